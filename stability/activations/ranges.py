"""Ranges of activations and gradients, with overflow and underflow in bfloat16 and float16.

One forward and one backward pass give the range of every intermediate, of every cotangent (the
derivative of the loss by an intermediate) and of every gradient, and the gradient norm of each
module in float32. Source: docs/formats.md "Activations and attention".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32, Integer

from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.roles import check_unstacked
from megalodon_jax.segments import check_segment_ids
from megalodon_jax.weights import named_leaves
from parity.engine.measure.quantity import Quantity
from parity.engine.programs.yardstick import compiled
from parity.megalodon.intermediates import computed
from parity.megalodon.runner import evaluate
from stability.core.findings import Finding, Severity
from stability.core.number_formats import by_name

FORMATS = ("bfloat16", "float16")
HEADROOM = 2.0**-4
"""Fraction of a format's largest number above which the largest magnitude of an array gives a
warning. Magnitudes can grow by a factor of 16 and more during training."""
LOST_SHARE = 0.01
"""Fraction of the nonzero elements that may underflow to 0 without a warning."""
REPLAY = "replay the step with stability.nonfinite.replay.locate"
SOURCE = "largest finite and smallest subnormal number of the format (IEEE 754, bfloat16)"


class Range(NamedTuple):
    """Range of one array and its losses in narrow formats; all numbers are float32 scalars."""

    largest: Float[Array, ""]
    """Largest finite magnitude."""
    smallest: Float[Array, ""]
    """Smallest nonzero magnitude; infinite if there is none."""
    rms: Float[Array, ""]
    """Root mean square of all elements; those that are not finite count as 0."""
    bad: Float[Array, ""]
    """Fraction of the elements that are NaN or infinite."""
    lost: dict[str, Float[Array, ""]]
    """Fraction of the nonzero elements that would underflow to 0, by format (`FORMATS`)."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of all arrays of one step, by name, in order of computation."""

    intermediates: Mapping[str, Range]
    """Ranges by name of the intermediate, from the forward pass."""
    cotangents: Mapping[str, Range]
    """Ranges by `bar/<intermediate>`, from the backward pass."""
    gradients: Mapping[str, Range]
    """Ranges of gradients by parameter name."""
    norms: Mapping[str, float]
    """L2 norm of the gradients of a module's own parameters (without submodules), by module path;
    squares are summed in float32 per parameter."""


def measure_ranges(
    model: MegalodonForCausalLM,
    ids: ArrayLike,
    mask: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> Ranges:
    """Return the ranges of all intermediates, cotangents and gradients of one batch.

    All these arrays are in memory at once: about 30 arrays (B, L, D) per layer.

    Args:
        model: the model, in any dtypes.
        ids: token ids (B, L) int32.
        mask: (B, L) bool, True where a token is valid; None: all are valid.
        labels: targets (B, L) int32, unshifted: the loss shifts them by one; None: the ids.
        segment_ids: number of each token's document, integers (B, L), for packed rows; None: each
            row is one document.

    Raises:
        ValueError: `ids` are not integers (B, L), `labels` or `segment_ids` have another shape, or
            the model's layers are stacked (`megalodon_jax.stack_layers`).
    """
    check_unstacked("measure_ranges", model)
    ids = token_ids(ids, "measure_ranges")
    labels = ids if labels is None else jnp.asarray(labels, jnp.int32)
    if labels.shape != ids.shape:
        raise ValueError(
            f"measure_ranges: labels have shape {labels.shape}, expected that of ids, {ids.shape}."
        )
    mask = None if mask is None else jnp.asarray(mask, bool)
    (_, intermediates), (gradients, bars) = compiled(evaluate, yardstick=False)(
        model, ids, labels, mask, documents_of(ids, segment_ids)
    )
    bars = {str(Quantity.cotangent(name)): bar for name, bar in bars.items()}

    def summed(arrays: Mapping[str, Array]) -> dict[str, tuple[Range, np.ndarray]]:
        # One program per array size, shared by all layers. A single program for all arrays would
        # take minutes to compile.
        return {name: jax.device_get(_summed(jnp.ravel(array))) for name, array in arrays.items()}

    def in_order(arrays: Mapping[str, Array]) -> dict[str, Range]:
        names = [name for name in computed(model.config) if name in arrays]
        return {n: found for n, (found, _) in summed({n: arrays[n] for n in names}).items()}

    by_parameter, squares = summed(named_leaves(gradients)), defaultdict[str, float](float)
    for name, (_, square) in by_parameter.items():
        squares[name.rpartition(".")[0] or name] += float(square)
    return Ranges(
        in_order(intermediates),
        in_order(bars),
        {name: found for name, (found, _) in by_parameter.items()},
        {name: float(np.sqrt(square)) for name, square in squares.items()},
    )


def token_ids(ids: ArrayLike, caller: str) -> Int32[Array, "B L"]:
    """Return token ids as int32.

    Raises:
        ValueError: `ids` are not integers (B, L); the message begins with `caller`.
    """
    ids = jnp.asarray(ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{caller}: ids are {ids.dtype} {ids.shape}, expected integers (B, L).")
    return ids.astype(jnp.int32)


def documents_of(ids: Array, segment_ids: ArrayLike | None) -> Integer[Array, "B L"] | None:
    """Return segment ids as an array; None stays None.

    Raises:
        ValueError: `segment_ids` are not integers of the shape of `ids`.
    """
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(segment_ids)
    check_segment_ids(segment_ids, ids.shape, "ids")
    return segment_ids


def range_findings(ranges: Ranges) -> list[Finding]:
    """Return a finding per array and format, and a note with the gradient norm of each module.

    An array with NaN or infinity has a single finding, an error. In bfloat16, overflow is an error;
    a largest magnitude within a factor of 16 of overflow, and underflow of more than 1 % of the
    nonzero elements, are warnings. In float16, in which this project stores nothing, these three
    are notes. A norm that is not finite is an error.
    """
    gradients = {Quantity.gradient(name): found for name, found in ranges.gradients.items()}
    arrays = {**ranges.intermediates, **ranges.cotangents, **gradients}
    return [
        *(f for name, found in arrays.items() for f in _of_array(name, found)),
        *(_of_norm(module, norm) for module, norm in ranges.norms.items()),
    ]


def _of_array(name: str, found: Range) -> list[Finding]:
    probe, bad, largest = "activation_range", float(found.bad), float(found.largest)
    if bad:
        source = 'docs/training.md "Is everything finite?"'
        message, error = f"{bad:.2%} of its elements are NaN or infinite already", Severity.ERROR
        return [Finding(probe, error, name, "non_finite", bad, 0.0, source, message, REPLAY)]
    findings = []
    for fmt in FORMATS:
        top, lost = by_name(fmt).max, float(found.lost[fmt])
        severity, remedy = Severity.WARNING, ""
        if largest > top:
            severity, remedy = Severity.ERROR, f"keep it out of {fmt}: bfloat16 has float32's range"
        elif largest > top * HEADROOM:
            remedy = f"scale it down before it is stored in {fmt}"
        elif lost > LOST_SHARE:
            remedy = f"scale the loss up, or keep it out of {fmt}"
        else:
            severity = Severity.OK
        if fmt == "float16" and severity is not Severity.OK:
            severity = Severity.NOTE  # this project stores nothing in float16
        message = (
            f"in {fmt}: largest {largest:.3g} of {top:.3g}, {lost:.2%} of the nonzero elements "
            f"underflow to 0; rms {float(found.rms):.3g}, smallest {float(found.smallest):.3g}"
        )
        metric = f"largest_{fmt}"
        findings.append(
            Finding(probe, severity, name, metric, largest, top, SOURCE, message, remedy)
        )
    return findings


def _of_norm(module: str, norm: float) -> Finding:
    # optax sums squares in the gradients' dtype, so the square of the norm must be in range too.
    square, formats = np.square(np.float64(norm)), map(by_name, FORMATS)
    gone = [f.name for f in formats if square > f.max or 0.0 < square < f.min_subnormal]
    outside = f"; its square is outside {' and '.join(gone)}" if gone else ""
    message = f"gradient norm {norm:.3g}{outside}"
    source, metric = 'docs/formats.md "Activations and attention"', "norm"
    severity, remedy = (Severity.NOTE, "") if np.isfinite(norm) else (Severity.ERROR, REPLAY)
    nan = math.nan
    return Finding("gradient_norm", severity, module, metric, norm, nan, source, message, remedy)


@jax.jit
def summary(x: Array) -> Range:
    """Return the range of an array of any shape.

    NaN and infinity count in `bad`, and as 0 in `rms`; the other fields ignore them.
    """
    wide = x.astype(jnp.float32)
    finite = jnp.isfinite(wide)
    magnitude = jnp.where(finite, jnp.abs(wide), 0.0)
    nonzero = magnitude > 0
    top = jnp.max(magnitude, initial=0.0)
    # Scaled by the largest magnitude: the square of 1e20 overflows float32.
    scale = jnp.maximum(top, jnp.finfo(jnp.float32).tiny)

    def share(flags: Array, of: ArrayLike) -> Array:
        return jnp.sum(flags, dtype=jnp.float32) / jnp.maximum(jnp.asarray(of, jnp.float32), 1.0)

    # Only nonzero elements count: zeros of unused tokens would hide the losses of other elements.
    at_risk = jnp.sum(nonzero, dtype=jnp.float32)

    return Range(
        largest=top,
        smallest=jnp.min(jnp.where(nonzero, magnitude, jnp.inf), initial=jnp.inf),
        rms=scale * jnp.sqrt(jnp.mean(jnp.square(magnitude / scale))),
        bad=share(~finite, x.size),
        # Half of the smallest subnormal is a tie, and ties to even round it to 0.
        lost={
            f: share(nonzero & (magnitude <= np.float32(by_name(f).min_subnormal / 2)), at_risk)
            for f in FORMATS
        },
    )


@jax.jit
def _summed(x: Array) -> tuple[Range, Array]:
    """Return the range of an array and the sum of its squares in float32."""
    return summary(x), jnp.sum(jnp.square(x.astype(jnp.float32)))
