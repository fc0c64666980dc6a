"""Distances between arrays, computed in float64; NaN always propagates.

Source: docs/parity.md "Metrics".
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

# The relative error of an element that should be 0 is meaningless.
SMALL = 1e-3
"""Threshold of small elements in `max_rel`, as a fraction of the array's root mean square. The
error of an element below the threshold is relative to the threshold."""
TOP_K = 10
"""Number of most likely tokens that are compared as a set."""
IGNORED = -100
"""Label of a position without a correct token."""
POOLED = "rel_l2_pooled"
"""Metric: geometric mean of a quantity's relative L2 error over random draws of weights and inputs.
The root mean square would be dominated by the worst draw: the logarithm of the root mean square has
a standard deviation of 0.27, the logarithm of the geometric mean one of 0.1."""


def relative_l2(actual: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Return `|a - e| / scale`; NaN if either array holds a non-finite value.

    Args:
        actual: array `a`.
        expected: array `e` of the same shape.
        scale: norm that the error is relative to. None selects `|e|`, or 1 if `e` is 0 everywhere:
            the error is then absolute, and no relative bound applies.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return math.nan
    difference = float(np.linalg.norm(a - e))
    scale = float(np.linalg.norm(e)) if scale is None else scale
    return difference / scale if scale > 0.0 else difference


def without_shared_infinities(
    a: np.ndarray, e: np.ndarray, truth: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays with 0 where both hold the same infinity, such as masked scores.

    Use it for arrays that may contain masks; in others an infinity is an overflow. Arrays of
    different shapes are returned unchanged.

    Args:
        a: one side.
        e: the other side.
        truth: float64 values: an infinity counts as a mask only if `truth` has it too. None: `e`.
    """
    truth = e if truth is None else truth
    if not a.shape == e.shape == truth.shape:
        return a, e
    same = np.isinf(e) & (a == e) & (truth == e)
    if not same.any():
        return a, e
    return np.where(same, 0, a), np.where(same, 0, e)


def tensor_metrics(a: np.ndarray, e: np.ndarray, dtype: str) -> dict[str, float]:
    """Return element-wise metrics of a difference.

    Args:
        a: the array, finite float64.
        e: the truth, finite float64, of the same shape.
        dtype: dtype of the computation, which defines a unit in the last place (ULP).

    Returns:
        By name: max_abs; max_rel, where the error of an element of `e` below `SMALL` times the root
        mean square of `e` is relative to that threshold; ulp_p50, ulp_p99 and ulp_max, median, 99th
        percentile and maximum error in ULPs of `dtype` at the truth; cosine of the angle between
        both. Empty arrays have no ULP metrics.
    """
    if not a.size:
        return {"max_abs": 0.0, "max_rel": 0.0, "cosine": math.nan}
    apart = np.abs(a - e)
    floor = np.maximum(np.abs(e), SMALL * np.sqrt(np.mean(np.square(e))))
    ulps = apart / ulp(e, dtype)
    middle, high = np.percentile(ulps, (50, 99))
    return {
        "max_abs": float(np.max(apart)),
        "max_rel": float(np.max(np.divide(apart, floor, out=np.zeros_like(e), where=floor > 0))),
        "ulp_p50": float(middle),
        "ulp_p99": float(high),
        "ulp_max": float(np.max(ulps)),
        "cosine": cosine(a, e),
    }


def ulp(x: np.ndarray, dtype: str) -> np.ndarray | np.floating:
    """Return the unit in the last place of a dtype at x: the gap to the next larger magnitude.

    At 0 the result is the unit of numbers in [0.5, 1): an error there is measured as an absolute
    error.
    """
    info = ml_dtypes.finfo(dtype)
    # frexp(0) has exponent 0. The true gap at 0 is the smallest subnormal number, in units of which
    # the rounding of a sum that cancels to 0 would be about 1e37.
    _, exponent = np.frexp(np.abs(x))
    return np.ldexp(1.0, np.maximum(exponent - 1, int(info.minexp)) - int(info.nmant))


def cosine(a: np.ndarray, e: np.ndarray) -> float:
    """Return the cosine of the angle between the flattened arrays; NaN if one of them is zero."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(e))
    return float(np.vdot(a, e)) / scale if scale > 0 else math.nan


def logit_metrics(a: np.ndarray, e: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return metrics of the predictions that logits make.

    Args:
        a: logits (..., V).
        e: true logits, the same shape.
        labels: correct token ids (...); `IGNORED` excludes a token from nll_difference alone.

    Returns:
        By name: kl_p50, kl_p99 and kl_max, percentiles and maximum of KL(e || a) per token, in
        nats; top1_agreement, fraction of tokens with the same argmax; topk_jaccard, mean overlap of
        the `TOP_K` most likely tokens (intersection over union); nll_difference, mean negative
        log-likelihood of `labels` under `a` minus that under `e`, in nats.
    """
    a, e = a.reshape(-1, a.shape[-1]), e.reshape(-1, e.shape[-1])
    log_a, log_e = log_softmax(a), log_softmax(e)
    kl = np.sum(np.exp(log_e) * (log_e - log_a), axis=-1)
    middle, high = np.percentile(kl, (50, 99))
    flat = labels.reshape(-1)
    rows = np.nonzero(flat != IGNORED)[0]
    nll = (log_e - log_a)[rows, flat[rows]]
    return {
        "kl_p50": float(middle),
        "kl_p99": float(high),
        "kl_max": float(np.max(kl)),
        "top1_agreement": float(np.mean(a.argmax(-1) == e.argmax(-1))),
        "topk_jaccard": _topk_jaccard(a, e),
        "nll_difference": float(np.mean(nll)) if len(rows) else 0.0,
    }


def top1_flips(a: np.ndarray, e: np.ndarray, bound: float) -> float:
    """Count positions whose argmax differs although an error within `bound` cannot explain it.

    If the logits of a position are within the relative L2 `bound` of the truth, its two best tokens
    can swap only if they differ by at most `sqrt(2) bound |e|` (the worst error is split equally
    between them). A swap across a larger margin means that the position is outside the bound, even
    if the tensor as a whole is within it.

    Args:
        a: logits (..., V).
        e: true logits, the same shape.
        bound: largest relative L2 error that passes.
    """
    a, e = a.reshape(-1, a.shape[-1]), e.reshape(-1, e.shape[-1])
    if a.shape[-1] < 2:
        return 0.0
    ranked = np.sort(e, axis=-1)
    clear = ranked[:, -1] - ranked[:, -2] > math.sqrt(2) * bound * np.linalg.norm(e, axis=-1)
    return float(np.sum((a.argmax(-1) != e.argmax(-1)) & clear))


def disagreement(a: np.ndarray, e: np.ndarray) -> float:
    """Return the number of tokens from the first difference of two generated batches to their end.

    The row with the earliest difference counts; 0 if all rows are equal.

    Args:
        a: token ids (B, T).
        e: token ids, the same shape.
    """
    same = np.cumprod(a == e, axis=-1).sum(axis=-1)
    return float(a.shape[-1] - same.min(initial=a.shape[-1]))


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Return the log-softmax over the last axis in the dtype of `x`."""
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def _topk_jaccard(a: np.ndarray, e: np.ndarray) -> float:
    k = min(TOP_K, a.shape[-1])
    chosen = np.zeros((2, *a.shape), bool)
    for side, x in zip(chosen, (a, e), strict=True):
        np.put_along_axis(side, np.argpartition(-x, k - 1, axis=-1)[:, :k], True, axis=-1)
    shared = np.sum(chosen[0] & chosen[1], axis=-1)
    return float(np.mean(shared / (2 * k - shared)))
