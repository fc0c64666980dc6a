"""Findings on an EMA's poles, and rows for a plot of its memory under storage and training.

Source: docs/stability.md "EMA poles".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parity.tolerances import LONG_CONTEXT
from stability.core.findings import Finding, judge, notes
from stability.core.number_formats import BF16, Format
from stability.core.parameter_leaves import sample
from stability.storage.ema_poles import SOURCE, Poles, collapsed, find_poles, float32_error
from stability.storage.simulate import FLOAT32, Gradients, Storage, run
from stability.storage.update_rules import Optimiser

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Reported quantiles over the poles of an EMA. Both ends are included, since storage affects the
longest memory first."""
LENGTHS = (4096, 32_768)
"""Default sequence lengths in tokens: those of the table in docs/model.md "What float32 gets
wrong"."""
COLLAPSED_SHARE = 0.01
"""Largest fraction of poles that never forget (|q| = 1) without a warning. The state of such a pole
grows with the text, so that 1 % of them matters."""
TURN_ERROR = 1 / 8
"""Largest phase error without a warning, in turns. At 1/8 of a turn (45 degrees) the projection of
a pole's output onto the exact phase is 30 % too small: cos(pi / 4) = 0.7."""
_FLOAT32_MATTERS = 100 * LONG_CONTEXT
"""Largest relative L2 error of the response with poles in float32 without a warning: 100 times the
tolerance for this project's EMA over long contexts."""


def findings(source: Any, fmt: Format = BF16, lengths: tuple[int, ...] = LENGTHS) -> list[Finding]:
    """Return findings for every EMA: poles that never forget, phase errors, errors of float32 q.

    Notes give quantiles of the decay per step, and the largest relative change of a pole's memory
    if parameters are stored in `fmt`.

    Args:
        source: pytree, state dict or checkpoint.
        fmt: the storage format to report on.
        lengths: sequence lengths in tokens, ascending. `float32_error` at the last length and the
            phase error after a pole's memory, at most the last length, are compared with limits; at
            the other lengths `float32_error` is a note.

    Raises:
        ValueError: see `find_poles`.
    """
    rows = []
    for layer, poles in find_poles(source).items():
        rows += [_collapse(poles, fmt), _phase(poles, fmt, lengths[-1]), _wide(poles, lengths[-1])]
        numbers = {
            f"decay_q{100 * q:g}": float(value)
            for q, value in zip(QUANTILES, np.quantile(poles.decay, QUANTILES), strict=True)
        }
        for length in lengths[:-1]:
            numbers[f"float32_error_{length}"] = float32_error(poles, length)
        narrow = poles.narrow(fmt).memory() / poles.memory()
        numbers["memory_change"] = float(np.max(np.abs(narrow - 1.0)))
        rows += notes("poles", layer, numbers, SOURCE)
    return rows


def _collapse(poles: Poles, fmt: Format) -> Finding:
    share, longest = collapsed(poles, fmt), 2.0 ** (fmt.mantissa_bits + 1)
    beyond = float(np.mean(poles.memory() > longest))
    message = (
        f"with |q| stored in {fmt.name}, {share:.1%} of {poles.decay.size:,} poles never forget "
        f"(alpha' delta' at most {2.0 ** -(fmt.mantissa_bits + 2):g}); {beyond:.1%} remember "
        f"longer than the {longest:.0f} steps that the format can represent"
    )
    remedy = "keep the EMA's parameters and q in float32, or q as log1p(-alpha' delta')"
    subject, metric = poles.layer, "collapsed_fraction"
    return judge("poles", subject, metric, share, COLLAPSED_SHARE, SOURCE, message, remedy)


def _phase(poles: Poles, fmt: Format, length: int) -> Finding:
    # Phase matters only within the pole's memory, so errors accumulate up to that length.
    steps = np.minimum(poles.memory(), length)
    per_step = np.abs(poles.narrow(fmt).turns - poles.turns)
    worst = float(np.minimum(0.5, np.max(per_step * steps)))
    message = (
        f"theta stored in {fmt.name} turns a pole {worst:.2g} of a turn off within its memory "
        f"(at most {length:,} steps); one that never decayed would be "
        f"{float(np.max(poles.phase_error(length, fmt))):.2g} off"
    )
    subject, metric, remedy = poles.layer, "phase_error_turns", "keep theta in float32"
    return judge("poles", subject, metric, worst, TURN_ERROR, SOURCE, message, remedy)


def _wide(poles: Poles, length: int) -> Finding:
    # The message names the longest memory: it has the largest error, and training lengthens it.
    error = float32_error(poles, length)
    source = 'docs/model.md "What float32 gets wrong"'
    message = (
        f"with q computed in float32 the response over {length:,} steps is {error:.1e} off; the "
        f"longest memory is {float(np.max(poles.memory())):,.0f} steps"
    )
    remedy = (
        "compute q^j from log1p(-alpha' delta') and exactly reduced phases, as "
        "megalodon_jax.layers.complex_ema does; other implementations will differ by this much"
    )
    subject, metric = poles.layer, f"float32_error_{length}"
    return judge("poles", subject, metric, error, _FLOAT32_MATTERS, source, message, remedy)


def memory_rows(
    source: Any,
    optimiser: Optimiser,
    steps: int = 200,
    fmt: Format = BF16,
    quantiles: tuple[float, ...] = QUANTILES,
    size: int = 2048,
) -> list[dict[str, Any]]:
    """Return memory lengths of EMA poles as rows for a plot: in float32, stored, after training.

    The synthetic gradients (`Gradients(uphill)`) have one sign, so that training lengthens the
    memory of every pole. There are two runs, with parameters in float32 and stored in `fmt`. The
    difference between their memories is the effect of lost updates.

    Args:
        source: pytree, state dict or checkpoint.
        optimiser: updates alpha and delta.
        steps: training steps, T.
        fmt: the storage format.
        quantiles: quantiles of the memory over a sample of the layer's poles.
        size: number of poles sampled per layer.

    Returns:
        One row per layer, quantile and state: {"layer", "quantile", "state", "steps", "memory"},
        memory in steps, inf for a pole that never forgets. States: "float32", "q in <format>",
        "parameters in <format>", "float32 after T", "<format> after T".

    Raises:
        ValueError: see `find_poles`.
    """
    push, narrow, rows = Gradients(signal=1.0, uphill=True), Storage("nearest", fmt.name), []
    for layer, poles in find_poles(source).items():
        # Same sampled positions for both logits, since they belong to the same poles.
        alpha, delta = (_column(sample(x, layer, size)) for x in (poles.alpha, poles.delta))
        some = Poles(layer, alpha, delta, np.zeros(alpha.shape))
        states = {
            "float32": some.memory(),
            f"q in {fmt.name}": some.memory_stored(fmt),
            f"parameters in {fmt.name}": some.narrow(fmt).memory(),
            "float32 after T": _trained(some, optimiser, FLOAT32, push, steps).memory(),
            f"{fmt.name} after T": _trained(some, optimiser, narrow, push, steps).memory(),
        }
        for state, memory in states.items():
            place = {"layer": layer, "state": state, "steps": steps if state.endswith("T") else 0}
            # Not interpolated: the result between a finite and an infinite memory is infinite.
            values = np.quantile(memory, quantiles, method="lower")
            rows += [
                place | {"quantile": q, "memory": float(value)}
                for q, value in zip(quantiles, values, strict=True)
            ]
    return rows


def _trained(
    poles: Poles, optimiser: Optimiser, storage: Storage, push: Gradients, steps: int
) -> Poles:
    values = {
        f"{poles.layer}.{n}": getattr(poles, n).astype(np.float32) for n in ("alpha", "delta")
    }
    outcomes = run(values, optimiser, storage, push, steps, poles.alpha.size)
    alpha, delta = (_column(outcome.last) for outcome in outcomes.values())
    return Poles(poles.layer, alpha, delta, poles.theta)


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64).reshape(-1, 1)
