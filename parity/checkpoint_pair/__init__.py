"""Two checkpoints from outside, compared on a text: whole, or layer by layer."""
