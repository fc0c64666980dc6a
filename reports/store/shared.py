"""Runs on shared storage, `s3://bucket/runs` or whatever fsspec reads, by way of a copy here.

A run is never changed, so the copy of a run is never out of date, and one question is left: which
runs are there? Those whose run.json is. It is sent last, and an object appears whole or not at all,
so what a writer that was killed had sent is no run. Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megalodon_jax.files import folder_written_aside, written_aside
from reports.store.schema import MANIFEST, StoreError

ADDRESS = ".shared"
"""File of a copy that says of which storage it is."""
CLAIM = ".writer"
"""Object that says who is writing a run; it goes once the run is there."""
UNSENT = ".unsent"
"""Folder of a copy with runs that the storage did not take; the next command sends them."""
AT_ONCE = 16
"""Runs that are copied at a time: what waits for a network waits together."""
REQUESTS = 64
"""Objects that are read at a time."""
ABANDONED = 3600
"""Seconds after which what a writer left is nobody's: sending a run takes a few."""


@dataclass(frozen=True)
class Storage:
    """A folder of runs on shared storage, and its copy on this machine."""

    address: str
    copy: Path
    files: Any
    """The file system, of fsspec."""
    root: str
    """The folder, as the file system names it."""

    def names(self) -> list[str]:
        """Return the folders of the storage, runs or not; none where the folder is not there yet.

        Raises FileNotFoundError where what should hold the folder, such as a bucket, is not there.
        """
        try:
            paths = self.files.ls(self.root, detail=False)
        except FileNotFoundError:
            self.files.ls(self.root.partition("/")[0], detail=False)
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(name for name in names if not name.startswith("."))

    def refresh(self) -> None:
        """Bring the copy up to date: runs that came, runs that went, runs that were not sent."""
        with _refusals_named(self.address):
            # Here first: a run that another process finishes meanwhile is then not taken for one
            # that went.
            here = {p.name for p in self.copy.iterdir() if p.is_dir() and p.name[0] != "."}
            there = set(self.names())
            for name in here - there:
                shutil.rmtree(self.copy / name, ignore_errors=True)
            new = sorted(there - here)
            # A listing has a thousand objects, which are a hundred runs and more.
            listed = self._objects_of_all() if 100 * len(new) > len(there) else {}
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda name: self._fetch(name, listed.get(name)), new))
            self.send_unsent()

    def send_unsent(self) -> None:
        """Send the runs that the storage did not take when they were made."""
        with _refusals_named(self.address):
            for folder in sorted((self.copy / UNSENT).glob("*")):
                if self.claim(folder.name):
                    self._send(folder, folder.name)
                    folder.rename(self.copy / folder.name)

    def listed(self) -> list[str]:
        """Return `names`; raises StoreError where the storage refuses."""
        with _refusals_named(self.address):
            return self.names()

    def get(self, paths: Sequence[str], folder: Path) -> None:
        """Copy objects below this folder to those places below another, many at a time.

        One that is not there is left out; raises like `listed`.
        """

        def one(path: str) -> None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                # Not `cat_file`, which asks for the size first.
                self.files.get_file(f"{self.root}/{path}", str(folder / path))

        with _refusals_named(self.address), ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(one, paths))

    def put(self, file: Path, path: str) -> None:
        """Write an object below the folder, in the place of what is there; raises like `listed`."""
        with _refusals_named(self.address):
            self.files.put_file(str(file), f"{self.root}/{path}")

    def _fetch(self, name: str, objects: Mapping[str, str] | None) -> None:
        objects = self._objects(name) if objects is None else objects
        if MANIFEST not in objects:
            return
        # What is written aside becomes a run when it is whole, here too.
        with suppress(FileNotFoundError), folder_written_aside(self.copy / name) as aside:
            self.files.get(list(objects.values()), [str(aside / inside) for inside in objects])

    def _objects(self, name: str) -> dict[str, str]:
        return {path.rpartition("/")[2]: path for path in self.files.find(f"{self.root}/{name}")}

    def _objects_of_all(self) -> dict[str, dict[str, str]]:
        folders: dict[str, dict[str, str]] = {}
        for path in self.files.find(self.root):
            name, _, inside = path.removeprefix(f"{self.root}/").partition("/")
            if inside and "/" not in inside:
                folders.setdefault(name, {})[inside] = path
        return folders

    def claim(self, name: str) -> bool:
        """Return whether this process may write a run of that name: nobody has it or writes it.

        Storage without conditional writes may tell two writers so at once; `_send` asks again.
        """
        with _refusals_named(self.address):
            if self._left_by_a_writer(name):
                self.files.rm(f"{self.root}/{name}", recursive=True)
            claim = f"{self.root}/{name}/{CLAIM}"
            try:
                self.files.pipe_file(claim, self._token, mode="create")
            except OSError:
                # A condition that does not hold is another error with every file system.
                if self.files.exists(claim):
                    return False
                raise
            if self.files.exists(f"{self.root}/{name}/{MANIFEST}"):
                self.files.rm_file(claim)
                return False
            return True

    @property
    def _token(self) -> bytes:
        return f"{os.getpid()} {_TOKEN}".encode()

    def _left_by_a_writer(self, name: str) -> bool:
        """Return whether a folder is no run, and nobody has written to it for long."""
        objects = self._objects(name)
        if not objects or MANIFEST in objects:
            return False
        newest = max(self.files.modified(path) for path in objects.values())
        return (datetime.now(UTC) - newest).total_seconds() > ABANDONED

    def publish(self, folder: Path, name: str) -> None:
        """Send a run whose name is claimed, its run.json last.

        Raises:
            StoreError: the storage refuses; the run is kept, and the next command sends it.
        """
        try:
            with _refusals_named(self.address):
                self._send(folder, name)
        except StoreError as error:
            aside = self.copy / UNSENT / name
            aside.parent.mkdir(exist_ok=True)
            shutil.copytree(folder, aside, dirs_exist_ok=True)
            raise StoreError(
                f"{error}. The run is whole in {aside}, and the next command with "
                f"--out {self.address} sends it"
            ) from error

    def _send(self, folder: Path, name: str) -> None:
        place = f"{self.root}/{name}"
        for path in sorted(folder.iterdir()):
            if path.name != MANIFEST:
                self.files.put_file(str(path), f"{place}/{path.name}")
        if self.files.cat_file(f"{place}/{CLAIM}") != self._token:
            raise StoreError(f"another writer has taken {place} meanwhile")
        manifest = (folder / MANIFEST).read_bytes()
        self.files.pipe_file(f"{place}/{MANIFEST}", manifest, mode="create")
        self.files.rm_file(f"{place}/{CLAIM}")

    def release(self, name: str) -> None:
        """Give up a name that is claimed, with what was sent; what refuses is left to `clean`."""
        place = f"{self.root}/{name}"
        with suppress(Exception):
            if self.files.cat_file(f"{place}/{CLAIM}") == self._token:
                self.files.rm(place, recursive=True)

    def delete(self, name: str) -> None:
        """Delete a run: its run.json first, without which the rest is none."""
        place = f"{self.root}/{name}"
        with _refusals_named(self.address):
            self.files.rm_file(f"{place}/{MANIFEST}")
            self.files.rm(place, recursive=True)

    def clean(self) -> None:
        """Delete what writers and deletions that were killed have left."""
        with _refusals_named(self.address):
            for name in self.names():
                if not (self.copy / name).exists() and self._left_by_a_writer(name):
                    self.files.rm(f"{self.root}/{name}", recursive=True)

    def check_writable(self) -> None:
        """Raise StoreError where nothing can be written to the storage, and `clean` it."""
        probe = f"{self.root}/.partial-{uuid.uuid4().hex[:8]}"
        with _refusals_named(self.address):
            self.files.pipe_file(probe, b"")
            self.files.rm_file(probe)
        self.clean()


_TOKEN = uuid.uuid4().hex


def is_address(text: str) -> bool:
    """Return whether a text names shared storage rather than a folder of this machine."""
    return "://" in text


def copy_of(address: str) -> Path:
    """Return where the copy of a folder on shared storage lies on this machine, there or not."""
    address = address.rstrip("/")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", address)[-60:].lstrip(".-")
    return caches / "megalodon-numerics" / "runs" / f"{name}-{digest}"


def open_copy(address: str, runs: bool = True) -> Path:
    """Return the copy of a folder of runs on shared storage, up to date.

    Args:
        address: of the folder.
        runs: whether to bring the runs here; otherwise it has those that it had.

    Raises:
        StoreError: what reads such storage is not installed, or the storage refuses.
    """
    address = address.rstrip("/")
    copy = copy_of(address)
    storage = _connect(address, copy)
    try:
        copy.mkdir(parents=True, exist_ok=True)
        if not (copy / ADDRESS).exists():
            with written_aside(copy / ADDRESS) as aside:
                aside.write_text(storage.address, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"expected to keep a copy of {address} at {copy}, but {error.strerror or error}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    if runs:
        storage.refresh()
    return copy


def refresh(root: Path) -> None:
    """Bring `root` up to date where it is the copy of shared storage; raises like `open_copy`."""
    if (storage := storage_of(root)) is not None:
        storage.refresh()


def address_of(root: Path) -> str:
    """Return where the runs of `root` lie: on shared storage if it is a copy, or `root` itself."""
    # A damaged one makes no copy; `list_runs` names it. A pipe would wait for a writer.
    with suppress(OSError, UnicodeDecodeError):
        if (root / ADDRESS).is_file():
            return (root / ADDRESS).read_text(encoding="utf-8")
    return str(root)


def storage_of(root: Path) -> Storage | None:
    """Return the storage that `root` is a copy of, or None; raises like `open_copy`."""
    address = address_of(root)
    return _connect(address, root) if is_address(address) else None


def _connect(address: str, copy: Path) -> Storage:
    try:
        import fsspec

        # Listings are asked anew: other machines write there. Only folders must be made.
        folders = {"auto_mkdir": True} if address.startswith(("file:", "local:")) else {}
        files, path = fsspec.url_to_fs(address, use_listings_cache=False, **folders)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"expected something installed that reads {address}, but: {error}. "
            "pip install 'megalodon-numerics[s3]' for s3://; any other needs its package of fsspec"
        ) from error
    return Storage(address, copy, files, path.rstrip("/"))


@contextmanager
def _refusals_named(address: str) -> Iterator[None]:
    """Say of what the storage refuses which it was, and what to do."""
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(
            f"expected {address} to be there, but {error}; make the bucket, or mend the address"
        ) from error
    except PermissionError as error:
        raise StoreError(
            f"expected to be let in at {address}, but {error}; give credentials that may list, "
            "read and write there, as the storage's own tools want them"
        ) from error
    except Exception as error:
        # Clients of storage raise errors of their own, which have nothing in common.
        raise StoreError(
            f"expected an answer from {address}, but {type(error).__name__}: {error}; see that it "
            "can be reached from this machine, and with which credentials"
        ) from error
