"""Since when a gate fails: the last run in which it held, and the commits after it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from reports.verdict.decide import decide
from reports.verdict.history import History
from reports.verdict.since import Since, commit_range, commits, log_command, sentence, since_when
from tests.reports.nights import earlier, failing, manifest, measurement, run

GATE = failing()
NIGHTS = tuple(
    manifest(id=f"night-{i}", commit=f"{i}" * 40, created=f"2026-11-1{i}T00:00:00+00:00")
    for i in range(5)
)


def history(*shares: float | None) -> History:
    return History(
        runs=tuple(m.id for m in NIGHTS),
        series={GATE.key: shares},
        manifests=NIGHTS,
    )


@pytest.mark.parametrize(
    ("shares", "held", "failed", "runs"),
    [
        ((0.5, 0.5, 0.5, 0.5, 0.5), "night-4", "today", 1),
        ((0.5, 0.5, 0.5, 3.0, 3.0), "night-2", "night-3", 3),
        # A run that did not measure it says nothing: the range becomes wider.
        ((0.5, 0.5, None, 3.0, None), "night-1", "night-3", 2),
        # Only the newest streak counts, and what is not a number did not hold.
        ((0.5, 3.0, 1.0, math.nan, math.inf), "night-2", "night-3", 3),
        ((2.0, 3.0, 2.0, 2.0, 2.0), None, "night-0", 6),
    ],
)
def test_a_gate_fails_since_the_run_after_the_last_in_which_it_held(shares, held, failed, runs):
    today = run(GATE, id="today")
    since = since_when(GATE, today, history(*shares))
    assert since is not None
    assert (since.held and since.held.id, since.failed.id, since.runs) == (held, failed, runs)
    assert since.folder == (held or "")


def test_a_long_streak_is_shown_by_thousands():
    night = run(GATE)
    told = Since(night.manifest, night.manifest, 1234, "before")
    assert sentence(told, night) == "It failed in 1,234 runs in a row."


def test_without_an_earlier_measurement_nothing_is_said():
    assert since_when(GATE, run(GATE), History()) is None
    assert since_when(GATE, run(GATE), history(None, None, None, None, None)) is None


def test_the_range_is_of_commits_that_git_can_list():
    before, after = NIGHTS[1], NIGHTS[3]
    assert commit_range(before, after) == "1111111111..3333333333"
    assert log_command(before, after) == "git log --oneline 1111111111..3333333333"
    # A run outside git has no commit.
    for unknown in ((replace(before, commit=""), after), (before, replace(after, commit=""))):
        assert commit_range(*unknown) == log_command(*unknown) == ""
    unclean = replace(before, dirty=True), replace(after, dirty=True)
    for pair, which in (
        ((before, unclean[1]), "the later run"),
        ((unclean[0], after), "the earlier run"),
        (unclean, "both runs"),
    ):
        assert commits(*pair) == f"1111111111..3333333333 ({which} had uncommitted changes)"


def test_one_commit_is_no_range_and_acquits_the_code():
    same = replace(NIGHTS[3], commit=NIGHTS[1].commit)
    assert commit_range(NIGHTS[1], same) == log_command(NIGHTS[1], same) == ""
    assert "not the code" in commits(NIGHTS[1], same)
    # What is uncommitted, or planted, is code all the same.
    for changes in ({"dirty": True}, {"fault": "rope_keys_one_late"}):
        assert "not the code" not in commits(NIGHTS[1], replace(same, **changes))
        assert "not the code" not in commits(replace(NIGHTS[1], **changes), same)
    both = replace(NIGHTS[1], dirty=True), replace(same, dirty=True)
    assert commits(*both).endswith(" (both runs had uncommitted changes)")
    planted = replace(same, fault="rope_keys_one_late")
    assert "not the code" in commits(planted, planted)
    assert commits(replace(same, commit=None), same) == "not known"


def test_a_planted_bug_is_named_as_the_reason():
    today = run(GATE, fault="rope_keys_one_late")
    since = since_when(GATE, today, history(*[0.5] * 5))
    assert since is not None
    assert "rope_keys_one_late is planted" in sentence(since, today)
    assert "planted" not in sentence(since, run(GATE))


def test_nothing_is_called_new_without_a_run_before():
    rows = (failing(), failing(quantity="loss"))
    alone = decide(run(*rows), None)
    assert "new" not in alone.sentence
    assert alone.sentence.startswith("2 failures, with no earlier run to compare with.")
    then = decide(run(*rows), earlier(measurement(), measurement(quantity="loss")))
    assert then.sentence.startswith("2 failures, all new.")
    assert "did not measure" not in then.sentence


def test_a_failure_that_the_baseline_could_not_have_is_said_to_be_so():
    """An earlier run than the baseline may have had it."""
    rows = (failing(), failing(quantity="loss"), measurement(quantity="new and held"))
    decision = decide(run(*rows), earlier(measurement()))
    assert decision.sentence.startswith(
        "2 failures, all new. The baseline did not measure 1 of these gates. It starts at"
    )


def test_without_one_of_two_commits_there_is_no_range():
    nobody = replace(NIGHTS[3], commit=None)
    assert commit_range(NIGHTS[1], nobody) == commit_range(nobody, NIGHTS[1]) == ""
    assert commits(NIGHTS[1], nobody) == commits(nobody, NIGHTS[1]) == "not known"
    # Two runs of unknown commits need not be of one.
    assert commits(replace(NIGHTS[1], commit=None), nobody) == "not known"


def test_the_run_that_held_is_named_by_its_folder_and_the_length_of_a_streak_is_told():
    past = replace(history(0.5, 0.5, 0.5, 0.5, 3.0), runs=tuple(f"copy-{i}" for i in range(5)))
    since = since_when(GATE, run(GATE), past)
    assert since is not None and since.held is not None
    assert (since.held.id, since.folder) == ("night-3", "copy-3")
    assert sentence(since, run(GATE)) == "It failed in 2 runs in a row."
