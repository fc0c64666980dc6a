"""The history of a bench on the page: where a figure changed its level, and when none did."""

from __future__ import annotations

import dataclasses
import math

import pytest

from reports.bench.figures import length_timings
from reports.page import svg
from reports.page.render import render
from reports.page.sections.speed import changes, markdown, rows, watched
from reports.store.runs import Run
from reports.store.timings import Timing
from reports.verdict.change_points import LEAST_RUNS, ChangePoint
from reports.verdict.decide import decide
from reports.verdict.history import History
from tests.reports.nights import altered, bench, measurement, run

RUNS = 16
WOBBLE = (1.0, 1.01, 0.99, 1.02, 0.98)


def commit(run: int) -> str:
    return f"{run:02d}" * 20


def benches(before: float, after: float, count: int = RUNS) -> list[Run]:
    """Benches a day apart, whose ratio changes in the ninth; each of its own commit."""
    speeds = [(before if i < 8 else after) * WOBBLE[i % 5] for i in range(count)]
    days = [bench(day=1 + i, speedup=speed) for i, speed in enumerate(speeds)]
    return [altered(r, commit=commit(i), dirty=False) for i, r in enumerate(days)]


def section(history: list[Run]) -> str:
    night = run(measurement())
    page = render(night, decide(night, None), History(benches=tuple(history)))
    return page[page.index('<section id="speed"') : page.index('<section id="tolerances"')]


@pytest.mark.parametrize(("after", "word"), [(9.0, "better"), (3.0, "worse")])
def test_a_change_names_its_figures_its_run_and_its_commits(after: float, word: str) -> None:
    days = benches(6.0, after)
    found = changes(days)
    assert {line["work"] for line in found} == {"forward", "train step", "prefill", "decode"}
    for line in found:
        assert line["word"] == word
        assert line["run"] == days[8].id
        assert line["created"] == days[8].manifest.created
        assert line["commits"] == f"{commit(7)[:10]}..{commit(8)[:10]}"
    text = section(days)
    assert days[8].id in text.replace("<wbr>", "")
    assert text.count(f">{word}</span>") == 4
    assert text.count('class="level"') == 2 * 4
    assert "probability of at most 1%" in text


@pytest.mark.parametrize(("factor", "word"), [(1.5, "worse"), (0.7, "better")])
def test_farther_from_the_floor_is_worse(factor: float, word: str) -> None:
    days = benches(6.0, 6.0)
    moved = [
        dataclasses.replace(day, timings=tuple(_farther(t, factor) for t in day.timings))
        if i >= 8
        else day
        for i, day in enumerate(days)
    ]
    found = changes(moved)
    assert {line["work"] for line in found} == {"forward, over its floor"}
    assert [line["word"] for line in found] == [word]


def _farther(timing: Timing, factor: float) -> Timing:
    if (timing.work, timing.metric) != ("forward", "floor_ratio"):
        return timing
    return dataclasses.replace(timing, value=factor * timing.value)


def test_without_a_change_the_page_says_so() -> None:
    text = section(benches(6.0, 6.0))
    assert f"No figure changed its level over {RUNS} benches" in text
    assert f"at least {LEAST_RUNS} are needed" in text
    assert 'class="level"' not in text
    assert changes(benches(6.0, 12.0, LEAST_RUNS - 1)) == []


def test_runs_of_another_machine_are_no_history() -> None:
    days = benches(6.0, 9.0)
    # Before the change another machine: what is left has one level.
    aside = [bench(day=1 + i, speedup=6.0, identity="elsewhere") for i in range(8)]
    assert changes([*aside, *days[8:]]) == []


def test_every_quotient_that_was_measured_is_watched() -> None:
    last = bench()
    # Four works with a ratio and a floor each, and a peak.
    assert watched([last]) == 4 * 2 + 1
    assert watched([bench(missing="not installed")]) == 4


def test_lengths_are_lines_whose_goal_is_the_largest_value() -> None:
    shared = {"dtype": "float32", "device": "cpu", "identity": "same"}
    rounds = {2048: (1.0,), 8192: (4.4,), 32768: (24.0,)}
    timings = length_timings("forward", rounds, {2048: 1e6, 8192: 2e6, 32768: 2e7}, shared)
    night = Run(bench().manifest, timings=timings)
    lines = {line["work"]: line for line in rows([night])}
    short = lines["forward, 8192 tokens, time per token over the shortest"]
    long = lines["forward, 32768 tokens, time per token over the shortest"]
    assert (short["ratio"], short["goal"], short["state"]) == ("1.10", "≤ 1.3", "reached")
    assert (long["ratio"], long["state"]) == ("1.50", "missed")
    assert "memory per token over a short one's | 3.80 | ≤ 1.1: missed |" in markdown(night)


def test_a_trend_draws_its_levels_and_marks_what_is_above_the_largest() -> None:
    series = (1.0, 1.1, 2.0, 2.1)
    change = ChangePoint(2, 1.05, 2.05)
    text = svg.trend(series, 1.3, at_most=True, changes=(change,))
    assert text.count('class="cross"') == 2
    assert text.count('class="level"') == 2
    assert "1 change of level, goal at most 1.3" in text
    assert svg.trend(series, 1.3).count('class="cross"') == 2
    assert 'class="level"' not in svg.trend(series, math.nan)
