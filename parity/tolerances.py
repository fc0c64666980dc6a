"""All tolerances, and the other constants that decide whether a check passes.

The rules of an edge (pair of compared runs) are declared where its runs are defined, in
`parity.megalodon.tolerance_table`, `parity.mesh.tolerance_table` and `parity.port_tolerances`, and
collected here. Constants for number formats, noisy values and drift follow. Source: docs/parity.md
"Tolerances".
"""

from __future__ import annotations

from dataclasses import dataclass

from parity.engine.measure.bounds import EXACT_ENOUGH, FORWARD, Rule, bound_from
from parity.engine.measure.bounds import rule as _rule
from parity.engine.measure.edge import Edge
from parity.engine.measure.measurement import Kind
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.tolerance_table import (
    KNOWN_DIFFERENCE_BOUNDS,
    KNOWN_DIFFERENCES_RECORDED,
    NOISE_FILE,
    TABLE,
    NoiseFloors,
)
from parity.mesh.tolerance_table import MESHES, MeshEdge
from parity.port_tolerances import PORTS, PortEdge

__all__ = [
    "ABSORBED",
    "DRIFT_DEVIATIONS",
    "DRIFT_SHARE",
    "DRIFT_TYPICAL",
    "DRIFT_WORST",
    "EXACT_ENOUGH",
    "FIGURES",
    "FORMAT_BOUNDS",
    "FORWARD",
    "INDEPENDENT",
    "KNOWN_DIFFERENCES_RECORDED",
    "KNOWN_DIFFERENCE_BOUNDS",
    "MESHES",
    "MESH_EDGES",
    "MLA_MOE_LOGITS",
    "NOISE_FILE",
    "NOISE_FLOOR",
    "NOISE_LEAST",
    "NOISE_MADS",
    "NOISE_WINDOW",
    "PORTS",
    "PORT_EDGES",
    "PRODUCTS",
    "TABLE",
    "TRAINED_LOSS",
    "UNBIASED",
    "FormatBound",
    "NoiseFloors",
    "Rule",
    "bound_from",
    "rule",
]
PRODUCTS = MegalodonEdge.PRODUCTS32_FLOAT64
"""Edge of `stability.products.accuracy`, which measures matrix products against float64."""
PORT_EDGES = tuple(PortEdge)
MESH_EDGES = tuple(MeshEdge)
SEAM_BOUNDS, SEAMS_RECORDED = KNOWN_DIFFERENCE_BOUNDS, KNOWN_DIFFERENCES_RECORDED
"""Former names of `KNOWN_DIFFERENCE_BOUNDS` and `KNOWN_DIFFERENCES_RECORDED`."""
TRAINED_LOSS = {"mxfp8": 0.01, "nvfp4": 0.03}
"""Goal, not a gate: largest relative excess of the held-out loss after a drill (short training run)
in a format over the loss after the same drill in float32."""


@dataclass(frozen=True, slots=True)
class FormatBound:
    """Largest errors with which a low-precision format is precise enough for a product."""

    error: float
    """Relative L2 error of the product."""
    underflow: float
    """Fraction of elements that underflow to 0, of the operand in which it is larger."""
    reason: str
    """Measured errors and underflows that the two bounds are based on, in words."""


FORMAT_BOUNDS = {
    "nvfp4": FormatBound(
        0.20,
        0.50,
        "normal numbers: 0.134 and 7 %; the byte model, trained and at initialisation: at most "
        "0.155 and 40 % (gradients after a gate, many of them near 0)",
    ),
    "mxfp4": FormatBound(
        0.30, 0.75, "normal numbers: 0.162 and 11 %; the byte model: at most 0.233 and 67 %"
    ),
    "mxfp8": FormatBound(
        0.053, 0.02, "normal numbers: 0.038 and none; the byte model: at most 0.041 and 1 %"
    ),
    "mxfp8 floor": FormatBound(
        0.083, 0.02, "normal numbers: 0.042 and none; the byte model: at most 0.064 and 1 %"
    ),
    "deepseek": FormatBound(
        0.050, 0.02, "normal numbers: 0.037 and none; the byte model: at most 0.039 and 1 %"
    ),
    "bfloat16": FormatBound(0.004, 0.001, "normal numbers and the byte model: 0.0025 and none"),
}
"""Bounds by format (`stability.products.what_if`).

Each is the largest value measured on tensors without a known problem, with at least 128 numbers
along the contraction, plus a margin: about a third for the error, up to twice for the underflow.
Underflow has its own bound because the error does not show it: numbers that become 0 next to an
outlier contribute little to the product's norm."""
FIGURES = {
    "mxfp8 floor clips": ("clipped", 0.167, 0.004),
    "mxfp8 even clips": ("clipped", 0.119, 0.004),
    "mxfp8 ceil clips": ("clipped", 0.0, 0.0),
    "mxfp8 floor": ("mse", 8.6e-4, 1e-5),
    "mxfp8 even": ("mse", 7.6e-4, 1e-5),
    "mxfp8 ceil": ("mse", 7.06e-4, 1e-5),
    "nvfp4 loses": ("underflow", 0.068, 0.001),
    "nvfp4": ("mse", 0.009, 1e-4),
}
"""Published error of each format on normally distributed numbers, as (metric, value, tolerance).

The tolerance covers the sampling error of 2^21 numbers and the digits of the published value.
`clipped` is the fraction of blocks with a clipped element."""
NOISE_WINDOW = 14
"""Number of earlier runs with whose median a noisy value, which varies from run to run, is compared
(docs/verdicts.md "Comparability")."""
# The median absolute deviation of four numbers is mostly chance.
NOISE_LEAST = 5
"""Fewest earlier runs for the comparison of a noisy value with their median."""
NOISE_MADS = 5.0
"""Largest deviation of a noisy value from the median of earlier runs, in median absolute deviations
of log10(error)."""
NOISE_FLOOR = 1.05
"""Factor by which a noisy value may always differ from the median of earlier runs: 5 %."""
# On one machine errors repeat bit by bit until the code or a library changes.
DRIFT_TYPICAL = 1.3
"""Largest ratio of the geometric mean of a group's errors to the same mean in an earlier run on the
same machine. docs/verdicts.md lists the changes that this limit detects."""
# With a limit of 3, none of 20 pairs of hosts failed, but a nightly run compares hundreds of
# levels.
DRIFT_DEVIATIONS = 4.0
"""Largest difference of a group's error level from another machine's, in standard deviations of the
difference of two independent draws of rounding errors, calibrated in docs/verdicts.md."""
# The error of one small tensor varies more than a mean.
DRIFT_WORST = 2.0
"""Largest ratio of the largest error in a group to the largest error in an earlier run on the same
machine."""
# Such errors are still a factor of 100 below their tolerance.
DRIFT_SHARE = 0.01
"""Lower limit of errors in an error level, as a fraction of their tolerance: smaller errors are
raised to this limit, so that their drift has no effect."""
# The random draws depend only on the rounded values, so every machine has the same. One set of
# draws in two million exceeds the bound.
UNBIASED = 5.0
"""Largest deviation of the summed errors of stochastic rounding from 0, in standard deviations."""
# The difference that remains is sampling error over at least 10^4 elements.
INDEPENDENT = 0.05
"""Largest relative difference between a product's error and the root sum of squares of the errors
that its two operands cause independently."""
# The gate itself is the tighter bound from the noise floor. Measured: at most 8.5e-7, with a tied
# head.
MLA_MOE_LOGITS = 1e-5
"""Largest relative L2 error of MLA + MoE's float32 logits against Transformers."""
ABSORBED = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest relative L2 between absorbed and expanded MLA of one layer, by dtype of activations.

Both are the same mathematics in another order, so the bound is a multiple of the rounding error.
Measured: 1.2e-7 on the model in which defects are planted, 0.004 on the small size. Values in the
wrong order give 1."""
LOST_APPLIED = 0.7
"""Largest fraction of the error of a token-by-token EMA that remains when the rounding error of its
poles is corrected. Measured: 0.42 at 16,384 tokens and 0.51 at 4,096. The remaining error is the
rounding of the state itself."""
LONG_CONTEXT = 1e-6
"""Largest relative L2 error of a float32 EMA with slow poles against float64, at 131,072 tokens."""
LONG_CONTEXT_REFERENCE = 1e-3
"""Smallest relative L2 error of the EMA of `LONG_CONTEXT` if powers of the poles are computed in
float32 (negative control)."""
LONG_CONTEXT_GRADIENT = 2e-6
"""Largest relative L2 error of the gradients of a float32 EMA with slow poles, at 16,384 tokens.
Measured: at most 8e-7, on theta."""
MEMORY_PER_DOUBLING = 2.2
"""Largest ratio of a program's memory when the sequence doubles: 2 is linear growth, 0.2 slack."""


def rule(edge: Edge | str, kind: Kind, metric: str = "rel_l2") -> Rule | None:
    """Return the rule for an edge, kind and metric from all tolerance tables; None without one."""
    return _rule((*TABLE, *PORTS, *MESHES), edge, kind, metric)
