"""Runs on shared storage: there whole or not at all, whoever writes, and read by every command."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megalodon_jax.extras import install
from reports.registry import shared_index
from reports.registry.outcome import store
from reports.registry.retention import clean, delete
from reports.store import shared, unsent
from reports.store.index import Line, read_lines
from reports.store.objects import Objects
from reports.store.runs import check_writable, list_runs, write_run
from reports.store.schema import FILES, SCHEMA, RunKind, StoreError
from reports.store.writer import add_verdict
from tests.helpers import cli
from tests.reports.nights import earlier, explained, failing, measurement, reseal, run

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
BUCKET = "nights"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def night(day: int, row: Any = None) -> Any:
    return earlier(row or measurement(), day=day, suites=SUITES)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Work as on another machine from now on: one with a cache of its own."""

    def become(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    become("first")
    return become


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a server that speaks S3, with an empty bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield url
    server.stop()


# A server takes seconds for what a folder does at once, so a day's run has a part of these.
ON_A_SERVER = [pytest.mark.s3, pytest.mark.sweep]


@pytest.fixture(params=["file", pytest.param("s3", marks=ON_A_SERVER)])
def storage(request: pytest.FixtureRequest, tmp_path: Path, machine: Any) -> str:
    """Address of an empty folder on each kind of storage."""
    if request.param == "file":
        (tmp_path / "remote").mkdir()
        return f"file://{tmp_path}/remote/runs"
    request.getfixturevalue("server")
    return f"s3://{BUCKET}/{tmp_path.name}/runs"


def objects(address: str) -> set[str]:
    """Paths of the objects on the storage below the address, without claims."""
    storage = shared._connect(address, Path()).objects
    paths = (path.removeprefix(f"{storage.root}/") for path in storage.files.find(storage.root))
    return {path for path in paths if not path.startswith(f"{shared.CLAIMS}/")}


def ids(address: str) -> list[str]:
    runs, unreadable = list_runs(shared.open_copy(address))
    assert not unreadable
    return [run.manifest.id for run in runs]


def test_every_command_reads_what_another_machine_has_written(storage: str, machine: Any) -> None:
    copy = shared.open_copy(storage)
    good = write_run(copy, night(1), lambda run: "<p>first</p>").name
    bad = write_run(copy, night(2, failing())).name
    assert {f"{good}/run.json", f"{good}/report.html"} <= objects(storage)
    machine("second")
    listed = json.loads(cli("list", "--json", "--out", storage).output)
    assert [(run["id"], run["broken"]) for run in listed["runs"]] == [(good, 0), (bad, 1)]
    assert [cli("gate", name, "--out", storage).exit_code for name in (good, "latest")] == [0, 1]
    history = json.loads(cli("history", "--json", "--out", storage).output)
    assert (history["runs"], len(history["rows"])) == (2, 1)
    compared = cli("compare", good, bad, "--out", storage)
    assert compared.exit_code == 1 and "logits" in compared.output
    page = shared.copy_of(storage) / good / "report.html"
    assert page.read_text(encoding="utf-8") == "<p>first</p>"
    pruned = cli("prune", "--keep", 1, "--delete", "--out", storage)
    assert f"keeping {good}" in pruned.output or f"deleted {good}" in pruned.output


def test_a_run_is_judged_by_what_others_stored_while_it_was_measured(
    storage: str, machine: Any
) -> None:
    mine = shared.open_copy(storage)
    machine("second")
    write_run(shared.open_copy(storage), night(2, measurement(value=2e-6)))
    machine("first")
    done = store(mine, night(3), lambda line: None)
    assert done.decision is not None
    assert done.decision.baseline_id == night(2).id


@pytest.mark.parametrize("here", [*itertools.product((False, True), repeat=2)], ids=str)
def test_what_a_run_gets_late_comes_to_a_copy_that_lacks_it(
    here: tuple[bool, bool], tmp_path: Path, machine: Any
) -> None:
    """Verdict and page, each of which may be there, or come, without the other."""
    (tmp_path / "remote").mkdir()
    storage = f"file://{tmp_path}/remote/runs"
    name = write_run(shared.open_copy(storage), night(1), lambda run: "<p>page</p>").name
    place = Path(storage.removeprefix("file://")) / name
    content = {file: (place / file).read_bytes() for file in shared.LATE}
    for file in shared.LATE:
        (place / file).unlink()
    machine("second")
    copy = shared.open_copy(storage) / name
    for file, there in zip(shared.LATE, here, strict=True):
        assert not (copy / file).exists()
        if there:
            (place / file).write_bytes(content[file])
    shared.open_copy(storage)
    assert tuple((copy / file).exists() for file in shared.LATE) == here
    for file in shared.LATE:
        (place / file).write_bytes(content[file])
    shared.open_copy(storage)
    assert {file: (copy / file).read_bytes() for file in shared.LATE} == content


@pytest.mark.parametrize("gone", shared.LATE)
def test_a_late_file_that_goes_during_a_copy_keeps_no_other_from_it(
    gone: str, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may remove a page or a verdict after it was listed."""
    (tmp_path / "remote").mkdir()
    storage = f"file://{tmp_path}/remote/runs"
    name = write_run(shared.open_copy(storage), night(1), lambda run: "<p>page</p>").name
    place = tmp_path / "remote" / "runs" / name
    content = {file: (place / file).read_bytes() for file in shared.LATE}
    for file in shared.LATE:
        (place / file).unlink()
    machine("second")
    copy = shared.open_copy(storage) / name
    for file in shared.LATE:
        (place / file).write_bytes(content[file])
    listing = Objects.inside_all

    def listed_before(objects: Objects) -> dict[str, dict[str, int]]:
        found = listing(objects)
        (place / gone).unlink()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "inside_all", listed_before)
        shared.open_copy(storage)
    there = {file for file in shared.LATE if (copy / file).exists()}
    assert there == {*shared.LATE} - {gone}
    (place / gone).write_bytes(content[gone])
    shared.open_copy(storage)
    assert {file: (copy / file).read_bytes() for file in shared.LATE} == content


def test_a_page_that_was_drawn_again_here_stays(tmp_path: Path, machine: Any) -> None:
    """Only what a copy lacks is fetched, though the verdict is still to come."""
    (tmp_path / "remote").mkdir()
    storage = f"file://{tmp_path}/remote/runs/"
    copy = shared.open_copy(storage)
    assert shared.address_of(copy) == storage[:-1]
    folder = write_run(copy, night(1), lambda run: "<p>there</p>")
    (folder / "verdict.json").unlink()
    (folder / "report.html").write_text("<p>here</p>", encoding="utf-8")
    shared.open_copy(storage)
    assert (folder / "verdict.json").is_file()
    assert (folder / "report.html").read_text(encoding="utf-8") == "<p>here</p>"


def test_a_list_of_red_runs_needs_no_accounts_of_them(tmp_path: Path, machine: Any) -> None:
    """What only a red run has is on the storage, and is not fetched for a list."""
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    red = replace(night(1, failing()), explanations=(explained(),))
    folder = write_run(shared.open_copy(address), red)
    assert (folder / "explanations.parquet").is_file()
    machine("second")
    assert listed(address) == ([folder.name], [])


def test_a_verdict_without_a_page_reaches_the_storage(tmp_path: Path, machine: Any) -> None:
    """Where the page could not be drawn."""
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    folder = write_run(shared.open_copy(address), night(1))
    add_verdict(folder, "PASS")
    assert f"{folder.name}/verdict.json" in objects(address)
    machine("second")
    [info], _ = list_runs(shared.open_copy(address))
    assert info.manifest.verdict == "PASS" and not (info.folder / "report.html").exists()
    # Both are written again whenever the run is judged again.
    machine("first")
    add_verdict(folder, "CHANGED", "<p>page</p>")
    machine("third")
    [info], _ = list_runs(shared.open_copy(address))
    assert info.manifest.verdict == "CHANGED"
    assert (info.folder / "report.html").read_text(encoding="utf-8") == "<p>page</p>"


def test_a_run_that_goes_there_goes_here(storage: str, machine: Any) -> None:
    names = [write_run(shared.open_copy(storage), night(day)).name for day in (1, 2, 3)]
    machine("second")
    assert ids(storage) == names
    machine("first")
    shared.storage_of(shared.open_copy(storage)).delete(names[0])  # pyright: ignore
    assert not any(path.startswith(names[0]) for path in objects(storage))
    machine("second")
    assert ids(storage) == names[1:]


def test_two_writers_of_one_name_get_two(storage: str, machine: Any) -> None:
    first = shared.open_copy(storage)
    machine("second")
    second = shared.open_copy(storage)
    # Neither machine knows of the other's run: the storage alone can tell.
    one, two = write_run(first, night(1)), write_run(second, night(1, failing()))
    assert two.name == f"{one.name}-2"
    assert ids(storage) == [one.name, two.name]
    # A name that somebody writes is taken as well, and stays so if nothing comes of it: a request
    # of its writer may arrive late.
    claims = shared.storage_of(first), shared.storage_of(second)
    assert [c and c.claim("night") for c in claims] == [True, False]
    assert claims[0] and claims[1]
    assert not claims[1].claim("night")


def test_writers_at_once_lose_nothing(storage: str, machine: Any) -> None:
    copies = []
    for day in (4, 5, 6):
        machine(f"machine {day}")
        copies.append((shared.open_copy(storage), night(day)))
    with ThreadPoolExecutor(len(copies)) as pool:
        names = sorted(folder.name for folder in pool.map(lambda pair: write_run(*pair), copies))
    assert ids(storage) == names and len(names) == 3
    assert {path.partition("/")[0] for path in objects(storage)} == set(names)


def _killed(address: str, cache: str) -> None:
    """Write a run, and die when all is sent but its run.json."""
    os.environ["XDG_CACHE_HOME"] = cache
    copy = shared.open_copy(address)
    read = Path.read_bytes

    def read_or_die(self: Path) -> bytes:
        if self.name == "run.json":
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self)

    Path.read_bytes = read_or_die
    write_run(copy, night(1))


def test_a_killed_writer_leaves_no_run_and_its_machine_sends_the_run_later(
    storage: str, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = storage, str(tmp_path / "killed")
    killed = multiprocessing.get_context("spawn").Process(target=_killed, args=words)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    left = objects(storage)
    assert any(path.endswith("measurements.parquet") for path in left)
    assert not any(path.endswith("run.json") for path in left)
    assert ids(storage) == []
    # It may still be writing: its objects stay for an hour.
    copy = shared.open_copy(storage)
    assert cli("prune", "--delete", "--out", storage).exit_code == 0
    assert objects(storage) == left
    assert write_run(copy, night(1)).name.endswith("-2")
    monkeypatch.setattr(shared, "ABANDONED", -1)
    check_writable(copy)
    assert len({path.partition("/")[0] for path in objects(storage)}) == 1
    assert [name[-2:] for name in ids(storage)] == ["-2"]
    # Where the killed writer ran, the next command sends its run under a free name.
    machine("killed")
    ids(storage)
    assert [name[-2:] for name in ids(storage)] == ["-2", "-3"]


def test_a_run_that_the_storage_refuses_is_kept_and_sent_later(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shared.open_copy(storage)
    deliver = shared.deliver

    def refuse(*_: Any) -> None:
        raise OSError("the network went away")

    monkeypatch.setattr(shared, "deliver", refuse)
    with pytest.raises(StoreError, match=r"network went away.*complete in .*unsent.*next command"):
        write_run(copy, night(1))
    assert not objects(storage) and not list_runs(copy)[0]
    monkeypatch.setattr(shared, "deliver", deliver)
    assert [name[:10] for name in ids(storage)] == ["2026-11-01"]
    assert any(path.endswith("run.json") for path in objects(storage))
    assert ids(storage) == ids(storage)


def test_what_cannot_be_reached_is_said(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = cli("list", "--out", f"file://{tmp_path}/runs")
    # A folder that is made by whoever writes there first.
    assert (missing.exit_code, "no runs in file://" in missing.output) == (0, True)
    unknown = cli("list", "--out", "nothing://runs")
    assert (unknown.exit_code, "installed package that reads nothing://runs" in unknown.output) == (
        2,
        True,
    )
    monkeypatch.setattr(
        "fsspec.url_to_fs", lambda *_, **__: (_ for _ in ()).throw(ImportError("Install s3fs"))
    )
    extra = cli("list", "--out", "s3://bucket/runs")
    assert extra.exit_code == 2 and install("s3") in extra.output
    monkeypatch.undo()
    machine("first")

    copy = shared.open_copy(f"file://{tmp_path}/runs")

    def refuse(*_: Any) -> None:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(Objects, "names", refuse)
    refused = cli("list", "--out", f"file://{tmp_path}/runs")
    assert refused.exit_code == 2 and "provide credentials" in refused.output
    # A copy that was opened before must not be taken for the storage either.
    with pytest.raises(StoreError, match="provide credentials"):
        shared.refresh(copy)


def test_a_run_whose_folder_could_not_be_moved_is_published_under_its_name(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim is kept until then; a new claim would find the name taken and use another."""
    copy = shared.open_copy(storage)
    opened = shared.storage_of(copy)
    assert opened is not None and opened.claim("2026-11-01-here")
    finished = write_run(copy.parent / "elsewhere", night(1))

    def refuse(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(shared, "put_in", refuse)
    with pytest.raises(OSError, match="disk is full"):
        opened.publish(finished, "2026-11-01-here")
    monkeypatch.undo()
    assert opened.publish(finished, "2026-11-01-here").name == "2026-11-01-here"


@pytest.mark.parametrize(
    ("error", "here"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (PermissionError(errno.EACCES, "Permission denied", "{copy}/x"), True),
        (PermissionError(errno.EACCES, "Permission denied", "{copy}-of-others/x"), False),
        # A link or a rename has two names.
        (OSError(errno.EXDEV, "Another device", "{copy}-of-others/x", None, "{copy}/x"), True),
        (OSError(errno.EXDEV, "Another device", "{copy}/x", None, "{copy}-of-others/x"), True),
        (OSError(errno.EXDEV, "Another device", "{copy}-a/x", None, "{copy}-b/x"), False),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), False),
    ],
)
def test_a_copy_that_cannot_be_written_is_not_the_storage_s_fault(
    storage: str, error: OSError, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(shared.open_copy(storage), night(1))
    copy = shared.open_copy(storage)
    for folder in copy.glob("2026*"):
        shutil.rmtree(folder)
    # A new error for each storage: `error` is shared between the two.
    one, other = (name and name.format(copy=copy) for name in (error.filename, error.filename2))

    def refuse(*_: Any) -> None:
        raise OSError(error.errno, error.strerror, one, None, other)

    monkeypatch.setattr(Objects, "fetch", refuse)
    with pytest.raises(StoreError) as refused:
        shared.open_copy(storage)
    said = f"expected to keep a copy of {storage} at {copy}, but {error.strerror}; free space"
    assert (said in str(refused.value)) is here
    assert (
        "provide credentials" in str(refused.value) or "can reach it" in str(refused.value)
    ) is not here


@pytest.mark.s3
def test_a_bucket_that_is_not_there_is_said(machine: Any, server: str) -> None:
    for command in (("list",), ("nightly", "--case", "plain")):
        missing = cli(*command, "--out", "s3://no-such-bucket/runs")
        assert missing.exit_code == 2 and "create the bucket" in missing.output


def test_what_is_here_is_asked_for_once(
    storage: str, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a list of ten thousand runs waits for their names alone."""
    names = [write_run(shared.open_copy(storage), night(day)).name for day in (1, 2)]
    asked: list[str] = []
    fetch = shared.Storage._fetch

    def counted(self: shared.Storage, name: str, objects: Any) -> None:
        asked.append(name)
        fetch(self, name, objects)

    monkeypatch.setattr(shared.Storage, "_fetch", counted)
    machine("second")
    assert [ids(storage), ids(storage), sorted(asked)] == [names, names, names]


class Counted(Objects):
    """Objects of a storage that count how often its folders are listed."""

    __setattr__ = object.__setattr__

    def __init__(self, names: Sequence[str]) -> None:
        self.folders = list(names)
        self.whole, self.single = 0, list[str]()
        self.fetched: list[str] = []

    def names(self) -> list[str]:
        return self.folders

    def inside(self, name: str) -> dict[str, int]:
        self.single.append(name)
        return {"run.json": 4, "report.html": 4}

    def inside_all(self) -> dict[str, dict[str, int]]:
        self.whole += 1
        # One folder is sent after the listing.
        return {name: {"run.json": 4, "report.html": 4} for name in self.folders[1:]}

    def fetch(self, path: str, file: Path) -> None:
        self.fetched.append(path)
        file.write_text("fine", encoding="utf-8")


@pytest.mark.parametrize(
    ("new", "late", "old", "at_once"),
    [(3, 0, 0, True), (1, 0, 98, True), (1, 0, 99, False), (0, 1, 98, True), (0, 1, 99, False),
     (1, 1, 197, True), (1, 1, 198, False), (0, 0, 5, False)],
)  # fmt: skip
def test_many_folders_are_listed_at_once_and_few_one_by_one(
    tmp_path: Path, new: int, late: int, old: int, at_once: bool
) -> None:
    """One answer has a thousand objects, those of more than a hundred runs."""
    names = [
        f"{kind}{i:03d}" for kind, n in (("a", new), ("b", late), ("c", old)) for i in range(n)
    ]
    for name in names[new:]:
        (tmp_path / name).mkdir()
    (tmp_path / "deleted").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in names[new + late :]:
        os.utime(tmp_path / name, (0, 0))
    objects = Counted(names)
    shared.Storage("memory://x", tmp_path, objects).refresh()
    asked = names[: new + late]
    assert objects.whole == at_once
    # The folder that was sent after the listing is listed by itself.
    assert sorted(objects.single) == (asked[:1] if at_once else asked)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != ".") == sorted(names)
    files = [f"{name}/{file}" for name in names[:new] for file in ("report.html", "run.json")]
    files += [f"{name}/report.html" for name in names[new : new + late]]
    assert sorted(objects.fetched) == sorted(files)


def test_a_run_that_another_process_stores_during_a_listing_stays(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the copy and not in the listing, but nobody deleted it."""
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    copy = shared.open_copy(address)
    first = write_run(copy, night(1))
    names = Objects.names

    def slow(objects: Objects) -> Any:
        found = list(names(objects))
        monkeypatch.undo()
        machine("first")
        write_run(copy, night(2))
        return found

    monkeypatch.setattr(Objects, "names", slow)
    storage = shared.storage_of(copy)
    assert storage is not None
    storage.refresh()
    assert sorted(p.name for p in copy.iterdir() if p.name[0] != ".") == [
        first.name,
        night(2).manifest.id,
    ]


def test_a_run_that_is_deleted_here_is_deleted_there(tmp_path: Path, machine: Any) -> None:
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    copy = shared.open_copy(address)
    first, second = (write_run(copy, night(day)) for day in (1, 2))
    delete(first)
    assert not first.exists() and ids(address) == [second.name]
    assert not any(path.startswith(f"{first.name}/") for path in objects(address))
    # What a killed deletion left is deleted by the next clean-up, here and there.
    storage = shared.storage_of(copy)
    assert storage is not None
    storage.objects.create(f".gone-{second.name}", b"")
    (copy / ".pruned-x").mkdir()
    clean(copy)
    assert not (copy / ".pruned-x").exists() and objects(address) == set()
    # A run that is gone meanwhile gets nothing any more.
    assert not storage._may_grow("gone") and storage._may_grow(second.name)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"gates": 0}, False),
        ({"verdict": "PASS"}, False),
        ({"created": "yesterday"}, False),
        ({"created": "2026-11-01T00:00:00"}, False),
        ({"created": "2026-11-01T00:00:00+00:00"}, False),
    ],
    ids=str,
)
def test_the_line_of_a_run_waits_for_its_verdict_for_an_hour(
    changes: dict[str, Any], waits: bool
) -> None:
    just = (datetime.now(UTC) - timedelta(minutes=59)).isoformat()
    made = {"created": just, "verdict": "", "gates": 1, **changes}
    manifest = replace(night(1).manifest, created=made["created"], verdict=made["verdict"])
    assert shared_index._to_be_judged(Line("a", "", "", manifest, made["gates"])) is waits
    late = (datetime.now(UTC) - timedelta(minutes=61)).isoformat()
    line = Line("a", "", "", replace(manifest, created=late), 1)
    assert not shared_index._to_be_judged(line)


@pytest.mark.parametrize("schema", [4, SCHEMA])
def test_the_files_of_a_run_are_those_of_its_kind(tmp_path: Path, schema: int) -> None:
    """Also of a run without checksums, which names no file."""
    folder = reseal(write_run(tmp_path, run(measurement())), schema=schema)
    assert shared_index._files(folder) == FILES[RunKind.NIGHTLY]
    (folder / "run.json").unlink()
    assert shared_index._files(folder) == ()


def test_a_file_system_without_locks_sends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of network folders; another process that has the lock is left alone."""
    for error, ours in ((OSError("no locks"), True), (BlockingIOError(), False), (None, True)):

        def lock(handle: int, how: int, error: OSError | None = error) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(unsent.fcntl, "flock", lock)
        with unsent.locked(tmp_path) as own:
            assert own is ours
    with unsent.locked(tmp_path / "gone") as own:
        assert own is False


def _written(address: str, cache: str, runs: int) -> list[str]:
    """Store runs of the same ids as other writers do; return the names that were reported."""
    copy = Path(cache)
    copy.mkdir()
    (copy / shared.ADDRESS).write_text(address, encoding="utf-8")
    return [write_run(copy, night(day)).name for day in range(1, runs + 1)]


def test_writers_of_one_id_at_once_lose_no_run(storage: str, tmp_path: Path) -> None:
    """With S3 they are processes."""
    if storage.startswith("s3"):
        pool = ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn"))
    else:
        pool = ThreadPoolExecutor(8)
    with pool:
        caches = [str(tmp_path / f"writer{i}") for i in range(8)]
        told = list(pool.map(_written, [storage] * 8, caches, [5] * 8))
    names = sorted(name for each in told for name in each)
    # Storage with conditional writes wastes no number; a local folder has them by hard links.
    first = [night(day).id for day in range(1, 6)]
    wanted = {f"{n}{e}" for n in first for e in ("", *(f"-{i}" for i in range(2, 9)))}
    assert set(names) == wanted and len(names) == len(wanted)
    assert sorted(ids(storage)) == names


def listed(address: str) -> tuple[list[str], list[str]]:
    """Runs that `list` names, and those that it says are unreadable."""
    answer = json.loads(cli("list", "--json", "--out", address).output)
    folders = [Path(entry["folder"]) for entry in answer["unreadable"]]
    # They are named as if they were copied, wherever they were examined.
    assert {folder.parent for folder in folders} <= {shared.copy_of(address)}
    names = [folder.name for folder in folders]
    return [run["id"] for run in answer["runs"]], names


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Objects that are read for a list, in order."""
    paths: list[str] = []
    get = shared.Storage.get

    def counted(self: shared.Storage, wanted: Sequence[str], folder: Path) -> None:
        paths.extend(wanted)
        get(self, wanted, folder)

    monkeypatch.setattr(shared.Storage, "get", counted)
    return paths


def test_a_list_copies_no_run_and_reads_what_nobody_has_listed(
    storage: str, machine: Any, asked: list[str]
) -> None:
    names = [write_run(shared.open_copy(storage), night(day)).name for day in (1, 2)]
    machine("second")
    assert listed(storage) == (names, [])
    assert not [path for path in shared.copy_of(storage).iterdir() if path.is_dir()]
    # Of a run what a list says of it, and no page.
    read = {path.rpartition("/")[2] for path in asked}
    rows = {"measurements.parquet", "findings.parquet"}
    assert read == {shared_index.THERE, "run.json", "verdict.json", *rows}
    # Another machine has all of it from the first, and each knows then.
    for name, objects_read in (("third", [shared_index.THERE]), ("second", []), ("third", [])):
        asked.clear()
        machine(name)
        assert (listed(storage), asked) == ((names, []), objects_read)
    third = write_run(shared.open_copy(storage), night(3)).name
    ours = shared.storage_of(shared.copy_of(storage))
    assert ours is not None
    ours.delete(names[0])
    machine("second")
    assert listed(storage) == ([names[1], third], [])


@pytest.mark.parametrize("spoilt", ["nothing", "the index", "a manifest", "rows", "no manifest"])
def test_what_a_list_is_made_from_may_be_gone_or_damaged(
    spoilt: str, tmp_path: Path, machine: Any
) -> None:
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    good, bad = (write_run(shared.open_copy(address), night(day)).name for day in (1, 2))
    remote = tmp_path / "remote" / "runs"
    machine("second")
    if spoilt == "the index":
        (remote / shared_index.THERE).write_text("no index", encoding="utf-8")
    if spoilt == "a manifest":
        (remote / bad / "run.json").write_text("{", encoding="utf-8")
    if spoilt == "rows":
        (remote / bad / "measurements.parquet").write_bytes(b"PAR1")
    if spoilt == "no manifest":
        (remote / bad / "run.json").unlink()
    broken = spoilt in ("a manifest", "rows")
    runs = [good, bad] if spoilt in ("nothing", "the index") else [good]
    for _ in range(2):
        assert listed(address) == (runs, [bad] if broken else [])


def test_who_may_only_read_has_a_list_and_reads_nothing_twice(
    storage: str, machine: Any, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [write_run(shared.open_copy(storage), night(1)).name]

    def refuse(*_: Any) -> None:
        raise StoreError("403 Forbidden")

    monkeypatch.setattr(shared.Storage, "put", refuse)
    machine("reader")
    assert listed(storage) == (names, []) and len(asked) > 1
    asked.clear()
    assert (listed(storage), asked) == ((names, []), [])
    assert not [path for path in objects(storage) if path.startswith(".")]


@pytest.mark.parametrize(("hours", "again"), [(-2, False), (0, True), (2, False)])
def test_a_run_is_read_again_only_while_its_verdict_may_come(
    tmp_path: Path, machine: Any, asked: list[str], hours: int, again: bool
) -> None:
    """A run that a clock dated ahead is no run of this hour: its line is kept as those of old."""
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    created = (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="seconds")
    one = earlier(measurement(), suites=SUITES, created=created)
    name = write_run(shared.open_copy(address), one).name
    machine("second")
    assert listed(address) == ([name], [])
    asked.clear()
    assert listed(address) == ([name], [])
    assert bool([path for path in asked if path.startswith(name)]) == again


@pytest.mark.parametrize("beside", ["damaged", "waiting"])
def test_what_was_read_for_a_list_is_on_the_storage_for_others_whatever_is_new_beside_it(
    tmp_path: Path, machine: Any, asked: list[str], beside: str
) -> None:
    """A damaged run, or one whose verdict may still come, has no line there."""
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    just = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "suites": SUITES}
    made = night(2) if beside == "damaged" else earlier(measurement(), id="waiting", **just)
    old, other = (write_run(shared.open_copy(address), it).name for it in (night(1), made))
    if beside == "damaged":
        (tmp_path / "remote" / "runs" / other / "run.json").write_text("{", encoding="utf-8")
    for name in ("second", "third"):
        machine(name)
        asked.clear()
        found, unreadable = listed(address)
        assert sorted([*found, *unreadable]) == sorted([old, other])
    assert not [path for path in asked if path.startswith(old)]
    there = read_lines(tmp_path / "remote" / "runs" / shared_index.THERE)
    assert [line.name for line in there] == [old]


def test_damage_of_every_batch_of_new_runs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"run{n}" for n in range(5)]
    storage = shared.Storage("s3://bucket/runs", tmp_path, Objects(None, "bucket/runs"))
    monkeypatch.setattr(shared.Storage, "send_unsent", lambda self: None)
    monkeypatch.setattr(shared.Storage, "listed", lambda self: names)

    def read(storage: object, names: list[str]) -> tuple[dict, list]:
        return {}, [(tmp_path / name, "damaged") for name in names if name != "run1"]

    monkeypatch.setattr(shared_index, "TOGETHER", 2)
    monkeypatch.setattr(shared_index, "_lines_there", lambda storage: {})
    monkeypatch.setattr(shared_index, "_read", read)
    lines, unreadable = shared_index.shared_lines(storage)
    assert lines == []
    assert [folder.name for folder, _ in unreadable] == ["run0", "run2", "run3", "run4"]


def test_runs_of_every_batch_that_wait_for_their_verdicts_are_listed(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    names = [
        write_run(
            shared.open_copy(address),
            earlier(measurement(), suites=SUITES, created=created, id=f"run{n}"),
        ).name
        for n in range(3)
    ]
    machine("second")
    monkeypatch.setattr(shared_index, "TOGETHER", 1)
    found, unreadable = listed(address)
    assert (sorted(found), unreadable) == (names, [])


def test_what_was_deleted_is_in_no_list_though_the_storage_has_its_line(
    tmp_path: Path, machine: Any
) -> None:
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    names = [write_run(shared.open_copy(address), night(day)).name for day in (1, 2)]
    machine("second")
    assert listed(address) == (names, [])
    machine("first")
    delete(shared.open_copy(address) / names[0])
    for name in ("third", "second"):
        machine(name)
        assert listed(address) == (names[1:], [])
        here = shared.open_copy(address) / shared_index.HERE
        assert [line.name for line in read_lines(here)] == names[1:]


def test_a_list_sends_what_could_not_be_sent_before(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    copy, deliver = shared.open_copy(address), shared.deliver

    def refuse(*_: Any) -> None:
        raise OSError("the network went away")

    with monkeypatch.context() as patched:
        patched.setattr(shared, "deliver", refuse)
        with pytest.raises(StoreError, match="network went away"):
            write_run(copy, night(1))
    assert shared.deliver is deliver
    told = cli("list", "--json", "--out", address)
    [listed_run] = json.loads(told.stdout)["runs"]
    assert listed_run["id"] == night(1).id and "sent now" in told.stderr


def test_a_list_that_is_interrupted_keeps_what_it_has_read(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    names = [write_run(shared.open_copy(address), night(day)).name for day in (1, 2, 3)]
    machine("second")
    read = shared_index._read

    def killed(storage: shared.Storage, new: Sequence[str]) -> Any:
        if names[2] in new:
            raise KeyboardInterrupt
        return read(storage, new)

    with monkeypatch.context() as patched:
        patched.setattr(shared_index, "TOGETHER", 1)
        patched.setattr(shared_index, "_read", killed)
        assert "interrupted" in cli("list", "--out", address).output
    asked.clear()
    assert listed(address) == (names, [])
    assert not [path for path in asked if path.startswith((names[0], names[1]))]


def test_a_machine_that_has_runs_of_its_own_lists_those_of_others_too(
    tmp_path: Path, machine: Any
) -> None:
    """Under the names of their folders there, whatever they were called when they were made."""
    (tmp_path / "remote").mkdir()
    address = f"file://{tmp_path}/remote/runs"
    write_run(shared.open_copy(address), night(1))
    machine("second")
    theirs = write_run(shared.open_copy(address), night(2)).name
    (tmp_path / "remote" / "runs" / theirs).rename(tmp_path / "remote" / "runs" / "renamed")
    machine("first")
    for _ in range(2):
        assert listed(address) == ([night(1).id, "renamed"], [])
