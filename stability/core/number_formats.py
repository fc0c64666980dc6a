"""Narrow floating-point formats and the properties that follow from their bit layout.

Source: docs/stability.md "Update survival", docs/formats.md "The formats".
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point storage format, described by its NumPy dtype."""

    name: str
    dtype: np.dtype

    @property
    def mantissa_bits(self) -> int:
        """Stored bits of the significand, without the implicit leading one."""
        return int(ml_dtypes.finfo(self.dtype).nmant)

    @property
    def min_exponent(self) -> int:
        """Binary exponent of the smallest normal number."""
        return int(ml_dtypes.finfo(self.dtype).minexp)

    @property
    def max_exponent(self) -> int:
        """Binary exponent of the largest finite number."""
        return int(np.frexp(self.max)[1]) - 1

    @property
    def max(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.dtype).max)

    @property
    def min_normal(self) -> float:
        """The smallest normal number."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number; the smallest normal one if there are no mantissa bits."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return int(ml_dtypes.finfo(self.dtype).bits)

    @property
    def bytes(self) -> int:
        """Bytes per number in an unpacked array."""
        return self.dtype.itemsize

    def clamp(self, x: np.ndarray | np.floating) -> np.ndarray:
        """Clamp finite float32 values to the range of the format; keep NaN and infinity.

        All casts in this module clamp first: a plain cast to e4m3 turns larger values into NaN.
        """
        x = np.asarray(x, np.float32)
        return np.where(np.isfinite(x), np.clip(x, -self.max, self.max), x)

    def encode(self, x: np.ndarray | np.floating) -> np.ndarray:
        """Return float32 values, clamped as by `clamp`, rounded to nearest even to this format."""
        return self.clamp(x).astype(self.dtype)

    def round(self, x: np.ndarray | np.floating) -> np.ndarray:
        """Return float32 values rounded as by `encode`, again in float32."""
        return self.encode(x).astype(np.float32)

    def spacing(self, x: np.ndarray) -> np.ndarray | np.floating:
        """Return the spacing of the format's numbers at |x|, float64, in the shape of x.

        For a number of the format, that is the distance to the next larger magnitude.
        """
        _, exponent = np.frexp(np.abs(np.asarray(x, np.float64)))
        normal = np.maximum(exponent - 1, self.min_exponent)
        floor = np.where(np.asarray(x) == 0, self.min_exponent, normal)
        return np.ldexp(1.0, floor - self.mantissa_bits)

    def distinct(
        self, x: np.ndarray, times: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct values of x rounded to this format, (k,) float64, and their counts.

        A 16-bit format has at most 65,536 values. A statistic over the distinct values is therefore
        exact, and its cost hardly depends on the size of x.

        Args:
            x: values of any shape.
            times: how often to count each element of x, (x.size,); None: once.
        """
        kind = np.uint8 if self.bytes == 1 else np.uint16
        counts = np.zeros(1 << (8 * self.bytes), np.int64)
        flat = np.asarray(x).reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            part = flat[block]
            stored = part if part.dtype == self.dtype else self.encode(part)
            bits = stored.view(kind)
            if times is None:
                counts += np.bincount(bits, minlength=counts.size)
            else:
                np.add.at(counts, bits, times[block])
        patterns = np.flatnonzero(counts)
        return patterns.astype(kind).view(self.dtype).astype(np.float64), counts[patterns]


_BLOCK = 1 << 22
"""Number of elements that `distinct` rounds at a time, which bounds its memory."""

BF16 = Format("bfloat16", np.dtype(ml_dtypes.bfloat16))
FP16 = Format("float16", np.dtype(np.float16))
E4M3 = Format("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn))
E5M2 = Format("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2))
FORMATS = (BF16, FP16, E4M3, E5M2)
"""Formats in which a parameter can be stored."""
E2M1 = Format("float4_e2m1fn", np.dtype(ml_dtypes.float4_e2m1fn))
E8M0 = Format("float8_e8m0fnu", np.dtype(ml_dtypes.float8_e8m0fnu))
"""Format of block scales (`block_formats`): powers of two, without sign or zero."""


def format_of(dtype: DTypeLike) -> Format | None:
    """Return the member of `FORMATS` with this dtype; None for others, such as float32."""
    return {fmt.dtype: fmt for fmt in FORMATS}.get(np.dtype(dtype))


def by_name(name: str) -> Format:
    """Return a member of `FORMATS` by its dtype's name, such as "bfloat16" or "float8_e4m3fn".

    Raises:
        ValueError: there is no format of that name.
    """
    for fmt in FORMATS:
        if fmt.name == name:
            return fmt
    raise ValueError(
        f"unknown storage format {name!r}: expected one of {', '.join(f.name for f in FORMATS)}."
    )
