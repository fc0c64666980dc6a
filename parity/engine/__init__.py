"""The engine: turns the named arrays of any two programs into measurements.

`measure` compares arrays and checks tolerances. `pairing` finds which parameter and which stage
(named intermediate) of one program corresponds to which of another. `programs` evaluates a JAX
program operation by operation. No module depends on a particular model.
"""
