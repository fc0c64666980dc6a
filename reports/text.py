"""Formatting of numbers, names and edges (comparisons), for the page and the terminal alike.

Source: docs/reports.md "The page".
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reports.printable import printable

_SIDES = {
    "jax64": "JAX float64",
    "jax32": "JAX float32",
    "jaxtf32": "JAX with TF32 products",
    "jaxbf16": "JAX bfloat16",
    "reference32": "reference float32",
    "autocast": "reference autocast to bfloat16",
    "referencebf16": "reference cast to bfloat16",
    "oracle": "oracle",
    "recorded32": "recording",
    "live32": "live reference",
    "products32": "JAX low-precision products",
    "float64": "float64 on their operands",
    "port32": "port float32",
    "port64": "port float64",
    "original32": "original float32",
    "original64": "original float64",
    "portbf16": "port bfloat16",
    "originalbf16": "original bfloat16",
    "mesh64": "mesh float64",
    "one64": "one device",
    "mesh32": "mesh float32",
    "one32": "one device",
}
_QUESTIONS = {
    "jax64:oracle": "Same mathematics?",
    "jax32:oracle": "How accurate is JAX?",
    "reference32:oracle": "Do we understand the reference?",
    "jax32:reference32": "Can a checkpoint move?",
    "recorded32:live32": "Are the recordings still true?",
    "jaxtf32:oracle": "Does JAX lose more than TF32 rounds?",
    "jaxbf16:oracle": "Is bfloat16 in JAX as accurate as autocast?",
    "products32:float64": "Are only the operands narrow?",
    "port64:original64": "Same mathematics, in a port?",
    "port32:port64": "How accurate is the port?",
    "original32:port64": "Do we understand the original?",
    "original32:original64": "How accurate is the original?",
    "port32:original64": "How accurate is the port, by the original's float64?",
    "port32:original32": "Can a checkpoint of the original move?",
    "portbf16:port64": "How accurate is the port in bfloat16?",
    "originalbf16:original64": "How accurate is the original in bfloat16?",
    "mesh64:one64": "Same mathematics on many devices?",
    "mesh32:one32": "Does only the order of sums differ on a mesh?",
}
_METRICS = {
    "rel_l2": "relative L2",
    "rel_l2_pooled": "relative L2 over draws",
    "max_abs": "max abs",
    "cosine": "cosine",
    "kl_p50": "KL p50",
    "kl_p99": "KL p99",
    "kl_max": "KL max",
    "max_rel": "max relative",
    "ulp_p50": "ULP p50",
    "ulp_p99": "ULP p99",
    "ulp_max": "ULP max",
    "topk_jaccard": "top-10 overlap",
    "disagreement": "tokens from the first difference on",
    "changed_parameters": "changed parameters",
    "error_over_autocast": "error over autocast's",
    "exact_share": "share equal to the last bit",
    "seam": "size of the difference",
    "top1_agreement": "top-1 agreement",
    "top1_flips": "top-1 flips",
    "expert_flips": "expert flips",
    "rel_l2_forced": "relative L2, fed the original's values",
    "replicas": "devices whose copy differs",
    "unequal": "whole numbers that differ",
    "unmatched": "parameters that are not the original's",
    "error_over_original": "error over the original's",
    "nll_difference": "NLL difference",
    "error_over_reference": "error over the reference's",
    "frozen_fraction": "frozen share",
    "predicted_frozen_fraction": "frozen share, predicted",
    "fidelity": "fidelity",
    "fidelity_float32": "fidelity in float32",
    "min_lr": "least learning rate",
    "collapsed_fraction": "poles that never forget",
    "phase_error_turns": "phase error, turns",
    "float32_error_4096": "float32 error, 4,096 steps",
    "float32_error_32768": "float32 error, 32,768 steps",
    "unchanged_fraction": "share of elements that merging leaves as they were",
    "zero_row_fraction": "share of rows that are zero",
    "memory_change": "memory change, relative",
    "decay_q0": "least decay",
    "decay_q5": "decay p5",
    "decay_q25": "decay p25",
    "decay_q50": "decay p50",
    "decay_q75": "decay p75",
    "decay_q95": "decay p95",
    "decay_q100": "largest decay",
    "changes": "rows changed",
    "not_compared": "rows not compared",
}


def number(value: float | None) -> str:
    """Format a measured number with two significant digits, such as "1.2e-05"; None as a dash."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return "0" if value == 0 else f"{value:.1e}"


def metric_value(metric: str, value: float) -> str:
    """Format the value of a metric that has no tolerance.

    A cosine is shown as its distance from 1, agreement and overlap in percent, `top1_flips` as a
    count, and any other metric as by `number`.
    """
    if not math.isfinite(value):
        return number(value)
    if metric == "cosine":
        return number(max(0.0, 1.0 - value))
    if metric in ("top1_agreement", "topk_jaccard"):
        return f"{100 * value:.2f} %"
    return f"{value:.0f}" if metric == "top1_flips" else number(value)


def contrast(before: float | None, now: float | None) -> tuple[str, str]:
    """Format two numbers with the digits needed to tell them apart, at most 17; None as a dash."""
    if before is None or now is None or not (math.isfinite(before) and math.isfinite(now)):
        return number(before), number(now)
    pairs = [(f"{before:.{digits}e}", f"{now:.{digits}e}") for digits in (1, 3, 6, 9, 16)]
    pair = next((p for p in pairs if p[0] != p[1]), pairs[0])
    return ("0" if before == 0 else pair[0]), ("0" if now == 0 else pair[1])


def contrast_all(values: Sequence[float | None]) -> list[str]:
    """Format numbers with the digits needed to tell unequal ones apart, at most 17.

    None becomes a dash.
    """
    finite = {v for v in values if v is not None and math.isfinite(v)}
    for digits in (1, 3, 6, 9, 16):
        if len({f"{v:.{digits}e}" for v in finite}) == len(finite):
            break
    return [number(v) if v not in finite or v == 0 else f"{v:.{digits}e}" for v in values]


def share(value: float | None) -> str:
    """Format a fraction of a tolerance in percent, or as "12×" if it is at least 10.

    None becomes a dash.
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return number(value)
    if value >= 10:
        return f"{value:,.0f}×" if value < 1e4 else f"{value:.1e}×"
    percent = 100 * value
    if 0 < percent < 0.1:
        return "<0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def label(text: str, limit: int = 96) -> str:
    """Make a name safe to display: control and direction characters become visible, and a name
    longer than `limit` characters is shortened in the middle. Markup is escaped by the page.
    """
    visible = printable(text, keep="")
    if len(visible) <= limit:
        return visible
    half = (limit - 1) // 2
    return f"{visible[:half]}…{visible[-half:]}"


def edge_name(edge: str) -> str:
    """Return an edge, the two sides of a comparison, in words: "JAX float32 vs oracle"."""
    return " vs ".join(_SIDES.get(side, label(side, 40)) for side in edge.split(":"))


def edge_question(edge: str) -> str:
    """Return the question that a comparison (edge) answers, or "" for an unknown edge."""
    return _QUESTIONS.get(edge, "")


def edge_rank(edge: str) -> tuple[int, str]:
    """Return the sort key of an edge (comparison): the order of `_QUESTIONS`, unknown ones last."""
    edges = list(_QUESTIONS)
    return (edges.index(edge) if edge in edges else len(edges), edge)


def metric_name(metric: str) -> str:
    """Return the name of a metric as shown to people, such as "relative L2" for `rel_l2`."""
    return _METRICS.get(metric, label(metric, 40))


def count(number_of: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: "1 failure", "1,204 failures". Default plural: noun + s."""
    return f"{number_of:,} {noun if number_of == 1 else plural or noun + 's'}"


def closest(name: str, names: Sequence[str]) -> list[str]:
    """Return up to three names that `name` may be a misspelling of, the most similar first."""
    by_lower = {each.lower(): each for each in names}
    return [by_lower[near] for near in difflib.get_close_matches(name.lower(), by_lower, n=3)]


def record_id(case: str, edge: str, quantity: str, metric: str) -> str:
    """Return the HTML id of a measurement's row: ten hexadecimal digits, the same in every run."""
    key = "\x1f".join((case, edge, quantity, metric))
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:10]


def for_json(value: Any) -> Any:
    """Convert a value for JSON: floats that are not finite become None, tuples and arrays lists.

    Containers are converted recursively. JSON has no NaN and no infinity; other programs could not
    read them.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: for_json(item) for name, item in value.items()}
    return [for_json(v) for v in value] if isinstance(value, list | tuple | np.ndarray) else value
