"""Helpers for optax: weight-decay mask, and updates under strict dtype promotion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from megalodon_jax.roles import Role, dotted, role_of

if TYPE_CHECKING:
    import optax


def optimiser_update(
    transform: optax.GradientTransformation, gradients: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """Return `transform.update(gradients, state, params, **extra)`: updates and the new state.

    optax multiplies floats by its integer step count, which is an error under
    `jax_numpy_dtype_promotion="strict"`. So this call enables standard promotion.
    """
    with jax.numpy_dtype_promotion("standard"):
        return transform.update(gradients, state, params, **extra)


def decay_mask(params: Any) -> Any:
    """Return a pytree of bools: True, for weight decay, at matrices of linear maps and adapters.

    Weight decay does not apply to norms, biases, gains, the EMA, or the embedding and head, whose
    magnitudes have a meaning. The mask uses names, so it is also correct for stacked layers, whose
    vectors have two axes. Pass this function as `mask=` to `optax.adamw` and others.

    Args:
        params: a model, or a pytree whose leaves have the names of its parameters.
    """

    def decays(path: Any, _: Any) -> bool:
        return role_of(dotted(path)) in (Role.LINEAR, Role.LORA)

    return jax.tree_util.tree_map_with_path(decays, params)
