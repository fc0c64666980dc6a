"""Retiring work: a person declares that gates or suites of earlier runs are no longer expected.

Source: docs/verdicts.md "Retired work".
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from reports.registry.lookup import read_judgeable
from reports.store.runs import Run
from reports.store.schema import StoreError
from reports.text import label
from reports.verdict import pins
from reports.verdict.history import load_history
from reports.verdict.vanished import (
    Retired,
    read_retired,
    vanished,
    write_retired,
)


@dataclass(frozen=True)
class Retirement:
    """Result of retiring work.

    Attributes:
        path: path of the written file.
        suites: number of suites that were retired.
        groups: number of groups of gates (same case, edge and kind) that were retired.
        left: number of suites and groups that the run lacks and that are still expected.
    """

    path: Path
    suites: int
    groups: int
    left: int


def retire(folder: Path, name: str, reason: str) -> Retirement:
    """Declare that work of earlier runs, which a stored run lacks, is no longer expected.

    Args:
        folder: Folder of the run that lacks the work.
        name: Suite, case, edge or kind of quantity of the work, or several of them joined by " | ",
            all of which the work must have.
        reason: Why the work was removed.

    Raises:
        StoreError: `reason` is empty, the run is incomplete or has a planted fault, it lacks no
            work of that name, or the file of retired work is damaged or cannot be written.
    """
    if not reason.strip():
        raise StoreError("expected a reason that a reviewer can judge, received none; use --reason")
    run = read_judgeable(folder)
    if run.manifest.fault or not all(suite.whole for suite in run.manifest.suites):
        raise StoreError(
            f"expected a complete run without a planted fault, but {run.id} is not one: the work "
            "that it lacks may have failed instead of being removed. Name a complete run"
        )
    home = pins.retired_home(folder.parent, run.manifest)
    try:
        with _alone(home):
            return _retire(home, folder.parent, run, name, reason.strip())
    except OSError as error:
        raise StoreError(
            f"expected a folder that can be written at {home}, but {error.strerror or error}; "
            "all work is still expected"
        ) from error


def _retire(home: Path, root: Path, run: Run, name: str, reason: str) -> Retirement:
    known, why = read_retired(home)
    if why:
        raise StoreError(why)
    before = vanished(run, load_history(root, run).earlier, known)
    suites, groups = before.named(name) if name.strip(" |") else ((), ())
    if not suites + groups:
        lacked = {*before.suites, *(case for case, _, _ in before.groups)}
        names = ", ".join(label(each, 60) for each in sorted(lacked)[:8]) or "nothing"
        raise StoreError(
            f"expected the name of work that {run.id} lacks, received {name!r}: it lacks {names}"
        )
    new = Retired(name, run.manifest.created, reason, suites, groups)
    path = write_retired(home, (*known, new))
    left = len(before.suites) + len(before.groups) - len(suites) - len(groups)
    return Retirement(path, len(suites), len(groups), left)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Context that locks the folder `home`, making it if necessary.

    If two processes read and rewrote the file of retired work at the same time, the work retired by
    one of them would be lost.
    """
    new = not home.exists()
    home.mkdir(parents=True, exist_ok=True)
    handle = os.open(home, os.O_RDONLY)
    try:
        # Some network file systems cannot lock folders.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
        if new:
            # `rmdir` deletes the folder only if it is empty, that is, if nothing was retired.
            with suppress(OSError):
                home.rmdir()
