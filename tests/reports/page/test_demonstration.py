"""The demonstration: two real runs, sixty nights and more, and a page that tells what happened."""

from __future__ import annotations

import re

import pytest

from parity.faults import by_name
from reports.registry.lookup import judge_stored
from reports.store.runs import read_run
from reports.store.schema import PAGE
from reports.subjects.megalodon import suites as megalodon_suites
from reports.suite_run import SuiteRun
from reports.verdict.decide import Word
from reports.verdict.history import load_history
from tests.reports.page.demonstration import BAD, FAULT, demonstrate

# Of real nights, which want the program as users compile it: `make test` does without LLVM's
# optimisations, and sums one after another lose what a night tells.
pytestmark = pytest.mark.sweep
NIGHTS = 64


@pytest.fixture(scope="module")
def last_two(tmp_path_factory):
    def skipped(checkpoint, model, report):
        return SuiteRun("stability", planned=1, executed=1)

    with pytest.MonkeyPatch.context() as patch:
        # The probes have tests of their own; here they would only cost time.
        patch.setattr(megalodon_suites, "run_stability", skipped)
        return demonstrate(tmp_path_factory.mktemp("demonstration"), ("slow_decay",), NIGHTS)


def test_the_night_before_held_and_repeated_exactly(last_two):
    decision = judge_stored(last_two[0]).decision
    assert decision.word is Word.PASS
    assert "Nothing changed" in decision.sentence


def test_the_last_night_is_red_where_the_bug_is(last_two):
    decision = judge_stored(last_two[1]).decision
    assert decision.word is Word.REGRESSED
    assert int(decision.exit_code) == 1
    assert decision.starts[0].quantity == by_name(FAULT).stage
    assert by_name(FAULT).stage in decision.sentence
    text = (last_two[1] / PAGE).read_text(encoding="utf-8")
    assert re.search(rf'class="tag fail">planted .*:(</span>)? {FAULT}</span>', text)
    assert f"Trend, {NIGHTS} runs" in text


def test_its_trend_shows_the_nights_on_which_the_bug_was_there_before(last_two):
    folder = last_two[1]
    run = read_run(folder)
    history = load_history(folder.parent, run)
    m = judge_stored(folder).decision.starts[0]
    series = history.series[m.case, m.edge, m.quantity, m.metric]
    assert len(series) == NIGHTS - 1
    outside = [len(series) - i for i, share in enumerate(series) if share > 1]
    assert outside == sorted(BAD, reverse=True)


@pytest.mark.sweep
def test_its_failing_tensors_are_described_with_the_bits_that_differ(last_two):
    run = read_run(last_two[1])
    first = run.tensors[0]
    assert first.quantity == by_name(FAULT).stage
    assert sum(first.histogram[1:]) > 0.9 * sum(first.histogram)
    assert all(w.actual != w.expected for w in first.worst)
    text = (last_two[1] / PAGE).read_text(encoding="utf-8")
    assert re.search(r'<details id="t-[0-9a-f]{10}">\s*<summary>Element by element', text)
