"""Bugs that only precision shows, and those that only derivatives show."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from transformers.models.gpt2 import modeling_flax_gpt2 as gpt2
from transformers.models.llama import modeling_flax_llama as llama

from tests.parity.ports.faults.fault import Family, PortFault, at, instead


def narrow_softmax(weights: Any, query: Any, key: Any, dtype: Any = None, **options: Any) -> Any:
    """Normalise in bfloat16."""
    scores = [x.astype(jnp.bfloat16) for x in (query, key)]
    return weights(*scores, dtype=jnp.bfloat16, **options).astype(query.dtype)


def narrow_result(call: Any, module: Any, x: Any) -> Any:
    """Round the result to bfloat16."""
    return call(x).astype(jnp.bfloat16).astype(x.dtype)


def half_statistics(call: Any, module: Any, x: Any) -> Any:
    """Take the root of a float16 mean."""
    square = jnp.mean(jnp.square(x.astype(jnp.float16)), -1, keepdims=True)
    return x / jnp.sqrt(square.astype(x.dtype) + module.epsilon) * module.weight


def narrow_table(healthy: Any, *args: Any) -> Any:
    """Make sines and cosines in bfloat16."""
    return healthy(*args).astype(jnp.bfloat16).astype(jnp.float32)


def stopped(call: Any, module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Let no derivative through."""
    return jax.lax.stop_gradient(call(x, *args, **kwargs))


def stopped_weights(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Let no derivative into the scores."""
    return jax.lax.stop_gradient(weights(query, key, **options))


@jax.custom_vjp
def doubled(x: Any) -> Any:
    """Return x; its derivative is doubled."""
    return x


doubled.defvjp(lambda x: (x, None), lambda _, derivative: (2 * derivative,))


def doubled_back(call: Any, module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Double the derivative."""
    return doubled(call(x, *args, **kwargs))


def stopped_gain(call: Any, module: Any, x: Any) -> Any:
    """Do not train the gain."""
    object.__setattr__(module, "weight", jax.lax.stop_gradient(module.weight))
    return call(x)


def _narrow(
    name: str, subject: str, how: str, stage: str, plant: Any, line: str | None = ""
) -> PortFault:
    return PortFault(Family.PRECISION, name, subject, how, stage, plant, line)


def _gradient(name: str, subject: str, how: str, stage: str, plant: Any) -> PortFault:
    return PortFault(Family.GRADIENTS, name, subject, how, stage, plant, None, gradients=True)


FAULTS = (
    _narrow(
        "gpt2_softmax_bfloat16",
        "gpt2",
        "scores and softmax in bfloat16",
        r"transformer\.h\.0\.attn\.c_proj",
        instead(gpt2, "dot_product_attention_weights", narrow_softmax),
    ),
    _narrow(
        "llama_head_bfloat16",
        "llama",
        "logits rounded to bfloat16",
        r"lm_head",
        at(r"lm_head", narrow_result),
    ),
    _narrow(
        "llama_norm_float16",
        "llama",
        "statistics in float16",
        r"model\.layers\.1\.input_layernorm",
        at(r"model\.layers\.1\.input_layernorm", half_statistics),
    ),
    _narrow(
        "llama_rotary_bfloat16",
        "llama",
        "tables in bfloat16",
        r"model\.layers\.0\.self_attn\.o_proj",
        instead(llama, "create_sinusoidal_positions", narrow_table),
    ),
    _narrow(
        "vit_dense_bfloat16",
        "vit",
        "a projection's result rounded to bfloat16",
        r"vit\.encoder\.layer\.0\.output\.dense",
        at(r"vit\.encoder\.layer\.0\.output\.dense", narrow_result),
    ),
    _gradient(
        "gpt2_feed_forward_not_trained",
        "gpt2",
        "no derivative through the last feed-forward",
        r"transformer\.h\.1\.mlp\.c_proj\.(kernel|bias)",
        at(r"transformer\.h\.1\.mlp", stopped),
    ),
    _gradient(
        "gpt2_attention_weights_not_trained",
        "gpt2",
        "no derivative into the scores",
        r"transformer\.h\.1\.attn\.c_attn\.(kernel|bias)",
        instead(gpt2, "dot_product_attention_weights", stopped_weights),
    ),
    _gradient(
        "llama_derivative_doubled",
        "llama",
        "a derivative of one's own is off by a factor",
        r"model\.layers\.1\.mlp\.gate_proj\.kernel",
        at(r"model\.layers\.1\.mlp\.gate_proj", doubled_back),
    ),
    _gradient(
        "llama_gain_not_trained",
        "llama",
        "no derivative of a gain",
        r"model\.layers\.0\.post_attention_layernorm\.weight",
        at(r"model\.layers\.0\.post_attention_layernorm", stopped_gain),
    ),
)
