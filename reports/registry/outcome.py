"""What becomes of a run that was just made: it is judged, and stored with its page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from reports.page.render import render
from reports.registry.lookup import comparison_lines, judge
from reports.store.runs import Run, write_run
from reports.store.schema import PAGE, RunKind
from reports.store.shared import address_of, is_address, refresh
from reports.verdict.decide import Decision


@dataclass(frozen=True)
class Outcome:
    """A stored run: its verdict, and where it is."""

    run: Run
    decision: Decision | None
    """None for a shard, which is judged when all of them are merged."""
    folder: Path
    against: tuple[str, ...] = ()
    """A line for each run that levels were compared with, and for each pin that cannot be read."""

    @property
    def page(self) -> Path:
        """The page to open."""
        return self.folder / PAGE


def store(root: Path, run: Run, report: Callable[[str], None]) -> Outcome:
    """Judge a run, write it with its page, and return both; a shard is stored as it is.

    Raises:
        StoreError: the folder cannot be written; `report` got the verdict before.
    """
    if run.manifest.kind is RunKind.SHARD:
        return Outcome(run, None, _stored(root, write_run(root, run), report))
    # An hour after the night began, others may have stored theirs.
    refresh(root)
    judged = judge(root, run)
    run = replace(run, manifest=replace(run.manifest, verdict=judged.decision.word.value))
    # Should the disk be full, the night's answer is not lost with the night's numbers.
    report(f"verdict: {judged.decision.word}")
    folder = write_run(root, run, lambda run: render(run, judged.decision, judged.history))
    run = replace(run, manifest=replace(run.manifest, id=folder.name))
    folder = _stored(root, folder, report)
    return Outcome(run, judged.decision, folder, tuple(comparison_lines(judged)))


def _stored(root: Path, folder: Path, report: Callable[[str], None]) -> Path:
    if is_address(address := address_of(root)):
        report(f"stored in {address}/{folder.name}; a copy is here")
    return folder
