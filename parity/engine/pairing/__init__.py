"""Pairs of parameters and of stages of two programs, found by value and by name.

`matching` pairs parameters and `alignment` pairs stages. The other modules supply the evidence:
equal values under a change of layout, sums and slices of parameters, names. `converter` builds the
parameters of one program from those of the other.
"""
