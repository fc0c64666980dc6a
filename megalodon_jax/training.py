"""Parts of a training loop: windows of a text, AdamW with its schedule, the step, the loss.

`examples/train.py` is a loop made of these parts; to resume, call `checkpoint.resume`. Source:
docs/training.md "When a step goes wrong".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.optimiser import decay_mask, optimiser_update
from megalodon_jax.sharding import shard_model, shard_state

Batch = tuple[Array, Array | None]
"""Token ids (B, L) int32, and the PRNG key of dropout, or None to train without dropout."""
Step = Callable[[Batch, Any, Any], tuple[Any, Any, Array]]
"""Training step: (batch, model, optimiser state) -> (model, optimiser state, loss)."""


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> Int32[np.ndarray, "B L"]:
    """Return the `length` tokens of a text from each start on, (B, length) int32.

    Args:
        text: tokens, (T,) of any integer dtype. If it is memory-mapped, only the windows are read.
        starts: index of the first token of each window, (B,), at most T - length.
        length: tokens in a window.
    """
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def adamw(
    lr: float, steps: int, *, warmup: int = 40, b2: float = 0.98, weight_decay: float = 0.1
) -> optax.GradientTransformation:
    """Return AdamW that decays matrices only (`decay_mask`), with warmup and cosine decay.

    Args:
        lr: highest learning rate; the learning rate ends at a twentieth of it.
        steps: optimiser steps of the whole run. A resumed run needs the same number.
        warmup: steps over which the learning rate rises from 0, but at most `steps // 2`.
        b2: decay rate of the second moment.
        weight_decay: decoupled decay, multiplied by the learning rate.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, min(warmup, steps // 2), steps, lr / 20)
    return optax.adamw(rate, b2=b2, weight_decay=weight_decay, mask=decay_mask)


def make_step(optimiser: optax.GradientTransformation, mesh: Mesh | None = None) -> Step:
    """Return the compiled training step: ((ids, key), model, state) -> (model, state, loss).

    ids are (B, L), inputs as well as labels; a key enables dropout, None disables it. The loss is
    the mean in nats per token, before the update. The buffers of model and state are donated:
    the arguments must not be used again.

    Args:
        optimiser: any optax optimiser; it also receives the loss as `value=`, which
            `stability.recovery.guard.guard` needs.
        mesh: mesh on which `shard_model` and `shard_state` placed model and state; None: no mesh.
    """
    transform = optax.with_extra_args_support(optimiser)

    def training_loss(model: MegalodonForCausalLM, ids: Array, key: Array | None) -> Array:
        return model.compute_loss(ids, ids, deterministic=key is None, key=key)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Batch, model: Any, state: Any) -> tuple[Any, Any, Array]:
        loss, gradients = eqx.filter_value_and_grad(training_loss)(model, *batch)
        parameters = eqx.filter(model, eqx.is_array)
        updates, state = optimiser_update(transform, gradients, state, parameters, value=loss)
        model = eqx.apply_updates(model, updates)
        if mesh is None:
            return model, state, loss
        # Keep the placement of the arguments, or the next call would compile again.
        return shard_model(model, mesh), shard_state(state, model, mesh), loss

    return step


@eqx.filter_jit
def mean_loss(model: MegalodonForCausalLM, ids: Int32[Array, "B L"]) -> Float[Array, ""]:
    """Return the mean loss on ids (B, L), in nats per token, without dropout."""
    return model.compute_loss(ids, ids)
