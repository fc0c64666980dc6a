"""Audit of optimiser states: moments that do not decay, counters that stop, norms that underflow.

A second moment stored in bfloat16 cannot decay by 0.999: 1 - 0.999 is less than half the relative
spacing of bfloat16, so the product rounds back to the old value. A step counter in bfloat16 stops
at 256. A norm underflows if small gradients are squared in their own narrow dtype. Source:
docs/stability.md "Optimiser state".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.weights import named_leaves
from stability.core.findings import Finding, Severity, judge
from stability.core.number_formats import BF16, FP16, format_of

SOURCE = 'docs/stability.md "Optimiser state"'
SECOND_MOMENTS = frozenset({"nu", "exp_avg_sq"})
"""Names of running means of squared gradients in optax and torch, as parts of a leaf's path."""
FIRST_MOMENTS = frozenset({"mu", "trace", "exp_avg", "momentum_buffer"})
"""Names of running means of gradients in optax and torch, as parts of a leaf's path."""
COUNTERS = frozenset({"count", "step", "steps", "gradient_step", "mini_step"})
"""Names of step counters in optax and torch, as the last part of a leaf's path."""
RUN_LENGTH = 100_000
"""Default for the largest step number that a counter must hold: a long training run."""


def audit_state(
    state: Any, beta2: float = 0.999, steps: int = RUN_LENGTH, *, beta1: float = 0.9
) -> list[Finding]:
    """Return one finding per moment and step counter of a state: does its dtype suffice?

    A moment must decay, with gradients of 0, as in exact arithmetic, up to a factor of 2; a counter
    must be able to reach `steps`. The finding's subject is the path of the moment or counter in the
    state.

    Args:
        state: an optax state or torch's `optimizer.state_dict()`, in any nesting.
        beta2: decay factor per step of the second moments.
        steps: planned number of optimiser steps.
        beta1: decay factor per step of the first moments.

    Raises:
        ValueError: the state holds no array, or a beta is not in [0, 1).
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"audit_state: {name}={beta} must be in [0, 1), such as 0.9 or 0.999.")
    leaves = named_leaves(state)
    if not leaves:
        raise ValueError(
            f"no arrays in this {type(state).__name__}: expected an optax state or torch's "
            "optimizer.state_dict() after at least one step."
        )
    findings = []
    for path, leaf in leaves.items():
        parts = path.split(".")
        dtype = str(leaf.dtype).removeprefix("torch.")
        if SECOND_MOMENTS & set(parts):
            findings.append(_moment(path, dtype, "second", beta2))
        elif FIRST_MOMENTS & set(parts):
            findings.append(_moment(path, dtype, "first", beta1))
        elif parts[-1] in COUNTERS and math.prod(leaf.shape) == 1:
            findings.append(_counter(path, dtype, steps))
    return findings


def audit_global_norm(gradients: Any) -> Finding:
    """Return a finding on the norm that clips gradients, `optax.tree.norm`.

    Its value is this norm divided by the true one, computed in float64. The finding is an error if
    the ratio differs from 1 by more than 2 eps (machine epsilon) of the narrowest dtype.

    Args:
        gradients: pytree of arrays, in the dtypes of the training loop.

    Raises:
        ValueError: there are no gradients.
    """
    leaves = named_leaves(gradients)
    if not leaves:
        raise ValueError("audit_global_norm: no arrays; expected a pytree of gradients.")
    with jax.numpy_dtype_promotion("standard"):
        norm = float(optax.tree.norm(gradients))
    true = math.sqrt(sum(float(np.sum(np.square(_wide(x)))) for x in leaves.values()))
    ratio = norm / true if true else 1.0
    # The sum and the root are each rounded once, in the dtype of the gradients.
    narrowest = max(float(ml_dtypes.finfo(x.dtype).eps) for x in leaves.values())
    bound = 2 * narrowest
    wrong = not abs(ratio - 1.0) <= bound
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves.values()}))
    message = f"the norm of gradients in {dtypes} comes out as {norm:.3g}; it is {true:.3g}"
    remedy = (
        "take the norm of gradients cast to float32; clipping by a wrong norm does nothing or "
        "divides by zero"
    )
    severity, fix = (Severity.ERROR, remedy) if wrong else (Severity.OK, "")
    metric, least = "norm_ratio", 1.0 - bound
    return Finding("optimiser", severity, "global norm", metric, ratio, least, SOURCE, message, fix)


@lru_cache(maxsize=32)
def remaining(dtype: str, beta2: float, steps: int) -> float:
    """Return the value to which optax decays a second moment of 1 over steps with gradient 0.

    Args:
        dtype: name of the dtype in which the moment is stored.
        beta2: decay factor per step.
        steps: number of steps. Exact arithmetic gives beta2**steps.

    Raises:
        RuntimeError: this optax does not keep the moment in `dtype`.
    """
    transform = optax.scale_by_adam(b2=beta2)
    params = {"leaf": jnp.ones(1, dtype)}
    initial: Any = transform.init(params)
    state = initial._replace(nu=params)
    # If optax widened the moment, the result would be that of the wider dtype.
    if state.nu["leaf"].dtype != jnp.dtype(dtype):
        raise RuntimeError(
            f"expected optax to keep a second moment in {dtype}, but it changes the dtype: the "
            "decay cannot be predicted with this version of optax"
        )

    def step(carry: Any, _: None) -> tuple[Any, None]:
        zeros = {"leaf": jnp.zeros(1, dtype)}
        return optimiser_update(transform, zeros, carry, params)[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, None, length=steps))(state)
    return float(np.asarray(state.nu["leaf"], np.float64)[0])


def _moment(path: str, dtype: str, which: str, beta: float) -> Finding:
    steps = max(1, round(1.0 / (1.0 - beta)))
    share = expected = beta**steps
    if dtype in (BF16.name, FP16.name, "float32"):
        share = remaining(dtype, beta, steps)
    elif dtype != "float64":
        # With fewer bits than bfloat16, or as an integer, the decay rounds back to the old value.
        share = 1.0
    message = (
        f"{which} moment in {dtype}: after {steps:,} steps of zero gradient {share:.0%} is left, "
        f"{expected:.0%} should be (beta{1 if which == 'first' else 2} {beta:g})"
    )
    remedy = (
        f"keep {which} moments in float32: a float32 copy of the parameters, or the wrappers of "
        "stability.storage.narrow_optimisers"
    )
    # Twice the expected remainder means that the moment remembers gradients it should forget.
    most, metric = 2 * expected, f"{which}_moment_left"
    return judge("optimiser", path, metric, share, most, SOURCE, message, remedy)


def _counter(path: str, dtype: str, steps: int) -> Finding:
    if dtype.startswith(("int", "uint")):
        last = float(np.iinfo(dtype).max)
    else:
        # 2^(bits + 1) + 1 is the first integer that cannot be represented.
        kind = BF16.dtype if dtype == BF16.name else np.dtype(dtype)
        last = 2.0 ** (ml_dtypes.finfo(kind).nmant + 1)
    message = f"step counter in {dtype} counts to {last:,.0f}"
    remedy = "keep step counters in int32; bias correction and schedules stand still where it stops"
    planned, metric = float(steps), "last_count"
    return judge("optimiser", path, metric, last, planned, SOURCE, message, remedy, least=True)


def _wide(leaf: Any) -> np.ndarray:
    narrow = format_of(leaf.dtype) is not None
    return np.asarray(leaf, np.float32 if narrow else leaf.dtype).astype(np.float64)
