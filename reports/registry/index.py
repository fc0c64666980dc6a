"""What a list of runs says, kept beside them so that ten thousand are listed at once.

The run folders are the truth. A line of the index counts only while the files of its run are those
it was made from, by size and time of change; whoever deletes the index loses a minute. Source:
docs/reports.md "Store".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megalodon_jax.files import written_aside
from reports.store.schema import FILES, MANIFEST, RunKind

INDEX = ".index.parquet"
Unreadable = list[tuple[Path, str]]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list."""

    id: str
    kind: str
    created: str
    device: str
    reference: str
    gates: int
    """Measurements held to a tolerance, or that could not be; 0 for a bench."""
    broken: int
    fault: str
    verdict: str
    """Word of its verdict when it was stored; `gate` judges it again by later runs."""


_FIELDS = [f.name for f in fields(RunSummary)]
_SCHEMA = pa.schema(
    [(name, pa.int64() if name in ("gates", "broken") else pa.string()) for name in _FIELDS]
    + [("name", pa.string()), ("signature", pa.string())]
)
_NAMES = (MANIFEST, *sorted({name for kind in RunKind for name in FILES[kind]}))


@dataclass(frozen=True, slots=True)
class Line:
    """A run of the index: its summary, the id that its manifest has, and what it was made from."""

    summary: RunSummary
    name: str
    signature: str


Examine = Callable[[Sequence[Path]], tuple[Mapping[Path, tuple[RunSummary, str]], Unreadable]]
"""Reads runs: by folder a summary and the run's id, and the folders that it could not read."""


def summaries(
    root: Path,
    folders: Iterable[Path],
    examine: Examine,
) -> tuple[list[Line], Unreadable]:
    """Return a line for every readable folder, and the others with a reason.

    Args:
        root: where the folders and the index lie.
        folders: of runs, maybe.
        examine: what reads runs that the index does not know.
    """
    known = {line.summary.id: line for line in read_lines(root / INDEX)}
    lines: list[Line] = []
    new: dict[Path, str] = {}
    for folder in folders:
        signature = _signature(folder)
        line = known.get(folder.name)
        if line is not None and signature and line.signature == signature:
            lines.append(line)
        else:
            new[folder] = signature
    found, unreadable = examine(list(new)) if new else ({}, [])
    for folder, (summary, name) in found.items():
        lines.append(Line(summary, name, new[folder]))
    if found or len(lines) < len(known):
        write_lines(root / INDEX, lines)
    return lines, unreadable


def _signature(folder: Path) -> str:
    """Return sizes and times of change of a run's files; "" where it has no manifest."""
    parts = {}
    for entry in os.scandir(folder):
        if entry.name in _NAMES:
            stat = entry.stat()
            parts[entry.name] = f"{stat.st_size}@{stat.st_mtime_ns}"
    return " ".join(parts[name] for name in sorted(parts)) if MANIFEST in parts else ""


def read_lines(path: Path) -> list[Line]:
    """Return the lines of an index; none where it is not there, or is no index."""
    try:
        columns = pq.read_table(path, schema=_SCHEMA).to_pydict()
    except (OSError, pa.ArrowException):
        # The runs say the same.
        return []
    rows = zip(*(columns[name] for name in _SCHEMA.names), strict=True)
    return [Line(RunSummary(*row[:-2]), *row[-2:]) for row in rows]


def write_lines(path: Path, lines: Sequence[Line]) -> None:
    """Write an index, if one may write there."""
    columns = {name: [getattr(line.summary, name) for line in lines] for name in _FIELDS}
    columns |= {name: [getattr(line, name) for line in lines] for name in ("name", "signature")}
    try:
        with written_aside(path) as aside:
            pq.write_table(pa.table(columns, schema=_SCHEMA), aside)
    except OSError:
        # Whoever may only read has the list all the same, and waits for it.
        return
