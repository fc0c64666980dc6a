"""Where a difference starts, and whether it starts there or was only carried there.

Free-running, every stage after a bug is wrong too. Fed the right inputs, only the buggy ones are:
the culprit is the first stage whose forced error breaks its tolerance. Source: docs/parity.md
"First divergence".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from parity.engine.measurement import Measurement, Verdict


def first_divergence(measurements: Iterable[Measurement]) -> Measurement | None:
    """Return the earliest failing stage, or the first failure without a stage; without any, the
    first that is not comparable.

    The measurements should belong to one case, since stages of different cases do not order. Of
    several edges that fail at one stage the one that comes first is named.
    """
    bad = [m for m in measurements if m.verdict in (Verdict.FAIL, Verdict.NOT_COMPARABLE)]
    return min(
        bad, key=lambda m: (m.verdict is not Verdict.FAIL, m.stage < 0, m.stage), default=None
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """One named intermediate: its error in the run as it is, and on its own."""

    name: str
    free: float
    """Relative L2 against the truth, everything before it computed by the subject."""
    forced: float
    """The same with every intermediate before it replaced by the truth's."""
    tolerance: float
    """Largest `forced` that passes."""

    @property
    def amplification(self) -> float:
        """How much of the free error was carried here: free over forced; NaN for 0 over 0."""
        if self.forced == 0.0:
            return math.nan if self.free == 0.0 else math.inf
        return self.free / self.forced

    @property
    def broken(self) -> bool:
        """Whether the stage is wrong on its own; not a number is wrong."""
        return not self.forced <= self.tolerance
