"""Distances between all stages of two sides, each after the reshape and transposition (layout) with
the smallest distance.

Stages are compared on a sample of their elements. All stages of one shape are compared with all
stages of another shape in one matrix product: 300 by 300 stages take a fraction of a second. The
caller verifies its decisions on all elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parity.engine.pairing.fingerprints import sample_positions
from parity.engine.pairing.layouts import Layout, Near, candidates, find_layout, take

# About a hundred float32 unit roundoffs. Programs that sum in different orders were measured to
# differ by 1e-7 to 1e-6 on small models. A bug, or the next layer, changes a stage by far more.
EQUAL = 1e-5
"""Relative L2 difference up to which two stages count as equal."""
SAMPLE = 4096
"""Largest number of elements compared per stage; the estimated distance is off by about 2 %."""
# Masks are excluded, since their squares would dominate all others.
MASKED = 1e30
"""Magnitude from which a value counts as a mask rather than a number."""
CLEARLY = 0.95
"""A layout (reshape and transposition) is preferred to a simpler one only if its distance is less
than this fraction of the simpler one's."""

SLACK = 16
"""Factor on the tolerance `equal` when the sums of two arrays are compared in `entangled`."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Closeness:
    """Distances of all stages of the original (rows) to all stages of the port (columns)."""

    distance: np.ndarray
    """Relative L2 difference (original, port), over the original's norm, after the layout (reshape
    and transposition) that makes it smallest; infinite if the numbers of elements differ."""
    layouts: dict[tuple[int, int], Layout]
    """The layout with the smallest distance, from original to port, by (row, column); missing if
    the numbers of elements differ."""
    telling: tuple[np.ndarray, np.ndarray]
    """Booleans for the stages of the original and of the port: True if a stage has more than two
    distinct values, so that it can be identified by them. False for zeros, masks and scalars."""


def closeness(original: Sequence[np.ndarray], port: Sequence[np.ndarray]) -> Closeness:
    """Return the distances between all stages of two sides.

    Only stages with equally many elements are compared; the distance of others is infinite.
    """
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
    """Return pairs of stages that are equal after some reshape and transposition, even an unusual
    one.

    An example is heads interleaved in one axis, which `plain_layouts` does not cover.

    Args:
        original: all stages of the original.
        port: all stages of the port.
        rows: indices of the original's stages to try.
        columns: indices of the port's stages to try.
        equal: relative L2 difference up to which two stages are equal.

    Returns:
        The layout from original to port, by (row, column).
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
    """Return the few rearrangements of one shape to another that are common in libraries, the
    simplest first.

    They permute only whole axes of one of the two shapes. Examples: heads before or after
    positions; batch and positions as one axis. Only these are tried on stages that differ: after a
    bug no layout is right, and one of dozens could be close by chance.
    """
    return tuple(layout for layout, _ in _plain_samples(source, target))


@functools.lru_cache(maxsize=4096)
def _plain_samples(source: Shape, target: Shape) -> tuple[tuple[Layout, np.ndarray], ...]:
    """Return each of `plain_layouts` with an integer array: for each sampled element of the target,
    its position in the flattened source."""
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
    """Return the relative L2 difference of two arrays of one shape.

    Equal elements count as no difference, even if infinite. Masked elements (magnitude >=
    `MASKED`) count in the difference, but not in the norm of `expected` that it is divided by; a
    norm of 0 is replaced by 1. The result is NaN if an array holds a NaN or an infinity that the
    other lacks.
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
    """Return the smallest distances over the plain layouts, and the indices in `plain_layouts` of
    the layouts that give them: two arrays (original, port).

    All stages of the original have one shape, and so have all stages of the port.
    """
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
    """Return |y - x| / |x| for all rows of x (m, n) and y (k, n), as an array (m, k).

    Computed as x x + y y - 2 x y in float64. Cancellation limits the result to about 1e-8, which is
    accurate enough.
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
    """Return an array in float64, with masked elements (magnitude >= `MASKED`) and NaN set to 0."""
    wide = np.asarray(x, np.float64)
    return np.where(np.abs(wide) < MASKED, wide, 0.0)


def _is_telling(x: np.ndarray) -> bool:
    """Return whether an array has more than two distinct values; a sample is tested first."""
    sample = x.reshape(-1)[sample_positions(x.size, SAMPLE)]
    return _has_three_values(sample) or (x.size > sample.size and _has_three_values(x))


def _has_three_values(x: np.ndarray) -> bool:
    if x.size < 3:
        return False
    values = _numbers(x)
    low, high = values.min(), values.max()
    return bool(np.any((values != low) & (values != high)))


def _sums(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return L2 norm, sum and sum of magnitudes of each array, (arrays, 3).

    A layout (reordering of the elements) changes none of the three.
    """
    out = np.zeros((len(arrays), 3))
    for row, x in zip(out, arrays, strict=True):
        values = _numbers(x)
        row[:] = _norm(values), values.sum(), np.abs(values).sum()
    return out


def _norm(x: np.ndarray) -> float:
    # Not np.linalg.norm: on a busy machine BLAS threads wait for each other, 50 times slower.
    return math.sqrt(float(np.sum(np.square(x))))
