"""An adversary over a small night: interrupted, damaged, changed and resumed, one thing holds.

No PASS unless every gate of the contract was measured once, by the code and on the checkpoint that
the run names, and without a planted bug. The driver, its answers, the shards, the store and the
verdict are the real ones; only what a part measures costs nothing. The adversary is a Hypothesis
state machine; a failing example is printed as the shortest list of its moves.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from parity.engine.measure.measurement import Verdict
from parity.executors.inputs import contents
from parity.executors.item import ItemError
from parity.executors.sweep import ANSWERS
from reports.nightly import fan_out as driver
from reports.nightly.fan_out import UNFINISHED, fan_out
from reports.nightly.run import Options
from reports.registry.lookup import judge_stored
from reports.registry.outcome import UnjudgedError
from reports.store.runs import Run, list_runs, read_run
from reports.store.schema import StoreError
from reports.verdict.decide import ExitCode
from tests.helpers import scratch_folder
from tests.reports.nightly.test_fan_out import quiet
from tests.reports.nightly.world import CASES, CONTENTS, PARTS, Source, Ticking, World

BUG = "rope_keys_one_late"
EVENTS = 16
"""About as many as a night has, from its first part to the page of its run."""
STORED = 12
"""Events of a night before its run is stored: four for each part."""
numbers = st.integers(min_value=0, max_value=10**6)
# Half of them late: then all parts are measured, and their run is about to be stored.
moments = st.integers(0, EVENTS) | st.integers(EVENTS - 5, EVENTS)


class NightAdversary(RuleBasedStateMachine):
    """Moves over a night of three parts and what its drivers left behind."""

    passed: ClassVar[int] = 0
    """Nights that passed, of all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.root = scratch_folder()
        (self.root / "checkpoint").mkdir()
        (self.root / "pins").mkdir()
        self.world = World(self.root / "checkpoint")
        self.options = Options(self.root / "runs", CASES, "recorded", self.world.checkpoint)
        self.write_content(CONTENTS[0])
        self.checked: set[Path] = set()
        """Folders of runs that were judged as they were stored."""
        self.patched = contextlib.ExitStack()
        self.patched.enter_context(self.world.in_place(self.root / "pins"))

    def teardown(self) -> None:
        try:
            self.a_night_runs("", 0, True, "")
            unseen = {info.folder for info in list_runs(self.options.out)[0]} - self.checked
            for folder in sorted(unseen):
                with contextlib.suppress(StoreError):
                    if judge_stored(folder).decision.exit_code is ExitCode.PASS:
                        self.check(read_run(folder))
        finally:
            self.close()

    def close(self) -> None:
        self.patched.close()
        shutil.rmtree(self.root)

    def write_content(self, content: bytes) -> None:
        (self.world.checkpoint / "weights").write_bytes(content)

    # What happens to a night.

    @rule(
        event=st.sampled_from(["kill", "kill", "break", "change", "edit", ""]),
        moment=moments,
        resume=st.sampled_from([True, True, True, False]),
        lost=st.sampled_from(["", "", "", *PARTS]),
    )
    def a_night_runs(self, event: str, moment: int, resume: bool, lost: str) -> None:
        """Run it; at one event it is killed, a part breaks down, or somebody changes a file.

        Every other night begins in the same second as the one before.
        """
        world = self.world
        world.edited.clear()
        world.now += timedelta(seconds=moment % 2)
        world.code = f"c0de{int(world.bug)}"
        world.moment = moment if event else -1
        world.event = getattr(self, f"_{event}", lambda: None)
        executor = Ticking(world=world, killed={lost: "signal 9"} if lost else {})
        try:
            outcome = fan_out(self.options, executor, quiet, resume)
        except (KeyboardInterrupt, ZeroDivisionError, StoreError, ItemError, UnjudgedError):
            return
        finally:
            world.moment, world.planted = -1, False
        assert outcome.decision is not None
        self.checked.add(outcome.folder)
        if outcome.decision.exit_code is ExitCode.PASS:
            type(self).passed += 1
            stored = read_run(outcome.folder)
            self.check(stored)
            assert {m.case for m in stored.measurements} == set(self.options.cases)
            assert not self.options.fault
            if event not in ("change", "edit"):
                # Nothing changed while it ran: it is of the code and the content of now.
                [now] = contents([str(world.checkpoint)]).values()
                checkpoint = stored.manifest.checkpoint
                assert checkpoint is not None and checkpoint.content == now
                assert stored.manifest.code == f"c0de{int(world.bug)}"

    def check(self, run: Run) -> None:
        """A run that passes is of one code, one content and no bug, and every gate is measured."""
        manifest, rows = run.manifest, run.measurements
        gates = [m for m in rows if m.verdict is not Verdict.INFO]
        assert sorted(m.case for m in gates) == sorted(manifest.selected)
        assert [f.subject for f in run.findings] == ["w"]
        notes = [m.note for m in gates] + [f.message for f in run.findings]
        cases = [m.case for m in gates] + [PARTS[-1]]
        assert manifest.checkpoint is not None
        for note, case in zip(notes, cases, strict=True):
            expected = Source(case, str(manifest.code), manifest.checkpoint.content, False)
            assert self.world.measured[note] == expected, note

    def _kill(self) -> None:
        raise KeyboardInterrupt

    def _break(self) -> None:
        raise ZeroDivisionError("of a part, or of the driver")

    def _change(self) -> None:
        content = self.world.content()
        self.write_content(CONTENTS[(CONTENTS.index(content) + 1) % len(CONTENTS)])

    def _edit(self) -> None:
        self.world.bug = not self.world.bug
        self.world.edited.append("parity/engine/measure/compare.py")

    # What happens between two nights.

    @rule(content=st.sampled_from(CONTENTS))
    def the_checkpoint_is_another(self, content: bytes) -> None:
        self.write_content(content)

    @rule()
    def the_code_is_edited(self) -> None:
        self.world.bug = not self.world.bug

    @rule(
        cases=st.sampled_from([CASES, CASES, CASES[:1], CASES[::-1]]),
        fault=st.sampled_from([None, None, BUG]),
    )
    def other_options_are_given(self, cases: tuple[str, ...], fault: str | None) -> None:
        self.options = replace(self.options, cases=cases, fault=fault)

    def left(self, pattern: str = "*") -> list[Path]:
        """Return files that drivers left behind."""
        place = self.options.out / UNFINISHED
        return sorted(p for p in place.rglob(pattern) if p.is_file()) if place.is_dir() else []

    def folders(self) -> list[Path]:
        """Return the folders of parts that drivers left behind."""
        place = self.options.out / UNFINISHED
        return sorted(p for p in place.glob("*/*") if p.is_dir()) if place.is_dir() else []

    @rule(number=numbers, at=numbers, how=st.sampled_from(["flip", "cut", "delete", "add"]))
    def a_file_is_damaged(self, number: int, at: int, how: str) -> None:
        if not (files := self.left()):
            return
        path = files[number % len(files)]
        content = bytearray(path.read_bytes())
        if how == "delete":
            path.unlink()
        elif how == "add":
            path.with_name(f"{path.name}.copy").write_bytes(content)
        elif content:
            if how == "cut":
                content = content[: at % len(content)]
            else:
                content[at % len(content)] ^= 1 << at % 8
            path.write_bytes(content)

    @rule(one=numbers, other=numbers)
    def two_parts_exchange_a_file(self, one: int, other: int) -> None:
        files = [path for path in self.left() if path.suffix in (".parquet", ".json")]
        if not files:
            return
        first = files[one % len(files)]
        alike = [path for path in files if path.name == first.name]
        second = alike[other % len(alike)]
        contents = first.read_bytes(), second.read_bytes()
        second.write_bytes(contents[0])
        first.write_bytes(contents[1])

    @rule(one=numbers, other=numbers, how=st.sampled_from(["exchange", "double"]))
    def a_part_is_in_the_place_of_another(self, one: int, other: int, how: str) -> None:
        if not (folders := self.folders()):
            return
        first, second = folders[one % len(folders)], folders[other % len(folders)]
        if first == second:
            return
        aside = self.root / "aside"
        shutil.move(second, aside)
        shutil.copytree(first, second)
        if how == "exchange":
            shutil.rmtree(first)
            shutil.move(aside, first)
        else:
            shutil.rmtree(aside)

    @rule(one=numbers, other=numbers)
    def a_part_is_there_twice(self, one: int, other: int) -> None:
        """The run of one lies in the folder of another too."""
        if not (folders := self.folders()):
            return
        first, second = folders[one % len(folders)], folders[other % len(folders)]
        for run in [p for p in first.iterdir() if p.is_dir()]:
            if not (copy := second / f"{run.name}x").exists():
                shutil.copytree(run, copy)

    @rule(one=numbers, other=numbers, how=st.sampled_from(["line", "key"]))
    def answers_are_doubled_or_renamed(self, one: int, other: int, how: str) -> None:
        if not (files := self.left(ANSWERS)):
            return
        path = files[one % len(files)]
        try:
            lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        except ValueError:
            return
        if not lines:
            return
        line = lines[other % len(lines)]
        keys = [folder.name for folder in self.folders()]
        if how == "key" and keys:
            line = line | {"key": keys[one % len(keys)]}
        lines.append(line)
        path.write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")

    @rule(one=numbers, other=numbers)
    def a_whole_night_is_in_the_place_of_another(self, one: int, other: int) -> None:
        place = self.options.out / UNFINISHED
        nights = sorted(place.iterdir()) if place.is_dir() else []
        if len(nights) < 2:
            return
        first, second = nights[one % len(nights)], nights[other % len(nights)]
        if first != second:
            shutil.rmtree(second)
            shutil.copytree(first, second)


def attack(examples: int, **changes: Any) -> None:
    """Let the adversary make so many examples of at most six moves."""
    NightAdversary.passed = 0
    run_state_machine_as_test(
        NightAdversary,
        settings=settings(
            max_examples=examples,
            stateful_step_count=6,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **changes,
        ),
    )


@pytest.mark.parametrize(
    "examples",
    [200, pytest.param(5000, marks=[pytest.mark.sweep, pytest.mark.long])],
    ids=["", "many"],
)
def test_no_pass_but_for_what_was_measured_by_this_code_on_this_content(examples: int) -> None:
    attack(examples)
    # The invariant would hold too where nothing ever passes.
    assert NightAdversary.passed > examples // 10


HOLES: dict[str, Callable[..., Any]] = {
    "contents": lambda names: {},
    "_same_night": lambda one, other: one.shards == other.shards,
}
"""By name in `reports.nightly.fan_out`: parts do not know their checkpoint, and a run is known by
the seconds that its parts began in."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", HOLES)
def test_the_adversary_finds_a_hole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, name, HOLES[name])
    with pytest.raises(AssertionError):
        # Two failures would come as a group, which is no AssertionError.
        one = {"phases": [Phase.generate], "report_multiple_bugs": False}
        attack(2000, derandomize=True, database=None, **one)


@pytest.mark.parametrize("hole", [None, *HOLES])
def test_moves_through_a_hole_break_the_invariant(
    hole: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control that needs no search: a kill right after or before a run is stored."""
    if hole:
        monkeypatch.setattr(driver, hole, HOLES[hole])
    machine = NightAdversary()
    machine.a_night_runs("kill", STORED if hole == "contents" else STORED + 2, True, "")
    if hole == "contents":
        machine.the_checkpoint_is_another(CONTENTS[1])
    else:
        machine.the_code_is_edited()
    with pytest.raises(AssertionError) if hole else contextlib.nullcontext():
        machine.a_night_runs("", 0, True, "")
    machine.close()


def test_a_healthy_night_that_was_interrupted_and_resumed_passes() -> None:
    for moment in range(EVENTS):
        machine = NightAdversary()
        machine.a_night_runs("kill", moment, True, "")
        before = NightAdversary.passed
        machine.a_night_runs("", 0, True, "")
        assert NightAdversary.passed == before + 1, moment
        machine.teardown()
