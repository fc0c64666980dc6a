"""Finiteness flags by name inside jit, cheap enough for every training step.

`finite_flags` checks the leaves of a pytree; `watched_loss` checks every intermediate, cotangent,
gradient and the loss of a training step. `stability.nonfinite.replay` finds the root cause
operation by operation. Source: docs/training.md "Is everything finite?".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.megalodon.intermediates import capture
from stability.core.findings import Finding, Severity
from stability.core.reduced import reduced_leaves, reduced_loss

SOURCE = 'docs/training.md "Is everything finite?"'
Flags = dict[str, jax.Array]
"""Bool scalars by name of an array: True if every element of it is finite."""


def finite(x: jax.Array) -> jax.Array:
    """Return a bool scalar: whether every element of `x`, of any shape and dtype, is finite."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray(True)
    return jnp.all(jnp.isfinite(x))


def finite_flags(tree: Any, prefix: str = "") -> Flags:
    """Return whether each array leaf is finite, by `prefix` + dotted path; works inside jit."""
    return reduced_leaves(tree, finite, prefix)


def with_intermediate_flags(function: Callable[..., Any]) -> Callable[..., tuple[Any, Flags]]:
    """Return `function` with a second result: flags that tell whether each intermediate is finite.

    Arguments must be pytrees of arrays, as for `parity.megalodon.intermediates.capture`. The
    intermediates themselves are not returned.
    """

    def flagged(*args: Any) -> tuple[Any, Flags]:
        out, intermediates = capture(function)(*args)
        return out, {name: finite(x) for name, x in intermediates.items()}

    return flagged


with_tap_flags = with_intermediate_flags
"""Former name of `with_intermediate_flags`."""


def watched_loss(
    loss: Callable[..., jax.Array],
    *,
    intermediates: bool = True,
    cotangents: bool = False,
    taps: bool | None = None,
) -> Callable[..., tuple[tuple[jax.Array, Any], Flags]]:
    """Return a function (model, *args) -> ((loss, gradients), flags).

    A flag says whether a value is finite. Flags are named by intermediate, `bar/<intermediate>` for
    cotangents, `grad/<parameter>` and `loss`, in order of computation. Call the function inside
    `eqx.filter_jit`.

    Args:
        loss: called as `loss(model, *args)`, returns a scalar; `args` are pytrees of arrays.
        intermediates: whether to watch the forward pass too; otherwise only the loss and the
            gradients.
        cotangents: whether to watch the derivatives by intermediates too. Every such cotangent then
            stays in memory. Has no effect without `intermediates`.
        taps: former name of `intermediates`, which it overrides unless it is None.
    """
    watch_forward = intermediates if taps is None else taps
    return reduced_loss(loss, finite, capture, intermediates=watch_forward, cotangents=cotangents)


def broken(flags: Mapping[str, Any]) -> list[str]:
    """Return the names of the flags that are False, in the order of `flags`; outside jit only."""
    host = jax.device_get(dict(flags))
    # Iterate over `flags`: the device returns a dictionary sorted by name.
    return [name for name in flags if not bool(np.asarray(host[name]))]


def finite_findings(flags: Mapping[str, Any]) -> list[Finding]:
    """Return one finding on all flags; its subject is the first value that is not finite.

    A jitted function returns dictionaries sorted by name. Pass flags through `in_order` first, so
    that the first value is the first in order of computation.
    """
    names = broken(flags)
    severity, subject, remedy = Severity.OK, "step", ""
    message = f"{len(flags)} named values, all finite"
    if names:
        severity, subject = Severity.ERROR, names[0]
        message = f"{subject} is the first of {len(names)} named values that are not finite"
        remedy = "replay the step with stability.nonfinite.locate: it names operation and inputs"
    probe, count = "finite_flags", float(len(names))
    return [Finding(probe, severity, subject, "broken", count, 0.0, SOURCE, message, remedy)]


def in_order(flags: Mapping[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    """Return flags in the order of the names `order`; flags not named there follow at the end.

    `parity.megalodon.intermediates.computed` returns the order of computation.
    """
    ordered = {name: flags[name] for name in order if name in flags}
    return ordered | {name: flag for name, flag in flags.items() if name not in ordered}
