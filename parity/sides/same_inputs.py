"""Check that two sides were given the same inputs, possibly under different names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from parity.sides.side import Side, SideError


def check_same_inputs(one: Side, other: Side) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Raise an error, before anything runs, if two sides were given different inputs.

    Inputs with equal elements are paired first, whatever their names, positions and order of axes;
    among several equal inputs, one of the same name is preferred. Two remaining inputs, one of each
    side, are taken for the same input with different values, which is an error, if
    - both have the same name, shape and kind (floating-point, or integer or bool);
    - one of the two is positional, and each is the only remaining input of its side with this shape
    and kind;
    - both have the same name and rank, with three exceptions: both agree after broadcasting; or
    their kinds differ, and one of them has at most two distinct values, like a mask; or both are
    positional arguments after the first, and some other input array is equal on both sides; or
    - no input array is equal on both sides, each is the only remaining input of its side with its
    rank and kind, and they do not agree after broadcasting.

    Other remaining inputs need not correspond: one may be a mask and the other positions, or one a
    mask of positions and the other a mask of pairs of positions.

    Returns:
        Names of the inputs without an equal partner, for `one` and for `other`.

    Raises:
        SideError: two inputs taken for the same one differ in elements, shape or dtype.
    """
    ours, theirs = dict(one.inputs()), dict(other.inputs())
    shared = False
    for name, x in list(ours.items()):
        partner = next((n for n in _from(theirs, name) if _equal(x, theirs[n])), None)
        if partner is not None:
            shared = shared or x.ndim > 0
            del ours[name], theirs[partner]
    differences = []
    for name, x in ours.items():
        like = [n for n in _from(theirs, name) if _comparable(x, theirs[n])]
        rivals = [n for n in ours if _comparable(x, ours[n])]
        alone = len(like) == len(rivals) == 1 and (_by_place(name) or _by_place(like[0]))
        if name in like or alone:
            differences.append(_elements((one, name, x), (other, like[0], theirs[like[0]])))
        elif (partner := _other_shape(name, ours, theirs, shared)) is not None:
            differences.append(_layouts((one, name, x), (other, partner, theirs[partner])))
    if differences:
        raise SideError(
            f"both sides need the same inputs, but {'; '.join(differences)}: give both the same "
            "arrays"
        )
    return tuple(ours), tuple(theirs)


def _other_shape(
    name: str, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], shared: bool
) -> str | None:
    """Return the name of the other side's input that should equal the input `name` but has another
    shape or dtype; None if there is none.

    Args:
        name: Name of the input on one side.
        ours: Inputs of that side that have no equal input on the other side.
        theirs: Inputs of the other side that have no equal input.
        shared: Whether some input array of the two sides is equal. If so, positional arguments
            after the first may differ in meaning: one side's may be a mask, the other's positions.
    """
    x = ours[name]
    if name in theirs:
        y = theirs[name]
        if x.ndim != y.ndim or (shared and _by_place(name) and name != "0") or _broadcasts(x, y):
            return None
        # A mask may be additive (float) on one side and boolean on the other.
        masks = _whole(x) != _whole(y) and (_is_mask(x) or _is_mask(y))
        return None if masks else name
    like = [n for n in theirs if theirs[n].ndim == x.ndim and _whole(theirs[n]) == _whole(x)]
    rivals = [n for n in ours if ours[n].ndim == x.ndim and _whole(ours[n]) == _whole(x)]
    lone = len(like) == len(rivals) == 1 and not shared
    return like[0] if lone and not _broadcasts(x, theirs[like[0]]) else None


def _broadcasts(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether two arrays hold the same numbers after broadcasting."""
    try:
        x, y = np.broadcast_arrays(x, y)
    except ValueError:
        return False
    return np.array_equal(x.astype(np.float64), y.astype(np.float64))


def _is_mask(x: np.ndarray) -> bool:
    return np.unique(x).size <= 2


def _from(names: Iterable[str], first: str) -> list[str]:
    return sorted(names, key=lambda name: name != first)


def _by_place(name: str) -> bool:
    return name[:1].isdigit()


def _comparable(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether two arrays have equal shapes and are both integer or both floating-point."""
    return x.shape == y.shape and _whole(x) == _whole(y)


def _whole(x: np.ndarray) -> bool:
    return x.dtype.kind in "biu"


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    # Token ids are int64 in torch and int32 in JAX; float64 holds both exactly.
    if _whole(x) != _whole(y) or x.size != y.size:
        return False
    a, b = x.astype(np.float64), y.astype(np.float64)
    # One side may be channels-last and the other channels-first.
    laid = [a] if a.shape == b.shape else [a.reshape(b.shape), *_turned(a, b.shape)]
    return any(np.array_equal(each, b, equal_nan=not _whole(x)) for each in laid)


def _turned(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield an array with its axes in every order that gives the shape `shape`."""
    for axes in itertools.permutations(range(x.ndim)):
        if tuple(x.shape[i] for i in axes) == shape:
            yield x.transpose(axes)


_Input = tuple[Side, str, np.ndarray]


def _elements(left: _Input, right: _Input) -> str:
    """Return a clause that says how many elements of two inputs of one shape differ."""
    (one, a, x), (other, b, y) = left, right
    differ = int(np.sum(x.astype(np.float64) != y.astype(np.float64)))
    return (
        f"{differ} of {x.size} elements of input {a} of the {one.kind} side, {_type(x)}, differ "
        f"from input {b} of the {other.kind} side, {_type(y)}"
    )


def _layouts(left: _Input, right: _Input) -> str:
    """Return a clause that says how the shapes and dtypes of two inputs differ."""
    (one, a, x), (other, b, y) = left, right
    sizes = enumerate(zip(x.shape, y.shape, strict=True))
    axes = [f"axis {i} has {m} against {n}" for i, (m, n) in sizes if m != n]
    if _whole(x) != _whole(y):
        axes.append("only one of them is of whole numbers")
    return (
        f"input {a} of the {one.kind} side is {_type(x)} and input {b} of the {other.kind} side "
        f"{_type(y)} ({', '.join(axes)})"
    )


def _type(x: np.ndarray) -> str:
    return f"{x.dtype}{list(x.shape)}"
