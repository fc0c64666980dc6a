"""A folder of runs in which something is damaged or hostile: it costs only itself, and is named."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parity.engine.measure.measurement import Verdict
from reports.registry import outcome
from reports.registry.lookback import look_back
from reports.registry.lookup import judge_stored
from reports.registry.outcome import UnjudgedError, store
from reports.store import reader
from reports.store import run as store_run
from reports.store.examine import examine
from reports.store.runs import list_runs, read_run, write_run
from reports.store.schema import StoreError
from reports.store.seal import text_of
from reports.verdict import pins
from tests.helpers import cli
from tests.reports.nights import earlier, explained, failing, finding, measurement, reseal, run

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]


@pytest.fixture(autouse=True)
def no_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "FOLDER", tmp_path / "pinned")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two healthy nights."""
    for day in (18, 19):
        write_run(tmp_path / "runs", earlier(measurement(), day=day, suites=SUITES))
    return tmp_path / "runs"


def rows_of(folder: Path, change: Any) -> Path:
    """Change the rows of a stored run, as somebody would who writes the checksums too."""
    path = folder / "measurements.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), table.schema), path)
    return reseal(folder)


def link_to_itself(root: Path) -> None:
    (root / "2026-11-17T21-30-00Z-0000000").symlink_to("2026-11-17T21-30-00Z-0000000")


def pipe(root: Path) -> None:
    folder = root / "2026-11-17T21-30-00Z-0000000"
    folder.mkdir()
    os.mkfifo(folder / "run.json")


def deep(root: Path) -> None:
    folder = root / "2026-11-17T21-30-00Z-0000000"
    folder.mkdir()
    (folder / "run.json").write_text("[" * 200_000, encoding="utf-8")


def manifest_link(root: Path) -> None:
    folder = root / "2026-11-17T21-30-00Z-0000000"
    folder.mkdir()
    (folder / "run.json").symlink_to("run.json")


def null_value(root: Path) -> None:
    folder = write_run(root, earlier(measurement(), day=17, suites=SUITES))
    rows_of(folder, lambda rows: [{**row, "value": None} for row in rows])


def bad_address(root: Path) -> None:
    (root / ".shared").write_bytes(b"\xff\xfe s3://")


def address_that_leads_nowhere(root: Path) -> None:
    (root / ".shared").symlink_to("gone")


def partial_file(root: Path) -> None:
    (root / f".partial-{run().id}").write_text("", encoding="utf-8")
    os.utime(root / f".partial-{run().id}", (0, 0))


def partial_pipe(root: Path) -> None:
    os.mkfifo(root / f".partial-{run().id}")
    os.utime(root / f".partial-{run().id}", (0, 0))


def rows_in_a_pipe(root: Path) -> None:
    folder = write_run(root, earlier(measurement(), day=17, suites=SUITES))
    (folder / "measurements.parquet").unlink()
    os.mkfifo(folder / "measurements.parquet")


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (link_to_itself, "2026-11-17"),
        (pipe, "2026-11-17"),
        (deep, "2026-11-17"),
        (manifest_link, "2026-11-17"),
        (null_value, "2026-11-17"),
        (rows_in_a_pipe, "2026-11-17"),
        (bad_address, ".shared"),
        (address_that_leads_nowhere, ".shared"),
        (partial_file, ""),
        (partial_pipe, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_neighbour_costs_only_itself(
    root: Path, tmp_path: Path, spoil: Any, name: str
) -> None:
    spoil(root)
    listed = json.loads(cli("list", "--json", "--out", root).stdout)
    assert len(listed["runs"]) == 2
    assert [Path(bad["folder"]).name.startswith(name) for bad in listed["unreadable"]] == (
        [True] if name else []
    )
    assert cli("gate", "latest", "--out", root).exit_code == 0
    history = cli("history", "--json", "--out", root)
    assert (history.exit_code, json.loads(history.stdout)["runs"]) == (0, 2)
    assert cli("compare", "2026-11-18", "2026-11-19", "--out", root).exit_code == 0
    drawn = cli("report", "latest", "--out", root, "--page", tmp_path / "page.html")
    assert drawn.exit_code == 0
    assert cli("prune", "--keep", 1, "--out", root).exit_code == 0
    # The next night is stored and judged.
    done = store(root, run(measurement(), suites=SUITES), lambda line: None)
    assert done.page.is_file() and done.decision and done.decision.word == "PASS"
    assert len(list_runs(root)[0]) == 3


def test_a_damaged_newer_run_makes_latest_incomplete(root: Path) -> None:
    told = cli("gate", "latest", "--out", root)
    assert told.exit_code == 0
    assert "judged: run 2026-11-19T21-30-00Z-0000000, " in told.stdout and " old" in told.stdout
    newest = write_run(root, run(failing(), suites=SUITES))
    assert cli("gate", "latest", "--out", root).exit_code == 1
    (newest / "measurements.parquet").write_bytes(b"PAR1")
    told = cli("gate", "latest", "--out", root)
    assert told.exit_code == 3
    assert told.stdout.startswith("INCOMPLETE: 1 newer folder is damaged")
    assert f"newer, and damaged: {newest.name}: " in told.stdout
    words = json.loads(cli("gate", "latest", "--json", "--out", root).stdout)
    assert (words["verdict"], words["exit_code"]) == ("INCOMPLETE", 3)
    assert words["run"].startswith("2026-11-19")
    assert [Path(bad["folder"]).name for bad in words["damaged"]] == [newest.name]
    # The date of one whose run.json is gone is in its name.
    (newest / "run.json").write_text("{", encoding="utf-8")
    assert cli("gate", "latest", "--out", root).exit_code == 3
    # What was asked for by name is not in doubt.
    assert cli("gate", "2026-11-19", "--out", root).exit_code == 0
    assert cli("gate", newest.name, "--out", root).exit_code == 2


def test_a_damaged_older_run_leaves_latest_as_it_is(root: Path) -> None:
    old = next(p for p in root.iterdir() if p.name.startswith("2026-11-18"))
    (old / "measurements.parquet").write_bytes(b"PAR1")
    told = cli("gate", "latest", "--out", root)
    assert (told.exit_code, "newer, and damaged" in told.stdout) == (0, False)
    assert f"not readable: {old.name}: " in told.stdout


def test_a_flipped_byte_is_named_and_never_another_number(root: Path) -> None:
    folder = write_run(
        root,
        replace(
            run(failing(), *(measurement(quantity=f"q{i}") for i in range(50)), suites=SUITES),
            explanations=(explained(),),
            findings=(finding(),),
        ),
    )
    for name in ("measurements.parquet", "findings.parquet", "explanations.parquet"):
        path = folder / name
        content = path.read_bytes()
        for place in np.linspace(0, len(content) - 1, 6).astype(int):
            flipped = bytearray(content)
            flipped[place] ^= 0x01
            path.write_bytes(flipped)
            with pytest.raises(StoreError, match=rf"{name} is not the file that was stored"):
                read_run(folder)
            assert [f.name for f, _ in list_runs(root)[1]] == [folder.name]
            assert look_back(str(root)).unreadable
        assert look_back(f"{root}/*").unreadable or name != "measurements.parquet"
        path.write_bytes(content)
    assert list_runs(root)[1] == []


@pytest.mark.parametrize("name", ["measurements.parquet", "explanations.parquet"])
def test_a_file_that_is_gone_or_was_added_is_named(root: Path, name: str) -> None:
    whole = write_run(root, replace(run(failing(), suites=SUITES), explanations=(explained(),)))
    (whole / name).rename(whole / "elsewhere")
    with pytest.raises(StoreError, match=name):
        read_run(whole)
    assert [f.name for f, _ in list_runs(root)[1]] == [whole.name]
    other = next(p for p in root.iterdir() if p.name.startswith("2026-11-19"))
    shutil.copyfile(whole / "elsewhere", other / name)
    with pytest.raises(StoreError, match=name):
        read_run(other)


def test_a_run_of_todays_schema_without_checksums_is_damaged(root: Path) -> None:
    folder = next(iter(sorted(root.glob("2026*"))))
    content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del content["files"]
    (folder / "run.json").write_text(text_of(content), encoding="utf-8")
    with pytest.raises(StoreError, match=r"expected a checksum of .*measurements\.parquet"):
        read_run(folder)
    # One of schema 4 never had any: it is read and said to be unchecked, and no gate was planned.
    reseal(folder, schema=4)
    told = cli("gate", folder.name, "--out", root)
    assert told.exit_code == 3 and "stored by schema 4" in told.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"value": -1.0}, Verdict.FAIL),
        ({"tolerance": math.inf}, Verdict.NOT_COMPARABLE),
        ({"value": math.inf, "tolerance": math.inf}, Verdict.FAIL),
        ({"value": 5e-6}, Verdict.FAIL),
        ({"value": 0.0}, Verdict.PASS),
    ],
)
def test_a_verdict_is_that_of_the_numbers(root: Path, changes: Any, expected: Verdict) -> None:
    folder = write_run(root, run(measurement(), suites=SUITES))
    rows_of(folder, lambda rows: [{**row, **changes} for row in rows])
    assert [m.verdict for m in read_run(folder).measurements] == [expected]
    listed = json.loads(cli("list", "--json", "--out", root).stdout)["runs"]
    assert [r["broken"] for r in listed if r["id"] == folder.name] == [
        int(expected is not Verdict.PASS)
    ]
    assert (judge_stored(folder).decision.exit_code == 0) is (expected is Verdict.PASS)


@pytest.mark.parametrize("name", ["cases", "parts", "contract", "times"])
@pytest.mark.parametrize("value", [5, "x", {"a": 1}, [5], [{"name": 5, "suite": 5, "case": 5}]])
def test_a_list_that_is_none_is_named_by_lists_too(root: Path, name: str, value: Any) -> None:
    """Lists leave these fields out, and a sealed run may still come from a faulty writer."""
    folder = write_run(root, run(measurement(), suites=SUITES))
    reseal(folder, **{name: value})
    [(bad, why)] = list_runs(root)[1]
    assert bad == folder and f"`$.{name}" in why


def test_a_whole_number_beyond_float64_is_refused(root: Path) -> None:
    times = [{"suite": "a", "case": "b", "seconds": 10**400}]
    folder = reseal(write_run(root, run(measurement(), suites=SUITES)), times=times)
    [(bad, why)] = list_runs(root)[1]
    assert bad == folder and "`$.times[0].seconds`" in why


@pytest.mark.parametrize("suite", [{"name": "a", "\ud800": 1}, {"name": "a", "planned": "\udfff"}])
def test_half_of_a_surrogate_pair_costs_only_its_run(root: Path, suite: dict[str, Any]) -> None:
    """JSON can escape it, and UTF-8 has no such text."""
    good = write_run(root, run(measurement(), created="2026-11-18T21:30:00+00:00", suites=SUITES))
    bad = write_run(root, run(measurement(), suites=SUITES))
    reseal(bad, suites=[suite])
    readable, [(folder, why)] = list_runs(root)
    assert folder == bad and "surrogates not allowed" in why
    assert {good} <= {each.folder for each in readable}


def test_a_row_that_is_there_twice_is_named(root: Path) -> None:
    folder = write_run(root, run(measurement(), failing(quantity="loss"), suites=SUITES))
    rows_of(folder, lambda rows: [*rows, {**rows[1], "value": 1e-6, "verdict": "pass"}])
    twice = pytest.raises(
        StoreError, match=r"baseline \| .*loss \| rel_l2 is there twice, in row 2"
    )
    with twice:
        read_run(folder)
    assert [f for f, _ in list_runs(root)[1]] == [folder]
    # Nor may a run of schema 3, whose rows have no suite, have a row twice.
    path = folder / "measurements.parquet"
    pq.write_table(pq.read_table(path).drop_columns("suite"), path)
    reseal(folder, schema=3)
    with twice:
        read_run(folder)


def test_a_row_that_is_there_twice_is_found_in_the_only_run_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement(), suites=SUITES))
    rows_of(folder, lambda rows: [*rows, *rows])
    [(bad, why)] = list_runs(tmp_path)[1]
    assert bad == folder and "is there twice" in why


@pytest.mark.parametrize("again", [None, 0, 6])
def test_repeated_keys_are_found(again: int | None) -> None:
    """Rows that share three of the four parts of a key are different rows."""
    parts = [(c, e, q, m) for c in "ab" for e in "ef" for q in "qr" for m in "mn"][:7]
    rows = parts if again is None else [*parts, parts[again]]
    columns = zip(*rows, strict=True)
    names = ("case", "edge", "quantity", "metric")
    table = pa.table(
        {n: pa.array(c).dictionary_encode() for n, c in zip(names, columns, strict=True)}
    )
    if again is None:
        store_run.check_keys(table, Path("x"))
    else:
        with pytest.raises(StoreError, match=f"{' . '.join(parts[again])} is there twice.* row 7"):
            store_run.check_keys(table, Path("x"))


@pytest.mark.parametrize("text", [b"quantity", b"logits"], ids=["name", "value"])
def test_texts_that_are_no_utf8_are_damage_even_with_a_checksum_that_fits(
    root: Path, text: bytes
) -> None:
    folder = write_run(root, run(measurement(), suites=SUITES))
    path = folder / "measurements.parquet"
    pq.write_table(pq.read_table(path), path, compression="none", write_statistics=False)
    content = path.read_bytes()
    assert text in content
    path.write_bytes(content.replace(text, b"\xb2" + text[1:]))
    reseal(folder)
    with pytest.raises(StoreError, match=r"measurements\.parquet"):
        read_run(folder)
    [(bad, why)] = list_runs(root)[1]
    assert (bad, "measurements.parquet" in why) == (folder, True)


def bomb(path: Path, kind: str) -> None:
    if kind == "rows":
        table = pq.read_table(path)
        long = [{**row, "quantity": f"q{i}"} for row in table.to_pylist() for i in range(1000)]
        pq.write_table(pa.Table.from_pylist(long, table.schema), path)
    else:
        table = pq.read_table(path).to_pylist()
        long = [{**r, "note": "x" * 200_000, "quantity": f"q{i}"} for i in range(4) for r in table]
        pq.write_table(pa.Table.from_pylist(long, pq.read_schema(path)), path,
                       compression="zstd", use_dictionary=kind == "dictionary")  # fmt: skip


@pytest.mark.parametrize("kind", ["rows", "texts", "dictionary"])
def test_what_unpacks_to_too_much_is_refused(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(root, run(measurement(), suites=SUITES))
    bomb(folder / "measurements.parquet", kind)
    reseal(folder)
    assert read_run(folder).measurements
    monkeypatch.setattr(reader, "ROWS", 100)
    monkeypatch.setattr(reader, "UNPACKED_BYTES", 300_000)
    with pytest.raises(StoreError, match="would unpack to"):
        read_run(folder)


def test_names_are_never_printed_raw(root: Path) -> None:
    evil = "q\x1b[31m\x00\u202e"
    rows = [failing(case=evil, quantity=evil, note=evil, metric=evil)]
    folder = write_run(root, run(*rows, suites=SUITES, fault=evil))
    hostile = root / "2026-12-01\x1b[31m"
    hostile.mkdir()
    for command in (
        ("list",), ("gate", folder.name), ("gate", "latest"), ("history",), ("prune",),
        ("compare", "2026-11-19", folder.name), ("history", evil), ("gate", evil),
        ("export", folder.name, "junit"),
    ):  # fmt: skip
        told = cli(*command, "--out", root)
        for sign in "\x1b\x00\u202e":
            assert sign not in told.output, command


def test_numbers_are_stored_before_they_are_judged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bad pin")

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "judge", fail)
        with pytest.raises(UnjudgedError, match=r"is stored in .*gate .*report .*") as caught:
            store(root, run(measurement(), suites=SUITES), lambda line: None)
    [folder] = list(root.glob("2026-11-20*"))
    assert "a bad pin" in str(caught.value)
    assert read_run(folder).measurements == (measurement(),)
    assert read_run(folder).manifest.verdict == ""
    assert {p.name for p in folder.iterdir()} == {
        "run.json", "measurements.parquet", "findings.parquet"
    }  # fmt: skip
    assert "gate RUN" in cli("list", "--out", root).output
    assert cli("gate", folder.name, "--out", root).exit_code == 0

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "render", fail)
        with pytest.raises(RuntimeError, match="page could not be drawn"):
            store(root, run(measurement(), suites=SUITES), lambda line: None)
    [second] = list(root.glob("2026-11-20*-2"))
    assert read_run(second).manifest.verdict == "PASS"


def test_a_verdict_is_about_the_numbers_it_was_made_of(root: Path) -> None:
    folder = store(root, run(measurement(), suites=SUITES), lambda line: None).folder
    assert [r["verdict"] for r in listed(root)][-1] == "PASS"
    reseal(folder, commit="0" * 12)
    assert [r["verdict"] for r in listed(root)][-1] == ""


def listed(root: Path) -> list[dict[str, Any]]:
    return json.loads(cli("list", "--json", "--out", root).stdout)["runs"]


def test_the_verdict_is_reported_though_the_disk_is_full(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreError("No space left on device")

    monkeypatch.setattr(outcome, "write_run", full)
    lines: list[str] = []
    with pytest.raises(StoreError, match="No space left"):
        store(root, run(failing(), suites=SUITES), lines.append)
    assert lines == ["verdict: REGRESSED"]


def test_a_few_rows_of_endless_lists_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values of a list take no room in the file and all of it in memory."""
    lists = pa.list_(pa.float64())
    schema = pa.schema([("few", lists), ("rounds", lists)])

    def read(*values: int) -> pa.Table:
        buffer = pa.BufferOutputStream()
        rows = {"few": [[1.0]] * len(values), "rounds": [[1.0] * count for count in values]}
        pq.write_table(pa.table(rows, schema=schema), buffer, row_group_size=1)
        return reader.read_table(buffer.getvalue().to_pybytes(), Path("f"), schema, frozenset())

    monkeypatch.setattr(reader, "VALUES", 1000)
    assert read(1000).num_rows == 1 and read(1, 998, 1).num_rows == 3
    # Groups of rows count together, because all of them are read.
    for values in ((1001,), (1, 1001), (1001, 1), (400, 400, 400)):
        told = rf"unpack to {len(values)} rows, {sum(values):,} values .*rows, 1,000 values"
        with pytest.raises(StoreError, match=told):
            read(*values)


def test_row_groups_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of many groups, each below the limit, takes the memory of all of them."""
    schema = pa.schema([("value", pa.float64())])
    buffer = pa.BufferOutputStream()
    table = pa.table({"value": np.arange(1000.0)}, schema=schema)
    pq.write_table(table, buffer, row_group_size=100, use_dictionary=False)
    stored = buffer.getvalue().to_pybytes()

    monkeypatch.setattr(reader, "UNPACKED_BYTES", 12_000)
    assert reader.read_table(stored, Path("f"), schema, frozenset()).num_rows == 1000
    monkeypatch.setattr(reader, "UNPACKED_BYTES", 6_000)
    with pytest.raises(StoreError, match="would unpack to 1,000 rows"):
        reader.read_table(stored, Path("f"), schema, frozenset())


def test_a_column_that_is_there_twice_is_damage(root: Path) -> None:
    table = pa.table({"value": [1.0]}).append_column("value", pa.array([2.0]))
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    schema = pa.schema([("value", pa.float64())])
    with pytest.raises(StoreError, match=r"each column once in x.parquet, .* value more often"):
        reader.read_table(buffer.getvalue().to_pybytes(), Path("x.parquet"), schema, frozenset())


def parquet(**columns: Any) -> tuple[bytes, pa.Schema]:
    """The bytes of a file of these columns, and its schema."""
    buffer, table = pa.BufferOutputStream(), pa.table(columns)
    pq.write_table(table, buffer)
    return buffer.getvalue().to_pybytes(), table.schema


@pytest.mark.parametrize(("limit", "read"), [(100, True), (99, False)])
def test_rows_are_counted_however_little_each_takes(
    monkeypatch: pytest.MonkeyPatch, limit: int, read: bool
) -> None:
    content, schema = parquet(value=[1.0] * 100)
    monkeypatch.setattr(reader, "ROWS", limit)
    if read:
        assert reader.read_table(content, Path("f"), schema, frozenset()).num_rows == 100
    else:
        with pytest.raises(StoreError, match="f would unpack to 100 rows"):
            reader.read_table(content, Path("f"), schema, frozenset())


def test_many_columns_of_little_text_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = pa.array(["x"] * 10).dictionary_encode()
    table = pa.table({str(n): texts for n in range(100)})
    most = len(texts) * texts.dictionary.nbytes
    for columns, read in ((64, True), (65, False)):
        monkeypatch.setattr(reader, "UNPACKED_BYTES", 64 * most)
        some = table.select(table.column_names[:columns])
        if read:
            reader._check_texts(some, Path("f"))
        else:
            with pytest.raises(StoreError, match=f"to {65 * most:,} bytes of text"):
                reader._check_texts(some, Path("f"))


def test_texts_of_all_columns_count_together_and_null_counts_as_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a dictionary a text takes its room once, and in the rows of a run as often as it is."""
    texts = ["x" * 1000, None] * 20
    content, schema = parquet(one=texts, two=texts, three=texts)
    for limit in (60_000, 59_999):
        monkeypatch.setattr(reader, "UNPACKED_BYTES", limit)
        if limit == 60_000:
            assert reader.read_table(content, Path("f"), schema, frozenset()).num_rows == 40
        else:
            with pytest.raises(StoreError, match="to 60,000 bytes of text, more than the 59,999"):
                reader.read_table(content, Path("f"), schema, frozenset())


@pytest.mark.parametrize("gigabytes", [3, 5])
def test_more_text_than_fits_in_32_bits_is_counted(gigabytes: int) -> None:
    """One long text takes its room in the file once, however many rows have it."""
    long, rows = "x" * 10**6, gigabytes * 1000
    texts = pa.DictionaryArray.from_arrays(np.zeros(rows, "int16"), [long])
    with pytest.raises(StoreError, match=f"f would unpack to {rows * len(long):,} bytes of text"):
        reader._check_texts(pa.table({"note": texts}), Path("f"))


def test_a_column_of_another_type_is_named_with_both(tmp_path: Path) -> None:
    content, _ = parquet(value=[{"{a}": 1}])
    schema = pa.schema([("value", pa.float64())])
    for name in ("f", "g"):
        said = rf"column value of {name} to be of type double, received struct<\{{a\}}: int64>"
        with pytest.raises(StoreError, match=said):
            reader.read_table(content, Path(name), schema, frozenset())


def test_a_link_to_a_file_is_no_damaged_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert list_runs(tmp_path) == ([], [])


def test_columns_are_read_in_the_order_in_which_they_are_asked_for() -> None:
    """Tables of runs are joined, though another writer has them in another order."""
    content, schema = parquet(a=["x"], b=[1.0])
    for asked in (schema, pa.schema([schema.field("b"), schema.field("a")])):
        table = reader.read_table(content, Path("f"), asked, frozenset())
        assert table.column_names == asked.names


def test_one_null_among_values_is_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement(), measurement(quantity="loss"), suites=SUITES))
    rows_of(folder, lambda rows: [rows[0], {**rows[1], "value": None}])
    with pytest.raises(StoreError, match="a value in every row of the columns value of"):
        read_run(folder)


def test_a_verdict_of_a_later_version_is_a_gate_that_does_not_pass(tmp_path: Path) -> None:
    """In a list, which judges columns; reading the run asks for an update."""
    folder = write_run(tmp_path, run(measurement(), measurement(quantity="loss"), suites=SUITES))
    rows_of(folder, lambda rows: [rows[0], {**rows[1], "verdict": "odd", "tolerance": math.nan}])
    found = examine(folder)
    assert (found.gates, found.broken, found.why) == (2, 1, "")
    with pytest.raises(StoreError, match="update megalodon-numerics"):
        read_run(folder)


@pytest.mark.parametrize("target", ["gone", "itself"])
@pytest.mark.parametrize("name", [".shared", "itself"])
def test_a_link_that_leads_nowhere_is_named_and_ends_no_list(
    tmp_path: Path, name: str, target: str
) -> None:
    """It may be the run, or the address, of a disk that is not mounted."""
    (tmp_path / name).symlink_to(target)
    readable, [(bad, why)] = list_runs(tmp_path)
    assert (readable, bad) == ([], tmp_path / name) and why
