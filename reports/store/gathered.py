"""Combined files with the gates of many runs, so that a history opens few files.

A file is named after its checksum and never changed; the index says which file has the gates of
which run. Combined files are derived from the run folders. Source: docs/reports.md "Store".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalodon_jax.files import written_aside
from reports.store.examine import Examined
from reports.store.reader import checksum, read_bytes
from reports.store.schema import StoreError

FOLDER = ".values"
"""Hidden folder beside the runs that holds the combined files."""
RUNS, FEW = 64, 16
"""A combined file of fewer than RUNS runs is small; more than FEW small files are merged."""
BYTES = 2**30
"""Largest combined file, in bytes, that is read."""
LEFT_OVER = 3600
"""Age in seconds from which a file that the index does not name is deleted; a newer one may belong
to another process that is about to write its index."""


@dataclass
class Gathered:
    """The combined files of one folder of runs, each with the gates of many runs."""

    root: Path
    verified: dict[str, str]
    """Inode, size and times of each file when its checksum was last verified, by name."""
    checked: dict[str, bool] = field(default_factory=dict)
    """Whether each file that this object has checked matches its checksum, by name."""

    def holds(self, name: str) -> bool:
        """Return whether the file `name` exists and matches its checksum; True for "" (no file)."""
        if not name:
            return True
        if name not in self.checked:
            self.checked[name] = self._check(name)
        return self.checked[name]

    def _check(self, name: str) -> bool:
        path = self.path(name)
        try:
            status = path.stat()
            now = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            if self.verified.get(name) != now and checksum(read_bytes(path, BYTES)) != name:
                return False
        except (OSError, StoreError):
            return False
        self.verified[name] = now
        return True

    def path(self, name: str) -> Path:
        """Return the path of the combined file called `name`."""
        return self.root / FOLDER / f"{name}.parquet"

    def write(self, table: pa.Table) -> str:
        """Write a table and return the name of its file; "" if the folder is not writable."""
        buffer = pa.BufferOutputStream()
        # Without Arrow's schema in the file, dictionary columns are read back as plain strings.
        # Numbers rarely repeat: dictionaries and statistics for them would double the time.
        texts = [f.name for f in table.schema if not pa.types.is_floating(f.type)]
        pq.write_table(
            table,
            buffer,
            compression="zstd",
            store_schema=False,
            # The type stubs lack the form with a list of columns.
            use_dictionary=texts,  # pyright: ignore[reportArgumentType]
            write_statistics=False,
        )
        content = buffer.getvalue().to_pybytes()
        name = checksum(content)
        try:
            self.path(name).parent.mkdir(exist_ok=True)
            with written_aside(self.path(name)) as aside:
                aside.write_bytes(content)
        except OSError:
            return ""
        self.checked.pop(name, None)
        return name if self.holds(name) else ""

    def merge(self, members: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Merge the files with fewer than `RUNS` runs into one, if they are more than `FEW`.

        Args:
            members: names of the runs in each file.

        Returns:
            name of the new file, by run whose file was merged; empty if nothing was merged, for
            example because another process deleted a file or damaged it.
        """
        small = [name for name, runs in members.items() if len(runs) < RUNS]
        if len(small) <= FEW:
            return {}
        tables = []
        for name in small:
            try:
                table = pq.read_table(self.path(name))
            except (OSError, pa.ArrowException):
                return {}
            kept = pa.array(np.isin(table["run"].to_numpy(), members[name]))
            tables.append(table.filter(kept))
        merged = self.write(pa.concat_tables(tables))
        return {run: merged for name in small for run in members[name]} if merged else {}


def gather(gathered: Gathered, found: Sequence[Examined]) -> str:
    """Write the gates of the runs `found` to one combined file and return its name.

    The name is "" if the runs have no rows, their strings exceed 2 GiB, or the folder is not
    writable; queries then read the runs one by one.
    """
    found = [one for one in found if one.rows is not None]
    if not found:
        return ""
    rows = [one.rows for one in found if one.rows is not None]
    if any(not table.schema.equals(rows[0].schema) for table in rows):
        rows = list(map(_plain, rows))
    # String columns stay dictionary-encoded as they were read; Parquet stores them in this form.
    try:
        together = pa.concat_tables(rows).unify_dictionaries()
    except pa.ArrowException:
        # The strings together exceed 2 GiB.
        return ""
    names = pa.array([one.name for one in found], pa.string())
    counts = np.repeat(np.arange(len(rows), dtype=np.int32), [table.num_rows for table in rows])
    runs = pa.DictionaryArray.from_arrays(pa.array(counts), names)
    return gathered.write(together.add_column(0, "run", runs))


def _plain(table: pa.Table) -> pa.Table:
    """Return a table whose string columns are plain instead of dictionary-encoded."""
    types = (pa.string() if pa.types.is_dictionary(f.type) else f.type for f in table.schema)
    names = table.schema.names
    return table.cast(pa.schema(list(map(pa.field, names, types))))


def forget(gathered: Gathered, used: Iterable[str]) -> None:
    """Delete the combined files that are not among the names `used` and older than `LEFT_OVER`."""
    names = set(used)
    with suppress(OSError):
        for path in (gathered.root / FOLDER).glob("*.parquet"):
            if path.stem not in names and time.time() - path.stat().st_mtime > LEFT_OVER:
                path.unlink()
    for name in set(gathered.verified) - names:
        del gathered.verified[name]
