"""Catalogue of planted bugs, one module per part of the model."""
