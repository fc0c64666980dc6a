"""Interrupts: SIGINT or SIGTERM ends a driver and all processes it started within seconds.

Python runs signal handlers only between bytecode instructions, and one call that compiles a program
can take minutes. So a thread waits too, and ends the process if the handler could not.
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
"""Seconds after SIGINT or SIGTERM that a process has to stop by itself before it is killed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: signal that a process gets when its parent dies."""
# Saved before `parity.engine.programs.exits` replaces it while user code runs.
_exit = os._exit
_answers: list[int] = []
"""Exit codes set by `end_with`; the last one counts."""
_notes: list[Callable[[int], None]] = []
"""Callbacks that are called with the exit code just before an interrupted process ends, unless it
ends by force."""
_groups: set[int] = set()
"""Process ids of this driver's workers; each leads a process group of the same number."""


@contextmanager
def ended_in_time(code: int, grace: float = GRACE) -> Iterator[None]:
    """Within this context, end the process with exit code `code` soon after SIGINT or SIGTERM.

    The first signal raises KeyboardInterrupt. The process ends when the context is left, or after
    `grace` seconds by force; in both cases its workers (`started_group`) are killed. Further
    signals are ignored: they would interrupt the cleanup. `end_with` changes the exit code unless
    the process ends by force.
    Outside of the main thread, where Python allows no signal handlers, the context does nothing.
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
        # Python's C code writes the number of each signal to the pipe at once, even while no
        # bytecode runs (`set_wakeup_fd`).
        while received := os.read(reader, 1):
            if received[0] in _SIGNALS:
                time.sleep(grace)
                end_groups()
                os.write(2, b"interrupted: running work did not stop by itself and was killed\n")
                _exit(code)
        os.close(reader)

    hook, sys.unraisablehook = (
        sys.unraisablehook,
        _repeating(sys.unraisablehook, interrupt, interrupted),
    )
    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="interrupts").start()
    try:
        yield
    finally:
        if interrupted.is_set():
            # All contexts inside have been left. End without Python's shutdown, which takes seconds
            # with JAX.
            end_groups()
            _flush()
            answer = _answers[-1] if _answers else code
            for note in _notes:
                note(answer)
            _exit(answer)
        sys.unraisablehook = hook
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)


def _flush() -> None:
    """Flush stdout and stderr, even if one of them is closed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _repeating(
    hook: Callable[[Any], Any], interrupt: Callable[..., None], interrupted: threading.Event
) -> Callable[[Any], None]:
    """Return a `sys.unraisablehook` that sends SIGINT again if Python ignored a KeyboardInterrupt.

    Python ignores exceptions raised in `__del__` and in callbacks of the garbage collector, such as
    JAX's, and continues the work that the interrupt should have ended.

    Args:
        hook: the hook that gets all other ignored exceptions.
        interrupt: the signal handler, installed anew before SIGINT is sent.
        interrupted: set once a signal has arrived; before that, all exceptions go to `hook`.
    """

    def repeat(lost: Any) -> None:
        # Only the main thread gets our interrupt; a KeyboardInterrupt may come from elsewhere.
        here = threading.current_thread() is threading.main_thread()
        if lost.exc_type is not KeyboardInterrupt or not interrupted.is_set() or not here:
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
    """Set the exit code with which this process ends after an interrupt.

    For commands that run until Ctrl-C, such as a watch, and then end with their own exit code.
    """
    _answers.append(code)


def noted_by(note: Callable[[int], None]) -> None:
    """Register one more callback that gets the exit code just before an interrupted process ends.

    It stays registered as long as the process runs. It is not called if the process ends by force
    (`ended_in_time`).
    """
    _notes.append(note)


def lead_group() -> None:
    """Make this process the leader of a new process group, which its children will belong to."""
    with suppress(OSError):
        os.setpgid(0, 0)


def end_own_group() -> None:
    """Kill this process and all processes of the group that it leads."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    _exit(1)


def started_group(pid: int) -> None:
    """Register a worker by its process id, to be killed by `end_groups`."""
    _groups.add(pid)


def end_group(pid: int) -> None:
    """Kill a worker, given its process id, and all processes it started."""
    _groups.discard(pid)
    # A worker that has not run its first line leads no group yet, so kill the process itself too.
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_groups() -> None:
    """Kill every registered worker and all processes they started."""
    for pid in list(_groups):
        end_group(pid)


def run_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a module as a program in a subprocess, which is killed if this process ends.

    Args:
        module: dotted name, as for `python -m`.
        arguments: command-line arguments.
        environment: all environment variables of the subprocess.
        timeout: seconds after which the subprocess is killed.

    Returns:
        Exit code, stdout and stderr; a nonzero exit code raises nothing.

    Raises:
        subprocess.TimeoutExpired: the program took longer than `timeout` seconds.
    """
    program = (
        "import runpy, sys; from parity.executors.interrupts import end_with_parent; "
        "end_with_parent(int(sys.argv.pop(1))); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, str(os.getpid()), module, *arguments]
    # The output may hold any bytes, for example of a crash inside a library.
    return subprocess.run(
        command,
        env=dict(environment),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )


def end_with_parent(parent: int) -> None:
    """Make this process end when its parent, the process with id `parent`, has ended.

    Linux kills this process at once. On other systems a thread checks once a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        _exit(1)

    # The parent may have ended before `prctl` was called.
    if os.getppid() != parent:
        _exit(1)
    threading.Thread(target=look, daemon=True).start()
