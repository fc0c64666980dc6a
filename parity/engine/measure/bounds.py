"""Bounds of errors: rules by edge (pair of runs), kind of quantity and metric, and the noise floors
that some rules multiply.

Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from parity.engine.measure import rounding_noise
from parity.engine.measure.compare import Work
from parity.engine.measure.edge import Edge
from parity.engine.measure.measurement import Kind

EXACT_ENOUGH = 2e-7
"""Relative L2 error that rounding of the result alone can cause. Where a port's error is divided by
the reference's, the reference's error counts as at least this large."""
FORWARD = (Kind.LOGITS, Kind.BLOCK, Kind.LOSS, Kind.STATE, Kind.TRAJECTORY)
"""Kinds computed by a forward pass, a stream (token-by-token run) or a training trajectory."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Row of the tolerance table; its bound is the larger of `absolute` and
    `noise_factor` times the noise floor.

    Attributes:
        edge: the two runs that are compared.
        kinds: kinds of quantities that the rule applies to.
        reason: why the bound is right.
        metric: metric that is bounded.
        absolute: fixed part of the bound, in the metric's unit.
        noise_factor: multiple of the noise floor; 0: the bound is `absolute` alone.
    """

    edge: Edge
    kinds: tuple[Kind, ...]
    reason: str
    metric: str = "rel_l2"
    absolute: float = 0.0
    noise_factor: float = 0.0

    @property
    def bound(self) -> str:
        """The bound as text, such as "rel_l2 <= max(3.0e-07, 6 x noise floor)"."""
        parts = [f"{self.noise_factor:.2g} x noise floor"] if self.noise_factor else []
        parts = [f"{self.absolute:.1e}"] * bool(self.absolute) + parts or ["0"]
        return f"{self.metric} <= " + (f"max({', '.join(parts)})" if len(parts) > 1 else parts[0])


def rule(rules: Iterable[Rule], edge: str, kind: Kind, metric: str = "rel_l2") -> Rule | None:
    """Return the first rule for an edge, kind and metric; None if there is none."""
    for row in rules:
        if row.edge == edge and kind in row.kinds and row.metric == metric:
            return row
    return None


def bound_from(row: Rule | None, floor: float) -> float:
    """Return the largest value of a metric that passes the rule `row`.

    The result is NaN if `row` is None, or if the rule needs the noise floor and `floor` is NaN.

    Args:
        row: row of the tolerance table; None: no rule applies.
        floor: noise floor of the quantity: the error that rounding alone causes.
    """
    if row is None:
        return math.nan
    if not row.noise_factor:
        return row.absolute
    return math.nan if math.isnan(floor) else max(row.absolute, row.noise_factor * floor)


@dataclass(frozen=True)
class NoiseFloors:
    """Tolerances computed from rules and from the stored noise floors of calibrated cases."""

    cases: dict[str, dict]
    """Stored calibration of each case, by its name: `hash` of the work (inputs and weights), and
    `responses`, relative L2 changes under simulated rounding by quantity, one per seed."""
    rules: Sequence[Rule]
    """The tolerance table. If several rules apply to one quantity, the first one decides."""
    exact_enough: ClassVar[float] = EXACT_ENOUGH
    unknown: ClassVar[str] = "calibrate this case"

    def responses(self, work: Work) -> Mapping[str, Sequence[float]]:
        """Return the relative L2 changes under simulated rounding, by quantity, one per seed.

        Empty unless the case was calibrated with exactly these inputs and weights.
        """
        entry = self.cases.get(work.name, {})
        return entry["responses"] if entry.get("hash") == work.hash else {}

    def floor(self, work: Work, quantity: str) -> float:
        """Return the noise floor of a quantity: the root mean square of `responses` over the seeds;
        NaN unless the case was calibrated with exactly these inputs and weights."""
        values = self.responses(work).get(quantity)
        return math.nan if values is None else rounding_noise.floor(values)

    def bound(self, edge: Edge, kind: Kind, work: Work, quantity: str) -> float:
        """Return the largest relative L2 error that passes; NaN without a rule, or if the rule
        needs the noise floor and this case was not calibrated."""
        return bound_from(rule(self.rules, edge, kind), self.floor(work, quantity))

    def absolute(self, edge: Edge, kind: Kind, metric: str) -> float:
        """Return the largest value that passes, for a metric whose bound uses no noise floor; NaN
        if no rule applies."""
        row = rule(self.rules, edge, kind, metric)
        return math.nan if row is None else row.absolute
