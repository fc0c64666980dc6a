"""Stability: what low precision does to a model, with the number, its source and the remedy."""
