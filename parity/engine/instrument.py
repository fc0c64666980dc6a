"""Named intermediates of a JAX function, as outputs of the same computation.

A function marks an intermediate with `jax.ad_checkpoint.checkpoint_name`, an identity that costs
nothing when nobody asks; `capture` makes the marked values extra outputs. Source: docs/parity.md
"Intermediates".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from parity.engine.evaluation import Evaluation
from parity.engine.marks import Change, Marks


def capture(
    function: Callable[..., Any],
    *,
    numbered: Mapping[str, str] | None = None,
    offsets: Mapping[str, Any] | None = None,
    forced: Mapping[str, Any] | None = None,
) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """Return `function` with its named intermediates as a second result.

    Operation by operation the results are the same bits. Under jit the extra outputs can keep XLA
    from fusing across them, so results are equal to rounding only.

    The result can be jitted and differentiated. Arguments must be pytrees of arrays.

    Args:
        function: what to watch.
        numbered: for marks that are passed more than once, such as once per layer, what to call
            them, with "{}" for how often each was passed before: `{"q": "layers.{}.q"}`.
        offsets: added to intermediates by name: the derivative by a zero is the cotangent there.
        forced: what the computation goes on with in place of an intermediate, by name. What is
            reported is still what was computed, from forced inputs.

    Raises:
        ValueError: a mark that is not `numbered` is passed twice: one name has one value.
    """

    def captured(*args: Any) -> tuple[Any, dict[str, jax.Array]]:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        replaced, added = forced or {}, offsets or {}
        changes = {
            name: Change(name in replaced, replaced.get(name), added.get(name))
            for name in {**replaced, **added}
        }
        marks = Marks(numbered=numbered or {}, once=True)
        evaluation = Evaluation(differentiable=True)
        values = evaluation.run(closed, jax.tree.leaves(args), marks, changes)
        return jax.tree.unflatten(jax.tree.structure(shape), values), _certain(marks)

    return captured


def _certain(marks: Marks) -> dict[str, jax.Array]:
    """Return the values of marks; one in a branch that was not taken has none: NaN."""
    values = dict(marks.values)
    for name, passed in marks.passed.items():
        if jnp.issubdtype(values[name].dtype, jnp.inexact):
            values[name] = jnp.where(passed, values[name], jnp.full_like(values[name], jnp.nan))
    return values
