"""Accounts and tensors keep elements and lines, and those of earlier versions are read without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from parity.engine.programs.source_lines import Line
from reports.store.explanations import EXPLANATIONS, read_explanations, write_explanations
from reports.store.failures import read_names
from reports.store.schema import StoreError
from tests.reports.nights import explained


def test_lines_and_elements_are_stored_and_older_files_have_none(tmp_path: Path) -> None:
    line = Line("model.py:9 (f)", "makes a mask", "> 9  x")
    account = replace(explained(), where="row 0: all padding", lines=(line,))
    write_explanations(tmp_path, [account])
    assert read_explanations(tmp_path, None) == (account,)
    file = tmp_path / EXPLANATIONS
    pq.write_table(pq.read_table(file).drop_columns(["where", "lines"]), file)
    assert read_explanations(tmp_path, None) == (explained(),)


@pytest.mark.parametrize("damage", ["truncated", "footer", "length of the footer"])
def test_a_damaged_file_of_accounts_is_named_and_not_taken_for_an_earlier_version(
    tmp_path: Path, damage: str
) -> None:
    """Its names of columns, which tell the version, cannot be read either."""
    write_explanations(tmp_path, [explained()])
    content = (file := tmp_path / EXPLANATIONS).read_bytes()
    # The last eight bytes are the length of the footer and a mark.
    footer = int.from_bytes(content[-8:-4], "little")
    damaged = {
        "truncated": content[:-1],
        "footer": content[: -8 - footer] + bytes(footer) + content[-8:],
        "length of the footer": content[:-8] + len(content).to_bytes(4, "little") + content[-4:],
    }
    file.write_bytes(damaged[damage])
    assert read_names(file.read_bytes()) == ()
    with pytest.raises(StoreError, match=f"complete Parquet file at {file}"):
        read_explanations(tmp_path, None)
