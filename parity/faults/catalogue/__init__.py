"""The planted bugs, one module per part of the model."""
