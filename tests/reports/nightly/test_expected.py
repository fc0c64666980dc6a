"""How long a night will take, before it begins."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from reports.nightly.expected import FIRST, OTHER, cost, expected_seconds
from reports.provenance.environment import new_manifest
from reports.provenance.host import processor
from reports.store.manifest import PartInfo
from reports.store.runs import write_run
from reports.store.schema import RunKind
from tests.reports.nights import earlier, measurement

HERE = processor(new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment)


def store(root: Path, day: int, seconds: float, where: str = HERE) -> Path:
    night = earlier(measurement(), day=day)
    parts = tuple(PartInfo(name, processor=where, seconds=seconds) for name in ("plain", "(mesh)"))
    return write_run(root, replace(night, manifest=replace(night.manifest, parts=parts)))


def test_the_newest_readable_night_of_this_processor_says_how_long_parts_take(
    tmp_path: Path,
) -> None:
    store(tmp_path, 15, 7.0)
    store(tmp_path, 16, 5.0)
    store(tmp_path, 17, 900.0, "another processor")
    damaged = store(tmp_path, 18, 800.0)
    (damaged / "run.json").write_text("{", encoding="utf-8")
    assert expected_seconds(tmp_path, ["plain"]) == ({"plain": 5.0}, True)
    # A part that none of them had: their nights are others.
    assert expected_seconds(tmp_path, ["plain", "new"])[1] is False


def test_a_first_night_takes_the_table(tmp_path: Path) -> None:
    expected, known = expected_seconds(tmp_path / "runs", ["plain", "not in the table"])
    assert not known
    assert expected == {"plain": FIRST.get("plain", OTHER), "not in the table": OTHER}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("seconds", "workers", "words"),
    [((60.0, 60.0, 120.0), 2, "about 2 minutes"), ((30.0, 80.0), 4, "about 80 s")],
)
def test_the_cost_is_told_in_words(seconds, workers, words) -> None:
    expected = {str(n): each for n, each in enumerate(seconds)}
    assert cost(expected, workers, True).startswith(f"{words}, as the last night")
    assert cost(expected, workers, False).startswith(f"{words}: a first night compiles")
