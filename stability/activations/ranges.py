"""How large activations and gradients get, and what of them bfloat16 or float16 could not hold.

Ranges per tap and per cotangent, gradient norms by module in float32. One pass forward and one
backward. Source: docs/audits.md "Activations and attention".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from megalodon_jax.weights import named_leaves
from parity.engine.compare import COTANGENT
from parity.megalodon.runner import evaluate
from parity.megalodon.taps import computed
from stability.core.findings import Finding, Severity

FORMATS = ("bfloat16", "float16")
HEADROOM = 2.0**-4
"""A range this close to the largest number is a warning: training moves by more than that."""
LOST_SHARE = 0.01
"""Share of the elements below the smallest subnormal at which a warning is given."""
SOURCE = "largest finite and smallest subnormal number of the format (IEEE 754, bfloat16)"


class Range(NamedTuple):
    """Scalars over one array, float32: its finite magnitudes, and what the formats would lose."""

    largest: Float[Array, ""]
    smallest: Float[Array, ""]
    """Smallest magnitude that is not 0; infinite without any."""
    rms: Float[Array, ""]
    bad: Float[Array, ""]
    """Share of the elements that are NaN or infinite."""
    lost: dict[str, Float[Array, ""]]
    """By format: share of the elements that are not 0 and would round to 0."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """What one step computes: ranges by name, all in order of computation."""

    taps: Mapping[str, Range]
    cotangents: Mapping[str, Range]
    """By `bar/<tap>`."""
    gradients: Mapping[str, Range]
    """By parameter."""
    norms: Mapping[str, float]
    """L2 norm of the gradient by module, squared and summed in float32."""


def measure_ranges(model: Any, ids: Any, mask: Any = None, labels: Any = None) -> Ranges:
    """Return ranges of all taps, their cotangents and all gradients for one batch.

    All of them are in memory at once: some 30 arrays (B, L, D) per layer.

    Args:
        model: a `MegalodonForCausalLM`, in any dtypes.
        ids: token ids (B, L) int32.
        mask: (B, L) bool, True where a token is valid; None means everywhere.
        labels: (B, L) int32; None means the ids themselves.

    Raises:
        ValueError: `ids` are not integers (B, L), or `labels` have another shape.
    """
    ids = jnp.asarray(ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"measure_ranges: ids are {ids.dtype} {ids.shape}, expected integers (B, L)."
        )
    ids = ids.astype(jnp.int32)
    labels = ids if labels is None else jnp.asarray(labels, jnp.int32)
    if labels.shape != ids.shape:
        raise ValueError(
            f"measure_ranges: labels have shape {labels.shape}, expected that of ids, {ids.shape}."
        )
    mask = None if mask is None else jnp.asarray(mask, bool)
    (_, taps), (gradients, bars) = evaluate(model, ids, labels, mask)
    named, order = named_leaves(gradients), computed(model.config)
    bars = {COTANGENT + name: bar for name, bar in bars.items()}

    def summed(arrays: Mapping[str, Array]) -> dict[str, tuple[Range, np.ndarray]]:
        # Compiled once per size, and layers have the same: one program for all would take minutes.
        return {name: jax.device_get(_summed(jnp.ravel(array))) for name, array in arrays.items()}

    def ranges(arrays: Mapping[str, Array]) -> dict[str, Range]:
        return {name: found for name, (found, _) in summed(arrays).items()}

    squares: dict[str, float] = defaultdict(float)
    by_parameter = summed(named)
    for name, (_, square) in by_parameter.items():
        squares[name.rpartition(".")[0] or name] += float(square)
    return Ranges(
        ranges({name: taps[name] for name in order if name in taps}),
        ranges({name: bars[name] for name in order if name in bars}),
        {name: found for name, (found, _) in by_parameter.items()},
        {name: float(np.sqrt(square)) for name, square in squares.items()},
    )


def range_findings(ranges: Ranges) -> list[Finding]:
    """Return a finding per array and format, and the gradient norm of each module.

    An array that would overflow is an error, one within a factor of 16 of it, or with more than 1 %
    of its elements below the smallest subnormal, a warning; in float16, which nothing here is
    stored in, all three are notes. Norms are notes.
    """
    named = {**ranges.taps, **ranges.cotangents}
    named |= {f"grad/{name}": found for name, found in ranges.gradients.items()}
    findings = [f for name, found in named.items() for f in _range_findings(name, found)]
    source = 'docs/audits.md "Activations and attention"'
    return findings + [
        Finding(
            "gradient_norm",
            Severity.NOTE if np.isfinite(norm) else Severity.ERROR,
            module,
            "norm",
            norm,
            float("nan"),
            source,
            f"gradient norm {norm:.3g}" + _squared(norm),
            "" if np.isfinite(norm) else "replay the step with stability.nonfinite.replay.locate",
        )
        for module, norm in ranges.norms.items()
    ]


def _squared(norm: float) -> str:
    """Say in which narrow formats the square of a norm, as optax sums it, does not exist."""
    square = np.square(np.float64(norm))
    gone = [f for f in FORMATS if square > _largest(f) or 0.0 < square < _tiniest(f)]
    return f"; its square is outside {' and '.join(gone)}" if gone else ""


def _range_findings(name: str, found: Range) -> list[Finding]:
    if float(found.bad):
        return [
            Finding(
                *("activation_range", Severity.ERROR, name, "non_finite", float(found.bad)),
                *(0.0, 'docs/training.md "Is everything finite?"'),
                f"{float(found.bad):.2%} of its elements are NaN or infinite already",
                "replay the step with stability.nonfinite.replay.locate",
            )
        ]
    return [_one_format(name, found, fmt) for fmt in FORMATS]


def _one_format(name: str, found: Range, fmt: str) -> Finding:
    top, largest, lost = _largest(fmt), float(found.largest), float(found.lost[fmt])
    severity, remedy = Severity.OK, ""
    if largest > top:
        severity, remedy = Severity.ERROR, f"keep it out of {fmt}: bfloat16 has float32's range"
    elif largest > top * HEADROOM:
        severity, remedy = Severity.WARNING, f"scale it down before it is stored in {fmt}"
    elif lost > LOST_SHARE:
        severity, remedy = Severity.WARNING, f"scale the loss up, or keep it out of {fmt}"
    if fmt == "float16" and severity is not Severity.OK:
        severity = Severity.NOTE  # this project stores nothing in float16
    return Finding(
        "activation_range",
        severity,
        name,
        f"largest_{fmt}",
        largest,
        top,
        SOURCE,
        f"in {fmt}: largest {largest:.3g} of {top:.3g}, {lost:.2%} of its elements round to 0; "
        f"rms {float(found.rms):.3g}, smallest {float(found.smallest):.3g}",
        remedy,
    )


def _largest(fmt: str) -> float:
    return float(ml_dtypes.finfo(fmt).max)


def _tiniest(fmt: str) -> float:
    return float(ml_dtypes.finfo(fmt).smallest_subnormal)


@jax.jit
def summary(x: Array) -> Range:
    """Return the range of an array of any shape; what is not finite counts in `bad` alone."""
    wide = x.astype(jnp.float32)
    size = max(x.size, 1)
    fine = jnp.isfinite(wide)
    magnitude = jnp.where(fine, jnp.abs(wide), 0.0)
    seen = magnitude > 0

    def share(flags: Array) -> Array:
        return jnp.sum(flags, dtype=jnp.float32) / size

    return Range(
        largest=jnp.max(magnitude, initial=0.0),
        smallest=jnp.min(jnp.where(seen, magnitude, jnp.inf), initial=jnp.inf),
        rms=_rms(magnitude),
        bad=share(~fine),
        # Half the smallest subnormal is a tie and rounds to 0, the even one.
        lost={f: share(seen & (magnitude <= _half_tiniest(f))) for f in FORMATS},
    )


@jax.jit
def _summed(x: Array) -> tuple[Range, Array]:
    """Return the range of an array, and the sum of its squares in float32."""
    return summary(x), jnp.sum(jnp.square(x.astype(jnp.float32)))


def _half_tiniest(fmt: str) -> np.float32:
    return np.float32(_tiniest(fmt) / 2)


def _rms(magnitude: Array) -> Array:
    # Scaled by the largest: a square of 1e20 is not a float32.
    top = jnp.maximum(jnp.max(magnitude, initial=0.0), jnp.finfo(jnp.float32).tiny)
    return top * jnp.sqrt(jnp.mean(jnp.square(magnitude / top)))
