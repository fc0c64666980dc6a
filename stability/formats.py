"""Small floating-point formats as value objects: what follows from their bits.

Source: spec/stability.md "Update survival" and "Formats".
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point storage format, described by its NumPy dtype."""

    name: str
    dtype: np.dtype

    @property
    def mantissa_bits(self) -> int:
        """Stored bits of the significand, without the implicit one."""
        return int(ml_dtypes.finfo(self.dtype).nmant)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return int(ml_dtypes.finfo(self.dtype).minexp)

    def round(self, x: np.ndarray) -> np.ndarray:
        """Round float32 values to the nearest number of this format, ties to even; float32 out."""
        return np.asarray(x, np.float32).astype(self.dtype).astype(np.float32)

    def spacing(self, x: np.ndarray) -> np.ndarray:
        """Distance from each |x| to the next larger number of the format; float64."""
        _, exponent = np.frexp(np.abs(np.asarray(x, np.float64)))
        normal = np.maximum(exponent - 1, self.min_exponent)
        floor = np.where(np.asarray(x) == 0, self.min_exponent, normal)
        return np.ldexp(1.0, floor - self.mantissa_bits)


BF16 = Format("bfloat16", np.dtype(ml_dtypes.bfloat16))
FP16 = Format("float16", np.dtype(np.float16))
E4M3 = Format("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn))
E5M2 = Format("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2))
