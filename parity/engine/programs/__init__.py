"""Evaluation of a JAX program operation by operation: marks, rounding, source lines.

`evaluation` runs a jaxpr with replaced or perturbed values. `operations` and `unseen` find the
first operation whose result the other program does not compute. `exits` turns a `sys.exit` inside a
program into an error that names the side.
"""
