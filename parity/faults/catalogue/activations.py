"""Bugs of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax

from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.ffn import NormalizedFFN
from parity.faults.fault import (
    Family,
    Fault,
    Patch,
    Plant,
    marked,
    rounded,
)


def _activation(name: str, how: str, stage: str, owner: Any, plant: Plant, **options) -> Fault:
    patch_ = Patch(owner, "__call__", plant)
    return Fault(Family.ACTIVATIONS, name, how, f"layers.0.{stage}", patch_, **options)


def _silu(*replacements: Callable[[Any], Any] | None) -> Plant:
    """Replace the calls of SiLU within a method, in order; None and what is beyond stay."""

    def plant(call):
        def faulty(*args, **options):
            silu, left = jax.nn.silu, list(replacements)

            def replaced(x):
                function = left.pop(0) if left else None
                return (function or silu)(x)

            with patch.object(jax.nn, "silu", replaced):
                return call(*args, **options)

        return faulty

    return plant


def _quick_gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)


def _in_bfloat16(x):
    return rounded(x * rounded(jax.nn.sigmoid(rounded(x))))


def _silu_on_h(y, self, x):
    return x + jax.nn.silu(y - x)


FAULTS = (
    _activation("value_gelu", "GELU for SiLU", "v", MegalodonAttention, _silu(jax.nn.gelu)),
    _activation(
        "value_quick_gelu",
        "x sigmoid(1.702 x), near enough to look right",
        "v",
        MegalodonAttention,
        _silu(_quick_gelu),
    ),
    _activation(
        "value_linear",
        "values left without activation",
        "v",
        MegalodonAttention,
        _silu(lambda x: x),
    ),
    _activation(
        "value_silu_bfloat16",
        "an activation evaluated in bfloat16 and widened after it",
        "v",
        MegalodonAttention,
        _silu(_in_bfloat16),
    ),
    _activation(
        "gate_sigmoid",
        "a gate is a sigmoid elsewhere",
        "gate",
        MegalodonAttention,
        _silu(None, jax.nn.sigmoid),
    ),
    _activation(
        "silu_on_h",
        "the paper's activation after the sum, which megalodon-hf leaves out",
        "attn",
        MegalodonAttention,
        marked(_silu_on_h, "attn"),
    ),
    _activation("ffn_gelu", "GELU for SiLU", "ffn", NormalizedFFN, _silu(jax.nn.gelu)),
    _activation("ffn_relu", "ReLU for SiLU", "ffn", NormalizedFFN, _silu(jax.nn.relu)),
)
