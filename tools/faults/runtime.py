"""Planted bugs of dtypes and rounding; the mathematics stays correct."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from megalodon_jax import model
from megalodon_jax.layers import linear, timestep_norm
from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.norms import RMSNorm
from megalodon_jax.model import MegalodonModel
from parity.faults.fault import Family, Plant, around, fault, marked, on_result, rounded
from parity.megalodon import runner

_fault = partial(fault, Family.RUNTIME)


def _products(bits: int) -> Plant:
    @around
    def plant(matmul, x, weight, *rest):
        return matmul(rounded(x, bits), rounded(weight, bits), *rest)

    return plant


@around
def _loaded_in_bfloat16(build, config, tensors, **options):
    return build(config.with_dtype("bfloat16"), tensors, **options)


@around
def _rounded_logits(mark, value, name):
    return mark(value.astype(jnp.bfloat16) if name == "logits" else value, name)


@around
def _rms_in_bfloat16(call, self, x):
    return call(self, rounded(x))


@around
def _means_in_bfloat16(run, mu, *rest):
    return run(rounded(mu), *rest)


_product = partial(_fault, stage="layers.0.q", owner=linear, attribute="matmul")

FAULTS = (
    _product("products_in_bfloat16", "an autocast left on", _products(7)),
    _product("products_in_tf32", "a GPU allowed to shorten float32 products", _products(10)),
    _fault(
        "loaded_in_bfloat16",
        "the checkpoint's dtype taken for the model's",
        _loaded_in_bfloat16,
        stage="embed",
        owner=runner,
        attribute="build_model",
    ),
    _fault(
        "logits_handed_out_in_bfloat16",
        "the dtype of the output follows the weights",
        _rounded_logits,
        stage="logits",
        owner=model,
        attribute="checkpoint_name",
    ),
    _fault(
        "residual_in_bfloat16",
        "the residual stream stored in bfloat16",
        on_result(lambda x, *args: rounded(x)),
        stage="embed",
        owner=MegalodonModel,
        attribute="_embedded",
    ),
    _fault(
        "timenorm_in_bfloat16",
        "statistics taken of rounded means",
        _means_in_bfloat16,
        stage="layers.0.timenorm",
        owner=timestep_norm,
        attribute="_running",
    ),
    _fault(
        "rmsnorm_in_bfloat16",
        "norm not widened",
        _rms_in_bfloat16,
        stage="layers.0.rmsnorm",
        owner=RMSNorm,
    ),
    _fault(
        "gate_in_bfloat16",
        "an activation stored narrow between two products",
        marked(lambda value, self, x: rounded(value), "gate"),
        stage="layers.0.gate",
        owner=MegalodonAttention,
    ),
)
