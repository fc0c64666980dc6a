"""Exits in user code: `sys.exit(0)` in a model is an error of that model, not a success.

Source: docs/parity.md "Fail closed".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class ExitError(ValueError):
    """User code ended the program instead of returning a result; the message names the code."""


class OsExit(SystemExit):
    """Raised by `os._exit` while user code runs."""


@contextmanager
def os_exit_raises() -> Iterator[None]:
    """Make `os._exit` raise `OsExit` within this context, in this process only; forks still exit.

    If the code catches the exception, or calls `os._exit` in a thread, the exception is raised
    again at the end of the context.
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
    """Turn an exit of the code in this context into an error that names the code.

    Args:
        whose: Name of the code, such as `the port (flax)`.

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
