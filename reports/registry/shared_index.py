"""Lists the runs on shared storage without copying them to this machine.

A run never changes, so its index line stays valid as long as the run exists. Lines are cached on
this machine, and on the storage for other machines. Deleting either cache only costs the time to
read the runs again. Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from reports.store.examine import Examined, examine_all
from reports.store.index import Line, read_lines, slim, write_lines
from reports.store.manifest import Manifest, read_manifest
from reports.store.schema import FILES, MANIFEST, VERDICT, StoreError
from reports.store.shared import Storage

HERE, THERE = ".listed.json", ".index.json"
"""File names of the cached index lines: in the local copy, and on the storage."""
TOGETHER = 256
"""Number of runs read per batch; the cache is saved after each batch."""
JUDGED = timedelta(hours=1)
"""Age after which a run without a verdict is assumed never to get one. A younger run may still get
a verdict, since a run is stored before it is judged."""
Unreadable = list[tuple[Path, str]]


def shared_lines(storage: Storage) -> tuple[list[Line], Unreadable]:
    """Return an index line for every run on a storage, and the unreadable runs with a reason.

    Unsent runs are sent first. Then the names of all runs are requested, and the runs without a
    cached line are read.

    Raises:
        StoreError: the storage raises an error.
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
        # Without write permission the list still works.
        with suppress(StoreError, OSError):
            storage.put(here, THERE)
    elif lines.keys() != known.keys():
        write_lines(here, list(lines.values()))
    return [*lines.values(), *fresh.values()], unreadable


def _to_be_judged(line: Line) -> bool:
    """Return whether a run may still get its verdict, so that its line must not be cached."""
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
    """Return the index lines of the named runs by name, and the unreadable runs with a reason.

    Only the files that a list needs are fetched, into a temporary folder.
    """
    with tempfile.TemporaryDirectory() as aside:
        folders = {name: Path(aside) / name for name in names}
        heads = [f"{name}/{file}" for name in names for file in (MANIFEST, VERDICT)]
        storage.get(heads, Path(aside))
        # Without a manifest the run is unfinished or abandoned.
        folders = {name: f for name, f in folders.items() if (f / MANIFEST).is_file()}
        rows = [f"{name}/{file}" for name, folder in folders.items() for file in _files(folder)]
        storage.get(rows, Path(aside))
        found = examine_all(folders.values(), only=True)
    unreadable = [(storage.copy / one.name, one.why) for one in found if one.why]
    lines = {it.name: _line(it, it.manifest) for it in found if it.manifest is not None}
    return lines, unreadable


def _line(found: Examined, manifest: Manifest) -> Line:
    return Line(found.name, "", "", slim(manifest), found.gates, found.broken, found.work)


def _files(folder: Path) -> tuple[str, ...]:
    """Return the names of the Parquet files that a run must have; empty if run.json is invalid."""
    try:
        return FILES[read_manifest(folder).kind]
    except StoreError:
        return ()
