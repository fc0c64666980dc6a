"""Shared storage that loses requests and replies: every run is stored, once, and reported so."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reports.store import claims, objects, shared, unsent
from reports.store.runs import list_runs, write_run
from reports.store.schema import MANIFEST, StoreError
from tests.reports.nights import earlier, measurement
from tests.reports.store.faulty import Faulty

ROOT = "bucket/runs"
ADDRESS = f"faulty://{ROOT}"
SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
NAME = "2026-11-01T21-30-00Z-1a2b3c4"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and a cache of the test's own."""
    monkeypatch.setattr(objects, "PAUSE", 0.0)
    monkeypatch.setattr(claims, "COLLISION", 0.002)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def machine(tmp_path: Path, name: str) -> shared.Storage:
    """The storage as another machine sees it, which has a copy of its own."""
    copy = tmp_path / name
    copy.mkdir(exist_ok=True)
    (copy / ".shared").write_text(ADDRESS, encoding="utf-8")
    storage = shared.storage_of(copy)
    assert storage is not None
    return storage


def folder_of(tmp_path: Path, content: str, name: str = NAME) -> Path:
    """A run as it is before it is sent, of files that `content` tells from others."""
    folder = tmp_path / f"made-{content}"
    folder.mkdir()
    (folder / "measurements.parquet").write_text(content * 3, encoding="utf-8")
    (folder / "report.html").write_text(content, encoding="utf-8")
    document = json.dumps({"id": name, "content": content})
    (folder / MANIFEST).write_text(document, encoding="utf-8")
    return folder


def assert_whole(store: Faulty) -> dict[str, str]:
    """Return by name what each stored run holds; every run is whole, and lies where it says."""
    held: dict[str, str] = {}
    for name, manifest in store.runs(ROOT).items():
        document = json.loads(manifest)
        assert document["id"] == name
        held[name] = content = document["content"]
        files = {"measurements.parquet": content * 3, "report.html": content}
        for file, text in files.items():
            assert store.objects[f"{ROOT}/{name}/{file}"][0].decode() == text
    return held


FAULTS = [
    pytest.param(replies, requests, conditions, id=f"{replies}-{requests}-{conditions}")
    for conditions in ("kept", "ignored", "refused")
    for replies, requests in ((0.3, 0.0), (0.15, 0.15))
]


def stored_by_all(tmp_path: Path, store: Faulty, writers: int, rounds: int) -> list[str]:
    """Have writers send runs of one id each round; return the lines that were reported."""
    lines: list[str] = []
    machines = [machine(tmp_path, f"machine{i}") for i in range(writers)]
    start = threading.Barrier(writers)

    def work(i: int) -> None:
        for turn in range(rounds):
            name, content = f"night-{turn:02}", f"w{i}r{turn}"
            folder = folder_of(tmp_path, content, name)
            start.wait()
            try:
                claimed = machines[i].claim(name)
                place = machines[i].publish(folder, name if claimed else name, lines.append)
                lines.append(f"stored {place.name} {content}")
            except StoreError as error:
                # The storage did not answer: what the next command does.
                assert "next command" in str(error) or "answer" in str(error)
                if folder.exists():
                    unsent.put_in(machines[i].copy, folder, unsent.Note(name, None))

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(work, range(writers)))
    for each in machines:
        for _ in range(20):
            each.send_unsent(lines.append)
        assert not unsent.waiting(each.copy)
    return lines


@pytest.mark.parametrize(("replies", "requests", "conditions"), FAULTS)
def test_every_run_of_writers_at_once_is_stored_once(
    tmp_path: Path, replies: float, requests: float, conditions: str
) -> None:
    store = Faulty.make(1, replies, requests, conditions)
    lines = stored_by_all(tmp_path, store, 8, 5)
    held = assert_whole(store)
    assert Counter(held.values()) == Counter(f"w{i}r{turn}" for i in range(8) for turn in range(5))
    for line in lines:
        if match := re.fullmatch(r"stored (\S+) (\S+)", line):
            assert held[match[1]] == match[2]
        elif match := re.search(r"(?:stored as |sent now: \S+/)(night-\d+(?:-\d+)?)", line):
            assert match[1] in held
        else:
            assert "not sent" in line
    if conditions == "kept":
        # The condition decides who wins, so no number is wasted, and nothing is sent twice.
        data = {p: n for p, n in store.written.items() if "/night-" in p and ".claims" not in p}
        assert set(data.values()) == {1}
