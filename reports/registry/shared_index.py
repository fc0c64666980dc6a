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
from pathlib import Path

from reports.registry.index import Examine, Line, Unreadable, read_lines, write_lines
from reports.store.manifest import read_manifest
from reports.store.schema import FILES, MANIFEST, StoreError
from reports.store.shared import Storage

HERE, THERE = ".listed.parquet", ".index.parquet"
"""Names of the lines in the copy on this machine, and on the storage."""
TOGETHER = 256
"""Runs that are read at a time: so many are on this machine, and what was read is kept."""


def shared_summaries(storage: Storage, examine: Examine) -> tuple[list[Line], Unreadable]:
    """Return a line for every run on a storage, and what cannot be read with a reason.

    Args:
        storage: asked for the names of its runs, and for what no line is about.
        examine: as of `reports.registry.index.summaries`.

    Raises:
        StoreError: the storage refuses.
    """
    storage.send_unsent()
    names = set(storage.listed())
    here = storage.copy / HERE
    known = {line.summary.id: line for line in read_lines(here)}
    lines = {name: line for name, line in known.items() if name in names}
    if names - lines.keys():
        lines |= {name: line for name, line in _lines_there(storage).items() if name in names}
    new, unreadable = sorted(names - lines.keys()), []
    for start in range(0, len(new), TOGETHER):
        more, bad = _read(storage, new[start : start + TOGETHER], examine)
        lines |= more
        unreadable += bad
        write_lines(here, list(lines.values()))
    if new and lines.keys() & set(new):
        # Whoever may only read has the list all the same.
        with suppress(StoreError, OSError):
            storage.put(here, THERE)
    elif lines.keys() != known.keys():
        write_lines(here, list(lines.values()))
    return list(lines.values()), unreadable


def _lines_there(storage: Storage) -> dict[str, Line]:
    with tempfile.TemporaryDirectory() as aside:
        storage.get([THERE], Path(aside))
        return {line.summary.id: line for line in read_lines(Path(aside) / THERE)}


def _read(
    storage: Storage, names: Sequence[str], examine: Examine
) -> tuple[dict[str, Line], Unreadable]:
    """Return lines about runs, of which only what a list needs comes to this machine."""
    with tempfile.TemporaryDirectory() as aside:
        folders = {name: Path(aside) / name for name in names}
        storage.get([f"{name}/{MANIFEST}" for name in names], Path(aside))
        # What has no manifest is being written, or was left behind.
        folders = {name: f for name, f in folders.items() if (f / MANIFEST).is_file()}
        rows = [f"{name}/{file}" for name, folder in folders.items() for file in _files(folder)]
        storage.get(rows, Path(aside))
        found, bad = examine(list(folders.values()))
    unreadable = [(storage.copy / folder.name, why) for folder, why in bad]
    return {f.name: Line(summary, name, "") for f, (summary, name) in found.items()}, unreadable


def _files(folder: Path) -> tuple[str, ...]:
    """Return the names of a run's files beside its manifest; none where that does not say."""
    try:
        return FILES[read_manifest(folder).kind]
    except StoreError:
        return ()
