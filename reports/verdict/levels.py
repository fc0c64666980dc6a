"""Levels: the size of the errors of a group of gates, and how much rounding alone varies it.

A slow loss of accuracy moves a level while every tolerance still holds. The levels of two machines
that round in different orders are two samples from one distribution, whose width is known: the
noise floor was calibrated with several seeds. See docs/verdicts.md "Another machine".
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity.engine.measure.measurement import Key, Kind, Measurement
from parity.engine.measure.metrics import POOLED
from parity.mesh.tolerance_table import MeshEdge
from parity.tolerances import DRIFT_SHARE
from reports.suite_run import Calibrated
from reports.verdict.history import Past

RECENT = 7
"""Number of newest values, the judged run's included, that are combined into one for a gate whose
value does not repeat bit by bit."""
# A scalar's error may be zero by luck, so only errors that average over many elements have a
# level. A ratio of two errors scatters with both, and each has its own level; a share is no error.
_RATIOS = ("error_over_reference", "exact_share")
KINDS = (Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT, Kind.STATE, Kind.TRAJECTORY)
"""Kinds of quantity whose gates count for error levels."""

Group = tuple[str, str, str, str]
"""Case, edge (comparison), kind of quantity, metric: gates that share them are one group."""
Spread = tuple[float, float]
"""Standard deviations that rounding alone causes: of ln of the geometric mean of a group of gates,
and of ln of their largest value."""
STILL: Spread = (0.0, 0.0)
"""Spread of a group of gates whose response to rounding is unknown: rounding then explains no
drift."""
_MESH_EDGES = frozenset(map(str, MeshEdge))
Settle = Callable[[Sequence[float]], float]
"""Function that combines recent values of a gate that does not repeat into one, e.g. a median."""


@dataclass(frozen=True, slots=True)
class Level:
    """Level of one group of gates: the geometric mean (`typical`) and the largest (`worst`) value.

    A value below `DRIFT_SHARE` of its gate's tolerance counts as that share. `spread` has the
    standard deviations of ln(`typical`) and ln(`worst`) that rounding alone causes.
    """

    work: str
    """Hash of the work behind the group's gates; only levels with equal hashes are compared."""
    gates: int
    typical: float
    worst: float
    spread: Spread = STILL
    tolerance: float = 0.0
    """Geometric mean of the tolerances of its gates; 0 if unknown, as in old pins."""
    floored: int = 0
    """Number of gates whose smaller value was raised to `DRIFT_SHARE` of their tolerance. If there
    are any, the level depends on the tolerances."""


def group_gates(rows: Iterable[Measurement]) -> dict[Group, list[Measurement]]:
    """Return the gates that count for error levels, by `Group`; groups are sorted by their names.

    Gates count if their kind is in `KINDS`, their metric is not in `_RATIOS`, their value is
    finite, and their tolerance is positive and finite. If a group was pooled over draws (models
    with other random weights and inputs, `parity.pooling`), only the pooled metric counts: the
    error of a single small model is mostly chance.
    """
    groups: dict[Group, list[Measurement]] = {}
    for m in rows:
        # A tolerance near the smallest float has a share that underflows to 0. With an infinite
        # tolerance a gate is not comparable.
        gated = 0 < DRIFT_SHARE * m.tolerance < math.inf and math.isfinite(m.value)
        if gated and m.kind in KINDS and m.metric not in _RATIOS:
            groups.setdefault((m.case, m.edge, m.kind.value, m.metric), []).append(m)
    pooled = {(*group[:3], "rel_l2") for group in groups if group[3] == POOLED}
    return {group: gates for group, gates in sorted(groups.items()) if group not in pooled}


def levels(
    rows: Iterable[Measurement],
    past: Mapping[Key, Past],
    spreads: Mapping[str, Sequence[float]] | None = None,
    settle: Settle = statistics.median,
) -> dict[Group, Level]:
    """Return the error level (geometric mean and largest) of every group of gates of a run.

    A gate that does not repeat counts with `settle` of its `RECENT` newest values. Every gate
    counts with at least `DRIFT_SHARE` of its tolerance.

    Args:
        rows: Measurements of the run.
        past: Earlier values of the gates that do not repeat, oldest first.
        spreads: Spread by `name_of` the group, as stored in a manifest; `STILL` for a group without
            one.
        settle: Function that combines the recent values of a gate into one.
    """

    def recent(m: Measurement) -> float:
        earlier = past.get(m.key, Past()).values
        return settle((*earlier[1 - RECENT :], m.value))

    by_group = {}
    for group, gates in group_gates(rows).items():
        spread = spread_of((spreads or {}).get(name_of(group), STILL))
        by_group[group] = _level(gates, [recent(m) for m in gates], spread)
    return by_group


def _level(gates: Sequence[Measurement], raw: Sequence[float], spread: Spread) -> Level:
    floors = [DRIFT_SHARE * m.tolerance for m in gates]
    values = [max(pair) for pair in zip(raw, floors, strict=True)]
    identities = repr(sorted(m.identity for m in gates)).encode()
    return Level(
        work=hashlib.sha256(identities).hexdigest()[:8],
        gates=len(values),
        typical=_rounded(statistics.geometric_mean(values)),
        worst=_rounded(max(values)),
        spread=spread,
        tolerance=_rounded(statistics.geometric_mean([m.tolerance for m in gates])),
        floored=sum(value < floor for value, floor in zip(raw, floors, strict=True)),
    )


def over_meshes(groups: Mapping[Group, Level]) -> dict[Group, tuple[Group, ...]]:
    """Return the groups of gates that differ only in the mesh, by their common group.

    A common group has the case without the mesh: "mesh megalodon" for "mesh megalodon data=8". It
    is left out if it has only one mesh.
    """
    members: dict[Group, list[Group]] = {}
    for group in groups:
        case, edge, kind, metric = group
        subject = " ".join(word for word in case.split(" ") if "=" not in word)
        if edge in _MESH_EDGES and subject != case:
            members.setdefault((subject, edge, kind, metric), []).append(group)
    return {common: tuple(own) for common, own in members.items() if len(own) > 1}


def pooled(members: Sequence[Level]) -> Level:
    """Return the geometric mean of several levels, weighted by their numbers of gates.

    `worst` is the weighted geometric mean of the members' `worst`, since their maximum would show
    the worst partition only. `spread` is the largest of the members': they share one side of the
    comparison, so their errors are dependent, and it is unknown how much averaging reduces the
    spread.
    """
    gates = sum(level.gates for level in members)

    def mean(values: Iterable[float]) -> float:
        logs = (level.gates * math.log(v) for level, v in zip(members, values, strict=True))
        return _rounded(math.exp(math.fsum(logs) / gates))

    known = all(level.tolerance for level in members)
    return Level(
        work=hashlib.sha256(" ".join(sorted(it.work for it in members)).encode()).hexdigest()[:8],
        gates=gates,
        typical=mean(level.typical for level in members),
        worst=mean(level.worst for level in members),
        spread=(max(it.spread[0] for it in members), max(it.spread[1] for it in members)),
        tolerance=mean(level.tolerance for level in members) if known else 0.0,
        floored=sum(level.floored for level in members),
    )


def spread_of(values: object) -> Spread:
    """Return a stored `Spread`, or `STILL` (0, 0) if it is not two finite numbers of at least 0.

    With `STILL` the run is judged more strictly: rounding then explains no drift.
    """
    try:
        return _checked_spread(values)
    except (TypeError, ValueError, OverflowError):
        return STILL


def level_of(document: Mapping[str, Any]) -> Level:
    """Return the `Level` that a pinned baseline stores as `document`.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: a field is missing, unknown or of a wrong
            type, or a number is outside its valid range.
    """
    level = Level(**{**document, "spread": _checked_spread(document["spread"])})
    numbers = (level.typical, level.worst, level.tolerance)
    counts = (level.gates, level.floored)
    sound = (
        isinstance(level.work, str)
        and bool(level.work)
        and all(map(_is_number, numbers))
        # A mean of gates exceeds their largest by at most one unit of the third digit, from
        # rounding.
        and 0 < level.typical <= 1.01 * level.worst
        and level.tolerance >= 0
        and all(type(n) is int for n in counts)
        and level.gates >= 1
        and 0 <= level.floored <= level.gates
    )
    if not sound:
        raise ValueError(f"a field of the level {dict(document)} is outside its valid range")
    return level


def _checked_spread(values: Any) -> Spread:
    typical, worst = values
    if not all(_is_number(v) and v >= 0 for v in (typical, worst)):
        raise ValueError(f"the spread {values!r} is not two numbers of at least 0")
    return typical, worst


def _is_number(value: object) -> bool:
    """Return whether `value` is a finite int or float; bool and str are not."""
    return type(value) in (int, float) and math.isfinite(float(value))  # pyright: ignore[reportArgumentType]


def _rounded(value: float) -> float:
    # Three digits, so that the diff of a pinning shows real changes and no jitter.
    return float(f"{value:.2e}")


def name_of(group: Group) -> str:
    """Return the name of a group of gates: "case | edge | kind | metric"."""
    return " | ".join(group)


def spreads_of(
    rows: Iterable[Measurement], responses: Mapping[Calibrated, Mapping[str, Sequence[float]]]
) -> dict[str, Spread]:
    """Return how much rounding alone varies the level of each group of gates, by its `name_of`.

    A `Spread` has the standard deviations of ln(`typical`) and ln(`worst`). A group is left out if
    one of its gates has no calibrated responses to rounding.

    Args:
        rows: Measurements of a run.
        responses: By (case, metric), valid on all edges, or by (case, metric, edge), which has
            precedence: the responses of each quantity. A response is the relative L2 change of the
            quantity, for each rounding seed (`parity.engine.measure.rounding_noise`) or, if draws
            were pooled, for each draw with one seed.
    """
    spreads = {}
    for group, gates in group_gates(rows).items():
        case, edge, _, metric = group
        answers = responses.get((case, metric, edge), responses.get((case, metric), {}))
        values = [answers[m.quantity] for m in gates if m.quantity in answers]
        if len(values) == len(gates):
            if metric == POOLED:
                typical, worst = spread_by_jackknife(values)
            else:
                floors = [DRIFT_SHARE * m.tolerance for m in gates]
                typical, worst = spread_over_seeds(values, floors)
            spreads[name_of(group)] = (_rounded(typical), _rounded(worst))
    return spreads


def spread_over_seeds(
    values: Sequence[Sequence[float]], floors: Sequence[float] | None = None
) -> Spread:
    """Return the standard deviations over seeds of ln of a group's `typical` and `worst`.

    Seeds are independent but gates are not: one perturbed weight moves every later value. Therefore
    the level is computed for each seed, and the standard deviation is taken over seeds. As in a
    level, a value counts with at least the floor of its gate: some gates do not respond to a seed.
    A seed is left out if a value is not finite, or 0 without a floor. With fewer than two seeds the
    result is `STILL`.

    Args:
        values: Responses to rounding, `values[gate][seed]`.
        floors: Least value of each gate; None for no floors.
    """
    floors = floors or [0.0] * len(values)
    finite = [column for column in zip(*values, strict=True) if all(map(math.isfinite, column))]
    levels = [[max(pair) for pair in zip(column, floors, strict=True)] for column in finite]
    seeds = [level for level in levels if min(level) > 0]
    if len(seeds) < 2:
        return STILL
    typical = [statistics.fmean(map(math.log, column)) for column in seeds]
    return statistics.stdev(typical), statistics.stdev(math.log(max(column)) for column in seeds)


def spread_by_jackknife(values: Sequence[Sequence[float]]) -> Spread:
    """Estimate how much rounding varies the level of gates that are pooled over independent draws.

    The result is the standard deviations of ln(`typical`) and ln(`worst`). Each gate is a geometric
    mean over draws (models with other random weights), and `values[gate][draw]` is one response to
    rounding. The level is therefore observed only once, and its deviation is estimated by the
    delete-one jackknife, which is exact for the mean of the gates. Gates with a response of 0 in
    any draw are left out. With fewer than two draws the result is `STILL`.
    """
    logs = [[math.log(v) for v in gate] for gate in values if all(v > 0 for v in gate)]
    if not logs or (draws := len(logs[0])) < 2:
        return STILL
    without = [[(sum(gate) - gate[i]) / (draws - 1) for gate in logs] for i in range(draws)]

    def deviation(estimates: Sequence[float]) -> float:
        return math.sqrt((draws - 1) * statistics.pvariance(estimates))

    return deviation([statistics.fmean(w) for w in without]), deviation([max(w) for w in without])
