"""Block-scaled quantisation in JAX, bit-exact on every platform.

The last axis, along which a product sums, is cut into blocks with a common scale; the last block is
padded with zeros. Three rules make the results exact:

- Exponents are read from the bits, never from a float logarithm.
- Values are rounded to the grid of their format by float32 arithmetic, never by a narrow cast,
  which a compiler may elide or do in two steps.
- Scaling by a power of two works on the bits, because a CPU flushes float32 subnormals to zero.

`stability.products.block_formats` is an independent reference that gives bit-identical results.

Sources: OCP Microscaling Formats (MX) v1.0, section 6.3; "Pretraining Large Language Models with
NVFP4" (NVIDIA 2025), appendix C; DeepSeek-V3, section 3.3; docs/formats.md "The formats".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

MODES = ("ceil", "floor", "even")
"""Rounding modes for the scale of an MX block."""
E4M3, E2M1 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
MX_BLOCK, NV_BLOCK, TILE = 32, 16, 128
LARGEST = float(np.finfo(np.float32).max)
# Keeps every scale above 0.
SMALLEST_AMAX = 1e-4
"""Lower bound of amax, the largest magnitude in a block, when `deepseek` computes a scale."""
_BIAS, _FRACTION, _INFINITY, _NAN_BYTE = 127, 23, 0x7F800000, 255


class MX(NamedTuple):
    """Array quantised to an MX format: blocks of values, each with a power-of-two scale (E8M0)."""

    values: Float[Array, "... n block"]
    """Values of the element format, stored as float32."""
    scale: UInt8[Array, "... n"]
    """Biased exponent of the block's scale, 2^(byte - 127); 255 is NaN."""

    def dequantised(self) -> Float[Array, "... n block"]:
        """Return values times scale in float32: inf on overflow, and on a CPU 0 below 2^-126."""
        exponent = self.scale.astype(jnp.int32)[..., None] - _BIAS
        half = exponent >> 1
        wide = self.values * _power(half) * _power(exponent - half)
        return jnp.where(self.scale[..., None] == _NAN_BYTE, jnp.nan, wide)


class Scaled(NamedTuple):
    """Quantised array: blocks of values, a floating-point scale per block, and one per tensor."""

    values: Float[Array, "... n block"]
    """Values of the element format, stored as float32."""
    scale: Float[Array, "... n"]
    """Scale of each block; NaN if the block contained a non-finite value."""
    outer: Float[Array, ""]
    """Scale of the tensor."""

    def inner(self) -> Float[Array, "... n block"]:
        """Return values times block scale; for NVFP4 exact, with at most 6 significant bits."""
        return self.values * self.scale[..., None]

    def dequantised(self) -> Float[Array, "... n block"]:
        """Return values times both scales in float32; on a CPU 0 below 2^-126."""
        return self.inner() * self.outer


def blocks(x: Float[Array, "... k"], size: int) -> Float[Array, "... n size"]:
    """Cut the last axis into blocks (..., n, size); padding zeros do not affect products."""
    short = -x.shape[-1] % size
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, short),))
    return x.reshape(*x.shape[:-1], -1, size)


def mx(x: Float[Array, "... k"], mode: str = "ceil", dtype: Any = E4M3, size: int = MX_BLOCK) -> MX:
    """Quantise float32 to an MX format: MXFP8 by default, MXFP4 with `E2M1`.

    Let amax be the largest magnitude in a block, and max = m 2^e the format's largest value, with m
    in [1, 2). `mode` selects the block's scale:

    - "floor": 2^(E - e), where E is the exponent of amax;
    - "even": the same after rounding amax to the format's precision;
    - "ceil": amax / max, rounded up to a power of two; the only mode that never clips.

    The scale byte is 0 for a block of zeros, 255 for one with a NaN, and 254 for one with an
    infinity.

    Args:
        x: values of any shape; blocks run along the last axis.
        mode: one of `MODES`.
        dtype: the element format.
        size: number of values per block.

    Raises:
        ValueError: the mode is unknown, or `x` is not float32.
    """
    if mode not in MODES:
        raise ValueError(f"mx: mode={mode!r} must be one of {MODES}.")
    parts = blocks(_checked(x, "mx"), size)
    amax = jnp.max(_magnitude(parts), axis=-1)
    top = int(np.float32(_info(dtype).max).view(np.int32))
    exponent, fraction = amax >> _FRACTION, amax & ((1 << _FRACTION) - 1)
    half_step = 1 << (_FRACTION - 1 - _info(dtype).nmant)
    carry = {
        "floor": fraction < 0,
        "ceil": fraction > top & ((1 << _FRACTION) - 1),
        "even": fraction >= (1 << _FRACTION) - half_step,
    }[mode]
    exponent = exponent + carry.astype(jnp.int32) - ((top >> _FRACTION) - _BIAS)
    byte = jnp.clip(exponent, 0, _NAN_BYTE - 1)
    byte = jnp.where(amax >= _INFINITY, _NAN_BYTE - 1, byte)
    byte = jnp.where(amax > _INFINITY, _NAN_BYTE, byte)
    scaled = _saturated(_shifted(parts, _BIAS - byte[..., None]), dtype)
    values = jnp.where((amax > _INFINITY)[..., None], 0.0, nearest(scaled, dtype))
    return MX(values, byte.astype(jnp.uint8))


def nvfp4(x: Float[Array, "... k"], key: jax.Array | None = None) -> Scaled:
    """Quantise float32 to NVFP4: e2m1, an e4m3 scale per block of 16, a float32 scale per tensor.

    The encode scale is g = min(448 * 6 / amax, FLT_MAX), with amax over the tensor's finite values.
    A block with largest magnitude amax_b has the scale s = e4m3(amax_b * (g / 6)) and the values
    x * min(1 / (s / g), FLT_MAX), clamped to 6. Every operation is rounded to 24 bits, also below
    2^-126. A block with non-finite values has scale NaN. `outer`, the tensor's scale, is 1/g.

    Args:
        x: values of any shape; blocks run along the last axis.
        key: PRNG key for stochastic rounding of the values; None rounds to nearest, ties to even.

    Raises:
        ValueError: `x` is not float32.
    """
    parts = blocks(_checked(x, "nvfp4"), NV_BLOCK)
    bits = _magnitude(parts)
    amax = jnp.max(jnp.where(bits < _INFINITY, bits, 0), initial=0)
    encode = jnp.minimum(_info(E4M3).max * _info(E2M1).max / _float(amax), LARGEST)
    g, g_exponent = _split(encode)
    largest = jnp.max(bits, axis=-1)
    finite = largest < _INFINITY
    scale = _shifted(jnp.where(finite, _float(largest), 0.0), g_exponent)
    scale = scale * _divided(g, int(_info(E2M1).max))
    scale = nearest(_saturated(scale, E4M3), E4M3)
    factor, exponent = _split(1.0 / (scale * (1.0 / g)))
    exponent = exponent + g_exponent
    beyond = (scale == 0) | (exponent > _BIAS)
    factor = jnp.where(beyond, np.float32(LARGEST * 2.0**-_BIAS), factor)[..., None]
    shifted = _shifted(parts, jnp.where(beyond, _BIAS, exponent)[..., None])
    scaled = jnp.where(finite[..., None], _saturated(shifted * factor, E2M1), 0.0)
    values = nearest(scaled, E2M1) if key is None else stochastic(scaled, E2M1, key)
    return Scaled(values, jnp.where(finite, scale, jnp.nan), 1.0 / encode)


def deepseek(
    x: Float[Array, "... k"], *, rows: int = 1, power_of_two: bool = False, dtype: Any = E4M3
) -> Scaled:
    """Quantise float32 to e4m3, with a float32 scale max(amax, 1e-4) / 448 per `rows` x 128 block.

    Args:
        x: values; at least two axes if `rows` is above 1. Blocks lie along the last two axes.
        rows: 1 for activations, 128 for weights.
        power_of_two: round scales up to powers of two, as for hardware with E8M0 scales.
        dtype: the element format; 448 above is the largest value of the default.

    Returns:
        The blocks, with the scale repeated for each row of a block, and `outer` 1. The scale is NaN
        for a block with a non-finite value.

    Raises:
        ValueError: `x` is not float32.
    """
    parts = blocks(_checked(x, "deepseek"), TILE)
    amax = jnp.max(_magnitude(parts), axis=-1)
    if rows > 1:
        count = x.shape[-2]
        padded = jnp.pad(amax, (*((0, 0),) * (x.ndim - 2), (0, -count % rows), (0, 0)))
        grouped = padded.reshape(*x.shape[:-2], -1, rows, amax.shape[-1]).max(-2)
        amax = jnp.repeat(grouped, rows, axis=-2)[..., :count, :]
    largest = jnp.maximum(_float(jnp.minimum(amax, _INFINITY - 1)), SMALLEST_AMAX)
    scale = _divided(largest, int(_info(dtype).max))
    if power_of_two:
        factor, exponent = _split(scale)
        scale = _power(exponent + (factor > 1).astype(jnp.int32))
    scale = jnp.where(amax < _INFINITY, scale, jnp.nan)
    scaled = jnp.where((amax < _INFINITY)[..., None], parts / scale[..., None], 0.0)
    return Scaled(nearest(_saturated(scaled, dtype), dtype), scale, jnp.float32(1.0))


def nearest(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Round float32 values to the nearest number of `dtype`, ties to even; the result is float32.

    Values beyond the range saturate; NaN and infinity are kept. Subnormals of bfloat16 are
    subnormals of float32, which the CPU flushes to zero.
    """
    info = _info(dtype)
    x = _clamped(x, dtype)
    # The exponent keeps float32's width: reduce_precision would flush the format's subnormals.
    rounded = jax.lax.reduce_precision(x, 8, info.nmant)
    if info.minexp > 1 - _BIAS:
        smallest = 2.0 ** (info.minexp - info.nmant)
        subnormal = jnp.round(x / smallest) * smallest
        rounded = jnp.where(jnp.abs(x) < 2.0**info.minexp, subnormal, rounded)
    return rounded


def stochastic(x: Float[Array, "..."], dtype: Any, key: jax.Array) -> Float[Array, "..."]:
    """Round float32 values to one of their two neighbours in `dtype`, such that the mean is x.

    The probability of each neighbour is exact where float32 has at most 23 more bits than the
    format at x. In bfloat16, results below 2^-119 are multiples of 2^-126, and values of `x` below
    2^-126 flush to zero.

    Args:
        x: float32 values of any shape. Values beyond the range saturate; NaN and infinity are kept.
        dtype: the format to round to.
        key: PRNG key; the same key rounds the same way.
    """
    info = _info(dtype)
    x = _clamped(x, dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = ((bits >> _FRACTION) & 0xFF) - _BIAS
    # Both the unit and its inverse must be normal numbers of float32.
    lowest = max(info.minexp, 1 - _BIAS + info.nmant)
    unit = _power(jnp.maximum(exponent, lowest) - info.nmant)
    below = jnp.floor(x / unit)
    share = x / unit - below
    # Explicit float32: with 64-bit types enabled the default is float64, which draws other numbers.
    up = jax.random.uniform(key, x.shape, jnp.float32) < share
    rounded = _clamped((below + up.astype(jnp.float32)) * unit, dtype)
    return jnp.where(jnp.isfinite(x), rounded, x)


def key_from(x: Float[Array, "..."]) -> jax.Array:
    """Return a PRNG key that depends only on the bits of float32 values.

    The key is the sum of the bits as integers, which does not depend on the order: on any device
    and in any sharding, the same tensor gives the same key. The result of a computation differs
    between devices by rounding, which changes the key; so pass a stored tensor such as a weight.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.random.key(jnp.sum(bits, dtype=jnp.uint32))


def _info(dtype: Any) -> Any:
    found = jnp.finfo(dtype)
    return _Grid(int(found.nmant), int(found.minexp), float(found.max))


class _Grid(NamedTuple):
    nmant: int
    minexp: int
    max: float


def _checked(x: jax.Array, name: str) -> jax.Array:
    if x.dtype != jnp.float32:
        raise ValueError(f"{name}: x is {x.dtype}, expected float32; write x.astype(jnp.float32).")
    return x


def _magnitude(x: jax.Array) -> jax.Array:
    """Return |x| as int32 bits: ordered like the values, with infinity and then NaN at the top."""
    return jax.lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF)


def _divided(x: jax.Array, divisor: int) -> jax.Array:
    """Return x / divisor in float32, rounded once, for positive normal x and results.

    XLA turns division by a known constant into multiplication by its reciprocal, which rounds
    differently in a third of all cases. Therefore this divides the significand as an integer.
    """
    twos = (divisor & -divisor).bit_length() - 1
    odd = divisor >> twos
    bits, low = _magnitude(x), odd.bit_length() - 1
    significand = bits & ((1 << _FRACTION) - 1) | (1 << _FRACTION)
    place = jnp.where(significand >= (odd << _FRACTION) >> low, low, low + 1)
    # An odd divisor leaves no ties.
    quotient = jax.lax.div((significand << place) + odd // 2, np.int32(odd))
    return quotient.astype(jnp.float32) * _power((bits >> _FRACTION) - 150 - place - twos)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _power(exponent: jax.Array) -> jax.Array:
    """Return 2^exponent in float32, for exponents of normal numbers."""
    return _float((exponent + _BIAS) << _FRACTION)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the significand in [1, 2) and the exponent of positive normal numbers."""
    bits = _magnitude(x)
    return _float(bits & ((1 << _FRACTION) - 1) | (_BIAS << _FRACTION)), (bits >> _FRACTION) - _BIAS


def _shifted(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return x * 2^exponent, also for subnormal x; inexact below 2^-102 and beyond 2^126.

    In every format that callers round to, results below 2^-102 are too small to matter, and results
    beyond 2^126 saturate.
    """
    bits, magnitude = jax.lax.bitcast_convert_type(x, jnp.int32), _magnitude(x)
    biased = magnitude >> _FRACTION
    implicit = jnp.where(biased > 0, 1 << _FRACTION, 0)
    significand = magnitude & ((1 << _FRACTION) - 1) | implicit
    place = jnp.maximum(biased, 1) - (_BIAS + _FRACTION) + exponent
    shifted = significand.astype(jnp.float32) * _power(jnp.clip(place, 1 - _BIAS, 103))
    shifted = jnp.where(magnitude >= _INFINITY, jnp.abs(x), shifted)
    return jnp.where(bits < 0, -shifted, shifted)


def _saturated(x: jax.Array, dtype: Any) -> jax.Array:
    """Clamp to the format's range, also infinity, which a cast would turn into NaN."""
    top = _info(dtype).max
    return jnp.clip(x, -top, top)


def _clamped(x: jax.Array, dtype: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x), _saturated(x, dtype), x)
