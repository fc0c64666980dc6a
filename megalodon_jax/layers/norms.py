"""Normalisation over the features of one token: RMSNorm and LayerNorm (spec/model.md "Pieces")."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from megalodon_jax.config import widened


class RMSNorm(eqx.Module):
    """`x * rsqrt(mean(x^2) + eps) * (gamma + 1)` over the last axis; gamma starts at 0.

    Works in at least float32 and returns the dtype it was given.
    """

    gamma: Float[Array, " dim"] | None
    eps: float = eqx.field(static=True)

    def __init__(
        self, dim: int, eps: float = 1e-6, affine: bool = True, dtype: DTypeLike = jnp.float32
    ):
        self.gamma = jnp.zeros(dim, dtype) if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalise (..., dim) over its last axis."""
        wide = _rows(x)
        y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.gamma is not None:
            y = y * (self.gamma + 1.0).astype(y.dtype)
        return y.reshape(x.shape).astype(x.dtype)


class LayerNorm(eqx.Module):
    """`(x - mean) * rsqrt(var + eps) * weight + bias` over the last axis; weight starts at 1.

    Works in at least float32 and returns the dtype it was given.
    """

    weight: Float[Array, " dim"] | None
    bias: Float[Array, " dim"] | None
    eps: float = eqx.field(static=True)

    def __init__(
        self, dim: int, eps: float = 1e-5, affine: bool = True, dtype: DTypeLike = jnp.float32
    ):
        self.weight = jnp.ones(dim, dtype) if affine else None
        self.bias = jnp.zeros(dim, dtype) if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalise (..., dim) over its last axis."""
        wide = _rows(x)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        var = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(var + self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.astype(y.dtype) + self.bias.astype(y.dtype)
        return y.reshape(x.shape).astype(x.dtype)


def _rows(x: Array) -> Float[Array, "rows dim"]:
    """Widen, and flatten: XLA's CPU backend is 10 times slower at the gradients of (1, L, dim)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(widened(x.dtype))
