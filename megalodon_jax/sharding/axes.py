"""Where an array lies while a program is traced: the axes of a mesh that the model knows.

An array that was placed on a mesh says so in its type, in a traced function too, so no layer is
told about a mesh: it asks its input. Without one, everything here returns what it was handed, and
the program is that of one device, bit for bit. Axes that a surrounding `shard_map` has taken are
none of ours: inside it an array is a shard.

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
"""What each axis of an array is: "batch", "sequence", "tensor", or None for none of these."""

DATA, FSDP, TENSOR, SEQUENCE = AXES = ("data", "fsdp", "tensor", "sequence")
"""Names of mesh axes. Rows of a batch lie on the first two, tokens on the last."""
MEANING: dict[str, tuple[str, ...]] = {
    "batch": (DATA, FSDP),
    "sequence": (SEQUENCE,),
    "tensor": (TENSOR,),
}


def mesh_of(x: Any) -> AnyMesh | None:
    """Return the mesh on which an array lies, or None where there is nothing to split.

    A mesh counts if one of its axes is ours and longer than 1, and none is Explicit: there JAX
    itself says where results lie (`automatic` is how the model gets around that).
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
    """Return the sizes of our axes of a mesh by name, but those that a `shard_map` has taken."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {n: mesh.shape[n] for n, kind in kinds if n in AXES and kind != AxisType.Manual}


def shards(mesh: AnyMesh | None, meaning: str) -> int:
    """Return how many parts a mesh cuts an axis of this meaning into; 1 without a mesh."""
    sizes = {} if mesh is None else axis_sizes(mesh)
    return math.prod(sizes.get(name, 1) for name in MEANING[meaning])


def spec_of(mesh: AnyMesh, shape: tuple[int, ...], dims: Dims) -> PartitionSpec:
    """Return where an array of a shape lies on a mesh.

    An axis of an array that the mesh does not divide is not cut: a batch of one row is the same on
    every device. What must be divided is refused before (`check_divisible`).
    """
    sizes, entries = axis_sizes(mesh), []
    for size, meaning in zip(shape, dims, strict=True):
        names = tuple(name for name in MEANING.get(meaning or "", ()) if sizes.get(name, 1) > 1)
        whole = size % math.prod(sizes[name] for name in names) == 0
        entries.append(names if names and whole else None)
    return PartitionSpec(*entries)


def placed(x: Tree, *dims: str | None) -> Tree:
    """Return an array, laid out as `dims` say; the same array where there is no mesh."""
    mesh = mesh_of(x)
    return x if mesh is None else constrained(x, mesh, spec_of(mesh, x.shape, dims))  # pyright: ignore[reportAttributeAccessIssue]


def constrained(x: Tree, mesh: AnyMesh, spec: PartitionSpec) -> Tree:
    """Return an array, laid out by a spec."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # pyright: ignore[reportArgumentType]


def on_shards(
    function: Callable[..., Any], mesh: AnyMesh, arguments: tuple[Any, ...], ins: Any, outs: Any
) -> Any:
    """Call a function on the shards of its arguments, every axis of ours being manual.

    Args:
        function: takes the shards of `arguments` and returns shards.
        mesh: where.
        arguments: pytrees of arrays.
        ins: for each of them its specs.
        outs: specs of what `function` returns. What they do not name is equal on all devices, which
            JAX checks.
    """
    names = frozenset(axis_sizes(mesh))
    call = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, axis_names=names)
    return call(*arguments)


def as_varied(tree: Tree, specs: Any, like: PartitionSpec) -> Tree:
    """Return parameters on a shard as values that may differ wherever an activation does.

    They do not differ; but then their gradients are summed over shards as what they are, and not as
    whatever was first multiplied with the activation, such as a kernel as long as the sequence.

    Args:
        tree: parameters, in a function that `on_shards` calls.
        specs: theirs, in the same structure.
        like: that of the activation.
    """

    def varied(leaf: Any, spec: PartitionSpec) -> Any:
        missing = tuple(name for name in _names(like) if name not in _names(spec))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(varied, tree, specs)


def _names(spec: PartitionSpec) -> list[str]:
    entries = [entry for entry in spec if entry is not None]
    return [name for e in entries for name in ((e,) if isinstance(e, str) else e)]


def check_divisible(mesh: AnyMesh, meaning: str, **sizes: int) -> None:
    """Insist that a mesh divides sizes.

    Raises:
        ValueError: it does not; the message has both numbers.
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
    """Return `function(tree)`, traced with Auto axes where arrays of `tree` lie on Explicit ones.

    With Explicit axes, JAX's default, every operation must say where its result lies; the model
    says it in a few places and leaves the rest to the compiler. Types return at the end, and those
    of gradients are those of what they belong to.

    Args:
        function: what to call.
        tree: a pytree; what is no JAX array in it is passed as it is.
        outs: takes the mesh and returns specs for the result, in its structure.
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
    """Return a mesh with the axes `data`, `fsdp`, `tensor` and `sequence`, Auto, of these sizes.

    Axes of size 1 are left out, but for `data` where all are 1. Devices that stand next to one
    another in `jax.devices()` differ in the last axes, the ones that talk most in each layer.
    Any other mesh with these names does too, Explicit ones included.

    Args:
        data: replicas of the model, each with its own rows of the batch.
        fsdp: as `data`, but each holds a part of every parameter.
        tensor: parts of heads, channels, FFN columns and vocabulary.
        sequence: parts of the tokens, whole chunks each.
        devices: which; by default the first of `jax.devices()`.

    Raises:
        ValueError: a size is no positive integer, or there are fewer devices.
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
            f"devices, and there are {len(available)}. On a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={number}, set before JAX is "
            "imported, makes virtual ones."
        )
    names = tuple(name for name, size in sizes.items() if size > 1) or (DATA,)
    grid = np.array(available[:number]).reshape([sizes[name] for name in names])
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
