"""Bugs of sequence parallelism: states, statistics, positions, labels."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from parity.faults.fault import around
from tests.parity.mesh.faults.fault import Family, fault, instead
from tests.parity.mesh.faults.witnesses.sequence import AXIS, L, Sequence

_fault = partial(fault, owner=Sequence)
_state = partial(_fault, Family.STATES, attribute="incoming_state", stage="ema")
_label = partial(_fault, Family.STATES, attribute="next_first", stage="counts")
_norm = partial(_fault, Family.STATISTICS)


def _from_shard(labels: Any, step: int) -> Any:
    size = jax.lax.axis_size(AXIS)
    moves = [(i, (i + step) % size) for i in range(size)]
    first = jax.lax.ppermute(labels[:, :1], AXIS, moves)
    return jnp.where(jax.lax.axis_index(AXIS) == size - 1, -100, first)


def _own(states: Any, through: Any, place: Any) -> Any:
    """Return this device's outgoing state as its incoming one."""
    size = len(states)
    own = jnp.tensordot((jnp.arange(size) == place).astype(states.dtype), states, 1)
    return own * jnp.asarray(size > 1, own.dtype)


def _last_of_text(valid: Any) -> Any:
    """Count padding of the last shard as text, if there is more than one shard."""
    many = jax.sharding.get_abstract_mesh().shape[AXIS] > 1
    return valid | (jnp.arange(valid.shape[1]) >= L)[None] & many


FAULTS = (
    _state(
        "ema_state_not_handed_over",
        "every shard convolves from rest",
        instead(lambda states, through, place: jnp.zeros_like(states[0])),
    ),
    _state("ema_state_handed_to_itself", "a shard's last state is its first one", instead(_own)),
    _state(
        "ema_state_one_shard_late",
        "the state before the previous shard",
        around(lambda state, states, through, place: state(states, through, place - 1)),
    ),
    _state(
        "ema_state_one_shard_early",
        "a shard's own state is in what it starts from",
        around(
            lambda state, states, through, place: (
                state(states, through, place + 1) * jnp.asarray(len(states) > 1, states.dtype)
            )
        ),
    ),
    _state(
        "ema_state_conjugated",
        "real and imaginary part exchanged with a sign",
        around(lambda state, *args: jnp.conj(state(*args))),
    ),
    _state(
        "ema_state_real_part_only",
        "a complex state sent as real",
        around(lambda state, *args: state(*args).real.astype(args[0].dtype)),
    ),
    _state(
        "ema_state_not_decayed",
        "states of earlier shards added up without q^L",
        around(lambda state, states, through, place: state(states, jnp.ones_like(through), place)),
    ),
    _fault(
        Family.STATES,
        "ema_state_decayed_by_one_step",
        "q for q^L where a state passes through a shard",
        instead(lambda q, length: q),
        attribute="powers",
        stage="ema",
    ),
    _state(
        "ema_state_of_previous_shard_only",
        "a ring of one hop: states of shards further back are lost",
        instead(
            lambda states, through, place: jnp.tensordot(
                (jnp.arange(len(states)) == place - 1).astype(states.dtype), states, 1
            )
        ),
    ),
    fault(
        Family.GRADIENTS,
        "ema_state_detached",
        "the state that comes in is a constant to the gradient",
        around(lambda state, *args: jax.lax.stop_gradient(state(*args))),
        owner=Sequence,
        attribute="incoming_state",
        stage="grad/turn",
    ),
    _fault(
        Family.STATES,
        "exchange_over_wrong_axis",
        "states gathered over data: those of other texts",
        instead(
            lambda x: (
                jax.lax.all_gather(x.real, "data") + 1j * jax.lax.all_gather(x.imag, "data")
                if jnp.iscomplexobj(x)
                else jax.lax.all_gather(x, AXIS)
            )
        ),
        attribute="gathered",
        stage="ema",
    ),
    _label(
        "label_of_next_shard_dropped",
        "the last token of a shard has no target",
        instead(lambda labels: jnp.full_like(labels[:, :1], -100)),
    ),
    fault(
        Family.STATES,
        "label_of_own_shard",
        "labels rolled on each device: the last token predicts the shard's first",
        instead(
            lambda labels: jnp.where(
                jax.lax.axis_index(AXIS) == jax.lax.axis_size(AXIS) - 1, -100, labels[:, :1]
            )
        ),
        owner=Sequence,
        attribute="next_first",
        stage="counts",
    ),
    fault(
        Family.STATES,
        "label_of_previous_shard",
        "the exchange goes the other way",
        instead(lambda labels: _from_shard(labels, 1)),
        owner=Sequence,
        attribute="next_first",
        stage="counts",
        collective=("collective-permute", (AXIS,)),
    ),
    _fault(
        Family.STATES,
        "positions_local",
        "every shard counts from 0",
        instead(lambda length: jnp.arange(length)),
        attribute="positions",
        stage="rotated",
    ),
    _fault(
        Family.STATES,
        "positions_of_whole_batch",
        "devices numbered over the whole mesh, not along the text",
        instead(lambda length: jax.lax.axis_index(("data", AXIS)) * length + jnp.arange(length)),
        attribute="positions",
        stage="rotated",
    ),
    _norm(
        "norm_count_local",
        "every shard counts its own tokens",
        instead(lambda counts, place: jnp.zeros_like(counts[0])),
        attribute="incoming_count",
        stage="norm_count",
    ),
    _norm(
        "norm_count_of_tokens_not_valid",
        "masked tokens of earlier shards count",
        instead(
            lambda counts, place: jnp.broadcast_to(
                (place * (32 // len(counts))).astype(counts.dtype), counts[0].shape
            )
        ),
        attribute="incoming_count",
        stage="norm_count",
    ),
    _norm(
        "norm_mean_local",
        "the mean of earlier shards taken for 0",
        instead(lambda means, counts, place: jnp.zeros_like(means[0])),
        attribute="incoming_mean",
        stage="norm_mean",
    ),
    _norm(
        "norm_mean_of_means",
        "means of shards averaged whatever they count",
        instead(
            lambda means, counts, place: (
                jnp.sum(
                    jnp.where(jnp.arange(len(means))[:, None, None] < place, means, 0.0), axis=0
                )
                / jnp.maximum(place, 1).astype(means.dtype)
            )
        ),
        attribute="incoming_mean",
        stage="norm_mean",
    ),
    _norm(
        "norm_spread_local",
        "squares of earlier shards not handed over",
        instead(lambda spreads, *args: jnp.zeros_like(spreads[0])),
        attribute="incoming_spread",
        stage="norm_spread",
    ),
    _norm(
        "norm_variances_averaged",
        "squared deviations added without those of the means (no Chan term)",
        around(
            lambda spread, spreads, means, counts, mean, place: spread(
                spreads, jnp.broadcast_to(mean, means.shape), counts, mean, place
            )
        ),
        attribute="incoming_spread",
        stage="norm_spread",
    ),
    fault(
        Family.COUNTS,
        "last_shard_filled_with_text",
        "tokens that fill up the last, shorter shard count as text",
        instead(_last_of_text),
        owner=Sequence,
        attribute="filled_tokens",
        stage="norm_count",
    ),
    fault(
        Family.COUNTS,
        "loss_of_first_text",
        "sum and count of the first row of the mesh alone",
        instead(
            lambda x: jax.lax.psum(
                jnp.where(jax.lax.axis_index("data") == 0, x, jnp.zeros_like(x)), ("data", AXIS)
            )
        ),
        owner=Sequence,
        attribute="total",
        stage="loss",
    ),
)
