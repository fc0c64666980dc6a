"""Drift: the ratio of a run's levels to those of the pinned runs it is compared with.

On the machine of the pinned run levels repeat, and the limits of the tolerance table apply. Another
machine rounds in another order: there a level may differ by as much as in two runs with independent
rounding errors. See docs/verdicts.md "Another machine".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parity.engine.measure.measurement import Key
from parity.tolerances import DRIFT_DEVIATIONS, DRIFT_TYPICAL, DRIFT_WORST
from reports.provenance.host import differences, fingerprint
from reports.store.runs import Run
from reports.verdict.history import Past
from reports.verdict.levels import Group, Level, levels, over_meshes, pooled
from reports.verdict.pins import Pin

UNSEEN = 3.0
"""Largest ratio of a level to the pinned one that passes on a machine without an earlier run,
although rounding there could explain more. Beyond it, one run cannot distinguish rounding from a
loss of accuracy, and a person has to decide."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Typical value of a group of gates: `now`, and as pinned (`before`)."""

    group: Group
    what: str
    """The compared value of a level: `typical`, the mean of its gates, or `worst`, the largest."""
    before: float
    now: float
    limit: float
    """Largest ratio `now` / `before` that rounding explains; its inverse is the smallest."""

    @property
    def wide(self) -> bool:
        """Whether rounding explains ratios above `UNSEEN`, so one run cannot detect a loss of
        accuracy."""
        return self.limit > UNSEEN

    @property
    def draws(self) -> int:
        """Number of draws (models with other random weights) to pool until one run can judge.

        A level pooled over so many draws has a limit of at most `UNSEEN`: the deviation of a mean
        of n draws, and therefore ln of the limit, falls as 1/sqrt(n).
        """
        return max(1, math.ceil((math.log(self.limit) / math.log(UNSEEN)) ** 2))

    @property
    def ratio(self) -> float:
        """`now` divided by `before`."""
        return self.now / self.before

    @property
    def excess(self) -> float:
        """|ln ratio| divided by ln limit: 1 is at the limit."""
        # The ratio may underflow to 0, which has no logarithm; both levels are positive.
        return abs(math.log(self.now) - math.log(self.before)) / math.log(self.limit)

    @property
    def broken(self) -> bool:
        """Whether the ratio is outside the limit."""
        return not 1 / self.limit <= self.ratio <= self.limit


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A group whose level depends on its tolerances, which changed: no ratio of levels is formed.

    `before` and `now` are the geometric means of the tolerances of its gates.
    """

    group: Group
    before: float
    now: float


@dataclass(frozen=True)
class PinComparison:
    """The levels of a run compared with those of one pinned run."""

    pin: Pin
    same: bool
    """Whether both runs have the same machine: equal fingerprints, reference included."""
    differs: tuple[str, ...]
    """Differences of this run's environment from the pinned run's, one line each."""
    levels: int
    """Number of levels of the run."""
    compared: tuple[Drift, ...]
    """Two comparisons per level that both runs measured by the same work: one of `typical` and one
    of `worst`. The largest excess comes first."""
    rescaled: tuple[Rescaled, ...] = ()
    """Levels that both runs measured by the same work, not compared because tolerances changed."""
    covered: int = 0
    """Number of the run's levels in `compared` and `rescaled`; one pooled over meshes counts as
    several."""
    held: frozenset[Group] = frozenset()
    """Groups whose levels another comparison compares with an earlier run of this machine."""

    @property
    def not_yet(self) -> tuple[Drift, ...]:
        """One drift per group that is not comparable yet, the largest limit first.

        For such a group rounding explains more than `UNSEEN`, and no earlier run of this machine
        has its level.
        """
        first: dict[Group, Drift] = {}
        for drift in sorted(self.compared, key=lambda d: -d.limit):
            if drift.wide and drift.group not in self.held:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def unseen(self) -> tuple[Drift, ...]:
        """One drift per group of `not_yet` that grew more than `UNSEEN` within its limit.

        The largest ratio comes first.
        """
        first: dict[Group, Drift] = {}
        left = {drift.group for drift in self.drifts}
        for drift in sorted(self.compared, key=lambda d: (-d.ratio, d.group, d.what)):
            if drift.wide and drift.ratio > UNSEEN and drift.group not in self.held | left:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def comparable(self) -> int:
        """Number of levels in `compared`; one pooled over meshes counts once."""
        return len(self.compared) // 2

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """One drift per group that left its level, the largest excess first."""
        first: dict[Group, Drift] = {}
        for drift in self.compared:
            if drift.broken:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def largest(self) -> Drift | None:
        """Comparison of the typical level that grew most; None if nothing was compared."""
        typical = [d for d in self.compared if d.what == "typical"]
        return max(typical, key=lambda d: d.ratio, default=None)


def limit(base: float, deviation: float, same: bool) -> float:
    """Return the largest ratio of two levels that passes.

    Args:
        base: The limit on one machine, where levels repeat.
        deviation: Standard deviation of ln of the level over random rounding errors.
        same: Whether both levels are from the same machine. If not, rounding errors are
            independent, and ln of the ratio has sqrt(2) times the deviation of ln of one level.
    """
    if same:
        return base
    return max(base, math.exp(DRIFT_DEVIATIONS * math.sqrt(2) * deviation))


def compare(
    now: Mapping[Group, Level], pin: Pin, same: bool, before: Mapping[Group, Level]
) -> tuple[tuple[Drift, ...], tuple[Rescaled, ...]]:
    """Compare the levels that `now` and `pin` measured by the same work.

    Args:
        now: Levels of the run.
        pin: Pinned run to compare with.
        same: Whether the pinned run is of the same machine.
        before: Levels of the run's baseline. An old pin without stored tolerances is assumed to
            have had those of `before`, or without them, today's.

    Returns:
        Two drifts per level (of `typical` and of `worst`), the largest excess first, and the levels
        that could not be compared because their tolerances changed.
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
        # A level pinned before its case was calibrated has no spread; the run's may lack one as
        # well.
        typical, worst = map(max, zip(pinned.spread, level.spread, strict=True))
        for what, base, deviation in (
            ("typical", DRIFT_TYPICAL, typical),
            ("worst", DRIFT_WORST, worst),
        ):
            ratio = limit(base, deviation, same)
            drifts.append(Drift(group, what, getattr(pinned, what), getattr(level, what), ratio))
    return tuple(sorted(drifts, key=lambda d: (-d.excess, d.group, d.what))), tuple(rescaled)


def _meshes_pooled(now: Mapping[Group, Level], pin: Pin) -> tuple[Mapping[Group, Level], Pin]:
    """Return the levels of a run and a pin of another machine, with the levels of meshes pooled.

    Levels of the partitions of one program differ by up to 4 times on a healthy machine (0.45e-6 to
    1.7e-6 for the gradients of MLA + MoE on a processor with SSE 4.2 only), so a single one says
    nothing about another machine. The pooled levels of three machines were within 2.5 times of
    each other.
    """
    ours, theirs = dict(now), dict(pin.groups)
    for common, own in over_meshes(now).items():
        both = [g for g in own if g in theirs and theirs[g].work == ours[g].work]
        if len(both) > 1:
            ours[common], theirs[common] = (
                pooled([side[g] for g in both]) for side in (now, pin.groups)
            )
            for group in both:
                del ours[group], theirs[group]
    return ours, replace(pin, groups=theirs)


def compare_with_pins(
    run: Run,
    now: Mapping[Group, Level],
    pins: Iterable[Pin],
    before: Mapping[Group, Level] | None = None,
) -> tuple[PinComparison, ...]:
    """Compare a run's levels with pins of its own machine and with pins of other machines.

    Among the pins of its own machine, a level is compared with the first that has it; likewise
    among those of other machines, of which pins with the run's kind of reference come first. The
    anchor is the last pin of the own machine, for levels that the pinned run did not measure.

    Args:
        run: The measured run.
        now: Its levels.
        pins: Candidates, in order of preference.
        before: Levels of the run's baseline, for tolerances that a pin does not store.
    """
    machine = fingerprint(run.manifest.environment)
    kind = run.manifest.environment.reference.kind
    candidates = list(pins)
    own = [g for g in candidates if machine is not None and g.fingerprint == machine]
    # Prefer a pin with the same kind of reference; the sort is stable.
    others = [g for g in candidates if machine is None or g.fingerprint != machine]
    others.sort(key=lambda g: g.environment.reference.kind != kind)

    meshes = over_meshes(now)

    def comparison(pin: Pin, same: bool, held: frozenset[Group] = frozenset()) -> PinComparison:
        differs = differences(run.manifest.environment, pin.environment)
        ours, theirs = (now, pin) if same else _meshes_pooled(now, pin)
        compared, rescaled = compare(ours, theirs, same, before or {})
        held |= {common for common, own in meshes.items() if held >= {*own}}
        groups = {each.group for each in (*compared, *rescaled)}
        covered = sum(len(meshes.get(group, (group,))) for group in groups)
        return PinComparison(pin, same, differs, len(now), compared, rescaled, covered, held)

    def each_level_once(
        pins: Sequence[Pin], same: bool, held: frozenset[Group] = frozenset()
    ) -> list[PinComparison]:
        made: list[PinComparison] = []
        seen: set[Group] = set()
        for pin in pins:
            left = {group: level for group, level in pin.groups.items() if group not in seen}
            new = comparison(replace(pin, groups=left), same, held)
            if new.compared or new.rescaled or not made:
                made.append(new)
            for group in {each.group for each in (*new.compared, *new.rescaled)}:
                seen |= {group, *meshes.get(group, ())}
        return made

    here = each_level_once(own, True)
    held = frozenset(drift.group for each in here for drift in each.compared)
    return (*here, *each_level_once(others, False, held))


def levels_of(run: Run, past: Mapping[Key, Past]) -> dict[Group, Level]:
    """Return the levels of a run by group, with their spreads; `past` as for `levels`."""
    return levels(run.measurements, past, run.manifest.spreads)
