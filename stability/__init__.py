"""Probes of how low precision affects a model; each finding has a number, a source and a remedy."""
