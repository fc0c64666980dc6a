"""History of gates (measurements with a tolerance) over all stored runs, local or remote.

Source: docs/reports.md "Store": history is a query over the folders.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from reports.store.gathered import Gathered
from reports.store.manifest import Manifest, parse_manifest
from reports.store.query import Table
from reports.store.runs import RunInfo, check_root, list_lines, without_copies
from reports.store.schema import FILES, MANIFEST, MEASUREMENTS, RunKind, StoreError
from reports.text import closest, count

LATEST = 14
"""Number of newest runs per subject (set of ports, or none). A gate is listed if a run measured it
since the oldest of these runs."""
# Different work is never joined: each gate is followed by its newest identity only, and only a gate
# that one of the newest runs has is shown. Runs are numbered from the oldest. Rows are read once: a
# join would hold all of them, which for ten thousand runs takes four times the memory.
_GATES = """
SELECT * EXCLUDE (identity, newest) FROM (
    SELECT "case", edge, quantity, metric, identity, count(*) AS runs,
           arg_min(value, run) AS first, median(value) AS median, arg_max(value, run) AS last,
           arg_max(tolerance, run) AS tolerance, arg_max(fraction, run) AS share,
           list_reverse(arg_max(value, run, 24)) AS recent,
           max(run) FILTER (run >= $since) AS newest
    FROM measurements WHERE verdict <> 'info' AND ($case IS NULL OR "case" = $case)
    GROUP BY ALL
) WHERE newest IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY "case", edge, quantity, metric ORDER BY newest DESC) = 1
ORDER BY share DESC, "case", edge, quantity, metric
LIMIT $most
"""
_ONE = """
SELECT id, created, edge, metric, value, tolerance, fraction AS share, verdict, deterministic,
       identity
FROM measurements JOIN runs USING (run)
WHERE "case" = $case AND quantity = $quantity AND verdict <> 'info'
ORDER BY edge, metric, created
LIMIT $most
"""
EVERYTHING = 2**31 - 1
_TICKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Entry:
    """A run that can be queried.

    Attributes:
        manifest: manifest of the run.
        file: path of its measurements, as DuckDB can read it.
        gathered: path of the combined file with its gates and those of other runs; "" if none.
    """

    manifest: Manifest
    file: str
    gathered: str = ""


@dataclass(frozen=True)
class Lookback:
    """Result of a query over stored runs.

    Attributes:
        rows: one dict of JSON values per row, by name of the column.
        runs: number of runs that were queried and could be read.
        unreadable: folders or files that could not be read, each with the reason.
    """

    rows: list[dict[str, Any]]
    runs: int
    unreadable: list[tuple[str, str]]


def look_back(
    place: str,
    case: str | None = None,
    quantity: str | None = None,
    most: int = EVERYTHING,
    kind: RunKind | None = None,
) -> Lookback:
    """Return the history of gates over stored runs: a row per gate, or with `quantity`, per value.

    A gate is a measurement with a tolerance; its share of tolerance is value / tolerance.

    Gates come in order of their share of tolerance in the newest run, the largest first; values of
    a quantity by edge and metric, each from the oldest run on. Runs with a planted fault are left
    out. The row of a gate has the number of runs, the first, median and last value, the last
    tolerance and share, and at most 24 recent values, oldest first.

    Args:
        place: A folder of runs, or a pattern of run folders such as `s3://bucket/runs/*`.
        case: Case whose gates are returned; None for all cases.
        quantity: Quantity of `case`, which is then required: one row per run, edge and metric.
        most: Maximal number of rows, counted from the first row.
        kind: Kind of the runs; None for nights, or if there are none, the kind of the newest run of
            ports or session of tests.

    Raises:
        StoreError: `place` cannot be listed, or the case or quantity was never measured.
        ValueError: there is a quantity without a case.
    """
    if quantity is not None and case is None:
        raise ValueError(
            f"expected the case of the quantity {quantity!r}, received case=None: "
            "`measured_names(place)` lists the cases"
        )
    entries, unreadable = _runs(place)
    kind = _kind_of(entries) if kind is None else kind
    runs = [e for e in entries if e.manifest.kind is kind and not e.manifest.fault]
    values: dict[str, Any] = {"case": case, "most": most}
    if quantity is not None:
        values["quantity"] = quantity
    else:
        values["since"] = min(_latest([e.manifest for e in runs]), default=0)
    with _table(runs) as table:
        table.database.register("runs", _manifests([e.manifest for e in runs]))
        answer, broken = table.ask(_ONE if quantity is not None else _GATES, **values)
    unreadable += [(runs[i].file, why) for i, why in broken.items()]
    names = list(answer)
    columns = [column.tolist() for column in answer.values()]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if not rows and case is not None:
        raise StoreError(_not_measured(place, case, quantity, len(runs)))
    return Lookback(rows, len(runs) - len(broken), unreadable)


def measured_names(place: str, case: str | None = None) -> list[str]:
    """Return the names of the cases that stored runs measured, or of the quantities of `case`."""
    column = "quantity" if case else '"case"'
    query = f"""SELECT DISTINCT {column} AS name FROM measurements
                WHERE verdict <> 'info' AND ($case IS NULL OR "case" = $case) ORDER BY name"""
    entries = [e for e in _runs(place)[0] if MEASUREMENTS in FILES[e.manifest.kind]]
    with _table(entries) as table:
        answer, _ = table.ask(query, case=case)
    return [str(name) for name in answer["name"]]


def _not_measured(place: str, case: str, quantity: str | None, runs: int) -> str:
    """Return the error message for a case or quantity without rows, with similar names."""
    what = f"{quantity} in case {case}" if quantity else f"case {case}"
    text = f"no gate of {what} in {count(runs, 'run')} of {place}"
    if not runs:
        return f"{text}; `nightly` makes one"
    for name, names in (
        (case, measured_names(place)),
        (quantity, measured_names(place, case) if quantity else []),
    ):
        if name and name not in names and (close := closest(name, names)):
            return f"{text}. Did you mean {' or '.join(map(repr, close))}?"
    return f"{text}; `history` lists all gates, `history CASE` those of a case"


def _table(runs: Sequence[Entry]) -> Table:
    return Table([run.file for run in runs], [run.gathered for run in runs])


def _kind_of(entries: Sequence[Entry]) -> RunKind:
    """Return the default kind of run for a query: nights, else the newest port or test session."""
    every = [entry.manifest.kind for entry in entries]
    kinds = [kind for kind in every if kind in (RunKind.PORT, RunKind.PYTEST)]
    nights = RunKind.NIGHTLY in every
    return RunKind.NIGHTLY if nights or not kinds else kinds[-1]


def _latest(manifests: Sequence[Manifest]) -> list[int]:
    """Return the positions of the `LATEST` newest runs of each subject (set of ports, or none)."""
    by_subject: dict[frozenset[str], list[int]] = {}
    for position, manifest in enumerate(manifests):
        by_subject.setdefault(manifest.subject, []).append(position)
    return [position for those in by_subject.values() for position in those[-LATEST:]]


def _manifests(manifests: Sequence[Manifest]) -> pa.Table:
    return pa.table(
        {
            "run": pa.array(range(len(manifests)), pa.int64()),
            "id": pa.array([m.id for m in manifests], pa.string()),
            "created": pa.array([m.created for m in manifests], pa.string()),
        }
    )


def _runs(place: str) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return the runs, oldest first, and the unreadable folders with a reason."""
    if "://" in place or any(sign in place for sign in "*?"):
        return _matched(place)
    root = Path(place)
    check_root(root)
    lines, failures = list_lines(root)
    runs = [RunInfo(root / line.name, line.manifest) for line in lines if line.manifest]
    # A path for each combined file, not for each run: there are ten thousand runs.
    paths = {name: _values(root, name) for name in {line.gathered for line in lines}}
    together = {line.name: paths[line.gathered] for line in lines}
    entries = [
        Entry(run.manifest, os.path.join(run.folder, MEASUREMENTS), together[run.folder.name])
        for run in without_copies(runs, failures)
    ]
    return entries, [(str(folder), why) for folder, why in failures]


def _values(root: Path, name: str) -> str:
    return str(Gathered(root, {}).path(name)) if name else ""


def _matched(pattern: str) -> tuple[list[Entry], list[tuple[str, str]]]:
    # On object storage a second slash is part of a name.
    pattern = pattern.rstrip("/")
    pattern = pattern if any(sign in pattern for sign in "*?") else f"{pattern}/*"
    query = "SELECT filename, content, size FROM read_blob($pattern) ORDER BY filename"
    try:
        with duckdb.connect() as database:
            texts = database.execute(query, {"pattern": f"{pattern}/{MANIFEST}"}).fetchall()
    except duckdb.Error as error:
        raise StoreError(
            f"expected run folders at {pattern}, but DuckDB says: {error}. Give a folder of runs, "
            "or a pattern of run folders that DuckDB can read"
        ) from error
    if not texts:
        raise StoreError(
            f"expected run folders at {pattern}, and nothing matches. Give a folder of runs, or a "
            "pattern of run folders that DuckDB can read"
        )
    readable: list[RunInfo] = []
    places: dict[Path, str] = {}
    unreadable: list[tuple[Path, str]] = []
    for name, content, _ in texts:
        # A Path would merge the slashes of a URL scheme; here it only names the folder.
        folder = Path(name).parent
        if folder.name.startswith("."):
            continue
        places[folder] = str(name).removesuffix(MANIFEST) + MEASUREMENTS
        try:
            readable.append(RunInfo(folder, parse_manifest(content, Path(name))))
        except StoreError as error:
            unreadable.append((folder, str(error)))
    runs = without_copies(readable, unreadable)
    wrong = _unfit([(run, places[run.folder]) for run in runs])
    unreadable += [(run.folder, wrong[run.folder]) for run in runs if run.folder in wrong]
    entries = [Entry(r.manifest, places[r.folder]) for r in runs if r.folder not in wrong]
    return entries, [(str(folder), why) for folder, why in unreadable]


def _unfit(runs: Sequence[tuple[RunInfo, str]]) -> dict[Path, str]:
    """Return the folders of runs whose measurements do not match their checksum, with a reason.

    DuckDB hashes the files, local or remote. A file that it cannot read is reported by the query.
    """
    wrong: dict[Path, str] = {}
    with duckdb.connect() as database:
        for run, file in runs:
            checksums = run.manifest.checksums
            if checksums is None or MEASUREMENTS not in FILES[run.kind]:
                continue
            with suppress(duckdb.Error):
                found = database.execute(
                    "SELECT sha256(content) FROM read_blob($file)", {"file": glob.escape(file)}
                ).fetchall()
                # For a missing file DuckDB returns no row.
                if found and found != [(checksums.get(MEASUREMENTS),)]:
                    wrong[run.folder] = (
                        f"{file} is not the file that was stored: its SHA-256 differs from the one "
                        "in run.json: restore the folder or delete it"
                    )
    return wrong


def sparkline(values: Sequence[float] | np.ndarray) -> str:
    """Return values as a line of block characters, scaled from their minimum to their maximum.

    A value that is not finite is "!"; if none is finite, all are "?".
    """
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return "?" * len(values)
    low, high = min(finite), max(finite)
    span, top = (high - low) or 1.0, len(_TICKS) - 1
    # `low + span` may round to less than `high`.
    return "".join(
        _TICKS[round(top * (v - low) / span)] if low <= v <= high else "!" for v in values
    )
