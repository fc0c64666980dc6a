"""Where a difference starts, and whether it starts there or was only carried there.

Free-running, every stage after a bug is wrong too. Fed the right inputs, only the buggy ones are:
the culprit is the first stage whose forced error breaks its tolerance. Source: docs/parity.md
"First divergence".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from parity.calibrate import forced_floors, forward_truth
from parity.cases import Case
from parity.deviation import Worst, worst_elements
from parity.metrics import relative_l2
from parity.results import Kind, Measurement, Verdict
from parity.subject import JaxSubject
from parity.taps import parameters_of
from parity.tolerances import bound_from, rule

Arrays = Mapping[str, np.ndarray]


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
    """One tap: its error in the run as it is, and on its own."""

    name: str
    free: float
    """Relative L2 against the oracle, everything before it computed by the subject."""
    forced: float
    """The same with every tap before it replaced by the oracle's."""
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

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters that act between the taps before it and this one."""
        return parameters_of(self.name)


@dataclass(frozen=True)
class Account:
    """All stages of a case in the order they are computed."""

    case: Case
    dtype: str
    stages: tuple[Stage, ...]
    worst: Worst | None
    """Of the culprit, on its own."""

    @property
    def culprit(self) -> Stage | None:
        """The first stage that is wrong on its own."""
        return next((stage for stage in self.stages if stage.broken), None)

    @property
    def carried(self) -> tuple[Stage, ...]:
        """Stages that hold on their own although their free error would not pass."""
        return tuple(s for s in self.stages if not s.broken and not s.free <= s.tolerance)


def account(case: Case, dtype: str = "float64") -> Account:
    """Run every stage of a case free and forced, and compare both with the oracle.

    Args:
        case: one without cuts; a stream has states, not taps.
        dtype: "float64" asks whether the mathematics is the same, "float32" whether the rounding
            is no worse than calibrated (ten more runs of the oracle).

    Raises:
        ValueError: the case is a stream.
    """
    if case.cuts:
        raise ValueError(
            f"{case.name} is a stream: its states are compared, but its stages have no taps. "
            "Explain the same configuration without cuts, for example case 'plain'."
        )
    subject, exact = JaxSubject(dtype), forward_truth(case)
    free, forced = subject.taps(case), subject.taps(case, exact)
    floors = {} if dtype == "float64" else forced_floors(case)
    edge = "jax64:oracle" if dtype == "float64" else "jax32:oracle"
    found = tuple(
        Stage(
            name,
            relative_l2(free[name], exact[name]),
            relative_l2(forced[name], exact[name]),
            bound_from(rule(edge, Kind.BLOCK), floors.get(name, math.nan)),
        )
        for name in exact
    )
    told = Account(case, dtype, found, None)
    if told.culprit is None:
        return told
    name = told.culprit.name
    first, *_ = worst_elements(forced[name], exact[name], 1)
    return Account(case, dtype, found, first)
