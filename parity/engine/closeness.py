"""How near every stage of one side is to every stage of the other, however its axes lie.

Stages are compared at a sample of their elements, all of one shape with all of another in one
matrix product: 300 by 300 stages take a fraction of a second. What is decided by it is measured on
all elements afterwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parity.engine.fingerprints import sample_positions
from parity.engine.layouts import Layout, Near, candidates, find_layout, take

EQUAL = 1e-5
"""Relative L2 up to which two stages hold the same value. A hundred float32 unit roundoffs: what
rounding leaves between two programs that sum in other orders, measured 1e-7 to 1e-6 on small
models, and far below what a bug or the next layer does to a stage."""
SAMPLE = 4096
"""Elements compared of each stage: an estimate of a distance good to about 2 %."""
MASKED = 1e30
"""Values beyond it are masks, not numbers; their squares would drown all others."""
CLEARLY = 0.95
"""A layout is preferred to a simpler one only where it is nearer by more than this factor."""

SLACK = 16
"""Room for sums of two arrays that are equal, in units of their relative L2."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Closeness:
    """Distances of all stages of an original, (rows), to all of its port, (columns)."""

    distance: np.ndarray
    """Relative L2, of the original's size, under the nearest layout; infinite where the sizes
    differ. (original, port)"""
    layouts: dict[tuple[int, int], Layout]
    """By (row, column): the nearest layout from the original to the port; where sizes are equal."""
    telling: tuple[np.ndarray, np.ndarray]
    """Which stages of either side can be known by their values: not those that hold one or two
    values, such as zeros, masks and scalars."""


def closeness(original: Sequence[np.ndarray], port: Sequence[np.ndarray]) -> Closeness:
    """Compare every stage with every other of its size."""
    distance = np.full((len(original), len(port)), math.inf)
    layouts: dict[tuple[int, int], Layout] = {}
    rows, columns = _by_shape(original), _by_shape(port)
    for source, i in rows.items():
        for target, j in columns.items():
            if math.prod(source) == math.prod(target) and math.prod(source):
                near, chosen = _nearest([original[n] for n in i], [port[n] for n in j])
                distance[np.ix_(i, j)] = near
                options = plain_layouts(source, target)
                for (a, b), option in np.ndenumerate(chosen):
                    layouts[i[a], j[b]] = options[option]
    telling = tuple(np.array([_is_telling(x) for x in side], bool) for side in (original, port))
    return Closeness(distance, layouts, (telling[0], telling[1]))


def entangled(
    original: Sequence[np.ndarray],
    port: Sequence[np.ndarray],
    rows: Sequence[int],
    columns: Sequence[int],
    equal: float = EQUAL,
) -> dict[tuple[int, int], Layout]:
    """Return the pairs of stages that are equal under a layout that is none of the plain ones, such
    as heads interleaved in one axis.

    Args:
        original: every stage of one side.
        port: every stage of the other.
        rows: which of the original's to try.
        columns: which of the port's.
        equal: relative L2 up to which they are.
    """
    ours, theirs = _sums([original[i] for i in rows]), _sums([port[j] for j in columns])
    sizes = np.maximum(np.abs(ours)[:, None], np.abs(theirs)[None])
    # Sums of signed numbers may cancel, so the sum of magnitudes is what both are near by.
    room = SLACK * equal * sizes[..., [0, 2, 2]]
    near = np.all(np.abs(ours[:, None] - theirs[None]) <= room, axis=-1)
    out = {}
    for a, b in np.argwhere(near):
        i, j = rows[a], columns[b]
        layout = find_layout(_numbers(original[i]), _numbers(port[j]), Near(equal))
        if layout is not None:
            out[i, j] = layout
    return out


def plain_layouts(source: Shape, target: Shape) -> tuple[Layout, ...]:
    """Return the layouts that split no axis but into axes the other side has, the simplest first.

    After a bug every layout of a stage is wrong, and the nearest of dozens is near by chance; these
    few are what libraries do: heads before or after positions, batch and positions as one axis.
    """
    return tuple(layout for layout, _ in _plain_samples(source, target))


@functools.lru_cache(maxsize=4096)
def _plain_samples(source: Shape, target: Shape) -> tuple[tuple[Layout, np.ndarray], ...]:
    """Return the plain layouts, each with the flat positions its sample has in the source."""
    out: dict[bytes, tuple[Layout, np.ndarray]] = {}
    positions = sample_positions(math.prod(source), SAMPLE)
    numbers = np.arange(math.prod(source)).reshape(source)
    for layout in candidates(source, target):
        before = [n for n in layout.before if n > 1]
        after = [n for n in (layout.before[axis] for axis in layout.axes) if n > 1]
        if before == [n for n in source if n > 1] or after == [n for n in target if n > 1]:
            places = take(layout, numbers, positions)
            # Two ways to write one order of elements are one layout.
            out.setdefault(places.tobytes(), (layout, places))
    return tuple(out.values())


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 of two arrays of one shape; masks that are equal are no difference.

    NaN where either holds a NaN, or an infinity that the other has not.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = _norm(np.where(a == e, 0.0, a - e))
    if not math.isfinite(apart):
        return math.nan
    scale = _norm(e[np.abs(e) < MASKED])
    return apart / scale if scale > 0 else apart


def _nearest(
    original: Sequence[np.ndarray], port: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return distances (o, p) of stages of one shape to stages of one shape, and which of their
    plain layouts each is under."""
    source, target = original[0].shape, port[0].shape
    positions = sample_positions(math.prod(source), SAMPLE)
    y = _numbers(np.stack([x.reshape(-1)[positions] for x in port]))
    best = np.full((len(original), len(port)), math.inf)
    chosen = np.zeros(best.shape, int)
    flat = [x.reshape(-1) for x in original]
    for option, (_, places) in enumerate(_plain_samples(source, target)):
        x = _numbers(np.stack([x[places] for x in flat]))
        apart = _relative(x, y)
        # Of layouts that all agree, or none does, the simplest is meant.
        nearer = (best > EQUAL) & (apart < CLEARLY * best)
        best[nearer], chosen[nearer] = apart[nearer], option
    return best, chosen


def _relative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return |y - x| / |x| for all rows of x (m, n) and y (k, n): (m, k).

    By the binomial formula in float64, whose cancellation ends at 1e-8: below what is asked.
    """
    xx, yy = np.sum(x * x, axis=1)[:, None], np.sum(y * y, axis=1)[None]
    apart = np.sqrt(np.maximum(xx + yy - 2 * (x @ y.T), 0.0))
    scale = np.sqrt(xx)
    # Off an original of zeros nothing is near, and a port of zeros is equal.
    return np.where(scale > 0, apart / np.where(scale > 0, scale, 1.0), yy > 0)


def _by_shape(stages: Sequence[np.ndarray]) -> dict[Shape, list[int]]:
    out: dict[Shape, list[int]] = {}
    for n, stage in enumerate(stages):
        out.setdefault(stage.shape, []).append(n)
    return out


def _numbers(x: np.ndarray) -> np.ndarray:
    """Return an array in float64 with 0 for what is no number."""
    wide = np.asarray(x, np.float64)
    return np.where(np.abs(wide) < MASKED, wide, 0.0)


def _is_telling(x: np.ndarray) -> bool:
    """Whether an array holds more than two values; a sample says so of nearly all that do."""
    sample = x.reshape(-1)[sample_positions(x.size, SAMPLE)]
    return _has_three_values(sample) or (x.size > sample.size and _has_three_values(x))


def _has_three_values(x: np.ndarray) -> bool:
    if x.size < 3:
        return False
    values = _numbers(x)
    low, high = values.min(), values.max()
    return bool(np.any((values != low) & (values != high)))


def _sums(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return norms, sums and sums of magnitudes, (arrays, 3): no layout changes them."""
    out = np.zeros((len(arrays), 3))
    for row, x in zip(out, arrays, strict=True):
        values = _numbers(x)
        row[:] = _norm(values), values.sum(), np.abs(values).sum()
    return out


def _norm(x: np.ndarray) -> float:
    # Not by BLAS, whose threads wait for each other on a busy machine: 50 times slower there.
    return math.sqrt(float(np.sum(np.square(x))))
