"""Alias of `megalodon_jax.quantization.formats`, under its former name, for existing imports."""

from megalodon_jax.quantization.formats import *  # noqa: F403
