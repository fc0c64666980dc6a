"""A command in a child process that must leave a completion record: exit code 0 is earned.

`os._exit(0)` in a module under test, or `exit(0)` in its C code, ends the process on the spot. No
`finally` runs, and the shell sees success. So the process that the shell waits for does nothing but
wait itself. The child is forked before anything large is imported, which costs 2 ms.

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
"""Exit code where the program ended before the command did: incomplete."""
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that are sent to the process that waits, and meant for the one that works."""
_records: list[tuple[int, int]] = []
"""Number of this process and the pipe that its record goes into; empty where nothing waits."""


def supervised(command: Callable[[], Any]) -> int:
    """Return the exit code of a command that runs in a child process.

    It runs in this process where there is no `fork`, or where a fork is not safe because threads
    run already.

    Args:
        command: Ends by `SystemExit`, or returns its exit code.
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
    """Record that the command of this process has ended, and with which exit code."""
    # A fork of the process has the pipe as well, and not the command.
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
        # nohup's SIGHUP stays ignored. A shell ignores SIGINT for what it starts in the
        # background; a command that handles it all the same ends as it would without a parent.
        ignored = signal.getsignal(number) is signal.SIG_IGN
        if not ignored or number == signal.SIGINT:
            signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    # Not until the end of the pipe: processes that the command left behind may hold it open.
    os.set_blocking(reader, False)
    try:
        recorded = os.read(reader, 64).split()
    except BlockingIOError:
        recorded = []
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # Ended by a signal, as this process is then for whoever waits for it.
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
