"""Rounding inside jit that the compiler may not remove, to nearest and stochastically.

XLA may elide a float32 -> bfloat16 -> float32 round trip as excess precision, and with it every
lost update and every Kahan error term. `lax.reduce_precision` and integer arithmetic on the bits
are not such a round trip, and `check_rounding` compares what was compiled with NumPy's cast.
Source: spec/stability.md "Update survival", last paragraph.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from stability.formats import Format

_BIAS, _FRACTION = 127, 23


def nearest(x: jax.Array, fmt: Format) -> jax.Array:
    """Round float32 values to the nearest number of `fmt`, ties to even, saturating; float32 out.

    Subnormals of bfloat16 are subnormals of float32, which the CPU flushes to zero.
    """
    x = _clamped(x, fmt)
    # The exponent keeps float32's width: reduce_precision would flush the format's subnormals.
    rounded = jax.lax.reduce_precision(x, 8, fmt.mantissa_bits)
    if fmt.min_exponent > 1 - _BIAS:
        smallest = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        subnormal = jnp.round(x / smallest) * smallest
        rounded = jnp.where(jnp.abs(x) < 2.0**fmt.min_exponent, subnormal, rounded)
    return rounded


def stochastic(x: jax.Array, fmt: Format, key: jax.Array) -> jax.Array:
    """Round float32 values to one of their two neighbours in `fmt`, so that the mean is x.

    The probability of each neighbour is exact wherever float32 has at most 23 more bits than the
    format at x. In bfloat16 the grid below 2^-119 is 2^-126, and values below it flush to zero.

    Args:
        x: float32 values of any shape; saturating, NaN and infinity stay.
        fmt: the format to round to.
        key: the randomness; the same key rounds the same way.
    """
    x = _clamped(x, fmt)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = ((bits >> _FRACTION) & 0xFF) - _BIAS
    # Both the unit and its inverse must be normal numbers of float32.
    lowest = max(fmt.min_exponent, 1 - _BIAS + fmt.mantissa_bits)
    place = jnp.maximum(exponent, lowest) - fmt.mantissa_bits
    unit = jax.lax.bitcast_convert_type((place + _BIAS) << _FRACTION, jnp.float32)
    below = jnp.floor(x / unit)
    share = x / unit - below
    up = jax.random.uniform(key, x.shape) < share
    rounded = _clamped((below + up.astype(jnp.float32)) * unit, fmt)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _clamped(x: jax.Array, fmt: Format) -> jax.Array:
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -fmt.max, fmt.max), x)


@lru_cache(maxsize=16)
def check_rounding(fmt: Format) -> None:
    """Assert that rounding happens in compiled code; every probe that rounds calls this first.

    Raises:
        RuntimeError: the compiled program returned values that NumPy's cast would have rounded.
    """
    rng = np.random.default_rng(0)
    scale = np.float32(2.0) ** rng.integers(-6, 6, 256).astype(np.float32)
    x = (rng.standard_normal(256).astype(np.float32) * scale).astype(np.float32)
    got = np.asarray(jax.jit(lambda v: nearest(v, fmt))(x))
    wrong = int(np.sum(got != fmt.round(x)))
    if wrong:
        raise RuntimeError(
            f"rounding to {fmt.name} did not happen: {wrong} of {x.size} values that the compiled "
            "program returned differ from the cast. A compiler flag such as "
            "xla_allow_excess_precision may have removed it; no result of this probe would hold."
        )
