"""Accounts of a run's failing cases, `explanations.parquet`: written only where a case failed.

They are made while the night runs, with whatever was planted in it: nothing can make them again
from what is stored. Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parity.engine.deviation import Worst
from parity.engine.localize import Stage
from parity.megalodon.explanation import Explanation

EXPLANATIONS = "explanations.parquet"
_STAGE = pa.struct(
    [("name", pa.string())] + [(name, pa.float64()) for name in ("free", "forced", "tolerance")]
)
_WORST = pa.struct(
    [("index", pa.list_(pa.int64())), ("actual", pa.float64()), ("expected", pa.float64())]
)
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("case", "edge", "quantity")]
    + [(name, pa.float64()) for name in ("value", "tolerance")]
    + [("meaning", pa.string()), ("stages", pa.list_(_STAGE)), ("worst", _WORST)]
    + [("parameters", pa.list_(pa.string())), ("note", pa.string())]
)


def write_explanations(folder: Path, explanations: Sequence[Explanation]) -> None:
    """Write the accounts of a run into its folder; none leaves no file."""
    if explanations:
        rows = [asdict(explanation) for explanation in explanations]
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), folder / EXPLANATIONS)


def read_explanations(folder: Path) -> tuple[Explanation, ...]:
    """Read the accounts of a run; a run without the file has none.

    Raises:
        ValueError: the file is damaged, or was not written by this tool.
    """
    path = folder / EXPLANATIONS
    if not path.exists():
        return ()
    try:
        rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
        return tuple(_row(row) for row in rows)
    except (OSError, pa.ArrowException, TypeError, KeyError) as error:
        raise ValueError(
            f"expected readable accounts of failing cases in {path}, but reading gave: {error}; "
            "the file is damaged: restore the folder, or delete the file to see the run without "
            "them"
        ) from error


def _row(row: dict[str, Any]) -> Explanation:
    worst = row["worst"]
    return Explanation(
        **{
            **row,
            "stages": tuple(Stage(**stage) for stage in row["stages"]),
            "worst": worst and Worst(tuple(worst["index"]), worst["actual"], worst["expected"]),
            "parameters": tuple(row["parameters"]),
        }
    )
