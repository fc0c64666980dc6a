"""Gated, chunked attention over an EMA: the first half of a block."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from megalodon_jax.config import MegalodonConfig, widened
from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.dropout import dropout, split_key
from megalodon_jax.layers.linear import Linear
from megalodon_jax.layers.norms import RMSNorm
from megalodon_jax.layers.rotary import RotaryEmbedding
from megalodon_jax.layers.timestep_norm import TimestepNorm


def attend(
    q: Float[Array, "*B Q H d"],
    k: Float[Array, "*B K H d"],
    v: Float[Array, "*B K H e"],
    mask: Bool[Array, "*#B Q K"],
    config: MegalodonConfig,
    *,
    key: jax.Array | None = None,
) -> Float[Array, "*B Q H e"]:
    """Return `softmax(q k^T) v` with scale 1; a query that sees no key gets 0.

    Args:
        q, k, v: queries, keys and values, heads on the last axis but one.
        mask: True where a query may see a key.
        config: gives the dtypes and the dropout of the attention weights.
        key: turns dropout on; None means deterministic.

    Returns:
        The mixture of values, in `config.accum_dtype`.
    """
    compute, accum = config.compute_dtype, config.accum_dtype
    scores = jnp.einsum(
        "...qhd,...khd->...hqk",
        q.astype(compute),
        k.astype(compute),
        preferred_element_type=accum,
    ).astype(config.softmax_dtype)
    mask = mask[..., None, :, :]
    scores = jnp.where(mask, scores, -jnp.inf)
    # A row of -inf alone would give NaN, in its gradient too: shift it by 0 instead of by -inf.
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = dropout(weights / jnp.where(total > 0, total, 1.0), config.attention_dropout, key)
    return jnp.einsum(
        "...hqk,...khe->...qhe",
        weights.astype(compute),
        v.astype(compute),
        preferred_element_type=accum,
    )


class ChunkedAttention(eqx.Module):
    """Causal attention within chunks of C tokens, RoPE at absolute positions."""

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
        mask: Bool[Array, "B L"] | None = None,
        *,
        key: jax.Array | None = None,
    ) -> Float[Array, "B L H e"]:
        """Attend within chunks counted from position 0; a short tail is its own chunk.

        Args:
            q, k: unrotated queries and keys (B, L, H, d).
            v: values (B, L, H, e).
            mask: True where a key is valid.
            key: turns dropout on.
        """
        L, C = q.shape[1], self.config.chunk_size
        q, k = self.rope(q, k)
        if L == 0:
            return v.astype(self.config.accum_dtype)
        whole = L // C * C
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

    def _chunks(self, q, k, v, mask, size: int, key):
        B, L, H, _ = q.shape
        chunks = L // size
        causal = jnp.tril(jnp.ones((size, size), bool))[None, None]
        if mask is not None:
            causal = causal & mask[:, :L].reshape(B, chunks, 1, size)
        q, k, v = (a.reshape(B, chunks, size, H, a.shape[-1]) for a in (q, k, v))
        return attend(q, k, v, causal, self.config, key=key).reshape(B, L, H, v.shape[-1])


class MegalodonAttention(eqx.Module):
    """TimestepNorm, CEMA, shared Q/K, chunked attention, gate (spec/model.md "Block order")."""

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
        mask: Bool[Array, "B L"] | None = None,
        *,
        key: jax.Array | None = None,
    ) -> Float[Array, "B L D"]:
        """Map the block input (B, L, D) to `x + h`; `key` turns dropout on."""
        config = self.config
        ema_key, inner_key, gate_key, out_key = split_key(key, 4)
        u, _ = self.timenorm(x, mask=mask)
        u = checkpoint_name(u, "timenorm")
        c, _ = self.cema(jnp.swapaxes(u, 1, 2), mask=mask)
        c = checkpoint_name(jnp.swapaxes(c, 1, 2), "cema")
        m = checkpoint_name(self.rmsnorm(c), "rmsnorm")
        m = dropout(m, config.hidden_dropout, ema_key)
        q, k = self.queries_keys(m)
        v = _heads(jax.nn.silu(self.wv(u)), config.num_heads)
        o = self.inner(q, k, v, mask, key=inner_key)
        o = checkpoint_name(o.reshape(*o.shape[:2], config.value_dim), "inner")
        gated = dropout(o * jax.nn.silu(self.wr(m)), config.hidden_dropout, gate_key)
        h = dropout(self.wh1(m) + self.wh2(gated), config.dropout, out_key)
        return checkpoint_name(x + h, "attn")

    def queries_keys(
        self, m: Float[Array, "B L D"]
    ) -> tuple[Float[Array, "B L H d"], Float[Array, "B L H d"]]:
        """Project to one z per head, normalise it, and read query and key off it affinely."""
        H, d = self.config.num_heads, self.config.head_dim
        z = _heads(self.wz(m), H)
        wide = z.astype(widened(z.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        z = wide * jax.lax.rsqrt(mean_square + self.config.norm_eps)
        scale = ((self.gamma + 1.0) / math.sqrt(d)).astype(z.dtype).reshape(2, H, d)
        shift = self.beta.astype(z.dtype).reshape(2, H, d)
        return z * scale[0] + shift[0], z * scale[1] + shift[1]


def _heads(x: Float[Array, "B L HE"], heads: int) -> Float[Array, "B L H E"]:
    return x.reshape(*x.shape[:2], heads, x.shape[-1] // heads)
