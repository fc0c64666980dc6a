"""Accounts and tensors keep elements and lines, and those of earlier versions are read without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from parity.engine.programs.source_lines import Line
from reports.store.explanations import EXPLANATIONS, read_explanations, write_explanations
from tests.reports.nights import explained


def test_lines_and_elements_are_stored_and_older_files_have_none(tmp_path: Path) -> None:
    line = Line("model.py:9 (f)", "makes a mask", "> 9  x")
    account = replace(explained(), where="row 0: all padding", lines=(line,))
    write_explanations(tmp_path, [account])
    assert read_explanations(tmp_path, None) == (account,)
    file = tmp_path / EXPLANATIONS
    pq.write_table(pq.read_table(file).drop_columns(["where", "lines"]), file)
    assert read_explanations(tmp_path, None) == (explained(),)
