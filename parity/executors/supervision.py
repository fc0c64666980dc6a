"""Supervision: a command runs in a child that must leave a completion record to exit with 0.

`os._exit(0)` in a module under test, or `exit(0)` in its C code, ends the process on the spot: no
`finally` runs, and the shell sees success. So the process that the shell waits for does nothing but
wait for a child. The child is forked before anything large is imported, which costs 2 ms.

Source: docs/parity.md "Fail closed".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from parity.executors.interrupts import end_with_parent, noted_by

ENDED = 3
"""Exit code of a program that ended before its command did: incomplete."""
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals forwarded from the waiting process to the working one."""
_records: list[tuple[int, int]] = []
"""Process number and pipe for its completion record; empty if nothing supervises this process."""


def supervised(command: Callable[[], Any]) -> int:
    """Run a command in a child process and return its exit code.

    It runs in this process where there is no `fork`, and where a fork would be unsafe because
    threads are already running.

    Args:
        command: ends by `SystemExit`, or returns its exit code.
    """
    if not hasattr(os, "fork") or threading.active_count() > 1 or "jax" in sys.modules:
        return _code_of(command)
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(writer)
        return _wait(child, reader)
    os.close(reader)
    _records.append((os.getpid(), writer))
    noted_by(record)
    end_with_parent(parent)
    code = _code_of(command)
    record(code)
    return code


def record(code: int) -> None:
    """Record that the command of this process has ended, with its exit code."""
    # A fork of this process inherits the pipe, but it is not the command.
    for pid, writer in _records:
        if pid == os.getpid():
            with suppress(OSError):
                os.write(writer, f"{code}\n".encode())


def _code_of(command: Callable[[], Any]) -> int:
    try:
        code = command()
    except SystemExit as error:
        code = error.code
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _wait(child: int, reader: int) -> int:
    """Wait for the child and return the exit code of the command."""

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for name in FORWARDED:
        number = getattr(signal, name)
        # nohup's SIGHUP stays ignored. A shell ignores SIGINT for background jobs; a command that
        # handles it nevertheless ends as it would without a parent.
        ignored = signal.getsignal(number) is signal.SIG_IGN
        if not ignored or number == signal.SIGINT:
            signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    # Do not read to the end of the pipe: processes left behind by the command may hold it open.
    os.set_blocking(reader, False)
    try:
        recorded = os.read(reader, 64).split()
    except BlockingIOError:
        recorded = []
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # The child was ended by a signal; end this process by the same signal.
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        return 128 - code
    if code:
        return code
    if not recorded:
        sys.stderr.write(
            "error: the process ended with exit code 0 before the command did. Code that it ran "
            "called os._exit or exit of C; remove that call. Nothing counts as measured.\n"
        )
        return ENDED
    return int(recorded[0])
