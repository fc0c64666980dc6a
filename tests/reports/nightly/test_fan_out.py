"""A night on an executor: the run of one process, whatever becomes of its workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from parity.device import device_kind
from parity.engine.measure.contract import Gate
from parity.executors.identity import Identity
from parity.executors.item import Answer, Item, ItemError, lost, no_device, not_run, perform
from parity.executors.sweep import Answers
from parity.megalodon.cases import BYTE_LM
from reports.nightly import fan_out as module
from reports.nightly.expected import cost
from reports.nightly.fan_out import UNFINISHED, fan_out, items_of
from reports.nightly.run import Options, nightly
from reports.page.sections.facts import machine
from reports.provenance.code import Start
from reports.provenance.host import FIELDS, fingerprint
from reports.registry.outcome import store
from reports.store.manifest import PartInfo
from reports.store.runs import Run, list_runs, read_run
from reports.store.schema import StoreError
from reports.subject import CONTROLS_PART, PROBES_PART
from reports.suite_run import SuiteRun
from reports.verdict.decide import Word, decide
from stability.core.findings import Finding, Severity
from tests.helpers import cli
from tests.reports.nights import altered, finding, measurement, run

CASES = ("length_c", "stream_tokens")


@dataclass
class Inline:
    """An executor in this process, in which tests have planted what is measured."""

    name: str = "inline"
    workers: int = 1
    killed: Mapping[str, str] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        return [self._done(item) for item in items]

    def _done(self, item: Item) -> Future[Answer]:
        future: Future[Answer] = Future()
        if item.needs.gpus:
            future.set_result(not_run(item, no_device(item.needs, "this machine")))
        elif item.name in self.killed:
            future.set_result(lost(item, 3, self.killed[item.name]))
        else:
            self.ran.append(item.name)
            future.set_result(
                replace(perform(item, Identity.here()), attempts=1 + (item.name == "(probes)"))
            )
        return future

    def running(self) -> Mapping[str, tuple[str, float]]:
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """A night whose three parts cost nothing."""

    def case(self: Any, case: Any, floors: Any) -> Iterator[Any]:
        yield measurement(case=case.name, identity=case.name)

    def probes(checkpoint: Any, model: Any, report: Any) -> SuiteRun:
        row = Finding("survival", Severity.OK, "w", "frozen_fraction", 0.1, 0.5, "", "")
        return SuiteRun("stability", 1, 1, findings=[row])

    def planned(case: Any, reference: Any) -> Iterator[Gate]:
        yield Gate.of(measurement(case=case.name))

    monkeypatch.setattr("parity.megalodon.suite.Suite.case", case)
    monkeypatch.setattr("parity.megalodon.contract.gates", planned)
    monkeypatch.setattr("reports.subjects.megalodon.suites.run_stability", probes)
    return Options(tmp_path / "runs", CASES, "recorded", BYTE_LM)


def quiet(line: str) -> None:
    """Say nothing."""


def facts_of(one: Run) -> dict[str, Any]:
    """Return all of a run but when, where and by whom it was measured."""
    manifest = one.manifest
    names = ("suites", "cases", "selected", "tolerances", "seams", "spreads", "checkpoint")
    return {name: getattr(manifest, name) for name in names} | {
        "rows": one.measurements,
        "findings": one.findings,
        "environment": manifest.environment,
    }


def test_a_night_of_parts_is_the_night_of_one_process(options: Options) -> None:
    lines: list[str] = []
    outcome = fan_out(options, Inline(), lines.append)
    whole = nightly(replace(options, out=options.out.parent / "whole"), quiet)
    assert facts_of(read_run(outcome.folder)) == facts_of(read_run(whole.folder))
    assert outcome.decision is not None and outcome.decision.word is Word.PASS
    parts = read_run(outcome.folder).manifest.parts
    assert [part.name for part in parts] == [*CASES, "(probes)"]
    assert len({part.fingerprint for part in parts}) == 1
    assert parts[0].cases == ("length_c",)
    # The retry is in the run, on its page and was said.
    assert [part.attempts for part in parts] == [1, 1, 2]
    assert ("workers that died and were replaced", "(probes): 1") in machine(outcome.run.manifest)
    assert any("(probes): 1 of its workers died" in line for line in lines)
    assert [info.folder for info in list_runs(options.out)[0]] == [outcome.folder]


def test_a_night_says_what_it_will_take_and_what_each_part_found(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells most begins; each part's own lines come with it, and no others."""
    seconds = {"length_c": 30.0, "stream_tokens": 100.0, "(probes)": 20.0}
    monkeypatch.setattr(module, "expected_seconds", lambda out, names: (seconds, True))
    begun: list[tuple[str, float | None]] = []

    @dataclass
    class Seen(Inline):
        def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
            begun.extend((item.name, item.expected) for item in items)
            return super().start(items)

    lines: list[str] = []
    fan_out(options, Seen(), lines.append)
    assert begun == [(name, seconds[name]) for name in ("stream_tokens", "length_c", "(probes)")]
    assert lines[0] == f"a night of 3 parts on inline: {cost(seconds, 1, True)}"
    own = [line for line in lines if "gates hold (" in line]
    # Which of several that are done comes first is not defined (`as_completed` holds a set).
    assert sorted(line.split(":")[0] for line in own) == [f"  {case}" for case in sorted(CASES)]
    assert not any(line.startswith("comparing JAX") for line in lines)
    assert [line for line in lines if line.startswith("verdict")] == ["verdict: PASS"]
    # On another machine than this one the table is a range.
    monkeypatch.setattr(module, "expected_seconds", lambda out, names: (seconds, False))
    fan_out(options, Inline(workers=2), lines.append)
    assert f"a night of 3 parts on inline: {cost(seconds, 2, False)}" in lines


def test_a_part_that_kills_its_workers_leaves_the_others_and_is_never_green(
    options: Options,
) -> None:
    outcome = fan_out(options, Inline(killed={"stream_tokens": "signal 9"}), quiet)
    assert outcome.decision is not None and outcome.decision.word is Word.INCOMPLETE
    [parity] = [s for s in outcome.run.manifest.suites if s.name == "parity"]
    assert (parity.planned, parity.executed) == (2, 1)
    assert parity.reason == "stream_tokens: killed 3 workers: signal 9"
    assert [m.case for m in outcome.run.measurements] == ["length_c"]


def test_the_files_of_a_night_are_read_again_for_a_failed_part_and_not_for_each_measured_one(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed worker may have seen a change; a large checkpoint takes long to read."""
    asked: list[bool] = []

    class Noted(Start):
        def check(self, now: bool = True) -> None:
            asked.append(now)
            super().check(now)

    monkeypatch.setattr(module, "Start", Noted)
    fan_out(options, Inline(killed={"length_c": "killed"}), quiet)
    first, *parts, last = asked
    assert first and last and sorted(parts) == [False, False, True]


def test_a_night_without_a_measured_part_names_parts_as_far_as_a_message_goes(
    options: Options,
) -> None:
    killed = dict.fromkeys((*CASES, "(probes)"), "x" * 500)
    with pytest.raises(StoreError) as refused:
        fan_out(options, Inline(killed=killed), quiet)
    start, _, reasons = str(refused.value).partition("none was measured: ")
    assert start == "expected parts of a night, but " and len(reasons) == 800
    first, second, *_ = reasons.split("; ")
    assert first.endswith(f": killed 3 workers: {'x' * 500}") and second.split(": ")[0] in killed


def test_a_part_that_no_worker_can_run_leaves_the_others_too(options: Options) -> None:
    class Without(Inline):
        def _done(self, item: Item) -> Future[Answer]:
            needs = replace(item.needs, gpus=float(item.name == "stream_tokens"))
            return super()._done(replace(item, needs=needs))

    outcome = fan_out(options, Without(), quiet)
    assert outcome.decision is not None and outcome.decision.word is Word.INCOMPLETE
    [parity] = [s for s in outcome.run.manifest.suites if s.name == "parity"]
    assert (parity.planned, parity.executed) == (2, 1)
    assert parity.reason.startswith("stream_tokens: ") and "no device" in parity.reason


def test_a_night_for_a_device_that_is_not_there_is_no_run(options: Options) -> None:
    with pytest.raises(StoreError, match=r"none was measured: .*no device"):
        fan_out(replace(options, device="cuda"), Inline(), quiet)
    assert list_runs(options.out) == ([], [])
    # A worker whose JAX has no such device does not measure on another.
    [item] = [i for i in items_of(replace(options, device="cuda")) if i.name == "length_c"]
    answer = perform(replace(item, needs=item.needs.__class__()), Identity.here())
    assert "expected to measure on cuda" in answer.reason


def test_a_checkpoint_that_is_not_there_is_refused_before_any_part_begins(options: Options) -> None:
    executor = Inline()
    missing = replace(options, checkpoint=options.out / "missing")
    with pytest.raises(FileNotFoundError, match="missing"):
        fan_out(missing, executor, quiet)
    assert executor.ran == []


@pytest.mark.few(1)
@pytest.mark.parametrize(("resume", "again"), [(True, 0), (False, 3)])
def test_finished_parts_of_a_killed_driver_are_taken(
    options: Options, monkeypatch: pytest.MonkeyPatch, resume: bool, again: int
) -> None:
    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "store", killed)
        fan_out(options, Inline(), quiet)
    second = Inline()
    outcome = fan_out(options, second, quiet, resume)
    assert len(second.ran) == again
    assert outcome.run.manifest.parts
    # A driver that was killed after it had stored the run stores no second one.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Answers, "discard", killed)
        fan_out(options, Inline(), quiet)
    stored = len(list_runs(options.out)[0])
    twice = fan_out(options, Inline(), quiet)
    assert len(list_runs(options.out)[0]) == stored
    assert twice.folder in [info.folder for info in list_runs(options.out)[0]]


def test_two_drivers_of_one_night_do_not_mix(options: Options) -> None:
    @dataclass
    class Second(Inline):
        def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
            alone = f"for this driver alone, and process {os.getpid()} on .* since 20.* has it; "
            with pytest.raises(ItemError, match=alone):
                fan_out(options, Inline(), quiet)
            # Another night in the same folder is no concern of this one.
            fan_out(replace(options, cases=CASES[:1]), Inline(), quiet)
            return super().start(items)

    fan_out(options, Second(), quiet)
    assert len(list_runs(options.out)[0]) == 2
    assert all((options.out / UNFINISHED).iterdir())


def test_parts_that_are_kept_are_those_of_a_night_with_the_same_options(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another night of the same parts neither takes nor discards them."""

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "store", killed)
        fan_out(options, Inline(), quiet)
    other, same = Inline(), Inline()
    fan_out(replace(options, device=device_kind()), other, quiet)
    fan_out(options, same, quiet)
    assert (len(other.ran), len(same.ran)) == (3, 0)


def test_a_night_has_the_findings_of_all_its_suites(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suite(name: str) -> SuiteRun:
        return SuiteRun(name, 1, 1, findings=[finding(probe=name)])

    monkeypatch.setattr("reports.nightly.run.plan_of", lambda asked: (PROBES_PART, CONTROLS_PART))
    for name in ("stability", "controls"):
        measured = partial(lambda name, *_: suite(name), name)
        monkeypatch.setattr(f"reports.subjects.megalodon.suites.run_{name}", measured)
    found = read_run(nightly(options, quiet).folder)
    assert [it.probe for it in found.findings] == ["stability", "controls"]


@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_a_night_is_measured_on_the_device_that_was_asked_for(
    options: Options, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    monkeypatch.setattr("reports.nightly.run.device_kind", lambda: there)
    asked = {"cpu": "cuda", "cuda": "cpu"}[there]
    with pytest.raises(RuntimeError, match=f"measure on {asked}, but JAX computes on {there} here"):
        nightly(replace(options, device=asked), quiet)
    assert list_runs(options.out) == ([], [])


def on(*hosts: str, value: float = 1e-6) -> Run:
    """A run whose two cases were measured on these hosts."""
    rows = [measurement(case=name, identity=name, value=value) for name in CASES]
    night = run(*rows, suites=[{"name": "parity", "status": "ran", "planned": 2, "executed": 2}])
    parts = tuple(
        PartInfo(name, host, host, f"processor {host}", 1, cases=(name,))
        for name, host in zip(CASES, hosts, strict=True)
    )
    return replace(night, manifest=replace(night.manifest, parts=parts))


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        (("a", "b"), ("a", "b"), set(CASES)),
        (("a", "b"), ("a", "c"), {"length_c"}),
        (("a", "b"), ("b", "a"), set()),
        (("a", "b"), ("a", ""), {"length_c"}),
    ],
)
def test_values_are_compared_with_those_of_their_own_host(
    before: tuple[str, str], now: tuple[str, str], changed: set[str]
) -> None:
    """Both cases gave other bits; that is a change only where the same host measured them."""
    then, today = on(*before), altered(on(*now, value=1.5e-6), id="today")
    today = replace(today, manifest=replace(today.manifest, parts=on(*now).manifest.parts))
    decision = decide(today, then)
    assert {c.case for c in decision.changes if c.what == "changed"} == changed
    assert decision.word is (Word.CHANGED if changed else Word.PASS)


def test_the_page_says_which_host_measured_what(tmp_path: Path) -> None:
    rows = dict(machine(on("a", "b").manifest))
    assert rows["measured on a: processor a, 1 threads, fingerprint a"] == "length_c"
    assert rows["measured on b: processor b, 1 threads, fingerprint b"] == "stream_tokens"
    page = store(tmp_path, on("a", "b"), quiet).page.read_text(encoding="utf-8")
    assert "processor b, 1 threads" in page


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b"), ("a", "")])
def test_a_night_of_several_machines_has_no_processor(hosts: tuple[str, str]) -> None:
    """With that of the first it would be history of that machine, whoever measured what."""
    manifest = on(*hosts).manifest
    known = dict.fromkeys(FIELDS, "known")
    manifest = replace(manifest, environment=replace(manifest.environment, host=known))
    environment = module._environment(manifest)
    if len(set(hosts)) == 1:
        assert environment == manifest.environment and fingerprint(environment)
        return
    assert environment.host == {} and fingerprint(environment) is None
    assert environment.device.name == " + ".join(sorted(f"processor {host}" for host in hosts))
    assert environment.threads == "1"


def test_hosts_of_one_processor_and_other_settings_are_several() -> None:
    manifest = on("a", "b").manifest
    parts = tuple(replace(part, processor="one") for part in manifest.parts)
    known = dict.fromkeys(FIELDS, "known")
    environment = replace(manifest.environment, host=known)
    made = module._environment(replace(manifest, parts=parts, environment=environment))
    assert made.host == {} and fingerprint(made) is None


def test_a_planted_bug_is_planted_in_every_part(options: Options) -> None:
    faulty = replace(options, fault="rope_keys_one_late")
    outcome = fan_out(faulty, Inline(), quiet)
    assert outcome.run.manifest.fault == "rope_keys_one_late"
    assert not outcome.run.manifest.whole


def test_a_night_of_the_same_second_is_another_run(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id begins alike; only a run of the same shards is the one that was stored before."""

    class Still(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 11, 23, tzinfo=tz)

    monkeypatch.setattr("reports.nightly.run.datetime", Still)
    first = fan_out(options, Inline(), quiet)
    second = fan_out(replace(options, cases=CASES[1:]), Inline(), quiet)
    assert len(list_runs(options.out)[0]) == 2 and first.folder != second.folder
    assert {m.case for m in second.run.measurements} == {CASES[1]}


def test_parts_of_a_night_know_what_was_asked_for(options: Options) -> None:
    outcome = fan_out(options, Inline(), quiet)
    assert set(outcome.run.manifest.selected) == set(CASES)
    # What is live here must not be a recording on another machine.
    references = {
        i.arguments["options"]["reference"] for i in items_of(replace(options, reference="auto"))
    }
    assert references <= {"live", "recorded"}


def test_what_does_not_go_with_an_executor_is_wrong_usage() -> None:
    for arguments, words in (
        (("--executor", "local", "--shard", "1/2"), "omit --shard"),
        (("--no-resume",), "go with --executor"),
        (("--address", "auto"), "go with --executor"),
    ):
        answer = cli("nightly", *arguments)
        assert answer.exit_code == 2 and words in answer.output


@pytest.mark.parametrize(
    ("arguments", "processors", "device", "shared"),
    [
        ((), 2, "cpu", ("local", False, "")),
        (("--executor", "local:1"), 2, "cpu", ("local:1", True, "")),
        ((), 1, "cpu", None),
        # The parts ask for a share of the GPU: without it they would each take most of its memory.
        ((), 2, "cuda", ("local", False, "cuda")),
        (("--executor", "local"), 2, "cuda", ("local", True, "cuda")),
        (("--executor", "local", "--device", "cpu"), 2, "cuda", ("local", True, "cpu")),
        # Which node has a GPU is the cluster's to know.
        (("--executor", "ray"), 2, "cuda", ("ray", True, "")),
        # An accelerator of JAX's that is none of CUDA's stays with one process.
        ((), 2, "tpu", None),
        (("--case", "length_c"), 2, "cpu", None),
        (("--shard", "1/28"), 2, "cpu", None),
    ],
)
def test_a_whole_night_is_shared_by_the_processors(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    processors: int,
    device: str,
    shared: tuple[str, bool, str] | None,
) -> None:
    seen: list[tuple[str, bool, str] | None] = []

    def elsewhere(options: Any, executor: Any, report: Any, resume: bool) -> Any:
        seen.append((executor, resume, options.device))
        raise click.exceptions.Exit(0)

    def here(*_: Any) -> Any:
        seen.append(None)
        raise click.exceptions.Exit(0)

    monkeypatch.setattr("reports.cli.measure.threads", lambda: processors)
    kind = "cpu" if device == "cpu" else "cuda"
    monkeypatch.setattr("parity.device.device_kind", lambda: kind)
    devices = ("NVIDIA H200",) if device == "cuda" else ()
    monkeypatch.setattr("parity.executors.item.accelerators", lambda: devices)
    monkeypatch.setattr("parity.executors.sweep.open_executor", lambda text, address: text)
    monkeypatch.setattr("reports.nightly.fan_out.fan_out", elsewhere)
    monkeypatch.setattr("reports.nightly.run.nightly", here)
    cli("nightly", "--reference", "recorded", "--out", str(tmp_path), *arguments)
    assert seen == [shared]


def test_every_line_of_a_part_is_told(options: Options) -> None:
    class Talking(Inline):
        def _done(self, item: Item) -> Future[Answer]:
            future: Future[Answer] = Future()
            told = {"lines": [f"  {item.name} one", f"  {item.name} two"]}
            future.set_result(replace(super()._done(item).result(), value=told))
            return future

    lines: list[str] = []
    fan_out(options, Talking(), lines.append)
    for name in (*CASES, "(probes)"):
        assert [line for line in lines if line.startswith(f"  {name} ")] == [
            f"  {name} one",
            f"  {name} two",
        ]
