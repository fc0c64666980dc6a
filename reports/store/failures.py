"""Files of a run that are only written if something failed, with one row per failure.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from reports.store.reader import read_checked, read_table
from reports.store.schema import StoreError

T = TypeVar("T")
INDICES = pa.list_(pa.int64())
WORST = pa.struct([("index", INDICES), ("actual", pa.float64()), ("expected", pa.float64())])
"""Arrow type of one differing element (`parity.engine.measure.deviation.Worst`)."""


def write_rows(path: Path, rows: Sequence[Any], schema: pa.Schema) -> None:
    """Write dataclasses as the rows of a Parquet file; without rows write no file."""
    if rows:
        pq.write_table(pa.Table.from_pylist(list(map(asdict, rows)), schema=schema), path)


def read_names(content: bytes) -> tuple[str, ...]:
    """Return the column names of a Parquet file; empty if it is not a Parquet file."""
    try:
        return tuple(pq.read_schema(pa.BufferReader(content)).names)
    except (OSError, pa.ArrowException):
        # Reading the rows reports the error.
        return ()


def read_rows(
    path: Path,
    schema: pa.Schema,
    row: Callable[[dict[str, Any]], T],
    checksums: Mapping[str, str] | None,
    added: Mapping[str, Any] | None = None,
) -> tuple[T, ...]:
    """Read the rows that `write_rows` wrote; empty if the run has no such file.

    Args:
        path: Path of the file.
        schema: Schema of its rows.
        row: Converts a row to its dataclass.
        checksums: Checksums of the run's files by name; None for a run without checksums.
        added: Default values of the columns that files of earlier versions lack.

    Raises:
        StoreError: the file is damaged, is missing although `checksums` has it, or was not written
            by this tool.
    """
    # A dangling link is damage, not a missing file; `exists` would not see it.
    if not os.path.lexists(path) and path.name not in (checksums or {}):
        return ()
    content = read_checked(path, checksums)
    try:
        there = read_names(content) if added else ()
        lacking = {name: value for name, value in (added or {}).items() if name not in there}
        rows = read_table(content, path, schema, frozenset(lacking)).to_pylist()
        return tuple(row({**lacking, **values}) for values in rows)
    except (TypeError, KeyError) as error:
        raise StoreError(
            f"expected rows of {path} as this tool writes them, but reading gave: {error!r}; "
            "restore the folder or delete it"
        ) from error
