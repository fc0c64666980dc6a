"""Interrupts and children: nothing that a driver started outlives it, and it ends in seconds.

Python runs a signal's handler between two of its own instructions, and one call that compiles a
program takes minutes. So a thread watches beside the handler, and ends the process where that did
not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

GRACE = 3.0
"""Seconds that a process has after SIGINT or SIGTERM to stop by itself."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
# Before `parity.engine.exits` puts something else in its place, while other people's code runs.
_exit = os._exit
_answers: list[int] = []
"""Exit codes that were set by `end_with`."""
_notes: list[Callable[[int], None]] = []
"""Called with the exit code of an interrupted process, before it ends."""
_groups: set[int] = set()
"""Process groups of this driver's workers."""


@contextmanager
def ended_in_time(code: int, grace: float = GRACE) -> Iterator[None]:
    """Context in which SIGINT and SIGTERM raise one KeyboardInterrupt, and end the process with
    exit code `code` where it is still there some seconds later.

    Further signals are ignored: a second one would interrupt the cleaning up after the first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    interrupted = threading.Event()

    def interrupt(*_: Any) -> None:
        interrupted.set()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def watch() -> None:
        # The system writes the number of each signal, whatever Python is at.
        while received := os.read(reader, 1):
            if received[0] in _SIGNALS:
                time.sleep(grace)
                end_groups()
                os.write(2, b"interrupted: what ran did not stop by itself, and was ended\n")
                _exit(code)
        os.close(reader)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="interrupts").start()
    try:
        yield
    finally:
        if interrupted.is_set():
            # All that was begun has been closed; Python's own end takes seconds with JAX in it.
            end_groups()
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            answer = _answers[-1] if _answers else code
            for note in _notes:
                note(answer)
            _exit(answer)
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)


def end_with(code: int) -> None:
    """Set the exit code of an interrupted process whose interrupt is its ordinary end."""
    _answers.append(code)


def noted_by(note: Callable[[int], None]) -> None:
    """Have the exit code of an interrupted process noted before it ends."""
    _notes.append(note)


def lead_group() -> None:
    """Make this worker the leader of a group, in which all processes are that it starts."""
    with suppress(OSError):
        os.setpgid(0, 0)


def end_own_group() -> None:
    """End this worker with all processes it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    _exit(1)


def started_group(pid: int) -> None:
    """Note the process of a worker, which will be the leader of its group."""
    _groups.add(pid)


def end_group(pid: int) -> None:
    """End a worker with all processes it started."""
    _groups.discard(pid)
    # It is in no group of its own before it ran its first line.
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_groups() -> None:
    """End every worker of this process with all that they started."""
    for pid in list(_groups):
        end_group(pid)


def run_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a module as a program, which ends when this process does, however that ends.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    program = (
        "import runpy, sys; from parity.executors.interrupts import end_with_parent; "
        "end_with_parent(int(sys.argv.pop(1))); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, str(os.getpid()), module, *arguments]
    return subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=timeout, check=False
    )


def end_with_parent(parent: int) -> None:
    """Have the system end this process when its parent, of that number, does.

    Where the system cannot, a thread looks once a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        _exit(1)

    # The parent may have ended before the system was asked.
    if os.getppid() != parent:
        _exit(1)
    threading.Thread(target=look, daemon=True).start()
