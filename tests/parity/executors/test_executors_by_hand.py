"""Parts of the executors that start no process: every number and word of theirs is written down."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import math
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megalodon_jax.extras import install
from parity.executors import cluster, identity, inputs, interrupts, local, machine, supervision
from parity.executors import item as item_module
from parity.executors import sweep as sweep_module
from parity.executors.cluster import RayExecutor, Starts, kernel_variables, options
from parity.executors.identity import Identity, Watch
from parity.executors.item import (
    ATTEMPTS,
    Answer,
    Item,
    ItemError,
    Needs,
    Place,
    State,
    lost,
    no_device,
    not_run,
)
from parity.executors.local import LocalExecutor, available_memory
from parity.executors.pace import LATE, PRIOR, UNSURE, Pace, duration, makespan
from parity.executors.progress import LINES, Progress
from parity.executors.sweep import Answers, collect, open_executor, run

WORK = "tests.parity.executors.work:"


def simulated(seconds: list[float], workers: int, busy: list[float]) -> float:
    """Return when the last item is over: each waits for the worker that is free first."""
    free = sorted([*busy, *([0.0] * (max(workers, 1) - len(busy)))])
    for each in seconds:
        first = min(range(len(free)), key=lambda n: free[n])
        free[first] += each
    return max(free)


@pytest.mark.parametrize("seed", range(8))
def test_each_item_goes_to_the_first_free_worker(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(1, 9, int(rng.integers(1, 8))).tolist()
    workers = int(rng.integers(1, 4))
    busy = rng.uniform(0, 20, int(rng.integers(0, workers + 1))).tolist()
    assert makespan(seconds, workers, busy) == pytest.approx(simulated(seconds, workers, busy))
    assert makespan(seconds, workers) == pytest.approx(simulated(seconds, workers, []))


def test_nothing_left_takes_as_long_as_what_runs() -> None:
    assert makespan([], 3) == 0.0 and makespan([], 2, [4.0, 7.0]) == 7.0
    assert makespan([2.0], 0) == 2.0 and makespan([1.0, 1.0], 1, [3.0]) == 5.0


def largest_pace(done: list[tuple[float, float]], running: list[tuple[float, float]]) -> float:
    """Return measured over expected seconds: what is done, and any set of what runs that raises it.

    Adding the latest while they are later than the pace is the set that makes it largest.
    """
    taken = PRIOR + sum(s for s, e in done if e)
    wanted = PRIOR + sum(e for _, e in done if e)
    late = [(a, e) for a, e in running if e]
    best = taken / wanted
    for chosen in range(1 << len(late)):
        some = [pair for n, pair in enumerate(late) if chosen >> n & 1]
        pace = (taken + sum(a for a, _ in some)) / (wanted + sum(e for _, e in some))
        best = max(best, pace)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_pace_is_of_what_is_done_and_of_what_is_late(seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = {f"i{n}": float(rng.choice([0.0, 5.0, 20.0, 60.0])) for n in range(7)}
    pace = Pace(dict(expected))
    done = [(n, float(rng.uniform(1, 80))) for n in ("i0", "i3")]
    for name, seconds in done:
        pace.done(name, seconds)
    ages = {n: float(rng.uniform(0, 120)) for n in ("i1", "i4", "i5", "i0")}
    assert list(pace.left) == [n for n in expected if n not in dict(done)]
    assert pace.seconds == [s for _, s in done] and pace.expected == [expected[n] for n, _ in done]
    running = [(ages[n], expected[n]) for n in ("i1", "i4", "i5")]
    whole = [(s, expected[n]) for n, s in done]
    assert pace.ratio(ages) == pytest.approx(largest_pace(whole, running))
    assert pace.ratio({}) == pytest.approx(largest_pace(whole, []))
    pace.done("of another sweep", 3.0)
    assert pace.expected[-1] == 0.0


def test_time_left_is_what_items_take_at_the_pace() -> None:
    pace = Pace({"a": 40.0, "b": 20.0, "c": 0.0})
    # Of one item nothing is known, and nothing is done.
    assert pace.estimate({}, 2) is None and pace.words({}, 2) == ""
    pace.left.pop("c")
    assert pace.estimate({}, 1) == 60.0 and pace.estimate({}, 2) == 40.0
    assert pace.words({}, 2) == "20 s to 80 s left" and UNSURE == 2.0
    pace.left["c"] = 0.0
    pace.done("b", 50.0)
    ratio = (PRIOR + 50.0) / (PRIOR + 20.0)
    # The median of what was measured stands for what nothing was expected of.
    assert pace.estimate({}, 1) == pytest.approx(40.0 * ratio + 50.0)
    assert pace.words({}, 1) == f"about {duration(40.0 * ratio + 50.0)} left"
    # Half of what was measured took no longer than the median.
    assert Pace({"c": 0.0}, [0.0] * 3, [1.0, 2.0, 30.0]).estimate({}, 1) == 2.0
    # Of an even number, the median lies between the two in the middle.
    assert Pace({"c": 0.0}, [0.0] * 4, [30.0, 2.0, 4.0, 1.0]).estimate({}, 1) == 3.0
    # Where nothing is left, no time is.
    assert Pace({}, [1.0], [1.0]).words({}, 1) == "about 0 s left"
    # One that runs takes what is left of it, and an eighth of its age at least.
    assert pace.estimate({"a": 10.0}, 1) == pytest.approx(40.0 * ratio - 10.0 + 50.0)
    late = (PRIOR + 50.0 + 400.0) / (PRIOR + 20.0 + 40.0)
    assert pace.ratio({"a": 400.0}) == pytest.approx(late)
    assert pace.estimate({"a": 400.0}, 2) == pytest.approx(max(400.0 / LATE, 50.0))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (89.4, "89 s"),
        (90.0, "90 s"),
        (154.0, "150 s"),
        (180.0, "3 minutes"),
        (600.0, "10 minutes"),
    ],
)
def test_seconds_are_minutes_from_three_on(seconds: float, words: str) -> None:
    assert duration(seconds) == words


class Idle:
    """An executor that runs nothing, and says what a test says of it."""

    name = "idle"

    def __init__(self, workers: int = 2, **at: tuple[str, float]) -> None:
        self.workers, self.at, self.closed = workers, at, 0

    def start(self, items: Any) -> list[Future[Answer]]:
        futures = []
        for item in items:
            future: Future[Answer] = Future()
            future.set_result(
                Answer(item.name, State.DONE, item.arguments.get("value"), seconds=2.0)
            )
            futures.append(future)
        return futures

    def running(self) -> Mapping[str, tuple[str, float]]:
        return self.at

    def close(self) -> None:
        self.closed += 1


def test_lines_say_counts_times_workers_and_the_slowest_three() -> None:
    said: list[str] = []
    now = [100.0]
    engine = Idle(2, b=("three", 97.0), a=("four", 98.0))
    items = [
        Item(n, "x:y", expected=e)
        for n, e in (("one", 10.0), ("two", 10.0), ("three", 10.0), ("four", 10.0))
    ]
    progress = Progress(engine, items, said.append, lambda: now[0])
    assert progress.lines() == [
        "0 of 4 in 0 s, 9 s to 36 s left",
        "a: four for 2 s",
        "b: three for 3 s",
    ]
    now[0] = 110.0
    progress.done(Answer("one", State.DONE, seconds=10.0, place=Place("node", 7)))
    progress.done(Answer("two", State.DONE, seconds=10.5, attempts=3, place=Place("node", 8)))
    progress.done(Answer("x", State.FAILED, reason="no reason", seconds=1.0, attempts=3))
    progress.done(Answer("y", State.NOT_RUN, reason="no device", seconds=0.5))
    assert said == [
        "  1/4 one: 10.0 s on node:7",
        "  2/4 two: 10.5 s on node:8, after 2 workers died",
        "  3/4 x: failed: no reason",
        "  4/4 y: not run: no device",
    ]
    # Both are late: neither is about to be over.
    left = 13.0 / LATE
    assert progress.estimate() == pytest.approx(left)
    assert progress.lines() == [
        f"4 of 4 in 10 s, about {duration(left)} left",
        "a: four for 12 s",
        "b: three for 13 s",
        "slowest: two 10.5 s, one 10.0 s, x 1.0 s",
    ]
    assert progress.table().row_count == 3
    # A name may look like markup of the table.
    engine.at["a"] = ("[red]four", 98.0)
    shown = io.StringIO()
    Console(file=shown, width=80).print(progress.table())
    assert "a: [red]four for 12 s" in shown.getvalue()


@pytest.mark.parametrize("planned", [LINES, LINES + 1])
def test_a_line_for_each_item_up_to_two_hundred(planned: int) -> None:
    said: list[str] = []
    progress = Progress(Idle(), [Item(str(n), "x:y") for n in range(planned)], said.append)
    progress.done(Answer("0", State.DONE, seconds=1.0))
    assert bool(said) == (planned == LINES)


@pytest.mark.parametrize(
    ("quiet", "terminal", "table"),
    [(False, True, True), (True, True, False), (None, True, False), (False, False, False)],
)
def test_a_table_is_drawn_on_a_terminal_where_lines_are_wanted(
    monkeypatch: pytest.MonkeyPatch, quiet: bool | None, terminal: bool, table: bool
) -> None:
    """Not where lines are dropped, nor where who receives them draws a bar of its own."""
    import rich.live

    drawn: list[str] = []
    live = types.SimpleNamespace(
        start=lambda: drawn.append("start"), stop=lambda: drawn.append("stop")
    )
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(rich.live, "Live", lambda **words: (asked.append(words), live)[1])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)

    def report(line: str) -> None:
        raise AssertionError(line)

    if quiet is not None:
        report.quiet = quiet  # pyright: ignore[reportFunctionMemberAccess]
    with Progress(Idle(1), [Item("a", "x:y")], report) as progress:
        assert drawn == ["start"] * table and not progress._over.is_set()
    assert drawn == ["start", "stop"] * table and progress._over.is_set()
    # It goes where lines of progress go, and leaves nothing behind.
    assert [(w["transient"], w["console"].stderr) for w in asked] == [(True, True)] * table


@pytest.mark.parametrize("planned", [1, LINES + 1])
def test_a_watcher_reports_now_and_then_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch, planned: int
) -> None:
    """Also in a sweep of so many items that most get no line."""
    monkeypatch.setattr("parity.executors.progress.EVERY", 0.01)
    told = threading.Event()
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        told.set()

    items = [Item(str(n), "x:y", expected=5.0) for n in range(planned)]
    with Progress(Idle(1, a=("0", 0.0)), items, report) as progress:
        assert told.wait(30.0) and progress._live is None
    assert said[0].startswith(f"0 of {planned} in 0 s, ") and progress._over.is_set()
    assert "; a: 0 for " in said[0]


@pytest.mark.parametrize("table", [False, True])
def test_lines_are_told_every_half_minute_unless_a_table_shows_them(table: bool) -> None:
    said: list[str] = []
    waited: list[float] = []
    progress = Progress(Idle(), [Item("a", "x:y", expected=5.0)], said.append)

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > 2

    progress._over = types.SimpleNamespace(wait=wait)  # pyright: ignore[reportAttributeAccessIssue]
    progress._live = object() if table else None
    progress._watch()
    assert waited == [30.0] * 3 and len(said) == (0 if table else 2)


def test_answers_come_stored_first_and_the_executor_is_closed_once(tmp_path: Path) -> None:
    said: list[str] = []
    items = [Item(f"i{n}", f"{WORK}double", {"value": n}) for n in range(3)]
    with Answers.opened(tmp_path) as answers:
        first = Idle()
        assert sorted(a.value for a in run(items[:2], first, answers, said.append)) == [0, 1]
        assert first.closed == 1 and "i0: 2.0 s on :0" in said[0] + said[1]
    said.clear()
    with Answers.opened(tmp_path) as answers:
        second = Idle()
        found = [a.name for a in run(items[::-1], second, answers, said.append)]
        assert found == ["i1", "i0", "i2"] and second.closed == 1
        assert said[0] == "  2 of 3 items have stored answers" and not answers.damaged
        # One that is stored stays what it is.
        answers.write(items[0], Answer("i0", State.DONE, "another"))
        stored = answers.read(items[0])
        assert stored is not None and stored.value == 0
        line = json.loads(
            (tmp_path / sweep_module.ANSWERS).read_text(encoding="utf-8").splitlines()[0]
        )
        facts = json.dumps([line["key"], line["answer"], {}], sort_keys=True)
        assert line["checksum"] == hashlib.sha256(facts.encode()).hexdigest()
        (tmp_path / "leftover").mkdir()
        (tmp_path / "mine.partial").mkdir()
    with Answers.opened(tmp_path / "deep") as answers:
        deep = Item("deep", f"{WORK}leave", folder=True)
        answers.write(deep, Answer("deep", State.DONE, files={"a/b/c": b"1", "a/b/d": b"2"}))
        assert (answers.files(deep) / "a" / "b" / "c").read_bytes() == b"1"
    with Answers.opened(tmp_path) as answers:
        # What an item without a folder left is not stored, and no damage.
        plain = Item("plain", f"{WORK}double")
        answers.write(plain, Answer("plain", State.DONE, 1, files={"a": b"1"}))
        assert answers.read(plain) is not None and not answers.damaged
        # Only what a killed driver left is removed.
        assert (tmp_path / "mine.partial").is_dir()
        # A folder that was never finished goes too.
        (tmp_path / ".begun.partial").mkdir()
        answers.discard()
        assert answers.read(items[0]) is None
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {sweep_module.ANSWERS, sweep_module.LOCK}
        # A file that no item wrote is in nobody's way.
        (tmp_path / "notes").touch()
        answers.discard()
        assert (tmp_path / "notes").is_file()
        (tmp_path / "notes").unlink()
        assert (tmp_path / sweep_module.ANSWERS).read_bytes() == b""


def test_answers_survive_a_power_failure_but_for_those_of_the_last_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [100.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(sweep_module, "time", clock)
    monkeypatch.setattr(sweep_module.os, "fsync", lambda file: synced.append(now[0]))
    every = sweep_module.SYNCED_EVERY
    with Answers.opened(tmp_path) as answers:
        for number, later in enumerate((0.0, every, 1.5 * every, 2.0 * every, 3.0 * every)):
            now[0] = 100.0 + later
            item = Item(f"i{number}", f"{WORK}double", {"value": number})
            answers.write(item, Answer(item.name, State.DONE, number))
            # The next driver sees it at once.
            lines = (tmp_path / sweep_module.ANSWERS).read_text(encoding="utf-8").splitlines()
            assert len(lines) == number + 1
    assert synced == [100.0 + 1.5 * every, 100.0 + 3.0 * every]


def test_an_answer_is_stored_where_it_was_done_alone(tmp_path: Path) -> None:
    class Fails(Idle):
        def start(self, items: Any) -> list[Future[Answer]]:
            futures = super().start(items)
            futures[0] = Future()
            futures[0].set_result(Answer(items[0].name, State.FAILED, reason="why"))
            return futures

    items = [Item(n, f"{WORK}double", {"value": 1}) for n in "ab"]
    with Answers.opened(tmp_path) as answers:
        assert {a.name: a.state for a in run(items, Fails(), answers)} == {
            "a": State.FAILED,
            "b": State.DONE,
        }
        assert answers.read(items[0]) is None and answers.read(items[1]) is not None


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("plain-1.2", "plain-1.2"),
        ("a b/c:d", "a_b_c_d"),
        ("..hidden", "hidden"),
        ("x" * 120, "x" * 100),
    ],
)
def test_a_key_is_letters_that_a_folder_may_have(name: str, key: str) -> None:
    item = Item(name, f"{WORK}double")
    assert sweep_module._key(item) == f"{key}-{item.digest()}" and len(item.digest()) == 16


def test_of_two_answers_of_one_item_the_later_one_counts(tmp_path: Path) -> None:
    """The first one was damaged, and the item ran again."""
    lines = [json.dumps({"key": key, "answer": n}) for n, key in enumerate("aba")]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert sweep_module._whole_lines(path) == {"a": lines[2], "b": lines[1]}


@pytest.mark.parametrize(("text", "workers"), [("local:3", 3), ("local:10", 10), ("local", None)])
def test_executors_are_named(text: str, workers: int | None) -> None:
    found = open_executor(text)
    assert isinstance(found, LocalExecutor) and found.asked == workers
    with pytest.raises(ItemError, match="expected no address"):
        open_executor(text, "host:1")


@pytest.mark.parametrize("text", ["local:0", "local:x", "local:-1", "Ray", "ray:2", ""])
def test_no_executor_has_such_a_name(text: str) -> None:
    with pytest.raises(ItemError, match="expected the executor local, local:N or ray"):
        open_executor(text)


def test_a_driver_that_waits_is_told_who_has_the_folder_now(tmp_path: Path, monkeypatch) -> None:
    """Not who had it before."""
    with monkeypatch.context() as patch:
        patch.setattr(sweep_module.platform, "node", lambda: "another-machine-with-a-long-name")
        with Answers.opened(tmp_path):
            pass
    with Answers.opened(tmp_path), pytest.raises(ItemError) as told, Answers.opened(tmp_path):
        raise AssertionError("two drivers")
    assert "another-machine" not in str(told.value)
    assert str(told.value).count("process ") == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch, number: int) -> None:
    """Without a lock two drivers could append to one file; no other driver is to blame."""

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sweep_module.fcntl, "flock", flock)
    refused = pytest.raises(ItemError, match="a file system that can lock")
    with refused as told, Answers.opened(tmp_path):
        raise AssertionError("no lock")
    assert os.strerror(number) in str(told.value) and "--out" in str(told.value)
    assert "driver alone" not in str(told.value)
    assert not (tmp_path / "answers.jsonl").exists()


def test_an_executor_is_closed_where_nobody_waits_for_all_answers() -> None:
    items = [Item(name, f"{WORK}double", {"value": 1}) for name in "ab"]
    answers = run(items, engine := Idle())
    assert next(answers).state is State.DONE and engine.closed == 0
    answers.close()
    assert engine.closed == 1

    class Broken(Idle):
        def start(self, items: Any) -> list[Future[Answer]]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(run(items, engine := Broken()))
    assert engine.closed == 1


def test_an_item_that_leaves_no_file_has_none_of_a_killed_driver(tmp_path: Path) -> None:
    item = Item("leaves", f"{WORK}leave", folder=True)
    with Answers.opened(tmp_path) as answers:
        (answers.files(item) / "old").mkdir(parents=True)
        (answers.files(item) / "old" / "file").touch()
        answers.write(item, Answer("leaves", State.DONE, 1))
        stored = answers.read(item)
        assert stored is not None and stored.value == 1 and answers.damaged == []
        assert list(answers.files(item).iterdir()) == []
        # A second answer changes neither the first nor its files.
        answers.write(item, Answer("leaves", State.DONE, 2, files={"more": b"2"}))
        assert list(answers.files(item).iterdir()) == []
        lines = (tmp_path / sweep_module.ANSWERS).read_text(encoding="utf-8").splitlines()
        assert len(lines) == 1


def test_damaged_answers_are_named_before_their_items_run_again(tmp_path: Path) -> None:
    said: list[str] = []
    items = [Item(name, f"{WORK}double", {"value": 1}) for name in "abc"]
    with Answers.opened(tmp_path) as answers:
        assert len(list(run(items, Idle(), answers, said.append))) == 3
    assert not [line for line in said if "damaged" in line]
    path = tmp_path / sweep_module.ANSWERS
    text = path.read_text(encoding="utf-8").replace('"seconds": 2.0', '"seconds": 3.0', 2)
    path.write_text(text, encoding="utf-8")
    said.clear()
    with Answers.opened(tmp_path) as answers:
        damaged = sorted(item.name for item in items if answers.read(item) is None)
    with Answers.opened(tmp_path) as answers:
        assert len(list(run(items, Idle(), answers, said.append))) == 3
    assert len(damaged) == 2
    assert said[0] == f"  stored answers are damaged, running again: {', '.join(damaged)}"
    assert said[1] == "  1 of 3 items have stored answers"


def test_a_line_is_said_before_its_answer_is_handed_on() -> None:
    said: list[str] = []
    for number, answer in enumerate(run([Item(n, "x:y") for n in "ab"], Idle(), None, said.append)):
        assert len(said) == number + 1 and f" {answer.name}: " in said[-1]


def test_lines_above_a_table_are_no_markup() -> None:
    printed: list[tuple[str, dict[str, bool]]] = []
    progress = Progress(Idle(), [Item("[red]", "x:y")], lambda line: None)
    console = types.SimpleNamespace(print=lambda line, **words: printed.append((line, words)))
    progress._live = types.SimpleNamespace(console=console)
    progress.done(Answer("[red]", State.FAILED, reason="why"))
    assert printed == [("  1/1 [red]: failed: why", {"markup": False, "highlight": False})]


def test_a_closed_executor_closes_every_process() -> None:
    closed: list[int] = []
    engine = LocalExecutor(1)
    engine._processes = [types.SimpleNamespace(close=functools.partial(closed.append, n))
                         for n in range(2)]  # fmt: skip
    engine.close()
    assert closed == [0, 1]


def test_the_first_five_items_without_an_answer_are_named() -> None:
    class Fails(Idle):
        def start(self, items: Any) -> list[Future[Answer]]:
            futures = []
            for item in items:
                future: Future[Answer] = Future()
                state = State.DONE if item.name == "well" else State.FAILED
                future.set_result(Answer(item.name, state, reason=f"why {item.name}"))
                futures.append(future)
            return futures

    names = ["well", *(f"i{n}" for n in range(7))]
    said: list[str] = []
    with pytest.raises(RuntimeError, match=r"^7 of 8 items have no answer: ") as told:
        collect([Item(name, "x:y") for name in names], Fails(), None, said.append)
    # Each was told of when it was done.
    assert len(said) == len(names)
    reasons = str(told.value).partition("answer: ")[2].split("; ")
    assert len(reasons) == 5
    assert all(reason == f"{n}: why {n}" for reason in reasons for n in [reason.split(":")[0]])


def test_words_about_items() -> None:
    item = Item("x", "y:z", needs=Needs(gpus=2))
    assert str(item.needs) == "2 GPU" and str(Needs(gpus=1, device="H100")) == "1 H100"
    assert str(Needs(gpus=1 / 16)) == "0.0625 GPU"
    assert no_device(item.needs, "here") == "no device: here has none with 2 GPU"
    assert not_run(item, "why") == Answer("x", State.NOT_RUN, reason="why")
    assert lost(item, 1, "gone") == Answer("x", State.FAILED, reason="its worker was lost: gone")
    several = lost(item, 2, "gone")
    assert (several.reason, several.attempts) == ("killed 2 workers: gone", 2)
    assert item_module._named(["a", "b", "c"]) == "a, b, c"
    assert item_module._named(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert item_module._named(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    place = Place("node", 3, "f", "cpu", "code")
    answer = Answer("x", State.DONE, [1], "", place, 1.5, 2, {"a": b"1"})
    document = answer.to_json()
    assert "files" not in document and json.loads(json.dumps(document)) == document
    assert Answer.from_json(document) == Answer("x", State.DONE, [1], "", place, 1.5, 2)


def test_accelerators_are_those_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, model in enumerate(("H100", "A100", "T4")):
        (tmp_path / str(n)).mkdir()
        text = f"Name of Model: bar\nModel: \t NVIDIA {model}\nIRQ: 3\n"
        (tmp_path / str(n) / "information").write_text(text, encoding="utf-8")
    real = item_module.Path
    # A folder has no order; that of the devices is of their names.
    there = types.SimpleNamespace(glob=lambda pattern: sorted(tmp_path.glob(pattern))[::-1])
    monkeypatch.setattr(
        item_module, "Path", lambda p: there if str(p).startswith("/proc/driver") else real(p)
    )
    names = ("NVIDIA H100", "NVIDIA A100", "NVIDIA T4")
    for shown, expected in (
        (None, names),
        ("0,1", names[:2]),
        ("", ()),
        ("2,", names[:1]),
        # CUDA reads up to the first name that it does not know.
        ("-1", ()),
        ("2,-1,0", names[:1]),
        (" 2 , -1 , 0", names[:1]),
    ):
        item_module.accelerators.cache_clear()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert item_module.accelerators() == expected
    item_module.accelerators.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, , GPU-a ,")
    assert item_module.visible(3) == ["2", "GPU-a"]


@pytest.mark.parametrize(
    ("asked", "needs", "devices", "count"),
    [
        (None, [Needs()], 0, 1),
        (None, [Needs()] * 20, 0, 8),
        (None, [Needs(cpus=3), Needs(cpus=1), Needs()], 0, 2),
        (None, [Needs(cpus=1), Needs(), Needs(cpus=5)], 0, 1),
        (None, [Needs(cpus=0)] * 20, 0, 8),
        (None, [Needs(memory=30)] * 20, 0, 3),
        (None, [Needs(memory=30), Needs(memory=60)] * 9, 0, 1),
        (None, [Needs(memory=1000)] * 9, 0, 1),
        # Who asks for a number gets it, whatever memory there is.
        (6, [Needs(memory=1000, cpus=8)] * 9, 0, 6),
        (6, [Needs()] * 4, 0, 4),
        (None, [Needs(gpus=2)] * 9, 5, 2),
        (None, [Needs(gpus=1), Needs(gpus=4)] * 9, 5, 1),
        (3, [Needs(gpus=1)] * 9, 5, 3),
        # Eight share one, as far as the processors go; three share each of two.
        (None, [Needs(gpus=1 / 16)] * 20, 1, 8),
        (None, [Needs(gpus=1 / 3)] * 20, 2, 6),
        (None, [Needs(gpus=1 / 3), Needs(gpus=1)] * 9, 2, 2),
        # Two of 0.6 are more than one; the inverse of 1 / 93 is less than 93.
        (20, [Needs(gpus=0.6)] * 9, 2, 2),
        (100, [Needs(gpus=1 / 93)] * 100, 1, 93),
    ],
)
def test_as_many_at_a_time_as_everything_allows(monkeypatch, asked, needs, devices, count) -> None:
    monkeypatch.setattr(local, "threads", lambda: 8)
    monkeypatch.setattr(local, "available_memory", lambda: 100)
    items = [Item(str(n), "x:y", needs=each) for n, each in enumerate(needs)]
    assert LocalExecutor(asked)._count(items, devices) == count
    assert LocalExecutor(asked).workers == (asked or 8)


def test_no_item_starts_on_fewer_devices_than_it_needs(monkeypatch) -> None:
    """Workers are those of both kinds, and each answer is at the place of its item."""
    monkeypatch.setattr(local, "accelerators", lambda: ("NVIDIA H100",))
    monkeypatch.setattr(local, "threads", lambda: 2)
    monkeypatch.setattr(
        LocalExecutor, "_run", lambda self, own, item: Answer(item.name, State.DONE)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    needs = {"one": 1.0, "plain": 0.0, "two": 2.0, "half": 0.5, "last": 0.0}
    engine = LocalExecutor()
    answers = [
        future.result()
        for future in engine.start([Item(n, "x:y", needs=Needs(gpus=g)) for n, g in needs.items()])
    ]
    assert engine.workers == 2 + 1
    engine.close()
    assert [answer.name for answer in answers] == list(needs)
    assert [a.name for a in answers if a.state is State.NOT_RUN] == ["two"]


def test_items_on_processors_are_as_many_at_a_time_as_they_alone_allow(monkeypatch) -> None:
    """What an item on an accelerator needs besides it takes no worker from the others."""
    monkeypatch.setattr(local, "accelerators", lambda: ("NVIDIA H100",))
    monkeypatch.setattr(local, "threads", lambda: 6)
    monkeypatch.setattr(local, "available_memory", lambda: 100)
    monkeypatch.setattr(
        LocalExecutor, "_run", lambda self, own, item: Answer(item.name, State.DONE)
    )
    engine = LocalExecutor()
    needs = [Needs(cpus=6, memory=100, gpus=1), *[Needs(cpus=2, memory=20)] * 3]
    engine.start([Item(str(n), "x:y", needs=each) for n, each in enumerate(needs)])
    assert engine.workers == 1 + 3
    engine.close()


def test_workers_see_the_accelerators_that_this_process_sees(monkeypatch) -> None:
    monkeypatch.setattr(local, "accelerators", lambda: ("NVIDIA H100", "NVIDIA H100"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a")
    both = threading.Barrier(2, timeout=30.0)

    def run(self: Any, own: threading.local, item: Item) -> Answer:
        both.wait()
        return Answer(item.name, State.DONE, dict(own.process.shown))

    monkeypatch.setattr(LocalExecutor, "_run", run)
    engine = LocalExecutor(2)
    futures = engine.start([Item(n, "x:y", needs=Needs(gpus=1)) for n in "ab"])
    shown = sorted(f.result(30.0).value["CUDA_VISIBLE_DEVICES"] for f in futures)
    engine.close()
    assert shown == ["5", "GPU-a"]


def test_devices_fit_by_name() -> None:
    names = ("NVIDIA H100 80GB", "NVIDIA A100")
    fits = [local._fitting(Needs(device=d), names) for d in ("", "h100", "A100", "B200")]
    assert fits == [2, 1, 1, 0]


def test_each_worker_on_accelerators_sees_its_own() -> None:
    engine = LocalExecutor(2)
    slots = iter(range(2))
    items = [Item("a", "x:y", needs=Needs(gpus=1)), Item("b", "x:y", needs=Needs(gpus=3))]
    shown = []
    for _ in range(2):
        own = threading.local()
        engine._open(own, slots, items, [*"012345"])
        shown.append((own.process.name, own.process.shown))
    assert shown == [
        ("local:1", {"CUDA_VISIBLE_DEVICES": "0,1,2"}),
        ("local:2", {"CUDA_VISIBLE_DEVICES": "3,4,5"}),
    ]
    shared, slots = [], iter(range(4))
    for _ in range(4):
        own = threading.local()
        engine._open(own, slots, [Item("c", "x:y", needs=Needs(gpus=0.5))], ["2", "GPU-a"])
        shared.append(own.process.shown["CUDA_VISIBLE_DEVICES"])
    assert shared == ["2", "GPU-a", "2", "GPU-a"]
    plain = threading.local()
    engine._open(plain, iter([0]), items, [])
    assert plain.process.shown == {} and len(engine._processes) == 7


def test_no_two_workers_have_one_name(monkeypatch) -> None:
    """Two threads may make theirs at once; who is at what is told by name."""
    engine, slots = LocalExecutor(2), iter(range(2))
    made, process = [], local._Process

    def meanwhile(*words: Any) -> Any:
        if not made:
            made.append("first")
            engine._open(threading.local(), slots, [], [])
        return process(*words)

    monkeypatch.setattr(local, "_Process", meanwhile)
    engine._open(threading.local(), slots, [], [])
    assert sorted(each.name for each in engine._processes) == ["local:1", "local:2"]


def test_a_closed_worker_starts_no_process(monkeypatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("started")

    process = local._Process("local:1", {}, Identity.here())
    monkeypatch.setattr(process, "_submit", never)
    process.close()
    with pytest.raises(BrokenProcessPool, match="closed"):
        process.perform(Item("x", "y:z"))


def test_a_worker_that_is_closed_as_it_is_about_to_start_starts_no_process(monkeypatch) -> None:
    process = local._Process("local:1", {}, Identity.here())
    entered: list[int] = []

    class Lock:
        def __enter__(self) -> None:
            # First to end the process before, then to start the next one.
            entered.append(1)
            process.closed = len(entered) > 1

        def __exit__(self, *_: object) -> None:
            pass

    process._lock = Lock()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(process, "_submit", lambda *_: entered.append(2))
    with pytest.raises(BrokenProcessPool, match="closed"):
        process.perform(Item("x", "y:z"))
    assert entered == [1, 1]


@pytest.mark.parametrize(
    ("environment", "number", "ended"),
    [({"A": "1"}, 2, False), ({"A": "2"}, 2, True), ({"A": "1"}, None, True), ({}, 2, True)],
)
def test_an_item_of_other_variables_or_threads_ends_the_process_before_it(
    monkeypatch, environment: dict[str, str], number: int | None, ended: bool
) -> None:
    process = local._Process("local:1", {}, Identity.here())
    process.setting = {"A": "1"}, 2
    asked: list[Any] = []
    done: Future[Answer] = Future()
    done.set_result(Answer("x", State.DONE))
    monkeypatch.setattr(process, "end", lambda: asked.append("end"))
    monkeypatch.setattr(process, "_submit", lambda *words: asked.append(words) or done)
    item = Item("x", "y:z", needs=Needs(environment=environment, threads=number))
    assert process.perform(item) is done.result()
    assert asked == [*["end"] * ended, (item, (environment, number))]


def test_a_new_process_is_one_to_be_ended_and_an_ended_one_has_no_setting(monkeypatch) -> None:
    known: list[tuple[str, int]] = []
    seen: list[str | None] = []

    def submit(*_: Any) -> Future[Answer]:
        seen.extend(map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")))
        return Future()

    pool = types.SimpleNamespace(
        submit=submit, _processes={13: None, 17: None}, shutdown=lambda **_: None
    )
    made: list[Any] = []
    monkeypatch.setattr(
        local, "ProcessPoolExecutor", lambda *args, **words: (made.append((args, words)), pool)[1]
    )
    monkeypatch.setattr(local, "started_group", lambda pid: known.append(("started", pid)))
    monkeypatch.setattr(local, "end_group", lambda pid: known.append(("ended", pid)))
    shown = {"CUDA_VISIBLE_DEVICES": "1"}
    process = local._Process("local:1", shown, Identity.here())
    asked = Needs(environment={"CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "3"})
    process._submit(Item("x", "y:z", needs=asked), ({}, None))
    # Whatever an item asks for, it sees the accelerators of its worker.
    assert seen == ["1", "3"]
    # One process alone, which inherits no lock of a thread, and ends with the driver.
    [((count, context), words)] = made
    assert (count, context.get_start_method()) == (1, "spawn")
    assert words == {"initializer": local._end_with_parent}
    assert known == [("started", 13), ("started", 17)] and process.setting == ({}, None)
    process.end()
    assert known[2:] == [("ended", 13), ("ended", 17)] and process.setting is None
    assert process.pool is None


class Scripted:
    """A process that dies as often as a test says."""

    name = "local:1"

    def __init__(self, deaths: int, closed: bool = False) -> None:
        self.deaths, self.closed, self.ended = deaths, closed, 0

    def perform(self, item: Item) -> Answer:
        if self.deaths:
            self.deaths -= 1
            raise BrokenProcessPool("died")
        return Answer(item.name, State.DONE, 1)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("deaths", range(ATTEMPTS + 1))
def test_an_item_may_kill_so_many_workers(deaths: int) -> None:
    engine, own = LocalExecutor(1), threading.local()
    own.process = process = Scripted(deaths)
    answer = engine._run(own, Item("x", "y:z"))
    assert process.ended == deaths and engine.running() == {}
    if deaths < ATTEMPTS:
        assert answer == Answer("x", State.DONE, 1, attempts=deaths + 1)
    else:
        assert answer.state is State.FAILED and answer.attempts == ATTEMPTS
        assert answer.reason.startswith(f"killed {ATTEMPTS} workers: ")


def test_a_worker_that_the_driver_ended_is_not_tried_again() -> None:
    engine, own = LocalExecutor(1), threading.local()
    own.process = process = Scripted(1, closed=True)
    with pytest.raises(BrokenProcessPool):
        engine._run(own, Item("x", "y:z"))
    assert process.ended == 1 and engine.running() == {}


def test_variables_are_there_while_a_process_starts_and_then_what_they_were(monkeypatch) -> None:
    monkeypatch.setenv("MINE", "before")
    monkeypatch.delenv("NEW", raising=False)
    with local._environment({"MINE": "now", "NEW": "1"}):
        assert os.environ["MINE"] == "now" and os.environ["NEW"] == "1"
    assert os.environ["MINE"] == "before" and "NEW" not in os.environ
    # An empty variable is one too.
    monkeypatch.setenv("MINE", "")
    with local._environment({"MINE": "now"}):
        pass
    assert os.environ["MINE"] == ""
    with pytest.raises(ZeroDivisionError), local._environment({"NEW": "1"}):
        raise ZeroDivisionError
    assert "NEW" not in os.environ


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    12 kB\nSwap: 1 kB\n", 12 * 1024),
        ("MemTotal: 9 kB\n", 0),
        ("MemAvailable: much kB\n", 0),
    ],
)
def test_memory_is_what_the_system_says(monkeypatch, tmp_path, text: str, size: int) -> None:
    path = tmp_path / "meminfo"
    path.write_text(text, encoding="ascii")
    monkeypatch.setattr(
        local, "open", lambda name, encoding: path.open(encoding=encoding), raising=False
    )
    assert available_memory() == size
    path.unlink()
    assert available_memory() == 0


X86 = """processor : 0
vendor_id : GenuineIntel
cpu family : 6
model : 85
model name : Xeon
stepping : 7
flags : fpu avx2 fma sse4_2 mce_recovery avx512f

processor : 1
vendor_id : Other

processor : 2
vendor_id : Third

"""
ARM = """processor : 0
CPU implementer : 0x41
CPU architecture: 8
CPU part : 0xd0c
CPU revision : 1
Features : asimd evtstrm aes fp bf16
"""
MAC = """machdep.cpu.brand_string: Apple M2
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.floatingpoint: 1
"""
INTEL_MAC = """machdep.cpu.vendor: GenuineIntel
machdep.cpu.brand_string: Intel i7
machdep.cpu.family: 6
machdep.cpu.model: 158
machdep.cpu.stepping: 10
machdep.cpu.features: FPU SSE AVX1.0 SSE
machdep.cpu.leaf7_features: AVX2 BMI1 RDTSCP
"""


def digest(*flags: str) -> str:
    return hashlib.sha256(" ".join(sorted(set(flags))).encode()).hexdigest()[:8]


def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(machine, "_CPUINFO", path)


def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    done = types.SimpleNamespace(stdout=text)
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)


@pytest.mark.parametrize(
    ("system", "text", "expected"),
    [
        (linux, X86, ("GenuineIntel", "6", "85", "7",
                      digest("fpu", "avx2", "fma", "sse4_2", "avx512f"), "Xeon")),
        (linux, ARM, ("0x41", "8", "0xd0c", "1", digest("asimd", "fp", "bf16"), None)),
        (mac, MAC, ("Apple", "Apple M2", "Apple M2", "Apple M2",
                    hashlib.sha256(b"hw.optional.arm.FEAT_BF16").hexdigest()[:8], "Apple M2")),
        (mac, INTEL_MAC, ("GenuineIntel", "6", "158", "10",
                          digest("fpu", "sse", "avx1.0", "avx2", "bmi1"), "Intel i7")),
        (linux, "model name : X\n", (*[machine.UNKNOWN] * 5, "X")),
        (mac, "", (*[machine.UNKNOWN] * 5, None)),
    ],
)  # fmt: skip
def test_a_processor_is_what_its_system_says_of_the_first_core(
    monkeypatch, tmp_path, system: Callable[..., None], text: str, expected: tuple[str, ...]
) -> None:
    system(monkeypatch, tmp_path, text)
    found = machine.host()
    assert list(found) == [*machine.FIELDS, "name"]
    name = expected[-1] or machine.platform.machine() or machine.UNKNOWN
    assert tuple(found.values()) == (*expected[:-1], name)


def test_an_arm_processor_may_have_a_name_and_a_mac_may_not_answer(monkeypatch, tmp_path) -> None:
    linux(monkeypatch, tmp_path, ARM + "model name : ARMv8\n")
    found = machine.host()
    assert (found["vendor"], found["stepping"], found["name"]) == ("0x41", "1", "ARMv8")
    mac(monkeypatch, tmp_path, "")
    unreadable = types.SimpleNamespace(
        is_file=lambda: True, read_text=functools.partial(raises, PermissionError())
    )
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_CPUINFO", unreadable)
        assert {machine.host()[field] for field in machine.FIELDS} == {machine.UNKNOWN}
    for error in (OSError("none"), machine.subprocess.TimeoutExpired("sysctl", 10)):
        monkeypatch.setattr(machine.subprocess, "run", functools.partial(raises, error))
        assert {machine.host()[field] for field in machine.FIELDS} == {machine.UNKNOWN}


def test_a_name_may_have_a_colon(monkeypatch, tmp_path) -> None:
    linux(monkeypatch, tmp_path, X86.replace("Xeon", "Xeon: Gold"))
    assert machine.host()["name"] == "Xeon: Gold"


def raises(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def test_threads_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {1, 3, 5}, raising=False)
    assert machine.threads() == 3
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 6)
    assert machine.threads() == 6
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    assert machine.threads() == 1


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One package of two files, a hidden one and a document."""
    folder = tmp_path / "parity"
    (folder / "deep" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("a.py", "deep/b.json", ".hidden", "deep/c.pyc", "README.md", ".git/x",
                 "deep/__pycache__/d.py"):  # fmt: skip
        (folder / name).write_text(f"# {name}\n", encoding="utf-8")
    (folder / "device").symlink_to(os.devnull)
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    monkeypatch.setattr(identity, "PACKAGES", ("parity",))
    for each in (identity._first_files, identity.code):
        each.cache_clear()
    yield folder
    for each in (identity._first_files, identity.code):
        each.cache_clear()


def test_code_is_every_file_that_programs_read(package: Path) -> None:
    def of(name: str) -> str:
        return hashlib.sha256((package / name).read_bytes()).hexdigest()

    files = {"parity/a.py": of("a.py"), "parity/deep/b.json": of("deep/b.json")}
    assert identity.package_files() == files
    lines = "".join(f"{name}\0{each}\n" for name, each in sorted(files.items()))
    first = hashlib.sha256(lines.encode()).hexdigest()[:12]
    assert identity.code() == identity.code_on_disk() == first
    assert identity.changed_files() == []
    (package / "a.py").write_text("other", encoding="utf-8")
    (package / "new.py").write_text("", encoding="utf-8")
    (package / "deep" / "b.json").unlink()
    assert identity.changed_files() == ["parity/a.py", "parity/deep/b.json", "parity/new.py"]
    # What a process asked first stays; what is on disk is another.
    assert identity.code() == first != identity.code_on_disk()


def test_a_watch_looks_again_only_after_a_while(package: Path, monkeypatch) -> None:
    now = [50.0]
    monkeypatch.setattr(identity.time, "monotonic", lambda: now[0])
    identity.code()
    watch = Watch(every=2.0)
    watch._looked = now[0] - 2.0
    assert watch.changed() == []
    (package / "a.py").write_text("other", encoding="utf-8")
    now[0] += 1.5
    assert watch.changed() == [] and watch.changed(now=True) == ["parity/a.py"]
    now[0] += 1.5
    assert watch.changed() == []
    now[0] += 0.5
    assert watch.changed() == ["parity/a.py"]
    assert Watch(3.0)._looked == -3.0


def test_differences_are_said_with_both_values() -> None:
    one = Identity("a", {"jax": "1"}, {"XLA_FLAGS": "x"})
    other = Identity("b", {"jax": "2", "torch": "3"}, {})
    assert one.differences(other) == [
        "code a → b", "jax 1 → 2", "torch none → 3", "XLA_FLAGS x → none",
    ]  # fmt: skip
    assert one.differences(one) == []


def test_bytecode_is_stale_where_it_is_of_another_source_of_the_same_stamp(
    package: Path, tmp_path: Path
) -> None:
    import py_compile

    source = package / "a.py"
    source.write_text("x = 1\n", encoding="utf-8")
    stored = Path(py_compile.compile(str(source), doraise=True))
    assert identity.stale_bytecode() == []
    before = source.stat()
    source.write_text("x = 2\n", encoding="utf-8")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Older than the last change of the source's state, whatever the source's own stamp says.
    for written in (0, before.st_mtime_ns + 1):
        os.utime(stored, ns=(written, written))
        assert identity.stale_bytecode() == ["parity/a.py"]
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 3 * 10**9))
    assert identity.stale_bytecode() == []
    source.write_text("x = 1\n", encoding="utf-8")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert identity.stale_bytecode() == []
    stored.unlink()
    assert identity.stale_bytecode() == []


@pytest.mark.parametrize("damage", ["hash", "flags", "size", "short", "no code", "unreadable"])
def test_bytecode_that_python_makes_again_is_not_stale(package: Path, damage: str) -> None:
    """Nor is a damaged file, which Python makes again or refuses: it never runs another program."""
    import py_compile

    source = package / "a.py"
    source.write_text("x = 1\n", encoding="utf-8")
    mode = py_compile.PycInvalidationMode
    kind = mode.CHECKED_HASH if damage == "hash" else mode.TIMESTAMP
    stored = Path(py_compile.compile(str(source), doraise=True, invalidation_mode=kind))
    before, content = source.stat(), stored.read_bytes()
    longer = "x = 22\n" if damage == "size" else "x = 2\n"
    source.write_text(longer, encoding="utf-8")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    parts = {
        "flags": content[:4] + (1).to_bytes(4, "little") + content[8:],
        "short": content[:9],
        "no code": content[:-5],
        "unreadable": content[:16] + b"?",
    }
    stored.write_bytes(parts.get(damage, content))
    os.utime(stored, (0, 0))
    assert identity.stale_bytecode() == []


def test_bytecode_of_the_planted_bugs_may_be_stale_too(package: Path, monkeypatch) -> None:
    monkeypatch.setattr(identity, "_is_stale", lambda source, stored: True)
    faults = identity.ROOT / identity.FAULTS
    faults.mkdir(parents=True)
    (faults / "bug.py").touch()
    assert sorted(identity.stale_bytecode()) == ["parity/a.py", f"{identity.FAULTS}/bug.py"]


def test_code_is_what_it_was_when_anything_asked_first(package: Path) -> None:
    """Its digest and what changed since are of the same moment."""
    before = identity.code_on_disk()
    assert identity.changed_files() == []
    (package / "a.py").write_text("other", encoding="utf-8")
    assert identity.code() == before != identity.code_on_disk()


def test_the_digest_of_code_does_not_depend_on_the_order_of_a_folder() -> None:
    files = {"parity/a.py": "1", "parity/b.py": "2", "reports/a.py": "3"}
    assert identity._digest(files) == identity._digest(dict(reversed(files.items())))
    assert identity._digest(files) != identity._digest({**files, "parity/a.py": "2"})


def test_a_document_anywhere_in_a_package_is_no_code(package: Path) -> None:
    before = identity.code_on_disk()
    (package / "deep" / "README.md").write_text("words", encoding="utf-8")
    assert identity.code_on_disk() == before


def test_versions_are_of_python_and_of_what_is_installed(monkeypatch) -> None:
    def version(name: str) -> str:
        if name == "flax":
            raise identity.metadata.PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(identity.metadata, "version", version)
    found = identity.versions.__wrapped__()
    installed = {name: f"{name} 1" for name in identity.NUMERICS if name != "flax"}
    assert found == {"python": identity.platform.python_version(), **installed}


def test_a_package_in_several_folders_is_an_input_by_its_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "in_parts").mkdir(parents=True)
        (tmp_path / place / "in_parts" / f"{place}.py").touch()
        monkeypatch.syspath_prepend(tmp_path / place)
    known = inputs.contents(["module:in_parts"])
    assert known["module:in_parts"] != inputs.MISSING
    (tmp_path / "one" / "in_parts" / "notes.txt").write_text("no code", encoding="utf-8")
    assert inputs.changed(known) == []
    for place in ("one", "two"):
        file = tmp_path / place / "in_parts" / f"{place}.py"
        file.write_text("x = 1", encoding="utf-8")
        assert inputs.changed(known) == ["module:in_parts"]
        file.write_text("", encoding="utf-8")
        assert inputs.changed(known) == []


def test_a_package_is_an_input_by_all_its_modules(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "of_two_modules"
    # Modules of subpackages may have equal names.
    files = [
        package / name for name in ("__init__.py", "other.py", "sub/__init__.py", "sub/other.py")
    ]
    files[-1].parent.mkdir(parents=True)
    for file in files:
        file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    known = inputs.contents(["module:of_two_modules"])
    for file in files:
        file.write_text("x = 1", encoding="utf-8")
        assert inputs.changed(known) == ["module:of_two_modules"], file
        file.write_text("", encoding="utf-8")
        assert inputs.changed(known) == []


def test_a_module_in_one_file_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "in_one_file.py"
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    known = inputs.contents(["module:in_one_file"])
    assert known["module:in_one_file"] != inputs.MISSING
    file.write_text("x = 1", encoding="utf-8")
    assert inputs.changed(known) == ["module:in_one_file"]
    assert inputs.content("module:sys") == inputs.MISSING
    made = types.ModuleType("of_no_file")
    made.__spec__ = ModuleSpec("of_no_file", None)
    monkeypatch.setitem(sys.modules, "of_no_file", made)
    assert inputs.content("module:of_no_file") == inputs.MISSING


def test_a_content_is_of_names_and_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    for name in ("z", "b/a"):
        (folder / name).write_text(name, encoding="utf-8")

    def of(files: Mapping[str, Path]) -> str:
        lines = (
            f"{n}\0{hashlib.sha256(files[n].read_bytes()).hexdigest()}\n" for n in sorted(files)
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    both = {"z": folder / "z", "b/a": folder / "b" / "a"}
    assert inputs.content(str(folder)) == of(both)
    assert inputs.content(str(folder / "z")) == of({"": folder / "z"})
    (tmp_path / "empty").mkdir()
    # A path that goes through a file leads nowhere either.
    for name in (tmp_path / "empty", tmp_path / "none", folder / "z" / "below"):
        assert inputs.content(str(name)) == inputs.MISSING
    assert inputs.content("module:no_such_module") == inputs.MISSING
    assert inputs.content("module:") == inputs.MISSING
    known = inputs.contents([str(folder), "module:none"])
    assert inputs.changed(known) == []
    assert inputs.changed({**known, "module:none": "x", str(tmp_path): "y"}) == [
        "module:none",
        str(tmp_path),
    ]


def test_a_name_stands_for_a_module_only_if_it_begins_so(tmp_path: Path) -> None:
    file = tmp_path / "a module:parity"
    file.touch()
    known = inputs.contents([str(file)])
    file.write_text("other", encoding="utf-8")
    assert inputs.changed(known) == [str(file)]


def test_only_the_folder_of_compiled_files_is_left_out(tmp_path: Path) -> None:
    for folder in ("__main__", "__pycache__", "cache"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").touch()
    found = {name for name, _ in inputs.files_below(tmp_path)}
    assert found == {"__main__/x.py", "cache/x.py"}


def test_the_digest_of_a_file_that_is_written_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "file"
    path.write_text("one", encoding="utf-8")
    monkeypatch.setattr(inputs, "_SETTLED", -math.inf)
    real = hashlib.file_digest

    def overtaken(file: Any, name: str) -> Any:
        found = real(file, name)
        path.write_text("other", encoding="utf-8")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(inputs.hashlib, "file_digest", overtaken)
        inputs.digest_of_file(path)
    assert str(path) not in inputs._digests
    # What was read before it came to rest is not what is there now.
    assert inputs.digest_of_file(path) == hashlib.sha256(b"other").hexdigest()


def test_a_file_is_remembered_only_where_its_stamp_tells_a_change(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "file"
    path.write_text("one", encoding="utf-8")
    changed = path.stat().st_ctime_ns / 1e9
    reads = []
    real = hashlib.file_digest
    monkeypatch.setattr(inputs.hashlib, "file_digest", lambda *a: reads.append(1) or real(*a))
    for later, total in ((0.05, 1), (0.09, 2), (0.2, 3), (9.0, 3)):
        monkeypatch.setattr(inputs.time, "time", lambda later=later: changed + later)
        assert inputs.digest_of_file(path) == hashlib.sha256(b"one").hexdigest()
        assert len(reads) == total


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 0, 0, ""),
        (lambda: 4, 4, ""),
        (lambda: sys.exit(), 0, ""),
        (lambda: sys.exit(7), 7, ""),
        (lambda: sys.exit("why"), 1, "why\n"),
    ],
)
def test_a_command_s_code_is_what_python_would_make_of_it(capsys, command, code, said) -> None:
    assert supervision._code_of(command) == code
    assert capsys.readouterr().err == said
    # JAX is here: no fork is safe, and it runs in this process.
    assert supervision.supervised(command) == code


@pytest.mark.parametrize("why", ["no fork", "threads", "jax"])
def test_a_command_is_not_supervised_where_no_fork_is_safe(monkeypatch, why: str) -> None:
    def never() -> int:
        raise AssertionError("forked")

    if why != "jax":
        monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(supervision.os, "fork", never)
    monkeypatch.setattr(supervision.threading, "active_count", lambda: 1 + (why == "threads"))
    if why == "no fork":
        monkeypatch.delattr(supervision.os, "fork")
    assert supervision.supervised(lambda: 4) == 4


def test_a_record_is_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    other, theirs = os.pipe()
    records = [(os.getpid() + 1, theirs), (os.getpid(), writer)]
    monkeypatch.setattr(supervision, "_records", records)
    supervision.record(12)
    for end in (writer, theirs):
        os.close(end)
    assert os.read(reader, 64) == b"12\n" and os.read(other, 64) == b""
    for end in (reader, other):
        os.close(end)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_wait_forwards_each_signal_and_ends_by_the_one_that_ended_the_child(
    monkeypatch, ignored: bool
) -> None:
    """What a user ignores, such as a hangup under nohup, stays ignored, but for an interrupt."""
    handlers: dict[int, Any] = {}
    sent: list[tuple[int, int]] = []
    before = signal.SIG_IGN if ignored else signal.SIG_DFL
    numbers = [getattr(signal, name) for name in supervision.FORWARDED]
    expected = [signal.SIGINT] if ignored else numbers

    def waitpid(child: int, _: int) -> tuple[int, int]:
        for number, handler in handlers.items():
            handler(number, None)
        return child, int(signal.SIGKILL)

    monkeypatch.setattr(supervision.signal, "getsignal", lambda _: before)
    monkeypatch.setattr(supervision.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(supervision.signal, "pthread_sigmask", lambda *_: set())

    def kill(process: int, number: int) -> None:
        sent.append((process, number))
        if process == 99:
            # It has ended meanwhile.
            raise ProcessLookupError

    monkeypatch.setattr(supervision.os, "waitpid", waitpid)
    monkeypatch.setattr(supervision.os, "kill", kill)
    reader, writer = os.pipe()
    assert supervision._wait(99, reader, ()) == 128 + signal.SIGKILL
    # Nothing keeps this process from ending by the signal.
    assert handlers[signal.SIGKILL] is signal.SIG_DFL
    assert sent == [*((99, n) for n in expected), (os.getpid(), signal.SIGKILL)]
    for end in (reader, writer):
        os.close(end)


def test_a_file_that_went_while_files_were_read_hides_no_other(package: Path, monkeypatch) -> None:
    """An editor renames a file while it saves; the others are read all the same."""
    read = identity.digest_of_file

    def vanished(path: Path) -> str:
        if path.name == "a.py":
            raise FileNotFoundError
        return read(path)

    before = set(identity.package_files())
    monkeypatch.setattr(identity, "digest_of_file", vanished)
    assert set(identity.package_files()) == before - {"parity/a.py"} != set()


def test_a_file_of_the_code_that_may_not_be_read_is_an_error(package: Path, monkeypatch) -> None:
    """Without it the code would be said to be another, or the same."""
    monkeypatch.setattr(identity, "digest_of_file", functools.partial(raises, PermissionError()))
    with pytest.raises(PermissionError):
        identity.package_files()


def test_signals_are_not_held_back_where_no_process_could_be_started(monkeypatch) -> None:
    """A driver that cannot fork says so, and an interrupt still ends it."""
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(supervision.threading, "active_count", lambda: 1)
    refused = BlockingIOError(errno.EAGAIN, "no more processes")
    monkeypatch.setattr(supervision.os, "fork", functools.partial(raises, refused))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with pytest.raises(BlockingIOError):
            supervision.supervised(lambda: 0)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_groups_are_ended_each_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_groups", set())
    sent = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if pid == 11:
            raise ProcessLookupError
        if pid == 12:
            raise PermissionError

    monkeypatch.setattr(interrupts.os, "killpg", lambda p, n: (sent.append("group"), kill(p, n)))
    monkeypatch.setattr(interrupts.os, "kill", kill)
    for pid in (11, 12, 13):
        interrupts.started_group(pid)
    interrupts.end_group(13)
    assert sent == ["group", (13, signal.SIGKILL), (13, signal.SIGKILL)]
    assert interrupts._groups == {11, 12}
    sent.clear()
    interrupts.end_groups()
    assert sorted(x for x in sent if x != "group") == [
        (p, signal.SIGKILL) for p in (11, 11, 12, 12)
    ]
    assert not interrupts._groups
    sent.clear()
    interrupts.end_group(99)
    assert len(sent) == 3


def test_the_groups_of_a_process_are_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have given the number of an ended group to another program since."""
    ended: list[int] = []
    monkeypatch.setattr(local, "end_group", ended.append)
    process = local._Process("local:1", {}, Identity.here())
    process._pids = [13, 17]
    process.end()
    process.close()
    assert ended == [13, 17] and process.closed


def test_a_worker_leads_a_group_and_ends_it_once_its_driver_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    ended = threading.Event()

    def end_own_group() -> None:
        done.append("end")
        ended.set()

    monkeypatch.setattr(local, "lead_group", lambda: done.append("lead"))
    monkeypatch.setattr(local, "end_own_group", end_own_group)
    driver = types.SimpleNamespace(join=lambda: done.append("driver ended"))
    monkeypatch.setattr(local, "parent_process", lambda: driver)
    # Nothing else may end this process.
    monkeypatch.setattr(local.os, "_exit", lambda code: ended.set())
    local._end_with_parent()
    assert ended.wait(60) and done == ["lead", "driver ended", "end"]


def test_a_worker_ends_its_group_only_as_its_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(interrupts.os, "killpg", lambda *args: sent.append(args))
    monkeypatch.setattr(interrupts, "_exit", sent.append)
    monkeypatch.setattr(interrupts.os, "getpgid", lambda pid: os.getpid() + pid)
    interrupts.end_own_group()
    assert sent == [(0, signal.SIGKILL), 1]
    sent.clear()
    monkeypatch.setattr(interrupts.os, "getpgid", lambda pid: os.getpid() + 1)
    interrupts.end_own_group()
    assert sent == [1]


@pytest.mark.parametrize("error", [None, PermissionError])
def test_a_worker_leads_a_group_of_its_own_where_it_may(monkeypatch, error) -> None:
    asked: list[tuple[int, ...]] = []

    def setpgid(*words: int) -> None:
        asked.append(words)
        if error is not None:
            raise error

    monkeypatch.setattr(interrupts.os, "setpgid", setpgid)
    interrupts.lead_group()
    assert asked == [(0, 0)]


def stream(name: str, flushed: list[str], error: type[Exception] | None) -> Any:
    """A stream that notes that it was flushed, and then raises an error, if there is one."""

    def flush() -> None:
        flushed.append(name)
        if error is not None:
            raise error

    return types.SimpleNamespace(flush=flush)


class Interrupted(BaseException):
    """In the place of the end of the process."""


@pytest.mark.parametrize(
    ("answers", "lost"), [([], None), ([5, 6], None), ([], ValueError), ([5], BrokenPipeError)]
)
def test_an_interrupt_is_raised_once_noted_and_ends_with_the_last_code(
    monkeypatch, answers, lost
) -> None:
    """Whether anybody reads what is written, or the output was closed."""
    ends: list[float] = []
    noted: list[int] = []

    def end(code: int) -> None:
        ends.append(code)
        if threading.current_thread() is threading.main_thread():
            raise Interrupted

    def sleep(seconds: float) -> None:
        # The thread beside the handler waits before it ends the process.
        ends.append(seconds)
        waited.wait(30.0)

    waited = threading.Event()
    monkeypatch.setattr(interrupts, "time", types.SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(interrupts, "_exit", end)
    monkeypatch.setattr(interrupts, "_answers", [])
    monkeypatch.setattr(interrupts, "_notes", [])
    monkeypatch.setattr(interrupts, "end_groups", lambda: noted.append(-1))
    list(map(interrupts.end_with, answers))
    interrupts.noted_by(noted.append)
    interrupts.noted_by(lambda code: noted.append(10 * code))
    # What was written so far is written out: the process ends without Python's shutdown.
    flushed: list[str] = []
    monkeypatch.setattr(sys, "stdout", stream("stdout", flushed, lost))
    monkeypatch.setattr(sys, "stderr", stream("stderr", flushed, lost))
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    fd = signal.set_wakeup_fd(-1)
    try:
        with pytest.raises(Interrupted), interrupts.ended_in_time(3, grace=600.0):
            [watcher] = [t for t in threading.enumerate() if t.name == "interrupts"]
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                while True:
                    signal.pause()
            except KeyboardInterrupt:
                # Further ones are ignored.
                for number in before:
                    assert signal.getsignal(number) is signal.SIG_IGN
                while not ends:
                    threading.Event().wait(0.001)
                assert ends == [600.0]
    finally:
        writer = signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
    expected = answers[-1] if answers else 3
    assert ends == [600.0, expected] and noted == [-1, expected, 10 * expected]
    assert flushed == ["stdout", "stderr"]
    # Where the process is still there, the thread ends its workers and it, by the context's code.
    ends.clear()
    waited.set()
    os.close(writer)
    watcher.join(30.0)
    assert ends == [3] and noted == [-1, expected, 10 * expected, -1]


def test_without_an_interrupt_signals_are_what_they_were() -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    # Another thread that runs, such as one of JAX, takes nothing away.
    over = threading.Event()
    other = threading.Thread(target=over.wait, args=(30.0,))
    alive = threading.active_count()
    other.start()
    with interrupts.ended_in_time(3):
        assert all(signal.getsignal(n) not in (h, signal.SIG_IGN) for n, h in before.items())
        assert "interrupts" in {t.name for t in threading.enumerate()}
    assert {n: signal.getsignal(n) for n in before} == before
    over.set()
    other.join(30.0)
    for thread in threading.enumerate():
        if thread.name == "interrupts":
            thread.join(30.0)
    assert threading.active_count() == alive
    # On another thread there are no signals to take.
    done = []

    def elsewhere() -> None:
        with interrupts.ended_in_time(3):
            done.append({n: signal.getsignal(n) for n in before} == before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(30.0)
    assert done == [True]


def test_a_signal_that_a_program_handles_itself_ends_nothing(monkeypatch) -> None:
    """Python writes the number of each signal that has a handler to the pipe."""
    ends: list[Any] = []
    monkeypatch.setattr(interrupts, "time", types.SimpleNamespace(sleep=ends.append))
    monkeypatch.setattr(interrupts, "_exit", ends.append)
    monkeypatch.setattr(interrupts, "end_groups", lambda: ends.append("groups"))
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    try:
        with interrupts.ended_in_time(3):
            [watcher] = [t for t in threading.enumerate() if t.name == "interrupts"]
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    watcher.join(30.0)
    assert handled == [signal.SIGUSR1] and ends == [] and not watcher.is_alive()


def test_without_an_interrupt_what_python_ignores_goes_where_it_went() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    hook, before = sys.unraisablehook, signal.set_wakeup_fd(writer)
    try:
        with interrupts.ended_in_time(3):
            assert sys.unraisablehook is not hook
        assert sys.unraisablehook is hook
    finally:
        left = signal.set_wakeup_fd(before)
    assert left == writer
    for end in (reader, writer):
        os.close(end)


def test_a_process_whose_parent_has_ended_already_ends_at_once(monkeypatch) -> None:
    """Linux tells of an end that comes later only."""
    asked: list[tuple[int, ...]] = []
    linux = types.SimpleNamespace(prctl=lambda *words: asked.append(words))
    monkeypatch.setattr(interrupts.ctypes, "CDLL", lambda _: linux)
    watched: list[Any] = []

    class Thread:
        def __init__(self, **words: Any) -> None:
            watched.append(words)

        def start(self) -> None:
            watched.append("started")

    def end(code: int) -> None:
        raise Interrupted(code)

    monkeypatch.setattr(interrupts.threading, "Thread", Thread)
    monkeypatch.setattr(interrupts, "_exit", end)
    monkeypatch.setattr(interrupts.os, "getppid", lambda: 7)
    with pytest.raises(Interrupted, match="1"):
        interrupts.end_with_parent(8)
    assert watched == []
    interrupts.end_with_parent(7)
    assert watched[1] == "started" and watched[0]["daemon"]
    # PR_SET_PDEATHSIG is 1; a signal that a program can handle might not end it.
    assert asked == ([(1, signal.SIGKILL)] * 2 if sys.platform == "linux" else [])
    # Elsewhere a look now and then finds that the parent is another.
    monkeypatch.setattr(interrupts.os, "getppid", lambda: 1)
    with pytest.raises(Interrupted, match="1"):
        watched[0]["target"]()


def test_a_module_has_the_variables_that_it_is_given_alone(monkeypatch) -> None:
    monkeypatch.setenv("OF_THE_DRIVER", "1")
    asked: list[Any] = []
    done = interrupts.subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(
        interrupts.subprocess, "run", lambda *_, **words: (asked.append(words), done)[1]
    )
    assert interrupts.run_module("x", [], {"ONLY": "this"}, 9.0) is done
    assert (asked[0]["env"], asked[0]["timeout"]) == ({"ONLY": "this"}, 9.0)


class Ray:
    """What an executor asks of Ray, and what a test says that it answers."""

    class exceptions:  # noqa: N801
        class WorkerCrashedError(Exception):
            pass

        class NodeDiedError(Exception):
            pass

        class OutOfMemoryError(Exception):
            pass

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.listed, self.calls, self.tasks = nodes, [], {}
        self.at: dict[str, tuple[str, float]] = {}
        self.broken: type[Exception] | None = None

    def init(self, **words: Any) -> None:
        self.calls.append(("init", words))

    def nodes(self) -> list[dict[str, Any]]:
        return list(self.listed)

    def shutdown(self) -> None:
        self.calls.append(("shutdown", {}))

    def get(self, value: Any, timeout: float = 0.0) -> Any:
        if self.broken is not None:
            raise self.broken
        return value

    def remote(self, what: Any = None, **words: Any) -> Any:
        if what is None:
            return lambda cls: types.SimpleNamespace(remote=lambda: self._actor(words))

        def asked(**options: Any) -> Any:
            return types.SimpleNamespace(remote=lambda item, *_: self._task(item, options))

        return types.SimpleNamespace(options=asked)

    def _actor(self, words: Any) -> Any:
        assert words == {"num_cpus": 0}
        return types.SimpleNamespace(running=types.SimpleNamespace(remote=lambda: self.at))

    def _task(self, item: Item, options: Any) -> Any:
        future: Future[Any] = Future()
        self.tasks[item.name] = future
        self.calls.append((item.name, options))
        return types.SimpleNamespace(future=lambda: future)


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ray, RayExecutor]]:
    def made(*nodes: dict[str, Any], address: str | None = None) -> tuple[Ray, RayExecutor]:
        fake = Ray(*nodes)
        monkeypatch.setitem(sys.modules, "ray", fake)
        monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
        monkeypatch.delenv("RAY_task_oom_retries", raising=False)
        return fake, RayExecutor(address)

    return made


def test_a_cluster_has_the_processors_of_its_living_nodes(ray, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fake, engine = ray(node(CPU=4.0), node(False, CPU=8.0), node(CPU=2.0, GPU=1.0), node(GPU=1.0))
    assert engine.workers == 6 and ray(node())[1].workers == 1
    name, words = fake.calls[0]
    assert name == "init" and words["address"] is None and words["log_to_driver"] is False
    assert words["runtime_env"] == {"env_vars": kernel_variables()}
    assert "OMP_NUM_THREADS" in words["runtime_env"]["env_vars"]
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["RAY_task_oom_retries"] == str(ATTEMPTS - 1)  # noqa: SIM112
    engine.close()
    assert fake.calls[-1][0] == "shutdown"


def test_a_setting_of_ray_that_the_user_made_stays(monkeypatch) -> None:
    class Started(Ray):
        def init(self, **words: Any) -> None:
            self.seen = {name: os.environ[name] for name in chosen}

    chosen = {"RAY_USAGE_STATS_ENABLED": "1", "RAY_task_oom_retries": "7"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray", fake := Started(node(CPU=1.0)))
    RayExecutor()
    assert fake.seen == chosen


@pytest.mark.parametrize("mine", [lambda *_: None, signal.SIG_DFL, signal.SIG_IGN])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_ray_takes_no_handler_of_a_signal_away(elsewhere: bool, mine: Any) -> None:
    """A night that is ended must end with its own code; on other threads handlers are not ours."""

    class Taking(Ray):
        def init(self, **words: Any) -> None:
            if not elsewhere:
                signal.signal(signal.SIGTERM, lambda *_: None)

    ours = signal.signal(signal.SIGTERM, mine)
    made: list[RayExecutor] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "ray", Taking(node(CPU=1.0)))
            if elsewhere:
                thread = threading.Thread(target=lambda: made.append(RayExecutor()))
                thread.start()
                thread.join(30.0)
            else:
                made.append(RayExecutor())
        assert len(made) == 1 and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, ours)


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
def test_a_cluster_that_refuses_is_named_with_what_starts_one(monkeypatch, error) -> None:
    class Refusing(Ray):
        def init(self, **words: Any) -> None:
            raise error("no head")

    monkeypatch.setitem(sys.modules, "ray", Refusing())
    with pytest.raises(ItemError, match=r"at auto, and connecting gave: no head\. `ray start"):
        RayExecutor("auto")


def test_a_cluster_is_connected_to_at_its_address(ray) -> None:
    ray()
    assert isinstance(engine := open_executor("ray", "auto"), RayExecutor)
    assert engine.ray.calls[-1][1]["address"] == "auto"


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ItemError, match="it is not installed: ") as told:
        RayExecutor()
    assert install("ray") in str(told.value)


def test_a_cluster_gives_what_it_has_and_says_what_it_has_not(ray) -> None:
    fake, engine = ray(node(CPU=4.0, memory=2.0**30), node(False, CPU=99.0, GPU=9.0))
    items = [
        Item("fits", "x:y", needs=Needs(cpus=4)),
        Item("gpu", "x:y", needs=Needs(gpus=1)),
        Item("large", "x:y", needs=Needs(cpus=2, memory=3 * 2**30)),
        Item("also", "x:y"),
    ]
    fits, gpu, large, also = engine.start(items)
    assert gpu.done() and large.done()
    assert gpu.result().reason == "no device: the cluster has none with 1 GPU"
    assert large.result().reason == "no node of the cluster has 2 processors and 3.0 GiB of memory"
    assert {gpu.result().state, large.result().state} == {State.NOT_RUN}
    assert set(fake.tasks) == {"fits", "also"} and not fits.done()
    fake.tasks["also"].set_result(Answer("also", State.DONE, 1))
    assert also.result().value == 1
    fake.tasks["fits"].set_exception(Ray.exceptions.NodeDiedError("gone\n  away"))
    answer = fits.result()
    assert answer.attempts == ATTEMPTS and answer.reason == (
        f"killed {ATTEMPTS} workers: NodeDiedError: gone away"
    )


def test_one_node_that_an_item_fits_on_is_enough(ray) -> None:
    fake, engine = ray(node(CPU=1.0), node(CPU=4.0), node(CPU=2.0, GPU=1.0))
    engine.start(
        [Item("wide", "x:y", needs=Needs(cpus=4)), Item("gpu", "x:y", needs=Needs(gpus=1))]
    )
    assert set(fake.tasks) == {"wide", "gpu"}


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (Ray.exceptions.WorkerCrashedError("x"), ATTEMPTS),
        (Ray.exceptions.OutOfMemoryError("x"), ATTEMPTS),
        (ValueError("y" * 500), 1),
    ],
)
def test_only_deaths_of_workers_are_counted(ray, error: Exception, attempts: int) -> None:
    fake, engine = ray(node(CPU=1.0))
    [future] = engine.start([Item("x", "y:z")])
    fake.tasks["x"].set_exception(error)
    assert future.result().attempts == attempts
    assert len(future.result().reason.partition(": ")[2]) <= 400


def test_who_is_at_what_is_asked_every_two_seconds(ray, monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(cluster.time, "time", lambda: now[0])
    fake, engine = ray(node(CPU=1.0))
    engine.start([Item("a", "x:y"), Item("b", "x:y")])
    fake.at = {"w1": ("a", 990.0), "w2": ("done", 1.0)}
    assert engine.running() == {"w1": ("a", 990.0)}
    fake.at = {"w1": ("b", 999.0)}
    now[0] += 2.0
    assert engine.running() == {"w1": ("a", 990.0)}
    now[0] += 0.5
    assert engine.running() == {"w1": ("b", 999.0)}
    # The two seconds are since the last time.
    fake.at = {"w1": ("a", 990.0)}
    now[0] += 1.0
    assert engine.running() == {"w1": ("b", 999.0)}
    # What was known last stays, where the cluster does not answer in time or at all.
    for error in (TimeoutError, RuntimeError):
        fake.broken = error
        now[0] += 9.0
        assert engine.running() == {"w1": ("b", 999.0)}
    fake.tasks["b"].set_result(Answer("b", State.DONE))
    assert engine.running() == {}


def test_what_was_started_before_still_runs_and_what_failed_does_not(ray) -> None:
    fake, engine = ray(node(CPU=1.0))
    engine.start([Item("a", "x:y"), Item("b", "x:y")])
    engine.start([Item("c", "x:y")])
    fake.at = {f"w{name}": (name, 1.0) for name in "abc"}
    assert engine.running() == fake.at
    fake.tasks["b"].set_exception(ValueError("why"))
    assert engine.running() == {"wa": ("a", 1.0), "wc": ("c", 1.0)}


def test_attempts_are_counted_by_item_and_the_dead_are_at_nothing(monkeypatch) -> None:
    monkeypatch.setattr(cluster.time, "time", lambda: 5.0)
    starts = Starts()
    assert starts.began("a", "w1") == 1 and starts.began("b", "w2") == 1
    assert starts.began("a", "w3") == 2
    assert starts.running() == {"w2": ("b", 5.0), "w3": ("a", 5.0)}
    assert starts.began("c", "w2") == 1 and starts.began("a", "w1") == 3
    assert starts.running() == {"w2": ("c", 5.0), "w1": ("a", 5.0)}


def test_ray_is_told_all_that_an_item_needs() -> None:
    plain = {"name": "x", "num_cpus": 1, "max_retries": ATTEMPTS - 1, "retry_exceptions": False}
    assert options(Item("x", "y:z")) == plain
    needs = Needs(2, 1, 5, "H100", 4, {"XLA_FLAGS": "a"})
    assert options(Item("x", "y:z", needs=needs)) == plain | {
        "num_cpus": 2,
        "num_gpus": 1,
        "memory": 5,
        "accelerator_type": "H100",
        "runtime_env": {"env_vars": {"XLA_FLAGS": "a", "MEGALODON_NUMERICS_THREADS": "4"}},
    }
    # The item itself stays what it is.
    assert needs.environment == {"XLA_FLAGS": "a"}
    # A fraction of a device is shared with other items.
    assert options(Item("x", "y:z", needs=Needs(gpus=0.25))) == plain | {"num_gpus": 0.25}
    assert options(Item("x", "y:z", needs=Needs(threads=0)))["runtime_env"] == {
        "env_vars": {"MEGALODON_NUMERICS_THREADS": "0"}
    }


def test_an_empty_number_of_threads_is_none_while_a_task_runs(monkeypatch) -> None:
    for before, inside in (("", None), ("3", "3")):
        monkeypatch.setenv("OMP_NUM_THREADS", before)
        with cluster._without_empty_threads():
            assert os.environ.get("OMP_NUM_THREADS") == inside
            os.environ["OMP_NUM_THREADS"] = before or "7"
        assert os.environ["OMP_NUM_THREADS"] == before
        with pytest.raises(ZeroDivisionError), cluster._without_empty_threads():
            raise ZeroDivisionError
        assert os.environ["OMP_NUM_THREADS"] == before
    monkeypatch.delenv("OMP_NUM_THREADS")
    with cluster._without_empty_threads():
        assert "OMP_NUM_THREADS" not in os.environ
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert kernel_variables()["OMP_NUM_THREADS"] == "4"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert kernel_variables()["OMP_NUM_THREADS"] == ""


@pytest.mark.parametrize("address", [None, "auto", "ray://127.0.0.1:1", "host", ":7", "host:x"])
def test_only_a_host_and_a_port_are_tried_beforehand(monkeypatch, address) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(cluster.socket, "create_connection", never)
    cluster._check_answers(address)


def test_a_host_is_tried_at_its_port(monkeypatch) -> None:
    tried = []

    def refuses(at: tuple[str, int], timeout: float) -> None:
        tried.append(at)
        raise OSError("refused")

    monkeypatch.setattr(cluster.socket, "create_connection", refuses)
    with pytest.raises(
        ItemError, match=r"a Ray cluster at 10\.0\.0\.1:6379, and connecting gave: refused"
    ):
        cluster._check_answers("10.0.0.1:6379")
    with pytest.raises(ItemError, match="connecting gave: refused"):
        cluster._check_answers("::1:6379")
    with pytest.raises(ItemError, match=r"at \[::1\]:6379"):
        cluster._check_answers("[::1]:6379")
    assert tried == [("10.0.0.1", 6379), ("::1", 6379), ("::1", 6379)]
    assert "at this machine" in cluster._nobody(None, ValueError("x"))


def test_a_connection_that_was_only_tried_is_closed(monkeypatch) -> None:
    closed: list[tuple[str, int]] = []

    def connected(at: tuple[str, int], timeout: float) -> Any:
        return types.SimpleNamespace(close=lambda: closed.append(at))

    monkeypatch.setattr(cluster.socket, "create_connection", connected)
    cluster._check_answers("host:6379")
    assert closed == [("host", 6379)]


def test_a_task_runs_with_its_attempt(monkeypatch) -> None:
    fake = Ray()
    monkeypatch.setitem(sys.modules, "ray", fake)
    began = []

    def remote(item: str, worker: str) -> int:
        began.append((item, worker))
        return 2

    starts = types.SimpleNamespace(began=types.SimpleNamespace(remote=remote))
    item = Item("double", f"{WORK}double", {"number": 4})
    answer = cluster._perform(item, Identity.here(), starts)
    assert (answer.value, answer.attempts) == (8, 2) and answer.state is State.DONE
    assert began == [("double", f"{os.uname().nodename}:{os.getpid()}")]


def test_a_task_sees_no_empty_number_of_threads(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Ray())
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    seen = []

    def perform(item: Item, expected: Identity) -> Answer:
        seen.append("OMP_NUM_THREADS" in os.environ)
        return Answer(item.name, State.DONE)

    monkeypatch.setattr(cluster, "perform", perform)
    starts = types.SimpleNamespace(began=types.SimpleNamespace(remote=lambda *_: 1))
    assert cluster._perform(Item("x", "y:z"), Identity("", {}, {}), starts).attempts == 1
    assert seen == [False] and os.environ["OMP_NUM_THREADS"] == ""


def test_variables_that_an_item_sets_are_no_other_settings(monkeypatch) -> None:
    """Libraries set some on import; those that a worker started with are compared."""
    variable = "OMP_PROC_BIND"
    monkeypatch.setenv(variable, "close")
    item_module._own_identity.cache_clear()
    try:
        driver = Identity.here()
        item = Item("x", f"{WORK}set_variable", {"variable": variable, "value": "spread"})
        for _ in range(2):
            answer = item_module.perform(item, driver)
            assert answer.state is State.DONE, answer.reason
        assert os.environ[variable] == "spread"
        # A driver with another value is still refused.
        answer = item_module.perform(item, Identity.here())
        assert answer.state is State.FAILED and f"{variable} spread → close" in answer.reason
    finally:
        item_module._own_identity.cache_clear()


def test_a_variable_of_an_item_stands_for_the_driver_s(monkeypatch) -> None:
    """The worker was started with it, whatever the driver has."""
    variable = "OMP_PROC_BIND"
    monkeypatch.setenv(variable, "close")
    driver = Identity.here()
    monkeypatch.setenv(variable, "spread")
    item_module._own_identity.cache_clear()
    try:
        needs = Needs(environment={variable: "spread"})
        item_module._check_alike(Item("x", "y:z", needs=needs), driver, "node")
        with pytest.raises(ItemError, match=f"{variable} close → spread"):
            item_module._check_alike(Item("x", "y:z"), driver, "node")
    finally:
        item_module._own_identity.cache_clear()


def test_an_answer_has_the_files_that_an_item_left_by_their_paths() -> None:
    item = Item("leaves", f"{WORK}leave", {"text": "so"}, folder=True)
    answer = item_module.perform(item, Identity.here())
    assert answer.state is State.DONE and answer.files == {"below/text": b"so"}


@pytest.mark.parametrize("fails", [False, True])
def test_the_folder_of_an_item_goes_with_it(tmp_path: Path, monkeypatch, fails: bool) -> None:
    monkeypatch.setattr(item_module.tempfile, "tempdir", str(tmp_path))
    words = {"wrong": 1} if fails else {"text": "so"}
    answer = item_module.perform(Item("x", f"{WORK}leave", words, folder=True), Identity.here())
    assert (answer.state is State.FAILED) is fails
    assert list(tmp_path.iterdir()) == []


def test_an_item_with_a_folder_of_its_own_may_not_be_given_another() -> None:
    words = {"text": "so", "folder": "elsewhere"}
    answer = item_module.perform(Item("x", f"{WORK}leave", words, folder=True), Identity.here())
    assert answer.state is State.FAILED and "multiple values" in answer.reason


def test_an_answer_says_where_an_item_failed() -> None:
    item = Item("x", f"{WORK}double", {"wrong": 1})
    answer = item_module.perform(item, Identity.here())
    assert answer.state is State.FAILED and answer.value is None and answer.seconds > 0
    assert answer.reason.startswith("TypeError: ") and answer.reason.endswith(")")
    assert len(answer.reason) < 900 and math.isfinite(answer.seconds)
    assert answer.place.process == os.getpid() and answer.place.code == identity.code()


@pytest.mark.parametrize(
    "flag",
    [
        "ssse3", "sse4_2", "pni", "avx", "avx2", "avx512_bf16", "fma", "f16c", "amx_tile",
        "amx_bf16", "bmi2", "abm", "popcnt", "gfni", "fphp", "asimdhp", "sve2", "sme", "bf16",
        "i8mm",
    ],
)  # fmt: skip
def test_instructions_for_arithmetic_make_another_processor(flag: str) -> None:
    assert machine._hash(f"sse2 {flag}") != machine._hash("sse2") != ""
    assert machine._hash(f"{flag} sse2") == machine._hash(f"sse2 {flag} {flag}")
    # Mitigations come and go with versions of the kernel.
    assert machine._hash(f"sse2 {flag} md_clear spec_ctrl") == machine._hash(f"sse2 {flag}")


def test_an_item_that_is_tried_again_has_run_since_its_second_attempt(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(local.time, "time", lambda: now[0])
    executor, seen = LocalExecutor(1), []

    class Process:
        name, closed = "local:1", False

        def perform(self, item):
            seen.append(executor._running["local:1"])
            now[0] += 600.0
            if len(seen) == 1:
                raise BrokenProcessPool
            return Answer(item.name, State.DONE, 7)

        def end(self):
            pass

    here = threading.local()
    here.process = Process()
    assert executor._run(here, Item("long", "module:function")).attempts == 2
    assert seen == [("long", 100.0), ("long", 700.0)] and not executor._running
