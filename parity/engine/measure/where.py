"""Descriptions of where in an array elements differ, such as in which rows, heads or chunks.

All functions are pure. Source: docs/reports.md "What broke, and where".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Below 1, because in a wrong row some elements are correct by accident.
FILLED = 0.9
"""Smallest fraction of a region's compared elements that must differ for the description to say
that the region differs as a whole."""
REGIONS = 3
"""Largest number of regions listed; if there are more, one region that contains all differences is
described."""
ALL_PADDING = "all padding"
"""Phrase for differences that lie in padding only."""
RANGES = 4
"""Largest number of index ranges listed on one axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Name of an axis, and the equal blocks that its indices form.

    Attributes:
        name: singular, such as "position".
        block: name of a block, singular, such as "chunk"; empty if there are none.
        size: indices per block; the last block of an axis may be shorter. 0 without blocks.
    """

    name: str
    block: str = ""
    size: int = 0


@dataclass(frozen=True)
class _Region:
    """Part of an array: the product of one set of indices per axis.

    `share` is the fraction of the region's compared elements that differ.
    """

    indices: tuple[np.ndarray, ...]
    share: float


def where(
    differs: np.ndarray,
    axes: Sequence[Axis] = (),
    valid: np.ndarray | None = None,
    compared: np.ndarray | None = None,
) -> str:
    """Describe where elements differ, such as "row 0, positions 49-52, all channels: all padding".

    Args:
        differs: which elements differ, booleans of any shape.
        axes: names of the axes; if their number does not fit, axis 0, axis 1, ... are used.
        valid: booleans over the leading axes, False at padding; None: padding is not mentioned.
        compared: booleans over the leading axes, False where elements were not compared; None: all
            were compared. Either mask is ignored if it does not fit the shape of `differs`.

    Returns:
        The description, without a full stop; empty for a scalar, or if nothing differs.
    """
    differs = np.asarray(differs, bool)
    if not differs.ndim or not differs.any():
        return ""
    if len(axes) != differs.ndim:
        axes = [Axis(f"axis {k}") for k in range(differs.ndim)]
    cared = _expanded(compared, differs.shape)
    differs = differs & cared
    if not differs.any():
        return ""
    regions, full = _regions(differs, cared)
    reach = tuple(np.flatnonzero(_any_but(cared, k)) for k in range(differs.ndim))
    padding = _padding(differs, cared, valid)
    if regions[0].indices and all(
        i.size >= n.size for i, n in zip(regions[0].indices, reach, strict=True)
    ):
        share = regions[0].share
        some = "everywhere" if share >= FILLED else f"{_percent(share)} of all elements"
        return some + (f": {padding}" if padding == "no padding" else "")
    texts, notes = [], dict[str, None]()
    for region in regions:
        words = [
            _indices_text(idx, of, axis, n, k in full)
            for k, (idx, of, axis, n) in enumerate(
                zip(region.indices, reach, axes, differs.shape, strict=True)
            )
            if n > 1
        ]
        text = ", ".join(words)
        if region.share < FILLED:
            text = f"{_percent(region.share)} of {text}"
        texts.append(text)
        for idx, axis, n in zip(region.indices, axes, differs.shape, strict=True):
            if note := _block_note(idx, axis, n):
                notes[note] = None
    ends = ", ".join(filter(None, (padding, *(notes if len(notes) <= RANGES else ()))))
    return "; ".join(texts) + (f": {ends}" if ends else "")


def culprits(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> np.ndarray:
    """Return the smallest set of elements whose correction makes the array pass its tolerance.

    Rounding makes nearly every element differ a little; the returned elements are those that break
    the tolerance. Elements that are not finite on either side are always included, except where
    both sides hold the same infinity.

    Args:
        actual: any shape.
        expected: the same shape.
        tolerance: largest relative L2 error that passes; negative or not finite counts as 0.

    Returns:
        Booleans of the same shape, True at the elements to be corrected.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    known = np.isfinite(a) & np.isfinite(e)
    unknown = ~known & (a != e)
    error = np.zeros(np.shape(e))
    np.subtract(a, e, out=error, where=known)
    scale = float(np.max(np.abs(e), where=known, initial=0.0))
    if scale == 0.0:
        return np.asarray(unknown | (error != 0.0))
    # Scaled, so that no square overflows or underflows.
    squares = (error / scale).reshape(-1) ** 2
    norm = float(np.sum((np.where(known, e, 0.0) / scale) ** 2))
    room = norm * tolerance**2 if math.isfinite(tolerance) and tolerance > 0 else 0.0
    order = np.argsort(squares, kind="stable")
    wrong = np.zeros(squares.size, bool)
    wrong[order[np.cumsum(squares[order]) > room]] = True
    # For 0-d arrays `|` returns a scalar, not an array.
    return np.asarray(unknown | wrong.reshape(np.shape(e)))


def _expanded(mask: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast a mask over the leading axes to `shape`; all True if it is None or does not fit."""
    if mask is None or np.shape(mask) != shape[: np.ndim(mask)]:
        return np.ones(shape, bool)
    mask = np.asarray(mask, bool)
    return np.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)


def _any_but(array: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(array.any(axis=tuple(k for k in range(array.ndim) if k != axis)))


def _regions(differs: np.ndarray, cared: np.ndarray) -> tuple[list[_Region], set[int]]:
    """Return at most `REGIONS` regions that cover all differences, and the axes (by number) that
    the regions span fully.

    `cared` is True at the compared elements, here and in the functions below.
    """
    full = {k for k in range(differs.ndim) if _is_full(differs, cared, k)}
    # Collapse the axes that the regions span fully: the remaining array is small.
    flat = tuple(sorted(full))
    less = np.asarray(differs.any(axis=flat, keepdims=True)) if flat else differs
    care = np.asarray(cared.any(axis=flat, keepdims=True)) if flat else cared
    found = _split(less, care, REGIONS) or [_bounds(less, care)]
    every = tuple(np.arange(n) for n in differs.shape)
    return [
        _Region(
            tuple(every[k] if k in full else i for k, i in enumerate(region.indices)), region.share
        )
        for region in found
    ], full


def _is_full(differs: np.ndarray, cared: np.ndarray, axis: int) -> bool:
    """Return whether each line along an axis differs at none or (nearly) all compared elements."""
    lines = differs.any(axis=axis, keepdims=True) & cared
    return bool(differs.sum() >= FILLED * lines.sum())


def _bounds(differs: np.ndarray, cared: np.ndarray) -> _Region:
    indices = tuple(np.flatnonzero(_any_but(differs, k)) for k in range(differs.ndim))
    block = np.ix_(*indices)
    return _Region(indices, float(differs[block].sum() / max(1, cared[block].sum())))


def _split(differs: np.ndarray, cared: np.ndarray, room: int) -> list[_Region]:
    """Return at most `room` regions that cover all differences; empty if more are needed.

    At least the fraction `FILLED` of the compared elements of each region differs. Differences that
    do not fill one region are split along the axis that gives the fewest regions.
    """
    whole = _bounds(differs, cared)
    if whole.share >= FILLED:
        return [whole]
    best: list[_Region] = []
    for axis in range(differs.ndim):
        groups: dict[bytes, list[int]] = {}
        for i in whole.indices[axis]:
            groups.setdefault(np.take(differs, i, axis).tobytes(), []).append(int(i))
            if len(groups) > room:
                break
        if not 1 < len(groups) <= room:
            continue
        parts: list[_Region] = []
        for members in groups.values():
            kept = np.zeros(differs.shape[axis], bool)
            kept[members] = True
            only = kept.reshape([-1 if k == axis else 1 for k in range(differs.ndim)])
            inner = _split(differs & only, cared, room - len(groups) + 1)
            if not inner:
                break
            parts += inner
        else:
            if len(parts) <= room and (not best or len(parts) < len(best)):
                best = parts
    return best


def _indices_text(indices: np.ndarray, reach: np.ndarray, axis: Axis, n: int, full: bool) -> str:
    """Describe indices on one axis, such as "positions 4-7".

    Args:
        indices: ascending indices to describe.
        reach: indices that were compared.
        axis: names of the axis and its blocks.
        n: length of the axis.
        full: whether the description is to name the whole axis.
    """
    numbered = axis.name.startswith("axis ")
    if full or indices.size >= reach.size:
        return f"all of {axis.name}" if numbered else f"all {axis.name}s"
    runs = _runs(indices)
    if len(runs) <= RANGES:
        text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
        return f"{axis.name}: {text}" if numbered else f"{_plural(axis, indices.size)} {text}"
    steps = np.diff(indices)
    ends = f"from {indices[0]} to {indices[-1]}"
    if (steps == steps[0]).all():
        every = f"every {_ordinal(int(steps[0]))}"
        return f"{axis.name}: {every} {ends}" if numbered else f"{every} {axis.name} {ends}"
    some = f"{indices.size:,} of {n:,}"
    return f"{axis.name}: {some} {ends}" if numbered else f"{some} {axis.name}s {ends}"


def _block_note(indices: np.ndarray, axis: Axis, n: int) -> str:
    """Describe indices by blocks: whole blocks, part of one block, or one position in each.

    Empty if none of these descriptions fits, or the axis has no blocks.
    """
    if not axis.block or not 0 < axis.size < n or indices.size == n:
        return ""
    blocks = np.unique(indices // axis.size)
    names = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(blocks))
    last, short = -(-n // axis.size) - 1, n % axis.size
    alone = blocks[0] == last and short
    tail = f", the tail of {short}" if alone else ""
    if indices.size == sum(min(axis.size, n - b * axis.size) for b in blocks):
        return f"{axis.block}{'s' if blocks.size > 1 else ''} {names}{tail}"
    if blocks.size == 1:
        return f"in {axis.block} {names}{tail}"
    places = np.unique(indices % axis.size)
    if places.size == 1:
        place = {0: "the first", axis.size - 1: "the last"}.get(int(places[0]), f"{places[0]}")
        at = place if place.startswith("the") else f"place {place}"
        return f"{at} of {axis.block}s {names}"
    return ""


def _padding(differs: np.ndarray, cared: np.ndarray, valid: np.ndarray | None) -> str:
    """Return "no padding", "padding too" or `ALL_PADDING`; empty if no padding was compared."""
    padded = ~_expanded(valid, differs.shape)
    if not (padded & cared).any():
        return ""
    if not (differs & padded).any():
        return "no padding"
    return "padding too" if (differs & ~padded).any() else ALL_PADDING


def _runs(indices: np.ndarray) -> list[tuple[int, int]]:
    """Return ascending indices as ranges (first, last), both included."""
    cuts = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(indices, cuts)]


def _plural(axis: Axis, n: int) -> str:
    return axis.name if n == 1 else f"{axis.name}s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"


def _ordinal(n: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{n}{'th' if 10 <= n % 100 <= 20 else ends.get(n % 10, 'th')}"
