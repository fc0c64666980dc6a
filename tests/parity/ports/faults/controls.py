"""Changes of a port that change no mathematics: another order or formula. They must hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from transformers.modeling_flax_utils import ACT2FN
from transformers.models.bloom import modeling_flax_bloom as bloom
from transformers.models.gpt2 import modeling_flax_gpt2 as gpt2
from transformers.models.llama import modeling_flax_llama as llama
from transformers.models.t5 import modeling_flax_t5 as t5

from tests.parity.ports.faults.fault import Family, PortFault, at, entry, field, instead


def root_first(call: Any, module: Any, x: Any) -> Any:
    """Multiply by the reciprocal root, the gain first."""
    return module.weight * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + module.epsilon)


def positions_later(call: Any, module: Any, key: Any, query: Any, positions: Any) -> Any:
    """Count from three: only differences of rotations matter."""
    return call(key, query, positions + 3)


def alibi_later(healthy: Any, mask: Any, heads: int, **options: Any) -> Any:
    """Add a number to all scores of a query: the softmax does not see it."""
    return healthy(mask, heads, **options) + 0.5


def scores_shifted(weights: Any, query: Any, key: Any, bias: Any = None, **options: Any) -> Any:
    """Add a number to all scores."""
    return weights(query, key, bias=bias + 1.5, **options)


def keys_scaled(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Scale keys, not queries."""
    root = query.shape[-1] ** 0.5
    return weights(query * root, key / root, **options)


def one_by_one(weights: Any, query: Any, key: Any, bias: Any = None, **options: Any) -> Any:
    """Sum scores and softmax in another order."""
    scores = jnp.einsum("bkhd,bqhd->bhqk", key, query) / query.shape[-1] ** 0.5
    scores = jnp.maximum(scores + bias, -1e9)
    powers = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    return powers / jnp.sum(powers[..., ::-1], -1, keepdims=True)


def complementary(x: Any) -> Any:
    """Return the GELU by the complementary error function."""
    return 0.5 * x * jax.lax.erfc(-x * 0.5**0.5)


def by_exponential(x: Any) -> Any:
    """Return the ReLU as half of x and its magnitude."""
    return (x + jnp.abs(x)) / 2


def by_columns(call: Any, module: Any, x: Any) -> Any:
    """Multiply from the other side, in two halves."""
    parameters = module.variables["params"]
    half = x.shape[-1] // 2
    first, second = (parameters["kernel"][s].T for s in (slice(half), slice(half, None)))
    product = jnp.einsum("oi,bli->blo", second, x[..., half:])
    return parameters["bias"] + product + jnp.einsum("oi,bli->blo", first, x[..., :half])


def two_passes(call: Any, module: Any, x: Any) -> Any:
    """Normalise with the mean subtracted twice."""
    parameters = module.variables["params"]
    centred = x - jnp.mean(x, -1, keepdims=True)
    centred = centred - jnp.mean(centred, -1, keepdims=True)
    root = jnp.sqrt(jnp.sum(centred**2, -1, keepdims=True) / x.shape[-1] + module.epsilon)
    return centred / root * parameters["scale"] + parameters["bias"]


def sum_in_another_order(
    call: Any, module: Any, ids: Any, kinds: Any, positions: Any, *_: Any, **__: Any
):
    """Add positions before kinds."""
    total = module.position_embeddings(positions) + module.token_type_embeddings(kinds)
    return module.LayerNorm(total + module.word_embeddings(ids))


def by_choice(call: Any, module: Any, ids: Any) -> Any:
    """Multiply by one-hot rows instead of reading them."""
    table = module.embedding
    return jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype) @ table


def _control(name: str, subject: str, how: str, plant: Any) -> PortFault:
    return PortFault(Family.PRECISION, name, subject, how, "", plant, None)


CONTROLS = (
    _control(
        "llama_norm_rsqrt", "llama", "x w rsqrt(...) for w (x / sqrt(...))",
        at(r".*(layernorm|model\.norm)", root_first),
    ),
    _control(
        "llama_positions_later", "llama", "all positions three later: rotations are relative",
        at(r".*\.rotary_emb", positions_later),
    ),
    _control(
        "bloom_alibi_shifted", "bloom", "a number added to all scores of a query",
        instead(bloom, "build_alibi_tensor", alibi_later),
    ),
    _control(
        "gpt2_scores_shifted", "gpt2", "a number added to all scores",
        instead(gpt2, "dot_product_attention_weights", scores_shifted),
    ),
    _control(
        "llama_keys_scaled", "llama", "keys divided by sqrt(d), not queries",
        instead(llama, "dot_product_attention_weights", keys_scaled),
    ),
    _control(
        "t5_softmax_one_by_one", "t5", "scores, softmax and sums in another order",
        instead(t5, "dot_product_attention_weights", one_by_one),
    ),
    _control(
        "gpt2_gelu_by_erfc", "gpt2", "the GELU by the complementary error function",
        entry(ACT2FN, "gelu", complementary),
    ),
    _control(
        "bert_relu_by_magnitude", "bert", "half the sum of x and its magnitude",
        entry(ACT2FN, "relu", by_exponential),
    ),
    _control(
        "bert_dense_in_halves", "bert", "matrices multiplied in two halves, from the other side",
        at(r".*\.(query|key|value|dense)", by_columns),
    ),
    _control(
        "vit_norm_in_two_passes", "vit", "variance of what is centred twice",
        at(r".*layernorm.*", two_passes),
    ),
    _control(
        "bert_norm_variance_fast", "bert", "variance as E[x^2] - E[x]^2, or not",
        field(r".*LayerNorm", use_fast_variance=False),
    ),
    _control(
        "bert_embeddings_summed_otherwise", "bert", "embeddings added in another order",
        at(r"bert\.embeddings", sum_in_another_order),
    ),
    _control(
        "opt_embeddings_by_product", "opt", "rows read by a product with ones and zeros",
        at(r"model\.decoder\.embed_tokens", by_choice),
    ),
)  # fmt: skip
