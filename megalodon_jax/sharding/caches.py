"""Placement of a cache on a mesh: rows like those of a batch, heads and channels on `tensor`.

Source: docs/sharding.md "Generation".
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.roles import dotted
from megalodon_jax.sharding.axes import AnyMesh, Dims, axis_sizes, constrained, mesh_of, spec_of
from megalodon_jax.sharding.placement import laid_out
from megalodon_jax.types import ModelCache, init_cache

Tree = TypeVar("Tree")
_DIMS: dict[str, Dims] = {
    "k": ("batch", None, "tensor", None),
    "v": ("batch", None, "tensor", None),
    "mean": ("batch", "tensor"),
    "var": ("batch", "tensor"),
    "h": ("batch", "tensor", None),
}
_COUNTERS = ("count", "first", "position", "document")
"""Names of counters, which are scalars shared by all rows, or (B,)."""


def cache_specs(cache: Tree, mesh: AnyMesh) -> Tree:
    """Return the sharding spec of each array of a cache; shapes in place of arrays suffice."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        name = dotted(path).rpartition(".")[2]
        if name in _COUNTERS and leaf.ndim:
            return spec_of(mesh, leaf.shape, ("batch",))
        dims: Dims = _DIMS[name] if name in _DIMS else (None,) * leaf.ndim
        return spec_of(mesh, leaf.shape, dims)

    return jax.tree_util.tree_map_with_path(spec, cache)


def shard_cache(cache: ModelCache, mesh: AnyMesh) -> ModelCache:
    """Return a cache, such as one from `init_cache`, placed on a mesh."""
    specs = cache_specs(cache, mesh)
    return jax.tree.map(lambda leaf, spec: laid_out(leaf, mesh, spec), cache, specs)


def placed_cache(cache: Tree, x: Any) -> Tree:
    """Place a cache that the model returns where the next call expects it.

    With another placement, the next call would compile again.

    Args:
        cache: cache returned by a model.
        x: an activation, whose type includes the mesh.
    """
    mesh = mesh_of(x)
    if mesh is None:
        return cache
    specs = cache_specs(cache, mesh)
    return jax.tree.map(lambda leaf, spec: constrained(leaf, mesh, spec), cache, specs)


def full_cache_specs(
    config: MegalodonConfig,
    batch_size: int,
    mesh: AnyMesh,
    per_row: bool = False,
    packed: bool = False,
) -> Any:
    """Return the specs of the cache that a model returns.

    `per_row` is whether each row has its own position, and `packed` whether the cache stores the
    document of each row.
    """
    shapes = jax.eval_shape(lambda: init_cache(config, batch_size, per_row=per_row, packed=packed))
    return cache_specs(shapes, mesh)


def check_no_sequence(mesh: AnyMesh) -> None:
    """Check that a mesh does not cut the tokens of a call with a cache.

    Raises:
        ValueError: the mesh axis `sequence` is longer than 1.
    """
    parts = axis_sizes(mesh).get("sequence", 1)
    if parts > 1:
        raise ValueError(
            f"sharding: a cache does not go with {parts} parts of the mesh axis sequence, expected "
            "1: the tokens of a call with a cache cannot be split over devices. Prefill and decode "
            "on a mesh of data x tensor."
        )
