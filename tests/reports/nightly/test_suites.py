"""Suites of a night: a replay is a second measurement, and a control counts where it is found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.quantization.products import BACKENDS
from parity.engine.measure.contract import Gate, breaches, contract_of
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.metrics import POOLED
from parity.faults.controls import CASE, CONTROLS
from parity.megalodon import GIVEN
from parity.megalodon import port as megalodon_port
from parity.megalodon.cases import by_name
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.megalodon.recordings import RecordedReference
from parity.megalodon.suite import Reference, Suite
from reports.subjects.megalodon import suites as module
from reports.subjects.megalodon.suites import run_controls, run_parity
from reports.subjects.meshes import suites as meshes_module
from reports.subjects.mla_moe import suites as mla_moe_module
from reports.subjects.port import suites as port_module
from reports.suite_run import SuiteRun, mark_repeats
from stability.suite import PROBES, Checkpoint
from tests.helpers import double
from tests.reports.nights import explained, failing, finding, measurement

REFERENCE = RecordedReference()
RESPONSES = {"mesh megalodon data=8": {"logits": (1e-7, 2e-7)}}
Measure = Callable[[], list[Measurement]]
Report = Callable[[str], None]


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.fixture(params=[True, False], ids=["repeats", "differs each time"])
def repeats(request: pytest.FixtureRequest) -> bool:
    """Whether the same work gives the same value again."""
    return request.param


@pytest.fixture
def measure(repeats: bool) -> Measure:
    """Measures two gates; each call gives new values, or the same ones."""
    turns = itertools.count()

    def measured() -> list[Measurement]:
        value = 0.0 if repeats else 1e-9 * next(turns)
        return [measurement(quantity=name, value=value) for name in ("logits", "loss")]

    return measured


def parity(measure: Measure, monkeypatch: pytest.MonkeyPatch, report: Report = quiet) -> SuiteRun:
    def case(self: Suite, case: Any, floors: Any) -> Iterator[Measurement]:
        yield from measure()

    monkeypatch.setattr(Suite, "case", case)
    return run_parity([by_name("length_c")], REFERENCE, report)


def known_differences(
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
    report: Report = quiet,
    only: Collection[str] = (),
) -> SuiteRun:
    monkeypatch.setattr(module, "measure_known_differences", lambda *_: measure())
    return module.run_known_differences(REFERENCE, report, only)


def products(
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
    report: Report = quiet,
    only: Collection[str] = (),
) -> SuiteRun:
    monkeypatch.setattr(module, "measure_products", lambda *_: measure())
    return module.run_products(REFERENCE, report, only)


def mla_moe(measure: Measure, monkeypatch: pytest.MonkeyPatch, report: Report = quiet) -> SuiteRun:
    pool = SimpleNamespace(first={}, measurements=[], responses={})
    answer = SimpleNamespace(kind="recorded", refusal="", versions={"transformers": ""})
    fake = SimpleNamespace(
        CASES=mla_moe_module.mla_moe.CASES[:1],
        answer=lambda *_: answer,
        side=lambda *_: None,
        compare=lambda *_, **__: SimpleNamespace(measurements=measure(), report=None),
        pooled=lambda *_: pool,
    )
    monkeypatch.setattr(mla_moe_module, "mla_moe", fake)
    monkeypatch.setattr(mla_moe_module.mla_moe_contract, "gates", lambda *_: ())
    monkeypatch.setattr(port_module.accounts, "of_port", lambda report: None)
    found = SimpleNamespace(message="", value=0.0)
    monkeypatch.setattr(mla_moe_module, "reference_scatter", lambda *_: found)
    return mla_moe_module.run_mla_moe(REFERENCE, report)


@dataclass(frozen=True)
class FakePort:
    """What `replace` is asked to change of a port."""

    name: str = ""
    case: str = ""
    device: str = ""


def port(
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
    report: Report = quiet,
    only: Collection[str] = (),
) -> SuiteRun:
    def compare(made: FakePort) -> Any:
        rows = measure()
        return SimpleNamespace(measurements=rows, contract=[Gate.of(m) for m in rows])

    monkeypatch.setattr(megalodon_port, "port", lambda *_, **__: FakePort())
    monkeypatch.setattr(port_module, "compare_port", compare)
    monkeypatch.setattr(port_module.accounts, "of_port", lambda report: None)
    return port_module.run_port(REFERENCE, report, only)


def mesh(
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
    report: Report = quiet,
    only: Collection[str] = (),
) -> SuiteRun:
    monkeypatch.setattr(meshes_module.meshes, "measure", lambda only: (measure(), RESPONSES))
    return meshes_module.run_mesh(REFERENCE, report, only)


@pytest.mark.parametrize("suite", [parity, known_differences, products, mla_moe, port])
def test_a_replay_is_measured_again(
    suite: Callable[..., SuiteRun],
    measure: Measure,
    repeats: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay that is compared with itself would repeat whatever it measured."""
    done = suite(measure, monkeypatch)
    assert not done.reason.count("Error"), done.reason
    assert [row.quantity for row in done.measurements] == ["logits", "loss"]
    assert {row.deterministic for row in done.measurements} == {repeats}


def test_a_known_difference_that_was_not_measured_is_missing(monkeypatch) -> None:
    done = known_differences(lambda: [measurement(quantity=KNOWN_DIFFERENCES[0].id)], monkeypatch)
    assert (done.planned, done.executed) == (len(KNOWN_DIFFERENCES), 1)
    assert not done.result().whole


def test_a_comparison_has_the_seconds_until_its_last_row(monkeypatch) -> None:
    now = [0.0]

    def rows() -> Iterator[Measurement]:
        for edge, seconds in (("first", 2.0), ("first", 1.0), ("second", 4.0)):
            now[0] += seconds
            yield measurement(case="plain", edge=edge)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    suite = SuiteRun("parity", 1)
    for _ in suite.timed(rows()):
        # What is done with a row is no part of measuring it.
        now[0] += 100.0
    assert suite.times == {("plain", "first"): 3.0, ("plain", "second"): 4.0}
    # A second look at the same work adds to it.
    assert len(list(suite.timed(rows()))) == 3
    assert suite.times == {("plain", "first"): 6.0, ("plain", "second"): 8.0}


@pytest.mark.parametrize("suite", [parity, known_differences, products])
def test_what_is_compared_one_after_the_other_is_timed(suite, measure, monkeypatch) -> None:
    done = suite(measure, monkeypatch)
    assert done.times.keys() == {(m.case, m.edge) for m in done.measurements}
    assert 0 < sum(done.times.values()) <= done.seconds


@pytest.mark.parametrize("again", ["one", "two", "one two three", ""])
def test_a_replay_must_find_the_pairs_that_a_port_had_before(
    again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are found by values: what the second run pairs is what the first should have gated."""
    turns = iter(["one two", again])

    def measured() -> list[Measurement]:
        return [measurement(quantity=name) for name in next(turns).split()]

    suite = port(measured, monkeypatch)
    found = breaches(contract_of(suite.contract), suite.measurements)
    assert bool(found)
    # Negative control: the same pairs twice.
    turns = iter(["one two", "one two"])
    suite = port(measured, monkeypatch)
    assert not breaches(contract_of(suite.contract), suite.measurements)


def test_a_gate_that_its_replay_does_not_have_does_not_repeat() -> None:
    for value in (math.nan, math.inf, 1e-7):
        rows = [measurement(quantity=name, value=value) for name in ("logits", "loss")]
        marked = mark_repeats(rows, rows[:1])
        assert [row.deterministic for row in marked] == [True, False]
    assert [mark_repeats(rows[:1], [replace(rows[0], value=1.0)])[0].deterministic] == [False]


def found(control: Any, **changes: Any) -> Measurement:
    """The row of a control that the triangle finds."""
    names = {"quantity": control.fault.stage, "edge": control.edge, "verdict": Verdict.FAIL}
    return measurement(case=CASE.name, **(names | changes))


@pytest.mark.parametrize(
    ("rows", "executed"),
    [
        ([], 0),
        ([found(CONTROLS[0])], 1),
        ([found(CONTROLS[1])], 1),
        ([found(control) for control in CONTROLS], 2),
        ([found(control, verdict=Verdict.PASS) for control in CONTROLS], 0),
        ([found(control, verdict=Verdict.NOT_COMPARABLE) for control in CONTROLS], 0),
        ([found(control, quantity="loss") for control in CONTROLS], 0),
    ],
    ids=["nothing", "the first", "the second", "both", "held", "not compared", "elsewhere"],
)
def test_a_control_counts_only_where_the_triangle_found_it(
    rows: list[Measurement], executed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Suite", lambda *_, **__: double(Suite, case=lambda *_: iter(rows)))
    lines: list[str] = []
    suite = run_controls(REFERENCE, lines.append)
    assert (suite.planned, suite.executed) == (len(CONTROLS), executed)
    assert suite.result().whole == (executed == len(CONTROLS))
    assert suite.reason.count("was planted at") == len(CONTROLS) - executed
    assert f"{executed} of 2 planted bugs found" in lines[0]


def test_a_long_reason_of_missed_controls_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x" * 300, "y" * 300]
    monkeypatch.setattr(module, "missed", lambda *_: zip(CONTROLS, texts, strict=True))
    lines: list[str] = []
    suite = run_controls(REFERENCE, lines.append)
    assert suite.reason == "; ".join(texts)[:400]
    assert suite.executed == 0 and lines[0].endswith(f" s) {suite.reason}")


def test_a_suite_that_ends_early_counts_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missed", lambda *_: iter(()))
    suite = run_controls(REFERENCE, quiet)
    assert suite.executed == 0 and not suite.result().whole


SAID = {
    parity: ["  length_c: FAIL at loss (jax32:oracle) why (3.0 s)", "    not explained: "],
    known_differences: [
        f"  known differences: 1 of {len(KNOWN_DIFFERENCES)} are unchanged (3.0 s)"
    ],
    products: ["  products: 1 gates of GEMM backends hold (3.0 s)"],
    mla_moe: ["  mla-moe: 1 gates hold (3.0 s)"],
    port: ["  as a user's port: 1 gates hold (3.0 s)"],
    mesh: ["  mesh: 1 gates hold on 1 meshes (1.5 s)"],
}
"""Lines about one gate that holds and one that fails; each look at them takes 1.5 seconds."""


@pytest.mark.parametrize("suite", SAID, ids=lambda suite: suite.__name__)
def test_a_suite_says_what_holds_and_how_long_it_took(suite, monkeypatch) -> None:
    now, lines = [0.0], []

    def measured() -> list[Measurement]:
        now[0] += 1.5
        rows = [measurement(), failing(quantity="loss", note="why")]
        return [replace(row, identity="x") for row in rows]

    def explain(*_: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "explain", explain)
    done = suite(measured, monkeypatch, lines.append)
    assert done.reason == "" and len(lines) == len(SAID[suite])
    for line, start in zip(lines, SAID[suite], strict=True):
        assert line.startswith(start)
    assert done.seconds == (1.5 if suite is mesh else 3.0)


@pytest.mark.parametrize(
    ("suite", "chosen", "every"),
    [
        (known_differences, KNOWN_DIFFERENCES[1].id, [d.id for d in KNOWN_DIFFERENCES]),
        (products, list(BACKENDS)[1], list(BACKENDS)),
    ],
    ids=["known differences", "products"],
)
def test_what_is_asked_for_alone_is_planned_and_measured_alone(
    suite, chosen, every, monkeypatch
) -> None:
    """All are measured together; a row of another name is left out, and so is its contract."""
    by_case = suite is products

    def measured() -> list[Measurement]:
        return [measurement(**{"case" if by_case else "quantity": name}) for name in every]

    def names(rows: Any) -> set[str]:
        return {row.case if by_case else row.quantity for row in rows}

    whole, alone = (suite(measured, monkeypatch, quiet, only) for only in ((), {chosen}))
    assert (whole.planned, whole.executed) == (len(every), len(every))
    assert names(whole.measurements) == names(whole.contract) == set(every)
    assert (alone.planned, alone.executed) == (1, 1)
    assert names(alone.measurements) == names(alone.contract) == {chosen}
    assert all(row.deterministic for row in (*whole.measurements, *alone.measurements))


def test_a_port_and_meshes_are_asked_for_by_name(monkeypatch) -> None:
    rows = [measurement(case=case) for case in ("one", "one", "two")]
    made: list[Any] = []
    one = port(lambda: rows, monkeypatch, only=["port/plain"])
    assert (one.name, one.planned, one.executed) == ("port", 1, 1)
    assert [gate.case for gate in one.contract] == [row.case for row in rows]
    # What is compared is the case with its derivatives, on the device of this process.
    with monkeypatch.context() as patch:
        patch.setattr(
            megalodon_port, "port", lambda *asked, **how: made.append((asked, how)) or FakePort()
        )
        compare = port_module.compare_port
        patch.setattr(port_module, "compare_port", lambda it: made.append(it) or compare(it))
        port_module.run_port(REFERENCE, quiet)
    asked, *compared = made
    assert asked == ((by_name("plain"),), {"gradients": True})
    assert compared == [FakePort("port", "plain", module.device_kind())] * 2
    other = port(lambda: rows, monkeypatch, only=["port/other"])
    assert (other.planned, other.executed, other.measurements) == (0, 0, [])
    # What is wrong with the port is kept in the form of a case's account.
    monkeypatch.setattr(port_module.accounts, "of_port", lambda report: report.measurements[0])
    with monkeypatch.context() as patch:
        patch.setattr(port_module.accounts, "of_port", lambda report: None)
        assert port_module.run_port(REFERENCE, quiet).explanations == []
    assert port_module.run_port(REFERENCE, quiet).explanations == rows[:1]
    whole = mesh(lambda: rows, monkeypatch)
    assert (whole.planned, whole.executed) == (meshes_module.meshes.planned(), 2)
    # Of float32 alone: in float64 a level is below its floor on every machine.
    [(of, *how)] = whole.responses
    assert how == ["rel_l2", "mesh32:one32"] and [*whole.responses.values()] == [RESPONSES[of]]
    [subject, *_] = meshes_module.meshes.SUBJECTS
    asked = mesh(lambda: rows, monkeypatch, only=[subject])
    assert 0 < asked.planned == meshes_module.meshes.planned([subject]) < whole.planned
    assert 0 < len(asked.contract) < len(whole.contract)


def test_a_case_that_breaks_down_leaves_the_others(monkeypatch) -> None:
    """Each case is a step; its rows, seconds and responses count where it came to its end."""
    cases = [by_name(name) for name in ("plain", "length_c", "stream")]
    now, lines, steps = [0.0], [], []

    def case(self: Suite, case: Any, floors: Any) -> Iterator[Measurement]:
        now[0] += 2.0
        yield measurement(case=case.name)
        if case.name == "length_c":
            raise KeyError("lost")

    monkeypatch.setattr(Suite, "case", case)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    suite = run_parity(cases, REFERENCE, lines.append, steps.append)
    assert steps == [0, 1, 2]
    assert lines == [
        "  plain: 1 gates hold (4.0 s)",
        "  length_c: did not finish: case length_c: KeyError: 'lost' (2.0 s)",
        "  stream: 1 gates hold (4.0 s)",
    ]
    assert (suite.planned, suite.executed, suite.seconds) == (3, 2, 10.0)
    assert suite.result().status == "failed"
    assert [row.case for row in suite.measurements] == ["plain", "stream"]
    assert suite.responses.keys() == {("plain", "rel_l2"), ("stream", "rel_l2")}
    assert all(suite.responses.values())
    assert {gate.case for gate in suite.contract} == {case.name for case in cases}


def test_probes_are_a_suite_of_what_they_found(monkeypatch) -> None:
    """A probe that broke down is named, and the night goes on."""
    now, lines = [0.0], []
    ok = finding()
    probed = SimpleNamespace(
        findings=[ok],
        shown={"poles": 1},
        executed=3,
        seconds={"values": 2.0},
        failures=["poles: ValueError: why", "x" * 500],
    )

    def run(*_: Any) -> Any:
        now[0] += 7.0
        return probed

    monkeypatch.setattr(module.stability, "run", run)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    checkpoint = double(Checkpoint, folder=Path("here/mine"))
    suite = module.run_stability(checkpoint, double(MegalodonForCausalLM), lines.append)
    assert (suite.name, suite.planned, suite.executed) == ("stability", len(PROBES), 3)
    assert (suite.findings, suite.shown, suite.seconds) == ([ok], {"poles": 1}, 7.0)
    assert suite.times == {("values", ""): 2.0}
    assert suite.reason == f"poles: ValueError: why; {'x' * 500}"[:400]
    assert lines == [
        f"probing mine: {', '.join(PROBES)}",
        "  did not finish: poles: ValueError: why",
        f"  did not finish: {'x' * 500}",
    ]


def test_the_second_architecture_is_measured_case_by_case(monkeypatch) -> None:
    """Rows, pooled rows, responses and contract of each; what was found is said once."""
    cases = mla_moe_module.mla_moe.CASES[:3]
    asked: list[Any] = []

    def answer(case: Any, which: str) -> Any:
        asked.append((case.title, which))
        live = "live" if case is cases[0] else "recorded"
        return SimpleNamespace(kind=live, refusal=case.title, versions={"transformers": "4"})

    def compare(case: Any, answer: Any, ours: Any, device: str) -> Any:
        assert ours == f"side of {case.title}"
        return SimpleNamespace(measurements=[measurement(case=case.title)], report=case.title)

    def pooled(case: Any, live: bool, device: str) -> Any:
        asked.append(live)
        rows = [measurement(case=case.title, metric=POOLED)]
        return SimpleNamespace(first={case.title: 1}, measurements=rows, responses={case.title: 2})

    fake = SimpleNamespace(
        CASES=cases, answer=answer, compare=compare, pooled=pooled,
        side=lambda case: f"side of {case.title}",
    )  # fmt: skip
    monkeypatch.setattr(mla_moe_module, "mla_moe", fake)
    gates = lambda case, *_: [Gate.of(measurement(case=case.title))]  # noqa: E731
    monkeypatch.setattr(mla_moe_module.mla_moe_contract, "gates", gates)
    accounts = (None, "an account", "another")
    of_port = {case.title: it for case, it in zip(cases, accounts, strict=True)}
    monkeypatch.setattr(port_module.accounts, "of_port", of_port.get)
    bugs = {cases[0].title: ("one", 1.0), cases[1].title: ("one", 1.0), cases[2].title: ("", 0.0)}

    def scatter(refusal: str, version: str) -> Any:
        message, value = bugs[refusal]
        return finding(message=message, value=value)

    monkeypatch.setattr(mla_moe_module, "reference_scatter", scatter)
    suite = mla_moe_module.run_mla_moe(REFERENCE, quiet)
    alone = mla_moe_module.run_mla_moe(double(Reference, kind="live"), quiet, {cases[1].title})
    titles = [case.title for case in cases]
    assert suite.reason == alone.reason == ""
    assert (suite.planned, suite.executed, alone.planned, alone.executed) == (3, 3, 1, 1)
    assert asked == [
        *(
            it
            for t, live in zip(titles, (True, False, False), strict=True)
            for it in ((t, "recorded"), live)
        ),
        (titles[1], "auto"),
        False,
    ]
    assert [(m.case, m.metric) for m in suite.measurements] == [
        (title, metric) for title in titles for metric in ("rel_l2", POOLED)
    ]
    assert {m.deterministic for m in suite.measurements} == {True}
    assert [gate.case for gate in suite.contract] == titles
    assert suite.responses == {
        (title, metric): {title: number}
        for title in titles
        for metric, number in (("rel_l2", 1), (POOLED, 2))
    }
    assert suite.explanations == ["an account", "another"]
    assert [f.message for f in suite.findings] == ["one"]
    assert {m.case for m in alone.measurements} == {gate.case for gate in alone.contract}
    assert {m.case for m in alone.measurements} == {titles[1]}


def test_a_case_that_breaks_down_is_not_explained_by_the_rows_before_it(monkeypatch) -> None:
    asked: list[str] = []

    def case(self: Suite, case: Any, floors: Any) -> Iterator[Measurement]:
        yield failing(case=case.name)
        if case.name == "length_c":
            raise KeyError("lost")

    def explain(case: Any, known: Any) -> Any:
        asked.append(case.name)
        return explained(case.name)

    monkeypatch.setattr(Suite, "case", case)
    monkeypatch.setattr(module, "explain", explain)
    run_parity([by_name(name) for name in ("plain", "length_c")], REFERENCE, quiet)
    assert asked == ["plain"]


def test_tensors_of_a_failure_are_kept_once(monkeypatch) -> None:
    """The replay would keep those of the same failure again."""
    kept: list[Any] = []

    def case(self: Suite, case: Any, floors: Any) -> Iterator[Measurement]:
        kept.append(self.on_failure)
        yield measurement(case=case.name)

    monkeypatch.setattr(Suite, "case", case)
    suite = run_parity([by_name("plain")], REFERENCE, quiet)
    first, replay = kept
    assert first is suite.tensors and replay is None


def test_floors_of_a_given_checkpoint_are_measured_before_its_case(monkeypatch) -> None:
    """The stored ones are those of the committed checkpoint."""
    given = replace(by_name("byte_lm"), name=GIVEN)
    asked: list[list[Any]] = []

    def extended(floors: Any, cases: Any) -> Any:
        asked.append(list(cases))
        return floors

    monkeypatch.setattr(module, "extended", extended)
    monkeypatch.setattr(module.megalodon_contract, "gates", lambda *_: ())
    monkeypatch.setattr(Suite, "case", lambda *_: iter([measurement()]))
    run_parity([by_name("plain"), given], REFERENCE, quiet)
    assert asked == [[given]]


def test_the_account_of_a_port_is_of_the_comparison_that_is_stored(monkeypatch) -> None:
    """And not of its replay."""
    values, asked = itertools.count(), list[float]()

    def of_port(report: Any) -> None:
        asked.extend(m.value for m in report.measurements)

    def compared(rows: list[Measurement]) -> Any:
        return SimpleNamespace(measurements=rows, contract=[])

    def measured() -> list[Measurement]:
        return [measurement(value=float(next(values)))]

    port(list, monkeypatch)
    monkeypatch.setattr(port_module, "compare_port", lambda _: compared(measured()))
    monkeypatch.setattr(port_module.accounts, "of_port", of_port)
    suite = port_module.run_port(REFERENCE, quiet)
    assert asked == [m.value for m in suite.measurements] == [0.0]
