"""Stores a new run, then judges it and draws its page.

The numbers are stored first: errors in earlier runs, pins or the page cannot lose the measurements.
Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from reports.page.render import render
from reports.registry.lookup import comparison_lines, judge
from reports.registry.runs_page import renew_runs_page
from reports.store.runs import Run, add_page, write_run
from reports.store.schema import PAGE, RunKind, StoreError
from reports.store.shared import address_of, is_address, refresh
from reports.verdict.decide import Decision


class UnjudgedError(RuntimeError):
    """A run was stored but could not be judged; the message says what to do."""


@dataclass(frozen=True)
class Outcome:
    """A stored run, its verdict and its folder."""

    run: Run
    decision: Decision | None
    """Verdict of the run; None for a shard, which is judged after merging."""
    folder: Path
    against: tuple[str, ...] = ()
    """Lines to show below the verdict (`reports.registry.lookup.comparison_lines`)."""

    @property
    def page(self) -> Path:
        """Path of the run's page."""
        return self.folder / PAGE


def store(root: Path, run: Run, report: Callable[[str], None]) -> Outcome:
    """Store a run, judge it, and add verdict and page; a shard is only stored.

    Raises:
        StoreError: the folder cannot be written, so the run is lost; its verdict, unless it is a
            shard, was passed to `report`.
        UnjudgedError: the run is stored, but judging it failed.
        RuntimeError: the run is stored with its verdict, but drawing its page failed.
    """
    try:
        folder = write_run(root, run)
    except StoreError:
        if run.manifest.kind is not RunKind.SHARD:
            _report_verdict(root, run, report)
        raise
    if folder.name != run.id:
        report(f"the name {run.id} was taken; the run is stored as {folder.name}")
    run = replace(run, manifest=replace(run.manifest, id=folder.name))
    if is_address(address := address_of(root)):
        report(f"stored in {address}/{folder.name}; a copy is on this machine")
    if run.manifest.kind is RunKind.SHARD:
        return Outcome(run, None, folder)
    return finish(folder, run, report)


def finish(folder: Path, run: Run, report: Callable[[str], None]) -> Outcome:
    """Judge a run stored in `folder`, add verdict and page, and update the page of all runs.

    Raises:
        UnjudgedError: judging failed; the run stays stored.
        RuntimeError: drawing failed; run and verdict stay stored.
    """
    try:
        outcome = _judged_and_drawn(folder, run, report)
    except Exception:
        # Show it on the page of all runs as a run without a verdict.
        renew_runs_page(folder.parent, report)
        raise
    renew_runs_page(folder.parent, report)
    return outcome


def _judged_and_drawn(folder: Path, run: Run, report: Callable[[str], None]) -> Outcome:
    try:
        # Other machines may have stored runs since this one began.
        refresh(folder.parent)
        judged = judge(folder.parent, run)
        against = comparison_lines(judged)
    except Exception as error:
        raise UnjudgedError(
            f"the run is stored in {folder}, but judging it failed with {type(error).__name__}: "
            f"{error}. No measurement is lost. Correct what the message names; then "
            f"`megalodon-numerics gate {folder}` judges the run, and `megalodon-numerics report "
            f"{folder}` draws its page"
        ) from error
    word = judged.decision.word.value
    report(f"verdict: {word}")
    run = replace(run, manifest=replace(run.manifest, verdict=word))
    add_page(folder, run, lambda run: render(run, judged.decision, judged.history))
    return Outcome(run, judged.decision, folder, tuple(against))


def _report_verdict(root: Path, run: Run, report: Callable[[str], None]) -> None:
    """Report the verdict of a run that could not be stored; its numbers are lost."""
    try:
        report(f"verdict: {judge(root, run).decision.word}")
    except Exception as error:
        report(f"judging failed too, with {type(error).__name__}: {error}")
