"""Whether two sides were given the same inputs, whatever each calls them."""

from __future__ import annotations

import numpy as np

from parity.sides.side import Side, SideError


def check_same_inputs(one: Side, other: Side) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Refuse to compare what two sides made of different inputs.

    What is equal belongs together, first by name and then whatever its name and place. Of what is
    left, an input differs from the first of the other side that it could be, one of its name before
    others.

    Returns:
        Inputs that only one of them has, (one, other): positions and masks, for example, which the
        other makes itself.

    Raises:
        SideError: an input differs.
    """
    ours, theirs = dict(one.inputs()), dict(other.inputs())
    for belongs in (_equal, _comparable):
        for name in list(ours):
            x = ours[name]
            others = sorted(theirs, key=lambda n: n != name)
            partner = next((n for n in others if belongs(x, theirs[n])), None)
            if partner is None:
                continue
            if not _equal(x, theirs[partner]):
                _refuse((one, name, x), (other, partner, theirs[partner]))
            del ours[name], theirs[partner]
    return tuple(ours), tuple(theirs)


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
