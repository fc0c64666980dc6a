"""A machine on which a night costs nothing: what its parts measure is made up, and written down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from parity.engine.measure.contract import Gate
from parity.engine.measure.measurement import Verdict
from parity.executors import sweep
from parity.executors.identity import Identity, Watch
from parity.executors.inputs import contents
from parity.executors.item import Answer, Item
from parity.executors.sweep import Answers
from parity.megalodon.recordings import RecordedReference
from parity.tolerances import TABLE
from reports.nightly import fan_out as driver
from reports.provenance.environment import describe
from reports.subject import Tables
from reports.suite_run import SuiteRun
from stability.core.findings import Finding, Severity
from stability.suite import Checkpoint
from tests.helpers import double
from tests.reports.nightly.test_fan_out import Inline
from tests.reports.nights import measurement

CASES = ("length_c", "stream_tokens")
PARTS = (*CASES, "(probes)")
CONTENTS = (b"one", b"two", b"bad")
"""Of the checkpoint: the third one fails a gate."""


@dataclass(frozen=True)
class Source:
    """What a number was measured by, and on."""

    case: str
    code: str
    content: str
    planted: bool


@dataclass
class World:
    """The machine that a night runs on, and a record of every number it ever gave.

    Attributes:
        checkpoint: folder whose one file decides whether a gate holds.
        edited: files of the packages that changed since the driver began.
        bug: whether the code on disk has a bug in it.
        code: digest of the code that the driver began with.
        planted: whether the night plants a bug in itself.
        measured: source of each measurement and finding, by the number in its note.
        now: time of day, which stands still while a night runs.
        moment: events until `event` happens.
    """

    checkpoint: Path
    edited: list[str] = field(default_factory=list)
    bug: bool = False
    code: str = "c0de0"
    planted: bool = False
    measured: dict[str, Source] = field(default_factory=dict)
    now: datetime = datetime(2026, 11, 23, tzinfo=UTC)
    moment: int = -1
    event: Callable[[], None] = lambda: None

    def tick(self) -> None:
        """Let an event pass: at the chosen one, what the adversary planned happens."""
        self.moment -= 1
        if self.moment == -1:
            self.event()

    def note(self, case: str) -> str:
        """Measure something, and return the number it goes by."""
        self.tick()
        code, planted = f"c0de{int(self.bug)}", self.planted
        [content] = contents([str(self.checkpoint)]).values()
        note = f"number {len(self.measured)}"
        self.measured[note] = Source(case, code, content, planted)
        return note

    def healthy(self) -> bool:
        return not (self.planted or self.bug) and self.content() != b"bad"

    def content(self) -> bytes:
        return (self.checkpoint / "weights").read_bytes()

    def parity(self, cases: Sequence[Any], *_: Any) -> SuiteRun:
        """Measure one gate for each case; the last one tells a bug, the others do not."""
        suite = SuiteRun("parity", planned=len(cases))
        for case in cases:
            row = measurement(case=case.name, identity=case.name, note=self.note(case.name))
            suite.contract.append(Gate.of(row))
            if case.name == CASES[-1] and not self.healthy():
                row = replace(row, value=9e-6, verdict=Verdict.FAIL)
            suite.measurements.append(row)
            suite.executed += 1
        return suite

    def probes(self, *_: Any) -> SuiteRun:
        """Measure one fact."""
        row = Finding("survival", Severity.OK, "w", "frozen_fraction", 0.1, 0.5, "", "")
        row = replace(row, message=self.note(PARTS[-1]))
        return SuiteRun("stability", 1, 1, findings=[row])

    @contextlib.contextmanager
    def plant(self) -> Iterator[None]:
        self.planted = True
        try:
            yield
        finally:
            self.planted = False

    @contextlib.contextmanager
    def in_place(self, pins: Path) -> Iterator[None]:
        """Context in which nights run in this world."""
        line, store, discard = sweep._line, driver.store, Answers.discard

        def told(function: Callable[..., Any]) -> Callable[..., Any]:
            def first(*arguments: Any) -> Any:
                self.tick()
                result = function(*arguments)
                self.tick()
                return result

            return first

        model = SimpleNamespace(size=3, config=SimpleNamespace(to_dict=dict))
        opened = double(Checkpoint, folder=self.checkpoint, training=None, load=lambda: model)
        recorded = RecordedReference()
        described = describe(recorded)
        patches: dict[str, Any] = {
            # Where a part writes: as fast as the folder of the world.
            "tempfile.tempdir": str(pins.parent),
            "reports.nightly.run.datetime": SimpleNamespace(now=lambda zone: self.now),
            "reports.subjects.megalodon.suites.run_parity": self.parity,
            "reports.subjects.megalodon.suites.run_stability": self.probes,
            "reports.subjects.megalodon.checkpoint.open_checkpoint": lambda folder: opened,
            "parity.megalodon.suite.choose_reference": lambda asked: recorded,
            # The page of a running night, which has no verdict, is a third of the time.
            "reports.nightly.tonight.render": lambda *_: "",
            # The tolerances in force, which no verdict reads, are two thirds of a run.json.
            "reports.nightly.document.tables": lambda: Tables(TABLE[:2]),
            "reports.nightly.run.describe": lambda asked: described,
            "reports.nightly.run.fault_by_name": lambda name: SimpleNamespace(
                name=name, planted=self.plant
            ),
            "reports.nightly.fan_out.expected_seconds": lambda out, parts: (
                dict.fromkeys(parts, 1.0),
                True,
            ),
            "reports.nightly.fan_out.store": told(store),
            "reports.verdict.pins.FOLDER": pins,
            "reports.registry.outcome.render": lambda *_: "",
            "reports.registry.outcome.renew_runs_page": quiet_pages,
            # Versions are read once, not in each of thousands of nights.
            "importlib.metadata.version": version,
            "reports.provenance.code.stale_bytecode": list,
            "reports.provenance.code.git_state": lambda folder: ("0" * 40, False),
            "reports.provenance.environment.git_state": lambda *_: ("0" * 40, False),
            "reports.provenance.code.code": lambda: self.code,
            "parity.executors.identity.code": lambda: self.code,
            "parity.executors.item.code": lambda: self.code,
            "parity.executors.identity.changed_files": lambda: list(self.edited),
            "parity.executors.item._PACKAGES": Watch(every=0.0),
            "parity.executors.item._own_identity": Identity.here,
            # The library's own takes futures that are done in the order of their addresses: of a
            # failing example that Hypothesis tries again, another order would be another example.
            "parity.executors.sweep.as_completed": list,
            "parity.executors.sweep._line": told(line),
            "parity.executors.sweep.Answers.discard": told(discard),
        }
        with contextlib.ExitStack() as stack:
            for name, value in patches.items():
                stack.enter_context(mock.patch(name, value))
            yield


version = cache(metadata.version)


def quiet_pages(*_: Any) -> None:
    """Draw no page."""


@dataclass
class Ticking(Inline):
    """An executor in this process, with an event in front of each item."""

    world: World | None = None

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        futures = []
        for item in items:
            assert self.world is not None
            self.world.tick()
            futures.append(self._done(item))
        return futures
