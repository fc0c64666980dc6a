"""Exits in other people's code: `sys.exit(0)` in a model is that model's error, not a success.

Source: docs/parity.md "Fail closed".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class ExitError(ValueError):
    """Code that should return a result ended the program; the message names whose code it was."""


class OsExit(SystemExit):
    """What `os._exit` raises while other people's code runs."""


@contextmanager
def os_exit_raises() -> Iterator[None]:
    """Context in which `os._exit` raises `OsExit`, in this process alone: forked children end.

    Code that catches it, or calls it in a thread, is found at the end of the context.
    """
    owner, before = os.getpid(), os._exit
    raised: list[OsExit] = []

    def refuse(status: Any = 0) -> NoReturn:
        if os.getpid() != owner:
            before(status)
        raised.append(OsExit(status))
        raise raised[-1]

    os._exit = refuse
    try:
        yield
        if raised:
            raise raised[0]
    finally:
        os._exit = before


@contextmanager
def exits_named(whose: str) -> Iterator[None]:
    """Context that turns an exit of the code in it into an error that names the code.

    Args:
        whose: The code, such as `the port (flax)`.

    Raises:
        ExitError: the code called `sys.exit`, `exit`, `quit` or `os._exit`.
    """
    try:
        with os_exit_raises():
            yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        call = "os._exit" if isinstance(error, OsExit) else "sys.exit"
        raise ExitError(
            f"{whose} called {call}({code}) instead of returning a result: nothing was compared. "
            "Remove the exit."
        ) from error
