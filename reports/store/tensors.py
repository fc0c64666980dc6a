"""Failing tensors of a run, `tensors.parquet`: written only where something failed.

Source: docs/reports.md "Store": tensors only for failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parity.engine.deviation import Deviation, Worst

TENSORS = "tensors.parquet"
_INDICES = pa.list_(pa.int64())
_WORST = pa.struct([("index", _INDICES), ("actual", pa.float64()), ("expected", pa.float64())])
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("case", "edge", "quantity", "dtype")]
    + [("shape", _INDICES), ("histogram", _INDICES), ("worst", pa.list_(_WORST))]
)


def write_tensors(folder: Path, tensors: Sequence[Deviation]) -> None:
    """Write the failing tensors of a run into its folder; none leaves no file."""
    if tensors:
        rows = [asdict(tensor) for tensor in tensors]
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), folder / TENSORS)


def read_tensors(folder: Path) -> tuple[Deviation, ...]:
    """Read the failing tensors of a run; a run without the file had none.

    Raises:
        ValueError: the file is damaged, or was not written by this tool.
    """
    path = folder / TENSORS
    if not path.exists():
        return ()
    try:
        rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
        return tuple(_row(row) for row in rows)
    except (OSError, pa.ArrowException, TypeError, KeyError) as error:
        raise ValueError(
            f"expected readable tensors in {path}, but reading gave: {error}; the file is damaged: "
            "restore the folder, or delete the file to see the run without them"
        ) from error


def _row(row: dict[str, Any]) -> Deviation:
    worst = tuple(Worst(tuple(w["index"]), w["actual"], w["expected"]) for w in row["worst"])
    shape, histogram = tuple(row["shape"]), tuple(row["histogram"])
    return Deviation(**{**row, "shape": shape, "histogram": histogram, "worst": worst})
