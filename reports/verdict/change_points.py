"""Where a series of runs changed its level: pieces of constant level, and a test by permutations.

Unlike `reports.verdict.noise`, which judges one new value, this reads a whole history. Source:
docs/speed.md "Changes of level".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FALSE_ALARM = 0.01
"""Probability of a change in a series that has none."""
SHORTEST = 3
"""Runs of a level: the median of three is deaf to one outlier, that of two is not."""
LEAST_RUNS = next(n for n in range(2 * SHORTEST, 100) if 2 / math.comb(n, n // 2) < FALSE_ALARM)
"""Runs below which no change is ever found: among fewer, chance puts the higher half of them at one
end too often."""
_BATCH, _BATCHES = 111, 9
"""Permutations at a time, and how often: 999 give p-values in thousandths."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of level: `index` is that of the first run of the new one."""

    index: int
    before: float
    """Median from the change before this one, or from the beginning, in the unit of the series."""
    after: float
    """Median from here to the next change, or to the end."""

    @property
    def ratio(self) -> float:
        """`after` over `before`."""
        return self.after / self.before


def change_points(series: Sequence[float | None]) -> tuple[Change, ...]:
    """Return the changes of a series of positive numbers, oldest first.

    The logarithms are fitted by two levels where the sum of absolute deviations becomes least. The
    fit is a change where fewer than `FALSE_ALARM` of the permutations of the same numbers can be
    fitted that well: noise alone has no order. Both sides are then searched in the same way. What
    the noise is like does not matter, but values of neighbouring runs must not depend on each
    other. Gaps (None) and what has no logarithm are left out.
    """
    places = [i for i, v in enumerate(series) if v is not None and v > 0 and math.isfinite(v)]
    values = np.array([series[i] for i in places], np.float64)
    starts = _split(np.log(values), 0)
    levels = [float(np.median(part)) for part in np.split(values, starts)] if starts else []
    pairs = zip(starts, levels, levels[1:], strict=False)
    return tuple(Change(places[start], before, after) for start, before, after in pairs)


def _split(logs: np.ndarray, offset: int) -> list[int]:
    """Return where levels begin, the first left out, in order."""
    if len(logs) < 2 * SHORTEST:
        return []
    gains = _gains(logs[None])[0]
    best = int(np.argmax(gains))
    if not _is_rare(logs, float(gains[best])):
        return []
    start = best + SHORTEST
    left, right = _split(logs[:start], offset), _split(logs[start:], offset + start)
    return [*left, offset + start, *right]


def _is_rare(logs: np.ndarray, gain: float) -> bool:
    """Say whether permutations reach a gain with a probability of at most `FALSE_ALARM`."""
    # The same permutations each time: the same runs have the same changes on every page.
    rng = np.random.default_rng(0)
    # The order at hand counts as one of the draws, which makes the probability exact.
    allowed = FALSE_ALARM * (1 + _BATCH * _BATCHES) - 1
    reached = 0
    # Sums in another order differ in the last bits.
    level = gain - 8 * len(logs) * np.finfo(np.float64).eps * float(np.abs(logs).sum())
    for _ in range(_BATCHES):
        draws = rng.permuted(np.tile(logs, (_BATCH, 1)), axis=1)
        reached += int(np.sum(_gains(draws).max(axis=1) >= level))
        # What more draws say cannot take it back.
        if reached > allowed:
            return False
    return True


def _gains(rows: np.ndarray) -> np.ndarray:
    """Return what two levels save of the absolute deviations of each row (P, n) from its median.

    Entry [p, k] is of a second level from SHORTEST + k on.
    """
    n = rows.shape[1]
    cuts = range(SHORTEST, n - SHORTEST + 1)
    two = [_deviations(rows[:, :k]) + _deviations(rows[:, k:]) for k in cuts]
    return _deviations(rows)[:, None] - np.stack(two, axis=1)


def _deviations(rows: np.ndarray) -> np.ndarray:
    """Return the sum of absolute deviations from the median, row by row."""
    return np.abs(rows - np.median(rows, axis=1, keepdims=True)).sum(axis=1)
