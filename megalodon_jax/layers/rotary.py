"""Rotary position embedding at absolute positions (spec/model.md "RoPE")."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from megalodon_jax.config import widened


class RotaryEmbedding(eqx.Module):
    """Rotate pairs (first half real, second half imaginary) by `position * base^(-2j/d)`."""

    dim: int = eqx.field(static=True)
    base: float = eqx.field(static=True)

    def __init__(self, dim: int, base: float = 10_000.0):
        if dim % 2:
            raise ValueError(f"RotaryEmbedding: dim={dim} must be even: features rotate in pairs.")
        self.dim = dim
        self.base = base

    def __call__(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        start_index: int | Int[Array, ""] = 0,
    ) -> tuple[Float[Array, "B L H d"], Float[Array, "B L H d"]]:
        """Rotate queries and keys whose first token stands at `start_index`; dtypes are kept."""
        cos, sin = self.tables(start_index, q.shape[1], widened(q.dtype))
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def tables(
        self, start_index: int | Int[Array, ""], length: int, dtype: DTypeLike
    ) -> tuple[Float[Array, "L 1 half"], Float[Array, "L 1 half"]]:
        """Return cosine and sine (L, 1, d/2), computed in float64 and rounded once.

        In float32 the angle itself has lost a sixteenth of a radian at position 10^6.
        """
        half = self.dim // 2
        with jax.enable_x64(True):
            start = jnp.asarray(start_index).astype(jnp.float64)
            positions = start + jnp.arange(length, dtype=jnp.float64)
            rates = float(self.base) ** (-jnp.arange(half, dtype=jnp.float64) / half)
            angles = (positions[:, None] * rates)[:, None, :]
            return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    real, imag = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([real * cos - imag * sin, imag * cos + real * sin], -1).astype(x.dtype)
