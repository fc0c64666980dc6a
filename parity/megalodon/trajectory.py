"""Trajectory: AdamW steps from the same weights on the same batches, by every implementation.

A correct gradient can still be applied wrongly. A trajectory therefore compares the loss curve,
both moments of the optimiser and the displacement of every parameter, after the first and the last
step. Step k, counted from 0, uses the case's text rotated by k positions. Decoupled weight decay
applies to linear weights only. Source: docs/parity.md "Same work"; Loshchilov & Hutter 2019,
algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax

from megalodon_jax.loss import next_token_loss
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.weights import Role, named_leaves, replace_leaves, role_of
from parity.engine.measure.quantity import LOSSES, Quantity
from parity.engine.programs.yardstick import compiled
from parity.megalodon import oracle, perturbation
from parity.megalodon.cases import Batch, Case


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of AdamW, used by JAX, oracle and megalodon-hf alike."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


HYPER = AdamW()
"""The hyperparameters of all trajectories."""


def decays(name: str) -> bool:
    """Return whether weight decay applies to the parameter with this torch name."""
    return role_of(name) is Role.LINEAR


def batches(case: Case) -> Iterator[Batch]:
    """Yield the batch of each step: for step k, from 0, the case's rows are rotated right by k
    positions."""
    batch = case.batch
    for k in range(case.steps):
        yield Batch(*(np.roll(a, k, axis=1) for a in (batch.ids, batch.labels, batch.mask)))


class Diary:
    """Records the compared quantities of a trajectory while it runs.

    The quantities are the loss before each step and, after the first and the last step, both
    moments and the displacement of every parameter.

    Args:
        case: a case with steps.
        start: initial parameters, by torch name.
        dtype: dtype of losses and displacements in the result; moments keep their own dtype.
    """

    def __init__(self, case: Case, start: Mapping[str, Any], dtype: str):
        self._case, self._dtype, self._step = case, dtype, 0
        # Copied: an optimiser may update parameters in place.
        self._start = {name: np.array(p, np.float64) for name, p in start.items()}
        self._losses: list[float] = []
        self._notes: dict[str, np.ndarray] = {}

    def note(self, loss: Any, params: Mapping, mu: Mapping, nu: Mapping) -> None:
        """Record one step, given the loss before it and parameters and moments after it.

        Args:
            loss: the loss, a scalar.
            params: parameters by torch name.
            mu: first moments by torch name.
            nu: second moments by torch name.
        """
        self._step += 1
        self._losses.append(float(loss))
        if self._step not in (1, self._case.steps):
            return
        for name, start in self._start.items():
            drift = np.asarray(params[name], np.float64) - start
            kept = {"mu": mu[name], "nu": nu[name], "drift": drift.astype(self._dtype)}
            for what, value in kept.items():
                self._notes[Quantity.after_step(self._step, what, name)] = np.array(value)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all recorded arrays, by name (`losses`, `step1/mu/<parameter>` and so on)."""
        return self._notes | {LOSSES: np.array(self._losses, self._dtype)}


def of_oracle(case: Case, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
    """Return the trajectory of the oracle in float64, with AdamW written from its algorithm.

    Args:
        case: a case with steps.
        rng: generator for the noise floor. In every step it perturbs all values that float32 would
            round: weights (see `perturbation`), intermediates, and the stored moments and
            parameters. None: nothing is perturbed.

    Returns:
        The arrays of `Diary.arrays`.
    """
    hook = oracle.unchanged if rng is None else perturbation.hook(rng, case.config.model_dim)
    w = {name: np.asarray(p, np.float64) for name, p in case.weights.items()}
    mu, nu = ({name: np.zeros_like(p) for name, p in w.items()} for _ in range(2))
    diary = Diary(case, w, "float64")
    for k, batch in enumerate(batches(case), start=1):
        seen = w if rng is None else perturbation.weights(w, rng)
        out = oracle.run(case.config, seen, batch.ids, batch.labels, batch.mask, hook=hook)
        for name in w:
            g = out[Quantity.gradient(name)]
            mu[name] = hook("mu", HYPER.beta1 * mu[name] + (1 - HYPER.beta1) * g)
            nu[name] = hook("nu", HYPER.beta2 * nu[name] + (1 - HYPER.beta2) * g**2)
            first = mu[name] / (1 - HYPER.beta1**k)
            second = nu[name] / (1 - HYPER.beta2**k)
            shrink = HYPER.weight_decay * w[name] if decays(name) else 0.0
            step = HYPER.lr * (first / (np.sqrt(second) + HYPER.eps) + shrink)
            w[name] = hook("parameter", w[name] - step)
        diary.note(out["loss"], w, mu, nu)
    return diary.arrays()


def of_jax(case: Case, model: Any, dtype: str) -> dict[str, np.ndarray]:
    """Return the trajectory of the JAX model with optax's AdamW, as `Diary.arrays` in `dtype`.

    Args:
        case: a case with steps.
        model: the model with the case's weights.
        dtype: dtype of the model.
    """
    state = adamw().init(eqx.filter(model, eqx.is_array))
    diary = Diary(case, named_leaves(model), dtype)
    for batch in batches(case):
        ids, labels = jnp.asarray(batch.ids), jnp.asarray(batch.labels)
        mask = jnp.asarray(batch.mask) if batch.padded else None
        loss, model, state = compiled(_step, dtype == "float64")(model, state, ids, labels, mask)
        moments = (named_leaves(optax.tree_utils.tree_get(state, m)) for m in ("mu", "nu"))
        diary.note(loss, named_leaves(model), *moments)
    return diary.arrays()


def adamw() -> optax.GradientTransformation:
    """Return optax's AdamW with the common hyperparameters."""

    def mask(params: Any) -> Any:
        return replace_leaves(params, {name: decays(name) for name in named_leaves(params)})

    options = {"eps": HYPER.eps, "weight_decay": HYPER.weight_decay, "mask": mask}
    return optax.adamw(HYPER.lr, HYPER.beta1, HYPER.beta2, **options)


def _step(model, state, ids, labels, mask):
    """Return the loss, and model and optimiser state after one step."""

    def objective(model):
        logits, _ = model(ids, mask)
        return next_token_loss(logits, labels, mask, dtype=model.config.softmax_dtype)

    loss, grads = eqx.filter_value_and_grad(objective)(model)
    updates, state = optimiser_update(adamw(), grads, state, eqx.filter(model, eqx.is_array))
    return loss, eqx.apply_updates(model, updates), state
