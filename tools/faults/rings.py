"""Planted bugs of the ring buffers with a stream's keys and values, and of their visibility."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from megalodon_jax.layers.attention import ChunkedAttention
from megalodon_jax.layers.rotary import RotaryEmbedding
from megalodon_jax.ragged import lengths_of, rolled
from megalodon_jax.types import AttentionCache
from parity.engine.measure.quantity import Quantity
from parity.faults.fault import Family, altered, around, fault, on_result, rounded

_fault = partial(fault, Family.CACHES, witness="stream")


@around
def _offset_lost(call, self, q, k, start_index=0):
    return call(self, q, k, 0)


@around
def _written_from_slot_zero(append, self, k, v, *lengths):
    right = append(self, k, v, *lengths)
    wrong = append(altered(self, count=jnp.zeros_like(self.count)), k, v, *lengths)
    return altered(right, k=wrong.k, v=wrong.v)


def _values_not_written(ring, self, *args):
    return altered(ring, v=self.v)


@around
def _rounded_ring(append, self, k, v, *lengths):
    return append(self, rounded(k), rounded(v), *lengths)


def _counts_of_the_longest(ring, *args):
    return altered(ring, count=jnp.full_like(ring.count, jnp.max(ring.count)))


@around
def _slot_of_the_first_row(append, self, k, v, lengths):
    right = append(self, k, v, lengths)
    shared = jnp.full_like(self.count, self.count[0])
    wrong = append(altered(self, count=shared), k, v, lengths)
    # Only single tokens are misplaced. Longer calls write a row's ring at once, from its own end.
    return altered(right, k=wrong.k, v=wrong.v) if k.shape[1] == 1 else right


@around
def _chunks_of_the_padded_index(call, self, q, k, v, mask=None, cache=None, *args, **options):
    out, ring = call(self, q, k, v, mask, cache, *args, **options)
    if mask is None or cache is not None:
        return out, ring
    pad = mask.shape[1] - lengths_of(mask)
    moved = (rolled(x, -pad) for x in (q, k, v, mask))
    return rolled(call(self, *moved, **options)[0], pad), ring


@around
def _chunk_forgotten(visible, self, queries, keys):
    return (keys >= 0) & (keys <= queries)


def _window_one_short(seen, self, queries, keys):
    return seen & (keys > queries[-1:] - self.config.effective_max_cache_len + 1)


@around
def _window_per_query(visible, self, queries, keys):
    seen = (keys >= 0) & (keys <= queries)
    return seen & (keys > queries - self.config.effective_max_cache_len)


def _bounded_anyway(seen, self, queries, keys):
    return seen & (keys > queries - self.config.chunk_size)


@around
def _one_block(stream, self, q, k, v, ring, key):
    return self._attend_block(q, k.astype(ring.k.dtype), v.astype(ring.v.dtype), ring, key)


_LAYER = Quantity.state("layers.0.")


# Wrong visibility of keys does not change the first layer's cache. The first state that it changes
# is in the second layer.
_NEXT_LAYER = Quantity.state("layers.1.norm_mean")

_ring = partial(_fault, owner=AttentionCache, attribute="append")
_rows = partial(_fault, owner=AttentionCache, attribute="_append_rows", witness="stream_ragged")
_seen = partial(_fault, stage=_NEXT_LAYER, owner=ChunkedAttention)

FAULTS = (
    _fault(
        "cache_offset_lost",
        "RoPE starts at 0 in every call",
        _offset_lost,
        stage=_LAYER + "k",
        owner=RotaryEmbedding,
    ),
    _ring(
        "cache_written_from_slot_zero",
        "a call overwrites the oldest slots instead of going on",
        _written_from_slot_zero,
        stage=_LAYER + "k",
    ),
    _ring(
        "cache_values_not_written",
        "keys appended, values forgotten",
        on_result(_values_not_written),
        stage=_LAYER + "v",
    ),
    _ring(
        "cache_keys_bfloat16",
        "keys and values kept narrower than they were computed",
        _rounded_ring,
        stage=_LAYER + "k",
    ),
    _seen(
        "cache_chunk_leak",
        "a stream sees the whole ring, whatever chunk its keys are of",
        _chunk_forgotten,
        attribute="_visible",
    ),
    _seen(
        "cache_window_one_short",
        "window - 1 keys",
        on_result(_window_one_short),
        attribute="_visible",
        witness="stream_sliding",
    ),
    _seen(
        "cache_window_per_query",
        "the window ends at the query, not at the end of its block",
        _window_per_query,
        attribute="_visible",
        witness="stream_sliding",
    ),
    _seen(
        "cache_call_in_one_block",
        "a long call attends at once, not in blocks of a chunk",
        _one_block,
        attribute="_stream",
        witness="stream_sliding",
    ),
    _seen(
        "cache_bounded_anyway",
        "an unbounded cache reads the latest chunk only",
        on_result(_bounded_anyway),
        attribute="_visible",
        witness="stream_unbounded",
    ),
    _ring(
        "cache_state_lost_when_whole",
        "a copy of the ring made before it is written is handed on",
        lambda append: lambda self, k, v: self if k.shape[1] == 1 else append(self, k, v),
        stage=_LAYER + "k",
        witness="stream_tokens",
    ),
    _rows(
        "ragged_counts_of_the_longest",
        "every row counts as many tokens as the longest",
        on_result(_counts_of_the_longest),
        stage=_LAYER + "k",
    ),
    _rows(
        "ragged_slot_of_the_first_row",
        "a token of every row is written where the first row writes its own",
        _slot_of_the_first_row,
        stage=_LAYER + "k",
    ),
    _seen(
        "ragged_chunks_of_the_padded_index",
        "chunks of a left-padded prompt are counted from its padding",
        _chunks_of_the_padded_index,
        witness="stream_ragged",
    ),
)
