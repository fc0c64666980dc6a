"""Many stored runs: finding them, the history of a gate, pinning, and pruning."""
