"""Pairs of parameters and of stages of two programs, found by value and by name.

`matching` pairs parameters and `alignment` pairs stages (named intermediates). The other modules
supply the evidence: equal values in another layout, sums and slices of parameters, names.
`proposal` guesses the pairs of a port without the original's values. `converter` writes a module
that builds the port's parameters from the original's.
"""
