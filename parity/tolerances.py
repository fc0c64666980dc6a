"""The one table of tolerances: a bound and a reason for each edge of the triangle and each kind.

Bounds in float32 are multiples of a calibrated noise floor: the response of the oracle when every
weight and every named intermediate is moved by one unit roundoff, per case and quantity
(`parity.calibrate`, stored in `data/noise.json`). Source: spec/parity.md "Tolerances".
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from parity.cases import Case
from parity.results import Kind

NOISE_FILE = Path(__file__).parent / "data" / "noise.json"
FORWARD = (Kind.LOGITS, Kind.BLOCK, Kind.LOSS, Kind.STATE)


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
        parts = [f"{self.absolute:.1e}"] if self.absolute else []
        parts += [f"{self.noise_factor:g} x noise floor"] if self.noise_factor else []
        return f"{self.metric} <= " + (f"max({', '.join(parts)})" if len(parts) > 1 else parts[0])


TABLE = (
    Rule(
        "jax64:oracle",
        FORWARD,
        "spec/parity.md: same mathematics; a bug stands orders above; at most 2.2e-14 measured",
        absolute=1e-11,
    ),
    Rule(
        "jax64:oracle",
        (Kind.GRADIENT,),
        "spec/parity.md: against automatic differentiation of the oracle; at most 1.0e-13 measured",
        absolute=1e-10,
    ),
    Rule(
        "reference32:oracle",
        FORWARD,
        "its own rounding: median 1.5 x, at most 3.8 x the floor measured (EMA coefficients in "
        "float32); a scalar loss can cancel below its tensors, hence the minimum",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        "reference32:oracle",
        (Kind.GRADIENT,),
        "its own rounding: median 1.6 x, at most 5.6 x the floor measured, on the EMA phase theta",
        absolute=3e-7,
        noise_factor=12.0,
    ),
    Rule(
        "jax32:oracle",
        FORWARD,
        "our own rounding: median 0.89 x, at most 2.3 x the floor measured, in byte_lm, whose "
        "sums are longer: their rounding is not in the floor (the reference: 2.9 x)",
        absolute=3e-7,
        noise_factor=4.0,
    ),
    Rule(
        "jax32:oracle",
        (Kind.GRADIENT,),
        "our own rounding: median 0.95 x, at most 5.2 x the floor measured, on layer 0's "
        "TimestepNorm bias of byte_lm, behind the cancellation in RMSNorm's derivative",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        "jax32:oracle",
        (Kind.LOGITS, Kind.BLOCK, Kind.LOSS, Kind.GRADIENT),
        "no less accurate than the reference, or below 3e-7: error over max(reference's error, "
        "2e-7); gradients as the root mean square over the parameters of a case. Not states: a "
        "mean kept relative to an origin trades digits of a mean near 0 for those of a large one",
        metric="error_over_reference",
        absolute=1.5,
    ),
    Rule(
        "jax32:reference32",
        FORWARD,
        "a checkpoint can move: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=10.0,
    ),
    Rule(
        "jax32:reference32",
        (Kind.GRADIENT,),
        "a checkpoint can move: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=18.0,
    ),
    Rule(
        "recorded32:live32",
        (*FORWARD, Kind.GRADIENT),
        "the same program twice: thread count and BLAS order may differ, mathematics may not",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    *(
        Rule(
            edge,
            (Kind.TOKENS,),
            "greedy decoding is discrete: one different token is another text",
            absolute=1e-12,
        )
        for edge in (
            "jax64:oracle",
            "reference32:oracle",
            "jax32:oracle",
            "jax32:reference32",
            "recorded32:live32",
        )
    ),
)


def rule(edge: str, kind: Kind, metric: str = "rel_l2") -> Rule | None:
    """Return the row for an edge, kind and metric, or None: an unmatched quantity cannot pass."""
    for row in TABLE:
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

    def floor(self, case: Case, quantity: str) -> float:
        """Return the floor of a quantity; NaN when it was not calibrated for exactly this case."""
        entry = self.cases.get(case.name, {})
        if entry.get("hash") != case.hash:
            return math.nan
        return entry["floors"].get(quantity, math.nan)

    def bound(self, edge: str, kind: Kind, case: Case, quantity: str) -> float:
        """Return the largest relative L2 that passes; NaN when no rule or floor applies."""
        return bound_from(rule(edge, kind), self.floor(case, quantity))
