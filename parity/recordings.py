"""Recordings: stored results of a reference, for machines where the reference cannot run.

A recording is a safetensors file of named arrays. Its metadata contain its provenance and the hash
of the work (weights and inputs) that the arrays were computed from. Source: docs/parity.md "Fail
closed".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.numpy import save_file

from megalodon_jax.files import written_aside
from megalodon_jax.tensor_files import open_safetensors, read_file

SCHEMA = 1
T = TypeVar("T")


class RecordingError(ValueError):
    """A recording is missing, corrupt, or of different work; the message says how to renew it."""


class ReferenceUnavailableError(RuntimeError):
    """The reference program cannot run here; the message says why and how to install it."""


def choose(
    prefer: str,
    live: Callable[[], T],
    recorded: Callable[[], T],
    why_unavailable: Callable[[], str | None],
) -> T:
    """Return the result of `live` (run the reference) or of `recorded` (read its recording).

    Args:
        prefer: "live", "recorded", or "auto": live if the reference can run, else recorded.
        live: runs the reference; raises ReferenceUnavailableError if it cannot run.
        recorded: reads the recording; raises RecordingError if there is none.
        why_unavailable: reason why the live reference cannot run; None if it can.
    """
    if prefer == "live" or (prefer == "auto" and why_unavailable() is None):
        return live()
    return recorded()


def read(path: Path, work: str, renew: str) -> dict[str, np.ndarray]:
    """Return the arrays of a recording by name, if it was made from exactly this work.

    Args:
        path: the recording's file.
        work: hash of the requested work.
        renew: command that makes the recording, for the error message.

    Raises:
        RecordingError: the recording is missing, corrupt, or of different work.
    """
    provenance = read_provenance(path, renew)
    if provenance["case_hash"] != work:
        raise RecordingError(
            f"{path.name} was recorded from other work (case hash {provenance['case_hash']}, "
            f"now {work}): not comparable. Run `{renew}` with the live reference installed."
        )
    return read_file(path)


def read_provenance(path: Path, renew: str) -> dict[str, Any]:
    """Return the provenance of a recording: what produced it, such as versions and host.

    Args:
        path: the recording's file.
        renew: command that makes the recording, for the error message.

    Raises:
        RecordingError: the file is missing, corrupt, or has another schema.
    """
    if not path.is_file():
        raise RecordingError(
            f"no recording {path.name} in {path.parent.name}/; run `{renew}` with the live "
            "reference installed."
        )
    try:
        with open_safetensors(path) as file:
            provenance = json.loads((file.metadata() or {})["provenance"])
    except (KeyError, ValueError) as error:
        raise RecordingError(
            f"{path.name} is not a readable recording ({error!r}); restore it from version control "
            f"or run `{renew}`."
        ) from error
    if provenance.get("schema") != SCHEMA:
        raise RecordingError(
            f"{path.name} has schema {provenance.get('schema')}, expected {SCHEMA}; "
            f"run `{renew}` with the live reference installed."
        )
    return provenance


def write(
    name: str,
    work: str,
    arrays: Mapping[str, np.ndarray],
    provenance: Mapping[str, Any],
    folder: Path,
) -> Path:
    """Write one recording atomically and return its path.

    Args:
        name: file name without suffix.
        work: hash of the work that the arrays belong to.
        arrays: arrays by name.
        provenance: what produced the arrays, such as versions, host and date.
        folder: destination.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    notes = {**provenance, "schema": SCHEMA, "case_hash": work}
    tensors = {name: np.array(array, order="C") for name, array in arrays.items()}
    with written_aside(path) as aside:
        # Compact JSON: all recordings together must stay below 12 MiB.
        text = json.dumps(notes, sort_keys=True, separators=(",", ":"))
        save_file(tensors, aside, metadata={"provenance": text})
    return path
