"""Summary of an array on the host: dtype, shape, range, and number of non-finite elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Operand:
    """Summary of an operation's input or output."""

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    """Smallest finite element; NaN if there is none."""
    largest: float
    """Largest finite element; NaN if there is none."""
    nan: int
    """Number of NaN elements."""
    inf: int
    """Number of infinite elements."""

    def describe(self) -> str:
        """Return text such as "float32[2, 3] in [-1, 4], 1 NaN"."""
        bad = "".join(f", {n:,} {word}" for n, word in ((self.nan, "NaN"), (self.inf, "inf")) if n)
        spread = f" in [{self.smallest:.4g}, {self.largest:.4g}]"
        return f"{self.dtype}{list(self.shape)}{'' if np.isnan(self.smallest) else spread}{bad}"


def _host(array: Any) -> np.ndarray | None:
    """Return floating-point values on the host in float32 or wider; None for other dtypes.

    Complex values become a stack of their real and imaginary parts.
    """
    dtype = getattr(array, "dtype", np.dtype(type(array)))
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or not jnp.issubdtype(dtype, jnp.inexact):
        return None
    host: Any = np.asarray(array)
    if np.iscomplexobj(host):
        return np.stack([host.real, host.imag])
    return host.astype(np.float32) if host.dtype.itemsize < 4 else host


def all_finite(array: Any) -> bool:
    """Whether an array has neither NaN nor infinity; True for non-floating dtypes."""
    host = _host(array)
    return host is None or bool(np.isfinite(host).all())


def has_nan(array: Any) -> bool:
    """Whether an array has a NaN; False for non-floating dtypes."""
    host = _host(array)
    return host is not None and bool(np.isnan(host).any())


def operand(array: Any) -> Operand:
    """Return the summary of an array; random keys and booleans have the range NaN to NaN."""
    dtype = str(getattr(array, "dtype", type(array).__name__))
    shape = tuple(getattr(array, "shape", ()))
    host = _host(array)
    if host is None:
        plain = jax.dtypes.issubdtype(getattr(array, "dtype", np.dtype(bool)), jnp.integer)
        values = np.asarray(array) if plain else np.zeros(0)
        nan = inf = 0
    else:
        nan, inf = int(np.isnan(host).sum()), int(np.isinf(host).sum())
        values = host[np.isfinite(host)]
    low, high = (float(values.min()), float(values.max())) if values.size else (np.nan, np.nan)
    return Operand(dtype, shape, low, high, nan, inf)
