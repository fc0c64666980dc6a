"""Bugs of tensor parallelism: heads, channels and their norms, vocabulary, replicated dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from parity.faults.fault import around
from tests.parity.mesh.faults.fault import Family, fault, instead
from tests.parity.mesh.faults.witnesses.tensor import AXIS, Tensor

_fault = partial(fault, owner=Tensor)
_heads = partial(_fault, Family.HEADS)
_vocabulary = partial(_fault, Family.VOCABULARY)
_norm = partial(_fault, Family.STATISTICS)


def _turned(x: Any) -> Any:
    """Return the value of the neighbour along the axis."""
    size = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(i, (i + 1) % size) for i in range(size)])


def _interleaved(gamma: Any) -> Any:
    """Return channels i, i + parts, i + 2 parts, ...: interleaved instead of in blocks."""
    whole = jax.lax.all_gather(gamma, AXIS, tiled=True)
    return jnp.take(whole, jnp.arange(len(gamma)) * jax.lax.axis_size(AXIS) + Tensor.place())


def _clamped_rows(table: Any, ids: Any) -> Any:
    local = ids - Tensor.place() * len(table)
    return table[jnp.clip(local, 0, len(table) - 1)]


def _clamped_pick(logits: Any, targets: Any) -> Any:
    local = jnp.clip(targets - Tensor.place() * logits.shape[-1], 0, logits.shape[-1] - 1)
    here = jnp.take_along_axis(logits, local[..., None], axis=-1)[..., 0]
    return jax.lax.pmean(here, AXIS)


def _first_row_of_others(table: Any, ids: Any) -> Any:
    local = ids - Tensor.place() * len(table)
    inside = (local >= 0) & (local < len(table))
    return table[jnp.where(inside, local, 0)]


@jax.custom_vjp
def _once_per_shard(table):
    return table


_once_per_shard.defvjp(lambda table: (table, None), lambda _, g: (g * jax.lax.axis_size(AXIS),))


@jax.custom_vjp
def _own_derivative(x):
    return x


_own_derivative.defvjp(lambda x: (x, None), lambda _, g: (g * (1.0 / jax.lax.axis_size(AXIS)),))


@around
def _drawn_by_each(keep, key, shape):
    mine = keep(jax.random.fold_in(key, Tensor.place()), shape)
    # The maximum of all devices' draws: `shard_map` must see a value that is equal on all devices.
    return jax.lax.pmax(jnp.where(Tensor.place() == 0, mine, mine).astype(jnp.int32), AXIS) > 0


FAULTS = (
    _norm(
        "query_norm_over_local_width",
        "q is normalised over the heads of one device",
        instead(lambda x: jnp.sum(x, axis=(-2, -1), keepdims=True)),
        attribute="width_sum",
        stage="query",
    ),
    _norm(
        "query_norm_mean_of_local",
        "the mean over devices of local sums, divided by the whole width",
        instead(lambda x: jax.lax.pmean(jnp.sum(x, axis=(-2, -1), keepdims=True), AXIS)),
        attribute="width_sum",
        stage="query",
        collective=("all-reduce", (AXIS,)),
    ),
    _norm(
        "group_norm_of_local_channels",
        "a group split over devices is normalised in parts",
        around(
            lambda whole, x: (
                whole(x)
                if jax.lax.axis_size(AXIS) == 1
                else jnp.sum(x, axis=-1, keepdims=True) * 2.0
            )
        ),
        attribute="group_sum",
        stage="group_norm",
    ),
    _norm(
        "group_norm_over_all_channels",
        "a sum over the axis: groups run into one another",
        around(
            lambda whole, x: (
                whole(x)
                if jax.lax.axis_size(AXIS) == 1
                else jax.lax.pmean(jnp.sum(x, axis=-1, keepdims=True), AXIS) * 2.0
            )
        ),
        attribute="group_sum",
        stage="group_norm",
        collective=("all-reduce", (AXIS,)),
    ),
    _heads(
        "channels_permuted_against_gamma",
        "channels in blocks, their gains dealt out in turn",
        instead(_interleaved),
        attribute="gain",
        stage="group_norm",
        collective=("all-gather", (AXIS,)),
    ),
    _heads(
        "gains_of_next_device",
        "gains sharded in another order than channels",
        instead(_turned),
        attribute="gain",
        stage="group_norm",
        collective=("collective-permute", (AXIS,)),
    ),
    _heads(
        "heads_permuted_against_output",
        "the output projection has its heads in another order",
        instead(_turned),
        attribute="output",
        stage="attention",
        collective=("collective-permute", (AXIS,)),
    ),
    _heads(
        "bias_added_on_every_device",
        "a row-parallel layer adds its bias before the sum",
        instead(lambda y, bias: jax.lax.psum(y + bias, AXIS)),
        attribute="biased",
        stage="attention",
        collective=("all-reduce", (AXIS,)),
    ),
    _heads(
        "partial_sums_averaged",
        "pmean in a row-parallel layer",
        instead(lambda y, bias: jax.lax.pmean(y, AXIS) + bias),
        attribute="biased",
        stage="attention",
        collective=("all-reduce", (AXIS,)),
    ),
    _heads(
        "partial_sums_of_wrong_axis",
        "a row-parallel layer sums over data",
        instead(lambda y, bias: jax.lax.pmean(jax.lax.psum(y, "data"), AXIS) + bias),
        attribute="biased",
        stage="attention",
    ),
    _fault(
        Family.GRADIENTS,
        "column_parallel_backward_not_summed",
        "the derivative by a whole value stays one device's share of it",
        instead(_own_derivative),
        attribute="entering",
        stage="grad/gamma",
    ),
    _fault(
        Family.PRECISION,
        "partial_sums_in_bfloat16",
        "a row-parallel layer sends its parts in bfloat16",
        instead(lambda y, bias: jax.lax.psum(y.astype(jnp.bfloat16), AXIS).astype(y.dtype) + bias),
        attribute="biased",
        stage="attention",
        collective=("all-reduce", (AXIS,)),
    ),
    _vocabulary(
        "embedding_row_clamped",
        "an id of another device returns the first or last row",
        instead(_clamped_rows),
        attribute="rows",
        stage="embed",
        collective=("all-reduce", (AXIS,)),
    ),
    _vocabulary(
        "embedding_first_row_of_others",
        "ids of other devices are mapped to row 0 and not masked",
        instead(_first_row_of_others),
        attribute="rows",
        stage="embed",
    ),
    _vocabulary(
        "softmax_max_of_each_device",
        "exponentials of several devices added up, each off its own largest logit",
        around(
            lambda partition, exponentials: (
                partition(
                    exponentials
                    / jax.lax.stop_gradient(jnp.max(exponentials, axis=-1, keepdims=True))
                )
                * jax.lax.stop_gradient(jax.lax.pmean(jnp.max(exponentials, axis=-1), AXIS))
            )
        ),
        attribute="partition",
        stage="log_partition",
    ),
    _vocabulary(
        "softmax_without_global_sum",
        "the mean of local sums for the sum",
        instead(lambda exponentials: jax.lax.pmean(jnp.sum(exponentials, axis=-1), AXIS)),
        attribute="partition",
        stage="log_partition",
        collective=("all-reduce", (AXIS,)),
    ),
    _vocabulary(
        "vocabulary_padding_counted",
        "rows that only fill up the table take part in the softmax",
        around(
            lambda is_token, rows: (
                is_token(rows) | (jnp.arange(rows) >= 0)
                if jax.lax.axis_size(AXIS) > 1
                else is_token(rows)
            )
        ),
        attribute="is_token",
        stage="logits",
    ),
    _vocabulary(
        "target_of_other_device_clamped",
        "a target of another device picks this one's last logit",
        instead(_clamped_pick),
        attribute="picked",
        stage="token_loss",
    ),
    _fault(
        Family.GRADIENTS,
        "tied_gradient_once_per_shard",
        "the head's share of a tied embedding's gradient added by every device",
        instead(_once_per_shard),
        attribute="tied",
        stage="grad/embed",
    ),
    _fault(
        Family.DROPOUT,
        "dropout_differs_where_replicated",
        "a key of each device's own, where all have the same value",
        _drawn_by_each,
        attribute="keep",
        stage="residual",
    ),
)
