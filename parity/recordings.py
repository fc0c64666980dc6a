"""Recordings of the live reference: what CI and users without it compare with.

One safetensors file per case with every array and its provenance. A recording answers for exactly
the case it was made from: another hash is refused, never compared. Source: docs/parity.md
"Recordings".
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from parity import lowprecision, seams
from parity.cases import CASES, Case
from parity.engine.compare import COTANGENT

if TYPE_CHECKING:
    from parity.reference import LiveReference

SCHEMA = 1
FOLDER = Path(__file__).parent / "data" / "recordings"
BFLOAT16 = ".bfloat16"
"""What follows a case's name in the name of its recording in bfloat16."""
SEAMS = "seams"
RENEW = "make record"
"""The command that makes recordings of megalodon-hf."""


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
        return self._read(case.name, case.hash)

    def weights(self, case: Case) -> None:
        """Nothing: what the reference made of the weights is not recorded."""

    def low_precision(self, case: Case) -> dict[str, np.ndarray]:
        """Return logits and loss in bfloat16 by mode; errors as `run`."""
        return self._read(case.name + BFLOAT16, case.hash)

    def seams(self) -> dict[str, np.ndarray]:
        """Return what every seam is measured from, by its id; errors as `run`."""
        return self._read(SEAMS, seams.work_hash())

    def _read(self, name: str, work: str) -> dict[str, np.ndarray]:
        return read(self.folder / f"{name}.safetensors", work)


def read(path: Path, work: str, renew: str = RENEW) -> dict[str, np.ndarray]:
    """Return the arrays of a recording, which must answer for exactly this work.

    Args:
        path: its file.
        work: hash of what is asked.
        renew: the command that makes it, for an error.

    Raises:
        RecordingError: it is missing, corrupt, or of other work.
    """
    provenance = read_provenance(path, renew)
    if provenance["case_hash"] != work:
        raise RecordingError(
            f"{path.name} was recorded from other work (case hash {provenance['case_hash']}, "
            f"now {work}): not comparable. Run `{renew}` with the live reference."
        )
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_provenance(path: Path, renew: str = RENEW) -> dict[str, Any]:
    """Return what a recording says of itself; `renew` is the command that makes it.

    Raises:
        RecordingError: the file is missing, corrupt, or of another schema.
    """
    if not path.is_file():
        raise RecordingError(
            f"no recording {path.name} in {path.parent.name}/; run `{renew}` with the live "
            "reference installed."
        )
    try:
        with safe_open(path, framework="numpy") as file:
            provenance = json.loads((file.metadata() or {})["provenance"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
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


def record(case: Case, reference: LiveReference, folder: Path = FOLDER) -> list[Path]:
    """Run the reference on a case and write what it gives, in bfloat16 too where that is measured.

    A case that a seam keeps the reference out of has no recording.
    """
    if case.seam:
        return []
    provenance, notes = reference.provenance, {"case": case.definition}
    given = reference.run(case)
    kept = {n: a for n, a in given.items() if RecordedReference(folder).gives(n)}
    paths = [write(case.name, case.hash, kept, provenance | notes, folder)]
    if case.name in lowprecision.CASES:
        narrow = reference.low_precision(case)
        paths.append(write(case.name + BFLOAT16, case.hash, narrow, provenance | notes, folder))
    return paths


def record_seams(reference: LiveReference, folder: Path = FOLDER) -> Path:
    """Run the reference at every seam and write what it does there."""
    return write(SEAMS, seams.work_hash(), reference.seams(), reference.provenance, folder)


def write(
    name: str,
    work: str,
    arrays: Mapping[str, np.ndarray],
    provenance: Mapping[str, Any],
    folder: Path = FOLDER,
) -> Path:
    """Write one recording, aside first and then renamed; returns its path.

    Args:
        name: of the file, without its ending.
        work: hash of what the arrays answer for.
        arrays: by name.
        provenance: what made them.
        folder: where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    notes = {**provenance, "schema": SCHEMA, "case_hash": work}
    tensors = {name: np.array(array, order="C") for name, array in arrays.items()}
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"provenance": json.dumps(notes, sort_keys=True)})
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
