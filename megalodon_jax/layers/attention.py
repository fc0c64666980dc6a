"""Gated, chunked attention over an EMA: the first half of a block."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int32, Key

from megalodon_jax.checks import checked
from megalodon_jax.config import MegalodonConfig, widened
from megalodon_jax.inputs import PACKED_MASK, PACKED_WINDOW, Mask, as_mask
from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.contraction import contract
from megalodon_jax.layers.dropout import dropout, kept, split_key
from megalodon_jax.layers.entry import check_inputs
from megalodon_jax.layers.linear import Linear
from megalodon_jax.layers.norms import RMSNorm
from megalodon_jax.layers.packed_attention import Draws, packed_attention
from megalodon_jax.layers.rotary import RotaryEmbedding
from megalodon_jax.layers.timestep_norm import TimestepNorm
from megalodon_jax.ragged import kept as kept_state
from megalodon_jax.ragged import lengths_of, padding_of, rolled
from megalodon_jax.sharding.axes import mesh_of, on_shards, placed, shards, spec_of
from megalodon_jax.types import AttentionCache, EMAState, LayerCache, NormState, check_ring

STRIPE = 512
"""Number of queries of a chunk that are processed at once (a stripe)."""
_LATE_TOKEN = (
    "with a cache, a layer expects the tokens of each row on the left, but the mask has a token "
    "behind padding. Move the tokens to the left before the call, as MegalodonModel does."
)


def attend(
    q: Float[Array, "*B Q H d"],
    k: Float[Array, "*B K H d"],
    v: Float[Array, "*B K H e"],
    mask: Bool[Array, "*#B Q K"],
    config: MegalodonConfig,
    *,
    key: jax.Array | None = None,
) -> Float[Array, "*B Q H e"]:
    """Return `softmax(q k^T) v`, without a factor 1/sqrt(d); a query that sees no key gets 0.

    Args:
        q, k, v: queries, keys and values, with heads on the second-to-last axis.
        mask: True where a query may see a key.
        config: gives the dtypes and the dropout rate of the attention weights.
        key: PRNG key, which enables dropout; None means deterministic.

    Returns:
        The weighted values (*B, Q, H, e), in `config.accum_dtype`.
    """
    mesh = mesh_of(q)
    if mesh is None:
        return _attend(q, k, v, mask, None, config, key)
    *batch, Q, H, _ = q.shape
    keep = None
    if key is not None and config.attention_dropout > 0.0:
        # Drawn for the whole array, so that shards draw the same values as one device.
        shape = (*batch, H, Q, k.shape[-3])
        keep = jax.random.bernoulli(key, 1.0 - config.attention_dropout, shape)
    # `_attend` merges heads, rows and chunks into one axis, which is not possible while a mesh cuts
    # all three; so it runs on shards.
    first = ("batch", "sequence")[: len(batch)]
    heads = (*first, None, "tensor", None)
    dims = (heads, heads, heads, (*first, None, None), (*first, "tensor", None, None))
    arguments = (q, k, v, mask, keep)
    ins = tuple(
        None if a is None else spec_of(mesh, a.shape, d)
        for a, d in zip(arguments, dims, strict=True)
    )

    def local(q: Array, k: Array, v: Array, mask: Array, keep: Array | None) -> Array:
        return _attend(q, k, v, mask, keep, config)

    return on_shards(local, mesh, arguments, ins, ins[2])


def _attend(
    q: Float[Array, "*B Q H d"],
    k: Float[Array, "*B K H d"],
    v: Float[Array, "*B K H e"],
    mask: Bool[Array, "*#B Q K"],
    keep: Bool[Array, "*B H Q K"] | None,
    config: MegalodonConfig,
    key: jax.Array | None = None,
) -> Float[Array, "*B Q H e"]:
    """Compute `attend` on one device; if `keep`, a drawn dropout mask, is given, `key` is None."""
    *batch, Q, H, _ = q.shape
    q, k, v = (_heads_first(a.astype(config.compute_dtype)) for a in (q, k, v))
    mixed = _mixed(q, k, v, mask, keep, config, key, (*batch, H))
    return jnp.swapaxes(mixed.reshape(*batch, H, Q, v.shape[-1]), -3, -2)


def _mixed(
    q: Float[Array, "N Q d"],
    k: Float[Array, "N K d"],
    v: Float[Array, "N K e"],
    mask: Bool[Array, "*#B Q K"],
    keep: Bool[Array, "*B H Q K"] | None,
    config: MegalodonConfig,
    key: jax.Array | None,
    heads: tuple[int, ...],
) -> Float[Array, "N Q e"]:
    """Compute `_attend` for q, k and v that are already in `config.compute_dtype`, with batch and
    heads merged into axis N.

    `heads` is the shape (*B, H) of the axes that were merged; the result is (N, Q, e).
    """
    Q = q.shape[1]
    scores = contract("nqd,nkd->nqk", q, k, config)
    scores = scores.reshape(*heads, Q, k.shape[1]).astype(config.softmax_dtype)
    scores = jnp.where(mask[..., None, :, :], scores, -jnp.inf)
    scores = scores.reshape(k.shape[0] * Q, k.shape[1])
    # A row of only -inf would give NaN, also in its gradient: shift it by 0 instead of by -inf.
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    if keep is None:
        weights = dropout(weights, config.attention_dropout, key)
    else:
        weights = kept(weights, keep.reshape(weights.shape), config.attention_dropout)
    weights = weights.reshape(k.shape[0], Q, k.shape[1])
    return contract("nqk,nke->nqe", weights, v, config)


def _heads_first(x: Float[Array, "*B L H d"]) -> Float[Array, "N L d"]:
    """Return `x` as contiguous (N, L, d), N = prod(B) H.

    On CPUs, matrix products of a strided array would be 3 times slower.
    """
    *batch, L, H, d = x.shape
    return jnp.swapaxes(x, -3, -2).reshape(math.prod(batch) * H, L, d)


class ChunkedAttention(eqx.Module):
    """Causal attention within chunks of C tokens, or over a window if a cache is larger than C.

    RoPE is applied at absolute positions, before caching. Chunks, windows and packed documents
    differ only in the mask, which follows from positions (docs/model.md "Chunked attention").
    """

    rope: RotaryEmbedding
    config: MegalodonConfig = eqx.field(static=True)

    def __init__(self, config: MegalodonConfig):
        self.rope = RotaryEmbedding(config.head_dim, config.effective_rope_base)
        self.config = config

    def __call__(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        mask: Mask | None = None,
        cache: AttentionCache | None = None,
        return_cache: bool = False,
        positions: Int32[Array, "B L"] | None = None,
        *,
        key: jax.Array | None = None,
    ) -> tuple[Float[Array, "B L H e"], AttentionCache | None]:
        """Attend from L tokens to themselves and to the cache.

        Without a cache, chunks are counted from position 0, and a remainder of fewer than C tokens
        is a chunk too. With a cache, given or requested, the result depends on the cache's size:

        - A cache of one chunk: keys of earlier chunks are never visible.
        - A larger cache: a call is processed in blocks of at most C tokens counted from the start
          of the call, and each block sees the last `max_cache_len` keys up to its own end. The
          result then depends on how a text is split into calls (as in megalodon-hf).

        Args:
            q, k: unrotated queries and keys (B, L, H, d).
            v: values (B, L, H, e).
            mask: True where a key is valid. With a cache, given or requested, the valid tokens of a
                row must precede its padding; each row then has its own position, and outputs at
                padding are meaningless.
            cache: keys and values seen so far.
            return_cache: whether to return the cache after these tokens.
            positions: index of each token within its document, for packed documents. Chunks are
                counted from the first token of each document, and no query sees another document.
                The first document continues from the cache if its first index is above 0.
            key: PRNG key, which enables dropout.

        Returns:
            The weighted values in `config.accum_dtype`, and the cache after the call or None.

        Raises:
            ValueError: the cache's capacity is smaller than this layer needs, or packed documents
                are combined with a cache and either a mask or a window of more than a chunk.
            RuntimeError: with a cache, a token follows padding (also under jit).
        """
        self._check(q, k, v, cache)
        B, L = q.shape[:2]
        mask = as_mask("mask", mask, (B, L), "the queries")
        if positions is not None:
            check_inputs("ChunkedAttention", jnp.integer, positions=(positions, (B, L)))
            q, k = self.rope(q, k, positions)
            if cache is None and not return_cache:
                return self._documents(q, k, v, mask, positions, key), None
            return self._document_stream(q, k, v, mask, positions, cache, key)
        if cache is not None:
            check_ring(self.config, cache, "ring")
        ragged: tuple[Array, ...] = ()
        if cache is not None or return_cache:
            mask = padding_of(mask, (B, L))
            if mask is not None:
                q = checked(q, mask[:, 1:] & ~mask[:, :-1], _LATE_TOKEN)
                # Padding comes after every valid token, so no valid token attends to it.
                k, v = _silenced(mask, k, v)
                ragged, mask = (lengths_of(mask),), None
        start = 0 if cache is None else cache.count
        q, k = self.rope(q, k, start)
        if cache is None and L and (not return_cache or self._chunk_local):
            out = self._block_diagonal(q, k, v, mask, key)
            return out, self.empty_ring(B, L).append(k, v, *ragged) if return_cache else None
        ring = self.empty_ring(B, L) if cache is None else cache
        ring = ring.rowwise() if ragged else ring
        if L == 0:
            return v.astype(self.config.accum_dtype), ring if return_cache else None
        out, ring = self._stream(q, k, v, ring, key, *ragged)
        return out, ring if return_cache else None

    def _check(self, q: Array, k: Array, v: Array, cache: AttentionCache | None) -> None:
        config, owner = self.config, "ChunkedAttention"
        keys, values = ((config.num_heads, d) for d in (config.head_dim, config.value_head_dim))
        rows = ("B", "L")
        check_inputs(owner, q=(q, (*rows, *keys)), k=(k, (*rows, *keys)), v=(v, (*rows, *values)))
        if cache is not None:
            rows = (q.shape[0], "capacity")
            held = {"cache.k": (cache.k, (*rows, *keys)), "cache.v": (cache.v, (*rows, *values))}
            check_inputs(owner, **held)

    @property
    def _chunk_local(self) -> bool:
        return self.config.effective_max_cache_len == self.config.chunk_size

    def _block_diagonal(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        mask: Bool[Array, "B L"] | None,
        key: jax.Array | None,
    ) -> Float[Array, "B L H e"]:
        """Attend within chunks counted from position 0; the last chunk may be shorter."""
        L, C = q.shape[1], self.config.chunk_size
        whole = L // C * C
        if mask is not None:
            k, v = _silenced(mask, k, v)
        keys = split_key(key, 2)
        parts = []
        if whole:
            parts.append(self._chunks(q[:, :whole], k[:, :whole], v[:, :whole], mask, C, keys[0]))
        if whole < L:
            tail = None if mask is None else mask[:, whole:]
            parts.append(
                self._chunks(q[:, whole:], k[:, whole:], v[:, whole:], tail, L - whole, keys[1])
            )
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def _documents(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        mask: Bool[Array, "B L"] | None,
        positions: Int32[Array, "B L"],
        key: jax.Array | None,
        ring: AttentionCache | None = None,
    ) -> Float[Array, "B L H e"]:
        """Attend within chunks of each document; `ring` is the cache before this call, or None."""
        config, mesh = self.config, mesh_of(q)
        if q.shape[1] == 0:
            return v.astype(config.accum_dtype)
        if mask is not None:
            k, v = _silenced(mask, k, v)
        parts = shards(mesh, "sequence")
        before = () if ring is None else _chunk_before(ring, config.chunk_size)
        rate, keys, number = config.attention_dropout, None, None
        if key is not None and rate > 0.0:
            keys = _keys_of_heads(key, q.shape[0], q.shape[2])
            number = jnp.arange(q.shape[1], dtype=jnp.int32)

        def local(
            q: Array,
            k: Array,
            v: Array,
            mask: Array | None,
            positions: Array,
            keys: Array | None,
            number: Array | None,
            *before: Any,
        ) -> Array:
            B, L, H, _ = q.shape
            q, k, v = (_heads_first(a.astype(config.compute_dtype)) for a in (q, k, v))
            earlier = None
            if before:
                earlier = _heads_first(before[0]), _heads_first(before[1]), before[2]
            draws = None
            if keys is not None and number is not None:
                draws = Draws(keys, number[0], jnp.asarray(rate, jnp.float32))
            mix = partial(_mixed, config=config, key=None, heads=(B, H))
            chunk = config.chunk_size
            out = packed_attention(mix, q, k, v, positions, mask, chunk, draws, parts, earlier)
            return jnp.swapaxes(out.reshape(B, H, L, v.shape[-1]), 1, 2)

        arguments = (q, k, v, mask, positions, keys, number, *before)
        if mesh is None:
            return local(*arguments)
        heads = spec_of(mesh, q.shape, ("batch", "sequence", "tensor", None))
        tokens = spec_of(mesh, positions.shape, ("batch", "sequence"))
        ins: Any = (heads, heads, heads, None if mask is None else tokens, tokens, None, None)
        if keys is not None and number is not None:
            places = ("batch", "tensor"), ("sequence",)
            ins = *ins[:5], *map(partial(spec_of, mesh), (keys.shape, number.shape), places)
        if before:
            held = spec_of(mesh, before[0].shape, ("batch", None, "tensor", None))
            ins += (held, held, spec_of(mesh, before[2].shape, ("batch", None)))
        return on_shards(local, mesh, arguments, ins, heads)

    def _document_stream(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        mask: Bool[Array, "B L"] | None,
        positions: Int32[Array, "B L"],
        ring: AttentionCache | None,
        key: jax.Array | None,
    ) -> tuple[Float[Array, "B L H e"], AttentionCache]:
        """Run `_documents`; also return the cache (a ring buffer) to continue the last document."""
        if mask is not None:
            raise ValueError(f"ChunkedAttention: {PACKED_MASK}")
        if not self._chunk_local:
            raise ValueError(f"ChunkedAttention: {PACKED_WINDOW}")
        L = q.shape[1]
        if ring is not None:
            check_ring(self.config, ring, "ring")
            ring = ring.rowwise()
        out = self._documents(q, k, v, None, positions, key, ring)
        ring = self.empty_ring(*q.shape[:2]).rowwise() if ring is None else ring
        if L == 0:
            return out, ring
        new = jnp.minimum(positions[:, -1] + 1, L)
        # If the last document started in this call, drop the keys of the document before it.
        count, first = (
            jnp.where(positions[:, -1] < L, 0, counter) for counter in (ring.count, ring.first)
        )
        k, v = (rolled(a, L - new) for a in (k, v))
        return out, AttentionCache(ring.k, ring.v, count, first).append(k, v, new)

    def _chunks(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        mask: Bool[Array, "B longer"] | None,
        size: int,
        key: jax.Array | None,
    ) -> Float[Array, "B L H e"]:
        """Attend within whole chunks of `size` tokens; columns of `mask` beyond L are ignored."""
        B, L, H, _ = q.shape
        chunks = L // size
        causal = jnp.tril(jnp.ones((size, size), bool))[None, None]
        if mask is not None:
            causal = causal & mask[:, :L].reshape(B, chunks, 1, size)
        q, k, v = (a.reshape(B, chunks, size, H, a.shape[-1]) for a in (q, k, v))
        # Queries of a stripe see no later keys, so products above the diagonal are skipped.
        stripes = range(0, size, STRIPE)
        outs = []
        for begin, stripe_key in zip(stripes, split_key(key, len(stripes)), strict=True):
            end = min(begin + STRIPE, size)
            visible = causal[..., begin:end, :end]
            seen = (q[:, :, begin:end], k[:, :, :end], v[:, :, :end], visible)
            outs.append(attend(*seen, self.config, key=stripe_key))
        out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=2)
        return out.reshape(B, L, H, v.shape[-1])

    def _stream(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        ring: AttentionCache,
        key: jax.Array | None,
        lengths: Int32[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B L H e"], AttentionCache]:
        """Attend block by block in a loop, so that compile time does not grow with the length L.

        `ring` is the cache, a ring buffer, which is returned with the new tokens. `lengths` (B,) is
        the number of tokens of each row, if some rows have fewer than L.
        """
        L, C = q.shape[1], self.config.chunk_size
        k, v = k.astype(ring.k.dtype), v.astype(ring.v.dtype)
        whole = L // C
        block_key, tail_key = split_key(key, 2)
        outs = []
        left = () if lengths is None else (lengths,)
        if whole:

            def block(carry: tuple[AttentionCache, tuple[Array, ...]], part):
                (ring, left), (q, k, v, key) = carry, part
                out, ring = self._attend_block(q, k, v, ring, key, *left)
                return (ring, tuple(jnp.maximum(n - C, 0) for n in left)), out

            parts = (_blocks(a[:, : whole * C], C) for a in (q, k, v))
            keys = None if block_key is None else jax.random.split(block_key, whole)
            (ring, left), out = jax.lax.scan(block, (ring, left), (*parts, keys))
            outs.append(jnp.moveaxis(out, 0, 1).reshape(v.shape[0], whole * C, *v.shape[2:]))
        if whole * C < L:
            q, k, v = (a[:, whole * C :] for a in (q, k, v))
            out, ring = self._attend_block(q, k, v, ring, tail_key, *left)
            outs.append(out)
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1), ring

    def _attend_block(
        self,
        q: Float[Array, "B L H d"],
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        ring: AttentionCache,
        key: jax.Array | None,
        left: Int32[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B L H e"], AttentionCache]:
        """Attend from a block, at most a chunk of tokens, to the ring buffer and the block itself.

        Also return the ring buffer after the block. `left` (B,) is the number of valid tokens of
        each row from the start of the block to the end of the call; None if no row has padding.
        """
        n = q.shape[1]
        new = queries = _numbered(ring.count, n)
        if left is None:
            after = ring.append(k, v)
        else:
            # Padding is no key. As a query it gets the position of its row's last token, because
            # the window is counted back from the last query.
            lengths = jnp.minimum(left, n)
            last = (ring.count + lengths - 1)[:, None]
            new, queries = jnp.where(queries <= last, queries, -1), jnp.minimum(queries, last)
            after = ring.append(k, v, lengths)
        if n == 1:
            # One token overwrites only a slot it may not see, so the ring buffer holds all keys.
            return self._attend_ring(q, queries, after, key), after
        keys = jnp.concatenate([ring.k, k], axis=1)
        held = ring.positions()
        # With a position per row, empty slots may hold NaN left over from an earlier document.
        earlier = _silenced(held >= 0, ring.v) if ring.per_row else (ring.v,)
        values = jnp.concatenate([*earlier, v], axis=1)
        positions = jnp.concatenate([held, new], axis=-1)
        visible = self._visible_rows(queries, positions)
        return attend(q, keys, values, visible, self.config, key=key), after

    def _attend_ring(
        self,
        q: Float[Array, "B 1 H d"],
        queries: Int32[Array, "1"] | Int32[Array, "B 1"],
        ring: AttentionCache,
        key: jax.Array | None,
    ) -> Float[Array, "B 1 H e"]:
        """Attend from one token to the ring buffer; early in a chunk, skip most empty slots.

        `queries` is the token's position: one for all rows, or one per row.
        """
        visible = self._visible_rows(queries, ring.positions())

        def front(size: int):
            def mixed():
                seen, k, v = visible[..., :size], ring.k[:, :size], ring.v[:, :size]
                if ring.per_row:
                    # Empty slots may hold NaN left over from an earlier document.
                    (v,) = _silenced(seen[:, 0], v)
                return attend(q, k, v, seen, self.config, key=key)

            return mixed

        C = self.config.chunk_size
        if not self._chunk_local or ring.capacity != C or C < STRIPE:
            return front(ring.capacity)()
        # With chunk-local attention, slot s is position s of the chunk. Decoding is limited by
        # memory reads.
        sizes = (C // 16, C // 4, C)
        # Rows with different positions all read as far as the fullest row needs.
        filled = jnp.max(queries % C, initial=0) + 1 if ring.per_row else queries[0] % C + 1
        index = sum((filled > size).astype(jnp.int32) for size in sizes[:-1])
        return jax.lax.switch(index, [front(size) for size in sizes])

    def _visible_rows(
        self,
        queries: Int32[Array, " Q"] | Int32[Array, "B Q"],
        keys: Int32[Array, " K"] | Int32[Array, "B K"],
    ) -> Bool[Array, "#B Q K"]:
        """Compute `_visible`, with a first axis of size B if each row has its positions, else 1."""
        if queries.ndim == 2:
            return jax.vmap(self._visible)(queries[:, :, None], keys[:, None, :])
        return self._visible(queries[:, None], keys[None, :])[None]

    def _visible(
        self, queries: Int32[Array, "Q 1"], keys: Int32[Array, "1 K"]
    ) -> Bool[Array, "Q K"]:
        """Return which keys each query may see, by position; empty slots and padding have -1."""
        visible = (keys >= 0) & (keys <= queries)
        if self._chunk_local:
            C = self.config.chunk_size
            return visible & (keys // C == queries // C)
        window = self.config.effective_max_cache_len
        return visible if window is None else visible & (keys > queries[-1:] - window)

    def empty_ring(self, batch_size: int, length: int) -> AttentionCache:
        """Return an empty ring buffer of the configured size.

        If the cache is unbounded, its size is `length` tokens, rounded up to whole chunks.
        """
        config = self.config
        capacity = config.effective_max_cache_len
        if capacity is None:
            capacity = max(-(-length // config.chunk_size), 1) * config.chunk_size
        return AttentionCache.empty(config, batch_size, capacity, config.compute_dtype)


def _keys_of_heads(key: jax.Array, rows: int, heads: int) -> Key[Array, "B H"]:
    """Return dropout keys (rows, heads), for every row and head of the whole batch."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    numbers = jnp.arange(rows * heads, dtype=jnp.int32)
    return jax.vmap(partial(jax.random.fold_in, key))(numbers).reshape(rows, heads)


def _chunk_before(
    ring: AttentionCache, chunk: int
) -> tuple[Float[Array, "B C H d"], Float[Array, "B C H e"], Bool[Array, "B C"]]:
    """Return each row's last `chunk` cached keys and values, and a mask: False at empty slots."""
    at = ring.count[:, None] - jnp.arange(chunk, 0, -1, dtype=jnp.int32)
    slots = (at % ring.capacity)[..., None, None]
    k, v = (jnp.take_along_axis(a, slots, axis=1, mode="clip") for a in (ring.k, ring.v))
    there = at >= ring.first[:, None]
    (v,) = _silenced(there, v)
    return k, v, there


class MegalodonAttention(eqx.Module):
    """First half of a block: TimestepNorm, complex EMA, shared Q/K, chunked attention, gate.

    Source: docs/model.md "Block order".
    """

    timenorm: TimestepNorm
    cema: ComplexEMA
    rmsnorm: RMSNorm
    wz: Linear
    wv: Linear
    wr: Linear
    wh1: Linear
    wh2: Linear
    gamma: Float[Array, "2 Z"]
    beta: Float[Array, "2 Z"]
    inner: ChunkedAttention
    config: MegalodonConfig = eqx.field(static=True)

    def __init__(self, config: MegalodonConfig, *, key: jax.Array):
        keys = jax.random.split(key, 6)
        D, Z, E = config.model_dim, config.z_dim, config.value_dim
        sensitive, affine = config.sensitive_dtype, config.norm_affine
        self.timenorm = TimestepNorm(D, config.norm_num_groups, config.norm_eps, affine, sensitive)
        self.cema = ComplexEMA(D, config.cema_ndim, sensitive, key=keys[0])
        self.rmsnorm = RMSNorm(D, config.norm_eps, affine, sensitive)
        self.wz = Linear(D, Z, config, key=keys[1])
        self.wv = Linear(D, E, config, key=keys[2])
        self.wr = Linear(D, E, config, key=keys[3])
        self.wh1 = Linear(D, D, config, key=keys[4])
        self.wh2 = Linear(E, D, config, key=keys[5])
        self.gamma = jnp.zeros((2, Z), sensitive)
        self.beta = jnp.zeros((2, Z), sensitive)
        self.inner = ChunkedAttention(config)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B L D"],
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        return_cache: bool = False,
        *,
        key: jax.Array | None = None,
        positions: Int32[Array, "B L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], LayerCache | None]:
        """Return `x + h` for the block input x (B, L, D), and the layer's cache after these tokens.

        h is the output of the gated attention. The returned cache is None unless `return_cache`.

        With a cache, the valid tokens of a row must precede its padding, and a mask gives each row
        its own position. `key` enables dropout. `positions` (B, L) is the index of each token
        within its document, for packed documents.
        """
        config = self.config
        ema_key, inner_key, gate_key, out_key = split_key(key, 4)
        mask = as_mask("mask", mask, x.shape[:2], "the tokens")
        lengths, ragged = None, ()
        if cache is not None or return_cache:
            mask = padding_of(mask, x.shape[:2])
            if mask is not None:
                lengths = lengths_of(mask)
                ragged = (lengths,)
        packed = {} if positions is None else {"positions": positions}
        before = None if cache is None else cache.norm
        u, norm = self.timenorm(x, before, mask, **packed)
        if lengths is not None:
            norm = kept_norm(lengths, norm, before)
        u = checkpoint_name(placed(u, "batch", "sequence", "tensor"), "timenorm")
        state = None if cache is None else cache.ema
        c, ema = self._filtered(u, mask, state, return_cache, *ragged, **packed)
        c = checkpoint_name(c, "cema")
        m = checkpoint_name(self.rmsnorm(c), "rmsnorm")
        # On a mesh, every head reads all channels: gather them here, once for `u` and once for `m`.
        m = placed(dropout(m, config.hidden_dropout, ema_key), "batch", "sequence", None)
        u = placed(u, "batch", "sequence", None)
        q, k = self.queries_keys(m)
        q, k = checkpoint_name(q, "q"), checkpoint_name(k, "k")
        v = placed(self.wv(u), "batch", "sequence", "tensor")
        v = checkpoint_name(_heads(jax.nn.silu(v), config.num_heads), "v")
        held = None if cache is None else cache.attn
        if cache is not None and held is None:
            held = self.inner.empty_ring(*x.shape[:2])
            held = held.rowwise() if cache.position.ndim else held
        o, attn = self.inner(q, k, v, mask, held, return_cache, **packed, key=inner_key)
        o = checkpoint_name(o.reshape(*o.shape[:2], config.value_dim), "inner")
        gate = placed(self.wr(m), "batch", "sequence", "tensor")
        gate = checkpoint_name(jax.nn.silu(gate), "gate")
        gated = dropout(o * gate, config.hidden_dropout, gate_key)
        h = placed(self.wh1(m) + self.wh2(gated), "batch", "sequence", "tensor")
        h = dropout(h, config.dropout, out_key)
        y = checkpoint_name(x + h, "attn")
        if not return_cache:
            return y, None
        position = jnp.zeros((), jnp.int32) if cache is None else cache.position
        if positions is not None and x.shape[1]:
            return y, LayerCache(attn, norm, ema, positions[:, -1] + 1)
        length = x.shape[1] if lengths is None else lengths
        return y, LayerCache(attn, norm, ema, position + length)

    def _filtered(
        self, u, mask, state: EMAState | None, return_state: bool, lengths=None, **packed
    ):
        """Return the EMA of `u` (B, L, D) over time, and the state after it, or None.

        A single token of a stream uses the recurrence, other inputs an FFT. `lengths` (B,) is the
        number of tokens of each row, if there are a mask and a cache; `packed` contains
        `positions` for packed documents.
        """
        h = None if state is None else state.h
        if h is not None and u.shape[1] == 1 and not packed:
            wide = u[:, 0].astype(jnp.real(h).dtype)
            c, after = self.cema.step(wide, h)
            after = after if lengths is None else kept_state(lengths, after, h)
            return c[:, None].astype(u.dtype), EMAState(after)
        if lengths is None:
            mask = mask if self.config.mask_ema else None
            c, h = self.cema(jnp.swapaxes(u, 1, 2), h, return_state, mask, **packed)
        else:
            c, h = self.cema(jnp.swapaxes(u, 1, 2), h, return_state, lengths=lengths)
        return jnp.swapaxes(c, 1, 2), None if h is None else EMAState(h)

    def queries_keys(
        self, m: Float[Array, "B L D"]
    ) -> tuple[Float[Array, "B L H d"], Float[Array, "B L H d"]]:
        """Return q and k (B, L, H, d), unrotated: two elementwise affine maps of z.

        z is the projection of `m`, the block's normalised EMA output, divided by its root mean
        square over the d features of each head. The gains of q and k include 1/sqrt(d).
        """
        H, d = self.config.num_heads, self.config.head_dim
        gains = {name: (getattr(self, name), (2, H * d)) for name in ("gamma", "beta")}
        check_inputs("MegalodonAttention", **gains)
        B, L, _ = m.shape
        z = _heads(placed(self.wz(m), "batch", "sequence", "tensor"), H)
        z = RMSNorm(d, self.config.norm_eps, affine=False)(z.astype(widened(z.dtype)))
        # As rows of a matrix, for speed, except on a mesh (see `norms._rows`).
        rows = z.reshape(B, L, H * d) if mesh_of(z) else z.reshape(B * L, H * d)
        scale = ((self.gamma + 1.0) / math.sqrt(d)).astype(z.dtype)
        shift = self.beta.astype(z.dtype)
        q, k = (rows * scale[i] + shift[i] for i in range(2))
        return q.reshape(z.shape), k.reshape(z.shape)


def _silenced(mask: Bool[Array, "B L"], *arrays: Float[Array, "B L H _"]) -> tuple[Array, ...]:
    """Return the arrays (keys, values) with 0 where `mask` is False."""
    # A weight of 0 is not enough if a padding token is not finite: 0 * NaN is NaN.
    return tuple(jnp.where(mask[..., None, None], a, 0.0) for a in arrays)


def _numbered(
    start: Int32[Array, ""] | Int32[Array, " B"], length: int
) -> Int32[Array, " L"] | Int32[Array, "B L"]:
    """Return the positions of `length` tokens from `start` on; (B, L) if each row has a start."""
    steps = jnp.arange(length, dtype=jnp.int32)
    return start[:, None] + steps[None] if start.ndim else start + steps


def kept_norm(lengths: Int32[Array, " B"], new: NormState, before: NormState | None) -> NormState:
    """Return the norm statistics after a call; rows without a token get those `before` the call."""
    if before is None:
        rows, groups = new.mean.shape
        before = NormState.fresh(rows, groups, new.mean.dtype)
    return kept_state(lengths, new, before)


def _blocks(x: Float[Array, "B L ..."], size: int) -> Float[Array, "n B size ..."]:
    B, L = x.shape[:2]
    return jnp.moveaxis(x.reshape(B, L // size, size, *x.shape[2:]), 1, 0)


def _heads(x: Float[Array, "B L HE"], heads: int) -> Float[Array, "B L H E"]:
    return x.reshape(*x.shape[:2], heads, x.shape[-1] // heads)
