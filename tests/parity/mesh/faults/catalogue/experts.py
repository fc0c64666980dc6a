"""Bugs of expert parallelism: routing of tokens, and combination of expert outputs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from parity.faults.fault import around
from tests.parity.mesh.faults.fault import Family, fault, instead
from tests.parity.mesh.faults.witnesses.experts import AXIS, CAPACITY, Experts

_fault = partial(fault, Family.EXPERTS, owner=Experts)


def _over_local(weights):
    """Normalise over this device's experts; over all devices the sum then exceeds 1."""
    size = weights.shape[-1] // jax.lax.axis_size(AXIS)
    whole = weights.reshape(len(weights), -1, size)
    total = jnp.sum(whole, axis=-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    return (whole / safe).reshape(weights.shape)


FAULTS = (
    _fault(
        "capacity_counted_locally",
        "every device gives an expert its whole capacity: more tokens are taken",
        instead(lambda chosen: jnp.cumsum(chosen, axis=0) - chosen),
        attribute="queue",
        stage="queue",
    ),
    _fault(
        "capacity_divided_among_devices",
        "capacity split by devices, queues counted over the batch: tokens are dropped",
        instead(lambda: CAPACITY // jax.lax.axis_size("data")),
        attribute="capacity",
        stage="gates",
    ),
    _fault(
        "router_statistics_local",
        "the balance loss sees one device's tokens, for all",
        instead(
            lambda x: jax.lax.psum(
                jnp.where(jax.lax.axis_index("data") == 0, jnp.mean(x, axis=0), 0.0), "data"
            )
        ),
        attribute="share",
        stage="load",
        collective=("all-reduce", ("data",)),
    ),
    _fault(
        "router_statistics_summed",
        "means of devices added up",
        instead(lambda x: jax.lax.psum(jnp.mean(x, axis=0), "data")),
        attribute="share",
        stage="load",
        collective=("all-reduce", ("data",)),
    ),
    _fault(
        "router_weights_normalised_locally",
        "weights of a token's experts add up to 1 on each device",
        instead(_over_local),
        attribute="normalised",
        stage="weights",
    ),
    _fault(
        "experts_of_first_device",
        "every device takes the first experts' weights for its own",
        instead(lambda: 0 * jax.lax.axis_index(AXIS)),
        attribute="first",
        stage="gates",
    ),
    _fault(
        "expert_outputs_averaged",
        "pmean where a token's experts are added up",
        instead(lambda said: jax.lax.pmean(said, AXIS)),
        attribute="combined",
        stage="experts",
        collective=("all-reduce", (AXIS,)),
    ),
    _fault(
        "expert_outputs_summed_twice",
        "added up by the layer and by the residual",
        around(lambda combined, said: combined(said) * jax.lax.axis_size(AXIS)),
        attribute="combined",
        stage="experts",
        collective=("all-reduce", (AXIS,)),
    ),
    _fault(
        "tokens_of_another_row",
        "tokens sent along the wrong axis arrive at the experts of other tokens",
        instead(
            lambda x: jax.lax.ppermute(
                x,
                "data",
                [
                    (i, (i + 1) % jax.lax.axis_size("data"))
                    for i in range(jax.lax.axis_size("data"))
                ],
            )
        ),
        attribute="arrived",
        stage="experts",
        collective=("collective-permute", ("data",)),
    ),
)
