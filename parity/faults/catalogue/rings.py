"""Bugs of the keys and values a stream keeps, and of what it may see of them."""

from __future__ import annotations

import jax.numpy as jnp

from megalodon_jax.layers.attention import ChunkedAttention
from megalodon_jax.layers.rotary import RotaryEmbedding
from megalodon_jax.types import AttentionCache
from parity.faults.fault import (
    Family,
    altered,
    of,
    on_result,
    rounded,
    streamed,
)
from parity.megalodon.cases import Case

_fault = of(Family.CACHES, "stream", streamed)


def _offset_lost(call):
    def faulty(self, q, k, start_index=0):
        return call(self, q, k, 0)

    return faulty


def _written_from_slot_zero(append):
    def faulty(self, k, v):
        right = append(self, k, v)
        wrong = append(altered(self, count=jnp.zeros_like(self.count)), k, v)
        return altered(right, k=wrong.k, v=wrong.v)

    return faulty


def _values_not_written(ring, self, k, v):
    return altered(ring, v=self.v)


def _rounded_ring(append):
    def faulty(self, k, v):
        return append(self, rounded(k), rounded(v))

    return faulty


def _chunk_forgotten(visible):
    def faulty(self, queries, keys):
        return (keys >= 0) & (keys <= queries)

    return faulty


def _window_one_short(seen, self, queries, keys):
    return seen & (keys > queries[-1:] - self.config.effective_max_cache_len + 1)


def _window_per_query(visible):
    def faulty(self, queries, keys):
        seen = (keys >= 0) & (keys <= queries)
        return seen & (keys > queries - self.config.effective_max_cache_len)

    return faulty


def _bounded_anyway(seen, self, queries, keys):
    return seen & (keys > queries - self.config.chunk_size)


def _one_block(stream):
    def faulty(self, q, k, v, ring, key):
        return self._attend_block(q, k.astype(ring.k.dtype), v.astype(ring.v.dtype), ring, key)

    return faulty


def _sliding(case: Case) -> bool:
    window = case.config.effective_max_cache_len
    return streamed(case) and window is not None and window > case.config.chunk_size


def _chunk_local(case: Case) -> bool:
    return streamed(case) and case.config.effective_max_cache_len == case.config.chunk_size


def _unbounded(case: Case) -> bool:
    return streamed(case) and case.config.cache_unbounded


_LAYER = "state/layers.0."


# A bug of visibility leaves what the first layer holds right: it enters the state of the second.
_NEXT_LAYER = "state/layers.1.norm_mean"


FAULTS = (
    _fault(
        "cache_offset_lost",
        "RoPE starts at 0 in every call",
        _LAYER + "k",
        RotaryEmbedding,
        "__call__",
        _offset_lost,
    ),
    _fault(
        "cache_written_from_slot_zero",
        "a call overwrites the oldest slots instead of going on",
        _LAYER + "k",
        AttentionCache,
        "append",
        _written_from_slot_zero,
    ),
    _fault(
        "cache_values_not_written",
        "keys appended, values forgotten",
        _LAYER + "v",
        AttentionCache,
        "append",
        on_result(_values_not_written),
    ),
    _fault(
        "cache_keys_bfloat16",
        "keys and values kept narrower than they were computed",
        _LAYER + "k",
        AttentionCache,
        "append",
        _rounded_ring,
    ),
    _fault(
        "cache_chunk_leak",
        "a stream sees the whole ring, whatever chunk its keys are of",
        _NEXT_LAYER,
        ChunkedAttention,
        "_visible",
        _chunk_forgotten,
        shows=_chunk_local,
    ),
    _fault(
        "cache_window_one_short",
        "window - 1 keys",
        _NEXT_LAYER,
        ChunkedAttention,
        "_visible",
        on_result(_window_one_short),
        "stream_sliding",
        _sliding,
    ),
    _fault(
        "cache_window_per_query",
        "the window ends at the query, not at the end of its block",
        _NEXT_LAYER,
        ChunkedAttention,
        "_visible",
        _window_per_query,
        "stream_sliding",
        _sliding,
    ),
    _fault(
        "cache_call_in_one_block",
        "a long call attends at once, not in blocks of a chunk",
        _NEXT_LAYER,
        ChunkedAttention,
        "_stream",
        _one_block,
        "stream_sliding",
        _sliding,
    ),
    _fault(
        "cache_bounded_anyway",
        "an unbounded cache reads the latest chunk only",
        _NEXT_LAYER,
        ChunkedAttention,
        "_visible",
        on_result(_bounded_anyway),
        "stream_unbounded",
        _unbounded,
    ),
    _fault(
        "cache_state_lost_when_whole",
        "a copy of the ring made before it is written is handed on",
        _LAYER + "k",
        AttentionCache,
        "append",
        lambda append: lambda self, k, v: self if k.shape[1] == 1 else append(self, k, v),
        "stream_tokens",
    ),
)
