"""Megalodon: the model with cases, a reference and a checkpoint; its suites and its page."""
