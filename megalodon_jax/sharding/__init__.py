"""Sharding of one model over many devices: mesh axes, parameter placement, communication.

The layers use the modules `axes`, `rules` and `sequence`; users call the functions exported here.
"""

from megalodon_jax.sharding.axes import AXES, make_mesh
from megalodon_jax.sharding.placement import (
    padded_batch,
    shard_batch,
    shard_model,
    shard_state,
)
from megalodon_jax.sharding.rules import partition_specs

__all__ = [
    "AXES",
    "make_mesh",
    "padded_batch",
    "partition_specs",
    "shard_batch",
    "shard_model",
    "shard_state",
]
