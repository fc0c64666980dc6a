"""Deviations of the failing tensors of a run, `tensors.parquet`; only written if a gate failed.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from parity.engine.measure.deviation import Deviation, Worst
from reports.store.failures import INDICES, WORST, read_rows, write_rows

TENSORS = "tensors.parquet"
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("case", "edge", "quantity", "dtype")]
    + [("shape", INDICES), ("histogram", INDICES), ("worst", pa.list_(WORST))]
    + [("breaking", pa.int64()), ("where", pa.string())]
)


def write_tensors(folder: Path, tensors: Sequence[Deviation]) -> None:
    """Write the failing tensors of a run into its folder; write no file if there are none."""
    write_rows(folder / TENSORS, tensors, _SCHEMA)


def read_tensors(folder: Path, checksums: Mapping[str, str] | None) -> tuple[Deviation, ...]:
    """Read the failing tensors of a run; empty if the run has no such file.

    Raises:
        StoreError: the file is damaged or does not match its checksum.
    """
    added = {"breaking": 0, "where": ""}
    return read_rows(folder / TENSORS, _SCHEMA, _row, checksums, added)


def _row(row: dict[str, Any]) -> Deviation:
    worst = tuple(Worst(tuple(w["index"]), w["actual"], w["expected"]) for w in row["worst"])
    shape, histogram = tuple(row["shape"]), tuple(row["histogram"])
    return Deviation(**{**row, "shape": shape, "histogram": histogram, "worst": worst})
