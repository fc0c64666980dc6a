"""Checks run folders for listings: verifies their files, and counts passing and failing gates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from parity.engine.measure.measurement import Verdict
from reports.store.manifest import Manifest, read_manifest
from reports.store.reader import read_checked
from reports.store.run import check_keys, repeated_keys, rows_table
from reports.store.schema import FILES, MEASUREMENTS, StoreError, added_columns

KEY = ("case", "edge", "quantity", "metric", "identity")
"""Columns that name a gate, and `identity`, a hash of the work behind its value."""
_COLUMNS = (*KEY, "value", "tolerance", "verdict", "deterministic")
"""Columns of `measurements.parquet` that name a gate and decide whether it passes."""
_WORDS = tuple(verdict.value for verdict in Verdict)
_PASS, _FAIL, _INFO, _NOT_COMPARABLE = (
    _WORDS.index(verdict)
    for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.INFO, Verdict.NOT_COMPARABLE)
)
"""Positions in `_WORDS`: comparing integers is much faster than comparing strings."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of checking a folder that may be a run.

    Attributes:
        name: name of the folder.
        why: why the folder is not a readable run; "" if it is one.
        manifest: manifest of the run; None if it is not readable.
        gates: number of measurements that have a tolerance or could not be compared.
        broken: number of gates that do not pass, recomputed from their values and tolerances.
        work: hash of the gates and their identities, without values.
        rows: gates with recomputed verdicts and shares of tolerance; None without measurements.
        path: path of the folder; None if it could not be read.
    """

    name: str
    why: str = ""
    manifest: Manifest | None = None
    gates: int = 0
    broken: int = 0
    work: str = ""
    rows: pa.Table | None = None
    path: Path | None = None


BATCH = 2**18
"""Largest number of rows whose verdicts are recomputed together, unless a single run has more.
Recomputing each small run by itself would take longer."""
BATCH_BYTES = 2**28
"""Largest size in bytes of the rows whose verdicts are recomputed together, unless a single run has
more."""


def examine(folder: Path, only: bool = False) -> Examined:
    """Read a folder, check every file of the run against its checksum, and count its gates.

    If the folder is not a readable run, `why` of the result has the reason; no error is raised.

    Args:
        folder: A folder that may be a run.
        only: Check only the files that a run of its kind must have, such as measurements.parquet.
    """
    [found] = examine_all([folder], only)
    return found


def examine_all(folders: Iterable[Path], only: bool = False) -> list[Examined]:
    """Apply `examine` to several folders, and return the results in the same order."""
    found: list[Examined] = []
    waiting: dict[int, pa.Table] = {}
    rows = size = 0
    for folder in folders:
        read = _read(folder, only)
        if read.rows is not None:
            first = next(iter(waiting.values()), read.rows)
            rows, size = rows + len(read.rows), size + read.rows.nbytes
            if first.schema != read.rows.schema or rows > BATCH or size > BATCH_BYTES:
                _judge(found, waiting)
                rows, size = len(read.rows), read.rows.nbytes
            waiting[len(found)] = read.rows
        found.append(read)
    _judge(found, waiting)
    return found


def _read(folder: Path, only: bool) -> Examined:
    """Check the files of a folder; `rows` of the result are its measurements, not yet judged."""
    try:
        # The lists of run.json were checked, and are not needed here.
        manifest = read_manifest(folder, brief=True)
        checksums, needed = manifest.checksums, FILES[manifest.kind]
        contents = {name: read_checked(folder / name, checksums) for name in needed}
        for name in () if only else (checksums or {}).keys() - contents.keys():
            read_checked(folder / name, checksums)
        tables = {}
        for name, content in contents.items():
            # A matching checksum proves a file intact, so only the measurements are parsed.
            if checksums is None or name == MEASUREMENTS:
                absent = added_columns(name, manifest.migrated_from)
                # A checksum covers every column; without one each column has to be read.
                read = None if checksums is None else _COLUMNS
                tables[name] = rows_table(content, folder / name, absent, read, unique=False)
    except StoreError as error:
        return Examined(folder.name, str(error))
    return Examined(folder.name, manifest=manifest, rows=tables.get(MEASUREMENTS), path=folder)


def _judge(found: list[Examined], waiting: dict[int, pa.Table]) -> None:
    """Recompute the verdicts of the rows in `waiting` (by index into `found`), and empty it.

    The gates of each run and their counts are set in `found`; a run with a measurement twice
    becomes unreadable.
    """
    runs, tables = list(waiting), list(waiting.values())
    waiting.clear()
    if not tables:
        return
    together = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    sizes = [table.num_rows for table in tables]
    if repeated_keys(together, np.repeat(np.arange(len(runs)), sizes)):
        for run, table in zip(runs, tables, strict=True):
            try:
                check_keys(table, (found[run].path or Path()) / MEASUREMENTS)
            except StoreError as error:
                found[run] = Examined(found[run].name, str(error))
        left = {run: table for run, table in zip(runs, tables, strict=True) if not found[run].why}
        if len(left) < len(runs):
            _judge(found, left)
            return
    columns, gated, broken = _gates(together)
    ends = np.cumsum(sizes)
    for run, table, end in zip(runs, tables, ends.tolist(), strict=True):
        own = slice(end - table.num_rows, end)
        rows = columns.slice(own.start, table.num_rows)
        found[run] = replace(
            found[run],
            gates=int(gated[own].sum()),
            broken=int(broken[own].sum()),
            work=_work(table, gated[own]),
            rows=rows if gated[own].all() else rows.filter(pa.array(gated[own])),
        )


def _gates(table: pa.Table) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Return the rows with recomputed verdicts, a mask of the gates, and a mask of broken gates.

    A gate is a measurement that has a tolerance or could not be compared; it is broken if its
    verdict is not "pass". Verdicts follow from the numbers, as in `Measurement.settled`.
    """
    words, codes = _codes(table["verdict"].combine_chunks())
    value, tolerance = (table[name].to_numpy() for name in ("value", "tolerance"))
    gated = (codes != _INFO) | ~np.isnan(tolerance)
    asked = (codes == _PASS) | ((codes == _INFO) & gated)
    with np.errstate(all="ignore"):
        within = np.isfinite(value) & (value <= tolerance) & (value >= 0)
        share = np.where(
            tolerance == 0, np.where(value == 0, 0.0, np.inf), np.divide(value, tolerance)
        )
    share = np.where(np.isfinite(tolerance), share, np.nan)
    judged = np.where(asked, np.where(within, _PASS, _FAIL), codes)
    unbounded = asked & np.isfinite(value) & ~np.isfinite(tolerance)
    judged = np.where(unbounded, _NOT_COMPARABLE, judged)
    columns = {name: table[name] for name in (*KEY, "value", "tolerance")}
    verdict = pa.DictionaryArray.from_arrays(pa.array(judged, pa.int32()), words)
    columns |= {"fraction": share, "verdict": verdict}
    if "deterministic" in table.column_names:
        columns["deterministic"] = table["deterministic"]
    else:
        columns["deterministic"] = pa.nulls(table.num_rows, pa.bool_())
    return pa.table(columns), gated, gated & (judged != _PASS)


def _codes(column: pa.Array) -> tuple[list[str], np.ndarray]:
    """Encode a column of verdicts as integers: return the words, and each row's index into them.

    The words are those of `Verdict`, followed by other words that the column holds.
    """
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    found = column.dictionary.to_pylist()
    words = [*_WORDS, *(word for word in found if word not in _WORDS)]
    places = np.array([words.index(word) for word in found], np.int32)
    return words, places[column.indices.to_numpy(False)]


def _work(table: pa.Table, gated: np.ndarray) -> str:
    """Return a hash of the rows: their names and identities (`KEY`), and which of them are gates.

    Runs with equal hashes measured the same gates, so a query needs to read only one of them.
    """
    digest = hashlib.sha256(np.packbits(gated).tobytes())
    for name in KEY:
        column = table[name].combine_chunks()
        array = column.dictionary_encode() if not pa.types.is_dictionary(column.type) else column
        if isinstance(array, pa.ChunkedArray):
            array = array.unify_dictionaries().combine_chunks()
        digest.update("\0".join(array.dictionary.to_pylist()).encode("utf-8", "replace"))
        digest.update(array.indices.to_numpy(False).astype(np.int32).tobytes())
    return digest.hexdigest()[:16]
