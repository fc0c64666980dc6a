"""Frozen fractions and update sizes of a running training, every N steps, on a sample.

An inspection of one optimiser step is called a look. It holds a few elements of each leaf before
and after the step, and whether an update of each element was due: in torch if its gradient was not
0, in JAX if its update was not negligible. This module evaluates looks with NumPy alone;
`watch_torch_loop` and `watch_jax_loop` take them. Source: docs/training.md "Watch a run while it
trains".
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
"""Default number of optimiser steps between two looks (inspected steps)."""
PATIENCE = 3
"""An element counts as frozen if an update of it was due at this number of looks (inspected steps),
and the element did not change from the first to the last of them. One look is not enough: an
element that alternates between two stored numbers is found unchanged half of the time."""
KEPT = 120
"""Largest number of stored looks. With more, every second look is dropped: the stored document of a
long run stays small, at half the time resolution."""
PROBE = "watch"
SOURCE = 'docs/training.md "Watch a run while it trains"'


@dataclass(frozen=True)
class Followed:
    """A watched leaf and its sampled elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the stored dtype."""
    places: np.ndarray
    """Flat indices of the sampled elements (k,)."""

    @property
    def size(self) -> int:
        """Number of elements of the whole leaf, sampled or not."""
        return math.prod(self.shape)

    @property
    def family(self) -> str:
        """Family of the parameter: norms, biases, matrices, embeddings, ..."""
        return family_of(self.name, self.shape)


def follow(name: str, shape: tuple[int, ...], dtype: str) -> Followed:
    """Return a leaf together with its sampled elements, which `frozen_watch.places` chooses."""
    return Followed(name, shape, dtype, places(name, shape, FOLLOWED))


class Seen(NamedTuple):
    """Sampled elements of a leaf before and after one optimiser step, each (k,)."""

    before: np.ndarray
    after: np.ndarray
    meant: np.ndarray
    """Whether an update of the element was due, bool: its gradient (torch) was not 0, or its update
    (optax) not negligible."""


class LeafLook(NamedTuple):
    """Result of one look (inspected step) at one leaf; only sampled elements are counted."""

    unchanged: float
    """Fraction of the elements due for an update that this step left unchanged."""
    frozen: float
    """Fraction of the elements ever due for an update that are frozen (see `PATIENCE`); NaN in the
    first `PATIENCE` - 1 looks at the leaf."""
    elements: int
    """Number of elements ever due for an update, the denominator of `frozen`."""
    update: float
    """Root mean square of the change, divided by the root mean square of the values before the
    step; NaN if all values are 0."""


Take: TypeAlias = Callable[[int, dict[str, Seen], dict[str, str]], None]
"""Function that receives a look: step number, samples by leaf name, and the reason by leaf name why
there is no sample."""


@dataclass(frozen=True)
class Look:
    """Result of one look (inspected step) at all leaves."""

    step: int
    leaves: Mapping[str, LeafLook]
    """Results by leaf name."""
    families: Mapping[str, LeafLook]
    """Averages by family (norms, matrices, ...), weighted by leaf size; `elements` is the sum."""


@dataclass
class _Count:
    """State of a leaf between looks: arrays (k,) over its sampled elements."""

    last: np.ndarray
    """Values after the last look."""
    still: np.ndarray
    """Number of looks with an update due since the element last changed, int."""
    ever: np.ndarray
    """Whether an update was ever due, bool."""
    looks: int = 0
    """Number of looks at the leaf."""


@dataclass
class Watched:
    """All results of watching one training run."""

    leaves: Mapping[str, Followed]
    """Watched leaves by name."""
    every: int = EVERY
    """Number of optimiser steps between two looks."""
    looks: list[Look] = field(default_factory=list)
    """Stored looks, oldest first."""
    absent: dict[str, str] = field(default_factory=dict)
    """Reasons by leaf name, for leaves that the last look could not measure or that are not
    watched."""
    step: int = 0
    """Step of the newest look."""
    _counts: dict[str, _Count] = field(default_factory=dict)
    """State by leaf name."""

    def look(
        self, step: int, seen: Mapping[str, Seen], absent: Mapping[str, str] | None = None
    ) -> Look:
        """Evaluate a look (inspected step); store the result and return it.

        Args:
            step: optimiser steps so far.
            seen: sampled elements by leaf name, in the order of `Followed.places`.
            absent: reason by name for each leaf that is not in `seen`; None: there is none.
        """
        absent, found = dict(absent or {}), {}
        for name, part in seen.items():
            if not (np.isfinite(part.before).all() and np.isfinite(part.after).all()):
                absent[name] = "it has values that are NaN or infinite"
            elif not part.meant.any():
                absent[name] = "no update was due for the sampled elements"
            else:
                found[name] = self._leaf(name, part)
        never = {n: why for n, why in self.absent.items() if n not in self.leaves}
        self.absent = {**never, **absent}
        self.step = step
        look = Look(step, found, self._families(found))
        self.looks.append(look)
        if len(self.looks) > KEPT:
            # Counted from the end, so that the newest look is kept.
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
        """Return the newest result by leaf name, for each leaf that was ever measured."""
        newest: dict[str, LeafLook] = {}
        for look in self.looks:
            newest |= look.leaves
        return newest

    def frozen(self) -> list[str]:
        """Return the names of the frozen leaves.

        Their frozen fraction is above one half by more than two standard errors.
        """
        return [n for n, leaf in self.latest().items() if self._stands_still(n, leaf)]

    def _stands_still(self, name: str, leaf: LeafLook) -> bool:
        # The comparison is False for NaN, a leaf with too few looks.
        middle, error = _estimate(leaf.frozen, leaf.elements, self.leaves[name].size)
        return middle - 2 * error > FROZEN_SHARE

    def warning(self, framework: str) -> str:
        """Return a warning with the frozen leaves and remedies; empty if no leaf is frozen.

        Args:
            framework: "torch" or "jax", for the text of the remedies.
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
            f"due. {self.remedy(framework)}"
        )

    def remedy(self, framework: str) -> str:
        """Return advice for the frozen leaves as text; empty if no leaf is frozen."""
        frozen = [(x.family, x.size, x.dtype) for x in map(self.leaves.__getitem__, self.frozen())]
        return advice(frozen, sum(x.size for x in self.leaves.values()), framework)

    def findings(self, framework: str) -> list[Finding]:
        """Return one finding per watched leaf, with its frozen fraction; NaN if not measured."""
        still, remedy = set(self.frozen()), self.remedy(framework)
        latest, rows = self.latest(), []
        for name, leaf in self.leaves.items():
            look = latest.get(name)
            value = math.nan if look is None else look.frozen
            message = self._message(name, look)
            # A fraction above one half by less than two standard errors gives no warning.
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
            return f"not measured: only {looks} of the {PATIENCE} looks that are needed"
        error = error_of(look.frozen, look.elements, self.leaves[name].size)
        sampled = f", sampling error {error:.1%}" if error else ""
        return (
            f"{look.frozen:.0%} of {look.elements} elements have not changed over {PATIENCE} "
            f"looks although updates were due{sampled}"
        )


def error_of(share: float, elements: int, size: int) -> float:
    """Return the standard error of a fraction measured in a sample; 0 if all elements are in it.

    Args:
        share: the fraction.
        elements: number of elements in the sample.
        size: number of elements of the leaf.
    """
    return _estimate(share, elements, size)[1]


def _estimate(share: float, elements: int, size: int) -> tuple[float, float]:
    """Return the centre and standard error of a fraction's Agresti-Coull interval."""
    if elements >= size or math.isnan(share):
        return share, 0.0
    # Two successes and two failures are added, so that 3 frozen of 3 sampled is not certain.
    count = elements + 4
    middle = (share * elements + 2) / count
    return middle, math.sqrt(middle * (1 - middle) / count)
