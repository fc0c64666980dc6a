"""The run folder: immutable, written aside and renamed, readable by anything that reads Parquet.

Source: spec/reports.md "Store".
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parity.deviation import Deviation
from parity.results import Kind, Measurement, Verdict
from reports.tensors import read_tensors, write_tensors
from reports.timings import Timing
from stability.findings import Finding, Severity

SCHEMA = 1
"""Raised only where stored runs stop being readable: that discards every baseline there is."""
MEASUREMENTS = "measurements.parquet"
FINDINGS = "findings.parquet"
TIMINGS = "timings.parquet"
MANIFEST = "run.json"
PAGE = "report.html"

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_TYPES = {
    **dict.fromkeys(("value", "tolerance", "threshold", "goal", "fraction"), pa.float64()),
    **dict.fromkeys(("stage", "repeats"), pa.int32()),
    "rounds": pa.list_(pa.float64()),
}
_ROWS = {MEASUREMENTS: Measurement, FINDINGS: Finding, TIMINGS: Timing}
_COLUMNS = {name: [f.name for f in fields(row)] for name, row in _ROWS.items()}
# Properties of a row, written for whoever queries the files and never read back.
_DERIVED = {MEASUREMENTS: ["fraction"], FINDINGS: [], TIMINGS: ["repeats"]}
Rows = tuple[Measurement, ...] | tuple[Finding, ...] | tuple[Timing, ...]


class RunKind(StrEnum):
    """What a run is. Runs of one kind are never history of another."""

    NIGHTLY = "nightly"
    BENCH = "bench"


FILES = {RunKind.NIGHTLY: (MEASUREMENTS, FINDINGS), RunKind.BENCH: (TIMINGS,)}
"""The Parquet files of a run of each kind."""


class StoreError(ValueError):
    """A run could not be written or read; the message says what was expected and what to do."""


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


def kind_of(manifest: dict[str, Any]) -> RunKind:
    """Return the kind of a run; runs stored before there were kinds are all nightlies.

    Raises:
        StoreError: the kind is not one this version knows.
    """
    kind = manifest.get("kind", RunKind.NIGHTLY)
    try:
        return RunKind(kind)
    except ValueError as error:
        known = ", ".join(RunKind)
        raise StoreError(
            f"expected a run of kind {known}, received {kind!r}; update megalodon-numerics"
        ) from error


def _schema(name: str) -> pa.Schema:
    columns = _COLUMNS[name] + _DERIVED[name]
    return pa.schema([(column, _TYPES.get(column, pa.string())) for column in columns])


def _table(name: str, rows: Rows) -> pa.Table:
    schema = _schema(name)
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
            "set it to reports.store.SCHEMA"
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
    no run behind. Raises StoreError where the id exists, the rows are not those of the run's kind,
    or the root or the disk refuses.
    """
    run_id, parts = _check_id(run), _check_rows(run)
    final = root / run_id
    partial = root / f".partial-{run_id}-{uuid.uuid4().hex[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if final.exists():
            raise StoreError(
                f"a run is never overwritten, and {final} exists already; "
                "choose another id or another folder with --out"
            )
        partial.mkdir()
        (partial / MANIFEST).write_text(
            json.dumps(run.manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        for name, rows in parts.items():
            pq.write_table(_table(name, rows), partial / name)
        write_tensors(partial, run.tensors)
        if page is not None:
            (partial / PAGE).write_text(page, encoding="utf-8")
        partial.rename(final)
    except OSError as error:
        raise _unwritable(root, error) from error
    finally:
        # Also after Ctrl-C: after the rename there is nothing left here to remove.
        shutil.rmtree(partial, ignore_errors=True)
    return final


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read run.json alone. Raises StoreError where it is missing, damaged, or of a schema or kind
    that this version does not know.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"expected a complete {MANIFEST} in {folder}, but reading it gave: {error}; "
            "this is not a stored run, or it was damaged: restore the folder or delete it"
        ) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise StoreError(
            f"{path} has schema {schema}, newer than the {SCHEMA} this version reads; "
            "update megalodon-numerics"
        )
    if schema != SCHEMA:
        raise StoreError(
            f"expected schema {SCHEMA} in {path}, received {schema!r}; run the suites again"
        )
    if not isinstance(manifest.get("id"), str) or not isinstance(manifest.get("created"), str):
        raise StoreError(
            f"expected the texts 'id' and 'created' in {path}; restore the folder or delete it"
        )
    try:
        kind_of(manifest)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error
    return manifest


def _open(folder: Path, name: str) -> pq.ParquetFile:
    path = folder / name
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"expected a complete Parquet file at {path}, but opening it gave: {error}; "
            "it is missing or truncated: restore the folder or delete it"
        ) from error
    missing = sorted(set(_schema(name).names) - set(file.schema_arrow.names))
    if missing:
        file.close()
        raise StoreError(
            f"expected the columns {', '.join(missing)} in {path}, and they are not there; "
            "the file was not written by this tool: restore the folder or delete it"
        )
    return file


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    with _open(folder, name) as file:
        try:
            return file.read(columns=_COLUMNS[name]).to_pylist()
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
                _ROWS[name](**row | {column: make(row[column]) for column, make in words.items()})
                for row in _rows(folder, name)
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


def list_runs(root: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the readable runs of every kind under `root`, oldest first, and the unreadable ones
    with a reason.

    A root that does not exist yet holds no runs. Hidden folders, which is what an interrupted write
    may leave, are never runs. Raises StoreError where `root` cannot be listed.
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
    readable: list[tuple[str, Path]] = []
    unreadable: list[tuple[Path, str]] = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            for name in FILES[kind_of(manifest)]:
                _open(folder, name).close()
        except StoreError as error:
            unreadable.append((folder, str(error)))
        else:
            readable.append((manifest["created"], folder))
    return [folder for _, folder in sorted(readable)], unreadable
