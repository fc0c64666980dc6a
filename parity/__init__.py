"""Parity: the JAX model, megalodon-hf and a float64 oracle compared on the same work."""
