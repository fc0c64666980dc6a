"""Runs in the local copy that shared storage does not have yet. Every run waits here while it is
sent, so a killed or rejected writer loses nothing: the next command sends the run.

Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megalodon_jax.files import read_json_object, written_aside
from reports.store.schema import MANIFEST, StoreError
from reports.store.seal import check_seal, text_of

UNSENT = ".unsent"
"""Folder of a copy that holds the unsent runs."""
NOTE = ".claim"
"""File of an unsent run that holds its `Note`; it is never sent."""
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Error codes of renaming a folder to a name that another file or a non-empty folder has."""


@dataclass(frozen=True)
class Note:
    """Claimed name of an unsent run.

    Attributes:
        name: Name that the run shall have on the storage.
        token: Token of the claim; None if the name is not claimed yet.
    """

    name: str
    token: str | None


def put_in(copy: Path, folder: Path, note: Note) -> Path:
    """Move the complete run in `folder` to the unsent runs of a copy, and return its new folder."""
    _write(folder, note)
    (copy / UNSENT).mkdir(exist_ok=True)
    for turn in itertools.count(1):
        place = copy / UNSENT / (note.name if turn == 1 else f"{note.name}-{turn}")
        # Not `exists`: another process may take the name after the answer.
        try:
            return folder.rename(place)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
    raise AssertionError("unreachable: some name is free")


def waiting(copy: Path) -> list[Path]:
    """Return the unsent runs of a copy, sorted by name."""
    folders = (copy / UNSENT).glob("*")
    return sorted(f for f in folders if f.name[0] != "." and f.is_dir())


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Context in which no other process sends the run in `folder`.

    Yields False if another process is sending the run or has sent it; then leave the run alone.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(handle) and _is(handle, folder)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some network file systems cannot lock folders. Sending a run twice at once is only
        # wasteful.
        return True
    return True


def _is(handle: int, folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), folder.stat())
    return False


def read_note(folder: Path) -> Note | None:
    """Return the note of an unsent run; None if it has none, because an earlier version left it.

    Raises:
        StoreError: the note is damaged.
    """
    if not (folder / NOTE).exists():
        return None
    try:
        note = read_json_object(folder / NOTE)
        name, token = note["name"], note["token"]
        if isinstance(name, str) and (token is None or isinstance(token, str)):
            return Note(name, token)
        raise ValueError(
            "expected as name a text, the name of the run to send, and as token a text, its claim "
            f"of that name, or null; received {note}"
        )
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(folder / NOTE, error) from error


def set_name(folder: Path, note: Note) -> None:
    """Write the note of an unsent run and set the id in its run.json.

    Raises:
        StoreError: run.json is damaged or was edited.
    """
    _write(folder, note)
    file = folder / MANIFEST
    try:
        document = read_json_object(file)
        # An edited document must not be sealed again.
        check_seal(document, file)
        if document.get("id") != note.name:
            document["id"] = note.name
            with written_aside(file) as aside:
                aside.write_text(text_of(document), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error


def take_out(folder: Path, place: Path) -> None:
    """Move a sent run out of the unsent runs, to its folder `place` in the copy."""
    manifest = (folder / MANIFEST).read_bytes()
    try:
        folder.rename(place)
    except OSError:
        with suppress(OSError):
            if (place / MANIFEST).read_bytes() == manifest:
                # Another process has fetched the run in the meantime.
                shutil.rmtree(folder)
                return
        shutil.rmtree(place)
        folder.rename(place)
    # Last: without its note an interrupted run would be sent again under another name.
    (place / NOTE).unlink(missing_ok=True)


def _write(folder: Path, note: Note) -> None:
    with written_aside(folder / NOTE) as aside:
        aside.write_text(json.dumps({"name": note.name, "token": note.token}), encoding="utf-8")


def _damaged(file: Path, error: Exception) -> StoreError:
    return StoreError(
        f"expected a run that can be sent in {file.parent}, but {file.name} is damaged: {error}; "
        "restore the file or delete the folder"
    )
