"""Bugs of positions: tables, rotations, biases, buckets."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from transformers.models.bloom import modeling_flax_bloom as bloom
from transformers.models.gemma import modeling_flax_gemma as gemma
from transformers.models.gptj import modeling_flax_gptj as gptj
from transformers.models.llama import modeling_flax_llama as llama
from transformers.models.t5 import modeling_flax_t5 as t5

from tests.parity.ports.faults.fault import Family, Plant, PortFault, at, configured, instead


def one_late(call: Any, module: Any, positions: Any) -> Any:
    """Count from one."""
    return call(positions + 1)


def two_early(call: Any, module: Any, positions: Any) -> Any:
    """Do not add the two rows that are no positions."""
    return call(positions - 2)


def other_base(healthy: Any, count: int, width: int) -> Any:
    """Make the tables with another base."""
    angles = np.arange(count)[:, None] / 5000.0 ** (np.arange(0, width, 2)[None] / width)
    angles = np.concatenate([angles, angles], -1)
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], -1), jnp.float32)[:, None]


def other_way(healthy: Any, x: Any) -> Any:
    """Rotate by the negative angle."""
    return -healthy(x)


def by_pairs(healthy: Any, x: Any) -> Any:
    """Pair neighbours, not halves."""
    return jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


def by_halves(healthy: Any, x: Any) -> Any:
    """Pair halves, not neighbours."""
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], -1)


def keys_left(call: Any, module: Any, key: Any, query: Any, positions: Any) -> Any:
    """Rotate queries only."""
    return key * 1.0, call(key, query, positions)[1]


def keys_one_late(call: Any, module: Any, key: Any, query: Any, positions: Any) -> Any:
    """Count keys from one."""
    return call(key, query, positions + 1)[0], call(key, query, positions)[1]


def steeper(healthy: Any, mask: Any, heads: int, **options: Any) -> Any:
    """Double the slopes."""
    return 2 * healthy(mask, heads, **options)


def heads_reversed(healthy: Any, mask: Any, heads: int, **options: Any) -> Any:
    """Give the slopes to heads from the last to the first."""
    return healthy(mask, heads, **options)[:, ::-1]


def next_bucket(healthy: Any, distance: Any, num_buckets: int = 32, **options: Any) -> Any:
    """Count distances from one."""
    return healthy(distance + 1, num_buckets=num_buckets, **options)


def both_ways(healthy: Any, distance: Any, bidirectional: bool = True, **options: Any) -> Any:
    """Tell the future from the past in a decoder, too."""
    return healthy(distance, bidirectional=True, **options)


def no_bias(call: Any, module: Any, *args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
    """Do not hand the first layer's bias on: only its mask."""
    bias = jnp.where(position_bias < -1e30, position_bias, 0.0)
    return call(*args, position_bias=bias, **kwargs)


def columns_first(call: Any, module: Any, x: Any) -> Any:
    """Flatten the patches column by column."""
    return jnp.swapaxes(call(x), 1, 2)


def _fault(
    name: str, subject: str, how: str, stage: str, plant: Plant, line: str = ""
) -> PortFault:
    return PortFault(Family.POSITIONS, name, subject, how, stage, plant, line)


LLAMA, T5 = r"model\.layers\.0\.self_attn\.o_proj", r"\.block\.0\.layer\.0\.SelfAttention\."
FAULTS = (
    _fault(
        "gpt2_positions_from_one",
        "gpt2",
        "positions counted from one",
        r"transformer\.(wpe|dropout)",
        at(r"transformer\.wpe", one_late),
    ),
    _fault(
        "bart_no_offset",
        "bart",
        "the two rows that are no positions are read",
        r"model\.encoder\.embed_positions",
        at(r"model\.encoder\.embed_positions", two_early),
    ),
    _fault(
        "opt_positions_from_one",
        "opt",
        "positions counted from one",
        r"model\.decoder\.embed_positions",
        at(r"model\.decoder\.embed_positions", one_late),
    ),
    _fault(
        "whisper_decoder_positions_from_one",
        "whisper",
        "positions counted from one",
        r"model\.decoder\.embed_positions",
        at(r"model\.decoder\.embed_positions", one_late),
    ),
    _fault(
        "llama_rotary_base",
        "llama",
        "tables of another base",
        LLAMA,
        instead(llama, "create_sinusoidal_positions", other_base),
        "self.sincos[",
    ),
    _fault(
        "llama_rotary_sign",
        "llama",
        "rotation by the negative angle",
        LLAMA,
        instead(llama, "rotate_half", other_way),
    ),
    _fault(
        "gemma_rotary_pairs",
        "gemma",
        "neighbours rotated, not halves",
        LLAMA,
        instead(gemma, "rotate_half", by_pairs),
    ),
    _fault(
        "llama_keys_not_rotated",
        "llama",
        "queries rotated only",
        LLAMA,
        at(r".*\.rotary_emb", keys_left),
    ),
    _fault(
        "gemma_keys_one_late",
        "gemma",
        "keys counted from one",
        LLAMA,
        at(r".*\.rotary_emb", keys_one_late),
    ),
    _fault(
        "gptj_rotary_halves",
        "gptj",
        "halves rotated, not neighbours",
        r"transformer\.h\.0\.attn\.out_proj",
        instead(gptj, "rotate_every_two", by_halves),
    ),
    _fault(
        "bloom_alibi_steeper",
        "bloom",
        "slopes twice as steep",
        r"transformer\.h\.0\.self_attention\.dense",
        instead(bloom, "build_alibi_tensor", steeper),
    ),
    _fault(
        "bloom_alibi_heads_reversed",
        "bloom",
        "slopes given to other heads",
        r"transformer\.h\.0\.self_attention\.dense",
        instead(bloom, "build_alibi_tensor", heads_reversed),
    ),
    _fault(
        "t5_buckets_one_late",
        "t5",
        "distances counted from one",
        "encoder" + T5 + "(relative_attention_bias|o)",
        instead(t5.FlaxT5Attention, "_relative_position_bucket", next_bucket),
    ),
    _fault(
        "t5_decoder_buckets_both_ways",
        "t5",
        "the decoder's buckets tell the future from the past",
        "decoder" + T5 + "(relative_attention_bias|o)",
        instead(t5.FlaxT5Attention, "_relative_position_bucket", both_ways),
    ),
    _fault(
        "t5_largest_distance",
        "t5",
        "the default of the largest distance",
        "encoder" + T5 + "(relative_attention_bias|o)",
        configured(relative_attention_max_distance=128),
        "self.relative_attention_bias(",
    ),
    _fault(
        "t5_bias_in_the_first_layer_only",
        "t5",
        "the bias of positions is not handed on",
        r"encoder\.block\.1\.layer\.0\.SelfAttention\.o",
        at(r"encoder\.block\.1\.layer\.0\.SelfAttention", no_bias),
    ),
    _fault(
        "vit_patches_by_column",
        "vit",
        "patches flattened column by column",
        r"vit\.embeddings\.patch_embeddings(\.projection)?",
        at(r"vit\.embeddings\.patch_embeddings\.projection", columns_first),
    ),
)
