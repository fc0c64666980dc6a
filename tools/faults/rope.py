"""Planted bugs of the rotary position embedding.

The compared queries and keys are those before the rotation, so a bug first shows in the attention's
result, `inner`. A bug that rotates both by the same extra angle changes no score; it shows only in
cached keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp

from megalodon_jax.layers import rotary
from megalodon_jax.layers.attention import ChunkedAttention
from megalodon_jax.layers.rotary import RotaryEmbedding, _rotate
from parity.engine.measure.quantity import Quantity
from parity.faults.demonstration import DEMONSTRATION
from parity.faults.fault import Family, altered, around, fault, on_copy, on_result, rounded

_fault = partial(fault, Family.ROPE, stage="layers.0.inner", owner=RotaryEmbedding)


@around
def _interleaved(rotate, x, cos, sin):
    real, imag = x[..., ::2].astype(cos.dtype), x[..., 1::2].astype(cos.dtype)
    pairs = jnp.stack([real * cos - imag * sin, imag * cos + real * sin], axis=-1)
    return pairs.reshape(x.shape).astype(x.dtype)


@around
def _half_of_the_features(rotate, x, cos, sin):
    half = x.shape[-1] // 2
    few = cos.shape[-1] // 2
    turned = rotate(x[..., :half], cos[..., :few], sin[..., :few])
    return jnp.concatenate([turned, x[..., half:]], axis=-1)


def _queries_only(result, self, q, k, *start):
    return result[0], k


@around
def _from_one(tables, self, start_index, length, dtype):
    return tables(self, start_index + 1, length, dtype)


def _other_way(result, *args):
    return result[0], -result[1]


@around
def _bfloat16_angles(tables, self, start_index, length, dtype):
    positions = (jnp.asarray(start_index) + jnp.arange(length)).astype(dtype)
    rates = self.base ** (-jnp.arange(self.dim // 2, dtype=dtype) / (self.dim // 2))
    angles = rounded(rounded(positions)[:, None, None] * rounded(rates))
    return jnp.cos(angles), jnp.sin(angles)


class _Restarting:
    """A faulty RoPE that counts positions from the start of each chunk."""

    def __init__(self, rope: RotaryEmbedding, chunk: int):
        self.rope, self.chunk = rope, chunk

    def __call__(self, q: Any, k: Any, start_index: Any = 0) -> Any:
        positions = (jnp.asarray(start_index) + jnp.arange(q.shape[1])) % self.chunk
        cos, sin = (t[positions] for t in self.rope.tables(0, self.chunk, q.dtype))
        return _rotate(q, cos, sin), _rotate(k, cos, sin)


@around
def _restarts(call, self, *args, **options):
    rope = _Restarting(self.rope, self.config.chunk_size)
    return call(altered(self, rope=rope), *args, **options)


_tables = partial(_fault, attribute="tables")

FAULTS = (
    _fault(
        "rope_interleaved_pairs",
        "pairs (2j, 2j + 1), as GPT-J has them",
        _interleaved,
        owner=rotary,
        attribute="_rotate",
    ),
    _fault(
        "rope_half_the_features",
        "partial rotary, as GPT-NeoX has it",
        _half_of_the_features,
        owner=rotary,
        attribute="_rotate",
    ),
    DEMONSTRATION,
    _fault("rope_queries_only", "keys cached before they are rotated", on_result(_queries_only)),
    _tables("rope_sign", "rotation by the negative angle", on_result(_other_way)),
    _tables(
        "rope_rate_over_d",
        "base^(-j/d) for base^(-2j/d)",
        on_copy(base=lambda self: self.base**0.5),
    ),
    _tables(
        "rope_base_ignored",
        "the default base whatever the configuration says",
        on_copy(base=lambda self: 10_000.0),
        witness="multi_head",
    ),
    _tables("rope_bfloat16_angles", "angles multiplied in bfloat16", _bfloat16_angles),
    _tables(
        "rope_positions_from_one",
        "positions counted from 1 for both: only cached keys can show it",
        _from_one,
        stage=Quantity.state("layers.0.k"),
        witness="stream",
    ),
    _fault(
        "rope_restarts_per_chunk",
        "positions counted from the start of a chunk: scores within it are the same",
        _restarts,
        stage=Quantity.state("layers.0.k"),
        owner=ChunkedAttention,
        witness="stream",
    ),
)
