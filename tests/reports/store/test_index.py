"""The index of a list of runs: what it saves, and that the folders are the truth."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from reports.registry import listing
from reports.registry.index import INDEX
from reports.registry.listing import summarise_runs
from reports.store.runs import write_run
from tests.reports.nights import failing, measurement, run


def night(day: int, row: Any = None) -> Any:
    name = f"2026-11-{day:02d}T21-30-00Z-0000000"
    return run(row or measurement(), id=name, created=f"2026-11-{day:02d}T21:30:00+00:00")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The folders that are read, by list."""
    seen: list[list[str]] = []
    examined = listing._examined

    def watched(folders: Any) -> Any:
        seen.append([folder.name for folder in folders])
        return examined(folders)

    monkeypatch.setattr(listing, "_examined", watched)
    return seen


def test_a_list_reads_what_is_new_alone(tmp_path: Path, reads: list[list[str]]) -> None:
    first, second = write_run(tmp_path, night(1)), write_run(tmp_path, night(2))
    once = summarise_runs(tmp_path)
    third = write_run(tmp_path, night(3, failing()))
    twice = summarise_runs(tmp_path)
    assert reads == [[first.name, second.name], [third.name]]
    assert twice[0][:2] == once[0]
    assert [(s.id, s.gates, s.broken) for s in twice[0]][2] == (third.name, 1, 1)
    assert summarise_runs(tmp_path) == twice and len(reads) == 2
    # What is deleted is in no list, whatever the index has.
    shutil.rmtree(first)
    assert [s.id for s in summarise_runs(tmp_path)[0]] == [second.name, third.name]


@pytest.mark.parametrize("damage", ["index", "run", "measurements", "no index"])
def test_the_folders_are_the_truth(tmp_path: Path, damage: str) -> None:
    folders = [write_run(tmp_path, night(day)) for day in (1, 2)]
    healthy = summarise_runs(tmp_path)
    if damage == "index":
        (tmp_path / INDEX).write_bytes(b"PAR1 nothing of it")
    elif damage == "no index":
        (tmp_path / INDEX).unlink()
    elif damage == "run":
        (folders[0] / "run.json").write_text("{", encoding="utf-8")
    else:
        (folders[0] / "measurements.parquet").write_bytes(b"PAR1")
    listed, unreadable = summarise_runs(tmp_path)
    if damage.endswith("index"):
        assert (listed, unreadable) == healthy
    else:
        assert [s.id for s in listed] == [folders[1].name]
        assert [folder for folder, _ in unreadable] == [folders[0]]


def test_a_copy_is_named_whether_the_index_knows_it_or_not(tmp_path: Path) -> None:
    own = write_run(tmp_path, night(1))
    shutil.copytree(own, tmp_path / "a-copy")
    for _ in range(2):
        listed, unreadable = summarise_runs(tmp_path)
        assert [s.id for s in listed] == [own.name]
        assert [(f.name, "delete one of them" in why) for f, why in unreadable] == [
            ("a-copy", True)
        ]
