"""Rules of a verdict on a few rows each: what counts as moved, and what comes first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.tolerances import (
    DRIFT_DEVIATIONS,
    DRIFT_SHARE,
    DRIFT_TYPICAL,
    DRIFT_WORST,
    NOISE_FLOOR,
    NOISE_LEAST,
    NOISE_MADS,
)
from reports.store.runs import Run
from reports.verdict.changes import (
    Change,
    What,
    count_changes,
    find_changes,
    gravest_first,
    rescaled_change,
    unseen_change,
)
from reports.verdict.completeness import FIRST_SCHEMA, breaches_of, lacking
from reports.verdict.decide import ExitCode, Word, _starts, decide
from reports.verdict.drift import (
    UNSEEN,
    Drift,
    PinComparison,
    Rescaled,
    _meshes_pooled,
    compare,
    compare_with_pins,
    levels_of,
    limit,
)
from reports.verdict.history import Past
from reports.verdict.levels import (
    RECENT,
    STILL,
    level_of,
    levels,
    over_meshes,
    pooled,
    spread_of,
)
from reports.verdict.noise import step
from reports.verdict.pins import Pin, pin_of
from reports.verdict.several import _cells
from reports.verdict.vanished import Retired, Seen, Vanished
from stability.core.findings import DIFFERENCES, Severity
from tests.reports.nights import contracted, earlier, explained, failing, finding, measurement, run

SAME = [1.0] * NOISE_LEAST
BEYOND = 1.01
"""A little more than a rule lets pass."""


@pytest.mark.parametrize(
    ("value", "past", "ratio"),
    [
        (NOISE_FLOOR * BEYOND, SAME, NOISE_FLOOR * BEYOND),
        (1 / (NOISE_FLOOR * BEYOND), SAME, 1 / (NOISE_FLOOR * BEYOND)),
        (NOISE_FLOOR / BEYOND, SAME, None),
        (BEYOND / NOISE_FLOOR, SAME, None),
        # Too few values say nothing, and neither does what has no logarithm.
        (1e3 * NOISE_FLOOR, SAME[1:], None),
        (1e3 * NOISE_FLOOR, [*SAME[1:], 0.0, math.inf, math.nan], None),
        (1e3 * NOISE_FLOOR, [*SAME, 0.0, math.inf], 1e3 * NOISE_FLOOR),
        *((value, SAME, None) for value in (0.0, -1.0, math.inf, math.nan)),
        # One value as high as that was seen already.
        (1e3 * NOISE_FLOOR, [*SAME, 1e3 * NOISE_FLOOR], None),
        (1e-3 / NOISE_FLOOR, [*SAME, 1e-3 / NOISE_FLOOR], None),
        # Beyond that by the floor again is a step, over the median.
        (1e3 * NOISE_FLOOR**2 * BEYOND, [*SAME, 1e3 * NOISE_FLOOR], 1e3 * NOISE_FLOOR**2 * BEYOND),
    ],
)
def test_a_step_is_far_from_the_median_and_where_no_value_was(value, past, ratio):
    assert step(value, past) == (None if ratio is None else pytest.approx(ratio))


def test_a_step_is_so_many_median_deviations_away():
    """Values at 1/10, 1 and 10 deviate by one decade in the median."""
    past = [0.1, 0.1, 1.0, 10.0, 10.0] * NOISE_LEAST
    far = 10.0**NOISE_MADS
    assert step(far * BEYOND, past) == pytest.approx(far * BEYOND)
    assert step(far / BEYOND, past) is None


def drift(before: float, now: float, most: float) -> Drift:
    return Drift(("case", "edge", "kind", "metric"), "typical", before, now, most)


def test_a_drift_is_a_share_of_what_passes_in_logarithms():
    assert drift(2.0, 8.0, 16.0).ratio == 4.0
    assert drift(2.0, 8.0, 16.0).excess == drift(8.0, 2.0, 16.0).excess == pytest.approx(0.5)
    assert not drift(1.0, 1.0, UNSEEN).wide and drift(1.0, 1.0, UNSEEN * BEYOND).wide
    # The logarithm of the limit falls with the root of the draws.
    assert drift(1.0, 1.0, UNSEEN).draws == drift(1.0, 1.0, BEYOND).draws == 1
    assert drift(1.0, 1.0, UNSEEN**3 / BEYOND).draws == 9
    # As many as are enough, and not about as many.
    assert [drift(1.0, 1.0, UNSEEN**root).draws for root in (1.2, 1.5, 2.01)] == [2, 3, 5]


def test_machines_that_differ_have_room_for_two_draws_of_rounding():
    assert limit(DRIFT_TYPICAL, 9.0, same=True) == DRIFT_TYPICAL
    assert limit(DRIFT_TYPICAL, 0.0, same=False) == DRIFT_TYPICAL
    wide = limit(DRIFT_TYPICAL, 9.0, same=False)
    assert math.log(wide) == pytest.approx(DRIFT_DEVIATIONS * math.sqrt(2) * 9.0)


def test_a_level_is_of_recent_values_and_no_less_than_a_share_of_tolerances():
    rows = [
        measurement(quantity="a", value=0.5, tolerance=1.0),
        measurement(quantity="b", value=0.0, tolerance=4.0),
    ]
    [level] = levels(rows, {}).values()
    assert (level.gates, level.floored, level.worst) == (2, 1, 0.5)
    assert level.typical == pytest.approx(math.sqrt(0.5 * DRIFT_SHARE * 4.0), rel=2 / 100)
    assert level.tolerance == 2.0 and level.spread == STILL
    # At that share it is not below it: the level is that of its value.
    [level] = levels([measurement(value=DRIFT_SHARE, tolerance=1.0)], {}).values()
    assert level.floored == 0
    past = {rows[0].key: Past((99.0, *[0.25] * (RECENT - 1)), True)}
    # The oldest of more than so many is no longer among them.
    assert {level.worst for level in levels(rows, past, settle=max).values()} == {0.5}
    past = {rows[0].key: Past((99.0, *[0.25] * (RECENT - 2)), True)}
    assert {level.worst for level in levels(rows, past, settle=max).values()} == {99.0}


@pytest.mark.parametrize(
    "values", [(1.0,), (1.0, -0.5), (math.nan, 1.0), ("1", 1.0), (True, 1.0), None, (1, 2, 3)]
)
def test_a_spread_that_is_not_two_numbers_explains_nothing(values):
    assert spread_of(values) == STILL
    assert spread_of([0.0, 2]) == (0.0, 2)


GOOD = {
    "work": "w",
    "gates": 2,
    "typical": 1.0,
    "worst": 1.0,
    "spread": [0.0, 0.0],
    "tolerance": 0.0,
    "floored": 2,
}


@pytest.mark.parametrize(
    "change",
    [
        {"work": ""},
        {"work": 1},
        {"gates": 0, "floored": 0},
        {"gates": 2.0},
        {"gates": True, "floored": 0},
        {"typical": 0.0},
        {"typical": 1.02},
        {"typical": math.nan},
        {"worst": math.inf},
        {"tolerance": -1.0},
        {"floored": 3},
        {"floored": -1},
        {"spread": [0.0, -1.0]},
    ],
)
def test_a_pinned_level_that_no_gates_can_have_is_refused(change):
    assert level_of(GOOD).gates == 2
    # A mean is rounded, and so is the largest.
    assert level_of(GOOD | {"typical": 1.01}).typical == 1.01
    with pytest.raises((ValueError, TypeError)):
        level_of(GOOD | change)


def test_what_is_new_comes_first_by_case_and_edge_together():
    """An edge that failed before is no new one because another of its case is, or of its name."""

    def fails(case: str, edge: str, stage: int):
        return failing(case=case, edge=edge, stage=stage, quantity=f"q{stage}")

    a64, a32 = fails("a", "jax64:oracle", 1), fails("a", "jax32:oracle", 2)
    b64, b32 = fails("b", "jax64:oracle", 3), fails("b", "jax32:oracle", 4)
    blocked = measurement(case="0", stage=0, verdict=Verdict.NOT_COMPARABLE)
    night = run(blocked, a64, a32, b64, b32)
    assert _starts(night, {b32.key}) == (b32, b64, a64, a32, blocked)
    assert _starts(night, {a32.key}) == (a32, a64, b64, b32, blocked)
    assert _starts(night, set()) == (a64, a32, b64, b32, blocked)
    # A case that is wrong at padding alone comes after one that is wrong at tokens.
    places = {"a": "row 0, positions 3-5: all padding", "b": "row 1, position 2: no padding"}
    told = tuple(replace(explained(case), where=where) for case, where in places.items())
    assert _starts(replace(night, explanations=told), set()) == (b64, b32, a64, a32, blocked)
    assert _starts(replace(night, explanations=told), {a32.key})[0] == a32


def test_a_cell_is_of_other_work_than_the_first_run_that_has_it():
    row = measurement()
    key = row.key
    other = failing(identity="other")
    gates = [{}, {key: row}, {key: other}, {key: measurement(verdict=Verdict.INFO)}, {}]
    gates.append({key: measurement(verdict=Verdict.NOT_COMPARABLE)})
    probe = finding(severity=Severity.ERROR)
    errors = [{}, {}, {}, {}, {key: probe}, {}]
    cells = _cells(key, gates, errors, [None] * len(gates))
    assert cells[0] is None
    told = [(c.state, c.other_work, c.what) for c in cells if c is not None]
    assert told == [
        ("pass", False, None),
        ("fail", True, None),
        ("info", False, None),
        ("fail", False, None),
        ("blocked", False, None),
    ]
    # An identity that is empty is one too.
    gates = [{key: replace(row, identity=identity)} for identity in ("", "x", "")]
    cells = _cells(key, gates, [{}] * 3, [None] * 3)
    assert [cell is not None and cell.other_work for cell in cells] == [False, True, False]
    [ok] = _cells(key, [{}], [{key: finding()}], [None])
    assert ok is not None and (ok.state, ok.value, ok.tolerance) == ("pass", 1.0, 2.0)


def test_exit_codes_are_those_that_scripts_rely_on() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "PASS": 0,
        "REGRESSION": 1,
        "USAGE": 2,
        "INCOMPLETE": 3,
        "NOT_COMPARABLE": 4,
        "NOTHING_SELECTED": 5,
        "INTERNAL_ERROR": 6,
    }


def changes_of(now: Run, then: Run | None, past: dict[Any, Past] | None = None) -> list[Change]:
    return list(find_changes(now, then, past or {}, equal=lambda case: True))


ROW = measurement(value=3e-6, stage=7, note="its own note")
OLD = replace(ROW, value=2e-6, note="an older note")


@pytest.mark.parametrize(
    ("now", "old", "what", "before", "note"),
    [
        (ROW, OLD, What.CHANGED, 2e-6, "its own note"),
        (
            ROW,
            replace(OLD, tolerance=5e-6),
            What.CHANGED,
            2e-6,
            "tolerance changed from 5.0e-06 to 4.0e-06",
        ),
        (failing(note="why"), None, What.NEW, None, "not in the baseline"),
        (failing(note="why"), failing(identity="x"), What.NEW, None, "another identity"),
        (ROW, replace(OLD, identity="x"), What.NOT_COMPARABLE, None, "another identity"),
        (failing(note="why"), failing(value=8e-6), What.PERSISTING, 8e-6, "why"),
        (failing(note="why"), measurement(), What.NEW, 1e-6, "why"),
        (ROW, failing(), What.FIXED, 9e-6, "its own note"),
    ],
)
def test_a_change_has_the_fields_of_its_row_and_the_value_before(
    now: Measurement, old: Measurement | None, what: What, before: float | None, note: str
) -> None:
    then = earlier(*([old] if old else []))
    assert changes_of(run(now), then) == [
        Change(what, *now.key[:3], now.metric, before, now.value, now.tolerance, now.stage, note)
    ]


def test_what_has_no_tolerance_is_neither_of_other_work_nor_missed() -> None:
    info = replace(ROW, metric="cosine", tolerance=math.nan, verdict=Verdict.INFO)
    assert changes_of(run(ROW, info), earlier(ROW, replace(info, identity="x"))) == []
    assert changes_of(run(ROW), earlier(ROW, info)) == []
    [gone] = changes_of(run(), earlier(OLD))
    assert (gone.what, gone.before, gone.now) == (What.GONE, 2e-6, None)
    assert (gone.stage, gone.tolerance, gone.note) == (7, 4e-6, "an older note")


def test_of_another_work_the_verdict_of_this_run_counts() -> None:
    """A gate may have had no tolerance before, and may have none any more."""
    info = replace(ROW, tolerance=math.nan, verdict=Verdict.INFO)
    [found] = changes_of(run(failing()), earlier(replace(info, identity="x")))
    assert found.what is What.NEW
    assert changes_of(run(info), earlier(replace(ROW, identity="x"))) == []
    assert changes_of(run(info), earlier(failing(identity="x"))) == []


@pytest.mark.parametrize(("threads", "word"), [(2, Word.CHANGED), (4, Word.PASS)])
def test_what_another_machine_failed_is_no_change_of_this_one(threads: int, word: Word) -> None:
    decision = decide(run(measurement()), earlier(failing(), threads=threads))
    assert (decision.word, decision.counts.fixed) == (word, 1)


def test_a_step_is_told_from_the_median_of_its_past() -> None:
    noisy = replace(ROW, deterministic=False)
    past = {noisy.key: Past((2e-9, *[1e-9] * NOISE_LEAST, 5e-10))}
    [change] = changes_of(run(noisy), earlier(OLD), past)
    assert change.what is What.WORSE and change.before == pytest.approx(1e-9)
    assert change.note == f"3000.00 times the median of {NOISE_LEAST + 2} runs"
    # What repeats, and never varied, is compared with the baseline alone.
    assert changes_of(run(ROW), earlier(ROW), past) == []
    varied = {noisy.key: replace(past[noisy.key], varied=True)}
    assert [c.what for c in changes_of(run(ROW), earlier(OLD), varied)] == [What.WORSE]
    # A failure is one, and what could not be compared is no step.
    blocked = replace(noisy, verdict=Verdict.NOT_COMPARABLE)
    assert changes_of(run(blocked), earlier(OLD), past) == []


BAD = finding(severity=Severity.ERROR, value=3.0, threshold=0.5, message="why", remedy="how")


@pytest.mark.parametrize(
    ("now", "then", "what", "before", "value"),
    [
        ([BAD], [], What.NEW, None, 3.0),
        ([BAD], [replace(BAD, severity=Severity.WARNING)], What.NEW, None, 3.0),
        ([BAD], [replace(BAD, value=2.0)], What.PERSISTING, 2.0, 3.0),
        ([replace(BAD, severity=Severity.NOTE)], [BAD], What.FIXED, 3.0, None),
        ([], [BAD], What.GONE, 3.0, None),
        # The probe compared what the error was about, or something else.
        ([finding(subject="s", metric=DIFFERENCES)], [BAD], What.FIXED, 3.0, None),
        ([finding(metric=DIFFERENCES, source="x")], [BAD], What.GONE, 3.0, None),
        ([finding(metric=DIFFERENCES, probe="x")], [BAD], What.GONE, 3.0, None),
        ([finding(metric="mean")], [BAD], What.GONE, 3.0, None),
    ],
)
def test_a_change_of_a_finding_has_its_fields(now, then, what, before, value) -> None:
    night = run(findings=tuple(now))
    assert changes_of(night, earlier(findings=tuple(then))) == [
        Change(
            what, "probe values", "", "model.embed.weight", "max", before, value, 0.5, note="why"
        )
    ]


PLACE = Change(What.NEW, "b", "jax32:oracle", "q", "m", 1.0, 2.0, 4.0, stage=3)
LATER: dict[str, dict[str, Any]] = {
    "what": {"what": What.PERSISTING, "case": "a", "excess": 9.0},
    "a smaller excess": {"excess": -1.0, "case": "a"},
    "no tolerance": {"tolerance": math.nan, "case": "a"},
    "a coarser edge": {"edge": "jax32:reference32", "case": "a", "stage": 0},
    "a case of another name": {"case": "c", "stage": 0},
    "no stage": {"stage": -1},
    "a later stage": {"stage": 4},
}


@pytest.mark.parametrize("changes", LATER.values(), ids=LATER)
def test_of_two_changes_the_graver_comes_first(changes: dict[str, Any]) -> None:
    """Each is later by one thing, although what comes after that in the order is earlier."""
    later = replace(PLACE, **changes)
    assert gravest_first([later, PLACE]) == gravest_first([PLACE, later]) == (PLACE, later)


def test_changes_of_named_cases_come_before_others_of_their_kind() -> None:
    one, two, three = (replace(PLACE, case=case) for case in "abc")
    probe = replace(PLACE, case="c", tolerance=math.nan)
    graver = replace(PLACE, excess=1.0)
    rows = [probe, one, two, three, graver]
    assert gravest_first(rows, ["c", "b", "c"]) == (graver, three, two, one, probe)


def test_each_count_is_of_what_it_says() -> None:
    verdicts = {Verdict.PASS: 5, Verdict.FAIL: 3, Verdict.NOT_COMPARABLE: 2, Verdict.INFO: 4}
    limits = {Verdict.INFO: math.nan}
    rows = [
        measurement(verdict=v, tolerance=limits.get(v, 4e-6))
        for v, times in verdicts.items()
        for _ in range(times)
    ]
    severities = {Severity.WARNING: 2, Severity.NOTE: 3, Severity.OK: 4, Severity.ERROR: 5}
    found = [finding(severity=s) for s, times in severities.items() for _ in range(times)]
    suites = [
        {"name": "a", "status": "ran", "planned": 9, "executed": 2},
        {"name": "b", "status": "failed", "planned": 0, "executed": 0},
        {"name": "c", "status": "skipped", "planned": 3, "executed": 0},
        {"name": "d", "status": "skipped", "planned": 0, "executed": 0},
        {"name": "e", "status": "ran", "planned": 6, "executed": 6},
        {"name": "f", "status": "failed", "planned": 4, "executed": 4},
    ]
    whats = [what for turn, what in enumerate(What, 1) for _ in range(turn)]
    night = replace(run(suites=suites, findings=tuple(found)), measurements=tuple(rows))
    counts = count_changes(night, [replace(PLACE, what=what) for what in whats])
    assert (counts.gates, counts.passed, counts.not_comparable, counts.warnings) == (10, 5, 2, 2)
    assert (counts.new, counts.persisting, counts.worse, counts.fixed) == (1, 2, 3 + 4, 5)
    assert (counts.changed, counts.not_run, counts.skipped) == (7, 7 + 1 + 1, 3 + 1)


def test_what_could_not_be_compared_is_counted_and_the_first_is_named() -> None:
    rows = [
        measurement(quantity=f"q{n}", stage=n, value=math.nan, verdict=Verdict.NOT_COMPARABLE)
        for n in (3, 1, 2)
    ]
    for note, why in (("", ""), ("two shapes", ": two shapes")):
        noted = [replace(m, note=note) for m in rows]
        noted.append(replace(rows[0], case="c", note="another"))
        decision = decide(run(measurement(case="other"), *noted), None)
        assert decision.word is Word.NOT_COMPARABLE
        assert decision.sentence == (
            "4 measurements could not be compared. It starts at q1 in case baseline "
            f"(JAX float32 vs oracle){why}."
        )


def test_a_decision_names_its_baseline_and_how_its_plan_was_broken() -> None:
    row = measurement()
    night = replace(run(row, measurement(case="other")), measurements=(row,))
    before = earlier(row, threads=4)
    decision = decide(night, before)
    assert decision.baseline_id == before.id and decision.environment == ("threads 4 → 2",)
    assert decision.breaches and decide(night, None).baseline_id is None
    assert not decide(run(row), None).breaches


def of_group(name: str, what: str, now: float, most: float) -> Drift:
    return Drift((name, "edge", "kind", "metric"), what, 1.0, now, most)


def test_of_each_group_one_drift_speaks() -> None:
    """`a` may be rounding or a loss, `b` left its limit, `h` was measured here before."""
    a = of_group("a", "typical", 2.0, 4.0), of_group("a", "worst", 3.5, 9.0)
    b = of_group("b", "typical", 5.0, 4.0), of_group("b", "worst", 8.0, 9.0)
    c = of_group("c", "typical", 6.0, 400.0), of_group("c", "worst", 1.0, 2.0)
    h = of_group("h", "typical", 4.0, 5.0), of_group("h", "worst", 4.0, 5.0)
    narrow = of_group("n", "typical", 1.5, 2.0), of_group("n", "worst", 2.0, 2.0)
    fell = of_group("f", "worst", 0.05, 2.0), of_group("f", "typical", 0.1, 2.0)
    rows = (*fell, *b, *a, *c, *h, *narrow)
    pin = Pin("pinned", None, "2026-11-01", "why")
    found = PinComparison(pin, False, (), 6, rows, held=frozenset({h[0].group}))
    assert found.comparable == 6
    assert found.drifts == (fell[0], b[0])
    assert found.not_yet == (c[0], b[1], a[1])
    assert found.unseen == (c[0], a[1])
    assert found.largest == c[0]
    # Growth by the largest factor that passes is none that nobody has seen.
    at = of_group("u", "typical", UNSEEN, 4.0), of_group("u", "worst", UNSEEN, 4.0)
    assert PinComparison(pin, False, (), 1, at).unseen == ()
    assert not any(d.broken for d in narrow)
    assert not of_group("n", "worst", 0.5, 2.0).broken
    nothing = PinComparison(pin, False, (), 0, ())
    assert (nothing.largest, nothing.drifts, nothing.unseen, nothing.not_yet) == (None, (), (), ())


def test_the_wider_spread_of_both_runs_explains_a_drift() -> None:
    row = measurement()
    [(group, level)] = levels([row], {}).items()
    for one, other in (((0.25, 0.75), (0.5, 0.5)), ((0.5, 0.5), (0.25, 0.75))):
        pin = Pin("p", None, "2026-11-01", "why", groups={group: replace(level, spread=other)})
        drifts, _ = compare({group: replace(level, spread=one)}, pin, False, {})
        assert {d.what: d.limit for d in drifts} == {
            "typical": limit(DRIFT_TYPICAL, 0.5, same=False),
            "worst": limit(DRIFT_WORST, 0.75, same=False),
        }


@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_level_follows_its_tolerances_if_a_gate_of_either_run_is_far_below_them(
    ours: int, theirs: int
) -> None:
    [(group, level)] = levels([measurement()], {}).items()
    then = replace(level, tolerance=1e-6, floored=theirs)
    now = {group: replace(level, tolerance=2e-6, floored=ours)}
    drifts, rescaled = compare(now, Pin("p", None, "", "", groups={group: then}), True, {})
    assert (bool(drifts), bool(rescaled)) == (not (ours or theirs), bool(ours or theirs))
    assert [(it.before, it.now) for it in rescaled] == [(1e-6, 2e-6)] * bool(ours or theirs)
    # With equal tolerances it is compared, whatever is below them.
    now = {group: replace(now[group], tolerance=1e-6)}
    assert compare(now, Pin("p", None, "", "", groups={group: then}), True, {})[1] == ()


def test_of_other_machines_the_pin_with_the_same_kind_of_reference_is_asked_first() -> None:
    def pin(name: str, reference: str, threads: int = 2, *rows: Measurement) -> Pin:
        made = run(*(rows or [measurement()]), id=name, threads=threads, host={"vendor": name})
        kind = replace(made.manifest.environment.reference, kind=reference)
        environment = replace(made.manifest.environment, reference=kind)
        manifest = replace(made.manifest, environment=environment)
        return pin_of(replace(made, manifest=manifest), {}, "why", "2026-11-01")

    night = run(measurement(), measurement(case="b"))
    both = measurement(), measurement(case="b")
    pins = [pin("live", "live", 2, *both), pin("recorded", "recorded", 4)]
    found = compare_with_pins(night, levels_of(night, {}), pins)
    assert [(each.pin.run, each.comparable) for each in found] == [("recorded", 1), ("live", 1)]
    assert "threads 4 → 2" in found[0].differs
    # One that has no level of this run is named only if there is no other.
    nothing = pin("nothing", "recorded", 2, measurement(case="c"))
    found = compare_with_pins(night, levels_of(night, {}), [nothing])
    assert [(each.pin.run, each.comparable, each.covered) for each in found] == [("nothing", 0, 0)]
    found = compare_with_pins(night, levels_of(night, {}), [*pins, nothing])
    assert [each.pin.run for each in found] == ["recorded", "live"]


def test_a_level_whose_tolerances_changed_is_asked_of_no_second_pin() -> None:
    """Its newest pin says so; an older one would compare it with what was reviewed before."""
    night = run(measurement(tolerance=4e-4))
    old, newest = (
        pin_of(run(measurement(tolerance=t), id=name), {}, "why", date)
        for name, t, date in (("old", 4e-4, "2026-11-01"), ("newest", 8e-4, "2026-11-02"))
    )
    [found] = compare_with_pins(night, levels_of(night, {}), [newest, old])
    assert (found.pin.run, found.comparable, len(found.rescaled)) == ("newest", 0, 1)
    assert found.covered == 1
    # Beside a pin that has nothing of this run it is not left out.
    other = pin_of(run(measurement(case="b"), id="other"), {}, "why", "2026-11-03")
    found = compare_with_pins(night, levels_of(night, {}), [other, newest])
    assert [(each.pin.run, len(each.rescaled)) for each in found] == [("other", 0), ("newest", 1)]


@pytest.mark.parametrize("kind", Kind)
def test_errors_of_many_elements_have_a_level(kind: Kind) -> None:
    many = {Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT, Kind.STATE, Kind.TRAJECTORY}
    assert bool(levels([measurement(kind=kind)], {})) is (kind in many)


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "error_over_reference"},
        {"metric": "exact_share"},
        *({"value": value} for value in (math.nan, math.inf)),
        *({"tolerance": value} for value in (math.nan, math.inf, 0.0, 5e-324)),
    ],
    ids=str,
)
def test_what_is_no_error_of_a_gate_has_no_level(changes: dict[str, Any]) -> None:
    assert levels([measurement(**changes)], {}) == {}
    assert levels([measurement(metric="max_abs")], {}) != {}


def test_a_level_of_equal_gates_is_of_as_many_as_there_are() -> None:
    """Two gates of one identity are other work than one of them."""
    one, two = measurement(quantity="a"), measurement(quantity="b")
    [level], [other] = levels([one], {}).values(), levels([one, two], {}).values()
    assert level.work != other.work


def test_a_level_that_cannot_be_judged_is_a_change_with_its_numbers() -> None:
    name = "2026-11-20T21-30-00Z-1a2b3c4"
    found = PinComparison(Pin(name, None, "2026-11-01", "why"), True, (), 1, ())
    grown = Drift(("case", "edge", "kind", "metric"), "worst", 2.0, 8.0, 25.0)
    fields = ("case", "edge", "all kind gates", "metric")
    assert unseen_change(grown, found) == Change(
        What.NOT_COMPARABLE,
        *fields,
        2.0,
        8.0,
        math.nan,
        note=f"not comparable yet: worst of these gates, 4.00 times that of run {name} on this "
        "machine; rounding between the machines explains 25.00, and 3 over 9 pooled draws",
        kind="kind",
        excess=grown.excess,
    )
    assert rescaled_change(Rescaled(grown.group, 1e-6, 2e-6), found) == Change(
        What.NOT_COMPARABLE,
        *fields,
        None,
        None,
        math.nan,
        note=f"tolerance changed from 1.0e-06 to 2.0e-06 since run {name} on this machine",
        kind="kind",
    )


def test_a_value_that_is_no_number_comes_before_the_largest_that_is() -> None:
    rows = [failing(case=c, value=v) for c, v in (("a", 1.0), ("b", 2.0), ("z", math.nan))]
    assert [m.case for m in _starts(run(*rows), set())] == ["z", "b", "a"]


def test_what_was_stored_twice_is_counted_and_the_first_is_named() -> None:
    rows = [measurement(quantity=name) for name in "aabcbb"]
    night = replace(run(), measurements=tuple(rows))
    told = lacking(night, breaches_of(run()))
    assert told == (
        "Nothing failed, but 2 measurements were stored more than once, first: a (rel_l2) of case "
        "baseline (jax32:oracle). Measure again."
    )


@pytest.mark.parametrize("kind", ["nightly", "shard", "port", "pytest"])
@pytest.mark.parametrize("schema", [None, FIRST_SCHEMA - 1, FIRST_SCHEMA])
def test_a_run_is_held_to_its_contract_unless_it_was_stored_before_there_were_any(
    kind: str, schema: int | None
) -> None:
    """A session of tests plans no gates."""
    suites = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1}]
    night = run(measurement(), kind=kind, suites=suites, contract=[])
    night = replace(night, manifest=replace(night.manifest, migrated_from=schema))
    old, bound = schema == FIRST_SCHEMA - 1, kind != "pytest"
    found = breaches_of(night)
    assert bool(found) is (bound and not old)
    told = lacking(night, found)
    assert bool(told) is bound
    assert ("a version without contracts (schema 4)" in told) is (bound and old)
    assert bool(lacking(night, found, old_schema_may_pass=True)) is (bound and not old)


@pytest.mark.parametrize(
    ("planned", "known", "told"),
    [
        ("a b", "a b stability controls", ""),
        ("a", "a c b", "suite b, c has no gate in the contract"),
        ("a c b", "a", "suite b, c is in the contract but not in the run"),
        ("a b", "a c", "suite c has no gate in the contract"),
    ],
)
def test_suites_of_a_run_are_those_of_its_contract(planned: str, known: str, told: str) -> None:
    rows = [measurement(case=name, suite=name) for name in planned.split()]
    suites = [{"name": n, "status": "ran", "planned": 1, "executed": 1} for n in known.split()]
    night = run(*rows, suites=suites, contract=contracted(rows))
    found = lacking(night, breaches_of(night))
    assert found == (told and f"Nothing failed, but {told}. Measure again.")


def test_runs_that_share_a_gate_were_compared_although_it_has_another_value() -> None:
    row = measurement(deterministic=False)
    decision = decide(run(row), earlier(replace(row, value=2e-6)), alone=True)
    assert decision.word is Word.PASS


@pytest.mark.parametrize(("until", "word"), [("2026-11-20", Word.PASS), ("2026-11-18", None)])
def test_a_suite_that_came_back_after_it_was_retired_is_missed(
    until: str, word: Word | None
) -> None:
    suites = [{"name": n, "status": "ran", "planned": 1, "executed": 1} for n in ("parity", "x")]
    then = earlier(measurement(), suites=suites, day=19)
    entry, other = (Retired(name, until, "why", (name,)) for name in "xz")
    for retired in ((entry,), (entry, other), (other, entry)):
        gone = Vanished(retired=retired)
        found = decide(run(measurement(), suites=suites[:1]), then, gone=gone)
        assert found.word is (word or Word.INCOMPLETE)


def test_suites_that_vanished_and_those_of_the_baseline_are_missed_together() -> None:
    suites = [{"name": n, "status": "ran", "planned": 1, "executed": 1} for n in ("parity", "y")]
    gone = Vanished({"x": Seen("r", "2026-11-01T00:00:00+00:00")})
    found = decide(run(measurement(), suites=suites[:1]), earlier(suites=suites), gone=gone)
    assert (found.word, found.exit_code) == (Word.INCOMPLETE, ExitCode.INCOMPLETE)
    assert "a suite that this run lacks: x, y. If" in found.sentence


def test_a_breach_of_the_contract_is_said_before_work_that_vanished() -> None:
    row = measurement()
    broken = replace(run(row, measurement(case="b")), measurements=(row,))
    gone = Vanished({}, {("c", "jax32:oracle", "logits"): Seen("r", "2026-11-01T00:00:00+00:00")})
    assert "does not plan" not in decide(broken, None, gone=gone).sentence
    assert "does not plan" in decide(run(row), None, gone=gone).sentence
    assert decide(run(row), None, gone=gone).word is Word.INCOMPLETE


def test_work_that_vanished_is_said_before_a_value_that_left_its_history() -> None:
    row = measurement(value=3e-6, deterministic=False)
    past = {row.key: Past((1e-9,) * NOISE_LEAST)}
    assert decide(run(row), None, past).word is Word.REGRESSED
    gone = Vanished({}, {("c", "jax32:oracle", "logits"): Seen("r", "2026-11-01T00:00:00+00:00")})
    found = decide(run(row), None, past, gone=gone)
    assert (found.word, found.counts.worse) == (Word.INCOMPLETE, 1)


def test_without_a_baseline_no_failure_is_called_new() -> None:
    assert What.NEW.wording(True) == What.NEW.value != "failure" == What.NEW.wording(False)
    for what in {*What} - {What.NEW}:
        assert what.wording(True) == what.wording(False) == what.value


def test_of_what_is_not_comparable_a_level_that_grew_comes_before_another_work() -> None:
    """Though it has no tolerance: its excess says how grave it is."""
    grew = replace(PLACE, what=What.NOT_COMPARABLE, tolerance=math.nan, excess=0.5)
    other = replace(PLACE, what=What.NOT_COMPARABLE)
    assert gravest_first([other, grew]) == (grew, other)


def test_of_levels_that_grew_unseen_the_one_that_grew_most_comes_first() -> None:
    """And of one level the value that grew most, whatever rounding explains."""
    a = of_group("a", "typical", 3.5, 90.0), of_group("a", "worst", 4.5, 9.0)
    b = of_group("b", "typical", 4.0, 900.0), of_group("b", "worst", 3.2, 4.0)
    found = PinComparison(Pin("p", None, "2026-11-01", "why"), False, (), 2, (*a, *b))
    assert found.unseen == (a[1], b[0])


def test_a_spread_beyond_every_float_explains_nothing() -> None:
    assert spread_of([10**400, 1]) == spread_of([1, 10**400]) == STILL


def test_meshes_that_both_runs_measured_are_pooled_without_the_others() -> None:
    names = [f"mesh net data={n}" for n in (2, 4, 8)]
    rows = [measurement(case=n, identity=n, edge="mesh32:one32") for n in names]
    pin = pin_of(run(*rows[:2]), {}, "why", "2026-11-01")
    now = levels_of(run(*rows), {})
    ours, theirs, counts = _meshes_pooled(now, pin)
    common = "mesh net"
    assert list(counts.values()) == [2]
    # The third is compared with nothing, and counts as such.
    [found] = compare_with_pins(run(*rows), now, [pin])
    assert (found.levels, found.covered) == (len(now), len(now) - 1)
    assert {group[0] for group in ours} == {common, names[2]}
    assert {group[0] for group in theirs.groups} == {common}


def test_meshes_of_a_program_are_one_level_that_is_asked_of_no_second_pin() -> None:
    """Nor is a mesh that the newer pin lacks: alone it says nothing of another machine."""
    names = [f"mesh net data={n}" for n in (2, 4, 8)]
    rows = [measurement(case=n, identity=n, edge="mesh32:one32") for n in names]
    newer, older = (
        pin_of(run(*of, id=name, host={"vendor": name}), {}, "why", "2026-11-01")
        for name, of in (("newer", rows[:2]), ("older", rows))
    )
    night = run(*rows)
    [found] = compare_with_pins(night, levels_of(night, {}), [newer, older])
    assert (found.pin.run, found.comparable, found.covered) == ("newer", 1, 2)


def test_a_comparison_without_a_mesh_in_its_name_is_pooled_with_none() -> None:
    names = ["mesh net", "mesh net data=2", "mesh net data=4"]
    rows = [measurement(case=n, identity=n, edge="mesh32:one32") for n in names]
    [(common, own)] = over_meshes(levels_of(run(*rows), {})).items()
    assert common[0] == "mesh net" and [group[0] for group in own] == names[1:]
    assert not over_meshes(levels_of(run(*rows[:2]), {}))


def test_a_fact_that_is_no_number_any_more_changed() -> None:
    fact = measurement(value=1.0, tolerance=math.nan, verdict=Verdict.INFO)
    [found] = changes_of(run(replace(fact, value=math.nan)), earlier(fact))
    assert found.what is What.CHANGED
    assert not changes_of(*(make(replace(fact, value=math.nan)) for make in (run, earlier)))


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL, Verdict.NOT_COMPARABLE])
def test_a_gate_that_is_gone_is_told_whatever_it_was(verdict: Verdict) -> None:
    old = measurement(quantity="old", value=9e-6, verdict=verdict)
    old = replace(old, tolerance=1e-5) if verdict is Verdict.PASS else old
    [found] = changes_of(run(measurement()), earlier(measurement(), old))
    assert (found.what, found.quantity) == (What.GONE, "old")


def test_what_could_not_be_compared_neither_persists_nor_is_fixed() -> None:
    blocked = measurement(value=math.nan, verdict=Verdict.NOT_COMPARABLE)
    [found] = changes_of(run(failing()), earlier(blocked))
    assert found.what is What.NEW
    [found] = changes_of(run(measurement()), earlier(blocked))
    assert found.what is What.CHANGED
    assert not changes_of(run(replace(blocked, value=9e-6)), earlier(failing()))
    fact = measurement(value=9e-6, tolerance=math.nan, verdict=Verdict.INFO)
    assert not [c for c in changes_of(run(fact), earlier(failing())) if c.what is What.FIXED]


@pytest.mark.parametrize("repeated", [None, True, False])
def test_a_value_need_not_repeat_if_it_did_not_in_the_baseline(repeated: bool | None) -> None:
    """Older baselines do not say whether it did."""
    found = changes_of(run(ROW), earlier(replace(OLD, deterministic=repeated)))
    assert [c.what for c in found] == [What.CHANGED] * (repeated is not False)


def test_a_value_that_fell_below_its_past_is_better() -> None:
    row = measurement(value=1e-9, deterministic=False)
    [found] = changes_of(run(row), None, {row.key: Past((1e-6,) * NOISE_LEAST)})
    assert found.what is What.BETTER and found.before == pytest.approx(1e-6)


def test_a_little_above_the_highest_value_so_far_is_no_step() -> None:
    high = 1e3 * NOISE_FLOOR
    assert step(high * BEYOND, [*SAME, high]) is None
    assert step(BEYOND**-1 / high, [*SAME, 1 / high]) is None


def test_levels_are_compared_by_equal_work_and_the_furthest_comes_first() -> None:
    rows = [measurement(case=case, identity=case) for case in "abc"]
    pin = pin_of(run(*rows), {}, "why", "2026-11-01")
    now = [replace(rows[0], value=1.5e-6), replace(rows[1], value=1e-7, tolerance=4e-6)]
    now.append(replace(rows[2], identity="other"))
    drifts, rescaled = compare(levels_of(run(*now), {}), pin, True, {})
    assert [drift.group[0] for drift in drifts] == ["b", "b", "a", "a"] and rescaled == ()


def test_meshes_of_other_work_are_not_pooled() -> None:
    names = [f"mesh net data={n}" for n in (2, 4)]
    rows = [measurement(case=n, identity=n, edge="mesh32:one32") for n in names]
    then = run(rows[0], replace(rows[1], identity="other"))
    pin = pin_of(then, {}, "why", "2026-11-01")
    ours, theirs, counts = _meshes_pooled(levels_of(run(*rows), {}), pin)
    assert not counts
    assert [group[0] for group in ours] == [group[0] for group in theirs.groups] == names


def test_a_pooled_level_has_a_tolerance_if_all_have_one_and_counts_all_floors() -> None:
    [level] = levels([measurement()], {}).values()
    one, two = replace(level, floored=1, spread=(0.1, 0.4)), replace(level, floored=1)
    assert pooled([one, two]).floored == 2 and pooled([two, one]).spread == (0.1, 0.4)
    assert pooled([one, replace(two, spread=(0.3, 0.2))]).spread == (0.3, 0.4)
    assert pooled([one, two]).tolerance == level.tolerance
    assert pooled([one, replace(two, tolerance=0.0)]).tolerance == 0.0


def test_every_level_that_any_run_of_this_machine_has_is_held() -> None:
    rows = [measurement(case=case, identity=case) for case in "ab"]
    other = pin_of(run(*rows, host={"vendor": "other"}), {}, "why", "2026-11-01")
    own = [pin_of(run(row), {}, "why", "2026-11-01") for row in rows]
    night = run(*rows)
    *here, there = compare_with_pins(night, levels_of(night, {}), [*own, other])
    assert [each.comparable for each in here] == [1, 1]
    assert {case for case, *_ in there.held} == {"a", "b"}


@pytest.mark.parametrize(
    "kinds",
    [("recorded", "live"), ("live", "recorded"), ("live", "live"), ("recorded", None)],
    ids=str,
)
def test_only_a_night_of_recordings_after_a_live_one_lacks_live_suites(
    kinds: tuple[str, str | None],
) -> None:
    now, then = (
        [{"name": name, "status": "ran", "planned": 1, "executed": 1} for name in names]
        for names in (("parity",), ("parity", "port"))
    )
    nights = (
        make(measurement(), suites=suites, reference={"kind": kind})
        for make, suites, kind in zip((run, earlier), (now, then), kinds, strict=True)
    )
    whole = kinds == ("recorded", "live")
    assert (decide(*nights).word is Word.INCOMPLETE) is not whole


def test_a_level_that_all_but_vanished_has_an_excess() -> None:
    """Though its ratio is smaller than any float."""
    assert math.isfinite(drift(1e200, 1e-200, 2.0).excess)


def test_the_work_of_a_pooled_level_does_not_depend_on_the_order_of_meshes() -> None:
    one, two = levels([measurement(case=n, identity=n) for n in "ab"], {}).values()
    assert one.work != two.work and pooled([one, two]) == pooled([two, one])
