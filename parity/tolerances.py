"""The table of all tolerances and of the other constants that decide whether a check passes.

The rules of an edge are declared beside its subject (`parity.megalodon.tolerance_table`,
`parity.mesh.tolerance_table`, `parity.port_tolerances`) and collected here. Constants of formats,
levels and drift are below. Source: docs/parity.md "Tolerances".
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
"""The edge of `stability.products.accuracy`."""
PORT_EDGES = tuple(PortEdge)
MESH_EDGES = tuple(MeshEdge)
SEAM_BOUNDS, SEAMS_RECORDED = KNOWN_DIFFERENCE_BOUNDS, KNOWN_DIFFERENCES_RECORDED
"""Former names."""
TRAINED_LOSS = {"mxfp8": 0.01, "nvfp4": 0.03}
"""Largest relative excess of the held-out loss over float32's after a drill in each format."""


@dataclass(frozen=True, slots=True)
class FormatBound:
    """Largest error of a product in a low-precision format before a wider format is advised."""

    error: float
    """Relative L2 of the product."""
    underflow: float
    """Fraction of an operand's elements that underflow to 0."""
    reason: str


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

Each is the largest value seen on healthy tensors with at least 128 numbers along the contraction,
plus about a third for the error and up to twice for the underflow. Underflow has its own bound
because outliers hide it: the numbers they push to 0 contribute little to the product's norm."""
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
"""Published effect of each format on normally distributed numbers: metric, value, tolerance.

The tolerance covers the sampling error of 2^21 numbers and the digits of the published value.
`clipped` is a fraction of blocks."""
NOISE_WINDOW = 14
"""Earlier runs whose median a noisy value is compared with (docs/verdicts.md "Comparability")."""
NOISE_LEAST = 5
"""Fewest earlier runs for that comparison: the MAD of four numbers is mostly chance."""
NOISE_MADS = 5.0
"""Tolerance of a noisy value around that median, in median absolute deviations of log10(error)."""
NOISE_FLOOR = 1.05
"""Smallest such tolerance, as a factor: 5 %."""
DRIFT_TYPICAL = 1.3
"""Largest ratio of a group's geometric mean to a run on the same machine. There it repeats bit by
bit until the code or a library changes. docs/verdicts.md lists the changes that this detects."""
DRIFT_DEVIATIONS = 4.0
"""Largest deviation of a group's level from another machine's, in standard deviations of the
difference of two draws of rounding. The deviation is calibrated (docs/verdicts.md). With a limit of
3, none of 20 pairs of hosts failed, but a night compares hundreds of levels."""
DRIFT_WORST = 2.0
"""Like `DRIFT_TYPICAL`, for the worst gate of a group: one small tensor varies more than a mean."""
DRIFT_SHARE = 0.01
"""Gates below this fraction of their tolerance may drift freely: a factor of 100 remains."""
UNBIASED = 5.0
"""Largest deviation of the summed errors of stochastic rounding from 0, in standard deviations.
The draws depend only on the rounded values, so every machine has the same; one set of draws in two
million exceeds this."""
INDEPENDENT = 0.05
"""Largest relative difference between a product's error and the root sum of squares of its
operands' independent errors. The rest is sampling error over at least 10^4 elements."""
MLA_MOE_LOGITS = 1e-5
"""Required relative L2 of MLA + MoE's float32 logits against Transformers. The gate itself is the
tighter bound from the noise floor. Measured: at most 8.5e-7, with a tied head."""
ABSORBED = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest relative L2 between absorbed and expanded MLA of one layer, by dtype of activations.

Both are the same mathematics in another order, so the bound is a multiple of the rounding error.
Measured: 1.2e-7 on the model in which defects are planted, 0.004 on the small size. Values in the
wrong order give 1."""
LOST_APPLIED = 0.7
"""Largest fraction of a token-by-token stream's error that remains when the rounding error of the
poles is corrected. Measured: 0.42 at 16,384 tokens and 0.51 at 4,096. The rest is the rounding of
the state itself."""
LONG_CONTEXT = 1e-6
"""Largest relative L2 of a float32 EMA with slow poles against float64, at 131,072 tokens."""
LONG_CONTEXT_REFERENCE = 1e-3
"""Smallest such error when powers of the poles are computed in float32: the negative control."""
LONG_CONTEXT_GRADIENT = 2e-6
"""Largest such error of the gradients, at 16,384 tokens. Measured: at most 8e-7, on theta."""
MEMORY_PER_DOUBLING = 2.2
"""Largest growth of a program's memory when the sequence doubles: 2 is linear, 0.2 is slack."""


def rule(edge: Edge | str, kind: Kind, metric: str = "rel_l2") -> Rule | None:
    """Return the row of any subject for an edge, kind and metric, or None."""
    return _rule((*TABLE, *PORTS, *MESHES), edge, kind, metric)
