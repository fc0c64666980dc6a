"""Probe of latent attention (MLA): logits, QK-clip, low-rank products, absorbed against expanded.

QK-clip scales queries and keys down if logits exceed tau. Absorbed attention folds the key and
value projections into queries and outputs, and equals the expanded one up to rounding.

Source: QK-clip, Kimi K2 report (arXiv 2507.20534), section 2.1; docs/mla-moe.md "The
stability guide".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from parity.deepseek_v3.attention import Attention
from parity.engine.measure.metrics import relative_l2
from parity.tolerances import ABSORBED
from stability.core.findings import Finding, Severity, judge
from stability.moe.observe import Observed, largest_scores, positions_of

PROBE = "latent attention"
TAU = 100.0
"""Attention logit above which QK-clip scales queries and keys down; Kimi K2's threshold."""
LEAST_RANK = 0.25
"""Smallest effective rank of a low-rank product without a warning, as a fraction of its full rank.
Below it the product counts as collapsed. Effective rank is the exponential of the entropy of the
singular values divided by their sum."""
MOST_GAIN = 1.5
"""Largest amplification by the expanding matrix of a low-rank product without a warning, relative
to a random matrix. Amplification is the largest singular value divided by the root mean square of
all singular values; a random matrix has `1 + sqrt(rank / outputs)` (Marchenko-Pastur). Above the
limit one direction dominates."""
OWN = "this project's threshold, stability/moe/attention_probe.py"
Clip = Callable[[Attention, Float[np.ndarray, " H"]], Attention]


def attention_findings(observed: Observed, tau: float = TAU) -> list[Finding]:
    """Return findings on each layer's largest logit, low-rank products and absorbed attention.

    Args:
        observed: a forward pass.
        tau: see `TAU`.
    """
    findings = []
    for i, block in enumerate(observed.model.model.layers):
        name, x = f"layers.{i}.self_attn", observed.intermediates[f"layers.{i}.attn_norm"]
        largest = np.asarray(largest_scores(block.self_attn, x))
        findings += [
            score_finding(name, largest, tau),
            *rank_findings(name, block.self_attn),
            absorbed_finding(name, block.self_attn, x),
        ]
    return findings


def score_finding(name: str, largest: Float[np.ndarray, " H"], tau: float = TAU) -> Finding:
    """Return the finding on a layer's largest logit, with the scaling that QK-clip would apply."""
    factors = clip_factors(largest, tau)
    heads = int(np.sum(factors < 1))
    worst = float(factors.min(initial=1.0))
    message = (
        f"largest attention logit {np.max(largest):.3g} (head {int(np.argmax(largest))}); QK-clip "
        f"scales {heads} of {largest.size} heads, by {worst:.3g} at least"
    )
    source, remedy = "QK-clip's tau (Kimi K2)", "apply qk_clip after the optimiser step"
    most = float(np.max(largest))
    return judge(PROBE, name, "largest_logit", most, tau, source, message, remedy)


def clip_factors(largest: Float[np.ndarray, " H"], tau: float = TAU) -> Float[np.ndarray, " H"]:
    """Return QK-clip's factor on each head's logits, tau / max(S, tau), float64 (H,).

    Args:
        largest: largest logit S of each head.
        tau: logit to which larger ones are reduced.
    """
    return tau / np.maximum(np.asarray(largest, np.float64), tau)


def qk_clip(attention: Attention, factors: Float[np.ndarray, " H"]) -> Attention:
    """Return attention with weights scaled so that each head's logits are multiplied by its factor.

    The non-rotary parts of queries and keys are each multiplied by the factor's square root. The
    rotary key is shared by all heads, so the rotary queries take the whole factor and the rotary
    key is unchanged.
    """
    c = attention.config
    factor = jnp.asarray(factors, jnp.float32)[:, None]
    plain, whole = (
        jnp.repeat(f, n, 1)
        for f, n in ((jnp.sqrt(factor), c.qk_nope_head_dim), (factor, c.qk_rope_head_dim))
    )
    queries = jnp.concatenate([plain, whole], 1)
    values = jnp.ones((c.num_attention_heads, c.v_head_dim), jnp.float32)
    keys = jnp.concatenate([plain, values], 1)

    def scaled(weight: Array, rows: Array) -> Array:
        return (weight.astype(jnp.float32) * rows.reshape(-1, 1)).astype(weight.dtype)

    # `eqx.tree_at` calls this function with trees whose leaves are not arrays.
    def weights(a: Attention) -> tuple[Any, Any]:
        last = a.q_b_proj if a.q_proj is None else a.q_proj
        assert last is not None
        return last.weight, a.kv_b_proj.weight

    queried, keyed = weights(attention)
    return eqx.tree_at(weights, attention, (scaled(queried, queries), scaled(keyed, keys)))


def clip_findings(
    name: str, attention: Attention, x: Float[Array, "B L D"], tau: float, clip: Clip = qk_clip
) -> list[Finding]:
    """Return a finding on whether clipping turns each head's largest logit S into min(S, tau).

    Args:
        name: name of the layer.
        attention: attention of the layer.
        x: normalised input of the attention.
        tau: limit of the logits for the clipping.
        clip: the clipping function to test.
    """
    before = np.asarray(largest_scores(attention, x), np.float64)
    after = np.asarray(largest_scores(clip(attention, clip_factors(before, tau)), x), np.float64)
    target = np.minimum(before, tau)
    off = float(np.max(np.abs(after - target) / np.abs(target)))
    return [
        judge(
            PROBE,
            name,
            "clip_error",
            off,
            ABSORBED["float32"],
            "a head's largest logit after QK-clip is min(S, tau)",
            f"after QK-clip at tau {tau:.3g} a head's largest logit is off by {off:.2g}",
            "scale the rotary queries by the whole factor; the rotary key belongs to all heads",
            severity=Severity.ERROR,
        )
    ]


def rank_findings(name: str, attention: Attention) -> list[Finding]:
    """Return findings on effective rank and amplification of a layer's low-rank products.

    The product "kv" always exists, "q" only if queries are low-rank too. Effective rank is defined
    at `LEAST_RANK`, amplification at `MOST_GAIN`.
    """
    latent = attention.config.kv_lora_rank
    down = attention.kv_a_proj_with_mqa.weight[:latent]
    pairs = [("kv", down, attention.kv_a_layernorm.weight, attention.kv_b_proj.weight)]
    if attention.q_a_proj and attention.q_a_layernorm and attention.q_b_proj:
        q = (attention.q_a_proj.weight, attention.q_a_layernorm.weight, attention.q_b_proj.weight)
        pairs.append(("q", *q))
    return [f for which, *parts in pairs for f in _product(f"{name}.{which}", *parts)]


def _product(name: str, down: Array, norm: Array, up: Array) -> list[Finding]:
    a, g, b = (np.asarray(x, np.float64) for x in (down, norm, up))
    scaled = b * g
    # The SVD is taken of the product of two small QR factors, since the product itself may have
    # thousands of rows.
    values = np.linalg.svd(np.linalg.qr(scaled).R @ np.linalg.qr(a.T).R.T, compute_uv=False)
    values = values[: len(a)]
    share = values / values.sum()
    # Exponential of the entropy of the singular values; 0 log 0 is 0.
    rank = float(np.exp(-np.sum(share * np.log(np.maximum(share, 1e-300)))) / len(a))
    expand = np.linalg.svd(scaled, compute_uv=False)
    peak = float(expand[0] / math.sqrt(np.mean(expand**2)))
    random_peak = 1.0 + math.sqrt(len(a) / len(b))
    size = f"effective rank {rank * len(a):.1f} of {len(a)}; largest singular value {values[0]:.3g}"
    raise_rank = "lower the learning rate of the low-rank matrices, or raise the rank"
    gain = (
        f"one direction of the latent is amplified {peak:.2f} times the root mean square; "
        f"in a random matrix {random_peak:.2f} times"
    )
    widen = "store the low-rank matrices in bfloat16 or float32, not in float8"
    return [
        judge(PROBE, name, "effective_rank", rank, LEAST_RANK, OWN, size, raise_rank, least=True),
        judge(PROBE, name, "amplification", peak / random_peak, MOST_GAIN, OWN, gain, widen),
    ]


def absorbed_finding(name: str, attention: Attention, x: Float[Array, "B L D"]) -> Finding:
    """Return a finding on absorbed attention (for decoding): its error against expanded attention.

    The error is the relative L2 error of the outputs.

    Args:
        name: name of the layer.
        attention: attention of the layer.
        x: normalised input of the attention.
    """
    expanded, absorbed = (np.asarray(_attended(attention, x, a), np.float64) for a in (False, True))
    off = relative_l2(absorbed, expanded)
    bound, source = ABSORBED.get(x.dtype.name, 0.0), "parity/tolerances.py"
    message = f"absorbed and expanded attention differ by {off:.2g} in {x.dtype.name}"
    remedy = "multiply queries by the key rows of kv_b_proj, and results by its value rows"
    error = Severity.ERROR
    return judge(PROBE, name, "absorbed_error", off, bound, source, message, remedy, severity=error)


@eqx.filter_jit
def _attended(attention: Attention, x: Array, absorbed: bool) -> Array:
    return attention(x, positions_of(x), absorbed=absorbed)[0]
