"""Change points of a series of numbers over runs, found by a permutation test.

`reports.verdict.noise` judges one new value; this module analyses a whole history. Source:
docs/speed.md "Changes of level".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FALSE_ALARM = 0.01
"""Probability of reporting a change in a series that has none."""
SHORTEST = 3
"""Smallest number of runs at a constant level: a median of three values ignores one outlier, a
median of two does not."""
LEAST_RUNS = next(n for n in range(2 * SHORTEST, 100) if 2 / math.comb(n, n // 2) < FALSE_ALARM)
"""Smallest number of runs in which a change can be found: with fewer, chance alone sorts the higher
half of the values to one end too often."""
# Refitting settles every cut within one or two rounds; the bound only ends an endless cycle.
ROUNDS = 10
"""Largest number of rounds in which all cuts are fitted again (`_settled`)."""
_BATCH, _BATCHES = 111, 9
"""Permutations per batch, and batches: 999 in total, so p-values are multiples of 0.001."""


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A place in a series over runs at which the typical (median) value changes."""

    index: int
    """Index in the series of the first run after the change."""
    before: float
    """Median from the previous change (or the beginning) to this one, in the unit of the series."""
    after: float
    """Median from this change to the next one (or the end), in the unit of the series."""

    @property
    def ratio(self) -> float:
        """`after` divided by `before`."""
        return self.after / self.before


def change_points(series: Sequence[float | None]) -> tuple[ChangePoint, ...]:
    """Return the change points of a series of positive numbers, oldest first.

    Two constant levels are fitted to the logarithms, with the cut that minimises the sum of
    absolute deviations. The cut is a change point if a fraction of at most `FALSE_ALARM` of random
    permutations of the same values fits as well. Both sides are then searched in the same way. If
    there are several cuts, each is fitted again between its neighbours (`_settled`). The noise may
    have any distribution, but values of neighbouring runs must be independent. Gaps (None) and
    values without a logarithm are skipped.
    """
    places = [i for i, v in enumerate(series) if v is not None and v > 0 and math.isfinite(v)]
    values = np.array([series[i] for i in places], np.float64)
    logs = np.log(values)
    starts = _settled(logs, _split(logs, 0))
    levels = [float(np.median(part)) for part in np.split(values, starts)] if starts else []
    pairs = zip(starts, levels, levels[1:], strict=False)
    return tuple(ChangePoint(places[start], before, after) for start, before, after in pairs)


def _split(logs: np.ndarray, offset: int) -> list[int]:
    """Return the start of every constant level of `logs` except the first, plus `offset`, in order.

    The series is cut in two, and each part again, as long as the cut is significant (`_cut`).
    """
    found = _cut(logs, offset)
    if not found:
        return []
    start = found[0] - offset
    left, right = _split(logs[:start], offset), _split(logs[start:], offset + start)
    return [*left, offset + start, *right]


def _settled(logs: np.ndarray, starts: list[int]) -> list[int]:
    """Return the cuts `starts`, refined until each is the best cut between its neighbours.

    Cuts that are not significant (`_is_rare`) are dropped, and significant ones between the
    remaining cuts are added.

    The first cut was fitted to the whole series: on a staircase it may lie in the middle of a step.
    A single cut needs no refinement.
    """
    if len(starts) < 2:
        return starts
    for _ in range(ROUNDS):
        fitted = [0]
        for stop in (*starts[1:], len(logs)) if starts else ():
            fitted += _cut(logs[fitted[-1] : stop], fitted[-1])
        ends = [*fitted, len(logs)]
        more = (_split(logs[a:b], a) for a, b in itertools.pairwise(ends))
        settled = sorted({*fitted[1:], *itertools.chain(*more)})
        if settled == starts:
            break
        starts = settled
    return starts


def _cut(logs: np.ndarray, offset: int) -> list[int]:
    """Return, as a list, the index plus `offset` at which a series is best cut into two levels.

    The list is empty if the series is too short or the cut is not significant (`_is_rare`).
    """
    if len(logs) < 2 * SHORTEST:
        return []
    gains = _gains(logs[None])[0]
    best = int(np.argmax(gains))
    return [offset + best + SHORTEST] if _is_rare(logs, float(gains[best])) else []


def _is_rare(logs: np.ndarray, gain: float) -> bool:
    """Return whether a cut of a series is significant.

    It is if random permutations of `logs` reach `gain`, the reduction of absolute deviations by the
    cut (`_gains`), with a probability of at most `FALSE_ALARM`.
    """
    # Fixed seed: the same runs have the same change points on every page.
    rng = np.random.default_rng(0)
    # Counting the observed order as one of the permutations makes the test exact.
    allowed = FALSE_ALARM * (1 + _BATCH * _BATCHES) - 1
    reached = 0
    # Sums in another order differ in the last bits, so a gain this close to `gain` reaches it.
    level = gain - 8 * len(logs) * np.finfo(np.float64).eps * float(np.abs(logs).sum())
    for _ in range(_BATCHES):
        draws = rng.permuted(np.tile(logs, (_BATCH, 1)), axis=1)
        reached += int(np.sum(_gains(draws).max(axis=1) >= level))
        # Further permutations cannot lower the count again.
        if reached > allowed:
            return False
    return True


def _gains(rows: np.ndarray) -> np.ndarray:
    """Return by how much each possible cut into two levels fits each row better than one level.

    Args:
        rows: Logarithms of P series with n values, shape (P, n).

    Returns:
        Sum of absolute deviations from one median, minus the sums from the medians of both parts;
        entry [p, k] is for row p, cut before value SHORTEST + k.
    """
    n = rows.shape[1]
    cuts = range(SHORTEST, n - SHORTEST + 1)
    two = [_deviations(rows[:, :k]) + _deviations(rows[:, k:]) for k in cuts]
    return _deviations(rows)[:, None] - np.stack(two, axis=1)


def _deviations(rows: np.ndarray) -> np.ndarray:
    """Return each row's sum of absolute deviations from its median."""
    return np.abs(rows - np.median(rows, axis=1, keepdims=True)).sum(axis=1)
