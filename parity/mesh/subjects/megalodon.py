"""Megalodon on meshes: logits, every intermediate, loss, gradients, and steps of AdamW."""

from __future__ import annotations

from functools import cache
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.roles import named_leaves, replace_leaves
from megalodon_jax.sharding import padded_batch
from megalodon_jax.sharding.axes import AnyMesh, spec_of
from megalodon_jax.sharding.rules import partition_spec
from megalodon_jax.weights import build_model, weight_table
from parity.mesh.step import MeshComparison
from parity.mesh.subjects.training import STEPS, initial_state, trained

AXES = ("data", "fsdp", "tensor", "sequence")
"""Mesh axes of Megalodon."""
MESHES = (
    {"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1},
    {"data": 2, "fsdp": 1, "tensor": 4, "sequence": 1},
    {"data": 4, "fsdp": 2, "tensor": 1, "sequence": 1},
    {"data": 2, "fsdp": 1, "tensor": 2, "sequence": 2},
    {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 8},
)
"""Meshes of 8 devices: data parallel, two and three axes combined, and sequence parallel."""
SMALL = MegalodonConfig(
    vocab_size=20,
    model_dim=16,
    num_layers=1,
    num_heads=4,
    z_dim=16,
    value_dim=16,
    ffn_hidden_dim=24,
    cema_ndim=2,
    chunk_size=4,
    norm_num_groups=4,
    swiglu=True,
)
"""Configuration of the subject. Vocabulary (20), heads and norm groups (4 each) are divisible by 4
but not by 8, which tests axes that do not divide a size."""
PARTS = 8
"""Largest number of parts into which the sequence axis splits a text. Texts are padded to a
multiple of that many chunks."""


def megalodon(
    config: MegalodonConfig = SMALL,
    *,
    length: int = 29,
    batch: int = 8,
    seed: int = 0,
    steps: int = STEPS,
    gradients: bool = True,
    meshes: Any = MESHES,
    explicit: bool = False,
) -> MeshComparison:
    """Return a training run of Megalodon, to be compared over meshes.

    Weights are random, and texts have different lengths.

    Args:
        config: float32 configuration; in float64 `config.with_dtype("float64")` is used.
        length: tokens of the longest text, before padding.
        batch: number of texts.
        seed: seed of weights, ids and masks.
        steps: number of AdamW steps; 0: no training, compare intermediates, loss and gradients.
        gradients: whether gradients are computed if `steps` is 0.
        meshes: axis sizes; each mesh has all axes of `AXES`.
        explicit: whether mesh axes have JAX's type Explicit.
    """
    rng = np.random.default_rng([7, seed])
    weights = {
        row.name: (0.3 * rng.standard_normal(row.shape)).astype(np.float32)
        for row in weight_table(config)
    }
    model = jax.tree.map(np.asarray, build_model(config, weights))
    ids = rng.integers(1, config.vocab_size, (batch, length)).astype(np.int32)
    ends = rng.integers(2, length + 1, batch)
    ends[0] = length
    text = {
        "input_ids": ids,
        "labels": np.where(rng.random(ids.shape) < 0.2, -100, ids).astype(np.int32),
        "attention_mask": np.arange(length)[None] < ends[:, None],
    }
    text = padded_batch(text, PARTS * config.chunk_size)
    params, _ = eqx.partition(model, eqx.is_array_like)

    def loss(params: Any, text: Any) -> jax.Array:
        return _typed(config, params).compute_loss(**text)

    def run(params: Any, state: Any, text: Any) -> dict[str, Any]:
        if steps:
            return trained(loss, params, state, text, steps=steps)
        if not gradients:
            return {"loss": loss(params, text)}
        value, grad = jax.value_and_grad(loss)(params, text)
        return {"loss": value, "grad": named_leaves(grad)}

    state = initial_state(params) if steps else ()
    arguments = (params, state, text)
    return MeshComparison(run, arguments, _spec, meshes, name="megalodon", explicit=explicit)


def _spec(path: str, leaf: Any, mesh: AnyMesh) -> P:
    """Return the sharding of an argument leaf: texts by row and token, parameters by role."""
    if path.startswith("2/"):
        return spec_of(mesh, leaf.shape, ("batch", "sequence"))
    name = path.replace("/", ".")
    owner = next((n for n in ("model.", "lm_head.") if f".{n}" in name), None)
    if owner is None or not leaf.ndim:
        return P()
    return partition_spec(name[name.index(f".{owner}") + 1 :], leaf.shape, mesh)


def _typed(config: MegalodonConfig, params: Any) -> MegalodonForCausalLM:
    """Return the model with the given parameters, configured for their dtype."""
    leaves = named_leaves(params)
    dtype = next(iter(leaves.values())).dtype.name
    return replace_leaves(_abstract(config, dtype), leaves)


@cache
def _abstract(config: MegalodonConfig, dtype: str) -> MegalodonForCausalLM:
    typed = config.with_dtype(dtype)
    with jax.enable_x64(dtype == "float64"):
        return eqx.filter_eval_shape(MegalodonForCausalLM, typed, key=jax.random.key(0))
