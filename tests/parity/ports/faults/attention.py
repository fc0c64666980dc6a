"""Bugs of attention: scales, heads, queries, keys and values."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from transformers.models.bart import modeling_flax_bart as bart
from transformers.models.bert import modeling_flax_bert as bert
from transformers.models.bloom import modeling_flax_bloom as bloom
from transformers.models.gemma import modeling_flax_gemma as gemma
from transformers.models.gpt2 import modeling_flax_gpt2 as gpt2
from transformers.models.gpt_neo import modeling_flax_gpt_neo as gpt_neo
from transformers.models.llama import modeling_flax_llama as llama
from transformers.models.opt import modeling_flax_opt as opt
from transformers.models.t5 import modeling_flax_t5 as t5
from transformers.models.vit import modeling_flax_vit as vit
from transformers.models.whisper import modeling_flax_whisper as whisper

from tests.parity.ports.faults.fault import Family, Plant, PortFault, at, configured, instead

WEIGHTS = "dot_product_attention_weights"


def unscaled(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Leave 1 / sqrt(d) out."""
    return weights(query * math.sqrt(query.shape[-1]), key, **options)


def scaled(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Divide by sqrt(d) what is not to be."""
    return weights(query / math.sqrt(query.shape[-1]), key, **options)


def scaled_by_width(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Divide by the root of the width of all heads."""
    return weights(query / math.sqrt(query.shape[-2]), key, **options)


def crossed(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Take keys for queries."""
    return weights(key, query, **options)


def over_queries(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Normalise along the wrong axis."""
    found = weights(query, key, **options)
    return found / jnp.maximum(jnp.sum(found, axis=-2, keepdims=True), 1e-3)


def one_head(weights: Any, query: Any, key: Any, **options: Any) -> Any:
    """Broadcast the first head's weights."""
    found = weights(query, key, **options)
    return jnp.broadcast_to(found[..., :1, :, :], found.shape) * 1.0


def interleaved(healthy: Any, module: Any, x: Any, *heads: Any) -> Any:
    """Split the width as (d, H)."""
    right = healthy(module, x, *heads)
    return jnp.swapaxes(x.reshape(right.shape[:-2] + right.shape[:-3:-1]), -1, -2)


def in_thirds(healthy: Any, module: Any, x: Any) -> Any:
    """Split fused queries, keys and values as (3, H, d) where they lie as (H, 3, d)."""
    right = healthy(module, x)
    parts = x.reshape((*right.shape[:-2], 3, right.shape[-2], right.shape[-1] // 3))
    return jnp.swapaxes(parts, -3, -2).reshape(right.shape)


def heads_reversed(healthy: Any, module: Any, x: Any) -> Any:
    """Join heads from the last to the first."""
    return healthy(module, x[..., ::-1, :])


def in_turn(healthy: Any, x: Any, repeats: Any, axis: Any = None, **rest: Any) -> Any:
    """Repeat groups as a whole, not each head."""
    return jnp.concatenate([x] * repeats, axis)


def one_late(call: Any, module: Any, *args: Any, key_value_states: Any = None, **kwargs: Any):
    """Attend to the encoder's states one position late."""
    return call(*args, key_value_states=jnp.roll(key_value_states, 1, 1), **kwargs)


def without_bias(call: Any, module: Any, x: Any) -> Any:
    """Leave the bias out."""
    return call(x) - module.variables["params"]["bias"]


def _fault(name: str, how: str, stage: str, plant: Plant, line: str = "") -> PortFault:
    subject = next(s for s in SUBJECTS if name.startswith(s))
    return PortFault(Family.ATTENTION, name, subject, how, stage, plant, line)


SUBJECTS = (
    "gpt_neo", "gpt2", "gemma", "llama", "bert", "bart", "bloom", "opt", "t5", "vit", "whisper",
)  # fmt: skip
FAULTS = (
    _fault(
        "gpt2_query_is_key",
        "queries and keys taken for one another",
        r"transformer\.h\.0\.attn\.c_proj",
        instead(gpt2, WEIGHTS, crossed),
    ),
    _fault(
        "gpt2_heads_interleaved",
        "the width split as (d, H)",
        r"transformer\.h\.0\.attn\.c_proj",
        instead(gpt2.FlaxGPT2Attention, "_split_heads", interleaved),
    ),
    _fault(
        "llama_unscaled",
        "1 / sqrt(d) left out",
        r"model\.layers\.0\.self_attn\.o_proj",
        instead(llama, WEIGHTS, unscaled),
    ),
    _fault(
        "llama_groups_in_turn",
        "keys and values repeated as a whole, not head by head",
        r"model\.layers\.0\.self_attn\.o_proj",
        instead(jnp, "repeat", in_turn),
    ),
    _fault(
        "gemma_scaled_by_heads",
        "the scale taken from another axis",
        r"model\.layers\.0\.self_attn\.o_proj",
        instead(gemma, WEIGHTS, scaled_by_width),
    ),
    _fault(
        "bert_softmax_over_queries",
        "weights normalised along the wrong axis",
        r"bert\.encoder\.layer\.0\.attention\.self\[0\]",
        instead(bert, WEIGHTS, over_queries),
    ),
    _fault(
        "bart_heads_of_the_encoder",
        "the decoder's attention takes the encoder's number of heads",
        r"model\.decoder\.layers\.0\.self_attn\.out_proj",
        configured(decoder_attention_heads=4),
        "self.num_heads",
    ),
    _fault(
        "bart_encoder_one_late",
        "keys and values of the encoder one position late",
        r"model\.decoder\.layers\.0\.encoder_attn\.k_proj",
        at(r"model\.decoder\.layers\.0\.encoder_attn", one_late),
    ),
    _fault(
        "bart_heads_reversed",
        "heads joined from the last to the first",
        r"model\.encoder\.layers\.0\.self_attn\.out_proj",
        instead(bart.FlaxBartAttention, "_merge_heads", heads_reversed),
    ),
    _fault(
        "t5_scaled",
        "scores divided by sqrt(d), which the initialisation holds",
        r"encoder\.block\.0\.layer\.0\.SelfAttention\.o",
        instead(t5, WEIGHTS, scaled),
    ),
    _fault(
        "gpt_neo_scaled",
        "scores divided by sqrt(d), which this model leaves out",
        r"transformer\.h\.0\.attn\.attention\.out_proj",
        instead(gpt_neo, WEIGHTS, scaled),
    ),
    _fault(
        "opt_query_bias_left_out",
        "no bias in attention",
        r"model\.decoder\.layers\.1\.self_attn\.q_proj",
        at(r"model\.decoder\.layers\.1\.self_attn\.q_proj", without_bias),
    ),
    _fault(
        "opt_unscaled",
        "1 / sqrt(d) left out",
        r"model\.decoder\.layers\.0\.self_attn\.out_proj",
        instead(opt, WEIGHTS, unscaled),
    ),
    _fault(
        "bloom_fused_in_thirds",
        "fused queries, keys and values split as (3, H, d)",
        r"transformer\.h\.0\.self_attention\.dense",
        instead(bloom.FlaxBloomAttention, "_split_heads", in_thirds),
    ),
    _fault(
        "vit_one_head",
        "every head has the first one's weights",
        r"vit\.encoder\.layer\.0\.attention\.attention\[0\]",
        instead(vit, WEIGHTS, one_head),
    ),
    _fault(
        "whisper_heads_interleaved",
        "the width split as (d, H)",
        r"model\.encoder\.layers\.0\.self_attn\.out_proj",
        instead(whisper.FlaxWhisperAttention, "_split_heads", interleaved),
    ),
)
