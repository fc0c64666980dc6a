"""Capture of named intermediates of a JAX function, as outputs of the same computation.

A function marks an intermediate with `jax.ad_checkpoint.checkpoint_name`, an identity that costs
nothing when unused. `capture` turns the marked values into extra outputs. Source: docs/parity.md
"Intermediates".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from parity.engine.programs.evaluation import Evaluation
from parity.engine.programs.marks import MarkChange, Marks


def capture(
    function: Callable[..., Any],
    *,
    numbered: Mapping[str, str] | None = None,
    once: bool = True,
    offsets: Mapping[str, Any] | None = None,
    forced: Mapping[str, Any] | None = None,
) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """Return `function` with its named intermediates as a second result.

    Each operation gives the same bits as in `function`. Under jit, the extra outputs may prevent
    fusions, so that results agree only up to rounding. The returned function can be jitted and
    differentiated. Its arguments must be pytrees of arrays.

    Args:
        function: function whose intermediates are marked with `checkpoint_name`.
        numbered: name templates for marks that occur more than once, such as once per layer; "{}"
            is the number of earlier occurrences: `{"q": "layers.{}.q"}`.
        once: whether a mark that occurs more than once and is not in `numbered` is an error;
            otherwise the second occurrence of `name` is called `name#2`.
        offsets: values added to intermediates, by name. The derivative with respect to a zero
            offset is the cotangent of the intermediate.
        forced: values that replace intermediates, by name, in the rest of the computation. The
            returned intermediate is still the one that was computed.

    Raises:
        ValueError: a mark that is not in `numbered` occurs twice, and `once` is set.
    """

    def captured(*args: Any) -> tuple[Any, dict[str, jax.Array]]:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        replaced, added = forced or {}, offsets or {}
        changes = {
            name: MarkChange(name in replaced, replaced.get(name), added.get(name))
            for name in {**replaced, **added}
        }
        marks = Marks(numbered=numbered or {}, once=once)
        evaluation = Evaluation(differentiable=True)
        values = evaluation.run(closed, jax.tree.leaves(args), marks, changes)
        return jax.tree.unflatten(jax.tree.structure(shape), values), _certain(marks)

    return captured


def _certain(marks: Marks) -> dict[str, jax.Array]:
    """Return the values of marks (named intermediates); in branches that were not taken NaN for
    floating-point ones, 0 for others."""
    values = dict(marks.values)
    for name, passed in marks.passed.items():
        if jnp.issubdtype(values[name].dtype, jnp.inexact):
            values[name] = jnp.where(passed, values[name], jnp.full_like(values[name], jnp.nan))
    return values
