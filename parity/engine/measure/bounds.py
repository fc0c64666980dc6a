"""Bounds: rules by edge, kind and metric, and the noise floors that some rules multiply.

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
"""Relative L2 below which an error is the rounding of the result, so a smaller one is no better."""
FORWARD = (Kind.LOGITS, Kind.BLOCK, Kind.LOSS, Kind.STATE, Kind.TRAJECTORY)
"""Kinds computed by a forward pass, a stream or a trajectory."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Row of the table: an absolute bound, a multiple of the noise floor, or their maximum."""

    edge: Edge
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


def rule(rules: Iterable[Rule], edge: str, kind: Kind, metric: str = "rel_l2") -> Rule | None:
    """Return the rule for an edge, kind and metric; None if there is none, so it cannot pass."""
    for row in rules:
        if row.edge == edge and kind in row.kinds and row.metric == metric:
            return row
    return None


def bound_from(row: Rule | None, floor: float) -> float:
    """Return the bound of a rule at a noise floor; NaN without a rule or without a needed floor."""
    if row is None:
        return math.nan
    if not row.noise_factor:
        return row.absolute
    return math.nan if math.isnan(floor) else max(row.absolute, row.noise_factor * floor)


@dataclass(frozen=True)
class NoiseFloors:
    """Calibrated noise by case name: the case's hash, and responses by quantity (relative L2)."""

    cases: dict[str, dict]
    rules: Sequence[Rule]
    """Rules that multiply the floors, and rules with absolute bounds."""
    exact_enough: ClassVar[float] = EXACT_ENOUGH
    unknown: ClassVar[str] = "calibrate this case"

    def responses(self, work: Work) -> Mapping[str, Sequence[float]]:
        """Return each quantity's response to each seed; empty for a case that is not calibrated."""
        entry = self.cases.get(work.name, {})
        return entry["responses"] if entry.get("hash") == work.hash else {}

    def floor(self, work: Work, quantity: str) -> float:
        """Return the noise floor of a quantity; NaN unless exactly this case was calibrated."""
        values = self.responses(work).get(quantity)
        return math.nan if values is None else rounding_noise.floor(values)

    def bound(self, edge: Edge, kind: Kind, work: Work, quantity: str) -> float:
        """Return the largest relative L2 that passes; NaN if no rule or floor applies."""
        return bound_from(rule(self.rules, edge, kind), self.floor(work, quantity))

    def absolute(self, edge: Edge, kind: Kind, metric: str) -> float:
        """Return the largest value of another metric that passes; NaN without a rule."""
        row = rule(self.rules, edge, kind, metric)
        return math.nan if row is None else row.absolute
