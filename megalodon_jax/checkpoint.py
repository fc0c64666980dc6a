"""Native checkpoints: model, configuration and optimiser state in one folder, written atomically.

    model.safetensors      the parameters by torch name, each in its own dtype
    optimizer.safetensors  leaves of the optimiser state by dotted path, if there is one
    config.json            `MegalodonConfig.to_dict()`
    manifest.json          schema, versions, step, dtype policy; per tensor shape, dtype, sha256

A save writes a new folder beside the target and then exchanges the two. Loading rejects anything
that differs from the manifest. `convert.load_from_pretrained` reads the same folder. No torch is
needed. Source: docs/guide.md "Stopping and resuming".
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.files import folder_written_aside, read_json_object
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.roles import check_unstacked
from megalodon_jax.weight_files import read_tensors
from megalodon_jax.weights import build_model, dotted, replace_leaves, weight_table

KIND, SCHEMA = "megalodon_jax checkpoint", 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
CONFIG, MANIFEST = "config.json", "manifest.json"
_PACKAGES = ("megalodon-numerics", "jax", "equinox", "optax", "safetensors", "numpy", "ml_dtypes")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Contents of a checkpoint folder."""

    model: MegalodonForCausalLM
    step: int
    """Number of optimiser steps taken before the save."""
    opt_state: Any = None
    """Optimiser state; None if it was not asked for (`load_checkpoint(opt_state_like=None)`)."""
    mesh: dict[str, int] | None = None
    """Axis sizes, by axis name, of the mesh on which the model was saved. None: no mesh."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: MegalodonForCausalLM,
    *,
    step: int,
    opt_state: Any = None,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Write a checkpoint, replacing the one at `folder` only when the new one is complete.

    Where the system supports it (Linux), the old and the new folder are exchanged in one step.
    Elsewhere the old folder is renamed first, and restored if the new one cannot take its place. An
    interrupted save leaves a hidden folder beside `folder`, which may be deleted if `folder`
    exists. Parameters that a user added to the model are saved too; pass `model_like` to
    `load_checkpoint` to load them.

    Args:
        folder: target; missing parents are created.
        model: the model; its dtypes must match its configuration.
        step: number of optimiser steps taken, at least 0.
        opt_state: any pytree of arrays, such as optax's; may contain typed PRNG keys.
        mesh: size of each axis of the model's mesh, by name; stored as information only.

    Raises:
        ValueError: the model's dtypes contradict its configuration, its layers are stacked
            (`stack_layers`), a leaf of `opt_state` cannot be stored, `step` is negative, or
            `folder` holds something other than a checkpoint.
        OSError: the folder cannot be written; its former content is unchanged.
    """
    target, step = Path(os.path.realpath(folder)), operator.index(step)
    if step < 0:
        raise ValueError(f"save_checkpoint: step={step} must be at least 0.")
    _check_replaceable(target)
    check_unstacked("save_checkpoint", (model, opt_state))
    files = {MODEL: storable_leaves(model, "model")}
    check_model(model, files[MODEL], "save_checkpoint")
    if opt_state is not None:
        files[OPTIMIZER] = storable_leaves(opt_state, "opt_state")
    with folder_written_aside(target) as aside:
        _write(aside, model.config, step, files, mesh)


def load_checkpoint(
    folder: str | os.PathLike[str], *, opt_state_like: Any = None, model_like: Any = None
) -> Checkpoint:
    """Load a checkpoint, bit for bit: model, step, optimiser state and mesh (`Checkpoint`).

    Args:
        folder: a folder written by `save_checkpoint`.
        opt_state_like: an optimiser state with the structure to fill, of arrays or shapes, such as
            `optimizer.init(...)` or its `eqx.filter_eval_shape`; None skips the saved state.
        model_like: a model with the structure to fill, of arrays or shapes, for a checkpoint with
            parameters that a user added; None builds the model of the configuration.

    Raises:
        FileNotFoundError: the folder or one of its files does not exist.
        ValueError: a file is corrupt or differs from the manifest, the manifest has another schema,
            `config.json` contradicts the manifest, the saved tensors are not those of `model_like`
            (or the configuration) or of `opt_state_like`, or no optimiser state was saved although
            `opt_state_like` is given. An error about tensors lists all that differ.
    """
    folder = Path(os.path.realpath(folder))
    manifest = _read_manifest(folder)
    config = _read_config(folder, manifest)
    tensors = _read(folder, MODEL, manifest)
    if model_like is None:
        problems = differences(table_specs(config), specs(tensors))
        refuse(problems, f"{folder / MODEL} does not fit {CONFIG}")
        model = build_model(config, tensors, source=str(folder / MODEL))
    else:
        check_config(config, model_like.config, str(folder))
        leaves = _leaves(tensors, manifest["files"][MODEL])
        problems = differences(specs(storable_leaves(model_like, "model_like")), specs(leaves))
        refuse(problems, f"{folder / MODEL} is not of the structure of model_like")
        model = replace_leaves(model_like, leaves)
    opt_state = None
    if opt_state_like is not None:
        opt_state = _read_optimizer(folder, manifest, opt_state_like)
    return Checkpoint(model, manifest["step"], opt_state, manifest.get("mesh"))


def resume(
    folder: str | os.PathLike[str], model: MegalodonForCausalLM, opt_state: Any
) -> tuple[MegalodonForCausalLM, Any, int]:
    """Return model, optimiser state and step of a run's checkpoint, or the given start values if
    there is no checkpoint.

    Args:
        folder: where the run saves its checkpoint with `save_checkpoint`.
        model: a new model of the run's configuration; may have parameters that a user added.
        opt_state: the initial optimiser state of `model`.

    Returns:
        Model, state and step of the checkpoint; if `folder` does not exist, `model`, `opt_state`
        and 0.

    Raises:
        FileNotFoundError: a file of the checkpoint is missing.
        ValueError: the checkpoint is of another configuration or optimiser; see `load_checkpoint`.
    """
    if not Path(folder).exists():
        return model, opt_state, 0
    found = load_checkpoint(folder, opt_state_like=opt_state, model_like=model)
    return found.model, found.opt_state, found.step


def check_model(model: MegalodonForCausalLM, leaves: Mapping[str, Any], caller: str) -> None:
    """Check that a model's leaves have the dtypes and shapes of its configuration.

    Leaves that a user added are not compared. If there are any, missing leaves are accepted, since
    a wrapped layer has its parameters under other names.

    Args:
        model: the model, which gives the configuration.
        leaves: the leaves of `model` by dotted path (`storable_leaves`).
        caller: name of the calling function, for errors.

    Raises:
        ValueError: the leaves differ from the configuration; every difference is listed.
    """
    found, table = specs(leaves), table_specs(model.config)
    ours = {name: found[name] for name in found if name in table}
    if len(ours) < len(found):
        # A wrapped layer has its parameters under other names, so missing names are errors only if
        # nothing was added.
        table = {name: table[name] for name in ours}
    refuse(
        differences(table, ours),
        f"{caller}: the model is not what its configuration says",
        "Cast the parameters with megalodon_jax.precision.ensure_sensitive_param_dtype, or set "
        "param_dtype in the configuration.",
    )


def check_config(saved: MegalodonConfig, expected: MegalodonConfig, source: str) -> None:
    """Check that the configuration of a checkpoint, called `source` in errors, is the expected one.

    Raises:
        ValueError: the configurations differ; every differing field is listed.
    """
    fields = ({n: repr(v) for n, v in c.to_dict().items()} for c in (expected, saved))
    refuse(differences(*fields), f"{source} is of another configuration")


def storable_leaves(tree: Any, name: str) -> dict[str, Any]:
    """Return the leaves of a pytree by dotted path, after checking that they can be stored.

    `name` is what messages call the pytree.

    Raises:
        ValueError: a leaf is not an array, has the same path as another leaf, or is weakly typed
            without being a scalar.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        at, reason = dotted(path), None
        if not hasattr(leaf, "dtype"):
            reason = f"is a {type(leaf).__name__}, not an array; wrap numbers in jnp.asarray"
        elif at in leaves:
            reason = "is the name of two leaves; rename one"
        elif getattr(leaf, "weak_type", False) and leaf.shape:
            reason = "is weakly typed, which only a scalar may be; fix its dtype with .astype"
        if reason:
            raise ValueError(f"checkpoint: leaf {at!r} of {name} {reason}.")
        leaves[at] = leaf
    return leaves


def _stored(leaf: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the NumPy array to write for a leaf, and its manifest entry.

    The entry has `shape`, `dtype` and `sha256`; also `prng`, the implementation of a PRNG key, or
    `weak`, True for a weakly typed scalar.
    """
    extra: dict[str, Any] = {}
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        extra = {"prng": str(jax.random.key_impl(leaf))}
        leaf = jax.random.key_data(leaf)
    elif getattr(leaf, "weak_type", False):
        # A strongly typed scalar promotes other arrays, a weakly typed one does not.
        extra = {"weak": True}
    array = np.asarray(leaf, order="C")
    return array, _row(array) | extra


def _restored(array: np.ndarray, row: Mapping[str, Any]) -> Any:
    if "prng" in row:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=row["prng"])
    return jnp.asarray(array.item()) if "weak" in row else array


def _leaves(arrays: Mapping[str, np.ndarray], rows: Mapping[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(_restored(array, rows[name])) for name, array in arrays.items()}


def _row(array: np.ndarray) -> dict[str, Any]:
    digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}


def specs(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return each leaf's dtype and shape as text, such as "float32 (4, 8)", by name."""
    return {name: f"{leaf.dtype} {tuple(leaf.shape)}" for name, leaf in leaves.items()}


def table_specs(config: MegalodonConfig) -> dict[str, str]:
    """Return dtype and shape of a configuration's parameters, by name, in the format of `specs`."""
    return {row.name: f"{row.dtype} {row.shape}" for row in weight_table(config)}


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return a line for each name that is missing, unexpected, or has another text than expected.

    Both arguments are texts by name, such as those of `specs`.
    """
    return [
        *(f"missing {name}: {what}" for name, what in expected.items() if name not in found),
        *(f"unexpected {name}: {what}" for name, what in found.items() if name not in expected),
        *(
            f"{name} is {found[name]}, expected {what}"
            for name, what in expected.items()
            if found.get(name, what) != what
        ),
    ]


def refuse(problems: list[str], what: str, remedy: str = "") -> None:
    """Raise a ValueError that lists all problems, if there are any.

    The message begins with `what` (the thing that is wrong) and ends with `remedy`.
    """
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(f"{what}, {len(problems)} difference(s):\n  {listing}\n{remedy}".rstrip())


def _write(
    folder: Path,
    config: MegalodonConfig,
    step: int,
    files: Mapping[str, Mapping[str, Any]],
    mesh: Mapping[str, int] | None,
) -> None:
    fields = config.to_dict()
    policy = {name: value for name, value in fields.items() if name.endswith("_dtype")}
    manifest: dict[str, Any] = {
        "kind": KIND,
        "schema": SCHEMA,
        "step": step,
        "packages": package_versions(),
        "dtype_policy": policy | {"sensitive_dtype": config.sensitive_dtype.name},
        "config": fields,
        "files": {},
    }
    if mesh is not None:
        manifest["mesh"] = dict(mesh)
    for name, leaves in files.items():
        stored = {at: _stored(leaf) for at, leaf in leaves.items()}
        save_file({at: array for at, (array, _) in stored.items()}, folder / name, {"format": "pt"})
        manifest["files"][name] = {at: row for at, (_, row) in stored.items()}
    manifest["sha256"] = _digest(manifest)
    for name, content in ((CONFIG, fields), (MANIFEST, manifest)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    names = {path.name for path in target.iterdir()} if target.is_dir() else {target.name}
    foreign = names - {MODEL, OPTIMIZER, CONFIG, MANIFEST}
    if foreign or (names and MANIFEST not in names):
        raise ValueError(
            f"save_checkpoint: {target} is not a checkpoint folder (it holds {sorted(names)}), and "
            "saving there would delete its content; choose another folder."
        )


def package_versions() -> dict[str, str | None]:
    """Return the versions of this package, JAX and the other `_PACKAGES` that a checkpoint names.

    The version of a package that is not installed is None.
    """
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        left = sorted(str(path) for path in file.parent.parent.glob(f".{file.parent.name}.*"))
        hint = f" An interrupted save may have left a checkpoint in {left}." if left else ""
        raise FileNotFoundError(f"no checkpoint at {file.parent}: {file.name} is missing.{hint}")
    return read_json_object(file)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    manifest = _read_json(file)
    found = (manifest.get("kind"), manifest.get("schema"))
    if found != (KIND, SCHEMA):
        raise ValueError(
            f"{file} is of kind {found[0]!r} and schema {found[1]!r}, expected {KIND!r} and "
            f"{SCHEMA}; read it with the versions that wrote it: {manifest.get('packages')}."
        )
    if manifest.get("sha256") != _digest(manifest):
        raise ValueError(
            f"{file} was changed after it was written (its sha256 differs). Copy the folder again."
        )
    return manifest


def _read_config(folder: Path, manifest: Mapping[str, Any]) -> MegalodonConfig:
    fields = _read_json(folder / CONFIG)
    said, saved = ({n: repr(v) for n, v in x.items()} for x in (fields, manifest["config"]))
    refuse(differences(saved, said), f"{folder / CONFIG} contradicts {MANIFEST}")
    return MegalodonConfig.from_dict(fields)


def _read(folder: Path, name: str, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of file `name` in `folder`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the manifest has no such file, or the file is corrupt, or names, dtypes, shapes
            or sha256 of its tensors differ from the manifest.
    """
    rows, file = manifest["files"].get(name), folder / name
    if rows is None:
        raise ValueError(f"{folder} was saved without {name}; load it with opt_state_like=None.")
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} is incomplete: {name} is missing. Copy the folder again."
        )
    tensors = read_tensors(file)
    expected = {at: _said(row) for at, row in rows.items()}
    found = {at: _said(_row(array)) for at, array in tensors.items()}
    refuse(
        differences(expected, found), f"{file} differs from {MANIFEST}", "Copy the folder again."
    )
    return tensors


def _said(row: Mapping[str, Any]) -> str:
    return f"{row['dtype']} {tuple(row['shape'])} sha256 {row['sha256'][:16]}"


def _read_optimizer(folder: Path, manifest: Mapping[str, Any], like: Any) -> Any:
    arrays = _read(folder, OPTIMIZER, manifest)
    leaves = _leaves(arrays, manifest["files"][OPTIMIZER])
    refuse(
        differences(specs(storable_leaves(like, "opt_state_like")), specs(leaves)),
        f"{folder / OPTIMIZER} is not of the structure of opt_state_like",
        "Build the same optimiser as when it was saved.",
    )
    return replace_leaves(like, leaves)
