"""What is said of stored runs: whether one may be pinned, which is the newest, how many stand."""

from __future__ import annotations

import glob
import json
import math
import os
import random
import re
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.programs.explanation import Explanation
from parity.engine.programs.source_lines import Line
from reports.page.all_runs import Entry, Event, GateGroup
from reports.provenance.host import FIELDS
from reports.registry import lookback, lookup, retention, runs_page
from reports.registry import outcome as outcomes
from reports.registry import pin as pinning
from reports.registry import side_by_side as pairs
from reports.registry.gate_changes import GateName
from reports.registry.listing import summarise_runs
from reports.registry.lookback import LATEST, look_back, measured_names, sparkline
from reports.registry.lookup import (
    AHEAD,
    Found,
    JudgedRun,
    _may_be_newer,
    anchors_of,
    as_document,
    change_lines,
    check_age,
    comparison_lines,
    explanations_of,
    find_run,
    is_pinned,
    judge_stored,
    look_up,
    page_of,
    run_line,
    runs_from,
    withheld,
    without_pinned,
)
from reports.registry.pin import pin_run
from reports.registry.retention import clean, delete, plan
from reports.registry.several import (
    as_values,
    more_line,
    read_several,
    run_lines,
    table,
    write_several_page,
)
from reports.registry.side_by_side import range_lines, write_page
from reports.store.runs import Run, read_run, write_run
from reports.store.schema import MEASUREMENTS, SCHEMA, RunKind, StoreError
from reports.text import edge_name
from reports.verdict import pins
from reports.verdict.changes import Change, What
from reports.verdict.decide import Decision, ExitCode, Word, decide
from reports.verdict.history import History
from reports.verdict.several import GRAVEST, compare_runs
from stability.core.findings import Severity
from tests.helpers import cli
from tests.reports.nights import (
    bench,
    earlier,
    explained,
    failing,
    finding,
    measurement,
    reseal,
    run,
)

WHOLE = {"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}
KEY = "logits in baseline (JAX float32 vs oracle)"


@pytest.fixture(autouse=True)
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of pinned baselines, and a clean checkout."""
    monkeypatch.setattr(pins, "FOLDER", tmp_path / "pinned")
    monkeypatch.setattr(pinning, "git_state", lambda code, root: ("c0ffee", False))
    yield tmp_path / "pinned"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"kind": "pytest"}, "is a run of kind pytest"),
        ({"dirty": True}, "was made from a tree with uncommitted changes"),
        ({"fault": "rope_sign"}, "has the planted fault rope_sign; is INCOMPLETE"),
        ({"selected": ["baseline"]}, "ran only some cases"),
        ({"suites": [{**WHOLE, "planned": 2}]}, "is INCOMPLETE: Nothing failed, but suite parity"),
        ({"contract": []}, "is INCOMPLETE"),
        ({"selected": ["a"], "kind": "port", "suites": [{**WHOLE, "name": "a"}]}, "ran only some"),
    ],
)
def test_only_a_whole_healthy_run_of_a_clean_tree_is_pinned(
    tmp_path: Path, pinned: Path, changes: dict[str, Any], why: str
) -> None:
    folder = write_run(tmp_path / "runs", run(measurement(), **changes))
    if why:
        with pytest.raises(StoreError, match="expected a complete, healthy run") as told:
            pin_run(folder, "why")
        assert why in str(told.value) and not list(pinned.glob("*"))
        return
    diff = pin_run(folder, "  why  ")
    assert (diff.pin.run, diff.pin.reason, diff.before) == (folder.name, "why", None)
    assert diff.pin.pinned == f"{datetime.now(UTC):%Y-%m-%d}"
    assert diff.path.parent == pinned
    read = pins.read(diff.path)
    assert read is not None and (read.groups, read.run) == (diff.pin.groups, diff.pin.run)
    assert diff.lines() == ["0 levels moved, 1 are new, 0 were removed"]
    assert find_run(tmp_path / "runs", "pinned") == folder


def test_pinning_needs_a_reason_and_a_clean_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "runs", run(measurement()))
    with pytest.raises(StoreError, match="expected a reason"):
        pin_run(folder, "  ")
    for state, why in (
        (("c0ffee", True), "has uncommitted changes"),
        ((None, False), "is not a git checkout"),
    ):
        monkeypatch.setattr(pinning, "git_state", lambda code, root, state=state: state)
        with pytest.raises(StoreError, match=why):
            pin_run(folder, "why")
    red = write_run(tmp_path / "runs", run(failing(), id="red"))
    monkeypatch.setattr(pinning, "git_state", lambda code, root: ("c0ffee", False))
    with pytest.raises(StoreError, match="is REGRESSED: 1 failure"):
        pin_run(red, "why")


def test_a_pinning_says_which_levels_moved_and_how_far(tmp_path: Path) -> None:
    names = [f"case{i:02d}" for i in range(14)]

    def night(day: int, factors: dict[str, float]) -> Path:
        rows = [
            measurement(case=n, value=1e-5 * f, tolerance=2e-4, identity=n)
            for n, f in factors.items()
        ]
        return write_run(tmp_path / "runs", earlier(*rows, day=day))

    pin_run(night(1, dict.fromkeys([*names, "old"], 1.0)), "first")
    factors = {n: 1.0 + i for i, n in enumerate(names)} | {"new": 1.0, "newer": 1.0}
    factors["case13"] = 0.21
    diff = pin_run(night(2, factors), "second")
    assert diff.before is not None and diff.before.reason == "first"
    head, *lines = diff.lines()
    # The first did not move; of those that did the ten furthest are named, either way.
    assert head == "13 levels moved, 2 are new, 1 were removed"
    furthest = [*(f"case{i:02d}" for i in range(12, 3, -1)), "case13"]
    assert [line.split(" | ")[0].strip() for line in lines] == furthest
    assert lines[0] == "  case12 | jax32:oracle | logits | rel_l2: 1.0e-05 → 1.3e-04, 13.00 times"
    assert lines[9].endswith(": 1.0e-05 → 2.1e-06, 0.21 times")


def test_a_look_back_has_the_tolerance_that_the_newest_run_used(tmp_path: Path) -> None:
    """Neither the loosest nor the oldest: a tolerance follows its noise floor, up and down."""
    for days in ((4e-6, 1e-6, 2e-6), (1e-6, 4e-6, 2e-6)):
        root = tmp_path / str(days[0])
        for day, tolerance in enumerate(days, 1):
            write_run(root, earlier(measurement(value=1e-7 * day, tolerance=tolerance), day=day))
        [row] = look_back(str(root)).rows
        assert (row["tolerance"], row["share"]) == (2e-6, pytest.approx(3e-7 / 2e-6))


def test_a_look_back_goes_from_the_oldest_value_to_the_newest(tmp_path: Path) -> None:
    """Whichever is the least; of many runs the newest 24 are drawn, in the order they ran in."""
    values = [2e-6, 1e-6, 4e-6, *(3e-6 + 1e-8 * day for day in range(22)), 2.5e-6]
    for day, value in enumerate(values, 1):
        write_run(tmp_path, earlier(measurement(value=value), day=day))
    [row] = look_back(str(tmp_path)).rows
    assert (row["runs"], row["first"], row["last"]) == (len(values), values[0], values[-1])
    assert row["median"] == pytest.approx(statistics.median(values))
    assert list(row["recent"]) == values[-24:]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_look_back_reads_runs_in_combined_files_and_runs_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: int
) -> None:
    for day in (1, 2):
        write_run(tmp_path, earlier(measurement(value=day * 1e-6), day=day))
    lines, _ = lookback.list_lines(tmp_path)
    assert all(line.gathered for line in lines)
    lines[alone] = replace(lines[alone], gathered="")
    monkeypatch.setattr(lookback, "list_lines", lambda root: (lines, []))
    [row] = look_back(str(tmp_path)).rows
    assert (row["runs"], row["first"], row["last"]) == (2, 1e-6, 2e-6)


def test_values_of_a_quantity_come_edge_by_edge_and_metric_by_metric(tmp_path: Path) -> None:
    """Each from the oldest run on, also where names of runs say otherwise."""
    keys = [(edge, metric) for edge in ("e", "d") for metric in ("rel_l2", "max_abs")]
    for name, day in (("b", 1), ("a", 2), ("c", 3)):
        rows = [measurement(edge=edge, metric=metric) for edge, metric in keys]
        write_run(tmp_path, earlier(*rows, id=name, day=day))
    rows = look_back(str(tmp_path), "baseline", "logits").rows
    found = [(row["edge"], row["metric"], row["id"]) for row in rows]
    assert found == [(*key, name) for key in sorted(keys) for name in "bac"]
    gates = look_back(str(tmp_path)).rows
    assert [(row["edge"], row["metric"], row["runs"]) for row in gates] == [
        (*key, 3) for key in sorted(keys)
    ]


def test_runs_with_planted_bugs_displace_no_gate_of_the_newest_nights(tmp_path: Path) -> None:
    for turn in range(LATEST):
        planted = earlier(measurement(), id=f"a{turn:02d}", fault="conjugate", day=1)
        write_run(tmp_path, planted)
    for day, quantity in ((2, "gone"), (3, "logits")):
        write_run(tmp_path, earlier(measurement(quantity=quantity), day=day))
    assert [row["quantity"] for row in look_back(str(tmp_path)).rows] == ["gone", "logits"]


def test_a_value_without_a_tolerance_is_no_value_of_a_gate(tmp_path: Path) -> None:
    """Runs that told it alone are left out of the history of the gate."""
    fact = measurement(value=3e-6, tolerance=math.nan, verdict=Verdict.INFO)
    other = replace(fact, identity="other")
    for day, (name, row) in enumerate(
        (("a", measurement()), ("b", other), ("c", failing()), ("d", fact)), 1
    ):
        write_run(tmp_path, earlier(row, replace(fact, quantity="loss"), id=name, day=day))
    for place in (str(tmp_path), f"{tmp_path}/*"):
        rows = look_back(place, "baseline", "logits").rows
        assert [(row["id"], row["value"]) for row in rows] == [("a", 1e-6), ("c", 9e-6)]
        [gate] = look_back(place).rows
        assert (gate["runs"], list(gate["recent"]), gate["tolerance"]) == (2, [1e-6, 9e-6], 4e-6)


def ago(hours: float) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours)).isoformat(timespec="seconds")


def test_a_run_that_is_too_old_or_dated_ahead_is_refused(tmp_path: Path) -> None:
    for hours, limit, allowed in (
        (1, 2, True),
        (3, 2, False),
        (-AHEAD / 2, 2, True),
        (-2 * AHEAD, 2, False),
        (1, math.nan, False),
        (1, 0.5, False),
        (0.75, 0.5, False),
        (2.75, 2, False),
        (1.25, 1.5, True),
    ):
        made = run(measurement(), id=f"r{hours}-{limit}".replace("-", "m"), created=ago(hours))
        folder = write_run(tmp_path, made)
        if allowed:
            check_age(folder, limit)
        else:
            with pytest.raises(StoreError, match="expected a run that began at most"):
                check_age(folder, limit)


@pytest.mark.parametrize(
    ("hours", "age"),
    [(1.5, "1.5 hours"), (47.9, "47.9 hours"), (49, "2 days"), (24 * 1000, "1,000 days")],
)
def test_a_verdict_says_how_old_its_run_is(tmp_path: Path, hours: float, age: str) -> None:
    made = run(measurement(), created=ago(hours))
    made = replace(made, manifest=replace(made.manifest, files={}))
    line = run_line(Found(tmp_path / "run"), made)
    assert line == f"judged: run run, {age} old"
    old = replace(made, manifest=replace(made.manifest, migrated_from=3))
    assert run_line(Found(tmp_path / "run"), old) == (
        f"{line}; stored by schema 3, which has no checksums: its files are unchecked"
    )


@pytest.mark.parametrize("created", ["yesterday", "2026-11-20T21:30:00"])
def test_of_a_time_that_is_none_no_age_is_said(tmp_path: Path, created: str) -> None:
    made = run(measurement(), created=created)
    assert run_line(Found(tmp_path / "run"), made) == f"judged: run run, begun at {created}"


def decision_of(word: Word, code: ExitCode) -> Decision:
    return replace(decide(run(measurement()), None), word=word, exit_code=code)


@pytest.mark.parametrize("ahead", [0.0, AHEAD, 2 * AHEAD])
@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize(
    ("word", "code"),
    [
        (Word.PASS, ExitCode.PASS),
        (Word.CHANGED, ExitCode.PASS),
        (Word.REGRESSED, ExitCode.REGRESSION),
        (Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE),
    ],
)
def test_a_green_verdict_is_withheld_where_the_run_may_not_be_the_newest(
    ahead: float, damaged: int, word: Word, code: ExitCode
) -> None:
    made = decision_of(word, code)
    found = Found(Path("run"), tuple((Path(f"d{i}"), "why") for i in range(damaged)), ahead)
    told = withheld(made, found)
    green = code is ExitCode.PASS
    if not green or (not damaged and ahead <= AHEAD):
        assert told is made
        return
    assert (told.word, told.exit_code) == (Word.INCOMPLETE, ExitCode.INCOMPLETE)
    if ahead > AHEAD:
        assert told.sentence.startswith(f"Run run is dated {ahead:.1f} hours ahead")
    else:
        several = "1 newer folder is" if damaged == 1 else "2 newer folders are"
        assert told.sentence.startswith(f"{several} damaged, so run run, which is {word},")


def test_the_newest_run_is_named_with_what_may_be_newer(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for day in (3, 4, 5, 6):
        write_run(root, earlier(measurement(), day=day))
    bench = earlier(day=7, kind="watch", suites=[])
    write_run(root, bench)

    def name(day: int) -> str:
        return f"2026-11-{day:02d}T21-30-00Z-0000000"

    newest = look_up(root, "latest")
    assert (newest.folder, newest.newer) == (root / name(6), ()) and newest.ahead < 0
    for day, latest, newer in ((6, 5, [6]), (5, 4, [5, 6]), (3, 4, [5, 6])):
        (root / name(day) / "run.json").write_text("{", encoding="utf-8")
        found = look_up(root, "latest")
        assert found.folder == root / name(latest)
        assert [f.name for f, _ in found.newer] == list(map(name, newer)), day
    with pytest.raises(StoreError, match=f"expected the newest run, but {name(5)} may be newer"):
        find_run(root, "latest")
    # A folder without a date in its name is as old as its last change.
    other = root / "undated"
    other.mkdir()
    (other / "run.json").write_text("{", encoding="utf-8")
    for year, newer in ((2001, False), (2040, True)):
        stamp = datetime(year, 1, 1, tzinfo=UTC).timestamp()
        os.utime(other, (stamp, stamp))
        found = look_up(root, "latest")
        assert ("undated" in [f.name for f, _ in found.newer]) == newer
    # One that was moved is as new as the newer of its two dates.
    moved = root / "2026-11-01T00-00-00Z-x"
    moved.mkdir()
    (moved / "run.json").write_text('{"created": "2026-11-20T00:00:00+00:00"}', encoding="utf-8")
    assert moved.name in [f.name for f, _ in look_up(root, "latest").newer]
    (moved / "run.json").write_text('{"created": "2026-11-02T00:00:00+00:00"}', encoding="utf-8")
    assert moved.name not in [f.name for f, _ in look_up(root, "latest").newer]


def test_a_name_leads_to_one_run_or_to_the_names_that_there_are(
    tmp_path: Path, pinned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    with pytest.raises(StoreError) as told:
        find_run(root, "latest")
    empty = f"no run 'latest': there is no folder {root}; `nightly` makes one."
    assert str(told.value) == empty
    folders = [write_run(root, earlier(measurement(), day=day)) for day in range(2, 9)]
    names = [folder.name for folder in folders]
    # Of several that are pinned the newest: one file for each machine names one run.
    for turn, folder in enumerate((folders[3], folders[1])):
        night = replace(earlier(measurement(), host=dict.fromkeys(FIELDS, str(turn))))
        made = pins.pin_of(night, {}, "why", "2026-11-01")
        pins.write(replace(made, run=folder.name), pins.file_of(made, pinned))
    monkeypatch.chdir(root)
    # A folder in the current one, and a path; a keyword is none.
    for shadow in ("latest", "pinned"):
        (root / shadow).symlink_to(folders[0])
    assert find_run(root, "pinned") == folders[3]
    for name in (names[2], str(folders[2]), f"./{names[2]}"):
        assert find_run(root, name).resolve() == folders[2]
    for shadow in ("latest", "pinned"):
        (root / shadow).unlink()
    monkeypatch.chdir(tmp_path)
    assert find_run(root, "latest") == folders[-1]
    assert find_run(root, names[4][:11]) == folders[4]
    # A damaged run is named by its beginning too; reading it says what is wrong.
    (folders[5] / "run.json").write_text("{", encoding="utf-8")
    assert find_run(root, names[5][:11]) == folders[5]
    for name, what, listed in (
        ("2026-11-0", "several runs begin with", [names[2], *names[3:5], names[6], names[5]]),
        ("none", "no run", [*names[1:5], names[6]]),
        (f"x/{names[0]}", "no run", [*names[1:5], names[6]]),
        # A path is one from the current folder, and not from that of the runs.
        (f"../runs/{names[0]}", "no run", [*names[1:5], names[6]]),
    ):
        with pytest.raises(StoreError) as told:
            find_run(root, name)
        there = f"there are {', '.join(listed)}. `list` shows all of them."
        assert str(told.value) == f"{what} {name!r} in {root}; {there}"
    for folder in folders:
        (folder / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(StoreError) as told:
        find_run(root, "none")
    said, at = str(told.value), 0
    for part in (f"no run 'none' can be read in {root}", *names[-3:]):
        assert (at := said.find(part, at)) >= 0
    assert said.count("-0000000 is damaged: ") == 3


def test_a_whole_copy_is_no_newer_run_and_another_run_of_its_id_is(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folder = write_run(root, earlier(measurement(), day=6))
    copy = root / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert look_up(root, "latest").newer == ()
    # Nor where the run itself is in a folder of another name.
    moved = folder.rename(root / "moved")
    assert look_up(root, "latest").newer == ()
    moved.rename(folder)
    reseal(copy, commit="another")
    [(newer, _)] = look_up(root, "latest").newer
    assert newer == copy


def test_a_comparison_of_two_says_what_they_share_and_the_commits_between(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    old = write_run(root, earlier(measurement(), day=1, commit="a" * 40))
    new = write_run(root, earlier(measurement(value=2e-6), day=2, commit="b" * 40))
    judged = judge_stored(new, old)
    assert judged.decision.word is Word.CHANGED and judged.history.runs == ()
    assert range_lines(old, judged) == [
        "compared: 1 gate compared, 0 of them equal.",
        f"commits: {'a' * 10}..{'b' * 10}",
    ]
    again = write_run(root, earlier(measurement(), day=3, commit="a" * 40))
    # The sentence has it already, and of equal runs nothing is to suspect.
    assert range_lines(old, judge_stored(again, old)) == [
        f"commits: none, both runs are of {'a' * 10}"
    ]
    other = write_run(root, earlier(measurement(value=2e-6), day=4, commit="a" * 40))
    [_, commits] = range_lines(old, judge_stored(other, old))
    assert commits.endswith(": not the code, so the environment or the machine")


def test_a_failure_that_two_equal_runs_share_suspects_nothing(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    old, new = (write_run(root, earlier(failing(), day=day, commit="a" * 40)) for day in (1, 2))
    judged = judge_stored(new, old)
    assert [change.what for change in judged.decision.changes] == [What.PERSISTING]
    assert range_lines(old, judged)[-1] == f"commits: none, both runs are of {'a' * 10}"


def test_what_cannot_be_compared_has_no_account_of_a_failure(tmp_path: Path) -> None:
    """Only a gate that fails began to fail in some run."""
    blocked = measurement(
        case="plain", value=math.nan, tolerance=math.nan, verdict=Verdict.NOT_COMPARABLE
    )
    write_run(tmp_path, earlier(blocked, day=1))
    night = replace(earlier(blocked, day=2), explanations=(explained("plain"),))
    judged = judge_stored(write_run(tmp_path, night))
    assert judged.decision.word is Word.NOT_COMPARABLE and judged.decision.starts
    assert not [line for line in comparison_lines(judged) if not line.startswith("levels ")]


def test_below_a_verdict_is_since_when_it_fails_and_what_explains_it(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    held = write_run(root, earlier(measurement(case="plain"), day=1, commit="a" * 40))
    write_run(root, earlier(failing(case="plain"), day=2, commit="b" * 40))
    (root / "damaged").mkdir()
    made = replace(
        earlier(failing(case="plain"), day=3, commit="c" * 40),
        explanations=(replace(explained("plain"), where="row 1"), explained("z")),
    )
    lines = comparison_lines(judge_stored(write_run(root, made)))
    culprit = explained("plain").quantity
    assert lines[0] == (
        f"since when: It failed in 2 runs in a row. This gate held in run {held.name}; commits: "
        f"{'a' * 10}..{'b' * 10}"
    )
    assert lines[1] == (
        f"explained: {culprit} is wrong on its own, fed the oracle's inputs; parameters that act "
        "there: model.layers.0.attn.rmsnorm"
    )
    assert lines[2] == "elements that break the tolerance: row 1"
    assert [line.split(": ")[0] for line in lines[3:5]] == ["explain", "shrink"]
    assert all(" plain" in line for line in lines[3:5])
    assert lines[5].startswith(f"levels compared with run {held.name}, the oldest healthy run")
    assert lines[6].startswith("not readable: damaged: ") and len(lines) == 7


@pytest.mark.parametrize("longer", [0, 1])
def test_since_when_is_said_of_the_failure_that_is_named_first(tmp_path: Path, longer: int) -> None:
    """It is the new one, whichever failed before."""
    cases = ("baseline", "plain")
    for day, red in ((1, ()), (2, (cases[longer],)), (3, cases)):
        rows = [(failing if case in red else measurement)(case=case) for case in cases]
        folder = write_run(tmp_path, earlier(*rows, day=day))
    judged = judge_stored(folder)
    assert [start.case for start in judged.decision.starts] == [cases[1 - longer], cases[longer]]
    [since] = [line for line in comparison_lines(judged) if line.startswith("since when: ")]
    assert "in a row" not in since and "2026-11-02" in since


def test_below_the_verdict_of_a_stream_are_call_stage_and_line(tmp_path: Path) -> None:
    """The account of a stream has no stages; one without lines adds nothing to the verdict."""
    line = Line("megalodon_jax/x.py:3 (f)", "why", "  2\n> 3  x")
    told = Explanation(
        "plain", "jax64:oracle", quantity="state/layers.0.v", meaning="In call 2.", lines=(line,)
    )
    night = replace(earlier(failing(case="plain"), day=1), explanations=(told,))
    lines = comparison_lines(judge_stored(write_run(tmp_path / "a", night)))
    assert lines[:4] == [
        "explained: In call 2",
        "line: megalodon_jax/x.py:3 (f): why",
        "      2",
        "    > 3  x",
    ]
    # A bot reads the same as JSON, of the cases that fail alone.
    both = replace(night, explanations=(told, Explanation("other", "jax64:oracle")))
    folder = write_run(tmp_path / "c", both)
    answer = cli("gate", folder.name, "--out", str(folder.parent), "--json")
    [found] = json.loads(answer.stdout)["explanations"]
    assert (found["case"], found["quantity"]) == ("plain", "state/layers.0.v")
    assert found["lines"] == [{"place": line.place, "why": line.why, "excerpt": line.excerpt}]
    assert [command.split(" parity ")[1] for command in found["commands"]] == [
        "explain plain", "shrink plain",
    ]  # fmt: skip
    night = replace(night, explanations=(replace(told, lines=()),))
    bare = comparison_lines(judge_stored(write_run(tmp_path / "b", night)))
    assert bare == lines[4:]


def change(i: int, **changes: Any) -> Change:
    made = Change(What.NEW, "baseline", "jax32:oracle", "logits", "rel_l2", None, 9e-6, 4e-6)
    return replace(made, **changes)


@pytest.mark.parametrize("damaged", [0, 1, 5, 6, 1200])
def test_the_first_damaged_runs_are_named_and_the_others_counted(damaged: int) -> None:
    """A pinned file that was not used has a line of its own."""
    unreadable = tuple((Path(f"runs/d{i}"), f"why {i}") for i in range(damaged))
    judged = JudgedRun(
        run(measurement()),
        decide(run(measurement()), None),
        History(unreadable=(*unreadable, (Path("pins"), "x is not used"))),
        ("x is not used",),
    )
    expected = [f"not readable: d{i}: why {i}" for i in range(min(damaged, 5))]
    if damaged > 5:
        more = {1: "1 more folder", 1195: "1,195 more folders"}[damaged - 5]
        expected.append(f"not readable: {more}; `list` names them")
    assert comparison_lines(judged) == ["x is not used", *expected]


def test_a_folder_whose_age_nobody_knows_may_be_the_newest(tmp_path: Path) -> None:
    now = datetime.now(UTC).isoformat()
    assert _may_be_newer(tmp_path / "gone", now, [])
    (tmp_path / "old").mkdir()
    # It may have been written in the moment in which the other run began.
    then = datetime(2026, 11, 20, tzinfo=UTC)
    os.utime(tmp_path / "old", (then.timestamp(), then.timestamp()))
    assert _may_be_newer(tmp_path / "old", then.isoformat(), [])
    os.utime(tmp_path / "old", (0, 0))
    assert not _may_be_newer(tmp_path / "old", now, []) and _may_be_newer(tmp_path / "old", "?", [])
    # A date without its time zone cannot be compared with one that has it.
    assert _may_be_newer(tmp_path / "old", now[:19], [])
    assert not _may_be_newer(tmp_path / ".gone", now, [])


def test_twenty_changes_are_listed_and_the_others_counted() -> None:
    first = change(0, note="why")
    line = f"new failure: {KEY}: relative L2 – → 9.0e-06"
    assert change_lines([first]) == [f"{line}  why"]
    assert change_lines([change(0, edge="", before=8e-6)]) == [
        "new failure: logits in baseline: relative L2 8.0e-06 → 9.0e-06"
    ]
    assert change_lines([change(i) for i in range(20)]) == [line] * 20
    assert change_lines([change(i) for i in range(21)])[20:] == ["and 1 more change"]
    assert change_lines([change(i) for i in range(1024)])[20:] == ["and 1,004 more changes"]


def test_a_verdict_as_json_has_no_number_that_json_does_not_have() -> None:
    then = earlier(measurement(), threads=4)
    made = decide(run(failing(value=math.nan, note="n")), then)
    told = as_document(made)
    [first] = told.pop("changes")
    assert told == {
        "verdict": "REGRESSED",
        "exit_code": 1,
        "sentence": made.sentence,
        "baseline": then.id,
        "against": [],
        "environment": ["threads 4 → 2"],
    }
    assert first == {
        "what": "new failure",
        "case": "baseline",
        "edge": "jax32:oracle",
        "quantity": "logits",
        "metric": "rel_l2",
        "before": 1e-6,
        "now": None,
        "tolerance": 4e-6,
        "note": "n",
    }


def test_several_runs_are_a_table_beside_the_first(tmp_path: Path) -> None:
    """A row for each gate and error that stands otherwise in any, and a cell for each run."""
    rng = random.Random(5)
    for _ in range(60):
        keys = [(case, quantity) for case in "ab" for quantity in "xy"]

        def night(name: str, keys: list[Any] = keys) -> Run:
            rows = []
            for case, quantity in keys:
                value = rng.choice((1e-6, 1e-6, 2e-6, 9e-6))
                verdict = rng.choice((*[Verdict.PASS] * 6, Verdict.NOT_COMPARABLE))
                compared = verdict is Verdict.PASS
                made = measurement(
                    case=case,
                    quantity=quantity,
                    value=value if compared else math.inf,
                    tolerance=4e-6 if compared else math.inf,
                    identity=rng.choice("iiij"),
                    verdict=verdict,
                )
                rows += [made] * (rng.random() < 0.9)
            severity = rng.choice((Severity.OK, Severity.ERROR))
            found = (finding(severity=severity),) * (rng.random() < 0.7)
            return run(*rows, findings=found, id=name)

        runs = [night(f"r{i}") for i in range(rng.randrange(2, 5))]
        several = compare_runs(runs)
        decisions = [decide(runs[0], None, alone=True)]
        decisions += [decide(it, runs[0], alone=True) for it in runs[1:]]
        assert several.decisions == tuple(decisions)
        ranks = [GRAVEST.index(decision.word) for decision in decisions]
        assert ranks[several.gravest] == min(ranks[1:]) and several.gravest >= 1
        assert min(ranks[1:]) not in ranks[1 : several.gravest]
        whats = [
            {(c.case, c.edge, c.quantity, c.metric): c.what for c in decision.changes}
            for decision in decisions[1:]
        ]
        assert {row.key for row in several.rows} == {key for of_run in whats for key in of_run}
        order = [list(What).index(row.gravest.what) for row in several.rows]
        assert order == sorted(order)
        told = as_values(several)
        json.dumps(told, allow_nan=False)
        assert [it["run"] for it in told["runs"]] == [it.id for it in runs]
        assert [it["verdict"] for it in told["runs"]] == [it.word.value for it in decisions]
        assert [it["exit_code"] for it in told["runs"]] == [int(it.exit_code) for it in decisions]
        heads, lines, omitted = table(several)
        assert heads == ["", *map(str, range(1, len(runs) + 1))] and omitted == 0
        assert lines[0] == ["verdict", *(it.word.value for it in decisions)]
        for row, values, line in zip(
            several.rows, told["rows"], lines[-len(several.rows) :], strict=True
        ):
            assert (values["case"], values["edge"], values["quantity"], values["metric"]) == row.key
            own = [whats[i - 1].get(row.key) if i else None for i in range(len(runs))]
            gravest = min((w for w in own if w), key=list(What).index)
            assert row.gravest.what is gravest
            first = None
            for i, it in enumerate(runs):
                cell, value = row.cells[i], values["cells"][i]
                m = next((m for m in it.measurements if m.key == row.key), None)
                if m is None and row.key[1]:
                    assert cell is None and value is None and line[i + 1] == "–"
                    continue
                if m is None:
                    assert (cell is None) == (not it.findings)
                    if cell is not None:
                        wrong = it.findings[0].severity is Severity.ERROR
                        assert cell.state == ("fail" if wrong else "pass")
                        assert (cell.value, cell.tolerance, cell.what) == (1.0, 2.0, own[i])
                    continue
                first = first or m.identity
                assert cell is not None
                state = {"fail": "fail", "not comparable": "blocked"}.get(m.verdict.value, "pass")
                assert (cell.state, cell.value, cell.tolerance) == (state, m.value, m.tolerance)
                assert (cell.other_work, cell.what) == (m.identity != first, own[i])
                assert value == {
                    "value": None if state == "blocked" else m.value,
                    "tolerance": None if state == "blocked" else m.tolerance,
                    "state": state,
                    "other_work": m.identity != first,
                    "what": own[i] and own[i].value,
                }
                assert (" ✕" in line[i + 1]) == (state == "fail")
                assert (" ≠" in line[i + 1]) == (state == "blocked")
                assert ("(other work)" in line[i + 1]) == (m.identity != first)
        [edge] = lines[1:2]
        gates = [[m for m in it.measurements if m.verdict is not Verdict.INFO] for it in runs]
        assert edge[0] == "gates held, JAX float32 vs oracle"
        assert edge[1:] == [
            f"{sum(m.verdict is Verdict.PASS for m in own)} / {len(own)}" if own else "–"
            for own in gates
        ]
        assert run_lines(several) == [
            f"{i}: run {it.id}: {d.word}: {d.sentence}"
            for i, (it, d) in enumerate(zip(runs, decisions, strict=True), start=1)
        ]


def test_rows_that_the_terminal_leaves_out_are_counted(tmp_path: Path) -> None:
    rows = [measurement(quantity=f"q{i:02d}") for i in range(25)]
    folders = [
        write_run(tmp_path, run(*rows, id="one")),
        write_run(tmp_path, run(*(replace(m, value=2e-6) for m in rows), id="two")),
    ]
    several = read_several(folders)
    _, lines, omitted = table(several)
    assert (len(lines), omitted) == (2 + 20, 5)
    assert [line[0].split()[0] for line in lines[2:]] == [f"q{i:02d}" for i in range(20)]
    assert more_line(5) == ["and 5 more rows; --html and --json have them"]
    assert more_line(1) == ["and 1 more row; --html and --json have them"] and more_line(0) == []
    assert len(as_values(several)["rows"]) == 25


def test_a_deleted_run_is_gone_and_what_a_killed_deletion_left_is_cleaned(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folder = write_run(root, run(measurement()))
    delete(folder)
    assert not folder.exists() and summarise_runs(root) == ([], [])
    with pytest.raises(StoreError, match="expected to delete"):
        delete(folder)
    left = root / ".pruned-x"
    left.mkdir()
    (left / "run.json").write_text("{}", encoding="utf-8")
    kept = write_run(root, run(measurement(kind=Kind.BLOCK)))
    clean(root)
    assert not left.exists() and kept.exists()


def test_links_of_a_page_lead_to_the_folder_of_the_runs(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "one"
    folder.mkdir(parents=True)
    assert runs_from(folder / "report.html", folder) == ".."
    assert runs_from(tmp_path / "page.html", folder) == "my%20runs"
    assert runs_from(tmp_path / "a" / "page.html", folder) == "../my%20runs"


def test_a_page_that_is_drawn_again_leads_to_the_runs_beside_its_own(tmp_path: Path) -> None:
    """From the folder of its run, or from wherever it is to lie."""
    root = tmp_path / "runs"
    old = write_run(root, earlier(measurement(), day=1))
    new = write_run(root, earlier(measurement(value=2e-6), day=2))
    for page, place in ((None, ".."), (new / "report.html", ".."), (tmp_path / "x.html", "runs")):
        drawn = page_of(new, page)
        assert f'href="{place}/{old.name}/report.html' in drawn
        assert drawn.count(f"{old.name}/report.html") == drawn.count(f"{place}/{old.name}/")


def test_values_that_were_changed_by_hand_are_not_looked_back_on(tmp_path: Path) -> None:
    """A pattern is read by DuckDB, which asks each file for its checksum too."""
    root = tmp_path / "runs [1]"
    for day in (1, 2, 3):
        write_run(root, earlier(measurement(value=1e-7 * day), day=day))
    # No part of any history.
    write_run(root, earlier(measurement(), id="planted", fault="conjugate", day=1))
    # A folder that a pattern made from the name of this one would match.
    shutil.copytree(root, tmp_path / "runs 1")
    spoilt, source = (root / f"2026-11-{day:02d}T21-30-00Z-0000000" for day in (2, 3))
    (spoilt / MEASUREMENTS).write_bytes((source / MEASUREMENTS).read_bytes())
    pattern = f"{glob.escape(str(root))}/*"
    answer = look_back(pattern, "baseline", "logits")
    assert [row["value"] for row in answer.rows] == pytest.approx([1e-7, 3e-7])
    [(name, why)] = answer.unreadable
    assert name == str(spoilt) and "is not the file that was stored" in why and answer.runs == 2
    # A folder that some writer hides is no run.
    hidden = root / ".partial-x"
    hidden.mkdir()
    (hidden / "run.json").write_bytes((source / "run.json").read_bytes())
    assert look_back(pattern, "baseline", "logits").unreadable == answer.unreadable
    assert look_back(f"{glob.escape(str(root))}/.*").runs == 0
    # A run without checksums is believed, and one that is gone is named.
    reseal(spoilt, schema=4)
    assert len(look_back(pattern, "baseline", "logits").rows) == 3
    (spoilt / MEASUREMENTS).unlink()
    answer = look_back(pattern, "baseline", "logits")
    [(name, _)] = answer.unreadable
    assert len(answer.rows) == 2 and name == str(spoilt / MEASUREMENTS)
    # One that should be there is not called another one.
    reseal(spoilt, schema=SCHEMA)
    [(name, why)] = look_back(pattern, "baseline", "logits").unreadable
    assert name.startswith(str(spoilt)) and "is not the file that was stored" not in why


def test_what_was_never_measured_is_answered_with_what_is_alike(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    hint = "`history` lists all gates, `history CASE` those of a case"
    rows = [measurement(case=c, quantity=q) for c, q in (("plain", "logits"), ("stream", "loss"))]
    told = measurement(case="plain", quantity="kl_max", verdict=Verdict.INFO, tolerance=math.nan)
    for number, asked, expected in (
        (0, ("plain", None), "no gate of case plain in 0 runs of {}; `nightly` makes one"),
        (1, ("plian", None), "no gate of case plian in 1 run of {}. Did you mean 'plain'?"),
        (1, ("x", "logits"), f"no gate of logits in case x in 1 run of {{}}; {hint}"),
        (
            2,
            ("plain", "logit"),
            "no gate of logit in case plain in 2 runs of {}. Did you mean 'logits'?",
        ),
        # Of another case, and a fact without a tolerance: neither is a gate of this case.
        (2, ("plain", "xyz"), f"no gate of xyz in case plain in 2 runs of {{}}; {hint}"),
        (2, ("plain", "kl_max"), f"no gate of kl_max in case plain in 2 runs of {{}}; {hint}"),
        (
            2,
            ("plian", "logits"),
            "no gate of logits in case plian in 2 runs of {}. Did you mean 'plain'?",
        ),
        (
            2,
            ("steam", "loss"),
            "no gate of loss in case steam in 2 runs of {}. Did you mean 'stream'?",
        ),
    ):
        while len(list(root.glob("2026*"))) < number:
            write_run(root, earlier(*rows, told, day=1 + len(list(root.glob("2026*")))))
        with pytest.raises(StoreError) as error:
            look_back(str(root), *asked)
        assert str(error.value) == expected.format(root)
    assert look_back(str(root)).runs == 2 and measured_names(str(root)) == ["plain", "stream"]
    assert measured_names(str(root), "plain") == ["logits"]


@pytest.mark.parametrize(
    ("kinds", "asked"),
    [
        (["port", "pytest", "nightly", "port"], "nightly"),
        (["port", "pytest"], "pytest"),
        (["pytest", "port", "bench"], "port"),
        (["port", "port", "pytest"], "pytest"),
        (["bench"], "nightly"),
        ([], "nightly"),
    ],
    ids=str,
)
def test_without_a_kind_nights_are_looked_back_on_or_what_is_newest(
    tmp_path: Path, kinds: list[str], asked: str
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    for day, kind in enumerate(kinds, 1):
        made = bench(day) if kind == "bench" else earlier(measurement(), day=day, kind=kind)
        write_run(root, made)
    assert look_back(str(root)).runs == kinds.count(asked)
    # A pattern finds the same runs as the folder does.
    if kinds:
        assert look_back(f"{root}/*/").runs == kinds.count(asked)
    else:
        with pytest.raises(StoreError, match="and nothing matches"):
            look_back(f"{root}/*")


def test_runs_are_listed_by_their_time_and_those_of_one_second_by_name(tmp_path: Path) -> None:
    """Also where names say otherwise; a copy is named beside the run in the folder of its name."""
    for name, day in (("c", 1), ("b", 2), ("a", 2), ("0", 3)):
        write_run(tmp_path, earlier(measurement(), id=name, day=day))
    for place in ("A copy", "z copy"):
        shutil.copytree(tmp_path / "c", tmp_path / place)
    listed, unreadable = summarise_runs(tmp_path)
    assert [it.id for it in listed] == ["c", "a", "b", "0"]
    assert sorted(folder.name for folder, _ in unreadable) == ["A copy", "z copy"]
    shutil.rmtree(tmp_path / "c")
    listed, [(folder, _)] = summarise_runs(tmp_path)
    assert [it.id for it in listed] == ["A copy", "a", "b", "0"] and folder.name == "z copy"


def test_names_are_asked_of_runs_that_have_gates_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not there would have every file asked by itself."""
    write_run(tmp_path, bench(1))
    folder = write_run(tmp_path, earlier(measurement(), day=2))
    asked: list[list[Path]] = []
    whole = lookback.Table
    monkeypatch.setattr(
        lookback, "Table", lambda files, *them: (asked.append(list(files)), whole(files, *them))[1]
    )
    assert measured_names(str(tmp_path)) == ["baseline"]
    assert asked == [[str(folder / MEASUREMENTS)]]


def test_a_line_of_blocks_goes_from_the_least_to_the_largest() -> None:
    assert sparkline([]) == "" and sparkline([math.inf, math.nan]) == "??"
    assert sparkline([-1.0]) == "▁"
    assert sparkline(list(range(8))) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, -4.0, 10.0, math.nan, -math.inf, math.inf]) == "▅▁█!!!"
    # The largest is a number, though the least and the span add up to less than it.
    low, high = 2.8234412378709476e-09, 7.066599410846618e-09
    assert low + (high - low) != high and sparkline([low, high]) == "▁█"


def test_a_run_is_stored_then_judged_then_drawn_and_each_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, lines, pages = tmp_path / "runs", list[str](), list[Path]()
    monkeypatch.setattr(outcomes, "render", lambda run, decision, history: f"page of {run.id}")
    monkeypatch.setattr(outcomes, "renew_runs_page", lambda root, report: pages.append(root))
    night = earlier(measurement())
    first = outcomes.store(root, night, lines.append)
    assert lines == ["verdict: PASS"] and pages == [root]
    assert (first.folder, first.page) == (root / night.id, root / night.id / "report.html")
    assert first.run.manifest.verdict == read_run(first.folder).manifest.verdict == "PASS"
    assert first.decision is not None and first.against == ()
    assert first.page.read_text(encoding="utf-8") == f"page of {night.id}"
    (root / "damaged").mkdir()
    # The second of one second has another name, and its page knows it.
    second = outcomes.store(root, night, lines.append)
    assert lines[1:] == [
        f"the name {night.id} was taken; the run is stored as {night.id}-2",
        "verdict: PASS",
    ]
    assert second.run.id == second.folder.name == f"{night.id}-2"
    assert second.page.read_text(encoding="utf-8") == f"page of {night.id}-2"
    # What could not be read for its verdict is told with it.
    assert second.against == tuple(comparison_lines(judge_stored(second.folder)))
    assert [line.split(":")[:2] for line in second.against] == [["not readable", " damaged"]]
    # A shard is stored alone; it is judged with the others.
    lines.clear()
    shard = outcomes.store(root, replace_kind(night, "shard"), lines.append)
    assert (shard.decision, shard.against) == (None, ())
    assert lines == [f"the name {night.id} was taken; the run is stored as {night.id}-3"]
    assert not shard.page.exists() and pages == [root] * 2
    assert read_run(shard.folder).manifest.verdict == ""


def replace_kind(night: Run, kind: str) -> Run:
    return replace(night, manifest=replace(night.manifest, kind=RunKind(kind)))


def test_a_run_that_cannot_be_judged_or_drawn_is_stored_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, lines, pages = tmp_path / "runs", list[str](), list[Path]()
    monkeypatch.setattr(outcomes, "renew_runs_page", lambda root, report: pages.append(root))

    def broken(*_: Any) -> Any:
        raise KeyError("why")

    with monkeypatch.context() as patch, pytest.raises(outcomes.UnjudgedError) as told:
        patch.setattr(outcomes, "judge", broken)
        outcomes.store(root, run(measurement(), id="one"), lines.append)
    assert lines == [] and read_run(root / "one").manifest.verdict == ""
    said = f"the run is stored in {root / 'one'}, but judging it failed with KeyError: 'why'. "
    assert str(told.value).startswith(said)
    for command in (f"gate {root / 'one'}` judges", f"report {root / 'one'}` draws"):
        assert f"`megalodon-numerics {command}" in str(told.value)
    monkeypatch.setattr(outcomes, "render", broken)
    with pytest.raises(RuntimeError, match="its page could not be drawn"):
        outcomes.store(root, run(measurement(), id="two"), lines.append)
    assert lines == ["verdict: PASS"] and read_run(root / "two").manifest.verdict == "PASS"
    # The page of all runs shows both.
    assert pages == [root, root]


@pytest.mark.parametrize("kind", ["nightly", "port", "pytest", "shard"])
def test_the_verdict_of_a_run_that_cannot_be_stored_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def full(*_: Any) -> Any:
        raise StoreError("no space")

    monkeypatch.setattr(outcomes, "write_run", full)
    lines: list[str] = []
    night = replace_kind(run(failing()), kind)
    with pytest.raises(StoreError, match="no space"):
        outcomes.store(tmp_path, night, lines.append)
    assert lines == (["verdict: REGRESSED"] if kind != "shard" else [])

    def unjudged(*_: Any) -> Any:
        return {}["level"]

    # Whatever error judging ends with, that of storing is raised.
    for judge, error in ((full, "StoreError: no space"), (unjudged, "KeyError: 'level'")):
        lines.clear()
        monkeypatch.setattr(outcomes, "judge", judge)
        with pytest.raises(StoreError, match="no space"):
            outcomes.store(tmp_path, night, lines.append)
        assert lines == ([f"judging failed too, with {error}"] if kind != "shard" else [])


def test_each_run_is_an_entry_of_the_page_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field by field: a night, its bad day, a planted bug in a few cases, and a damaged folder."""
    root, drawn = tmp_path / "runs", list[tuple[Any, str, Any]]()
    monkeypatch.setattr(runs_page.all_runs, "render", lambda *told: drawn.append(told) or "page")
    gates = [("b", "jax32:oracle", "y"), ("b", "jax64:oracle", "z"), ("a", "jax32:oracle", "y")]
    gates += [("b", "jax32:oracle", "x")]

    def night(day: int, make: Any, **changes: Any) -> Path:
        rows = [make(case=c, edge=e, quantity=q, identity=c) for c, e, q in gates]
        return write_run(root, earlier(*rows, day=day, **changes))

    whole = night(2, measurement, commit="a" * 40)
    (whole / "report.html").write_text("page", encoding="utf-8")
    bad = night(3, failing, commit="b" * 40, dirty=True, device={"kind": "cpu", "name": None})
    changes: dict[str, Any] = {"fault": "rope", "selected": ["a", "b"], "reference": {}}
    changes |= {"device": {}, "commit": None}
    planted = night(4, measurement, **changes)
    (root / "2026-11-03T09-08-07Z-damaged").mkdir()
    (root / "0 undated").mkdir()
    assert runs_page.draw_runs_page(root) == "page"
    [(entries, place, omitted)] = drawn
    assert place == "runs" and omitted == []
    shared = {"kind": "nightly", "gates": 4}
    machine, reference = "cpu x86_64", "recorded 082db4b"
    groups = (
        GateGroup("b", "jax64:oracle", 1, "z", "rel_l2"),
        GateGroup("a", "jax32:oracle", 1, "y", "rel_l2"),
        GateGroup("b", "jax32:oracle", 2, "x", "rel_l2"),
    )
    commits = f"{'a' * 10}..{'b' * 10} (the later run had uncommitted changes)"
    first, damaged, second, third, undated = entries
    created = "2026-11-{:02d}T21:30:00+00:00".format
    assert first == Entry(
        whole.name, created(2), device=machine, reference=reference, commit="a" * 40, page=True,
        **shared,
    )  # fmt: skip
    assert (damaged.name, damaged.created) == (
        "2026-11-03T09-08-07Z-damaged",
        "2026-11-03T09:08:07+00:00",
    )
    assert damaged.why and damaged == Entry(damaged.name, damaged.created, damaged.why)
    assert second == Entry(
        bad.name, created(3), device="cpu", reference=reference, commit="b" * 40, dirty=True,
        broken=4, events=(Event(whole.name, commits, groups, ()),), **shared,
    )  # fmt: skip
    event = Event(bad.name, "not known", (), groups)
    assert third == Entry(
        planted.name, created(4), fault="rope", selected=2, events=(event,), **shared
    )
    assert (undated.name, undated.created) == ("0 undated", "") and undated.why
    # Of more than are shown the older ones are left out, without their changes and pages.
    monkeypatch.setattr(runs_page, "SHOWN", 1)
    runs_page.draw_runs_page(root)
    entries, _, omitted = drawn[-1]
    assert [entry.name for entry in entries if not entry.why] == [planted.name]
    assert [entry.name for entry in omitted] == [whole.name, bad.name]
    assert not any(entry.page or entry.events for entry in (*omitted, *entries))


def test_a_place_with_a_sign_or_an_address_is_looked_up_by_duckdb(tmp_path: Path) -> None:
    for day in (1, 2):
        write_run(tmp_path, earlier(measurement(), id=f"r{day}", day=day))
    for place in ("{}/r?", "{}/r?/", "file://{}", "file://{}/", "file://{}/r?", "{}/r*"):
        assert look_back(place.format(tmp_path)).runs == 2, place
    assert look_back(f"{tmp_path}/?1").runs == 1
    # A second slash would be part of a name on object storage.
    for place, pattern in (("{}/x*/", "{}/x*"), ("file://{}/x/", "file://{}/x/*")):
        told = re.escape(f"run folders at {pattern.format(tmp_path)}, and nothing matches")
        with pytest.raises(StoreError, match=told):
            look_back(place.format(tmp_path))
    for most, ids in ((1, ["r1"]), (2, ["r1", "r2"]), (3, ["r1", "r2"])):
        rows = look_back(str(tmp_path), "baseline", "logits", most=most).rows
        assert [row["id"] for row in rows] == ids


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("bench", "its numbers are on the next nightly's page"),
        ("shard", "`merge` it with the others first"),
        ("watch", "its page shows what was measured, and `open` shows the page"),
    ],
)
def test_a_run_without_a_verdict_is_never_the_latest_and_says_what_to_do(
    tmp_path: Path, kind: str, advice: str
) -> None:
    night = write_run(tmp_path, earlier(measurement(), day=1))
    folder = write_run(tmp_path, earlier(day=2, kind=kind))
    found = look_up(tmp_path, "latest")
    assert (found.folder, found.newer, found.others) == (night, (), ())
    for command in (judge_stored, lambda folder: judge_stored(night, folder)):
        with pytest.raises(StoreError, match=rf"but {folder.name} is a {kind}; {advice}\.$"):
            command(folder)


def test_of_other_subjects_the_newest_are_named_unless_they_are_healthy(tmp_path: Path) -> None:
    words = {"a": "PASS", "b": "CHANGED", "c": "REGRESSED", "d": "", "e": "NOT COMPARABLE"}
    for day, (name, word) in enumerate(words.items(), 1):
        suites = [{**WHOLE, "name": name}]
        row = measurement(case=name)
        write_run(
            tmp_path, earlier(row, id=name, day=day, kind="port", suites=suites, verdict=word)
        )
    write_run(tmp_path, earlier(measurement(), id="night", day=9))
    assert look_up(tmp_path, "latest").others == (
        ("e", "NOT COMPARABLE"),
        ("d", "not judged"),
        ("c", "REGRESSED"),
    )


@pytest.mark.parametrize("newest", ["PASS", "REGRESSED"])
def test_the_newest_run_of_another_subject_alone_speaks_for_it(tmp_path: Path, newest: str) -> None:
    """Not an older one of it, nor one of the subject that is asked for."""
    suites = [{**WHOLE, "name": "a"}]
    words = ("REGRESSED", "NOT COMPARABLE", newest)
    for day, word in enumerate(words, 1):
        changes: dict[str, Any] = {"id": f"port{day}", "verdict": word, "kind": "port"}
        write_run(tmp_path, earlier(measurement(), day=day, suites=suites, **changes))
        write_run(tmp_path, earlier(measurement(), id=f"night{day}", day=day, verdict=word))
    write_run(tmp_path, earlier(measurement(), id="night", day=9))
    expected = () if newest == "PASS" else (("port3", newest),)
    assert look_up(tmp_path, "latest").others == expected


def test_a_run_whose_name_begins_like_that_of_a_pinned_one_is_not_pinned(tmp_path: Path) -> None:
    """As that of the second run of one second does."""
    root = tmp_path / "runs"
    first, second = (write_run(root, earlier(measurement(), day=1)) for _ in range(2))
    assert second.name == f"{first.name}-2"
    pin_run(first, "why")
    assert find_run(root, "pinned") == first
    assert [is_pinned(root, read_run(it).manifest) for it in (first, second)] == [True, False]
    # A pin of another version is no baseline, and still protects its run.
    (file,) = pins.home(root, read_run(first).manifest).glob("*.json")
    pin = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(pin | {"schema": 0}), encoding="utf-8")
    assert is_pinned(root, read_run(first).manifest) and find_run(root, "pinned") == first


def test_gates_that_held_are_counted_edge_by_edge_the_mathematics_first(tmp_path: Path) -> None:
    """In every run, also where it did not measure the edge."""
    edges = ("jax32:oracle", "port32:port64", "jax64:oracle")
    rows = [measurement(edge=edge, quantity=q) for edge in edges for q in "xy"]
    blocked = replace(rows[1], verdict=Verdict.NOT_COMPARABLE)
    runs = [
        run(*rows, id="one"),
        run(replace(rows[0], value=9e-6, verdict=Verdict.FAIL), blocked, id="two"),
        run(*rows[1:], id="three"),
    ]
    _, [_, *counts], _ = table(compare_runs(runs))
    assert [line for line in counts if line[0].startswith("gates held")] == [
        ["gates held, JAX float64 vs oracle", "2 / 2", "–", "2 / 2"],
        ["gates held, JAX float32 vs oracle", "2 / 2", "0 / 2", "1 / 1"],
        [f"gates held, {edge_name('port32:port64')}", "2 / 2", "–", "2 / 2"],
    ]


def test_a_damaged_folder_of_the_same_second_may_be_newer(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(), day=6))
    for second, newer in (("00", True), ("01", True)):
        (folder := tmp_path / f"2026-11-06T21-30-{second}Z-damaged").mkdir()
        assert bool(look_up(tmp_path, "latest").newer) is newer
        folder.rmdir()
    (tmp_path / "2026-11-06T21-29-59Z-damaged").mkdir()
    assert look_up(tmp_path, "latest").newer == ()


def test_what_failed_from_the_first_has_no_run_that_held(tmp_path: Path) -> None:
    """Of the lines of code that act where a case starts to fail the first is shown."""
    code = tuple(Line(f"model.py:{n} (f)", f"why {n}", f"> {n}  x") for n in (3, 5))
    told = replace(explained("plain"), lines=code, where="row 1")
    accounts = (told, replace(told, edge="jax32:oracle", lines=(), where="row 2"))
    write_run(tmp_path, earlier(failing(case="plain"), day=1))
    made = replace(earlier(failing(case="plain"), day=2), explanations=accounts)
    folder = write_run(tmp_path, made)
    lines = comparison_lines(judge_stored(folder))
    assert lines[0] == "since when: It failed in every run that measured it: 2 runs."
    assert [line for line in lines if "model.py" in line] == ["line: model.py:3 (f): why 3"]
    assert [line for line in lines if line.startswith("    ")] == ["    > 3  x"]
    elements = [line.split(": ")[1] for line in lines if line.startswith("elements that break")]
    assert elements == ["row 1", "row 2"]
    answer = cli("gate", folder.name, "--out", tmp_path, "--json")
    found, _ = json.loads(answer.stdout)["explanations"]
    assert [line["why"] for line in found["lines"]] == ["why 3", "why 5"]


def test_what_explains_a_port_names_no_command_of_megalodon(tmp_path: Path) -> None:
    """Though it has a case of the same name."""
    suites = [{**WHOLE, "name": "mlp"}]
    rows = [failing(case="plain", edge="port32:port64")]
    made = replace(earlier(*rows, kind="port", suites=suites), explanations=(explained("plain"),))
    folder = write_run(tmp_path, made)
    lines = comparison_lines(judge_stored(folder))
    assert [line.split(": ")[0] for line in lines[:1]] == ["explained"]
    assert not [line for line in lines if line.startswith(("explain:", "shrink:"))]
    answer = cli("gate", folder.name, "--out", tmp_path, "--json")
    [found] = json.loads(answer.stdout)["explanations"]
    assert (found["case"], found["commands"]) == ("plain", [])


def port(root: Path, day: int, name: str = "a b", value: float = 1e-6) -> Path:
    """Store a healthy run of a port."""
    row = measurement(case=name, value=value)
    return write_run(root, earlier(row, day=day, kind="port", suites=[{**WHOLE, "name": name}]))


def test_the_checkout_that_is_asked_is_that_of_the_measured_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours for a night, and for a port its own; files below the runs make neither dirty."""
    asked: list[tuple[Path, Path]] = []
    monkeypatch.setattr(
        pinning, "git_state", lambda *places: (asked.append(places), ("c0ffee", False))[1]
    )
    root = tmp_path / "runs"
    pin_run(write_run(root, earlier(measurement(), day=1)), "why")
    pin_run(port(root, 2), "why")
    assert asked == [(Path(pinning.__file__).parent, root), (tmp_path, root)]


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Etc/GMT-14"])
def test_a_pin_has_the_date_of_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    """Whichever date it is where it is pinned: at any time one of these zones has another."""
    folder = write_run(tmp_path / "runs", run(measurement()))
    days = [today()]
    try:
        with monkeypatch.context() as patched:
            patched.setenv("TZ", zone)
            time.tzset()
            pinned = pin_run(folder, "why").pin.pinned
    finally:
        time.tzset()
    assert pinned in (*days, today())


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


@pytest.mark.parametrize("hours", [-1.0, AHEAD / 2, AHEAD + 1])
def test_a_newest_run_beside_a_damaged_newer_one_is_refused_whenever_it_is_dated(
    tmp_path: Path, hours: float
) -> None:
    made = datetime.now(UTC) + timedelta(hours=hours)
    folder = write_run(tmp_path, earlier(measurement(), created=made.isoformat()))
    assert find_run(tmp_path, "latest") == folder
    assert abs(look_up(tmp_path, "latest").ahead - hours) < 1
    (damaged := tmp_path / f"{made + timedelta(days=1):%Y-%m-%dT%H-%M-%SZ}-damaged").mkdir()
    with pytest.raises(StoreError, match=f"but {damaged.name} may be newer than {folder.name}"):
        find_run(tmp_path, "latest")


def test_levels_that_moved_as_far_are_listed_by_name(tmp_path: Path) -> None:
    names = ("b", "c", "a")
    for day, value in ((1, 1e-6), (2, 2e-6)):
        rows = [measurement(case=name, value=value, identity=name) for name in names]
        diff = pin_run(write_run(tmp_path / "runs", earlier(*rows, day=day)), "why")
    assert [line.split(" | ")[0] for line in diff.lines()[1:]] == ["  a", "  b", "  c"]


def test_a_pin_that_an_earlier_version_put_elsewhere_moves(tmp_path: Path) -> None:
    root, old = tmp_path / "runs", tmp_path / "pinned" / "a-b"
    old.mkdir(parents=True)
    first = pin_run(port(root, 1), "first")
    assert first.path.parent.name.startswith("a-b~") and first.before is None
    first.path.rename(place := old / first.path.name)
    second = pin_run(port(root, 2, value=2e-6), "second")
    assert second.before == first.pin and second.path == first.path and not place.exists()
    # Where both are there, the one in its place is replaced, and the other goes too.
    first.path.rename(place)
    third = pin_run(port(root, 3), "third")
    pins.write(first.pin, place)
    fourth = pin_run(port(root, 4), "fourth")
    assert fourth.before == third.pin and not place.exists()
    # In a folder of the caller's own nothing else is looked for.
    pins.write(first.pin, place)
    own = pin_run(port(root, 5), "fifth", tmp_path / "own")
    assert (own.path.parent, own.before) == (tmp_path / "own", None) and place.exists()


def test_a_pin_of_another_port_in_the_same_folder_stays(tmp_path: Path) -> None:
    """In earlier versions the folder of "a b" was that of "a-b"."""
    root = tmp_path / "runs"
    theirs = pin_run(port(root, 1, "a-b"), "first")
    assert theirs.path.parent == tmp_path / "pinned" / "a-b"
    ours = pin_run(port(root, 2, "a b"), "second")
    assert ours.path.name == theirs.path.name and ours.before is None
    assert pins.read(theirs.path) == theirs.pin


def test_a_deletion_that_cannot_be_completed_ends_no_other(tmp_path: Path) -> None:
    (tmp_path / ".pruned-a").write_text("", encoding="utf-8")
    (tmp_path / ".pruned-b" / "c").mkdir(parents=True)
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".pruned-a"]


def test_a_machine_whose_levels_are_all_pinned_needs_no_anchor(tmp_path: Path) -> None:
    root, other = tmp_path / "runs", {"host": dict.fromkeys(FIELDS, "another")}
    first, second = (write_run(root, earlier(measurement(), day=day)) for day in (1, 2))
    write_run(root, earlier(measurement(identity="other"), day=3, **other))
    found = plan(root, 1)
    assert (found.goes, found.spared) == (
        (second,),
        ((first, f"anchor of the machine of {second.name}"),),
    )
    pin_run(first, "why")
    found = plan(root, 1)
    assert (found.goes, found.spared) == ((second,), ((first, "pinned"),))
    pin_run(second, "why")
    found = plan(root, 1)
    assert (found.goes, found.spared) == ((first,), ((second, "pinned"),))


@pytest.mark.parametrize("changes", [{"selected": ["a"]}, {"fault": "rope_sign"}], ids=str)
def test_a_part_of_a_night_keeps_every_anchor_of_the_whole_ones(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The next whole night is compared with them, whatever ran last."""
    a, b = (measurement(case=name, identity=name) for name in "ab")
    nights = [((b,), {}), ((a, b), {}), ((a, b), {}), ((a,), changes)]
    folders = [
        write_run(tmp_path, earlier(*rows, day=day, **more))
        for day, (rows, more) in enumerate(nights, 1)
    ]
    found = plan(tmp_path, 1)
    why = f"anchor of the machine of {folders[2].name}"
    assert {folder for folder, said in found.spared if said == why} == set(folders[:2])
    assert not set(folders[:2]) & set(found.goes)


def test_the_page_of_all_runs_says_where_they_are_and_is_kept_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, drawn, told = tmp_path / "my runs", list[Any](), list[str]()
    changes: dict[str, Any] = {"reference": {"kind": "live", "commit": "0123456789abcdef"}}
    suites = [{**WHOLE, "name": name} for name in "hgfedcba"]
    write_run(root, earlier(measurement(), day=1, kind="port", suites=suites, **changes))
    draw = runs_page.all_runs.render
    monkeypatch.setattr(runs_page.all_runs, "render", lambda *it: (drawn.append(it), draw(*it))[1])
    monkeypatch.chdir(root)
    for place in (root, Path()):
        runs_page.renew_runs_page(place, told.append)
        [entry], name, _ = drawn[-1]
        assert name == "my runs" and told == []
        assert (entry.reference, entry.subject) == ("live 0123456789", tuple("abcdefgh"))
    before = (root / "index.html").read_text(encoding="utf-8")

    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        runs_page.renew_runs_page(root, told.append)
    assert len(told) == 1 and "OSError: [Errno 28] No space left on device; `mega" in told[0]
    assert (root / "index.html").read_text(encoding="utf-8") == before
    # Whatever goes wrong, the night goes on.
    monkeypatch.setattr(runs_page, "list_lines", lambda root: 1 // 0)
    runs_page.renew_runs_page(root, told.append)
    assert "ZeroDivisionError" in told[1]
    monkeypatch.undo()


def test_the_page_of_all_runs_of_a_copy_names_their_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(runs_page.all_runs, "render", lambda *it: drawn.append(it) or "page")
    (tmp_path / ".shared").write_text("s3://bucket/runs", encoding="utf-8")
    runs_page.draw_runs_page(tmp_path)
    assert drawn[0][1] == "s3://bucket/runs"


def test_only_a_pin_of_a_machine_and_its_work_stands_for_an_anchor_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, first := earlier(measurement(), day=1))
    now = earlier(measurement(value=2e-6), day=2)
    elsewhere = earlier(measurement(), day=1, host=dict.fromkeys(FIELDS, "another"))
    otherwise = earlier(measurement(identity="other"), day=1)
    for night, anchored in ((first, False), (elsewhere, True), (otherwise, True)):
        found = anchors_of(tmp_path, now, pins.Pins((pins.pin_of(night, {}, "why"),)))
        assert [old.id for old in found] == [first.id] * anchored


def test_a_page_of_several_runs_leads_to_each_where_it_is(tmp_path: Path) -> None:
    """Runs that are compared may lie in different folders."""
    one = write_run(tmp_path / "a", earlier(measurement(), day=1))
    two = write_run(tmp_path / "b", earlier(measurement(value=2e-6), day=2))
    page = tmp_path / "page.html"
    write_several_page(page, [one, two], read_several([one, two]))
    drawn = page.read_text(encoding="utf-8")
    assert f"a/{one.name}" in drawn and f"b/{two.name}" in drawn
    assert f"a/{two.name}" not in drawn
    write_page(page, one, two, judge_stored(two, one))
    drawn = page.read_text(encoding="utf-8")
    assert f"a/{one.name}" in drawn and f"b/{two.name}" in drawn
    assert f"a/{two.name}" not in drawn


def test_the_earlier_of_two_runs_has_the_verdict_that_it_has_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pairs, "render", lambda *it: drawn.append(it) or "page")
    one, two = (write_run(tmp_path, earlier(failing(), day=day)) for day in (1, 2))
    write_page(tmp_path / "page.html", one, two, judge_stored(two, one))
    [(then, decision, now, _, _)] = drawn
    assert (then.id, now.id) == (one.name, two.name)
    assert decision == decide(read_run(one), None)


def test_runs_without_a_folder_of_their_name_are_listed_in_order_and_once(tmp_path: Path) -> None:
    """The one that is left out is compared with the one that is listed, which has another name."""
    for name in "cb":
        write_run(tmp_path, earlier(measurement(), id=name))
    for name in ("a", "d"):
        shutil.copytree(tmp_path / "c", tmp_path / name)
    shutil.rmtree(tmp_path / "c")
    listed, [(folder, why)] = summarise_runs(tmp_path)
    assert [it.id for it in listed] == ["a", "b"] and folder == tmp_path / "d"
    assert why.startswith(f"a copy of run c in {tmp_path / 'a'}")


def test_a_reference_without_a_commit_is_listed_by_its_kind(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(), reference={"kind": "absent"}))
    [listed], _ = summarise_runs(tmp_path)
    assert listed.reference == "absent"


def test_a_run_is_found_by_the_beginning_of_its_name_and_a_keyword_is_no_name(
    tmp_path: Path,
) -> None:
    root = tmp_path / "runs"
    write_run(root, earlier(measurement(), id="latest", day=1))
    newest = write_run(root, earlier(measurement(), id="of-day-2", day=2))
    assert look_up(root, "latest").folder == newest
    with pytest.raises(StoreError, match="no run 'day-2'"):
        look_up(root, "day-2")
    # A damaged run is found by its path too: reading it says what is wrong.
    (place := tmp_path / "elsewhere").mkdir()
    (place / "run.json").symlink_to(tmp_path / "nowhere")
    assert look_up(root, str(place)).folder == place


def test_a_bench_is_among_the_names_that_there_are(tmp_path: Path) -> None:
    folder = write_run(tmp_path, bench(1))
    with pytest.raises(StoreError, match=f"no run 'none' in .*; there are {folder.name}"):
        look_up(tmp_path, "none")


def test_a_damaged_run_is_as_new_as_the_newer_of_its_two_dates(tmp_path: Path) -> None:
    """Whichever of name and content has it, to the second; a link is as old as itself."""
    write_run(tmp_path, earlier(measurement(), day=6))
    for name, created, newer in (
        ("2026-11-07T00-00-00Z-x", "2026-11-01T00:00:00+00:00", True),
        ("undated", "2026-11-06T21:30:01+00:00", True),
        ("undated", "2026-11-06T21:29:59+00:00", False),
        # What is no text is no date: the folder is as old as its last change, which is just now.
        ("undated", 20261101, True),
        ("2026-11-01T00-00-00Z-x", 20261107, False),
    ):
        (folder := tmp_path / name).mkdir()
        (folder / "run.json").write_text(json.dumps({"created": created}), encoding="utf-8")
        assert bool(look_up(tmp_path, "latest").newer) is newer, created
        shutil.rmtree(folder)
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for year, newer in ((2001, False), (2040, True)):
        stamp = datetime(year, 1, 1, tzinfo=UTC).timestamp()
        os.utime(link, (stamp, stamp), follow_symlinks=False)
        assert bool(look_up(tmp_path, "latest").newer) is newer, year


def test_every_file_that_a_verdict_could_not_use_is_told(tmp_path: Path, pinned: Path) -> None:
    """Of pins, of retired work, and of runs."""
    folder = write_run(tmp_path / "runs", earlier(measurement(), day=1))
    (tmp_path / "runs" / "damaged").mkdir()
    pinned.mkdir()
    for name in ("cpu-x-recorded.json", "retired.json"):
        (pinned / name).write_text("{", encoding="utf-8")
    judged = judge_stored(folder)
    names = [why.partition(" is not used")[0] for why in judged.unusable_pins]
    assert names == ["cpu-x-recorded.json", "retired.json"]
    # The file of retired work is no pinned baseline.
    counted = " 1 pinned baseline was not used (cpu-x-recorded.json)."
    assert judged.decision.sentence.endswith(counted)
    assert [place.name for place, _ in judged.history.unreadable] == ["damaged", "pinned", "pinned"]


def test_a_night_that_was_stored_before_contracts_may_be_an_anchor(tmp_path: Path) -> None:
    folder = reseal(write_run(tmp_path, earlier(measurement(), day=1)), schema=4)
    assert judge_stored(folder).decision.word is Word.INCOMPLETE
    found = anchors_of(tmp_path, earlier(measurement(), day=2), pins.Pins())
    assert [old.id for old in found] == [folder.name]


def test_levels_that_any_pin_of_the_machine_has_need_no_anchor() -> None:
    rows = [measurement(case=name, identity=name) for name in "abc"]
    made = tuple(pins.pin_of(earlier(row), {}, "why") for row in rows[:2])
    left = without_pinned(run(*rows), pins.Pins(made))
    assert [m.case for m in left.measurements] == ["c"]


def test_all_accounts_of_a_case_have_a_line_and_its_commands_plant_the_fault(
    tmp_path: Path,
) -> None:
    told = replace(explained("plain"), lines=(Line("model.py:3 (f)", "why 3", "> 3  x"),))
    other = replace(told, edge="jax32:oracle", lines=(Line("model.py:5 (f)", "why 5", "> 5  x"),))
    made = earlier(failing(case="plain"), fault="rope_sign")
    folder = write_run(tmp_path, replace(made, explanations=(told, other)))
    judged = judge_stored(folder)
    lines = comparison_lines(judged)
    assert [line.split(": ")[-1] for line in lines if "model.py" in line] == ["why 3", "why 5"]
    for command in ("explain", "shrink"):
        [line] = [line for line in lines if line.startswith(f"{command}: ")]
        assert line.endswith(f" parity {command} plain --fault rope_sign")
    for values in explanations_of(judged.run):
        assert values["elements"] == ""
        assert [it.split(" parity ")[1] for it in values["commands"]] == [
            "explain plain --fault rope_sign",
            "shrink plain --fault rope_sign",
        ]


@pytest.mark.parametrize("kind", ["bench", "shard"])
def test_a_run_without_a_verdict_has_no_page_to_draw(tmp_path: Path, kind: str) -> None:
    made = bench(1) if kind == "bench" else earlier(measurement(), kind=kind)
    with pytest.raises(StoreError, match=f"is a {kind}; "):
        page_of(write_run(tmp_path, made))


def test_links_of_a_page_lead_out_of_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (folder := tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "deep" / "pages").mkdir(parents=True)
    (link := tmp_path / "link").symlink_to(tmp_path / "deep" / "pages")
    assert runs_from(link / "page.html", folder) == "../../runs"


def test_what_a_probe_said_is_told_beside_its_change() -> None:
    told = change_lines([change(0, edge="", case="probe values", note="why")])
    assert [line.endswith("  why") for line in told] == [True]


def test_a_gate_that_only_one_run_has_makes_nothing_suspect(tmp_path: Path) -> None:
    """The runs are not equal, but no result differs."""
    old = write_run(tmp_path, earlier(measurement(), day=1, commit="a" * 40))
    more = measurement(quantity="loss")
    new = write_run(tmp_path, earlier(measurement(), more, day=2, commit="a" * 40))
    judged = judge_stored(new, old)
    [commits] = range_lines(old, judged)
    assert "only in the second" in judged.decision.sentence and not judged.decision.changes
    assert commits == f"commits: none, both runs are of {'a' * 10}"


def test_entries_of_one_second_and_folders_without_a_date_are_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(runs_page.all_runs, "render", lambda *it: drawn.append(it) or "page")
    write_run(tmp_path, earlier(measurement(), id="z", day=1))
    for name in ("damaged", "2026-11-01T21-30-00Z-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    runs_page.draw_runs_page(tmp_path)
    names = ["2026-11-01T21-30-00Z-x", "z", "damaged", "nowhere"]
    assert [entry.name for entry in drawn[0][0]] == names


def test_the_page_of_all_runs_counts_every_older_run_and_says_which_trees_were_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with a planted fault, and a tree of which no commit is known."""
    drawn: list[Any] = []
    monkeypatch.setattr(runs_page.all_runs, "render", lambda *it: drawn.append(it) or "page")
    monkeypatch.setattr(runs_page, "SHOWN", 1)
    write_run(tmp_path, earlier(measurement(), id="a", day=1, fault="rope_sign"))
    write_run(tmp_path, earlier(measurement(), id="b", day=2, dirty=True, commit=None))
    runs_page.draw_runs_page(tmp_path)
    [(entries, _, omitted)] = drawn
    assert [(entry.name, entry.dirty) for entry in entries] == [("b", True)]
    assert [(entry.name, entry.fault) for entry in omitted] == [("a", "rope_sign")]


def test_a_group_of_gates_is_named_by_the_first_of_its_names(tmp_path: Path) -> None:
    gates = [GateName("c", "e", q, m) for q, m in (("y", "a"), ("x", "z"), ("x", "b"))]
    assert runs_page._groups(gates) == (GateGroup("c", "e", 3, "x", "b"),)


def test_a_run_is_judged_by_what_other_machines_stored_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is brought here when the run is stored, before the run is judged."""
    before = earlier(measurement(value=2e-6))
    monkeypatch.setattr(outcomes, "refresh", lambda root: write_run(root, before))
    decision = outcomes.store(tmp_path, run(measurement()), lambda line: None).decision
    assert decision is not None and {it.before for it in decision.changes} == {2e-6}


def test_groups_of_gates_come_by_edge_and_then_by_case() -> None:
    """In whatever order the gates are found."""
    names = [("b", "jax32:oracle"), ("a", "e"), ("c", "jax64:oracle"), ("a", "jax32:oracle")]
    groups = runs_page._groups([GateName(case, edge, "x", "m") for case, edge in names])
    assert [(group.case, group.edge) for group in groups] == [
        ("c", "jax64:oracle"),
        ("a", "jax32:oracle"),
        ("b", "jax32:oracle"),
        ("a", "e"),
    ]


def test_a_quantity_is_asked_of_a_case_even_if_its_name_is_empty(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(), day=1))
    with pytest.raises(ValueError, match="expected the case of the quantity ''"):
        look_back(str(tmp_path), quantity="")


def test_names_of_facts_without_a_tolerance_are_no_names_of_gates(tmp_path: Path) -> None:
    fact = measurement(case="fact", tolerance=math.nan, verdict=Verdict.INFO)
    write_run(tmp_path, earlier(measurement(), fact, day=1))
    for place in (str(tmp_path), f"{tmp_path}/*"):
        assert measured_names(place) == ["baseline"]


def test_cleaning_leaves_what_no_deletion_left(tmp_path: Path) -> None:
    """Such as the parts of an unfinished night, which are hidden too."""
    for name in (".unfinished", ".values", ".pruned-a"):
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished", ".values"]


def test_a_page_is_drawn_of_the_run_with_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "render", lambda run, *_: f"verdict {run.manifest.verdict}")
    stored = outcomes.store(tmp_path, earlier(failing()), lambda line: None)
    assert stored.page.read_text(encoding="utf-8") == "verdict REGRESSED"


def test_the_baseline_of_a_newest_run_is_kept_if_there_are_but_two(tmp_path: Path) -> None:
    first, second = (
        write_run(tmp_path, earlier(row, day=day))
        for day, row in ((1, failing()), (2, measurement()))
    )
    found = plan(tmp_path, 1)
    assert (found.goes, found.spared) == ((), ((first, f"baseline of {second.name}"),))


def test_nothing_is_looked_back_on_in_a_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(StoreError, match="expected a folder of runs"):
        look_back(str(tmp_path))
    with pytest.raises(StoreError, match="expected a folder of runs"):
        look_up(tmp_path, "latest")


def test_gates_are_looked_back_on_from_the_closest_to_its_tolerance_on(tmp_path: Path) -> None:
    rows = [measurement(case=case, value=value) for case, value in (("a", 1e-6), ("b", 3e-6))]
    write_run(tmp_path, earlier(*rows, measurement(case="c", value=2e-6)))
    assert [row["case"] for row in look_back(str(tmp_path)).rows] == ["b", "c", "a"]


def test_a_run_whose_reference_is_described_in_other_words_is_an_anchor(tmp_path: Path) -> None:
    reference = earlier().manifest.to_json()["reference"] | {"detail": "other words"}
    folder = write_run(tmp_path, earlier(measurement(), day=1, reference=reference))
    found = anchors_of(tmp_path, earlier(measurement(), day=2), pins.Pins())
    assert [old.id for old in found] == [folder.name]


def test_what_could_not_be_looked_back_on_is_named_by_its_path(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement()))
    (tmp_path / "damaged").mkdir()
    [(name, _)] = look_back(str(tmp_path)).unreadable
    assert name == str(tmp_path / "damaged")


def test_the_page_of_a_run_leads_to_the_runs_beside_it_though_its_folder_is_a_link(
    tmp_path: Path,
) -> None:
    (folder := tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (link := tmp_path / "elsewhere" / "link").symlink_to(folder)
    assert runs_from(link / "report.html", link) == ".."
    assert runs_from(tmp_path / "page.html", link) == "runs"


@pytest.mark.parametrize("several", [False, True])
def test_a_page_of_runs_side_by_side_is_kept_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    runs = [write_run(tmp_path / "runs", earlier(measurement(), day=day)) for day in (1, 2)]
    page = tmp_path / "page.html"
    page.write_text("before", encoding="utf-8")

    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(Path, "write_text", full)
        if several:
            write_several_page(page, runs, read_several(runs))
        else:
            write_page(page, *runs, judge_stored(runs[1], runs[0]))
    assert page.read_text(encoding="utf-8") == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "runs"]


def test_a_run_whose_deletion_is_interrupted_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, earlier(measurement()))

    def killed(path: Path) -> None:
        (path / MEASUREMENTS).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        delete(folder)
    assert summarise_runs(tmp_path) == ([], [])
    clean(tmp_path)
    assert not list(tmp_path.glob(f"*{folder.name}*"))


def test_a_run_that_its_storage_does_not_delete_stays_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, earlier(measurement()))

    class Refusing:
        def delete(self, name: str) -> None:
            raise StoreError("403 Forbidden")

    monkeypatch.setattr(retention, "storage_of", lambda root: Refusing())
    with pytest.raises(StoreError, match="403"):
        delete(folder)
    assert read_run(folder).id == folder.name


def test_a_pin_that_cannot_be_written_leaves_the_one_that_it_would_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, old = tmp_path / "runs", tmp_path / "pinned" / "a-b"
    old.mkdir(parents=True)
    first = pin_run(port(root, 1), "first")
    first.path.rename(place := old / first.path.name)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    second = port(root, 2)
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="nothing was pinned"):
        patched.setattr(pins, "write", full)
        pin_run(second, "second")
    assert pins.read(place) == first.pin


def test_an_account_as_json_has_all_of_its_parts() -> None:
    told = replace(explained("plain"), parameters=("b", "a"), where="row 1")
    code = (Line("model.py:3 (f)", "why", "> 3  x"),)
    known = Explanation("held", "jax64:oracle", meaning="It holds.", lines=code)
    night = replace(run(failing(case="plain")), explanations=(told, known))
    [values] = explanations_of(night)
    parts = {name: getattr(told, name) for name in ("case", "edge", "quantity", "meaning")}
    parts |= {"parameters": ["b", "a"], "elements": "row 1", "lines": []}
    assert values.pop("commands") and values == parts


def test_a_row_of_a_finding_says_no_edge_and_near_values_differ(tmp_path: Path) -> None:
    """The values of a row have as many digits as it takes to tell them apart."""
    found = finding(severity=Severity.ERROR)
    rows = [
        run(measurement(value=value), findings=(found,) * (name == "b"), id=name)
        for name, value in (("a", 1.001e-6), ("b", 1.002e-6))
    ]
    _, lines, _ = table(compare_runs(rows))
    finds, gate = lines[-2:]
    assert "()" not in finds[0] and "(JAX float32 vs oracle)" in gate[0]
    assert gate[1] != gate[2]


def test_a_run_that_drifted_from_a_pin_is_no_anchor(tmp_path: Path) -> None:
    """Also of levels that no pin has."""
    a, b = (measurement(case=name, identity=name) for name in "ab")
    nights = [earlier(replace(a, value=3.9e-6), b, day=1), earlier(a, b, day=2)]
    for night in nights:
        write_run(tmp_path, night)
    pinned = pins.Pins((pins.pin_of(earlier(a), {}, "why"),))
    for known, expected in ((pinned, nights[1]), (pins.Pins(), nights[0])):
        found = anchors_of(tmp_path, earlier(a, b, day=3), known)
        assert [old.id for old in found] == [expected.id]


def test_the_address_of_measurements_is_that_of_their_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all slashes of its scheme, without which no storage finds them."""
    folder = write_run(tmp_path, earlier(measurement()))
    content = (folder / "run.json").read_bytes()

    class Remote:
        """Answers like a storage that has this run, and cannot hash its file."""

        def __enter__(self) -> Remote:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def execute(self, query: str, values: dict[str, str]) -> Remote:
            if "sha256" in query:
                raise duckdb.Error
            assert values == {"pattern": "s3://bucket/runs/*/run.json"}
            return self

        def fetchall(self) -> list[Any]:
            return [(f"s3://bucket/runs/{folder.name}/run.json", content, len(content))]

    monkeypatch.setattr(lookback.duckdb, "connect", Remote)
    [[entry], unreadable] = lookback._runs("s3://bucket/runs")
    assert entry.file == f"s3://bucket/runs/{folder.name}/{MEASUREMENTS}" and unreadable == []


def test_all_parts_of_a_verdict_are_of_one_look_at_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another process stores an older run while the verdict is formed."""
    then = write_run(tmp_path, earlier(measurement(), day=2))
    now = write_run(tmp_path, earlier(measurement(), day=3))
    load = lookup.load_history

    def loaded(root: Path, run: Run) -> History:
        history = load(root, run)
        write_run(root, earlier(measurement(), day=1))
        return history

    monkeypatch.setattr(lookup, "load_history", loaded)
    [comparison] = judge_stored(now).decision.comparisons
    assert comparison.pin.run == then.name


def test_a_copy_is_looked_back_on_once_though_a_pattern_finds_it_twice(tmp_path: Path) -> None:
    folder = write_run(tmp_path, earlier(measurement(), day=1))
    shutil.copytree(folder, tmp_path / "copy")
    for place in (str(tmp_path), f"{tmp_path}/*"):
        found = look_back(place, "baseline", "logits")
        assert (found.runs, len(found.rows)) == (1, 1)
        assert [Path(name).name for name, _ in found.unreadable] == ["copy"]


def test_runs_of_the_kind_that_is_asked_for_are_looked_back_on(tmp_path: Path) -> None:
    """Of which there are as many as are counted where none of them has the gate."""
    for day, kind in enumerate(("nightly", "nightly", "pytest"), 1):
        write_run(tmp_path, earlier(measurement(), day=day, kind=kind))
    assert look_back(str(tmp_path), kind=RunKind.PYTEST).runs == 1
    with pytest.raises(StoreError, match="no gate of case x in 1 run of"):
        look_back(str(tmp_path), "x", kind=RunKind.PYTEST)


def test_a_run_of_no_known_class_of_device_is_listed_without_one(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(), device={"kind": None, "name": "a name"}))
    [listed], _ = summarise_runs(tmp_path)
    assert listed.device == ""


def test_what_is_left_on_a_storage_alone_is_cleaned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned: list[bool] = []

    class Storage:
        def clean(self) -> None:
            cleaned.append(True)

    monkeypatch.setattr(retention, "storage_of", lambda root: Storage())
    clean(tmp_path)
    assert cleaned == [True]
