"""Planted bugs of activation functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import jax

from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.ffn import NormalizedFFN
from parity.faults.fault import Family, Plant, around, fault, marked, rounded

_activation = partial(fault, Family.ACTIVATIONS)


def _silu(*replacements: Callable[[Any], Any] | None) -> Plant:
    """Return a plant for a method whose i-th call of SiLU calls `replacements[i]` instead.

    None leaves a call unchanged, as are all calls after the last replacement.
    """

    @around
    def plant(call, *args, **options):
        silu, left = jax.nn.silu, list(replacements)

        def replaced(x):
            function = left.pop(0) if left else None
            return (function or silu)(x)

        with patch.object(jax.nn, "silu", replaced):
            return call(*args, **options)

    return plant


def _quick_gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)


def _in_bfloat16(x):
    return rounded(x * rounded(jax.nn.sigmoid(rounded(x))))


def _silu_on_h(y, self, x):
    return x + jax.nn.silu(y - x)


_value = partial(_activation, stage="layers.0.v", owner=MegalodonAttention)

FAULTS = (
    _value("value_gelu", "GELU for SiLU", _silu(jax.nn.gelu)),
    _value("value_quick_gelu", "x sigmoid(1.702 x), near enough to look right", _silu(_quick_gelu)),
    _value("value_linear", "values left without activation", _silu(lambda x: x)),
    _value(
        "value_silu_bfloat16",
        "an activation evaluated in bfloat16 and widened after it",
        _silu(_in_bfloat16),
    ),
    _activation(
        "gate_sigmoid",
        "a gate is a sigmoid elsewhere",
        _silu(None, jax.nn.sigmoid),
        stage="layers.0.gate",
        owner=MegalodonAttention,
    ),
    _activation(
        "silu_on_h",
        "the paper's activation after the sum, which megalodon-hf leaves out",
        marked(_silu_on_h, "attn"),
        stage="layers.0.attn",
        owner=MegalodonAttention,
    ),
    _activation(
        "ffn_gelu", "GELU for SiLU", _silu(jax.nn.gelu), stage="layers.0.ffn", owner=NormalizedFFN
    ),
    _activation(
        "ffn_relu", "ReLU for SiLU", _silu(jax.nn.relu), stage="layers.0.ffn", owner=NormalizedFFN
    ),
)
