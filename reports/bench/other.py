"""Starts a process with PyPI's package `megalodon-jax`, which a bench times as a third side.

The package has the import name of this project's model, so it is installed separately and runs in a
separate process (`reports.bench.other_child`).
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.weights import weight_table
from reports.bench.worker import Worker, WorkerError

INSTALL = "pip install --target FOLDER --no-deps megalodon-jax==0.2.2"
"""Command that installs the package into a folder for `start_other`."""
ABSENT = (
    f"megalodon-jax of the package index is not installed: {INSTALL}, then bench --other FOLDER"
)
"""Reason for missing times of the package if no folder of it was given."""
_CHILD = Path(__file__).with_name("other_child.py")


def start_other(
    place: Path, config: MegalodonConfig, length: int, rows: int = 1, **loss: Any
) -> Worker:
    """Start a process that does the bench's work with PyPI's megalodon-jax.

    Args:
        place: Folder in which the package is installed, or an environment (or its Python) that has
            it.
        config: Sizes, dtype of products, and whether activations are recomputed in the backward
            pass; everything else is the package's default.
        length: Tokens per row.
        rows: Rows of the batch.
        loss: Further arguments of the loss, by the names in this project.

    Raises:
        WorkerError: `place` lacks the package or provides this project's package of the same name,
            the process does not start, or the package's matrices have another number of parameters
            than ours.
    """
    python, path = _interpreter(place)
    sizes = {**config.to_dict(), "tied": config.tied}
    numbers = (str(length), str(rows), json.dumps(loss))
    arguments = ("-P", str(_CHILD), json.dumps(sizes, default=str), *numbers)
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    worker = Worker(arguments, python, environment | ({"PYTHONPATH": path} if path else {}))
    try:
        _check(worker.facts, place, config)
    except WorkerError:
        worker.close()
        raise
    return worker


def _interpreter(place: Path) -> tuple[str, str]:
    """Return the Python to run, and the folder for PYTHONPATH or ""."""
    if (place / "megalodon_jax").is_dir():
        return sys.executable, str(place.resolve())
    # Not resolved: the Python of an environment is a link, and is identified by its location.
    python = place / "bin" / "python" if place.is_dir() else place
    if not python.is_file():
        raise WorkerError(
            f"expected {place} to be one of three: a folder that contains megalodon_jax, a virtual "
            "environment, or the Python of one; "
            f"{INSTALL} makes such a folder"
        )
    return str(python.absolute()), ""


def _check(facts: dict[str, object], place: Path, config: MegalodonConfig) -> None:
    ours = Path(__file__).parents[2]
    if Path(str(facts["file"])).is_relative_to(ours / "megalodon_jax"):
        raise WorkerError(f"{place} gives this project's megalodon_jax, not PyPI's: {INSTALL}")
    # Matrices only: the original release lacks a bias that megalodon-hf has.
    shapes = [weight.shape for weight in weight_table(config) if len(weight.shape) > 1]
    expected = sum(math.prod(shape) for shape in shapes)
    if facts["parameters"] != expected:
        raise WorkerError(
            f"megalodon-jax {facts['version']} has matrices with {facts['parameters']} parameters "
            f"at these sizes, ours {expected}: not the same work, so the times would not compare"
        )
