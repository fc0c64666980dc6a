"""States a stream carries from one call to the next, as pytrees."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class NormState(eqx.Module):
    """Running statistics of a TimestepNorm; a fresh stream is (0, 0, 1) (spec/model.md).

    count (B,) int32 tokens seen, mean (B, G) and var (B, G) of the per-token group means, in at
    least float32.
    """

    count: Int32[Array, " B"]
    mean: Float[Array, "B G"]
    var: Float[Array, "B G"]

    @classmethod
    def fresh(cls, batch_size: int, num_groups: int, dtype=jnp.float32) -> NormState:
        """Return the state before the first token."""
        return cls(
            count=jnp.zeros(batch_size, jnp.int32),
            mean=jnp.zeros((batch_size, num_groups), dtype),
            var=jnp.ones((batch_size, num_groups), dtype),
        )
