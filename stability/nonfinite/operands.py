"""An array in numbers: dtype, shape, range, and how much of it is not finite; on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Operand:
    """What an operation read or wrote, in numbers."""

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    """Of the finite elements; NaN without any."""
    largest: float
    nan: int
    inf: int

    def describe(self) -> str:
        """Return dtype, shape, range and what is not finite, in words."""
        bad = "".join(f", {n:,} {word}" for n, word in ((self.nan, "NaN"), (self.inf, "inf")) if n)
        spread = f" in [{self.smallest:.4g}, {self.largest:.4g}]"
        return f"{self.dtype}{list(self.shape)}{'' if np.isnan(self.smallest) else spread}{bad}"


def _host(array: Any) -> np.ndarray | None:
    """Return floating-point values on the host, widened; None for other kinds."""
    dtype = getattr(array, "dtype", np.dtype(type(array)))
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or not jnp.issubdtype(dtype, jnp.inexact):
        return None
    host: Any = np.asarray(array)
    if np.iscomplexobj(host):
        return np.stack([host.real, host.imag])
    return host.astype(np.float32) if host.dtype.itemsize < 4 else host


def all_finite(array: Any) -> bool:
    """Return whether an array has neither NaN nor infinity; what is no float has none."""
    host = _host(array)
    return host is None or bool(np.isfinite(host).all())


def has_nan(array: Any) -> bool:
    """Return whether an array has a NaN."""
    host = _host(array)
    return host is not None and bool(np.isnan(host).any())


def operand(array: Any) -> Operand:
    """Return an array in numbers; keys and other kinds have no range."""
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
