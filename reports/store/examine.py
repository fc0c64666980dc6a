"""One run as listings see it: whether its files are those that were stored, and what they say."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from parity.engine.measurement import Verdict
from reports.store.manifest import Manifest, read_manifest
from reports.store.reader import read_checked
from reports.store.run import rows_table
from reports.store.schema import FILES, MEASUREMENTS, StoreError, added_columns

KEY = ("case", "edge", "quantity", "metric", "identity")
"""What names a gate and the work it is about."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What a folder turned out to be; the fields are those of `reports.store.index.Line`."""

    name: str
    why: str = ""
    manifest: Manifest | None = None
    gates: int = 0
    broken: int = 0
    work: str = ""
    rows: pa.Table | None = None
    """Its gates, with verdicts and shares by their numbers; None for a run without measurements."""


def examine(folder: Path, only: bool = False) -> Examined:
    """Read a folder and check every file of the run against its checksum.

    Args:
        folder: maybe a run.
        only: read no other files than those that a run of its kind must have.
    """
    try:
        manifest = read_manifest(folder)
        checksums, needed = manifest.checksums, FILES[manifest.kind]
        contents = {name: read_checked(folder / name, checksums) for name in needed}
        for name in () if only else (checksums or {}).keys() - contents.keys():
            read_checked(folder / name, checksums)
        tables = {}
        for name, content in contents.items():
            # A file that fits its checksum is whole; only the gates are counted.
            if checksums is None or name == MEASUREMENTS:
                absent = added_columns(name, manifest.migrated_from)
                tables[name] = rows_table(content, folder / name, absent)
    except StoreError as error:
        return Examined(folder.name, str(error))
    if MEASUREMENTS not in tables:
        return Examined(folder.name, manifest=manifest)
    gates, gated = _gates(tables[MEASUREMENTS])
    broken = int((gates["verdict"].to_numpy() != Verdict.PASS.value).sum())
    work = _work(tables[MEASUREMENTS], gated)
    return Examined(folder.name, "", manifest, gates.num_rows, broken, work, gates)


def _gates(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """Return the rows that are gates, judged by their numbers as `Measurement.settled` does, and
    which of all rows they are.
    """
    words = _texts(table["verdict"].combine_chunks())
    value, tolerance = (table[name].to_numpy() for name in ("value", "tolerance"))
    gated = (words != Verdict.INFO.value) | ~np.isnan(tolerance)
    asked = (words == Verdict.PASS.value) | ((words == Verdict.INFO.value) & gated)
    with np.errstate(all="ignore"):
        within = np.isfinite(value) & (value <= tolerance) & (value >= 0)
        share = np.where(
            tolerance == 0, np.where(value == 0, 0.0, np.inf), np.divide(value, tolerance)
        )
    share = np.where(np.isnan(tolerance), np.nan, share)
    judged = np.where(asked, np.where(within, Verdict.PASS.value, Verdict.FAIL.value), words)
    unbounded = asked & np.isfinite(value) & ~np.isfinite(tolerance)
    judged = np.where(unbounded, Verdict.NOT_COMPARABLE.value, judged)
    columns = {name: table[name] for name in (*KEY, "value", "tolerance")}
    columns |= {"fraction": share, "verdict": pa.array(judged.tolist(), pa.string())}
    if "deterministic" in table.column_names:
        columns["deterministic"] = table["deterministic"]
    else:
        columns["deterministic"] = pa.nulls(table.num_rows, pa.bool_())
    gates = pa.table(columns)
    return (gates if gated.all() else gates.filter(pa.array(gated))), gated


def _texts(column: pa.Array) -> np.ndarray:
    """Return texts as NumPy has them, each text of a dictionary made once."""
    if pa.types.is_dictionary(column.type) and len(column.dictionary):
        return np.asarray(column.dictionary.to_pylist())[column.indices.to_numpy(False)]
    return np.asarray(column.cast(pa.string()).to_numpy(False))


def _work(table: pa.Table, gated: np.ndarray) -> str:
    """Return a hash of what each row is about and whether it is a gate, in the order of the rows.

    Of runs of one work one is asked which gates it measured, for all of them.
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
