"""Rules of a verdict on a few rows each: what counts as moved, and what comes first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parity.engine.measure.measurement import Verdict
from parity.tolerances import (
    DRIFT_DEVIATIONS,
    DRIFT_SHARE,
    DRIFT_TYPICAL,
    NOISE_FLOOR,
    NOISE_LEAST,
    NOISE_MADS,
)
from reports.verdict.decide import ExitCode, _starts
from reports.verdict.drift import UNSEEN, Drift, limit
from reports.verdict.history import Past
from reports.verdict.levels import RECENT, STILL, level_of, levels, spread_of
from reports.verdict.noise import step
from reports.verdict.several import _cells
from stability.core.findings import Severity
from tests.reports.nights import explained, failing, finding, measurement, run

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
