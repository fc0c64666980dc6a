"""Evaluation of a JAX program operation by operation, with replaced or perturbed values.

`evaluation` runs a jaxpr. `marks` names its intermediates, and `rounding` perturbs its values.
`operations` and `unseen` find the first operation whose result another program does not compute,
and its source line. `exits` turns a `sys.exit` inside a program into an error that names the
program.
"""
