"""Random signs inside a traced float64 program, which simulate the rounding of every result.

Each run gets one pool of random signs, and every operation reads a different part of it. A random
number generator at every operation would take longer to compile than the program.
"""

from __future__ import annotations

import dataclasses
import hashlib
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
# `SPAN` over the golden ratio: in nested loops, iterations share signs only if the inner loop has
# hundreds of them. With a factor of 1, inner iteration 1 of outer iteration 0 would read the signs
# of inner iteration 0 of outer iteration 1, and errors that should be independent would add up.
OUTER = 10_125
"""Factor on the outer iteration in the combined iteration number of nested loops."""
SIGNIFICANT = 12
"""Largest number of significant bits with which a number counts as exact, such as 0.5 or -1e4, but
not 1e-6."""


def pool(seed: int, elements: int) -> np.ndarray:
    """Return a pool of random signs, int8 of shape (elements + SPAN,), for arrays of up to
    `elements` elements."""
    bits = np.random.default_rng(seed).integers(0, 2, elements + SPAN, np.int8)
    return (2 * bits - 1).astype(np.int8)


@dataclass(frozen=True)
class Signs:
    """Perturbs float64 values by one unit roundoff, up or down."""

    pool: Any
    """Signs (1 or -1), int8 of shape (elements + SPAN,); a pool of zeros perturbs nothing."""
    operations: Any = 1.0
    """1 to perturb the result of every operation and all constants, 0 for none."""
    constants: Any = 0.0
    """1 to perturb constants that are float32 even in a float64 program, 0 for none."""
    # False for float32 programs: with bfloat16's larger roundoff, an operation that computes in too
    # low a precision by mistake would be within tolerance.
    narrow: bool = False
    """Whether bfloat16 operations are perturbed by bfloat16's roundoff; if not, by float32's."""
    shared: frozenset[bytes] = frozenset()
    """Digests of the constants that another program holds bit for bit (`digest`), for which
    `constants` has no effect."""
    turn: Any = 0
    """Number of the current loop iteration, 0 outside of loops; the numbers of nested loops are
    combined into one."""
    places: Iterator[int] = field(default_factory=itertools.count)
    """Counter that gives each operation a different part of the pool."""

    def at(self, turn: Any) -> Signs:
        """Return the signs for iteration `turn` of a loop."""
        # Modulo `SPAN`, so that no 32-bit product overflows.
        return dataclasses.replace(self, turn=(self.turn * OUTER + turn + 1) % SPAN)

    def moved(self, value: Any, roundoff: float, *, counted: bool = False) -> Any:
        """Return a float64 value times 1 +- `roundoff`; exact scalars (`is_short`) are unchanged.

        A complex value is multiplied by 1 +- roundoff +- i roundoff. If the field `operations` is
        0, every value is unchanged.

        Args:
            value: float64 or complex128 array.
            roundoff: relative change of each element.
            counted: whether exact elements of an array are unchanged too.
        """
        moves = self._draw(value.shape)
        if jnp.iscomplexobj(value):
            # Each part of a complex product takes errors from both parts of the factors, so the
            # phase is perturbed too.
            moves = jax.lax.complex(moves, self._draw(value.shape))
        factor = 1 + moves * jnp.asarray(roundoff * self.operations)
        perturbed = value * factor.astype(value.dtype)
        if (value.shape and not counted) or jnp.iscomplexobj(value):
            return perturbed
        # A scalar with few digits is a count or an exponent, such as 3.0 - 1.0, and is exact. If an
        # integer exponent were perturbed, powers of negative numbers would become NaN.
        mantissa, _ = jnp.frexp(value)
        return jnp.where((mantissa * 2**SIGNIFICANT) % 1 == 0, value, perturbed)

    def inside(self, name: str, operands: list[Any]) -> list[Any]:
        """Return the operands of an operation, reflected into its domain if values are perturbed.

        Operands are returned unchanged if the operation has no bounded domain (`domains.inside`),
        if an operand is complex, or if neither operations nor constants are perturbed.
        """
        if (name != "pow" and name not in DOMAINS) or any(jnp.iscomplexobj(x) for x in operands):
            return operands
        # Without perturbations, an operand outside of the domain is the program's fault: keep NaN.
        perturbs = jnp.maximum(jnp.asarray(self.operations), jnp.asarray(self.constants)) > 0
        kept = inside(name, operands, jnp.where)
        return [jnp.where(perturbs, x, y) for x, y in zip(kept, operands, strict=True)]

    def constant(self, value: Any) -> Any:
        """Return a constant in float64, perturbed by its rounding error if it was in float32 or a
        narrower dtype.

        Numbers with few significant bits (`is_short`) count as exact; integers are unchanged.
        """
        # Not `result_type`: it would call a weak float32 literal float64.
        dtype = getattr(value, "dtype", None) or jnp.result_type(value)
        if dtype == jnp.complex64:
            # A table of complex rotations is treated as two tables, of cosines and of sines.
            parts = np.asarray(value)
            own = self
            if digest(parts) in self.shared:
                own = dataclasses.replace(self, constants=0.0)
            return jax.lax.complex(*map(own.constant, (np.real(parts), np.imag(parts))))
        if not jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.float64:
            return value
        short, wide = is_short(value), jnp.asarray(value, jnp.float64)
        if short.all():
            return wide
        units = jnp.asarray(_table_units(value) * UNIT_ROUNDOFF)
        scale = self.operations
        if digest(value) not in self.shared:
            scale = jnp.maximum(self.constants, scale)
        moves = self._draw(np.shape(value)) * (units * scale)
        return jnp.where(short, wide, wide * (1 + moves))

    def _draw(self, shape: tuple[int, ...]) -> Any:
        size = math.prod(shape)
        start = (next(self.places) * STEP) % SPAN
        start = start if isinstance(self.turn, int) else (start + self.turn * TURN) % SPAN
        part = jax.lax.dynamic_slice(self.pool, (start,), (size,)).reshape(shape)
        return part.astype(jnp.float64)


def digest(table: Any) -> bytes:
    """Return a hash of a constant array's shape and of its values in float64 or complex128."""
    array = np.asarray(table)
    array = np.ascontiguousarray(array, np.complex128 if np.iscomplexobj(array) else np.float64)
    return hashlib.sha256(repr(np.shape(table)).encode() + array.tobytes()).digest()


def is_short(value: Any) -> np.ndarray:
    """Return which numbers have at most `SIGNIFICANT` significant bits, as booleans.

    Examples are 0, 1, 0.5 and -1e4; infinities count too. Such numbers, which occur in masks, are
    taken to be exact rather than rounded to float32.
    """
    array = np.asarray(value, np.float64)
    mantissa, _ = np.frexp(np.where(np.isfinite(array), array, 0.0))
    return np.asarray((mantissa * 2**SIGNIFICANT) % 1 == 0)


def _table_units(value: Any) -> Any:
    """Return the error of each row of a float32 constant, in unit roundoffs, to be broadcast to it.

    In a table of sines and cosines that starts at position 0, the angle of row r is up to r and was
    rounded, so the entries of row r are off by up to r units, plus 1 for their own rounding. Any
    other constant gets 1 unit.
    """
    array = np.asarray(value)
    if array.ndim < 2 or not array.size or float(np.abs(array).max()) > 1.0 or array.min() >= 0:
        return np.ones((1,) * array.ndim)
    rows = int(np.argmax(array.shape[:-1]))
    # Row 0 has angle 0, hence entries 0 and 1. Other tables, such as filters, do not start so.
    if not np.isin(np.take(array, 0, rows), (0.0, 1.0)).all():
        return np.ones((1,) * array.ndim)
    shape = [1] * array.ndim
    shape[rows] = array.shape[rows]
    return (1.0 + np.arange(array.shape[rows])).reshape(shape)
