"""Measurements of named arrays: deviations, bounds, and the contract of a run.

`compare` measures each pair of arrays, `bounds` and `rounding_noise` give the tolerance, `localize`
and `where` find the stage and the elements that differ, `contract` lists the gates that a run must
measure.
"""
