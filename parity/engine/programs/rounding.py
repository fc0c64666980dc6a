"""Random signs inside a traced program, which simulate the rounding of every result in float64.

Each run gets one pool of random bits, and every operation reads a different part of it. A random
number generator at every operation would take longer to compile than the program.
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

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.domains import DOMAINS, inside

SPAN = 1 << 14
"""Number of positions in the pool where an operation may start reading."""
# Coprime to `SPAN`, so that successive operations visit every position.
STEP = 5_741
TURN = 9_973
"""Distance in the pool between successive iterations of a loop."""
# The golden ratio of `SPAN`: iterations of two nested loops share signs only if the inner loop has
# hundreds. With 1, iteration 1 of outer iteration 0 would read the signs of iteration 0 of outer
# iteration 1, and errors that should be independent would add up.
OUTER = 10_125
"""Inner iterations that one iteration of the enclosing loop counts for."""
SIGNIFICANT = 12
"""Significant bits up to which a literal counts as exact: 0.5 and -1e4 do, 1e-6 is rounded."""


def pool(seed: int, elements: int) -> np.ndarray:
    """Return a pool of random signs, int8, for arrays of up to `elements`."""
    bits = np.random.default_rng(seed).integers(0, 2, elements + SPAN, np.int8)
    return (2 * bits - 1).astype(np.int8)


@dataclass(frozen=True)
class Signs:
    """Perturbs values by one unit roundoff, up or down."""

    pool: Any
    """Signs, int8 (elements + SPAN,); zeros perturb nothing."""
    operations: Any = 1.0
    """1 to round the result of every operation, 0 for none."""
    constants: Any = 0.0
    """1 to perturb constants that are float32 even in a float64 program, 0 for none."""
    narrow: bool = False
    """Whether a bfloat16 operation rounds to bfloat16. If not, it rounds to float32: a program that
    should be float32 must not be excused for computing in lower precision."""
    turn: Any = 0
    """Index of the enclosing loop's iteration."""
    places: Iterator[int] = field(default_factory=itertools.count)

    def at(self, turn: Any) -> Signs:
        """Return the signs of one iteration of a loop."""
        # Kept below `SPAN`, so that no 32-bit product overflows.
        return dataclasses.replace(self, turn=(self.turn * OUTER + turn + 1) % SPAN)

    def moved(self, value: Any, roundoff: float) -> Any:
        """Perturb a float64 value as an operation with this unit roundoff would."""
        moves = self._draw(value.shape)
        if jnp.iscomplexobj(value):
            # Each part of a complex product takes errors from both parts of its factors, so the
            # phase is perturbed too.
            moves = jax.lax.complex(moves, self._draw(value.shape))
        factor = 1 + moves * jnp.asarray(roundoff * self.operations)
        perturbed = value * factor.astype(value.dtype)
        if value.shape or jnp.iscomplexobj(value):
            return perturbed
        # A scalar with few digits is a count or an exponent, such as 3.0 - 1.0: it is exact, and a
        # negative number has no power near it.
        mantissa, _ = jnp.frexp(value)
        return jnp.where((mantissa * 2**SIGNIFICANT) % 1 == 0, value, perturbed)

    def inside(self, name: str, operands: list[Any]) -> list[Any]:
        """Return the operands of an operation, reflected into its domain if they are perturbed."""
        if (name != "pow" and name not in DOMAINS) or any(jnp.iscomplexobj(x) for x in operands):
            return operands
        # An unperturbed operand outside of the domain is the program's own, and gives NaN.
        perturbs = jnp.maximum(jnp.asarray(self.operations), jnp.asarray(self.constants)) > 0
        kept = inside(name, operands, jnp.where)
        return [jnp.where(perturbs, x, y) for x, y in zip(kept, operands, strict=True)]

    def constant(self, value: Any) -> Any:
        """Widen a constant to float64; perturb one of float32 or less by its rounding error."""
        # Not `result_type`: it would call a weak float32 literal float64.
        dtype = getattr(value, "dtype", None) or jnp.result_type(value)
        if dtype == jnp.complex64:
            # A rotation consists of a cosine and a sine, computed as two tables.
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
    """Return which numbers are short enough to be exact rather than rounded to float32: 0, 1, 0.5,
    -1e4 and infinities, of which masks are made."""
    array = np.asarray(value, np.float64)
    mantissa, _ = np.frexp(np.where(np.isfinite(array), array, 0.0))
    return np.asarray((mantissa * 2**SIGNIFICANT) % 1 == 0)


def _table_units(value: Any) -> Any:
    """Return the error of each row of a float32 table, in unit roundoffs, (rows, 1, ...).

    In a table of sines and cosines that starts at position 0, the angle of row r is up to r and was
    rounded, so its entries are off by up to r units. Any other constant is taken to be rounded
    once.
    """
    array = np.asarray(value)
    if array.ndim < 2 or not array.size or float(np.abs(array).max()) > 1.0 or array.min() >= 0:
        return np.ones((1,) * array.ndim)
    rows = int(np.argmax(array.shape[:-1]))
    # The row of angle 0. Other tables of numbers below 1, such as filters, do not start with one.
    if not np.isin(np.take(array, 0, rows), (0.0, 1.0)).all():
        return np.ones((1,) * array.ndim)
    shape = [1] * array.ndim
    shape[rows] = array.shape[rows]
    return (1.0 + np.arange(array.shape[rows])).reshape(shape)
