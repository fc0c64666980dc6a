"""Objects on shared storage, where every request and every reply may be lost.

A failed operation is retried. Retrying a write is safe only after reading the object back, because
a lost reply looks like a lost request. Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
TRIES = 6
"""Attempts per operation. Storage clients also retry on their own."""
PAUSE = 0.1
"""Seconds before the first retry; the pause doubles with each further retry."""
GONE = ".gone-"
"""Prefix of a marker object that hides the folder of the same name from every listing."""
_FINAL = (FileNotFoundError, PermissionError)
"""Errors that are definite answers of the storage; a retry cannot help."""


@dataclass(frozen=True)
class Objects:
    """Objects below one folder of shared storage; paths are relative to that folder."""

    files: Any
    """The fsspec file system that reaches the storage."""
    root: str
    """Path of the folder within the file system."""

    def names(self) -> list[str]:
        """Return the names of the folders in the root that are neither hidden nor being deleted.

        Some of them may be no runs. Empty if the root does not exist.

        Raises:
            FileNotFoundError: the parent of the root, such as a bucket, does not exist.
        """
        listed = self._top()
        return sorted(n for n in listed if n[0] != "." and f"{GONE}{n}" not in listed)

    def going(self) -> list[str]:
        """Return the names of the folders whose deletion has started but not finished."""
        return sorted(n.removeprefix(GONE) for n in self._top() if n.startswith(GONE))

    def _top(self) -> set[str]:
        try:
            paths = again(lambda: self.files.ls(self.root, detail=False))
        except FileNotFoundError:
            again(lambda: self.files.ls(self.root.partition("/")[0], detail=False))
            return set()
        return {path.rstrip("/").rpartition("/")[2] for path in paths} - {""}

    def inside(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the objects directly in a folder, by name."""
        place = f"{self.root}/{folder}"
        found = again(lambda: self.files.find(place, detail=True))
        inside = {path.removeprefix(f"{place}/"): info["size"] for path, info in found.items()}
        return {name: size for name, size in inside.items() if "/" not in name}

    def inside_all(self) -> dict[str, dict[str, int]]:
        """Return for every folder, by name, the result of `inside`; one request lists all."""
        folders: dict[str, dict[str, int]] = {}
        for path, info in again(lambda: self.files.find(self.root, detail=True)).items():
            name, _, inside = path.removeprefix(f"{self.root}/").partition("/")
            if inside and "/" not in inside:
                folders.setdefault(name, {})[inside] = info["size"]
        return folders

    def newest(self, folder: str) -> datetime | None:
        """Return the newest modification time of a folder's objects; None if it has none."""
        times: list[datetime] = []
        for path in [f"{self.root}/{folder}/{name}" for name in self.inside(folder)]:
            # Another process may delete an object after it was listed.
            with suppress(FileNotFoundError):
                times.append(again(lambda p=path: self.files.modified(p)))
        return max(times, default=None)

    def now(self) -> datetime:
        """Return the storage's time, by writing and deleting a temporary object."""
        probe = f".partial-{uuid.uuid4().hex[:8]}"
        self.create(probe, b"")
        try:
            return again(lambda: self.files.modified(f"{self.root}/{probe}"))
        finally:
            self.remove(probe)

    def read(self, path: str) -> bytes | None:
        """Return the content of an object, or None if it does not exist."""
        with suppress(FileNotFoundError):
            return again(lambda: self.files.cat_file(f"{self.root}/{path}"))
        return None

    def fetch(self, path: str, file: Path) -> None:
        """Copy an object to a file; raises FileNotFoundError if the object does not exist."""
        # Not `cat_file`, which first requests the size.
        again(lambda: self.files.get_file(f"{self.root}/{path}", str(file)))

    def create(self, path: str, content: bytes) -> bool:
        """Write an object unless it exists; return whether the object now has this content.

        After an error the object is read back, so a write whose reply was lost counts as done and
        is not repeated. Storage without conditional writes overwrites an existing object.
        """
        place, condition, pause = f"{self.root}/{path}", {"mode": "create"}, PAUSE
        for turn in range(TRIES):
            try:
                if _is_local(self.files):
                    _create_local(place, content, f"{self.root}/.partial-{uuid.uuid4().hex}")
                else:
                    self.files.pipe_file(place, content, **condition)
                return True
            except _FINAL:
                raise
            except Exception as error:
                # File systems report an unmet condition with different errors.
                if (there := self.read(path)) is not None:
                    return there == content
                if _unconditional(error):
                    condition = {}
                if turn == TRIES - 1:
                    raise
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    def replace(self, path: str, file: Path) -> None:
        """Upload a file as an object, overwriting an existing one."""
        again(lambda: self.files.put_file(str(file), f"{self.root}/{path}"))

    def remove(self, path: str) -> None:
        """Delete an object if it exists."""
        with suppress(FileNotFoundError):
            again(lambda: self.files.rm_file(f"{self.root}/{path}"))

    def remove_folder(self, folder: str) -> None:
        """Delete every object of a folder, and the folder itself on storage that has folders."""
        for name in self.inside(folder):
            self.remove(f"{folder}/{name}")
        # Object stores have no folders, and their clients raise an error.
        with suppress(Exception):
            self.files.rmdir(f"{self.root}/{folder}")


def again(work: Callable[[], T]) -> T:
    """Return the result of an operation that is safe to repeat; try at most `TRIES` times."""
    pause = PAUSE
    for _ in range(TRIES - 1):
        try:
            return work()
        except _FINAL:
            raise
        except Exception:
            time.sleep(pause)
            pause *= 2
    return work()


def _unconditional(error: Exception) -> bool:
    """Return whether an error means that the storage does not support conditional writes."""
    if isinstance(error, TypeError | NotImplementedError):
        return True
    return isinstance(error, OSError) and error.errno == errno.ENOSYS


def _is_local(files: Any) -> bool:
    return "file" in ([files.protocol] if isinstance(files.protocol, str) else files.protocol)


def _create_local(place: str, content: bytes, aside: str) -> None:
    """Create a file atomically at `place`, unless it exists; `aside` is a temporary path beside it.

    fsspec's local file system checks and then writes, so two writers may both succeed and a reader
    may see half a file. A hard link, which is made here, can only be made if its name is free.

    Raises:
        FileExistsError: the file exists.
    """
    os.makedirs(os.path.dirname(place), exist_ok=True)
    try:
        with open(aside, "xb") as file:
            file.write(content)
        os.link(aside, place)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)
