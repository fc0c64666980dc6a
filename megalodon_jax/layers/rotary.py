"""Rotary position embedding at absolute positions (docs/model.md "RoPE")."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from megalodon_jax.config import widened
from megalodon_jax.layers.entry import check_inputs, check_positive, check_sizes
from megalodon_jax.layers.turns import cos_sin
from megalodon_jax.sharding.axes import SEQUENCE, mesh_of, on_shards, shards, spec_of


class RotaryEmbedding(eqx.Module):
    """Rotary embedding: rotates features (j, j + d/2) by the angle `position * base^(-2j/d)`."""

    dim: int = eqx.field(static=True)
    base: float = eqx.field(static=True)

    def __init__(self, dim: int, base: float = 10_000.0):
        check_sizes("RotaryEmbedding", dim=dim)
        check_positive("RotaryEmbedding", base=base)
        if dim % 2:
            raise ValueError(f"RotaryEmbedding: dim={dim} must be even: features rotate in pairs.")
        self.dim = dim
        self.base = base

    def __call__(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        start_index: int | Int[Array, ""] | Int[Array, " B"] | Int[Array, "B L"] = 0,
    ) -> tuple[Float[Array, "B L H d"], Float[Array, "B L H d"]]:
        """Rotate queries and keys whose first token is at `start_index`; dtypes are kept.

        `start_index` is one number, one per row (B,), or every token's position (B, L).

        Raises:
            ValueError: a shape or a dtype does not fit, or is float16.
        """
        shape = ("B", "L", "H", self.dim)
        check_inputs("RotaryEmbedding", q=(q, shape), k=(k, shape))
        mesh, L, dtype = mesh_of(q), q.shape[1], widened(q.dtype)
        parts = shards(mesh, "sequence")
        if not isinstance(start_index, int) and start_index.ndim == 2:
            cos, sin = self.at(start_index, dtype)
        elif mesh is None or parts == 1:
            cos, sin = self.tables(start_index, L, dtype)
        else:
            # Each shard computes the rows of its own positions: the whole table would be the
            # largest array on every device.
            def local(start: Array) -> tuple[Array, Array]:
                length = L // parts
                return self.tables(start + jax.lax.axis_index(SEQUENCE) * length, length, dtype)

            start = jnp.asarray(start_index, jnp.int32)
            spec = spec_of(mesh, (L, 1, 1), ("sequence", None, None))
            cos, sin = on_shards(local, mesh, (start,), (jax.sharding.PartitionSpec(),), spec)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def at(
        self, positions: Int[Array, "B L"], dtype: DTypeLike
    ) -> tuple[Float[Array, "B L 1 half"], Float[Array, "B L 1 half"]]:
        """Return cosine and sine (B, L, 1, d/2) of the angles: from float64, rounded once.

        The angles of each position are computed directly, with polynomials. Rows of a table would
        have to be gathered, and on a mesh every device would hold the table for the longest
        possible document.
        """
        with jax.enable_x64(True):
            turns = jnp.asarray(self._rates() / (2.0 * math.pi))
            turns = positions.astype(jnp.float64)[..., None, None] * turns
            cos, sin = cos_sin(turns - jnp.round(turns))
            return cos.astype(dtype), sin.astype(dtype)

    def _rates(self) -> np.ndarray:
        """Return the angle (d/2,) of each pair from one position to the next, radians, float64."""
        half = self.dim // 2
        return float(self.base) ** (-np.arange(half) / half)

    def tables(
        self, start_index: int | Int[Array, ""] | Int[Array, " B"], length: int, dtype: DTypeLike
    ) -> tuple[Float[Array, "*B L 1 half"], Float[Array, "*B L 1 half"]]:
        """Return cosine and sine of the angles at L = `length` positions from `start_index` on.

        They are (L, 1, d/2), or (B, L, 1, d/2) if each row has its own start, computed in float64
        and rounded once.

        In float32, the angle at position 10^6 would be off by a sixteenth of a radian. By the
        addition theorem, about 2 sqrt(L) rows of sines and cosines and a product give all L rows.
        """
        half = self.dim // 2
        S = max(1, math.isqrt(length))
        A = -(-length // S)
        with jax.enable_x64(True):
            start = jnp.asarray(start_index).astype(jnp.float64)
            rates = jnp.asarray(self._rates())
            steps = S * jnp.arange(A, dtype=jnp.float64)
            rows = start.shape
            begins = (start[:, None] + steps[None]).reshape(-1) if rows else start + steps
            coarse = rates[:, None] * begins
            fine = rates[:, None] * jnp.arange(S, dtype=jnp.float64)
            cos_a, sin_a, cos_b, sin_b = (f(x) for x in (coarse, fine) for f in (jnp.cos, jnp.sin))
            # A matrix product rather than an elementwise one, into which XLA would fuse the
            # trigonometric functions and so evaluate them L times.
            left = jnp.stack([cos_a, sin_a], axis=-1)
            right = jnp.stack([jnp.stack([cos_b, -sin_b], -1), jnp.stack([sin_b, cos_b], -1)])
            # Not `einsum`, which requests float64 by name: a transformation that traces this again
            # outside of the context (`jax.vmap` of a jitted function) would read that as float32.
            numbers = (((2,), (3,)), ((0,), (1,)))
            cos_sin = jax.lax.dot_general(left, right, numbers).transpose(2, 1, 3, 0)
            cos_sin = cos_sin.reshape(2, *rows, A * S, 1, half)[..., :length, :, :]
            return cos_sin[0].astype(dtype), cos_sin[1].astype(dtype)


def _rotate(
    x: Float[Array, "B L H d"],
    cos: Float[Array, "*B L 1 half"],
    sin: Float[Array, "*B L 1 half"],
) -> Float[Array, "B L H d"]:
    real, imag = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([real * cos - imag * sin, imag * cos + real * sin], -1).astype(x.dtype)
