"""Programs that the tests of sharding share, and what they run on: compiled once for a mesh."""

from __future__ import annotations

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from megalodon_jax import MegalodonConfig, MegalodonForCausalLM
from megalodon_jax.sharding import make_mesh, shard_batch, shard_model
from tests.helpers import model_of, tiny, tokens

SMALL = tiny(
    model_dim=16,
    num_layers=1,
    num_heads=4,
    z_dim=16,
    value_dim=24,
    ffn_hidden_dim=20,
    norm_num_groups=4,
    swiglu=True,
)
"""Divides by every axis of eight devices but in its vocabulary of 17, which is filled up."""
B, L = 8, 32


def mesh_named(name: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """The mesh of a name such as "data=2 tensor=4"."""
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in name.split())}
    mesh = make_mesh(**sizes)
    kinds = (kind,) * len(mesh.axis_names)
    return mesh if kind == AxisType.Auto else Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


@cache
def ragged(rows: int = B, length: int = L) -> dict[str, np.ndarray]:
    """A batch whose rows hold different numbers of tokens: late, early, with holes, and full."""
    rng = np.random.default_rng(5)
    mask = rng.random((rows, length)) < 0.8
    mask[0, : length // 3] = False
    mask[1, length // 2 :] = False
    mask[2] = True
    mask[3, : length - 3] = False
    ids = tokens(SMALL, (rows, length))
    labels = np.where(rng.random(ids.shape) < 0.9, ids, -100).astype(np.int32)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@eqx.filter_jit
def evaluated(
    model: MegalodonForCausalLM, batch: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, Any]:
    """Logits, loss and gradients of a batch."""

    def loss(model: MegalodonForCausalLM) -> jax.Array:
        return model.compute_loss(**batch)

    logits, _ = model(batch["input_ids"], batch["attention_mask"])
    value, gradients = eqx.filter_value_and_grad(loss)(model)
    return logits, value, gradients


def on_one_device(config: MegalodonConfig, batch: dict[str, np.ndarray]) -> Any:
    """What `evaluated` returns there."""
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    return evaluated(model_of(config), arrays)


def on_mesh(config: MegalodonConfig, batch: dict[str, np.ndarray], mesh: Mesh) -> Any:
    """What `evaluated` returns with model and batch laid out on a mesh."""
    model = shard_model(model_of(config), mesh)
    return evaluated(model, shard_batch(batch, mesh, chunk_size=config.chunk_size))
