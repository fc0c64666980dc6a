"""Recordings of the live reference: what CI and users without it compare with.

One safetensors file per case with every array and its provenance. A recording answers for exactly
the case it was made from: another hash is refused, never compared. Source: docs/parity.md
"Recordings".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.engine.quantity import Quantity, Role
from parity.megalodon import known_differences, low_precision
from parity.megalodon.cases import CASES, Case, by_name
from parity.megalodon.reference import LiveReference
from parity.recordings import read, read_provenance, write

FOLDER = Path(__file__).parents[1] / "data" / "recordings"
BFLOAT16 = ".bfloat16"
"""What follows a case's name in the name of its recording in bfloat16."""
DIFFERENCES_FILE = "known_differences"
RENEW = "make record"
"""The command that makes recordings of megalodon-hf."""


@dataclass(frozen=True)
class RecordedReference:
    """Answers for megalodon-hf from the committed recordings."""

    folder: Path = FOLDER
    kind = "recorded"
    omits = "cotangents, v and gate, which are not recorded to keep the repository small"

    def gives(self, quantity: str) -> bool:
        """Whether recordings hold a quantity the oracle has; see `omits`."""
        what = Quantity(quantity)
        omitted = what.role is Role.VALUE and what.stage in ("v", "gate")
        return what.role is not Role.COTANGENT and not omitted

    @property
    def provenance(self) -> dict[str, Any]:
        """What made the recordings (as the first one says)."""
        return read_provenance(self.folder / f"{CASES[0].name}.safetensors", RENEW)

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

    def known_differences(self) -> dict[str, np.ndarray]:
        """Return what every known difference is measured from, by its id; errors as `run`."""
        return self._read(DIFFERENCES_FILE, known_differences.work_hash())

    def _read(self, name: str, work: str) -> dict[str, np.ndarray]:
        return read(self.folder / f"{name}.safetensors", work, RENEW)


def record(case: Case, reference: LiveReference, folder: Path = FOLDER) -> list[Path]:
    """Run the reference on a case and write what it gives, in bfloat16 too where that is measured.

    A case without the reference has no recording.
    """
    if not case.has_reference:
        return []
    provenance, notes = reference.provenance, {"case": case.definition}
    given = reference.run(case)
    kept = {n: a for n, a in given.items() if RecordedReference(folder).gives(n)}
    paths = [write(case.name, case.hash, kept, provenance | notes, folder)]
    if case.name in low_precision.CASES:
        narrow = reference.low_precision(case)
        paths.append(write(case.name + BFLOAT16, case.hash, narrow, provenance | notes, folder))
    return paths


def record_all(names: Collection[str] = (), folder: Path = FOLDER) -> Iterator[Path]:
    """Run the live reference on the cases, or those named, and yield what was written.

    Without names it also runs at every known difference.

    Raises:
        ReferenceUnavailableError: it cannot run here.
        ValueError: there is no case of a name.
    """
    reference = LiveReference()
    for case in map(by_name, names) if names else CASES:
        yield from record(case, reference, folder)
    if not names:
        work, facts = known_differences.work_hash(), reference.known_differences()
        yield write(DIFFERENCES_FILE, work, facts, reference.provenance, folder)
