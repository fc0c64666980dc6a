"""Checkpoints of a training run through Orbax: sharded, asynchronous, restored onto any mesh.

A folder holds a numbered folder for each step, with four items:

    model      the parameters by torch name
    opt_state  leaves of the optimiser state by dotted path, if there is one
    key        the numbers of a PRNG key, if there is one
    meta       JSON: configuration, position in the data, and a description of each leaf

Each process writes its own shards, in the background. Orbax names a step only when it is complete,
so an interrupted save leaves the earlier steps intact. Needs the extra `orbax`. Source:
docs/guide.md "Checkpoints of a long run".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from megalodon_jax.checkpoint import (
    check_model,
    differences,
    package_versions,
    refuse,
    specs,
    storable_leaves,
    table_specs,
)
from megalodon_jax.config import MegalodonConfig
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.orbax_items import (
    KIND,
    META,
    SCHEMA,
    leaf_rows,
    load_items,
    orbax_package,
    read_leaves,
    read_meta,
    shape_of,
    stored_arrays,
)
from megalodon_jax.roles import check_unstacked, replace_leaves
from megalodon_jax.sharding.placement import state_specs
from megalodon_jax.sharding.rules import partition_specs
from megalodon_jax.weights import abstract_model

MODEL, STATE, KEY = "model", "opt_state", "key"
_STEP_FILE = "_CHECKPOINT_METADATA"
"""File that Orbax writes into the folder of every step."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Values of a restored step, as they were given to `OrbaxCheckpoints.save`."""

    model: MegalodonForCausalLM
    step: int
    """Number of optimiser steps taken before the save."""
    opt_state: Any = None
    """Optimiser state; None if it was not asked for (`restore(opt_state_like=None)`)."""
    key: jax.Array | None = None
    position: Any = None
    """Position of the run in its data, as JSON values."""


class OrbaxCheckpoints:
    """Saves steps of a training run to a folder; as a context manager, waits for the last save.

    Args:
        folder: the run's folder, on a disk that all processes see; missing parents are created.
            Leftovers of interrupted saves in it are deleted.
        keep: number of newest steps to keep; None keeps all.
        every: `save` skips steps that are not a multiple of this number, but always saves a step if
            the folder holds none.
        asynchronous: whether `save` returns as soon as the arrays are copied off the devices, and
            writes in the background.

    Raises:
        ImportError: Orbax is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = None,
        every: int = 1,
        asynchronous: bool = True,
    ) -> None:
        ocp = orbax_package()
        self.folder = _absolute(folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            save_interval_steps=every,
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(
        self,
        step: int,
        model: MegalodonForCausalLM,
        *,
        opt_state: Any = None,
        key: jax.Array | None = None,
        position: Any = None,
        force: bool = False,
    ) -> bool:
        """Save a step; all processes must call it.

        Args:
            step: number of optimiser steps taken, at least 0.
            model: the model, on any mesh; its dtypes must match its configuration.
            opt_state: any pytree of arrays, such as optax's; may contain PRNG keys.
            key: PRNG key to continue with.
            position: position of the run in its data, as JSON values.
            force: save even if the step would be skipped.

        Returns:
            Whether the step is saved. False if it is skipped, because it is not a multiple of
            `every` or is already saved as the newest step.

        Raises:
            ValueError: the step is negative, the model's dtypes contradict its configuration, its
                layers are stacked, a leaf of `opt_state` cannot be stored, or `position` is not
                JSON. Also, without `force`: the step is older than the newest saved one. With
                `force`: the step already exists.
        """
        ocp = orbax_package()
        if step < 0:
            raise ValueError(f"OrbaxCheckpoints.save: step={step} must be at least 0.")
        newest = self._manager.latest_step()
        if not force and newest is not None and step < newest:
            # Orbax would skip every step up to the newest one, so a run that went back to an
            # earlier step would have no new checkpoint until it passed the newest one.
            raise ValueError(
                f"{self.folder} holds step {newest}, which is newer than step {step}: if the run "
                "returned to an earlier step, delete the folders of the steps after "
                f"{step}, or use another folder."
            )
        if not force and not self._manager.should_save(step):
            return False
        if step in self._manager.all_steps():
            raise ValueError(
                f"{self.folder} holds step {step} already: delete its folder, or restore that step "
                "and continue from it."
            )
        check_unstacked("OrbaxCheckpoints.save", (model, opt_state))
        trees = {MODEL: storable_leaves(model, MODEL)}
        check_model(model, trees[MODEL], "OrbaxCheckpoints.save")
        if opt_state is not None:
            trees[STATE] = storable_leaves(opt_state, STATE)
        if key is not None:
            trees[KEY] = {KEY: key}
        meta = {
            "kind": KIND,
            "schema": SCHEMA,
            "step": step,
            "packages": package_versions(),
            "config": model.config.to_dict(),
            "position": position,
            "leaves": {item: leaf_rows(leaves) for item, leaves in trees.items()},
        }
        try:
            json.dumps(position)
        except (TypeError, ValueError) as error:
            # Checked here, because an error in Orbax's writing thread would come later.
            raise ValueError(f"OrbaxCheckpoints.save: position must be JSON: {error}.") from error
        items = {item: ocp.args.PyTreeSave(stored_arrays(leaves)) for item, leaves in trees.items()}
        arguments = ocp.args.Composite(**items, **{META: ocp.args.JsonSave(meta)})
        return bool(self._manager.save(step, args=arguments, force=force))

    def latest(self) -> int | None:
        """Return the number of the newest complete step, or None if there is none."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Wait until every save is complete; raise the error of a save that failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for every save, and release the folder."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> OrbaxCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Return the number of the newest complete step in a run's folder, or None if there is none."""
    folder = _absolute(folder)
    found = folder.iterdir() if folder.is_dir() else ()
    numbers = [int(path.name) for path in found if path.name.isdecimal() and _is_step(path)]
    return max(numbers, default=None)


def is_orbax(folder: Path) -> bool:
    """Return whether a folder holds the steps of a run, or is the folder of one step."""
    return folder.is_dir() and (_is_step(folder) or latest(folder) is not None)


def restore(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    config: MegalodonConfig | None = None,
    opt_state_like: Any = None,
    model_like: MegalodonForCausalLM | None = None,
) -> Restored:
    """Restore a step bit for bit onto a mesh, whichever mesh it was saved on.

    Each process reads its own shards.

    Args:
        folder: the run's folder.
        step: the step; None selects the newest complete one.
        mesh: mesh for parameters and optimiser state; None puts all on the first device.
        config: the expected configuration; None expects that of `model_like`, or without
            `model_like` accepts the saved one.
        opt_state_like: an optimiser state with the structure to fill, of arrays or shapes; None
            does not read the state.
        model_like: a model with the structure to fill, of arrays or shapes, for a model with
            parameters that a user added; None restores the model of the configuration.

    Returns:
        Model, step, optimiser state, PRNG key and position in the data, as a `Restored`.

    Raises:
        ImportError: Orbax is not installed.
        FileNotFoundError: there is no such step; the message lists the newest complete ones.
        ValueError: configuration, parameters or optimiser state differ from the saved ones (every
            difference is listed), or the mesh does not divide the model.
    """
    place = _step_folder(_absolute(folder), step)
    meta = read_meta(place)
    saved = MegalodonConfig.from_dict(meta["config"])
    model = abstract_model(saved) if model_like is None else model_like
    expected = {MODEL: table_specs(saved) if model_like is None else specs(_named(model, MODEL))}
    likes = {MODEL: _named(model, MODEL)}
    if opt_state_like is not None:
        likes[STATE] = _named(opt_state_like, STATE)
        expected[STATE] = specs(likes[STATE])
    wanted = model_like.config if config is None and model_like is not None else config
    _check(place, meta, saved, wanted, expected)
    layout = {MODEL: {} if mesh is None else partition_specs(model, mesh)}
    if mesh is not None and opt_state_like is not None:
        layout[STATE] = state_specs(opt_state_like, model, mesh)
    rows = meta["leaves"]
    if KEY in rows:
        likes[KEY] = {KEY: shape_of(rows[KEY][KEY])}
    arrays = read_leaves(place, rows, likes, layout, mesh)
    filled = {
        item: replace_leaves(like, arrays[item]) for item, like in _trees(model, opt_state_like)
    }
    return Restored(
        filled[MODEL],
        int(meta["step"]),
        filled.get(STATE),
        arrays[KEY][KEY] if KEY in arrays else None,
        meta["position"],
    )


def model_arrays(folder: str | os.PathLike[str]) -> tuple[MegalodonConfig, dict[str, np.ndarray]]:
    """Return configuration and parameters (NumPy arrays by torch name) of a run's newest step.

    Args:
        folder: folder of a run's steps, or of one step, saved on any mesh.

    Raises:
        ImportError: Orbax is not installed.
        FileNotFoundError: there is no complete step.
        ValueError: another program or version wrote the folder.
    """
    ocp = orbax_package()
    place = _step_folder(_absolute(folder), None)
    meta = read_meta(place)
    names = [n for n, row in meta["leaves"][MODEL].items() if 0 not in row["shape"]]
    plan = ocp.args.PyTreeRestore(
        dict.fromkeys(names, 0),
        restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)),
    )
    return MegalodonConfig.from_dict(meta["config"]), load_items(place, {MODEL: plan})[MODEL]


def _absolute(folder: str | os.PathLike[str]) -> Path:
    # Absolute, because Orbax uses paths in other threads and rejects relative ones.
    return Path(os.path.abspath(folder))


def _is_step(folder: Path) -> bool:
    return (folder / _STEP_FILE).is_file() and (folder / META).is_dir()


def _step_folder(folder: Path, step: int | None) -> Path:
    if step is None and _is_step(folder):
        return folder
    chosen = latest(folder) if step is None else step
    if chosen is None or not _is_step(folder / str(chosen)):
        there = sorted((p.name for p in folder.glob("*") if _is_step(p)), key=lambda n: (len(n), n))
        wanted = "a complete step" if step is None else f"step {step}"
        raise FileNotFoundError(
            f"no Orbax checkpoint at {folder}: {wanted} is not there; the newest complete steps "
            f"are {', '.join(there[-6:]) or 'none'}. Give one of them, or save a step "
            "first."
        )
    return folder / str(chosen)


def _named(tree: Any, item: str) -> dict[str, Any]:
    return storable_leaves(tree, f"{item}_like")


def _trees(model: Any, opt_state: Any) -> list[tuple[str, Any]]:
    return [(MODEL, model)] + ([] if opt_state is None else [(STATE, opt_state)])


def _check(
    place: Path,
    meta: Mapping[str, Any],
    saved: MegalodonConfig,
    wanted: MegalodonConfig | None,
    expected: Mapping[str, Mapping[str, str]],
) -> None:
    """Check the saved configuration and leaves of a step against the requested ones.

    Args:
        place: folder of the step, for the error.
        meta: the saved `meta` item, which describes the leaves.
        saved: the saved configuration.
        wanted: the requested configuration; None: any.
        expected: dtype and shape of the requested leaves as text, by item and name.

    Raises:
        ValueError: they differ; every difference is listed.
    """
    problems = []
    if wanted is not None:
        fields = ({n: repr(v) for n, v in c.to_dict().items()} for c in (wanted, saved))
        problems += [f"config: {line}" for line in differences(*fields)]
    for item, table in expected.items():
        rows = meta["leaves"].get(item)
        if rows is None:
            problems.append(f"{item}: none was saved")
            continue
        found = {name: row["is"] for name, row in rows.items()}
        problems += [f"{item}: {line}" for line in differences(table, found)]
    refuse(
        problems,
        f"{place} differs from what was requested",
        "Restore with the configuration and the optimiser of the run; pass model_like if a user "
        "added parameters to the model.",
    )
