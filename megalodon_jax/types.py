"""Caches: the states that a stream (a text split into calls) carries from call to call, as pytrees.

Positions and counters are arrays, never Python integers, so that a stream does not recompile as it
advances. Source: docs/model.md "Caches".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Complex, Float, Int32, Integer

from megalodon_jax.checks import checked
from megalodon_jax.config import MegalodonConfig, checked_dtype, widened
from megalodon_jax.inputs import Tensor, as_int32, as_integer, traced

Counter: TypeAlias = Int32[Array, ""] | Int32[Array, " B"]
"""Token count of a stream: () if it is equal for all rows of the batch, (B,) with one per row."""


class NormState(eqx.Module):
    """Running statistics of a TimestepNorm; before the first token (count, mean, var) = (0, 0, 1).

    count (B,) int32 is the number of tokens seen; mean (B, G) and var (B, G) are statistics of the
    per-token group means (see `TimestepNorm`), in at least float32.
    """

    count: Int32[Array, " B"]
    mean: Float[Array, "B G"]
    var: Float[Array, "B G"]

    @classmethod
    def fresh(cls, batch_size: int, num_groups: int, dtype: DTypeLike = jnp.float32) -> NormState:
        """Return the state before the first token.

        Raises:
            ValueError: the dtype is not supported, for example float16.
        """
        dtype = checked_dtype("dtype", dtype, "NormState.fresh")
        return cls(
            count=jnp.zeros(batch_size, jnp.int32),
            mean=jnp.zeros((batch_size, num_groups), dtype),
            var=jnp.ones((batch_size, num_groups), dtype),
        )


class EMAState(eqx.Module):
    """State of a complex EMA: h (B, D, N), complex64 or wider."""

    h: Complex[Array, "B D N"]


class AttentionCache(eqx.Module):
    """Rotated keys, and values, of the latest tokens: a ring buffer of `cap` slots (the capacity).

    k (B, cap, H, d) and v (B, cap, H, e) have the compute dtype. The token at position p is in slot
    p modulo `cap`. `count` int32 is the number of tokens seen. `first` int32 is the oldest position
    still held: slots with earlier positions are empty. Both counters are scalars if all rows have
    seen equally many tokens, and (B,) if each row has its own position.
    """

    k: Float[Array, "B cap H d"]
    v: Float[Array, "B cap H e"]
    count: Counter = eqx.field(default_factory=lambda: jnp.zeros((), jnp.int32))
    first: Counter = eqx.field(default_factory=lambda: jnp.zeros((), jnp.int32))

    @property
    def capacity(self) -> int:
        """Number of tokens that the ring buffer can hold."""
        return self.k.shape[1]

    @property
    def per_row(self) -> bool:
        """Whether each row has its own position."""
        return self.count.ndim == 1

    def positions(self) -> Int32[Array, " cap"] | Int32[Array, "B cap"]:
        """Return the absolute position of the token in each slot; -1 for an empty slot."""
        if self.per_row:
            rows = jax.vmap(lambda count, first: _held(count, first, self.capacity))
            return rows(self.count, self.first)
        return _held(self.count, self.first, self.capacity)

    def rowwise(self) -> AttentionCache:
        """Return this ring buffer with one counter per row, (B,)."""
        rows = self.k.shape[0]
        return AttentionCache(self.k, self.v, spread(self.count, rows), spread(self.first, rows))

    def append(
        self,
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        lengths: Int32[Array, " B"] | None = None,
    ) -> AttentionCache:
        """Return the ring buffer after L more tokens; the oldest tokens are overwritten.

        With `lengths`, row b receives only the first `lengths[b]` of the L tokens, and counters are
        per row.
        """
        L = k.shape[1]
        if lengths is not None or self.per_row:
            lengths = jnp.full(k.shape[:1], L, jnp.int32) if lengths is None else lengths
            return self.rowwise()._append_rows(k, v, lengths)
        keep = min(L, self.capacity)
        slots = (self.count + jnp.arange(L - keep, L, dtype=jnp.int32)) % self.capacity

        def write(ring: Array, new: Array) -> Array:
            new = new[:, L - keep :].astype(ring.dtype)
            if keep == 1:
                # A slice update is done in place; a scatter would copy the ring.
                return jax.lax.dynamic_update_slice_in_dim(ring, new, slots[0], axis=1)
            return ring.at[:, slots].set(new)

        return AttentionCache(
            k=write(self.k, k),
            v=write(self.v, v),
            count=self.count + L,
            first=jnp.maximum(self.first, self.count + L - self.capacity),
        )

    def _append_rows(
        self,
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H e"],
        lengths: Int32[Array, " B"],
    ) -> AttentionCache:
        """Compute `append` for a ring buffer in which each row has its own position."""
        (B, L), capacity = k.shape[:2], self.capacity
        count = self.count + lengths
        first = jnp.maximum(self.first, count - capacity)
        after = AttentionCache(self.k, self.v, count, first)
        if L == 1:
            # One slot per row. A row without a token gets a slot out of range, which is dropped.
            slots = jnp.where(lengths > 0, self.count % capacity, capacity)
            rows = jnp.arange(B, dtype=jnp.int32)

            def write(ring: Array, new: Array) -> Array:
                at = ring.at[rows, slots]
                new = new[:, 0].astype(ring.dtype)
                return at.set(new, mode="drop", unique_indices=True, indices_are_sorted=True)
        else:
            # Write all slots at once: each takes the new token for it, or keeps the old one.
            index = after.positions() - self.count[:, None]
            taken = (index >= 0)[..., None, None]
            index = jnp.maximum(index, 0)[..., None, None]

            def write(ring: Array, new: Array) -> Array:
                new = jnp.take_along_axis(new.astype(ring.dtype), index, axis=1, mode="clip")
                return jnp.where(taken, new, ring)

        return AttentionCache(write(self.k, k), write(self.v, v), count, first)

    def resized(self, capacity: int) -> AttentionCache:
        """Return a ring buffer of another capacity with as many of the latest tokens as fit."""
        empty = jnp.zeros((self.k.shape[0], capacity, *self.k.shape[2:]), self.k.dtype)
        values = jnp.zeros((self.v.shape[0], capacity, *self.v.shape[2:]), self.v.dtype)
        oldest = self.count - min(capacity, self.capacity)
        first = jnp.maximum(self.first, oldest)
        positions = AttentionCache(empty, values, self.count, first).positions()
        source = positions % self.capacity
        mask = (positions >= 0).reshape(-1, capacity, 1, 1)

        def moved(ring: Array) -> Array:
            if self.per_row:
                return jnp.take_along_axis(ring, source[..., None, None], axis=1, mode="clip")
            return ring[:, source]

        return AttentionCache(
            k=jnp.where(mask, moved(self.k), empty),
            v=jnp.where(mask, moved(self.v), values),
            count=self.count,
            first=first,
        )

    @classmethod
    def empty(
        cls, config: MegalodonConfig, batch_size: int, capacity: int, dtype: DTypeLike
    ) -> AttentionCache:
        """Return an empty ring buffer with scalar counters.

        Raises:
            ValueError: the dtype is not supported, for example float16.
        """
        dtype = checked_dtype("dtype", dtype, "AttentionCache.empty")
        shape = (batch_size, capacity, config.num_heads)
        return cls(
            k=jnp.zeros((*shape, config.head_dim), dtype),
            v=jnp.zeros((*shape, config.value_head_dim), dtype),
            count=jnp.zeros((), jnp.int32),
            first=jnp.zeros((), jnp.int32),
        )


def _held(count: Int32[Array, ""], first: Int32[Array, ""], capacity: int) -> Int32[Array, " cap"]:
    """Return the position in each slot of a ring buffer after `count` tokens; -1 if empty."""
    last = count - 1
    latest = last - (last - jnp.arange(capacity, dtype=jnp.int32)) % capacity
    return jnp.where(latest >= first, latest, -1)


def spread(counter: Counter, rows: int) -> Int32[Array, " B"]:
    """Return `counter` with an entry per row, (B,); unchanged if it already has one per row."""
    return counter if counter.ndim else jnp.full((rows,), counter)


class LayerCache(eqx.Module):
    """State of one block: keys and values, norm statistics, EMA state, absolute position.

    A part that is None stands for its state before the first token. `position` int32 is the number
    of tokens seen: (), or (B,) if each row has its own position, as in `attn`.
    """

    attn: AttentionCache | None = None
    norm: NormState | None = None
    ema: EMAState | None = None
    position: Counter = eqx.field(default_factory=lambda: jnp.zeros((), jnp.int32))


class ModelCache(eqx.Module):
    """State of a model: one `LayerCache` per block and the statistics of the final norm.

    `layer_caches` may be any sequence; an element None becomes an empty `LayerCache`. `document` is
    the segment id of each row's last token, or None if calls have no segment ids.
    """

    layer_caches: tuple[LayerCache, ...] = eqx.field(
        converter=lambda layers: tuple(LayerCache() if c is None else c for c in layers)
    )
    final_norm: NormState | None = None
    document: Int32[Array, " B"] | None = None

    @property
    def position(self) -> Counter:
        """Number of tokens seen so far, () or (B,) per row."""
        return self.layer_caches[0].position

    @property
    def per_row(self) -> bool:
        """Whether each row has its own position."""
        return self.position.ndim == 1


def init_cache(
    config: MegalodonConfig,
    batch_size: int,
    dtype: DTypeLike | None = None,
    *,
    allocate_kv: bool | None = None,
    allocate_norm: bool | None = None,
    allocate_ema: bool | None = None,
    per_row: bool = False,
    packed: bool = False,
) -> ModelCache:
    """Return the cache of a stream before its first token.

    By default every array is allocated. A model then returns a cache of the same structure, shapes
    and dtypes, as `lax.scan`, `lax.while_loop` and donated arguments require. An unbounded cache
    grows only outside of jit; `reserve_cache` allocates room beforehand.

    Args:
        config: sizes, capacity and dtypes.
        batch_size: rows of the stream.
        dtype: dtype of keys and values; None means `config.compute_dtype`.
        allocate_kv, allocate_norm, allocate_ema: which arrays to allocate now. If none is True, all
            are allocated except those with False; otherwise only those with True. The first call
            adds the missing arrays, which changes the structure of the cache.
        per_row: whether each row has its own position. A call with a padding mask returns such a
            cache even if it received one with a shared position. So a loop whose body passes a mask
            must start with True.
        packed: whether calls may have `segment_ids`. Each row then has its own position.
    """
    per_row = per_row or packed
    dtype = config.compute_dtype if dtype is None else checked_dtype("dtype", dtype, "init_cache")
    parts = (allocate_kv, allocate_norm, allocate_ema)
    # A caller that requests some parts gets only these.
    rest = not any(parts)
    kv, norm, ema = (rest if part is None else part for part in parts)
    # An unbounded cache starts with one chunk and grows.
    capacity = config.effective_max_cache_len or config.chunk_size
    wide = widened(config.accum_dtype)

    def ring() -> AttentionCache:
        empty = AttentionCache.empty(config, batch_size, capacity, dtype)
        return empty.rowwise() if per_row else empty

    def moments() -> NormState:
        return NormState.fresh(batch_size, config.norm_num_groups, wide)

    def layer() -> LayerCache:
        return LayerCache(
            attn=ring() if kv else None,
            norm=moments() if norm else None,
            ema=_zero_state(config, batch_size, wide) if ema else None,
            position=jnp.zeros((batch_size,) if per_row else (), jnp.int32),
        )

    layers = tuple(layer() for _ in range(config.num_layers))
    document = jnp.zeros((batch_size,), jnp.int32) if packed else None
    return ModelCache(layers, moments() if norm else None, document)


def filled_cache(
    config: MegalodonConfig, cache: ModelCache | None, batch_size: int, *, per_row: bool = False
) -> ModelCache:
    """Return the cache with every part that is None set to its state before the first token.

    A `cache` of None gives an empty cache. With `per_row`, the result has one counter per row.
    """
    per_row = per_row or (cache is not None and cache.per_row)
    fresh = init_cache(config, batch_size, per_row=per_row)
    if cache is None:
        return fresh
    if per_row:
        cache = rowwise_cache(cache, batch_size)

    def filled(layer: LayerCache, new: LayerCache) -> LayerCache:
        return LayerCache(
            attn=layer.attn or new.attn,
            norm=layer.norm or new.norm,
            ema=layer.ema or new.ema,
            position=layer.position,
        )

    layers = map(filled, cache.layer_caches, fresh.layer_caches)
    return ModelCache(tuple(layers), cache.final_norm or fresh.final_norm, cache.document)


def rowwise_cache(cache: ModelCache, batch_size: int) -> ModelCache:
    """Return the cache with one counter per row, (B,), in place of those shared by all rows."""

    def rowwise(layer: LayerCache) -> LayerCache:
        attn = None if layer.attn is None else layer.attn.rowwise()
        return LayerCache(attn, layer.norm, layer.ema, spread(layer.position, batch_size))

    return ModelCache(tuple(map(rowwise, cache.layer_caches)), cache.final_norm, cache.document)


def grown_cache(
    config: MegalodonConfig,
    cache: ModelCache,
    length: int | Int32[Array, " B"],
    *,
    resizable: bool = False,
) -> ModelCache:
    """Return the cache, resized to hold `length` more tokens if `config.cache_unbounded`.

    `length` is a number, or one per row (B,).

    Under jit, the number of cached tokens is unknown. There the cache keeps its size. With
    `resizable`, which allows its shape to change, it grows as if it were full.

    Raises:
        RuntimeError: the tokens do not fit, under jit and without `resizable`.
    """
    attn = cache.layer_caches[0].attn
    if not config.cache_unbounded or attn is None:
        return cache
    if not any(map(traced, (attn.count, attn.first, length))):
        # Computed in NumPy: within a trace, JAX would not return concrete numbers.
        after = np.asarray(attn.count) - np.asarray(attn.first) + np.asarray(length)
        needed = int(np.max(after, initial=0))
    elif resizable:
        needed = attn.capacity + int(np.max(length, initial=0))
    else:
        message = (
            f"cache_unbounded: the cache holds {attn.capacity} tokens and is full; a cache grows "
            "only outside of jit. Call reserve_cache first, or call the model without jit."
        )
        full = attn.count - attn.first + length > attn.capacity
        count = checked(attn.count, full, message)
        return eqx.tree_at(lambda c: c.layer_caches[0].attn.count, cache, count)
    C = config.chunk_size
    return _reserved(cache, -(-needed // C) * C)


def copied_cache(cache: ModelCache) -> ModelCache:
    """Return a copy that shares no buffer, so that donating one cache leaves the other intact."""
    return jax.tree.map(jnp.copy, cache)


def trim_cache(cache: ModelCache, max_len: int) -> ModelCache:
    """Return a copy of the cache that keeps only the latest `max_len` keys and values.

    The capacity does not change, since the attention window needs it: later tokens see each other
    as usual, however they are split into calls. An unbounded cache reuses the freed slots before it
    grows.

    Raises:
        ValueError: `max_len` is not a positive integer.
    """
    remedy = "; for an empty cache call init_cache"
    max_len = as_integer("trim_cache: max_len", max_len, 1, remedy)

    def trimmed(attn: AttentionCache) -> AttentionCache:
        first = jnp.maximum(attn.first, attn.count - max_len)
        return AttentionCache(attn.k, attn.v, attn.count, first)

    return copied_cache(_with_rings(cache, trimmed))


def reserve_cache(cache: ModelCache, max_len: int) -> ModelCache:
    """Return a copy of the cache with room for at least `max_len` tokens.

    Call this before passing an unbounded cache to a compiled function, where it cannot grow.

    Raises:
        ValueError: `max_len` is not a positive integer.
    """
    max_len = as_integer("reserve_cache: max_len", max_len, 1)
    return copied_cache(_reserved(cache, max_len))


def index_cache(cache: ModelCache, indices: Integer[Tensor, " K"]) -> ModelCache:
    """Return a copy of the cache with rows `indices` (K,), for example to reorder beams.

    Raises:
        ValueError: `indices` is not a vector of integers.
        RuntimeError: an index is outside [0, B), where JAX would use another row (also under jit).
    """
    rows = as_int32("index_cache: indices", indices, "K", "give the row each beam continues")
    number = next((leaf.shape[0] for leaf in jax.tree.leaves(cache) if leaf.ndim), None)
    if number is not None:
        rows = checked(
            rows,
            (rows < 0) | (rows >= number),
            f"index_cache: indices must be in [0, {number}), the rows of this cache.",
        )
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if leaf.ndim == 0 else leaf[rows], cache)


def _reserved(cache: ModelCache, capacity: int) -> ModelCache:
    def reserved(attn: AttentionCache) -> AttentionCache:
        return attn if attn.capacity >= capacity else attn.resized(capacity)

    return _with_rings(cache, reserved)


def _with_rings(
    cache: ModelCache, change: Callable[[AttentionCache], AttentionCache]
) -> ModelCache:
    def changed(layer: LayerCache) -> LayerCache:
        attn = None if layer.attn is None else change(layer.attn)
        return LayerCache(attn, layer.norm, layer.ema, layer.position)

    return ModelCache(tuple(map(changed, cache.layer_caches)), cache.final_norm, cache.document)


def check_cache(config: MegalodonConfig, cache: ModelCache, batch_size: int) -> None:
    """Check that a cache fits a configuration and a batch size.

    Raises:
        ValueError: layer count or shapes differ; the message names the first difference.
    """
    if len(cache.layer_caches) != config.num_layers:
        raise ValueError(
            f"cache has {len(cache.layer_caches)} layers, expected {config.num_layers}; "
            "it is the cache of another model: make one with init_cache for this configuration."
        )
    heads, groups = config.num_heads, config.norm_num_groups
    norm = {"count": (batch_size,), "mean": (batch_size, groups), "var": (batch_size, groups)}
    keys = (batch_size, None, heads, config.head_dim)
    values = (batch_size, None, heads, config.value_head_dim)
    ema = {"h": (batch_size, config.model_dim, config.cema_ndim)}
    counters = (batch_size,) if cache.per_row else ()
    for i, layer in enumerate(cache.layer_caches):
        ring = {"k": keys, "v": values, "count": counters, "first": counters}
        _check_state(f"layer {i}", layer, {"position": counters})
        _check_state(f"layer {i} attn", layer.attn, ring)
        if layer.attn is not None:
            check_ring(config, layer.attn, f"layer {i} attn")
        _check_state(f"layer {i} norm", layer.norm, norm)
        _check_state(f"layer {i} ema", layer.ema, ema)
    _check_state("final_norm", cache.final_norm, norm)
    if cache.document is not None:
        _check_state("rows", cache, {"document": (batch_size,), "position": (batch_size,)})


def check_ring(config: MegalodonConfig, ring: AttentionCache, name: str) -> None:
    """Check that a ring buffer can hold all keys that the attention of a configuration may see.

    Raises:
        ValueError: its capacity is too small, or differs between keys and values; the message names
            the ring buffer `name`.
    """
    window = config.effective_max_cache_len or 1
    if ring.capacity < window or ring.v.shape[1] != ring.capacity:
        raise ValueError(
            f"cache: {name} has room for {ring.capacity} keys and {ring.v.shape[1]} values, "
            f"expected the same number, at least {window} for this configuration; make the cache "
            "with init_cache. To drop old tokens call trim_cache, which keeps the capacity."
        )


def _check_state(name: str, state: Any, expected: Mapping[str, tuple[int | None, ...]]) -> None:
    if state is None:
        return
    for leaf, shape in expected.items():
        got = getattr(state, leaf).shape
        fits = len(got) == len(shape) and all(
            s is None or s == g for s, g in zip(shape, got, strict=True)
        )
        if not fits:
            raise ValueError(
                f"cache: {name}.{leaf} has shape {got}, expected {shape} (None: any); "
                "make it with init_cache for this configuration and batch size."
            )


def _zero_state(config: MegalodonConfig, batch_size: int, dtype: DTypeLike) -> EMAState:
    zeros = jnp.zeros((batch_size, config.model_dim, config.cema_ndim), dtype)
    return EMAState(jax.lax.complex(zeros, zeros))
