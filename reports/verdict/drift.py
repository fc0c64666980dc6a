"""Drift: the ratio of a run's error levels to those of the pinned runs it is compared with.

A level is the geometric mean, or the largest, error of a group of gates. On the machine of the
pinned run levels repeat, and the limits of the tolerance table apply. Another machine rounds in
another order: there a level may differ by as much as in two runs with independent rounding errors.
See docs/verdicts.md "Another machine".
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
"""Largest ratio of an error level to the pinned one that passes on a machine without an earlier
run, although rounding there could explain more. Beyond it, one run cannot distinguish rounding from
a loss of accuracy, and a person has to decide."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Error level of a group of gates in a run (`now`), compared with the pinned one (`before`)."""

    group: Group
    what: str
    """Compared number: `typical`, the geometric mean of the gates, or `worst`, their largest."""
    before: float
    now: float
    limit: float
    """Largest ratio `now` / `before` that passes; the smallest one is its inverse."""

    @property
    def wide(self) -> bool:
        """Whether the limit exceeds `UNSEEN`: rounding may change this level so much that one run
        cannot show a loss of accuracy."""
        return self.limit > UNSEEN

    @property
    def draws(self) -> int:
        """Number of draws (models with other random weights) to average for a limit of `UNSEEN`.

        The deviation of a mean of n draws, and therefore ln of the limit, falls as 1/sqrt(n).
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
        """Whether the ratio is above the limit or below its inverse."""
        return not 1 / self.limit <= self.ratio <= self.limit


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A group of gates whose error level is not compared, because their tolerances changed.

    `before` and `now` are the geometric means of the tolerances. Gates far below their tolerance
    count with a share of it, so the level depends on the tolerances.
    """

    group: Group
    before: float
    now: float


@dataclass(frozen=True)
class PinComparison:
    """The error levels of a run compared with those of one pinned run or anchor."""

    pin: Pin
    same: bool
    """Whether both runs are of one machine: equal fingerprints, which include the reference."""
    differs: tuple[str, ...]
    """Differences of this run's environment from the pinned run's, one line each."""
    levels: int
    """Number of error levels of the run, one per group of gates."""
    compared: tuple[Drift, ...]
    """Two comparisons per level that both runs measured by the same work: of `typical` (geometric
    mean of the gates) and `worst` (largest). The largest excess comes first."""
    rescaled: tuple[Rescaled, ...] = ()
    """Levels that both runs measured by the same work, not compared because tolerances changed."""
    covered: int = 0
    """Number of the run's levels in `compared` and `rescaled`; a level pooled over meshes counts
    once per mesh."""
    held: frozenset[Group] = frozenset()
    """Groups of gates whose levels are compared with an earlier run of this machine, in another
    `PinComparison`."""

    @property
    def not_yet(self) -> tuple[Drift, ...]:
        """One `Drift` per group of gates that is not comparable yet, the largest limit first.

        It is that of the group's two (`typical`, `worst`) with the larger limit. For such a group
        rounding explains more than `UNSEEN`, and no earlier run of this machine has its level.
        """
        first: dict[Group, Drift] = {}
        for drift in sorted(self.compared, key=lambda d: -d.limit):
            if drift.wide and drift.group not in self.held:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def unseen(self) -> tuple[Drift, ...]:
        """One `Drift` per group of `not_yet` with a ratio above `UNSEEN` and within its limits.

        If both of a group (`typical`, `worst`) have one, it is that with the larger ratio. The
        largest ratio comes first.
        """
        first: dict[Group, Drift] = {}
        left = {drift.group for drift in self.drifts}
        for drift in sorted(self.compared, key=lambda d: (-d.ratio, d.group, d.what)):
            if drift.wide and drift.ratio > UNSEEN and drift.group not in self.held | left:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def comparable(self) -> int:
        """Number of levels in `compared`; a level pooled over meshes counts once."""
        return len(self.compared) // 2

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """One `Drift` per group of gates with a ratio outside its limits, largest excess first.

        If both of a group (`typical`, `worst`) have one, it is that with the larger excess.
        """
        first: dict[Group, Drift] = {}
        for drift in self.compared:
            if drift.broken:
                first.setdefault(drift.group, drift)
        return tuple(first.values())

    @property
    def largest(self) -> Drift | None:
        """`Drift` of the typical error with the largest ratio; None if nothing was compared."""
        typical = [d for d in self.compared if d.what == "typical"]
        return max(typical, key=lambda d: d.ratio, default=None)


def limit(base: float, deviation: float, same: bool) -> float:
    """Return the largest ratio of two error levels that is no drift.

    Args:
        base: The limit on one machine, where levels repeat.
        deviation: Standard deviation of ln of the level over random rounding errors.
        same: Whether both levels are from the same machine. If so, the result is `base`. If not,
            rounding errors are independent, and ln of the ratio has sqrt(2) times the deviation of
            ln of one level; the result is `base` or exp(`DRIFT_DEVIATIONS` times that), whichever
            is larger.
    """
    if same:
        return base
    return max(base, math.exp(DRIFT_DEVIATIONS * math.sqrt(2) * deviation))


def compare(
    now: Mapping[Group, Level], pin: Pin, same: bool, before: Mapping[Group, Level]
) -> tuple[tuple[Drift, ...], tuple[Rescaled, ...]]:
    """Compare the error levels of a run (`now`) with those that `pin` measured by the same work.

    Args:
        now: Levels of the run.
        pin: Pinned run to compare with.
        same: Whether the pinned run is of the same machine.
        before: Levels of the run's baseline. An old pin without stored tolerances is assumed to
            have had those of `before` or, if `before` lacks the group, those of `now`.

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


def _meshes_pooled(
    now: Mapping[Group, Level], pin: Pin
) -> tuple[Mapping[Group, Level], Pin, Mapping[Group, int]]:
    """Return a run's levels and a pin of another machine, both pooled over the meshes of a program,
    and how many levels each pooled one stands for.

    Levels of the partitions of one program differ by up to 4 times on a healthy machine (0.45e-6 to
    1.7e-6 for the gradients of MLA + MoE on a processor with SSE 4.2 only), so a single one says
    nothing about another machine. The pooled levels of three machines were within 2.5 times of
    each other.
    """
    ours, theirs, counts = dict(now), dict(pin.groups), dict[Group, int]()
    for common, own in over_meshes(now).items():
        both = [g for g in own if g in theirs and theirs[g].work == ours[g].work]
        if len(both) > 1:
            ours[common], theirs[common] = (
                pooled([side[g] for g in both]) for side in (now, pin.groups)
            )
            # Without the meshes that the pin lacks, which are compared with nothing.
            counts[common] = len(both)
            for group in both:
                del ours[group], theirs[group]
    return ours, replace(pin, groups=theirs), counts


def compare_with_pins(
    run: Run,
    now: Mapping[Group, Level],
    pins: Iterable[Pin],
    before: Mapping[Group, Level] | None = None,
) -> tuple[PinComparison, ...]:
    """Compare a run's levels with pins of its own machine and with pins of other machines.

    A level is compared with the first pin of the run's machine that has it, and with the first pin
    of another machine that has it. Among other machines, pins with the run's kind of reference come
    first.

    Args:
        run: The measured run.
        now: Its levels.
        pins: Candidates, in order of preference. The caller puts the anchor of the run's machine
            last: it is for levels that no pinned run of this machine measured.
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
        ours, theirs, counts = (now, pin, {}) if same else _meshes_pooled(now, pin)
        compared, rescaled = compare(ours, theirs, same, before or {})
        held |= {common for common, own in meshes.items() if held >= {*own}}
        groups = {each.group for each in (*compared, *rescaled)}
        covered = sum(counts.get(group, 1) for group in groups)
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
    """Return the error level of each group of gates of a run; `past` as for `levels`."""
    return levels(run.measurements, past, run.manifest.spreads)
