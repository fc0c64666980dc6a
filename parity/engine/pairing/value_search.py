"""Search for arrays with equal values: whole, fused, split, stacked, in part or reordered.

Fingerprints, which add up over the parts of an array, propose candidates. Every candidate is then
rearranged and compared element by element.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.constructions import (
    Construction,
    Part,
    Piece,
    cut,
    laid_out,
    whole,
)
from parity.engine.pairing.fingerprints import MODULUS, fingerprint, sample_positions
from parity.engine.pairing.layouts import (
    SAMPLES,
    Layout,
    Shape,
    candidates,
    identity,
    same_values,
    take,
    transposition,
)

SMALL = 4
"""Largest number of elements with which two unrelated arrays may be equal by accident."""
# 1,500 units have a million sums of two.
MOST_UNITS = 1500
"""Largest number of units, which are arrays or families (names that differ in numbers), for which
sums of two and three units are tried."""
PROBES = 3
"""Number of a part's elements that are first looked up anywhere in an array, before positions for
the whole part are tried."""
MOST_STARTS = 64
"""Largest number of places along an axis that are tried for a part."""
MOST_PERMUTED = 4
"""Largest number of axes of an array whose rows are searched for in another order."""
# The gates of a recurrent cell are three or four blocks.
MOST_BLOCKS = 8
"""Largest number of blocks for which rows count as reordered in blocks."""


class Tensors:
    """Named arrays, read one at a time, with cached fingerprints.

    Args:
        arrays: arrays by name; a mapping may read them lazily.
        rounding: dtype that wider floating-point arrays are rounded to when read; None: no
            rounding.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], rounding: np.dtype | None = None):
        self.arrays, self.rounding = arrays, rounding
        self.names = tuple(arrays)
        self.shapes: dict[str, Shape] = {name: tuple(arrays[name].shape) for name in arrays}
        self._fingerprints: dict[str, int] = {}
        self._ambiguous: dict[str, bool] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        array = np.asarray(self.arrays[name])
        if self.rounding is None or not self.rounds(name, self.rounding):
            return array
        # Values beyond the narrow dtype's range become infinity, compared like any other value.
        with np.errstate(over="ignore"):
            return array.astype(self.rounding).astype(array.dtype)

    def rounds(self, name: str, dtype: np.dtype) -> bool:
        """Return whether rounding to `dtype` may change array `name`, that is, whether the array
        has a wider floating-point dtype."""
        own = self.arrays[name].dtype
        return own.kind not in "biu" and own.itemsize > dtype.itemsize

    def rounded(self, dtype: np.dtype) -> Tensors:
        """Return the same arrays rounded to `dtype`.

        Both objects share the cached results of `ambiguous`; a result is computed from the arrays
        of the object that is asked first.
        """
        result = Tensors(self.arrays, dtype)
        result._ambiguous = self._ambiguous
        return result

    def size(self, name: str) -> int:
        """Return the number of elements of array `name`."""
        return math.prod(self.shapes[name])

    def fingerprint(self, name: str) -> int:
        """Return the fingerprint of an array, computed on first use."""
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint(self[name])
        return self._fingerprints[name]

    def ambiguous(self, name: str) -> bool:
        """Return whether an array is constant or has at most `SMALL` elements.

        Its values then cannot identify it.
        """
        if name not in self._ambiguous:
            self._ambiguous[name] = self.size(name) <= SMALL or is_constant(self[name])
        return self._ambiguous[name]


def is_constant(x: np.ndarray) -> bool:
    """Return whether all elements are equal; a sample is tested first."""
    first = x.reshape(-1)[:1] if x.flags.c_contiguous else x[(0,) * x.ndim].reshape(-1)
    if not x.size or not (elements(x, sample_positions(x.size, SAMPLES)) == first).all():
        return not x.size
    return bool((x == first).all())


def elements(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the elements of `x` at flat positions, without copying the others."""
    return x[np.unravel_index(positions, x.shape)] if x.ndim else x.reshape(-1)[positions]


def fit(source: np.ndarray, target: np.ndarray) -> Layout | None:
    """Return the simplest layout (reshape and transposition) in which `source` equals `target`;
    None if there is none.

    Like `find_layout`, without comparing fingerprints first.
    """
    positions = sample_positions(target.size, SAMPLES)
    wanted = elements(target, positions)
    for layout in candidates(source.shape, target.shape):
        if same_values(take(layout, source, positions), wanted) and (
            same_values(layout(source), target)
        ):
            return layout
    return None


def whole_matches(
    originals: Tensors, ports: Tensors, rest_o: Iterable[str], rest_p: Iterable[str]
) -> Iterator[tuple[tuple[str, ...], list[tuple[str, dict[str, Layout]]]]]:
    """Yield groups of arrays with the same values in any order.

    Args:
        originals: arrays of the original.
        ports: arrays of the port.
        rest_o: names of the original's arrays to consider.
        rest_p: names of the port's arrays to consider.

    Yields:
        Names of the original's arrays in the group; and for each of the port's arrays its name and
        the layouts (reshape and transposition) that map the original's arrays to it, by the
        original's name. An array whose order of elements no layout gives is missing there.
    """
    content = defaultdict(lambda: ([], []))
    sizes = {originals.size(name) for name in rest_o}
    for name in rest_p:
        if ports.size(name) in sizes:
            content[ports.size(name), ports.fingerprint(name)][1].append(name)
    sizes = {size for size, _ in content}
    for name in rest_o:
        if originals.size(name) in sizes:
            key = (originals.size(name), originals.fingerprint(name))
            if key in content:
                content[key][0].append(name)
    for group_o, group_p in content.values():
        if group_o and group_p:
            fits = []
            for p in group_p:
                layouts = {o: fit(originals[o], ports[p]) for o in group_o}
                fits.append((p, {o: layout for o, layout in layouts.items() if layout}))
            yield tuple(group_o), fits


class Sums:
    """Index of sums of fingerprints, to find the parts of a fused or stacked array, whose
    fingerprint is the sum of theirs.

    A unit is one array or a family of arrays. Sums of one, two and three units are found.

    Args:
        parts: arrays that may be parts.
        names: names of the arrays to consider.
        largest: number of elements of the largest fused or stacked array.
    """

    def __init__(self, parts: Tensors, names: Sequence[str], largest: int):
        names = [name for name in names if parts.size(name) < largest]
        units = [(name,) for name in names] + naming.families(names)
        sizes = [sum(map(parts.size, unit)) for unit in units]
        self.units = [unit for unit, n in zip(units, sizes, strict=True) if n <= largest]
        self.sizes = np.array([n for n in sizes if n <= largest], np.int64)
        prints = [sum(map(parts.fingerprint, unit)) % MODULUS for unit in self.units]
        self.prints = np.array(prints, np.uint64)
        count = len(self.units) if len(self.units) <= MOST_UNITS else 0
        first, second = np.triu_indices(count, 1)
        near = self.sizes[first] + self.sizes[second] <= largest
        first, second = first[near], second[near]
        sums = self.prints[first] + self.prints[second]
        order = np.argsort(sums)
        self.sums, self.pairs = sums[order], np.stack([first[order], second[order]], -1)

    def groups(self, size: int, wanted: int) -> Iterator[tuple[str, ...]]:
        """Yield groups of names whose sizes and fingerprints sum to those of a fused or stacked
        array.

        Args:
            size: number of elements of that array.
            wanted: fingerprint of that array.
        """
        target = np.uint64(wanted)
        for i in np.flatnonzero((self.prints == target) & (self.sizes == size)):
            yield self.units[i]
        # Sums of two, then of three: the target minus one unit is searched for among sums of two.
        missing = np.concatenate([[target], target - self.prints])
        low = np.searchsorted(self.sums, missing)
        high = np.searchsorted(self.sums, missing, side="right")
        for i in np.flatnonzero(low < high):
            for pair in self.pairs[low[i] : high[i]]:
                chosen = [*map(int, pair), *([int(i) - 1] if i else [])]
                names = tuple(name for unit in chosen for name in self.units[unit])
                if self.sizes[chosen].sum() == size and len(set(names)) == len(names):
                    yield names


def compositions(
    wholes: Tensors, parts: Tensors, rest_wholes: Sequence[str], rest_parts: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, Part, Layout]]]]:
    """Yield fused or stacked arrays, each with the arrays it consists of (its parts).

    Args:
        wholes: arrays that may be fused or stacked.
        parts: arrays that they may consist of; each is used at most once.
        rest_wholes: names of the arrays in `wholes` to consider.
        rest_parts: names of the arrays in `parts` to consider.

    Yields:
        The name of the fused or stacked array; and for each part its name, its place in that
        array, and the layout from that place to the part.
    """
    if not rest_wholes or not rest_parts:
        return
    sums = Sums(parts, rest_parts, max(map(wholes.size, rest_wholes)))
    used: set[str] = set()
    for name in rest_wholes:
        for group in sums.groups(wholes.size(name), wholes.fingerprint(name)):
            if used.isdisjoint(group):
                pieces = dissect(wholes[name], {part: parts[part] for part in group})
                if pieces is not None:
                    yield name, pieces
                    used.update(group)
                    break


def dissect(
    array: np.ndarray, parts: Mapping[str, np.ndarray]
) -> list[tuple[str, Part, Layout]] | None:
    """Return where each part lies in a fused or stacked `array`; None if the parts do not fill it.

    Each entry holds a part's name, its place in `array` and the layout from there to the part.
    Concatenations along one axis are tried. The axis may also be split into groups first, such as
    heads, each with its query, key and value. Then stacks of concatenations are tried, with the
    parts grouped by the first number in their names.
    """
    array = np.ascontiguousarray(array)  # so that reshapes of it are views
    for view, axis in _views(array.shape):
        if (pieces := _tile(array, parts, view, axis)) is not None:
            return pieces
    groups = defaultdict(dict)
    for name, part in parts.items():
        groups[naming.numbers(name)[:1]][name] = part
    if not 1 < len(groups) == (array.shape or (0,))[0] or len(groups) == len(parts):
        return None
    result = []
    for i, numbers in enumerate(sorted(groups)):
        pieces = dissect(array[i], groups[numbers])
        if pieces is None:
            return None
        for name, part, layout in pieces:
            inside = Part(
                array.shape, (len(groups), *part.view), (i, *part.starts), (i + 1, *part.stops)
            )
            unit = Layout((1, *layout.source), layout.before, layout.axes, layout.target)
            result.append((name, inside, unit))
    return result


def locate(array: np.ndarray, part: np.ndarray) -> tuple[Part, Layout] | None:
    """Return the place of `part` in a larger `array`, and the layout from that place to `part`.

    None if `part` is not found.
    """
    array = np.ascontiguousarray(array)
    # A search for a few elements rules out nearly all unrelated arrays.
    # NaN counts as equal to NaN, as in `fit`.
    for x in elements(part, sample_positions(part.size, PROBES)):
        if not (np.isnan(array) if np.isnan(x) else array == x).any():
            return None
    for view, axis in _views(array.shape):
        length = part.size * view[axis] // array.size
        if length * array.size != part.size * view[axis] or not 0 < length < view[axis]:
            continue
        starts = dict.fromkeys((0, view[axis] - length, *range(0, view[axis] - length, length)))
        for start in list(starts)[:MOST_STARTS]:
            place = cut(array.shape, view, axis, start, start + length)
            if layout := fit(place(array), part):
                return place, layout
    return None


def _tile(
    array: np.ndarray, parts: Mapping[str, np.ndarray], view: Shape, axis: int
) -> list[tuple[str, Part, Layout]] | None:
    rest, at, pieces = dict(parts), 0, []
    lengths = {}
    for name, part in parts.items():
        lengths[name], remainder = divmod(part.size * view[axis], array.size)
        if remainder or not lengths[name]:
            return None
    while rest:
        for name, part in rest.items():
            place = cut(array.shape, view, axis, at, at + lengths[name])
            if layout := fit(place(array), part):
                pieces.append((name, place, layout))
                break
        else:
            return None
        at += lengths[pieces[-1][0]]
        del rest[pieces[-1][0]]
    return pieces


def _views(shape: Shape) -> Iterator[tuple[Shape, int]]:
    """Yield reshapes of an array of `shape` in which parts are searched for, each with the axis
    along which it is cut into parts.

    First the unchanged shape, then leading axes merged, then one axis split in two.
    """
    for axis in range(len(shape)):
        yield shape, axis
    for merged in range(2, len(shape)):
        yield (math.prod(shape[:merged]), *shape[merged:]), 0
    for axis, size in enumerate(shape):
        for groups in range(2, size // 2 + 1):
            if size % groups == 0:
                yield (*shape[:axis], groups, size // groups, *shape[axis + 1 :]), axis + 1


def of_parts(shape: Shape, pieces: Iterable[tuple[str, Part, Layout]]) -> Construction:
    """Return the construction (recipe) of a port's array from whole arrays of the original.

    Args:
        shape: shape of the port's array.
        pieces: for each array of the original its name, its place in the port's array, and the
            layout from that place to the original's array.
    """
    return Construction(
        shape,
        tuple(
            Piece(name, whole(layout.target), layout.reversed, place)
            for name, place, layout in pieces
        ),
    )


def part_of(name: str, place: Part, layout: Layout) -> Construction:
    """Return the construction (recipe) of a port's array that is one part of the original's array
    `name`.

    Args:
        name: name of the original's array.
        place: the part of the original's array.
        layout: maps that part to the port's array.
    """
    return Construction(layout.target, (Piece(name, place, layout, whole(layout.target)),))


def rearranged(name: str, source: np.ndarray, target: np.ndarray) -> Construction | None:
    """Return the construction (recipe) that makes `target` from `source` by reordering rows or
    columns; None if there is none.

    Two kinds of order are found: reordered blocks, such as the gates of a recurrent cell, and
    interleaved groups, such as the rows of a head for another convention of rotary embeddings. The
    rows must be distinct.

    Args:
        name: name of `source` in the construction.
        source: array of the original.
        target: array of the port.
    """
    if source.ndim != target.ndim or source.ndim > MOST_PERMUTED:
        return None
    for axes in itertools.permutations(range(source.ndim)):
        if tuple(source.shape[axis] for axis in axes) != target.shape:
            continue
        for axis in range(target.ndim):
            order = _order(np.moveaxis(source.transpose(axes), axis, 0),
                           np.moveaxis(target, axis, 0))  # fmt: skip
            if order is None:
                continue
            if blocks := _blocks(order):
                return _in_blocks(name, source.shape, axes, axis, blocks)
            if factors := _interleaved(order):
                return laid_out(name, _interleaving(source.shape, axes, axis, factors))
    return None


def orders_of(construction: Construction, name: str) -> set[tuple[int, ...]]:
    """Return the set of orders in which a construction (recipe) takes rows or columns of parameter
    `name`.

    An order lists, for each index along an axis of the port's parameter, the index of the
    original's row or column that is found there. Axes in unchanged order are left out, and so are
    axes whose length another axis has too: a bias follows the rows of a square matrix, and the
    columns may be in another order.

    Args:
        construction: recipe for a parameter of the port.
        name: name of one of the original's parameters that the recipe uses.
    """
    found = set()
    shapes = {piece.parameter: piece.part.whole for piece in construction.pieces}
    shape = shapes[name]
    for axis, length in enumerate(shape):
        if shape.count(length) > 1:
            continue
        places = np.arange(length, dtype=np.float64)
        spread = [length if a == axis else 1 for a in range(len(shape))]
        numbered = {n: np.zeros(of) for n, of in shapes.items()}
        numbered[name] = np.broadcast_to(places.reshape(spread), shape).copy()
        held = construction.from_original(numbered)
        for along in range(held.ndim):
            lines = np.moveaxis(held, along, 0).reshape(held.shape[along], -1)
            if lines.shape[0] != length or (lines != lines[:, :1]).any():
                continue
            order = tuple(int(n) for n in lines[:, 0])
            if sorted(order) == list(range(length)) and order != tuple(range(length)):
                found.add(order)
    return found


def sum_of(
    names: Sequence[str], arrays: Sequence[np.ndarray], target: np.ndarray
) -> Construction | None:
    """Return the construction (recipe) that makes `target` as the sum of two arrays of one shape;
    None if there is none.

    The sum is rounded to the target's dtype. `target` may also be a block of the sum along the
    first axis, have its rows or columns in another order (`rearranged`), or hold blocks of the sum
    beside blocks of one array alone, such as a GRU's bias.

    Args:
        names: names of the two arrays in the construction.
        arrays: the two arrays, of the original.
        target: array of the port.
    """
    total = (arrays[0] + arrays[1]).astype(target.dtype)
    if total.size % max(1, target.size) or is_constant(target):
        return None
    length, shape = total.shape[0] * target.size // total.size, total.shape
    if target.shape != (length, *shape[1:]):
        return None
    for start in range(0, shape[0], length):
        if same_values(total[start : start + length], target):
            part = cut(shape, shape, 0, start, start + length)
            layout, place = identity(target.shape), whole(target.shape)
            return Construction(
                target.shape, tuple(Piece(name, part, layout, place) for name in names)
            )
    if length < shape[0]:
        return None
    if (found := rearranged("", total, target)) is not None:
        pieces = (replace(piece, parameter=name) for piece in found.pieces for name in names)
        return Construction(target.shape, tuple(pieces))
    return _partly_sum(names, (total, *(x.astype(target.dtype) for x in arrays)), target)


def _partly_sum(
    names: Sequence[str], sources: Sequence[np.ndarray], target: np.ndarray
) -> Construction | None:
    """Return the construction (recipe) of `target` from blocks of a sum and blocks of its two
    terms; None if there is none.

    Args:
        names: names of the two terms in the construction.
        sources: the sum and its two terms, of one shape.
        target: array of the port.
    """
    length, shape = len(sources[0]), sources[0].shape
    order = _order(np.concatenate(sources), target)
    blocks = [] if order is None else _blocks(order, length)
    if not any(start < length for _, start, _ in blocks):
        return None
    pieces = []
    for there, start, stop in blocks:
        source, first = divmod(start, length)
        part = cut(shape, shape, 0, first, first + stop - start)
        place = cut(shape, shape, 0, there, there + stop - start)
        terms = names if source == 0 else names[source - 1 : source]
        pieces += [Piece(name, part, identity(part.shape), place) for name in terms]
    return Construction(shape, tuple(pieces))


def _order(source: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    """Return, for each row of `target`, the index of the equal row of `source`.

    None if rows are not distinct, a row of `target` is not in `source`, or the order is unchanged.
    """
    rows = [np.ascontiguousarray(x.reshape(len(x), -1), np.float64) for x in (source, target)]
    if not (rows[0] == rows[1][0]).all(axis=1).any():
        return None
    where = {row.tobytes(): i for i, row in enumerate(rows[0])}
    found = [where.get(row.tobytes()) for row in rows[1]]
    if len(where) < len(source) or None in found or len({*found}) < len(found):
        return None
    order = np.array(found)
    return None if np.array_equal(order, np.arange(len(order))) else order


def _blocks(order: np.ndarray, length: int = 0) -> list[tuple[int, int, int]]:
    """Return the blocks of an order, each as (start in the target, start in the source, stop in the
    source).

    A block is a run of consecutive indices. Empty if there are more than `MOST_BLOCKS` blocks, or
    fewer than two indices per block on average.

    Args:
        order: indices of the source, by position in the target.
        length: length of the arrays that are joined in the source, whose borders no block crosses;
            0: the source is one array.
    """
    parts = np.diff(order // length) if length else 0
    starts = [0, *(np.flatnonzero((np.diff(order) != 1) | (parts != 0)) + 1)]
    stops = [*starts[1:], len(order)]
    runs = [
        (int(a), int(order[a]), int(order[a] + b - a)) for a, b in zip(starts, stops, strict=True)
    ]
    return runs if len(runs) <= min(MOST_BLOCKS, len(order) // 2) else []


def _in_blocks(
    name: str, shape: Shape, axes: Sequence[int], axis: int, blocks: Iterable[tuple[int, int, int]]
) -> Construction:
    target = tuple(shape[each] for each in axes)
    pieces = []
    for there, start, stop in blocks:
        part = cut(shape, shape, axes[axis], start, stop)
        place = cut(target, target, axis, there, there + stop - start)
        pieces.append(Piece(name, part, transposition(part.shape, axes), place))
    return Construction(target, tuple(pieces))


def _interleaved(order: np.ndarray) -> tuple[int, int, int] | None:
    """Return (a, b, c) such that reshaping the indices to (a, b, c) and exchanging the last two
    axes gives `order`; None if there are no such numbers."""
    n = len(order)
    for b in (d for d in range(2, n // 2 + 1) if n % d == 0):
        for c in (d for d in range(2, n // b + 1) if n // b % d == 0):
            shape = (n // b // c, b, c)
            if np.array_equal(np.arange(n).reshape(shape).swapaxes(1, 2).reshape(-1), order):
                return shape
    return None


def _interleaving(
    shape: Shape, axes: Sequence[int], axis: int, factors: tuple[int, int, int]
) -> Layout:
    split = axes[axis]
    before = (*shape[:split], *factors, *shape[split + 1 :])
    # The split axis became three axes, so later axes moved by two.
    moved = [a if a < split else a + 2 for a in axes]
    order = [*moved[:axis], split, split + 2, split + 1, *moved[axis + 1 :]]
    return Layout(shape, before, tuple(order), tuple(shape[a] for a in axes))
