"""Exports the measurements of a run as an Arrow file, for pandas, Polars, R, W&B or MLflow.

Columns that identify the run come before those of measurements.parquet, so files of many runs can
be concatenated. Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from reports.store.runs import Run
from reports.store.schema import MEASUREMENTS
from reports.verdict.decide import Decision


def arrow_file(run: Run, decision: Decision, folder: Path, to: Path) -> None:
    """Write the Arrow IPC file (Feather version 2) of a stored run.

    Args:
        run: The run; facts about it are written as constant columns.
        decision: Verdict on the run, one of these facts.
        folder: Folder of the run, with measurements.parquet.
        to: File to write.
    """
    rows = pq.read_table(folder / MEASUREMENTS)
    manifest = run.manifest
    facts = {
        "run": run.id,
        "commit": manifest.commit or "",
        "run_kind": manifest.kind.value,
        "run_verdict": str(decision.word),
        "reference": manifest.environment.reference.kind or "",
        "fault": manifest.fault or "",
    }
    columns = {name: _constant(text, rows.num_rows) for name, text in facts.items()}
    created = pa.scalar(datetime.fromisoformat(manifest.created), pa.timestamp("us", "UTC"))
    columns["created"] = pa.repeat(created, rows.num_rows)
    table = pa.table(columns | dict(zip(rows.column_names, rows.columns, strict=True)))
    with pa.OSFile(str(to), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _constant(text: str, rows: int) -> pa.DictionaryArray:
    """Return a column with one text in every row, stored once."""
    indices = pa.repeat(pa.scalar(0, pa.int32()), rows)
    return pa.DictionaryArray.from_arrays(indices, pa.array([text]))
