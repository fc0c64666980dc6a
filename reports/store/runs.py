"""The runs in a folder: which there are, and which folders are damaged.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from reports.store.addresses import ADDRESS, address_of
from reports.store.index import Line, read_index
from reports.store.manifest import Manifest
from reports.store.reader import checksum, read_bytes
from reports.store.run import Run, read_run
from reports.store.schema import MANIFEST, PAGE, RunKind, StoreError
from reports.store.several import learn_together
from reports.store.writer import add_page, add_verdict, check_writable, write_run

__all__ = [
    "PAGE", "Run", "RunInfo", "StoreError", "add_page", "add_verdict", "check_writable",
    "list_lines", "list_runs", "one_look", "read_run", "run_folders", "without_copies", "write_run",
]  # fmt: skip

Unreadable = list[tuple[Path, str]]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A readable run folder with its manifest, of which lists keep a part; its rows are not read.

    Attributes:
        folder: of the run.
        manifest: without tables, cases, parts and what else no list asks for.
        work: hash of what was measured, values aside; "" where it is not known. Runs with the same
            one measured the same gates of the same work.
    """

    folder: Path
    manifest: Manifest
    work: str = ""

    @property
    def kind(self) -> RunKind:
        """What the run is."""
        return self.manifest.kind


def list_runs(root: Path) -> tuple[list[RunInfo], Unreadable]:
    """Return the readable runs of every kind under `root`, oldest first, and the unreadable folders
    with a reason.

    A run is readable if each of its files is the one that was stored, by its checksum. A root that
    does not exist yet holds no runs. Hidden folders, which is what an interrupted write may leave,
    are never runs. Of copies of one run, the one in the folder of its name counts, and the others
    are named. Raises StoreError where `root` cannot be listed.
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
    """Within this context `list_runs` looks at a folder once, so that all parts of one answer are
    about the same runs, and ten thousand folders are not looked at again for each.
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
    """Return the lines of the index about readable runs, and the other folders with a reason.

    Nothing is written unless `keep`.
    """
    folders, unreadable = _folders(root)
    lines = read_index(root, folders, keep, learn_together(root, folders, keep))
    unreadable += [(root / line.name, line.why) for line in lines if line.why]
    return [line for line in lines if not line.why], unreadable


def run_folders(root: Path) -> list[Path]:
    """Return the folders under `root` that may be runs, by name; raises like `list_runs`."""
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
                    # A link to itself, among others.
                    why = f"expected a folder, but: {error.strerror or error}; delete it"
                    unreadable.append((root / entry.name, why))
    except OSError as error:
        raise StoreError(
            f"expected a folder of runs at {root}, but {error.strerror or error}; "
            "give the folder that `nightly` wrote to"
        ) from error
    if os.path.lexists(root / ADDRESS) and address_of(root) == str(root):
        why = (
            "expected the address of shared storage; the folder counts as one of this machine alone"
        )
        unreadable.append((root / ADDRESS, f"{why}: delete the file, or name the address"))
    return [root / name for name in sorted(names)], unreadable


def without_copies(runs: list[RunInfo], unreadable: Unreadable) -> list[RunInfo]:
    """Return `runs` oldest first, each id once; the copies go to `unreadable` with a reason."""
    by_id: dict[str, RunInfo] = {}
    for run in sorted(runs, key=lambda run: run.folder.name != run.manifest.id):
        first = by_id.setdefault(run.manifest.id, run)
        if first is not run:
            same = checksum(read_bytes(run.folder / MANIFEST)) == checksum(
                read_bytes(first.folder / MANIFEST)
            )
            what = "a copy of run" if same else "another run with the id of run"
            why = f"{what} {run.manifest.id} in {first.folder}; delete one of them"
            unreadable.append((run.folder, why))
    return sorted(by_id.values(), key=lambda run: (run.manifest.created, str(run.folder)))
