"""Bugs of how layers are connected, and of scales and dropouts between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.parity.ports.faults.fault import Family, Plant, PortFault, at, configured, field


def without_skip(call: Any, module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the block's input out of its result."""
    result = call(x, *args, **kwargs)
    return (result[0] - x, *result[1:])


def skipped(call: Any, module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the layer out."""
    return (x * 1.0, *call(x, *args, **kwargs)[1:])


def norm_first(call: Any, module: Any, x: Any, residual: Any, **kwargs: Any) -> Any:
    """Normalise before the sum."""
    return module.LayerNorm(module.dense(x)) + residual


def one_kind(call: Any, module: Any, kinds: Any) -> Any:
    """Read the first row for all."""
    return call(jnp.zeros_like(kinds))


def without_kinds(call: Any, module: Any, kinds: Any) -> Any:
    """Add nothing."""
    return call(kinds) * 0.0


def left_on(call: Any, module: Any, x: Any, **kwargs: Any) -> Any:
    """Drop in evaluation."""
    return call(x, deterministic=False, rng=jax.random.key(0))


def unscaled(call: Any, module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Undo the scale of embeddings."""
    return call(x / x.shape[-1] ** 0.5, *args, **kwargs)


def without_embed_scale(call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Do not scale embeddings."""
    object.__setattr__(module, "embed_scale", 1.0)
    return call(*args, **kwargs)


def channels_reversed(call: Any, module: Any, x: Any) -> Any:
    """Read blue for red."""
    return call(x[..., ::-1])


def mean_for_first(call: Any, module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Rotate the tokens: another one is the first."""
    return jnp.roll(call(x, *args, **kwargs), -1, 1)


def scaled(call: Any, module: Any, x: Any) -> Any:
    """Scale as where the head is tied."""
    return call(x * x.shape[-1] ** -0.5)


def without_bias(call: Any, module: Any, x: Any, **kwargs: Any) -> Any:
    """Leave the bias out."""
    return call(x, **kwargs) - module.variables["params"]["bias"]


def sequential(call: Any, module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Feed the feed-forward what attention made, not what it got."""
    normal = module.ln_1(x)
    attended = x + module.attn(normal, *args, **kwargs)[0]
    return (attended + module.mlp(module.ln_1(attended), deterministic=True),)


def _fault(
    name: str, subject: str, how: str, stage: str, plant: Plant, line: str = ""
) -> PortFault:
    return PortFault(Family.WIRING, name, subject, how, stage, plant, line)


FAULTS = (
    _fault(
        "gpt2_block_without_skip",
        "gpt2",
        "the block's input is not added",
        r"transformer\.h\.1\[0\]",
        at(r"transformer\.h\.1", without_skip),
    ),
    _fault(
        "llama_layer_left_out",
        "llama",
        "the last layer is not used",
        r"model\.layers\.1\[0\]",
        at(r"model\.layers\.1", skipped),
    ),
    _fault(
        "bert_norm_before_the_sum",
        "bert",
        "normalised before the residual is added",
        r"bert\.encoder\.layer\.0\.attention\.output\.LayerNorm",
        at(r"bert\.encoder\.layer\.0\.attention\.output", norm_first),
        "",
    ),
    _fault(
        "bert_one_token_type",
        "bert",
        "kinds of tokens are not read",
        r"bert\.embeddings\.token_type_embeddings",
        at(r"bert\.embeddings\.token_type_embeddings", one_kind),
    ),
    _fault(
        "bert_no_token_types",
        "bert",
        "the embedding of kinds is not added",
        r"bert\.embeddings\.token_type_embeddings",
        at(r"bert\.embeddings\.token_type_embeddings", without_kinds),
    ),
    _fault(
        "bert_head_bias_left_out",
        "bert",
        "the bias of the head is not added",
        r"cls\.predictions",
        at(r"cls\.predictions", without_bias),
    ),
    _fault(
        "gpt2_dropout_left_on",
        "gpt2",
        "dropout in evaluation",
        r"transformer\.dropout",
        at(r"transformer\.dropout", left_on),
    ),
    _fault(
        "bart_dropout_left_on",
        "bart",
        "dropout in evaluation, in one layer",
        r"model\.decoder\.layers\.1\.(dropout_layer.*|encoder_attn_layer_norm|self_attn_layer_norm)",
        at(r"model\.decoder\.layers\.1\.dropout_layer", left_on),
    ),
    _fault(
        "gemma_embeddings_unscaled",
        "gemma",
        "embeddings not scaled; an RMSNorm sees it by its epsilon only",
        r"model\.layers\.0\.input_layernorm",
        at(r"model\.layers", unscaled),
    ),
    _fault(
        "bart_embeddings_unscaled",
        "bart",
        "the scale of embeddings is not read",
        r"model\.(shared|encoder\.layernorm_embedding)",
        at(r"model\.encoder", without_embed_scale),
        "embed_scale",
    ),
    _fault(
        "bloom_residual_before_the_norm",
        "bloom",
        "which residual is taken is not read",
        r"transformer\.h\.0\.self_attention\[0\]",
        configured(apply_residual_connection_post_layernorm=False),
        "+ residual",
    ),
    _fault(
        "vit_channels_reversed",
        "vit",
        "blue read for red",
        r"vit\.embeddings\.patch_embeddings\.projection",
        at(r"vit\.embeddings\.patch_embeddings\.projection", channels_reversed),
    ),
    _fault(
        "vit_first_token_last",
        "vit",
        "the class token is behind the patches",
        r"vit\.embeddings",
        at(r"vit\.embeddings", mean_for_first),
    ),
    _fault(
        "t5_head_scaled",
        "t5",
        "the head scaled as where it is tied",
        r"lm_head|output\.logits",
        at(r"lm_head", scaled),
    ),
    _fault(
        "gpt2_bias_left_out",
        "gpt2",
        "a projection without bias",
        r"transformer\.h\.1\.mlp\.c_proj",
        field(r"transformer\.h\.1\.mlp\.c_proj", use_bias=False),
        "lax.dot_general(",
    ),
    _fault(
        "gptj_block_in_sequence",
        "gptj",
        "feed-forward behind attention, not beside it",
        r"transformer\.h\.0\.(mlp\.fc_in|ln_1#2|ln_1.*)",
        at(r"transformer\.h\.0", sequential),
    ),
)
