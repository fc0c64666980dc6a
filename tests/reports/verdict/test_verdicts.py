"""Every rule of the verdict, each with the run that must not trigger it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.megalodon.suite import culprit
from reports.provenance.host import fingerprint
from reports.verdict.changes import What
from reports.verdict.decide import ExitCode, Word, decide
from reports.verdict.pins import pin_of
from stability.core.findings import Severity
from tests.reports.nights import earlier, failing, finding, measurement, run

PARTIAL = {"name": "parity", "status": "ran", "planned": 13, "executed": 12, "reason": "stopped"}
SKIPPED = {"name": "parity", "status": "skipped", "planned": 13, "executed": 0, "reason": "absent"}
BLOCKED = measurement(verdict=Verdict.NOT_COMPARABLE, value=math.nan, note="shape (2,) and (3,)")


def test_a_healthy_run_passes() -> None:
    decision = decide(run(measurement()), None)
    assert (decision.word, decision.exit_code) == (Word.PASS, ExitCode.PASS)
    assert "25 % of its tolerance" in decision.sentence
    assert decision.starts == ()


def test_exit_codes_are_those_of_the_specification() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6]


def test_a_failure_regresses_and_names_where_it_starts() -> None:
    stages = [
        failing(quantity="layers.1.ffn", stage=9, kind=Kind.BLOCK),
        failing(quantity="layers.1.attn", stage=8, kind=Kind.BLOCK),
        measurement(quantity="layers.1.cema", stage=7, kind=Kind.BLOCK),
        failing(quantity="grad/x", stage=-1, kind=Kind.GRADIENT),
    ]
    decision = decide(run(*stages), None)
    assert (decision.word, decision.exit_code) == (Word.REGRESSED, ExitCode.REGRESSION)
    assert [m.quantity for m in decision.starts] == ["layers.1.attn"]
    for part in ("layers.1.attn", "case baseline", "JAX float32 vs oracle", "9.0e-06", "4.0e-06"):
        assert part in decision.sentence


def test_the_mathematics_is_named_before_the_accuracy() -> None:
    night = run(failing(edge="jax32:oracle", value=1.0), failing(edge="jax64:oracle"))
    assert [m.edge for m in decide(night, None).starts] == ["jax64:oracle", "jax32:oracle"]


def test_the_earliest_stage_is_named_on_whichever_edge() -> None:
    wide = failing(edge="port64:original64", quantity="logits", stage=9)
    narrow = failing(edge="port32:original32", quantity="layers.0.router", stage=4, kind=Kind.BLOCK)
    ratio = failing(edge="port32:port64", quantity="all", stage=-1, kind=Kind.BLOCK)
    elsewhere = failing(case="other", edge="port32:original32", quantity="embed", stage=0)
    decision = decide(run(elsewhere, wide, ratio, narrow), None)
    assert [m.quantity for m in decision.starts] == ["layers.0.router", "logits", "all", "embed"]
    assert "It starts at layers.0.router" in decision.sentence
    assert culprit([wide, ratio, narrow]) == narrow
    # At one stage, the mathematics is named before the accuracy.
    both = [failing(edge=edge) for edge in ("jax32:reference32", "jax64:oracle")]
    assert culprit(both) == both[1]


def test_what_failed_is_named_before_what_could_not_be_compared() -> None:
    blocked = measurement(quantity="embed", stage=0, verdict=Verdict.NOT_COMPARABLE)
    failed = failing(quantity="norm", stage=7, kind=Kind.BLOCK)
    assert first_divergence([blocked, failed]) == failed
    assert first_divergence([measurement(), blocked]) == blocked
    assert first_divergence([measurement()]) is None


AGREE = [measurement(edge=edge) for edge in ("jax64:oracle", "jax32:oracle")]
OUTSIDE = [failing(edge=edge) for edge in ("reference32:oracle", "jax32:reference32")]


@pytest.mark.parametrize(
    ("rows", "suspected"),
    [
        (AGREE + OUTSIDE, True),
        ([failing(edge="jax64:oracle"), AGREE[1], *OUTSIDE], False),
        (AGREE + OUTSIDE[:1] + [measurement(edge="jax32:reference32")], False),
        (AGREE[:1] + OUTSIDE, False),
    ],
    ids=["both agree", "one is wrong", "a reference agrees", "one was not measured"],
)
def test_what_jax_and_the_oracle_share_is_suspected(rows, suspected: bool) -> None:
    sentence = decide(run(*rows), None).sentence
    assert ("suspect first what the two share, the configuration" in sentence) is suspected


@pytest.mark.parametrize(
    "bad",
    [
        measurement(value=math.nan),
        measurement(value=math.inf),
        measurement(value=5e-6),
        measurement(value=-1.0),
        measurement(value=math.inf, tolerance=math.inf),
        measurement(value=math.nan, verdict=Verdict.INFO),
        measurement(value=math.nan, verdict=Verdict.FAIL),
    ],
)
def test_a_pass_that_its_numbers_do_not_support_fails(bad: Measurement) -> None:
    assert bad.settled().verdict is Verdict.FAIL
    assert decide(run(measurement(), bad), None).word is Word.REGRESSED


@pytest.mark.parametrize("tolerance", [math.nan, math.inf])
def test_a_pass_without_a_finite_tolerance_measured_nothing(tolerance: float) -> None:
    bad = measurement(tolerance=tolerance).settled()
    assert bad.verdict is Verdict.NOT_COMPARABLE
    assert decide(run(measurement(case="other"), bad), None).word is Word.NOT_COMPARABLE


@pytest.mark.parametrize(
    "good",
    [
        measurement(value=4e-6),
        measurement(value=0.0, tolerance=0.0),
        measurement(value=math.nan, tolerance=math.nan, verdict=Verdict.INFO),
    ],
)
def test_a_pass_that_its_numbers_support_holds(good: Measurement) -> None:
    assert good.settled().verdict is not Verdict.FAIL
    assert decide(run(measurement(case="other"), good), None).word is Word.PASS


@pytest.mark.parametrize(
    "suite", [PARTIAL, SKIPPED, {**PARTIAL, "status": "failed"}, {"name": "x"}]
)
def test_a_suite_that_is_not_whole_is_incomplete(suite: dict[str, object]) -> None:
    decision = decide(run(measurement(), BLOCKED, suites=[suite]), None)
    assert (decision.word, decision.exit_code) == (Word.INCOMPLETE, ExitCode.INCOMPLETE)
    assert str(suite["name"]) in decision.sentence
    assert decision.counts.skipped + decision.counts.not_run > 0


@pytest.mark.parametrize(
    ("now", "then", "suite", "word"),
    [
        ("recorded", "live", "port", Word.PASS),
        ("live", "live", "port", Word.INCOMPLETE),
        ("recorded", "recorded", "port", Word.INCOMPLETE),
        ("recorded", "live", "products", Word.INCOMPLETE),
    ],
)
def test_what_asks_the_live_reference_is_not_missed_where_recordings_answer(
    now: str, then: str, suite: str, word: Word
) -> None:
    def suites(*names: str) -> list[dict[str, object]]:
        return [{"name": name, "status": "ran", "planned": 1, "executed": 1} for name in names]

    before = earlier(
        measurement(), suites=suites("parity", suite), reference={"kind": then, "commit": "1"}
    )
    night = run(measurement(), suites=suites("parity"), reference={"kind": now, "commit": "1"})
    assert decide(night, before).word is word


@pytest.mark.parametrize("kind", ["nightly", "shard", "port", "pytest"])
def test_a_run_that_planned_nothing_is_incomplete(kind: str) -> None:
    night = run(measurement(), kind=kind, suites=[])
    assert decide(night, None).exit_code is ExitCode.INCOMPLETE
    assert decide(night, earlier(measurement(), kind=kind)).exit_code is ExitCode.INCOMPLETE


@pytest.mark.parametrize(
    ("now", "then", "whole", "word"),
    [
        ([], [], True, Word.INCOMPLETE),
        ([], ["baseline"], True, Word.INCOMPLETE),
        (["baseline"], [], True, Word.PASS),
        (["baseline"], ["baseline"], True, Word.PASS),
        ([], [], False, Word.PASS),
    ],
)
def test_a_suite_of_the_baseline_is_missed_unless_this_run_is_a_selection(
    now: list[str], then: list[str], whole: bool, word: Word
) -> None:
    """What was asked for decides, and not what was asked for then; a broken suite is none."""
    suite = {"name": "products", "status": "ran", "planned": 2, "executed": 1 + whole}
    parity = {"name": "parity", "status": "ran", "planned": 1, "executed": 1}
    before = earlier(measurement(), suites=[parity, suite], selected=then)
    night = run(measurement(), suites=[parity], selected=now)
    assert decide(night, before).word is word


ROWS = {
    Verdict.PASS: measurement(deterministic=None),
    Verdict.FAIL: failing(deterministic=None),
    Verdict.NOT_COMPARABLE: measurement(
        verdict=Verdict.NOT_COMPARABLE, value=math.nan, deterministic=None
    ),
    Verdict.INFO: measurement(verdict=Verdict.INFO, tolerance=math.nan, deterministic=None),
}


@pytest.mark.parametrize("now", ROWS, ids=str)
@pytest.mark.parametrize("then", [*ROWS, None], ids=str)
def test_what_became_of_a_gate_follows_from_both_its_verdicts(
    then: Verdict | None, now: Verdict
) -> None:
    """Only what failed can be fixed or persist: what could not be compared was not broken."""
    before = earlier(*([ROWS[then]] if then else []), measurement(case="other"))
    decision = decide(run(ROWS[now], measurement(case="other")), before)
    whats = [c.what for c in decision.changes]
    if now is Verdict.FAIL:
        assert whats == [What.PERSISTING if then is Verdict.FAIL else What.NEW]
    elif (then, now) == (Verdict.FAIL, Verdict.PASS):
        assert whats == [What.FIXED]
    else:
        assert whats == []
    assert decision.counts.fixed == whats.count(What.FIXED)


KNOWN, ELSEWHERE, UNKNOWN = "0123456789ab", "ba9876543210", ""


@pytest.mark.parametrize(
    ("now", "then", "alike"),
    [
        (KNOWN, KNOWN, True),
        (KNOWN, ELSEWHERE, False),
        (KNOWN, UNKNOWN, False),
        (UNKNOWN, KNOWN, False),
        (UNKNOWN, UNKNOWN, False),
        (None, KNOWN, False),
        (None, None, False),
    ],
)
def test_a_value_of_one_host_of_several_is_held_to_its_own_baseline(
    now: str | None, then: str | None, alike: bool
) -> None:
    """A host that nobody knows equals none, itself included; None: no part has the case."""

    def parts(host: str | None) -> list[dict[str, object]]:
        case = {} if host is None else {"cases": ["baseline"], "fingerprint": host}
        # Two more hosts, so that the run is of several.
        others = [{"name": n, "cases": [n], "fingerprint": f"host {n}"} for n in ("x", "y")]
        return [*([{"name": "baseline", **case}] if case else []), *others]

    before = earlier(measurement(value=2e-6), parts=parts(then))
    decision = decide(run(measurement(), parts=parts(now)), before)
    assert (decision.word is Word.CHANGED) is alike
    assert decision.counts.changed == alike


@pytest.mark.parametrize("of_several", ["the night", "its baseline"])
@pytest.mark.parametrize("same", [True, False])
def test_a_night_of_one_host_is_held_to_what_that_host_measured(
    of_several: str, same: bool
) -> None:
    here = fingerprint(run().manifest.environment)
    hosts = {"baseline": here if same else ELSEWHERE, "another case": ELSEWHERE if same else here}
    parts = [{"name": n, "cases": [n], "fingerprint": host} for n, host in hosts.items()]
    now, then = [parts, []] if of_several == "the night" else [[], parts]
    decision = decide(run(measurement(), parts=now), earlier(measurement(value=2e-6), parts=then))
    assert (decision.word is Word.CHANGED) is same


def test_a_failure_outweighs_an_incomplete_suite() -> None:
    decision = decide(run(failing(), suites=[PARTIAL]), None)
    assert decision.word is Word.REGRESSED
    assert decision.counts.not_run == 1


def test_an_incomparable_measurement_is_not_a_pass() -> None:
    decision = decide(run(measurement(case="other"), BLOCKED), None)
    assert (decision.word, decision.exit_code) == (Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE)
    assert "shape (2,) and (3,)" in decision.sentence


@pytest.mark.parametrize(
    "rows",
    [(), (measurement(tolerance=math.nan, verdict=Verdict.INFO),)],
    ids=["none", "info"],
)
def test_nothing_measured_is_never_a_pass(rows: tuple[Measurement, ...]) -> None:
    assert decide(run(*rows), None).exit_code is ExitCode.NOTHING_SELECTED
    assert decide(run(*rows, suites=[]), None).exit_code is ExitCode.NOTHING_SELECTED


def test_a_value_that_does_not_repeat_is_changed() -> None:
    before = measurement(value=1.0000001e-6)
    decision = decide(run(measurement()), earlier(before))
    assert (decision.word, decision.exit_code) == (Word.CHANGED, ExitCode.PASS)
    assert decision.counts.changed == 1
    assert "1.000000100e-06" in decision.sentence


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (measurement(), {}),
        (measurement(value=2e-6, identity="other"), {}),
        (measurement(value=2e-6, device="gpu"), {}),
        (measurement(value=2e-6), {"versions": {"jax": "0.10.0", "numpy": "2.3.4"}}),
        (measurement(value=2e-6), {"threads": 4}),
        (measurement(value=2e-6), {"flags": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}}),
        (measurement(value=2e-6), {"host": {"vendor": "another"}}),
        (measurement(value=2e-6), {"reference": {"kind": "live", "commit": "082db4b"}}),
        (measurement(value=2e-6), {"device": {"kind": "cpu", "name": "aarch64"}}),
    ],
    ids=[
        *("equal", "identity", "device", "versions", "threads", "flags", "host", "reference"),
        "machine",
    ],
)
def test_only_equal_work_in_equal_environments_is_changed(
    before: Measurement, changes: dict[str, object]
) -> None:
    decision = decide(run(measurement()), earlier(before, **changes))
    assert decision.word is Word.PASS
    assert decision.counts.changed == 0
    assert bool(decision.environment) is bool(changes)


def test_a_variable_that_an_older_run_does_not_know_is_as_good_as_empty() -> None:
    """The night after an update still says which value changed."""
    decision = decide(run(measurement()), earlier(measurement(value=2e-6), flags={}))
    assert (decision.environment, decision.word) == ((), Word.CHANGED)


def test_a_level_that_left_its_pin_is_not_said_to_differ_from_the_night_before() -> None:
    row = measurement(value=1e-6)
    pin = pin_of(run(measurement(value=2e-6)), {}, "worse", "2026-11-01")
    sentence = decide(run(row), earlier(row), {}, [pin]).sentence
    assert "Nothing changed since run" in sentence
    assert sentence.count("Levels compared with a pinned run: 1 better than before") == 1
    # Negative control: a value that did change is said to.
    moved = decide(run(measurement(value=1.1e-6)), earlier(row), {}, [pin]).sentence
    assert "Nothing changed" not in moved


@pytest.mark.parametrize("replayed", [False, None])
def test_only_what_a_replay_repeated_is_held_to_repeat(replayed: bool | None) -> None:
    night = run(measurement(deterministic=replayed))
    decision = decide(night, earlier(measurement(value=2e-6)))
    assert (decision.word, decision.counts.changed) == (Word.PASS, 0)
    varied = earlier(measurement(value=2e-6, deterministic=False))
    assert decide(run(measurement()), varied).word is Word.PASS
    # Negative control: replayed on both sides it counts.
    assert decide(run(measurement()), earlier(measurement(value=2e-6))).word is Word.CHANGED


def test_another_identity_is_never_a_delta() -> None:
    baseline = earlier(measurement(identity="other", value=2e-6))
    [change] = decide(run(measurement()), baseline).changes
    assert (change.what, change.before) == (What.NOT_COMPARABLE, None)


def test_failures_are_new_persisting_or_fixed() -> None:
    cases = ("new", "persisting", "fixed", "other work")
    now = [failing(case=c) for c in cases]
    now[2] = measurement(case="fixed")
    before = [failing(case=c) for c in cases]
    before[0] = measurement(case="new")
    before[3] = failing(case="other work", identity="other")
    decision = decide(run(*now), earlier(*before))
    counts = decision.counts
    assert (counts.new, counts.persisting, counts.fixed) == (2, 1, 1)
    assert decision.starts[0].case in ("new", "other work")


def test_a_gate_that_vanished_is_reported() -> None:
    baseline = earlier(measurement(), measurement(case="gone"))
    decision = decide(run(measurement()), baseline)
    assert [c.what for c in decision.changes] == [What.GONE]
    assert "1 no longer measured" in decision.sentence


def test_a_loosened_tolerance_is_noted() -> None:
    baseline = earlier(failing())
    [change] = decide(run(measurement(value=9e-6, tolerance=1e-5)), baseline).changes
    assert (change.what, change.note) == (What.FIXED, "tolerance changed from 4.0e-06 to 1.0e-05")


def test_a_fact_that_has_no_tolerance_twice_keeps_its_note() -> None:
    fact = measurement(verdict=Verdict.INFO, tolerance=math.nan, note="own")
    [change] = decide(run(replace(fact, value=2e-6)), earlier(fact)).changes
    assert (change.what, change.note) == (What.CHANGED, "own")


@pytest.mark.parametrize(
    ("severity", "word"),
    [
        (Severity.ERROR, Word.REGRESSED),
        (Severity.WARNING, Word.PASS),
        (Severity.NOTE, Word.PASS),
        (Severity.OK, Word.PASS),
    ],
)
def test_only_findings_of_severity_error_regress(severity: Severity, word: Word) -> None:
    result = finding(severity=severity, message="three values are not finite")
    decision = decide(run(measurement(), findings=(result,)), None)
    assert decision.word is word
    assert ("three values are not finite" in decision.sentence) is (word is Word.REGRESSED)


def test_an_error_finding_persists_and_is_fixed() -> None:
    bad, good = finding(severity=Severity.ERROR), finding()
    broken = earlier(measurement(), findings=(bad,))
    assert decide(run(measurement(), findings=(bad,)), broken).counts.persisting == 1
    assert decide(run(measurement(), findings=(good,)), broken).counts.fixed == 1


def test_a_failure_that_stays_is_red_and_no_news() -> None:
    """Alone it still regresses; beside a new one it comes second, whatever its case is called."""
    old, new = failing(case="a"), failing(case="b")
    alone = decide(run(old), earlier(old))
    assert (alone.word, alone.counts.persisting) == (Word.REGRESSED, 1)
    assert "1 persisting failure" in alone.sentence
    both = decide(run(old, new), earlier(old, measurement(case="b")))
    assert [m.case for m in both.starts] == ["b", "a"]


def test_what_another_environment_mended_is_no_change() -> None:
    decision = decide(run(measurement()), earlier(failing(), threads=4))
    assert (decision.word, decision.counts.fixed) == (Word.PASS, 1)
    assert decide(run(measurement()), earlier(failing())).word is Word.CHANGED


def test_a_note_that_is_no_number_twice_has_not_changed() -> None:
    note = measurement(metric="cosine", value=math.nan, tolerance=math.nan, verdict=Verdict.INFO)
    decision = decide(run(measurement(), note), earlier(measurement(), note))
    assert (decision.word, decision.changes) == (Word.PASS, ())


def test_the_gate_nearest_to_its_tolerance_is_named() -> None:
    near, far = measurement(quantity="near", value=3.6e-6), measurement(quantity="far", value=1e-9)
    assert "the closest is near" in decide(run(far, near), None).sentence
