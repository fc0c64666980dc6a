"""Multi-head latent attention: compressed keys and values, one rotary key shared by all heads.

Source: DeepSeek-V3 technical report, equations 1 to 11; absorption, DeepSeek-V2 report
(arXiv 2405.04434), section 2.1.2.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Num

from megalodon_jax.config import widened
from parity.deepseek_v3.config import MLAMoEConfig


class LayerCache(NamedTuple):
    """Cache of one layer for S positions; its size does not depend on the number of heads."""

    latent: Float[Array, "B S R"]
    """Keys and values of all heads, compressed to R numbers per position and normalised."""
    rotary: Float[Array, "B S r"]
    """Rotary key that all heads share, already rotated."""


class RMSNorm(eqx.Module):
    """RMSNorm, `x * rsqrt(mean(x^2) + eps) * weight`, in at least float32; weight starts at 1."""

    weight: Float[Array, " D"]
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, eps: float):
        self.weight, self.eps = jnp.ones(dim, jnp.float32), eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise the last axis of `x`; the result has the dtype of `x`."""
        wide = x.astype(widened(x.dtype))
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight.astype(wide.dtype)).astype(x.dtype)


class Linear(eqx.Module):
    """Linear map `x W^T` without bias, in the dtype of `x`, to which the weight is cast."""

    weight: Float[Array, "*experts out in"]

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        """Apply the map to the last axis of `x`."""
        return x @ self.weight.astype(x.dtype).T


class Draw:
    """Draws initial float32 weights of successive layers from N(0, std^2)."""

    def __init__(self, key: jax.Array, std: float):
        self.key, self.std = key, std

    def __call__(self, *shape: int) -> Linear:
        """Return a `Linear` with a new weight of this shape."""
        self.key, now = jax.random.split(self.key)
        return Linear(self.std * jax.random.normal(now, shape, jnp.float32))


class Attention(eqx.Module):
    """Multi-head latent attention (DeepSeek-V3 report, equations 1 to 11).

    Fields have DeepSeek-V3's names. Queries are compressed by `q_a_proj` and expanded by
    `q_b_proj`, or computed by `q_proj` alone if `q_lora_rank` is None.
    """

    q_proj: Linear | None
    q_a_proj: Linear | None
    q_a_layernorm: RMSNorm | None
    q_b_proj: Linear | None
    kv_a_proj_with_mqa: Linear
    kv_a_layernorm: RMSNorm
    kv_b_proj: Linear
    o_proj: Linear
    config: MLAMoEConfig = eqx.field(static=True)

    def __init__(self, config: MLAMoEConfig, draw: Draw):
        D, H, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        R, r, v = config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim
        queries = H * config.qk_head_dim
        direct = rank is None
        # The epsilon of the latent norms is fixed by the architecture, not by the configuration.
        self.q_proj = draw(queries, D) if direct else None
        self.q_a_proj = None if direct else draw(rank, D)
        self.q_a_layernorm = None if direct else RMSNorm(rank, 1e-6)
        self.q_b_proj = None if direct else draw(queries, rank)
        self.kv_a_proj_with_mqa = draw(R + r, D)
        self.kv_a_layernorm = RMSNorm(R, 1e-6)
        self.kv_b_proj = draw(H * (config.qk_nope_head_dim + v), R)
        self.o_proj = draw(D, H * v)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B L D"],
        positions: Num[Array, "B L"],
        past: LayerCache | None = None,
        filled: Int[Array, ""] | int = 0,
        *,
        absorbed: bool = False,
        scope: str = "",
    ) -> tuple[Float[Array, "B L D"], LayerCache]:
        """Attend from each token to itself and all earlier ones; return the output and the cache.

        Args:
            x: normalised hidden states.
            positions: position of each token, for the rotation.
            past: cache to continue, with room for L more positions; the returned cache has the
                same size. None: the returned cache holds the L positions of `x` only.
            filled: number of positions of `past` that are filled.
            absorbed: multiply queries, instead of latents, by the key matrix, and the weighted sum
                of latents by the value matrix, so that keys and values per head are never computed
                (DeepSeek-V2 report, section 2.1.2). The result is equal up to rounding.
            scope: prefix of the names of intermediates, such as `layers.0.`.
        """
        q_nope, q_rot = self.queries(x, positions, scope)
        now = self.compress(x, positions, scope)
        if past is not None:
            both = zip(past, now, strict=True)
            now = LayerCache(
                *(jax.lax.dynamic_update_slice_in_dim(o, n, filled, 1) for o, n in both)
            )
        seen = _causal(x.shape[1], now.latent.shape[1], filled)
        mix = self._absorbed if absorbed else self._expanded
        heads = mix(q_nope, q_rot, now, seen)
        out = self.o_proj(heads.reshape(*x.shape[:2], -1))
        return checkpoint_name(out, f"{scope}attn"), now

    def queries(
        self, x: Float[Array, "B L D"], positions: Num[Array, "B L"], scope: str = ""
    ) -> tuple[Float[Array, "B L H n"], Float[Array, "B L H r"]]:
        """Return the queries in two parts: the non-rotary part (B, L, H, qk_nope_head_dim), and the
        part rotated by RoPE (B, L, H, qk_rope_head_dim)."""
        if self.q_proj is not None:
            q = self.q_proj(x)
        else:
            assert self.q_a_proj and self.q_a_layernorm and self.q_b_proj
            latent = checkpoint_name(self.q_a_layernorm(self.q_a_proj(x)), f"{scope}q_latent")
            q = self.q_b_proj(latent)
        q = q.reshape(*q.shape[:2], self.config.num_attention_heads, -1)
        nope, rot = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        return nope, rotate(rot, positions, self.config)

    def compress(
        self, x: Float[Array, "B L D"], positions: Num[Array, "B L"], scope: str = ""
    ) -> LayerCache:
        """Return the cache entries of L tokens with normalised hidden states `x`."""
        both = self.kv_a_proj_with_mqa(x)
        latent, rot = jnp.split(both, [self.config.kv_lora_rank], axis=-1)
        latent = checkpoint_name(self.kv_a_layernorm(latent), f"{scope}kv_latent")
        return LayerCache(latent, rotate(rot[:, :, None], positions, self.config)[:, :, 0])

    def expand(self) -> tuple[Float[Array, "H n R"], Float[Array, "H v R"]]:
        """Return the matrices per head that expand latents of width R to non-rotary keys,
        (H, qk_nope_head_dim, R), and to values, (H, v_head_dim, R)."""
        c = self.config
        both = self.kv_b_proj.weight.reshape(c.num_attention_heads, -1, c.kv_lora_rank)
        return both[:, : c.qk_nope_head_dim], both[:, c.qk_nope_head_dim :]

    def scores(
        self, q_nope: Array, q_rot: Array, kept: LayerCache, *, absorbed: bool = False
    ) -> Float[Array, "B H L S"]:
        """Return scaled attention logits (B, H, L, S) before the mask, in at least float32.

        `kept` is the cache of the keys; `absorbed` as in `__call__`.
        """
        keys = self.expand()[0].astype(q_nope.dtype)
        if absorbed:
            plain = jnp.einsum(
                "blhr,bsr->bhls", jnp.einsum("blhn,hnr->blhr", q_nope, keys), kept.latent
            )
        else:
            plain = jnp.einsum(
                "blhn,bshn->bhls", q_nope, jnp.einsum("bsr,hnr->bshn", kept.latent, keys)
            )
        rotary = jnp.einsum("blhr,bsr->bhls", q_rot, kept.rotary)
        wide = widened(plain.dtype)
        return (plain.astype(wide) + rotary.astype(wide)) * self.config.score_scale

    def _expanded(self, q_nope: Array, q_rot: Array, kept: LayerCache, seen: Array) -> Array:
        weights = _softmax(self.scores(q_nope, q_rot, kept), seen, q_nope.dtype)
        values = jnp.einsum("bsr,hvr->bshv", kept.latent, self.expand()[1].astype(q_nope.dtype))
        return jnp.einsum("bhls,bshv->blhv", weights, values)

    def _absorbed(self, q_nope: Array, q_rot: Array, kept: LayerCache, seen: Array) -> Array:
        weights = _softmax(self.scores(q_nope, q_rot, kept, absorbed=True), seen, q_nope.dtype)
        mixed = jnp.einsum("bhls,bsr->blhr", weights, kept.latent)
        return jnp.einsum("blhr,hvr->blhv", mixed, self.expand()[1].astype(q_nope.dtype))


def rotate(
    x: Float[Array, "B L H r"], positions: Num[Array, "B L"], config: MLAMoEConfig
) -> Float[Array, "B L H r"]:
    """Apply RoPE: rotate pairs of elements of the last axis by position times the pair's rate.

    Rates are `config.rotations()`. Angles are computed in at least float32. The result has the
    dtype of `x`.
    """
    wide = widened(x.dtype)
    rates = jnp.asarray(config.rotations(), wide)
    angles = (positions.astype(wide)[..., None] * rates)[:, :, None]
    size = config.rope_scaling.amplitude if config.rope_scaling else 1.0
    cos, sin = (size * f(angles) for f in (jnp.cos, jnp.sin))
    if config.rope_interleave:
        pairs = x.astype(wide).reshape(*x.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(x.astype(wide), 2, axis=-1)
    # The result has first elements of all pairs, then second ones. That order does not matter: only
    # products of two rotated vectors are used.
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _causal(L: int, S: int, before: Int[Array, ""] | int) -> Bool[Array, "L S"]:
    """Return the causal mask (L, S), True where a query attends to a key; the first query is at
    position `before`, the first key at 0."""
    queries = before + jnp.arange(L, dtype=jnp.int32)
    return jnp.arange(S, dtype=jnp.int32) <= queries[:, None]


def _softmax(scores: Array, seen: Array, dtype: jnp.dtype) -> Array:
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(dtype)
