"""What is written is what is read: every field of a run, of a line of the index and of a row."""

from __future__ import annotations

import errno
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parity.engine.measure.contract import ContractLine
from parity.engine.measure.deviation import Deviation, Worst
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.programs.explanation import Explanation
from parity.engine.programs.source_lines import Line as SourceLine
from reports.store import manifest as manifests
from reports.store.explanations import EXPLANATIONS, read_explanations, write_explanations
from reports.store.index import Line, read_index, read_lines, slim, write_lines
from reports.store.manifest import (
    CaseInfo,
    CheckpointInfo,
    Device,
    Environment,
    Manifest,
    PartInfo,
    ReferenceInfo,
    SuiteResult,
    Time,
)
from reports.store.objects import Objects
from reports.store.reader import checksum
from reports.store.run import Run, read_run
from reports.store.runs import run_folders
from reports.store.schema import (
    MANIFEST,
    MEASUREMENTS,
    MIGRATIONS,
    PAGE,
    SCHEMA,
    TIMINGS,
    VERDICT,
    RunKind,
    StoreError,
    migrate,
)
from reports.store.seal import text_of
from reports.store.shared import open_copy
from reports.store.tensors import TENSORS, read_tensors, write_tensors
from reports.store.timings import AT_MOST, LESS_IS_BETTER, Timing
from reports.store.writer import rewrite_run, write_run
from stability.core.findings import Finding, Severity
from tests.reports.nights import finding, measurement, reseal

ROWS = (SuiteResult, CaseInfo, CheckpointInfo, PartInfo, Time, ContractLine, Device, ReferenceInfo)


def full(kind: type, name: str = "x") -> Any:
    """One of a dataclass of the store, each field with a value of its own, none of them default."""
    types = typing.get_type_hints(kind, vars(manifests) | {"Sequence": typing.Sequence})
    values = {}
    for turn, f in enumerate(fields(kind)):
        values[f.name] = value_of(types[f.name], f"{name}-{f.name}", turn + 1)
    return kind(**values)


def value_of(wanted: Any, name: str, number: int) -> Any:
    if wanted is RunKind:
        return RunKind.PYTEST
    if is_dataclass(wanted):
        return full(typing.cast(type, wanted), name)
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    simple = {str: name, int: number, float: number + 0.5, bool: True}
    if wanted in simple:
        return simple[wanted]
    if origin is tuple:
        return tuple(value_of(inner[0], f"{name}{i}", number + i) for i in range(2))
    if origin is Mapping:
        if inner[1] is Any:
            return {f"{name}-key": [name, number]}
        return {f"{name}-key": value_of(inner[1], name, number)}
    if origin is not None and issubclass(origin, typing.Sequence):  # pyright: ignore
        return [number + 0.25, number + 0.75]
    # Of several types the first.
    return value_of(inner[0], name, number)


def whole() -> Manifest:
    made = full(Manifest)
    return replace(made, created="2026-11-20T21:30:00+00:00", migrated_from=None)


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_every_field_of_a_manifest_is_read_as_it_was_written() -> None:
    made = whole()
    # Nothing here is a default, or its loss would be its value.
    for f in fields(Manifest):
        if f.name != "migrated_from":
            assert getattr(made, f.name) != default_of(f), f.name
    document = as_json(made.to_json())
    again = Manifest.from_json(document)
    for f in fields(Manifest):
        assert as_json(plain(getattr(again, f.name))) == as_json(plain(getattr(made, f.name))), f
    assert document["schema"] == SCHEMA and "environment" not in document
    assert {f.name for f in fields(Environment)} <= document.keys()
    assert again.checkpoint is not None and made.checkpoint is not None
    # Of these, equality does not speak.
    assert (again.files, again.checkpoint.folder) == (made.files, made.checkpoint.folder)


def plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return list(map(plain, value)) if isinstance(value, tuple) else value


def default_of(f: Field[Any]) -> object:
    return f.default_factory() if f.default_factory is not MISSING else f.default


@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.__name__)
def test_a_part_of_a_document_has_the_types_that_it_says(kind: type) -> None:
    """Null is what is not there; any other type is refused with the path of the field."""
    document, made = as_json(plain(full(kind))), full(kind)
    assert manifests.typed(kind, document) == made
    assert manifests.typed(kind, document | {"more": 1}) == made
    for f in fields(kind):
        default = default_of(f)
        if default is MISSING:
            with pytest.raises(StoreError, match=f"missing required field `{f.name}`"):
                manifests.typed(kind, document | {f.name: None})
        else:
            found = manifests.typed(kind, document | {f.name: None})
            assert getattr(found, f.name) == default
    for wrong in (None, [], "text", 1):
        with pytest.raises(StoreError, match="Expected `object`, got"):
            manifests.typed(kind, wrong)
    for f in fields(kind):
        for wrong in ([1.5], {"a": {"b": [1]}}):
            if "Any" in str(f.type) and isinstance(wrong, dict):
                continue
            with pytest.raises(StoreError, match=rf"Expected .* at `\$\.{f.name}"):
                manifests.typed(kind, document | {f.name: wrong})


LISTS = ("suites", "cases", "parts", "contract", "times", "selected", "tolerances", "seams")


@pytest.mark.parametrize("name", (*LISTS, "plan", "shards", "ports"))
def test_what_must_be_a_list_is_refused_as_anything_else(name: str) -> None:
    document = as_json(whole().to_json())
    assert getattr(Manifest.from_json({**document, name: None}), name) == ()
    for wrong in ({"a": 1}, "text", 3):
        with pytest.raises(StoreError, match=rf"Expected `array`, got .* at `\$\.{name}`"):
            Manifest.from_json({**document, name: wrong})


def test_only_what_says_nothing_is_left_out_of_a_document() -> None:
    empty = Manifest("id", "2026-11-20T21:30:00+00:00")
    document = empty.to_json()
    optional = {"workload", "shard", "plan", "contract", "shards", "parts", "ports", "verdict"}
    optional |= {"code", "times"}
    names = {f.name for f in fields(Manifest)} - {"environment", "migrated_from"}
    names |= {f.name for f in fields(Environment)} | {"schema"}
    assert document.keys() == names - optional
    assert whole().to_json().keys() == names
    assert Manifest.from_json(as_json(document)) == replace(empty, shard=None)


@pytest.mark.parametrize(
    ("status", "planned", "executed", "is_whole"),
    [
        ("ran", 2, 2, True),
        ("ran", 2, 1, False),
        ("ran", 2, 3, False),
        ("ran", 0, 0, False),
        ("failed", 2, 2, False),
        ("skipped", 2, 2, False),
    ],
)
def test_a_night_is_whole_where_every_suite_is(
    status: str, planned: int, executed: int, is_whole: bool
) -> None:
    suite = SuiteResult("a", planned, executed, "", status)
    good = SuiteResult("b", 1, 1, "", "ran")
    night = Manifest("id", "now", suites=(good, suite))
    assert suite.whole is night.whole is is_whole
    if is_whole:
        for changes in ({"fault": "f"}, {"selected": ("a",)}, {"suites": ()}):
            assert not replace(night, **changes).whole


def port(*names: str, kind: RunKind = RunKind.PORT) -> Manifest:
    return Manifest("id", "now", kind=kind, suites=tuple(map(SuiteResult, names)))


def test_runs_share_a_subject_where_they_are_of_one_kind_and_about_one_port() -> None:
    assert port("p", "q").subject == {"p", "q"}
    assert port("p", kind=RunKind.NIGHTLY).subject == frozenset()
    for one, other, shared in (
        (port("p"), port("p"), True),
        (port("p"), port("q"), False),
        (port("p", "q"), port("q", "r"), True),
        (port("p", kind=RunKind.NIGHTLY), port("q", kind=RunKind.NIGHTLY), True),
        (port("p", kind=RunKind.NIGHTLY), port("p", kind=RunKind.PYTEST), False),
        (port("p"), port("p", kind=RunKind.NIGHTLY), False),
    ):
        assert one.shares_subject(other) is other.shares_subject(one) is shared


def test_tests_without_megalodon_chose_no_reference() -> None:
    alone = Manifest("id", "now", kind=RunKind.PYTEST, ports=({"title": "p"},))
    assert alone.without_megalodon
    live, recorded, absent, originals = (
        {"environment": Environment(reference=ReferenceInfo(kind))}
        for kind in ("live", "recorded", "absent", "torch and flax")
    )
    # A test may also record measurements without the report of a port.
    for changes in (originals, {"ports": ()}):
        assert replace(alone, **changes).without_megalodon
    for changes in ({"kind": RunKind.PORT}, live, recorded, absent):
        assert not replace(alone, **changes).without_megalodon


def test_the_index_keeps_what_lists_ask_for_and_nothing_else(tmp_path: Path) -> None:
    manifest = whole()
    bulky = {"tolerances", "seams", "times", "cases", "ports", "parts", "plan", "contract"}
    bulky |= {"spreads", "stability", "workload", "checkpoint", "files"}
    kept = slim(manifest)
    for f in fields(Manifest):
        if f.name in bulky:
            assert not getattr(kept, f.name), f.name
        else:
            assert getattr(kept, f.name) == getattr(manifest, f.name), f.name
    lines = [
        Line("a", "signature", "", kept, 3, 1, "work", "values"),
        Line("b", "other", "damaged: why"),
        # The same environment and suites, and others.
        Line("c", "third", "", replace(kept, id="c", selected=(), dirty=False), 4, 2, "w", "v"),
        Line("d", "fourth", "", replace(kept, environment=Environment(), suites=()), 0, 0),
    ]
    path = tmp_path / "index.json"
    write_lines(path, lines, {"values": "status"})
    found = read_lines(path)
    assert [replace(line, manifest=None) for line in found] == [
        replace(line, manifest=None) for line in lines
    ]
    for line, again in zip(lines, found, strict=True):
        if line.manifest is None:
            assert again.manifest is None
            continue
        assert again.manifest is not None
        for f in fields(Manifest):
            then, now = (plain(getattr(it.manifest, f.name)) for it in (line, again))
            assert as_json(now) == as_json(then), f.name
    for damage in (b"", b"x", path.read_bytes()[:-1], path.read_bytes() + b" "):
        path.write_bytes(damage)
        assert read_lines(path) == []


def test_an_index_is_read_up_to_a_limit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reports.store import index, reader

    path = tmp_path / "index.json"
    write_lines(path, [Line("a", "s")])
    size = path.stat().st_size
    # That of any other JSON file is another one.
    monkeypatch.setattr(reader, "JSON_BYTES", size - 1)
    for limit, found in ((size, 1), (size - 1, 0)):
        monkeypatch.setattr(index, "INDEX_BYTES", limit)
        assert len(read_lines(path)) == found
    with pytest.raises(StoreError):
        reader.read_bytes(path, size - 1)
    assert len(reader.read_bytes(path, size)) == size


def test_a_folder_is_read_again_where_anything_of_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reports.store import examine, index

    folders = [write_run(tmp_path, stored(f"r{i}")) for i in range(3)]
    asked: list[str] = []
    read = examine._read

    def counted(folder: Path, only: bool) -> Any:
        asked.append(folder.name)
        return read(folder, only)

    monkeypatch.setattr(examine, "_read", counted)
    lines = read_index(tmp_path, folders)
    # The gates of all of them lie together, in one file that is named after its content.
    [together] = {line.gathered for line in lines}
    assert (tmp_path / ".values" / f"{together}.parquet").is_file()
    assert asked == ["r0", "r1", "r2"] and [line.name for line in lines] == asked
    assert read_index(tmp_path, folders[::-1]) == lines and len(asked) == 3
    (folders[1] / MEASUREMENTS).touch()
    assert len(read_index(tmp_path, folders)) == 3 and asked[3:] == ["r1"]
    # Without `keep` nothing is learnt, and nothing is forgotten.
    before = (tmp_path / index.INDEX).read_bytes()
    (folders[2] / MEASUREMENTS).touch()
    read_index(tmp_path, folders, keep=False)
    assert (tmp_path / index.INDEX).read_bytes() == before and asked[4:] == ["r2"]
    # A folder that is gone leaves the index.
    assert [line.name for line in read_index(tmp_path, folders[:2])] == ["r0", "r1"]
    assert [line.name for line in read_lines(tmp_path / index.INDEX)] == ["r0", "r1"]


def stored(name: str) -> Run:
    row = measurement()
    return Run(replace(Manifest(name, "2026-11-20T21:30:00+00:00"), code="c"), (row,))


def test_every_field_of_every_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = (
        measurement(note="n", deterministic=None, stage=-1, device="cuda", suite="s"),
        measurement(quantity="q", kind=Kind.BLOCK, value=math.inf, verdict=Verdict.FAIL),
        measurement(quantity="r", deterministic=False, dtype="bfloat16", identity="i"),
    )
    found = (finding(remedy="r", severity=Severity.WARNING, value=3.0), finding(probe="p"))
    worst = Worst((1, 2), math.nan, 0.5), Worst((0, 3), 7.0, math.inf)
    tensor = Deviation("c", "e", "q", "float32", (2, 4), (1, 2, 3), worst, 5, "rows 1")
    stages = (Stage("s", 1.0, 2.0, 3.0), Stage("t", math.inf, 0.0, 0.5))
    account = Explanation(
        "c", "e", "q", 1.0, 2.0, "m", stages, worst[0], ("p", "q"), "note", "where",
        (SourceLine("a.py:3", "why", "text"),),
    )  # fmt: skip
    accounts = account, replace(account, case="d", worst=None, lines=(), stages=())
    made = Run(
        Manifest("run", "2026-11-20T21:30:00+00:00"), rows, found,
        tensors=(tensor, replace(tensor, case="d", worst=()),
                 replace(tensor, case="e", shape=(), worst=(replace(worst[0], index=()),))),
        explanations=accounts,
    )  # fmt: skip
    again = read_run(write_run(tmp_path, made))
    assert (again.measurements, again.findings) == (made.measurements, made.findings)
    assert repr(again.tensors) == repr(made.tensors)
    assert repr(again.explanations) == repr(made.explanations)
    times = (
        Timing("w", "ratio", 2.0, 1.5, (1.0, 2.0, math.inf), "float32", "cpu", "i", "n"),
        Timing("w", "jax_seconds", math.nan, math.nan, (), "float32", "cpu", "i"),
    )
    bench = Run(Manifest("b", "2026-11-20T21:30:00+00:00", kind=RunKind.BENCH), timings=times)
    assert repr(read_run(write_run(tmp_path, bench)).timings) == repr(times)
    assert all(isinstance(f, Finding) for f in again.findings)


@pytest.mark.parametrize(
    ("metric", "value", "goal", "reached"),
    [
        ("ratio", 2.0, 2.0, True),
        ("ratio", 1.9, 2.0, False),
        ("ratio", 2.1, 2.0, True),
        ("token_ratio", 2.0, 2.0, True),
        ("token_ratio", 1.9, 2.0, True),
        ("token_bytes_ratio", 2.1, 2.0, False),
        ("ratio", math.nan, 2.0, None),
        ("ratio", 2.0, math.nan, None),
        ("ratio", math.inf, 2.0, True),
    ],
)
def test_a_goal_is_the_least_wanted_or_of_ratios_over_tokens_the_most(
    metric: str, value: float, goal: float, reached: bool | None
) -> None:
    made = Timing("w", metric, value, goal, (1.0,) * 3, "float32", "cpu", "i")
    assert made.reached is reached and made.repeats == 3
    assert {"token_ratio", "token_bytes_ratio"} == AT_MOST < LESS_IS_BETTER
    assert {"floor_ratio"} == LESS_IS_BETTER - AT_MOST


def test_an_older_manifest_is_read_as_each_newer_one_in_turn(tmp_path: Path) -> None:
    steps = {
        1: {"kind": "nightly", "host": {}, "spreads": {}, "files": None},
        2: {"host": {}, "spreads": {}, "files": None},
        3: {"files": None},
        4: {"files": None},
    }
    assert steps.keys() == MIGRATIONS.keys() == set(range(1, SCHEMA))
    for schema, added in steps.items():
        found = migrate({"schema": schema, "id": "i"}, tmp_path)
        assert found == {"id": "i", "schema": SCHEMA, "migrated_from": schema, **added}
        # What an older run says of itself stays, but for files that nothing checks.
        own = {"kind": "port", "host": {"a": "b"}, "spreads": {"c": [1]}}
        assert own.items() <= migrate({"schema": schema, **own}, tmp_path).items()
    assert migrate({"schema": SCHEMA}, tmp_path) == {"schema": SCHEMA}
    for wrong in (0, -1, None, "5", True, 5.0):
        with pytest.raises(StoreError, match="expected a schema from 1"):
            migrate({"schema": wrong}, tmp_path)
    with pytest.raises(StoreError, match=r"newer than .* update"):
        migrate({"schema": SCHEMA + 1}, tmp_path)


def test_a_run_that_is_watched_is_replaced_with_its_page_and_verdict(tmp_path: Path) -> None:
    """Folder and page are exchanged as one."""
    first = Run(Manifest("w", "2026-11-20T21:30:00+00:00", kind=RunKind.WATCH), (), (finding(),))
    folder = write_run(tmp_path, first)
    later = replace(first, findings=(finding(value=3.0), finding(subject="s")))
    later = replace(later, manifest=replace(first.manifest, verdict="PASS", commit="c"))
    rewrite_run(folder, later, "<p>page</p>")
    again = read_run(folder)
    assert again.findings == later.findings
    assert (again.manifest.commit, again.manifest.verdict) == ("c", "PASS")
    assert (folder / PAGE).read_text(encoding="utf-8") == "<p>page</p>"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    with pytest.raises(StoreError, match="to hold rows for findings"):
        rewrite_run(folder, replace(later, measurements=(measurement(),)), "")
    assert read_run(folder).findings == later.findings


def test_a_watched_run_has_its_page_and_verdict_before_a_reader_sees_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reports.store import writer

    first = Run(Manifest("w", "2026-11-20T21:30:00+00:00", kind=RunKind.WATCH), (), (finding(),))
    folder = write_run(tmp_path, first)
    seen: list[tuple[Finding, ...]] = []
    add_verdict = writer.add_verdict

    def watched(place: Path, *rest: str) -> None:
        seen.append(read_run(folder).findings)
        add_verdict(place, *rest)

    monkeypatch.setattr(writer, "add_verdict", watched)
    later = replace(first, findings=(finding(value=3.0),))
    rewrite_run(folder, later, "<p>page</p>")
    assert seen == [first.findings] and read_run(folder).findings == later.findings


def test_a_run_on_shared_storage_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reports.registry import outcome

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"file://{tmp_path / 'runs'}"
    root, said = open_copy(address), list[str]()
    shard = Run(Manifest("s", "2026-11-20T21:30:00+00:00", kind=RunKind.SHARD), (measurement(),))
    made = outcome.store(root, shard, said.append)
    assert said == [f"stored in {address}/s; a copy is on this machine"]
    assert (made.folder, made.decision) == (root / "s", None)
    assert (tmp_path / "runs" / "s" / MEASUREMENTS).is_file()
    # The name is taken there, for ever.
    again = outcome.store(root, shard, said.append)
    assert said[1:] == [
        "the name s was taken; the run is stored as s-2",
        f"stored in {address}/s-2; a copy is on this machine",
    ]
    assert again.run.id == again.folder.name == "s-2"
    here = tmp_path / "here"
    assert outcome.store(here, shard, said.append).folder == here / "s" and len(said) == 3


@pytest.mark.parametrize("how", ["shorter", "longer", "gone"])
def test_what_is_not_what_was_listed_is_no_run_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A file that was cut on the way is fetched again, and is never half a run here."""
    address = f"file://{tmp_path / 'runs'}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    write_run(open_copy(address), stored("r"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    fetch = Objects.fetch

    def cut(self: Objects, path: str, file: Path) -> None:
        fetch(self, path, file)
        if path.endswith(MEASUREMENTS):
            content = file.read_bytes()
            file.write_bytes(content[:-1] if how == "shorter" else content + b"x")
            if how == "gone":
                file.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "fetch", cut)
        assert run_folders(open_copy(address)) == []
    [folder] = run_folders(open_copy(address))
    assert read_run(folder).measurements == stored("r").measurements


@pytest.mark.parametrize(
    ("error", "unconditional"),
    [
        (TypeError("mode"), True),
        (NotImplementedError("mode"), True),
        (OSError(errno.ENOSYS, "no"), True),
        (OSError(errno.EIO, "no"), False),
        (ValueError("no"), False),
    ],
    ids=repr,
)
def test_only_storage_without_conditions_is_written_without_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception, unconditional: bool
) -> None:
    """Any other error may be a lost reply: without its condition the next writer would win too."""
    from reports.store import objects

    monkeypatch.setattr(objects, "PAUSE", 0.0)
    asked: list[dict[str, str]] = []

    class Files:
        protocol = "memory"

        def pipe_file(self, place: str, content: bytes, **condition: str) -> None:
            asked.append(condition)
            if len(asked) == 1:
                raise error

        def cat_file(self, place: str) -> bytes:
            raise FileNotFoundError(place)

    assert Objects(Files(), "root").create("a", b"x")
    assert asked == [{"mode": "create"}, {} if unconditional else {"mode": "create"}]


@pytest.mark.parametrize("error", [PermissionError("no"), FileNotFoundError("no bucket")])
def test_a_definite_answer_of_the_storage_is_no_reason_to_ask_again(error: Exception) -> None:
    asked: list[str] = []

    class Files:
        protocol = "memory"

        def pipe_file(self, place: str, content: bytes, **condition: str) -> None:
            asked.append(place)
            raise error

    with pytest.raises(type(error)):
        Objects(Files(), "root").create("a", b"x")
    assert asked == ["root/a"]


def test_columns_that_older_files_lack_say_nothing(tmp_path: Path) -> None:
    tensor = Deviation("c", "e", "q", "float32", (2,), (1,), (), 5, "rows 1")
    account = replace(full_account(), where="w")
    write_tensors(tmp_path, [tensor])
    write_explanations(tmp_path, [account])
    assert read_tensors(tmp_path, None) == (tensor,)
    for name, added in ((TENSORS, ["breaking", "where"]), (EXPLANATIONS, ["where", "lines"])):
        table = pq.read_table(tmp_path / name)
        pq.write_table(table.drop_columns(added), tmp_path / name)
    assert read_tensors(tmp_path, None) == (replace(tensor, breaking=0, where=""),)
    assert read_explanations(tmp_path, None) == (replace(account, where="", lines=()),)


@pytest.mark.parametrize("lacks", ["where", "lines"])
def test_a_file_that_lacks_one_column_keeps_the_others(tmp_path: Path, lacks: str) -> None:
    """Columns came one after the other."""
    account = replace(full_account(), where="w")
    write_explanations(tmp_path, [account])
    table = pq.read_table(tmp_path / EXPLANATIONS)
    pq.write_table(table.drop_columns(lacks), tmp_path / EXPLANATIONS)
    expected = replace(account, where="") if lacks == "where" else replace(account, lines=())
    assert read_explanations(tmp_path, None) == (expected,)


def full_account() -> Explanation:
    lines = (SourceLine("a", "b", "c"),)
    return Explanation("c", "e", "q", 1.0, 2.0, "m", (), None, (), "", "", lines)


def test_columns_for_other_readers_are_written(tmp_path: Path) -> None:
    """What a row says without storing it: no Python is needed to ask for it."""
    rows = measurement(value=1e-6, tolerance=4e-6), measurement(quantity="q", tolerance=0.0)
    folder = write_run(tmp_path, Run(Manifest("a", "2026-11-20T21:30:00+00:00"), rows))
    assert pq.read_table(folder / MEASUREMENTS)["fraction"].to_pylist() == [0.25, math.inf]
    times = (Timing("w", "ratio", 2.0, 1.5, (1.0, 2.0, 3.0), "float32", "cpu", "i"),)
    bench = Run(Manifest("b", "2026-11-20T21:30:00+00:00", kind=RunKind.BENCH), timings=times)
    folder = write_run(tmp_path, bench)
    assert pq.read_table(folder / TIMINGS)["repeats"].to_pylist() == [3]


@pytest.mark.parametrize("word", [5, None, ["PASS"]])
def test_a_verdict_that_is_no_word_is_none(tmp_path: Path, word: Any) -> None:
    folder = write_run(tmp_path, stored("r"))
    document = {"verdict": word, "run": checksum((folder / MANIFEST).read_bytes())}
    (folder / VERDICT).write_text(text_of(document), encoding="utf-8")
    assert read_run(folder).manifest.verdict == ""


@pytest.mark.parametrize(
    ("column", "value"),
    [("stages", [None]), ("stages", None), ("parameters", None), ("worst", {"index": None})],
)
def test_accounts_that_lack_a_part_are_damaged(tmp_path: Path, column: str, value: Any) -> None:
    write_explanations(tmp_path, [replace(full_account(), stages=(Stage("s", 1.0, 2.0, 3.0),))])
    table = pq.read_table(tmp_path / EXPLANATIONS)
    [row] = table.to_pylist()
    pq.write_table(
        pa.Table.from_pylist([{**row, column: value}], table.schema), tmp_path / EXPLANATIONS
    )
    with pytest.raises(StoreError, match=r"expected rows of .*explanations\.parquet as this tool"):
        read_explanations(tmp_path, None)


def test_elements_of_a_tensor_without_their_place_are_damaged(tmp_path: Path) -> None:
    worst = (Worst((1, 2), 3.0, 0.5),)
    write_tensors(tmp_path, [Deviation("c", "e", "q", "float32", (2, 4), (1,), worst, 5, "")])
    table = pq.read_table(tmp_path / TENSORS).drop_columns("worst")
    table = table.append_column("worst", pa.array([[{"actual": 3.0, "expected": 0.5}]]))
    pq.write_table(table, tmp_path / TENSORS)
    with pytest.raises(StoreError) as refused:
        read_tensors(tmp_path, None)
    assert str(refused.value) == (
        f"expected rows of {tmp_path / TENSORS} as this tool writes them, but reading gave: "
        "KeyError('index'); restore the folder or delete it"
    )


def test_a_word_of_a_later_version_asks_for_an_update(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stored("r"))
    table = pq.read_table(folder / MEASUREMENTS)
    rows = [{**row, "kind": "odd"} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), folder / MEASUREMENTS)
    reseal(folder)
    with pytest.raises(StoreError, match=r"measurements.* 'odd' .* update megalodon-numerics"):
        read_run(folder)


def test_a_goal_of_another_ratio_is_the_least_wanted_although_less_is_better() -> None:
    made = Timing("w", "floor_ratio", 3.0, 2.0, (), "float32", "cpu", "i")
    assert made.reached is True and replace(made, value=1.0).reached is False


def test_rows_are_read_up_to_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole night has more of them than a document may have."""
    from reports.store import reader

    asked: list[int] = []
    monkeypatch.setattr(reader, "read_bytes", lambda path, limit=0: asked.append(limit) or b"")
    reader.read_checked(Path("rows"), None)
    assert asked == [reader.PARQUET_BYTES]
