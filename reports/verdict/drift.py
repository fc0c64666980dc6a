"""Drift: how far the levels of a run are from those of the runs it is held against.

On the machine that a baseline was pinned on, levels repeat, and the limits of the tolerance table
apply. Another machine rounds in another order: there a level may be as far away as two independent
draws of rounding can be. See docs/verdicts.md "Another machine".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parity.engine.measurement import Key
from parity.tolerances import DRIFT_DEVIATIONS, DRIFT_TYPICAL, DRIFT_WORST
from reports.provenance.host import differences, fingerprint
from reports.store.runs import Run
from reports.verdict.history import Past
from reports.verdict.levels import Group, Level, levels
from reports.verdict.pins import Pin

UNSEEN = 3.0
"""Largest growth of a level that may pass unseen on a machine where nothing was measured before."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The level of one group beside a pinned one; `before` and `now` are means or worst values."""

    group: Group
    what: str
    """`typical` or `worst`."""
    before: float
    now: float
    limit: float
    """The largest ratio, and one over the smallest, that rounding explains."""

    @property
    def wide(self) -> bool:
        """Whether rounding explains more than `UNSEEN`: one draw cannot tell it from a loss."""
        return self.limit > UNSEEN

    @property
    def draws(self) -> int:
        """Draws over which the level would have to be pooled for rounding to explain `UNSEEN`.

        The deviation of a mean of n draws, and with it ln of the limit, falls with sqrt(n).
        """
        return max(1, math.ceil((math.log(self.limit) / math.log(UNSEEN)) ** 2))

    @property
    def ratio(self) -> float:
        """`now` over `before`."""
        return self.now / self.before

    @property
    def excess(self) -> float:
        """Distance from the pinned baseline as a share of what passes, in ln: 1 is at the limit."""
        # Of a ratio that underflows there is no logarithm, of both levels there is.
        return abs(math.log(self.now) - math.log(self.before)) / math.log(self.limit)

    @property
    def broken(self) -> bool:
        """Whether the level left what passes."""
        return not 1 / self.limit <= self.ratio <= self.limit


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A group whose level rests on tolerances that changed: there is no ratio to speak of."""

    group: Group
    before: float
    now: float


@dataclass(frozen=True)
class PinComparison:
    """The levels of a run compared with those of one pinned run."""

    pin: Pin
    same: bool
    """Whether both machines are equal, and the kind of reference too."""
    differs: tuple[str, ...]
    """How this run's machine and reference differ from the pinned baseline's."""
    levels: int
    """How many levels the run has."""
    compared: tuple[Drift, ...]
    """Two per level of the same work, `typical` and `worst`, the furthest from its pin first."""
    rescaled: tuple[Rescaled, ...] = ()
    """Levels of the same work that could not be compared: their tolerances changed."""
    held: frozenset[Group] = frozenset()
    """Groups that are compared with an earlier run of this machine, in another comparison."""

    @property
    def not_yet(self) -> tuple[Drift, ...]:
        """One for each group that is not comparable yet, the largest limit first: rounding explains
        more than `UNSEEN`, and no earlier run of this machine says where the level is here.
        """
        first: dict[Group, Drift] = {}
        for drift in sorted(self.compared, key=lambda d: -d.limit):
            if drift.wide and drift.group not in self.held:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def unseen(self) -> tuple[Drift, ...]:
        """One for each group of `not_yet` that grew more than `UNSEEN`, the largest ratio first."""
        first: dict[Group, Drift] = {}
        left = {drift.group for drift in self.drifts}
        for drift in sorted(self.compared, key=lambda d: (-d.ratio, d.group, d.what)):
            if drift.wide and drift.ratio > UNSEEN and drift.group not in self.held | left:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def comparable(self) -> int:
        """How many levels could be compared."""
        return len(self.compared) // 2

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """One for each group that left its level, the furthest over its limit first."""
        first: dict[Group, Drift] = {}
        for drift in self.compared:
            if drift.broken:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def largest(self) -> Drift | None:
        """The typical level that grew most, None where nothing was compared."""
        typical = [d for d in self.compared if d.what == "typical"]
        return max(typical, key=lambda d: d.ratio, default=None)


def limit(base: float, deviation: float, same: bool) -> float:
    """Return the largest ratio of two levels that passes.

    Args:
        base: The limit where levels repeat.
        deviation: Standard deviation of ln of the level over rounding.
        same: Whether both levels are of one machine. The logarithm of a ratio of two independent
            draws has sqrt(2) times the deviation of one.
    """
    if same:
        return base
    return max(base, math.exp(DRIFT_DEVIATIONS * math.sqrt(2) * deviation))


def compare(
    now: Mapping[Group, Level], pin: Pin, same: bool, before: Mapping[Group, Level]
) -> tuple[tuple[Drift, ...], tuple[Rescaled, ...]]:
    """Return how far each level of the same work is from the pinned one, the furthest first, and
    the levels that rest on tolerances which changed.

    A pinned baseline that does not hold its tolerances is taken to have had those of `before`.
    """
    drifts: list[Drift] = []
    rescaled: list[Rescaled] = []
    for group, level in now.items():
        pinned = pin.groups.get(group)
        if pinned is None or pinned.work != level.work:
            continue
        then = pinned if pinned.tolerance else before.get(group, level)
        if then.tolerance != level.tolerance and then.floored + level.floored:
            rescaled.append(Rescaled(group, then.tolerance, level.tolerance))
            continue
        # What was pinned before a case was calibrated holds no spread, and so may a run.
        typical, worst = map(max, zip(pinned.spread, level.spread, strict=True))
        for what, base, deviation in (
            ("typical", DRIFT_TYPICAL, typical),
            ("worst", DRIFT_WORST, worst),
        ):
            ratio = limit(base, deviation, same)
            drifts.append(Drift(group, what, getattr(pinned, what), getattr(level, what), ratio))
    return tuple(sorted(drifts, key=lambda d: (-d.excess, d.group, d.what))), tuple(rescaled)


def compare_with_pins(
    run: Run,
    now: Mapping[Group, Level],
    pins: Iterable[Pin],
    before: Mapping[Group, Level] | None = None,
) -> tuple[PinComparison, ...]:
    """Compare a run's levels with the pin of its own machine and with the newest of another.

    Args:
        run: What was measured.
        now: Its levels.
        pins: Candidates, the ones to be preferred first.
        before: Levels of the run's baseline, for the tolerances that a pin does not hold.
    """
    machine = fingerprint(run.manifest.environment)
    kind = run.manifest.environment.reference.kind
    candidates = list(pins)
    own = [g for g in candidates if machine is not None and g.fingerprint == machine][:1]
    # What was compared with the same kind of reference says more; sorting keeps the order else.
    others = [g for g in candidates if machine is None or g.fingerprint != machine]
    others.sort(key=lambda g: g.environment.reference.kind != kind)

    def comparison(pin: Pin, same: bool, held: frozenset[Group] = frozenset()) -> PinComparison:
        compared, rescaled = compare(now, pin, same, before or {})
        differs = differences(run.manifest.environment, pin.environment)
        return PinComparison(pin, same, differs, len(now), compared, rescaled, held)

    here = [comparison(g, True) for g in own]
    held = frozenset(drift.group for each in here for drift in each.compared)
    return (*here, *(comparison(g, False, held) for g in others[:1]))


def levels_of(run: Run, past: Mapping[Key, Past]) -> dict[Group, Level]:
    """Return the levels of a run with their spreads."""
    return levels(run.measurements, past, run.manifest.spreads)
