"""Localisation: finds where a difference starts, as opposed to where it was propagated to.

In an ordinary (free) run every stage after a bug is wrong too. If each stage is computed from
correct inputs (forced), only the stages with a bug are wrong. The culprit is the first stage whose
forced error breaks its tolerance. Source: docs/parity.md "First divergence".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from parity.engine.measure.measurement import Measurement, Verdict


def first_divergence(measurements: Iterable[Measurement]) -> Measurement | None:
    """Return the first failure, else the first measurement that is not comparable, else None.

    Failures, and likewise measurements that are not comparable, are ordered by stage; those without
    a stage, such as gradients, come last.

    The measurements should belong to one case, since stages of different cases are not ordered. If
    several edges fail at one stage, the first in `measurements` is returned.
    """
    bad = [m for m in measurements if m.verdict in (Verdict.FAIL, Verdict.NOT_COMPARABLE)]
    return min(
        bad, key=lambda m: (m.verdict is not Verdict.FAIL, m.stage < 0, m.stage), default=None
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """Errors of one named intermediate: in the free run, and with correct inputs."""

    name: str
    free: float
    """Relative L2 error in the tested program's ordinary run."""
    forced: float
    """Relative L2 error with every earlier intermediate replaced by the value of the oracle, or of
    a port's original."""
    tolerance: float
    """Largest `forced` that passes."""

    @property
    def amplification(self) -> float:
        """Free error over forced error; infinite if only the forced one is 0, NaN if both are. Far
        above 1: the error is propagated."""
        if self.forced == 0.0:
            return math.nan if self.free == 0.0 else math.inf
        return self.free / self.forced

    @property
    def broken(self) -> bool:
        """Whether the stage is wrong given correct inputs; NaN counts as wrong."""
        return not self.forced <= self.tolerance
