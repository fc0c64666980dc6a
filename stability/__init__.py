"""Stability: effects of low precision on a model, each with its number, source and remedy."""
