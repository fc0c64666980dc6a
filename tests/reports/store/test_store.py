"""The run folder: round trip, nothing half-written, and refusals that say what to do."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from parity.engine.measure.measurement import Verdict
from parity.engine.programs.explanation import Explanation
from reports.registry import retention
from reports.store import runs, writer
from reports.store.examine import examine
from reports.store.explanations import EXPLANATIONS
from reports.store.manifest import Environment
from reports.store.reader import checksum
from reports.store.runs import (
    Run,
    RunInfo,
    StoreError,
    check_writable,
    list_runs,
    read_run,
    without_copies,
    write_run,
)
from reports.store.schema import FILES, MANIFEST, MIGRATIONS, SCHEMA, VERDICT, RunKind
from reports.store.seal import text_of
from reports.store.tensors import TENSORS
from reports.verdict.history import load_history
from reports.verdict.replays import suite_of
from tests.reports.nights import (
    bench,
    document,
    explained,
    failing,
    finding,
    measurement,
    regressed,
    reseal,
    run,
)


def as_schema_1(folder: Path) -> Path:
    """Rewrite a run the way schema 1 had it: no kind, no column that tells of a replay."""
    old = {
        k: v
        for k, v in json.loads((folder / "run.json").read_text(encoding="utf-8")).items()
        if k != "kind"
    }
    (folder / "run.json").write_text(json.dumps(old), encoding="utf-8")
    path = folder / "measurements.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["deterministic"]), path)
    return reseal(folder, schema=1)


def test_a_run_survives_the_round_trip(tmp_path: Path) -> None:
    info = measurement(metric="max_abs", value=3.0, tolerance=4.0, note="a note")
    night = run(info, failing(), findings=(finding(),))
    folder = write_run(tmp_path, night, lambda night: "<p>page</p>")
    assert folder == tmp_path / night.id
    assert read_run(folder) == night
    assert (folder / "report.html").read_text(encoding="utf-8") == "<p>page</p>"
    assert {p.name for p in folder.iterdir()} == {
        *("run.json", "measurements.parquet", "findings.parquet", "report.html", "verdict.json")
    }


def test_non_finite_numbers_survive_the_round_trip(tmp_path: Path) -> None:
    night = run(
        failing(value=math.nan), failing(quantity="loss", value=math.inf, tolerance=math.nan)
    )
    first, second = read_run(write_run(tmp_path, night)).measurements
    assert math.isnan(first.value)
    assert second.value == math.inf
    assert math.isnan(second.tolerance)
    assert first.verdict is Verdict.FAIL


def test_a_run_without_rows_is_readable(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run())
    assert read_run(folder) == run()
    assert [stored.folder for stored in list_runs(tmp_path)[0]] == [folder]


def test_two_writers_of_one_id_both_survive(tmp_path: Path) -> None:
    first = write_run(tmp_path, run(measurement()), lambda night: "<p>first</p>")
    barrier = threading.Barrier(4)

    def write(value: float) -> Path:
        night = run(measurement(value=value))
        barrier.wait()
        return write_run(tmp_path, night, lambda stored: f"<p>{stored.id}</p>")

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(write, (1e-7, 2e-7, 3e-7, 4e-7)))
    assert {f.name for f in folders} == {f"{first.name}-{n}" for n in (2, 3, 4, 5)}
    assert (first / "report.html").read_text(encoding="utf-8") == "<p>first</p>"
    stored, unreadable = list_runs(tmp_path)
    assert (len(stored), unreadable) == (5, [])
    for value, folder in zip((1e-7, 2e-7, 3e-7, 4e-7), folders, strict=True):
        back = read_run(folder)
        assert (back.id, back.measurements[0].value) == (folder.name, value)
        assert (folder / "report.html").read_text(encoding="utf-8") == f"<p>{folder.name}</p>"


def test_copies_of_a_run_count_once_and_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement()))
    shutil.copytree(folder, tmp_path / "0-copy")
    stored, [(copy, why)] = list_runs(tmp_path)
    assert [run.folder for run in stored] == [folder]
    assert copy.name == "0-copy"
    assert f"a copy of run {folder.name}" in why


def test_a_run_of_schema_1_is_read_as_one_of_today(tmp_path: Path) -> None:
    folder = as_schema_1(write_run(tmp_path, run(measurement(), findings=(finding(),))))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    back = read_run(folder)
    assert (back.manifest.migrated_from, back.manifest.kind) == (1, RunKind.NIGHTLY)
    assert back.measurements == (measurement(deterministic=None, suite=""),)
    assert back.findings == (finding(),)
    assert load_history(tmp_path, run(measurement(), created="2026-11-21")).baseline == back
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_edge_says_the_suite_of_a_run_of_schema_3(tmp_path: Path) -> None:
    """There was one port then; today's say whose they are."""
    edges = ("jax64:oracle", "port32:port64", "products32:float64")
    folder = write_run(tmp_path, run(*(measurement(edge=edge, suite="") for edge in edges)))
    table = pq.read_table(folder / "measurements.parquet")
    pq.write_table(table.drop_columns("suite"), folder / "measurements.parquet")
    reseal(folder, schema=3)
    result = [suite_of(m) for m in read_run(folder).measurements]
    assert result == ["parity", "mla-moe", "products"]
    assert suite_of(measurement(edge="port32:port64", suite="mistral")) == "mistral"


def test_only_a_migration_excuses_a_missing_column(tmp_path: Path) -> None:
    folder = as_schema_1(write_run(tmp_path, run(measurement())))
    reseal(folder, schema=SCHEMA, kind="nightly")
    with pytest.raises(StoreError, match="expected the columns deterministic"):
        read_run(folder)


def test_every_older_schema_has_a_migration() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError(28, "No space left")])
def test_an_interrupt_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]
) -> None:
    written = []

    def interrupt(table: object, path: Path) -> None:
        written.append(path)
        path.write_bytes(b"half")
        if len(written) == 2:
            raise error

    monkeypatch.setattr(writer.pq, "write_table", interrupt)
    with pytest.raises((KeyboardInterrupt, RuntimeError, StoreError)):
        write_run(tmp_path, run())
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_never_listed(tmp_path: Path) -> None:
    stray = tmp_path / ".partial-2026-11-20T21-30-00Z-1a2b3c4"
    stray.mkdir()
    (stray / "run.json").write_text(text_of(document()), encoding="utf-8")
    assert list_runs(tmp_path) == ([], [])


def test_an_unwritable_root_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder", encoding="utf-8")
    with pytest.raises(StoreError, match=r"file.*nothing was stored.*--out"):
        write_run(blocker / "runs", run())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "the disk is full", "r/.partial-a/f"), "the disk is full (r/.parti"),
        (OSError(errno.ENOSPC, "the disk is full"), "the disk is full (r); nothing"),
        (OSError("odd"), "odd (r); nothing"),
    ],
    ids=str,
)
def test_what_could_not_be_written_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    """The file that the system names, else the folder of runs."""
    monkeypatch.chdir(tmp_path)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(writer, "_write_files", refuse)
    with pytest.raises(StoreError) as refused:
        write_run(Path("r"), run())
    start = "expected a folder that can be written at r, but "
    assert str(refused.value).startswith(start + said)
    assert list(Path("r").iterdir()) == []


def test_an_unwritable_root_is_found_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "runs")
    assert list((tmp_path / "new" / "runs").iterdir()) == []
    blocker = tmp_path / "file"
    blocker.write_text("not a folder", encoding="utf-8")
    with pytest.raises(StoreError, match=r"file.*--out"):
        check_writable(blocker)


@pytest.mark.parametrize("name", ["", "../escape", ".hidden", "a/b", "x" * 300, "x" * 201, "a\n"])
def test_an_id_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="run id"):
        write_run(tmp_path, run(id=name))
    assert list(tmp_path.iterdir()) == []


def test_an_id_may_have_200_characters(tmp_path: Path) -> None:
    assert write_run(tmp_path, run(id="x" * 200)).name == "x" * 200


def test_a_verdict_says_which_page_it_came_with(tmp_path: Path) -> None:
    """The page as its bytes are, where a name in it is no UTF-8 too."""
    folder = write_run(tmp_path, run(measurement()), lambda night: "<p>b\udcfcro</p>")
    page = (folder / "report.html").read_bytes()
    assert page == b"<p>b?ro</p>"
    told = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    assert told["files"] == {"report.html": checksum(page)}
    assert told["run"] == checksum((folder / "run.json").read_bytes())


@pytest.mark.parametrize("name", ["measurements.parquet", "findings.parquet"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_parquet_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = write_run(tmp_path, run(measurement())) / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    said = "missing" if damage == "missing" else "not the file that was stored"
    with pytest.raises(StoreError, match=rf"{name}.*{said}"):
        read_run(path.parent)
    readable, [(folder, why)] = list_runs(tmp_path)
    assert (readable, folder) == ([], path.parent)
    assert name in why


def red_run() -> Run:
    """A run that has every file a run may have."""
    return replace(regressed(run(failing(case="slow_decay"))), explanations=(explained(),))


FILES_OF_A_RED_RUN = ("measurements.parquet", "findings.parquet", TENSORS, EXPLANATIONS)
DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "one bit of it": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1])),
    "of another run": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("name", FILES_OF_A_RED_RUN)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_run_that_lost_any_of_its_files_is_damaged(tmp_path: Path, name: str, damage) -> None:
    """Also one that a run may well be without: that it had it stands in run.json."""
    folder = write_run(tmp_path, red_run())
    assert {path.name for path in folder.iterdir()} == {*FILES_OF_A_RED_RUN, "run.json"}
    _is_whole(folder)
    damage(folder / name)
    _is_damaged(folder)


def test_a_link_to_nothing_is_damage_where_nothing_says_which_files_there_are(
    tmp_path: Path,
) -> None:
    """Of schema 4, which had no checksums, a file that is missing is one that there was not."""
    folder = reseal(write_run(tmp_path, red_run()), schema=4)
    for name in (TENSORS, EXPLANATIONS):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        assert read_run(folder).measurements
        (folder / name).symlink_to("nowhere")
        _is_damaged(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    _is_whole(folder)


@pytest.mark.parametrize("name", sorted(FILES[RunKind.NIGHTLY]))
def test_a_cut_file_of_a_run_without_checksums_is_damage_in_a_list_too(
    tmp_path: Path, name: str
) -> None:
    folder = reseal(write_run(tmp_path, red_run()), schema=4)
    assert examine(folder).manifest is not None
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    assert examine(folder).manifest is None
    _is_damaged(folder)


@pytest.mark.parametrize("named", ["none", "null", "no names", "one name less"])
def test_a_run_json_that_does_not_name_its_files_is_damaged(tmp_path: Path, named: str) -> None:
    """Sealed as it is: whoever can seal could leave out what he changed."""
    folder = write_run(tmp_path, red_run())
    path = folder / "run.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for lost in FILES_OF_A_RED_RUN if named == "one name less" else ("",):
        edited = {**content, "files": {n: s for n, s in content["files"].items() if n != lost}}
        if named == "none":
            del edited["files"]
        elif named == "null":
            edited["files"] = None
        elif named == "no names":
            edited["files"] = {}
        path.write_text(text_of(edited), encoding="utf-8")
        _is_damaged(folder)
    path.write_text(text_of(content), encoding="utf-8")
    # Negative control: sealed anew with all names.
    _is_whole(folder)


def _is_whole(folder: Path) -> None:
    night = read_run(folder)
    assert night.measurements and night.tensors and night.explanations


def _is_damaged(folder: Path) -> None:
    with pytest.raises(StoreError):
        read_run(folder)


def test_runs_share_a_subject_where_they_are_of_one_kind_and_have_a_port_in_common() -> None:
    """Whichever of two is asked about the other."""
    names = [n for size in range(1, 4) for n in itertools.combinations("abc", size)]
    made = [
        run(kind=kind, suites=[{"name": name} for name in subject]).manifest
        for kind in RunKind
        for subject in names
    ]
    for one, other in itertools.product(made, repeat=2):
        ports = {suite.name for suite in one.suites} & {suite.name for suite in other.suites}
        alike = one.kind is other.kind and (one.kind is not RunKind.PORT or bool(ports))
        assert one.shares_subject(other) is alike


def test_a_newer_schema_asks_for_an_update(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run())
    (folder / "run.json").write_text(text_of(document(schema=SCHEMA + 1)), encoding="utf-8")
    with pytest.raises(StoreError, match=r"newer.*update megalodon-numerics"):
        read_run(folder)


def test_a_kind_of_a_later_version_asks_for_an_update(tmp_path: Path) -> None:
    folder = reseal(write_run(tmp_path, run()), kind="odd")
    said = f"expected a run of kind {', '.join(RunKind)}, received 'odd'; update megalodon-numerics"
    with pytest.raises(StoreError, match=said):
        read_run(folder)
    [(bad, why)] = list_runs(tmp_path)[1]
    assert bad == folder and said in why


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": "1"}'])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path, run())
    (folder / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match=r"run\.json"):
        read_run(folder)


def test_runs_are_listed_oldest_first_by_their_time_not_their_name(tmp_path: Path) -> None:
    late = write_run(tmp_path, run(id="a", created="2026-11-20T21:30:00+00:00"))
    early = write_run(tmp_path, run(id="b", created="2026-11-19T21:30:00+00:00"))
    assert [stored.folder for stored in list_runs(tmp_path)[0]] == [early, late]


def test_a_root_that_does_not_exist_holds_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == ([], [])


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    with pytest.raises(StoreError) as refused:
        list_runs(path)
    assert str(refused.value) == (
        f"expected a folder of runs at {path}, but Not a directory; "
        "give the folder that `nightly` wrote to"
    )


@pytest.mark.parametrize("code", [0, errno.EIO])
def test_a_folder_that_cannot_be_listed_is_told_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Once with its path, whether the system has words for the error or not."""
    error = OSError(code, "no answer", str(tmp_path)) if code else OSError("odd")

    def refuse(folder: Path) -> None:
        raise error

    monkeypatch.setattr(runs.os, "scandir", refuse)
    with pytest.raises(StoreError) as refused:
        list_runs(tmp_path)
    reason = "no answer" if code else "odd"
    assert str(refused.value).startswith(f"expected a folder of runs at {tmp_path}, but {reason};")


def test_a_link_to_itself_is_told_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    [(folder, why)] = list_runs(tmp_path)[1]
    assert folder == tmp_path / "loop"
    reason = os.strerror(errno.ELOOP)
    assert why == f"expected a folder, but: {reason}; delete it"


@pytest.mark.parametrize(
    "part",
    [
        {"host": "text"},
        {"flags": ["--xla"]},
        {"device": 3},
        {"suites": [{"name": "parity", "planned": "3"}]},
        {"suites": {"name": "parity"}},
        {"id": 3},
        {"created": 3},
        {"created": None},
        {"suites": [{"planned": 3}]},
        {"cases": [{"title": "without a name"}]},
    ],
    ids=str,
)
def test_a_manifest_with_a_part_of_another_type_is_named(tmp_path: Path, part) -> None:
    folder = write_run(tmp_path, run())
    (folder / "run.json").write_text(text_of(document(**part)), encoding="utf-8")
    with pytest.raises(StoreError, match=rf"{folder / 'run.json'}(:|;) "):
        read_run(folder)
    if "cases" in part:
        # Of which lists read nothing.
        return
    readable, [(named, why)] = list_runs(tmp_path)
    assert (readable, named) == ([], folder)
    assert str(folder / "run.json") in why


@pytest.mark.parametrize("executed", range(3))
def test_a_suite_that_does_not_say_what_it_planned_is_not_whole(executed: int) -> None:
    parity = {"name": "parity", "status": "ran", "executed": executed}
    [suite] = run(suites=[parity]).manifest.suites
    assert (suite.planned, suite.whole) == (0, False)


def test_null_in_a_manifest_is_what_is_not_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run())
    parts = ("host", "flags", "versions", "device", "reference", "suites", "stability")
    reseal(folder, **dict.fromkeys(parts))
    manifest = read_run(folder).manifest
    assert manifest.environment == Environment(threads=2)
    assert (manifest.suites, manifest.stability, manifest.whole) == ((), {}, False)


def test_a_page_that_cannot_be_drawn_costs_no_numbers(tmp_path: Path) -> None:
    def draw(night: Run) -> str:
        raise FileNotFoundError("style.css")

    with pytest.raises(RuntimeError, match="page could not be drawn") as caught:
        write_run(tmp_path, run(measurement()), draw)
    [info], _ = list_runs(tmp_path)
    assert f"`megalodon-numerics report {info.folder}` draws it again" in str(caught.value)
    assert read_run(info.folder).measurements == (measurement(),)
    assert not (info.folder / "report.html").exists()


def test_what_a_killed_writer_claimed_is_free_after_an_hour(tmp_path: Path) -> None:
    night = run(measurement())
    claim = tmp_path / f".partial-{night.id}"
    claim.mkdir()
    assert write_run(tmp_path, night).name == f"{night.id}-2"
    os.utime(claim, (0, 0))
    assert write_run(tmp_path, night).name == night.id
    assert not claim.exists()


def test_a_slow_writer_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    """What it writes changes the time of its folder; the run it began keeps its name."""
    night = run(measurement())
    claim = tmp_path / f".partial-{night.id}"
    claim.mkdir()
    (claim / "measurements.parquet").write_bytes(b"half")
    for age in (0, writer.ABANDONED // 2, writer.ABANDONED - 60):
        then = time.time() - age
        os.utime(claim, (then, then))
        assert write_run(tmp_path, night).name != night.id
        assert (claim / "measurements.parquet").read_bytes() == b"half"


def test_numbers_come_before_the_manifest_and_the_manifest_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a writer is killed, what has the name of a run is whole."""
    seen: list[set[str]] = []
    rename = Path.rename

    def watched(self: Path, target: Path) -> Path:
        assert not target.exists()
        seen.append({path.name for path in self.iterdir()})
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    folder = write_run(tmp_path, run(failing()), lambda night: "<p>page</p>")
    assert seen == [{"run.json", "measurements.parquet", "findings.parquet"}]
    content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert set(content["files"]) == {"measurements.parquet", "findings.parquet"}


def test_a_folder_that_is_there_is_never_written_to(tmp_path: Path) -> None:
    """Not even one that holds no run, or a link that leads nowhere."""
    night = run(measurement())
    (tmp_path / night.id).symlink_to("nowhere")
    (tmp_path / f"{night.id}-2").mkdir()
    assert write_run(tmp_path, night).name == f"{night.id}-3"
    assert not list((tmp_path / f"{night.id}-2").iterdir())
    # Nor does a claim of the names that were taken stay behind.
    assert not list(tmp_path.glob(".partial-*"))


def test_a_deletion_that_is_interrupted_leaves_no_run_with_files_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, run(measurement()))

    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        (path / "findings.parquet").unlink()
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", interrupted)
        with pytest.raises(StoreError, match="prune again"):
            retention.delete(folder)
    assert list_runs(tmp_path) == ([], [])
    assert not folder.exists()
    retention.clean(tmp_path)
    assert not list(tmp_path.glob(".pruned-*"))


def test_the_accounts_of_failing_cases_are_stored_with_the_run(tmp_path: Path) -> None:
    stream = Explanation(
        "stream", "jax64:oracle", quantity="state/k", value=math.nan, meaning="States are in ..."
    )
    accounts = (explained("plain"), stream)
    folder = write_run(tmp_path, replace(run(failing()), explanations=accounts))
    again = read_run(folder).explanations
    assert again[0] == accounts[0]
    assert math.isnan(again[1].value)
    assert replace(again[1], value=0.0, tolerance=0.0) == replace(stream, value=0.0, tolerance=0.0)
    assert again[0].culprit == accounts[0].stages[2]


def test_a_run_without_failures_has_no_file_of_accounts(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement()))
    assert not (folder / EXPLANATIONS).exists()
    assert read_run(folder).explanations == ()


def test_damaged_accounts_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, replace(run(failing()), explanations=(explained(),)))
    (folder / EXPLANATIONS).write_bytes(b"PAR1 and nothing else")
    with pytest.raises(StoreError, match=r"explanations\.parquet is not the file that was stored"):
        read_run(folder)


def test_a_path_that_is_no_utf8_costs_no_run(tmp_path: Path) -> None:
    """Python has a lone surrogate for each of its bytes, which UTF-8 has not."""
    place = os.fsdecode(b"/home/b\xfcro/checkpoint")
    night = run(measurement(), checkpoint={"name": "Größe", "folder": place})
    folder = write_run(tmp_path, night)
    checkpoint = read_run(folder).manifest.checkpoint
    assert checkpoint is not None and (checkpoint.name, checkpoint.folder) == ("Größe", place)
    assert "Größe" in (folder / "run.json").read_text(encoding="utf-8")
    assert [info.folder for info in list_runs(tmp_path)[0]] == [folder]


def test_a_run_that_does_not_say_its_kind_is_damaged(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement()))
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    del content["kind"]
    (folder / MANIFEST).write_text(text_of(content), encoding="utf-8")
    with pytest.raises(StoreError, match="received None"):
        read_run(folder)


def test_findings_of_a_run_that_has_none_are_refused(tmp_path: Path) -> None:
    made = replace(bench(1), findings=(finding(),), measurements=(measurement(),))
    with pytest.raises(StoreError) as refused:
        write_run(tmp_path, made)
    assert str(refused.value) == (
        "expected a run of kind bench to hold rows for timings.parquet only, received rows for "
        "measurements.parquet, findings.parquet; set the manifest's kind to what was run"
    )
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_an_account_stay_in_the_order_in_which_they_act(tmp_path: Path) -> None:
    told = replace(explained(), parameters=("model.b", "model.a"))
    folder = write_run(tmp_path, replace(run(failing()), explanations=(told,)))
    assert [it.parameters for it in read_run(folder).explanations] == [("model.b", "model.a")]


def test_a_run_of_schema_1_is_listed(tmp_path: Path) -> None:
    """Though its file lacks columns that came later."""
    folder = as_schema_1(write_run(tmp_path, run(measurement())))
    [found], unreadable = list_runs(tmp_path)
    assert (found.folder, unreadable) == (folder, [])


def test_a_run_whose_name_was_taken_says_its_new_one(tmp_path: Path) -> None:
    for name in ("run", "run-2", "run-3"):
        folder = write_run(tmp_path, run(measurement(), id="run"))
        assert (folder.name, read_run(folder).id) == (name, name)


def test_the_verdict_of_one_run_is_not_that_of_another(tmp_path: Path) -> None:
    """Though it is whole: it names the run.json that it is about."""
    first, second = (write_run(tmp_path, run(measurement(), id=name)) for name in "ab")
    writer.add_verdict(first, "PASS")
    shutil.copy(first / VERDICT, second / VERDICT)
    assert [read_run(it).manifest.verdict for it in (first, second)] == ["PASS", ""]


def test_a_list_of_which_one_entry_is_no_object_is_damage_in_a_list_of_runs_too(
    tmp_path: Path,
) -> None:
    folder = reseal(write_run(tmp_path, run(measurement())), cases=[{"name": "a"}, 7])
    readable, [(damaged, why)] = list_runs(tmp_path)
    assert (readable, damaged) == ([], folder) and why


def test_what_another_writer_claims_once_a_run_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden name is free after the rename, and the next writer may take it at once."""
    rename = Path.rename

    def claimed_by_another(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        self.mkdir()
        return moved

    monkeypatch.setattr(Path, "rename", claimed_by_another)
    folder = write_run(tmp_path, run(measurement()))
    assert (tmp_path / f".partial-{folder.name}").is_dir()


def test_copies_without_an_original_are_ordered_by_their_folders_among_runs_of_their_time() -> None:
    made = [RunInfo(Path(f"runs/{folder}"), run(id=id_).manifest) for folder, id_ in ("bb", "ax")]
    assert without_copies(made, []) == made[::-1]


@pytest.mark.parametrize("schema", range(2, SCHEMA))
def test_a_run_of_an_older_schema_keeps_the_columns_that_it_has(
    tmp_path: Path, schema: int
) -> None:
    row = measurement(suite="mine", deterministic=True)
    folder = write_run(tmp_path, run(row))
    if schema < 4:
        row = replace(row, suite="")
        table = pq.read_table(folder / "measurements.parquet").drop_columns("suite")
        pq.write_table(table, folder / "measurements.parquet")
    assert read_run(reseal(folder, schema=schema)).measurements == (row,)


def test_copies_of_a_run_in_two_folders_of_runs_are_named_though_their_names_are_equal() -> None:
    made = [RunInfo(Path(root) / "r", run(id="r").manifest) for root in ("one", "two")]
    left_out: list[tuple[Path, str]] = []
    assert without_copies(made, left_out) == made[:1]
    assert [folder for folder, _ in left_out] == [made[1].folder]


def test_a_claim_of_a_killed_writer_that_cannot_be_deleted_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another user's."""
    night = run(measurement())
    (claim := tmp_path / f".partial-{night.id}").mkdir()
    os.utime(claim, (0, 0))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(writer.shutil, "rmtree", refuse)
        assert write_run(tmp_path, night).name == f"{night.id}-2"
    assert claim.is_dir()
