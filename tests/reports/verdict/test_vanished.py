"""Work that earlier runs did stays expected until somebody retires it."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.port_tolerances import PortEdge
from reports.registry import retire as retiring
from reports.registry.lookup import judge
from reports.registry.retire import retire
from reports.store.manifest import AHEAD
from reports.store.runs import Run, write_run
from reports.store.schema import MANIFEST, MEASUREMENTS, SCHEMA, RunKind, StoreError
from reports.verdict import pins
from reports.verdict.decide import Word
from reports.verdict.vanished import (
    FILE,
    Earlier,
    Retired,
    Seen,
    Vanished,
    comparable,
    group_of,
    read_retired,
    vanished,
    write_retired,
)
from tests.helpers import cli
from tests.reports.nights import altered, contracted, failing, measurement, reseal, run

SUITE = {"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}
BEFORE = (
    measurement(case="a"),
    measurement(case="a", kind=Kind.GRADIENT, quantity="grad/w"),
    measurement(case="a", edge="jax64:oracle", quantity="logits"),
    measurement(case="b"),
    measurement(case="a difference", suite="seams"),
)


@pytest.fixture(autouse=True)
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pins, "FOLDER", tmp_path / "pinned")
    return tmp_path / "pinned"


def night(day: int, rows: Sequence[Measurement], **changes: Any) -> Run:
    """A whole night of these rows on a day of November."""
    suites = [{**SUITE, "name": name} for name in dict.fromkeys(m.suite for m in rows)]
    date = f"2026-11-{day:02d}T21"
    given = {"id": f"{date}-30-00Z-1a2b3c4", "created": f"{date}:30:00+00:00", "suites": suites}
    made = run(*rows, **{**given, "contract": contracted(rows), **changes})
    # As the file has it: rows of a port are named after their suites.
    return replace(made, measurements=tuple(rows))


def stored(root: Path, *nights: Run) -> list[Path]:
    return [write_run(root, it) for it in nights]


def without(**of: Any) -> list[Measurement]:
    return [m for m in BEFORE if any(getattr(m, name) != value for name, value in of.items())]


LOST = {
    "a case": ({"case": "b"}, "gates of case b"),
    "a comparison": ({"edge": "jax64:oracle"}, "JAX float64 vs oracle"),
    "all gradients": ({"kind": Kind.GRADIENT}, "gradient gates of case a"),
    "a suite": ({"suite": "seams"}, "a suite that this run lacks: seams"),
}


@pytest.mark.parametrize(("lost", "told"), LOST.values(), ids=LOST)
def test_what_vanished_is_missed_every_night(tmp_path, lost, told) -> None:
    root = tmp_path / "runs"
    less = without(**lost)
    nights = [night(1, BEFORE), *(night(day, less) for day in (2, 3, 4))]
    stored(root, *nights)
    for it in nights[1:]:
        decision = judge(root, it).decision
        assert (decision.word, told in decision.sentence) == (Word.INCOMPLETE, True)
        assert f"`retire --reason ... {it.id} " in decision.sentence
    # Negative controls: the first night, and one that has it all.
    assert judge(root, nights[0]).decision.word is Word.PASS
    assert judge(root, night(5, BEFORE)).decision.word is Word.PASS


NO_EVIDENCE = {
    "a selection": {"selected": ["a", "b"]},
    "a planted bug": {"fault": "conjugate"},
    "a night cut short": {"suites": [{**SUITE, "planned": 2}, {**SUITE, "name": "seams"}]},
    "another class of device": {"device": {"kind": "cuda", "name": "H200"}},
    "another kind of reference": {"reference": {"kind": "live", "commit": "082db4b"}},
    "a session of pytest": {"kind": "pytest"},
}


@pytest.mark.parametrize("changes", NO_EVIDENCE.values(), ids=NO_EVIDENCE)
def test_what_another_kind_of_night_did_is_not_expected(tmp_path, changes) -> None:
    less = without(case="b")
    stored(tmp_path / "runs", night(1, BEFORE, **changes))
    assert judge(tmp_path / "runs", night(2, less)).decision.word is Word.PASS


def test_a_damaged_night_is_evidence_of_what_it_planned(tmp_path) -> None:
    root, less = tmp_path / "runs", night(3, without(suite="seams"))
    old, newer = stored(root, night(1, BEFORE), night(2, less.measurements))
    # Damaged before it was ever listed, and after.
    for name in ("a first look", "a second"):
        (old / MEASUREMENTS).write_bytes(name.encode())
        decision = judge(root, less).decision
        assert (decision.word, "seams" in decision.sentence) == (Word.INCOMPLETE, True)
    answer = cli("retire", newer.name, "seams", "--reason", "gone", "--out", root)
    assert answer.exit_code == 0, answer.output
    assert judge(root, less).decision.word is Word.PASS


NO_PLAN = {
    "run.json does not fit its seal": {},
    "a copy of it": {"name": "2026-11-01T21-30-00Z-copy"},
    "later": {"day": 9},
    "another kind": {"kind": "pytest"},
    "a planted bug": {"fault": "conjugate"},
    "a selection": {"selected": ["a", "b"]},
}


@pytest.mark.parametrize("changes", NO_PLAN.values(), ids=NO_PLAN)
def test_what_a_damaged_run_planned_counts_as_if_it_were_whole(tmp_path, changes) -> None:
    root, less = tmp_path / "runs", night(3, without(case="b"))
    changes, seal = dict(changes), not changes
    day, name = changes.pop("day", 1), changes.pop("name", "")
    [old] = stored(root, night(day, BEFORE, **changes))
    old = old.rename(root / name) if name else old
    (old / MEASUREMENTS).write_bytes(b"damaged")
    if seal:
        text = (old / MANIFEST).read_text(encoding="utf-8")
        (old / MANIFEST).write_text(text.replace('"b"', '"c"'), encoding="utf-8")
    assert judge(root, less).decision.word is Word.PASS


@pytest.mark.parametrize(("schema", "word"), [(4, Word.PASS), (SCHEMA, Word.INCOMPLETE)])
def test_what_a_damaged_run_without_a_seal_planned_is_no_evidence(tmp_path, schema, word) -> None:
    """Nothing says that the run.json of an old schema is as it was stored; a whole run counts."""
    root, less = tmp_path / "runs", night(3, without(suite="seams"))
    old = reseal(*stored(root, night(1, BEFORE)), schema=schema)
    assert judge(root, less).decision.word is Word.INCOMPLETE
    (old / MEASUREMENTS).write_bytes(b"damaged")
    assert judge(root, less).decision.word is word


@pytest.mark.parametrize(("newer", "word"), [(2, Word.INCOMPLETE), (3, Word.PASS)])
def test_of_damaged_runs_too_the_newest_count(tmp_path, monkeypatch, newer, word) -> None:
    monkeypatch.setattr("reports.verdict.history.WINDOW", 4)
    root, less = tmp_path / "runs", without(case="b")
    old, *_ = stored(root, night(1, BEFORE), *(night(2 + n, less) for n in range(newer)))
    for text in ("", "damaged"):
        if text:
            (old / MEASUREMENTS).write_text(text, encoding="utf-8")
        assert judge(root, night(9, less)).decision.word is word


def test_a_run_of_selected_cases_misses_nothing(tmp_path) -> None:
    stored(tmp_path / "runs", night(1, BEFORE))
    chosen = night(2, without(case="b"), selected=["a"])
    assert judge(tmp_path / "runs", chosen).decision.word is Word.PASS


def test_retired_work_is_missed_no_longer_until_it_comes_back(tmp_path, pinned) -> None:
    root, less = tmp_path / "runs", without(case="b")
    first, second, third = night(1, BEFORE), night(2, less), night(3, less)
    folders = stored(root, first, second, third)
    answer = cli("retire", third.id, "b", "--reason", "covered by a", "--out", root)
    assert answer.exit_code == 0 and "1 groups of gates" in answer.output
    assert "still expected" not in answer.output
    [entry] = read_retired(pinned)[0]
    groups = (("b", "jax32:oracle", "logits"),)
    assert entry == Retired("b", third.manifest.created, "covered by a", (), groups)
    for it in (second, third, night(4, less)):
        assert judge(root, it).decision.word is Word.PASS
    # It came back: whoever removes it again has to say so again.
    stored(root, night(5, BEFORE))
    assert judge(root, night(6, less)).decision.word is Word.INCOMPLETE
    # More than one part of a name: all must fit.
    stored(root, night(7, without(kind=Kind.GRADIENT)))
    with pytest.raises(StoreError, match="it lacks a"):
        retire(folders[0].parent / night(7, BEFORE).id, "b | gradient", "gone")
    assert len(read_retired(pinned)[0]) == 1
    retire(folders[0].parent / night(7, BEFORE).id, "a | gradient", "gone")
    assert judge(root, night(8, without(kind=Kind.GRADIENT))).decision.word is Word.PASS
    assert judge(root, night(8, less)).decision.word is Word.INCOMPLETE


def test_a_retirement_needs_a_reason_and_something_to_retire(tmp_path, pinned) -> None:
    root = tmp_path / "runs"
    _, folder = stored(root, night(1, BEFORE), night(2, without(case="b")))
    with pytest.raises(StoreError, match="reason"):
        retire(folder, "b", " ")
    with pytest.raises(StoreError, match="received 'a': it lacks b"):
        retire(folder, "a", "covered")
    assert not (pinned / FILE).exists()


def test_a_retired_group_of_other_than_texts_is_named(pinned) -> None:
    pinned.mkdir()
    for entry in (WHOLE.replace('"logits"', "7"), WHOLE.replace('["b", ', "[7, ")):
        (pinned / FILE).write_text(f'{{"schema": 1, "retired": [{entry}]}}', encoding="utf-8")
        found, why = read_retired(pinned)
        assert found == () and "expected case, comparison and kind, received [" in why


def test_a_file_of_retired_work_that_lacks_something_is_told_with_what_it_lacks(pinned) -> None:
    pinned.mkdir()
    (pinned / FILE).write_text('{"schema": 1}', encoding="utf-8")
    told = (
        "retired.json is not used: expected what `retire` writes (schema 1), but reading it gave "
        "KeyError('retired'); restore it with git"
    )
    assert read_retired(pinned) == ((), told)


def test_a_folder_in_place_of_the_file_of_retired_work_is_told(pinned) -> None:
    """Not taken for a file that is not there yet."""
    assert read_retired(pinned) == ((), "")
    (pinned / FILE).mkdir(parents=True)
    found, why = read_retired(pinned)
    assert found == () and why.startswith(f"{FILE} is not used: ")


DAMAGED = ["{", "[]", '{"schema": 2, "retired": []}', '{"schema": 1, "retired": [{"name": "b"}]}']
ENTRY = '{"name": "b", "until": "soon", "reason": "x", "suites": [], "groups": []}'
EMPTY = ENTRY.replace('"b"', '""').replace("soon", "2026-11-10T00:00:00+00:00")
SHORT = ENTRY.replace('"groups": []', '"groups": [["b"]]').replace("soon", "2026-11-10")


WHOLE = ENTRY.replace("soon", "2026-11-10T00:00:00+00:00").replace(
    '"groups": []', '"groups": [["b", "jax32:oracle", "logits"]]'
)
BLANK = [
    WHOLE.replace('"reason": "x"', '"reason": " "'),
    WHOLE.replace('"suites": []', '"suites": ["seams", ""]'),
    WHOLE.replace('["b", ', '["", '),
    WHOLE.replace('"jax32:oracle"', '""'),
    WHOLE.replace('"logits"', "7"),
]
WRAPPED = [f'{{"schema": 1, "retired": [{entry}]}}' for entry in (ENTRY, EMPTY, SHORT, *BLANK)]


@pytest.mark.parametrize("text", [*DAMAGED, *WRAPPED, '{"schema": 0, "retired": []}'])
def test_a_damaged_file_retires_nothing_and_is_named(tmp_path, pinned, text) -> None:
    root, less = tmp_path / "runs", without(case="b")
    _, folder = stored(root, night(1, BEFORE), night(2, less))
    group = ("b", "jax32:oracle", "logits")
    write_retired(pinned, [Retired("b", "2026-11-10T00:00:00+00:00", "covered", (), (group,))])
    assert judge(root, night(2, less)).decision.word is Word.PASS
    # Control: what these files damage is whole without it.
    (pinned / FILE).write_text(f'{{"schema": 1, "retired": [{WHOLE}]}}', encoding="utf-8")
    assert judge(root, night(2, less)).decision.word is Word.PASS
    (pinned / FILE).write_text(text, encoding="utf-8")
    judged = judge(root, night(2, less))
    assert judged.decision.word is Word.INCOMPLETE
    assert any(FILE in why for why in judged.unusable_pins)
    with pytest.raises(StoreError, match="restore it"):
        retire(folder, "b", "covered")


def test_a_retired_suite_is_missed_no_longer(tmp_path) -> None:
    """The baseline ran it, too."""
    root, less = tmp_path / "runs", without(suite="seams")
    _, folder = stored(root, night(1, BEFORE), night(2, less))
    with pytest.raises(StoreError, match=r"received 'x': it lacks .*\bseams\b"):
        retire(folder, "x", "no seams any more")
    assert retire(folder, "seams", "no seams any more").suites == 1
    assert judge(root, night(2, less)).decision.word is Word.PASS
    assert judge(root, night(3, less)).decision.word is Word.PASS
    # Of another machine, whose newest run had the suite before that.
    assert judge(root, night(3, less, host={"name": "other"})).decision.word is Word.PASS


def test_a_retirement_covers_what_the_run_lacked_and_nothing_else(tmp_path) -> None:
    both = [*BEFORE, replace(BEFORE[1], case="b")]
    less = [m for m in both if (m.case, m.kind) != ("a", Kind.GRADIENT)]
    root = tmp_path / "runs"
    _, folder = stored(root, night(1, both), night(2, less))
    assert retire(folder, "gradient", "those of a are gone").groups == 1
    assert judge(root, night(2, less)).decision.word is Word.PASS
    none = [m for m in both if m.kind is not Kind.GRADIENT]
    third = night(3, none)
    assert judge(root, third).decision.word is Word.INCOMPLETE
    # Another retirement of the same name keeps the first.
    (folder,) = stored(root, third)
    assert retire(folder, "gradient", "those of b too").groups == 1
    assert judge(root, third).decision.word is Word.PASS


@pytest.mark.parametrize(
    "changes",
    [
        {"fault": "conjugate"},
        {"suites": [{**SUITE, "planned": 2}]},
        {"suites": [SUITE, {**SUITE, "name": "mesh", "planned": 2}]},
    ],
    ids=["bug", "cut", "one of two cut"],
)
def test_what_a_broken_night_lacks_is_not_retired(tmp_path, changes) -> None:
    less = [m for m in BEFORE if m.case == "a"]
    _, folder = stored(tmp_path / "runs", night(1, BEFORE), night(2, less, **changes))
    with pytest.raises(StoreError, match="may have failed instead"):
        retire(folder, "b", "gone")


def test_selections_in_between_do_not_age_what_a_whole_night_did(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("reports.verdict.history.WINDOW", 3)
    root = tmp_path / "runs"
    chosen = [night(day, BEFORE[:1], selected=["a"]) for day in (2, 3, 4, 5)]
    stored(root, night(1, BEFORE), *chosen)
    assert judge(root, night(6, without(case="b"))).decision.word is Word.INCOMPLETE


def test_another_checkpoint_has_its_own_name_for_the_same_case(tmp_path) -> None:
    committed, given = (
        [*BEFORE, measurement(case=name, quantity="loss")] for name in ("byte_lm", "checkpoint")
    )
    stored(tmp_path / "runs", night(1, committed))
    assert judge(tmp_path / "runs", night(2, given)).decision.word is Word.PASS
    assert judge(tmp_path / "runs", night(2, BEFORE)).decision.word is Word.INCOMPLETE


@pytest.mark.parametrize(
    "name", ["x | y", " lead", "é" * 70, "a\nb", "-dash", "a'b\"c", "\u202eevil", "gradient"]
)
def test_the_command_that_a_verdict_shows_retires_what_it_names(tmp_path, name) -> None:
    root, second = tmp_path / "runs", night(2, BEFORE)
    stored(root, night(1, [*BEFORE, measurement(case=name)]), second)
    told = judge(root, second).decision.sentence
    command, *words = shlex.split(told[told.rindex("`retire") :].strip("`."))
    answer = cli(command, "--out", root, *("why" if word == "..." else word for word in words))
    assert answer.exit_code == 0, answer.output
    assert judge(root, second).decision.word is Word.PASS


def test_a_time_without_a_zone_is_that_of_utc(tmp_path, pinned) -> None:
    root, less = tmp_path / "runs", without(case="b")
    stored(root, night(1, BEFORE), night(2, less))
    group = ("b", "jax32:oracle", "logits")
    for until, word in (("2026-11-01T21:30:01", Word.PASS), ("2026-11-01", Word.INCOMPLETE)):
        write_retired(pinned, [Retired("b", until, "covered", (), (group,))])
        assert judge(root, night(2, less)).decision.word is word


@pytest.mark.parametrize("zone", ["EAST-9", "WEST+8"])
def test_a_time_without_a_zone_is_that_of_utc_wherever_it_is_read(monkeypatch, zone: str) -> None:
    entry = Retired("seams", "2026-11-10T21:30:01", "why", ("seams",))
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            assert entry.covers("seams", Seen("r", "2026-11-10T21:30:00+00:00"))
            assert not entry.covers("seams", Seen("r", "2026-11-10T21:30:02+00:00"))
    finally:
        time.tzset()


# -- ports


def port(day: int, *rows: Measurement, off: Sequence[str] = ()) -> Run:
    documents = [{"title": "mlp", "name": "mlp", "switched_off": list(off)}]
    return night(day, rows, kind="port", ports=documents, reference={"kind": "torch"})


LOGITS = measurement(case="mlp", suite="mlp", edge=PortEdge.PORT32_ORIGINAL32)
NARROW = measurement(case="mlp", suite="mlp", edge=PortEdge.PORTBF16_PORT64)
GRADIENT = replace(LOGITS, kind=Kind.GRADIENT, quantity="grad/w")
STAGE = replace(LOGITS, kind=Kind.BLOCK, quantity="up")


def test_a_port_that_no_longer_runs_in_bfloat16_is_incomplete(tmp_path) -> None:
    root = tmp_path / "runs"
    stored(root, port(1, LOGITS, NARROW, GRADIENT, STAGE))
    for lost in ((LOGITS, GRADIENT), (LOGITS, NARROW)):
        decision = judge(root, port(2, *lost)).decision
        assert (decision.word, "case mlp" in decision.sentence) == (Word.INCOMPLETE, True)
    # Switched off on purpose, and a stage that came or went.
    off = port(2, LOGITS, off=("bfloat16", "gradients"))
    assert judge(root, off).decision.word is Word.PASS
    assert judge(root, port(2, LOGITS, GRADIENT, off=("gradients",))).decision.word is not Word.PASS
    assert judge(root, port(2, LOGITS, NARROW, GRADIENT)).decision.word is Word.PASS


def test_a_port_that_left_the_file_is_missed(tmp_path) -> None:
    root, other = tmp_path / "runs", replace(LOGITS, case="gru", suite="gru")
    stored(root, port(1, LOGITS, other))
    decision = judge(root, port(2, LOGITS)).decision
    assert (decision.word, "gru" in decision.sentence) == (Word.INCOMPLETE, True)


def test_ports_that_come_and_go_keep_what_was_retired(tmp_path) -> None:
    """And the kinds of originals may change, in any order."""
    root, other = tmp_path / "runs", replace(LOGITS, case="gru", suite="gru")
    added = replace(LOGITS, case="lstm", suite="lstm")
    _, folder = stored(root, port(1, LOGITS, other), port(2, LOGITS))
    retire(folder, "gru", "moved to another file")
    assert judge(root, port(3, LOGITS, added)).decision.word is Word.PASS
    jax = {"reference": {"kind": "jax and torch"}}
    assert judge(root, replaced(port(3, LOGITS, added), **jax)).decision.word is Word.PASS
    stored(root, port(4, LOGITS, NARROW, added))
    late = replaced(port(5, LOGITS, added), **jax)
    assert judge(root, late).decision.word is Word.INCOMPLETE


def replaced(made: Run, **changes: Any) -> Run:
    return replace(altered(made, **changes), measurements=made.measurements)


def test_of_two_people_who_retire_at_once_neither_loses_anything(tmp_path, pinned) -> None:
    root = tmp_path / "runs"
    less = [m for m in BEFORE if m.case == "a" and m.edge != "jax64:oracle"]
    _, folder = stored(root, night(1, BEFORE), night(2, less))
    names = ("b", "jax64:oracle", "seams")
    ready = Barrier(len(names))

    def one(name: str) -> None:
        ready.wait()
        retire(folder, name, "at once")

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(one, names))
    assert sorted(entry.name for entry in read_retired(pinned)[0]) == sorted(names)
    assert judge(root, night(3, less)).decision.word is Word.PASS


def test_what_is_refused_leaves_no_folder(tmp_path, pinned) -> None:
    _, folder = stored(tmp_path / "runs", night(1, BEFORE), night(2, without(case="b")))
    with pytest.raises(StoreError, match="it lacks b"):
        retire(folder, "nonsense", "gone")
    assert not pinned.exists()


def test_nothing_is_retired_until_a_time_to_come(tmp_path, pinned) -> None:
    entry = Retired("b", "", "gone", (), (("b", "jax32:oracle", "logits"),))
    for hours, used in ((-1.0, True), (AHEAD / 2, True), (2 * AHEAD, False), (9e4, False)):
        until = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
        write_retired(pinned, [replace(entry, until=until)])
        found, why = read_retired(pinned)
        assert (bool(found), not why) == (used, used)
        # Neither is a suite.
        write_retired(pinned, [Retired("seams", until, "gone", ("seams",))])
        assert bool(read_retired(pinned)[0]) is used


def test_rows_without_a_gate_are_no_gates_of_their_group(tmp_path) -> None:
    """The gates of all gradients were dropped, and what is said of them stayed."""
    gates = without(kind=Kind.GRADIENT)
    said = measurement(case="a", kind=Kind.GRADIENT, quantity="grad/w", tolerance=math.nan)
    said = replace(said, verdict=Verdict.INFO)
    less = night(2, [*gates, said], contract=contracted(gates))
    stored(tmp_path / "runs", night(1, BEFORE), less)
    decision = judge(tmp_path / "runs", less).decision
    assert (decision.word, "gradient gates of case a" in decision.sentence) == (
        Word.INCOMPLETE,
        True,
    )


def test_a_name_that_is_none_retires_nothing_and_eight_that_are_missing_are_named(
    tmp_path, pinned
) -> None:
    root, names = tmp_path / "runs", [f"case{i}" for i in "543210987"]
    more = [*BEFORE, *(measurement(case=name) for name in names)]
    _, folder, whole = stored(root, night(1, more), night(2, BEFORE), night(3, more))
    there = ", ".join(sorted(names)[:8])
    for name in (" ", "", "x"):
        with pytest.raises(StoreError, match=rf"lacks, received {name!r}: it lacks {there}$"):
            retire(folder, name, "gone")
    with pytest.raises(StoreError, match=r"it lacks nothing$"):
        retire(whole, "case1", "gone")
    assert not pinned.exists()
    # A folder that was there stays, though nothing was retired.
    pinned.mkdir()
    with pytest.raises(StoreError):
        retire(folder, "x", "gone")
    assert pinned.is_dir()


def test_a_suite_without_a_name_is_not_meant_by_an_empty_one(tmp_path, pinned) -> None:
    odd = [measurement(case="odd", edge="x:y", suite=suite) for suite in ("", " ")]
    odd[1] = replace(odd[1], quantity="blank")
    _, folder = stored(tmp_path / "runs", night(1, [*BEFORE, *odd]), night(2, BEFORE))
    for name in ("", " ", " | "):
        with pytest.raises(StoreError, match="expected the name of work"):
            retire(folder, name, "gone")
    assert retire(folder, "odd", "gone").groups == 1


def test_a_retirement_counts_what_it_covers_and_what_is_still_expected(tmp_path, pinned) -> None:
    root = tmp_path / "runs"
    less = [m for m in BEFORE if m.case == "a" and m.kind is not Kind.GRADIENT]
    _, folder = stored(root, night(1, BEFORE), night(2, less))
    done = [retire(folder, name, f" {name} went ") for name in ("b", "seams", "gradient")]
    assert [(it.suites, it.groups, it.left) for it in done] == [(0, 1, 3), (1, 1, 1), (0, 1, 0)]
    assert [entry.reason for entry in read_retired(pinned)[0]] == [
        "b went",
        "seams went",
        "gradient went",
    ]


def test_work_is_retired_where_folders_cannot_be_locked(tmp_path, pinned, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("reports.registry.retire.fcntl.flock", refuse)
    _, folder = stored(tmp_path / "runs", night(1, BEFORE), night(2, without(case="b")))
    assert retire(folder, "b", "gone").groups == 1


SEEN = Seen("r", "2026-11-10T21:30:00+00:00", "seams")
GROUP = ("b", "jax32:oracle", "logits")


@pytest.mark.parametrize(
    ("until", "covered"),
    [
        ("2026-11-10T21:30:01+00:00", True),
        # The run that lacked the work cannot be the one that had it.
        ("2026-11-10T21:30:00+00:00", False),
        ("2026-11-10T22:30:01+01:00", True),
        ("2026-11-10T22:30:00+01:00", False),
    ],
)
def test_a_retirement_covers_what_was_last_measured_before_it(until: str, covered: bool) -> None:
    entry = Retired("b", until, "why", ("seams",), (GROUP,))
    assert entry.covers(GROUP, SEEN) is entry.covers("seams", SEEN) is covered
    assert not entry.covers(("a", *GROUP[1:]), SEEN) and not entry.covers("parity", SEEN)


@pytest.mark.parametrize(
    ("name", "suites", "groups"),
    [
        ("seams", ("seams",), (GROUP,)),
        ("b", (), (GROUP,)),
        ("b | logits | seams", (), (GROUP,)),
        ("b | gradient", (), ()),
        ("x | y", (), (("x | y", "e", ""),)),
    ],
)
def test_work_is_named_by_any_of_its_parts(name: str, suites: Any, groups: Any) -> None:
    other = {("x | y", "e", ""): replace(SEEN, suite="parity")}
    gone = Vanished({"seams": SEEN, "mesh": SEEN}, {GROUP: SEEN, **other})
    assert gone.named(name) == (suites, groups)


def test_what_a_run_must_repeat_is_of_its_device_and_for_nights_its_reference() -> None:
    base = night(1, BEFORE).manifest
    assert comparable(base, night(2, BEFORE).manifest)
    for changes, alike in (
        ({"device": {"kind": "cpu", "name": "another"}}, True),
        ({"device": {"kind": "cuda", "name": "x86_64"}}, False),
        ({"reference": {"kind": "live"}}, False),
        ({"suites": [{**SUITE, "executed": 0}]}, False),
    ):
        assert comparable(night(1, BEFORE, **changes).manifest, base) is alike
    one = port(1, LOGITS).manifest
    other = night(2, [LOGITS], kind="port", reference={"kind": "jax"}).manifest
    assert comparable(one, other)
    assert not comparable(one, night(2, [LOGITS], kind="pytest").manifest)


def test_a_group_has_one_name_for_what_differs_between_runs() -> None:
    night, port = RunKind.NIGHTLY, RunKind.PORT
    assert group_of(night, "byte_lm", "e", "logits") == ("checkpoint", "e", "logits")
    # A user's port may be called like the committed checkpoint.
    assert group_of(port, "byte_lm", "e", "gradient") == ("byte_lm", "e", "gradient")
    assert group_of(port, "p", "e", "logits") == ("p", "e", "")
    assert group_of(night, "p", "e", "state") == ("p", "e", "state")


def test_what_a_run_measured_beyond_its_contract_has_not_vanished() -> None:
    before = Earlier({"parity": SEEN}, {GROUP: SEEN, ("c", *GROUP[1:]): SEEN})
    rows = [measurement(case="a"), measurement(case="b")]
    tonight = night(1, rows, contract=contracted(rows[:1]))
    assert {*vanished(tonight, before, []).groups} == {("c", *GROUP[1:])}
    # A selection, or a session of tests, must repeat nothing.
    for changes in ({"selected": ["a"]}, {"kind": "pytest"}):
        some = night(1, rows, **changes)
        assert vanished(some, before, []) == Vanished()


def test_a_group_of_which_every_gate_fails_was_measured() -> None:
    tonight = night(1, [failing(case="b")], contract=())
    assert not vanished(tonight, Earlier({"parity": SEEN}, {GROUP: SEEN}), []).groups


def test_what_one_port_switched_off_is_still_expected_of_another() -> None:
    edges = PortEdge.PORTBF16_PORT64.value, PortEdge.PORT32_ORIGINAL32.value
    groups = {(case, edge, kind) for case in "ab" for edge in edges for kind in ("gradient", "")}
    documents = [{"title": "a", "switched_off": ["gradients"]}, {"title": "b", "switched_off": []}]
    for off, lost in (("gradients", ("gradient",)), ("bfloat16", ())):
        documents[0]["switched_off"] = [off]
        night_of_ports = night(1, [], kind="port", ports=documents)
        found = {*vanished(night_of_ports, Earlier({}, dict.fromkeys(groups, SEEN)), []).groups}
        skipped = {
            g for g in groups if g[0] == "a" and (g[2] in lost if lost else g[1] == edges[0])
        }
        assert skipped and found == groups - skipped


def test_a_folder_of_retired_work_is_made_with_those_above_it(tmp_path: Path) -> None:
    """And goes again where nothing was retired."""
    home = tmp_path / "a" / "b"
    with retiring._alone(home):
        assert home.is_dir()
    assert not home.exists()


def test_nothing_is_retired_where_no_folder_can_be(tmp_path, monkeypatch) -> None:
    """Below a file, which is no lack of permission."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(pins, "FOLDER", tmp_path / "file" / "pinned")
    _, folder = stored(tmp_path / "runs", night(1, BEFORE), night(2, without(case="b")))
    with pytest.raises(StoreError, match="all work is still expected"):
        retire(folder, "b", "gone")


def test_who_was_refused_keeps_no_lock(tmp_path, pinned, monkeypatch) -> None:
    """Another process could not retire anything as long as this one lives."""
    _, folder = stored(tmp_path / "runs", night(1, BEFORE), night(2, without(case="b")))
    locked: list[int] = []
    monkeypatch.setattr(retiring.fcntl, "flock", lambda handle, how: locked.append(handle))
    with pytest.raises(StoreError, match="it lacks b"):
        retire(folder, "nonsense", "gone")
    [handle] = locked
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
