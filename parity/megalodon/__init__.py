"""Megalodon as a subject: cases, float64 oracle, runner of the JAX model, references, noise floors.

`Suite` compares every case on every edge of the triangle. `intermediates` names the intermediates
that all sides have. The names that stored runs use are here, because reading them needs no JAX.
"""

SUITE = "parity"
"""Suite of Megalodon's measurements."""
DIFFERENCES = "seams"
"""Suite and case name of the known differences' measurements: the former word, which stored runs
use."""
COMMITTED = "byte_lm"
"""Name of the case of the committed checkpoint."""
GIVEN = "checkpoint"
"""Name of the case of a checkpoint that was given to a night, instead of the committed one's."""
