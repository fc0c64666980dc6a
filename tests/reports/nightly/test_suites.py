"""Suites of a night: a replay is a second measurement, and a control counts where it is found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from parity.engine.contract import Gate, breaches, contract_of
from parity.engine.measurement import Measurement, Verdict
from parity.faults.controls import CASE, CONTROLS
from parity.megalodon import port as megalodon_port
from parity.megalodon.cases import by_name
from parity.megalodon.recordings import RecordedReference
from parity.megalodon.suite import Suite
from reports.nightly import suites as module
from reports.nightly.suites import SuiteRun, mark_repeats, run_controls, run_parity
from tests.helpers import double
from tests.reports.nights import measurement

REFERENCE = RecordedReference()
Measure = Callable[[], list[Measurement]]


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


def parity(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> SuiteRun:
    def case(self: Suite, case: Any, floors: Any) -> Iterator[Measurement]:
        yield from measure()

    monkeypatch.setattr(Suite, "case", case)
    return run_parity([by_name("length_c")], REFERENCE, quiet)


def known_differences(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> SuiteRun:
    monkeypatch.setattr(module, "measure_known_differences", lambda *_: measure())
    return module.run_known_differences(REFERENCE, quiet)


def products(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> SuiteRun:
    monkeypatch.setattr(module, "measure_products", lambda *_: measure())
    return module.run_products(REFERENCE, quiet)


def mla_moe(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> SuiteRun:
    pool = SimpleNamespace(first={}, measurements=[], responses={})
    answer = SimpleNamespace(kind="recorded", refusal="", versions={"transformers": ""})
    fake = SimpleNamespace(
        CASES=module.mla_moe.CASES[:1],
        answer=lambda *_: answer,
        side=lambda *_: None,
        compare=lambda *_, **__: SimpleNamespace(measurements=measure(), report=None),
        pooled=lambda *_: pool,
    )
    monkeypatch.setattr(module, "mla_moe", fake)
    monkeypatch.setattr(module.mla_moe_contract, "gates", lambda *_: ())
    monkeypatch.setattr(module.accounts, "of_port", lambda report: None)
    found = SimpleNamespace(message="", value=0.0)
    monkeypatch.setattr(module, "reference_scatter", lambda *_: found)
    return module.run_mla_moe(REFERENCE, quiet)


@dataclass(frozen=True)
class FakePort:
    """What `replace` is asked to change of a port."""

    name: str = ""
    case: str = ""
    device: str = ""


def port(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> SuiteRun:
    def compare(made: FakePort) -> Any:
        rows = measure()
        return SimpleNamespace(measurements=rows, contract=[Gate.of(m) for m in rows])

    monkeypatch.setattr(megalodon_port, "port", lambda *_, **__: FakePort())
    monkeypatch.setattr(module, "compare_port", compare)
    monkeypatch.setattr(module.accounts, "of_port", lambda report: None)
    return module.run_port(REFERENCE, quiet)


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
    rows = [measurement(quantity=name, value=math.nan) for name in ("logits", "loss")]
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
    assert bool(suite.reason) == (executed < len(CONTROLS))
    assert f"{executed} of 2 planted bugs found" in lines[0]


def test_a_suite_that_ends_early_counts_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missed", lambda *_: iter(()))
    suite = run_controls(REFERENCE, quiet)
    assert suite.executed == 0 and not suite.result().whole
