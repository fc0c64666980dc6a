"""Which gates began and ceased to fail between runs that did the same work."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.engine.measure.measurement import Verdict
from reports.registry import gate_changes
from reports.registry.gate_changes import GateChanges, follow_gates
from reports.store.index import Line
from reports.store.query import Table
from reports.store.runs import Run, list_lines, write_run
from tests.reports.nights import earlier, failing, measurement


def lines_of(root: Path, *nights: Run) -> list[Line]:
    """Store nights, and return their lines oldest first."""
    for night in nights:
        write_run(root, night)
    lines, unreadable = list_lines(root)
    assert not unreadable
    return sorted(lines, key=lambda line: line.name)


def by_day(found: dict[str, GateChanges]) -> dict[int, GateChanges]:
    return {int(name[8:10]): change for name, change in found.items()}


def told(change: GateChanges) -> list[tuple[int, list[str], list[str]]]:
    """The steps of a run: the day before, and which quantities began and ceased to fail."""
    return [
        (int(s.before[8:10]), [g.quantity for g in s.began], [g.quantity for g in s.ceased])
        for s in change.steps
    ]


def test_a_gate_begins_and_ceases_to_fail(tmp_path: Path) -> None:
    other = measurement(quantity="other")
    nights = (
        earlier(measurement(), other, day=10),
        earlier(failing(), other, day=11),
        earlier(failing(), other, day=12),
        earlier(measurement(), other, day=13),
        earlier(measurement(), other, day=14),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert {day: told(change) for day, change in found.items()} == {
        11: [(10, ["logits"], [])],
        13: [(12, [], ["logits"])],
    }
    [gate] = found[11].steps[0].began
    assert (gate.case, gate.edge, gate.metric) == ("baseline", "jax32:oracle", "rel_l2")


def test_a_run_that_did_not_measure_it_is_passed_over(tmp_path: Path) -> None:
    """Each gate changes since the run that measured it last, which may be another for each."""
    x = {"quantity": "x"}
    nights = (
        earlier(failing(), measurement(**x), day=10),
        earlier(measurement(**x), day=11, selected=["plain"]),
        earlier(measurement(), failing(**x), day=12),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert told(found[12]) == [(11, ["x"], []), (10, [], ["logits"])]
    assert found[10].first == 1
    assert 11 not in found, "a selection dropped nothing"


def test_other_work_mends_nothing(tmp_path: Path) -> None:
    """A gate that fails and is then measured on other inputs has neither ceased nor begun."""
    nights = (
        earlier(failing(), failing(quantity="x"), day=10),
        earlier(measurement(identity="other"), failing(quantity="x"), day=11),
        earlier(failing(identity="third"), failing(quantity="x"), day=12),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert (found[11].steps, found[11].dropped, found[11].first) == ((), 1, 0)
    assert (found[12].steps, found[12].dropped, found[12].first) == ((), 0, 1)


def test_a_planted_bug_is_compared_and_never_compared_with(tmp_path: Path) -> None:
    nights = (
        earlier(measurement(), day=10),
        earlier(failing(), day=11, fault="rope_sign"),
        earlier(measurement(), day=12),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert told(found[11]) == [(10, ["logits"], [])]
    assert 12 not in found


def test_kinds_are_followed_apart(tmp_path: Path) -> None:
    nights = (
        earlier(measurement(), day=10),
        earlier(failing(), day=11, kind="pytest"),
        earlier(measurement(), day=12),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert set(found) == {11}
    assert (found[11].steps, found[11].first) == ((), 1)


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({}, 1),
        ({"device": {"kind": "cuda", "name": "an H200"}}, 0),
        ({"device": {"kind": "cpu", "name": "another"}}, 1),
        ({"suites": [{"name": "another port"}]}, 0),
        ({"selected": ["plain"]}, 0),
        ({"fault": "rope_sign"}, 0),
    ],
    ids=str,
)
def test_a_gate_is_dropped_only_by_a_whole_run_of_its_subject_on_its_device(
    changes: dict[str, Any], dropped: int, tmp_path: Path
) -> None:
    port = {"kind": "port", "suites": [{"name": "port"}]}
    nights = (
        earlier(failing(), measurement(quantity="x"), day=10, **port),
        earlier(measurement(quantity="x"), day=11, **{**port, **changes}),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert found.get(11, GateChanges()).dropped == dropped
    # A run of the same stream that comes later drops it all the same.
    last = earlier(measurement(quantity="x"), day=12, **port)
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, last)))
    assert found.get(12, GateChanges()).dropped == 1 - dropped


def test_runs_of_unknown_work_are_followed_each_by_what_it_measured(tmp_path: Path) -> None:
    """What runs have in common saves reading them, and changes no answer."""
    x, y = {"quantity": "x"}, {"quantity": "y"}
    nights = (
        earlier(failing(), day=10),
        earlier(measurement(**x), failing(**y), day=11),
        earlier(measurement(), failing(**x), day=12),
        earlier(measurement(), measurement(**x), measurement(**y), day=13),
        earlier(measurement(**y), failing(), day=14),
    )
    lines = lines_of(tmp_path, *nights)
    assert all(line.work for line in lines)
    known = follow_gates(tmp_path, lines)
    assert len(known) == len(nights)
    for unknown in ({10}, {11, 12}, {10, 12, 14}, {10, 11, 12, 13, 14}):
        blank = [replace(n, work="") if int(n.name[8:10]) in unknown else n for n in lines]
        assert follow_gates(tmp_path, blank) == known


@pytest.mark.parametrize("broken", [1, 3])
def test_failing_gates_that_cannot_be_read_are_not_known(tmp_path: Path, broken: int) -> None:
    """What the index counted and the files do not have is no answer, and later runs skip it."""
    nights = (
        earlier(measurement(), day=10),
        earlier(failing(), failing(quantity="second"), day=11),
        earlier(measurement(), day=12),
    )
    lines = lines_of(tmp_path, *nights)
    assert lines[1].broken == 2
    lines[1] = replace(lines[1], broken=broken)
    found = by_day(follow_gates(tmp_path, lines))
    assert found == {11: GateChanges(known=False)}


def test_a_file_that_cannot_be_read_leaves_the_red_runs_beside_it_known(tmp_path: Path) -> None:
    nights = [earlier(failing(quantity=f"q{day}"), day=day) for day in (10, 11, 12)]
    lines = lines_of(tmp_path, earlier(measurement(), day=9), *nights)
    lines = [replace(line, gathered="") for line in lines]
    (tmp_path / lines[3].name / "measurements.parquet").write_bytes(b"damaged")
    found = by_day(follow_gates(tmp_path, lines))
    assert {day for day, changes in found.items() if changes.known} == {10, 11}


def test_runs_of_a_work_that_cannot_be_read_are_not_known_though_all_their_gates_hold(
    tmp_path: Path,
) -> None:
    """Which gates a healthy run measured is read of one run of its work, here a damaged one."""
    other = {"identity": "other"}
    nights = [
        earlier(failing(), day=10),
        earlier(measurement(**other), day=11),
        earlier(measurement(**other), day=12),
        earlier(measurement(), day=13),
    ]
    lines = [replace(line, gathered="") for line in lines_of(tmp_path, *nights)]
    (tmp_path / lines[2].name / "measurements.parquet").write_bytes(b"damaged")
    found = by_day(follow_gates(tmp_path, lines))
    assert {day for day, changes in found.items() if not changes.known} == {11, 12}
    assert told(found[13]) == [(10, [], ["logits"])]


@pytest.mark.parametrize("last", [11, 12])
def test_a_gate_that_cannot_be_compared_begins_to_fail(tmp_path: Path, last: int) -> None:
    """Also in the newest run of its work, which tells what the others of it measured."""
    blocked = measurement(value=math.nan, tolerance=math.nan, verdict=Verdict.NOT_COMPARABLE)
    nights = [earlier(measurement(), day=10), earlier(blocked, day=11), earlier(failing(), day=12)]
    nights = [night for night in nights if night.manifest.id[8:10] <= str(last)]
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert {day: told(change) for day, change in found.items()} == {11: [(10, ["logits"], [])]}


def test_the_measurements_themselves_are_read_where_none_are_gathered(tmp_path: Path) -> None:
    nights = (earlier(measurement(), day=10), earlier(failing(), day=11))
    lines = [replace(line, gathered="") for line in lines_of(tmp_path, *nights)]
    assert told(by_day(follow_gates(tmp_path, lines))[11]) == [(10, ["logits"], [])]


def test_many_red_runs_are_told_apart(tmp_path: Path) -> None:
    """Each of them fails in one gate more than the one before, and the last in none."""
    names = [f"q{i}" for i in range(8)]
    nights = [
        earlier(
            *((failing if i < day - 10 else measurement)(quantity=n) for i, n in enumerate(names)),
            day=day,
        )
        for day in range(10, 18)
    ]
    nights.append(earlier(*(measurement(quantity=n) for n in names), day=18))
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert [told(found[day]) for day in range(11, 18)] == [
        [(day - 1, [f"q{day - 11}"], [])] for day in range(11, 18)
    ]
    [(before, began, ceased)] = told(found[18])
    assert (before, began, sorted(ceased)) == (17, [], names[:7])


def test_healthy_nights_cost_no_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(tmp_path, earlier(measurement(), day=10), earlier(measurement(), day=11))

    def refuse(self: Table, *_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(gate_changes.Table, "__init__", refuse)
    assert follow_gates(tmp_path, lines) == {}
    with pytest.raises(AssertionError):
        follow_gates(tmp_path, [replace(line, broken=1) for line in lines])


@pytest.mark.parametrize("gathered", [True, False])
def test_a_gate_that_is_told_without_a_tolerance_has_not_ceased_to_fail(
    tmp_path: Path, gathered: bool
) -> None:
    fact = measurement(tolerance=math.nan, verdict=Verdict.INFO)
    other = measurement(quantity="x")
    nights = (
        earlier(failing(), other, day=10),
        earlier(fact, other, day=11),
        earlier(measurement(), other, day=12),
    )
    lines = lines_of(tmp_path, *nights)
    if not gathered:
        lines = [replace(line, gathered="") for line in lines]
    found = by_day(follow_gates(tmp_path, lines))
    assert (told(found[11]), found[11].dropped) == ([], 1)
    assert told(found[12]) == [(10, [], ["logits"])]


def test_a_run_without_gates_is_passed_over(tmp_path: Path) -> None:
    """It dropped no gate, and the next one drops what the one before it had."""
    fact = measurement(quantity="fact", tolerance=math.nan, verdict=Verdict.INFO)
    nights = (
        earlier(failing(), day=10),
        earlier(fact, day=11),
        earlier(measurement(quantity="other"), day=12),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert {day: change.dropped for day, change in found.items()} == {10: 0, 12: 1}


def test_a_port_is_followed_through_runs_that_had_others_beside_it(tmp_path: Path) -> None:
    one, both = ([{"name": name} for name in names] for names in ("a", "ab"))
    nights = (
        earlier(measurement(suite="a"), day=10, kind="port", suites=both),
        earlier(failing(suite="a"), day=11, kind="port", suites=one),
        earlier(measurement(suite="a"), day=12, kind="port", suites=both),
    )
    found = by_day(follow_gates(tmp_path, lines_of(tmp_path, *nights)))
    assert {day: told(change) for day, change in found.items()} == {
        11: [(10, ["logits"], [])],
        12: [(11, [], ["logits"])],
    }


def test_what_failed_before_a_run_that_cannot_be_read_is_dropped_after_it(tmp_path: Path) -> None:
    x = measurement(quantity="x")
    nights = (
        earlier(failing(), x, day=10),
        earlier(failing(), x, failing(quantity="y"), day=11),
        earlier(x, day=12),
    )
    lines = lines_of(tmp_path, *nights)
    lines[1] = replace(lines[1], broken=3)
    found = by_day(follow_gates(tmp_path, lines))
    assert (found[11].known, found[12].dropped) == (False, 1)
