"""A run that did not measure its contract is INCOMPLETE, whatever the rows that are there say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity.engine.measure.contract import Breaches
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from reports.store.runs import Run
from reports.verdict.completeness import lacking
from reports.verdict.decide import ExitCode, Word, decide
from tests.reports.nights import altered, contracted, failing, measurement, realistic, run


def two_suites() -> Run:
    """A whole night whose gradients are a suite of their own."""
    night = realistic()
    rows = tuple(
        replace(m, suite="gradients") if m.kind is Kind.GRADIENT else m for m in night.measurements
    )
    suites = [*night.manifest.to_json()["suites"], GRADIENTS]
    return replace(altered(night, suites=suites, contract=contracted(rows)), measurements=rows)


GRADIENTS = {"name": "gradients", "status": "ran", "planned": 52, "executed": 52, "reason": ""}
NIGHT = two_suites()


def of(rows: list[Measurement]) -> Run:
    return replace(NIGHT, measurements=tuple(rows))


def test_a_whole_night_passes():
    assert decide(NIGHT, None).word is Word.PASS


LOST = {
    "all but one gate": lambda m: m is not NIGHT.measurements[0],
    "one gate": lambda m: m is NIGHT.measurements[0],
    "a suite": lambda m: m.suite == "gradients",
    "a case": lambda m: m.case == "slow_decay",
    "all gradients": lambda m: m.kind is Kind.GRADIENT,
    "an edge": lambda m: m.edge == "jax64:oracle",
    "an edge of one case": lambda m: (m.case, m.edge) == ("untied_head", "jax32:oracle"),
    "a quantity": lambda m: m.quantity == "norm",
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_a_night_with_gates_removed_is_incomplete(lost):
    night = of([m for m in NIGHT.measurements if not lost(m)])
    decision = decide(night, None)
    assert (decision.word, decision.exit_code) == (Word.INCOMPLETE, ExitCode.INCOMPLETE)
    assert "planned gate" in decision.sentence and "not measured" in decision.sentence
    # A baseline, which has them all, changes nothing about that.
    assert decide(night, NIGHT).word is Word.INCOMPLETE


def test_facts_may_come_and_go():
    kept = [m for m in NIGHT.measurements if m.verdict is not Verdict.INFO]
    assert decide(of(kept), None).word is Word.PASS


def test_a_gate_that_is_there_twice_or_was_not_planned_is_named():
    twice = decide(of([*NIGHT.measurements, NIGHT.measurements[3]]), None)
    assert twice.word is Word.INCOMPLETE and "more than once" in twice.sentence
    more = decide(of([*NIGHT.measurements, measurement(case="another")]), None)
    assert more.word is Word.INCOMPLETE and "not in the contract" in more.sentence


@pytest.mark.parametrize(
    ("number", "said"), [(1, "1 measurement was"), (1234, "1,234 measurements were")]
)
def test_measurements_that_are_there_twice_are_counted(number: int, said: str):
    rows = [measurement(quantity=f"q{turn}") for turn in range(number)]
    assert lacking(of([*rows, measurement(), *rows]), Breaches()) == (
        f"Nothing failed, but {said} stored more than once, first: q0 (rel_l2) of case baseline "
        "(jax32:oracle). Measure again."
    )


def test_a_fact_that_is_there_twice_is_an_error_too():
    fact = next(m for m in NIGHT.measurements if m.verdict is Verdict.INFO)
    assert decide(of([*NIGHT.measurements, fact]), None).word is Word.INCOMPLETE


def test_what_fails_is_said_before_what_is_missing():
    decision = decide(of([failing(), *NIGHT.measurements[20:]]), None)
    assert decision.word is Word.REGRESSED


@pytest.mark.parametrize(
    "counts", [(0, 0), (-5, -5), (0, 52), (-5, 0), (52, 53), (52, 51)], ids=str
)
def test_a_suite_executes_exactly_what_it_planned_and_plans_something(counts):
    planned, executed = counts
    suites = [
        replace(suite, planned=planned, executed=executed) if suite.name == "parity" else suite
        for suite in NIGHT.manifest.suites
    ]
    night = replace(NIGHT, manifest=replace(NIGHT.manifest, suites=tuple(suites)))
    decision = decide(night, None)
    assert decision.word is Word.INCOMPLETE and "suite parity is incomplete" in decision.sentence


def test_a_suite_and_its_contract_go_together():
    """The whole mesh suite removed with its lines of the contract, or with its count."""
    rows = tuple(m for m in NIGHT.measurements if m.suite != "gradients")
    night = replace(altered(NIGHT, contract=contracted(rows)), measurements=rows)
    assert "suite gradients has no gate in the contract" in decide(night, None).sentence
    suites = tuple(s for s in NIGHT.manifest.suites if s.name != "gradients")
    night = replace(NIGHT, manifest=replace(NIGHT.manifest, suites=suites))
    assert "suite gradients is in the contract but not in the run" in decide(night, None).sentence


def test_a_night_without_a_contract_is_incomplete():
    night = altered(NIGHT, contract=[])
    assert decide(night, None).word is Word.INCOMPLETE


@pytest.mark.parametrize(
    ("kind", "plans"), [("nightly", True), ("shard", True), ("port", True), ("pytest", False)]
)
def test_every_kind_of_run_that_plans_is_held_to_its_plan(kind: str, plans: bool):
    """A gate fewer than planned, one more, another one, and a suite on one side alone."""
    one, other = measurement(), measurement(case="another")
    elsewhere = replace(other, suite="another suite")
    for measured, planned in (
        ([one], [one, other]),
        ([one, other], [one]),
        ([one], [other]),
        ([one], [one, elsewhere]),
        ([one, elsewhere], [one]),
        ([one, elsewhere], [one, elsewhere]),
    ):
        night = run(*measured, kind=kind, contract=contracted(planned))
        assert (decide(night, None).word is Word.INCOMPLETE) is plans
        # Negative control: what was planned is what was measured.
        whole = run(*measured, kind=kind, suites=_suites(measured))
        assert decide(whole, None).word is Word.PASS


def _suites(measured: list[Measurement]) -> list[dict[str, object]]:
    names = dict.fromkeys(m.suite for m in measured)
    return [{"name": n, "status": "ran", "planned": 1, "executed": 1} for n in names]


@pytest.mark.parametrize("kind", ["pytest", "bench"])
def test_runs_that_cannot_plan_have_no_contract(kind):
    assert (
        lacking(run(measurement(), kind=kind, contract=[]), found=decide(NIGHT, None).breaches)
        == ""
    )


def test_a_night_of_an_older_schema_is_incomplete_and_may_anchor_levels():
    old = replace(NIGHT, manifest=replace(NIGHT.manifest, contract=(), migrated_from=4))
    decision = decide(old, None)
    assert decision.word is Word.INCOMPLETE
    assert "stored by a version without contracts (schema 4)" in decision.sentence
    assert decide(old, None, old_schema_may_pass=True).word is Word.PASS
