"""Sends a run to shared storage, or removes a run from it. An interruption at any request leaves a
complete run or none. Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from reports.store.claims import claim, held, retire
from reports.store.objects import GONE, Objects
from reports.store.schema import MANIFEST
from reports.store.unsent import Note, read_note, set_name


def deliver(objects: Objects, folder: Path) -> tuple[str, str]:
    """Send the unsent run in `folder`, under another name if its own is taken.

    Returns:
        The name that the run had, and the name that it is stored under.

    Raises:
        StoreError: the run is damaged.
    """
    note = read_note(folder)
    if note is None:
        note = Note(folder.name, None)
        # An earlier version may have sent the run but lost the reply.
        if _is_there(objects, folder, note.name):
            return note.name, note.name
    # Reject a damaged run before it claims a name.
    set_name(folder, note)
    if note.token is not None and _send(objects, folder, note.name, note.token):
        return note.name, note.name
    for turn in itertools.count(1):
        name = note.name if turn == 1 else f"{note.name}-{turn}"
        token = claim(objects, name)
        if token is not None and _send(objects, folder, name, token):
            return note.name, name
    raise AssertionError("unreachable: some name is free")


def _send(objects: Objects, folder: Path, name: str, token: str) -> bool:
    """Send a run under a claimed name, run.json last; return whether it is stored.

    False means that another process took the name from this writer; then no run.json of it remains.
    """
    set_name(folder, Note(name, token))
    there = objects.inside(name)
    if not all(_put(objects, path, name, there) for path in _files(folder)):
        return False
    if held(objects, name, token):
        if not _put(objects, folder / MANIFEST, name, there):
            return False
        # The claim is checked after run.json is written, see `reports.store.claims`.
        if _is_there(objects, folder, name) and held(objects, name, token):
            return True
    elif not _has_manifest(objects, folder, name):
        return False
    remove(objects, name)
    return False


def _put(objects: Objects, path: Path, name: str, there: Mapping[str, int]) -> bool:
    """Send a file unless an earlier attempt did; return whether the storage now has its content.

    `there` has the names and sizes of the objects that were stored when this attempt began.
    """
    place, content = f"{name}/{path.name}", path.read_bytes()
    if path.name in there and objects.read(place) == content:
        return True
    return objects.create(place, content)


def _is_there(objects: Objects, folder: Path, name: str) -> bool:
    """Return whether the storage holds the run in `folder` as `name`: all sizes and its run.json.

    This asks the storage and does not rely on the replies received while sending.
    """
    sizes = {path.name: path.stat().st_size for path in (*_files(folder), folder / MANIFEST)}
    there = objects.inside(name)
    return sizes.items() <= there.items() and _has_manifest(objects, folder, name)


def _has_manifest(objects: Objects, folder: Path, name: str) -> bool:
    return objects.read(f"{name}/{MANIFEST}") == (folder / MANIFEST).read_bytes()


def _files(folder: Path) -> list[Path]:
    """Return the paths of a run's files except run.json, sorted by name."""
    return sorted(p for p in folder.iterdir() if p.name != MANIFEST and p.name[0] != ".")


def remove(objects: Objects, name: str) -> None:
    """Delete a run or a partly sent one: hide it first, then delete run.json, then the rest."""
    retire(objects, name)
    # Hide it first: copies keep every listed run, and an interrupted deletion may leave a part.
    objects.create(f"{GONE}{name}", b"")
    objects.remove(f"{name}/{MANIFEST}")
    objects.remove_folder(name)
    objects.remove(f"{GONE}{name}")
