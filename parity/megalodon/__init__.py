"""Comparison of Megalodon: cases, float64 oracle, JAX model, megalodon-hf and noise floors.

`suite.Suite` runs each case on the JAX model, the oracle and megalodon-hf ("the triangle") and
compares them in pairs ("edges"). `intermediates` lists the intermediates that all three have. The
names below occur in stored runs; they are defined here so that reading a run does not import JAX.
"""

SUITE = "parity"
"""Value of `suite` in the measurements of Megalodon's cases."""
DIFFERENCES = "seams"
"""Value of `suite` and `case` in the measurements of known differences, which were formerly called
seams; stored runs contain the old word."""
COMMITTED = "byte_lm"
"""Name of the case that runs the checkpoint committed in `parity/data/byte_lm`."""
GIVEN = "checkpoint"
"""Name of the case that runs a checkpoint passed to a nightly run, in place of `COMMITTED`."""
