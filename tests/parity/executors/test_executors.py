"""Items on processes: what becomes of those that fail, kill and need what is not there."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.executors import item as item_module
from parity.executors.cluster import Starts, _fits, options
from parity.executors.identity import Identity
from parity.executors.item import ATTEMPTS, Answer, Item, ItemError, Needs, State
from parity.executors.local import LocalExecutor, available_memory
from parity.executors.machine import UNKNOWN, threads
from parity.executors.pace import LATE
from parity.executors.progress import LINES, Progress
from parity.executors.sweep import ANSWERS, Answers, collect, open_executor, run
from tests.helpers import ROOT

WORK = "tests.parity.executors.work:"


def doubles(count: int) -> list[Item]:
    return [Item(f"double {i}", f"{WORK}double", {"number": i}) for i in range(count)]


def by_name(answers: Iterable[Answer]) -> dict[str, Answer]:
    known = {}
    for answer in answers:
        assert answer.name not in known, "an item was answered twice"
        known[answer.name] = answer
    return known


def troubles(tmp_path: Path) -> list[Item]:
    """Return an item for each thing that can become of one."""
    folders = []
    for name in ("once", "ever"):
        (tmp_path / name).mkdir()
        folders.append(str(tmp_path / name))
    return [
        *doubles(6),
        Item("raises", f"{WORK}refuse", {"text": "not today"}),
        Item("dies once", f"{WORK}die", {"folder": folders[0], "times": 1}),
        Item("dies ever", f"{WORK}die", {"folder": folders[1], "times": 99}),
        Item("needs a device", f"{WORK}double", {"number": 1}, Needs(gpus=64)),
        Item("leaves a file", f"{WORK}leave", {"text": "here"}, folder=True),
        Item("simulated", f"{WORK}setting", {"variable": "XLA_FLAGS"},
             Needs(environment={"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}, threads=1)),
    ]  # fmt: skip


def check_troubles(tmp_path: Path, executor: str, address: str | None = None) -> None:
    """Hold an executor to what it promises of each."""
    lines: list[str] = []
    items = troubles(tmp_path)
    with Answers.opened(tmp_path / "answers") as stored:
        engine = open_executor(executor, address)
        known = by_name(run(items, engine, stored, lines.append))
        left = stored.files(items[-2]) / "below" / "text"
        assert left.read_text(encoding="utf-8") == "here"
        # What did not go well is no answer: the next driver tries it again.
        assert {name for item in items if stored.read(item) for name in [item.name]} == {
            name for name, answer in known.items() if answer.state is State.DONE
        }
    assert known.keys() == {item.name for item in items}
    assert [known[f"double {i}"].value for i in range(6)] == [0, 2, 4, 6, 8, 10]
    assert (known["raises"].state, known["raises"].attempts) == (State.FAILED, 1)
    assert "ValueError: not today" in known["raises"].reason
    assert (known["dies once"].value, known["dies once"].attempts) == ("survived after 1", 2)
    assert any("after 1 workers died" in line for line in lines), "a retry is told"
    tries = (tmp_path / "ever" / "tries").read_text(encoding="utf-8").splitlines()
    assert len(tries) == item_module.ATTEMPTS
    assert len(set(tries)) == len(tries), "every time another worker"
    assert known["dies ever"].state is State.FAILED
    assert "killed 3 workers" in known["dies ever"].reason
    assert known["needs a device"].state is State.NOT_RUN
    assert "no device" in known["needs a device"].reason
    assert known["simulated"].value == ["--xla_cpu_max_isa=SSE4_2", 1]
    places = {known[name].place.fingerprint for name in ("double 0", "simulated")}
    assert len(places) == 2, "a simulated host is another host"


def test_an_item_fails_dies_or_waits_for_a_device_and_no_other_is_lost(tmp_path: Path) -> None:
    check_troubles(tmp_path, "local:2")


@pytest.mark.parametrize("resume", ["same work", "other arguments", "other code"])
def test_stored_answers_are_taken_where_the_work_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("an item was run again")

    with Answers.opened(tmp_path) as stored:
        list(run(doubles(1), LocalExecutor(1), stored))
        if resume == "other code":
            monkeypatch.setattr("parity.executors.identity.code", lambda: "another")
        if resume == "same work":
            monkeypatch.setattr(item_module, "perform", forbidden)
        number = 7 if resume == "other arguments" else 0
        [item] = [Item("double 0", f"{WORK}double", {"number": number})]
        assert (stored.read(item) is not None) == (resume == "same work")


def test_a_worker_with_other_code_gives_no_answer() -> None:
    answer = item_module.perform(doubles(1)[0], replace(Identity.here(), code="another"))
    assert answer.state is State.FAILED
    assert "Install the same version" in answer.reason and "on every machine" in answer.reason


def test_two_drivers_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / ".half-written.partial").mkdir(parents=True)
    with (
        Answers.opened(tmp_path),
        pytest.raises(ItemError, match=f"process {os.getpid()} on .* has it"),
        Answers.opened(tmp_path),
    ):
        raise AssertionError("two drivers")
    # What a killed driver was writing is gone, and its lock with it.
    with Answers.opened(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock", ANSWERS}


DRIVER = """
import sys
from pathlib import Path
from parity.executors.item import Item
from parity.executors.sweep import Answers, open_executor, run

if __name__ == "__main__":
    work = "tests.parity.executors.work:wait"
    items = [
        Item(f"wait {i}", work, {"seconds": 0.05, "log": sys.argv[2], "name": str(i)})
        for i in range(16)
    ]
    with Answers.opened(Path(sys.argv[1])) as stored:
        for answer in run(items, open_executor("local:2"), stored):
            print(answer.value, flush=True)
"""


def test_a_driver_that_is_killed_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    script, log = tmp_path / "driver.py", tmp_path / "log"
    script.write_text(DRIVER, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "answers"), str(log)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, text=True) as first:
        assert first.stdout is not None
        for _ in range(4):
            first.stdout.readline()
        first.send_signal(signal.SIGKILL)
    time.sleep(0.3)
    done = Counter(log.read_text(encoding="utf-8").split())
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert Counter(ended.stdout.split()) == Counter(map(str, range(16)))
    again = Counter(log.read_text(encoding="utf-8").split()) - done
    # The workers of a killed driver end with it, and at most what they were at is done again.
    assert len(done) >= 4 and sum((again & done).values()) <= 2
    lines = (tmp_path / "answers" / ANSWERS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["answer"]["state"] for line in lines] == ["done"] * 16


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99], ids=["none", "half", "all but its end"])
def test_an_answer_that_a_driver_was_killed_in_is_none(tmp_path: Path, part: float) -> None:
    """At whatever byte it was: the answers before it stand, and the next ones are whole."""
    one, two, three = doubles(3)
    with Answers.opened(tmp_path) as stored:
        for item in (one, two):
            stored.write(item, Answer(item.name, State.DONE, 1))
    path = tmp_path / ANSWERS
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[: int(part * len(second))])
    with Answers.opened(tmp_path) as stored:
        assert [stored.read(item) is not None for item in (one, two, three)] == [True, False, False]
        stored.write(three, Answer(three.name, State.DONE, 3))
        # What is there stays what it is.
        stored.write(three, Answer(three.name, State.DONE, 4))
    with Answers.opened(tmp_path) as stored:
        values = [answer and answer.value for answer in map(stored.read, (one, two, three))]
        assert values == [1, None, 3]
        stored.discard()
        assert stored.read(one) is None
    assert not path.read_bytes()


def test_a_driver_that_is_killed_in_its_very_first_answer_leaves_none(tmp_path: Path) -> None:
    one, two = doubles(2)
    with Answers.opened(tmp_path) as stored:
        stored.write(one, Answer(one.name, State.DONE, 1))
    path = tmp_path / ANSWERS
    path.write_bytes(path.read_bytes()[:-2])
    with Answers.opened(tmp_path) as stored:
        assert stored.read(one) is None and not path.read_bytes()
        stored.write(two, Answer(two.name, State.DONE, 2))
    with Answers.opened(tmp_path) as stored:
        assert stored.read(one) is None
        assert (answer := stored.read(two)) is not None and answer.value == 2
        assert stored.damaged == []


def test_files_of_an_item_whose_answer_was_not_stored_are_replaced(tmp_path: Path) -> None:
    item = Item("leaves", f"{WORK}leave", {"text": "new"}, folder=True)
    answer = Answer(item.name, State.DONE, files={"below/text": b"new"})
    with Answers.opened(tmp_path) as stored:
        (stored.files(item) / "below").mkdir(parents=True)
        (stored.files(item) / "old").touch()
        assert stored.read(item) is None
        stored.write(item, answer)
        left = {path.name: path for path in stored.files(item).rglob("*") if path.is_file()}
        assert left.keys() == {"text"} and left["text"].read_bytes() == b"new"


@pytest.mark.parametrize("line", [{}, {"answer": None}, {"answer": 7}, {"answer": {}}], ids=str)
def test_a_line_without_its_answer_is_damaged_and_its_item_runs_again(
    tmp_path: Path, line: dict[str, Any]
) -> None:
    [item] = doubles(1)
    with Answers.opened(tmp_path) as stored:
        stored.write(item, Answer(item.name, State.DONE, 1))
    path = tmp_path / ANSWERS
    whole = json.loads(path.read_text(encoding="utf-8"))
    del whole["answer"]
    path.write_text(f"{json.dumps(whole | line)}\n", encoding="utf-8")
    with Answers.opened(tmp_path) as stored:
        assert stored.read(item) is None and stored.damaged == [item.name]
        stored.write(item, Answer(item.name, State.DONE, 2))
    with Answers.opened(tmp_path) as stored:
        assert (answer := stored.read(item)) is not None and answer.value == 2


@pytest.mark.parametrize("line", ["[]", "7", '{"answer": 1}', "no JSON"])
def test_what_is_no_file_of_answers_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / ANSWERS).write_text(f"{line}\n", encoding="utf-8")
    with (
        pytest.raises(ItemError, match=r"expected the stored results of items in .* run again"),
        Answers.opened(tmp_path),
    ):
        raise AssertionError("taken for answers")


@pytest.mark.parametrize(
    ("text", "words"), [("local:0", "local:N"), ("slurm", "or ray"), ("ray:2", "or ray")]
)
def test_an_executor_that_there_is_not_is_refused(text: str, words: str) -> None:
    with pytest.raises(ItemError, match=words):
        open_executor(text)


def test_items_that_cannot_be_told_apart_or_sent_are_refused() -> None:
    with pytest.raises(ItemError, match="received twice: double 0"):
        list(run([*doubles(2), *doubles(1)], LocalExecutor(1)))
    with pytest.raises(ItemError, match="expected JSON values"):
        Item("array", f"{WORK}double", {"number": object()}).digest()
    with pytest.raises(ItemError, match="that can be imported"):
        Item("nowhere", "no.such:function").digest()


def test_as_many_processes_as_memory_and_processors_allow() -> None:
    def count(asked: int | None, **needs: int) -> int:
        return LocalExecutor(asked)._count([Item("x", "y:z", needs=Needs(**needs))] * 99, 0)

    assert count(7) == 7
    assert count(None, memory=available_memory() or 1) == 1
    assert count(None, cpus=10_000) == 1
    # Any two of them may run at once, so that the largest decides.
    sizes = (1, available_memory() or 1)
    items = [Item("x", "y:z", needs=Needs(memory=size)) for size in sizes]
    assert LocalExecutor(None)._count(items, 0) == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_an_item_of_one_thread_leaves_the_next_one_all_processors() -> None:
    every = os.sched_getaffinity(0)
    words = {"variable": "XLA_FLAGS"}
    narrow = Item("narrow", f"{WORK}setting", words, Needs(threads=1))
    try:
        places = []
        for item, count in ((narrow, 1), (replace(narrow, needs=Needs()), len(every))):
            answer = item_module.perform(item, Identity.here())
            assert answer.value[1] == threads() == count
            places.append(answer.place.fingerprint)
        # Another number of threads adds in another order: another host.
        assert UNKNOWN in places or len(set(places)) == 2
    finally:
        os.sched_setaffinity(0, every)


def test_flags_are_part_of_the_fingerprint_of_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever simulates another processor has set it before.
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before = item_module.Place.here()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    after = item_module.Place.here()
    assert UNKNOWN in (before.fingerprint, after.fingerprint) or before != after


@pytest.mark.parametrize(("wanted", "fits"), [("", 4), ("H100", 4), ("h100", 4), ("B200", 0)])
def test_workers_on_accelerators_see_two_each_and_no_other(
    monkeypatch: pytest.MonkeyPatch, wanted: str, fits: int
) -> None:
    monkeypatch.setattr("parity.executors.local.accelerators", lambda: ("NVIDIA H100",) * 4)
    needs = Needs(gpus=2, device=wanted)
    items = [Item(str(i), f"{WORK}setting", {"variable": "CUDA_VISIBLE_DEVICES"}, needs)
             for i in range(3)]  # fmt: skip
    known = by_name(run(items, LocalExecutor(2)))
    if not fits:
        assert {answer.state for answer in known.values()} == {State.NOT_RUN}
        assert all(f"no device: this machine has none with 2 {wanted}" in answer.reason
                   for answer in known.values())  # fmt: skip
        return
    assert {answer.value[0] for answer in known.values()} <= {"0,1", "2,3"}
    assert len({answer.place.process for answer in known.values()}) == len(
        {answer.value[0] for answer in known.values()}
    )


@pytest.mark.parametrize("name", ["raises", "needs a device"])
def test_a_sweep_of_which_every_answer_is_needed_names_those_it_has_not(
    tmp_path: Path, name: str
) -> None:
    [odd] = [item for item in troubles(tmp_path) if item.name == name]
    with pytest.raises(RuntimeError, match=f"1 of 3 items have no answer: {name}: .+"):
        collect([*doubles(2), odd], LocalExecutor(1))
    assert [a.value for a in collect(doubles(2)[::-1], LocalExecutor(1))] == [2, 0]
    # An answer that is stored comes first, and is returned in its place.
    folder, items = tmp_path / "answers", doubles(2)
    collect(items[1:], LocalExecutor(1), folder)
    assert [a.value for a in collect(items, LocalExecutor(1), folder)] == [0, 2]


def test_an_item_may_kill_as_many_workers_on_a_cluster_as_here() -> None:
    """Needs no Ray: what it is told is plain data."""
    assert options(doubles(1)[0])["max_retries"] == ATTEMPTS - 1


@pytest.mark.parametrize(
    ("needs", "fits"),
    [
        (Needs(), True),
        (Needs(cpus=4, gpus=2, memory=8), True),
        (Needs(cpus=5), False),
        (Needs(gpus=3), False),
        (Needs(memory=9), False),
        (Needs(cpus=0), True),
        (Needs(gpus=1, device="H100"), True),
        (Needs(gpus=1, device="A100"), False),
        # A name that begins another one.
        (Needs(gpus=1, device="H10"), False),
        (Needs(cpus=4, gpus=2, memory=8, device="H100"), True),
        (Needs(cpus=4, gpus=2, memory=9, device="H100"), False),
    ],
    ids=str,
)
def test_a_node_fits_if_it_has_all_that_is_needed_and_may_have_no_more(needs, fits) -> None:
    node = {"CPU": 4.0, "GPU": 2.0, "memory": 8.0, "accelerator_type:H100": 1.0}
    assert _fits(needs, node) is fits
    # What a node does not speak of it does not have.
    bare = {name: amount for name, amount in node.items() if name == "CPU"}
    assert _fits(needs, bare) is (fits and not (needs.gpus or needs.memory or needs.device))


def test_a_long_sweep_says_only_what_did_not_go_well() -> None:
    lines: list[str] = []
    items = [Item(f"item {n}", "work:double") for n in range(LINES + 1)]
    progress = Progress(LocalExecutor(1), items, lines.append)
    progress.done(Answer("well", State.DONE))
    assert not lines
    progress.done(Answer("retried", State.DONE, attempts=2))
    progress.done(Answer("failed", State.FAILED, reason="why"))
    assert "1 workers died" in lines[0] and "failed: why" in lines[1]


def test_progress_says_who_is_at_what_what_was_slowest_and_how_long_it_takes() -> None:
    lines: list[str] = []
    engine = LocalExecutor(2)
    engine.workers = 2
    engine._running["local:1"] = "the long one", time.time() - 4.0
    names = ("quick", "slow", "the long one", "another")
    progress = Progress(engine, [Item(name, "work:double") for name in names], lines.append)
    assert progress.estimate() is None
    for name, seconds in (("quick", 1.0), ("slow", 9.0)):
        place = item_module.Place("node", 1)
        progress.done(Answer(name, State.DONE, seconds=seconds, place=place))
    # Two are left, of 5 s each, and of one of them 4 s are done: the other is what takes long.
    left = progress.estimate()
    assert left is not None and 4.9 < left <= 5.0
    # What took longer than most takes some longer still.
    engine._running["local:2"] = "another", time.time() - 80.0
    late = progress.estimate()
    assert late is not None and late > 5.0
    del engine._running["local:2"]
    head, worker, slowest = progress.lines()
    assert head.startswith("2 of 4")
    assert worker.startswith("local:1: the long one for 4 s")
    assert slowest == "slowest: slow 9.0 s, quick 1.0 s"
    assert "slow: 9.0 s on node:1" in lines[-1]


def test_the_time_left_is_what_was_expected_at_the_pace_of_what_is_done() -> None:
    engine = LocalExecutor(2)
    engine.workers = 2
    costs = {"mesh": 100.0, "probes": 60.0, "plain": 40.0, "tiny": 10.0}
    items = [Item(name, "work:double", expected=cost) for name, cost in costs.items()]
    progress = Progress(engine, items, lambda line: None)
    # Before anything is done: 100 s beside 60 and 40 s, and the last 10 s behind them.
    assert progress.estimate() == 110.0
    assert "55 s to 4 minutes left" in progress.lines()[0]
    # Twice as slow as expected, averaged with 5 s that are not: a pace of 125 / 65.
    progress.done(Answer("probes", State.DONE, seconds=120.0))
    assert progress.estimate() == pytest.approx(100.0 * 125 / 65)
    assert "about 3 minutes left" in progress.lines()[0]
    # What runs longer than it should is not about to be over at once, and says that the pace is no
    # less: (125 + 400) / (65 + 100). The other two take 40 and 10 s times that.
    engine._running["local:1"] = "mesh", time.time() - 400.0
    left = progress.estimate()
    assert left is not None and 40.0 * 525 / 165 < left < 50.0 * 525 / 165
    assert progress.pace.estimate({"mesh": 4000.0}, 2) == pytest.approx(40.0 * 4125 / 165)
    del progress.pace.left["plain"], progress.pace.left["tiny"]
    assert progress.pace.estimate({"mesh": 4000.0}, 2) == pytest.approx(4000.0 / LATE)
    progress.pace.left |= {"plain": 40.0, "tiny": 10.0}
    for name in ("mesh", "plain", "tiny"):
        assert progress.estimate() != 0.0
        progress.done(Answer(name, State.DONE, seconds=costs[name]))
    assert progress.estimate() == 0.0


def test_a_process_is_kept_for_items_that_need_the_same_of_it_alone() -> None:
    """A library counts its processors and reads its variables once."""
    needs = [
        *(Needs(), Needs(threads=1), Needs(threads=1), Needs()),
        *(Needs(environment={"HERE": "1"}), Needs(environment={"HERE": "2"})),
    ]
    items = [Item(str(i), f"{WORK}process", needs=need) for i, need in enumerate(needs)]
    found = [answer.value for answer in collect(items, LocalExecutor(1))]
    kept = [one == other for one, other in itertools.pairwise(found)]
    assert kept == [False, True, False, False, False]


def test_who_took_an_item_over_is_at_it_and_the_dead_one_no_more() -> None:
    starts = Starts()
    assert [starts.began(*at) for at in (("a", "w1"), ("b", "w2"), ("a", "w3"))] == [1, 1, 2]
    assert {worker: item for worker, (item, _) in starts.running().items()} == {
        "w2": "b",
        "w3": "a",
    }
