"""What a pytest session makes of the reports of its tests, without starting one."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest

from parity.engine.measure.measurement import Measurement
from parity.engine.programs.exits import OsExit
from reports.nightly.pytest_session import (
    Collector,
    NoExit,
    Planner,
    WorkerPlanner,
    _of_a_subject,
    distinct,
    measures,
)
from reports.provenance import environment
from reports.registry import outcome
from reports.store.schema import RunKind, StoreError
from reports.verdict.decide import ExitCode, Word
from stability.core.findings import Severity
from tests.reports.nights import measurement

CODES = pytest.ExitCode


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a configuration, an item or a report of pytest is none of them.

    jaxtyping checks the tested module (`tests.annotations.NAMES`), and can be switched off.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Config:
    """The options of a session."""

    def __init__(self, root: Path, **options: str) -> None:
        self.rootpath, self.options = root, options
        self.workeroutput: dict[str, Any] = {}

    def getoption(self, name: str, default: str = "") -> str:
        return self.options.get(name, default)


def collector(tmp_path: Path, judged: bool = True, **options: str) -> Collector:
    return Collector(Config(tmp_path, **options), tmp_path / "runs", judged)  # pyright: ignore


def test_the_plugin_needs_no_xdist(tmp_path: Path) -> None:
    """pytest refuses a hook that none of its plugins calls, unless the hook is optional."""
    plugins = pytest.PytestPluginManager()
    plugins.register(collector(tmp_path))
    plugins.check_pending()


def report(test: str, *rows: Measurement, when: str = "call", outcome: str = "passed") -> Any:
    """A report of a test that uses the fixture, as pytest and the plugin make it."""
    told = SimpleNamespace(
        nodeid=test,
        when=when,
        longreprtext="E  boom\nwhy",
        measurements=[asdict(m) for m in rows],
        **{name: outcome == name for name in ("failed", "skipped", "passed")},
    )
    return told


def item(*fixtures: str, mark: str = "", nodeid: str = "") -> Any:
    """A test that uses fixtures and has a mark."""
    marks = {mark: object()}
    return SimpleNamespace(fixturenames=fixtures, get_closest_marker=marks.get, nodeid=nodeid)


def test_a_test_measures_where_it_asks_for_the_fixture() -> None:
    assert measures(item("a", "b", "c", "d", "numerics"))
    assert not measures(item("a"))
    # A test that runs once for each port has to measure, however it compares them.
    assert measures(item("a", mark="ports")) and not measures(item("a", mark="slow"))


def test_the_plan_is_what_was_selected_and_what_could_not_be_collected(tmp_path: Path) -> None:
    planner = Planner(Config(tmp_path))  # pyright: ignore[reportArgumentType]
    for name, failed, skipped in (("a", True, False), ("b", False, True), ("c", False, False)):
        planner.pytest_collectreport(
            SimpleNamespace(nodeid=name, failed=failed, skipped=skipped)  # pyright: ignore
        )
    planner.pytest_collectreport(SimpleNamespace(nodeid="", failed=True, skipped=False))  # pyright: ignore
    assert planner.uncollected == {
        "a": "was not collected",
        "b": "skipped itself",
        "the session": "was not collected",
    }
    items = [item("numerics", nodeid="x"), item(nodeid="y")]
    planner.pytest_collection_finish(SimpleNamespace(items=items))  # pyright: ignore
    assert planner.planned == {"x"}
    worker = WorkerPlanner(Config(tmp_path))  # pyright: ignore[reportArgumentType]
    worker.planned, worker.uncollected = {"b", "a"}, {"m": "skipped itself"}
    worker.pytest_sessionfinish()
    made = collector(tmp_path)
    made.pytest_xdist_node_collection_finished(None, ["a", "b", "c"])
    made.planned, made.uncollected = {"z"}, {"n": "skipped itself"}
    made.pytest_testnodedown(SimpleNamespace(), "died")
    assert not made.plan_was_sent and made._suite(False).planned == 5
    made.pytest_testnodedown(SimpleNamespace(workeroutput=worker.config.workeroutput), None)  # pyright: ignore
    assert made.plan_was_sent and made.planned == {"a", "b", "z"}
    assert made.uncollected == {"m": "skipped itself", "n": "skipped itself"}
    suite = made._suite(False)
    # In the same order whichever worker answers first.
    assert suite.planned == 5 and suite.reason.startswith("m skipped itself; n skipped itself; ")


def drawn(rng: random.Random, tmp_path: Path) -> tuple[Collector, dict[str, str], bool]:
    """A session of a few tests, and what became of each."""
    made, fates = collector(tmp_path), {}
    fated = ("good", "good", "failed", "late", "silent", "skipped", "unreached", "broken", "noted")
    for turn in range(rng.randrange(1, 6)):
        name, fate = f"t{turn}", rng.choice(fated)
        row, fates[name] = measurement(case=name), fate
        made.planned.add(name)
        if fate in ("good", "late"):
            made.pytest_runtest_logreport(report(name, row))
        if fate == "failed":
            made.pytest_runtest_logreport(report(name, row, outcome="failed"))
        if fate == "late":
            made.pytest_runtest_logreport(report(name, when="teardown", outcome="failed"))
        if fate == "silent":
            made.pytest_runtest_logreport(report(name))
        if fate == "skipped":
            made.pytest_runtest_logreport(report(name, outcome="skipped"))
        if fate == "broken":
            # Its fixture failed before the test was called.
            made.pytest_runtest_logreport(report(name, when="setup", outcome="failed"))
        if fate == "noted":
            # It failed before it recorded anything.
            made.pytest_runtest_logreport(report(name, outcome="failed"))
    interrupted = rng.random() < 0.2
    if rng.random() < 0.3:
        made.uncollected["m"] = "was not collected"
    return made, fates, interrupted


def test_what_was_planned_and_not_measured_leaves_the_suite_incomplete(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(200):
        made, fates, interrupted = drawn(rng, tmp_path)
        suite = made._suite(interrupted)
        by_fate = {
            fate: sorted(n for n, f in fates.items() if f == fate) for fate in fates.values()
        }
        done = [n for n, fate in fates.items() if fate in ("good", "late", "failed", "noted")]
        reasons = ["m was not collected"] * len(made.uncollected)
        reasons += ["the session was interrupted"] * interrupted
        unreached = sorted(by_fate.get("unreached", []) + by_fate.get("broken", []))
        for what, tests in (
            ("did not run", unreached),
            ("skipped", by_fate.get("skipped", [])),
            ("recorded nothing", by_fate.get("silent", [])),
        ):
            reasons += [f"{what}: {', '.join(tests)}"] if tests else []
        assert suite.planned == len(fates) + len(made.uncollected)
        assert (suite.name, suite.executed) == ("pytest", len(done))
        assert suite.reason == "; ".join(reasons)
        assert suite.status == ("failed" if reasons else "ran")
        # Every failure is a finding, whatever was measured.
        failed = {n for n, f in fates.items() if f in ("failed", "late", "broken", "noted")}
        assert {f.subject for f in made.findings} == failed
        for found in made.findings:
            phase = {"late": "teardown", "broken": "setup"}.get(fates[found.subject], "call")
            assert found.message == f"failed in {phase}: why"
            assert found.severity is Severity.ERROR and found.value > found.threshold


def test_a_long_reason_is_cut(tmp_path: Path) -> None:
    made = collector(tmp_path)
    made.planned = {f"test_{i:040d}" for i in range(50)}
    reason = made._suite(False).reason
    assert len(reason) == 400 and reason.startswith(f"did not run: {min(made.planned)}, ")


def test_what_tests_record_keeps_its_numbers_and_each_key_once() -> None:
    rng = random.Random(1)
    for _ in range(200):
        records = []
        for _ in range(rng.randrange(1, 9)):
            row = measurement(
                case=rng.choice("ab"), quantity=rng.choice("xy"), value=rng.choice((1e-7, 2e-7))
            )
            records.append((rng.choice(("t1", "t2", "t3")), row))
        rows, _ = distinct(records, [])
        assert len({m.key for m in rows}) == len(rows) == len(records)
        assert [m.key for m in rows] == sorted(m.key for m in rows)
        assert sorted((m.quantity, m.value) for m in rows) == sorted(
            (m.quantity, m.value) for _, m in records
        )
        assert all(m.case.split(" [")[0] in ("a", "b") for m in rows)
        # The order in which workers answer has no influence on what one test measured alone.
        tests = sorted({test for test, _ in records})
        other = [r for test in reversed(tests) for r in records if r[0] == test]
        assert distinct(other, [])[0] == rows
        # The first test by its id keeps the name of its case.
        first = {m.key for test, m in records if test == tests[0]}
        assert first <= {m.key for m in rows}


def test_rows_that_belong_together_are_renamed_together() -> None:
    """A case that two tests measure is two cases, each with all of its rows."""
    one = [measurement(quantity=q) for q in "xy"]
    rows, documents = distinct(
        [*(("t2", m) for m in one), *(("t1", m) for m in one), *(("t1", m) for m in one)],
        [("t2", {"title": "baseline"}), ("t1", {"title": "baseline"}), ("t1", {"title": "other"})],
    )
    cases = {case: [m.quantity for m in rows if m.case == case] for case in {m.case for m in rows}}
    assert cases == {
        "baseline": ["x", "y"],
        "baseline [t1]": ["x", "y"],
        "baseline [t2]": ["x", "y"],
    }
    # Tests that share a case and no key need no other names.
    apart, _ = distinct([("t1", one[0]), ("t2", one[1])], [])
    assert [m.case for m in apart] == ["baseline"] * 2
    # A port's document has the name of its rows.
    assert [d["title"] for d in documents] == ["baseline", "baseline [t2]", "other"]
    # So has the second of one test.
    twice = [("t1", {"title": "baseline", "n": n}) for n in range(2)]
    _, documents = distinct([("t1", m) for m in one * 2], twice)
    assert [(d["title"], d["n"]) for d in documents] == [("baseline", 0), ("baseline [t1]", 1)]
    again = [("t1", one[0])] * 4
    assert [m.case for m in distinct(again, [])[0]] == [
        "baseline",
        "baseline [t1 #2]",
        "baseline [t1 #3]",
        "baseline [t1]",
    ]


@pytest.mark.parametrize(
    ("options", "selected"),
    [
        ({}, ("everything",)),
        ({"-m": "not sweep"}, ("not sweep",)),
        ({"-k": "norm"}, ("-k norm",)),
        ({"-m": "a", "-k": "b"}, ("a", "-k b")),
    ],
)
def test_a_session_is_a_selection(
    tmp_path: Path, options: dict[str, str], selected: tuple[str, ...]
) -> None:
    assert collector(tmp_path, **options)._selection() == selected


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize(
    ("exits", "answer"),
    [
        (CODES.OK, lambda judged: CODES.NO_TESTS_COLLECTED),
        (CODES.INTERRUPTED, lambda judged: ExitCode.INCOMPLETE if judged else CODES.INTERRUPTED),
        (CODES.TESTS_FAILED, lambda judged: CODES.TESTS_FAILED),
    ],
)
def test_a_session_that_measured_nothing_is_not_green(
    tmp_path: Path, judged: bool, exits: Any, answer: Any
) -> None:
    made, session = collector(tmp_path, judged), SimpleNamespace(exitstatus=int(exits))
    made.pytest_sessionfinish(session, exits)  # pyright: ignore[reportArgumentType]
    assert session.exitstatus == answer(judged)
    assert [line.startswith("NOT GREEN: no test recorded") for line in made.lines] == [True]
    made.uncollected = {"m": "was not collected"}
    made.pytest_sessionfinish(session, exits)  # pyright: ignore[reportArgumentType]
    assert made.lines[1].startswith("m was not collected: fix it")


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("exits", [CODES.OK, CODES.TESTS_FAILED, CODES.INTERRUPTED])
@pytest.mark.parametrize("verdict", [*ExitCode, None])
def test_the_exit_status_is_the_verdict_s_unless_it_is_0(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    judged: bool,
    exits: Any,
    verdict: ExitCode | None,
) -> None:
    made, session = collector(tmp_path, judged), SimpleNamespace(exitstatus=int(exits))
    asked: list[bool] = []

    def store(interrupted: bool) -> int:
        asked.append(interrupted)
        if verdict is None:
            raise StoreError("disk full")
        return int(verdict)

    monkeypatch.setattr(made, "_store", store)
    made.pytest_runtest_logreport(report("t", measurement()))
    made.pytest_sessionfinish(session, exits)  # pyright: ignore[reportArgumentType]
    assert asked == [exits is CODES.INTERRUPTED]
    if verdict is None:
        assert session.exitstatus == (CODES.INTERNAL_ERROR if exits is CODES.OK else exits)
        assert made.lines == ["NOT GREEN: disk full"]
        return
    assert session.exitstatus == (verdict if verdict and judged else exits)
    todo = {3: "run the tests", 4: "nothing is wrong with the command"}
    told = f"exit status {int(verdict)} is the verdict's, not pytest's: "
    told += todo.get(int(verdict), "the page in the folder above says what fails first")
    assert len(made.lines) == bool(verdict and judged and verdict != exits)
    assert all(line.startswith(told) for line in made.lines)


def test_a_session_is_stored_with_its_plan_and_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = []
    decision = SimpleNamespace(
        word=Word.PASS, sentence="All hold.", exit_code=ExitCode.CHANGED if False else ExitCode.PASS
    )

    def store(root: Path, run: Any, told: Any) -> Any:
        stored.append((root, run))
        return SimpleNamespace(decision=decision, folder=root / run.id)

    monkeypatch.setattr(outcome, "store", store)
    made = collector(tmp_path, **{"--reference": "recorded", "-k": "x"})
    made.planned = {"a", "b"}
    rows = [measurement(case=name) for name in "ab"]
    for name, row in zip("ba", rows[::-1], strict=True):
        made.pytest_runtest_logreport(report(name, row))
    assert made._store(interrupted=False) == 0
    [(root, run)] = stored
    manifest = run.manifest
    assert (root, manifest.kind) == (tmp_path / "runs", RunKind.PYTEST)
    assert [m.case for m in run.measurements] == ["a", "b"] and run.findings == ()
    assert manifest.environment.reference.kind == "recorded"
    assert manifest.selected == ("-k x",)
    [suite] = manifest.suites
    assert (suite.planned, suite.executed, suite.status) == (2, 2, "ran")
    assert manifest.durations.keys() == {"pytest"} and manifest.durations["pytest"] >= 0
    # The tolerances in force, as in a night.
    assert manifest.tolerances and manifest.seams
    first, second, folder = made.lines
    assert first.startswith("numerics run: 2 measurements of 2 tests: JAX on cpu (")
    assert "compared with the float64 oracle and megalodon-hf recorded" in first
    assert (second, folder) == ("PASS: All hold.", str(root / run.id))
    assert made.pytest_report_header().endswith(f"are stored in {tmp_path / 'runs'}")
    for interrupted, sent in itertools.product((True, False), repeat=2):
        made.plan_was_sent, made.collected = sent, {"c"}
        made._store(interrupted)
        [suite] = stored[-1][1].manifest.suites
        assert suite.planned == (2 if sent else 3)
        assert ("interrupted" in suite.reason) == interrupted


@pytest.mark.parametrize("others", [False, True])
def test_a_session_of_ports_alone_is_of_their_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """With a row of Megalodon among them it is a session of Megalodon that has ports too."""
    stored = []
    decision = SimpleNamespace(word=Word.REGRESSED, sentence="Why.", exit_code=ExitCode.REGRESSION)

    def store(root: Path, run: Any, told: Any) -> Any:
        stored.append(run)
        told("not printed")
        return SimpleNamespace(decision=decision, folder=root / run.id)

    monkeypatch.setattr(outcome, "store", store)
    made = collector(tmp_path, **{"--reference": "recorded"})
    told = report("t", measurement(case="a b", suite="p"))
    sides = {"original": "a torch module", "port": "a function"}
    told.ports = [{"name": "p", "title": "a b", "holds": True, "sides": sides, "versions": {}}]
    made.pytest_runtest_logreport(told)
    if others:
        made.pytest_runtest_logreport(report("u", measurement(case="c", suite="parity")))
    assert made._store(interrupted=False) == int(ExitCode.REGRESSION)
    [run] = stored
    assert [document["title"] for document in run.manifest.ports] == ["a b"]
    assert run.manifest.without_megalodon is not others
    assert bool(run.manifest.seams) is others
    first, second, _ = made.lines
    originals = "compared with its originals (a b: a torch module)"
    assert first.endswith(originals) is not others
    assert second == "REGRESSED: Why."


@pytest.mark.parametrize(
    ("row", "of_megalodon"),
    [
        ({"suite": "parity"}, True),
        ({"suite": "mla-moe", "edge": "port64:original64"}, True),
        ({"suite": "", "edge": "jax64:oracle"}, True),
        # Of a user: a port by its title, which may be that of a suite, and a row made by hand.
        ({"suite": "mlp", "edge": "port64:original64"}, False),
        ({"suite": "port", "edge": "port64:original64"}, False),
        ({"suite": "", "edge": "mine:theirs"}, False),
    ],
)
def test_rows_of_a_user_s_tests_name_neither_our_commit_nor_megalodon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, str], of_megalodon: bool
) -> None:
    """Rows that a test gave to `numerics` itself, without the report of a port."""
    stored = []
    decision = SimpleNamespace(word=Word.PASS, sentence="All hold.", exit_code=ExitCode.PASS)

    def store(root: Path, run: Any, told: Any) -> Any:
        stored.append(run)
        return SimpleNamespace(decision=decision, folder=root / run.id)

    monkeypatch.setattr(outcome, "store", store)
    made = collector(tmp_path, **{"--reference": "recorded"})
    made.pytest_runtest_logreport(report("t", measurement(**row)))
    assert made._store(interrupted=False) == int(ExitCode.PASS)
    [run], manifest = stored, stored[0].manifest
    assert run.manifest.without_megalodon is not of_megalodon
    # The folder of the tests is no git checkout; ours is one.
    assert bool(manifest.commit) is of_megalodon
    assert manifest.environment.reference.kind == ("recorded" if of_megalodon else None)
    assert ("megalodon-hf" in made.lines[0]) is of_megalodon
    assert made.lines[0].endswith("by the tolerances of its tests") is not of_megalodon


def test_a_module_that_would_end_the_session_is_not_collected() -> None:
    """And a test that would is an error; what they answer otherwise is passed on."""
    guard, collector = NoExit(), SimpleNamespace(nodeid="test_a.py")
    hook = guard.pytest_make_collect_report(collector)  # pyright: ignore[reportArgumentType]
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.throw(OsExit(7))
    report = ended.value.value
    assert (report.nodeid, report.outcome, report.result) == ("test_a.py", "failed", [])
    assert report.longrepr == "test_a.py called os._exit(7)"
    for hook in (
        guard.pytest_make_collect_report(collector),  # pyright: ignore[reportArgumentType]
        guard.pytest_runtest_setup(),
        guard.pytest_runtest_call(),
        guard.pytest_runtest_teardown(),
    ):
        next(hook)
        with pytest.raises(OsExit):
            os._exit(3)
        with pytest.raises((StopIteration, OsExit)):
            hook.send("answer")


def test_red_lines_are_those_that_are_not_green(tmp_path: Path) -> None:
    made, written = collector(tmp_path), []
    made.lines = ["NOT GREEN: why", "fine"]
    terminal = SimpleNamespace(write_line=lambda line, red: written.append((line, red)))
    made.pytest_terminal_summary(terminal)
    assert written == [("NOT GREEN: why", True), ("fine", False)]


def test_a_report_without_the_fixture_measures_nothing(tmp_path: Path) -> None:
    made = collector(tmp_path)
    other = report("t", outcome="failed")
    del other.measurements
    made.pytest_runtest_logreport(other)
    assert made.planned == set() and not made.records
    assert [f.subject for f in made.findings] == ["t"]
    row = replace(measurement(), note="n", deterministic=False)
    told = report("u", row)
    told.ports = ({"title": "p"}, {"title": "q"})
    made.pytest_runtest_logreport(told)
    assert made.records == [("u", row)]
    assert made.ports == [("u", {"title": "p"}), ("u", {"title": "q"})]


class SubtestReport(SimpleNamespace):
    """What pytest reports of a part of a test, by the name of its class alone."""


def test_a_test_of_which_a_part_was_skipped_is_not_executed(tmp_path: Path) -> None:
    """What that part would have measured is missing, whatever else the test recorded."""
    made = collector(tmp_path)
    for name in ("recorded", "silent", "whole"):
        for skipped in (name != "whole", False):
            part = SubtestReport(nodeid=name, when="call", failed=False, skipped=skipped)
            made.pytest_runtest_logreport(part)  # pyright: ignore[reportArgumentType]
        rows = [] if name == "silent" else [measurement(case=name)]
        made.pytest_runtest_logreport(report(name, *rows))
    suite = made._suite(interrupted=False)
    assert (suite.planned, suite.executed, suite.status) == (3, 1, "failed")
    assert suite.reason == "skipped: recorded, silent"


@pytest.mark.parametrize("name", ["parity", "mla-moe"])
def test_a_port_that_is_called_like_a_suite_of_a_subject_is_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    decision = SimpleNamespace(word=Word.PASS, sentence="All hold.", exit_code=ExitCode.PASS)
    stored = []

    def store(root: Path, run: Any, told: Any) -> Any:
        stored.append(run)
        return SimpleNamespace(decision=decision, folder=root / run.id)

    monkeypatch.setattr(outcome, "store", store)
    made = collector(tmp_path, **{"--reference": "recorded"})
    told = report("t", measurement(case="a title", suite=name, edge="port64:original64"))
    sides = {"original": "a torch module", "port": "a function"}
    port = {"name": name, "title": "a title", "holds": True, "sides": sides, "versions": {}}
    told.ports = [port]
    made.pytest_runtest_logreport(told)
    made._store(interrupted=False)
    assert stored[0].manifest.without_megalodon
    assert "compared with its originals (a title: a torch module)" in made.lines[0]


def test_a_measurement_of_another_suite_is_none_of_a_subject_whatever_its_edge() -> None:
    for suite, ours in (("", True), ("mine", False), ("parity", True)):
        assert _of_a_subject(measurement(suite=suite, edge="jax32:oracle")) is ours


def test_a_test_that_was_only_torn_down_is_not_executed(tmp_path: Path) -> None:
    made = collector(tmp_path)
    made.pytest_runtest_logreport(report("t", when="setup", outcome="failed"))
    made.pytest_runtest_logreport(report("t", when="teardown"))
    made.pytest_runtest_logreport(report("u", measurement()))
    suite = made._suite(interrupted=False)
    # Both report with the fixture, so both were planned, whoever collected them.
    assert (suite.planned, suite.executed, suite.reason) == (2, 1, "did not run: t")


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "failed"), ("E  boom\nwhy\n\n", "why"), (f"{'a' * 9}\n{'x' * 500}", "x" * 500)],
    ids=["nothing", "two lines", "long"],
)
def test_a_failure_is_told_by_its_last_line(tmp_path: Path, text: str, told: str) -> None:
    made = collector(tmp_path)
    failed = report("t", outcome="failed")
    failed.longreprtext = text
    made.pytest_runtest_logreport(failed)
    assert [f.message for f in made.findings] == [f"failed in call: {told}"[:400]]


def test_a_session_says_how_many_tests_it_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = SimpleNamespace(word=Word.INCOMPLETE, sentence="Why.", exit_code=ExitCode.INCOMPLETE)
    done = SimpleNamespace(decision=decision, folder=tmp_path)
    monkeypatch.setattr(outcome, "store", lambda *_: done)
    made = collector(tmp_path, **{"--reference": "recorded"})
    made.planned = {"t", "u", "v"}
    for name in "tu":
        made.pytest_runtest_logreport(report(name, measurement(case=name, edge="mine:theirs")))
    assert made._store(interrupted=False) == int(ExitCode.INCOMPLETE)
    assert made.lines[0].startswith("numerics run: 2 measurements of 2 tests: ")


def test_a_module_that_would_end_the_session_well_is_not_collected_either() -> None:
    hook = NoExit().pytest_make_collect_report(SimpleNamespace(nodeid="a"))  # pyright: ignore
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.throw(OsExit(0))
    assert (ended.value.value.outcome, ended.value.value.longrepr) == (
        "failed",
        "a called os._exit(0)",
    )


def test_the_plan_is_of_all_workers_and_every_line_of_the_summary_is_written(
    tmp_path: Path,
) -> None:
    made, written = collector(tmp_path), []
    for ids in (["a"], ["b"]):
        made.pytest_xdist_node_collection_finished(None, ids)
    assert made.collected == {"a", "b"}
    made.lines = ["1", "2", "3", "4"]
    made.pytest_terminal_summary(SimpleNamespace(write_line=lambda line, red: written.append(line)))
    assert written == made.lines


def test_a_test_that_failed_is_a_finding_of_the_stored_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []
    decision = SimpleNamespace(word=Word.REGRESSED, sentence="", exit_code=ExitCode.REGRESSION)
    monkeypatch.setattr(
        outcome,
        "store",
        lambda root, run, told: (
            stored.append(run) or SimpleNamespace(decision=decision, folder=root / run.id)
        ),
    )
    made = collector(tmp_path)
    made.pytest_runtest_logreport(report("t", measurement(edge="a:b", suite=""), outcome="failed"))
    assert made._store(interrupted=False) == int(ExitCode.REGRESSION)
    assert [(f.subject, f.severity) for f in stored[0].findings] == [("t", Severity.ERROR)]
    assert made.lines[2] == str(tmp_path / "runs" / stored[0].id)


def test_a_worker_sends_its_plan_in_order(tmp_path: Path) -> None:
    worker = WorkerPlanner(Config(tmp_path))  # pyright: ignore[reportArgumentType]
    names = [f"t{n:02d}" for n in range(20)]
    worker.planned = set(names)
    worker.pytest_sessionfinish()
    assert names in worker.config.workeroutput.values()  # pyright: ignore


def test_a_worker_without_a_test_that_measures_has_sent_its_plan(tmp_path: Path) -> None:
    """So tests that do not measure are not planned, whatever the workers collected."""
    made, worker = collector(tmp_path), WorkerPlanner(Config(tmp_path))  # pyright: ignore
    made.pytest_xdist_node_collection_finished(None, ["a"])
    worker.pytest_sessionfinish()
    made.pytest_testnodedown(SimpleNamespace(workeroutput=worker.config.workeroutput), None)  # pyright: ignore
    assert made.plan_was_sent and made._suite(False).planned == 0


def test_what_a_fixture_compared_is_stored_beside_what_its_test_did(tmp_path: Path) -> None:
    """Each phase of a test reports what it measured itself."""
    made, phases = collector(tmp_path), ["setup", "call", "teardown"]
    for when in phases:
        told = report("t", measurement(case=when), when=when)
        told.ports = [{"title": when}]
        made.pytest_runtest_logreport(told)
    assert [document["title"] for _, document in made.ports] == phases
    assert [row.case for _, row in made.records] == phases


def test_runs_in_the_checkout_of_the_tests_do_not_make_it_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    decision = SimpleNamespace(word=Word.PASS, sentence="All hold.", exit_code=ExitCode.PASS)
    done = SimpleNamespace(decision=decision, folder=tmp_path)
    monkeypatch.setattr(outcome, "store", lambda *_: done)
    make = environment.new_manifest
    monkeypatch.setattr(
        environment, "new_manifest", lambda *them: (asked.append(them), make(*them))[1]
    )
    made = collector(tmp_path)
    made.pytest_runtest_logreport(report("t", measurement(edge="mine:theirs", suite="")))
    made._store(interrupted=False)
    assert asked == [(made.started, RunKind.PYTEST, tmp_path, tmp_path / "runs")]
