"""Files of a run that are written only where something failed, one row for each thing that did.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

T = TypeVar("T")
INDICES = pa.list_(pa.int64())
WORST = pa.struct([("index", INDICES), ("actual", pa.float64()), ("expected", pa.float64())])
"""An element that differs (`parity.engine.deviation.Worst`)."""


def write_rows(path: Path, rows: Sequence[Any], schema: pa.Schema) -> None:
    """Write dataclasses as the rows of a file; none leaves no file."""
    if rows:
        pq.write_table(pa.Table.from_pylist(list(map(asdict, rows)), schema=schema), path)


def read_rows(
    path: Path, schema: pa.Schema, row: Callable[[dict[str, Any]], T], what: str
) -> tuple[T, ...]:
    """Read what `write_rows` wrote; a run without the file had none.

    Args:
        path: of the file.
        schema: of its rows.
        row: makes a dataclass of a row.
        what: the rows in words, for the message.

    Raises:
        ValueError: the file is damaged, or was not written by this tool.
    """
    if not path.exists():
        return ()
    try:
        return tuple(map(row, pq.read_table(path, schema=schema).to_pylist()))
    except (OSError, pa.ArrowException, TypeError, KeyError) as error:
        raise ValueError(
            f"expected readable {what} in {path}, but reading gave: {error}; the file is damaged: "
            "restore the folder, or delete the file to see the run without them"
        ) from error
