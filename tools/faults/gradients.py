"""Planted bugs of gradients; the forward pass stays correct."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp

from megalodon_jax.layers import complex_ema, timestep_norm
from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.norms import RMSNorm
from megalodon_jax.model import MegalodonForCausalLM, MegalodonModel
from parity.engine.measure.quantity import Quantity
from parity.faults.fault import Family, around, fault, on_copy, on_result

_gradient = partial(fault, Family.GRADIENTS)


@around
def _pad_row_learns(call, self, ids):
    with patch.object(jax.lax, "stop_gradient", lambda x: x):
        return call(self, ids)


def _detached_head(head):
    return property(lambda self: jax.lax.stop_gradient(head.fget(self)))


def _detached_statistics(result, *args):
    mean, var, count = result
    return jax.lax.stop_gradient(mean), jax.lax.stop_gradient(var), count


@around
def _detached_scale(call, self, x):
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
    y = x * jax.lax.stop_gradient(scale)
    return y if self.gamma is None else y * (self.gamma + 1.0).astype(y.dtype)


def _convolved_backwards(convolve):
    """Return a causal convolution whose gradient of the input convolves where it must correlate.

    In the frequency domain, a complex conjugate is missing.
    """

    @jax.custom_vjp
    def faulty(x, kernel):
        return convolve(x, kernel)

    def forward(x, kernel):
        return convolve(x, kernel), (x, kernel)

    def backward(saved, y_bar):
        _, pull_back = jax.vjp(convolve, *saved)
        return convolve(y_bar, saved[1]), pull_back(y_bar)[1]

    faulty.defvjp(forward, backward)
    return faulty


FAULTS = (
    _gradient(
        "pad_row_learns",
        "padding_idx not carried over: the row gets a gradient from the text",
        _pad_row_learns,
        stage=Quantity.gradient("model.embed.weight"),
        owner=MegalodonModel,
        attribute="_embedded",
        witness="pad_inside",
    ),
    _gradient(
        "tied_head_detached",
        "a tied head copied instead of shared: the embedding learns from its input side only",
        _detached_head,
        stage=Quantity.gradient("model.embed.weight"),
        owner=MegalodonForCausalLM,
        attribute="head",
    ),
    _gradient(
        "theta_frozen",
        "a parameter registered as a buffer",
        on_copy(theta=lambda self: jax.lax.stop_gradient(self.theta)),
        stage=Quantity.gradient("model.layers.0.attn.cema.theta"),
        owner=ComplexEMA,
        attribute="_powers",
    ),
    _gradient(
        "query_key_gain_frozen",
        "gamma created outside of the parameter tree",
        on_copy(gamma=lambda self: jax.lax.stop_gradient(self.gamma)),
        stage=Quantity.gradient("model.layers.0.attn.gamma"),
        owner=MegalodonAttention,
        attribute="queries_keys",
    ),
    _gradient(
        "timenorm_statistics_detached",
        "running statistics kept out of the gradient, as BatchNorm's buffers are",
        on_result(_detached_statistics),
        stage=Quantity.cotangent("layers.1.ffn"),
        owner=timestep_norm,
        attribute="_running",
    ),
    _gradient(
        "rmsnorm_scale_detached",
        "the root mean square taken for a constant",
        _detached_scale,
        stage=Quantity.cotangent("layers.1.rmsnorm"),
        owner=RMSNorm,
    ),
    _gradient(
        "cema_backward_not_conjugated",
        "a hand-written gradient convolves where it must correlate",
        _convolved_backwards,
        stage=Quantity.cotangent("layers.1.timenorm"),
        owner=complex_ema,
        attribute="causal_convolution",
    ),
)
