"""Contents of a checkpoint on disk: parameters, optimiser states, and a summary of the rest.

A checkpoint is a file of weights, a training checkpoint with everything in one file, or a folder
with the optimiser state beside the weights, as Hugging Face's Trainer writes it. Source:
docs/stability.md "Which files".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalodon_jax.convert import checkpoint_file
from megalodon_jax.files import read_json_object
from megalodon_jax.tensor_files import printable
from megalodon_jax.torch_files import describe, read_torch_file
from megalodon_jax.weight_files import open_tensors, reads_as_safetensors
from stability.core.parameter_leaves import Leaf, listed, stored_leaves

OPTIMISER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer.pth")

"""Names of files that hold an optimiser state beside the file of the weights."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The parts of a checkpoint that can be diagnosed."""

    path: Path
    """Path given by the caller."""
    leaves: dict[str, Leaf]
    """Parameters by name; empty if only an optimiser state was saved."""
    states: dict[str, Mapping[str, Any]]
    """Optimiser states in the form of `optimizer.state_dict()`, by place: a dotted key in the
    weights' file, or `<file>.<dotted key>` in a file beside it."""
    summary: str
    """One line that lists the parts of the checkpoint used ("taken") and skipped ("left")."""
    ordered: bool = True
    """Whether the leaves are in the order of the module's parameters. torch files keep that order.
    safetensors sorts tensors by name, and so does the shard index that transformers writes."""

    @property
    def folder(self) -> Path:
        """Folder that may contain a config.json."""
        return self.path if self.path.is_dir() else self.path.parent


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointFiles:
    """Open a checkpoint; the values of a leaf are read on access.

    If `path` is a folder and the weights' file holds no optimiser state, the states in those
    `OPTIMISER_FILES` that the folder contains are read too.

    Args:
        path: a safetensors or torch file, a shard index, or a folder with one of them.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ImportError: the checkpoint is a torch file and torch is not installed.
        ValueError: the file cannot be read, or holds neither parameters nor an optimiser state.
    """
    place = Path(path)
    file, ordered = checkpoint_file(place), True
    if file.name.endswith(".index.json") or reads_as_safetensors(file):
        leaves, states, left = stored_leaves(open_tensors(file)), {}, []
        if not leaves:
            raise ValueError(f"{file} holds no tensor: name a file with saved parameters.")
        leaves, ordered = _in_module_order(file, leaves)
        taken = [_counted(file.name, len(leaves))]
    else:
        contents = read_torch_file(file)
        states = {describe(at): state for at, state in contents.optimisers.items()}
        leaves = stored_leaves(contents.tensors if states else contents.model(file))
        left = contents.left
        taken = [_counted(describe(at), count) for at, count in contents.models.items()]
    if place.is_dir() and not states:
        for beside in (place / name for name in OPTIMISER_FILES):
            if beside.is_file():
                found = read_torch_file(beside).optimisers
                states |= {".".join((beside.name, *at)): state for at, state in found.items()}
    taken += [f"{at} (optimiser state of {len(s['state']):,})" for at, s in states.items()]
    summary = f"taken: {listed(taken, 6)}; left: {listed(left, 6)}"
    return CheckpointFiles(place, leaves, states, summary, ordered)


def _in_module_order(file: Path, leaves: dict[str, Leaf]) -> tuple[dict[str, Leaf], bool]:
    """Return the leaves of a safetensors file or shard index, and whether their order is known.

    If the second value is True, the leaves are in the order of the module's parameters.
    """
    if not file.name.endswith(".index.json"):
        return leaves, False
    places = read_json_object(file)["weight_map"]
    if list(places) != sorted(places):
        return {n: leaves[n] for n in map(printable, places) if n in leaves}, True
    # Shards in torch's format hold the parameters in the module's order; safetensors sorts them.
    shards = {file.parent / shard for shard in places.values()}
    return leaves, not any(reads_as_safetensors(shard) for shard in shards)


def _counted(name: str, tensors: int) -> str:
    return f"{printable(name)} ({tensors:,} tensor{'s' if tensors != 1 else ''})"
