"""Recordings of megalodon-hf's results, for comparison in CI and where megalodon-hf is not
installed.

Each case is one safetensors file with all arrays and their provenance. A recording is valid for one
case only: a recording with another case's hash is refused. Source: docs/parity.md "Recordings".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.engine.measure.quantity import Quantity, Role
from parity.megalodon import known_differences, low_precision
from parity.megalodon.cases import CASES, Case, by_name
from parity.megalodon.reference import LiveReference
from parity.recordings import read, read_provenance, write

FOLDER = Path(__file__).parents[1] / "data" / "recordings"
BFLOAT16 = ".bfloat16"
"""Suffix of a case's name in the file name of its bfloat16 recording."""
DIFFERENCES_FILE = "known_differences"
"""File name, without suffix, of the recording for the known differences."""
RENEW = "make record"
"""Command that records megalodon-hf's results again; named in error messages."""


@dataclass(frozen=True)
class RecordedReference:
    """Reads megalodon-hf's results from the committed recordings."""

    folder: Path = FOLDER
    kind = "recorded"
    omits = "cotangents, v and gate, which are not recorded to keep the repository small"

    def gives(self, quantity: str) -> bool:
        """Return whether recordings contain a quantity of the oracle; see `omits`."""
        what = Quantity(quantity)
        omitted = what.role is Role.VALUE and what.stage in ("v", "gate")
        return what.role is not Role.COTANGENT and not omitted

    @property
    def provenance(self) -> dict[str, Any]:
        """Commit, versions, threads, CPU capability and device of the first case's recording.

        Raises:
            RecordingError: there is no such recording.
        """
        return read_provenance(self.folder / f"{CASES[0].name}.safetensors", RENEW)

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Return the recorded arrays of a case, by name, float32.

        Raises:
            RecordingError: there is no recording of exactly this case.
        """
        return self._read(case.name, case.hash)

    def weights(self, case: Case) -> None:
        """Return None: the weights that megalodon-hf loaded are not recorded."""

    def low_precision(self, case: Case) -> dict[str, np.ndarray]:
        """Return logits and loss, computed in bfloat16, as `<mode>/logits` and `<mode>/loss`.

        The modes are "autocast" and "cast" (`reference.low_precision`). Raises as `run`.
        """
        return self._read(case.name + BFLOAT16, case.hash)

    def known_differences(self) -> dict[str, np.ndarray]:
        """Return megalodon-hf's result for every known difference, by id; raises as `run`."""
        return self._read(DIFFERENCES_FILE, known_differences.work_hash())

    def _read(self, name: str, work: str) -> dict[str, np.ndarray]:
        return read(self.folder / f"{name}.safetensors", work, RENEW)


def record(case: Case, reference: LiveReference, folder: Path = FOLDER) -> list[Path]:
    """Run megalodon-hf on a case, write its results, and return the paths of the recordings.

    Cases of `low_precision.CASES` have a second file, with bfloat16 results. The list is empty for
    a case that megalodon-hf is not compared on.
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
    """Run megalodon-hf on the named cases; yield the paths of the recordings.

    Without names, all cases and the known differences are recorded.

    Raises:
        ReferenceUnavailableError: megalodon-hf cannot run here.
        ValueError: there is no case with one of the names.
    """
    reference = LiveReference()
    for case in map(by_name, names) if names else CASES:
        yield from record(case, reference, folder)
    if not names:
        work, facts = known_differences.work_hash(), reference.known_differences()
        yield write(DIFFERENCES_FILE, work, facts, reference.provenance, folder)
