"""Bugs of RMSNorm, LayerNorm and the normalisation of the shared query/key."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.norms import LayerNorm, RMSNorm
from parity.faults.fault import (
    Family,
    affine,
    of_calls,
    on_copy,
    on_result,
    shifted_gain,
    zeroed,
)

_fault = of_calls(Family.NORMS)


def _rms_eps_outside(call):
    def faulty(self, x):
        y = x / (jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True)) + self.eps)
        return y if self.gamma is None else y * (self.gamma + 1.0).astype(y.dtype)

    return faulty


def _centred_first(call):
    def faulty(self, x):
        return call(self, x - jnp.mean(x, axis=-1, keepdims=True))

    return faulty


def _layer_norm_unbiased(y, self, x):
    n = x.shape[-1]
    if self.weight is None:
        return y * ((n - 1) / n) ** 0.5
    bias = self.bias.astype(y.dtype)
    return (y - bias) * ((n - 1) / n) ** 0.5 + bias


def _normalised_over_all_heads(call):
    def faulty(self, m):
        z = self.wz(m)
        z = z * jax.lax.rsqrt(
            jnp.mean(jnp.square(z), axis=-1, keepdims=True) + self.config.norm_eps
        )
        d = self.config.head_dim
        scale = ((self.gamma + 1.0) / d**0.5).astype(z.dtype)
        heads = (*m.shape[:2], self.config.num_heads, d)
        rows = (z * scale[i] + self.beta[i].astype(z.dtype) for i in range(2))
        return tuple(row.reshape(heads) for row in rows)

    return faulty


_TIME, _RMS, _FFN = "layers.0.timenorm", "layers.0.rmsnorm", "layers.0.ffn"


FAULTS = (
    _fault(
        "rmsnorm_plus_one_dropped",
        "gain used as it is stored",
        _RMS,
        RMSNorm,
        shifted_gain("gamma", -1.0),
        shows=affine,
    ),
    _fault(
        "rmsnorm_plus_one_doubled",
        "1 added when loading and when applying",
        _RMS,
        RMSNorm,
        shifted_gain("gamma", 1.0),
        shows=affine,
    ),
    _fault(
        "rmsnorm_wrong_eps",
        "1e-6, the default of the class, not the configuration's",
        _RMS,
        RMSNorm,
        on_copy(eps=lambda self: 1e-6),
    ),
    _fault("rmsnorm_eps_outside_sqrt", "x / (rms + eps)", _RMS, RMSNorm, _rms_eps_outside),
    _fault(
        "rmsnorm_centres",
        "the mean is subtracted, as LayerNorm does",
        _RMS,
        RMSNorm,
        _centred_first,
    ),
    _fault(
        "layer_norm_plus_one",
        "gain taken for one that starts at 0",
        _FFN,
        LayerNorm,
        shifted_gain("weight", 1.0),
        shows=affine,
    ),
    _fault(
        "layer_norm_unbiased_variance",
        "var(ddof=1)",
        _FFN,
        LayerNorm,
        on_result(_layer_norm_unbiased),
    ),
    _fault("layer_norm_bias_dropped", "bias=False", _FFN, LayerNorm, zeroed("bias"), shows=affine),
    _fault(
        "qk_normalised_over_all_heads",
        "one norm over Z instead of one per head",
        "layers.0.q",
        MegalodonAttention,
        _normalised_over_all_heads,
        attribute="queries_keys",
    ),
)
