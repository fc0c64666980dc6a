"""What a run folder is made of: its files, their columns, and how older ones are read.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa

from parity.engine.measurement import Measurement
from reports.store.timings import Timing
from stability.core.findings import Finding

SCHEMA = 5
"""Raised with every change that an older version could not read, together with a `Migration`."""
MEASUREMENTS = "measurements.parquet"
FINDINGS = "findings.parquet"
TIMINGS = "timings.parquet"
MANIFEST = "run.json"
PAGE = "report.html"
VERDICT = "verdict.json"
"""Verdict and checksum of the page. A run is stored before it is judged, so both come later and are
no part of the run: `gate` and `report` make them again."""


class StoreError(ValueError):
    """A run could not be written or read; the message says what was expected and what to do."""


class RunKind(StrEnum):
    """What a run is. Runs of one kind are never history of another."""

    NIGHTLY = "nightly"
    PYTEST = "pytest"
    """Measurements that tests recorded (`megalodon_numerics.pytest_plugin`)."""
    SHARD = "shard"
    """Part of a nightly, to be merged (`reports.nightly.shards`)."""
    BENCH = "bench"
    PORT = "port"
    """Ports of anybody's, each compared with its original (`reports.ports`)."""
    WATCH = "watch"
    """A training that was looked at while it ran (`reports.watching`)."""


_GATED = (MEASUREMENTS, FINDINGS)
FILES = dict.fromkeys(RunKind, _GATED) | {RunKind.BENCH: (TIMINGS,), RunKind.WATCH: (FINDINGS,)}
"""The Parquet files of a run of each kind."""
ROWS = {MEASUREMENTS: Measurement, FINDINGS: Finding, TIMINGS: Timing}
COLUMNS = {name: [f.name for f in fields(row)] for name, row in ROWS.items()}
# Properties of a row, written for whoever queries the files and never read back.
_DERIVED = {MEASUREMENTS: ["fraction"], FINDINGS: [], TIMINGS: ["repeats"]}
NULLABLE = frozenset(("deterministic",))
"""Columns that may hold null. In any other, null is damage: it would be read as some number."""
_TYPES = {
    **dict.fromkeys(("value", "tolerance", "threshold", "goal", "fraction"), pa.float64()),
    **dict.fromkeys(("stage", "repeats"), pa.int32()),
    "rounds": pa.list_(pa.float64()),
    "deterministic": pa.bool_(),
}


def arrow_schema(name: str) -> pa.Schema:
    """Return names and types of the columns of the Parquet file `name`."""
    columns = COLUMNS[name] + _DERIVED[name]
    return pa.schema([(column, _TYPES.get(column, pa.string())) for column in columns])


def kind_of(manifest: Mapping[str, Any]) -> RunKind:
    """Return the kind of a run.

    Raises:
        StoreError: the kind is not one this version knows.
    """
    kind = manifest.get("kind")
    try:
        return RunKind(kind)
    except ValueError as error:
        kinds = ", ".join(RunKind)
        raise StoreError(
            f"expected a run of kind {kinds}, received {kind!r}; update megalodon-numerics"
        ) from error


@dataclass(frozen=True, slots=True)
class Migration:
    """How a run of one schema is read as one of the next; the files on disk stay as they are."""

    manifest: Callable[[dict[str, Any]], dict[str, Any]]
    columns: Mapping[str, Mapping[str, Any]]
    """By file, the columns that the next schema adds, with what they hold for an older run."""


MIGRATIONS = {
    # Schema 1 became one of several kinds, and a replay was not part of a run.
    1: Migration(
        lambda manifest: {"kind": RunKind.NIGHTLY.value, **manifest},
        {MEASUREMENTS: {"deterministic": None}},
    ),
    # Schema 2 knew its processor by name only, and not how far rounding scatters a level.
    2: Migration(lambda manifest: {"host": {}, "spreads": {}, **manifest}, {}),
    # Schema 3 had one port, so that the edge of a measurement said its suite.
    3: Migration(lambda manifest: manifest, {MEASUREMENTS: {"suite": ""}}),
    # Schema 4 had no checksums: its files are read unchecked.
    4: Migration(lambda manifest: {**manifest, "files": None}, {}),
}
"""By the schema they start from; together they lead from every older schema to `SCHEMA`."""


def migrate(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the manifest in today's schema; `migrated_from` names the one it was stored in.

    Raises:
        StoreError: the schema is newer than this version's, or no schema at all.
    """
    schema = manifest.get("schema")
    # True is an int to Python.
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise StoreError(
            f"expected a schema from 1 to {SCHEMA} in {path}, received {schema!r}; "
            "restore the folder or delete it"
        )
    if schema > SCHEMA:
        raise StoreError(
            f"{path} has schema {schema}, newer than the {SCHEMA} this version reads; "
            "update megalodon-numerics"
        )
    if schema == SCHEMA:
        return manifest
    for step in range(schema, SCHEMA):
        manifest = MIGRATIONS[step].manifest(manifest)
    return {**manifest, "schema": SCHEMA, "migrated_from": schema}


def added_columns(name: str, first: int | None) -> dict[str, Any]:
    """Return the columns that file `name` of a run of schema `first` lacks, with their values."""
    added: dict[str, Any] = {}
    for step in range(first or SCHEMA, SCHEMA):
        added |= MIGRATIONS[step].columns.get(name, {})
    return added
