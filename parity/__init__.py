"""Parity: the JAX model, megalodon-hf and a float64 oracle on the same work, compared to the digit."""
