"""Planted bugs of the connections between the layers of a block."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.ffn import NormalizedFFN
from megalodon_jax.model import MegalodonModel
from parity.faults.fault import Family, altered, around, fault, marked, on_copy, on_result

_wiring = partial(fault, Family.WIRING)


def _without_residual(y, self, x):
    return y - x


def _fed(call, layer: str, source: str):
    """Return a faulty attention whose submodule `layer` gets the output of submodule `source`."""

    def faulty(self, *args, **options):
        seen: list[Any] = []

        def watched(*inputs, **more):
            out = getattr(self, source)(*inputs, **more)
            value = out[0] if isinstance(out, tuple) else out
            seen.append(value.reshape(*value.shape[:2], -1))
            return out

        def misled(x):
            return getattr(self, layer)(seen[-1])

        # Other methods of the chunked attention are used too, so its stand-in must have them.
        stand_in = _Watched(self.inner, watched) if source == "inner" else watched
        return call(altered(self, **{source: stand_in, layer: misled}), *args, **options)

    return faulty


class _Watched:
    """A module whose call is replaced by `call`; everything else is that of the module."""

    def __init__(self, module: Any, call: Callable[..., Any]):
        self._module, self._call = module, call

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _value_heads_transposed(v, self, x):
    B, L, H, e = v.shape
    return jnp.swapaxes(v.reshape(B, L, e, H), 2, 3)


@around
def _residual_from_middle(call, self, y, residual, **options):
    return call(self, y, y, **options)


def _unscaled_embedding(x, self, ids):
    return x / math.sqrt(self.config.model_dim) if self.config.scale_emb else x


_BIG = "swiglu_rescale_scale"

_attention = partial(_wiring, owner=MegalodonAttention)
_ffn = partial(_wiring, stage="layers.0.ffn", owner=NormalizedFFN)

FAULTS = (
    _attention(
        "values_from_m",
        "v read from m, as q and k are",
        lambda call: _fed(call, "wv", "rmsnorm"),
        stage="layers.0.v",
    ),
    _attention(
        "gate_from_u",
        "r read from u, as v is",
        lambda call: _fed(call, "wr", "timenorm"),
        stage="layers.0.gate",
    ),
    _attention(
        "gate_left_out",
        "wh2 reads o, not o r",
        lambda call: _fed(call, "wh2", "inner"),
        stage="layers.0.attn",
    ),
    _attention(
        "value_heads_transposed",
        "(B, L, E) reshaped to (e, H) instead of (H, e)",
        marked(_value_heads_transposed, "v"),
        stage="layers.0.v",
    ),
    _attention(
        "attention_residual_left_out",
        "y = h",
        marked(_without_residual, "attn"),
        stage="layers.0.attn",
    ),
    _ffn(
        "ffn_residual_from_middle",
        "x' = y + FFN(y), as everywhere else: the residual is the block's input",
        _residual_from_middle,
    ),
    _ffn(
        "rescale_from_layer_one",
        "0.1 * 0.5^(i + 1)",
        on_copy(scale=lambda self: self.scale * 0.5 if self.config.rescale_nffn else self.scale),
        witness=_BIG,
    ),
    _ffn(
        "rescale_left_out", "rescale_nffn not read", on_copy(scale=lambda self: 1.0), witness=_BIG
    ),
    _wiring(
        "embedding_scale_left_out",
        "scale_emb not read",
        on_result(_unscaled_embedding),
        stage="embed",
        owner=MegalodonModel,
        attribute="_embedded",
        witness=_BIG,
    ),
)
