"""A step to try `megalodon-numerics mesh` on: a network in two parts, on one device and on eight.

Leave out the `psum`, with `check_vma=False` in `shard_map`: the report names where it starts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parity.mesh import MeshComparison

WEIGHTS = {"up": P(None, "tensor"), "down": P("tensor")}


def network(weights, x, y):
    """Return the loss of one shard: `tensor` splits the hidden layer, `data` the batch."""
    hidden = checkpoint_name(jnp.tanh(x @ weights["up"]), "hidden")
    result = checkpoint_name(jax.lax.psum(hidden @ weights["down"], "tensor"), "result")
    return jax.lax.pmean(jnp.mean((result - y) ** 2), "data")


def train(weights, x, y):
    """Return loss and gradients."""
    sharded = jax.shard_map(network, in_specs=(WEIGHTS, P("data"), P("data")), out_specs=P())
    loss, grad = jax.value_and_grad(sharded)(weights, x, y)
    return {"loss": loss, "grad": grad}


def step():
    """Return what is compared; `mesh FILE` calls this."""
    rng = np.random.default_rng(0)
    shapes = {"up": (8, 16), "down": (16, 4)}
    weights = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    x, y = (rng.standard_normal((32, width)).astype(np.float32) for width in (8, 4))
    return MeshComparison(
        function=train,
        arguments=(weights, x, y),
        specs=(WEIGHTS, P("data"), P("data")),
        meshes=[{"data": 8, "tensor": 1}, {"data": 2, "tensor": 4}],
    )
