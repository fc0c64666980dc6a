"""The run folder: immutable, written aside and renamed, readable by anything that reads Parquet.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parity.engine.deviation import Deviation
from parity.engine.measurement import Kind, Measurement, Verdict
from parity.megalodon.explanation import Explanation
from reports.store.explanations import read_explanations, write_explanations
from reports.store.manifest import Manifest, read_manifest
from reports.store.schema import (
    COLUMNS,
    FILES,
    FINDINGS,
    MANIFEST,
    MEASUREMENTS,
    PAGE,
    ROWS,
    TIMINGS,
    RunKind,
    StoreError,
    added_columns,
    arrow_schema,
)
from reports.store.shared import ABANDONED, Storage, storage_of
from reports.store.tensors import read_tensors, write_tensors
from reports.store.timings import Timing
from stability.core.findings import Finding, Severity

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
Rows = tuple[Measurement, ...] | tuple[Finding, ...] | tuple[Timing, ...]


@dataclass(frozen=True)
class Run:
    """One run as stored: the manifest of run.json and the rows of its kind's files.

    Measurements have the verdict that their numbers support, whatever a file says
    (docs/parity.md "Fail closed").
    """

    manifest: Manifest
    measurements: tuple[Measurement, ...] = ()
    findings: tuple[Finding, ...] = ()
    timings: tuple[Timing, ...] = ()
    tensors: tuple[Deviation, ...] = ()
    """Of measurements that failed: where they differ and by how much."""
    explanations: tuple[Explanation, ...] = ()
    """Of cases that failed: where each leaves the oracle first, and whether it starts there."""

    def __post_init__(self) -> None:
        """Judge every measurement by its numbers."""
        rows = tuple(m.settled() for m in self.measurements)
        object.__setattr__(self, "measurements", rows)

    @property
    def id(self) -> str:
        """Name of the run's folder."""
        return self.manifest.id


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A readable run folder with its manifest; its rows are not read."""

    folder: Path
    manifest: Manifest

    @property
    def kind(self) -> RunKind:
        """What the run is."""
        return self.manifest.kind


def _table(name: str, rows: Rows) -> pa.Table:
    schema = arrow_schema(name)
    # str() of a StrEnum is its value; everything else goes in as it is.
    columns = {
        field.name: [
            str(getattr(row, field.name)) if field.type == pa.string() else getattr(row, field.name)
            for row in rows
        ]
        for field in schema
    }
    return pa.table(columns, schema=schema)


def _check_rows(run: Run) -> dict[str, Rows]:
    kind = run.manifest.kind
    rows = {MEASUREMENTS: run.measurements, FINDINGS: run.findings, TIMINGS: run.timings}
    foreign = [name for name, part in rows.items() if part and name not in FILES[kind]]
    if foreign:
        raise StoreError(
            f"expected a run of kind {kind} to hold rows for {', '.join(FILES[kind])} only, "
            f"received rows for {', '.join(foreign)}; set the manifest's kind to what was run"
        )
    return {name: rows[name] for name in FILES[kind]}


@contextmanager
def _refusals_named(root: Path) -> Iterator[None]:
    """Say of what the system refuses which folder it was about, and what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"expected a folder that can be written at {root}, but {error.strerror or error} "
            f"({error.filename or root}); nothing was stored. Give a writable folder with --out, "
            "or free some space"
        ) from error


def check_writable(root: Path) -> None:
    """Raise StoreError where `root` could not hold a run, before anything expensive starts."""
    probe = root / f".partial-{uuid.uuid4().hex[:8]}"
    with _refusals_named(root):
        root.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    if (storage := storage_of(root)) is not None:
        storage.check_writable()


def write_run(root: Path, run: Run, draw: Callable[[Run], str] | None = None) -> Path:
    """Store a run, and the page that `draw` makes of it, as `root/<id>` and return that folder.

    Everything is written to a hidden sibling and renamed, so an interrupted or failed write leaves
    no run behind. A run is never overwritten: where the id is taken, as when two writers started in
    the same second, the folder and the run become `<id>-2`. Where `root` is a copy of shared
    storage, the run is sent there before it is in the copy (`reports.store.shared`).

    Raises:
        StoreError: the id is not fit for a folder, the rows are not those of the run's kind, or the
            root or the disk refuses.
        RuntimeError: `draw` failed; the run is stored without its page.
    """
    if not _ID.fullmatch(run.id):
        raise StoreError(
            "expected a run id of letters, digits, '.', '_' and '-' that starts with a letter or a "
            f"digit, received {run.id!r}; give the manifest an id fit for a folder"
        )
    parts, failure, storage = _check_rows(run), None, storage_of(root)
    with _refusals_named(root):
        root.mkdir(parents=True, exist_ok=True)
        name, partial = _claim(root, run.id, storage)
    try:
        run = replace(run, manifest=replace(run.manifest, id=name))
        with _refusals_named(root):
            for file, rows in parts.items():
                pq.write_table(_table(file, rows), partial / file)
            write_tensors(partial, run.tensors)
            write_explanations(partial, run.explanations)
            document = json.dumps(run.manifest.to_json(), indent=2, ensure_ascii=False)
            (partial / MANIFEST).write_text(document + "\n", encoding="utf-8")
        try:
            page = draw(run) if draw else None
        except Exception as error:
            # An hour of numbers is not thrown away for a page that `report` can draw again.
            page, failure = None, error
        with _refusals_named(root):
            if page is not None:
                (partial / PAGE).write_text(page, encoding="utf-8")
            if storage is None:
                folder, partial = partial.rename(root / name), None
            else:
                whole, partial = partial, None
                # It keeps the run, whatever happens, and may have to take another name.
                folder = storage.publish(whole, name)
    finally:
        # Also after Ctrl-C. Once it is renamed, another writer may claim the hidden name.
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
            if storage is not None:
                storage.release(name)
    if failure is not None:
        raise RuntimeError(
            f"the run is stored in {folder}, but its page could not be drawn: {failure!r}. "
            f"`megalodon-numerics report {folder}` draws it again"
        ) from failure
    return folder


def _claim(root: Path, run_id: str, storage: Storage | None) -> tuple[str, Path]:
    """Return the first name that no run has and no other writer claims, and the hidden folder that
    claims it: making a folder succeeds once. A claim of long ago is of a writer that was killed.
    """
    for turn in itertools.count(1):
        name = run_id if turn == 1 else f"{run_id}-{turn}"
        partial = root / f".partial-{name}"
        with suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > ABANDONED:
                shutil.rmtree(partial)
        with suppress(FileExistsError):
            partial.mkdir()
            try:
                if not (root / name).exists() and (storage is None or storage.claim(name)):
                    return name, partial
            except StoreError:
                # The storage does not answer. The run is kept, and claims its name when it is sent.
                return name, partial
            partial.rmdir()
    raise AssertionError("unreachable: every name is taken")


def _open(folder: Path, name: str, absent: Mapping[str, Any]) -> pq.ParquetFile:
    path = folder / name
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"expected a complete Parquet file at {path}, but opening it gave: {error}; "
            "it is missing or truncated: restore the folder or delete it"
        ) from error
    missing = sorted(set(arrow_schema(name).names) - set(file.schema_arrow.names) - set(absent))
    if missing:
        file.close()
        raise StoreError(
            f"expected the columns {', '.join(missing)} in {path}, and they are not there; "
            "the file was not written by this tool: restore the folder or delete it"
        )
    return file


def _rows(folder: Path, name: str, absent: Mapping[str, Any]) -> list[dict[str, Any]]:
    with _open(folder, name, absent) as file:
        try:
            columns = [column for column in COLUMNS[name] if column not in absent]
            return [{**row, **absent} for row in file.read(columns=columns).to_pylist()]
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"expected readable rows in {folder / name}, but reading gave: {error}; "
                "the file is damaged: restore the folder or delete it"
            ) from error


# Columns that are more than a text or a number, by file.
_WORDS = {
    MEASUREMENTS: {"kind": Kind, "verdict": Verdict},
    FINDINGS: {"severity": Severity},
    TIMINGS: {"rounds": tuple},
}


def read_run(folder: Path) -> Run:
    """Read a stored run. Raises StoreError naming the file that is missing, damaged or newer."""
    manifest = read_manifest(folder)
    parts: dict[str, Any] = {}
    for name in FILES[manifest.kind]:
        words = _WORDS[name]
        try:
            parts[name.removesuffix(".parquet")] = tuple(
                ROWS[name](**row | {column: make(row[column]) for column, make in words.items()})
                for row in _rows(folder, name, added_columns(name, manifest.migrated_from))
            )
        except ValueError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{folder / name} holds a word this version does not know: {error}; "
                "update megalodon-numerics"
            ) from error
    try:
        more = {"tensors": read_tensors(folder), "explanations": read_explanations(folder)}
        return Run(manifest, **parts, **more)
    except ValueError as error:
        raise StoreError(str(error)) from error


def list_runs(root: Path) -> tuple[list[RunInfo], list[tuple[Path, str]]]:
    """Return the readable runs of every kind under `root`, oldest first, and the unreadable folders
    with a reason.

    A root that does not exist yet holds no runs. Hidden folders, which is what an interrupted write
    may leave, are never runs. Of copies of one run, the one in the folder of its name counts, and
    the others are named. Raises StoreError where `root` cannot be listed.
    """
    readable, unreadable = read_infos(run_folders(root))
    return without_copies(readable, unreadable), unreadable


def run_folders(root: Path) -> list[Path]:
    """Return the folders under `root` that may be runs, by name; raises like `list_runs`."""
    if not root.exists():
        return []
    try:
        with os.scandir(root) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
    except OSError as error:
        raise StoreError(
            f"expected a folder of runs at {root}, but {error.strerror or error}; "
            "give the folder that `nightly` wrote to"
        ) from error
    return [root / name for name in sorted(names)]


def read_infos(folders: Sequence[Path]) -> tuple[list[RunInfo], list[tuple[Path, str]]]:
    """Return folders that are readable runs with their manifests, and the others with a reason."""
    readable: list[RunInfo] = []
    unreadable: list[tuple[Path, str]] = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            for name in FILES[manifest.kind]:
                _open(folder, name, added_columns(name, manifest.migrated_from)).close()
        except StoreError as error:
            unreadable.append((folder, str(error)))
        else:
            readable.append(RunInfo(folder, manifest))
    return readable, unreadable


def without_copies(runs: list[RunInfo], unreadable: list[tuple[Path, str]]) -> list[RunInfo]:
    """Return `runs` oldest first, each id once; the copies go to `unreadable` with a reason."""
    by_id: dict[str, RunInfo] = {}
    for run in sorted(runs, key=lambda run: run.folder.name != run.manifest.id):
        first = by_id.setdefault(run.manifest.id, run)
        if first is not run:
            why = f"a copy of run {run.manifest.id} in {first.folder}; delete one of them"
            unreadable.append((run.folder, why))
    return sorted(by_id.values(), key=lambda run: (run.manifest.created, str(run.folder)))
