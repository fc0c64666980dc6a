"""A few steps of AdamW as one function of arrays, for a model of any library.

The steps are a scan, so that only one of them is compiled. Values of all steps are returned with
the step as the first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.roles import named_leaves

STEPS = 3
"""Number of training steps."""
CLIP, RATE = 0.5, 1e-2
"""Clipping norm and learning rate. The norm is below that of every gradient here, so that clipping
is active. The rate is large enough to change weights visibly in three steps."""


def transform() -> optax.GradientTransformation:
    """Return the optimiser: clipping by the global norm, then AdamW."""
    # `eps` is far above the rounding error of a gradient that should be 0. With a small `eps`, Adam
    # would turn the sign of that error into a full step.
    adam = optax.adamw(RATE, eps=1e-3, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(CLIP), adam)


def initial_state(params: Any) -> Any:
    """Return the initial state of `transform` for `params`, as NumPy zeros."""
    # Only shapes are evaluated, so nothing runs on a device.
    shapes = jax.eval_shape(transform().init, params)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def trained(
    loss: Callable[..., jax.Array], params: Any, state: Any, *batch: Any, steps: int = STEPS
) -> dict[str, Any]:
    """Train and return the values of every step, as a nested dictionary of arrays.

    Arrays have the step as first axis: `losses` before each step, gradients `grad` before clipping,
    their global L2 `norm`, and moments and parameters after each step. The latter are `mu`, `nu`
    and `params` in one dictionary, `step<steps>` (such as `step3`), which holds all steps. `loss`
    is the last of the losses.

    Args:
        loss: scalar function of parameters and batch.
        params: pytree of floating-point arrays.
        state: state of `transform` (`initial_state`).
        batch: further arguments of `loss`; the same in every step.
        steps: number of steps.
    """

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        norm = checkpoint_name(optax.tree.norm(gradients), "gradient_norm")
        updates, after = optimiser_update(transform(), gradients, state, params)
        moved = optax.apply_updates(params, updates)
        adam = after[1][0]
        kept = {
            "losses": value,
            "norm": norm,
            "grad": named_leaves(gradients),
            "mu": named_leaves(adam.mu),
            "nu": named_leaves(adam.nu),
            "params": named_leaves(moved),
        }
        return (moved, after), kept

    with jax.numpy_dtype_promotion("standard"):
        _, kept = jax.lax.scan(step, (params, state), None, length=steps)
    counted = {"mu": "mu", "nu": "nu", "params": "params"}
    moments = {f"step{steps}": {name: kept.pop(what) for what, name in counted.items()}}
    return kept | moments | {"loss": jnp.asarray(kept["losses"][-1])}
