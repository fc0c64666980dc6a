"""Nights in parts: what one run out of many has of each, beside sums and loops over the parts."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megalodon_jax
from parity.engine.measure.contract import Gate, contract_of
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.programs.explanation import NOTE
from parity.engine.programs.source_lines import Line
from parity.executors.inputs import contents
from parity.executors.item import Answer, Needs, Place, State
from parity.executors.pace import Pace
from parity.megalodon.cases import CASES
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.megalodon.suite import Reference
from parity.port import Report
from reports.nightly import accounts, fan_out
from reports.nightly import run as nights
from reports.nightly.document import known_differences
from reports.nightly.expected import EARLY, FIRST, NEWEST, OTHER, expected_seconds, in_order
from reports.nightly.fan_out import _environment, _part, _same_night, items_of
from reports.nightly.run import Options, _selection, _with_time_left, plan_of, select_cases
from reports.nightly.shards import Shard, _order, find_shards, merge_shards
from reports.provenance.code import Start
from reports.provenance.environment import new_manifest
from reports.provenance.host import FIELDS, fingerprint, processor
from reports.registry.outcome import Outcome
from reports.store.manifest import PartInfo, ReferenceInfo, SuiteResult, Time
from reports.store.runs import Run, write_run
from reports.store.schema import MANIFEST, RunKind, StoreError
from reports.subject import names_by_part, suite_of_part
from reports.subject import parts as parts_of_plan
from reports.subjects.megalodon import suites
from reports.subjects.megalodon.checkpoint import open_checkpoint
from reports.suite_run import SuiteRun, breakdowns_named, mark_repeats
from tests.helpers import double
from tests.reports.nights import (
    altered,
    contracted,
    described,
    explained,
    failing,
    finding,
    measurement,
    run,
)

PLAN = ("plain", "stream", "adamw", "(seams)", "(products)", "(mesh)", "(probes)")


def drawn(rng: random.Random, count: int) -> list[Run]:
    """The shards of a night, each with everything that a shard may have."""
    shards = []
    for index in range(1, count + 1):
        names = {suite_of_part(part) for part in PLAN[index - 1 :: count]}
        rows = [measurement(case=p, suite=suite_of_part(p)) for p in PLAN[index - 1 :: count]]
        results = [
            {
                "name": name,
                "planned": (planned := rng.randrange(1, 4)),
                "executed": planned - (rng.random() < 0.2),
                "status": rng.choice(("ran", "ran", "ran", "failed")),
                "reason": rng.choice(("", "", "why", "other")),
            }
            for name in sorted(names, key=lambda name: rng.random())
        ]
        made = run(
            *rows,
            findings=(finding(subject=str(index)),),
            tensors=described([failing(case=PLAN[index - 1])]),
            kind="shard",
            id=f"2026-11-20T21-30-{59 - index}Z-1a2b3c4-shard-{index}-of-{count}",
            created=f"2026-11-20T21:30:{59 - index}+00:00",
            shard={"index": index, "count": count},
            plan=PLAN,
            code="0123456789ab",
            suites=results,
            spreads={f"level {index}": [0.1 * index, 0.2]},
            stability={"poles": index} if "(probes)" in PLAN[index - 1 :: count] else {},
            durations={name: rng.randrange(9) / 7 for name in names},
            times=[{"suite": "s", "case": str(index), "edge": "e", "seconds": 1.0 * index}],
            cases=[{"name": part} for part in PLAN[index - 1 :: count] if part[0] != "("][::-1],
            seams=[{"id": f"of shard {index}"}],
            # What each of them planned is missing as often as none of them measured it.
            contract=contracted([*rows, measurement(case="planned by each")]),
        )
        shards.append(replace(made, explanations=(explained(str(index)),)))
    return shards


@pytest.mark.parametrize("seed", range(6))
def test_a_merged_night_is_the_sum_of_its_shards(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    count = rng.randrange(2, 6)
    shards = drawn(rng, count)
    lost = set(rng.sample(range(1, count + 1), rng.randrange(2)))
    kept = [it for i, it in enumerate(shards, 1) if i not in lost]
    folders = [write_run(tmp_path, it) for it in rng.sample(kept, len(kept))]
    reasons = {i: f"lost {i}" for i in lost} if seed % 2 else {}
    merged = merge_shards(folders, partial=not reasons, reasons=reasons)
    manifest, manifests = merged.manifest, [it.manifest for it in kept]
    oldest = min(manifests, key=lambda m: m.created)
    assert (manifest.kind, manifest.shard, manifest.created) == (
        RunKind.NIGHTLY,
        None,
        oldest.created,
    )
    assert manifest.id == oldest.id.split("-shard-")[0]
    assert manifest.shards == tuple(m.id for m in manifests)
    assert merged.measurements == tuple(m for it in kept for m in it.measurements)
    assert merged.findings == tuple(f for it in kept for f in it.findings)
    assert [t.case for t in merged.tensors] == [t.case for it in kept for t in it.tensors]
    assert merged.explanations == tuple(e for it in kept for e in it.explanations)
    assert manifest.plan == PLAN and manifest.tolerances
    assert manifest.seams == known_differences(merged.measurements)
    there = {case.name for m in manifests for case in m.cases}
    assert [case.name for case in manifest.cases] == [p for p in PLAN if p in there]
    assert manifest.times == tuple(t for m in manifests for t in m.times)
    assert manifest.spreads == {name: s for m in manifests for name, s in m.spreads.items()}
    assert manifest.contract == tuple(sorted(line for m in manifests for line in m.contract))
    assert manifest.stability == next((m.stability for m in manifests if m.stability), {})
    totals: dict[str, float] = {}
    for m in manifests:
        for name, seconds in m.durations.items():
            totals[name] = totals.get(name, 0.0) + seconds
    # bound: seconds are stored in milliseconds.
    assert manifest.durations == pytest.approx(totals, abs=1e-3)
    # What is missing counts as planned, with its reason.
    parts: dict[str, list[SuiteResult]] = {}
    for m in manifests:
        for suite in m.suites:
            parts.setdefault(suite.name, []).append(suite)
    for i in lost:
        why = reasons.get(i, f"shard {i}/{count} is missing")
        for part in PLAN[i - 1 :: count]:
            name = suite_of_part(part)
            parts.setdefault(name, []).append(SuiteResult(name, 1, 0, why))
    names = [
        name for name in ("parity", *(part.suite for part in parts_of_plan())) if name in parts
    ]
    assert [suite.name for suite in manifest.suites] == names
    for suite in manifest.suites:
        own = parts[suite.name]
        assert suite.planned == sum(it.planned for it in own)
        assert suite.executed == sum(it.executed for it in own)
        assert suite.reason == "; ".join(dict.fromkeys(it.reason for it in own if it.reason))
        assert (suite.status == "ran") == all(it.status == "ran" for it in own)
    if lost and not reasons:
        with pytest.raises(StoreError, match=f"missing: {min(lost)}/{count}"):
            merge_shards(folders)


def test_a_part_is_every_so_manieth_of_the_plan() -> None:
    for count in range(1, len(PLAN) + 1):
        parts = [Shard(i, count).part_of(PLAN) for i in range(1, count + 1)]
        assert sorted(p for part in parts for p in part) == sorted(PLAN)
        assert [part[0] for part in parts] == list(PLAN[:count])
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match=f"at most {len(PLAN)} shards"):
        Shard(1, len(PLAN) + 1).part_of(PLAN)
    assert Shard.parse("2/3") == Shard(2, 3) and str(Shard(2, 3)) == "2/3"
    for wrong in ("", "1", "1/", "/2", "0/2", "3/2", "-1/2", "1/2/3", "a/2", "1 /2", "1.0/2"):
        with pytest.raises(ValueError, match="expected K/N"):
            Shard.parse(wrong)


def test_shards_are_found_below_each_place_once(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "deep", run(measurement(), id="one"))
    two = write_run(tmp_path / "b", run(measurement(), id="two"))
    hidden = tmp_path / "a" / ".partial-x"
    hidden.mkdir()
    (hidden / "run.json").write_text("{}", encoding="utf-8")
    assert find_shards([tmp_path / "b", tmp_path / "a", tmp_path]) == [two, one]
    assert find_shards([one]) == [one]
    with pytest.raises(StoreError, match="found none"):
        find_shards([tmp_path / "a", hidden])


@pytest.mark.parametrize("seed", range(4))
def test_parts_are_expected_to_take_what_the_newest_night_here_says(
    seed: int, tmp_path: Path
) -> None:
    rng, names, stored = random.Random(seed), ["plain", "new"], []
    here = processor(new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment)
    for day in range(1, NEWEST + 4):
        made = run(measurement(), id=f"2026-11-{day:02d}T21-30-00Z-x")
        parts = tuple(
            PartInfo(
                name,
                processor=here if rng.random() < 0.7 else "another",
                seconds=rng.choice((0.0, 1.0, 2.5, 2.5)),
            )
            for name in names
            if rng.random() < 0.8
        )
        write_run(tmp_path, replace(made, manifest=replace(made.manifest, parts=parts)))
        stored.append({part.name: part.seconds for part in parts if part.processor == here})
    whole = [s for s in stored[-NEWEST:] if all(s.get(name, 0.0) > 0 for name in names)]
    table = {"plain": FIRST["plain"], "new": OTHER}
    assert expected_seconds(tmp_path, names) == ((whole[-1], True) if whole else (table, False))


@pytest.mark.parametrize(
    ("workers", "order"),
    [
        # Alone: what tells most, then the cases by the plan, and the longest as late as it may be.
        (1, "plain stream_tokens b c longest long"),
        # One of two runs the longest; the second longest starts when it would end too late.
        (2, "plain longest stream_tokens long b c"),
    ],
)
def test_results_come_while_the_longest_parts_run(workers: int, order: str) -> None:
    expected = {"b": 20.0, "plain": 20.0, "c": 20.0, "stream_tokens": 10.0, "long": 60.0}
    expected["longest"] = 100.0
    # Names, not places in the plan, say what comes first.
    assert in_order(list(expected), expected, workers) == order.split()


def test_every_part_is_started_once() -> None:
    rng = random.Random(3)
    for _ in range(200):
        names = rng.sample([*EARLY, *(f"p{i}" for i in range(8))], rng.randrange(1, 11))
        expected = {name: rng.choice((1.0, 15.0, 20.0, 30.0, 90.0)) for name in names}
        order = in_order(names, expected, rng.randrange(1, 5))
        assert sorted(order) == sorted(names)
        early = [name for name in EARLY if name in names]
        assert order[0] in (early[:1] or names)


def test_the_time_of_parts_that_end_together_is_shared() -> None:
    now, told = 0.0, []
    expected = {"a": 40.0, "b": 60.0, "c": 300.0, "d": 300.0}
    at = _with_time_left(lambda *words: told.append(words), expected, clock=lambda: now)
    at(0)
    now = 100.0
    at(2)
    assert told[-1] == (2, 4, "about 10 minutes left")
    now = 1900.0
    at(3)
    # It ran at a third of the speed; the machine's pace is that of all parts.
    done, of, words = told[-1]
    assert (done, of) == (3, 4) and words.startswith("about ") and words != "about 5 minutes left"
    at(4)
    assert told[-1] == (4, 4, "")


RECORDED = Options(Path("unused"), reference="recorded")


def test_a_night_by_recordings_has_every_part_that_they_answer() -> None:
    cases = tuple(case.name for case in CASES)
    parts = ("(seams)", "(products)", "(mla-moe)", "(mesh)", "(probes)", "(controls)")
    assert plan_of(RECORDED) == cases + parts
    # A few cases are about those cases; a checkpoint is given to have it probed.
    assert plan_of(replace(RECORDED, cases=("plain",))) == ("plain",)
    given = replace(RECORDED, cases=("plain",), checkpoint=Path("mine"))
    assert plan_of(given) == ("plain", "(probes)")
    with pytest.raises(ValueError, match="port/plain needs megalodon-hf itself"):
        plan_of(replace(RECORDED, cases=("port/plain",)))
    with pytest.raises(ValueError, match="no case 'nothing'; there are plain, "):
        plan_of(replace(RECORDED, cases=("plain", "nothing")))
    for part, names in names_by_part().items():
        if part != "(port)":
            name = min(names)
            options = replace(RECORDED, cases=(name,))
            assert plan_of(options) == (part,)
            assert _selection(options) == {p: {name} & n for p, n in names_by_part().items()}
            assert select_cases(options) == []


def test_a_night_with_a_planted_bug_has_every_part_of_another_one() -> None:
    assert plan_of(replace(RECORDED, fault="rope_sign")) == plan_of(RECORDED)


def test_an_unknown_case_is_answered_with_all_names_the_others_sorted() -> None:
    others = sorted(name for names in names_by_part().values() for name in names)
    with pytest.raises(ValueError, match=r"no case 'x'; there are ") as told:
        select_cases(replace(RECORDED, cases=("x",)))
    names = [*(case.name for case in CASES), *others]
    assert str(told.value) == f"no case 'x'; there are {', '.join(names)}."


def test_a_live_night_asks_megalodon_hf_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Live:
        kind = "live"

    monkeypatch.setattr("parity.megalodon.suite.choose_reference", lambda asked: Live)
    recorded = [p for p in plan_of(RECORDED) if p != "(port)"]
    assert "(port)" in plan_of(RECORDED) and len(plan_of(RECORDED)) == len(recorded) + 1


def test_a_checkpoint_takes_the_place_of_the_committed_one(tmp_path: Path) -> None:
    cases = select_cases(replace(RECORDED, checkpoint=tmp_path / "mine"))
    own = [case for case in CASES if case.checkpoint]
    assert own and len(cases) == len(CASES)
    for case, then in zip(cases, CASES, strict=True):
        if then.checkpoint:
            assert (case.name, case.checkpoint) == ("checkpoint", tmp_path / "mine")
            assert case.why == "mine on held-out text"
        else:
            assert case is then
    # Also where it is the case that was asked for.
    [case] = select_cases(replace(RECORDED, checkpoint=tmp_path, cases=(own[0].name,)))
    assert (case.name, case.checkpoint) == ("checkpoint", tmp_path)
    # The text beside the weights, or the committed one.
    committed = open_checkpoint(None)
    assert open_checkpoint(tmp_path).text == committed.text
    (tmp_path / "heldout.txt").write_text("text", encoding="utf-8")
    given = open_checkpoint(tmp_path)
    assert (given.folder, given.text) == (tmp_path, tmp_path / "heldout.txt")


def test_items_of_a_night_are_its_parts_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(RECORDED, cases=("plain", "stream"), fault="rope_sign")
    items = items_of(replace(options, device="cpu"))
    assert [item.name for item in items] == ["plain", "stream"]
    assert [item.arguments for item in items] == [
        {
            "options": {
                "shard": f"{i}/2",
                "cases": ["plain", "stream"],
                "reference": "recorded",
                "checkpoint": None,
                "fault": "rope_sign",
                "device": "cpu",
            },
            "part": part,
        }
        for i, part in ((1, "plain"), (2, "stream"))
    ]
    # A worker takes as many parts at a time as its memory holds.
    # The flag goes with the part, since the GPU may be another machine's.
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    shared |= {"XLA_FLAGS": "--a=1 --xla_gpu_deterministic_ops=true"}
    for device, more in (("cpu", {}), ("cuda", {"gpus": 1 / 16, "environment": shared})):
        needs = Needs(memory=3 * 2**30, **more)
        assert all(item.needs == needs for item in items_of(replace(options, device=device)))
    assert tuple(item.name for item in items_of(RECORDED)) == plan_of(RECORDED)


@pytest.mark.parametrize("shard", [None, Shard(2, 3)])
def test_options_of_a_night_reach_a_worker_whole(tmp_path: Path, shard: Shard | None) -> None:
    """A field that `to_json` leaves out would have its default on the worker."""
    given = Options(tmp_path, ("plain",), "live", tmp_path / "model", "rope_sign", shard, "cuda")
    default = Options(tmp_path)
    assert all(
        getattr(given, f.name) != getattr(default, f.name)
        for f in fields(Options)
        if f.name not in ("out", "shard")
    )
    for options in (given, replace(default, shard=shard)):
        words = json.loads(json.dumps(options.to_json()))
        assert Options.from_json(tmp_path, words) == options


def test_items_of_a_checkpoint_know_its_content(tmp_path: Path) -> None:
    """A worker that has other files there refuses them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    options = replace(RECORDED, cases=("plain",), checkpoint=tmp_path / "model" / ".." / "model")
    name = str(tmp_path / "model")
    for item in items_of(options):
        assert item.arguments["options"]["checkpoint"] == name
        assert item.inputs == contents([name]) and name in item.inputs
    assert all(not item.inputs for item in items_of(replace(RECORDED, cases=("plain",))))


def test_a_run_is_of_a_night_if_its_shards_code_plan_and_options_are() -> None:
    given = {"shards": ["a"], "code": "c", "plan": ["p"], "selected": ["s"], "fault": "f"}
    one = run(measurement(), checkpoint={"name": "n", "content": "one"}, **given).manifest
    assert one.checkpoint
    assert _same_night(one, replace(one, id="other", created="later"))
    changes: dict[str, Any] = {
        "shards": ("b",),
        "code": "d",
        "plan": ("q",),
        "selected": (),
        "fault": None,
        "checkpoint": replace(one.checkpoint, content="another"),
        "contract": (),
    }
    for name, value in changes.items():
        assert not _same_night(one, replace(one, **{name: value})), name


def test_a_night_of_one_host_has_its_environment_and_one_of_several_none(tmp_path: Path) -> None:
    manifest = run(measurement(), host=dict.fromkeys(FIELDS, "known")).manifest
    parts = (PartInfo("a", fingerprint="x", processor="P", threads=2),) * 2
    assert _environment(replace(manifest, parts=parts)) == manifest.environment
    other = PartInfo("b", fingerprint="y", processor="A", threads=4)
    several = _environment(replace(manifest, parts=(*parts, other)))
    assert (several.device.name, several.threads, several.host) == ("A + P", "2 + 4", {})
    assert several.device.kind == manifest.environment.device.kind
    cases = tuple("zyxabcmlkdefnop")
    rows = [measurement(case=case, quantity=q) for q in "pq" for case in cases]
    shard = run(*rows)
    folder = write_run(tmp_path, shard)
    answer = Answer("plain", State.DONE, seconds=1.23456, attempts=3, place=Place(node="n"))
    environment = shard.manifest.environment
    assert _part(answer, folder) == PartInfo(
        "plain",
        "n",
        fingerprint(environment) or "",
        processor(environment),
        environment.threads,
        1.235,
        3,
        cases,
    )


@pytest.mark.parametrize(
    ("planned", "executed", "reason", "status"),
    [(2, 2, "", "ran"), (2, 1, "", "failed"), (2, 2, "why", "failed"), (2, 3, "", "failed")],
)
def test_a_suite_ran_if_it_did_what_it_planned(
    planned: int, executed: int, reason: str, status: str
) -> None:
    rows = [measurement(), failing(), measurement(verdict=Verdict.INFO)]
    suite = SuiteRun("s", planned, executed, reason, measurements=rows)
    assert suite.result() == SuiteResult("s", planned, executed, reason, status)
    assert suite.passed == 1


def test_a_row_repeats_where_the_second_time_gave_its_bits() -> None:
    nan = float("nan")
    first = [
        measurement(quantity=q, value=v) for q, v in zip("abcd", (1.0, 2.0, nan, nan), strict=True)
    ]
    again = [replace(m, value=v) for m, v in zip(first, (1.0, 2.5, nan, 1.0), strict=True)]
    assert [m.deterministic for m in mark_repeats(first, again)] == [True, False, True, False]
    assert mark_repeats(first, again[1:])[0].deterministic is False
    assert [m.value for m in mark_repeats(first[:2], again)] == [1.0, 2.0]


def test_a_suite_that_breaks_down_says_why_and_how_long_it_took() -> None:
    suite = SuiteRun("s", 1)
    for kind in (ArithmeticError, RuntimeError, TypeError, KeyError, ValueError, IndexError,
                 AttributeError, AssertionError, OSError):  # fmt: skip
        with breakdowns_named(suite, "case a: "):
            raise kind("x" * 500)
        assert suite.reason.startswith(f"case a: {kind.__name__}: ") and len(suite.reason) == 400
    before = suite.seconds
    with pytest.raises(KeyboardInterrupt), breakdowns_named(suite):
        raise KeyboardInterrupt
    assert 60 > suite.seconds >= before > 0


def test_the_first_failing_cases_are_explained_and_no_error_there_ends_a_night(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suite, said, [case, *_] = SuiteRun("s", 1), [], CASES
    made = itertools.count()

    def explain(case: Any, known: Any) -> Any:
        assert known is suite.explanations
        if next(made) == 1:
            raise OSError("no text")
        return explained(case.name) if len(known) else replace(explained(case.name), quantity="")

    monkeypatch.setattr(suites, "explain", explain)
    for _ in range(suites.EXPLAINED + 4):
        suites._account(suite, case, said.append)
    assert len(suite.explanations) == suites.EXPLAINED
    assert next(made) == suites.EXPLAINED + 1
    assert said[0].startswith("    explained: it starts at nowhere between JAX and the oracle (")
    assert said[1] == "    not explained: OSError: no text"
    assert said[2].startswith(f"    explained: it starts at {explained().quantity} (")
    # What it took, and no time of day.
    assert len(said) == suites.EXPLAINED + 1 and 0 < suite.seconds < 60


def test_a_long_error_of_an_explanation_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*_: Any) -> Any:
        raise OSError("x" * 500)

    monkeypatch.setattr(suites, "explain", explain)
    said: list[str] = []
    suites._account(SuiteRun("s", 1), CASES[0], said.append)
    assert said == [f"    not explained: OSError: {'x' * 500}"[:400]]


def of_a_port(rows: list[Any], culprit: Stage | None) -> Report:
    """What a report of a port says to an account."""
    place = SimpleNamespace(
        edge="port64:original64",
        stages=(Stage("s", 1.0, 2.0, 3.0),),
        worst=(explained().worst, None),
        where="row 1",
        lines=(Line("a.py:3 (f)"),),
    )
    hints = ("parameter w: is transposed", "parameter v: is")
    fields = {"title": "a port", "measurements": rows, "culprit": culprit}
    return double(Report, **fields, place=place, hints=hints)


def test_the_account_of_a_port_is_of_its_culprit_or_its_first_failure() -> None:
    assert accounts.of_port(of_a_port([measurement()], None)) is None
    first = failing(quantity="x", stage=1, note="a note")
    rows = [failing(stage=3), first]
    made = of_a_port(rows, None)
    account = accounts.of_port(made)
    assert account is not None
    assert (account.case, account.edge, account.quantity) == ("a port", first.edge, "x")
    assert (account.value, account.tolerance) == (first.value, first.tolerance)
    assert account.stages == made.place.stages
    assert account.note == "a note; parameter w: is transposed; parameter v: is"
    assert account.worst is None and account.meaning.startswith("No stage is wrong on its own")
    culprit = Stage("norm", 0.5, 0.25, 0.125)
    account = accounts.of_port(of_a_port(rows, culprit))
    assert account is not None
    assert (account.case, account.edge, account.quantity) == ("a port", "port64:original64", "norm")
    assert (account.value, account.tolerance) == (0.25, 0.125)
    assert account.meaning == "wrong on its own, fed the original's values"
    assert (account.where, account.lines) == ("row 1", (Line("a.py:3 (f)"),))
    assert account.note == "parameter w: is transposed; parameter v: is"
    assert account.worst == explained().worst


def test_the_note_of_an_account_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of many parameters has a hint for each."""
    for culprit in (None, Stage("norm", 0.5, 0.25, 0.125)):
        made = of_a_port([failing()], culprit)
        monkeypatch.setattr(made, "hints", ("x" * NOTE, "y"))
        account = accounts.of_port(made)
        assert account is not None and account.note == "x" * NOTE


def test_a_night_of_several_hosts_is_stored_without_a_host(tmp_path: Path, monkeypatch) -> None:
    """The parts of tonight tell that, not the environments of the shards."""
    shards = drawn(random.Random(0), 2)
    shards[1] = altered(shards[1], host=dict.fromkeys(FIELDS, "other"))
    parts = {
        name: PartInfo(name, fingerprint=name, processor=processor, threads=2)
        for name, processor in (("plain", "P"), ("stream", "A"))
    }
    monkeypatch.setattr(fan_out, "_part", lambda answer, _: parts[answer.name])
    stored: list[Any] = []

    def store(_: Any, merged: Any, *rest: Any) -> Outcome:
        stored.append(merged)
        return double(Outcome)

    monkeypatch.setattr(fan_out, "store", store)
    known = {name: Answer(name, State.DONE) for name in parts}
    folders = {
        name: write_run(tmp_path / name, it)
        for name, it in zip(("stream", "plain"), shards, strict=True)
    }
    fan_out._stored(replace(RECORDED, out=tmp_path), (), known, folders, print)
    [night] = stored
    assert night.measurements == tuple(m for it in shards for m in it.measurements)
    environment = night.manifest.environment
    assert (environment.device.name, environment.host) == ("A + P", {})
    assert [part.name for part in night.manifest.parts] == ["plain", "stream"]


@pytest.mark.parametrize("known", [True, False])
def test_a_night_that_was_stored_under_another_name_is_not_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Another run began in the same second, so a killed driver stored the night as `...-2`."""
    another = run(measurement(value=2e-7), shards=["other"])
    merged = run(measurement(), shards=["a"])
    write_run(tmp_path, another)
    first = write_run(tmp_path, merged) if known else None
    assert first is None or first.name == f"{merged.id}-2"
    monkeypatch.setattr(fan_out, "merge_shards", lambda *_, **__: merged)
    monkeypatch.setattr(fan_out, "_environment", lambda manifest: manifest.environment)
    finished: list[Any] = []
    outcomes = {name: double(Outcome) for name in ("finished", "stored")}

    def finish(place: Any, *_: Any) -> Outcome:
        finished.append(place)
        return outcomes["finished"]

    monkeypatch.setattr(fan_out, "finish", finish)
    monkeypatch.setattr(fan_out, "store", lambda *_: outcomes["stored"])
    done = fan_out._stored(replace(RECORDED, out=tmp_path), (), {}, {}, print)
    assert done is outcomes["finished" if known else "stored"]
    assert finished == ([first] if known else [])


def test_a_port_that_fails_has_an_account_though_nothing_explains_it() -> None:
    made = of_a_port([failing()], None)
    made.hints = ()
    account = accounts.of_port(made)
    assert account is not None and account.note == failing().note


def test_a_shard_that_does_not_say_which_one_it_is_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement(), kind="shard"))
    with pytest.raises(StoreError, match="expected a run of `nightly --shard`"):
        merge_shards([folder])


def test_parts_are_measured_without_the_checks_of_traced_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    @contextmanager
    def checks(on: bool) -> Iterator[None]:
        asked.append(on)
        yield

    monkeypatch.setattr(megalodon_jax, "traced_checks", checks)
    monkeypatch.setattr(fan_out, "nightly", lambda options, report: report("  a line"))
    whole = Options(tmp_path, cases=("plain", "stream"), reference="recorded")
    options = replace(whole, shard=Shard(2, 2)).to_json()
    done = fan_out.measure(tmp_path, options, "stream")
    assert done == {"lines": ["  a line"]} and asked == [False]
    # With other subjects than the driver's, or without a shard, it would measure something else.
    for other, part in ((options, "plain"), (whole.to_json(), "stream")):
        with pytest.raises(ValueError, match=f"expected to measure {part}, but by the subjects"):
            fan_out.measure(tmp_path, other, part)
    assert asked == [False]


def test_a_night_takes_at_least_as_long_as_its_longest_part() -> None:
    """So the second longest need not start at once for the night to end in time."""
    expected = {"a": 5.0, "longest": 10.0, "b": 2.0, "long": 5.0}
    assert in_order(list(expected), expected, 3) == ["a", "longest", "b", "long"]


@pytest.mark.parametrize(
    ("seconds", "order"),
    [
        ({"longest": 100.0, "a": 5.0, "b": 4.0}, ["a", "longest", "b"]),
        ({"a": 5.0, "longest": 100.0, "b": 4.0}, ["a", "longest", "b"]),
        ({"a": 5.0, "plain": 100.0, "b": 4.0}, ["plain", "b", "a"]),
        ({"longest": 100.0}, ["longest"]),
    ],
)
def test_a_night_begins_with_a_short_part_unless_a_long_one_tells_most(
    seconds: dict[str, float], order: list[str]
) -> None:
    assert in_order(list(seconds), seconds, 2) == order


def test_a_case_is_summed_up_by_the_gates_that_hold() -> None:
    fact = measurement(quantity="fact", tolerance=math.nan, verdict=Verdict.INFO)
    assert suites._summary([measurement(), fact]) == "1 gates hold"


def test_a_suite_of_another_version_comes_last() -> None:
    names = ["other", "controls", "seams", "parity"]
    assert sorted(names, key=_order) == ["parity", "seams", "controls", "other"]


@pytest.mark.parametrize("shard", [None, Shard(2, 3), Shard(1, 1)])
def test_the_manifest_of_a_night_is_of_all_its_suites(
    monkeypatch: pytest.MonkeyPatch, shard: Shard | None
) -> None:
    """Which of them measured what is nothing to it; the only shard of a night is one too."""
    monkeypatch.setattr(
        nights, "new_manifest", lambda started, kind, start: run(kind=kind).manifest
    )
    monkeypatch.setattr(nights, "describe", lambda reference: ReferenceInfo("recorded"))
    known = KNOWN_DIFFERENCES[0]
    rows = [
        measurement(case="a"),
        measurement(case="b", suite="seams", quantity=known.id, kind=Kind.KNOWN_DIFFERENCE),
        measurement(case="c", suite="mesh"),
    ]
    made = [
        SuiteRun(
            m.suite,
            planned=1,
            executed=int(m.case != "c"),
            seconds=1.23456,
            times={(m.case, m.edge): 0.5},
            contract=[Gate.of(m)],
            measurements=[m],
            responses={(m.case, m.metric): {m.quantity: (1e-7, 2e-7, 4e-7)}},
            shown={m.case: 1},
        )
        for m in rows
    ]
    plan = ("a", "(seams)", "(mesh)")
    manifest = nights._manifest(
        datetime.now(UTC),
        double(Start),
        made,
        double(Reference, kind="live", omits="", provenance={}),
        shard,
        plan,
    )
    [value] = [entry["value"] for entry in manifest.seams if "value" in entry]
    assert value == rows[1].value and manifest.plan == plan
    assert manifest.contract == contract_of([Gate.of(m) for m in rows])
    assert manifest.spreads.keys() == {
        " | ".join((m.case, m.edge, m.kind.value, m.metric)) for m in (rows[0], rows[2])
    }
    assert manifest.durations == {m.suite: 1.235 for m in rows}
    assert manifest.times == tuple(Time(m.suite, m.case, m.edge, 0.5) for m in rows)
    assert manifest.stability == {"a": 1, "b": 1, "c": 1}
    assert [it.status for it in manifest.suites] == ["ran", "ran", "failed"]
    name = run().manifest.id
    if shard is None:
        assert (manifest.id, manifest.kind, manifest.shard) == (name, RunKind.NIGHTLY, None)
    else:
        assert manifest.id == f"{name}-{shard.index}-of-{shard.count}"
        assert manifest.kind is RunKind.SHARD
        assert manifest.shard == {"index": shard.index, "count": shard.count}


def test_each_part_is_timed_once_by_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Pace):
        def done(self, name: str, seconds: float) -> None:
            timed.append((name, seconds))
            super().done(name, seconds)

    timed: list[tuple[str, float]] = []
    monkeypatch.setattr(nights, "Pace", Told)
    now = [0.0]
    at = _with_time_left(lambda *_: None, dict.fromkeys("abcd", 1.0), clock=lambda: now[0])
    for now[0], done in ((0.0, 0), (2.0, 1), (5.0, 2), (13.0, 4)):
        at(done)
    assert timed == [("a", 2.0), ("b", 3.0), ("c", 4.0), ("d", 4.0)]


def test_shards_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = [f"{n * 7 % 30:02d}" for n in range(30)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("", encoding="utf-8")
    assert [folder.name for folder in find_shards([tmp_path])] == sorted(names)


def test_a_night_that_was_merged_is_no_shard(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement(), shard={"index": 1, "count": 1}))
    with pytest.raises(StoreError, match="is a nightly"):
        merge_shards([folder])


def test_a_worker_is_asked_for_cases_in_the_order_of_the_night(tmp_path: Path) -> None:
    options = Options(tmp_path, cases=("stream", "plain"))
    assert Options.from_json(tmp_path, options.to_json()) == options


@pytest.mark.parametrize("kind", ["live", "recorded"])
def test_every_part_has_the_reference_that_this_machine_chose(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    chosen = SimpleNamespace(kind=kind)
    monkeypatch.setattr("parity.megalodon.suite.choose_reference", lambda asked: chosen)
    monkeypatch.setattr(fan_out, "plan_of", lambda options: ("plain", "stream"))
    monkeypatch.setattr(fan_out, "contents", lambda names: {})
    asked = [item.arguments["options"]["reference"] for item in items_of(Options(Path("unused")))]
    assert asked == [kind, kind]


def test_a_worker_that_is_free_runs_the_longest_part_though_it_ran_a_longer_one() -> None:
    """At 50 seconds, when the night would not yet end late without it."""
    expected = {**{f"p{n}": 10.0 for n in range(12)}, "longest": 50.0, "long": 20.0}
    order = ["p0", "longest", "p1", "p2", "p3", "p4", "p5", "long"]
    assert in_order(list(expected), expected, 2)[: len(order)] == order


def test_a_part_as_long_as_the_longest_waiting_one_counts_as_a_long_part() -> None:
    """While it runs, the other worker runs a short part."""
    expected = {"a": 2.0, "b": 2.0, "short": 1.0, "c": 2.0}
    assert in_order(list(expected), expected, 2) == ["b", "short", "a", "c"]


@pytest.mark.parametrize(("last", "order"), [(4.0, ["c", "b"]), (4.5, ["b", "c"])])
def test_a_long_part_starts_at_once_only_if_it_would_end_after_the_goal(
    last: float, order: list[str]
) -> None:
    """The goal is 9 s, and after `c` the part `b` would end at 9 s or at 9.5 s."""
    expected = {"a": 1.0, "b": last, "c": 4.0, "longest": 10.0}
    assert in_order(list(expected), expected, 2) == ["a", "longest", *order]
