"""Shared storage that loses requests and replies: every run is stored, once, and reported so."""

from __future__ import annotations

import errno
import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reports.store import claims, objects, shared, unsent, writer
from reports.store.objects import Objects
from reports.store.runs import list_runs, write_run
from reports.store.schema import MANIFEST, SCHEMA, StoreError
from reports.store.seal import text_of
from tests.reports.nights import earlier, measurement
from tests.reports.store.faulty import LOST, Faulty

ROOT = "bucket/runs"
ADDRESS = f"faulty://{ROOT}"
SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
NAME = "2026-11-01T21-30-00Z-1a2b3c4"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and a cache of the test's own."""
    monkeypatch.setattr(objects, "PAUSE", 0.0)
    monkeypatch.setattr(claims, "COLLISION", 0.002)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def machine(tmp_path: Path, name: str) -> shared.Storage:
    """The storage as another machine sees it, which has a copy of its own."""
    copy = tmp_path / name
    copy.mkdir(exist_ok=True)
    (copy / ".shared").write_text(ADDRESS, encoding="utf-8")
    storage = shared.storage_of(copy)
    assert storage is not None
    return storage


def folder_of(tmp_path: Path, content: str, name: str = NAME) -> Path:
    """A run as it is before it is sent, of files that `content` tells from others."""
    folder = tmp_path / f"made-{content}"
    folder.mkdir()
    (folder / "measurements.parquet").write_text(content * 3, encoding="utf-8")
    (folder / "report.html").write_text(content, encoding="utf-8")
    # By name it comes after run.json.
    (folder / "tensors.parquet").write_text(content * 2, encoding="utf-8")
    document = json.dumps({"id": name, "content": content})
    (folder / MANIFEST).write_text(document, encoding="utf-8")
    return folder


def assert_whole(store: Faulty) -> dict[str, str]:
    """Return by name what each stored run holds; every run is whole, and lies where it says."""
    held: dict[str, str] = {}
    for name, manifest in store.runs(ROOT).items():
        document = json.loads(manifest)
        assert document["id"] == name
        held[name] = content = document["content"]
        files = {"measurements.parquet": content * 3, "report.html": content}
        files["tensors.parquet"] = content * 2
        for file, text in files.items():
            assert store.objects[f"{ROOT}/{name}/{file}"][0].decode() == text
    return held


FAULTS = [
    pytest.param(replies, requests, conditions, id=f"{replies}-{requests}-{conditions}")
    for conditions in ("kept", "ignored", "refused")
    for replies, requests in ((0.3, 0.0), (0.15, 0.15))
]


def stored_by_all(tmp_path: Path, store: Faulty, writers: int, rounds: int) -> list[str]:
    """Have writers send runs of one id each round; return the lines that were reported."""
    lines: list[str] = []
    machines = [machine(tmp_path, f"machine{i}") for i in range(writers)]
    start = threading.Barrier(writers)

    def work(i: int) -> None:
        for turn in range(rounds):
            name, content = f"night-{turn:02}", f"w{i}r{turn}"
            folder = folder_of(tmp_path, content, name)
            start.wait()
            try:
                # Whether it has the name or not: `publish` takes the next one then.
                machines[i].claim(name)
                place = machines[i].publish(folder, name, lines.append)
                lines.append(f"stored {place.name} {content}")
            except StoreError as error:
                # The storage did not answer: what the next command does.
                assert "next command" in str(error) or "answer" in str(error)
                if folder.exists():
                    unsent.put_in(machines[i].copy, folder, unsent.Note(name, None))

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(work, range(writers)))
    for each in machines:
        for _ in range(20):
            each.send_unsent(lines.append)
        assert not unsent.waiting(each.copy)
    return lines


@pytest.mark.parametrize(("replies", "requests", "conditions"), FAULTS)
def test_every_run_of_writers_at_once_is_stored_once(
    tmp_path: Path, replies: float, requests: float, conditions: str
) -> None:
    store = Faulty.make(1, replies, requests, conditions)
    lines = stored_by_all(tmp_path, store, 8, 5)
    held = assert_whole(store)
    assert Counter(held.values()) == Counter(f"w{i}r{turn}" for i in range(8) for turn in range(5))
    for line in lines:
        if match := re.fullmatch(r"stored (\S+) (\S+)", line):
            assert held[match[1]] == match[2]
        elif match := re.search(r"(?:stored as |sent now: \S+/)(night-\d+(?:-\d+)?)", line):
            assert match[1] in held
        else:
            assert "not sent" in line
    if conditions == "kept":
        # The condition decides who wins, so no number is wasted, and nothing is sent twice.
        data = {p: n for p, n in store.written.items() if "/night-" in p and ".claims" not in p}
        assert set(data.values()) == {1}


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("replies", "requests", "conditions"), FAULTS)
def test_eight_writers_of_forty_runs_with_more_seeds(
    tmp_path: Path, seed: int, replies: float, requests: float, conditions: str
) -> None:
    store = Faulty.make(seed, replies, requests, conditions)
    stored_by_all(tmp_path, store, 8, 40)
    held = assert_whole(store)
    assert Counter(held.values()) == Counter(f"w{i}r{turn}" for i in range(8) for turn in range(40))


class Killed(BaseException):
    """The end of a process: nothing of the program handles it."""


def at_request(number: int, act: Callable[[], None]) -> tuple[Callable[[str, str], None], list]:
    """Return a hook that acts before one request, and the requests that it saw."""
    seen: list[tuple[str, str]] = []

    def before(request: str, path: str) -> None:
        seen.append((request, path))
        if len(seen) - 1 == number:
            act()

    return before, seen


def die() -> None:
    raise Killed


def requests_of(store: Faulty, work: Callable[[], object]) -> int:
    """Return how many requests a piece of work makes."""
    store.before, seen = at_request(-1, die)
    work()
    return len(seen)


def publish(tmp_path: Path, content: str = "a", report: Any = None) -> Path:
    storage = machine(tmp_path, "writer")
    storage.claim(NAME)
    return storage.publish(folder_of(tmp_path, content), NAME, report or (lambda _: None))


@pytest.mark.parametrize("conditions", ["kept", "ignored"])
def test_a_writer_killed_at_any_request_loses_nothing_and_sends_nothing_twice(
    tmp_path: Path, conditions: str
) -> None:
    store = Faulty.make(conditions=conditions)
    count = requests_of(store, lambda: publish(tmp_path))
    assert count > 8
    for number in range(count):
        store, home = Faulty.make(conditions=conditions), tmp_path / str(number)
        home.mkdir()
        store.before, _ = at_request(number, die)
        with pytest.raises(Killed):
            publish(home)
        store.before = lambda *_: None
        other = machine(home, "reader")
        other.refresh()
        # To others it is a whole run or none.
        assert [p.name for p in other.copy.iterdir() if p.name[0] != "."] == list(store.runs(ROOT))
        assert_whole(store)
        mine = machine(home, "writer")
        if not unsent.waiting(mine.copy):
            # Killed before it had a run to send: only its claim is there.
            assert not [p for p in store.objects if "/.claims/" not in p]
            continue
        mine.send_unsent(lambda _: None)
        assert list(assert_whole(store).values()) == ["a"]
        assert not unsent.waiting(mine.copy)
        data = {p: n for p, n in store.written.items() if ".claims" not in p}
        assert set(data.values()) == {1}


@pytest.mark.parametrize("conditions", ["kept", "ignored"])
def test_a_slow_writer_that_is_cleaned_away_at_any_request_stores_its_run_once(
    tmp_path: Path, conditions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "ABANDONED", -1)
    store = Faulty.make(conditions=conditions)
    count, renamed = requests_of(store, lambda: publish(tmp_path)), 0
    for number in range(count):
        store, home = Faulty.make(conditions=conditions), tmp_path / str(number)
        home.mkdir()
        other, lines = machine(home, "cleaner"), []

        def clean(other: shared.Storage = other, store: Faulty = store) -> None:
            store.before = lambda *_: None
            other.clean()

        store.before, _ = at_request(number, clean)
        place = publish(home, report=lines.append)
        store.before = lambda *_: None
        other.clean()
        assert assert_whole(store) == {place.name: "a"}
        assert json.loads((place / MANIFEST).read_bytes())["id"] == place.name
        assert not (place / ".claim").exists()
        assert bool(lines) == (place.name != NAME)
        renamed += place.name != NAME
    # The cleaner found something to take at some requests, and nothing at others.
    assert 0 < renamed < count


def clean_while_a_run_is_published(home: Path, number: int) -> tuple[bool, Faulty, Path]:
    """Have a writer wait before it sends run.json, and go on before one request of the cleaner.

    Return whether the cleaner made that request, the storage, and the folder of the run.
    """
    store, writer, cleaner = Faulty.make(), machine(home, "writer"), machine(home, "cleaner")
    assert writer.claim(NAME)
    waits, may_go = threading.Event(), threading.Event()
    places: list[Path] = []
    folder = folder_of(home, "a")
    thread = threading.Thread(
        target=lambda: places.append(writer.publish(folder, NAME, lambda _: None))
    )

    def go_on() -> None:
        may_go.set()
        thread.join(10)

    hook, seen = at_request(number, go_on)

    def before(request: str, path: str) -> None:
        if threading.current_thread() is not thread:
            hook(request, path)
        elif request == "put" and path.endswith(f"/{NAME}/{MANIFEST}"):
            waits.set()
            may_go.wait(10)

    store.before = before
    thread.start()
    assert waits.wait(10)
    cleaner.clean()
    go_on()
    store.before = lambda *_: None
    cleaner.clean()
    return len(seen) > number, store, places[0]


def test_a_cleaner_leaves_a_run_that_is_published_while_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "ABANDONED", -1)
    names, more = set(), True
    for number in itertools.count():
        (home := tmp_path / str(number)).mkdir()
        more, store, place = clean_while_a_run_is_published(home, number)
        assert assert_whole(store) == {place.name: "a"}
        names.add(place.name)
        if not more:
            break
    # The writer keeps its name at some requests, and loses it at others.
    assert names == {NAME, f"{NAME}-2"}


def test_a_deletion_killed_at_any_request_leaves_no_run_with_files_missing(tmp_path: Path) -> None:
    def stored(home: Path) -> Faulty:
        store = Faulty.make()
        publish(home)
        machine(home, "reader").refresh()
        return store

    store = stored(tmp_path)
    count = requests_of(store, lambda: machine(tmp_path, "writer").delete(NAME))
    for number in range(count):
        home = tmp_path / str(number)
        home.mkdir()
        store = stored(home)
        store.before, _ = at_request(number, die)
        with pytest.raises(Killed):
            machine(home, "writer").delete(NAME)
        store.before = lambda *_: None
        assert_whole(store)
        reader = machine(home, "reader")
        reader.refresh()
        # Nobody keeps a copy of a run that has begun to go.
        hidden = any("/.gone-" in path for path in store.objects)
        assert (reader.copy / NAME).exists() == (not hidden and NAME in store.runs(ROOT))
        assert reader.listed() == ([NAME] if (reader.copy / NAME).exists() else [])
        reader.clean()
        if hidden:
            assert not [path for path in store.objects if "/.claims/" not in path]
        # A name is never used again: late requests of its writers and deleters hurt nobody.
        assert not (hidden and reader.claim(NAME))


def test_a_lost_reply_to_the_last_write_is_no_loss_and_no_second_run(tmp_path: Path) -> None:
    store = Faulty.make()
    writer = machine(tmp_path, "writer")
    assert writer.claim(NAME)

    def before(request: str, path: str) -> None:
        if path.endswith(f"/{NAME}/{MANIFEST}") and store.runs(ROOT):
            store.down = "all"

    store.before = before
    with pytest.raises(StoreError, match=r"complete in .*unsent.*next command"):
        writer.publish(folder_of(tmp_path, "a"), NAME)
    # Requests are lost from the read-back on: the writer cannot know that the run is stored.
    assert list(store.runs(ROOT)) == [NAME]
    store.before, store.down = (lambda *_: None), ""
    lines: list[str] = []
    machine(tmp_path, "writer").refresh(lines.append)
    assert assert_whole(store) == {NAME: "a"}
    assert [line for line in lines if "sent now" in line and NAME in line] == lines
    assert (writer.copy / NAME / MANIFEST).is_file()
    assert store.written[f"{ROOT}/{NAME}/{MANIFEST}"] == 1


@pytest.mark.parametrize("left_by", ["this version", "an earlier version"])
def test_an_unsent_run_whose_name_is_taken_is_sent_under_another(
    tmp_path: Path, left_by: str
) -> None:
    store = Faulty.make()
    writer = machine(tmp_path, "writer")
    if left_by == "this version":
        store.down = "all"
        with pytest.raises(StoreError, match="next command"):
            writer.publish(folder_of(tmp_path, "b"), NAME)
        store.down = ""
    else:
        (writer.copy / ".unsent").mkdir()
        folder_of(tmp_path, "b").rename(writer.copy / ".unsent" / NAME)
    other = machine(tmp_path, "other")
    assert other.claim(NAME)
    other.publish(folder_of(tmp_path, "a"), NAME)
    lines: list[str] = []
    writer.refresh(lines.append)
    assert assert_whole(store) == {NAME: "a", f"{NAME}-2": "b"}
    assert f"the name {NAME} is taken" in lines[0] and f"stored as {NAME}-2" in lines[0]
    assert "sent now" in lines[1] and lines[1].split(",")[0].endswith(f"{NAME}-2")
    assert (writer.copy / f"{NAME}-2" / MANIFEST).is_file() and not unsent.waiting(writer.copy)


def test_what_an_earlier_version_stored_without_knowing_is_not_sent_again(tmp_path: Path) -> None:
    store = Faulty.make()
    writer = machine(tmp_path, "writer")
    folder = folder_of(tmp_path, "a")
    for path in folder.iterdir():
        store.pipe_file(f"{ROOT}/{NAME}/{path.name}", path.read_bytes())
    (writer.copy / ".unsent").mkdir()
    folder.rename(writer.copy / ".unsent" / NAME)
    writer.send_unsent((lines := []).append)
    assert assert_whole(store) == {NAME: "a"} and (writer.copy / NAME).is_dir()
    assert len(lines) == 1 and lines[0].startswith(f"sent now: {ADDRESS}/{NAME},")


def test_equal_runs_of_two_writers_are_two_runs(tmp_path: Path) -> None:
    store = Faulty.make(2, replies=0.3)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        place = publish(tmp_path / name)
    assert place.name == f"{NAME}-2" and list(assert_whole(store).values()) == ["a", "a"]


def test_a_damaged_unsent_run_costs_only_itself(tmp_path: Path) -> None:
    store = Faulty.make()
    writer = machine(tmp_path, "writer")
    store.down = "all"
    for content in ("a", "b", "c"):
        with pytest.raises(StoreError):
            writer.publish(folder_of(tmp_path, content, f"night-{content}"), f"night-{content}")
    store.down = ""
    (writer.copy / ".unsent" / "night-a" / MANIFEST).write_text("{", encoding="utf-8")
    (writer.copy / ".unsent" / "night-b" / ".claim").write_text("[]", encoding="utf-8")
    lines: list[str] = []
    writer.refresh(lines.append)
    assert assert_whole(store) == {"night-c": "c"}
    assert [line.startswith("run not sent") and "damaged" in line for line in lines] == [
        *(True, True, False)
    ]
    # The storage answered: nothing is wrong with the way to it.
    assert not any("expected an answer" in line for line in lines)
    # What cannot be sent claims no name.
    assert not [path for path in store.objects if "/night-a" in path or "/night-b" in path]
    assert [folder.name for folder in unsent.waiting(writer.copy)] == ["night-a", "night-b"]


@pytest.mark.parametrize("part", ["open", "take_out"])
def test_an_unsent_run_that_this_disk_refuses_costs_only_itself(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Faulty.make()
    writer = machine(tmp_path, "writer")
    store.down = "all"
    for content in ("a", "b"):
        with pytest.raises(StoreError):
            writer.publish(folder_of(tmp_path, content, f"night-{content}"), f"night-{content}")
    store.down = ""
    at = unsent.os if part == "open" else shared
    whole = getattr(at, part)

    def refusing(path: Path, *others: Any, **how: Any) -> Any:
        if str(path).endswith("night-a"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return whole(path, *others, **how)

    monkeypatch.setattr(at, part, refusing)
    lines: list[str] = []
    writer.send_unsent(lines.append)
    assert [line.split(":")[0] for line in lines] == ["run not sent", "sent now"]
    assert "Permission denied" in lines[0] and "It is complete in" in lines[0]
    assert "night-b" in writer.objects.names()


@pytest.mark.parametrize("name", [NAME, "another"])
def test_an_unsent_run_that_was_edited_is_not_sealed_anew(tmp_path: Path, name: str) -> None:
    """Sending gives run.json another id, and with it a seal: what was edited must not get it."""
    store, writer, folder = Faulty.make(), machine(tmp_path, "writer"), folder_of(tmp_path, "a")
    content = text_of({"schema": SCHEMA, "id": NAME, "content": "a"})
    (folder / MANIFEST).write_text(content, encoding="utf-8")
    store.down = "all"
    with pytest.raises(StoreError):
        writer.publish(folder, NAME)
    store.down = ""
    [waiting] = unsent.waiting(writer.copy)
    edited = content.replace('"content": "a"', '"content": "b"')
    (waiting / MANIFEST).write_text(edited, encoding="utf-8")
    with pytest.raises(StoreError, match="does not fit its seal"):
        unsent.set_name(waiting, unsent.Note(name, None))
    writer.refresh(lambda line: None)
    assert (waiting / MANIFEST).read_text(encoding="utf-8") == edited
    assert not store.runs(ROOT)


def test_a_run_that_is_being_sent_is_left_to_its_sender(tmp_path: Path) -> None:
    store = Faulty.make()
    lines: list[str] = []

    def another() -> None:
        store.before = lambda *_: None
        machine(tmp_path, "writer").send_unsent(lines.append)

    writer = machine(tmp_path, "writer")
    assert writer.claim(NAME)
    store.before, _ = at_request(1, another)
    writer.publish(folder_of(tmp_path, "a"), NAME)
    assert (lines, assert_whole(store)) == ([], {NAME: "a"})


def test_a_run_is_kept_when_the_storage_is_lost_before_its_name_is_claimed(tmp_path: Path) -> None:
    store = Faulty.make()
    run = earlier(measurement(), day=1, suites=SUITES)
    copy = machine(tmp_path, "writer").copy
    store.down = "all"
    with pytest.raises(StoreError, match="next command"):
        write_run(copy, run)
    assert not list_runs(copy)[0] and not store.objects
    store.down = ""
    machine(tmp_path, "writer").refresh(lambda _: None)
    assert [info.manifest.id for info in list_runs(copy)[0]] == [run.id]
    assert list(store.runs(ROOT)) == [run.id]


def test_an_interrupted_writer_keeps_its_run(tmp_path: Path) -> None:
    store = Faulty.make()
    run = earlier(measurement(), day=1, suites=SUITES)
    copy = machine(tmp_path, "writer").copy

    def interrupt(request: str, path: str) -> None:
        if path.endswith(".parquet"):
            raise KeyboardInterrupt

    store.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        write_run(copy, run)
    store.before = lambda *_: None
    machine(tmp_path, "writer").refresh(lambda _: None)
    assert list(store.runs(ROOT)) == [run.id] and (copy / run.id).is_dir()


def test_a_half_fetched_run_is_no_run_of_the_copy(tmp_path: Path) -> None:
    store = Faulty.make()
    place = publish(tmp_path)
    whole = store.objects[path := f"{ROOT}/{place.name}/report.html"]

    def halve(request: str, name: str) -> None:
        if request == "get" and name == path:
            store.objects[path] = b"", whole[1]

    store.before = halve
    reader = machine(tmp_path, "reader")
    reader.refresh()
    assert not (reader.copy / place.name).exists()
    store.before, store.objects[path] = (lambda *_: None), whole
    reader.refresh()
    assert (reader.copy / place.name / "report.html").read_bytes() == whole[0]


def test_an_error_that_is_an_answer_is_not_asked_again(tmp_path: Path) -> None:
    store = Faulty.make()
    asked: list[str] = []

    def forbid(request: str, path: str) -> None:
        asked.append(request)
        raise PermissionError("403")

    store.before = forbid
    for work in (machine(tmp_path, "a").listed, lambda: machine(tmp_path, "a").claim("x")):
        asked.clear()
        with pytest.raises(StoreError, match="provide credentials"):
            work()
        assert len(asked) == 1


def test_a_page_that_is_added_after_the_run_reaches_every_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Faulty.make()
    writer, reader = machine(tmp_path, "writer"), machine(tmp_path, "reader")
    folder = folder_of(tmp_path, "a")
    (folder / "report.html").rename(page := tmp_path / "report.html")
    assert writer.claim(NAME)
    writer.publish(folder, NAME)
    reader.refresh()
    assert not (reader.copy / NAME / "report.html").exists()
    writer.put(page, f"{NAME}/report.html")
    count = requests_of(store, reader.refresh)
    assert (reader.copy / NAME / "report.html").read_text(encoding="utf-8") == "a"
    # Of an old run nothing more is expected, and nothing is asked.
    monkeypatch.setattr(shared, "ABANDONED", -1)
    assert requests_of(store, reader.refresh) < count


def test_a_page_that_goes_while_it_is_fetched_leaves_no_empty_one(tmp_path: Path) -> None:
    """An empty file in its place would never be fetched again."""
    store = Faulty.make()
    publish(tmp_path)
    reader = machine(tmp_path, "reader")
    reader.refresh()
    (page := reader.copy / NAME / "report.html").unlink()
    there = store.objects[path := f"{ROOT}/{NAME}/report.html"]

    def delete(request: str, name: str) -> None:
        if (request, name) == ("get", path):
            del store.objects[path]

    store.before = delete
    reader.refresh()
    assert not page.exists() and path not in store.objects
    store.before, store.objects[path] = (lambda *_: None), there
    reader.refresh()
    assert page.read_bytes() == there[0]


REQUESTS = {
    "names": lambda there: there.names(),
    "names where nothing is": lambda there: Objects(there.files, "bucket/none").names(),
    "deletions": lambda there: there.going(),
    "sizes": lambda there: there.inside("a"),
    "all sizes": lambda there: there.inside_all(),
    "times": lambda there: there.newest("a"),
    "the time": lambda there: isinstance(there.now(), datetime),
    "read": lambda there: (there.read("a/x"), there.read("a/none")),
    "create": lambda there: (there.create("c/x", b"new"), there.create("a/x", b"new")),
    "remove": lambda there: there.remove("a/x"),
    "remove what is not there": lambda there: there.remove("a/none"),
    "remove all": lambda there: there.remove_folder("a"),
}


@pytest.mark.parametrize("work", REQUESTS.values(), ids=REQUESTS)
def test_any_request_may_be_lost_once_and_the_answer_is_the_same(work: Any) -> None:
    then = datetime(2026, 11, 1, tzinfo=UTC)

    def lose() -> None:
        raise ConnectionError(LOST)

    def answer(lost: int) -> tuple[Any, dict[str, bytes], int]:
        store = Faulty.make()
        for path in ("a/x", "a/y", "b/x", ".gone-b"):
            store.objects[f"{ROOT}/{path}"] = path.encode(), then
        store.before, seen = at_request(lost, lose)
        answer = work(Objects(store, ROOT))
        return answer, {path: content for path, (content, _) in store.objects.items()}, len(seen)

    *whole, count = answer(-1)
    for number in range(count):
        *found, asked = answer(number)
        assert found == whole and asked >= count


@pytest.mark.parametrize("conditions", ["kept", "refused"])
def test_a_file_that_comes_and_goes_may_be_lost_once(tmp_path: Path, conditions: str) -> None:
    """A file replaces what has its name, also where its first request was lost."""
    (source := tmp_path / "source").write_bytes(b"new")
    for lost in ("put", "get"):
        store, left = Faulty.make(conditions=conditions), [lost]
        there = Objects(store, ROOT)
        there.create("a/x", b"old")

        def lose_once(request: str, path: str, left: list[str] = left) -> None:
            if request in left:
                left.remove(request)
                raise ConnectionError(LOST)

        store.before = lose_once
        there.replace("a/x", source)
        there.fetch("a/x", tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == b"new" and not left


def test_a_storage_that_is_down_is_asked_a_few_times_and_then_named(tmp_path: Path) -> None:
    """By every way that leads to it; what is here of it is not taken for what is there."""
    store = Faulty.make()
    place = publish(tmp_path)
    reader = machine(tmp_path, "reader")
    reader.refresh()
    asked: list[str] = []
    store.before, store.down = (lambda request, path: asked.append(request)), "all"
    for work in (
        reader.refresh,
        reader.listed,
        reader.clean,
        reader.check_writable,
        lambda: shared.refresh(reader.copy),
        lambda: shared.open_copy(ADDRESS),
        lambda: reader.claim("another"),
        lambda: reader.delete(NAME),
        lambda: reader.get([f"{NAME}/{MANIFEST}"], tmp_path / "got"),
        lambda: reader.put(place / MANIFEST, f"{NAME}/{MANIFEST}"),
    ):
        asked.clear()
        with pytest.raises(StoreError, match=f"answer from {ADDRESS}, but ConnectionError: {LOST}"):
            work()
        assert max(Counter(asked).values()) == objects.TRIES
    # Nothing of it is needed to open the copy alone, or a folder that is no copy.
    assert shared.open_copy(ADDRESS, runs=False).is_dir()
    shared.refresh(tmp_path)


class ClientError(Exception):
    """An error of a storage's client, which need not be one of the operating system."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("none"), "to exist, but none; create the bucket"),
        (PermissionError("403"), "but 403; provide credentials"),
        (ConnectionError("reset"), "but ConnectionError: reset; check that"),
        (ClientError("throttled"), "but ClientError: throttled; check that"),
        (RuntimeError("closed"), "but RuntimeError: closed; check that"),
    ],
)
def test_every_error_of_a_storage_names_it_and_what_to_do(
    tmp_path: Path, error: Exception, said: str
) -> None:
    store = Faulty.make()

    def refuse(request: str, path: str) -> None:
        raise error

    store.before = refuse
    with pytest.raises(StoreError) as told:
        machine(tmp_path, "a").listed()
    assert ADDRESS in str(told.value) and said in str(told.value)
    # Those of this tool say already what is wrong.
    error = StoreError("said")
    with pytest.raises(StoreError, match=r"^said$"), shared._refusals_named(ADDRESS):
        raise error


def test_a_page_has_the_name_that_its_run_has_on_the_storage(tmp_path: Path) -> None:
    """Also where the name was taken away while the run was sent."""
    store = Faulty.make()
    night = earlier(measurement(), day=1, suites=SUITES)

    def take(request: str, path: str) -> None:
        if request == "put" and path.endswith(".parquet"):
            store.before = lambda *_: None
            claims.retire(Objects(store, ROOT), night.id)

    store.before = take
    folder = write_run(machine(tmp_path, "writer").copy, night, lambda run: f"<p>{run.id}</p>")
    assert folder.name == f"{night.id}-2"
    assert (folder / "report.html").read_text(encoding="utf-8") == f"<p>{folder.name}</p>"
    there = store.objects[f"{ROOT}/{folder.name}/report.html"]
    assert there[0] == (folder / "report.html").read_bytes()


def test_a_run_that_cannot_be_moved_to_the_unsent_ones_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faulty.make()
    copy = machine(tmp_path, "writer").copy

    def refuse(*_: Any) -> Path:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shared, "put_in", refuse)
    with pytest.raises(StoreError, match="Input/output error"):
        write_run(copy, earlier(measurement(), day=1, suites=SUITES))
    [left] = copy.glob(".partial-*")
    assert (left / MANIFEST).is_file() and (left / "measurements.parquet").is_file()


def test_a_page_comes_before_the_verdict_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here and there: a verdict never speaks of a page that is not there."""
    store = Faulty.make()
    folder = write_run(machine(tmp_path, "writer").copy, earlier(measurement(), suites=SUITES))
    here, there, aside = list[str](), list[str](), writer.written_aside

    def watched(path: Path) -> Any:
        here.append(path.name)
        return aside(path)

    monkeypatch.setattr(writer, "written_aside", watched)
    store.before = lambda request, path: there.append(path.rpartition("/")[2])
    writer.add_verdict(folder, "PASS", "<p>page</p>")
    assert here == there == ["report.html", "verdict.json"]


def test_who_opens_a_copy_is_told_of_the_runs_that_were_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, lines = Faulty.make(), list[str]()
    storage = shared.storage_of(shared.open_copy(ADDRESS))
    assert storage is not None
    store.down = "all"
    with pytest.raises(StoreError):
        storage.publish(folder_of(tmp_path, "a"), NAME)
    store.down = ""
    # Nothing is sent where the runs stay as they are.
    shared.open_copy(ADDRESS, runs=False, report=lines.append)
    assert lines == [] and not store.runs(ROOT)
    shared.open_copy(ADDRESS, report=lines.append)
    assert [line.startswith(f"sent now: {ADDRESS}/{NAME},") for line in lines] == [True]
    assert capsys.readouterr().err == ""
