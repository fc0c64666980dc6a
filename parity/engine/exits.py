"""Exits in other people's code: `sys.exit(0)` in a model is that model's error, not a success.

Source: docs/parity.md "Fail closed".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExitError(ValueError):
    """Code that should return a result ended the program; the message names whose code it was."""


@contextmanager
def exits_named(whose: str) -> Iterator[None]:
    """Context that turns an exit of the code in it into an error that names the code.

    Args:
        whose: The code, such as `the port (flax)`.

    Raises:
        ExitError: the code called `sys.exit`, `exit` or `quit`.
    """
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise ExitError(
            f"{whose} called sys.exit({code}) instead of returning a result: nothing was compared. "
            "Remove the exit."
        ) from error
