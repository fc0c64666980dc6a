"""Bugs of a data-parallel step: gradients, counts, optimiser, gathered and saved parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from parity.faults.fault import around
from tests.parity.mesh.faults.fault import Family, fault, instead
from tests.parity.mesh.faults.witnesses.training import BETAS, BOTH, DECAY, Training

_fault = partial(fault, owner=Training)
_gradient = partial(_fault, Family.GRADIENTS, attribute="reduced", stage="gradient.down")
_count = partial(_fault, Family.COUNTS)


def _scattered(g: Any) -> Any:
    return jax.lax.psum_scatter(g, "fsdp", tiled=True)


def _own_rows(g: Any) -> Any:
    rows = g.shape[0] // jax.lax.axis_size("fsdp")
    return jax.lax.dynamic_slice_in_dim(g, jax.lax.axis_index("fsdp") * rows, rows)


def _narrow(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


def _next_device(x: Any, axis: str) -> Any:
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


def _stale(shard: Any, before: Any) -> Any:
    """Return the copy gathered one step earlier, in which only this device's rows are updated."""
    whole = jax.lax.all_gather(shard, "fsdp", tiled=True)
    if before is None:
        return whole
    start = jax.lax.axis_index("fsdp") * shard.shape[0]
    return jax.lax.dynamic_update_slice_in_dim(before, shard, start, 0)


def _saved_by_wrong_axis(shard: Any) -> Any:
    """Return as many blocks as there are shards, but replicas along `data` instead of shards."""
    parts = jax.lax.all_gather(shard, "data")[: jax.lax.axis_size("fsdp")]
    return parts.reshape(-1, *shard.shape[1:])


@around
def _first_batch_only(accumulate, gradients):
    # Summed over devices after the first micro-batch, and everything again after the last.
    first, *rest = gradients
    return accumulate([jax.tree.map(lambda g: jax.lax.psum(g, BOTH), first), *rest])


def _remainder_dropped(valid: Any) -> Any:
    """Keep only complete rows of devices, as a loader with drop_last does with 29 rows."""
    devices = jax.sharding.get_abstract_mesh().size
    return valid * (jnp.arange(len(valid)) < 29 // devices * devices).astype(valid.dtype)


FAULTS = (
    _gradient(
        "gradient_sum_missing",
        "no sum over data: every replica goes its own way",
        instead(_scattered),
    ),
    _gradient(
        "gradient_sum_twice",
        "a sum in the step and one in the optimiser",
        around(lambda reduced, g: jax.lax.psum(reduced(g), "data")),
        collective=("all-reduce", ("data",)),
    ),
    _gradient(
        "gradient_sum_over_wrong_axis",
        "summed over fsdp, cut on fsdp, never over data",
        instead(lambda g: _own_rows(jax.lax.psum(g, "fsdp"))),
        collective=("all-reduce", ("fsdp",)),
    ),
    _gradient(
        "gradient_mean_for_sum",
        "pmean of what was divided by the global count already",
        instead(lambda g: _scattered(jax.lax.pmean(g, "data"))),
    ),
    _gradient(
        "gradient_shards_not_summed",
        "every device keeps its rows of its own gradient: reduce-scatter without reduce",
        instead(lambda g: _own_rows(jax.lax.psum(g, "data"))),
    ),
    _gradient(
        "gradient_rows_of_next_shard",
        "a scatter in the order of another mesh",
        around(lambda reduced, g: _next_device(reduced(g), "fsdp")),
        collective=("collective-permute", ("fsdp",)),
    ),
    _fault(
        Family.GRADIENTS,
        "gradient_sum_in_every_micro_batch",
        "the sum between devices inside of the accumulation, and once more after it",
        _first_batch_only,
        attribute="accumulated",
        stage="gradient.down",
    ),
    _fault(
        Family.GRADIENTS,
        "gradient_over_local_count",
        "every device divides by its own rows, then the mean: uneven counts weigh the same",
        instead(
            lambda g, valid, count: g / jnp.maximum(jnp.sum(valid), 1) / jax.lax.axis_size(BOTH)
        ),
        attribute="scaled",
        stage="gradient.down",
    ),
    _count(
        "loss_mean_of_means",
        "pmean of local means with uneven counts",
        instead(
            lambda total, valid, count: jax.lax.pmean(total / jnp.maximum(jnp.sum(valid), 1), BOTH)
        ),
        attribute="mean",
        stage="mean",
        collective=("all-reduce", BOTH),
    ),
    _count(
        "loss_of_first_replica",
        "the loss that is logged is one device's",
        instead(lambda total, valid, count: total / jnp.maximum(jnp.sum(valid), 1)),
        attribute="mean",
        stage="mean",
    ),
    _count(
        "count_local",
        "valid rows counted on one device and multiplied",
        instead(lambda valid: jnp.sum(valid) * jax.lax.axis_size(BOTH)),
        attribute="count",
        stage="count",
    ),
    _count(
        "count_of_one_axis",
        "valid rows summed over data only",
        instead(lambda valid: jax.lax.psum(jnp.sum(valid), "data")),
        attribute="count",
        stage="count",
        collective=("all-reduce", ("data",)),
    ),
    _count(
        "count_at_least_one_each",
        "a guard against 0/0 on each device: a device with masked rows alone counts one",
        instead(lambda valid: jax.lax.psum(jnp.maximum(jnp.sum(valid), 1), BOTH)),
        attribute="count",
        stage="count",
        collective=("all-reduce", BOTH),
    ),
    _count(
        "batch_remainder_dropped",
        "a batch that does not divide loses its last rows",
        instead(_remainder_dropped),
        attribute="filled_rows",
        stage="count",
    ),
    _count(
        "batch_filled_rows_counted",
        "rows that fill up the batch of each device weigh like text",
        instead(
            lambda valid: jnp.where(
                (jnp.arange(len(valid)) >= 29) & (jax.sharding.get_abstract_mesh().size > 1),
                1.0,
                valid,
            )
        ),
        attribute="filled_rows",
        stage="count",
    ),
    _fault(
        Family.OPTIMISER,
        "clip_by_local_norm",
        "the norm of this device's rows",
        instead(lambda gs: sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gs))),
        attribute="squared_norm",
        stage="norm",
    ),
    _fault(
        Family.OPTIMISER,
        "clip_norm_of_replicas",
        "the norm summed over data: replicas count again and again",
        instead(
            lambda gs: jax.lax.psum(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gs)), BOTH)
        ),
        attribute="squared_norm",
        stage="norm",
        collective=("all-reduce", BOTH),
    ),
    _fault(
        Family.OPTIMISER,
        "decay_per_replica",
        "weight decay added to the gradient of every replica before they are summed",
        instead(lambda g, w: g + DECAY * w),
        attribute="early_decay",
        stage="gradient.down",
    ),
    _fault(
        Family.OPTIMISER,
        "adam_count_per_replica",
        "the count of steps summed with the other metrics",
        instead(lambda count: count + jax.lax.axis_size(BOTH)),
        attribute="counted",
        stage="steps",
    ),
    _fault(
        Family.OPTIMISER,
        "moment_of_replica",
        "a moment updated on every device with its own number of the batch",
        instead(
            lambda m, g: (
                BETAS[0] * m + (1 - BETAS[0]) * g * (1 + jax.lax.axis_index("data")).astype(g.dtype)
            )
        ),
        attribute="first_moment",
        stage="moment.down",
    ),
    _fault(
        Family.PARAMETERS,
        "parameter_stale",
        "gathered once and kept: other devices' rows are a step old",
        instead(_stale),
        attribute="parameter",
        stage="gathered.down#1",
    ),
    _fault(
        Family.PARAMETERS,
        "parameter_gathered_in_wrong_order",
        "shards put together in the order they arrive",
        instead(
            lambda shard, before: jax.lax.all_gather(
                _next_device(shard, "fsdp"), "fsdp", tiled=True
            )
        ),
        attribute="parameter",
        stage="gathered.down",
        collective=("collective-permute", ("fsdp",)),
    ),
    _fault(
        Family.PARAMETERS,
        "parameter_gathered_over_wrong_axis",
        "replicas of one shard put together instead of the shards",
        instead(lambda shard, before: _saved_by_wrong_axis(shard)),
        attribute="parameter",
        stage="gathered.down",
        collective=("all-gather", ("data",)),
    ),
    _fault(
        Family.PARAMETERS,
        "checkpoint_of_wrong_axis",
        "written by replica 0 of data: one shard several times",
        instead(_saved_by_wrong_axis),
        attribute="saved",
        stage="saved/down",
        collective=("all-gather", ("data",)),
    ),
    _fault(
        Family.DROPOUT,
        "dropout_key_equal_on_all_shards",
        "one key, and every device draws the same rows",
        instead(lambda key, shape: jax.random.bernoulli(key, 0.8, shape)),
        attribute="keep",
        stage="keep",
    ),
    _fault(
        Family.DROPOUT,
        "dropout_depends_on_mesh",
        "the key folded with the device's number: sound, but another mask on another mesh",
        instead(
            lambda key, shape: jax.random.bernoulli(
                jax.random.fold_in(key, jax.lax.axis_index(BOTH)), 0.8, shape
            )
        ),
        attribute="keep",
        stage="keep",
    ),
    _fault(
        Family.PRECISION,
        "gradients_summed_in_bfloat16",
        "an all-reduce of half the bytes",
        instead(lambda g: _scattered(jax.lax.psum(_narrow(g), "data").astype(g.dtype))),
        attribute="reduced",
        stage="gradient.down",
    ),
    _fault(
        Family.PRECISION,
        "micro_batches_summed_in_bfloat16",
        "an accumulator of the parameters' storage dtype",
        around(
            lambda accumulated, gs: jax.tree.map(
                lambda a, g: a.astype(g.dtype),
                accumulated([jax.tree.map(_narrow, g) for g in gs]),
                gs[0],
            )
        ),
        attribute="accumulated",
        stage="gradient.down",
    ),
)
