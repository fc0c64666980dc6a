"""Looks at a run while it trains: frozen shares and update sizes, every N steps, on a sample.

A look takes a few elements of each leaf before and after one optimiser step, and whether an update
was meant for each. This module judges them with NumPy alone; `watch_torch_loop` and
`watch_jax_loop` take them. Source: docs/training.md "Watch a run while it trains".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from stability.core.findings import Finding, judge
from stability.storage.frozen_watch import FOLLOWED, places
from stability.storage.survival import FROZEN_SHARE
from stability.storage.watch_advice import advice
from stability.storage.whole_run import family_of

EVERY = 100
"""Optimiser steps from one look to the next."""
PATIENCE = 3
"""Looks at which an element had an update coming, and was found unchanged since the one before, for
it to count as frozen. An element that flips between two stored numbers is found unchanged half of
the time, so one look in a row is not enough."""
KEPT = 120
"""Looks that are kept. When there are more, every second one is dropped, so that a long run is
known at half the rate and its document stays small."""
PROBE = "watch"
SOURCE = 'docs/training.md "Watch a run while it trains"'


@dataclass(frozen=True)
class Followed:
    """A leaf that is watched, and which of its elements are followed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype it is stored in."""
    places: np.ndarray
    """Flat indices of the elements followed (k,)."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def family(self) -> str:
        """Sort of parameter: norms, biases, matrices, embeddings, ..."""
        return family_of(self.name, self.shape)


def follow(name: str, shape: tuple[int, ...], dtype: str) -> Followed:
    """Return a leaf with the elements of it that are followed."""
    return Followed(name, shape, dtype, places(name, shape, FOLLOWED))


class Seen(NamedTuple):
    """Elements of a leaf around one optimiser step, each (k,)."""

    before: np.ndarray
    after: np.ndarray
    meant: np.ndarray
    """Whether the step meant to change it: its gradient, or the optimiser's update, was not 0."""


class LeafLook(NamedTuple):
    """One look at one leaf."""

    unchanged: float
    """Share of the elements with an update coming that this one step left as they were."""
    frozen: float
    """Share of the elements that ever had an update coming which have stood still for `PATIENCE`
    looks; NaN at the first ones, which cannot know."""
    elements: int
    """Elements that ever had an update coming, which the frozen share is one of."""
    update: float
    """Root mean square of the change over that of the values."""


Take: TypeAlias = Callable[[int, dict[str, Seen], dict[str, str]], None]
"""Gets a look: step, samples by name, and why other leaves have none."""


@dataclass(frozen=True)
class Look:
    """One look at all leaves."""

    step: int
    leaves: Mapping[str, LeafLook]
    """What was measured, by name."""
    families: Mapping[str, LeafLook]
    """The same by sort of parameter, each leaf weighed by its elements."""


@dataclass
class _Count:
    """State of a leaf between looks."""

    last: np.ndarray
    still: np.ndarray
    """Looks in a row with an update coming and without a change, int (k,)."""
    ever: np.ndarray
    """Whether an update ever came, bool (k,)."""
    looks: int = 0


@dataclass
class Watched:
    """All that a watch has measured."""

    leaves: Mapping[str, Followed]
    every: int = EVERY
    looks: list[Look] = field(default_factory=list)
    """Kept looks, oldest first."""
    absent: dict[str, str] = field(default_factory=dict)
    """Leaves that the last look did not measure, and leaves that no look can, with the reason."""
    step: int = 0
    """Step of the newest look."""
    _counts: dict[str, _Count] = field(default_factory=dict)

    def look(
        self, step: int, seen: Mapping[str, Seen], absent: Mapping[str, str] | None = None
    ) -> Look:
        """Judge a look, keep it and return it.

        Args:
            step: optimiser steps so far.
            seen: elements around the step by name, in the order of `Followed.places`.
            absent: why leaves that are not in `seen` are not.
        """
        absent, found = dict(absent or {}), {}
        for name, part in seen.items():
            if not (np.isfinite(part.before).all() and np.isfinite(part.after).all()):
                absent[name] = "it has values that are NaN or infinite"
            elif not part.meant.any():
                absent[name] = "no update was meant for the elements followed"
            else:
                found[name] = self._leaf(name, part)
        never = {n: why for n, why in self.absent.items() if n not in self.leaves}
        self.absent = {**never, **absent}
        self.step = step
        look = Look(step, found, self._families(found))
        self.looks.append(look)
        if len(self.looks) > KEPT:
            # The newest one stays.
            self.looks = self.looks[-1::-2][::-1]
        return look

    def _leaf(self, name: str, seen: Seen) -> LeafLook:
        before, after, meant = seen
        count = self._counts.get(name)
        if count is None:
            zeros = np.zeros(before.shape, np.int64)
            count = self._counts[name] = _Count(before, zeros, zeros.astype(bool))
        moved = (before != count.last) | (after != before) | (after != count.last)
        count.still = np.where(moved, 0, count.still + meant)
        count.last, count.ever, count.looks = after, count.ever | meant, count.looks + 1
        still = count.still[count.ever] >= PATIENCE
        norm = float(np.sqrt(np.mean(np.square(before, dtype=np.float64))))
        change = float(np.sqrt(np.mean(np.square(after - before, dtype=np.float64))))
        return LeafLook(
            unchanged=float(np.mean(after[meant] == before[meant])),
            frozen=float(np.mean(still)) if count.looks >= PATIENCE else math.nan,
            elements=int(count.ever.sum()),
            update=change / norm if norm else math.nan,
        )

    def _families(self, found: Mapping[str, LeafLook]) -> dict[str, LeafLook]:
        groups: dict[str, list[str]] = {}
        for name in found:
            groups.setdefault(self.leaves[name].family, []).append(name)
        return {family: self._combined(names, found) for family, names in groups.items()}

    def _combined(self, names: list[str], found: Mapping[str, LeafLook]) -> LeafLook:
        weights = np.array([self.leaves[n].size for n in names], float)
        rows = np.array([found[n] for n in names], float)
        known = np.isfinite(rows)
        total = (weights[:, None] * known).sum(axis=0)
        with np.errstate(invalid="ignore"):
            mean = np.where(known, rows * weights[:, None], 0.0).sum(axis=0) / total
        unchanged, frozen, _, update = map(float, mean)
        return LeafLook(unchanged, frozen, int(sum(found[n].elements for n in names)), update)

    def latest(self) -> dict[str, LeafLook]:
        """Return the newest look at each leaf that was ever measured."""
        newest: dict[str, LeafLook] = {}
        for look in self.looks:
            newest |= look.leaves
        return newest

    def frozen(self) -> list[str]:
        """Return the leaves that stand still: more than half is frozen, by two standard errors."""
        return [n for n, leaf in self.latest().items() if self._stands_still(n, leaf)]

    def _stands_still(self, name: str, leaf: LeafLook) -> bool:
        # A NaN is above nothing.
        middle, error = _estimate(leaf.frozen, leaf.elements, self.leaves[name].size)
        return middle - 2 * error > FROZEN_SHARE

    def warning(self, framework: str) -> str:
        """Return the one warning of a run, with the remedies; empty where nothing stands still.

        Args:
            framework: "torch" or "jax", in whose words the remedies are.
        """
        frozen = [self.leaves[n] for n in self.frozen()]
        if not frozen:
            return ""
        names = ", ".join(leaf.name for leaf in frozen[:4])
        more = f" and {len(frozen) - 4} more" if len(frozen) > 4 else ""
        dtypes = " and ".join(sorted({leaf.dtype for leaf in frozen}))
        verb = "stands" if len(frozen) == 1 else "stand"
        return (
            f"step {self.step}: {len(frozen)} of {len(self.latest())} watched parameters {verb} "
            f"still, {names}{more} ({dtypes}): more than half of the elements of each have not "
            f"changed over {PATIENCE} looks, {self.every} steps apart, although updates were "
            f"meant. {self.remedy(framework)}"
        )

    def remedy(self, framework: str) -> str:
        """Return what helps the leaves that stand still now; empty where none does."""
        frozen = [(x.family, x.size, x.dtype) for x in map(self.leaves.__getitem__, self.frozen())]
        return advice(frozen, sum(x.size for x in self.leaves.values()), framework)

    def findings(self, framework: str) -> list[Finding]:
        """Return the frozen share of every leaf as a finding; NaN where it was not measured."""
        still, remedy = set(self.frozen()), self.remedy(framework)
        latest, rows = self.latest(), []
        for name, leaf in self.leaves.items():
            look = latest.get(name)
            value = math.nan if look is None else look.frozen
            message = self._message(name, look)
            # A share above one half by less than its sampling error is no warning.
            limit = FROZEN_SHARE if name in still or not value > FROZEN_SHARE else 1.0
            rows.append(
                judge(PROBE, leaf.name, "frozen_fraction", value, limit, SOURCE, message, remedy)
            )
        return rows

    def _message(self, name: str, look: LeafLook | None) -> str:
        if look is None:
            return f"not measured: {self.absent.get(name, 'no look yet')}"
        if math.isnan(look.frozen):
            looks = self._counts[name].looks
            return f"not measured: {looks} of the {PATIENCE} looks that it takes"
        error = error_of(look.frozen, look.elements, self.leaves[name].size)
        sampled = f", sampling error {error:.1%}" if error else ""
        return (
            f"{look.frozen:.0%} of {look.elements} elements have not changed over {PATIENCE} "
            f"looks although updates were meant{sampled}"
        )


def error_of(share: float, elements: int, size: int) -> float:
    """Return one standard error of a share that was found in a sample; 0 for a whole leaf.

    Args:
        share: the share found.
        elements: how many elements it is a share of.
        size: elements of the leaf.
    """
    return _estimate(share, elements, size)[1]


def _estimate(share: float, elements: int, size: int) -> tuple[float, float]:
    """Return the middle of a share's interval and its standard error, of Agresti and Coull."""
    if elements >= size or math.isnan(share):
        return share, 0.0
    # With two successes and two failures more, so that 3 of 3 is not certain.
    count = elements + 4
    middle = (share * elements + 2) / count
    return middle, math.sqrt(middle * (1 - middle) / count)
