"""Runs on shared storage, `s3://bucket/runs` or whatever fsspec reads, by way of a copy here.

The numbers of a run are never changed, so a run that was copied stays current, and refreshing a
copy only asks which runs exist: those with a run.json. It is sent last, and an object appears whole
or not at all, so the objects of a killed writer are not a run. A page or a verdict may follow.
Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megalodon_jax.files import folder_written_aside, written_aside
from reports.store.addresses import ADDRESS, address_of, check_address, copy_of, is_address
from reports.store.claims import CLAIMS, claim, retire
from reports.store.objects import Objects
from reports.store.schema import MANIFEST, PAGE, VERDICT, StoreError
from reports.store.sending import deliver, remove
from reports.store.unsent import Note, locked, put_in, take_out, waiting

REQUESTS = 64
"""Objects that are read at a time: requests that wait for a network wait together."""
ABANDONED = 3600
"""Seconds without a new object after which an unfinished run is deleted. Sending takes a few."""
LATE = (PAGE, VERDICT)
"""Files that are added to a run after it is stored."""
Report = Callable[[str], None]


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Storage:
    """A folder of runs on shared storage, and its copy on this machine."""

    address: str
    copy: Path
    objects: Objects
    tokens: dict[str, str] = field(default_factory=dict)
    """Tokens of the names that were claimed and are not published yet."""

    def refresh(self, report: Report = _on_stderr) -> None:
        """Bring the copy up to date: fetch new runs, delete deleted ones, send unsent ones."""
        with _refusals_named(self.address):
            # The copy first: a run that another process publishes meanwhile is then not taken for
            # a deleted one.
            here = {p.name for p in self.copy.iterdir() if p.is_dir() and p.name[0] != "."}
            there = set(self.objects.names())
            for name in here - there:
                shutil.rmtree(self.copy / name, ignore_errors=True)
            new, late = sorted(there - here), sorted(filter(self._may_grow, here & there))
            # A listing has a thousand objects, which are a hundred runs and more.
            every = 100 * (len(new) + len(late)) > len(there)
            listed = self.objects.inside_all() if every else {}
            with ThreadPoolExecutor(REQUESTS) as pool:
                list(pool.map(lambda name: self._fetch(name, listed.get(name)), new))
                list(pool.map(lambda name: self._fetch_late(name, listed.get(name)), late))
        self.send_unsent(report)

    def _fetch(self, name: str, inside: Mapping[str, int] | None) -> None:
        """Copy a run; an unfinished one, or one that is deleted meanwhile, is left out."""
        inside = self.objects.inside(name) if inside is None else inside
        if MANIFEST not in inside:
            return
        try:
            # What is written aside becomes a run when it is whole, here too.
            with folder_written_aside(self.copy / name) as aside:
                for file, size in inside.items():
                    self.objects.fetch(f"{name}/{file}", aside / file)
                    if (aside / file).stat().st_size != size:
                        raise FileNotFoundError(f"{name}/{file} is not what was listed")
        except FileNotFoundError:
            return

    def _may_grow(self, name: str) -> bool:
        """Return whether a run of the copy may get a page or a verdict yet, which come last."""
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
        """Return the names of the runs on the storage, unfinished ones too.

        Raises:
            StoreError: the storage refuses.
        """
        with _refusals_named(self.address):
            return self.objects.names()

    def get(self, paths: Sequence[str], folder: Path) -> None:
        """Copy objects below this folder to those places below another, many at a time.

        One that is not there is left out; raises like `listed`.
        """

        def one(path: str) -> None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            self.objects.fetch(path, folder / path)

        with _refusals_named(self.address), ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(one, paths))

    def put(self, file: Path, path: str) -> None:
        """Write an object below the folder, in the place of what is there; raises like `listed`."""
        with _refusals_named(self.address):
            self.objects.replace(path, file)

    def claim(self, name: str) -> bool:
        """Return whether this writer now owns a name: nobody has or had it. Raises like `listed`.

        `publish` sends a run under the name; if nothing is published the name stays taken.
        """
        with _refusals_named(self.address):
            token = claim(self.objects, name)
        if token is not None:
            self.tokens[name] = token
        return token is not None

    def publish(self, folder: Path, name: str, report: Report = _on_stderr) -> Path:
        """Send a run, and return its folder in the copy, which has the name that it got.

        The folder is moved among the unsent runs first, and leaves them when the storage has been
        read back. It gets another name where somebody took the name meanwhile.

        Raises:
            StoreError: the storage refuses; the run is kept, and the next command sends it.
            OSError: the folder cannot be moved; it is where it was.
        """
        with locked(folder):
            kept = put_in(self.copy, folder, Note(name, self.tokens.pop(name, None)))
            try:
                with _refusals_named(self.address):
                    return self._deliver(kept, report)
            except StoreError as error:
                raise StoreError(
                    f"{error}. The run is whole in {kept}, and the next command with "
                    f"--out {self.address} sends it"
                ) from error

    def send_unsent(self, report: Report = _on_stderr) -> None:
        """Send the runs that the storage did not take when they were made, and report each."""
        for folder in waiting(self.copy):
            with locked(folder) as ours:
                if not ours:
                    continue
                try:
                    with _refusals_named(self.address):
                        place = self._deliver(folder, report)
                except StoreError as error:
                    # It costs only itself: other runs can be read, and perhaps sent.
                    report(f"not sent: {error}. The run is whole in {folder}")
                else:
                    report(f"sent now: {self.address}/{place.name}, which was not sent when made")

    def _deliver(self, folder: Path, report: Report) -> Path:
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

    def release(self, name: str) -> None:
        """Give up a claimed name. Nothing was sent, and the name stays taken."""
        self.tokens.pop(name, None)

    def delete(self, name: str) -> None:
        """Delete a run; an interrupted deletion leaves no run, and `clean` completes it."""
        with _refusals_named(self.address):
            remove(self.objects, name)

    def clean(self) -> None:
        """Complete interrupted deletions, and delete what killed writers left."""
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
                    # A slow writer that published meanwhile keeps its run or withdraws it.
                    if MANIFEST not in self.objects.inside(name):
                        self.objects.remove_folder(name)

    def check_writable(self) -> None:
        """Raise StoreError where nothing can be written to the storage, and `clean` it."""
        self.clean()


def open_copy(address: str, runs: bool = True, report: Report = _on_stderr) -> Path:
    """Return the copy of a folder of runs on shared storage, up to date.

    Args:
        address: of the folder.
        runs: whether to bring the runs here; otherwise it has those that it had.
        report: receives a line for each unsent run.

    Raises:
        StoreError: the address has a typing error, the package that reads such storage is not
            installed, or the storage refuses.
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
        raise StoreError(
            f"expected to keep a copy of {address} at {copy}, but {error.strerror or error}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    if runs:
        storage.refresh(report)
    return copy


def refresh(root: Path) -> None:
    """Bring `root` up to date where it is the copy of shared storage; raises like `open_copy`."""
    if (storage := storage_of(root)) is not None:
        storage.refresh()


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
    return Storage(address, copy, Objects(files, path.rstrip("/")))


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
