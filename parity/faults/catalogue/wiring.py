"""Bugs of how the layers of a block are connected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.ffn import NormalizedFFN
from megalodon_jax.model import MegalodonModel
from parity.faults.fault import (
    Family,
    altered,
    marked,
    of_calls,
    on_copy,
    on_result,
)
from parity.megalodon.cases import Case

_wiring = of_calls(Family.WIRING)


def _without_residual(y, self, x):
    return y - x


def _fed(call, layer: str, source: str):
    """Let one layer of the attention half read what another put out."""

    def faulty(self, *args, **options):
        seen: list[Any] = []

        def watched(*inputs, **more):
            out = getattr(self, source)(*inputs, **more)
            value = out[0] if isinstance(out, tuple) else out
            seen.append(value.reshape(*value.shape[:2], -1))
            return out

        def misled(x):
            return getattr(self, layer)(seen[-1])

        # The chunked attention is asked for more than its call.
        stand_in = _Watched(self.inner, watched) if source == "inner" else watched
        return call(altered(self, **{source: stand_in, layer: misled}), *args, **options)

    return faulty


class _Watched:
    def __init__(self, module: Any, call: Callable[..., Any]):
        self._module, self._call = module, call

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _value_heads_transposed(v, self, x):
    B, L, H, e = v.shape
    return jnp.swapaxes(v.reshape(B, L, e, H), 2, 3)


def _residual_from_middle(call):
    def faulty(self, y, residual, **options):
        return call(self, y, y, **options)

    return faulty


def _unscaled_embedding(x, self, ids):
    return x / math.sqrt(self.config.model_dim) if self.config.scale_emb else x


def _rescaled(case: Case) -> bool:
    return case.config.rescale_nffn


def _scaled(case: Case) -> bool:
    return case.config.scale_emb


_BIG = "swiglu_rescale_scale"


FAULTS = (
    _wiring(
        "values_from_m",
        "v read from m, as q and k are",
        "layers.0.v",
        MegalodonAttention,
        lambda call: _fed(call, "wv", "rmsnorm"),
    ),
    _wiring(
        "gate_from_u",
        "r read from u, as v is",
        "layers.0.gate",
        MegalodonAttention,
        lambda call: _fed(call, "wr", "timenorm"),
    ),
    _wiring(
        "gate_left_out",
        "wh2 reads o, not o r",
        "layers.0.attn",
        MegalodonAttention,
        lambda call: _fed(call, "wh2", "inner"),
    ),
    _wiring(
        "value_heads_transposed",
        "(B, L, E) reshaped to (e, H) instead of (H, e)",
        "layers.0.v",
        MegalodonAttention,
        marked(_value_heads_transposed, "v"),
    ),
    _wiring(
        "attention_residual_left_out",
        "y = h",
        "layers.0.attn",
        MegalodonAttention,
        marked(_without_residual, "attn"),
    ),
    _wiring(
        "ffn_residual_from_middle",
        "x' = y + FFN(y), as everywhere else: the residual is the block's input",
        "layers.0.ffn",
        NormalizedFFN,
        _residual_from_middle,
    ),
    _wiring(
        "rescale_from_layer_one",
        "0.1 * 0.5^(i + 1)",
        "layers.0.ffn",
        NormalizedFFN,
        on_copy(scale=lambda self: self.scale * 0.5 if self.config.rescale_nffn else self.scale),
        _BIG,
        _rescaled,
    ),
    _wiring(
        "rescale_left_out",
        "rescale_nffn not read",
        "layers.0.ffn",
        NormalizedFFN,
        on_copy(scale=lambda self: 1.0),
        _BIG,
        _rescaled,
    ),
    _wiring(
        "embedding_scale_left_out",
        "scale_emb not read",
        "embed",
        MegalodonModel,
        on_result(_unscaled_embedding),
        _BIG,
        _scaled,
        "_embedded",
    ),
)
