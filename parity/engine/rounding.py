"""Random signs inside of a traced program: what rounding every result does, in float64.

Each run is given one pool of random bits, and every operation reads its own part of it: a generator
of random numbers in the place of every operation would take longer to compile than the program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.engine.rounding_noise import UNIT_ROUNDOFF

SPAN = 1 << 14
"""Where operations begin to read the pool: a step that shares no factor with it visits all."""
STEP = 5_741
TURN = 9_973
"""How much further a turn of a loop reads than the one before."""
OUTER = 10_125
"""Turns of an inner loop that a turn of the loop around it is worth: the golden ratio of `SPAN`, so
that turns of two loops read the same signs only where the inner one has hundreds. Counted as one,
turn 1 of turn 0 would read those of turn 0 of turn 1, and errors that are independent would add up.
"""
SIGNIFICANT = 12
"""Bits up to which a literal is taken to mean itself: 0.5 and -1e4 do, 1e-6 is rounded."""


def pool(seed: int, elements: int) -> np.ndarray:
    """Return random signs, int8, enough for arrays of `elements`."""
    bits = np.random.default_rng(seed).integers(0, 2, elements + SPAN, np.int8)
    return (2 * bits - 1).astype(np.int8)


@dataclass(frozen=True)
class Signs:
    """Moves values by one unit roundoff, up or down."""

    pool: Any
    """Signs, int8 (elements + SPAN,); of zeros nothing moves."""
    operations: Any = 1.0
    """1 to round the result of every operation, 0 not to."""
    constants: Any = 0.0
    """1 to move what is float32 also in a float64 program, 0 not to."""
    narrow: bool = False
    """Whether an operation in bfloat16 rounds as bfloat16. Otherwise as float32: a program that is
    meant to be float32 must not be excused for what it does in less."""
    turn: Any = 0
    """Of the loop it is in."""
    places: Iterator[int] = field(default_factory=itertools.count)

    def at(self, turn: Any) -> Signs:
        """Return the signs of a turn of a loop."""
        # Below `SPAN`, so that no product of 32 bits overflows.
        return dataclasses.replace(self, turn=(self.turn * OUTER + turn + 1) % SPAN)

    def moved(self, value: Any, roundoff: float) -> Any:
        """Return a float64 value as an operation of this unit roundoff leaves it."""
        moves = self._draw(value.shape)
        if jnp.iscomplexobj(value):
            # Each part of a product is off by what both parts of its factors are: so is the angle.
            moves = jax.lax.complex(moves, self._draw(value.shape))
        factor = 1 + moves * jnp.asarray(roundoff * self.operations)
        return value * factor.astype(value.dtype)

    def constant(self, value: Any) -> Any:
        """Return what a program holds in float32 or less, moved as its making would have."""
        # Not `result_type`: a weak float32 literal would be float64 by it, and is not.
        dtype = getattr(value, "dtype", None) or jnp.result_type(value)
        if dtype == jnp.complex64:
            # A rotation is a cosine and a sine, each a table of its own.
            parts = np.asarray(value)
            return jax.lax.complex(*map(self.constant, (np.real(parts), np.imag(parts))))
        if not jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.float64:
            return value
        short, wide = is_short(value), jnp.asarray(value, jnp.float64)
        if short.all():
            return wide
        units = jnp.asarray(_table_units(value) * UNIT_ROUNDOFF)
        moves = self._draw(np.shape(value)) * (units * jnp.maximum(self.constants, self.operations))
        return jnp.where(short, wide, wide * (1 + moves))

    def _draw(self, shape: tuple[int, ...]) -> Any:
        size = math.prod(shape)
        start = (next(self.places) * STEP) % SPAN
        start = start if isinstance(self.turn, int) else (start + self.turn * TURN) % SPAN
        part = jax.lax.dynamic_slice(self.pool, (start,), (size,)).reshape(shape)
        return part.astype(jnp.float64)


def is_short(value: Any) -> np.ndarray:
    """Return which numbers are short enough to mean themselves, not something rounded to float32:
    0, 1, a half, -1e4 and infinities; a mask is made of them."""
    array = np.asarray(value, np.float64)
    mantissa, _ = np.frexp(np.where(np.isfinite(array), array, 0.0))
    return np.asarray((mantissa * 2**SIGNIFICANT) % 1 == 0)


def _table_units(value: Any) -> Any:
    """Return by how many units the rows of a table made in float32 may be off, (rows, 1, ...).

    Row r of a table of sines and cosines, which begins with that of position 0, had an angle of up
    to r to round: its entries are off by up to r units. Any other constant is taken to be rounded
    once.
    """
    array = np.asarray(value)
    if array.ndim < 2 or not array.size or float(np.abs(array).max()) > 1.0 or array.min() >= 0:
        return np.ones((1,) * array.ndim)
    rows = int(np.argmax(array.shape[:-1]))
    # Of angle 0; and no other table of numbers below 1, such as a filter, begins with such a row.
    if not np.isin(np.take(array, 0, rows), (0.0, 1.0)).all():
        return np.ones((1,) * array.ndim)
    shape = [1] * array.ndim
    shape[rows] = array.shape[rows]
    return (1.0 + np.arange(array.shape[rows])).reshape(shape)
