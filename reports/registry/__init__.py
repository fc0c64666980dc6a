"""Many stored runs: which there are, which is pinned, which may go, what became of a gate."""
