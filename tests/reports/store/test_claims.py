"""Claims, cleaning and sending on shared storage, one rule at a time."""

from __future__ import annotations

import errno
import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reports.store import claims, objects, sending, shared, unsent
from reports.store.claims import CLAIMS, claim, held, retire
from reports.store.objects import GONE, TRIES, Objects, again
from reports.store.schema import MANIFEST, StoreError
from tests.reports.store.faulty import Faulty
from tests.reports.store.test_lost_replies import (
    NAME,
    ROOT,
    assert_whole,
    at_request,
    folder_of,
    machine,
    publish,
    quick,
    requests_of,
)

__all__ = ["quick"]
HOURS = timedelta(hours=1)


def storage(**options: object) -> tuple[Faulty, Objects]:
    store = Faulty.make(**options)  # pyright: ignore[reportArgumentType]
    return store, Objects(store, ROOT)


@pytest.mark.parametrize("conditions", ["kept", "ignored", "refused"])
def test_a_name_has_one_owner_whatever_the_storage_knows(conditions: str) -> None:
    store, below = storage(conditions=conditions)
    token = claim(below, NAME)
    assert token and held(below, NAME, token)
    before = dict(store.objects)
    assert claim(below, NAME) is None
    # With conditions the loser writes nothing; without them it never disturbs the owner.
    assert conditions != "kept" or store.objects == before
    assert held(below, NAME, token) and not held(below, NAME, "another")


def test_two_that_claim_at_once_without_conditions_both_give_up() -> None:
    store, below = storage(conditions="ignored")
    found: list[str | None] = []

    def another() -> None:
        store.before = lambda *_: None
        found.append(claim(below, NAME))

    for number in range(4):
        store.objects.clear()
        found.clear()
        store.before, _ = at_request(number, another)
        found.append(claim(below, NAME))
        assert len(found) == 2 and None in found


def test_who_gives_up_to_another_waits_a_while_that_chance_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else both would meet again at the next name; who has a name, or finds it taken, goes on."""
    pauses: list[float] = []
    monkeypatch.setattr(claims.time, "sleep", pauses.append)
    for _ in range(20):
        store, below = storage(conditions="ignored")

        def another(request: str, path: str, store: Faulty = store) -> None:
            store.before = lambda *_: None
            store.pipe_file(f"{ROOT}/{CLAIMS}/{NAME}/another", b"")

        store.before = another
        assert claim(below, NAME) is None
    assert len(set(pauses)) > 10 and min(pauses) >= 0 and max(pauses) <= claims.COLLISION
    pauses.clear()
    _, below = storage()
    assert claim(below, NAME) and claim(below, NAME) is None and pauses == []


def test_a_claim_that_is_retired_or_wiped_is_not_held() -> None:
    store, below = storage()
    token = claim(below, NAME)
    assert token is not None
    retire(below, NAME)
    assert not held(below, NAME, token) and claim(below, NAME) is None
    store.objects.clear()
    assert not held(below, NAME, token)


def test_a_run_without_a_claim_has_its_name() -> None:
    store, below = storage()
    store.pipe_file(f"{ROOT}/{NAME}/{MANIFEST}", b"{}")
    assert claim(below, NAME) is None
    assert not [path for path in store.objects if CLAIMS in path]


def test_a_write_says_whose_content_is_there() -> None:
    _, below = storage()
    assert below.create("x", b"ours") and below.create("x", b"ours")
    assert not below.create("x", b"theirs") and below.read("x") == b"ours"
    assert below.read("y") is None


def test_a_deletion_whose_reply_was_lost_is_done() -> None:
    store, below = storage(replies=1.0)
    store.objects[f"{ROOT}/x"] = b"", store_time(store)
    below.remove("x")
    assert not store.objects


def store_time(store: Faulty) -> datetime:
    """Return the time of the storage's clock."""
    store.replies, replies = 0.0, store.replies
    store.pipe_file("other/now", b"")
    store.replies = replies
    return store.objects.pop("other/now")[1]


@pytest.mark.parametrize(
    "error",
    [ConnectionError("reset"), TimeoutError("slow"), OSError("503"), RuntimeError("of a library")],
)
def test_an_operation_is_tried_a_few_times(error: Exception) -> None:
    failures = [error] * (TRIES - 1)

    def work() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert again(work) == "done"
    failures += [error] * TRIES
    with pytest.raises(type(error)):
        again(work)
    assert not failures


@pytest.mark.parametrize("error", [FileNotFoundError("404"), PermissionError("403")])
def test_a_definite_answer_is_asked_for_once(error: Exception) -> None:
    failures = [error] * 2
    with pytest.raises(type(error)):
        again(lambda: (_ for _ in ()).throw(failures.pop()))
    assert len(failures) == 1


def test_a_bucket_that_is_not_there_is_no_empty_folder(tmp_path: Path) -> None:
    store, _ = storage()
    assert machine(tmp_path, "a").listed() == []
    store.bucket = "another"
    with pytest.raises(StoreError, match="create the bucket"):
        machine(tmp_path, "a").listed()


@pytest.mark.parametrize(
    ("claimed", "first", "last", "stays"),
    [(2, 2, 0, True), (2, 0, 0, True), (0, 2, 2, True), (2, 2, 2, False)],
)
def test_an_unfinished_run_goes_when_nothing_came_for_an_hour(
    tmp_path: Path, claimed: int, first: int, last: int, stays: bool
) -> None:
    store, below = storage()
    for age, paths in ((claimed, ()), (first, ("a",)), (last, ("b",))):
        store.shift = -age * HOURS
        if not paths:
            assert claim(below, NAME)
        for path in paths:
            assert below.create(f"{NAME}/{path}", b"")
    store.shift = timedelta()
    machine(tmp_path, "cleaner").clean()
    assert (f"{ROOT}/{NAME}/a" in store.objects) is stays
    assert (f"{ROOT}/{CLAIMS}/{NAME}/retired" in store.objects) is not stays


def test_what_stays_ends_no_cleaning(tmp_path: Path) -> None:
    """Between remains of killed writers stand a run that is whole and one that is still written,
    and one whose run.json the storage lost: the next refresh would delete its copy here too."""
    store, below = storage()
    names = [f"2026-11-0{n}T00-00-00Z-abcdefa" for n in range(1, 7)]
    for age, number, path in ((2, 0, "a"), (2, 1, MANIFEST), (2, 2, "a"), (0, 3, "a"), (2, 4, "a"),
                              (2, 5, "a")):  # fmt: skip
        store.shift = -age * HOURS
        assert below.create(f"{names[number]}/{path}", b"")
    store.shift = timedelta()
    assert below.names() == names
    cleaner = machine(tmp_path, "cleaner")
    (cleaner.copy / names[4]).mkdir()
    cleaner.clean()
    assert below.names() == [names[1], names[3], names[4]]
    # Names are taken from those that were deleted alone.
    claims = {path.split("/")[3] for path in store.objects if f"/{CLAIMS}/" in path}
    assert claims == {names[0], names[2], names[5]}


@pytest.mark.parametrize("error", [OSError("none"), NotImplementedError("none"), KeyError("none")])
def test_a_storage_without_folders_deletes_the_objects_of_a_run(error: Exception) -> None:
    """Its client may raise any error for a request that it does not have."""
    store, below = storage()
    for name in ("a", "b"):
        below.create(f"{NAME}/{name}", b"")
    below.create("another/a", b"")

    def rmdir(path: str) -> None:
        raise error

    store.rmdir = rmdir  # pyright: ignore[reportAttributeAccessIssue]
    below.remove_folder(NAME)
    assert below.inside_all() == {"another": {"a": 0}}


def test_a_deleted_run_that_cannot_be_deleted_here_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes as soon as it can, and what is new comes all the same."""
    storage()
    publish(tmp_path, "a")
    reader = machine(tmp_path, "reader")
    reader.refresh()
    machine(tmp_path, "writer").delete(NAME)
    publish(tmp_path, "b")
    unlink = os.unlink

    def refuse(path: Any, **how: Any) -> None:
        if str(path).endswith(MANIFEST):
            raise PermissionError(errno.EPERM, "no", path)
        unlink(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        reader.refresh()
    there = [path.name for path in reader.copy.iterdir() if path.name[0] != "."]
    assert sorted(there) == [NAME, f"{NAME}-2"]
    reader.refresh()
    assert not (reader.copy / NAME).exists() and (reader.copy / f"{NAME}-2").is_dir()


def test_the_age_of_objects_is_told_by_the_clock_of_the_storage(tmp_path: Path) -> None:
    store, below = storage()
    store.shift = -5 * HOURS
    assert below.create(f"{NAME}/a", b"")
    machine(tmp_path, "cleaner").clean()
    assert f"{ROOT}/{NAME}/a" in store.objects


@pytest.mark.parametrize("lost", ["measurements.parquet", "run.json"])
def test_what_the_storage_lost_after_it_took_it_is_sent_again(tmp_path: Path, lost: str) -> None:
    store, _ = storage()
    lists: list[str] = []

    def lose(request: str, path: str) -> None:
        if request == "list" and store.runs(ROOT) and not lists:
            lists.append(path)
            del store.objects[f"{ROOT}/{NAME}/{lost}"]

    store.before = lose
    place = publish(tmp_path)
    assert lists and assert_whole(store) == {place.name: "a"}


def test_a_file_that_the_storage_cut_short_is_not_there(tmp_path: Path) -> None:
    store, _ = storage()
    cut: list[str] = []

    def shorten(request: str, path: str) -> None:
        if request == "list" and store.runs(ROOT) and not cut:
            cut.append(name := f"{ROOT}/{NAME}/measurements.parquet")
            store.objects[name] = b"", store.objects[name][1]

    store.before = shorten
    place = publish(tmp_path)
    assert cut and place.name != NAME and assert_whole(store) == {place.name: "a"}


def test_a_file_of_another_in_a_claimed_folder_is_not_taken_for_ours(tmp_path: Path) -> None:
    store, below = storage()
    writer = machine(tmp_path, "writer")
    assert writer.claim(NAME)
    below.create(f"{NAME}/report.html", b"b")
    assert writer.publish(folder_of(tmp_path, "a"), NAME).name == f"{NAME}-2"
    assert assert_whole(store) == {f"{NAME}-2": "a"}
    assert below.read(f"{NAME}/report.html") == b"b"


def test_a_run_that_was_sent_meanwhile_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "unsent").mkdir()

    def moved(_: int) -> bool:
        folder.rename(tmp_path / "sent")
        return True

    monkeypatch.setattr(unsent, "_lock", moved)
    with unsent.locked(folder) as ours:
        assert not ours
    with unsent.locked(folder) as ours:
        assert not ours


def test_a_run_that_another_process_fetched_meanwhile_is_there_once(tmp_path: Path) -> None:
    store, _ = storage()
    fetched: list[int] = []

    def fetch(request: str, path: str) -> None:
        if request == "list" and store.runs(ROOT):
            store.before = lambda *_: None
            (other := machine(tmp_path, "writer")).refresh()
            fetched.append((other.copy / NAME).stat().st_ino)

    store.before = fetch
    place = publish(tmp_path)
    assert place.name == NAME and (place / MANIFEST).is_file()
    # Someone may read what was fetched: it is not replaced.
    assert [place.stat().st_ino] == fetched
    assert not unsent.waiting(place.parent) and assert_whole(store) == {NAME: "a"}


@pytest.mark.parametrize("name", [MANIFEST, "report.html"])
def test_a_stale_folder_in_the_copy_gives_way(tmp_path: Path, name: str) -> None:
    store, _ = storage()
    (stale := machine(tmp_path, "writer").copy / NAME).mkdir()
    (stale / name).write_text("{}", encoding="utf-8")
    place = publish(tmp_path)
    assert place == stale and b'"a"' in (place / MANIFEST).read_bytes() and store.runs(ROOT)


def test_pauses_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(objects, "PAUSE", 1.0)
    monkeypatch.setattr("time.sleep", pauses.append)
    store, below = storage(requests=1.0)
    for work in (lambda: below.read("x"), lambda: again(lambda: store.ls("x"))):
        pauses.clear()
        with pytest.raises(ConnectionError):
            work()
        assert pauses == [2.0**n for n in range(TRIES - 1)]
    # A write that takes no effect is repeated as often, and what is there is read in between.
    pauses.clear()
    store.requests, store.down, asked = 0.0, "put", []
    store.before = lambda request, _: asked.append(request)
    with pytest.raises(ConnectionError):
        below.create("x", b"ours")
    assert pauses == [2.0**n for n in range(TRIES - 1)]
    assert asked == ["put", "get"] * TRIES


def test_every_line_about_an_unsent_run_names_it(tmp_path: Path) -> None:
    store, _ = storage()
    writer = machine(tmp_path, "writer")
    store.down = "all"
    with pytest.raises(StoreError, match=rf"complete in .*{NAME}"):
        writer.publish(folder_of(tmp_path, "a"), NAME)
    lines: list[str] = []
    writer.send_unsent(lines.append)
    assert len(lines) == 1 and lines[0].startswith("run not sent") and NAME in lines[0]
    store.down = ""
    writer.send_unsent(lines.append)
    assert len(lines) == 2 and lines[1].startswith("sent now") and NAME in lines[1]


def test_a_local_file_is_created_whole_and_once(tmp_path: Path) -> None:
    below = machine_of(f"file://{tmp_path}/runs")
    assert below.create("night/x", b"ours") and not below.create("night/x", b"theirs")
    assert (tmp_path / "runs" / "night" / "x").read_bytes() == b"ours"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["night"]
    below.remove_folder("night")
    assert not list((tmp_path / "runs").iterdir()) and below.names() == []


def machine_of(address: str) -> Objects:
    """Return the objects of an address."""
    return shared._connect(address, Path()).objects


def test_no_run_json_is_sent_below_a_name_that_was_taken_away(tmp_path: Path) -> None:
    store, below = storage()
    writer = machine(tmp_path, "writer")
    assert writer.claim(NAME)
    retire(below, NAME)
    assert writer.publish(folder_of(tmp_path, "a"), NAME).name == f"{NAME}-2"
    assert not store.written[f"{ROOT}/{NAME}/{MANIFEST}"]
    assert assert_whole(store) == {f"{NAME}-2": "a"}


def test_a_run_of_another_below_a_name_that_was_taken_away_stays(tmp_path: Path) -> None:
    store, below = storage()
    writer = machine(tmp_path, "writer")
    assert writer.claim(NAME)
    retire(below, NAME)
    store.pipe_file(path := f"{ROOT}/{NAME}/{MANIFEST}", b"another's")
    assert writer.publish(folder_of(tmp_path, "a"), NAME).name == f"{NAME}-2"
    assert store.objects[path][0] == b"another's" and len(store.runs(ROOT)) == 2


def test_a_run_json_sent_before_the_name_was_taken_away_is_deleted(tmp_path: Path) -> None:
    """A writer sent it, was killed before it looked at its claim, and sends the run again."""
    store, below = storage()
    folder, token = folder_of(tmp_path, "a"), claim(below, NAME)
    assert token is not None
    store.pipe_file(f"{ROOT}/{NAME}/{MANIFEST}", (folder / MANIFEST).read_bytes())
    retire(below, NAME)
    unsent.set_name(folder, unsent.Note(NAME, token))
    assert sending.deliver(below, folder) == (NAME, f"{NAME}-2")
    assert assert_whole(store) == {f"{NAME}-2": "a"}


@pytest.mark.parametrize("token", ["t", None])
def test_an_unsent_run_has_the_id_that_its_note_names(token: str | None, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a")
    unsent.set_name(folder, unsent.Note(f"{NAME}-2", token))
    assert json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["id"] == f"{NAME}-2"


def test_the_object_that_shows_the_time_is_deleted_also_if_it_cannot_be_read() -> None:
    store, below = storage()

    def fails(path: str) -> None:
        raise FileNotFoundError(path)

    store.modified = fails  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FileNotFoundError):
        below.now()
    assert not store.find(ROOT)


def test_the_name_of_a_deleted_run_without_a_claim_is_not_free(tmp_path: Path) -> None:
    store, below = storage()
    store.pipe_file(f"{ROOT}/{NAME}/{MANIFEST}", b"{}")
    machine(tmp_path, "a").delete(NAME)
    assert not store.runs(ROOT) and claim(below, NAME) is None


@pytest.mark.parametrize(
    ("age", "kept"),
    [(-5, True), (0, True), (3500, True), (3700, False), (24 * 3600 + 600, False)],
)
def test_remains_are_as_old_as_their_newest_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int, kept: bool
) -> None:
    """An object that was sent after the storage told its time is younger than nothing."""
    _, below = storage()
    below.create(f"{NAME}/measurements.parquet", b"half")
    written = below.newest(NAME)
    assert written is not None
    monkeypatch.setattr(Objects, "now", lambda self: written + timedelta(seconds=age))
    shared.Storage("s3://bucket/runs", tmp_path, below).clean()
    assert bool(below.inside(NAME)) is kept


def test_machines_that_clean_at_once_refuse_no_run(tmp_path: Path) -> None:
    """One machine cleans before each request of another, which then cleans what is gone."""

    def remains() -> Faulty:
        store, below = storage()
        store.shift = -2 * HOURS
        for path in (f"{NAME}/a", f"{NAME}/b", f"{GONE}deleted", "deleted/a"):
            assert below.create(path, b"")
        store.shift = timedelta()
        return store

    number = requests_of(remains(), lambda: machine(tmp_path, "one").clean())
    for turn in range(number):
        store = remains()
        one, other = machine(tmp_path, "one"), machine(tmp_path, "other")
        store.before, _ = at_request(turn, other.clean)
        one.clean()
        assert {path.split("/")[2] for path in store.objects} == {CLAIMS}


def test_what_lies_in_folders_of_a_run_is_not_the_run_s() -> None:
    """Nor is an object that lies beside the runs a run."""
    store, below = storage()
    for path in (f"{NAME}/a", f"{NAME}/pages/b", "index.html"):
        store.pipe_file(f"{ROOT}/{path}", path.encode())
    inside = {"a": len(f"{NAME}/a")}
    assert below.inside(NAME) == inside and below.inside_all() == {NAME: inside}


def test_folders_are_listed_by_name_however_a_storage_writes_them() -> None:
    """With a slash at the end, as folders; and the root itself, where somebody made it."""

    class Files:
        def ls(self, root: str, detail: bool) -> list[str]:
            return ["", "/", f"{root}/b/", f"{root}/a", f"{root}/.gone-c", f"{root}/c/"]

    listed = Objects(Files(), ROOT)
    assert (listed.names(), listed.going()) == (["a", "b"], ["c"])


@pytest.mark.parametrize(
    "note", ["[]", "{", "{}", '{"name": 5, "token": null}', '{"name": "a", "token": 5}',
             '{"token": "a"}', '{"name": "a"}'],
)  # fmt: skip
def test_a_note_of_other_fields_is_damaged(tmp_path: Path, note: str) -> None:
    assert unsent.read_note(tmp_path) is None
    (tmp_path / unsent.NOTE).write_text(note, encoding="utf-8")
    with pytest.raises(StoreError, match=rf"can be sent in {tmp_path}, but .claim is damaged"):
        unsent.read_note(tmp_path)


@pytest.mark.parametrize("file", [unsent.NOTE, MANIFEST])
@pytest.mark.parametrize("damage", ["no file", "nothing", "a broken disk"])
def test_a_file_of_an_unsent_run_that_cannot_be_read_is_damage_and_no_fault_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, damage: str
) -> None:
    """What is not found here is not taken for a bucket that is not there."""
    store, _ = storage()
    writer = machine(tmp_path, "writer")
    store.down = "all"
    with pytest.raises(StoreError):
        writer.publish(folder_of(tmp_path, "a"), NAME)
    store.down = ""
    [waiting] = unsent.waiting(writer.copy)
    if damage != "a broken disk":
        (waiting / file).unlink()
    if damage == "no file":
        (waiting / file).mkdir()
    read = unsent.read_json_object

    def read_or_fail(path: Path) -> dict[str, Any]:
        if (path.name, damage) == (file, "a broken disk"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(unsent, "read_json_object", read_or_fail)
    lines: list[str] = []
    writer.send_unsent(lines.append)
    if (file, damage) == (unsent.NOTE, "nothing"):
        # An earlier version left none.
        assert list(assert_whole(store).values()) == ["a"]
        return
    [line] = lines
    said = f"run not sent: expected a run that can be sent in {waiting}, but {file} is damaged: "
    assert line.startswith(said)
    assert waiting.is_dir() and not store.runs(ROOT)


def test_unsent_runs_of_one_name_wait_beside_each_other(tmp_path: Path) -> None:
    """Also where something else has the name; what is hidden or no folder is no run."""
    place = tmp_path / unsent.UNSENT
    # Of a damaged run not all is left.
    (place / "n-5").mkdir(parents=True)
    (place / "n-5" / "report.html").write_text("", encoding="utf-8")
    for content in "abcd":
        kept = unsent.put_in(tmp_path, folder_of(tmp_path, content), unsent.Note("n", content))
        assert unsent.read_note(kept) == unsent.Note("n", content)
        assert b'"%s"' % content.encode() in (kept / MANIFEST).read_bytes()
        if content == "a":
            (place / "n-2").write_text("", encoding="utf-8")
    for name in (".partial-x", "m", "0"):
        (place / name).mkdir()
    assert [path.name for path in unsent.waiting(tmp_path)] == [
        *("0", "m", "n", "n-3", "n-4", "n-5", "n-6")
    ]


def test_a_folder_that_is_gone_has_no_other_name_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsent, "_write", lambda folder, note: None)
    with pytest.raises(FileNotFoundError):
        unsent.put_in(tmp_path, tmp_path / "gone", unsent.Note("n", "a"))


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("protocol", ["file", "local", "s3"])
def test_a_storage_is_asked_anew_each_time_and_makes_folders_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, protocol: str, slash: str
) -> None:
    asked: list[tuple[str, dict[str, bool]]] = []

    def connect(address: str, **how: bool) -> tuple[object, str]:
        asked.append((address, how))
        return object(), f"bucket/runs{slash}"

    monkeypatch.setattr("fsspec.url_to_fs", connect)
    found = shared._connect(f"{protocol}://bucket/runs", Path("copy"))
    assert (found.copy, found.objects.root) == (Path("copy"), "bucket/runs")
    made = {} if protocol == "s3" else {"auto_mkdir": True}
    assert asked == [(f"{protocol}://bucket/runs", {"use_listings_cache": False, **made})]


def test_the_note_of_a_run_is_sent_to_nobody(tmp_path: Path) -> None:
    """Nor is what an interrupted writer left half-written beside its files."""
    store, _ = storage()
    folder = folder_of(tmp_path, "a")
    (folder / ".report.html.x.partial").write_text("half", encoding="utf-8")
    machine(tmp_path, "writer").publish(folder, NAME)
    sent = {path.rpartition("/")[2] for path in store.objects if f"{ROOT}/{NAME}/" in path}
    assert sent == {MANIFEST, "measurements.parquet", "report.html", "tensors.parquet"}


def test_a_run_that_another_process_sends_keeps_no_other_waiting(tmp_path: Path) -> None:
    store, _ = storage()
    writer = machine(tmp_path, "writer")
    store.down = "all"
    for content, name in (("a", "run-1"), ("b", "run-2")):
        with pytest.raises(StoreError):
            writer.publish(folder_of(tmp_path, content, name), name)
    store.down = ""
    lines: list[str] = []
    with unsent.locked(unsent.waiting(writer.copy)[0]):
        writer.send_unsent(lines.append)
    assert len(lines) == 1 and "run-2" in lines[0] and list(store.runs(ROOT)) == ["run-2"]


def test_a_folder_that_took_the_place_of_another_is_not_the_locked_one(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    assert unsent._is(handle, folder)
    folder.rename(tmp_path / "b")
    assert not unsent._is(handle, folder)
    folder.mkdir()
    assert not unsent._is(handle, folder) and unsent._is(handle, tmp_path / "b")
    os.close(handle)


def test_local_files_are_known_by_any_of_the_names_of_their_protocol() -> None:
    for protocol, local in (
        ("file", True),
        (("file", "local"), True),
        (("local", "file"), True),
        ("profile", False),
        ("s3", False),
    ):
        assert objects._is_local(SimpleNamespace(protocol=protocol)) is local, protocol


def test_two_processes_that_move_a_run_to_one_name_at_once_keep_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name may be taken at any moment before the folder is renamed."""
    rename, other = Path.rename, folder_of(tmp_path, "b")

    def after_another(self: Path, target: Path) -> Path:
        monkeypatch.undo()
        assert unsent.put_in(tmp_path, other, unsent.Note("n", None)).name == "n"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", after_another)
    kept = unsent.put_in(tmp_path, folder_of(tmp_path, "a"), unsent.Note("n", None))
    assert kept.name == "n-2" and b'"a"' in (kept / MANIFEST).read_bytes()
    assert [path.name for path in unsent.waiting(tmp_path)] == ["n", "n-2"]


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR])
def test_a_run_gets_another_place_whatever_a_file_system_says_of_a_taken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """File systems have different errors for a folder that is there and is not empty."""
    rename = Path.rename

    def rename_or_refuse(self: Path, target: Path) -> Path:
        if target.name == "n":
            raise OSError(code, os.strerror(code))
        return rename(self, target)

    folder = folder_of(tmp_path, "a")
    monkeypatch.setattr(Path, "rename", rename_or_refuse)
    kept = unsent.put_in(tmp_path, folder, unsent.Note("n", None))
    assert kept.name == "n-2" and (kept / MANIFEST).is_file() and not folder.exists()


def test_a_run_that_cannot_be_moved_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, "another device")

    folder = folder_of(tmp_path, "a")
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="another device"):
        unsent.put_in(tmp_path, folder, unsent.Note("n", None))
    assert (folder / MANIFEST).is_file()


def test_a_run_is_sent_under_the_name_of_its_note_and_not_under_that_of_its_folder(
    tmp_path: Path,
) -> None:
    """They differ where a run of the name waits already, which may never be sent."""
    store, _ = storage()
    writer = machine(tmp_path, "writer")
    store.down = "all"
    for content in "ab":
        with pytest.raises(StoreError):
            writer.publish(folder_of(tmp_path, content), NAME)
    store.down = ""
    damaged, whole = unsent.waiting(writer.copy)
    assert (damaged.name, whole.name) == (NAME, f"{NAME}-2")
    (damaged / MANIFEST).write_text("{", encoding="utf-8")
    lines: list[str] = []
    writer.send_unsent(lines.append)
    assert assert_whole(store) == {NAME: "b"} and len(lines) == 2


def test_a_run_of_which_an_earlier_version_sent_a_part_is_sent_whole(tmp_path: Path) -> None:
    """Its run.json on the storage does not say that the other files are there."""
    _, below = storage()
    folder = folder_of(tmp_path, "a").rename(tmp_path / NAME)
    below.create(f"{NAME}/{MANIFEST}", (folder / MANIFEST).read_bytes())
    assert sending.deliver(below, folder) == (NAME, f"{NAME}-2")
    files = {path.name for path in folder.iterdir() if path.name != unsent.NOTE}
    assert below.inside(f"{NAME}-2").keys() == files and len(files) == 4


def test_of_a_folder_on_the_storage_only_the_bucket_has_to_exist() -> None:
    """Whoever writes there first makes what lies between."""
    store, _ = storage()
    assert Objects(store, "bucket/team/nights/runs").names() == []


def test_an_object_that_may_not_be_read_is_not_taken_for_a_missing_one() -> None:
    store, below = storage()
    assert below.create("x", b"ours")

    def forbid(request: str, path: str) -> None:
        if request == "get":
            raise PermissionError("403")

    store.before = forbid
    with pytest.raises(PermissionError):
        below.read("x")
    with pytest.raises(PermissionError):
        below.create("x", b"theirs")


@pytest.mark.parametrize("content", [b"", b"x"])
def test_a_write_whose_reply_was_lost_is_done_whatever_was_written(content: bytes) -> None:
    """Tokens of claims and marks of deletions are empty objects."""
    store, below = storage()
    write = store.pipe_file

    def lose_the_reply(path: str, value: bytes, **how: Any) -> None:
        write(path, value, **how)
        raise ConnectionError("the connection was reset")

    store.pipe_file = lose_the_reply  # pyright: ignore[reportAttributeAccessIssue]
    assert below.create("x", content) and store.written == {f"{ROOT}/x": 1}


def test_a_waiting_run_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), unsent.locked(tmp_path) as ours:
        assert ours
        raise ZeroDivisionError
    with unsent.locked(tmp_path) as ours:
        assert ours


def test_a_waiting_run_that_cannot_be_opened_is_not_taken_for_one_that_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(unsent.os, "open", refuse)
        with pytest.raises(PermissionError), unsent.locked(tmp_path):
            pass


def test_a_run_has_its_note_from_before_it_waits_until_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a note is taken for one of an earlier version, and gets another name."""
    rename, seen = Path.rename, list[unsent.Note | None]()

    def watched(self: Path, target: Path) -> Path:
        seen.append(unsent.read_note(self))
        moved = rename(self, target)
        seen.append(unsent.read_note(moved))
        return moved

    monkeypatch.setattr(Path, "rename", watched)
    note = unsent.Note(NAME, "token")
    kept = unsent.put_in(tmp_path, folder_of(tmp_path, "a"), note)
    unsent.take_out(kept, tmp_path / NAME)
    assert seen == [note] * 4 and unsent.read_note(tmp_path / NAME) is None


def test_each_name_that_is_claimed_is_kept_for_its_run(tmp_path: Path) -> None:
    storage()
    writer = machine(tmp_path, "writer")
    names = ("night-1", "night-2")
    assert all(writer.claim(name) for name in names)
    sent = [writer.publish(folder_of(tmp_path, name[-1], name), name).name for name in names]
    assert sent == [*names]


def test_a_run_that_is_published_while_its_name_is_taken_away_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer decides, who sees that the name is gone."""
    store, below = storage()
    store.shift = -2 * HOURS
    below.create(f"{NAME}/a", b"")
    store.shift = timedelta()
    monkeypatch.setattr(
        shared, "retire", lambda below, name: below.create(f"{name}/{MANIFEST}", b"{}")
    )
    machine(tmp_path, "cleaner").clean()
    assert below.inside(NAME).keys() == {"a", MANIFEST}
