"""Layouts: rearrangements of the elements of an array, such as a transposition.

A layout is a reshape, a permutation of axes and another reshape. It can turn (out, in) weights into
(in, out) kernels, matrices (H*d, D) into attention kernels (D, H, d), and reorder batch, head and
time axes. A layout is linear, so it also maps gradients.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from parity.engine.measure.metrics import relative_l2
from parity.engine.pairing.fingerprints import fingerprint, sample_positions

Shape = tuple[int, ...]
# A wrong layout of generic values already fails on a few elements.
SAMPLES = 48
"""Number of elements compared before the whole arrays are."""
# Blocks, so that large arrays are not copied.
BLOCK = 1 << 18
"""Number of elements compared at once in a full comparison."""
MOST_AXES = 6
"""Largest number of axes of an array for which permutations are tried (720 of them); for arrays of
more axes only reshapes are tried."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rearrangement of an array: reshape `source` to `before`, transpose by `axes`, reshape to
    `target`."""

    source: Shape
    before: Shape
    axes: tuple[int, ...]
    target: Shape

    def __post_init__(self):
        sizes = {math.prod(shape) for shape in (self.source, self.before, self.target)}
        if len(sizes) > 1 or sorted(self.axes) != list(range(len(self.before))):
            raise ValueError(
                f"a layout (reshape, transpose, reshape) needs three shapes with equally many "
                f"elements and a permutation of the axes of the second, not {self.source}, "
                f"{self.before}, {self.target} and {self.axes}; `find_layout` returns valid ones"
            )

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return `x`, of shape `source`, rearranged to shape `target`; a view if NumPy allows it.

        Raises:
            ValueError: `x` has another shape.
        """
        if x.shape != self.source:
            raise ValueError(
                f"a layout of arrays of shape {self.source} got an array of shape {x.shape}; "
                f"find the layout of this array with `find_layout`"
            )
        return x.reshape(self.before).transpose(self.axes).reshape(self.target)

    @property
    def reversed(self) -> Layout:
        """The layout from `target` to `source`."""
        permuted = tuple(self.before[axis] for axis in self.axes)
        back = tuple(int(axis) for axis in np.argsort(self.axes))
        return Layout(self.target, permuted, back, self.source)

    def inverse(self, y: np.ndarray) -> np.ndarray:
        """Return `y`, of shape `target`, rearranged back to shape `source`."""
        return self.reversed(y)

    @property
    def is_identity(self) -> bool:
        """Whether the layout changes nothing."""
        return self.source == self.target and self.axes == tuple(range(len(self.before)))

    def text(self) -> str:
        """Describe the layout, such as `reshaped (4, 8, 16) -> (32, 16), transposed (1, 0)`."""
        if self.is_identity:
            return "unchanged"
        if self.axes == tuple(range(len(self.before))):
            return f"reshaped {self.source} -> {self.target}"
        permuted = tuple(self.before[axis] for axis in self.axes)
        parts = [f"transposed {self.axes}"]
        if self.before != self.source:
            parts.insert(0, f"reshaped {self.source} -> {self.before}")
        if permuted != self.target:
            parts.append(f"reshaped {permuted} -> {self.target}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, list[int]]:
        """Return a JSON-serialisable dictionary."""
        return {name: list(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Layout:
        """Return the layout that `to_json` wrote.

        Raises:
            ValueError: a field is missing or unknown.
        """
        if set(entry) != set(cls.__slots__):
            raise ValueError(
                f"expected the fields {', '.join(cls.__slots__)} of a layout, got "
                f"{', '.join(sorted(entry)) or 'none'}; store what `Layout.to_json` returns"
            )
        return cls(**{name: tuple(int(n) for n in entry[name]) for name in cls.__slots__})


def identity(shape: Sequence[int]) -> Layout:
    """Return the layout of an array of `shape` that changes nothing."""
    shape = tuple(shape)
    return Layout(shape, shape, tuple(range(len(shape))), shape)


def transposition(shape: Sequence[int], axes: Sequence[int]) -> Layout:
    """Return the layout that permutes the axes of `shape` to the order `axes`."""
    shape = tuple(shape)
    return Layout(shape, shape, tuple(axes), tuple(shape[axis] for axis in axes))


@runtime_checkable
class Criterion(Protocol):
    """Criterion for two arrays to agree, as three tests; the cheap ones are applied first."""

    def possible(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether `source` may agree with `target` in some order of its elements."""
        ...

    def sampled(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether two arrays may agree, given some of their elements at the same places."""
        ...

    def agrees(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether two arrays of one shape agree."""
        ...


class Exact:
    """Criterion that all values are equal, whatever their dtypes; NaN agrees with NaN."""

    def possible(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether the fingerprints of both arrays are equal."""
        return fingerprint(source) == fingerprint(target)

    def sampled(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether the samples are equal."""
        return self.agrees(source, target)

    def agrees(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether all elements are equal."""
        return same_values(source, target)


@dataclass(frozen=True)
class Near:
    """Criterion that `distance(source, target)`, by default relative L2, is at most `tolerance`."""

    tolerance: float
    distance: Callable[[np.ndarray, np.ndarray], float] = relative_l2

    def possible(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether sums and L2 norms, which no rearrangement changes, are close enough.

        If |a - b| <= t |b|, the norms differ by at most t |b| (triangle inequality) and the sums by
        at most sqrt(size) t |b| (Cauchy-Schwarz). Always True for distances other than relative L2.
        """
        if self.distance is not relative_l2:
            return True
        a, b = _sums(source), _sums(target)
        if not all(map(math.isfinite, (*a, *b))):
            return False
        # Slack for the rounding of the sums themselves: size times float64's unit roundoff.
        slack = (self.tolerance + source.size * 2.0**-52) * max(a[1], b[1])
        return abs(a[1] - b[1]) <= slack and abs(a[0] - b[0]) <= slack * math.sqrt(source.size)

    def sampled(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether the samples are clearly closer than unrelated arrays, which differ by 1.4
        (relative L2).

        A few samples may contain most of the difference, so they get a wider tolerance than the
        whole array.
        """
        return self.distance(source, target) <= max(0.5, 8 * self.tolerance)

    def agrees(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Return whether the distance is at most the tolerance; NaN never is."""
        return self.distance(source, target) <= self.tolerance


EXACT = Exact()


def same_values(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether two arrays have equal shapes and values; NaN equals NaN, dtypes may differ."""
    if x.shape != y.shape:
        return False
    if x.ndim == 0 or x.size <= BLOCK or len(x) == 1:
        if x.dtype != y.dtype:
            # float64 represents all values of the dtypes in use exactly.
            x, y = _wide(x), _wide(y)
        return np.array_equal(x, y, equal_nan=True)
    # Blocks of rows: in a transposed array one cache line holds elements of 16 rows.
    rows = max(1, BLOCK * len(x) // x.size)
    starts = range(0, len(x), rows)
    return all(same_values(x[i : i + rows], y[i : i + rows]) for i in starts)


def find_layouts(
    source: np.ndarray, target: np.ndarray, criterion: Criterion = EXACT
) -> Iterator[Layout]:
    """Yield every layout (reshape and transposition) under which `source` agrees with `target`, the
    simplest first.

    There are several if values repeat; in a constant array every transposition fits.
    """
    if source.size != target.size or not source.size or not criterion.possible(source, target):
        return
    positions = sample_positions(target.size, SAMPLES)
    elements = target[np.unravel_index(positions, target.shape)] if target.ndim else target
    for layout in candidates(source.shape, target.shape):
        if criterion.sampled(take(layout, source, positions), np.reshape(elements, -1)) and (
            criterion.agrees(layout(source), target)
        ):
            yield layout


def find_layout(
    source: np.ndarray, target: np.ndarray, criterion: Criterion = EXACT
) -> Layout | None:
    """Return the simplest layout (reshape and transposition) under which `source` agrees with
    `target`; None if there is none."""
    return next(find_layouts(source, target, criterion), None)


def take(layout: Layout, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return `layout(x).reshape(-1)[positions]` without computing the other elements."""
    permuted = tuple(layout.before[axis] for axis in layout.axes)
    if not permuted:
        return x.reshape(-1)[positions]
    there = np.unravel_index(positions, permuted)
    back = np.argsort(layout.axes)
    flat = np.ravel_multi_index([there[axis] for axis in back], layout.before)
    return x[np.unravel_index(flat, x.shape)] if x.ndim else x.reshape(-1)[flat]


@functools.lru_cache(maxsize=4096)
def candidates(source: Shape, target: Shape) -> tuple[Layout, ...]:
    """Return the layouts that can map shape `source` to shape `target`, the simplest first.

    The first is a plain reshape. The others permute the axes of `source`, possibly after splitting
    axes as the sizes of `target` suggest, so that neighbours merge into the axes of `target`. Axes
    of size 1 are ignored. Empty if the sizes differ.
    """
    if math.prod(source) != math.prod(target):
        return ()
    plain = Layout(source, source, tuple(range(len(source))), target)
    wide, goal = (tuple(n for n in shape if n > 1) for shape in (source, target))
    if not 1 < max(len(wide), len(goal)) <= MOST_AXES:
        return (plain,)
    layouts = {plain: None}
    for before in _refinements(wide, goal):
        first = source if before == wide and len(wide) == len(source) else before
        for axes in itertools.permutations(range(len(before))):
            moved = axes != tuple(range(len(axes)))
            if moved and _merges([before[axis] for axis in axes], goal):
                layouts.setdefault(Layout(source, first, axes, target))
    return tuple(layouts)


def _refinements(shape: Shape, goal: Shape) -> list[Shape]:
    """Return `shape`, and finer shapes of the same size, with axes split, whose axes may merge into
    those of `goal` after a permutation."""
    shapes = {shape: None}
    for order in itertools.permutations(goal):
        if _merges(order, shape):
            shapes.setdefault(order)
    for axis, size in enumerate(shape):
        factors = {math.gcd(size, other) for other in goal} | {
            other // math.gcd(size, other) for other in goal
        }
        for factor in sorted(factors):
            if 1 < factor < size and size % factor == 0 and len(shape) < MOST_AXES:
                for pair in ((factor, size // factor), (size // factor, factor)):
                    shapes.setdefault((*shape[:axis], *pair, *shape[axis + 1 :]))
    return list(shapes)


def _merges(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Return whether products of neighbouring axes of `fine` give the axes of `coarse`, in
    order."""
    product, rest = 1, iter(coarse)
    wanted = next(rest, None)
    for size in fine:
        product *= size
        if wanted is None or product > wanted:
            return False
        if product == wanted:
            product, wanted = 1, next(rest, None)
    return product == 1 and wanted is None


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float64 else x.astype(np.float64)


def _sums(x: np.ndarray) -> tuple[float, float]:
    """Return the sum and the L2 norm of an array, in float64."""
    wide = _wide(x)
    return float(wide.sum()), float(np.linalg.norm(wide))
