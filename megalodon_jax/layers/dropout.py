"""Dropout, applied only if a PRNG key is passed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def dropout(x: Float[Array, "..."], rate: float, key: jax.Array | None) -> Float[Array, "..."]:
    """Zero each element with probability `rate` and scale the others by 1/(1-rate).

    Without a key, `x` is returned unchanged.
    """
    if key is None or rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    return kept(x, jax.random.bernoulli(key, 1.0 - rate, x.shape), rate)


def kept(x: Float[Array, "..."], keep: Bool[Array, "..."], rate: float) -> Float[Array, "..."]:
    """Zero each element where `keep` is False, and scale the others by 1/(1-rate)."""
    return jnp.where(keep, x / (1.0 - rate), 0.0) if rate < 1.0 else jnp.zeros_like(x)


def split_key(key: jax.Array | None, num: int) -> tuple[jax.Array | None, ...]:
    """Split a PRNG key into a tuple of `num` keys; for None, return `num` times None."""
    return (None,) * num if key is None else tuple(jax.random.split(key, num))
