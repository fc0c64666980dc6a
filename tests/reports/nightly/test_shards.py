"""Everything that a shard measured is in the run that shards are merged into."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from reports.nightly.shards import merge_shards
from reports.provenance.host import FIELDS, fingerprint
from reports.store.runs import Run, read_run, write_run
from reports.store.schema import StoreError
from reports.subject import PROBES_PART
from reports.suite_run import SuiteRun
from tests.reports.nights import (
    described,
    explained,
    failing,
    finding,
    measurement,
    reseal,
    run,
)

PLAN = ("length_c", "stream_tokens", PROBES_PART)


def shard(index: int, **changes: object) -> Run:
    """A shard of one part of the plan; only the last one has findings and what probes show."""
    name, last = PLAN[index - 1], index == len(PLAN)
    suite = {"name": "stability" if last else "parity", "planned": 1, "executed": 1}
    made = run(
        *(() if last else (measurement(case=name, identity=name),)),
        findings=(finding(),) if last else (),
        **{
            "kind": "shard",
            "id": f"2026-11-20T21-30-0{index}Z-1a2b3c4-shard-{index}-of-3",
            "created": f"2026-11-20T21:30:0{index}+00:00",
            "shard": {"index": index, "count": len(PLAN)},
            "plan": PLAN,
            "code": "0123456789ab",
            "suites": [{**suite, "status": "ran"}],
            "spreads": {} if last else {f"{name} level": [0.1 * index]},
            "stability": {"poles": index} if last else {},
            "durations": {"parity": 1.0 * index},
            "times": [{"suite": "parity", "case": name, "edge": "e", "seconds": 1.0 * index}],
            "cases": [],
            "fault": None,
            **changes,
        },
    )
    tensors = described([failing(case=name, identity=name)])
    return made if last else replace(made, explanations=(explained(name),), tensors=tensors)


@pytest.fixture
def stored(tmp_path: Path) -> list[Path]:
    """The folders of the three shards."""
    return [write_run(tmp_path, shard(index)) for index in (1, 2, 3)]


def test_nothing_of_a_shard_is_lost(stored: list[Path]) -> None:
    merged = merge_shards(stored)
    assert [m.case for m in merged.measurements] == list(PLAN[:2])
    assert [e.case for e in merged.explanations] == list(PLAN[:2])
    assert len(merged.findings) == 1 and len(merged.tensors) == 2
    manifest = merged.manifest
    assert manifest.spreads == {"length_c level": [0.1], "stream_tokens level": [0.2]}
    assert manifest.stability == {"poles": 3}
    assert manifest.durations == {"parity": 6.0}
    assert [(time.case, time.seconds) for time in manifest.times] == [
        (name, 1.0 * turn) for turn, name in enumerate(PLAN, 1)
    ]
    suites = {s.name: (s.planned, s.executed, s.whole) for s in manifest.suites}
    assert suites == {"parity": (2, 2, True), "stability": (1, 1, True)}
    assert (manifest.id, manifest.code) == ("2026-11-20T21-30-01Z-1a2b3c4", "0123456789ab")
    assert (manifest.created, manifest.shard, manifest.plan) == (
        "2026-11-20T21:30:01+00:00",
        None,
        PLAN,
    )


def test_a_part_that_was_not_executed_leaves_its_suite_incomplete(tmp_path: Path) -> None:
    """Also where another part of the suite is whole, and where a whole suite says why it is not."""
    broken = {"name": "parity", "planned": 1, "executed": 0, "reason": "KeyError", "status": "ran"}
    folders = [write_run(tmp_path, shard(i)) for i in (1, 3)]
    merged = merge_shards([*folders, write_run(tmp_path, shard(2, suites=[broken]))])
    [parity] = [s for s in merged.manifest.suites if s.name == "parity"]
    assert (parity.planned, parity.executed, parity.reason) == (2, 1, "KeyError")
    assert not parity.whole
    assert SuiteRun("parity", planned=1, executed=1, reason="KeyError").result().whole is False


@pytest.mark.parametrize("missing", [2, 3])
def test_a_shard_that_is_missing_is_in_the_account_of_its_suite(
    stored: list[Path], missing: int
) -> None:
    there = [folder for index, folder in enumerate(stored, start=1) if index != missing]
    with pytest.raises(StoreError, match=f"missing: {missing}/3"):
        merge_shards(there)
    with pytest.raises(StoreError, match=f"missing: {missing}/3"):
        merge_shards(there, reasons={1: "of another shard"})
    name = "parity" if missing == 2 else "stability"
    for words, reason in (
        ({"partial": True}, "is missing"),
        ({"reasons": {missing: "dead"}}, "dead"),
    ):
        [suite] = [s for s in merge_shards(there, **words).manifest.suites if s.name == name]
        assert suite.planned - suite.executed == 1 and reason in suite.reason
        assert not suite.whole


def test_shards_may_be_missing_only_if_each_has_a_reason(stored: list[Path]) -> None:
    """Of every set of shards that are there, and of every set of reasons."""
    sets = [set(n) for size in range(4) for n in itertools.combinations((1, 2, 3), size)]
    for there, known in itertools.product(sets[1:], sets):
        folders = [stored[index - 1] for index in sorted(there)]
        reasons = {index: f"dead {index}" for index in known}
        missing = {1, 2, 3} - there
        if not missing <= known:
            with pytest.raises(StoreError, match="expected all 3 shards"):
                merge_shards(folders, reasons=reasons)
            continue
        suites = merge_shards(folders, reasons=reasons).manifest.suites
        assert sum(s.planned - s.executed for s in suites) == len(missing)
        for index in missing:
            assert any(f"dead {index}" in s.reason and not s.whole for s in suites)


PARTS = {
    "whole": {"executed": 2},
    "broke down after the last": {"executed": 2, "status": "failed", "reason": "KeyError"},
    "stopped": {"executed": 1, "status": "failed", "reason": "KeyError"},
    "counted short": {"executed": 1},
    "skipped": {"executed": 0, "status": "skipped", "reason": "absent"},
}


@pytest.mark.parametrize("second", PARTS)
@pytest.mark.parametrize("first", PARTS)
def test_a_suite_is_whole_where_it_is_whole_in_every_shard(
    first: str, second: str, tmp_path: Path
) -> None:
    def made(index: int, part: str) -> Path:
        suite = {"name": "parity", "planned": 2, "status": "ran", "reason": "", **PARTS[part]}
        return write_run(tmp_path, shard(index, suites=[suite]))

    folders = [made(1, first), made(2, second), write_run(tmp_path, shard(3))]
    [suite, _] = merge_shards(folders).manifest.suites
    assert suite.whole is (first == second == "whole")
    assert suite.planned == 4
    assert bool(suite.reason) is any(PARTS[part].get("reason") for part in (first, second))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"threads": 64},
        {"host": dict.fromkeys(FIELDS, "another")},
        {"device": {"kind": "cpu", "name": "another"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_night_of_shards_has_a_machine_only_if_all_of_them_are_of_it(
    changes: dict[str, object], index: int, tmp_path: Path
) -> None:
    """Else it would be history of one of them, whoever measured what."""
    folders = [write_run(tmp_path, shard(i, **(changes if i == index else {}))) for i in (1, 2, 3)]
    merged = merge_shards(folders, mixed=True).manifest.environment
    own = shard(1).manifest.environment
    assert (fingerprint(merged) is None) is bool(changes)
    assert (merged == own) is not bool(changes)
    if changes:
        names = [str(read_run(it).manifest.environment.device.name) for it in folders]
        assert merged.device.name == " + ".join(names), "which shard was where is told too"
        with pytest.raises(StoreError, match="differs from"):
            merge_shards(folders)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"code": "ba9876543210"}, "code"),
        ({"checkpoint": {"name": "another", "content": "another"}}, "checkpoint"),
        ({"fault": "rope_keys_one_late"}, "fault"),
        ({"plan": (*PLAN[:2], "(mesh)")}, "plan"),
        ({"selected": ["length_c"]}, "selected"),
        ({"shard": {"index": 2, "count": 4}}, "number of shards"),
        ({"versions": {"jax": "0.0.1"}}, "jax"),
        ({"flags": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"}}, "XLA_FLAGS"),
        ({"threads": 64}, "threads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_odd_shard_is_refused_by_name(
    stored: list[Path], tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    """Where machines may be mixed, shards may differ in threads, but in nothing else named here."""
    odd = write_run(tmp_path / "odd", shard(2, **changes))
    for mixed in (False,) if named == "threads" else (False, True):
        with pytest.raises(StoreError, match=rf"differs from .*{named}.*Measure the odd one again"):
            merge_shards([stored[0], odd, stored[2]], mixed=mixed)


def test_shards_without_a_digest_of_their_code_are_of_one_commit(tmp_path: Path) -> None:
    """Of an older version, whose runs name the commit alone."""
    commits = ("a" * 12, "a" * 12, "b" * 12)
    made = [
        write_run(tmp_path / str(i), shard(i, code=None, commit=commit))
        for i, commit in enumerate(commits, start=1)
    ]
    odd = write_run(tmp_path / "dirty", shard(2, code=None, commit=commits[1], dirty=True))
    with pytest.raises(StoreError, match=r"differs from .*: dirty False → True"):
        merge_shards([made[0], odd], partial=True)
    with pytest.raises(StoreError, match=r"differs from .*commit"):
        merge_shards(made)


def test_a_measurement_of_two_shards_is_in_no_run(stored: list[Path], tmp_path: Path) -> None:
    """It is unknown which value is right; both shards are named."""
    first, second = shard(1), shard(2)
    twice = replace(second, measurements=(*second.measurements, *first.measurements))
    again = write_run(tmp_path / "again", twice)
    with pytest.raises(StoreError, match=f"{first.id} and {second.id} both hold length_c "):
        merge_shards([stored[0], again, stored[2]])


def test_shards_of_two_classes_of_device_are_never_one_night(
    stored: list[Path], tmp_path: Path
) -> None:
    """Also where machines may be mixed."""
    odd = write_run(tmp_path / "odd", shard(2, device={"kind": "cuda", "name": "a GPU"}))
    with pytest.raises(StoreError, match="differs from"):
        merge_shards([stored[0], odd, stored[2]], mixed=True)


def test_shards_of_which_one_has_no_digest_of_its_code_are_of_one_commit(tmp_path: Path) -> None:
    codes = ("0123456789ab", None, "0123456789ab")
    made = [
        write_run(tmp_path / str(i), shard(i, commit="a" * 12, code=code))
        for i, code in enumerate(codes, start=1)
    ]
    assert merge_shards(made).manifest.commit == "a" * 12


def test_a_copy_of_a_shard_is_no_other_shard(stored: list[Path], tmp_path: Path) -> None:
    """Its id is that of the original, and so are its measurements."""
    copy = shutil.copytree(stored[2], tmp_path / "copies" / stored[2].name)
    with pytest.raises(StoreError, match="both hold shard 3/3"):
        merge_shards([*stored, copy])


def test_a_night_of_shards_of_an_older_version_is_stored_by_this_one(tmp_path: Path) -> None:
    folders = [reseal(write_run(tmp_path, shard(i)), schema=4) for i in (1, 2, 3)]
    assert {read_run(it).manifest.migrated_from for it in folders} == {4}
    assert merge_shards(folders).manifest.migrated_from is None


def test_a_shard_of_many_is_named_as_its_option_names_it(tmp_path: Path) -> None:
    """By its number without zeros before it, however many shards there are."""
    folder = write_run(tmp_path, shard(1, shard={"index": 1, "count": 12}))
    copy = shutil.copytree(folder, tmp_path / "copies" / folder.name)
    with pytest.raises(StoreError, match="both hold shard 1/12;"):
        merge_shards([folder, copy])
