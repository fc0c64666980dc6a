"""Planted bugs of checkpoint conversion, which load changed weights into a correct model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from parity.faults.fault import Family, Fault, Weights, on_weights

Edit = Callable[[Any, Weights], None]
"""Changes weights in place, given the configuration and the weights by torch name."""


def _fault(name: str, how: str, stage: str, change: Edit, witness: str = "length_c") -> Fault:
    return Fault(Family.CONVERSION, name, how, stage, on_weights(change), witness)


def _each(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def apply(config: Any, weights: Weights) -> None:
        for name in weights:
            if name.endswith(suffix):
                weights[name] = change(weights[name])

    return apply


def _swap(left: str, right: str) -> Edit:
    def apply(config: Any, weights: Weights) -> None:
        for name in [n for n in weights if n.endswith(left)]:
            other = name.removesuffix(left) + right
            weights[name], weights[other] = weights[other], weights[name]

    return apply


def _layers_off_by_one(config: Any, weights: Weights) -> None:
    source = dict(weights)
    for name in source:
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str((int(parts[2]) + 1) % config.num_layers)
            weights[name] = source[".".join(parts)]


def _head_from_embedding(config: Any, weights: Weights) -> None:
    weights["lm_head.weight"] = weights["model.embed.weight"][: config.output_size]


def _final_norm_from_last_layer(config: Any, weights: Weights) -> None:
    last = f"model.layers.{config.num_layers - 1}.attn.timenorm."
    for leaf in ("weight", "bias"):
        weights[f"model.norm.{leaf}"] = weights[last + leaf]


def _pad_row_zeroed(config: Any, weights: Weights) -> None:
    table = weights["model.embed.weight"].copy()
    table[config.pad_token_id] = 0
    weights["model.embed.weight"] = table


def _heads_interleaved(config: Any, weights: Weights) -> None:
    H, d = config.num_heads, config.head_dim
    rows = np.arange(H * d).reshape(d, H).T.reshape(-1)
    _each("attn.wz.weight", lambda w: w[rows])(config, weights)


def _query_and_key_swapped(config: Any, weights: Weights) -> None:
    for leaf in ("attn.gamma", "attn.beta"):
        _each(leaf, lambda w: w[::-1])(config, weights)


def _random(w: np.ndarray) -> np.ndarray:
    draw = np.random.default_rng(0).normal(size=w.shape)
    return (draw * w.shape[-1] ** -0.5).astype(w.dtype)


def _bfloat16(w: np.ndarray) -> np.ndarray:
    return w.astype(ml_dtypes.bfloat16).astype(w.dtype)


def _key_missing(config: Any, weights: Weights) -> None:
    del weights["model.layers.0.attn.wr.bias"]


FAULTS = (
    _fault(
        "square_linear_transposed",
        "a square Linear is stored (in, out); no shape check can see it",
        "layers.0.attn",
        _each("attn.wh1.weight", np.transpose),
    ),
    _fault(
        "linear_transposed",
        "every Linear is stored (in, out); strict loading must refuse the shapes",
        "load",
        _each("attn.wv.weight", np.transpose),
    ),
    _fault("key_missing", "a name was misspelt; strict loading must refuse", "load", _key_missing),
    _fault(
        "key_left_random",
        "a key is missing and a lenient loader keeps the random initial value",
        "layers.0.q",
        _each("attn.wz.weight", _random),
    ),
    _fault(
        "key_left_zero",
        "a key is missing and a lenient loader keeps the initial zeros",
        "layers.0.gate",
        _each("attn.wr.bias", np.zeros_like),
    ),
    _fault(
        "gate_and_up_swapped",
        "fc1 and fc3 of the gated FFN go by other names elsewhere",
        "layers.0.ffn",
        _swap("ffn.fc1.weight", "ffn.fc3.weight"),
        "swiglu_rescale_scale",
    ),
    _fault(
        "value_and_gate_swapped",
        "wv and wr have one shape, so nothing complains",
        "layers.0.v",
        _swap("attn.wv.weight", "attn.wr.weight"),
    ),
    _fault(
        "layers_off_by_one",
        "layers counted from one: each gets the weights of the next",
        "layers.0.timenorm",
        _layers_off_by_one,
    ),
    _fault(
        "head_tied_anyway",
        "the head of an untied checkpoint is overwritten with the embedding",
        "logits",
        _head_from_embedding,
        "untied_head",
    ),
    _fault(
        "final_norm_of_last_layer",
        "a name matched by its ending: the last norm found wins",
        "norm",
        _final_norm_from_last_layer,
    ),
    _fault(
        "embedding_one_row_late",
        "a tokenizer's special token shifts every row",
        "embed",
        _each("embed.weight", lambda w: np.roll(w, 1, axis=0)),
    ),
    _fault(
        "pad_row_zeroed",
        "padding_idx taken to mean that the row is zero in the forward pass too",
        "embed",
        _pad_row_zeroed,
        "pad_inside",
    ),
    _fault(
        "weights_through_bfloat16",
        "the checkpoint was saved in bfloat16 on its way",
        "embed",
        _each("", _bfloat16),
    ),
    _fault(
        "ema_through_bfloat16",
        "sensitive parameters were cast along with the others",
        "layers.0.cema",
        _each("cema.alpha", _bfloat16),
    ),
    _fault(
        "gamma_loses_imaginary_part",
        "a complex gamma is cast to real",
        "layers.0.cema",
        _each("cema.gamma_imag", np.zeros_like),
    ),
    _fault(
        "gamma_parts_swapped",
        "(imag, real) read as (real, imag)",
        "layers.0.cema",
        _swap("cema.gamma_real", "cema.gamma_imag"),
    ),
    _fault(
        "alpha_and_delta_swapped",
        "both are (D, N, 1) logits; |q| is symmetric in them, p is not",
        "layers.0.cema",
        _swap("cema.alpha", "cema.delta"),
    ),
    _fault(
        "alpha_transposed",
        "(D, N, 1) filled from a buffer laid out as (N, D, 1)",
        "layers.0.cema",
        _each("cema.alpha", lambda w: np.swapaxes(w, 0, 1).reshape(w.shape)),
    ),
    _fault(
        "query_and_key_rows_swapped",
        "row 0 of gamma and beta taken for the key",
        "layers.0.q",
        _query_and_key_swapped,
    ),
    _fault(
        "heads_interleaved",
        "rows of wz ordered (d, H) instead of (H, d)",
        "layers.0.q",
        _heads_interleaved,
    ),
    _fault(
        "gain_converted_to_plus_one",
        "the converter adds the 1 that the layer adds again",
        "layers.0.timenorm",
        _each("attn.timenorm.weight", lambda w: w + 1),
    ),
    _fault(
        "layer_norm_weight_less_one",
        "the converter takes LayerNorm for a norm that adds 1",
        "layers.0.ffn",
        _each("ffn.norm.weight", lambda w: w - 1),
    ),
)
