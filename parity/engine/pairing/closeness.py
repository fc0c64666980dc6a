"""Distances between all stages of two sides, each under the nearest layout.

Stages are compared on a sample of their elements, all stages of one shape with all of another in
one matrix product: 300 by 300 stages take a fraction of a second. Decisions made this way are
verified on all elements afterwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parity.engine.pairing.fingerprints import sample_positions
from parity.engine.pairing.layouts import Layout, Near, candidates, find_layout, take

# A hundred float32 unit roundoffs. Two programs that sum in different orders differ by 1e-7 to 1e-6
# on small models (measured); a bug, or the next layer, changes a stage by far more.
EQUAL = 1e-5
"""Relative L2 up to which two stages have the same value."""
SAMPLE = 4096
"""Elements compared per stage, which estimates a distance to about 2 %."""
# Their squares would dominate all others.
MASKED = 1e30
"""Magnitude from which values are masks rather than numbers."""
CLEARLY = 0.95
"""A layout is preferred to a simpler one only if its distance is smaller by this factor."""

SLACK = 16
"""Slack for sums over two equal arrays, in units of their relative L2."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Closeness:
    """Distances of all stages of the original (rows) to all stages of the port (columns)."""

    distance: np.ndarray
    """Relative L2 (original, port) under the nearest layout, over the original's norm; infinite if
    sizes differ."""
    layouts: dict[tuple[int, int], Layout]
    """Nearest layout from the original to the port by (row, column), where sizes are equal."""
    telling: tuple[np.ndarray, np.ndarray]
    """Booleans for the stages of each side: whether a stage can be identified by its values, as it
    has more than two distinct ones. Zeros, masks and scalars cannot."""


def closeness(original: Sequence[np.ndarray], port: Sequence[np.ndarray]) -> Closeness:
    """Compute the distances between all stages of equal size."""
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
    """Return pairs of stages that are equal under a layout other than the plain ones, such as heads
    interleaved in one axis.

    Args:
        original: all stages of one side.
        port: all stages of the other.
        rows: stages of the original to try.
        columns: stages of the port to try.
        equal: relative L2 up to which two stages are equal.
    """
    ours, theirs = _sums([original[i] for i in rows]), _sums([port[j] for j in columns])
    sizes = np.maximum(np.abs(ours)[:, None], np.abs(theirs)[None])
    # Sums of signed numbers may cancel, so their tolerance is relative to the sum of magnitudes.
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
    """Return the layouts that split axes only into axes of the other side, the simplest first.

    After a bug every layout of a stage is wrong, and the nearest of dozens is near by chance. These
    few are common in libraries: heads before or after positions, batch and positions as one axis.
    """
    return tuple(layout for layout, _ in _plain_samples(source, target))


@functools.lru_cache(maxsize=4096)
def _plain_samples(source: Shape, target: Shape) -> tuple[tuple[Layout, np.ndarray], ...]:
    """Return the plain layouts, each with the source positions of the sample."""
    out: dict[bytes, tuple[Layout, np.ndarray]] = {}
    positions = sample_positions(math.prod(source), SAMPLE)
    numbers = np.arange(math.prod(source)).reshape(source)
    for layout in candidates(source, target):
        before = [n for n in layout.before if n > 1]
        after = [n for n in (layout.before[axis] for axis in layout.axes) if n > 1]
        if before == [n for n in source if n > 1] or after == [n for n in target if n > 1]:
            places = take(layout, numbers, positions)
            # Two layouts with the same order of elements are the same.
            out.setdefault(places.tobytes(), (layout, places))
    return tuple(out.values())


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the relative L2 of two arrays of one shape; equal masks count as no difference.

    NaN if either holds a NaN, or an infinity that the other lacks.
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
    """Return distances (o, p) between stages of one shape each, and the index of the plain layout
    that achieves each distance."""
    source, target = original[0].shape, port[0].shape
    positions = sample_positions(math.prod(source), SAMPLE)
    y = _numbers(np.stack([x.reshape(-1)[positions] for x in port]))
    best = np.full((len(original), len(port)), math.inf)
    chosen = np.zeros(best.shape, int)
    flat = [x.reshape(-1) for x in original]
    for option, (_, places) in enumerate(_plain_samples(source, target)):
        x = _numbers(np.stack([x[places] for x in flat]))
        apart = _relative(x, y)
        # If several layouts agree, or none does, take the simplest.
        nearer = (best > EQUAL) & (apart < CLEARLY * best)
        best[nearer], chosen[nearer] = apart[nearer], option
    return best, chosen


def _relative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return |y - x| / |x| for all rows of x (m, n) and y (k, n): (m, k).

    Expands the square in float64. Cancellation limits it to about 1e-8, below what is needed.
    """
    xx, yy = np.sum(x * x, axis=1)[:, None], np.sum(y * y, axis=1)[None]
    apart = np.sqrt(np.maximum(xx + yy - 2 * (x @ y.T), 0.0))
    scale = np.sqrt(xx)
    # Nothing is close to an original of zeros, except a port of zeros, which is equal.
    return np.where(scale > 0, apart / np.where(scale > 0, scale, 1.0), yy > 0)


def _by_shape(stages: Sequence[np.ndarray]) -> dict[Shape, list[int]]:
    out: dict[Shape, list[int]] = {}
    for n, stage in enumerate(stages):
        out.setdefault(stage.shape, []).append(n)
    return out


def _numbers(x: np.ndarray) -> np.ndarray:
    """Return an array in float64 with 0 in place of masks and NaN."""
    wide = np.asarray(x, np.float64)
    return np.where(np.abs(wide) < MASKED, wide, 0.0)


def _is_telling(x: np.ndarray) -> bool:
    """Return whether an array has more than two distinct values; a sample usually shows it."""
    sample = x.reshape(-1)[sample_positions(x.size, SAMPLE)]
    return _has_three_values(sample) or (x.size > sample.size and _has_three_values(x))


def _has_three_values(x: np.ndarray) -> bool:
    if x.size < 3:
        return False
    values = _numbers(x)
    low, high = values.min(), values.max()
    return bool(np.any((values != low) & (values != high)))


def _sums(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return norms, sums and sums of magnitudes, (arrays, 3), which no layout changes."""
    out = np.zeros((len(arrays), 3))
    for row, x in zip(out, arrays, strict=True):
        values = _numbers(x)
        row[:] = _norm(values), values.sum(), np.abs(values).sum()
    return out


def _norm(x: np.ndarray) -> float:
    # Not BLAS: on a busy machine its threads wait for each other, which is 50 times slower.
    return math.sqrt(float(np.sum(np.square(x))))
