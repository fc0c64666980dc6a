"""One process of a training run on several, as a user would write it; prints a line for each step.

With `moved` in its plan, the weights it begins with are each a unit in the last place away.

python worker.py '{"address": ..., "processes": 2, "index": 0, "mesh": {"data": 8}, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from megalodon_jax import MegalodonConfig, MegalodonForCausalLM, distributed, traced_checks
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.sharding import make_mesh, shard_batch, shard_model, shard_state

CONFIG = MegalodonConfig(
    vocab_size=256,
    model_dim=32,
    num_layers=2,
    num_heads=4,
    z_dim=16,
    value_dim=32,
    ffn_hidden_dim=32,
    cema_ndim=4,
    chunk_size=16,
    norm_num_groups=4,
    dropout=0.1,
    pad_token_id=None,
)
TRANSFORM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
ROWS, LENGTH = 8, 64


def batch(text: np.ndarray, step: int) -> dict[str, np.ndarray]:
    """Rows of the text by the number of the step alone, so that a run resumes where it stopped."""
    starts = np.random.default_rng(step).integers(0, len(text) - LENGTH, ROWS)
    ids = np.stack([text[s : s + LENGTH] for s in starts]).astype(np.int32)
    return {"input_ids": ids, "labels": ids}


@eqx.filter_jit(donate="all")
def advanced(model: Any, state: Any, batch: Any, key: jax.Array) -> Any:
    """One step."""

    def loss(model: Any) -> jax.Array:
        return model.compute_loss(**batch, deterministic=False, key=key)

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    params = eqx.filter(model, eqx.is_array)
    updates, state = optimiser_update(TRANSFORM, gradients, state, params)
    return eqx.apply_updates(model, updates), state, value


def initial() -> Any:
    """Return the model as every process draws it."""
    return eqx.filter_jit(MegalodonForCausalLM)(CONFIG, key=jax.random.key(0))


def run(plan: dict[str, Any]) -> None:
    """Train from `first` to `last`, save there, and end early at `dies` if there is such a step."""
    if plan["processes"] > 1:
        patience = plan.get("patience", 40)
        distributed.start(plan["address"], plan["processes"], plan["index"], patience=patience)
    mesh = make_mesh(**plan["mesh"])
    text = np.frombuffer(Path(plan["text"]).read_bytes(), np.uint8)
    model = initial()
    state = TRANSFORM.init(eqx.filter(model, eqx.is_array))
    if plan["first"]:
        found = distributed.load(plan["folder"], mesh, opt_state_like=state)
        model, state = found.model, found.opt_state
        if "moved" in plan:
            # Not above: processes that meet must not compute before they have.
            from tests.helpers import one_ulp_away

            model = one_ulp_away(model, plan["moved"])
    else:
        model, state = shard_model(model, mesh), shard_state(state, model, mesh)
    program = None
    for step in range(plan["first"], plan["last"]):
        if step == plan.get("dies") and plan["index"] == 1:
            os._exit(9)
        placed = shard_batch(batch(text, step), mesh, chunk_size=CONFIG.chunk_size)
        key = jax.random.key(step)
        program = program or distributed.compiled(advanced, model, state, placed, key)
        model, state, loss = program(model, state, placed, key)
        print(json.dumps({"step": step, "loss": float(loss)}), flush=True)
        if step + 1 in plan["saves"]:
            distributed.save(plan["folder"], model, step=step + 1, opt_state=state)


if __name__ == "__main__":
    # Callbacks would run in every process.
    with traced_checks(False):
        run(json.loads(sys.argv[1]))
