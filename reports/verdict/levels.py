"""Levels: where the gates of one group stand, and how far rounding alone scatters that.

A level is what a slow loss of accuracy moves while every tolerance holds. Two machines that round
in another order are two draws from the same distribution; its width is known, because the noise
floor was calibrated over seeds. See docs/verdicts.md "Another machine".
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity.engine.measurement import Key, Kind, Measurement
from parity.pooling import POOLED
from parity.tolerances import DRIFT_SHARE
from reports.verdict.history import Past

RECENT = 7
"""Newest values that stand for a gate that does not repeat, today's included."""
# A scalar's error may be zero by luck: only what averages over many elements has a level.
# A ratio of two errors trembles with both, and both have levels of their own; a share is no error.
_RATIOS = ("error_over_reference", "exact_share")
KINDS = (Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT, Kind.STATE, Kind.TRAJECTORY)

Group = tuple[str, str, str, str]
"""Case, edge, kind, metric."""
Spread = tuple[float, float]
"""Standard deviation, over rounding, of ln of a group's typical level and of its worst gate."""
STILL: Spread = (0.0, 0.0)
"""The spread of a group that was not calibrated: nothing is explained by rounding."""
Calibrated = tuple[str, str]
"""Case and metric that responses to rounding are known of."""
Settle = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Level:
    """Where the gates of one group stand: their geometric mean and the largest of them."""

    work: str
    """Hash of their identities: levels of other work are not compared."""
    gates: int
    typical: float
    worst: float
    spread: Spread = STILL
    tolerance: float = 0.0
    """Geometric mean of the tolerances; 0 where it is not known, in pins of earlier days."""
    floored: int = 0
    """Gates below `DRIFT_SHARE` of their tolerance, which count with that: where there are any, the
    level follows the tolerances."""


def group_gates(rows: Iterable[Measurement]) -> dict[Group, list[Measurement]]:
    """Return the gates that have a level, by group.

    What was pooled over draws (`parity.pooling`) has its level there: a single draw of a small
    model is one throw of dice.
    """
    groups: dict[Group, list[Measurement]] = {}
    for m in rows:
        # A tolerance near the smallest float has no share that is a number above 0; an infinite one
        # makes a gate not comparable, and its share is no level.
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
    """Return the level of every group of gates of a run.

    A gate that does not repeat counts with what `settle` makes of its `RECENT` newest values, and
    every gate with at least `DRIFT_SHARE` of its tolerance.

    Args:
        rows: Measurements.
        past: Earlier values of the gates that do not repeat.
        spreads: By the group's `name_of`, as a run's manifest holds them.
        settle: How recent values become one.
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


def spread_of(values: object) -> Spread:
    """Return a stored spread, or `STILL` where it is not two numbers of at least 0.

    Rounding then explains nothing, which is the stricter judgement.
    """
    try:
        return _checked_spread(values)
    except (TypeError, ValueError, OverflowError):
        return STILL


def level_of(document: Mapping[str, Any]) -> Level:
    """Return the level that a pinned baseline holds.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: a field is missing, unknown or of another
            type, or a number is none that a level can have.
    """
    level = Level(**{**document, "spread": _checked_spread(document["spread"])})
    numbers = (level.typical, level.worst, level.tolerance)
    counts = (level.gates, level.floored)
    sound = (
        isinstance(level.work, str)
        and bool(level.work)
        and all(map(_is_number, numbers))
        # The mean of gates is not beyond their largest, by more than one unit of the third digit.
        and 0 < level.typical <= 1.01 * level.worst
        and level.tolerance >= 0
        and all(type(n) is int for n in counts)
        and level.gates >= 1
        and 0 <= level.floored <= level.gates
    )
    if not sound:
        raise ValueError(f"the level {dict(document)} is none: see reports.verdict.levels.Level")
    return level


def _checked_spread(values: Any) -> Spread:
    typical, worst = values
    if not all(_is_number(v) and v >= 0 for v in (typical, worst)):
        raise ValueError(f"the spread {values!r} is not two numbers of at least 0")
    return typical, worst


def _is_number(value: object) -> bool:
    """Return whether it is a finite number; a bool and the text of a number are none."""
    return type(value) in (int, float) and math.isfinite(float(value))  # pyright: ignore[reportArgumentType]


def _rounded(value: float) -> float:
    # Three digits: the diff of a pinning shows what moved, not what trembled.
    return float(f"{value:.2e}")


def name_of(group: Group) -> str:
    """Write a group as one line of text."""
    return " | ".join(group)


def spreads_of(
    rows: Iterable[Measurement], responses: Mapping[Calibrated, Mapping[str, Sequence[float]]]
) -> dict[str, Spread]:
    """Return how far rounding scatters the level of every calibrated group, by `name_of`.

    Args:
        rows: Measurements of a run.
        responses: By quantity, the relative L2 response to each seed of rounding
            (`parity.engine.rounding_noise`) or, where draws were pooled, to one seed on each draw.
    """
    spreads = {}
    for group, gates in group_gates(rows).items():
        case, _, _, metric = group
        answers = responses.get((case, metric), {})
        values = [answers[m.quantity] for m in gates if m.quantity in answers]
        if len(values) == len(gates):
            typical, worst = (spread_by_jackknife if metric == POOLED else spread_over_seeds)(
                values
            )
            spreads[name_of(group)] = (_rounded(typical), _rounded(worst))
    return spreads


def spread_over_seeds(values: Sequence[Sequence[float]]) -> Spread:
    """Return the spread of a level whose gates respond to each seed as `values[gate][seed]`.

    Seeds are independent, gates are not: one perturbed weight moves all that follows it. Hence the
    level is formed seed by seed, and the standard deviation is over seeds.
    """
    seeds = [column for column in zip(*values, strict=True) if all(v > 0 for v in column)]
    if len(seeds) < 2:
        return STILL
    typical = [statistics.fmean(map(math.log, column)) for column in seeds]
    return statistics.stdev(typical), statistics.stdev(math.log(max(column)) for column in seeds)


def spread_by_jackknife(values: Sequence[Sequence[float]]) -> Spread:
    """Return the spread of a level whose gates are geometric means over independent draws.

    `values[gate][draw]` is one response each, so the level itself is seen once; what leaving out
    one draw at a time does to it estimates its variance (the delete-one jackknife, exact for the
    mean of the gates).
    """
    logs = [[math.log(v) for v in gate] for gate in values if all(v > 0 for v in gate)]
    if not logs or (draws := len(logs[0])) < 2:
        return STILL
    without = [[(sum(gate) - gate[i]) / (draws - 1) for gate in logs] for i in range(draws)]

    def deviation(estimates: Sequence[float]) -> float:
        return math.sqrt((draws - 1) * statistics.pvariance(estimates))

    return deviation([statistics.fmean(w) for w in without]), deviation([max(w) for w in without])
