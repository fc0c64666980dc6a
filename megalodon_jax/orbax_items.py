"""Items that Orbax stores for a training step: leaves by name, and JSON that describes them.

Orbax stores non-empty arrays only. PRNG keys are stored as integer arrays; empty leaves and weak
types are recorded in the JSON. Source: docs/guide.md "Checkpoints of a long run".
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from megalodon_jax.checkpoint import specs
from megalodon_jax.extras import install

KIND, SCHEMA = "megalodon_jax orbax checkpoint", 1
META = "meta"


def orbax_package() -> Any:
    """Import and return Orbax's package, which is an optional dependency.

    Raises:
        ImportError: Orbax is not installed; the message says how to install it.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"Orbax is not installed: {install('orbax')}, or use "
            "megalodon_jax.checkpoint, which needs no extra package."
        ) from error
    return ocp


def load_items(place: Path, plans: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return items of a step's folder by name; `plans` has Orbax's restore arguments by item."""
    ocp = orbax_package()
    wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def load() -> Mapping[str, Any]:
        with (
            jax.enable_x64(wide),
            ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader,
        ):
            return reader.restore(place, args=ocp.args.Composite(**plans))

    # If an event loop runs (in a notebook), Orbax makes the arrays in a separate thread, which does
    # not see this thread's `jax.enable_x64` and would narrow float64 to float32. The thread started
    # here has no event loop, and sets `jax.enable_x64` itself.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(load).result()


def read_meta(place: Path) -> dict[str, Any]:
    """Return the `meta` item of a step's folder, a JSON object.

    Raises:
        ValueError: another program or version wrote the folder.
    """
    meta = load_items(place, {META: orbax_package().args.JsonRestore()})[META]
    found = (meta.get("kind"), meta.get("schema")) if isinstance(meta, dict) else (None, None)
    if found != (KIND, SCHEMA):
        raise ValueError(
            f"{place} is of kind {found[0]!r} and schema {found[1]!r}, expected {KIND!r} and "
            f"{SCHEMA}; read it with the program and version that saved it."
        )
    return meta


def leaf_rows(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the description of each leaf, by name, as JSON values.

    A description holds dtype and shape, and properties that Orbax does not store: the
    implementation of a PRNG key, a weak type, the dtype of an empty leaf.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        rows[name] = {"is": specs({name: leaf})[name], "shape": list(leaf.shape)}
        if _is_key(leaf):
            rows[name]["prng"] = str(jax.random.key_impl(leaf))
        elif getattr(leaf, "weak_type", False):
            # A strongly typed scalar promotes other arrays, a weakly typed one does not.
            rows[name]["weak"] = True
        elif not leaf.size:
            rows[name]["dtype"] = str(leaf.dtype)
    return rows


def stored_arrays(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays to store, by name: PRNG keys as integers, and no empty arrays, which Orbax
    rejects."""
    arrays = {n: jax.random.key_data(x) if _is_key(x) else x for n, x in leaves.items()}
    return {name: array for name, array in arrays.items() if 0 not in array.shape}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shape_of(row: Mapping[str, Any]) -> Any:
    """Return a `jax.ShapeDtypeStruct` for a leaf, given its entry in the result of `leaf_rows`."""
    if "prng" in row:
        return jax.eval_shape(
            lambda: jnp.broadcast_to(jax.random.key(0, impl=row["prng"]), tuple(row["shape"]))
        )
    return jax.ShapeDtypeStruct(tuple(row["shape"]), jnp.dtype(row["is"].partition(" ")[0]))


def read_leaves(
    place: Path,
    rows: Mapping[str, Any],
    likes: Mapping[str, Mapping[str, Any]],
    layout: Mapping[str, Mapping[str, PartitionSpec]],
    mesh: Mesh | None,
) -> dict[str, dict[str, Any]]:
    """Read items onto their devices, and return leaves by item and name.

    Args:
        place: folder of the step.
        rows: the saved result of `leaf_rows`, by item.
        likes: the leaves to read, by item and name, as arrays or as shapes with dtypes.
        layout: sharding specs on `mesh`, by item and name; a leaf without a spec is replicated.
        mesh: the mesh; None puts all leaves on the first device.
    """
    ocp = orbax_package()
    plans, shardings = {}, {}
    for item, like in likes.items():
        shardings[item] = {
            name: _sharding(mesh, layout.get(item, {}).get(name, PartitionSpec())) for name in like
        }
        plan = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[item][name])
            for name, array in jax.eval_shape(stored_arrays, dict(like)).items()
        }
        arguments = ocp.checkpoint_utils.construct_restore_args(plan)
        plans[item] = ocp.args.PyTreeRestore(plan, restore_args=arguments)
    found = load_items(place, plans)
    return {
        item: {
            name: _leaf(found[item].get(name), rows[item][name], shardings[item][name])
            for name in like
        }
        for item, like in likes.items()
    }


def _sharding(mesh: Mesh | None, spec: PartitionSpec) -> Sharding:
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, spec)


def _leaf(array: Any, row: Mapping[str, Any], sharding: Sharding) -> Any:
    if array is None:
        return jax.device_put(jnp.zeros(tuple(row["shape"]), row["dtype"]), sharding)
    if "prng" in row:
        return jax.random.wrap_key_data(array, impl=row["prng"])
    if "weak" in row:
        return jax.device_put(jnp.asarray(array.addressable_data(0).item()), sharding)
    return array
