"""Supervision: a command counts as successful only if it reports that it ran to its end.

`os._exit(0)` in a module under test, or `exit(0)` in its C code, ends a process on the spot: no
`finally` runs, and the shell sees success. So the command runs in a child process, and the process
that the shell waits for only waits for the child's completion record. The child is forked before
anything large is imported, which costs 2 ms.

Source: docs/parity.md "Fail closed".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from parity.executors.interrupts import end_with_parent, noted_by

ENDED = 3
"""Exit code if the process ended before its command did (INCOMPLETE)."""
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")
"""Names of signals that the waiting process forwards to the child."""
_records: list[tuple[int, int]] = []
"""In a supervised child: its process id, and the file descriptor of the pipe to which it writes its
completion record. Empty in a process that is not supervised."""


def supervised(command: Callable[[], Any]) -> int:
    """Run a command in a child process and return its exit code.

    The result is `ENDED` if the child exits with code 0 before the command has returned.

    The command runs in this process, unsupervised, if there is no `fork`, or if forking would be
    unsafe because threads are running or JAX is imported.

    Args:
        command: returns its exit code, or raises `SystemExit`.
    """
    if not hasattr(os, "fork") or threading.active_count() > 1 or "jax" in sys.modules:
        return _code_of(command)
    reader, writer = os.pipe()
    parent = os.getpid()
    # A signal that arrives before `_wait` handles it waits, or it would be lost or end this process
    # alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in FORWARDED])
    try:
        child = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if child:
        os.close(writer)
        return _wait(child, reader, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(reader)
    _records.append((os.getpid(), writer))
    noted_by(record)
    end_with_parent(parent)
    code = _code_of(command)
    record(code)
    return code


def record(code: int) -> None:
    """Report to the waiting process that the command has ended, with exit code `code`.

    In a process that is not supervised, nothing happens.
    """
    # A fork of the child inherits the pipe too, but must not report the end of the command.
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


def _wait(child: int, reader: int, mask: Iterable[int]) -> int:
    """Wait for the child and return the exit code of its command, read from pipe `reader`.

    `mask` is the set of blocked signals that is restored once signals are forwarded to the child.
    """

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for name in FORWARDED:
        number = getattr(signal, name)
        # An ignored SIGHUP (nohup) stays ignored. SIGINT, which shells ignore for background jobs,
        # is forwarded all the same: the command itself decides whether to handle it.
        ignored = signal.getsignal(number) is signal.SIG_IGN
        if not ignored or number == signal.SIGINT:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _, status = os.waitpid(child, 0)
    # Read what is there, not to the end of the pipe, which processes that the command left behind
    # may keep open.
    os.set_blocking(reader, False)
    try:
        recorded = os.read(reader, 64).split()
    except BlockingIOError:
        recorded = []
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # A signal ended the child; end this process by the same signal.
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
