"""The one table of tolerances: a bound and a reason for each edge of the triangle and each kind.

Bounds in float32 are multiples of a calibrated noise floor: the response of the oracle when every
weight, every named intermediate and every sum is moved by what rounding does to it
(`parity.jitter`), per case and quantity (`parity.calibrate`, stored in `data/noise.json`). Source:
spec/parity.md "Tolerances".
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parity.results import Kind

if TYPE_CHECKING:
    from parity.cases import Case
    from parity.compare import Work

SEAM_BOUNDS = {
    "ema-mask": (1e-3, 1.0),
    "loss-mask": (1e-3, 1.0),
    "empty-loss": (0.0, 0.0),
    "untied-head": (0.0, 0.0),
    "initialisation": (0.0, 0.05),
}
"""The least and the most that each deliberate difference may be (`parity.seams` says of what).

Measured: 0.062, 0.095, 0, 0 and 0.007."""
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


EXACT_ENOUGH = 2e-7
"""Relative L2 below which an error is the rounding of the result, and beating it means nothing."""
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
        "spec/parity.md: same mathematics; a bug stands orders above; at most 2.7e-14 measured",
        absolute=1e-11,
    ),
    Rule(
        "jax64:oracle",
        (Kind.GRADIENT,),
        "spec/parity.md: against automatic differentiation of the oracle; at most 8.5e-14 measured",
        absolute=1e-10,
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
        "bfloat16 products with float32 parameters: no less accurate than torch's autocast on the "
        "same weights; 0.65 to 0.71 of its error measured",
        metric="error_over_autocast",
        absolute=1.0,
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
        for edge in ("port32:port64", "original32:port64", "port32:original32", "port64:original64")
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
    """Calibrated floors, per case name: the case's hash, and relative L2 by quantity."""

    cases: dict[str, dict]

    @classmethod
    def load(cls, path: Path = NOISE_FILE) -> NoiseFloors:
        """Read the committed table.

        Raises:
            FileNotFoundError: there is none; run `megalodon-numerics parity calibrate`.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found; run `megalodon-numerics parity calibrate`.")
        return cls(json.loads(path.read_text())["cases"])

    def floor(self, work: Case | Work, quantity: str) -> float:
        """Return the floor of a quantity; NaN when it was not calibrated for exactly this case."""
        entry = self.cases.get(work.name, {})
        if entry.get("hash") != work.hash:
            return math.nan
        return entry["floors"].get(quantity, math.nan)

    def bound(self, edge: str, kind: Kind, work: Case | Work, quantity: str) -> float:
        """Return the largest relative L2 that passes; NaN when no rule or floor applies."""
        return bound_from(rule(edge, kind), self.floor(work, quantity))
