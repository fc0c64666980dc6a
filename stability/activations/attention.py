"""Attention logits and entropy: how large logits get, and over how many keys heads attend.

If logits grow until the softmax puts all weight on one key, training fails. In bfloat16 a logit of
magnitude x has a rounding error e of up to x * 2^-8 (2^-9 just below a power of two). The relative
error of its softmax weight is exp(e) - 1. Source: docs/formats.md "Activations and attention".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from megalodon_jax.layers.attention import MegalodonAttention
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.segments import document_positions
from parity.megalodon.intermediates import capture
from stability.activations.ranges import documents_of, token_ids
from stability.core.findings import Finding, Severity, judge
from stability.core.number_formats import by_name

WEIGHT_ERROR = 0.1
"""Largest relative error without a warning that rounding a logit causes in a softmax weight."""
FLAT, PEAKED = 0.98, 0.05
"""Relative entropy above which a head counts as attending to all keys equally, and below which it
counts as attending to a single key."""
SOURCE = "half a unit in the last place of the format at the largest logit, exponentiated"
ENTROPY_SOURCE = "entropy over that of equal weights on the visible keys; 0 is one key"


@dataclass(frozen=True, slots=True)
class Heads:
    """Statistics of one layer's attention over all valid queries: float32 arrays (H,), by head."""

    largest: np.ndarray
    """Largest |logit|, the input of the softmax, of any query and visible key."""
    entropy: np.ndarray
    """Mean entropy of a query's softmax weights, in nats; NaN if there are no valid queries."""
    relative: np.ndarray
    """Mean of the entropy divided by the logarithm of the number of visible keys, over queries that
    see at least two keys; NaN if there are no such queries."""


def measure_heads(
    model: MegalodonForCausalLM,
    ids: ArrayLike,
    mask: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> tuple[Heads, ...]:
    """Return statistics of attention logits and entropies by layer, for one batch without a cache.

    Logits are computed in float32 from the model's queries and keys.

    Args:
        model: the model.
        ids: token ids (B, L) int32, L at least 1.
        mask: (B, L) bool, True where a token is valid; None: all are valid.
        segment_ids: number of each token's document, integers (B, L), for packed rows; None: each
            row is one document.

    Raises:
        ValueError: `ids` are not integers (B, L), or empty, or `segment_ids` have another shape.
    """
    ids = token_ids(ids, "measure_heads")
    if not ids.size:
        raise ValueError(f"measure_heads: ids have shape {ids.shape}, expected at least one token.")
    valid = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask, bool)
    documents = documents_of(ids, segment_ids)
    layers = jax.device_get(_measure(model, ids, valid, documents))
    return tuple(Heads(*layer) for layer in layers)


def attention_findings(heads: tuple[Heads, ...]) -> list[Finding]:
    """Return three findings per layer and head.

    They judge the error of rounding logits to bfloat16, the same for float16, and the entropy.
    """
    findings = []
    for layer, found in enumerate(heads):
        rows = zip(found.largest, found.entropy, found.relative, strict=True)
        for head, numbers in enumerate(rows):
            subject = f"layers.{layer}.attn head {head}"
            largest, entropy, relative = map(float, numbers)
            findings += [_logit(subject, largest, fmt) for fmt in ("bfloat16", "float16")]
            findings.append(_entropy(subject, entropy, relative))
    return findings


def weight_error(logit: float, fmt: str) -> float:
    """Return the largest relative error of exp(logit) if the logit is rounded to format `fmt`.

    Infinite if the logit is not finite or exceeds the format's range.

    Args:
        logit: largest magnitude of the logits.
        fmt: name of the format, such as "bfloat16".
    """
    storage = by_name(fmt)
    if not np.isfinite(logit) or logit > storage.max:
        return float("inf")
    _, exponent = np.frexp(max(abs(logit), storage.min_normal))
    half = np.ldexp(0.5, int(exponent) - 1 - storage.mantissa_bits)
    return float(np.expm1(half))


def _logit(subject: str, logit: float, fmt: str) -> Finding:
    error = weight_error(logit, fmt)
    severity = Severity.ERROR if np.isinf(error) else Severity.WARNING
    severity = Severity.NOTE if fmt == "float16" else severity
    message = f"largest |logit| {logit:.4g}; in {fmt} a softmax weight is off by up to {error:.2%}"
    remedy = (
        "take softmax in float32; a smaller learning rate for the q/k gains and weight decay on "
        "them keep logits down"
    )
    probe, metric = "attention_logit", f"weight_error_{fmt}"
    return judge(
        probe, subject, metric, error, WEIGHT_ERROR, SOURCE, message, remedy, severity=severity
    )


def _entropy(subject: str, entropy: float, relative: float) -> Finding:
    severity, why, remedy = Severity.OK, "", ""
    if np.isnan(relative):
        severity = Severity.NOTE if np.isfinite(entropy) else Severity.ERROR
        why = ": no query sees two keys" if np.isfinite(entropy) else ": it is not a number"
    elif relative < PEAKED:
        severity, why = Severity.WARNING, ": it attends to a single key"
        remedy = "lower the learning rate of the q/k gains, or clip logits"
    elif relative > FLAT:
        severity, why = Severity.NOTE, ": it attends to all keys alike"
    message = f"entropy {entropy:.3g} nats, {relative:.0%} of the largest possible{why}"
    probe, metric, source = "attention_entropy", "relative_entropy", ENTROPY_SOURCE
    return Finding(probe, severity, subject, metric, relative, PEAKED, source, message, remedy)


@eqx.filter_jit
def _measure(
    model: MegalodonForCausalLM, ids: Array, valid: Array, documents: Array | None
) -> tuple[Any, ...]:
    params, static = eqx.partition(model, eqx.is_array)

    def logits(params: Any, ids: Array, mask: Array) -> Array:
        return eqx.combine(params, static)(ids, mask, segment_ids=documents)[0]

    _, intermediates = capture(logits)(params, ids, valid)
    positions = document_positions(documents, ids.shape, "ids")

    def heads(i: int, layer: Any) -> tuple[Array, ...]:
        q, k = (intermediates[f"layers.{i}.{name}"] for name in "qk")
        return _heads(layer.attn, q, k, valid, positions)

    return tuple(heads(i, layer) for i, layer in enumerate(model.model.layers))


def _heads(
    attn: MegalodonAttention, q: Array, k: Array, valid: Array, positions: Array | None
) -> tuple[Array, ...]:
    C, L = attn.config.chunk_size, q.shape[1]
    turned = () if positions is None else (positions,)
    q, k = attn.inner.rope(q.astype(jnp.float32), k.astype(jnp.float32), *turned)
    at = jnp.arange(L, dtype=jnp.int32)[None] if positions is None else positions
    offsets = jnp.broadcast_to(at % C, valid.shape)

    def chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -L % C), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], -1, C, *x.shape[2:])

    queries, keys = tuple(map(chunks, (q, valid, offsets))), tuple(map(chunks, (k, valid)))
    if positions is not None:
        # Chunks count from the start of a document, so one may begin in the row's previous chunk.
        keys = tuple(jnp.concatenate([_chunk_before(x), x], axis=2) for x in keys)
    # One chunk at a time, so that the scores of only one chunk are in memory.
    flat = (x.reshape(-1, *x.shape[2:]) for x in (*queries, *keys))
    largest, *parts = jax.lax.map(_chunk, tuple(flat))
    entropies, queries, shares, several = (jnp.sum(part, 0) for part in parts)
    return jnp.max(largest, 0), entropies / queries, shares / several


def _chunk_before(x: Array) -> Array:
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def _chunk(parts: tuple[Array, ...]) -> tuple[Float[Array, " H"], ...]:
    """Return statistics of one chunk, each (H,).

    They are the largest |logit|, the sum of entropies, the number of queries, the sum of relative
    entropies, and the number of queries with at least two keys.

    Args:
        parts: queries (C, H, dim), whether each is valid (C,), its position in its chunk (C,), keys
            (K, H, dim), and whether each is valid (K,). K is C, or 2 C with the chunk before.
    """
    q, valid, offsets, k, there = parts
    C, K = q.shape[0], k.shape[0]
    distance = jnp.arange(K - C, K, dtype=jnp.int32)[:, None] - jnp.arange(K, dtype=jnp.int32)
    seen = (distance >= 0) & (distance <= offsets[:, None]) & there[None, :] & valid[:, None]
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision=jax.lax.Precision.HIGHEST)
    visible = jnp.broadcast_to(seen, scores.shape)
    largest = jnp.max(jnp.where(visible, jnp.abs(scores), 0.0), axis=(1, 2))
    # A query without visible keys gets logits of 0, since a row of -inf would give NaN. It does not
    # count in the sums.
    safe = jnp.where(visible.any(-1, keepdims=True), jnp.where(visible, scores, -jnp.inf), 0.0)
    log_weights = jax.nn.log_softmax(safe, axis=-1)
    terms = jnp.where(visible, jnp.exp(log_weights) * log_weights, 0.0)
    entropy = -jnp.sum(terms, axis=-1)
    keys = jnp.sum(seen, axis=-1, dtype=jnp.float32)
    several = keys >= 2
    share = jnp.where(several, entropy / jnp.log(jnp.maximum(keys, 2.0)), 0.0)
    ones = jnp.ones(q.shape[1], jnp.float32)
    return (
        largest,
        jnp.sum(jnp.where(valid, entropy, 0.0), axis=-1),
        ones * jnp.sum(valid, dtype=jnp.float32),
        jnp.sum(share, axis=-1),
        ones * jnp.sum(several, dtype=jnp.float32),
    )
