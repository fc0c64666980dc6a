"""The first night on a machine: no level may grow by more than 3 times unseen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from parity.tolerances import DRIFT_DEVIATIONS
from reports.provenance.host import FIELDS
from reports.registry.lookup import change_lines
from reports.store.runs import Run
from reports.verdict import pins
from reports.verdict.changes import What
from reports.verdict.decide import ExitCode, Word, decide
from reports.verdict.drift import UNSEEN, compare_with_pins, levels_of, limit
from reports.verdict.pins import pin_of
from reports.verdict.sentences import first_night
from tests.reports.nights import measurement, run

GROUP = "baseline | jax32:oracle | logits | rel_l2"
THERE = dict.fromkeys(FIELDS, "known") | {"model": "another"}
LEVEL = 1e-7
WIDE = 0.581
"""Deviation of the widest level of Megalodon's pinned runs that is pooled over no draws."""


def night(growth: float, spread: float = WIDE, **changes: Any) -> Run:
    row = measurement(value=LEVEL * growth, tolerance=1e-5)
    return run(row, spreads={GROUP: [spread, spread]}, **changes)


def first(growth: float, spread: float = WIDE):
    pin = pin_of(night(1.0, spread), {}, "as measured", "2026-11-01")
    return decide(night(growth, spread, host=THERE), None, {}, [pin])


@pytest.mark.parametrize(
    ("growth", "word", "code"),
    [
        (1.0, Word.PASS, ExitCode.PASS),
        (0.99 * UNSEEN, Word.PASS, ExitCode.PASS),
        (1.01 * UNSEEN, Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE),
        (20.0, Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE),
        (30.0, Word.REGRESSED, ExitCode.REGRESSION),
        # A level that fell hides no loss; the anchor that the night becomes is the lower one.
        (0.2, Word.PASS, ExitCode.PASS),
    ],
)
def test_a_level_that_rounding_alone_scatters_widely_passes_up_to_the_limit(
    growth: float, word: Word, code: ExitCode
) -> None:
    decision = first(growth)
    assert (decision.word, decision.exit_code) == (word, code), decision.sentence
    if word is Word.NOT_COMPARABLE:
        assert f"{growth:.2f} times" in decision.sentence and "pin" in decision.sentence
        [change] = decision.changes
        assert change.what is What.NOT_COMPARABLE
        assert "not comparable yet" in change_lines(decision.changes)[0]


def test_what_is_not_comparable_yet_is_counted() -> None:
    decision = first(1.5)
    assert "1 of the compared is not comparable yet" in decision.sentence
    assert "0 of 1 level comparable, 1 not comparable yet" in decision.against[0]
    # Negative control: a level that rounding scatters little.
    decision = first(1.5, 0.1)
    assert "not comparable yet" not in decision.sentence + decision.against[0]
    assert decision.word is Word.PASS


def test_a_level_of_a_narrow_spread_is_judged_by_its_own_limit() -> None:
    narrow = math.log(2.5) / (DRIFT_DEVIATIONS * math.sqrt(2))
    assert first(2.4, narrow).word is Word.PASS
    assert first(2.6, narrow).word is Word.REGRESSED


def test_a_failure_is_said_before_what_is_not_comparable_yet() -> None:
    pin = pin_of(
        run(measurement(value=LEVEL), measurement(case="b", value=LEVEL), spreads={GROUP: [1, 1]}),
        {},
        "as measured",
        "2026-11-01",
    )
    now = run(
        measurement(value=10 * LEVEL),
        measurement(case="b", value=10 * LEVEL),
        spreads={GROUP: [1, 1]},
        host=THERE,
    )
    assert decide(now, None, {}, [pin]).word is Word.REGRESSED


def test_an_earlier_run_of_the_machine_makes_it_comparable() -> None:
    """The pin of another machine then explains what it always did."""
    elsewhere = pin_of(night(1.0), {}, "as measured", "2026-11-01")
    here = pin_of(night(10.0, host=THERE), {}, "looked at", "2026-11-02")
    tonight = night(10.0, host=THERE)
    assert decide(tonight, None, {}, [elsewhere]).word is Word.NOT_COMPARABLE
    decision = decide(tonight, None, {}, [here, elsewhere])
    assert decision.word is Word.PASS
    assert not any("not comparable yet" in text for text in decision.against)
    # Of another case, the machine's own pin says nothing.
    other = pin_of(run(measurement(case="b"), host=THERE), {}, "looked at", "2026-11-02")
    assert decide(tonight, None, {}, [other, elsewhere]).word is Word.NOT_COMPARABLE


def test_a_night_is_the_first_one_until_a_level_of_its_machine_can_be_compared() -> None:
    """Whatever is pinned, and how many pins there are."""
    tonight = night(1.0, host=THERE)
    own, elsewhere, of_another_case = (
        pin_of(made, {}, "as measured", "2026-11-01")
        for made in (tonight, night(1.0), run(measurement(case="b"), host=THERE))
    )
    other_work = pin_of(
        run(measurement(identity="other"), host=THERE), {}, "as measured", "2026-11-01"
    )
    for chosen, first_one in (
        ([], True),
        ([elsewhere], True),
        ([of_another_case], True),
        ([other_work], True),
        ([of_another_case, elsewhere], True),
        ([own], False),
        ([own, elsewhere], False),
    ):
        comparisons = compare_with_pins(tonight, levels_of(tonight, {}), chosen)
        assert bool(first_night(tonight, comparisons)) is first_one
    # A machine that cannot be told from another has its first night every night.
    unknown = night(1.0, host={})
    itself = pin_of(unknown, {}, "as measured", "2026-11-01")
    comparisons = compare_with_pins(unknown, levels_of(unknown, {}), [itself])
    assert first_night(unknown, comparisons)
    # A pin of a machine that is not known either is compared, as one of another machine.
    assert [(it.pin.run, it.same, it.comparable) for it in comparisons] == [(itself.run, False, 1)]


def test_the_tolerance_of_a_drift_is_the_largest_level_that_passes() -> None:
    """Counted from what is pinned, however far the level is from it."""
    pin = pin_of(night(1.0, 0.1), {}, "as measured", "2026-11-01")

    def drifted(growth: float, **where: Any):
        return [
            change
            for change in decide(night(growth, 0.1, **where), None, {}, [pin]).changes
            if change.what is What.DRIFTED
        ]

    for where in ({}, {"host": THERE}):
        for growth in (3.0, 9.0):
            [change] = drifted(growth, **where)
            largest = change.tolerance / LEVEL
            # A level is kept with three digits.
            assert not drifted(0.98 * largest, **where) and drifted(1.02 * largest, **where)
            assert change.before == LEVEL and change.now == pytest.approx(growth * LEVEL)


def test_the_draws_that_would_be_enough_are_enough() -> None:
    """Pooled over n draws the deviation is the nth part of its variance's root."""
    pin = pin_of(night(1.0), {}, "as measured", "2026-11-01")
    [comparison] = decide(night(1.0, host=THERE), None, {}, [pin]).comparisons
    [drift] = comparison.not_yet
    assert limit(1.0, WIDE / math.sqrt(drift.draws), same=False) <= UNSEEN
    assert limit(1.0, WIDE / math.sqrt(drift.draws - 1), same=False) > UNSEEN


def test_how_many_levels_of_the_pinned_runs_are_not_comparable_yet() -> None:
    """docs/verdicts.md says so."""
    counted = {}
    for path in sorted(pins.FOLDER.glob("*.json")):
        pin = pins.read(path)
        assert pin is not None
        wide = [
            level
            for level in pin.groups.values()
            if max(limit(1.0, s, same=False) for s in level.spread) > UNSEEN
        ]
        counted[path.stem.rpartition("-")[2], pin.run] = (len(wide), len(pin.groups))
    text = (Path(__file__).parents[3] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    for wide, total in counted.values():
        assert f"| {total} | {wide} |" in text


def test_the_largest_gate_of_a_group_counts_too() -> None:
    """One gate of nine that grew fourfold moves their mean by a sixth."""

    def gates(growth: float, **changes: Any) -> Run:
        rows = [
            measurement(quantity=f"logits {n}", value=LEVEL * (growth if n == 0 else 1.0))
            for n in range(9)
        ]
        return run(*rows, spreads={GROUP: [0.01, WIDE]}, **changes)

    pin = pin_of(gates(1.0), {}, "as measured", "2026-11-01")
    decision = decide(gates(4.0, host=THERE), None, {}, [pin])
    assert decision.word is Word.NOT_COMPARABLE
    assert "times the worst logits of" in decision.sentence
    assert decide(gates(2.0, host=THERE), None, {}, [pin]).word is Word.PASS


def test_tests_of_ports_are_held_against_no_night_of_megalodon(tmp_path: Path) -> None:
    """Negative control: a session that measured Megalodon is."""
    asked = {"kind": "pytest", "selected": ["everything"]}
    port = {"name": "mlp", "title": "mlp", "holds": True, "sides": {"original": "torch"}}
    # The reference of a session of ports is the kind of their originals.
    for reference in ({}, {"kind": "torch"}):
        alone = run(measurement(suite="mlp"), ports=[port], cases=[], reference=reference, **asked)
        assert pins.home(tmp_path / "runs", alone.manifest).is_relative_to(tmp_path)
        assert first_night(alone, []) == ""
    # Beside a port too, and though its rows are of no case that the package knows.
    both = [measurement(), measurement(suite="mlp")]
    for rows, changes in ((both[:1], {}), (both, {"ports": [port], "cases": []})):
        megalodon = run(*rows, **changes, **asked)
        assert pins.home(tmp_path / "runs", megalodon.manifest) == pins.FOLDER
        assert "no levels were compared" in first_night(megalodon, [])
