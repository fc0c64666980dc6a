"""Block-scaled formats in NumPy and ml_dtypes: the oracle of the model's `quantization.formats`.

The functions here follow the formats' definitions, independently of the model's version: with
float64 and `frexp` where the model operates on float32 bits, and with casts of ml_dtypes for
rounding. Every float32 value has a defined result, NaN and infinity too. Sources: as in
`megalodon_jax.quantization.formats`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stability.core.number_formats import E2M1, E4M3, E8M0, Format

FLT_MAX = float(np.finfo(np.float32).max)


class Blocks(NamedTuple):
    """A quantised tensor: values (..., n, block) and scales (..., n) in their narrow dtypes."""

    values: np.ndarray
    scale: np.ndarray
    outer: float
    """Scale of the whole tensor, by which all values are multiplied; 1 if the format has none."""

    def dequantised(self) -> np.ndarray:
        """Return the represented values, float64 (..., n, block)."""
        scale = self.scale.astype(np.float64)[..., None]
        return self.values.astype(np.float64) * scale * self.outer

    def flat(self, length: int) -> np.ndarray:
        """Return the first `length` represented values, blocks joined, float64 (..., length)."""
        wide = self.dequantised()
        return wide.reshape(*wide.shape[:-2], -1)[..., :length]


def blocks(x: np.ndarray, size: int) -> np.ndarray:
    """Split the last axis into blocks, (..., n, size) float64; pad the last block with zeros."""
    short = -x.shape[-1] % size
    x = np.pad(np.asarray(x, np.float64), [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return x.reshape(*x.shape[:-1], -1, size)


def mx(x: np.ndarray, mode: str = "ceil", fmt: Format = E4M3, size: int = 32) -> Blocks:
    """Quantise to an MX format: a power-of-two scale (E8M0) per block of `size` elements.

    Args:
        x: (..., L).
        mode: rounding of the scale, "ceil", "even" or "floor"; see `quantization.formats.mx`.
        fmt: format of the elements.
        size: elements per block.
    """
    parts = blocks(x, size)
    amax = np.max(np.abs(parts), axis=-1)
    finite = np.where(np.isfinite(amax), amax, 1.0)
    if mode == "ceil":
        fraction, exponent = np.frexp(finite / fmt.max)
        exponent = exponent - (fraction == 0.5)
    else:
        if mode == "even":
            finite = _rounded_half_up(finite, fmt.mantissa_bits + 1)
        exponent = np.frexp(finite)[1] - np.frexp(fmt.max)[1]
    exponent = np.where(amax == 0, E8M0.min_exponent, exponent)
    exponent = np.where(np.isinf(amax), E8M0.max_exponent, exponent)
    scale = np.ldexp(1.0, np.clip(exponent, E8M0.min_exponent, E8M0.max_exponent))
    valid = ~np.isnan(amax)
    values = np.where(valid[..., None], parts, 0.0) / scale[..., None]
    scale = np.where(valid, scale, np.nan)
    return Blocks(_cast(values, fmt), scale.astype(E8M0.dtype), 1.0)


def nvfp4(x: np.ndarray) -> Blocks:
    """Quantise to NVFP4: e2m1 elements, an e4m3 scale per 16 elements, a scale of the whole tensor.

    Elements are rounded to nearest. See `quantization.formats.nvfp4` for the formulas.
    """
    parts = blocks(x, 16)
    amax = np.max(np.abs(parts), axis=-1)
    finite = np.isfinite(parts)
    whole = np.max(np.abs(parts), where=finite, initial=0.0)
    with np.errstate(divide="ignore"):
        encode = min(_to_24_bits(np.divide(E4M3.max * E2M1.max, whole)), FLT_MAX)
        decode = _to_24_bits(1.0 / encode)
        valid = np.isfinite(amax)
        scale = _to_24_bits(np.where(valid, amax, 0.0) * _to_24_bits(encode / E2M1.max))
        scale = _cast(scale, E4M3)
        each = np.divide(1.0, _to_24_bits(scale.astype(np.float64) * decode))
    each = np.minimum(_to_24_bits(each), FLT_MAX)[..., None]
    scaled = np.where(valid[..., None], _to_24_bits(np.where(finite, parts, 0.0) * each), 0.0)
    nan = np.array(np.nan, E4M3.dtype)
    return Blocks(_cast(scaled, E2M1), np.where(valid, scale, nan), float(decode))


def deepseek(
    x: np.ndarray, *, rows: int = 1, power_of_two: bool = False, fmt: Format = E4M3
) -> Blocks:
    """Quantise as DeepSeek-V3, with a float32 scale per block of `rows` x 128 elements.

    The scale is max(amax, 1e-4) / fmt.max, rounded up to a power of two if `power_of_two`. The
    result has values (..., n, 128) and scales (..., n), equal for all rows of a block.
    """
    parts = blocks(x, 128)
    amax = np.max(np.abs(parts), axis=-1)
    for start in range(0, x.shape[-2] if rows > 1 else 0, rows):
        rectangle = amax[..., start : start + rows, :]
        rectangle[...] = np.max(rectangle, axis=-2, keepdims=True)
    scale = _to_24_bits(np.maximum(amax, float(np.float32(1e-4))) / fmt.max)
    if power_of_two:
        fraction, exponent = np.frexp(np.where(np.isfinite(scale), scale, 1.0))
        scale = np.ldexp(1.0, exponent - (fraction == 0.5))
    valid = np.isfinite(amax)
    scaled = np.where(valid[..., None], parts, 0.0) / np.where(valid, scale, 1.0)[..., None]
    scale = np.where(valid, scale, np.nan)
    return Blocks(_cast(_to_24_bits(scaled), fmt), scale.astype(np.float32), 1.0)


def _cast(x: Any, fmt: Format) -> np.ndarray:
    """Clamp and round to nearest. The detour by float32 is exact for all values in this module."""
    return np.clip(x, -fmt.max, fmt.max).astype(np.float32).astype(fmt.dtype)


def _to_24_bits(x: Any) -> np.ndarray | np.floating:
    """Round to 24 significant bits, as float32 does, without float32's limits on the exponent."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 2.0**24), exponent - 24)


def _rounded_half_up(x: np.ndarray, bits: int) -> np.ndarray:
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.floor(fraction * 2.0**bits + 0.5), exponent - bits)
