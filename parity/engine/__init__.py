"""The engine: turns named arrays into measurements. It knows no model, not even ours.

`measure` compares two sides with their bounds, `pairing` finds which parameter and which stage of
one program is which of another, `programs` evaluates a JAX program operation by operation.
"""
