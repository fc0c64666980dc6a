"""How large activations and attention logits get, and what no narrow format could hold."""
