"""Whether two sides were given the same inputs, whatever each calls them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from parity.sides.side import Side, SideError


def check_same_inputs(one: Side, other: Side) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Refuse to compare what two sides made of different inputs.

    What is equal belongs together, whatever its name and place, one of its name before others. Of
    what is left, two could be one input where they have one name, or where one was given by place
    and is the only one of its kind on either side; those differ. Two of other names need not be the
    same: a mask, for example, and positions.

    Returns:
        Inputs that only one of them has, (one, other).

    Raises:
        SideError: an input differs.
    """
    ours, theirs = dict(one.inputs()), dict(other.inputs())
    for name, x in list(ours.items()):
        partner = next((n for n in _from(theirs, name) if _equal(x, theirs[n])), None)
        if partner is not None:
            del ours[name], theirs[partner]
    for name, x in ours.items():
        like = [n for n in _from(theirs, name) if _comparable(x, theirs[n])]
        rivals = [n for n in ours if _comparable(x, ours[n])]
        alone = len(like) == len(rivals) == 1 and (_by_place(name) or _by_place(like[0]))
        if name in like or alone:
            _refuse((one, name, x), (other, like[0], theirs[like[0]]))
    return tuple(ours), tuple(theirs)


def _from(names: Iterable[str], first: str) -> list[str]:
    return sorted(names, key=lambda name: name != first)


def _by_place(name: str) -> bool:
    return name[:1].isdigit()


def _comparable(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays could be one input: of one shape, and both of whole numbers or neither."""
    return x.shape == y.shape and _whole(x) == _whole(y)


def _whole(x: np.ndarray) -> bool:
    return x.dtype.kind in "biu"


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    # Token numbers are int64 in torch and int32 in JAX; float64 holds both.
    return _comparable(x, y) and np.array_equal(
        x.astype(np.float64), y.astype(np.float64), equal_nan=not _whole(x)
    )


def _refuse(left: tuple[Side, str, np.ndarray], right: tuple[Side, str, np.ndarray]) -> None:
    (one, a, x), (other, b, y) = left, right
    differ = int(np.sum(x.astype(np.float64) != y.astype(np.float64)))
    raise SideError(
        f"both sides need the same inputs, but {differ} of {x.size} elements of input {a} of the "
        f"{one.kind} side, {x.dtype}{list(x.shape)}, differ from input {b} of the {other.kind} "
        f"side: give both the same arrays"
    )
