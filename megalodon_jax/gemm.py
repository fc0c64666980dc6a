"""Alias of `megalodon_jax.quantization.products`, under its former name, for existing imports."""

from megalodon_jax.quantization.products import *  # noqa: F403
