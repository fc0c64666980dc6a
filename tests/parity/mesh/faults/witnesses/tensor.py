"""A layer and its loss on `data` x `tensor`: heads, channels and vocabulary are split.

The embedding is tied to the head. Its rows are padded to a number divisible by every mesh. Source:
docs/sharding.md "Planted bugs".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parity.mesh.step import MeshComparison

AXIS = "tensor"
B, L, D, HEADS, WIDTH, GROUPS, V, EPS = 4, 6, 8, 4, 3, 2, 14, 1e-3
ROWS = 16
"""Rows of the embedding; those from V on are padding."""


class Tensor:
    """The exchanges of a tensor-parallel layer."""

    @staticmethod
    def place() -> Any:
        """Return the index of this device's part of channels, heads and rows."""
        return jax.lax.axis_index(AXIS)

    @staticmethod
    def add(x: Any) -> Any:
        """Sum partial sums over devices."""
        return jax.lax.psum(x, AXIS)

    @staticmethod
    def rows(table: Any, ids: Any) -> Any:
        """Look up ids in this device's rows of the table; ids of other devices give zeros."""
        local = ids - Tensor.place() * len(table)
        inside = (local >= 0) & (local < len(table))
        return jnp.where(inside[..., None], table[jnp.clip(local, 0, len(table) - 1)], 0.0)

    @staticmethod
    def channels(x: Any) -> Any:
        """Return this device's channels of a replicated value."""
        size = x.shape[-1] // jax.lax.axis_size(AXIS)
        return jax.lax.dynamic_slice_in_dim(x, Tensor.place() * size, size, axis=-1)

    @staticmethod
    def gain(gamma: Any) -> Any:
        """Return the gains of this device's channels."""
        return gamma

    @staticmethod
    def group_sum(x: Any) -> Any:
        """Return the sum over the norm group of this device's channels, (..., 1)."""
        local = jnp.sum(x, axis=-1, keepdims=True)
        parts = jax.lax.axis_size(AXIS)
        if parts < GROUPS:
            whole = x.reshape(*x.shape[:-1], GROUPS // parts, -1)
            each = jnp.sum(whole, axis=-1, keepdims=True)
            return jnp.broadcast_to(each, whole.shape).reshape(x.shape)
        every = jax.lax.all_gather(local, AXIS)
        mates = jnp.arange(parts) * GROUPS // parts == Tensor.place() * GROUPS // parts
        return jnp.tensordot(mates.astype(x.dtype), every, 1)

    @staticmethod
    def width_sum(x: Any) -> Any:
        """Return the sum over the width of all heads, (..., 1, 1)."""
        return jax.lax.psum(jnp.sum(x, axis=(-2, -1), keepdims=True), AXIS)

    @staticmethod
    def output(weight: Any) -> Any:
        """Return the rows of the output projection for this device's heads."""
        return weight

    @staticmethod
    def biased(y: Any, bias: Any) -> Any:
        """Return the sum over devices plus the bias, added once."""
        return Tensor.add(y) + bias

    @staticmethod
    def keep(key: Any, shape: tuple[int, ...]) -> Any:
        """Return this device's rows of the dropout mask, replicated along the axis."""
        whole = jax.random.bernoulli(key, 0.8, (shape[0] * jax.lax.axis_size("data"), *shape[1:]))
        start = jax.lax.axis_index("data") * shape[0]
        return jax.lax.dynamic_slice_in_dim(whole, start, shape[0])

    @staticmethod
    def is_token(rows: int) -> Any:
        """Return which of this device's rows of the head are tokens."""
        return Tensor.place() * rows + jnp.arange(rows) < V

    @staticmethod
    def largest(logits: Any) -> Any:
        """Return the largest logit of the whole vocabulary, (B, L, 1)."""
        local = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        return jnp.max(jax.lax.psum(_placed(local), AXIS), axis=-1, keepdims=True)

    @staticmethod
    def partition(exponentials: Any) -> Any:
        """Return the sum over the whole vocabulary, (B, L)."""
        return jax.lax.psum(jnp.sum(exponentials, axis=-1), AXIS)

    @staticmethod
    def picked(logits: Any, targets: Any) -> Any:
        """Return the logit of the target from the device that has it, (B, L)."""
        local = targets - Tensor.place() * logits.shape[-1]
        inside = (local >= 0) & (local < logits.shape[-1])
        local = jnp.clip(local, 0, logits.shape[-1] - 1)
        here = jnp.take_along_axis(logits, local[..., None], axis=-1)[..., 0]
        return jax.lax.psum(jnp.where(inside, here, 0.0), AXIS)

    @staticmethod
    def tied(table: Any) -> Any:
        """Return the table as used by the head."""
        return table

    @staticmethod
    def entering(x: Any) -> Any:
        """Mark where a replicated value enters split computation; its gradient is a sum."""
        return x


def _placed(x: Any) -> Any:
    """Return (..., 1) as this device's column of (..., devices), with zeros in the others."""
    columns = jnp.arange(jax.lax.axis_size(AXIS))
    return jnp.where(columns == jax.lax.axis_index(AXIS), x, 0.0)


def _loss(weights: Any, ids: Any, targets: Any, seed: Any) -> Any:
    table = weights["embed"]
    x = checkpoint_name(Tensor.add(Tensor.rows(table, ids)), "embed")
    part = Tensor.channels(x)
    each = D // GROUPS
    mean = Tensor.group_sum(part) / each
    square = Tensor.group_sum(jnp.square(part - mean)) / each
    normed = (part - mean) * jax.lax.rsqrt(square + EPS)
    normed = checkpoint_name(normed * Tensor.gain(weights["gamma"]), "group_norm")
    x = checkpoint_name(jax.lax.psum(_spread(normed), AXIS), "whole")
    x = Tensor.entering(x)
    heads = jnp.einsum("bld,dhw->blhw", x, weights["query"])
    scale = jax.lax.rsqrt(Tensor.width_sum(jnp.square(heads)) / (HEADS * WIDTH) + EPS)
    q = checkpoint_name(heads * scale, "query")
    scores = jnp.einsum("bihw,bjhw->bhij", q, q)
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -jnp.inf)
    y = jnp.einsum("bhij,bjhw->bihw", jax.nn.softmax(scores), q)
    y = checkpoint_name(y, "heads")
    y = jnp.einsum("blhw,hwd->bld", y, Tensor.output(weights["out"]))
    y = checkpoint_name(Tensor.biased(y, weights["bias"]), "attention")
    y = jnp.where(Tensor.keep(jax.random.key(seed), y.shape), y, 0.0)
    x = checkpoint_name(x + y, "residual")
    logits = jnp.einsum("bld,vd->blv", x, Tensor.tied(table))
    logits = jnp.where(Tensor.is_token(len(table)), logits, -30.0 * jnp.ones_like(logits))
    logits = checkpoint_name(logits, "logits")
    top = Tensor.largest(logits)
    total = Tensor.partition(jnp.exp(logits - top))
    total = checkpoint_name(jnp.log(total) + top[..., 0], "log_partition")
    nll = checkpoint_name(total - Tensor.picked(logits, targets), "token_loss")
    return jax.lax.psum(jnp.sum(nll), "data") / (B * L)


def _spread(part: Any) -> Any:
    """Return this device's channels at their position among all, with zeros in the others."""
    size, place = part.shape[-1], jax.lax.axis_index(AXIS)
    whole = jnp.zeros((*part.shape[:-1], size * jax.lax.axis_size(AXIS)), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole + 0 * part[..., :1], part, place * size, -1)


def step(weights: Any, ids: Any, targets: Any, seed: Any) -> Any:
    """Return the loss and its gradients; arguments are global arrays, on any mesh."""

    def sharded(weights: Any) -> Any:
        rows = P("data")
        local = jax.shard_map(_loss, in_specs=(SPECS, rows, rows, P()), out_specs=P())
        return local(weights, ids, targets, seed)

    loss, grad = jax.value_and_grad(sharded)(weights)
    return {"loss": loss, "grad": grad}


SPECS = {
    "embed": P(AXIS),
    "gamma": P(AXIS),
    "query": P(None, AXIS),
    "out": P(AXIS),
    "bias": P(),
}


def comparison() -> MeshComparison:
    """Return the layer with random numbers."""
    rng = np.random.default_rng(2)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {
        "embed": draw(ROWS, D),
        "gamma": draw(D),
        "query": draw(D, HEADS, WIDTH),
        "out": draw(HEADS, WIDTH, D),
        "bias": draw(D),
    }
    ids, targets = (rng.integers(0, V, (B, L)).astype(np.int32) for _ in range(2))
    rows = P("data")
    return MeshComparison(
        step,
        (weights, ids, targets, np.int32(3)),
        (SPECS, rows, rows, P()),
        ({"data": 2, AXIS: 4},),
        name="tensor",
    )
