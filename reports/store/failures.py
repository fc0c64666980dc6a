"""Files of a run that are written only where something failed, one row for each thing that did.

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
"""An element that differs (`parity.engine.deviation.Worst`)."""


def write_rows(path: Path, rows: Sequence[Any], schema: pa.Schema) -> None:
    """Write dataclasses as the rows of a file; none leaves no file."""
    if rows:
        pq.write_table(pa.Table.from_pylist(list(map(asdict, rows)), schema=schema), path)


def read_names(content: bytes) -> tuple[str, ...]:
    """Return the names of the columns of a Parquet file; none of what is no such file."""
    try:
        return tuple(pq.read_schema(pa.BufferReader(content)).names)
    except (OSError, pa.ArrowException):
        # Whoever reads the rows says what is wrong with it.
        return ()


def read_rows(
    path: Path,
    schema: pa.Schema,
    row: Callable[[dict[str, Any]], T],
    checksums: Mapping[str, str] | None,
    added: Mapping[str, Any] | None = None,
) -> tuple[T, ...]:
    """Read what `write_rows` wrote; a run without the file had none.

    Args:
        path: of the file.
        schema: of its rows.
        row: makes a dataclass of a row.
        checksums: of the run's files by name; None for a run that has none.
        added: columns that files of earlier versions lack, and what they hold then.

    Raises:
        StoreError: the file is damaged or missing, or was not written by this tool.
    """
    # A link that leads nowhere is there, and is damage.
    if not os.path.lexists(path) and path.name not in (checksums or {}):
        return ()
    content = read_checked(path, checksums)
    try:
        there = read_names(content) if added else ()
        lacking = {name: value for name, value in (added or {}).items() if name not in there}
        rows = read_table(content, path, schema, frozenset(lacking)).to_pylist()
        return tuple(row({**lacking, **values}) for values in rows)
    except (TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"expected rows of {path} as this tool writes them, but reading gave: {error!r}; "
            "restore the folder or delete it"
        ) from error
