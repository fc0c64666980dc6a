"""The run folder: immutable, written aside and renamed, readable by anything that reads Parquet.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parity.engine.deviation import Deviation
from parity.engine.measurement import Kind, Measurement, Verdict
from reports.store.schema import (
    COLUMNS,
    FILES,
    FINDINGS,
    MANIFEST,
    MEASUREMENTS,
    PAGE,
    ROWS,
    SCHEMA,
    TIMINGS,
    RunKind,
    StoreError,
    added_columns,
    arrow_schema,
    kind_of,
    migrated,
)
from reports.store.tensors import read_tensors, write_tensors
from reports.store.timings import Timing
from stability.core.findings import Finding, Severity

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
Rows = tuple[Measurement, ...] | tuple[Finding, ...] | tuple[Timing, ...]


@dataclass(frozen=True)
class Run:
    """One run as stored: the manifest of run.json and the rows of its kind's files."""

    manifest: dict[str, Any]
    measurements: tuple[Measurement, ...] = ()
    findings: tuple[Finding, ...] = ()
    timings: tuple[Timing, ...] = ()
    tensors: tuple[Deviation, ...] = ()
    """Of measurements that failed: where they differ and by how much."""

    @property
    def id(self) -> str:
        """Name of the run's folder."""
        return self.manifest["id"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A readable run folder with its manifest."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def kind(self) -> RunKind:
        """What the run is."""
        return kind_of(self.manifest)


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
    kind = kind_of(run.manifest)
    rows = {MEASUREMENTS: run.measurements, FINDINGS: run.findings, TIMINGS: run.timings}
    foreign = [name for name, part in rows.items() if part and name not in FILES[kind]]
    if foreign:
        raise StoreError(
            f"expected a run of kind {kind} to hold rows for {', '.join(FILES[kind])} only, "
            f"received rows for {', '.join(foreign)}; set manifest['kind'] to what was run"
        )
    return {name: rows[name] for name in FILES[kind]}


def _check_id(run: Run) -> str:
    run_id = run.manifest.get("id")
    if not isinstance(run_id, str) or not _ID.fullmatch(run_id):
        raise StoreError(
            "expected a run id of letters, digits, '.', '_' and '-' that starts with a letter or a "
            f"digit, received {run_id!r}; set manifest['id'] to a name fit for a folder"
        )
    if run.manifest.get("schema") != SCHEMA:
        raise StoreError(
            f"expected manifest['schema'] = {SCHEMA}, received {run.manifest.get('schema')!r}; "
            "set it to reports.store.schema.SCHEMA"
        )
    return run_id


def _unwritable(root: Path, error: OSError) -> StoreError:
    return StoreError(
        f"expected a folder that can be written at {root}, but {error.strerror or error} "
        f"({error.filename or root}); nothing was stored. Give a writable folder with --out, or "
        "free some space"
    )


def check_writable(root: Path) -> None:
    """Raise StoreError where `root` could not hold a run, before anything expensive starts."""
    probe = root / f".partial-{uuid.uuid4().hex[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise _unwritable(root, error) from error


def write_run(root: Path, run: Run, page: str | None = None) -> Path:
    """Store a run, and its page where it has one, as `root/<id>` and return that folder.

    Everything is written to a hidden sibling and renamed, so an interrupted or failed write leaves
    no run behind. A run is never overwritten: where the id is taken, as when two writers started in
    the same second, the folder and the run become `<id>-2`. Raises StoreError where the rows are
    not those of the run's kind, or the root or the disk refuses.
    """
    run_id, parts = _check_id(run), _check_rows(run)
    partial = root / f".partial-{run_id}-{uuid.uuid4().hex[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        for name, rows in parts.items():
            pq.write_table(_table(name, rows), partial / name)
        write_tensors(partial, run.tensors)
        return _renamed(partial, root, run, page)
    except OSError as error:
        raise _unwritable(root, error) from error
    finally:
        # Also after Ctrl-C: after the rename there is nothing left here to remove.
        shutil.rmtree(partial, ignore_errors=True)


def _renamed(partial: Path, root: Path, run: Run, page: str | None) -> Path:
    """Complete `partial` and give it the first id that is free: the rename itself is the lock."""
    name, turn = run.id, 1
    while True:
        manifest = json.dumps({**run.manifest, "id": name}, indent=2, ensure_ascii=False)
        (partial / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        if page is not None:
            # An id is letters, digits and signs that no escaping changes.
            (partial / PAGE).write_text(page.replace(run.id, name), encoding="utf-8")
        try:
            partial.rename(root / name)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            turn += 1
            name = f"{run.id}-{turn}"
        else:
            return root / name


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read run.json alone, in today's schema.

    Raises:
        StoreError: it is missing or damaged, or of an unknown schema or kind.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from error
    return parse_manifest(text, path)


def parse_manifest(text: str, path: Path) -> dict[str, Any]:
    """Return what the text of a run.json says, in today's schema; raises like `read_manifest`."""
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise _damaged(path.parent, error) from error
    manifest = migrated(manifest if isinstance(manifest, dict) else {}, path)
    if not isinstance(manifest.get("id"), str) or not isinstance(manifest.get("created"), str):
        raise StoreError(
            f"expected the texts 'id' and 'created' in {path}; restore the folder or delete it"
        )
    try:
        kind_of(manifest)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error
    return manifest


def _damaged(folder: Path, error: Exception) -> StoreError:
    return StoreError(
        f"expected a complete {MANIFEST} in {folder}, but reading it gave: {error}; "
        "this is not a stored run, or it was damaged: restore the folder or delete it"
    )


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
    for name in FILES[kind_of(manifest)]:
        words = _WORDS[name]
        try:
            parts[name.removesuffix(".parquet")] = tuple(
                ROWS[name](**row | {column: make(row[column]) for column, make in words.items()})
                for row in _rows(folder, name, added_columns(name, manifest))
            )
        except ValueError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{folder / name} holds a word this version does not know: {error}; "
                "update megalodon-numerics"
            ) from error
    try:
        return Run(manifest, **parts, tensors=read_tensors(folder))
    except ValueError as error:
        raise StoreError(str(error)) from error


def list_runs(root: Path) -> tuple[list[Stored], list[tuple[Path, str]]]:
    """Return the readable runs of every kind under `root`, oldest first, and the unreadable folders
    with a reason.

    A root that does not exist yet holds no runs. Hidden folders, which is what an interrupted write
    may leave, are never runs. Of copies of one run, the one in the folder of its name counts, and
    the others are named. Raises StoreError where `root` cannot be listed.
    """
    if not root.exists():
        return [], []
    try:
        folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise StoreError(
            f"expected a folder of runs at {root}, but {error.strerror or error}; "
            "give the folder that `nightly` wrote to"
        ) from error
    readable: list[Stored] = []
    unreadable: list[tuple[Path, str]] = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            for name in FILES[kind_of(manifest)]:
                _open(folder, name, added_columns(name, manifest)).close()
        except StoreError as error:
            unreadable.append((folder, str(error)))
        else:
            readable.append(Stored(folder, manifest))
    return without_copies(readable, unreadable), unreadable


def without_copies(runs: list[Stored], unreadable: list[tuple[Path, str]]) -> list[Stored]:
    """Return `runs` oldest first, each id once; the copies go to `unreadable` with a reason."""
    kept: dict[str, Stored] = {}
    for run in sorted(runs, key=lambda run: run.folder.name != run.manifest["id"]):
        first = kept.setdefault(run.manifest["id"], run)
        if first is not run:
            why = f"a copy of run {run.manifest['id']} in {first.folder}; delete one of them"
            unreadable.append((run.folder, why))
    return sorted(kept.values(), key=lambda run: (run.manifest["created"], str(run.folder)))
