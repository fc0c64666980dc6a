"""The index of a folder of runs: what it saves, and that the folders are the truth."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import itertools
import json
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parity.engine.measure.measurement import Verdict
from reports.registry.listing import summarise_runs
from reports.registry.lookback import look_back
from reports.store import examine, gathered, index
from reports.store import run as store_run
from reports.store.examine import KEY
from reports.store.index import INDEX, Line, compact
from reports.store.query import Table
from reports.store.reader import checksum, read_table
from reports.store.runs import list_runs, one_look, write_run
from reports.store.schema import MEASUREMENTS
from tests.reports.nights import bench, earlier, failing, measurement, reseal, run


def night(day: int, *rows: Any) -> Any:
    name = f"2026-11-{day:02d}T21-30-00Z-0000000"
    return run(*(rows or (measurement(),)), id=name, created=f"2026-11-{day:02d}T21:30:00+00:00")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are read and checked, in order."""
    seen: list[str] = []
    read = examine._read

    def watched(folder: Path, only: bool) -> Any:
        seen.append(folder.name)
        return read(folder, only)

    monkeypatch.setattr(examine, "_read", watched)
    return seen


def values(root: Path) -> list[float]:
    return [row["value"] for row in look_back(str(root), "baseline", "logits").rows]


def test_a_list_reads_what_is_new_alone(tmp_path: Path, reads: list[str]) -> None:
    first, second = write_run(tmp_path, night(1)), write_run(tmp_path, night(2))
    once = summarise_runs(tmp_path)
    assert reads == [first.name, second.name]
    third = write_run(tmp_path, night(3, failing()))
    twice = summarise_runs(tmp_path)
    assert reads[2:] == [third.name]
    assert twice[0][:2] == once[0]
    assert [(s.id, s.gates, s.broken) for s in twice[0]][2] == (third.name, 1, 1)
    # Nor is an index written that would be the same.
    written = (tmp_path / INDEX).stat().st_ino
    assert summarise_runs(tmp_path) == twice and (tmp_path / INDEX).stat().st_ino == written
    assert values(tmp_path) == [1e-6, 1e-6, 9e-6] and len(reads) == 3
    # What is deleted is in no list, whatever the index has.
    shutil.rmtree(first)
    assert [s.id for s in summarise_runs(tmp_path)[0]] == [second.name, third.name]
    assert values(tmp_path) == [1e-6, 9e-6] and len(reads) == 3


@pytest.mark.parametrize(
    "damage", ["index", "a number in the index", "no index", "values", "no values"]
)
def test_whatever_becomes_of_the_index_the_answer_is_the_same(tmp_path: Path, damage: str) -> None:
    for day in (1, 2):
        write_run(tmp_path, night(day, measurement(value=day * 1e-7)))
    healthy = summarise_runs(tmp_path), values(tmp_path)
    [together] = (tmp_path / gathered.FOLDER).iterdir()
    if damage == "index":
        (tmp_path / INDEX).write_bytes(b"nothing of it")
    elif damage == "a number in the index":
        text = (tmp_path / INDEX).read_bytes()
        assert b"2026-11-01T21:30" in text
        (tmp_path / INDEX).write_bytes(text.replace(b"2026-11-01T21:30", b"2026-10-01T21:30"))
    elif damage == "no index":
        (tmp_path / INDEX).unlink()
    elif damage == "values":
        content = bytearray(together.read_bytes())
        content[len(content) // 2] ^= 1
        together.write_bytes(content)
    else:
        shutil.rmtree(together.parent)
    assert (summarise_runs(tmp_path), values(tmp_path)) == healthy


@pytest.mark.parametrize("damage", ["run.json", "measurements.parquet", "findings.parquet"])
def test_a_run_that_changed_is_checked_again(tmp_path: Path, damage: str) -> None:
    folders = [write_run(tmp_path, night(day)) for day in (1, 2)]
    path = folders[0] / damage
    before, status = summarise_runs(tmp_path), path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x20
    path.write_bytes(content)
    # As old and as large as it was.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size and not before[1]
    for _ in range(2):
        listed, unreadable = summarise_runs(tmp_path)
        if damage != "run.json":
            assert [s.id for s in listed] == [folders[1].name]
            assert [folder for folder, _ in unreadable] == [folders[0]]
            assert "not the file that was stored" in unreadable[0][1]
    # And healthy again once it is restored.
    content[len(content) // 2] ^= 0x20
    path.write_bytes(content)
    assert summarise_runs(tmp_path) == before


def test_a_copy_is_named_whether_the_index_knows_it_or_not(tmp_path: Path) -> None:
    own = write_run(tmp_path, night(1))
    shutil.copytree(own, tmp_path / "a-copy")
    for _ in range(2):
        listed, unreadable = summarise_runs(tmp_path)
        assert [s.id for s in listed] == [own.name]
        assert [(f.name, "delete one of them" in why) for f, why in unreadable] == [
            ("a-copy", True)
        ]


def test_many_small_files_of_values_become_one(tmp_path: Path) -> None:
    """A night a day makes a file of values a day; the folder's name is no pattern."""
    root = tmp_path / "runs [old]"
    for day in range(1, gathered.FEW + 3):
        write_run(root, night(day, measurement(value=day * 1e-8)))
        list_runs(root)
    # A folder that the name would match if it were a pattern.
    shutil.copytree(root, tmp_path / "runs o")
    names = {line.gathered for line in index.read_lines(root / INDEX)}
    assert len(names) < gathered.FEW
    assert values(root) == [day * 1e-8 for day in range(1, gathered.FEW + 3)]
    lines = index.read_lines(root / INDEX)
    files = [str(root / line.name / "measurements.parquet") for line in lines]
    with Table(files, [str(gathered.Gathered(root, {}).path(n.gathered)) for n in lines]) as table:
        found, broken = table.ask("SELECT value FROM measurements")
    assert broken == {} and sorted(found["value"]) == values(root)
    with Table(files) as table:
        found, broken = table.ask("SELECT value FROM measurements")
    assert broken == {} and sorted(found["value"]) == values(root)


def test_files_of_older_schemas_are_read_beside_newer_ones(tmp_path: Path) -> None:
    """By the names of their columns: some lack one, or have them in another order."""
    files = [write_run(tmp_path, night(day)) / MEASUREMENTS for day in (1, 2, 3)]
    old = pq.read_table(files[0]).drop_columns("suite")
    pq.write_table(old.select(sorted(old.column_names)), files[0])
    with Table([str(file) for file in files]) as table:
        answer, broken = table.ask(
            "SELECT run, quantity, value, suite FROM measurements ORDER BY run"
        )
    assert not broken
    assert list(zip(*(column.tolist() for column in answer.values()), strict=True)) == [
        (0, "logits", 1e-6, None),
        (1, "logits", 1e-6, "parity"),
        (2, "logits", 1e-6, "parity"),
    ]


def test_the_index_forgets_no_part_of_a_manifest_that_lists_need(tmp_path: Path) -> None:
    folder = write_run(tmp_path, night(1))
    reseal(folder, fault="conjugate", selected=["plain"], schema=4, verdict="CHANGED")
    [cold], [warm] = list_runs(tmp_path)[0], list_runs(tmp_path)[0]
    index._seen.clear()
    [stored] = list_runs(tmp_path)[0]
    assert cold == warm == stored
    manifest = stored.manifest
    assert (manifest.fault, manifest.selected, manifest.migrated_from) == (
        "conjugate",
        ("plain",),
        4,
    )
    assert (manifest.verdict, manifest.whole) == ("CHANGED", False)
    assert manifest.environment == night(1).manifest.environment
    assert manifest.suites == night(1).manifest.suites


def test_whoever_may_only_read_has_the_list_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, night(1))

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "read-only")

    for module in (index, gathered):
        monkeypatch.setattr(module, "written_aside", refuse)
    assert [len(part) for part in summarise_runs(tmp_path)] == [1, 0]
    assert values(tmp_path) == [1e-6]
    assert not (tmp_path / INDEX).exists()


def test_a_run_of_an_older_schema_is_listed_unchecked(tmp_path: Path) -> None:
    folder = reseal(write_run(tmp_path, night(1)), schema=4)
    assert "files" not in json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert [s.id for s in summarise_runs(tmp_path)[0]] == [folder.name]
    assert values(tmp_path) == [1e-6]


def test_runs_are_of_one_work_if_they_measured_the_same_gates(tmp_path: Path) -> None:
    rows = measurement(value=1e-7), measurement(identity="other"), measurement(quantity="loss")
    for day, row in enumerate((measurement(), *rows), 1):
        write_run(tmp_path, night(day, row))
    first, again, *others = (info.work for info in list_runs(tmp_path)[0])
    assert first == again
    assert len({first, *others}) == 3


def test_one_look_ends_with_its_answer(tmp_path: Path) -> None:
    write_run(tmp_path, night(1))
    with one_look():
        assert len(list_runs(tmp_path)[0]) == 1
        write_run(tmp_path, night(2))
        assert len(list_runs(tmp_path)[0]) == 1
    assert len(list_runs(tmp_path)[0]) == 2


NUMBERS = (math.nan, -math.inf, -1.0, 0.0, 1.0, 2.0, math.inf)


def test_the_index_judges_a_row_as_a_run_does(tmp_path: Path) -> None:
    """Two forms of one rule: on a row, and on columns of ten thousand runs."""
    cases = itertools.product(NUMBERS, NUMBERS, Verdict)
    rows = [
        measurement(quantity=f"q{i}", value=value, tolerance=tolerance, verdict=verdict)
        for i, (value, tolerance, verdict) in enumerate(cases)
    ]
    # Of what a row says; `Run` settles verdicts when it is made.
    columns = {name: [getattr(m, name) for m in rows] for name in (*KEY, "value", "tolerance")}
    words = pa.array([m.verdict.value for m in rows]).dictionary_encode()
    found, gated, _ = examine._gates(pa.table({**columns, "verdict": words}))
    found = found.filter(pa.array(gated))
    settled = {m.quantity: m.settled().verdict.value for m in rows}
    gates = {name: word for name, word in settled.items() if word != Verdict.INFO.value}
    assert dict(zip(*(found[c].to_pylist() for c in ("quantity", "verdict")), strict=True)) == gates
    shares = {m.quantity: repr(m.fraction) for m in rows if m.quantity in gates}
    told = zip(*(found[c].to_pylist() for c in ("quantity", "fraction")), strict=True)
    assert {name: repr(share) for name, share in told} == shares


@pytest.mark.parametrize("batch", [0, 3, examine.BATCH])
def test_runs_that_are_read_together_are_judged_as_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    folders = [
        write_run(tmp_path, night(1)),
        write_run(tmp_path, night(2, failing())),
        write_run(tmp_path, night(3, measurement(quantity="other"), replayed_once())),
        tmp_path / "none",
        # Nothing in it is a gate.
        write_run(tmp_path, night(4, measurement(tolerance=math.nan, verdict=Verdict.INFO))),
        write_run(tmp_path, night(5)),
    ]
    alone = [examine.examine(folder) for folder in folders]
    assert [(one.gates, one.broken, bool(one.why)) for one in alone] == [
        (1, 0, False),
        (1, 1, False),
        (2, 0, False),
        (0, 0, True),
        (0, 0, False),
        (1, 0, False),
    ]
    monkeypatch.setattr(examine, "BATCH", batch)
    assert _plain(examine.examine_all(folders)) == _plain(alone)
    # Places that collide are no repeated keys.
    monkeypatch.setattr(examine, "repeated_keys", lambda *_: True)
    assert _plain(examine.examine_all(folders)) == _plain(alone)
    monkeypatch.undo()
    # A run with one measurement twice is damaged; its neighbours are not.
    monkeypatch.setattr(store_run, "rows_table", doubled(store_run.rows_table, folders[1]))
    monkeypatch.setattr(examine, "rows_table", store_run.rows_table)
    together = examine.examine_all(folders)
    assert "is there twice" in together[1].why and together[1].rows is None
    assert _plain(together[:1] + together[2:]) == _plain(alone[:1] + alone[2:])


def doubled(read: Any, folder: Path) -> Any:
    def rows(content: bytes, path: Path, *rest: Any, **how: Any) -> pa.Table:
        table = read(content, path, *rest, **how)
        return pa.concat_tables([table, table]) if path.parent == folder else table

    return rows


def replayed_once() -> Any:
    return replace(measurement(), deterministic=None)


def _plain(found: Any) -> list[Any]:
    rows = [None if one.rows is None else one.rows.to_pylist() for one in found]
    return [
        (replace(one, rows=None), text) for one, text in zip(found, map(str, rows), strict=True)
    ]


def test_the_line_of_a_gate_ends_with_its_newest_values(tmp_path: Path) -> None:
    measured = [day * 1e-8 for day in range(1, 27)]
    for day, value in enumerate(measured, 1):
        write_run(tmp_path, night(day, measurement(value=value)))
    [row] = look_back(str(tmp_path)).rows
    assert list(row["recent"]) == measured[-24:]
    assert (row["first"], row["last"]) == (measured[0], measured[-1])


@pytest.mark.parametrize("damage", ["gone", "another content"])
def test_a_run_that_cannot_be_read_is_not_among_those_that_answered(
    tmp_path: Path, damage: str
) -> None:
    _, damaged = (write_run(tmp_path, night(day)) for day in (1, 2))
    file = damaged / MEASUREMENTS
    file.unlink() if damage == "gone" else file.write_bytes(b"nothing of it")
    for place in (str(tmp_path), f"{tmp_path}/*"):
        found = look_back(place)
        assert found.runs == 1
        assert [damaged.name in text for text, _ in found.unreadable] == [True]
        assert [row["runs"] for row in found.rows] == [1]


def test_work_is_which_row_is_about_what_and_which_is_a_gate(tmp_path: Path) -> None:
    """The same names and identities in other rows are other work, and so is a gate told as a fact:
    one run of a work is asked for all of them."""
    fact = {"tolerance": math.nan, "verdict": Verdict.INFO}
    works = [
        [{"identity": "x"}, {"identity": "y"}, {"identity": "x"}],
        [{"identity": "x"}, {"identity": "y"}, {"identity": "y"}],
        [{"identity": "x"}, {"identity": "y"}, {"identity": "x", **fact}],
        [{"identity": "x"}, {"identity": "y", **fact}, {"identity": "x"}],
        # Of the same letters.
        [{"identity": "vw"}, {"identity": "z"}, {"identity": "vw"}],
        [{"identity": "v"}, {"identity": "wz"}, {"identity": "v"}],
    ]
    for day, changes in enumerate(works, 1):
        rows = [measurement(quantity=f"q{i}", **change) for i, change in enumerate(changes)]
        write_run(tmp_path, earlier(*rows, day=day))
    assert len({info.work for info in list_runs(tmp_path)[0]}) == len(works)


def combined(root: Path) -> tuple[gathered.Gathered, Any]:
    """The combined files of a folder, and how to write one of these runs."""
    files = gathered.Gathered(root, {})

    def write(*runs: str) -> str:
        return files.write(pa.table({"run": list(runs), "value": [1.0] * len(runs)}))

    return files, write


def test_a_combined_file_is_trusted_while_it_is_the_one_that_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, write = combined(tmp_path)
    assert files.holds("") and not files.holds("none")
    name = write("a")
    path = tmp_path / ".values" / f"{name}.parquet"
    assert path == files.path(name) and checksum(path.read_bytes()) == name
    assert files.holds(name) and write("a") == name and write("b") != name
    # Its bytes are read once for each status of the file, and not again by another process.
    looks: list[Path] = []
    read = gathered.read_bytes
    monkeypatch.setattr(gathered, "read_bytes", lambda p, n: (looks.append(p), read(p, n))[1])
    later = gathered.Gathered(tmp_path, dict(files.verified))
    assert later.holds(name) and later.holds(name) and looks == []
    assert gathered.Gathered(tmp_path, {}).holds(name) and looks == [path]
    content = path.read_bytes()
    for change in (content[:-1] + b"x", content[:-1]):
        path.write_bytes(change)
        assert not gathered.Gathered(tmp_path, dict(files.verified)).holds(name)
    os.utime(path, (0, 0))
    assert files.holds(name), "asked for before in one look"
    path.unlink()
    again = gathered.Gathered(tmp_path, dict(files.verified))
    assert not again.holds(name)
    # And once more what it was, where the same look missed it.
    assert again.write(pa.table({"run": ["a"], "value": [1.0]})) == name and again.holds(name)
    # Of a folder that cannot be written there is none.
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert combined(tmp_path / "file")[1]("a") == ""


def test_a_run_that_was_gathered_again_has_its_newest_rows_alone(tmp_path: Path) -> None:
    """The old file still has those of before, beside other runs that are read from it."""
    files = gathered.Gathered(tmp_path, {})
    old, new = (
        files.write(pa.table({"run": names, "value": [value] * len(names)}))
        for names, value in ((["a", "b"], 1.0), (["a"], 2.0))
    )
    runs = [str(tmp_path / name / MEASUREMENTS) for name in ("a", "b")]
    with Table(runs, [str(files.path(name)) for name in (new, old)]) as table:
        answer, broken = table.ask("SELECT run, value FROM measurements ORDER BY ALL")
    assert not broken
    assert list(zip(answer["run"].tolist(), answer["value"].tolist(), strict=True)) == [
        (0, 2.0),
        (1, 1.0),
    ]


@pytest.mark.parametrize(("small", "merged"), [(gathered.FEW, False), (gathered.FEW + 1, True)])
def test_only_too_many_small_files_are_merged(tmp_path: Path, small: int, merged: bool) -> None:
    """A file of many runs stays, and so do lines without one; every line keeps what else it has."""
    files, write = combined(tmp_path)
    large = [f"l{i}" for i in range(gathered.RUNS)]
    few = [[f"{n} {i}" for n in range(2)] for i in range(small)]
    lines = {"none": Line("none", "s", "why")}
    for runs in (large, *few):
        file = write(*runs)
        lines |= {n: Line(n, f"signature {n}", gates=3, gathered=file) for n in runs}
    made = compact(files, lines)
    assert list(made) == list(lines) and made["none"] == lines["none"]
    assert all(made[name] == lines[name] for name in large)
    names = {made[name].gathered for runs in few for name in runs}
    assert (len(names) == 1) is merged and (made == lines) is not merged
    for name in (name for runs in few for name in runs):
        assert made[name] == replace(lines[name], gathered=made[name].gathered)
    # Where the merged file cannot be written, the small ones stay.
    files.write = lambda table: ""
    assert compact(files, lines) == lines


@pytest.mark.parametrize("gone", [True, False])
def test_small_files_of_which_one_is_gone_or_damaged_stay(tmp_path: Path, gone: bool) -> None:
    """Another process may delete a file after it was listed; the runs are then read again."""
    files, write = combined(tmp_path)
    lines = {n: Line(n, "s", gathered=write(n)) for n in map(str, range(gathered.FEW + 1))}
    assert compact(files, lines) != lines
    path = files.path(lines["3"].gathered)
    path.unlink() if gone else path.write_bytes(b"PAR1")
    assert compact(files, lines) == lines


def test_a_file_of_a_run_without_gates_is_kept_while_a_line_names_it(tmp_path: Path) -> None:
    files, write = combined(tmp_path)
    facts, other = write("facts"), write("other")
    for name in (facts, other):
        os.utime(files.path(name), (1e9, 1e9))
    index._save(tmp_path, {"facts": Line("facts", "s", gates=0, gathered=facts)}, files)
    assert files.path(facts).is_file() and not files.path(other).exists()


def test_files_that_no_line_names_are_deleted_after_an_hour(tmp_path: Path) -> None:
    """A younger one may be that of a process which is about to write its index."""
    files, write = combined(tmp_path)
    used, old, young = write("a"), write("b"), write("c")
    other = files.path("x").with_suffix(".txt")
    other.write_text("", encoding="utf-8")
    now = time.time()
    for path, age in ((files.path(used), 9e9), (files.path(old), 3700), (other, 9e9)):
        os.utime(path, (now - age, now - age))
    os.utime(files.path(young), (now - 3500, now - 3500))
    gathered.forget(files, iter([used, "gone"]))
    assert {path.name for path in files.path("x").parent.iterdir()} == {
        files.path(used).name,
        files.path(young).name,
        other.name,
    }
    assert files.verified.keys() == {used}


def in_plain_texts(one: examine.Examined) -> examine.Examined:
    """The same run as it is read from a file whose columns of texts are no dictionaries."""
    assert one.rows is not None
    texts = (
        pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type)
        for f in one.rows.schema
    )
    return replace(one, rows=one.rows.cast(pa.schema(texts)))


def test_gates_of_runs_are_gathered_with_the_names_of_their_runs(tmp_path: Path) -> None:
    """Also where one run has a column as text and another as numbers of texts."""
    folders = [write_run(tmp_path, night(day, measurement(case=f"c{day}"))) for day in (1, 2)]
    found = [examine.examine(folder) for folder in folders]
    empty = examine.examine(tmp_path / "none")
    assert empty.rows is None and empty.why
    files = gathered.Gathered(tmp_path, {})
    assert gathered.gather(files, [empty]) == ""
    plain = list(map(in_plain_texts, found))
    tables = []
    for rows in (found, [found[0], plain[1]], plain):
        name = gathered.gather(files, [rows[0], empty, rows[1]])
        tables.append(pq.read_table(files.path(name)))
    assert tables[0] == tables[1] == tables[2]
    assert tables[0].column_names[0] == "run"
    assert tables[0]["run"].to_pylist() == [folder.name for folder in folders]
    assert tables[0]["case"].to_pylist() == ["c1", "c2"]


def test_a_file_without_a_single_group_of_rows_has_no_rows(tmp_path: Path) -> None:
    """As other writers leave one that was opened and closed."""
    schema = pa.schema([("a", pa.string())])
    path = tmp_path / "x.parquet"
    pq.ParquetWriter(path, schema).close()
    assert pq.ParquetFile(path).num_row_groups == 0
    table = read_table(path.read_bytes(), path, schema, frozenset())
    assert table.num_rows == 0 and table.column_names == ["a"]


def test_every_column_of_a_run_without_checksums_is_looked_at(tmp_path: Path) -> None:
    """Lists need few columns; that the others are whole is shown by a checksum, or by reading."""
    folder = reseal(write_run(tmp_path, night(1)), schema=4)
    assert summarise_runs(tmp_path)[1] == []
    path = folder / MEASUREMENTS
    table = pq.read_table(path)
    spoilt = table.set_column(table.column_names.index("note"), "note", pa.array([1]))
    pq.write_table(spoilt, path)
    [(bad, why)] = summarise_runs(tmp_path)[1]
    assert bad == folder and "the column note of" in why


def test_a_folder_changes_with_what_its_links_lead_to(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    (target := tmp_path / "elsewhere").write_text("before", encoding="utf-8")
    (folder / "run.json").symlink_to(target)
    before = index.signature_of(folder)
    assert index.signature_of(folder) == before
    target.write_text("afterwards", encoding="utf-8")
    assert index.signature_of(folder) != before


@pytest.mark.parametrize("target", ["nowhere", "notes"])
def test_a_link_that_leads_nowhere_hides_no_change_of_a_folder(tmp_path: Path, target: str) -> None:
    """Neither one to a file that is gone nor one to itself."""
    folder = write_run(tmp_path, night(1))
    before = index.signature_of(folder)
    (folder / "notes").symlink_to(target)
    linked = index.signature_of(folder)
    assert index.signature_of(folder) == linked != before
    assert len(list_runs(tmp_path)[0]) == 1
    path = folder / MEASUREMENTS
    path.write_bytes(path.read_bytes()[:-1])
    assert [place for place, _ in list_runs(tmp_path)[1]] == [folder]
    (folder / "notes").unlink()
    (folder / "notes").symlink_to("nowhere" if target == "notes" else "notes")
    assert index.signature_of(folder) != linked


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"lines": 1, "texts": [], "values": {}},
        {"lines": [["a"]], "texts": [], "verified": {}},
        {"lines": [["a", "b", "", None, *range(9)]], "texts": [], "verified": {}},
        {"lines": [["a", "b", "", {}]], "texts": [], "verified": {}},
        {"lines": [["a", "b", "", {"environment": 0, "suites": 1}]], "texts": ["1", "[{}]"]},
        {"lines": [], "texts": [], "verified": {}, "rules": None},
        {"lines": [["a", "b", "damaged", None, 0, 0, "", ""]], "rules": index.RULES - 1},
        {"lines": [["a", "b", "damaged", None, 0, 0, "", ""]], "rules": index.RULES + 1},
    ],
    ids=str,
)
def test_the_index_of_another_version_is_written_anew(tmp_path: Path, document: Any) -> None:
    """Whole as its checksum says, and of other fields."""
    folder = write_run(tmp_path, night(1))
    expected = summarise_runs(tmp_path)
    if isinstance(document, dict):
        document = {"texts": [], "verified": {}, "rules": index.RULES} | document
    content = json.dumps(document).encode()
    digest = hashlib.sha256(content).hexdigest().encode()
    (tmp_path / INDEX).write_bytes(digest + b"\n" + content)
    assert index.read_lines(tmp_path / INDEX) == []
    assert summarise_runs(tmp_path) == expected
    assert [line.name for line in index.read_lines(tmp_path / INDEX)] == [folder.name]


def test_another_process_trusts_the_combined_files_that_were_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all of them again takes seconds in each list of many runs."""
    write_run(tmp_path, night(1))
    before = list_runs(tmp_path)[0]
    list_runs(tmp_path)
    index._seen.clear()
    looks: list[Path] = []
    read = gathered.read_bytes
    monkeypatch.setattr(gathered, "read_bytes", lambda p, n: (looks.append(p), read(p, n))[1])
    assert list_runs(tmp_path)[0] == before and looks == []


def test_an_index_that_another_process_wrote_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / INDEX
    for name in ("a", "b"):
        index.write_lines(path, [Line(name, "signature")])
        folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
        assert [f.name for f in index.unknown_folders(tmp_path, folders)] == [
            other for other in "abc" if other != name
        ]


def test_runs_that_are_read_in_several_batches_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch has a combined file; what has no gates is named in none."""
    monkeypatch.setattr(index, "AT_ONCE", 2)
    names = [write_run(tmp_path, night(day)).name for day in range(1, 6)]
    names.append(write_run(tmp_path, bench(day=6)).name)
    assert [info.folder.name for info in list_runs(tmp_path)[0]] == names
    files = [line.gathered for line in index.read_lines(tmp_path / INDEX)]
    assert files[-1] == "" and [files.index(file) for file in files[:5]] == [0, 0, 2, 2, 4]


@pytest.mark.parametrize("enabled", [True, False])
def test_memory_is_collected_after_a_batch_as_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    write_run(tmp_path, night(1))
    during: list[bool] = []
    whole = index.examine_all
    monkeypatch.setattr(
        index, "examine_all", lambda them: (during.append(gc.isenabled()), whole(them))[1]
    )
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        list_runs(tmp_path)
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert (during, after) == ([False], enabled)


@pytest.mark.parametrize("odd", range(3))
def test_runs_are_combined_whether_their_texts_repeat_or_not(tmp_path: Path, odd: int) -> None:
    """Repeated texts are dictionaries in memory, others plain."""
    found = [examine.examine(write_run(tmp_path, night(day))) for day in (1, 2, 3)]
    found[odd] = in_plain_texts(found[odd])
    files = gathered.Gathered(tmp_path, {})
    name = gathered.gather(files, found)
    runs = pq.read_table(files.path(name))["run"].to_pylist()
    assert runs == [one.name for one in found for _ in range(len(one.rows or ()))]


def test_runs_whose_texts_are_too_many_for_one_file_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise pa.lib.ArrowCapacityError("array cannot contain more than 2147483646 bytes")

    found = [examine.examine(write_run(tmp_path, night(1)))]
    monkeypatch.setattr(gathered.pa, "concat_tables", full)
    assert gathered.gather(gathered.Gathered(tmp_path, {}), found) == ""


def test_one_look_within_another_sees_the_same_runs(tmp_path: Path) -> None:
    """And what a part of an answer does with its list changes no other part."""
    write_run(tmp_path, night(1))
    (tmp_path / "damaged").mkdir()
    with one_look():
        readable, unreadable = list_runs(tmp_path)
        assert (len(readable), len(unreadable)) == (1, 1)
        readable.clear()
        unreadable.clear()
        write_run(tmp_path, night(2))
        with one_look():
            assert [len(part) for part in list_runs(tmp_path)] == [1, 1]
        assert [len(part) for part in list_runs(tmp_path)] == [1, 1]
    assert [len(part) for part in list_runs(tmp_path)] == [2, 1]


def test_a_combined_file_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    files, _ = combined(tmp_path)
    files.path("a").mkdir(parents=True)
    assert not files.holds("a")


def test_an_old_combined_file_stays_while_the_index_names_it(tmp_path: Path) -> None:
    write_run(tmp_path, night(1))
    list_runs(tmp_path)
    [file] = (tmp_path / gathered.FOLDER).iterdir()
    os.utime(file, (0, 0))
    write_run(tmp_path, night(2))
    list_runs(tmp_path)
    assert file.exists() and len(list(file.parent.iterdir())) == 2


def test_one_look_is_at_every_folder_of_runs(tmp_path: Path) -> None:
    for day in (1, 2):
        write_run(tmp_path / str(day), night(day))
    with one_look():
        found = [list_runs(tmp_path / str(day))[0] for day in (1, 2)]
        write_run(tmp_path / "1", night(3))
        found.append(list_runs(tmp_path / "1")[0])
    assert [[it.manifest.id[:10] for it in runs] for runs in found] == [
        ["2026-11-01"],
        ["2026-11-02"],
        ["2026-11-01"],
    ]


def test_combined_files_are_read_in_a_folder_with_any_name(tmp_path: Path) -> None:
    """Also one that DuckDB would take for a pattern."""
    root = tmp_path / "runs [1]"
    for day in (1, 2):
        write_run(root, night(day, measurement(value=day * 1e-6)))
    assert values(root) == values(root) == [1e-6, 2e-6]


def test_the_index_knows_the_machine_of_a_run_without_suites(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(), suites=[]))
    once, twice = (summarise_runs(tmp_path)[0] for _ in range(2))
    index._seen.clear()
    thrice = summarise_runs(tmp_path)[0]
    assert once == twice == thrice and once[0].device == "cpu" and once[0].reference


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_listed_is_another_one_with_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(error, "refused")

    monkeypatch.setattr(index.os, "scandir", refuse)
    assert index.signature_of(tmp_path) == f"unreadable: {error}"


def test_damaged_files_are_told_however_many_there_are(tmp_path: Path) -> None:
    """Also a combined file, which costs the runs whose rows it has and no other."""
    files = [str(write_run(tmp_path, night(day)) / MEASUREMENTS) for day in range(1, 7)]
    together = gathered.Gathered(tmp_path, {})
    found = [examine.examine(Path(file).parent) for file in files]
    whole, damaged = (str(together.path(gathered.gather(together, [found[i]]))) for i in (1, 4))
    for turn in (0, 3):
        Path(files[turn]).write_bytes(b"PAR1")
    Path(damaged).write_bytes(b"PAR1")
    with Table(files, ["", whole, "", "", damaged, ""]) as table:
        answer, broken = table.ask("SELECT run FROM measurements ORDER BY run")
    assert sorted(broken) == [0, 3, 4] and answer["run"].tolist() == [1, 2, 5]


def test_one_look_ends_with_an_error_too(tmp_path: Path) -> None:
    write_run(tmp_path, night(1))
    with pytest.raises(ZeroDivisionError), one_look():
        assert len(list_runs(tmp_path)[0]) == 1
        raise ZeroDivisionError
    write_run(tmp_path, night(2))
    assert len(list_runs(tmp_path)[0]) == 2


def test_a_combined_file_that_was_edited_without_a_trace_of_its_time_is_not_trusted(
    tmp_path: Path,
) -> None:
    """Its size and its time of modification can be set back; that of its last change cannot."""
    files, write = combined(tmp_path)
    path = files.path(name := write("a"))
    os.utime(path, (0, 0))
    assert gathered.Gathered(tmp_path, files.verified).holds(name)
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    # The clock of a file system has steps of some milliseconds.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, (0, 0))
    os.utime(path, (0, 0))
    status = path.stat()
    assert (status.st_size, status.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert not gathered.Gathered(tmp_path, files.verified).holds(name)


def test_a_combined_file_that_did_not_become_what_was_written_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def lost(path: Path) -> Any:
        yield tmp_path / "elsewhere"

    monkeypatch.setattr(gathered, "written_aside", lost)
    assert combined(tmp_path)[1]("a") == ""


def test_a_run_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    """Its line is of the files as they were before."""
    folder = write_run(tmp_path, night(1))
    whole = index.examine_all

    def change_after_reading(folders: Any) -> Any:
        monkeypatch.setattr(index, "examine_all", whole)
        found = whole(folders)
        (folder / "another").write_text("", encoding="utf-8")
        return found

    monkeypatch.setattr(index, "examine_all", change_after_reading)
    for _ in range(3):
        assert len(list_runs(tmp_path)[0]) == 1
    assert reads == [folder.name] * 2


def test_an_index_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / INDEX, index._read
    index.write_lines(path, [Line("a", "signature")])

    def replace_after_reading(place: Path) -> Any:
        monkeypatch.setattr(index, "_read", read)
        found = read(place)
        index.write_lines(path, [Line("b", "signature")])
        return found

    monkeypatch.setattr(index, "_read", replace_after_reading)
    folders = [tmp_path / "a", tmp_path / "b"]
    assert index.unknown_folders(tmp_path, folders) == [tmp_path / "b"]
    assert index.unknown_folders(tmp_path, folders) == [tmp_path / "a"]


def test_an_index_that_was_overwritten_in_place_is_read_again(tmp_path: Path) -> None:
    """By a tool that copies files, for example: it has the inode and size of the one before."""
    path, contents = tmp_path / INDEX, list[bytes]()
    for name in ("a", "b"):
        index.write_lines(path, [Line(name, "signature")])
        contents.append(path.read_bytes())
    folders = [tmp_path / "a", tmp_path / "b"]
    for time_, (content, unknown) in enumerate(zip(contents, folders[::-1], strict=True)):
        path.write_bytes(content)
        os.utime(path, (time_, time_))
        assert index.unknown_folders(tmp_path, folders) == [unknown]


def test_a_file_whose_name_is_no_utf8_is_part_of_its_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path, night(1))
    before = index.signature_of(folder)
    (folder / os.fsdecode(b"b\xfcro")).write_text("", encoding="utf-8")
    assert index.signature_of(folder) != before
    assert [info.folder for info in list_runs(tmp_path)[0]] == [folder]


def test_a_table_is_closed_where_its_block_ends(tmp_path: Path) -> None:
    with Table([]) as table:
        assert table.ask("SELECT run FROM measurements")[0]["run"].tolist() == []
    with pytest.raises(duckdb.Error):
        table.ask("SELECT run FROM measurements")


def test_the_list_that_merges_combined_files_reads_the_merged_one(tmp_path: Path) -> None:
    """Those of before are deleted at once where they are old."""
    measured = [day * 1e-8 for day in range(1, gathered.FEW + 2)]
    for day, value in enumerate(measured, 1):
        if day == len(measured):
            for path in (tmp_path / gathered.FOLDER).iterdir():
                os.utime(path, (0, 0))
        write_run(tmp_path, night(day, measurement(value=value)))
        if day < len(measured):
            list_runs(tmp_path)
    assert values(tmp_path) == measured
    assert len(list((tmp_path / gathered.FOLDER).iterdir())) < gathered.FEW


def test_a_combined_file_that_cannot_be_deleted_ends_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, write = combined(tmp_path)
    os.utime(files.path(write("a")), (0, 0))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        gathered.forget(files, [])
    assert files.verified == {}


def test_only_gates_are_kept_for_histories(tmp_path: Path) -> None:
    fact = measurement(quantity="fact", tolerance=math.nan, verdict=Verdict.INFO)
    found = examine.examine(write_run(tmp_path, night(1, measurement(), fact)))
    assert found.gates == 1 and found.rows is not None
    assert found.rows["quantity"].to_pylist() == ["logits"]
