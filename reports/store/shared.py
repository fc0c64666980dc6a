"""Runs on shared storage, `s3://bucket/runs` or any other that fsspec reads, through a local copy.

The numbers of a run never change, so a copied run stays valid, and refreshing a copy only lists
which runs exist: the folders with a run.json. run.json is sent last, and an object appears whole or
not at all, so what a killed writer leaves is not a run. Page and verdict may be added later.
Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megalodon_jax.extras import install
from megalodon_jax.files import folder_written_aside, written_aside
from parity.executors.executor import Log
from reports.store.addresses import ADDRESS, address_of, check_address, copy_of, is_address
from reports.store.claims import CLAIMS, claim, retire
from reports.store.objects import Objects
from reports.store.schema import MANIFEST, PAGE, VERDICT, StoreError
from reports.store.sending import deliver, remove
from reports.store.unsent import Note, locked, put_in, take_out, waiting

REQUESTS = 64
"""Number of parallel requests; most of their time is network latency."""
ABANDONED = 3600
"""Seconds without a new object after which an unfinished run is deleted; sending takes seconds."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error codes of a disk that is full or read-only."""
LATE = (PAGE, VERDICT)
"""Files that may be added to a run after it is stored."""


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Storage:
    """A folder of runs on shared storage and its copy on this machine."""

    address: str
    copy: Path
    objects: Objects
    tokens: dict[str, str] = field(default_factory=dict)
    """Tokens of the names that are claimed but not yet published."""

    def refresh(self, report: Log = _on_stderr) -> None:
        """Bring the copy up to date: fetch new runs, delete deleted ones, send unsent ones.

        `report` receives a line for each unsent run.

        Raises:
            StoreError: the storage raises an error, or the copy cannot be read or written.
        """
        with _refusals_named(self.address), _disk_named(self):
            # List the copy first: otherwise a run that another process publishes in between would
            # look like a deleted one.
            here = {p.name for p in self.copy.iterdir() if p.is_dir() and p.name[0] != "."}
            there = set(self.objects.names())
            for name in here - there:
                shutil.rmtree(self.copy / name, ignore_errors=True)
            new, late = sorted(there - here), sorted(filter(self._may_grow, here & there))
            # One listing request returns a thousand objects, which is more than a hundred runs.
            every = 100 * (len(new) + len(late)) > len(there)
            listed = self.objects.inside_all() if every else {}
            with ThreadPoolExecutor(REQUESTS) as pool:
                list(pool.map(lambda name: self._fetch(name, listed.get(name)), new))
                list(pool.map(lambda name: self._fetch_late(name, listed.get(name)), late))
        self.send_unsent(report)

    def _fetch(self, name: str, inside: Mapping[str, int] | None) -> None:
        """Copy a run to this machine, except if it is unfinished or is deleted meanwhile.

        `inside` has the sizes in bytes of its objects by name; None to request them.
        """
        inside = self.objects.inside(name) if inside is None else inside
        if MANIFEST not in inside:
            return
        try:
            # The local folder is renamed into place when it is complete, too.
            with folder_written_aside(self.copy / name) as aside:
                for file, size in inside.items():
                    self.objects.fetch(f"{name}/{file}", aside / file)
                    if (aside / file).stat().st_size != size:
                        raise FileNotFoundError(f"{name}/{file} changed while it was copied")
        except FileNotFoundError:
            return

    def _may_grow(self, name: str) -> bool:
        """Return whether a run of the copy may still get its page or verdict, which come last."""
        folder = self.copy / name
        with suppress(FileNotFoundError):
            young = time.time() - folder.stat().st_mtime < ABANDONED
            return young and not all((folder / file).exists() for file in LATE)
        return False

    def _fetch_late(self, name: str, inside: Mapping[str, int] | None) -> None:
        inside = self.objects.inside(name) if inside is None else inside
        for file in LATE:
            place = self.copy / name / file
            if file in inside and not place.exists():
                with suppress(FileNotFoundError), written_aside(place) as aside:
                    self.objects.fetch(f"{name}/{file}", aside)

    def listed(self) -> list[str]:
        """Return the names of the runs on the storage, including partly sent ones.

        Raises:
            StoreError: the storage raises an error.
        """
        with _refusals_named(self.address):
            return self.objects.names()

    def get(self, paths: Sequence[str], folder: Path) -> None:
        """Copy objects to the same relative paths below `folder`, in parallel.

        Missing objects are skipped. Raises like `listed`.
        """

        def one(path: str) -> None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                self.objects.fetch(path, folder / path)

        with _refusals_named(self.address), ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(one, paths))

    def put(self, file: Path, path: str) -> None:
        """Upload `file` as the object `path`, overwriting an existing one; raises like `listed`."""
        with _refusals_named(self.address):
            self.objects.replace(path, file)

    def claim(self, name: str) -> bool:
        """Claim a name for a run; return False if any writer has or had it. Raises like `listed`.

        `publish` sends a run under the name; if nothing is published, the name stays taken.
        """
        with _refusals_named(self.address):
            token = claim(self.objects, name)
        if token is not None:
            self.tokens[name] = token
        return token is not None

    def publish(self, folder: Path, name: str, report: Log = _on_stderr) -> Path:
        """Send a run, and return its folder in the copy, which has its final name.

        The folder is first moved to the unsent runs, and leaves them once reading the storage back
        has shown the whole run. It gets another name if another writer took the name meanwhile.

        Raises:
            StoreError: the storage raises an error; the run is kept, and the next command sends it.
            OSError: the folder cannot be moved; it stays where it was.
        """
        with locked(folder):
            kept = put_in(self.copy, folder, Note(name, self.tokens.get(name)))
            # Not earlier: a folder that could not be moved may be published again.
            self.tokens.pop(name, None)
            try:
                with _refusals_named(self.address):
                    return self._deliver(kept, report)
            except StoreError as error:
                raise StoreError(
                    f"{error}. The run is complete in {kept}, and the next command with "
                    f"--out {self.address} sends it"
                ) from error

    def send_unsent(self, report: Log = _on_stderr) -> None:
        """Send the runs that could not be sent when they were made; `report` gets a line for each.

        An error of the storage, or of this disk, is reported, not raised.
        """
        for folder in waiting(self.copy):
            try:
                with locked(folder) as ours:
                    if not ours:
                        continue
                    with _refusals_named(self.address):
                        place = self._deliver(folder, report)
            except (OSError, StoreError) as error:
                # A failure affects this run only: others can be read, and perhaps sent.
                report(f"run not sent: {error}. It is complete in {folder}")
            else:
                report(f"sent now: {self.address}/{place.name}, which could not be sent before")

    def _deliver(self, folder: Path, report: Log) -> Path:
        """Send an unsent run, and return its folder in the copy."""
        first, name = deliver(self.objects, folder)
        if name != first:
            report(
                f"the name {first} is taken on {self.address}: the run is stored as {name}. "
                "Its page may show the old name; `report` draws it again"
            )
        place = self.copy / name
        take_out(folder, place)
        return place

    def delete(self, name: str) -> None:
        """Delete a run. An interrupted deletion leaves no readable run; `clean` completes it."""
        with _refusals_named(self.address):
            remove(self.objects, name)

    def clean(self) -> None:
        """Complete interrupted deletions, and delete unfinished runs that a killed writer left."""
        with _refusals_named(self.address):
            for name in self.objects.going():
                remove(self.objects, name)
            now = self.objects.now()
            for name in self.objects.names():
                if (self.copy / name).exists() or MANIFEST in self.objects.inside(name):
                    continue
                times = self.objects.newest(name), self.objects.newest(f"{CLAIMS}/{name}")
                newest = max((time for time in times if time is not None), default=now)
                if (now - newest).total_seconds() > ABANDONED:
                    retire(self.objects, name)
                    # A slow writer that publishes meanwhile keeps its run or withdraws it.
                    if MANIFEST not in self.objects.inside(name):
                        self.objects.remove_folder(name)

    def check_writable(self) -> None:
        """Call `clean`, which writes a temporary object.

        Raises:
            StoreError: the storage is not writable.
        """
        self.clean()


def open_copy(address: str, runs: bool = True, report: Log = _on_stderr) -> Path:
    """Return the local copy of a folder of runs on shared storage.

    Args:
        address: Address of the folder.
        runs: Whether to bring the runs of the copy up to date; otherwise they are left unchanged.
        report: Receives one line per unsent run.

    Raises:
        StoreError: the address is malformed, the package that reads such storage is not installed,
            or the storage raises an error.
    """
    check_address(address)
    address = address.rstrip("/")
    copy = copy_of(address)
    storage = _connect(address, copy)
    try:
        copy.mkdir(parents=True, exist_ok=True)
        if address_of(copy) != address:
            with written_aside(copy / ADDRESS) as aside:
                aside.write_text(storage.address, encoding="utf-8")
    except OSError as error:
        raise _no_copy(storage, error) from error
    if runs:
        storage.refresh(report)
    return copy


def refresh(root: Path) -> None:
    """Bring `root` up to date if it is a copy of shared storage; raises like `open_copy`."""
    if (storage := storage_of(root)) is not None:
        storage.refresh()


def storage_of(root: Path) -> Storage | None:
    """Return the storage that `root` is a copy of, or None; raises like `open_copy`."""
    address = address_of(root)
    return _connect(address, root) if is_address(address) else None


def _connect(address: str, copy: Path) -> Storage:
    try:
        import fsspec

        # No cached listings: other machines write there. Only local folders have to be created.
        folders = {"auto_mkdir": True} if address.startswith(("file:", "local:")) else {}
        files, path = fsspec.url_to_fs(address, use_listings_cache=False, **folders)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"expected an installed package that reads {address}, but: {error}. "
            f"{install('s3')} for s3://; others need their fsspec package"
        ) from error
    return Storage(address, copy, Objects(files, path.rstrip("/")))


@contextmanager
def _disk_named(storage: Storage) -> Iterator[None]:
    """Context that turns errors of the disk with the copy into a StoreError that names the copy."""
    try:
        yield
    except OSError as error:
        names = [n for n in (error.filename, error.filename2) if isinstance(n, str | os.PathLike)]
        # An error of writing to an open file has no name; one of reading is never of this kind.
        if error.errno in FULL or any(Path(n).is_relative_to(storage.copy) for n in names):
            raise _no_copy(storage, error) from error
        raise


def _no_copy(storage: Storage, error: OSError) -> StoreError:
    return StoreError(
        f"expected to keep a copy of {storage.address} at {storage.copy}, but "
        f"{error.strerror or error}; free space there, or set XDG_CACHE_HOME to a folder that can "
        "be written"
    )


@contextmanager
def _refusals_named(address: str) -> Iterator[None]:
    """Context that turns errors of the storage into a StoreError with address and advice."""
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(
            f"expected {address} to exist, but {error}; create the bucket, or correct the address"
        ) from error
    except PermissionError as error:
        raise StoreError(
            f"expected access to {address}, but {error}; provide credentials that may list, "
            "read and write there, in the form that the storage's own tools use"
        ) from error
    except Exception as error:
        # Storage clients raise errors of different classes without a common base.
        raise StoreError(
            f"expected an answer from {address}, but {type(error).__name__}: {error}; check that "
            "this machine can reach it, and the credentials"
        ) from error
