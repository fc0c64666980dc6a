"""Bugs of masks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from transformers.models.gpt2 import modeling_flax_gpt2 as gpt2
from transformers.models.llama import modeling_flax_llama as llama
from transformers.models.opt import modeling_flax_opt as opt
from transformers.models.whisper import modeling_flax_whisper as whisper

from tests.parity.ports.faults.fault import Family, Plant, PortFault, at, configured, instead


def not_causal(healthy: Any, x: Any, **options: Any) -> Any:
    """See everything."""
    return jnp.ones_like(healthy(x, **options))


def next_too(healthy: Any, x: Any, **options: Any) -> Any:
    """See one token of the future."""
    length = x.shape[-1]
    mask = jnp.tril(jnp.ones((length, length)), 1)
    return jnp.broadcast_to(mask, healthy(x, **options).shape) > 0


def not_itself(healthy: Any, x: Any, **options: Any) -> Any:
    """See the past but, behind the first token, not the present."""
    length = x.shape[-1]
    mask = jnp.tril(jnp.ones((length, length)), -1).at[0, 0].set(1)
    return jnp.broadcast_to(mask, healthy(x, **options).shape) > 0


def unpadded(call: Any, module: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Attend to padding."""
    return call(*args, attention_mask=jnp.ones_like(attention_mask), **kwargs)


def unpadded_second(call: Any, module: Any, x: Any, attention_mask: Any, *args: Any, **kwargs: Any):
    """Attend to padding."""
    return call(x, jnp.ones_like(attention_mask), *args, **kwargs)


def weak(weights: Any, query: Any, key: Any, bias: Any = None, **options: Any) -> Any:
    """Mask with a number that leaves something through."""
    return weights(query, key, bias=jnp.maximum(bias, -8), **options)


def added_once_more(weights: Any, query: Any, key: Any, bias: Any = None, **options: Any) -> Any:
    """Mask weights, not scores: what is left does not sum to one."""
    found = weights(query, key, **options)
    return jnp.where(bias < 0, 0.0, found)


def _fault(
    name: str, subject: str, how: str, stage: str, plant: Plant, line: str = ""
) -> PortFault:
    return PortFault(Family.MASKS, name, subject, how, stage, plant, line)


FAULTS = (
    _fault(
        "gpt2_not_causal",
        "gpt2",
        "no causal mask",
        r"transformer\.h\.0\.attn\.c_proj",
        instead(gpt2, "make_causal_mask", not_causal),
    ),
    _fault(
        "llama_sees_the_next",
        "llama",
        "a triangle shifted by one",
        r"model\.layers\.0\.self_attn\.o_proj",
        instead(llama, "make_causal_mask", next_too),
    ),
    _fault(
        "opt_not_itself",
        "opt",
        "a triangle shifted the other way",
        r"model\.decoder\.layers\.0\.self_attn\.out_proj",
        instead(opt, "make_causal_mask", not_itself),
    ),
    _fault(
        "whisper_not_causal",
        "whisper",
        "the decoder sees everything",
        r"model\.decoder\.layers\.0\.self_attn\.out_proj",
        instead(whisper, "make_causal_mask", not_causal),
    ),
    _fault(
        "bert_padding_seen",
        "bert",
        "the mask of padding is not read",
        r"bert\.encoder\.layer\.1\.attention\.self\[0\]",
        at(r"bert\.encoder\.layer\.1\.attention\.self", unpadded_second),
    ),
    _fault(
        "bart_padding_seen_in_cross_attention",
        "bart",
        "the decoder reads padding of the encoder",
        r"model\.decoder\.layers\.0\.encoder_attn\.out_proj",
        at(r"model\.decoder\.layers\.\d\.encoder_attn", unpadded),
    ),
    _fault(
        "t5_padding_seen_in_cross_attention",
        "t5",
        "the decoder reads padding of the encoder",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.o",
        at(r"decoder\.block\.\d\.layer\.1\.EncDecAttention", unpadded),
    ),
    _fault(
        "llama_weak_mask",
        "llama",
        "masked by a number that leaves something through",
        r"model\.layers\.0\.self_attn\.o_proj",
        instead(llama, "dot_product_attention_weights", weak),
    ),
    _fault(
        "gpt2_weights_masked",
        "gpt2",
        "weights masked behind the softmax",
        r"transformer\.h\.0\.attn\.c_proj",
        instead(gpt2, "dot_product_attention_weights", added_once_more),
    ),
    _fault(
        "gpt_neo_window_of_six",
        "gpt_neo",
        "a window that holds one more",
        r"transformer\.h\.1\.attn\.attention\.out_proj",
        configured(window_size=6),
        "config.window_size",
    ),
    _fault(
        "gpt_neo_all_global",
        "gpt_neo",
        "local layers take everything in",
        r"transformer\.h\.1\.attn\.attention\.out_proj",
        configured(attention_layers=["global", "global"]),
        "make_causal_mask(",
    ),
)
