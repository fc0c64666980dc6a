"""Normalisation over the features of one token: RMSNorm and LayerNorm.

Source: docs/model.md "RMSNorm and LayerNorm".
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from megalodon_jax.config import checked_dtype, widened
from megalodon_jax.layers.entry import check_inputs, check_parameters, check_positive, check_sizes
from megalodon_jax.sharding.axes import mesh_of


class RMSNorm(eqx.Module):
    """`x * rsqrt(mean(x^2) + eps) * (gamma + 1)` over the last axis; gamma starts at 0.

    Computes in at least float32 and returns the dtype of its input.
    """

    gamma: Float[Array, " dim"] | None
    dim: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(
        self, dim: int, eps: float = 1e-6, affine: bool = True, dtype: DTypeLike = jnp.float32
    ):
        dtype = _checked("RMSNorm", dim, eps, dtype)
        self.gamma = jnp.zeros(dim, dtype) if affine else None
        self.dim, self.eps = dim, eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalise (..., dim) over its last axis.

        Raises:
            ValueError: the width or a dtype does not fit, or is float16.
        """
        wide = _rows(self, x)
        y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.gamma is not None:
            y = y * (self.gamma + 1.0).astype(y.dtype)
        return y.reshape(x.shape).astype(x.dtype)


class LayerNorm(eqx.Module):
    """`(x - mean) * rsqrt(var + eps) * weight + bias` over the last axis; weight starts at 1.

    Computes in at least float32 and returns the dtype of its input.
    """

    weight: Float[Array, " dim"] | None
    bias: Float[Array, " dim"] | None
    dim: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(
        self, dim: int, eps: float = 1e-5, affine: bool = True, dtype: DTypeLike = jnp.float32
    ):
        dtype = _checked("LayerNorm", dim, eps, dtype)
        self.weight = jnp.ones(dim, dtype) if affine else None
        self.bias = jnp.zeros(dim, dtype) if affine else None
        self.dim, self.eps = dim, eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalise (..., dim) over its last axis.

        Raises:
            ValueError: the width or a dtype does not fit, or is float16.
        """
        wide = _rows(self, x)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        var = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(var + self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.astype(y.dtype) + self.bias.astype(y.dtype)
        return y.reshape(x.shape).astype(x.dtype)


def _checked(owner: str, dim: int, eps: float, dtype: DTypeLike) -> np.dtype:
    check_sizes(owner, dim=dim)
    check_positive(owner, eps=eps)
    return checked_dtype("dtype", dtype, owner)


def _rows(norm: RMSNorm | LayerNorm, x: Array) -> Float[Array, "... dim"]:
    """Return `x`, checked, in at least float32, as rows (n, dim) unless it is on a mesh."""
    check_parameters(norm)
    check_inputs(type(norm).__name__, x=(x, (..., norm.dim)))
    wide = x.astype(widened(x.dtype))
    # XLA's CPU backend is 10 times slower at gradients of (1, L, D) than of rows. On a mesh, rows
    # and tokens that are both cut cannot be merged into one axis.
    return wide if mesh_of(x) else wide.reshape(math.prod(x.shape[:-1]), x.shape[-1])
