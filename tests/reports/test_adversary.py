"""An adversary over stored runs: whatever it edits, deletes, swaps or damages, one thing holds.

No PASS, and no exit code 0, unless every gate of the contract was measured and lies there as it was
stored. The adversary is a Hypothesis state machine; a failing example is printed as the shortest
list of its moves.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from parity.engine.measure.measurement import Measurement, Verdict
from reports.registry.lookup import judge_stored
from reports.store.runs import Run, StoreError, write_run
from reports.store.schema import FINDINGS, MANIFEST, MEASUREMENTS, PAGE, VERDICT
from reports.verdict import pins
from reports.verdict.decide import ExitCode
from tests.helpers import cli, scratch_folder
from tests.reports.nights import contracted, failing, finding, measurement, run

GATES = [
    measurement(case=case, edge=edge, quantity=quantity, identity=f"{case} {quantity}")
    for case in ("one", "two")
    for edge in ("jax64:oracle", "jax32:oracle")
    for quantity in ("embed", "logits")
]
FACT = measurement(case="one", quantity="embed", metric="cosine", verdict=Verdict.INFO)
ROWS = [*GATES, replace(FACT, tolerance=float("nan"))]
CONTRACT = contracted(GATES)
DERIVED = {PAGE, VERDICT}
"""Files of a run that its numbers do not depend on."""

NEIGHBOURS = ("loop", "pipe", "nested", "empty")
"""How the names of folders end that are no runs."""

numbers = st.integers(min_value=0, max_value=10**6)


def content_of(folder: Path) -> dict[str, bytes]:
    """The files of a run that decide its verdict: a pipe is never read, and white space is none."""
    files = (p for p in folder.iterdir() if p.name not in DERIVED and p.is_file())
    content = {p.name: p.read_bytes() for p in files}
    try:
        document = json.loads(content[MANIFEST])
    except (KeyError, ValueError, RecursionError):
        return content
    return content | {MANIFEST: json.dumps(document, sort_keys=True).encode()}


class StoreAdversary(RuleBasedStateMachine):
    """Moves over a folder of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.root = scratch_folder()
        self.healthy: list[dict[str, bytes]] = []
        """Content of the runs that may pass."""
        self.day = 1
        self.newest = ""
        """Name of the run that was stored last."""
        self.stored: dict[str, bytes] = {}
        """Its content."""

    def teardown(self) -> None:
        self.judge_all()
        shutil.rmtree(self.root)

    def folders(self) -> list[Path]:
        return sorted(p for p in self.root.iterdir() if p.is_dir() and p.name[0] != ".")

    def some(self, number: int) -> Path:
        folders = [p for p in self.folders() if not p.name.endswith(NEIGHBOURS)]
        return folders[number % len(folders)]

    @initialize()
    def a_night(self) -> None:
        self.store(ROWS)

    def store(self, rows: list[Measurement], **changes: Any) -> None:
        self.day += 1
        created = f"2026-10-{self.day:02d}T21:30:00+00:00"
        name = f"2026-10-{self.day:02d}T21-30-00Z-1a2b3c4"
        changes = {"contract": CONTRACT, "id": name, "created": created, **changes}
        night: Run = run(*rows, findings=(finding(),), **changes)
        folder = write_run(self.root, night)
        self.newest, self.stored = folder.name, content_of(folder)
        if rows == ROWS and changes.keys() == {"contract", "id", "created"}:
            self.healthy.append(content_of(folder))

    @rule()
    def another_night(self) -> None:
        self.store(ROWS)

    @rule(lost=st.sets(st.integers(0, len(GATES) - 1), min_size=1))
    def a_night_that_loses_gates(self, lost: set[int]) -> None:
        self.store([row for i, row in enumerate(ROWS) if i not in lost])

    @rule(which=st.integers(0, len(GATES) - 1))
    def a_night_that_measures_twice(self, which: int) -> None:
        self.store([*ROWS, ROWS[which]])

    @rule(which=st.integers(0, len(GATES) - 1), value=st.sampled_from([9.0, float("nan"), -1.0]))
    def a_night_that_fails(self, which: int, value: float) -> None:
        self.store([replace(r, value=value) if i == which else r for i, r in enumerate(ROWS)])

    @rule(
        which=st.integers(0, len(GATES) - 1),
        change=st.sampled_from(
            [{"tolerance": float("inf")}, {"tolerance": float("nan")}, {"quantity": "norm"},
             {"suite": "mesh"}, {"verdict": Verdict.INFO, "tolerance": float("nan")}]
        ),
    )  # fmt: skip
    def a_night_with_another_gate(self, which: int, change: dict[str, Any]) -> None:
        self.store([replace(r, **change) if i == which else r for i, r in enumerate(ROWS)])

    @rule(
        change=st.sampled_from(
            [{"contract": []}, {"contract": CONTRACT[1:]}, {"suites": []},
             {"suites": [{"name": "parity", "status": "ran", "planned": 0, "executed": 0}]},
             {"suites": [{"name": "parity", "status": "failed", "planned": 4, "executed": 4}]},
             {"suites": [{"name": "mesh", "status": "ran", "planned": 4, "executed": 4}]}]
        )
    )  # fmt: skip
    def a_night_that_says_other_things_of_itself(self, change: dict[str, Any]) -> None:
        self.store(ROWS, **change)

    @rule(
        number=numbers, kept=st.integers(0, len(ROWS) - 1), name=st.sampled_from(["first", "last"])
    )
    def rows_are_deleted(self, number: int, kept: int, name: str) -> None:
        self._edit_rows(number, lambda rows: rows[:kept] if name == "first" else rows[-kept:])

    @rule(number=numbers, which=numbers)
    def a_row_is_doubled(self, number: int, which: int) -> None:
        self._edit_rows(number, lambda rows: [*rows, rows[which % len(rows)]] if rows else rows)

    @rule(
        number=numbers,
        which=numbers,
        change=st.sampled_from([{"value": 0.0}, {"value": 1.0, "tolerance": 2.0}, {"case": "two"}]),
    )
    def a_row_is_edited(self, number: int, which: int, change: dict[str, Any]) -> None:
        def edit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            at = which % max(len(rows), 1)
            return [row | change if i == at else row for i, row in enumerate(rows)]

        self._edit_rows(number, edit)

    @rule(number=numbers)
    def rows_change_places(self, number: int) -> None:
        def swap(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [
                row | {"quantity": other["quantity"]}
                for row, other in zip(rows, rows[::-1], strict=True)
            ]

        self._edit_rows(number, swap)

    def _edit_rows(self, number: int, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
        path = self.some(number) / MEASUREMENTS
        try:
            table = pq.ParquetFile(path).read()
            rows = table.to_pylist()
        except (OSError, pa.ArrowException, UnicodeDecodeError):
            # A byte that was flipped before.
            return
        pq.write_table(pa.Table.from_pylist(edit(rows), schema=table.schema), path)

    @rule(one=numbers, other=numbers, name=st.sampled_from([MEASUREMENTS, FINDINGS, MANIFEST]))
    def files_change_places(self, one: int, other: int, name: str) -> None:
        paths = [self.some(n) / name for n in (one, other)]
        if all(path.is_file() for path in paths):
            contents = [path.read_bytes() for path in paths]
            for path, content in zip(paths, reversed(contents), strict=True):
                path.write_bytes(content)

    @rule(number=numbers, name=st.sampled_from([MEASUREMENTS, FINDINGS, MANIFEST]), at=numbers)
    def a_byte_is_flipped(self, number: int, name: str, at: int) -> None:
        path = self.some(number) / name
        if path.is_file() and (content := bytearray(path.read_bytes())):
            content[at % len(content)] ^= 1 << at % 8
            path.write_bytes(content)

    @rule(number=numbers, name=st.sampled_from([MEASUREMENTS, FINDINGS, MANIFEST]), at=numbers)
    def a_file_is_cut(self, number: int, name: str, at: int) -> None:
        path = self.some(number) / name
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(content[: at % max(len(content), 1)])

    @rule(number=numbers, name=st.sampled_from([MEASUREMENTS, FINDINGS, MANIFEST]))
    def a_file_is_deleted(self, number: int, name: str) -> None:
        (self.some(number) / name).unlink(missing_ok=True)

    @rule(
        number=numbers,
        key=st.sampled_from(
            ["contract", "suites", "seal", "files", "fault", "selected", "kind", "schema", "plan"]
        ),
        value=st.sampled_from([None, [], {}, 4, "pytest", ["one"]]),
    )
    def run_json_is_edited(self, number: int, key: str, value: Any) -> None:
        path = self.some(number) / MANIFEST
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return
        if isinstance(document, dict):
            path.write_text(json.dumps(document | {key: value}), encoding="utf-8")

    @rule(number=numbers)
    def a_run_is_copied(self, number: int) -> None:
        folder = self.some(number)
        copy = self.root / f"{folder.name[:20]}copy"
        if not copy.exists():
            shutil.copytree(folder, copy)

    @precondition(lambda self: len(self.folders()) > 4)
    @rule(number=numbers)
    def a_run_is_deleted(self, number: int) -> None:
        shutil.rmtree(self.some(number))

    @rule(kind=st.sampled_from(["loop", "pipe", "nested", "file", "empty"]))
    def a_bad_neighbour_comes(self, kind: str) -> None:
        place = self.root / f"2026-10-01T00-00-00Z-{kind}"
        if os.path.lexists(place):
            return
        if kind == "loop":
            place.symlink_to(place.name)
            return
        if kind == "file":
            (self.root / ".partial-x").write_text("", encoding="utf-8")
            return
        place.mkdir()
        if kind == "pipe":
            os.mkfifo(place / MANIFEST)
        elif kind == "nested":
            (place / MANIFEST).write_text("[" * 200_000, encoding="utf-8")

    @rule(number=numbers)
    def one_is_judged(self, number: int) -> None:
        self._judge(self.some(number))

    def judge_all(self) -> None:
        for folder in self.folders():
            self._judge(folder)
        # The newest run is judged as it is, or is named as damaged; an older one never stands in.
        if self.newest and (self.root / self.newest).is_dir():
            intact = any(content_of(folder) == self.stored for folder in self.folders())
            if not intact or self.stored not in self.healthy:
                assert cli("gate", "latest", "--out", self.root).exit_code != 0

    def _judge(self, folder: Path) -> None:
        if content_of(folder) in self.healthy:
            # It may pass, and need not be asked.
            return
        try:
            decision = judge_stored(folder).decision
        except StoreError:
            return
        assert decision.exit_code is not ExitCode.PASS, f"{decision.word}: {decision.sentence}"


@pytest.mark.parametrize(
    "examples",
    [200, pytest.param(5000, marks=[pytest.mark.sweep, pytest.mark.long])],
    ids=["", "many"],
)
def test_no_pass_but_for_what_was_measured(
    examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The repository's pinned runs are about other work, and reading them is half of a verdict.
    monkeypatch.setattr(pins, "FOLDER", tmp_path)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=6,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(StoreAdversary, settings=chosen)


def test_the_adversary_lets_a_healthy_night_pass(tmp_path: Path) -> None:
    """Without this the invariant would hold where nothing ever passes."""
    folder = write_run(tmp_path, run(*ROWS, contract=CONTRACT))
    assert judge_stored(folder).decision.exit_code is ExitCode.PASS
    assert cli("gate", "latest", "--out", tmp_path).exit_code == 0
    write_run(tmp_path, run(failing(), id="2026-11-21T00-00-00Z-1a2b3c4"))
    assert cli("gate", "latest", "--out", tmp_path).exit_code != 0
