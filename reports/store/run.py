"""One stored run in memory: the manifest of run.json and the rows of its Parquet files.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from parity.engine.measure.deviation import Deviation
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.programs.explanation import Explanation
from reports.store.explanations import read_explanations
from reports.store.manifest import Manifest, read_manifest
from reports.store.reader import read_checked, read_table
from reports.store.schema import (
    COLUMNS,
    FILES,
    FINDINGS,
    MEASUREMENTS,
    NULLABLE,
    ROWS,
    TIMINGS,
    StoreError,
    added_columns,
    arrow_schema,
)
from reports.store.tensors import read_tensors
from reports.store.timings import Timing
from stability.core.findings import Finding, Severity


@dataclass(frozen=True)
class Run:
    """One run as stored: the manifest of run.json and the rows of the Parquet files of its kind.

    The verdicts of measurements are recomputed from their numbers, whatever the file says
    (docs/parity.md "Fail closed").
    """

    manifest: Manifest
    measurements: tuple[Measurement, ...] = ()
    findings: tuple[Finding, ...] = ()
    timings: tuple[Timing, ...] = ()
    tensors: tuple[Deviation, ...] = ()
    """Deviations of the failing tensors: where the two sides differ and by how much."""
    explanations: tuple[Explanation, ...] = ()
    """Explanations of failed cases: the stage at which each first diverges, and whether the error
    starts at that stage."""

    def __post_init__(self) -> None:
        """Recompute the verdict of every measurement from its numbers."""
        rows = tuple(m.settled() for m in self.measurements)
        object.__setattr__(self, "measurements", rows)

    @property
    def id(self) -> str:
        """Name of the run's folder."""
        return self.manifest.id


# Columns that need a conversion, by file.
_WORDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    MEASUREMENTS: {"kind": Kind, "verdict": Verdict},
    FINDINGS: {"severity": Severity},
    TIMINGS: {"rounds": tuple},
}


def read_run(folder: Path) -> Run:
    """Read a stored run.

    Raises:
        StoreError: a file is missing, damaged or of a newer version; the message names it.
    """
    manifest = read_manifest(folder)
    parts: dict[str, Any] = {}
    for name in FILES[manifest.kind]:
        absent = added_columns(name, manifest.migrated_from)
        content = read_checked(folder / name, manifest.checksums)
        table = rows_table(content, folder / name, absent)
        parts[name.removesuffix(".parquet")] = _rows(table, folder / name, absent)
    checksums = manifest.checksums
    more = {
        "tensors": read_tensors(folder, checksums),
        "explanations": read_explanations(folder, checksums),
    }
    return Run(manifest, **parts, **more)


_KEY = ("case", "edge", "quantity", "metric")
"""Columns that name a measurement."""


def rows_table(
    content: bytes,
    path: Path,
    absent: Mapping[str, Any],
    only: Sequence[str] | None = None,
    unique: bool = True,
) -> pa.Table:
    """Return the rows of one of the Parquet files of a run as an Arrow table.

    Args:
        content: Bytes of the file.
        path: Path of the file, whose name selects the schema.
        absent: Default values, by name, of the columns that the file lacks because the run has an
            older schema (`added_columns`).
        only: Columns to read, which must include those of `_KEY`; None for all.
        unique: Whether to check that no two measurements have the same name (`_KEY`).

    Raises:
        StoreError: the file is damaged, has nulls in a column that must not have any, or has two
            measurements of one name.
    """
    name = path.name
    wanted = arrow_schema(name, tuple(COLUMNS[name] if only is None else only))
    table = read_table(content, path, wanted, frozenset(absent))
    empty = [c for c in table.column_names if c not in NULLABLE and table[c].null_count]
    if empty:
        raise StoreError(
            f"expected a value in every row of the columns {', '.join(empty)} of {path}, received "
            "null; the file was not written by this tool: restore the folder or delete it"
        )
    if name == MEASUREMENTS and unique:
        check_keys(table, path)
    return table


def check_keys(table: pa.Table, path: Path) -> None:
    """Raise StoreError if two measurements in the file at `path` have the same name.

    The name is case, edge, quantity and metric. Both would be counted; only one can be right.
    """
    if not repeated_keys(table):
        return
    seen: set[tuple[str, ...]] = set()
    for row, key in enumerate(zip(*(table[c].to_pylist() for c in _KEY), strict=True)):
        if key in seen:
            raise StoreError(
                f"expected each measurement once in {path}, but {' | '.join(key)} is there twice, "
                f"in row {row} again: it is unknown which is right. Restore the folder, or measure "
                "again"
            )
        seen.add(key)


def repeated_keys(table: pa.Table, runs: np.ndarray | int = 0) -> bool:
    """Return whether two rows of one run may have the same name; True may be a hash collision.

    The name is case, edge, quantity and metric.

    Args:
        table: Measurements of one or several runs.
        runs: Index of the run of each row; an int if all rows are of one run.
    """
    places = np.zeros(table.num_rows, np.int64) + runs
    for column in _KEY:
        codes = table[column].combine_chunks()
        # A product beyond 64 bits wraps around: rows with equal keys still get equal numbers.
        places = places * len(codes.dictionary) + codes.indices.to_numpy(False)
    # A hash table of Arrow is faster than sorting, and than counters of every possible key.
    return len(pa.array(places).unique()) < table.num_rows


def _rows(table: pa.Table, path: Path, absent: Mapping[str, Any]) -> tuple[Any, ...]:
    name, words = path.name, _WORDS[path.name]
    try:
        return tuple(
            ROWS[name](
                **row | absent | {column: make(row[column]) for column, make in words.items()}
            )
            for row in table.to_pylist()
        )
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path} holds a value unknown to this version: {error}; update megalodon-numerics"
        ) from error
