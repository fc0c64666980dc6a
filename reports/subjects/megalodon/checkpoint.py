"""The checkpoint that a night probes, and cases as run.json holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parity.megalodon import GIVEN
from parity.megalodon.cases import BYTE_LM, Case, heldout_text
from reports.store.manifest import CaseInfo
from stability.suite import Checkpoint


def open_checkpoint(folder: Path | None) -> Checkpoint:
    """Return the checkpoint in `folder`, or the committed one for None, with its held-out text.

    A folder without held-out text gets that of the committed checkpoint.
    """
    folder = folder or BYTE_LM
    return Checkpoint(folder, heldout_text(folder))


def with_checkpoint(case: Case, folder: Path) -> Case:
    """Return the case of the committed checkpoint as one of the checkpoint in `folder`.

    Cases of random weights are returned unchanged.
    """
    if not case.checkpoint:
        return case
    why = f"{folder.name} on held-out text"
    return replace(case, checkpoint=folder, name=GIVEN, why=why)


def case_info(case: Case) -> CaseInfo:
    """Return the fields of a case that run.json holds."""
    return CaseInfo(
        name=case.name,
        title=case.why,
        why=case.why,
        hash=case.hash,
        batch=case.batch_size,
        length=case.length,
        config=case.config.to_dict(),
    )
