"""Lists the runs in a folder and reports the damaged ones.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from reports.store.addresses import ADDRESS, address_of, is_address
from reports.store.index import Line, read_index
from reports.store.manifest import Manifest
from reports.store.reader import read_bytes
from reports.store.run import Run, read_run
from reports.store.schema import MANIFEST, PAGE, TONIGHT, RunKind, StoreError
from reports.store.several import learn_together
from reports.store.writer import add_page, add_verdict, check_writable, write_run
from reports.text import count

__all__ = [
    "DATED", "PAGE", "Run", "RunInfo", "StoreError", "add_page", "add_verdict", "check_root",
    "check_writable", "list_lines", "list_runs", "none_yet", "one_look", "read_run", "run_folders",
    "why_left_out", "without_copies", "write_run",
]  # fmt: skip

Unreadable = list[tuple[Path, str]]
"""Folders that are not readable runs, each with the reason."""
DATED = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d)-(\d\d)-(\d\d)Z")
"""Prefix of automatic run ids: the time at which the run began."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A readable run folder and its manifest; the rows are not read.

    Attributes:
        folder: Folder of the run.
        manifest: Manifest reduced to the fields that lists need: no tables, cases or parts.
        work: Hash of the gates and their identities, without values; "" if unknown. Runs with equal
            hashes measured the same gates of the same work.
    """

    folder: Path
    manifest: Manifest
    work: str = ""

    @property
    def kind(self) -> RunKind:
        """Kind of the run."""
        return self.manifest.kind


def list_runs(root: Path) -> tuple[list[RunInfo], Unreadable]:
    """Return the readable runs of every kind under `root`, oldest first, and the unreadable folders
    with a reason.

    A run is readable if all its files match their checksums. A root that does not exist yet holds
    no runs. Hidden folders are never runs: an interrupted write may leave them. If a run has
    copies, the one whose folder has the run's id as its name counts, and all other copies are
    reported as unreadable.

    Raises:
        StoreError: `root` cannot be listed.
    """
    seen = _look.get()
    if seen is None:
        return _list_runs(root)
    if root not in seen:
        seen[root] = _list_runs(root)
    readable, unreadable = seen[root]
    return list(readable), list(unreadable)


_look: ContextVar[dict[Path, tuple[list[RunInfo], Unreadable]] | None] = ContextVar(
    "look", default=None
)


@contextmanager
def one_look() -> Iterator[None]:
    """Context in which `list_runs` reads each folder of runs once and then repeats its result.

    So all parts of a command's output are about the same runs, and ten thousand folders are checked
    only once.
    """
    if _look.get() is not None:
        yield
        return
    token = _look.set({})
    try:
        yield
    finally:
        _look.reset(token)


def _list_runs(root: Path) -> tuple[list[RunInfo], Unreadable]:
    lines, unreadable = list_lines(root)
    runs = [RunInfo(root / n.name, n.manifest, n.work) for n in lines if n.manifest is not None]
    return without_copies(runs, unreadable), unreadable


def list_lines(root: Path, keep: bool = True) -> tuple[list[Line], Unreadable]:
    """Return the index lines of the readable runs, and the unreadable folders with a reason.

    The index file is only written if `keep` is true.

    Raises:
        StoreError: `root` cannot be listed.
    """
    folders, unreadable = _folders(root)
    lines = read_index(root, folders, keep, learn_together(root, folders, keep))
    unreadable += [(root / line.name, line.why) for line in lines if line.why]
    return [line for line in lines if not line.why], unreadable


def check_root(root: Path) -> None:
    """Check that a folder does not hold something other than runs, such as source code.

    A folder without subfolders, or that does not exist yet, is accepted.

    Raises:
        StoreError: the folder has subfolders, and none of them is a run or a damaged run.
    """
    names = [folder.name for folder in run_folders(root)]
    dated = any(DATED.match(name) for name in names)
    if names and not dated and not any(os.path.lexists(root / n / MANIFEST) for n in names):
        first = ", ".join(names[:3])
        raise StoreError(
            f"expected a folder of runs, but {root.resolve()} has {count(len(names), 'folder')} "
            f"and no run among them ({first}{', ...' if names[3:] else ''}). Give --out the folder "
            "that `nightly` wrote to, such as runs"
        )


def none_yet(root: Path) -> str:
    """Return a message that says why a folder has no runs, and which command makes one."""
    where = address_of(root)
    if not is_address(where) and not root.exists():
        return f"there is no folder {where}; `nightly` makes one"
    if (root / TONIGHT).is_file():
        return f"no finished run in {where}; {root / TONIGHT} shows the night that is running"
    return f"no runs in {where}; `nightly` makes one"


def run_folders(root: Path) -> list[Path]:
    """Return the folders under `root` that may be runs, sorted by name; raises like `list_runs`."""
    return _folders(root)[0]


def _folders(root: Path) -> tuple[list[Path], Unreadable]:
    if not root.exists():
        return [], []
    names: list[str] = []
    unreadable: Unreadable = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                try:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        names.append(entry.name)
                    elif entry.is_symlink() and not os.path.exists(entry.path):
                        why = "expected a folder, but the link leads nowhere; mount it or delete it"
                        unreadable.append((root / entry.name, why))
                except OSError as error:
                    # For example a link to itself.
                    why = f"expected a folder, but: {error.strerror or error}; delete it"
                    unreadable.append((root / entry.name, why))
    except OSError as error:
        raise StoreError(
            f"expected a folder of runs at {root}, but {error.strerror or error}; "
            "give the folder that `nightly` wrote to"
        ) from error
    if os.path.lexists(root / ADDRESS) and address_of(root) == str(root):
        why = "expected the address of shared storage; the folder is treated as a local one"
        unreadable.append((root / ADDRESS, f"{why}: delete the file, or name the address"))
    return [root / name for name in sorted(names)], unreadable


def why_left_out(folder: Path, first: Path, name: str) -> str:
    """Return why the run in `folder` is left out: the run in `first` has the same id `name`."""
    try:
        same = read_bytes(folder / MANIFEST) == read_bytes(first / MANIFEST)
        what = "a copy of run" if same else "another run with the id of run"
    except StoreError:
        # Runs of shared storage need not be on this machine.
        what = "a copy of run, or another run with the id of run,"
    return f"{what} {name} in {first}; delete one of them"


def without_copies(runs: list[RunInfo], unreadable: Unreadable) -> list[RunInfo]:
    """Return `runs` oldest first, each id once; copies are added to `unreadable` with a reason."""
    by_id: dict[str, RunInfo] = {}
    for run in sorted(runs, key=lambda run: run.folder.name != run.manifest.id):
        first = by_id.setdefault(run.manifest.id, run)
        if first is not run:
            why = why_left_out(run.folder, first.folder, run.manifest.id)
            unreadable.append((run.folder, why))
    return sorted(by_id.values(), key=lambda run: (run.manifest.created, str(run.folder)))
