"""What a list of runs on shared storage says, without a copy of the runs.

A run is never changed, so a line about one is true for as long as its name is there. Lines are kept
on this machine, and on the storage for machines that have none yet; whoever deletes either loses
the time that it takes to read what every run holds of a list. Source: docs/many-machines.md
"Shared storage".
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from reports.store.examine import Examined, examine
from reports.store.index import Line, read_lines, slim, write_lines
from reports.store.manifest import Manifest, read_manifest
from reports.store.schema import FILES, MANIFEST, VERDICT, StoreError
from reports.store.shared import Storage

HERE, THERE = ".listed.json", ".index.json"
"""Names of the lines in the copy on this machine, and on the storage."""
TOGETHER = 256
"""Runs that are read at a time: so many are on this machine, and what was read is kept."""
JUDGED = timedelta(hours=1)
"""Time after which a run without a verdict will get none: it is stored before it is judged."""
Unreadable = list[tuple[Path, str]]


def shared_lines(storage: Storage) -> tuple[list[Line], Unreadable]:
    """Return a line for every run on a storage, and what cannot be read with a reason.

    The storage is asked for the names of its runs, and for those that no line is about.

    Raises:
        StoreError: the storage refuses.
    """
    storage.send_unsent()
    names = set(storage.listed())
    here = storage.copy / HERE
    known = {line.name: line for line in read_lines(here)}
    lines = {name: line for name, line in known.items() if name in names}
    if names - lines.keys():
        lines |= {name: line for name, line in _lines_there(storage).items() if name in names}
    new, unreadable = sorted(names - lines.keys()), []
    fresh: dict[str, Line] = {}
    for start in range(0, len(new), TOGETHER):
        more, bad = _read(storage, new[start : start + TOGETHER])
        fresh |= {name: line for name, line in more.items() if _to_be_judged(line)}
        lines |= {name: line for name, line in more.items() if name not in fresh}
        unreadable += bad
        write_lines(here, list(lines.values()))
    if new and lines.keys() & set(new):
        # Whoever may only read has the list all the same.
        with suppress(StoreError, OSError):
            storage.put(here, THERE)
    elif lines.keys() != known.keys():
        write_lines(here, list(lines.values()))
    return [*lines.values(), *fresh.values()], unreadable


def _to_be_judged(line: Line) -> bool:
    """Whether a run may still get its verdict, so that its line is not kept."""
    assert line.manifest is not None
    if not line.gates or line.manifest.verdict:
        return False
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(line.manifest.created)
    except (TypeError, ValueError):
        return False
    return timedelta(0) <= age < JUDGED


def _lines_there(storage: Storage) -> dict[str, Line]:
    with tempfile.TemporaryDirectory() as aside:
        storage.get([THERE], Path(aside))
        return {line.name: line for line in read_lines(Path(aside) / THERE)}


def _read(storage: Storage, names: Sequence[str]) -> tuple[dict[str, Line], Unreadable]:
    """Return lines about runs, of which only what a list needs comes to this machine."""
    with tempfile.TemporaryDirectory() as aside:
        folders = {name: Path(aside) / name for name in names}
        heads = [f"{name}/{file}" for name in names for file in (MANIFEST, VERDICT)]
        storage.get(heads, Path(aside))
        # What has no manifest is being written, or was left behind.
        folders = {name: f for name, f in folders.items() if (f / MANIFEST).is_file()}
        rows = [f"{name}/{file}" for name, folder in folders.items() for file in _files(folder)]
        storage.get(rows, Path(aside))
        found = [examine(folder, only=True) for folder in folders.values()]
    unreadable = [(storage.copy / one.name, one.why) for one in found if one.why]
    lines = {it.name: _line(it, it.manifest) for it in found if it.manifest is not None}
    return lines, unreadable


def _line(found: Examined, manifest: Manifest) -> Line:
    return Line(found.name, "", "", slim(manifest), found.gates, found.broken, found.work)


def _files(folder: Path) -> tuple[str, ...]:
    """Return the names of a run's files beside its manifest; none where that does not say."""
    try:
        return FILES[read_manifest(folder).kind]
    except StoreError:
        return ()
