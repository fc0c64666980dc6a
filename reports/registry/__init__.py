"""Many stored runs: which there are, what became of a gate over them, which one is pinned and
which may go.
"""
