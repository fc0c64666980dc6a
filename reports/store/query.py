"""Measurements of many runs as one table: DuckDB over their Parquet files, local or remote.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence

import duckdb
import numpy as np
import pyarrow as pa

from reports.store.schema import MEASUREMENTS, arrow_schema

Columns = dict[str, np.ndarray]
"""Columns of a query result, by name."""


class Table:
    """Measurements of many runs as one DuckDB table; a damaged file is skipped and reported."""

    def __init__(self, files: Sequence[str], gathered: Sequence[str] = ()) -> None:
        """Open the measurements of runs.

        Args:
            files: Parquet files of the runs, as paths that DuckDB can read, local or remote.
            gathered: For each file, the combined file that holds its gates together with those of
                other runs (`reports.store.gathered`), or "". A combined file has no rows other than
                gates.
        """
        self.files = list(files)
        self.gathered = list(gathered) or [""] * len(self.files)
        self.database = duckdb.connect()
        self.database.register("no_rows", arrow_schema(MEASUREMENTS).empty_table())
        places = {
            "place": pa.array(self.files, pa.string()),
            "together": pa.array(self.gathered, pa.string()),
            "folder": pa.array(
                [os.path.basename(os.path.dirname(file)) for file in self.files], pa.string()
            ),
            "position": pa.array(range(len(self.files)), pa.int64()),
        }
        self.database.register("places", pa.table(places))

    def ask(self, query: str, **values: object) -> tuple[Columns, dict[int, str]]:
        """Run a query; return its columns, and the error of each unreadable file.

        The errors are by position of the file in `files`; rows of these files are left out.

        Args:
            query: SQL on the table `measurements`, whose column `run` is the position of a row's
                file in `files`.
            **values: Parameters of the query, such as `case` for `$case`.

        Raises:
            duckdb.Error: the query fails although every file can be read.
        """
        try:
            return self._ask(query, range(len(self.files)), values), {}
        except duckdb.Error:
            broken: dict[int, str] = {}
            for i in range(len(self.files)):
                try:
                    self._ask(query, [i], values)
                except duckdb.Error as error:
                    broken[i] = str(error)
            # Without a broken file, the query fails again.
            whole = [i for i in range(len(self.files)) if i not in broken]
            return self._ask(query, whole, values), broken

    def _ask(self, query: str, which: Sequence[int], values: Mapping[str, object]) -> Columns:
        # Columns that an older schema lacks are read as NULL, by the union with an empty table.
        tables = ["SELECT *, -1 AS run FROM no_rows"]
        # DuckDB treats a path as a glob pattern, and a folder name may contain brackets.
        alone = [glob.escape(self.files[i]) for i in which if not self.gathered[i]]
        together = sorted({self.gathered[i] for i in which if self.gathered[i]})
        if alone:
            values = {**values, "alone": alone}
            tables.append(
                "SELECT rows.* EXCLUDE (filename), position AS run "
                "FROM read_parquet($alone, union_by_name = true, filename = true) AS rows "
                "JOIN places ON filename = place"
            )
        if together:
            values = {**values, "together": [glob.escape(file) for file in together]}
            tables.append(
                "SELECT rows.* EXCLUDE (filename, run), position AS run "
                "FROM read_parquet($together, filename = true) AS rows "
                "JOIN places ON filename = together AND rows.run = folder"
            )
        table = " UNION ALL BY NAME ".join(tables)
        asked = f"WITH measurements AS ({table}) {query}"
        # Not `fetchnumpy`, which imports pandas and replaces null by an arbitrary number.
        found = self.database.sql(asked, params=values).to_arrow_table()
        return {
            name: column.to_numpy()
            for name, column in zip(found.column_names, found.columns, strict=True)
        }

    def __enter__(self) -> Table:
        """Return the table itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database."""
        self.database.close()
