"""States a stream carries from one call to the next, as pytrees.

Positions and counters are scalar arrays, never Python integers: a stream that moves on must not
compile again. Source: spec/api.md "Caches".
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Complex, Float, Int32

from megalodon_jax.config import MegalodonConfig, widened


class NormState(eqx.Module):
    """Running statistics of a TimestepNorm; a fresh stream is (0, 0, 1) (spec/model.md).

    count (B,) int32 tokens seen, mean (B, G) and var (B, G) of the per-token group means, in at
    least float32.
    """

    count: Int32[Array, " B"]
    mean: Float[Array, "B G"]
    var: Float[Array, "B G"]

    @classmethod
    def fresh(cls, batch_size: int, num_groups: int, dtype: DTypeLike = jnp.float32) -> NormState:
        """Return the state before the first token."""
        return cls(
            count=jnp.zeros(batch_size, jnp.int32),
            mean=jnp.zeros((batch_size, num_groups), dtype),
            var=jnp.ones((batch_size, num_groups), dtype),
        )


class EMAState(eqx.Module):
    """State of a complex EMA: h (B, D, N), complex64 or wider."""

    h: Complex[Array, "B D N"]


class AttentionCache(eqx.Module):
    """Rotated keys and values of the latest tokens, a ring indexed by position modulo capacity.

    k (B, cap, H, d) and v (B, cap, H, e) in the compute dtype; count () int32 is the number of
    tokens seen, so slot s holds the latest position before `count` that is s modulo `cap`.
    """

    k: Float[Array, "B cap H d"]
    v: Float[Array, "B cap H e"]
    count: Int32[Array, ""]

    @property
    def capacity(self) -> int:
        """Tokens the ring can hold."""
        return self.k.shape[1]

    def positions(self) -> Int32[Array, " cap"]:
        """Absolute position each slot holds; negative where it holds nothing."""
        last = self.count - 1
        return last - (last - jnp.arange(self.capacity, dtype=jnp.int32)) % self.capacity

    def append(self, k: Float[Array, "B L H d"], v: Float[Array, "B L H e"]) -> AttentionCache:
        """Return the ring after L more tokens; the oldest fall out."""
        L = k.shape[1]
        keep = min(L, self.capacity)
        slots = (self.count + jnp.arange(L - keep, L, dtype=jnp.int32)) % self.capacity
        return AttentionCache(
            k=self.k.at[:, slots].set(k[:, L - keep :].astype(self.k.dtype)),
            v=self.v.at[:, slots].set(v[:, L - keep :].astype(self.v.dtype)),
            count=self.count + L,
        )

    def resized(self, capacity: int) -> AttentionCache:
        """Return a ring of another capacity with the latest tokens that fit it."""
        empty = jnp.zeros((self.k.shape[0], capacity, *self.k.shape[2:]), self.k.dtype)
        values = jnp.zeros((self.v.shape[0], capacity, *self.v.shape[2:]), self.v.dtype)
        target = AttentionCache(empty, values, self.count)
        positions = target.positions()
        held = (positions >= 0) & (positions >= self.count - self.capacity)
        source = positions % self.capacity
        mask = held[None, :, None, None]
        return AttentionCache(
            k=jnp.where(mask, self.k[:, source], empty),
            v=jnp.where(mask, self.v[:, source], values),
            count=self.count,
        )


class LayerCache(eqx.Module):
    """What one block carries: keys and values, norm statistics, EMA state, absolute position."""

    attn: AttentionCache | None
    norm: NormState | None
    ema: EMAState | None
    position: Int32[Array, ""]


class ModelCache(eqx.Module):
    """What a model carries: one `LayerCache` per block and the final norm's statistics."""

    layer_caches: tuple[LayerCache, ...]
    final_norm: NormState | None

    @property
    def position(self) -> Int32[Array, ""]:
        """Tokens seen so far."""
        return self.layer_caches[0].position


def init_cache(
    config: MegalodonConfig,
    batch_size: int,
    dtype: DTypeLike | None = None,
    *,
    allocate_kv: bool = False,
    allocate_norm: bool = False,
    allocate_ema: bool = False,
) -> ModelCache:
    """Return the cache of a stream before its first token.

    Args:
        config: sizes, capacity and dtypes.
        batch_size: rows of the stream.
        dtype: dtype of keys and values; None means `config.compute_dtype`.
        allocate_kv, allocate_norm, allocate_ema: make the arrays now. What is not allocated is
            filled by the first call, after which the structure of the cache is another one.
    """
    dtype = config.compute_dtype if dtype is None else dtype
    wide = widened(config.accum_dtype)

    def layer() -> LayerCache:
        return LayerCache(
            attn=_empty_ring(config, batch_size, dtype) if allocate_kv else None,
            norm=NormState.fresh(batch_size, config.norm_num_groups, wide)
            if allocate_norm
            else None,
            ema=_zero_state(config, batch_size, wide) if allocate_ema else None,
            position=jnp.zeros((), jnp.int32),
        )

    norm = NormState.fresh(batch_size, config.norm_num_groups, wide) if allocate_norm else None
    return ModelCache(tuple(layer() for _ in range(config.num_layers)), norm)


def trim_cache(cache: ModelCache, max_len: int) -> ModelCache:
    """Return the cache with room for the latest `max_len` tokens of keys and values only.

    Raises:
        ValueError: `max_len` is not positive.
    """
    if max_len < 1:
        raise ValueError(f"trim_cache: max_len={max_len} must be at least 1.")

    return _resized(cache, lambda capacity: min(capacity, max_len))


def reserve_cache(cache: ModelCache, max_len: int) -> ModelCache:
    """Return the cache with room for `max_len` tokens: an unbounded one cannot grow under jit."""
    return _resized(cache, lambda capacity: max(capacity, max_len))


def index_cache(cache: ModelCache, indices: Int32[Array, " K"]) -> ModelCache:
    """Return the cache with rows taken by `indices` (K,), as beam search reorders its beams."""
    return jax.tree.map(lambda leaf: leaf if leaf.ndim == 0 else leaf[indices], cache)


def _resized(cache: ModelCache, choose: Callable[[int], int]) -> ModelCache:
    def resize(layer: LayerCache) -> LayerCache:
        if layer.attn is None or layer.attn.capacity == choose(layer.attn.capacity):
            return layer
        attn = layer.attn.resized(choose(layer.attn.capacity))
        return LayerCache(attn, layer.norm, layer.ema, layer.position)

    return ModelCache(tuple(map(resize, cache.layer_caches)), cache.final_norm)


def check_cache(config: MegalodonConfig, cache: ModelCache, batch_size: int) -> None:
    """Check that a cache belongs to a configuration and a batch.

    Raises:
        ValueError: layer count or shapes differ; the message names the first that does.
    """
    if len(cache.layer_caches) != config.num_layers:
        raise ValueError(
            f"cache has {len(cache.layer_caches)} layers, expected {config.num_layers}; "
            "it is of another model."
        )
    heads, groups = config.num_heads, config.norm_num_groups
    expected = {
        "attn.k": (batch_size, None, heads, config.head_dim),
        "attn.v": (batch_size, None, heads, config.value_head_dim),
        "norm.mean": (batch_size, groups),
        "ema.h": (batch_size, config.model_dim, config.cema_ndim),
    }
    for i, layer in enumerate(cache.layer_caches):
        for name, shape in expected.items():
            owner, leaf = name.split(".")
            state = getattr(layer, owner)
            if state is None:
                continue
            got = getattr(state, leaf).shape
            if len(got) != len(shape) or any(
                s is not None and s != g for s, g in zip(shape, got, strict=True)
            ):
                raise ValueError(
                    f"cache: layer {i} {name} has shape {got}, expected {shape} (None: any); "
                    "make it with init_cache for this configuration and batch size."
                )


def _empty_ring(config: MegalodonConfig, batch_size: int, dtype: DTypeLike) -> AttentionCache:
    # An unbounded cache starts with one chunk and grows.
    capacity = config.effective_max_cache_len or config.chunk_size
    shape = (batch_size, capacity, config.num_heads)
    return AttentionCache(
        k=jnp.zeros((*shape, config.head_dim), dtype),
        v=jnp.zeros((*shape, config.value_head_dim), dtype),
        count=jnp.zeros((), jnp.int32),
    )


def _zero_state(config: MegalodonConfig, batch_size: int, dtype: DTypeLike) -> EMAState:
    zeros = jnp.zeros((batch_size, config.model_dim, config.cema_ndim), dtype)
    return EMAState(jax.lax.complex(zeros, zeros))
