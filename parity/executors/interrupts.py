"""Interrupts and child processes: a driver and everything it started end within seconds.

Python runs a signal handler between two bytecode instructions, but a single call that compiles a
program can take minutes. So a thread watches as well, and ends the process if the handler did not.
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
"""Seconds after SIGINT or SIGTERM in which a process may stop by itself."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
# Saved before `parity.engine.programs.exits` replaces it while user code runs.
_exit = os._exit
_answers: list[int] = []
"""Exit codes set by `end_with`."""
_notes: list[Callable[[int], None]] = []
"""Callbacks that receive the exit code of an interrupted process before it ends."""
_groups: set[int] = set()
"""Process groups of this driver's workers."""


@contextmanager
def ended_in_time(code: int, grace: float = GRACE) -> Iterator[None]:
    """Make SIGINT and SIGTERM raise one KeyboardInterrupt within this context, and end the process
    with exit code `code` if it is still running `grace` seconds later.

    Further signals are ignored: a second one would interrupt the cleanup after the first.
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
        # The kernel writes the number of each signal to the pipe, whatever Python is doing.
        while received := os.read(reader, 1):
            if received[0] in _SIGNALS:
                time.sleep(grace)
                end_groups()
                os.write(2, b"interrupted: running work did not stop by itself and was killed\n")
                _exit(code)
        os.close(reader)

    hook, sys.unraisablehook = sys.unraisablehook, _repeating(sys.unraisablehook, interrupt)
    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="interrupts").start()
    try:
        yield
    finally:
        if interrupted.is_set():
            # All that was opened has been closed. Python's own shutdown takes seconds with JAX.
            end_groups()
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            answer = _answers[-1] if _answers else code
            for note in _notes:
                note(answer)
            _exit(answer)
        sys.unraisablehook = hook
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)


def _repeating(hook: Callable[[Any], Any], interrupt: Callable[..., None]) -> Callable[[Any], None]:
    """Return `sys.unraisablehook` that sends an interrupt again which Python ignored.

    Python ignores what is raised in `__del__` and in callbacks of the garbage collector, such as
    JAX's, and goes on with what was to be interrupted.
    """

    def repeat(lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            hook(lost)
            return
        for number in _SIGNALS:
            signal.signal(number, interrupt)
        # Later, because the call that ignores exceptions has not returned yet.
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    return repeat


def end_with(code: int) -> None:
    """Set the exit code of a process for which an interrupt is the normal end."""
    _answers.append(code)


def noted_by(note: Callable[[int], None]) -> None:
    """Register a callback for the exit code of an interrupted process, called before it ends."""
    _notes.append(note)


def lead_group() -> None:
    """Make this worker the leader of a process group that will contain all its children."""
    with suppress(OSError):
        os.setpgid(0, 0)


def end_own_group() -> None:
    """Kill this worker and all processes it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    _exit(1)


def started_group(pid: int) -> None:
    """Register the process of a worker, which will lead its group."""
    _groups.add(pid)


def end_group(pid: int) -> None:
    """Kill a worker and all processes it started."""
    _groups.discard(pid)
    # Before it runs its first line, the worker is not yet in its own group.
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_groups() -> None:
    """Kill every worker of this process and all processes they started."""
    for pid in list(_groups):
        end_group(pid)


def run_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a module as a program that ends when this process ends, for whatever reason.

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
    """Make the system kill this process when its parent, process `parent`, ends.

    Where the system cannot do so, a thread checks once a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        _exit(1)

    # The parent may have ended before the call above.
    if os.getppid() != parent:
        _exit(1)
    threading.Thread(target=look, daemon=True).start()
