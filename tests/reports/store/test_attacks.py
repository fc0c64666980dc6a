"""Ways in which a run was green that had not earned it, each found by attacking the commands."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parity.executors import identity
from reports.provenance.code import Start
from reports.registry.listing import summarise_runs
from reports.registry.lookback import LATEST, look_back
from reports.registry.lookup import AHEAD, Found, find_run, judge_stored, withheld
from reports.store import writer
from reports.store.gathered import FEW, Gathered
from reports.store.index import Line, compact
from reports.store.runs import (
    RunInfo,
    StoreError,
    list_runs,
    read_run,
    without_copies,
    write_run,
)
from reports.store.seal import sealed
from reports.verdict.decide import ExitCode, Word, decide
from tests.helpers import cli
from tests.reports.nights import earlier, failing, measurement, run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one run that passes."""
    write_run(tmp_path / "runs", earlier(measurement()))
    return tmp_path / "runs"


def gate(root: Path, *more: str):
    return cli("gate", "latest", "--out", root, *more)


def test_the_run_of_these_tests_passes(root: Path) -> None:
    assert gate(root).exit_code == 0


def test_another_run_of_the_same_id_is_no_copy(root: Path) -> None:
    """Two machines began in one second: the run that passed does not hide the one that failed."""
    aside = write_run(root.parent / "aside", earlier(failing()))
    shutil.copytree(aside, root / f"host2-{aside.name}")
    told = gate(root)
    assert told.exit_code == 3 and "newer folder is damaged" in told.output
    for _, [(_, why)] in (list_runs(root), summarise_runs(root)):
        assert why.startswith("another run with the id of run")
    # A copy of the run itself is none.
    shutil.rmtree(root / f"host2-{aside.name}")
    [good] = (info.folder for info in list_runs(root)[0])
    shutil.copytree(good, root / "copy")
    assert gate(root).exit_code == 0
    for _, [(_, why)] in (list_runs(root), summarise_runs(root)):
        assert why == f"a copy of run {good.name} in {good}; delete one of them"


def test_of_runs_elsewhere_that_share_an_id_one_counts_and_the_others_are_named() -> None:
    """Their files cannot be compared here: which are copies is not known, and ends no question."""
    folders = [Path("s3:/bucket/runs") / name for name in ("b", "r", "a")]
    runs, unreadable = [RunInfo(folder, run(id="r").manifest) for folder in folders], []
    assert without_copies(runs, unreadable) == [runs[1]]
    assert [folder.name for folder, _ in unreadable] == ["b", "a"]
    for _, why in unreadable:
        assert why.startswith("a copy of run, or another run with the id of run, r in s3:/bucket")


def test_what_reads_the_newest_run_refuses_an_older_one(root: Path) -> None:
    damaged = write_run(root, run(measurement()))
    (damaged / "measurements.parquet").write_bytes(b"PAR1")
    assert gate(root).exit_code == 3
    with pytest.raises(StoreError, match=r"expected the newest run, but .* cannot be read"):
        find_run(root, "latest")
    for command in ("export latest junit", "report latest", "compare latest latest"):
        assert cli(*command.split(), "--out", root).exit_code == 2


@pytest.mark.parametrize("also", ["", "edited", "cut"])
def test_a_newest_run_whose_files_were_moved_is_damaged_wherever_they_lie(
    tmp_path: Path, also: str
) -> None:
    """Two runs exchange their run.json, and the newer one, in the older folder, is damaged too."""
    older, newer = (write_run(tmp_path, earlier(measurement(), day=day)) for day in (18, 19))
    one, other = ((folder / "run.json").read_text("utf-8") for folder in (older, newer))
    assert gate(tmp_path).exit_code == 0
    if also == "edited":
        other = json.dumps(json.loads(other) | {"contract": None})
    if also == "cut":
        other = other[:40]
    (older / "run.json").write_text(other, "utf-8")
    (newer / "run.json").write_text(one, "utf-8")
    assert gate(tmp_path).exit_code == (3 if also else 0), "exchanged alone, both runs are there"


def test_a_change_is_withheld_too_where_a_newer_run_is_damaged(root: Path) -> None:
    """CHANGED exits with 0 like PASS."""
    write_run(root, run(measurement(value=1.1e-6), id="2026-11-20T00-00-00Z-1a2b3c4"))
    assert "CHANGED" in gate(root).output and gate(root).exit_code == 0
    newest = write_run(root, run(measurement(), created="2026-11-21T21:30:00+00:00"))
    (newest / "measurements.parquet").write_bytes(b"PAR1")
    assert gate(root).exit_code == 3


@pytest.mark.parametrize("code", [*ExitCode], ids=str)
@pytest.mark.parametrize("newer", [(), ((Path("damaged"), "because"),)], ids=["whole", "damaged"])
@pytest.mark.parametrize("ahead", [-5.0, AHEAD, AHEAD + 0.1])
def test_only_a_green_verdict_is_withheld(code: ExitCode, newer: Any, ahead: float) -> None:
    """What is red stays red, with its own exit code, whatever lies beside it."""
    decision = replace(decide(run(measurement()), None), exit_code=code)
    told = withheld(decision, Found(Path("night"), newer, ahead))
    if code is ExitCode.PASS and (newer or ahead > AHEAD):
        assert (told.word, told.exit_code) == (Word.INCOMPLETE, ExitCode.INCOMPLETE)
        assert "night" in told.sentence
    else:
        assert told == decision


@pytest.mark.parametrize("hours", [1.5, 73.0])
def test_an_age_counts_whole_days(tmp_path: Path, hours: float) -> None:
    created = (datetime.now(UTC) - timedelta(hours=hours)).isoformat()
    write_run(tmp_path, run(measurement(), created=created))
    assert gate(tmp_path, "--max-age", str(hours + 1)).exit_code == 0
    told = gate(tmp_path, "--max-age", str(hours - 1))
    assert told.exit_code == 2 and f"{hours:.1f} hours old" in told.output


def test_a_run_of_the_future_is_no_old_one(tmp_path: Path) -> None:
    created = (datetime.now(UTC) + timedelta(hours=AHEAD + 5)).isoformat()
    write_run(tmp_path, run(measurement(), created=created))
    told = gate(tmp_path, "--max-age", "2")
    assert told.exit_code == 2 and f"{AHEAD + 5:.1f} hours in the future" in told.output


def test_gates_of_every_subject_are_listed_whoever_ran_last(tmp_path: Path) -> None:
    for day, name in ((18, "mine"), (19, "yours")):
        suites = [{"name": name, "status": "ran", "planned": 1, "executed": 1}]
        row = measurement(case=f"{name}/one", suite=name)
        write_run(tmp_path, earlier(row, day=day, kind="port", suites=suites))
    cases = {row["case"] for row in look_back(str(tmp_path)).rows}
    assert cases == {"mine/one", "yours/one"}
    for turn in range(LATEST):
        again = {"kind": "port", "suites": suites, "id": f"2026-11-20-{turn:02d}"}
        write_run(tmp_path, earlier(row, created=f"2026-11-20T{turn:02d}:00:00+00:00", **again))
    cases = {row["case"] for row in look_back(str(tmp_path)).rows}
    assert cases == {"mine/one", "yours/one"}


def test_values_that_were_gathered_anew_are_kept_once(tmp_path: Path) -> None:
    """Files of few runs become one; what a later file holds anew is left out of it."""
    gathered = Gathered(tmp_path, {})

    def write(*runs: str, value: float) -> str:
        return gathered.write(pa.table({"run": list(runs), "value": [value] * len(runs)}))

    old, new = write("a", "b", value=1.0), write("a", value=2.0)
    more = [write(f"r{i}", value=3.0 + i) for i in range(FEW)]
    lines = {"a": Line("a", "", gathered=new), "b": Line("b", "", gathered=old)}
    lines |= {f"r{i}": Line(f"r{i}", "", gathered=name) for i, name in enumerate(more)}
    made = compact(gathered, lines)
    [name] = {line.gathered for line in made.values()}
    held = pq.read_table(gathered.path(name)).to_pydict()
    assert sorted(zip(held["run"], held["value"], strict=True)) == sorted(
        [("a", 2.0), ("b", 1.0), *((f"r{i}", 3.0 + i) for i in range(FEW))]
    )


def test_a_link_that_leads_nowhere_may_be_the_newest_run(root: Path) -> None:
    (root / "2026-12-24T00-00-00Z-1a2b3c4").symlink_to(root / "gone")
    told = gate(root)
    assert told.exit_code == 3 and "link leads nowhere" in told.output


def test_a_folder_named_latest_does_not_stand_for_the_newest_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root, run(failing()))
    monkeypatch.chdir(root.parent)
    shutil.copytree(sorted(root.glob("2026-11-19*"))[0], root.parent / "latest")
    assert gate(root).exit_code == 1


@pytest.mark.parametrize("hours", [2, 24 * 365])
def test_a_run_dated_in_the_future_does_not_stay_the_newest(tmp_path: Path, hours: int) -> None:
    created = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
    write_run(tmp_path, run(measurement(), created=created))
    told = gate(tmp_path)
    assert told.exit_code == 3 and "ahead of this machine's clock" in told.output
    assert cli("gate", "latest", "--out", tmp_path, "--max-age", "1").exit_code == 2


@pytest.mark.parametrize("limit", ["nan", "-1", "0"])
def test_a_limit_of_age_is_a_number_above_0(root: Path, limit: str) -> None:
    assert gate(root, "--max-age", limit).exit_code == 2


@pytest.mark.parametrize("created", ["zzz", "2026-11-20", "2026-11-20T23:59:00-05:00", ""])
def test_a_run_says_when_it_began_in_utc(tmp_path: Path, created: str) -> None:
    folder = write_run(tmp_path, run(measurement(), created=created))
    with pytest.raises(StoreError, match="expected a time in UTC"):
        read_run(folder)


def test_an_older_schema_is_not_written_by_hand(root: Path) -> None:
    """The seal taken out, and a schema and a kind put in that had none and no contract."""
    [info] = list_runs(root)[0]
    document = json.loads((info.folder / "run.json").read_text(encoding="utf-8"))
    del document["seal"]
    document |= {"schema": 4, "kind": "pytest"}
    (info.folder / "run.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StoreError, match=r"says schema 4 and has files, contract.*it was edited"):
        read_run(info.folder)


def test_a_list_shows_no_word_that_was_edited(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(failing()))
    writer.add_verdict(folder, "REGRESSED")
    [info] = list_runs(tmp_path)[0]
    assert info.manifest.verdict == "REGRESSED"
    path = folder / "verdict.json"
    edited = path.read_text(encoding="utf-8").replace("REGRESSED", "PASS")
    path.write_text(edited, encoding="utf-8")
    assert [each.manifest.verdict for each in list_runs(tmp_path)[0]] == [""]


def test_a_planted_bug_that_nothing_found_is_no_pass(tmp_path: Path) -> None:
    night = run(measurement(), fault="timenorm_counts_padding")
    decision = decide(night, None)
    assert decision.word is Word.INCOMPLETE
    assert "timenorm_counts_padding was planted" in decision.sentence
    assert decide(run(failing(), fault="timenorm_counts_padding"), None).word is Word.REGRESSED


def test_a_selection_says_that_it_is_one() -> None:
    asked = decide(run(measurement(), selected=["length_c", "plain"]), None)
    assert asked.word is Word.PASS
    assert asked.sentence.startswith("Only length_c, plain were measured, not the whole night. ")
    assert "only" not in decide(run(measurement()), None).sentence


def test_a_tolerance_near_the_smallest_float_costs_no_other_run(root: Path) -> None:
    tiny = measurement(value=0.0, tolerance=5e-324)
    odd = write_run(root, earlier(tiny, day=18))
    assert judge_stored(odd).decision.word is Word.PASS
    assert gate(root).exit_code == 0


def test_a_seal_holds_for_what_was_sealed_before() -> None:
    assert sealed(sealed({"a": 1})) == sealed({"a": 1})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the place of ours, with bytecode that Python stored."""
    import py_compile

    for name in identity.PACKAGES:
        (tmp_path / name).mkdir()
    module = tmp_path / identity.PACKAGES[0] / "norm.py"
    module.write_text("def root(x):\n    return x ** 0.5\n", encoding="utf-8")
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    py_compile.compile(str(module))
    return module


def test_bytecode_of_another_source_of_the_same_size_and_time_is_found(package: Path) -> None:
    assert identity.stale_bytecode() == []
    state = package.stat()
    package.write_text("def root(x):\n    return x ** 0.6\n", encoding="utf-8")
    os.utime(package, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert package.stat().st_size == state.st_size
    assert identity.stale_bytecode() == ["megalodon_jax/norm.py"]
    with pytest.raises(StoreError, match=r"bytecode of megalodon_jax/norm\.py .*__pycache__"):
        Start.now()
    # The source as it was, or with another time, is what Python runs.
    package.write_text("def root(x):\n    return x ** 0.5\n", encoding="utf-8")
    os.utime(package, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert identity.stale_bytecode() == []
    package.write_text("def root(x):\n    return x ** 0.7\n", encoding="utf-8")
    os.utime(package, ns=(state.st_atime_ns, state.st_mtime_ns + 2 * 10**9))
    assert identity.stale_bytecode() == []


def test_a_driver_without_settings_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not compared with the worker's own."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert identity.settings({}) == {}
    assert identity.settings()["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    assert identity.settings({"XLA_FLAGS": "", "HOME": "/"}) == {}
