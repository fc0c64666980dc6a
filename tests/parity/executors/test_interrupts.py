"""A driver that is interrupted ends in seconds with exit code 3, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity.executors import interrupts
from parity.executors.interrupts import end_groups, run_module, started_group
from parity.executors.item import Item
from parity.executors.local import LocalExecutor
from parity.executors.sweep import Answers
from tests.helpers import ROOT

WORK = "tests.parity.executors.work"
PROMISE = 20.0
"""Seconds after a signal in which everything has ended: four times the 5 s of an idle machine, for
one that is at other work too. What nobody ends takes 60."""
START = """
import sys, time
from pathlib import Path
from parity.executors.interrupts import ended_in_time, run_module
from parity.executors.item import Item
from parity.executors.sweep import Answers, open_executor, run

WORK = "tests.parity.executors.work"
pids, stuck = sys.argv[2], "stuck" in sys.argv
quick = Item("quick", f"{WORK}:double", {"number": 1})
slow = Item("slow", f"{WORK}:with_a_child", {"pids": pids, "seconds": 60})


def sweep():
    with Answers.opened(Path(sys.argv[1])) as answers:
        for answer in run([quick, slow], open_executor("local:1"), answers):
            print(answer.name, flush=True)


class Lost:
    def __del__(self):
        # Python prints and ignores what is raised here; so it does in JAX's hook of the collector.
        print(1, file=open(pids, "w"), flush=True)
        time.sleep(60)


def swallow():
    for _ in range(99):
        try:
            sweep()
        except KeyboardInterrupt:
            time.sleep(60)


if __name__ == "__main__":
    with ended_in_time(3, grace=0.5 if stuck else 4.0):
        try:
            if "lost" in sys.argv:
                Lost()
                time.sleep(60)
            elif "module" in sys.argv:
                run_module(WORK, [pids], __import__("os").environ, 60)
            else:
                swallow() if stuck else sweep()
        except KeyboardInterrupt:
            sys.exit(3)
"""


@pytest.mark.parametrize(
    ("kind", "interrupted", "here", "again"),
    [
        (KeyboardInterrupt, True, True, True),
        # Raised by other code, raised in another thread, and another exception.
        (KeyboardInterrupt, False, True, False),
        (KeyboardInterrupt, True, False, False),
        (ValueError, True, True, False),
    ],
)
def test_only_an_ignored_interrupt_of_ours_is_sent_again(
    kind: type, interrupted: bool, here: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    sent: list[tuple[object, ...]] = []
    handlers: list[int] = []
    arrived = threading.Event()
    if interrupted:
        arrived.set()

    class Timer:
        def __init__(self, _seconds: float, function: object, arguments: tuple[object, ...]):
            self.start = lambda: sent.append((function, *arguments))

    monkeypatch.setattr(interrupts.threading, "Timer", Timer)
    monkeypatch.setattr(interrupts.signal, "signal", lambda number, _: handlers.append(number))
    hook = interrupts._repeating(told.append, lambda *_: None, arrived)
    lost = SimpleNamespace(exc_type=kind)
    if here:
        hook(lost)
    else:
        thread = threading.Thread(target=hook, args=(lost,))
        thread.start()
        thread.join()
    assert sent == ([(os.kill, os.getpid(), signal.SIGINT)] if again else [])
    # The handler ignores signals once it has raised; what is sent again must find it.
    assert handlers == ([signal.SIGINT, signal.SIGTERM] if again else [])
    assert told == ([] if again else [lost])


def alive(pid: int) -> bool:
    """Whether a process runs: one that nobody has asked for its end does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def wait_for(path: Path) -> list[int]:
    """Return the numbers that a process wrote."""
    for _ in range(600):
        if path.is_file() and (text := path.read_text(encoding="utf-8")).endswith("\n"):
            return [int(word) for word in text.split()]
        time.sleep(0.05)
    raise AssertionError("it did not begin")


def ended(pids: list[int]) -> bool:
    """Whether all processes end within what is promised."""
    end = time.monotonic() + PROMISE
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [
        (signal.SIGINT, [], 3),
        (signal.SIGTERM, [], 3),
        # Python's handler waits for what is compiled, and anybody may catch what it raises.
        (signal.SIGTERM, ["stuck"], 3),
        (signal.SIGKILL, [], -signal.SIGKILL),
        (signal.SIGTERM, ["module"], 3),
        (signal.SIGKILL, ["module"], -signal.SIGKILL),
    ],
    ids=lambda value: str(value),
)
def test_nothing_outlives_a_driver_that_is_ended(
    tmp_path: Path, number: signal.Signals, words: list[str], code: int
) -> None:
    """Row 5 of issue 35: `close` began an item of 40 s again, and waited for it."""
    script, pids = tmp_path / "driver.py", tmp_path / "pids"
    script.write_text(START, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "answers"), str(pids), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        try:
            started = wait_for(pids)
            if "module" not in words:
                # The worker begins the next item while the driver still stores the answer before.
                assert driver.stdout is not None and driver.stdout.readline() == "quick\n"
            begun = time.monotonic()
            driver.send_signal(number)
            assert driver.wait(timeout=60) == code
            assert time.monotonic() - begun < PROMISE
            assert ended(started), "a worker, or what it started, is left"
        finally:
            driver.kill()
    assert len(pids.read_text(encoding="utf-8").splitlines()) == 1, "an item was begun again"
    if "module" not in words:
        # What was finished is kept.
        with Answers.opened(tmp_path / "answers") as answers:
            quick = Item("quick", f"{WORK}:double", {"number": 1})
            answer = answers.read(quick)
            assert answer is not None and answer.value == 2


def test_an_interrupt_that_python_ignores_is_sent_again(tmp_path: Path) -> None:
    """One that came while the garbage collector ran JAX's hook was lost: killed, and no word."""
    script, pids = tmp_path / "driver.py", tmp_path / "pids"
    script.write_text(START, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "answers"), str(pids), "lost"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as driver:
        try:
            wait_for(pids)
            driver.send_signal(signal.SIGINT)
            _, said = driver.communicate(timeout=60)
        finally:
            driver.kill()
    assert (driver.returncode, said) == (3, "")


def test_a_closed_executor_ends_what_runs_and_begins_nothing_again(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    engine = LocalExecutor(1)
    words = {"pids": str(pids), "seconds": 60}
    slow, next_one = engine.start(
        [Item(name, f"{WORK}:with_a_child", words) for name in ("slow", "next")]
    )
    started = wait_for(pids)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < PROMISE
    # What was ended is no answer of an item that killed its workers.
    assert isinstance(slow.exception(), BrokenProcessPool) and next_one.cancelled()
    assert ended(started)
    assert wait_for(pids) == started, "an item was begun again"
    assert not [t for t in threading.enumerate() if "ThreadPoolExecutor" in t.name and t.is_alive()]


def test_a_worker_that_dies_takes_what_it_started_along(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    engine = LocalExecutor(1)
    engine.start([Item("slow", f"{WORK}:with_a_child", {"pids": str(pids), "seconds": 60})])
    try:
        worker, child = wait_for(pids)
        os.kill(worker, signal.SIGKILL)
        assert ended([child])
    finally:
        engine.close()


def test_a_module_that_takes_too_long_or_fails_says_so(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(subprocess.TimeoutExpired):
        run_module(WORK, [str(pids)], os.environ | {"PYTHONPATH": str(ROOT)}, 2.0)
    assert not pids.is_file() or ended(wait_for(pids))
    done = run_module("no.such.module", [], os.environ, 30.0)
    assert done.returncode and "no.such" in done.stderr.replace("No module named 'no'", "no.such")


def test_a_module_may_print_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A crash inside a library prints any bytes; the caller asks for the exit code all the same."""
    (tmp_path / "bytes_of_a_crash.py").write_text(
        "import os\nos.write(1, b'a\\xffb')\nos.write(2, b'\\xfe')\nraise SystemExit(3)\n", "utf-8"
    )
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    done = run_module("bytes_of_a_crash", [], os.environ | {"PYTHONPATH": path}, 60.0)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a\ufffdb", "\ufffd")


COMMAND = """
import time
from reports.cli import main


@main.command()
def nap():
    print("asleep", flush=True)
    time.sleep(60)


main(["nap"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_command_ends_with_3_where_it_is_interrupted(number: signal.Signals) -> None:
    command = [sys.executable, "-c", COMMAND]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as driver:
        assert driver.stdout is not None and driver.stderr is not None
        assert driver.stdout.readline() == "asleep\n"
        begun = time.monotonic()
        driver.send_signal(number)
        assert driver.wait(timeout=60) == 3
        assert time.monotonic() - begun < PROMISE
        assert "interrupted: no run was written" in driver.stderr.read()


@pytest.mark.parametrize("leads", [True, False])
def test_a_worker_is_ended_whether_or_not_it_leads_a_group_yet(leads: bool) -> None:
    """A process leads its group from its first line on, and may be ended before."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    worker = subprocess.Popen(command, process_group=0 if leads else None)
    try:
        started_group(worker.pid)
        end_groups()
        assert worker.wait(PROMISE) == -signal.SIGKILL
    finally:
        worker.kill()
