"""The measurements of many runs as one table: DuckDB over the Parquet files, wherever they are.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence

import duckdb
import numpy as np

from reports.store.schema import MEASUREMENTS, arrow_schema

Answer = dict[str, np.ndarray]
"""The columns of an answer by name."""


class Table:
    """Measurements of many runs as one DuckDB table; a damaged file costs only itself."""

    def __init__(self, files: Sequence[str]) -> None:
        """Take the Parquet files, by paths that DuckDB can read, local or remote."""
        self.files = list(files)
        self.database = duckdb.connect()
        self.database.register("no_rows", arrow_schema(MEASUREMENTS).empty_table())

    def ask(self, query: str, **values: object) -> tuple[Answer, dict[int, str]]:
        """Return the columns of the answer, and by position the files that could not be read.

        In `query`, `measurements` is the table, with the position of each row's file as `run`.
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
            if not broken:
                raise
            whole = [i for i in range(len(self.files)) if i not in broken]
            return self._ask(query, whole, values), broken

    def _ask(self, query: str, which: Sequence[int], values: Mapping[str, object]) -> Answer:
        table = "SELECT *, -1 AS run FROM no_rows"
        if which:
            values = {**values, "names": self.files}
            # A path is a glob pattern to DuckDB, and a folder name may hold brackets.
            values["files"] = [glob.escape(self.files[i]) for i in which]
            # Files of older schemas lack columns; beside an empty table of today's they read NULL.
            table = (
                "SELECT * EXCLUDE (filename), list_position($names, filename) - 1 AS run "
                "FROM read_parquet($files, union_by_name = true, filename = true) "
                f"UNION ALL BY NAME {table}"
            )
        answer = self.database.execute(f"WITH measurements AS ({table}) {query}", values)
        return {name: np.asarray(column) for name, column in answer.fetchnumpy().items()}

    def __enter__(self) -> Table:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database."""
        self.database.close()
