"""DeepSeek-V3's decoder: multi-head latent attention, sparse experts, and cached inference.

Parameters have the names of a DeepSeek-V3 checkpoint, except that a layer's experts are stacked.
Activations have the dtype of the embedding. Norms, softmax, router and the sum over experts are
computed in at least float32. Source: DeepSeek-V3 technical report, section 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Num

from megalodon_jax.config import widened
from megalodon_jax.layers.dropout import dropout, split_key
from megalodon_jax.loss import next_token_loss
from parity.deepseek_v3.attention import Attention, Draw, LayerCache, Linear, RMSNorm
from parity.deepseek_v3.config import MLAMoEConfig
from parity.deepseek_v3.router import Router, Routing, counts, z_loss


class Cache(NamedTuple):
    """Cache of all layers, for inference."""

    layers: tuple[LayerCache, ...]
    length: Int[Array, ""]
    """Number of filled positions, the same in every row."""


class BlockOutput(NamedTuple):
    """Output of a block, dense or sparse."""

    hidden: Float[Array, "B L D"]
    routing: Routing | None
    """Experts chosen for the B * L tokens; None in a dense block."""
    cache: LayerCache


class Output(NamedTuple):
    """Logits of a forward pass, with the routing of its tokens and the updated cache."""

    logits: Float[Array, "B L V"]
    routing: dict[int, Routing]
    """Experts chosen for the B * L tokens, by index of the layer among all layers; without
    dense layers."""
    cache: Cache


class MLP(eqx.Module):
    """Dense SwiGLU: `down(silu(gate x) * up x)`."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __init__(self, dim: int, hidden: int, draw: Draw):
        self.gate_proj, self.up_proj = draw(hidden, dim), draw(hidden, dim)
        self.down_proj = draw(dim, hidden)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Apply SwiGLU to the last axis of `x`."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(eqx.Module):
    """The routed experts of a layer, one `MLP` each, stacked along the first axis."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __init__(self, config: MLAMoEConfig, draw: Draw):
        E, D, hidden = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj, self.up_proj = draw(E, hidden, D), draw(E, hidden, D)
        self.down_proj = draw(E, D, hidden)

    def __call__(self, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Apply to every token the experts chosen for it; return the weighted sum of their outputs.

        Copies of tokens are sorted by expert, so that those of one expert are consecutive rows.
        Outputs are summed in the dtype of the routing weights, at least float32.
        """
        T, k = routing.chosen.shape
        order = jnp.argsort(routing.chosen.reshape(-1))
        tokens, load = order // k, counts(routing)
        said = self.each(x[tokens], load).astype(routing.weights.dtype)
        said = said * routing.weights.reshape(-1)[order][:, None]
        return jnp.zeros((T, x.shape[1]), said.dtype).at[tokens].add(said).astype(x.dtype)

    def each(self, rows: Float[Array, "n D"], load: Int[Array, " E"]) -> Float[Array, "n D"]:
        """Apply each expert to its rows.

        Args:
            rows: copies of tokens, sorted by expert.
            load: number of rows of each expert.
        """

        def product(layer: Linear, x: Array) -> Array:
            weight = layer.weight.astype(x.dtype).swapaxes(1, 2)
            return jax.lax.ragged_dot(x, weight, load)

        gate = jax.nn.silu(product(self.gate_proj, rows))
        return product(self.down_proj, gate * product(self.up_proj, rows))


class MoE(eqx.Module):
    """Routed experts, plus shared experts that apply to every token.

    Source: DeepSeek-V3 report, equation 12.
    """

    gate: Router
    experts: Experts
    shared_experts: MLP

    def __init__(self, config: MLAMoEConfig, draw: Draw):
        E, D = config.n_routed_experts, config.hidden_size
        self.gate = Router(draw(E, D).weight, jnp.zeros(E, jnp.float32), config)
        self.experts = Experts(config, draw)
        shared = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = MLP(D, shared, draw)

    def __call__(
        self, x: Float[Array, "B L D"], scope: str = ""
    ) -> tuple[Float[Array, "B L D"], Routing]:
        """Return the output and the routing of the B * L tokens.

        `scope` is a prefix of the names of intermediates, such as `layers.0.`.
        """
        flat = x.reshape(-1, x.shape[-1])
        logits = checkpoint_name(self.gate.logits(flat), f"{scope}router_logits")
        routing = self.gate.route(logits)
        return self.experts(flat, routing).reshape(x.shape) + self.shared_experts(x), routing


class Block(eqx.Module):
    """One layer: attention, then a dense or sparse MLP, each after a norm and with a residual."""

    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE
    limit: float | None = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

    def __init__(self, config: MLAMoEConfig, layer: int, draw: Draw):
        D, eps, self.limit = config.hidden_size, config.rms_norm_eps, config.activation_limit
        self.dropout = config.dropout
        self.input_layernorm, self.self_attn = RMSNorm(D, eps), Attention(config, draw)
        self.post_attention_layernorm = RMSNorm(D, eps)
        dense = config.intermediate_size
        self.mlp = MoE(config, draw) if config.is_moe(layer) else MLP(D, dense, draw)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        positions: Num[Array, "B L"],
        past: LayerCache | None = None,
        filled: Int[Array, ""] | int = 0,
        *,
        absorbed: bool = False,
        scope: str = "",
        key: jax.Array | None = None,
    ) -> BlockOutput:
        """Apply the layer to hidden states; arguments as for `Attention`.

        `key` is the dropout key; None: no dropout.
        """
        attention_key, mlp_key = split_key(key, 2)
        normed = checkpoint_name(self.input_layernorm(x), f"{scope}attn_norm")
        attended, kept = self.self_attn(
            normed, positions, past, filled, absorbed=absorbed, scope=scope
        )
        x = x + dropout(attended, self.dropout, attention_key)
        normed, routing = self.post_attention_layernorm(x), None
        normed = checkpoint_name(normed, f"{scope}mlp_norm")
        if isinstance(self.mlp, MoE):
            said, routing = self.mlp(normed, scope)
        else:
            said = self.mlp(normed)
        x = x + dropout(checkpoint_name(said, f"{scope}mlp"), self.dropout, mlp_key)
        if self.limit is not None:
            x = jnp.clip(x, -self.limit, self.limit)
        return BlockOutput(checkpoint_name(x, f"{scope}block"), routing, kept)


class Decoder(eqx.Module):
    """Embedding, blocks and final norm, without the head."""

    embed_tokens: Linear
    layers: tuple[Block, ...]
    norm: RMSNorm


class MLAMoEForCausalLM(eqx.Module):
    """DeepSeek-V3 as a language model: decoder and head.

    Args:
        config: sizes and flags.
        key: random key of the initial weights.
    """

    model: Decoder
    lm_head: Linear | None
    """The head; None if it is tied to the embedding."""
    config: MLAMoEConfig = eqx.field(static=True)

    def __init__(self, config: MLAMoEConfig, *, key: jax.Array):
        draw = Draw(key, config.initializer_range)
        embedding = draw(config.vocab_size, config.hidden_size)
        blocks = tuple(Block(config, i, draw) for i in range(config.num_hidden_layers))
        self.model = Decoder(embedding, blocks, RMSNorm(config.hidden_size, config.rms_norm_eps))
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else draw(config.vocab_size, config.hidden_size)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, "B L"],
        positions: Num[Array, "B L"] | None = None,
        cache: Cache | None = None,
        *,
        absorbed: bool | None = None,
        key: jax.Array | None = None,
    ) -> Output:
        """Return logits (B, L, V), the routing of tokens, and the updated cache.

        Args:
            ids: token ids.
            positions: position of each token; None: counted from 0, or on from the cache's end.
            cache: result of `empty_cache` or of an earlier call; None: attend to `ids` only.
            absorbed: as in `Attention`; None: True if there is a cache.
            key: dropout key in training; None: no dropout.
        """
        B, L = ids.shape
        filled = 0 if cache is None else cache.length
        if positions is None:
            positions = jnp.broadcast_to(filled + jnp.arange(L, dtype=jnp.int32), (B, L))
        absorbed = cache is not None if absorbed is None else absorbed
        first, *keys = split_key(key, 1 + len(self.model.layers))
        x = checkpoint_name(self.model.embed_tokens.weight[ids], "embed")
        x = dropout(x, self.config.dropout, first)
        kept, routed = [], {}
        for i, block in enumerate(self.model.layers):
            past = None if cache is None else cache.layers[i]
            scope = f"layers.{i}."
            out = block(x, positions, past, filled, absorbed=absorbed, scope=scope, key=keys[i])
            x = out.hidden
            kept.append(out.cache)
            routed |= {} if out.routing is None else {i: out.routing}
        x = checkpoint_name(self.model.norm(x), "norm")
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = checkpoint_name(head(x), "logits")
        return Output(logits, routed, Cache(tuple(kept), jnp.asarray(filled + L, jnp.int32)))

    def losses(
        self,
        ids: Int[Array, "B L"],
        positions: Num[Array, "B L"] | None = None,
        *,
        key: jax.Array | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean next-token loss in nats, and further losses by name.

        The only further loss is `router_z`, the router's z-loss, averaged over sparse layers and
        not weighted; 0 if all layers are dense.

        Args:
            ids: token ids.
            positions: as in `__call__`.
            key: dropout key in training; None: no dropout.
        """
        out = self(ids, positions, key=key)
        loss = next_token_loss(out.logits, ids, dtype=widened(out.logits.dtype))
        z = [z_loss(r.logits) for r in out.routing.values()]
        return loss, {"router_z": jnp.mean(jnp.stack(z)) if z else jnp.zeros((), loss.dtype)}


def empty_cache(model: MLAMoEForCausalLM, batch: int, positions: int) -> Cache:
    """Return a cache with room for `positions` tokens of `batch` rows."""
    c, dtype = model.config, model.model.embed_tokens.weight.dtype
    shapes = ((batch, positions, c.kv_lora_rank), (batch, positions, c.qk_rope_head_dim))
    layers = (LayerCache(*(jnp.zeros(s, dtype) for s in shapes)) for _ in model.model.layers)
    return Cache(tuple(layers), jnp.zeros((), jnp.int32))


@eqx.filter_jit
def _advance(model: MLAMoEForCausalLM, ids: Array, cache: Cache) -> tuple[Array, Cache]:
    out = model(ids, cache=cache)
    return jnp.argmax(out.logits[:, -1:], axis=-1).astype(jnp.int32), out.cache


def generate(
    model: MLAMoEForCausalLM, prompt: Int[Array, "B L"], new_tokens: int
) -> Int[Array, "B T"]:
    """Continue each prompt greedily by `new_tokens` tokens; return prompt and continuation.

    Raises:
        ValueError: the prompt is empty, or no token is requested.
    """
    B, L = prompt.shape
    if L < 1 or new_tokens < 1:
        raise ValueError(
            f"generate: expected a prompt and new_tokens of at least 1, got a prompt of {L} and "
            f"{new_tokens} new tokens; begin an empty prompt with the begin-of-text token."
        )
    token, cache = _advance(model, prompt, empty_cache(model, B, L + new_tokens))
    said = [prompt, token]
    for _ in range(new_tokens - 1):
        token, cache = _advance(model, token, cache)
        said.append(token)
    return jnp.concatenate(said, axis=1)
