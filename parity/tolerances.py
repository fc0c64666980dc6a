"""The one table of tolerances, and every other constant that decides what passes.

The rules of edges are beside the subjects they are about, `parity.megalodon.tolerance_table`,
`parity.mesh.tolerance_table` and `parity.port_tolerances`, and are collected here; formats, levels
and drift are below. Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

from dataclasses import dataclass

from parity.engine.bounds import EXACT_ENOUGH, FORWARD, Rule, bound_from
from parity.engine.bounds import rule as _rule
from parity.engine.edge import Edge
from parity.engine.measurement import Kind
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
"""How far above float32's a held-out loss may be after a drill on each format, relative to it."""


@dataclass(frozen=True, slots=True)
class FormatBound:
    """What a product may lose in a low-precision format before a wider one is advised."""

    error: float
    """Relative L2 of the product."""
    underflow: float
    """Share of an operand's elements that become 0."""
    reason: str


FORMAT_BOUNDS = {
    "nvfp4": FormatBound(
        0.20,
        0.50,
        "normal numbers: 0.134 and 7 %; the byte model, trained and at initialisation: at most "
        "0.155 and 40 % (gradients behind a gate, many of them near 0)",
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
"""By format (`stability.products.what_if`): the largest seen on healthy tensors with 128 and more
numbers along the contraction, and about a third more error and up to twice the underflow. Underflow
is bounded too because outliers hide it: what they push to 0 is little of the product's norm."""
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
"""What formats do to normal numbers, known from elsewhere: metric, figure, and what sampling 2^21
of them and the figure's own digits leave open. Clipped is a share of blocks."""
NOISE_WINDOW = 14
"""Earlier runs whose median a noisy value is held against (docs/verdicts.md "Comparability")."""
NOISE_LEAST = 5
"""... and the fewest that say anything: a MAD of four numbers is mostly luck."""
NOISE_MADS = 5.0
"""Median absolute deviations of log10 of the error that a noisy value may be from the median."""
NOISE_FLOOR = 1.05
"""... and the factor it may always be away, 5 %."""
DRIFT_TYPICAL = 1.3
"""Factor by which a group's geometric mean may leave that of a run on the same machine, where it
repeats bit by bit until the code or a library changes; docs/verdicts.md says what is found."""
DRIFT_DEVIATIONS = 4.0
"""Standard deviations of the difference of two draws of rounding that the level of a group may be
from that on another machine. The deviation is calibrated (docs/verdicts.md); at 3 none of 20 pairs
of hosts was red, and a night has hundreds of levels."""
DRIFT_WORST = 2.0
"""... and the worst gate of the group: one small tensor varies more than a mean does."""
DRIFT_SHARE = 0.01
"""Share of its tolerance below which a gate's value moves freely: a hundredfold is still left."""
UNBIASED = 5.0
"""Standard deviations that the sum of the errors of stochastic rounding may be from 0: of draws
that are fixed by what is rounded, on every machine, one set in two million is beyond it."""
INDEPENDENT = 0.05
"""Largest relative difference between a product's error and that of two operands whose errors are
independent, root of the sum of squares: what is left is sampling, over 10^4 and more elements."""
MLA_MOE_LOGITS = 1e-5
"""Largest relative L2 of float32 logits of MLA + MoE against Transformers that was asked for; what
holds them is the bound from the noise floor. At most 8.5e-7 measured, with a tied head."""
ABSORBED = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest relative L2 between a layer of absorbed and of expanded MLA, by dtype of activations: the
same mathematics in another order, hence a multiple of the rounding. Measured: 1.2e-7 on the model
defects are planted in, 0.004 on the small size; values in the wrong order are off by 1."""
LOST_APPLIED = 0.7
"""Share of a token-by-token stream's error left when what rounding the poles lost is applied: 0.42
and 0.51 measured, at 16,384 and 4,096 tokens; the rest is the rounding of the state itself."""
LONG_CONTEXT = 1e-6
"""Relative L2 of a float32 EMA with slow poles against float64, at 131,072 tokens."""
LONG_CONTEXT_REFERENCE = 1e-3
"""... and what it is at least when powers of the poles are computed in float32."""
LONG_CONTEXT_GRADIENT = 2e-6
"""... of the gradients, at 16,384 tokens; at most 8e-7 measured, on theta."""
MEMORY_PER_DOUBLING = 2.2
"""Largest growth of a program's memory when its sequence gets twice as long: linear, and slack."""


def rule(edge: Edge | str, kind: Kind, metric: str = "rel_l2") -> Rule | None:
    """Return the row of any subject for an edge, kind and metric, or None."""
    return _rule((*TABLE, *PORTS, *MESHES), edge, kind, metric)
