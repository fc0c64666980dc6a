"""Explanations of a run's failing cases, `explanations.parquet`; only written if a case failed.

They are measured during the nightly run, with any planted fault in place, and cannot be
reconstructed from stored values. Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from parity.engine.measure.deviation import Worst
from parity.engine.measure.localize import Stage
from parity.engine.programs.explanation import Explanation
from parity.engine.programs.source_lines import Line
from reports.store.failures import WORST, read_rows, write_rows

EXPLANATIONS = "explanations.parquet"
_STAGE = pa.struct(
    [("name", pa.string())] + [(name, pa.float64()) for name in ("free", "forced", "tolerance")]
)
_LINE = pa.struct([(name, pa.string()) for name in ("place", "why", "excerpt")])
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("case", "edge", "quantity")]
    + [(name, pa.float64()) for name in ("value", "tolerance")]
    + [("meaning", pa.string()), ("stages", pa.list_(_STAGE)), ("worst", WORST)]
    + [("parameters", pa.list_(pa.string())), ("note", pa.string())]
    + [("where", pa.string()), ("lines", pa.list_(_LINE))]
)


def write_explanations(folder: Path, explanations: Sequence[Explanation]) -> None:
    """Write the explanations of a run into its folder; without explanations write no file."""
    write_rows(folder / EXPLANATIONS, explanations, _SCHEMA)


def read_explanations(folder: Path, checksums: Mapping[str, str] | None) -> tuple[Explanation, ...]:
    """Read the explanations of a run; empty if the run has no such file.

    Raises:
        StoreError: the file is damaged or does not match its checksum.
    """
    added = {"where": "", "lines": []}
    return read_rows(folder / EXPLANATIONS, _SCHEMA, _row, checksums, added)


def _row(row: dict[str, Any]) -> Explanation:
    worst = row["worst"]
    return Explanation(
        **{
            **row,
            "stages": tuple(Stage(**stage) for stage in row["stages"]),
            "worst": worst and Worst(tuple(worst["index"]), worst["actual"], worst["expected"]),
            "parameters": tuple(row["parameters"]),
            "lines": tuple(Line(**line) for line in row["lines"]),
        }
    )
