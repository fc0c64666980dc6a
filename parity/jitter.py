"""What rounding to float32 does, as random signs in float64; a few rows of a tensor at a time.

`parity.calibrate` moves every weight by one unit roundoff. That leaves out the rounding inside a
sum, which small cases do not notice and a model of a thousand features does: at D = 1024 a healthy
projection is 3.5 of those floors away from the truth. Checkpoints from outside are of any width, so
here the weights of a product over K features move by what adding K numbers one after another in
float32 loses. Source: spec/parity.md "Tolerances".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from megalodon_jax.weights import Role, role_of
from parity.calibrate import UNIT_ROUNDOFF

BLOCK = 1 << 20
"""Elements handled at once when a tensor is walked through by rows."""


def row_blocks(shape: tuple[int, ...], elements: int = BLOCK) -> Iterator[slice]:
    """Yield slices of the first axis that hold at most about `elements` each."""
    count = shape[0] if shape else 1
    step = max(1, elements // max(1, math.prod(shape[1:])))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def moved(
    value: np.ndarray, rng: np.random.Generator, roundoff: float = UNIT_ROUNDOFF
) -> np.ndarray:
    """Return a float64 array times `1 +- roundoff`, signs at random."""
    if not value.shape:
        return value * (1 + roundoff * (2 * rng.integers(0, 2) - 1.0))
    result = np.empty_like(value)
    for rows in row_blocks(value.shape):
        signs = rng.integers(0, 2, value[rows].shape, np.int8)
        np.multiply(value[rows], 1 + roundoff * (2 * signs - 1.0), out=result[rows])
    return result


def summed(terms: int) -> float:
    """Return the relative error of a sum of `terms` numbers of random sign in float32.

    Relative to the root of the sum of their squares. After k terms the partial sum is sqrt(k) of
    them, and rounding it loses 0.18 u^2 of its square on average (a rounding error is uniform, a
    leading digit logarithmic); u^2 is added for the rounding of the numbers themselves.
    """
    return UNIT_ROUNDOFF * math.sqrt(1 + terms / 11)


def of_weight(name: str, shape: tuple[int, ...]) -> float:
    """Return by how much a weight moves: as a product over its columns, or as itself.

    The embedding moves as itself, also where it is the head: what the sum of the logits loses is
    put on the logits.
    """
    return summed(shape[-1]) if role_of(name) is Role.LINEAR else UNIT_ROUNDOFF
