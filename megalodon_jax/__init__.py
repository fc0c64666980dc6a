"""Megalodon in JAX and Equinox: chunked attention over a complex exponential moving average."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalodon_jax.lazy import on_first_use

if TYPE_CHECKING:
    from megalodon_jax.checks import traced_checks
    from megalodon_jax.config import MegalodonConfig
    from megalodon_jax.inference import (
        decode_step,
        generate,
        generate_jit,
        greedy_token,
        sample_token,
    )
    from megalodon_jax.model import MegalodonBlock, MegalodonForCausalLM, MegalodonModel
    from megalodon_jax.stacked import stack_layers, unstack_layers
    from megalodon_jax.types import (
        AttentionCache,
        EMAState,
        LayerCache,
        ModelCache,
        NormState,
        index_cache,
        init_cache,
        reserve_cache,
        trim_cache,
    )

__all__ = [
    "AttentionCache",
    "EMAState",
    "LayerCache",
    "MegalodonBlock",
    "MegalodonConfig",
    "MegalodonForCausalLM",
    "MegalodonModel",
    "ModelCache",
    "NormState",
    "decode_step",
    "generate",
    "generate_jit",
    "greedy_token",
    "index_cache",
    "init_cache",
    "reserve_cache",
    "sample_token",
    "stack_layers",
    "traced_checks",
    "trim_cache",
    "unstack_layers",
]

_ROOMS = {
    "megalodon_jax.checks": ("traced_checks",),
    "megalodon_jax.config": ("MegalodonConfig",),
    "megalodon_jax.inference": (
        "decode_step",
        "generate",
        "generate_jit",
        "greedy_token",
        "sample_token",
    ),
    "megalodon_jax.model": (
        "MegalodonBlock",
        "MegalodonForCausalLM",
        "MegalodonModel",
    ),
    "megalodon_jax.stacked": (
        "stack_layers",
        "unstack_layers",
    ),
    "megalodon_jax.types": (
        "AttentionCache",
        "EMAState",
        "LayerCache",
        "ModelCache",
        "NormState",
        "index_cache",
        "init_cache",
        "reserve_cache",
        "trim_cache",
    ),
}
__getattr__, __dir__ = on_first_use(__name__, _ROOMS)
