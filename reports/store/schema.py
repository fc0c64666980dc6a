"""Schema of a run folder: its files, their columns, and migrations from older schemas.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from parity.engine.measure.measurement import Measurement
from reports.store.timings import Timing
from stability.core.findings import Finding

SCHEMA = 5
"""Schema that this version writes. It is increased with every change that older versions cannot
read, together with a new `Migration`."""
MEASUREMENTS = "measurements.parquet"
FINDINGS = "findings.parquet"
TIMINGS = "timings.parquet"
MANIFEST = "run.json"
PAGE = "report.html"
TONIGHT = "tonight.html"
"""Name of the page of the night that is running, beside the runs."""
VERDICT = "verdict.json"
"""Name of the file with the verdict and the page's checksum. A run is stored before it is judged,
so verdict and page are written later and are not part of the run: `gate` and `report` write them
again."""


class StoreError(ValueError):
    """A run could not be written or read; the message says what was expected and what to do."""


class RunKind(StrEnum):
    """Kind of a run. The history of a run consists of runs of its own kind."""

    NIGHTLY = "nightly"
    PYTEST = "pytest"
    """Measurements that tests recorded (`megalodon_numerics.pytest_plugin`)."""
    SHARD = "shard"
    """Part of a nightly, to be merged (`reports.nightly.shards`)."""
    BENCH = "bench"
    PORT = "port"
    """User-defined ports, each compared with its original (`reports.ports`)."""
    WATCH = "watch"
    """A training that was observed while it ran (`reports.watching`)."""


_GATED = (MEASUREMENTS, FINDINGS)
FILES = dict.fromkeys(RunKind, _GATED) | {RunKind.BENCH: (TIMINGS,), RunKind.WATCH: (FINDINGS,)}
"""Names of the Parquet files that a run must have, by its kind."""
ROWS = {MEASUREMENTS: Measurement, FINDINGS: Finding, TIMINGS: Timing}
"""Dataclass of the rows of each Parquet file; its fields are the `COLUMNS`."""
COLUMNS = {name: [f.name for f in fields(row)] for name, row in ROWS.items()}
# Properties of a row, written for external queries and never read back.
_DERIVED = {MEASUREMENTS: ["fraction"], FINDINGS: [], TIMINGS: ["repeats"]}
NULLABLE = frozenset(("deterministic",))
"""Columns that may hold null. In other columns null is damage: it would be read as a number."""
_TYPES = {
    **dict.fromkeys(("value", "tolerance", "threshold", "goal", "fraction"), pa.float64()),
    **dict.fromkeys(("stage", "repeats"), pa.int32()),
    "rounds": pa.list_(pa.float64()),
    "deterministic": pa.bool_(),
}


@cache
def arrow_schema(name: str, only: tuple[str, ...] | None = None) -> pa.Schema:
    """Return the Arrow schema of the Parquet file `name`, or if given, of its columns `only`."""
    columns = COLUMNS[name] + _DERIVED[name] if only is None else only
    return pa.schema([(column, _TYPES.get(column, pa.string())) for column in columns])


def kind_of(manifest: Mapping[str, Any]) -> RunKind:
    """Return the kind of a run.

    Raises:
        StoreError: this version does not know the kind.
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
    """Conversion of a run from one schema to the next; the files on disk are not changed."""

    manifest: Callable[[dict[str, Any]], dict[str, Any]]
    columns: Mapping[str, Mapping[str, Any]]
    """Values for an older run of the columns that the next schema adds, by file and column."""


MIGRATIONS = {
    # Schema 1 had one kind of run and did not store replays.
    1: Migration(
        lambda manifest: {"kind": RunKind.NIGHTLY.value, **manifest},
        {MEASUREMENTS: {"deterministic": None}},
    ),
    # Schema 2 knew the processor by name only and had no spreads of levels.
    2: Migration(lambda manifest: {"host": {}, "spreads": {}, **manifest}, {}),
    # Schema 3 had one port, so the edge of a measurement implied its suite.
    3: Migration(lambda manifest: manifest, {MEASUREMENTS: {"suite": ""}}),
    # Schema 4 had no checksums, so its files are read unverified.
    4: Migration(lambda manifest: {**manifest, "files": None}, {}),
}
"""Migrations by the schema that they start from; chained, they lead from any older schema to
`SCHEMA`."""


def migrate(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of run.json in the current schema.

    If it had an older schema, its key "migrated_from" holds that.

    Raises:
        StoreError: the schema is newer than this version's, or is not a positive integer.
    """
    schema = manifest.get("schema")
    # In Python True is an int.
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
    """Return the default values of the columns that file `name` of a run of schema `first` lacks.

    `first` is `Manifest.migrated_from`: None for the current schema, which lacks none.
    """
    added: dict[str, Any] = {}
    for step in range(first or SCHEMA, SCHEMA):
        added |= MIGRATIONS[step].columns.get(name, {})
    return added
