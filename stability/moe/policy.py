"""Storage policies of MLA + MoE: the dtype in which each parameter is stored.

Source: docs/mla-moe.md "The stability guide"; DeepSeek-V3 report (arXiv 2412.19437), section 3.3.1
(embedding, head, gating, norms and attention stay wide).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.quantization.formats import nearest
from megalodon_jax.weights import named_leaves, replace_leaves
from parity.deepseek_v3.model import MLAMoEForCausalLM
from stability.core.dtype_rules import Policy
from stability.core.findings import Finding, judge
from stability.core.number_formats import E4M3

_ALWAYS_WIDE = (
    ("*norm.weight", "float32"),
    ("*.gate.weight", "float32"),
    ("*.e_score_correction_bias", "float32"),
    ("*embed_tokens.weight", "bfloat16"),
    ("lm_head.weight", "bfloat16"),
)
BFLOAT16 = Policy("bfloat16", (*_ALWAYS_WIDE, ("*", "bfloat16")))
FP8 = Policy(
    "float8, MLA kept wide", (*_ALWAYS_WIDE, ("*.self_attn.*", "bfloat16"), ("*", "float8_e4m3fn"))
)
"""Policy that the stability guide recommends."""
FP8_MLA = Policy("float8, MLA too", (*_ALWAYS_WIDE, ("*", "float8_e4m3fn")))
"""Policy of the guide's option `--fp8_mla_params`, which it advises only with caution."""
MOST_LOST = 0.05
"""Largest relative root mean square error of a stored leaf without a warning. With its 3 mantissa
bits, e4m3 reaches 2.6 % at best, for values in its normal range, which begins at 2^-6."""


def policy_findings(model: MLAMoEForCausalLM, policy: Policy) -> list[Finding]:
    """Return a finding on the storage error of every leaf that the policy stores in e4m3.

    The storage error is the relative L2 error. The error without a scale decides the severity; the
    message also has the error with one power-of-two scale for the whole leaf.
    """
    findings = []
    for name, leaf in named_leaves(model).items():
        if policy.dtype(name) != E4M3.dtype:
            continue
        values = np.asarray(leaf, np.float32)
        # The lower bound of 1e-30 avoids a division by zero for a leaf of zeros.
        scale = 2.0 ** np.floor(np.log2(E4M3.max / max(float(np.abs(values).max()), 1e-30)))
        off, scaled = (_error(values, s) for s in (1.0, scale))
        source = "3 bits of mantissa; below 2^-6 fewer (e4m3)"
        message = (
            f"stored in {E4M3.name} it is off by {off:.1%}; multiplied by 2^{np.log2(scale):.0f} "
            f"before it is stored, by {scaled:.1%}"
        )
        remedy = "store it with a power-of-two scale"
        findings.append(
            judge("fp8 storage", name, "relative_rms", off, MOST_LOST, source, message, remedy)
        )
    return findings


def emulated(model: MLAMoEForCausalLM, policy: Policy) -> MLAMoEForCausalLM:
    """Return a float32 model whose parameters are rounded to a policy's dtypes.

    A float8 leaf is rounded with a power-of-two scale, one per expert. Gradients pass through the
    rounding unchanged, in float32; float8 gradients would lose most of their values.
    """
    leaves = named_leaves(model)
    return replace_leaves(model, {n: _stored(x, policy.dtype(n)) for n, x in leaves.items()})


def _stored(x: jax.Array, dtype: np.dtype) -> jax.Array:
    if dtype.itemsize >= x.dtype.itemsize:
        return x
    if dtype.itemsize > 1:
        rounded = nearest(x, dtype)
    else:
        # Matrices are the last two axes; leading axes number experts.
        amax = jnp.max(jnp.abs(x), axis=(-2, -1)[-x.ndim :], keepdims=True)
        room = jnp.log2(float(jnp.finfo(dtype).max) / jnp.maximum(amax, 1e-30))
        # ldexp instead of exp2, so that the scale is an exact power of two.
        scale = jnp.ldexp(jnp.float32(1.0), jnp.floor(room).astype(jnp.int32))
        rounded = nearest(x * scale, dtype) / scale
    return x + jax.lax.stop_gradient(rounded - x)


def _error(values: np.ndarray, scale: float) -> float:
    stored = E4M3.round(values * scale) / scale
    size = float(np.sqrt(np.mean(np.square(values))))
    return float(np.sqrt(np.mean(np.square(stored - values)))) / size if size else 0.0
