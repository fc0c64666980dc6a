"""Layouts: how the elements of one array lie in another of the same elements.

A layout is a reshape, a permutation of axes and another reshape. That covers (in, out) kernels of
(out, in) weights, attention kernels (D, H, d) of matrices (H*d, D), and the batch, head and time
axes that two libraries order differently. It is linear, so it also maps gradients.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from parity.engine.fingerprints import fingerprint, sample_positions
from parity.engine.metrics import relative_l2

Shape = tuple[int, ...]
SAMPLES = 48
"""Elements compared before all are: a wrong layout of generic values fails on the first few."""
BLOCK = 1 << 18
"""Elements compared in full at once, so that no copy of a large array is made."""
MOST_AXES = 6
"""Axes up to which permutations are tried: 720 of them; above, only what needs none."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Reshape `source` to `before`, transpose by `axes`, reshape to `target`."""

    source: Shape
    before: Shape
    axes: tuple[int, ...]
    target: Shape

    def __post_init__(self):
        sizes = {math.prod(shape) for shape in (self.source, self.before, self.target)}
        if len(sizes) > 1 or sorted(self.axes) != list(range(len(self.before))):
            raise ValueError(
                f"a layout needs three shapes of one size and a permutation of the axes of the "
                f"second, not {self.source}, {self.before}, {self.target} and {self.axes}; "
                f"`find_layout` returns valid ones"
            )

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return `x` of shape `source` as it lies in `target`; a view where NumPy can give one.

        Raises:
            ValueError: `x` has another shape.
        """
        if x.shape != self.source:
            raise ValueError(
                f"a layout of {self.source} got an array of shape {x.shape}; "
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
        """Return `y` of shape `target` as it lies in `source`."""
        return self.reversed(y)

    @property
    def is_identity(self) -> bool:
        """Whether source and target are one array."""
        return self.source == self.target and self.axes == tuple(range(len(self.before)))

    def text(self) -> str:
        """Return it in words, such as `reshaped (4, 8, 16) -> (32, 16), transposed (1, 0)`."""
        if self.is_identity:
            return "as it is"
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
        """Return it as what JSON can hold."""
        return {name: list(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Layout:
        """Return the layout that `to_json` wrote.

        Raises:
            ValueError: a field is missing or another one is there.
        """
        if set(entry) != set(cls.__slots__):
            raise ValueError(
                f"expected the fields {', '.join(cls.__slots__)} of a layout, got "
                f"{', '.join(sorted(entry)) or 'none'}; write the file again"
            )
        return cls(**{name: tuple(int(n) for n in entry[name]) for name in cls.__slots__})


def identity(shape: Sequence[int]) -> Layout:
    """Return the layout of an array in itself."""
    shape = tuple(shape)
    return Layout(shape, shape, tuple(range(len(shape))), shape)


def transposition(shape: Sequence[int], axes: Sequence[int]) -> Layout:
    """Return the layout that orders the axes of `shape` as `axes` says."""
    shape = tuple(shape)
    return Layout(shape, shape, tuple(axes), tuple(shape[axis] for axis in axes))


@runtime_checkable
class Criterion(Protocol):
    """When two arrays count as the same; what is cheap about it is asked first."""

    def possible(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether some order of the elements of `source` may agree with `target`."""
        ...

    def sampled(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether some elements, as they would come to lie, leave agreement possible."""
        ...

    def agrees(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether two arrays of one shape agree."""
        ...


class Exact:
    """The same values, whatever dtype they are held in; NaN agrees with NaN."""

    def possible(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether both have one fingerprint."""
        return fingerprint(source) == fingerprint(target)

    def sampled(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether the samples are equal."""
        return self.agrees(source, target)

    def agrees(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether all are equal."""
        return same_values(source, target)


@dataclass(frozen=True)
class Near:
    """Within `tolerance` by a distance relative to the target, such as relative L2."""

    tolerance: float
    distance: Callable[[np.ndarray, np.ndarray], float] = relative_l2

    def possible(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether sums and sums of squares are near enough.

        No order of the elements changes either, and where |a - b| <= t |b| the triangle inequality
        holds the norms to t |b|, and Cauchy-Schwarz the sums to sqrt(size) t |b|.
        """
        if self.distance is not relative_l2:
            return True
        a, b = _sums(source), _sums(target)
        if not all(map(math.isfinite, (*a, *b))):
            return False
        # Room for the rounding of the sums themselves: size of float64's unit roundoff, generous.
        slack = (self.tolerance + source.size * 2.0**-52) * max(a[1], b[1])
        return abs(a[1] - b[1]) <= slack and abs(a[0] - b[0]) <= slack * math.sqrt(source.size)

    def sampled(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether the samples are nearer than unrelated ones, whose relative L2 is about 1.4.

        The tolerance is of the whole array: a few samples may hold more than their share of the
        difference, so they are not held to it.
        """
        return self.distance(source, target) <= max(0.5, 8 * self.tolerance)

    def agrees(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether the distance is at most the tolerance; NaN is not."""
        return self.distance(source, target) <= self.tolerance


EXACT = Exact()


def same_values(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays of one shape hold equal values, block by block; NaN equals NaN."""
    if x.shape != y.shape:
        return False
    if x.ndim == 0 or x.size <= BLOCK or len(x) == 1:
        if x.dtype != y.dtype:
            # float64 holds every value of what is compared here, so widening decides nothing.
            x, y = _wide(x), _wide(y)
        return np.array_equal(x, y, equal_nan=True)
    # Several rows at once: of a transposed array each line of the cache has elements of 16 of them.
    rows = max(1, BLOCK * len(x) // x.size)
    starts = range(0, len(x), rows)
    return all(same_values(x[i : i + rows], y[i : i + rows]) for i in starts)


def find_layouts(
    source: np.ndarray, target: np.ndarray, criterion: Criterion = EXACT
) -> Iterator[Layout]:
    """Yield every layout under which `source` agrees with `target`, the simplest first.

    Several are yielded where the values allow several: every transposition of a constant.
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
    """Return the simplest layout under which `source` agrees with `target`; None without one."""
    return next(find_layouts(source, target, criterion), None)


def take(layout: Layout, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return `layout(x).reshape(-1)[positions]` without laying out the rest."""
    permuted = tuple(layout.before[axis] for axis in layout.axes)
    if not permuted:
        return x.reshape(-1)[positions]
    there = np.unravel_index(positions, permuted)
    back = np.argsort(layout.axes)
    flat = np.ravel_multi_index([there[axis] for axis in back], layout.before)
    return x[np.unravel_index(flat, x.shape)] if x.ndim else x.reshape(-1)[flat]


@functools.lru_cache(maxsize=4096)
def candidates(source: Shape, target: Shape) -> tuple[Layout, ...]:
    """Return the layouts that could take `source` to `target`, the simplest first.

    They are: as it is; reshaped; the axes permuted; and, with one axis of `source` split where the
    sizes of `target` suggest it, permuted so that neighbours merge into axes of `target`. Axes of
    size 1 play no part.
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
    """Return `shape`, and it with axes split so that its parts can make up `goal`."""
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
    """Whether runs of neighbours in `fine` multiply to the entries of `coarse`, in order."""
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
    """Return the sum and the norm, in float64."""
    wide = _wide(x)
    return float(wide.sum()), float(np.linalg.norm(wide))
