"""Planted bugs of AdamW: correct gradients are applied incorrectly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from parity.engine.measure.quantity import Quantity
from parity.faults.fault import Family, Fault, Patch
from parity.megalodon import trajectory
from parity.megalodon.trajectory import HYPER, decays

MU, NU, DRIFT = (Quantity.after_step(1, w, "model.embed.weight") for w in ("mu", "nu", "drift"))
"""Moments and displacement, after one step, of the first compared parameter, which has no weight
decay."""
_LINEAR = "model.layers.0.attn.wh1.weight"
LINEAR_MU, LINEAR_DRIFT = (Quantity.after_step(1, what, _LINEAR) for what in ("mu", "drift"))
"""First moment and displacement, after one step, of the first parameter with weight decay."""


def _adamw(name: str, how: str, stage: str, faulty: Callable[[Any], Any]) -> Fault:
    """Return the fault that replaces the correct optax transformation by `faulty(correct)`."""

    def plant(adamw: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: faulty(adamw())

    patch = Patch(trajectory, "adamw", plant)
    return Fault(Family.OPTIMISER, name, how, stage, patch, "adamw")


def _with(**changes: Any) -> Callable[[Any], Any]:
    """Return a function that gives AdamW with other hyperparameters (names as in optax)."""
    usual = {"b1": HYPER.beta1, "b2": HYPER.beta2, "eps": HYPER.eps, "mask": _linear}
    usual["weight_decay"] = HYPER.weight_decay
    return lambda healthy: optax.adamw(HYPER.lr, **usual | changes)


def _linear(params: Any) -> Any:
    names = trajectory.named_leaves(params)
    return trajectory.replace_leaves(params, {name: decays(name) for name in names})


def _chained(*parts: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda healthy: optax.chain(*(part() for part in parts))


def _adam() -> Any:
    return optax.scale_by_adam(HYPER.beta1, HYPER.beta2, HYPER.eps)


def _decay(rate: float = HYPER.weight_decay) -> Any:
    return optax.add_decayed_weights(rate, _linear)


def _down() -> Any:
    return optax.scale(-HYPER.lr)


def _decay_by_its_own() -> Any:
    return _decay(-HYPER.weight_decay)


def _decay_of_the_result() -> Any:
    """Return weight decay computed from the updated parameters, not those before the step."""

    def update(updates, state, params=None):
        assert params is not None
        after = optax.apply_updates(params, updates)
        shrunk = jax.tree.map(
            lambda u, p, on: u - HYPER.lr * HYPER.weight_decay * p if on else u,
            updates,
            after,
            _linear(params),
        )
        return shrunk, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _changed(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """Return a function that replaces the update of an optax transformation.

    `change(correct, grads, (state, params))` returns the updates and the new state.
    """

    def faulty(healthy: Any) -> Any:
        def update(updates, state, params=None):
            return change(healthy, updates, (state, params))

        return optax.GradientTransformation(healthy.init, update)

    return faulty


def _scaled(healthy, grads, rest):
    return healthy.update(jax.tree.map(lambda g: 1024 * g, grads), *rest)


def _clipped(healthy, grads, rest):
    norm = optax.tree.norm(grads)
    factor = jnp.minimum(1.0, 1e-2 / norm)
    return healthy.update(jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), *rest)


def _count_stuck(healthy, grads, rest):
    updates, state = healthy.update(grads, *rest)
    zero = jax.tree.map(jnp.zeros_like, optax.tree_utils.tree_get(state, "count"))
    return updates, optax.tree_utils.tree_set(state, count=zero)


def _first_moment_forgotten(healthy, grads, rest):
    updates, state = healthy.update(grads, *rest)
    stale = optax.tree_utils.tree_get(rest[0], "mu")
    return updates, optax.tree_utils.tree_set(state, mu=stale)


def _uncorrected() -> Any:
    """Return Adam without bias correction, as an optax transformation."""

    def update(updates, state, params=None):
        _, state = _adam().update(updates, state)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + HYPER.eps), state.mu, state.nu), state

    return optax.GradientTransformation(_adam().init, update)


FAULTS = (
    _adamw(
        "adamw_l2_for_decoupled",
        "decay added to the gradient, as Adam's weight_decay is",
        LINEAR_MU,
        _chained(_decay, _adam, _down),
    ),
    _adamw(
        "adamw_eps_inside_sqrt",
        "sqrt(v + eps) for sqrt(v) + eps",
        DRIFT,
        _with(eps=0.0, eps_root=HYPER.eps),
    ),
    _adamw("adamw_eps_1e_6", "another library's default", DRIFT, _with(eps=1e-6)),
    _adamw(
        "adamw_no_bias_correction",
        "moments used as they are",
        DRIFT,
        _chained(_uncorrected, _decay, _down),
    ),
    _adamw("adamw_default_beta2", "0.999 where the run was tuned with 0.95", NU, _with(b2=0.999)),
    _adamw(
        "adamw_betas_swapped",
        "arguments in the wrong order",
        MU,
        _with(b1=HYPER.beta2, b2=HYPER.beta1),
    ),
    _adamw("adamw_decay_everywhere", "norms, biases and EMA decay too", DRIFT, _with(mask=None)),
    _adamw(
        "adamw_decay_missing", "the library's default of 0", LINEAR_DRIFT, _with(weight_decay=0.0)
    ),
    _adamw(
        "adamw_decay_without_lr",
        "decay not multiplied by the learning rate",
        LINEAR_DRIFT,
        _chained(_adam, _down, _decay_by_its_own),
    ),
    _adamw(
        "adamw_decay_after_step",
        "decay of the updated weight",
        LINEAR_DRIFT,
        _chained(_adam, _down, _decay_of_the_result),
    ),
    _adamw("adamw_nesterov", "NAdam for Adam", DRIFT, _with(nesterov=True)),
    _adamw(
        "adamw_loss_scale_left", "gradients not divided by the loss scale", MU, _changed(_scaled)
    ),
    _adamw("adamw_clipped", "a gradient clip left on", MU, _changed(_clipped)),
    _adamw(
        "adamw_first_moment_in_bfloat16",
        "optimiser state cast with the model",
        MU,
        _with(mu_dtype=jnp.bfloat16),
    ),
    _adamw(
        "adamw_count_stuck",
        "the step counter not saved: bias correction of the first step for ever",
        "losses",
        _changed(_count_stuck),
    ),
    _adamw(
        "adamw_first_moment_forgotten",
        "state of the first moment not written back",
        MU,
        _changed(_first_moment_forgotten),
    ),
)
