"""Placement rules: the mesh axes that cut a parameter, according to its role.

    embedding, head     rows (the vocabulary) on `tensor`
    linear              rows on `tensor` (heads, FFN columns, channels); but columns of `wh2` and
                        `fc2`, whose inputs are cut already
    bias, norm, cema    channels on `tensor`, so that a norm's group is where its channels are
    q/k affine          heads on `tensor`
    lora                the axis shared with its matrix is cut like the matrix; the rank is not cut

`fsdp` cuts the other axis of a matrix. Vectors and the EMA, a thousandth of a model, are replicated
over `fsdp`, since each would need a separate collective. Source: docs/sharding.md "Where things
lie".
"""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.roles import Role, check_unstacked, dotted, named_leaves, role_of
from megalodon_jax.sharding.axes import (
    FSDP,
    TENSOR,
    AnyMesh,
    axis_sizes,
    check_divisible,
    constrained,
    mesh_of,
)

Tree = TypeVar("Tree")
_MATRICES = (Role.EMBEDDING, Role.HEAD, Role.LINEAR)
_READS_PARTS = r"(^|\.)(wh2|fc2)\.weight$"


def partition_spec(name: str, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Return the sharding spec with which a parameter is stored.

    If `tensor` does not divide the vocabulary, the columns of embedding and head are cut instead of
    their rows; the program then pads both with rows that no token uses. A parameter without a rule
    (`Role.OTHER`) is replicated, because how its layer reads it is unknown.
    """
    sizes, dim, role = axis_sizes(mesh), _tensor_dim(name), role_of(name)
    if role is Role.OTHER:
        return PartitionSpec()
    if role is Role.LORA:
        own = _shared_dim(name)
        return _spec(sizes, shape, {own: (TENSOR,) if own == dim else (FSDP,)})
    if role not in _MATRICES:
        return _spec(sizes, shape, {dim: (TENSOR,)})
    other, both = 1 - dim, (TENSOR, FSDP)
    if _divides(sizes, (TENSOR,), shape[dim]):
        return _spec(sizes, shape, {dim: (TENSOR,), other: (FSDP,)})
    return _spec(sizes, shape, {other: both if _divides(sizes, both, shape[other]) else (FSDP,)})


def partition_specs(model: Any, mesh: AnyMesh) -> dict[str, PartitionSpec]:
    """Return the sharding spec with which each parameter is stored, by name.

    Args:
        model: a `MegalodonForCausalLM` of arrays or shapes.
        mesh: the mesh; axes with names outside of `sharding.AXES` hold replicas.

    Raises:
        ValueError: the mesh does not divide the model (`check_config`), or its layers are stacked.
    """
    check_config(model.config, mesh)
    check_unstacked("sharding", model)
    leaves = named_leaves(model)
    return {name: partition_spec(name, tuple(x.shape), mesh) for name, x in leaves.items()}


def check_config(config: MegalodonConfig, mesh: AnyMesh) -> None:
    """Check that a mesh divides heads, norm groups, FFN width and model width of a configuration.

    Raises:
        ValueError: a size is not divisible; the message has the field, its value and the number of
            parts.
    """
    check_divisible(
        mesh,
        "tensor",
        num_heads=config.num_heads,
        norm_num_groups=config.norm_num_groups,
        ffn_hidden_dim=config.ffn_hidden_dim,
    )
    parts = axis_sizes(mesh).get(FSDP, 1)
    if config.model_dim % parts:
        raise ValueError(
            f"sharding: model_dim={config.model_dim} does not divide by the {parts} parts of the "
            f"mesh axis {FSDP}; choose a mesh whose {FSDP} divides {config.model_dim}."
        )


def gathered(tree: Tree, x: Any) -> Tree:
    """Return parameters as a layer reads them: gathered over `fsdp`, still cut by `tensor`.

    Call this once per block, where the parameters are used: gathered parameters live only while the
    block runs, and their gradients are summed into the parts.

    Args:
        tree: a block, or any pytree whose leaves have the names of parameters.
        x: an activation, whose type includes the mesh.
    """
    mesh = mesh_of(x)
    if mesh is None:
        return tree
    sizes = axis_sizes(mesh)

    def read(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        name = dotted(path)
        dim, role = _tensor_dim(name), role_of(name)
        if role is Role.OTHER:
            return constrained(leaf, mesh, PartitionSpec())
        reads_whole = role is Role.LORA and _shared_dim(name) != dim
        spec = _spec(sizes, leaf.shape, {} if reads_whole else {dim: (TENSOR,)})
        return constrained(leaf, mesh, spec)

    return jax.tree_util.tree_map_with_path(read, tree)


def _shared_dim(name: str) -> int:
    """Return the axis (0 or 1) that an adapter's matrix shares with the matrix it adapts."""
    return int("lora_A" in name)


def _tensor_dim(name: str) -> int:
    role = role_of(name)
    # For an adapter, use the axis of its matrix.
    name = re.sub(r"lora_[AB]$", "weight", name)
    return int(role == Role.QK_AFFINE or re.search(_READS_PARTS, name) is not None)


def _divides(sizes: dict[str, int], names: tuple[str, ...], size: int) -> bool:
    return size % math.prod(sizes.get(name, 1) for name in names) == 0


def _spec(
    sizes: dict[str, int], shape: tuple[int, ...], cuts: dict[int, tuple[str, ...]]
) -> PartitionSpec:
    """Return the spec of an array; `cuts` gives the mesh axes that cut an array axis, by its index.

    Mesh axes of size 1 are left out. An array axis whose size is no multiple of the product of its
    mesh axes is not cut.
    """
    entries: list[Any] = []
    for dim, size in enumerate(shape):
        names = tuple(name for name in cuts.get(dim, ()) if sizes.get(name, 1) > 1)
        entries.append(names if names and _divides(sizes, names, size) else None)
    return PartitionSpec(*entries)
