"""A training step that also returns a small summary of each value it computes, by name.

The values themselves do not leave the compiled program. The caller chooses the summary: whether a
value is finite (`stability.nonfinite.flags`), or a digest of its bits (`stability.repeat.digests`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from megalodon_jax.weights import named_leaves
from parity.engine.measure.quantity import LOSS, Quantity, Role

Reduce = Callable[[jax.Array], jax.Array]
"""Function that maps an array of any shape and dtype to a summary of one fixed shape."""
Capture = Callable[..., Callable[..., tuple[Any, dict[str, jax.Array]]]]
"""Function such as `parity.engine.programs.instrument.capture`: `capture(function, offsets=...)`
returns a function with the arguments of `function` and the results (result of `function`,
intermediates by name). `offsets`, arrays by name, are added to the intermediates."""


def reduced_leaves(tree: Any, reduce: Reduce, prefix: str = "") -> dict[str, jax.Array]:
    """Return `reduce` of each array of a tree, except PRNG keys, by `prefix` + dotted path."""
    return {
        prefix + name: reduce(leaf)
        for name, leaf in named_leaves(tree).items()
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }


def reduced_loss(
    loss: Callable[..., jax.Array],
    reduce: Reduce,
    capture: Capture,
    *,
    intermediates: bool = True,
    cotangents: bool = False,
) -> Callable[..., tuple[tuple[jax.Array, Any], dict[str, jax.Array]]]:
    """Return a function (model, *args) -> ((loss, gradients), summaries by name).

    The names of the summaries are intermediates, `bar/<intermediate>` for cotangents,
    `grad/<parameter>` and `loss`, in order of computation. Call the function in `eqx.filter_jit`.

    Args:
        loss: called as `loss(model, *args)`, returns a scalar; `args` are pytrees of arrays.
        reduce: returns the summary of a value.
        capture: makes the intermediates a second result of a function; see `Capture`.
        intermediates: whether to summarise the forward pass too; otherwise only the loss and the
            gradients.
        cotangents: whether to summarise the backward pass by intermediate too. Every cotangent then
            stays in memory. Has no effect without `intermediates`.
    """

    def reduced(model: Any, *args: Any) -> tuple[tuple[jax.Array, Any], dict[str, jax.Array]]:
        params, static = eqx.partition(model, eqx.is_inexact_array)
        # The order of computation is kept here, since JAX sorts dictionaries that it transforms.
        names: list[str] = []

        def plain(params: Any, *args: Any) -> jax.Array:
            return loss(eqx.combine(params, static), *args)

        def objective(params: Any, offsets: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
            if not intermediates:
                return plain(params, *args), {}
            value, marked = capture(plain, offsets=offsets)(params, *args)
            names[:] = marked
            return value, {name: reduce(x) for name, x in marked.items()}

        shapes: dict[str, Any] = {}
        if intermediates and cotangents:
            shapes = jax.eval_shape(capture(plain), params, *args)[1]
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
        (value, found), (gradients, bars) = jax.value_and_grad(
            objective, argnums=(0, 1), has_aux=True
        )(params, zeros)
        found = {name: found[name] for name in names}
        found |= {LOSS: reduce(value)}
        found |= {Quantity.cotangent(n): reduce(bars[n]) for n in reversed(names) if n in bars}
        found |= reduced_leaves(gradients, reduce, Role.GRADIENT)
        return (value, gradients), found

    return reduced
