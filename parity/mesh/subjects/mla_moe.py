"""MLA-MoE on meshes with expert parallelism: only the arguments are sharded, XLA does the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from megalodon_jax.roles import named_leaves
from parity.deepseek_v3.cases import BUFFER, TINY, Case
from parity.mesh.step import MeshComparison
from parity.mesh.subjects.training import STEPS, initial_state, trained

MESHES = (
    {"data": 8, "expert": 1},
    {"data": 2, "expert": 4},
    {"data": 4, "expert": 2},
    {"data": 1, "expert": 8},
)
"""Meshes of 8 devices, from data parallel to expert parallel."""
EXPERTS = "mlp/experts/"
"""Part of the path of parameters with one row per expert."""


def mla_moe(*, steps: int = STEPS, meshes: Any = MESHES, batch: int = 8) -> MeshComparison:
    """Return a training run of a tiny MLA-MoE, to be compared over meshes.

    Texts are sharded along `data`, experts along `expert`.

    Args:
        steps: number of AdamW steps; 0: no training, compare loss and gradients.
        meshes: sizes of the axes `data` and `expert`.
        batch: number of texts.
    """
    case = Case("mesh", "experts on an axis", replace(TINY), length=12, batch=batch)
    model = jax.tree.map(np.asarray, case.model())
    params, static = eqx.partition(model, eqx.is_inexact_array_like)

    def loss(params: Any, ids: Any) -> jax.Array:
        total, extra = eqx.combine(params, static).losses(ids)
        for other in extra.values():
            total = total + other
        return total

    def run(params: Any, state: Any, ids: Any) -> dict[str, Any]:
        if steps:
            return trained(loss, params, state, ids, steps=steps)
        value, gradients = jax.value_and_grad(loss)(params, ids)
        return {"loss": value, "grad": named_leaves(gradients)}

    state = initial_state(params) if steps else ()
    # The router's bias only selects experts, so its gradient and both moments are 0. It starts at 0
    # and stays there.
    buffers = [name for name in named_leaves(params) if name.endswith(BUFFER)]
    derived = ("grad", *(f"step{steps}/{what}" for what in ("mu", "nu", "params")))
    zeros = {f"{what}/{name}" for name in buffers for what in derived}
    arguments = (params, state, case.ids)
    return MeshComparison(run, arguments, _spec, meshes, name="mla-moe", zeros=zeros)


def _spec(path: str, leaf: Any, mesh: Any) -> P:
    if path == "2":
        return P("data")
    return P("expert") if EXPERTS in path else P()
