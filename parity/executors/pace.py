"""Seconds left of a sweep, from what its items were expected to take and what they take.

The pace is the ratio of measured to expected seconds. Items that are done say it. So does one that
runs for longer than the pace gives it, as a lower bound: the longest items are begun early, and a
slow machine shows there first.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PRIOR = 5.0
"""Seconds of work as long as expected that the pace is averaged with: the start of a process alone
is some seconds, so a shorter item says little of how fast a machine is, and one of 20 s much."""
LATE = 8.0
"""An item takes its age divided by this once more, at least: one that is late is not about to be
over. More than an eighth would show in items of minutes that are on time."""
UNSURE = 2.0
"""Factor between the estimate and either end of its range before any item is done: a machine half
or twice as fast as the one that the expected seconds are of."""


def makespan(seconds: Sequence[float], workers: int, busy: Sequence[float] = ()) -> float:
    """Return the seconds until the last item is over, where each goes to the first free worker.

    Args:
        seconds: Of each item that waits, in the order they are begun in.
        workers: How many run at a time.
        busy: Seconds that each item that runs still takes.
    """
    free = [*busy, *([0.0] * (max(workers, 1) - len(busy)))]
    heapq.heapify(free)
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


@dataclass
class Pace:
    """What is known of how long items take."""

    left: dict[str, float]
    """Expected seconds of items that are not done, in the order they are begun in; 0 where nobody
    knows."""
    expected: list[float] = field(default_factory=list)
    """Of items that are done, in the order they were done in."""
    seconds: list[float] = field(default_factory=list)
    """What those took."""

    def done(self, name: str, seconds: float) -> None:
        """Count an item that is over."""
        self.seconds.append(seconds)
        self.expected.append(self.left.pop(name, 0.0))

    def ratio(self, ages: Mapping[str, float]) -> float:
        """Return measured over expected seconds.

        Args:
            ages: Seconds that each item that runs has been running.
        """
        known = [(s, e) for s, e in zip(self.seconds, self.expected, strict=True) if e]
        taken = PRIOR + sum(s for s, _ in known)
        wanted = PRIOR + sum(e for _, e in known)
        late = [(ages[n], e) for n, e in self.left.items() if e and n in ages]
        # The latest first: each raises the pace, or none after it does.
        for age, expected in sorted(late, key=lambda pair: pair[0] / pair[1], reverse=True):
            if age / expected <= taken / wanted:
                break
            taken, wanted = taken + age, wanted + expected
        return taken / wanted

    def estimate(self, ages: Mapping[str, float], workers: int) -> float | None:
        """Return the seconds left; None before anything is known of how long items take.

        An item takes what was expected of it, times the pace; one of which nothing was expected
        takes what the median one did.

        Args:
            ages: As for `ratio`.
            workers: How many items run at a time.
        """
        pace = self.ratio(ages)
        typical = statistics.median(self.seconds) if self.seconds else 0.0
        takes = {name: pace * each or typical for name, each in self.left.items()}
        if not all(takes.values()):
            return None
        busy = [max(takes[n] - ages[n], ages[n] / LATE) for n in takes if n in ages]
        return makespan([takes[n] for n in takes if n not in ages], workers, busy)

    def words(self, ages: Mapping[str, float], workers: int) -> str:
        """Return the time left in words, a range before any item is done; "" where nobody knows."""
        left = self.estimate(ages, workers)
        if left is None:
            return ""
        if self.seconds:
            return f"about {duration(left)} left"
        return f"{duration(left / UNSURE)} to {duration(left * UNSURE)} left"


def duration(seconds: float) -> str:
    """Return seconds in words, in minutes from 90 s on."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
