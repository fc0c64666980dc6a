"""A routed layer on `data` x `expert`: tokens on one axis, experts on the other.

Every device applies its experts to the tokens of its row of the mesh; outputs of a token's experts
are summed across columns. The capacity of an expert is counted over the whole batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parity.mesh.step import MeshComparison

AXIS = "expert"
T, D, HIDDEN, E, PICKED, CAPACITY = 32, 6, 10, 8, 2, 9


class Experts:
    """The exchanges of an expert-parallel layer."""

    @staticmethod
    def every_score(scores: Any) -> Any:
        """Return the scores of all experts, (T, E), from this device's."""
        size, place = scores.shape[-1], jax.lax.axis_index(AXIS)
        whole = jnp.zeros((len(scores), size * jax.lax.axis_size(AXIS)), scores.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(
            whole + 0 * scores[:, :1], scores, place * size, -1
        )
        return jax.lax.psum(whole, AXIS)

    @staticmethod
    def normalised(weights: Any) -> Any:
        """Return the weights of all experts, (T, E), which sum to 1 per token."""
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    @staticmethod
    def queue(chosen: Any) -> Any:
        """Return the number of earlier tokens in the batch that chose the same expert, (T, E)."""
        every = jax.lax.all_gather(jnp.sum(chosen, axis=0), "data")
        mine = jnp.arange(len(every)) < jax.lax.axis_index("data")
        ahead = jnp.tensordot(mine.astype(chosen.dtype), every, 1)
        return jnp.cumsum(chosen, axis=0) - chosen + ahead

    @staticmethod
    def capacity() -> int:
        """Return how many tokens of the batch an expert accepts."""
        return CAPACITY

    @staticmethod
    def first() -> Any:
        """Return the index of this device's first expert."""
        return jax.lax.axis_index(AXIS) * (E // jax.lax.axis_size(AXIS))

    @staticmethod
    def combined(said: Any) -> Any:
        """Return the sum of the outputs of all experts."""
        return jax.lax.psum(said, AXIS)

    @staticmethod
    def share(x: Any) -> Any:
        """Return the mean over all tokens, (E,)."""
        return jax.lax.pmean(jnp.mean(x, axis=0), "data")

    @staticmethod
    def arrived(x: Any) -> Any:
        """Return the tokens as received by this device's experts."""
        return x


def _loss(weights: Any, x: Any) -> Any:
    scores = checkpoint_name(Experts.every_score(x @ weights["router"]), "scores")
    p = jax.nn.softmax(scores)
    floor = jax.lax.top_k(p, PICKED)[0][:, -1:]
    chosen = (p >= floor).astype(x.dtype)
    queue = checkpoint_name(Experts.queue(chosen), "queue")
    gates = checkpoint_name(Experts.normalised(p * chosen), "weights")
    gates = gates * (queue < Experts.capacity()).astype(x.dtype)
    size = weights["up"].shape[0]
    mine = jax.lax.dynamic_slice_in_dim(gates, Experts.first(), size, axis=1)
    mine = checkpoint_name(mine, "gates")
    h = jnp.tanh(jnp.einsum("td,edh->teh", Experts.arrived(x), weights["up"]))
    said = jnp.einsum("teh,ehd,te->td", h, weights["down"], mine)
    y = checkpoint_name(Experts.combined(said), "experts")
    load = checkpoint_name(Experts.share(chosen), "load")
    importance = checkpoint_name(Experts.share(p), "importance")
    balance = E * jnp.sum(load * importance)
    return jax.lax.psum(jnp.sum(jnp.square(y)), "data") / T + 0.1 * balance


def step(weights: Any, x: Any) -> Any:
    """Return the loss and its gradients; arguments are global arrays, on any mesh."""

    def sharded(weights: Any) -> Any:
        local = jax.shard_map(_loss, in_specs=(SPECS, P("data")), out_specs=P())
        return local(weights, x)

    loss, grad = jax.value_and_grad(sharded)(weights)
    return {"loss": loss, "grad": grad}


SPECS = {"router": P(None, AXIS), "up": P(AXIS), "down": P(AXIS)}


def comparison() -> MeshComparison:
    """Return the layer with random numbers, in which some experts exceed their capacity."""
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {"router": draw(D, E), "up": draw(E, D, HIDDEN), "down": draw(E, HIDDEN, D)}
    return MeshComparison(
        step,
        (weights, draw(T, D)),
        (SPECS, P("data")),
        ({"data": 2, AXIS: 4},),
        name="experts",
    )
