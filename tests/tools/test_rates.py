"""The verdict on synthetic histories: what is found, how soon, and what is claimed falsely."""

from __future__ import annotations

import math
import re

import pytest

from parity import tolerances
from reports.verdict import changes, noise
from reports.verdict.changes import What
from reports.verdict.decide import Word, decide
from reports.verdict.history import Past
from reports.verdict.noise import step
from reports.verdict.pins import pin_of
from tests.helpers import ROOT
from tests.reports.nights import earlier, failing, measurement, run
from tools.rates import SCENARIOS, Scenario, measure

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
DOCUMENT = ROOT / "docs" / "verdicts.md"
KEY = ("baseline", "jax32:oracle", "logits", "rel_l2")
TRIALS = 40


def scenario(start: str) -> Scenario:
    [found] = [s for s in SCENARIOS if s.name.startswith(start)]
    return found


def documented() -> dict[str, list[str]]:
    """The table of docs/verdicts.md: cells by the name of the history."""
    rows = re.findall(r"^\| (.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {first: rest for first, *rest in cells if first in BY_NAME}


def test_the_document_has_every_history() -> None:
    assert list(documented()) == list(BY_NAME)


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS if s.repeats])
def test_what_repeats_is_judged_as_documented_and_never_falsely(name: str) -> None:
    rate = measure(BY_NAME[name], 1)
    cells = documented()[name]
    assert rate.false == 0
    assert cells[1].startswith("0 of")
    if BY_NAME[name].nights:
        assert rate.found[0] is not None
        assert cells[-1] == str(rate.found[0] + 1)


@pytest.mark.sweep
def test_noise_is_told_from_steps_as_documented() -> None:
    calm, large, inf = (
        measure(scenario(f"10 % noise, {what}"), TRIALS)
        for what in ("nothing", "1.5 times", "one Inf")
    )
    shown = float(documented()[large.scenario.name][3].rstrip(" %")) / 100
    # Four standard deviations of a binomial count.
    assert abs(large.within(3) - shown) <= 4 * math.sqrt(shown * (1 - shown) / TRIALS)
    assert inf.within(1) == 1.0
    said = documented()[calm.scenario.name][1]
    false, of = (int(n.replace(",", "")) for n in said.split(" of "))
    expected = calm.quiet * false / of
    assert calm.false <= expected + 4 * math.sqrt(expected)


@pytest.mark.sweep
def test_two_modes_are_no_step_once_both_were_seen() -> None:
    rate = measure(scenario("two modes, 1 and 3 times, one night in two"), TRIALS)
    assert rate.false <= 0.02 * rate.quiet


def test_a_rule_that_never_speaks_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the measurement itself."""
    monkeypatch.setattr(changes, "step", lambda value, past: None)
    assert measure(scenario("10 % noise, 1.5 times"), 2).within(3) == 0.0


@pytest.mark.sweep
def test_a_rule_without_its_margins_cries_wolf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "NOISE_MADS", 1.0)
    monkeypatch.setattr(noise, "NOISE_FLOOR", 1.0)
    loud = measure(scenario("10 % noise, nothing"), TRIALS)
    assert loud.false > 0.05 * loud.quiet


def noisy(value: float, **changes: object):
    return measurement(value=value, deterministic=False, **changes)


@pytest.mark.parametrize(
    ("value", "past", "said"),
    [
        (1.5, [1.0] * 5, 1.5),
        (0.6, [1.0] * 5, 0.6),
        (1.04, [1.0] * 5, None),
        (1.5, [1.0] * 4, None),
        (3.0, [1.0] * 13 + [3.0], None),
        (0.0, [1.0] * 5, None),
        (2.02e-6, [1e-6] * 9 + [2e-6], None),
        (1.0, [0.0] * 14, None),
        (math.nan, [1.0] * 5, None),
    ],
    ids=["up", "down", "five percent", "too few", "seen", "hardly beyond", "zero", "zeros", "none"],
)
def test_a_step_is_far_and_unseen(value: float, past: list[float], said: float | None) -> None:
    assert step(value, past) == (None if said is None else pytest.approx(said))


def test_a_step_regresses_and_says_from_what() -> None:
    past = {KEY: Past((1e-6,) * 6, True)}
    decision = decide(run(noisy(1.5e-6)), earlier(noisy(1e-6)), past)
    assert (decision.word, decision.counts.worse) == (Word.REGRESSED, 1)
    assert "1.50 times the median of 6 runs" in decision.sentence
    better = decide(run(noisy(0.5e-6)), earlier(noisy(1e-6)), past)
    assert (better.word, better.changes[0].what) == (Word.PASS, What.BETTER)
    # A value that a replay repeated today, and that varied another night, is noisy.
    flaky = decide(run(measurement(value=1.02e-6)), earlier(measurement()), past)
    assert (flaky.word, flaky.counts.changed) == (Word.PASS, 0)


def test_a_drift_is_held_against_the_pinned_run_of_the_same_work_only() -> None:
    pin = pin_of(run(measurement()), {}, "the first", "2026-11-01")
    near = decide(run(measurement(value=1.29e-6)), None, {}, [pin])
    far = decide(run(measurement(value=1.31e-6)), None, {}, [pin])
    assert (near.word, far.word) == (Word.PASS, Word.REGRESSED)
    assert "1.31 times that of run" in far.sentence
    assert "1 of 1 level comparable" in far.against[0]
    other = decide(run(measurement(value=1.31e-6, identity="other")), None, {}, [pin])
    assert (other.word, "0 of 1 level" in other.against[0]) == (Word.PASS, True)
    # A level that fell is told, and no reason to be red.
    better = decide(run(measurement(value=0.5e-6)), None, {}, [pin])
    assert (better.word, [c.what for c in better.changes]) == (Word.PASS, [What.BETTER])
    # Far below its tolerance a value may move freely.
    tiny = pin_of(run(measurement(value=1e-12)), {}, "tiny", "2026-11-01")
    free = tolerances.DRIFT_SHARE * measurement().tolerance
    assert decide(run(measurement(value=free)), None, {}, [tiny]).word is Word.PASS


def test_a_suite_that_vanished_is_incomplete_unless_cases_were_selected() -> None:
    both = [{"name": n, "status": "ran", "planned": 1, "executed": 1} for n in ("parity", "seams")]
    before = earlier(measurement(), suites=both)
    decision = decide(run(measurement(), suites=both[:1]), before)
    assert (decision.word, "a suite that this run lacks: seams" in decision.sentence) == (
        Word.INCOMPLETE,
        True,
    )
    asked = run(measurement(), suites=both[:1], selected=["plain"])
    assert decide(asked, before).word is Word.PASS
    rows = measurement(), measurement(case="seams", suite="seams")
    assert decide(run(*rows, suites=both), before).word is Word.PASS


@pytest.mark.parametrize(
    ("now", "before", "word"),
    [
        (measurement(), None, Word.PASS),
        (failing(), None, Word.REGRESSED),
        (measurement(value=2e-6, identity="new case"), measurement(), Word.PASS),
        (measurement(value=2e-6, device="cuda", identity="cuda"), measurement(), Word.PASS),
        (measurement(value=math.inf), measurement(), Word.REGRESSED),
    ],
    ids=["first run", "first run, broken", "changed case", "other device", "Inf"],
)
def test_single_nights(now, before, word: Word) -> None:
    decision = decide(run(now), before and earlier(before))
    assert decision.word is word
    if before and now.identity != before.identity:
        [change] = decision.changes
        assert (change.what, change.before) == (What.NOT_COMPARABLE, None)
