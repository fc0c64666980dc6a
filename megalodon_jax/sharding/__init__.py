"""One model on many devices: axes of a mesh, where parameters lie, what crosses between shards.

The layers ask `axes`, `rules` and `sequence`; a user calls what is exported here.
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
