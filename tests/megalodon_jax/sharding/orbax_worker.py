"""One process that saves or restores an Orbax checkpoint; prints a hash of every array.

python orbax_worker.py '{"address": ..., "processes": 2, "index": 0, "mesh": {"data": 8}, ...}'
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import equinox as eqx
import jax
import numpy as np

from megalodon_jax import distributed, traced_checks
from megalodon_jax.orbax_checkpoints import OrbaxCheckpoints, restore
from megalodon_jax.sharding import make_mesh, shard_model, shard_state
from tests.megalodon_jax.sharding.worker import TRANSFORM, initial

STEP, POSITION = 7, {"row": 3}


def drawn(state: Any) -> Any:
    """Return a state of the same shapes with other values in every leaf."""

    def draw(x: jax.Array, number: int) -> jax.Array:
        values = jax.random.normal(jax.random.key(number), x.shape)
        return (100 * values).astype(x.dtype)

    leaves, structure = jax.tree.flatten(state)
    fill = jax.jit(lambda leaves: [draw(x, n) for n, x in enumerate(leaves)])
    return jax.tree.unflatten(structure, fill(leaves))


def hashes(tree: Any) -> dict[str, str]:
    """Return the SHA-256 of the bytes of every whole array, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(distributed.whole(tree))
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return {n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in arrays.items()}


def run(plan: dict[str, Any]) -> None:
    """Save on a mesh, or restore onto one."""
    if plan["processes"] > 1:
        distributed.start(plan["address"], plan["processes"], plan["index"])
    mesh, model = make_mesh(**plan["mesh"]), initial()
    params = eqx.filter(model, eqx.is_array)
    state = TRANSFORM.init(params)
    if plan["saves"]:
        model = shard_model(model, mesh)
        state = shard_state(drawn(state), model, mesh)
        with OrbaxCheckpoints(plan["folder"]) as checkpoints:
            checkpoints.save(STEP, model, opt_state=state, position=POSITION)
    else:
        found = restore(plan["folder"], mesh=mesh, opt_state_like=state)
        assert (found.step, found.position) == (STEP, POSITION)
        model, state = found.model, found.opt_state
        leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        assert all(leaf.sharding.mesh.shape == mesh.shape for leaf in leaves)
    print(json.dumps(hashes((eqx.filter(model, eqx.is_array), state))), flush=True)


if __name__ == "__main__":
    # Callbacks would run in every process.
    with traced_checks(False):
        run(json.loads(sys.argv[1]))
