"""Planted bugs of RMSNorm, LayerNorm and the norm of the shared query/key projection."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.layers.norms import LayerNorm, RMSNorm
from parity.faults.fault import Family, around, fault, on_copy, on_result, shifted_gain, zeroed

_fault = partial(fault, Family.NORMS)


@around
def _rms_eps_outside(call, self, x):
    y = x / (jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True)) + self.eps)
    return y if self.gamma is None else y * (self.gamma + 1.0).astype(y.dtype)


@around
def _centred_first(call, self, x):
    return call(self, x - jnp.mean(x, axis=-1, keepdims=True))


def _layer_norm_unbiased(y, self, x):
    n = x.shape[-1]
    if self.weight is None:
        return y * ((n - 1) / n) ** 0.5
    bias = self.bias.astype(y.dtype)
    return (y - bias) * ((n - 1) / n) ** 0.5 + bias


@around
def _normalised_over_all_heads(call, self, m):
    z = self.wz(m)
    z = z * jax.lax.rsqrt(jnp.mean(jnp.square(z), axis=-1, keepdims=True) + self.config.norm_eps)
    d = self.config.head_dim
    scale = ((self.gamma + 1.0) / d**0.5).astype(z.dtype)
    heads = (*m.shape[:2], self.config.num_heads, d)
    rows = (z * scale[i] + self.beta[i].astype(z.dtype) for i in range(2))
    return tuple(row.reshape(heads) for row in rows)


_TIME, _RMS, _FFN = "layers.0.timenorm", "layers.0.rmsnorm", "layers.0.ffn"

_rms = partial(_fault, stage=_RMS, owner=RMSNorm)
_layer_norm = partial(_fault, stage=_FFN, owner=LayerNorm)

FAULTS = (
    _rms("rmsnorm_plus_one_dropped", "gain used as it is stored", shifted_gain("gamma", -1.0)),
    _rms(
        "rmsnorm_plus_one_doubled",
        "1 added when loading and when applying",
        shifted_gain("gamma", 1.0),
    ),
    _rms(
        "rmsnorm_wrong_eps",
        "1e-6, the default of the class, not the configuration's",
        on_copy(eps=lambda self: 1e-6),
    ),
    _rms("rmsnorm_eps_outside_sqrt", "x / (rms + eps)", _rms_eps_outside),
    _rms("rmsnorm_centres", "the mean is subtracted, as LayerNorm does", _centred_first),
    _layer_norm(
        "layer_norm_plus_one", "gain taken for one that starts at 0", shifted_gain("weight", 1.0)
    ),
    _layer_norm("layer_norm_unbiased_variance", "var(ddof=1)", on_result(_layer_norm_unbiased)),
    _layer_norm("layer_norm_bias_dropped", "bias=False", zeroed("bias")),
    _fault(
        "qk_normalised_over_all_heads",
        "one norm over Z instead of one per head",
        _normalised_over_all_heads,
        stage="layers.0.q",
        owner=MegalodonAttention,
        attribute="queries_keys",
    ),
)
