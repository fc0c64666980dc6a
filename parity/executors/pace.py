"""Estimated time left in a sweep, from the expected and the measured seconds of its items.

The pace is the ratio of measured to expected seconds, over finished items. A running item counts
too once it has taken longer than expected at that pace: the longest items start early, so a slow
machine shows in them first.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# 5 s, because starting a process alone takes some seconds: an item of a few seconds says little
# about the speed of a machine, and one of 20 s says much.
PRIOR = 5.0
"""Weight of the prior of the pace: seconds of fictitious work that took as long as expected."""
# An overdue item is unlikely to end at once. A larger share than an eighth would change estimates
# for items of minutes that are on time.
LATE = 8.0
"""Divisor: a running item is assumed to need at least its age (the seconds since its start) divided
by this number."""
# The machine may be half or twice as fast as the one on which the expected seconds were measured.
UNSURE = 2.0
"""While no item is finished, the time left is given as a range: from the estimate divided by this
factor to the estimate times this factor."""


def makespan(seconds: Sequence[float], workers: int, busy: Sequence[float] = ()) -> float:
    """Return the seconds until the last item ends, if each one starts on the first free worker.

    Args:
        seconds: duration of each waiting item, in starting order.
        workers: number of items that run at a time.
        busy: remaining seconds of each running item.
    """
    free = [*busy, *([0.0] * (max(workers, 1) - len(busy)))]
    heapq.heapify(free)
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


@dataclass
class Pace:
    """Measured and expected durations of items, and the estimate of the time left."""

    left: dict[str, float]
    """Expected seconds of unfinished items by name, in starting order; 0: unknown."""
    expected: list[float] = field(default_factory=list)
    """Expected seconds of finished items, in order of completion."""
    seconds: list[float] = field(default_factory=list)
    """Measured seconds of finished items, in order of completion."""

    def done(self, name: str, seconds: float) -> None:
        """Record that an item has finished and how many seconds it took."""
        self.seconds.append(seconds)
        self.expected.append(self.left.pop(name, 0.0))

    def ratio(self, ages: Mapping[str, float]) -> float:
        """Return the pace: sum of measured seconds over sum of expected seconds; 1 at first.

        The sums include the finished items whose expected seconds are known, the running items
        whose age, taken as measured seconds, raises the pace, and `PRIOR` seconds in both.

        Args:
            ages: seconds since the start of each running item, by name.
        """
        known = [(s, e) for s, e in zip(self.seconds, self.expected, strict=True) if e]
        taken = PRIOR + sum(s for s, _ in known)
        wanted = PRIOR + sum(e for _, e in known)
        late = [(ages[n], e) for n, e in self.left.items() if e and n in ages]
        # Most overdue first: if one does not raise the pace, the remaining ones do not either.
        for age, expected in sorted(late, key=lambda pair: pair[0] / pair[1], reverse=True):
            if age / expected <= taken / wanted:
                break
            taken, wanted = taken + age, wanted + expected
        return taken / wanted

    def estimate(self, ages: Mapping[str, float], workers: int) -> float | None:
        """Return the estimated seconds until the sweep ends.

        An item is assumed to take its expected seconds times the pace (`ratio`) or, if its expected
        seconds are unknown, the median time of the finished items. The result is None if the
        expected seconds of an item are unknown and no item has finished.

        Args:
            ages: seconds since the start of each running item, by name.
            workers: number of items that run at a time.
        """
        pace = self.ratio(ages)
        typical = statistics.median(self.seconds) if self.seconds else 0.0
        takes = {name: pace * each or typical for name, each in self.left.items()}
        if not all(takes.values()):
            return None
        busy = [max(takes[n] - ages[n], ages[n] / LATE) for n in takes if n in ages]
        return makespan([takes[n] for n in takes if n not in ages], workers, busy)

    def words(self, ages: Mapping[str, float], workers: int) -> str:
        """Return `estimate` in words, as a range before any item is finished; "" if unknown."""
        left = self.estimate(ages, workers)
        if left is None:
            return ""
        if self.seconds:
            return f"about {duration(left)} left"
        return f"{duration(left / UNSURE)} to {duration(left * UNSURE)} left"


def duration(seconds: float) -> str:
    """Return a duration as text: seconds below 90 s, tens of seconds below 180 s, else minutes."""
    # 90 s as "2 minutes" would be off by a third.
    if seconds >= 180:
        return f"{seconds / 60:.0f} minutes"
    return f"{round(seconds, -1 if seconds >= 90 else 0):.0f} s"
