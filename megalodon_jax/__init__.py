"""Megalodon in JAX and Equinox: chunked attention over a complex exponential moving average."""

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.model import MegalodonBlock, MegalodonForCausalLM, MegalodonModel
from megalodon_jax.types import NormState

__all__ = [
    "MegalodonBlock",
    "MegalodonConfig",
    "MegalodonForCausalLM",
    "MegalodonModel",
    "NormState",
]
