"""Training on data with low-precision storage: every leaf is rounded after each step.

Source: docs/stability.md "Update survival", for frozen fractions measured in a real optimiser run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.config import widened
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.weights import named_leaves, replace_leaves
from stability.core.number_formats import Format
from stability.core.parameter_leaves import seed_of
from stability.core.rounding import check_rounding, nearest
from stability.storage.simulate import Survival, summary
from stability.storage.update_rules import Optimiser

Loss: TypeAlias = Callable[[Any, Any], jax.Array]
"""Function (parameters, batch) -> scalar loss."""
TRACKED = 1 << 16
"""Largest number of elements per leaf whose displacement is tracked. Larger leaves are sampled:
a float64 sum for every element would take more memory than the model."""


def next_token_loss(model: MegalodonForCausalLM, ids: Any) -> jax.Array:
    """Return a Megalodon's loss on token ids (B, L), in nats per token."""
    ids = jnp.asarray(ids, jnp.int32)
    return model.compute_loss(ids, ids)


def train_stored(
    model: Any,
    batches: Iterable[Any],
    optimiser: Optimiser,
    fmt: Format | None,
    loss: Loss | None = None,
) -> dict[str, Survival]:
    """Train one step per batch, round every leaf to `fmt` after each, and return survival by leaf.

    Args:
        model: initial pytree; it is not changed. The trained copy holds narrow leaves in float32.
        batches: values for the second argument of the loss, one per step.
        optimiser: the optimiser, with float32 moments, so that only the storage differs.
        fmt: storage format; None stores float32, the control.
        loss: (model, batch) -> scalar; None uses a Megalodon's own loss.

    Returns:
        Survival (frozen fraction and fidelity) by leaf name.

    Raises:
        ValueError: the loss is None and the model is not a Megalodon.
        RuntimeError: the compiler removed the rounding.
    """
    if loss is None and not isinstance(model, MegalodonForCausalLM):
        raise ValueError(
            f"expected a loss to train a {type(model).__name__} on batches: pass "
            "loss=(parameters, batch) -> scalar, or no batches for synthetic gradients."
        )
    if fmt is not None:
        check_rounding(fmt)
    step, transform = _stepped(optimiser, loss or next_token_loss)
    store, settle = _stored(fmt)
    model = store(model)
    state = transform.init(eqx.filter(model, eqx.is_array))
    track = {n: _tracked(n, x) for n, x in named_leaves(model).items()}
    first = last = {n: track[n](x) for n, x in named_leaves(model).items()}
    intended = {n: np.zeros(x.shape) for n, x in first.items()}
    changed = {n: np.zeros(x.shape, bool) for n, x in first.items()}
    for batch in batches:
        state, updates = step(model, state, batch)
        model = settle(model, updates)
        for n, move in named_leaves(updates).items():
            intended[n] += track[n](move)
        after = {n: track[n](x) for n, x in named_leaves(model).items()}
        for n, value in after.items():
            changed[n] |= value != last[n]
        last = after
    return {n: summary(first[n], last[n], intended[n], changed[n]) for n in first}


@lru_cache(maxsize=8)
def _stepped(optimiser: Optimiser, loss: Loss) -> Any:
    """Return a compiled step (model, state, batch) -> (state, updates), and its optax optimiser."""
    transform = optimiser.transform()

    @eqx.filter_jit
    def step(model: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        grads = eqx.filter_grad(loss)(model, batch)
        params = eqx.filter(model, eqx.is_array)
        updates, state = optimiser_update(transform, grads, state, params)
        return state, updates

    return step, transform


@lru_cache(maxsize=8)
def _stored(fmt: Format | None) -> Any:
    """Return two compiled functions: model -> rounded model, (model, updates) -> rounded sum."""

    def stored(x: Any) -> Any:
        if not eqx.is_inexact_array(x):
            return x
        x = x.astype(widened(x.dtype))
        return x if fmt is None else nearest(x, fmt)

    @eqx.filter_jit
    def store(model: Any) -> Any:
        return jax.tree.map(stored, model)

    @eqx.filter_jit
    def settle(model: Any, updates: Any) -> Any:
        before, moves = named_leaves(eqx.filter(model, eqx.is_array)), named_leaves(updates)
        return replace_leaves(model, {n: stored(before[n] + moves[n]) for n in before})

    return store, settle


def _tracked(name: str, leaf: Any) -> Callable[[Any], np.ndarray]:
    """Return a function that maps a leaf to a sample of k <= `TRACKED` elements, (k,) float64."""
    if leaf.size <= TRACKED:
        return lambda x: np.asarray(x, np.float64).reshape(-1)
    rng = np.random.default_rng(seed_of(name))
    index = np.sort(rng.choice(leaf.size, TRACKED, replace=False))
    return lambda x: np.asarray(x).reshape(-1)[index].astype(np.float64)
