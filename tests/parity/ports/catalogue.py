"""The Flax models of Transformers, each with its cases, and what is known of where they differ.

Sizes differ from one another and options from their defaults, so that no axis is taken for another
and no option that only one side reads goes unseen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.blenderbot_small import modeling_blenderbot_small
from transformers.models.resnet import modeling_flax_resnet

from tests.parity.ports.twins import (
    Context,
    Inputs,
    Known,
    Twin,
    Whose,
    cached_flax,
    cached_flax_pair,
    cached_torch,
    cached_torch_pair,
)

VOCABULARY = 61
B, L, TARGET = 3, 11, 7
"""Of a plain case; no other size of a model is one of them."""


def config(kind: str, **options: Any) -> Callable[[], Any]:
    """Return what makes a configuration."""
    return lambda: getattr(transformers, f"{kind}Config")(**options)


def tokens(rows: int = B, length: int = L, *, seed: int = 3) -> np.ndarray:
    """Return token ids without special ones, int64 (B, L)."""
    return np.random.default_rng(seed).integers(5, VOCABULARY, (rows, length))


def text(
    length: int = L,
    *,
    padding: str = "",
    kinds: bool = False,
    positions: bool = False,
    rows: int = B,
) -> Callable[[Any], Inputs]:
    """Return what makes `input_ids` and `attention_mask`, int64 (B, L).

    Args:
        length: of the longest row.
        padding: `right` or `left`: row r has 2 r padded positions.
        kinds: whether there are `token_type_ids`.
        positions: whether there are `position_ids`, those that generation makes of a mask.
        rows: how many.
    """

    def inputs(config: Any) -> Inputs:
        ids, mask = tokens(rows, length), np.ones((rows, length), np.int64)
        for row in range(rows if padding else 0):
            at = slice(length - 2 * row, None) if padding == "right" else slice(0, 2 * row)
            mask[row, at], ids[row, at] = 0, getattr(config, "pad_token_id", None) or 0
        result = {"input_ids": ids, "attention_mask": mask}
        if kinds:
            result["token_type_ids"] = (np.arange(length) >= length // 2) + 0 * ids
        if positions:
            result["position_ids"] = np.maximum(np.cumsum(mask, 1) - 1, 0)
        return result

    return inputs


def decoded(config: Any) -> Inputs:
    """Return the inputs of a decoder, int64 (B, TARGET)."""
    return {
        "decoder_input_ids": tokens(B, TARGET, seed=4),
        "decoder_attention_mask": np.ones((B, TARGET), np.int64),
    }


def images(size: int = 20, rows: int = 2) -> Callable[[Any], Inputs]:
    """Return what makes `pixel_values`, float32 (B, 3, size, size)."""
    return lambda config: {
        "pixel_values": np.random.default_rng(5).standard_normal((rows, 3, size, size), np.float32)
    }


def sound(length: int = 150) -> Callable[[Any], Inputs]:
    """Return what makes `input_values`, float32 (B, length)."""
    return lambda config: {
        "input_values": np.random.default_rng(6).standard_normal((B, length), np.float32)
    }


def unnamed_sound(config: Any) -> Inputs:
    """Return `inputs`, float32 (B, length), as what takes any encoder of sound calls them."""
    return {"inputs": sound()(config)["input_values"]}


def heard(config: Any) -> Inputs:
    """Return which samples of `sound` count, int64 (B, 150)."""
    return {"attention_mask": (np.arange(150)[None] < np.array([[150], [130], [97]])).astype(int)}


def untyped(config: Any) -> Inputs:
    """Return `token_type_ids` of 0, int64 (B, L)."""
    return {"token_type_ids": np.zeros((B, L), np.int64)}


def spectrum(config: Any) -> Inputs:
    """Return `input_features`, float32 (B, mel bins, frames)."""
    shape = (B, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": np.random.default_rng(6).standard_normal(shape, np.float32)}


def both(*makers: Callable[[Any], Inputs]) -> Callable[[Any], Inputs]:
    """Return what makes the inputs of several at once."""
    return lambda config: {k: v for make in makers for k, v in make(config).items()}


def pair(length: int = L, **options: Any) -> Callable[[Any], Inputs]:
    """Return what makes the inputs of an encoder and a decoder of text."""
    return both(text(length, **options), decoded)


EPSILON = 1e-4
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
    "n_inner": 40, "activation_function": "gelu", "layer_norm_epsilon": EPSILON, "use_cache": False,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "gelu", "use_cache": False,
    "rms_norm_eps": EPSILON, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
GEMMA = LLAMA | {"head_dim": 10, "hidden_act": "gelu_pytorch_tanh"}
MISTRAL = LLAMA | {"sliding_window": 40}
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "hidden_act": "relu", "max_position_embeddings": 32,
    "type_vocab_size": 2, "layer_norm_eps": EPSILON,
}  # fmt: skip
ALBERT = BERT | {"embedding_size": 20, "num_hidden_groups": 2}
BIG_BIRD = BERT | {"use_bias": True, "rescale_embeddings": True, "max_position_embeddings": 64}
FULL = BIG_BIRD | {"attention_type": "original_full"}
SPARSE = BIG_BIRD | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}
ELECTRA = BERT | {"embedding_size": 20, "hidden_act": "gelu"}
ROBERTA = BERT | {"pad_token_id": 1}
ROFORMER = BERT | {"embedding_size": 24, "rotary_value": True}
DISTILBERT = {
    "vocab_size": VOCABULARY, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40,
    "activation": "relu", "max_position_embeddings": 32,
}  # fmt: skip
SINUSOIDAL = DISTILBERT | {"sinusoidal_pos_embds": True}
BART = {
    "vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 6, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36, "activation_function": "relu", "max_position_embeddings": 32,
    "scale_embedding": True, "use_cache": False, "forced_eos_token_id": None, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
UNSCALED = BART | {"scale_embedding": False}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9, "layer_norm_epsilon": EPSILON, "use_cache": False,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
}  # fmt: skip
LOCAL = T5 | {"local_radius": 3, "encoder_attention_type": "local"}
GLOBAL = LOCAL | {"encoder_attention_type": "transient-global", "global_block_size": 2}
VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "image_size": 20, "patch_size": 5, "hidden_act": "relu", "layer_norm_eps": EPSILON,
    "num_labels": 9,
}  # fmt: skip
BEIT = VIT | {
    "use_relative_position_bias": True, "use_absolute_position_embeddings": True,
    "use_mask_token": True, "layer_scale_init_value": 0.3,
}  # fmt: skip
SHARED = {"use_shared_relative_position_bias": True, "use_relative_position_bias": False}
DINO = VIT | {"mlp_ratio": 2, "layerscale_value": 1.0}
CLIP_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "hidden_act": "gelu",
    "layer_norm_eps": EPSILON, "projection_dim": 18, "eos_token_id": 2,
}  # fmt: skip
CLIP_VISION = {
    "hidden_size": 28, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 20, "patch_size": 5, "hidden_act": "gelu", "layer_norm_eps": EPSILON,
    "projection_dim": 18,
}  # fmt: skip
CLIP = {
    "text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 18,
    "logit_scale_init_value": 1.7,
}  # fmt: skip
RESNET = {
    "embedding_size": 12, "hidden_sizes": [12, 16], "depths": [2, 1], "hidden_act": "gelu",
    "num_labels": 9,
}  # fmt: skip
WAV2VEC2 = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "hidden_act": "relu", "feat_extract_norm": "layer",
    "feat_extract_activation": "gelu", "conv_dim": (12, 14, 18), "conv_stride": (3, 2, 2),
    "conv_kernel": (6, 3, 2), "conv_bias": True, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "do_stable_layer_norm": True, "num_feat_extract_layers": 3,
    "num_codevectors_per_group": 10, "num_codevector_groups": 2, "codevector_dim": 16,
    "proj_codevector_dim": 20, "layer_norm_eps": 1e-5, "apply_spec_augment": False,
}  # fmt: skip
WHISPER = BART | {
    "num_mel_bins": 10, "max_source_positions": 9, "max_target_positions": 16, "bos_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
XGLM = {
    "vocab_size": VOCABULARY, "d_model": 24, "ffn_dim": 40, "num_layers": 2, "attention_heads": 4,
    "activation_function": "relu", "max_position_embeddings": 32, "scale_embedding": True,
    "use_cache": False,
}  # fmt: skip
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "activation_function": "gelu", "max_position_embeddings": 32,
    "word_embed_proj_dim": 18, "use_cache": False,
}  # fmt: skip
NEO = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_layers": 2, "num_heads": 4,
    "attention_types": [[["global", "local"], 1]], "intermediate_size": 40, "window_size": 5,
    "activation_function": "gelu", "max_position_embeddings": 32, "layer_norm_epsilon": EPSILON,
    "use_cache": False,
}  # fmt: skip
REGNET = RESNET | {"groups_width": 4}
GPTJ = GPT2 | {"n_head": 3, "rotary_dim": 4}
BLOOM = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 4, "use_cache": False,
    "layer_norm_epsilon": EPSILON, "apply_residual_connection_post_layernorm": True,
}  # fmt: skip


def two(kind: str, encoder: Any, decoder: Any, **options: Any) -> Callable[[], Any]:
    """Return what makes a configuration of two models, an encoder and a decoder."""
    make = getattr(transformers, f"{kind}Config").from_encoder_decoder_configs
    return lambda: make(encoder(), decoder(), decoder_start_token_id=3, pad_token_id=0, **options)


BART_DECODER = BART | {
    "is_decoder": True, "d_model": 20, "decoder_attention_heads": 5, "max_position_embeddings": 96,
}  # fmt: skip
CROSS = {"is_decoder": True, "add_cross_attention": True, "use_cache": False}
TEXT_PAIR = two(
    "EncoderDecoder", config("Bert", **BERT), config("Bert", **(BERT | CROSS | {"hidden_size": 20}))
)
IMAGE_PAIR = two(
    "VisionEncoderDecoder",
    config("ViT", **VIT),
    config("GPT2", **(GPT2 | {"n_embd": 20, "add_cross_attention": True})),
)
SOUND_PAIR = two(
    "SpeechEncoderDecoder",
    config("Wav2Vec2", **WAV2VEC2),
    # The port is first run on a second of sound, and a decoder on as many positions as frames.
    config("Bert", **(BERT | CROSS | {"hidden_size": 20, "max_position_embeddings": 96})),
)


def dual() -> Any:
    """Return the configuration of a model of images and of texts."""
    return transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**VIT),
        transformers.BertConfig(**(BERT | {"hidden_size": 28})),
        projection_dim=18,
        logit_scale_init_value=1.7,
    )


def with_cat() -> Any:
    """Return a context in which `jax.numpy` has `cat`."""
    return patch.object(jnp, "cat", jnp.concatenate, create=True)


@contextlib.contextmanager
def old_clip() -> Iterator[None]:
    """Let `jax.numpy.clip` take its bounds by the names they had."""
    clip = jnp.clip

    def renamed(x: Any, *bounds: Any, a_min: Any = None, a_max: Any = None, **rest: Any) -> Any:
        if a_min is not None or a_max is not None:
            return clip(x, *bounds, **({} if bounds else {"min": a_min}), max=a_max, **rest)
        return clip(x, *bounds, **rest)

    with patch.object(jnp, "clip", renamed):
        yield


def rotary(module: str, base: float = 10_000.0, stretch: float = 1.0) -> Context:
    """Return a context in which a port's tables have another base, or stretched positions."""

    def positions(count: int, width: int) -> Any:
        powers = np.arange(0, width, 2)[None] / width
        angles = np.arange(count)[:, None] / stretch / base**powers
        angles = np.concatenate([angles, angles], -1).astype(np.float32)
        return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], -1)[:, None])

    path = f"transformers.models.{module}.modeling_flax_{module}.create_sinusoidal_positions"
    return lambda: patch(path, positions)


def names_of_basic_layers() -> Any:
    """Return a context in which ResNet's basic layers have the names of the original's."""

    class Named(modeling_flax_resnet.FlaxResNetBasicLayerCollection):
        def setup(self) -> None:
            self.layer = [
                modeling_flax_resnet.FlaxResNetConvLayer(
                    self.out_channels, dtype=self.dtype, name=str(n), **options
                )
                for n, options in enumerate(({"stride": self.stride}, {"activation": None}))
            ]

    return patch.object(modeling_flax_resnet, "FlaxResNetBasicLayerCollection", Named)


def scaled_decoder() -> Any:
    """Return a context in which the decoder of BlenderbotSmall scales what it embeds."""
    decoder = modeling_blenderbot_small.BlenderbotSmallDecoder
    make = decoder.__init__

    def scaling(self: Any, config: Any, *rest: Any) -> None:
        make(self, config, *rest)
        scale = self.embed_scale
        self.layernorm_embedding.register_forward_pre_hook(lambda _, inputs: inputs[0] * scale)

    return patch.object(decoder, "__init__", scaling)


def torch_interpolation() -> Any:
    """Return a context in which JAX stretches images as torch does."""

    def stretched(x: Any, shape: Any, **_: Any) -> Any:
        rows, columns = (
            nn.functional.interpolate(
                torch.eye(old, dtype=torch.float64)[None, :, :, None], (new, 1), mode="bicubic"
            )[0, :, :, 0].numpy()
            for old, new in zip(x.shape[2:], shape[2:], strict=True)
        )
        return jnp.einsum("bcij,ik,jl->bckl", x, rows.astype(x.dtype), columns.astype(x.dtype))

    return patch("jax.image.scale_and_translate", stretched)


def configured_activation() -> Any:
    """Return a context in which the head of Electra has a relu."""
    return patch("transformers.models.electra.modeling_electra.get_activation", lambda _: nn.ReLU())


CLIPPED = Known(
    "`jax.numpy.clip` does not take `a_max` any more",
    Whose.PACKAGE,
    "`jax.numpy.clip` with the old names of its bounds",
    error="clip() got an unexpected keyword argument 'a_max'",
    patch=old_clip,
)
TABLE = "the port makes its table of positions anew and does not load the original's"


def made_anew(stage: str, table: str = "embed_positions") -> Known:
    """Return that a table of positions is not loaded, and the first stage that it reaches."""
    remedy = "the original's table as it is made"
    return Known(TABLE, Whose.DELIBERATE, remedy, stage, instead={"keep": (table,)})


def ignores(option: str, remedy: str, stage: str = "", **fields: Any) -> Known:
    """Return that the port does not read an option of the configuration."""
    return Known(f"the port does not read `{option}`", Whose.PORT, remedy, stage, **fields)


SIMPLE = (
    Twin("albert", "FlaxAlbertForMaskedLM", config("Albert", **ALBERT), text(kinds=True)),
    Twin("bart", "FlaxBartForConditionalGeneration", config("Bart", **BART), pair()),
    Twin("beit", "FlaxBeitForImageClassification", config("Beit", **BEIT), images()),
    Twin("bert", "FlaxBertForMaskedLM", config("Bert", **BERT), text(kinds=True)),
    Twin("big_bird", "FlaxBigBirdForMaskedLM", config("BigBird", **FULL), text(kinds=True)),
    Twin(
        "blenderbot",
        "FlaxBlenderbotForConditionalGeneration",
        config("Blenderbot", **BART),
        pair(),
    ),
    Twin(
        "blenderbot_small",
        "FlaxBlenderbotSmallForConditionalGeneration",
        config("BlenderbotSmall", **UNSCALED),
        pair(),
    ),
    Twin("bloom", "FlaxBloomForCausalLM", config("Bloom", **BLOOM), text()),
    Twin("clip", "FlaxCLIPModel", config("CLIP", **CLIP), both(text(rows=4), images())),
    Twin("dinov2", "FlaxDinov2ForImageClassification", config("Dinov2", **DINO), images()),
    Twin("distilbert", "FlaxDistilBertForMaskedLM", config("DistilBert", **DISTILBERT), text()),
    Twin("electra", "FlaxElectraForMaskedLM", config("Electra", **ELECTRA), text(kinds=True)),
    Twin("encoder_decoder", "FlaxEncoderDecoderModel", TEXT_PAIR, pair()),
    Twin("gemma", "FlaxGemmaForCausalLM", config("Gemma", **GEMMA), text()),
    Twin("gpt2", "FlaxGPT2LMHeadModel", config("GPT2", **GPT2), text()),
    Twin("gpt_neo", "FlaxGPTNeoForCausalLM", config("GPTNeo", **NEO), text()),
    Twin("gptj", "FlaxGPTJForCausalLM", config("GPTJ", **GPTJ), text()),
    Twin("llama", "FlaxLlamaForCausalLM", config("Llama", **LLAMA), text()),
    Twin(
        "longt5",
        "FlaxLongT5ForConditionalGeneration",
        config("LongT5", **LOCAL),
        pair(),
        known=CLIPPED,
    ),
    Twin(
        "marian",
        "FlaxMarianMTModel",
        config("Marian", **BART),
        pair(),
        keep=("embed_positions",),
    ),
    Twin("mbart", "FlaxMBartForConditionalGeneration", config("MBart", **BART), pair()),
    Twin("mistral", "FlaxMistralForCausalLM", config("Mistral", **MISTRAL), text()),
    Twin("mt5", "FlaxMT5ForConditionalGeneration", config("MT5", **T5), pair(), known=CLIPPED),
    Twin("opt", "FlaxOPTForCausalLM", config("OPT", **OPT), text()),
    Twin(
        "pegasus",
        "FlaxPegasusForConditionalGeneration",
        config("Pegasus", **BART),
        pair(),
        keep=("embed_positions",),
    ),
    Twin("regnet", "FlaxRegNetForImageClassification", config("RegNet", **REGNET), images()),
    Twin("resnet", "FlaxResNetForImageClassification", config("ResNet", **RESNET), images()),
    Twin("roberta", "FlaxRobertaForMaskedLM", config("Roberta", **ROBERTA), text()),
    Twin(
        "roberta_prelayernorm",
        "FlaxRobertaPreLayerNormForMaskedLM",
        config("RobertaPreLayerNorm", **ROBERTA),
        text(),
    ),
    Twin(
        "roformer",
        "FlaxRoFormerForMaskedLM",
        config("RoFormer", **ROFORMER),
        text(kinds=True),
        keep=("embed_positions",),
    ),
    Twin(
        "speech_encoder_decoder",
        "FlaxSpeechEncoderDecoderModel",
        SOUND_PAIR,
        both(unnamed_sound, decoded),
    ),
    Twin("t5", "FlaxT5ForConditionalGeneration", config("T5", **T5), pair(), known=CLIPPED),
    Twin(
        "vision_encoder_decoder",
        "FlaxVisionEncoderDecoderModel",
        IMAGE_PAIR,
        both(images(rows=B), decoded),
    ),
    Twin(
        "vision_text_dual_encoder",
        "FlaxVisionTextDualEncoderModel",
        dual,
        both(text(rows=4), images()),
    ),
    Twin("vit", "FlaxViTForImageClassification", config("ViT", **VIT), images()),
    Twin("wav2vec2", "FlaxWav2Vec2ForCTC", config("Wav2Vec2", **WAV2VEC2), sound()),
    Twin(
        "whisper",
        "FlaxWhisperForConditionalGeneration",
        config("Whisper", **WHISPER),
        both(spectrum, decoded),
    ),
    Twin("xglm", "FlaxXGLMForCausalLM", config("XGLM", **XGLM), text()),
    Twin("xlm_roberta", "FlaxXLMRobertaForMaskedLM", config("XLMRoberta", **ROBERTA), text()),
)
PLAIN = {twin.name: twin for twin in SIMPLE}


def case(name: str, what: str, **fields: Any) -> Twin:
    """Return another case of a model, its stages and outputs only."""
    twin = replace(PLAIN[name], case=what, whole=False, **fields)
    if twin.known is CLIPPED:  # said once, by the plain case
        return replace(twin, under=old_clip, known=fields.get("known"))
    return twin


WITH_POSITIONS = ("gpt2", "gpt_neo", "gptj", "llama", "gemma", "mistral", "opt", "xglm")
DECODERS = (*WITH_POSITIONS, "bloom")
ENCODERS = (
    "albert", "bert", "big_bird", "distilbert", "electra", "roberta", "roberta_prelayernorm",
    "roformer", "xlm_roberta",
)  # fmt: skip
PAIRS = (
    "bart", "blenderbot", "blenderbot_small", "longt5", "marian", "mbart", "mt5", "pegasus", "t5",
)  # fmt: skip
UNPOSITIONED = ("longt5", "mt5", "t5")
DECODING = {"torch_call": cached_torch, "flax_call": cached_flax}


def padded() -> Iterator[Twin]:
    """Yield every model of text with rows of several lengths."""
    for side in ("right", "left"):
        for name in (*DECODERS, *ENCODERS):
            positions = side == "left" and name in WITH_POSITIONS
            inputs = text(padding=side, positions=positions, kinds=name == "electra")
            yield case(name, f"{side} padding", inputs=inputs, padded=True)
        for name in PAIRS:
            yield case(name, f"{side} padding", inputs=pair(padding=side), padded=True)


def cached() -> Iterator[Twin]:
    """Yield every model that generates, reading with and decoding from its cache."""
    for name in DECODERS:
        inputs = text(padding="left", positions=name in WITH_POSITIONS)
        yield case(name, "cache", inputs=inputs, padded=True, **DECODING)
    for name in PAIRS:
        flax = partial(cached_flax_pair, positions=name not in UNPOSITIONED)
        calls = {"torch_call": cached_torch_pair, "flax_call": flax}
        yield case(name, "cache", inputs=pair(padding="right"), padded=True, **calls)


def lengths() -> Iterator[Twin]:
    """Yield lengths around what a model has a boundary at."""
    whole_table = dict.fromkeys((*DECODERS, *ENCODERS), 32)
    whole_table |= {"roberta": 30, "roberta_prelayernorm": 30, "xlm_roberta": 30, "xglm": 32}
    for name, length in whole_table.items():
        yield case(name, "whole table", inputs=text(length, kinds=name == "electra"))
    for length in (5, 6):
        yield case("gpt_neo", f"window of 5 on {length}", inputs=text(length))
    for length in (3, 4, 5, 8, 9, 10, 24):
        yield case("t5", f"length {length}", inputs=pair(length))
    for length in (3, 4, 5, 8, 12):
        yield case("longt5", f"length {length}", inputs=pair(length))
        yield case(
            "longt5",
            f"global, length {length}",
            config=config("LongT5", **GLOBAL),
            inputs=pair(length),
        )
    sparse = config("BigBird", **SPARSE)
    yield case("big_bird", "sparse, length 64", config=sparse, inputs=text(64))
    yield case(
        "big_bird",
        "sparse, length 36",
        config=sparse,
        inputs=text(36),
        known=Known(
            "the original attends to everything where a text is no longer than what a token sees",
            Whose.PORT,
            "full attention asked for",
            "bert.encoder.layer.0.attention.self[0]",
            instead={"config": config("BigBird", **FULL)},
        ),
    )
    yield case(
        "big_bird",
        "sparse, length 41",
        config=sparse,
        inputs=text(41),
        known=Known(
            "the original fills up the last block, and the port refuses",
            Whose.PORT,
            "a length of whole blocks",
            error="Sequence length must be multiple of block size",
            instead={"inputs": text(44)},
        ),
    )


def options() -> Iterator[Twin]:
    """Yield models with options that are not read alike on both sides, or that might not be."""
    yield case(
        "albert",
        "layers in a group",
        config=config("Albert", **(ALBERT | {"num_hidden_groups": 1, "inner_group_num": 2})),
    )
    yield case("beit", "one table", config=config("Beit", **(BEIT | SHARED)))
    yield case(
        "bert",
        "relative positions",
        config=config("Bert", **BERT, position_embedding_type="relative_key"),
        known=ignores(
            "position_embedding_type",
            "absolute positions",
            "bert.embeddings.LayerNorm",
            instead={"config": PLAIN["bert"].config},
        ),
    )
    yield case(
        "blenderbot_small",
        "scaled",
        config=config("BlenderbotSmall", **BART),
        known=Known(
            "the original's decoder makes `embed_scale` and does not use it",
            Whose.ORIGINAL,
            "the decoder of the original scales what it embeds",
            "model.decoder.layernorm_embedding",
            patch=scaled_decoder,
        ),
    )
    yield case(
        "bloom",
        "6 heads",
        config=config("Bloom", **(BLOOM | {"n_head": 6})),
        known=Known(
            "the slopes of a number of heads that is no power of two are made with "
            "`jax.numpy.cat`, which there is not",
            Whose.PORT,
            "`jax.numpy.concatenate`",
            error="module 'jax.numpy' has no attribute 'cat'",
            patch=with_cat,
        ),
    )
    ending = {"text_config": CLIP_TEXT | {"eos_token_id": 7}}
    yield case("clip", "end token", config=config("CLIP", **(CLIP | ending)))
    yield case(
        "dinov2",
        "larger image",
        inputs=images(30),
        known=Known(
            "positions are stretched by another cubic kernel, and by a tenth of a patch more",
            Whose.PORT,
            "the original's interpolation in the port",
            "dinov2.embeddings.dropout",
            patch=torch_interpolation,
        ),
    )
    yield replace(
        case(
            "dinov2", "layer scale", config=config("Dinov2", **(DINO | {"layerscale_value": 0.5}))
        ),
        whole=True,
        known=Known(
            "the port multiplies the loaded scale of each layer by its initial value",
            Whose.PORT,
            "a `layerscale_value` of 1 in the port",
            "dinov2.encoder.layer.0.layer_scale1",
            instead={"flax_config": {"layerscale_value": 1.0}},
        ),
    )
    sinusoidal = config("DistilBert", **SINUSOIDAL)
    tables = ("position_embeddings",)
    yield case("distilbert", "sinusoidal", config=sinusoidal, keep=tables)
    yield case(
        "distilbert",
        "other positions",
        config=sinusoidal,
        known=made_anew("distilbert.embeddings.LayerNorm", *tables),
    )
    for name, stage in (
        ("marian", "model.encoder.layers.0.self_attn.q_proj"),
        ("pegasus", "model.encoder.layers.0.self_attn_layer_norm"),
        ("roformer", "roformer.encoder.layer.0.attention.self[0]"),
    ):
        yield case(name, "other positions", keep=(), known=made_anew(stage))
    yield case(
        "electra",
        "relu",
        config=config("Electra", **(ELECTRA | {"hidden_act": "relu"})),
        known=Known(
            "the original's head has a gelu whatever `hidden_act` is",
            Whose.ORIGINAL,
            "the original's head with the configured activation",
            "generator_predictions.LayerNorm",
            patch=configured_activation,
        ),
    )
    yield case(
        "electra",
        "no token types",
        inputs=text(),
        known=Known(
            "the port takes tokens to be of type 1 where no types are given, the original of 0",
            Whose.PORT,
            "types of 0 are given",
            "electra.embeddings.token_type_embeddings",
            instead={"inputs": both(text(), untyped)},
        ),
    )
    yield case(
        "gemma",
        "relu",
        config=config("Gemma", **(GEMMA | {"hidden_act": "relu"})),
        known=Known(
            "the port reads `hidden_activation` where the original reads `hidden_act`, and warns",
            Whose.DELIBERATE,
            "`hidden_activation` is set in the port",
            "model.layers.0.mlp.down_proj",
            instead={"flax_config": {"hidden_activation": "relu"}},
        ),
    )
    attention = "model.layers.0.self_attn.o_proj"
    for name, kind, sizes in (
        ("llama", "Llama", LLAMA),
        ("gemma", "Gemma", GEMMA),
        ("mistral", "Mistral", MISTRAL),
    ):
        yield case(
            name,
            "rotary base",
            config=config(kind, **sizes, rope_theta=500.0),
            known=ignores(
                "rope_theta", "tables of that base", attention, patch=rotary(name, base=500.0)
            ),
        )
    yield case(
        "llama",
        "scaled positions",
        config=config("Llama", **LLAMA, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        known=ignores(
            "rope_scaling", "tables of those positions", attention, patch=rotary("llama", stretch=2)
        ),
    )
    biased = LLAMA | {"attention_bias": True}
    yield case(
        "llama",
        "biases",
        config=config("Llama", **biased, mlp_bias=True),
        known=Known(
            "the port does not read `mlp_bias`, and drops those biases",
            Whose.PORT,
            "biases of attention alone",
            "model.layers.0.mlp.up_proj",
            instead={"config": config("Llama", **biased)},
        ),
    )
    yield case("gpt2", "unscaled", config=config("GPT2", **GPT2, scale_attn_weights=False))
    yield case(
        "gpt2",
        "scaled by layer",
        config=config("GPT2", **GPT2, scale_attn_by_inverse_layer_idx=True),
    )
    yield case("longt5", "global", config=config("LongT5", **GLOBAL))
    yield replace(
        case(
            "mistral",
            "window",
            config=config("Mistral", **(LLAMA | {"sliding_window": 8})),
            inputs=text(24),
        ),
        whole=True,
        known=Known(
            "the port's window keeps one key more than `sliding_window`",
            Whose.PORT,
            "a window of 7 in the port",
            attention,
            instead={"flax_config": {"sliding_window": 7}},
            issue="huggingface/transformers#29176",
        ),
    )
    yield case(
        "mistral",
        "no window",
        config=config("Mistral", **(LLAMA | {"sliding_window": None})),
        known=Known(
            "the port takes no window for one of 0: a token sees itself alone",
            Whose.PORT,
            "a window longer than the sequence in the port",
            attention,
            instead={"flax_config": {"sliding_window": 40}},
        ),
    )
    yield case("opt", "norm behind", config=config("OPT", **OPT, do_layer_norm_before=False))
    yield case(
        "resnet",
        "basic",
        config=config("ResNet", **RESNET, layer_type="basic"),
        known=Known(
            "convolutions are `layer_0` here and `0` in the original: nothing loads them",
            Whose.PORT,
            "the original's names in the port",
            "resnet.encoder.stages.0.layers.0.layer.layer_0.convolution",
            patch=names_of_basic_layers,
        ),
    )
    yield case(
        "roformer",
        "other width",
        config=config("RoFormer", **(ROFORMER | {"embedding_size": 20})),
        known=Known(
            "the port's head is as wide as the layers, the original's as the embedding",
            Whose.PORT,
            "both of one width",
            error="was expected to be of shape (24,), but is (20,)",
            instead={"config": PLAIN["roformer"].config},
        ),
    )
    yield case(
        "speech_encoder_decoder",
        "bart",
        config=two(
            "SpeechEncoderDecoder", config("Wav2Vec2", **WAV2VEC2), config("Bart", **BART_DECODER)
        ),
        known=Known(
            "the projection between the two reads `initializer_range`, which Bart calls `init_std`",
            Whose.PORT,
            "a configuration of Bart that has both",
            error="'BartConfig' object has no attribute 'initializer_range'",
            instead={
                "config": two(
                    "SpeechEncoderDecoder",
                    config("Wav2Vec2", **WAV2VEC2),
                    config("Bart", **BART_DECODER, initializer_range=0.02),
                )
            },
        ),
    )
    tied = T5 | {"tie_word_embeddings": True, "feed_forward_proj": "relu"}
    yield case("t5", "tied", config=config("T5", **tied))
    yield case("vit", "no biases", config=config("ViT", **VIT, qkv_bias=False))
    group = {"feat_extract_norm": "group", "do_stable_layer_norm": False}
    yield case(
        "wav2vec2",
        "group norm",
        config=config("Wav2Vec2", **(WAV2VEC2 | group)),
        known=Known(
            "the port has no norms behind their sums, and says so",
            Whose.DELIBERATE,
            "norms before them",
            error="``config.do_stable_layer_norm is False`` is currently not supported.",
            instead={"config": PLAIN["wav2vec2"].config},
        ),
    )
    yield case(
        "wav2vec2",
        "epsilon",
        config=config("Wav2Vec2", **(WAV2VEC2 | {"layer_norm_eps": EPSILON})),
        known=Known(
            "the norms of the original's convolutions have an epsilon of 1e-5 whatever "
            "`layer_norm_eps` is",
            Whose.ORIGINAL,
            "a `layer_norm_eps` of 1e-5",
            "wav2vec2.feature_extractor.conv_layers.0.layer_norm",
            instead={"config": PLAIN["wav2vec2"].config},
        ),
    )
    yield case("wav2vec2", "padding", inputs=both(sound(), heard))


TWINS = (*SIMPLE, *options(), *padded(), *cached(), *lengths())
