"""Placement of a model, an optimiser state and a batch on a mesh, outside or inside of jit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from megalodon_jax.inputs import as_integer, traced
from megalodon_jax.roles import check_unstacked, dotted, named_leaves
from megalodon_jax.sharding.axes import AnyMesh, check_divisible, shards, spec_of
from megalodon_jax.sharding.rules import partition_specs

Tree = TypeVar("Tree")
FILL = {"input_ids": 0, "labels": -100, "attention_mask": 0, "segment_ids": None}
"""Fill values of `padded_batch` by array name; none affects a result. None repeats the last element
of each row, so that padding belongs to the row's last document."""


def shard_model(model: Tree, mesh: AnyMesh) -> Tree:
    """Place every leaf of a model, or of its gradients, on a mesh by the rules of `sharding.rules`.

    Values and structure do not change. Inside jit this constrains the placement of a result, so
    that an updated model stays where the old one was.

    Raises:
        ValueError: the mesh does not divide a size of the model (the message has both numbers), or
            its layers are stacked.
    """
    specs = partition_specs(model, mesh)

    def put(path: Any, leaf: Any) -> Any:
        return laid_out(leaf, mesh, specs[dotted(path)]) if hasattr(leaf, "dtype") else leaf

    return jax.tree_util.tree_map_with_path(put, model)


def shard_state(state: Tree, model: Any, mesh: AnyMesh) -> Tree:
    """Place an optimiser state on a mesh: leaves of a parameter where the parameter is placed.

    A leaf belongs to a parameter if its path ends in the parameter's name and it has the same
    shape, as optax's moments do. All other leaves, such as a count, are replicated.

    Args:
        state: any pytree.
        model: the model that the state belongs to, of arrays or shapes.
        mesh: the mesh.

    Raises:
        ValueError: the mesh does not divide a size of the model, or layers are stacked.
    """
    specs = state_specs(state, model, mesh)

    def put(path: Any, leaf: Any) -> Any:
        return laid_out(leaf, mesh, specs[dotted(path)]) if hasattr(leaf, "dtype") else leaf

    return jax.tree_util.tree_map_with_path(put, state)


def state_specs(state: Any, model: Any, mesh: AnyMesh) -> dict[str, PartitionSpec]:
    """Return the spec of every leaf of an optimiser state, by dotted path (`shard_state`).

    Raises:
        ValueError: see `shard_state`.
    """
    check_unstacked("shard_state", state)
    specs = partition_specs(model, mesh)
    shapes = {name: x.shape for name, x in named_leaves(model).items()}

    def spec(at: str, leaf: Any) -> PartitionSpec:
        owner = next(
            (n for n in shapes if (at == n or at.endswith("." + n)) and shapes[n] == leaf.shape),
            None,
        )
        return PartitionSpec() if owner is None else specs[owner]

    return {name: spec(name, leaf) for name, leaf in named_leaves(state).items()}


def shard_batch(batch: Tree, mesh: AnyMesh, *, chunk_size: int = 1) -> Tree:
    """Place a batch with its rows on `data` and `fsdp` and its tokens on `sequence`.

    Args:
        batch: a pytree of arrays (B, L), or (k, B, L) for k micro-batches, or (B,); every process
            passes the whole batch.
        mesh: the mesh.
        chunk_size: chunk size of the model; every device must get whole chunks.

    Raises:
        ValueError: rows or tokens are not divisible (the message has both numbers; `padded_batch`
            pads tokens), or a leaf is not an array of one to three axes.
    """

    def put(leaf: Any) -> Any:
        if not hasattr(leaf, "ndim"):
            raise ValueError(
                f"shard_batch: expected a pytree of arrays, got {type(leaf).__name__} {leaf!r} in "
                "it; convert lists to arrays with np.asarray first."
            )
        if leaf.ndim not in (1, 2, 3):
            raise ValueError(
                f"shard_batch: an array has shape {leaf.shape}, expected (B, L), (B,), or "
                "(k, B, L) for k micro-batches."
            )
        dims = {1: ("batch",), 2: ("batch", "sequence"), 3: (None, "batch", "sequence")}[leaf.ndim]
        check_divisible(mesh, "batch", batch=leaf.shape[dims.index("batch")])
        if leaf.ndim > 1:
            check_length(mesh, leaf.shape[-1], chunk_size)
        return laid_out(leaf, mesh, spec_of(mesh, leaf.shape, dims))

    return jax.tree.map(put, batch)


def padded_batch(
    batch: Mapping[str, Any], multiple: int, *, ignore_index: SupportsIndex = -100
) -> dict[str, Any]:
    """Pad a batch on the right to a multiple of a length, without effect on the loss.

    The model is causal, and ignored or masked labels do not count, so the loss and the logits of
    the original positions are unchanged.

    Args:
        batch: arrays (B, L), or (k, B, L), by name: `input_ids`, `labels`, `attention_mask`,
            `segment_ids`. Arrays that are None are left out; a mask is added if there is none.
        multiple: L is rounded up to a multiple of this, such as the chunk size times the size of
            the mesh axis `sequence`.
        ignore_index: label of positions that do not count.

    Raises:
        ValueError: an array has another name, or `multiple` is not a positive integer.
    """
    multiple = as_integer("padded_batch: multiple", multiple, 1)
    if unknown := sorted(set(batch) - set(FILL)):
        raise ValueError(f"padded_batch: unknown arrays {unknown}, expected some of {list(FILL)}.")
    fill = FILL | {"labels": as_integer("padded_batch: ignore_index", ignore_index)}
    arrays = {name: np.asarray(x) for name, x in batch.items() if x is not None}
    if not arrays:
        return {}
    first = next(iter(arrays.values()))
    arrays.setdefault("attention_mask", np.ones(first.shape, bool))
    short = -first.shape[-1] % multiple

    def filled(x: np.ndarray, value: int | None) -> np.ndarray:
        room = ((0, 0),) * (x.ndim - 1) + ((0, short),)
        return np.pad(x, room, "edge") if value is None else np.pad(x, room, constant_values=value)

    return {name: filled(x, fill[name]) for name, x in arrays.items()}


def check_length(mesh: AnyMesh, length: int, chunk_size: int) -> None:
    """Check that a length can be cut into whole chunks on every device of the axis `sequence`.

    Raises:
        ValueError: it cannot; the message says of which number the length must be a multiple.
    """
    parts = shards(mesh, "sequence")
    if parts > 1 and length % (parts * chunk_size):
        raise ValueError(
            f"sharding: a length of {length} tokens cannot be cut into {parts} parts (mesh axis "
            f"sequence) of whole chunks of {chunk_size} tokens; it must be a multiple of "
            f"{parts * chunk_size}. sharding.padded_batch adds tokens that do not count."
        )


def laid_out(leaf: Any, mesh: AnyMesh, spec: PartitionSpec) -> Any:
    """Place an array on a mesh; inside jit, constrain its placement."""
    sharding = NamedSharding(mesh, spec)
    if traced(leaf):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    if sharding.is_fully_addressable or not _addressable(leaf):
        return jax.device_put(leaf, sharding)
    # Every process holds the whole value and contributes its own parts; `device_put` would first
    # compare the whole value between processes.
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _addressable(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
