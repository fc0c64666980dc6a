"""A file is there whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megalodon_jax import files
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


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself", "large", "deep", "a list"])
def test_what_is_no_plain_json_file_within_limits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = tmp_path / "file.json"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "link to itself":
        file.symlink_to(file)
    elif kind == "large":
        monkeypatch.setattr(files, "JSON_BYTES", 100)
        file.write_text("{" + " " * 99 + "}", encoding="utf-8")
    elif kind == "deep":
        depth = files.JSON_DEPTH
        file.write_text('{"a":' * (depth + 1) + "1" + "}" * (depth + 1), encoding="utf-8")
    else:
        file.write_text("[]", encoding="utf-8")
    with pytest.raises((ValueError, OSError)):
        files.read_json_object(file)


def test_brackets_in_texts_are_no_nesting(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    content = {'[{"\\': "[" * 1000, "deep": {"a": [["{" * 1000]]}}
    file.write_text(json.dumps(content), encoding="utf-8")
    assert files.read_json_object(file) == content
