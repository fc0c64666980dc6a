"""The one table of tolerances: a bound and a reason for each edge of the triangle and each kind.

Bounds in float32 are multiples of a calibrated noise floor: the response of the oracle when every
weight, every named intermediate and every sum is moved by what rounding does to it
(`parity.engine.rounding_noise`), per case and quantity (`parity.megalodon.noise_floors`, stored in
`data/noise.json`). Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parity.engine import rounding_noise
from parity.engine.compare import Work
from parity.engine.measurement import Kind

SEAM_BOUNDS = {
    "ema-mask": (1e-3, 1.0),
    "loss-mask": (1e-3, 1.0),
    "empty-loss": (0.0, 0.0),
    "untied-head": (0.0, 0.0),
    "initialisation": (0.0, 0.05),
}
"""The least and the most that each deliberate difference may be
(`parity.megalodon.known_differences` says of what).

Measured: 0.062, 0.087, 0, 0 and 0.007."""
TRAINED_LOSS = {"mxfp8": 0.01, "nvfp4": 0.03}
"""How far above float32's a held-out loss may be after a drill on each format, relative to it."""
NOISE_FILE = Path(__file__).parent / "data" / "noise.json"
FORWARD = (Kind.LOGITS, Kind.BLOCK, Kind.LOSS, Kind.STATE, Kind.TRAJECTORY)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table: an absolute bound, a multiple of the noise floor, or their maximum."""

    edge: str
    kinds: tuple[Kind, ...]
    reason: str
    metric: str = "rel_l2"
    absolute: float = 0.0
    noise_factor: float = 0.0

    @property
    def bound(self) -> str:
        """The bound in words."""
        parts = [f"{self.noise_factor:.2g} x noise floor"] if self.noise_factor else []
        parts = [f"{self.absolute:.1e}"] * bool(self.absolute) + parts or ["0"]
        return f"{self.metric} <= " + (f"max({', '.join(parts)})" if len(parts) > 1 else parts[0])


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
EXACT_ENOUGH = 2e-7
"""Relative L2 below which an error is the rounding of the result, and beating it means nothing."""
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
PRODUCTS = "products32:float64"
"""The edge of `stability.products.accuracy`."""
UNBIASED = 5.0
"""Standard deviations that the sum of the errors of stochastic rounding may be from 0: of draws
that are fixed by what is rounded, on every machine, one set in two million is beyond it."""
EDGES = (
    "jax64:oracle",
    "reference32:oracle",
    "jax32:oracle",
    "jax32:reference32",
    "recorded32:live32",
)
TABLE = (
    Rule(
        "jax64:oracle",
        FORWARD,
        "same mathematics: a bug stands orders above rounding; at most 2.7e-14 measured",
        absolute=1e-11,
    ),
    Rule(
        "jax64:oracle",
        (Kind.GRADIENT,),
        "against automatic differentiation of the oracle; at most 8.5e-14 measured",
        absolute=1e-10,
    ),
    Rule(
        "jax64:oracle",
        (Kind.BLOCK,),
        "two implementations that add in different orders do not agree to the last bit: share of "
        "the gates of a case whose error is exactly 0. At most 3 of 16 on healthy cases, the "
        "counts of a stream; 1 where the oracle is compared with itself",
        metric="exact_share",
        absolute=0.5,
    ),
    Rule(
        "reference32:oracle",
        FORWARD,
        "its own rounding: median 1.1 x, at most 4.4 x the floor measured (the second moment of "
        "the EMA phase after one step of AdamW); the mean of a loss may cancel below what is in "
        "the floor, hence the minimum",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        "reference32:oracle",
        (Kind.GRADIENT,),
        "its own rounding: median 1.1 x, at most 4.8 x the floor measured, on the EMA phase theta",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        "jax32:oracle",
        FORWARD,
        "our own rounding: median 0.8 x, at most 1.9 x the floor measured, on a running mean that "
        "a stream carried on (1.4 x on intermediates, in byte_lm)",
        absolute=3e-7,
        noise_factor=3.0,
    ),
    Rule(
        "jax32:oracle",
        (Kind.GRADIENT,),
        "our own rounding: median 0.7 x, at most 1.8 x the floor measured, on layer 0's "
        "TimestepNorm bias of byte_lm, behind the cancellation in RMSNorm's derivative",
        absolute=3e-7,
        noise_factor=4.0,
    ),
    Rule(
        "jax32:oracle",
        (Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT),
        "no less accurate than the reference, or below 3e-7: error over max(reference's error, "
        "2e-7); gradients as the root mean square over the parameters of a case. Not states: a "
        "mean kept relative to an origin trades digits of a mean near 0 for those of a large one. "
        "Not the loss: the error of a scalar is one draw, and a draw may be near 0 on one side "
        "(2.8 seen where both were within their floors)",
        metric="error_over_reference",
        absolute=1.5,
    ),
    Rule(
        "jax32:reference32",
        FORWARD,
        "a checkpoint can move: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=9.0,
    ),
    Rule(
        "jax32:reference32",
        (Kind.GRADIENT,),
        "a checkpoint can move: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        "recorded32:live32",
        (*FORWARD, Kind.GRADIENT),
        "the same program twice: thread count and BLAS order may differ, mathematics may not",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        "jaxbf16:oracle",
        (Kind.LOGITS,),
        "bfloat16 products with float32 parameters: more accurate than torch's autocast on the "
        "same weights, since nothing is rounded that is added afterwards. 0.64 to 0.76 of its "
        "error seen on hosts with AMX, AVX512, AVX2, AVX and SSE4.2 of Intel, and on AMD EPYC; "
        "rounding what products give as well comes to 1",
        metric="error_over_autocast",
        absolute=0.85,
    ),
    Rule(
        "jaxbf16:oracle",
        (Kind.LOGITS, Kind.BLOCK),
        "bfloat16 rounds operands to 2^-9 where the floor is of 2^-24, so 2^15 floors; but of what "
        "the floor moves only the operands of products: at most 0.51 of 2^15 floors measured, on "
        "the attention of layer 0, 0.43 elsewhere",
        noise_factor=0.6 * 2.0**15,
    ),
    Rule(
        PRODUCTS,
        (Kind.BLOCK, Kind.GRADIENT),
        "a low-precision backend multiplies numbers of few bits and adds in float32: at most "
        "3.7e-8 measured against float64 on operands quantised in NumPy",
        absolute=2e-7,
    ),
    *(
        Rule(
            edge,
            (Kind.WEIGHTS,),
            "a conversion moves bytes: every value has the hash it had",
            metric="changed_parameters",
        )
        for edge in ("jax32:oracle", "reference32:oracle")
    ),
    *(
        Rule(
            edge,
            (Kind.TOKENS,),
            "greedy decoding is discrete: one different token is another text",
            metric="disagreement",
        )
        for edge in EDGES
    ),
    *(
        Rule(
            edge,
            (Kind.LOGITS,),
            "a token within the bound of the logits keeps its best token where the margin is clear",
            metric="top1_flips",
        )
        for edge in EDGES
    ),
)


SEAMS_RECORDED = 1e-4
"""Largest relative difference between what a seam amounts to live and in its recording: it is told
to four digits. 0 measured with the versions that recorded it; another torch may round otherwise."""
INDEPENDENT = 0.05
"""Largest relative difference between a product's error and that of two operands whose errors are
independent, root of the sum of squares: what is left is sampling, over 10^4 and more elements."""
PORT_EDGES = ("port64:original64", "port32:port64", "original32:port64", "port32:original32")
"""What is compared with what for a port that is not Megalodon (`parity.port`)."""
PORTS = (
    Rule(
        "port32:port64",
        FORWARD,
        "rounding of a port, against itself in float64: as for the JAX model, with more room, "
        "since nobody calibrated it",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        "original32:port64",
        FORWARD,
        "rounding of the original, if the two compute the same: as for megalodon-hf",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        "port32:original32",
        FORWARD,
        "the sum of both",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        "port32:port64",
        (Kind.GRADIENT,),
        "rounding of a port's derivatives, with the room that those of megalodon-hf have",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        "original32:port64",
        (Kind.GRADIENT,),
        "rounding of the original's derivatives: as for megalodon-hf",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        "port32:original32",
        (Kind.GRADIENT,),
        "the sum of both",
        absolute=6e-7,
        noise_factor=16.0,
    ),
    Rule(
        "port64:original64",
        FORWARD,
        "same mathematics, where the original computes in float64: as for the oracle",
        absolute=1e-11,
    ),
    Rule(
        "port64:original64",
        (Kind.GRADIENT,),
        "same mathematics, where the original computes in float64: as for the oracle",
        absolute=1e-10,
    ),
    *(
        Rule(
            edge,
            (Kind.LOGITS,),
            "a token within the bound of the logits keeps its best token where the margin is clear",
            metric="top1_flips",
        )
        for edge in PORT_EDGES
    ),
    Rule(
        "port32:original32",
        (Kind.BLOCK,),
        "a token whose router logits are within their bound keeps its experts where the margin is "
        "clear",
        metric="expert_flips",
    ),
)
"""What a port that is not Megalodon is held to (`parity.port`)."""
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


def rule(edge: str, kind: Kind, metric: str = "rel_l2") -> Rule | None:
    """Return the row for an edge, kind and metric, or None: an unmatched quantity cannot pass."""
    for row in (*TABLE, *PORTS):
        if row.edge == edge and kind in row.kinds and row.metric == metric:
            return row
    return None


def bound_from(row: Rule | None, floor: float) -> float:
    """Return the bound a row gives at a noise floor; NaN without a row, or a floor it needs."""
    if row is None:
        return math.nan
    if not row.noise_factor:
        return row.absolute
    return math.nan if math.isnan(floor) else max(row.absolute, row.noise_factor * floor)


@dataclass(frozen=True)
class NoiseFloors:
    """Calibrated noise, per case name: the case's hash, and responses by quantity (relative L2)."""

    cases: dict[str, dict]
    exact_enough: ClassVar[float] = EXACT_ENOUGH

    @classmethod
    def load(cls, path: Path = NOISE_FILE) -> NoiseFloors:
        """Read the committed table.

        Raises:
            FileNotFoundError: there is none; run `megalodon-numerics parity calibrate`.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found; run `megalodon-numerics parity calibrate`.")
        return cls(json.loads(path.read_text(encoding="utf-8"))["cases"])

    def responses(self, work: Work) -> Mapping[str, Sequence[float]]:
        """Return each quantity's response to each seed; nothing for a case not calibrated."""
        entry = self.cases.get(work.name, {})
        return entry["responses"] if entry.get("hash") == work.hash else {}

    def floor(self, work: Work, quantity: str) -> float:
        """Return the floor of a quantity; NaN when it was not calibrated for exactly this case."""
        values = self.responses(work).get(quantity)
        return math.nan if values is None else rounding_noise.floor(values)

    def bound(self, edge: str, kind: Kind, work: Work, quantity: str) -> float:
        """Return the largest relative L2 that passes; NaN when no rule or floor applies."""
        return bound_from(rule(edge, kind), self.floor(work, quantity))

    def absolute(self, edge: str, kind: Kind, metric: str) -> float:
        """Return the largest value of a metric other than relative L2 that passes; NaN without."""
        row = rule(edge, kind, metric)
        return math.nan if row is None else row.absolute
