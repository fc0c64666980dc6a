"""Recordings of the live reference: what CI and users without it compare with.

One safetensors file per case with every array and its provenance. A recording answers for exactly
the case it was made from: another hash is refused, never compared. Source: spec/parity.md
"Recordings".
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from parity.cases import CASES, Case
from parity.taps import COTANGENT

SCHEMA = 1
FOLDER = Path(__file__).parent / "data" / "recordings"


class RecordingError(ValueError):
    """A recording is missing, corrupt, or of other work; the message names the remedy."""


@dataclass(frozen=True)
class RecordedReference:
    """Answers for megalodon-hf from the committed recordings."""

    folder: Path = FOLDER
    kind = "recorded"
    omits = "cotangents, v and gate, which are not recorded to keep the repository small"

    def gives(self, quantity: str) -> bool:
        """Whether recordings hold a quantity the oracle has; see `omits`."""
        tap = quantity.rpartition(".")[-1] if not quantity.startswith("state/") else ""
        return not quantity.startswith(COTANGENT) and tap not in ("v", "gate")

    @property
    def provenance(self) -> dict[str, Any]:
        """What made the recordings (as the first one says)."""
        return read_provenance(self.folder / f"{CASES[0].name}.safetensors")

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Return the recorded arrays of a case.

        Raises:
            RecordingError: there is no recording of exactly this case.
        """
        path = self.folder / f"{case.name}.safetensors"
        provenance = read_provenance(path)
        if provenance["case_hash"] != case.hash:
            raise RecordingError(
                f"{path.name} was recorded from other work (case hash {provenance['case_hash']}, "
                f"now {case.hash}): not comparable. Run `make record` with the live reference."
            )
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_provenance(path: Path) -> dict[str, Any]:
    """Return what a recording says of itself.

    Raises:
        RecordingError: the file is missing, corrupt, or of another schema.
    """
    if not path.is_file():
        raise RecordingError(
            f"no recording {path.name} in {path.parent.name}/; run `make record` with the live "
            "reference installed."
        )
    try:
        with safe_open(path, framework="numpy") as file:
            provenance = json.loads((file.metadata() or {})["provenance"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise RecordingError(
            f"{path.name} is not a readable recording ({error!r}); restore it from version control "
            "or run `make record`."
        ) from error
    if provenance.get("schema") != SCHEMA:
        raise RecordingError(
            f"{path.name} has schema {provenance.get('schema')}, expected {SCHEMA}; "
            "run `make record` with the live reference installed."
        )
    return provenance


def write(
    case: Case,
    outputs: Mapping[str, np.ndarray],
    provenance: Mapping[str, Any],
    folder: Path = FOLDER,
) -> Path:
    """Write one recording, aside first and then renamed; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.name}.safetensors"
    notes = {**provenance, "schema": SCHEMA, "case_hash": case.hash, "case": case.definition}
    tensors = {
        name: np.array(array, order="C")
        for name, array in outputs.items()
        if RecordedReference(folder).gives(name)
    }
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{case.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"provenance": json.dumps(notes, sort_keys=True)})
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
