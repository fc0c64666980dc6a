"""Bugs of how the model is run: dtypes and rounding where the mathematics is right."""

from __future__ import annotations

import jax.numpy as jnp

from megalodon_jax import model
from megalodon_jax.layers import linear, timestep_norm
from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.norms import RMSNorm
from megalodon_jax.model import MegalodonModel
from parity.faults.fault import (
    Family,
    Plant,
    marked,
    of,
    on_result,
    rounded,
    uncached,
)
from parity.megalodon import runner

_fault = of(Family.RUNTIME)


def _products(bits: int) -> Plant:
    def plant(matmul):
        def faulty(x, weight, *rest):
            return matmul(rounded(x, bits), rounded(weight, bits), *rest)

        return faulty

    return plant


def _loaded_in_bfloat16(build):
    def faulty(config, tensors, **options):
        return build(config.with_dtype("bfloat16"), tensors, **options)

    return faulty


def _rounded_logits(mark):
    def faulty(value, name):
        return mark(value.astype(jnp.bfloat16) if name == "logits" else value, name)

    return faulty


def _rms_in_bfloat16(call):
    def faulty(self, x):
        return call(self, rounded(x))

    return faulty


def _means_in_bfloat16(run):
    def faulty(mu, *rest):
        return run(rounded(mu), *rest)

    return faulty


FAULTS = (
    _fault(
        "products_in_bfloat16",
        "an autocast left on",
        "layers.0.q",
        linear,
        "matmul",
        _products(7),
    ),
    _fault(
        "products_in_tf32",
        "a GPU allowed to shorten float32 products",
        "layers.0.q",
        linear,
        "matmul",
        _products(10),
    ),
    _fault(
        "loaded_in_bfloat16",
        "the checkpoint's dtype taken for the model's",
        "embed",
        runner,
        "build_model",
        _loaded_in_bfloat16,
    ),
    _fault(
        "logits_handed_out_in_bfloat16",
        "the dtype of the output follows the weights",
        "logits",
        model,
        "checkpoint_name",
        _rounded_logits,
        shows=uncached,
    ),
    _fault(
        "residual_in_bfloat16",
        "the residual stream stored in bfloat16",
        "embed",
        MegalodonModel,
        "_embedded",
        on_result(lambda x, *args: rounded(x)),
    ),
    _fault(
        "timenorm_in_bfloat16",
        "statistics taken of rounded means",
        "layers.0.timenorm",
        timestep_norm,
        "_running",
        _means_in_bfloat16,
    ),
    _fault(
        "rmsnorm_in_bfloat16",
        "norm not widened",
        "layers.0.rmsnorm",
        RMSNorm,
        "__call__",
        _rms_in_bfloat16,
    ),
    _fault(
        "gate_in_bfloat16",
        "an activation stored narrow between two products",
        "layers.0.gate",
        MegalodonAttention,
        "__call__",
        marked(lambda value, self, x: rounded(value), "gate"),
    ),
)
