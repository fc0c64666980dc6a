"""Mesh axes that the model uses, and the placement of arrays while a program is traced.

The type of an array on a mesh includes its mesh, also in a traced function. So layers need no mesh
argument: they get the mesh from their input (`mesh_of`). Without a mesh, arrays are not placed, and
the program is bit-identical to that of one device. Axes that are manual in a surrounding
`shard_map` are ignored, since inside it an array is a shard.

Source: docs/sharding.md "Where things lie".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")
AnyMesh: TypeAlias = Mesh | AbstractMesh
Dims: TypeAlias = tuple[str | None, ...]
"""Meaning of each axis of an array: "batch", "sequence", "tensor", or None for none of these."""

DATA, FSDP, TENSOR, SEQUENCE = AXES = ("data", "fsdp", "tensor", "sequence")
"""Names of mesh axes. Rows of a batch are divided over the first two, tokens over the last."""
MEANING: dict[str, tuple[str, ...]] = {
    "batch": (DATA, FSDP),
    "sequence": (SEQUENCE,),
    "tensor": (TENSOR,),
}


def mesh_of(x: Any) -> AnyMesh | None:
    """Return an array's mesh, or else the context's; None if no axis of `AXES` is longer than 1.

    The result is also None if an axis of the mesh is Explicit: then JAX itself determines the
    placement of results (`automatic` converts such axes).
    """
    mesh: Any = None
    if isinstance(x, jax.core.Tracer):  # pyright: ignore[reportAttributeAccessIssue]
        mesh = jax.typeof(x).sharding.mesh
    elif isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        mesh = x.sharding.mesh
    if mesh is None or mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types or math.prod(axis_sizes(mesh).values()) == 1:
        return None
    return mesh


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Return sizes of the mesh axes in `AXES`, by name, except those manual in a `shard_map`."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {n: mesh.shape[n] for n, kind in kinds if n in AXES and kind != AxisType.Manual}


def shards(mesh: AnyMesh | None, meaning: str) -> int:
    """Return into how many parts a mesh cuts "batch", "sequence" or "tensor"; 1 without a mesh."""
    sizes = {} if mesh is None else axis_sizes(mesh)
    return math.prod(sizes.get(name, 1) for name in MEANING[meaning])


def spec_of(mesh: AnyMesh, shape: tuple[int, ...], dims: Dims) -> PartitionSpec:
    """Return the sharding spec of an array of `shape`, whose axes have the meanings `dims`.

    A meaning is "batch", "sequence", "tensor" or None.

    An axis of the array whose size the mesh does not divide is not cut: a batch of one row is
    replicated on every device. Callers check sizes that must be divisible (`check_divisible`).
    """
    sizes, entries = axis_sizes(mesh), []
    for size, meaning in zip(shape, dims, strict=True):
        names = tuple(name for name in MEANING.get(meaning or "", ()) if sizes.get(name, 1) > 1)
        whole = size % math.prod(sizes[name] for name in names) == 0
        entries.append(names if names and whole else None)
    return PartitionSpec(*entries)


def placed(x: Tree, *dims: str | None) -> Tree:
    """Constrain an array to the placement of its axes; without a mesh, return it unchanged.

    `dims` is the meaning of each axis: "batch", "sequence", "tensor" or None.
    """
    mesh = mesh_of(x)
    return x if mesh is None else constrained(x, mesh, spec_of(mesh, x.shape, dims))  # pyright: ignore[reportAttributeAccessIssue]


def constrained(x: Tree, mesh: AnyMesh, spec: PartitionSpec) -> Tree:
    """Constrain an array to the placement of a spec."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # pyright: ignore[reportArgumentType]


def on_shards(
    function: Callable[..., Any], mesh: AnyMesh, arguments: tuple[Any, ...], ins: Any, outs: Any
) -> Any:
    """Call a function on the shards of its arguments, with all axes of `AXES` manual.

    Args:
        function: takes the shards of `arguments` and returns shards.
        mesh: the mesh.
        arguments: pytrees of arrays.
        ins: specs of each argument.
        outs: specs of the result. Along mesh axes that its spec does not name, a result must be
            equal on all devices, which JAX checks.
    """
    names = frozenset(axis_sizes(mesh))
    call = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, axis_names=names)
    return call(*arguments)


def as_varied(tree: Tree, specs: Any, like: PartitionSpec) -> Tree:
    """Mark parameters on a shard as varying over every axis that an activation varies over.

    Their values are equal on all shards. But with this mark JAX sums over shards the gradients of
    the parameters, not those of a larger intermediate result that first meets the activation, such
    as a kernel as long as the sequence.

    Args:
        tree: parameters, inside a function called by `on_shards`.
        specs: their specs, in the same structure.
        like: spec of the activation.
    """

    def varied(leaf: Any, spec: PartitionSpec) -> Any:
        missing = tuple(name for name in _names(like) if name not in _names(spec))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(varied, tree, specs)


def _names(spec: PartitionSpec) -> list[str]:
    entries = [entry for entry in spec if entry is not None]
    return [name for e in entries for name in ((e,) if isinstance(e, str) else e)]


def check_divisible(mesh: AnyMesh, meaning: str, **sizes: int) -> None:
    """Check that a mesh divides each of `sizes`, given by name, along `meaning`.

    `meaning` is "batch", "sequence" or "tensor". The divisor is the number of parts into which the
    mesh cuts it (`shards`).

    Raises:
        ValueError: a size is not divisible; the message has it and the number of parts.
    """
    count = shards(mesh, meaning)
    names = " x ".join(name for name in MEANING[meaning] if name in mesh.axis_names)
    for name, size in sizes.items():
        if size % count:
            raise ValueError(
                f"sharding: {name}={size} does not divide by the {count} parts of the mesh axis "
                f"{names}; choose a mesh whose {names} divides {size}."
            )


def automatic(function: Callable[[Any], Any], tree: Any, outs: Callable[[AnyMesh], Any]) -> Any:
    """Return `function(tree)`, traced with Auto axes if arrays of `tree` lie on Explicit ones.

    With Explicit axes, JAX's default, every operation must state the placement of its result. The
    model states it in a few places and leaves the rest to the compiler. The results are on Explicit
    axes again, and a gradient has the placement of its parameter.

    Args:
        function: the function to call.
        tree: a pytree; everything except JAX arrays is passed unchanged.
        outs: takes the mesh and returns specs with the structure of the result.
    """
    mesh = _explicit_mesh(tree)
    if mesh is None:
        return function(tree)
    arrays, rest = eqx.partition(tree, eqx.is_array)
    specs = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        outs(_as_auto(mesh)),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    call = jax.sharding.auto_axes(
        lambda arrays: function(eqx.combine(arrays, rest)), axes=names, out_sharding=specs
    )
    return call(arrays)


def _explicit_mesh(tree: Any) -> Any:
    meshes = [jax.sharding.get_abstract_mesh()]
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            meshes.append(jax.typeof(leaf).sharding.mesh)
    for mesh in meshes:
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _as_auto(mesh: Any) -> AbstractMesh:
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))


def make_mesh(
    *, data: int = 1, fsdp: int = 1, tensor: int = 1, sequence: int = 1, devices: Any = None
) -> Mesh:
    """Return a mesh with the Auto axes `data`, `fsdp`, `tensor` and `sequence` of these sizes.

    The mesh has them in the order `data`, `fsdp`, `sequence`, `tensor`. Axes of size 1 are left
    out, except `data` if all are 1. Adjacent devices of `jax.devices()` lie along the last axes,
    which communicate most in each layer. Any other mesh with these axis names works too, including
    one with Explicit axes.

    Args:
        data: number of model replicas, each with its own rows of the batch.
        fsdp: number of further parts of the batch's rows; each device of this axis stores only a
            part of every matrix.
        tensor: number of parts of heads, channels, FFN columns and vocabulary.
        sequence: number of parts of the tokens, each of whole chunks.
        devices: devices to use; by default the first of `jax.devices()`, as many as needed.

    Raises:
        ValueError: a size is not a positive integer, or there are too few devices.
    """
    sizes = {DATA: data, FSDP: fsdp, SEQUENCE: sequence, TENSOR: tensor}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"make_mesh: {name}={size!r} must be an integer of at least 1.")
    available = list(jax.devices() if devices is None else devices)
    number = math.prod(sizes.values())
    if number > len(available):
        raise ValueError(
            f"make_mesh: {' x '.join(f'{n}={s}' for n, s in sizes.items())} asks for {number} "
            f"devices, and there are {len(available)}. On a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={number} before JAX is imported, "
            "which makes virtual devices."
        )
    names = tuple(name for name, size in sizes.items() if size > 1) or (DATA,)
    grid = np.array(available[:number]).reshape([sizes[name] for name in names])
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
