"""A file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalodon_jax.files import written_aside


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "table.json"
    target.write_text("before", encoding="utf-8")
    with written_aside(target) as aside:
        aside.write_text("after", encoding="utf-8")
        assert aside.parent == tmp_path, "a rename between file systems is a copy"
        assert target.read_text(encoding="utf-8") == "before"
    assert target.read_text(encoding="utf-8") == "after"
    assert target.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("before", ["before", None])
def test_an_interruption_leaves_what_was_there_and_nothing_else(tmp_path: Path, before) -> None:
    target = tmp_path / "table.json"
    if before is not None:
        target.write_text(before, encoding="utf-8")
    with pytest.raises(KeyboardInterrupt), written_aside(target) as aside:
        aside.write_text("half", encoding="utf-8")
        raise KeyboardInterrupt
    left = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert left == ({} if before is None else {"table.json": before})


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="nowhere"),
        written_aside(tmp_path / "nowhere" / "a"),
    ):
        raise AssertionError("the block does not start")
