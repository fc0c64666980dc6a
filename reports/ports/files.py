"""Loads users' ports and sides from a Python file with a function `port()` or `side()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from parity.port import Port
from parity.sides import Side
from reports.user_module import UserFileError, functions_of, guarded, kind_of_answer

FUNCTION = "port"
"""Name of the function in a user's file that returns the ports."""
SIDE = "side"
"""Name of the function in a user's file that returns a single side, to be captured."""


@contextmanager
def ports_of(path: Path) -> Iterator[tuple[Port, ...]]:
    """Context that yields the ports that the function `port()` of a file returns, at least one.

    Inside the context the file's folder comes first in `sys.path`. On exit, the folder and the
    modules imported from it are removed from `sys.path` and `sys.modules`.

    Raises:
        UserFileError: the file does not exist, raises an error, or has no `port` that returns
            ports.
    """
    with functions_of(path, FUNCTION, SIDE) as functions:
        if FUNCTION not in functions:
            raise UserFileError(
                f"{path} has no function `{FUNCTION}`: expected `def {FUNCTION}()` that returns a "
                "parity.Port, or a list of them"
            )
        yield as_ports(guarded(path, functions[FUNCTION]), f"{FUNCTION}() of {path}")


@contextmanager
def side_of(path: Path, which: str, case: str = "") -> Iterator[tuple[Side, Port | None]]:
    """Context that yields one side that a file defines, and its port.

    A function `side()` is preferred to `port()`; the side that it returns has no port (None).

    Args:
        path: A file with a function `side()` or `port()`.
        which: "original" or "port": which side of a port to take; ignored for `side()`.
        case: `Port.title` or `Port.case` of the port; "" if the file has only one port.

    Raises:
        UserFileError: the file does not exist, raises an error, or has neither function; or `case`
            does not select exactly one port.
    """
    with functions_of(path, FUNCTION, SIDE) as functions:
        if SIDE in functions:
            answer = guarded(path, functions[SIDE])
            if not isinstance(answer, Side):
                raise UserFileError(
                    f"{SIDE}() of {path} returned {kind_of_answer(answer)}: expected a side, such "
                    "as parity.TorchSide(module, inputs)"
                )
            yield answer, None
            return
        if FUNCTION not in functions:
            raise UserFileError(
                f"{path} has no function `{SIDE}` and no function `{FUNCTION}`: expected `def "
                f"{SIDE}()` that returns a side, or `def {FUNCTION}()` that returns a parity.Port"
            )
        ports = as_ports(guarded(path, functions[FUNCTION]), f"{FUNCTION}() of {path}")
        chosen = _only(ports, path, case)
        yield getattr(chosen, which), chosen


@contextmanager
def port_of(path: Path, case: str = "") -> Iterator[Port]:
    """Context that yields one port that a file defines.

    Args:
        path: A file with a function `port()`.
        case: `Port.title` or `Port.case` of the port; "" if the file has only one port.

    Raises:
        UserFileError: as for `ports_of`, or `case` does not select exactly one port.
    """
    with ports_of(path) as ports:
        yield _only(ports, path, case)


def _only(ports: Sequence[Port], path: Path, case: str) -> Port:
    chosen = [port for port in ports if case in ("", port.title, port.case)]
    if len(chosen) != 1:
        titles = ", ".join(port.title for port in ports)
        raise UserFileError(
            f"expected --case to select exactly one port of {path}; there are {titles}"
        )
    return chosen[0]


def as_ports(answer: object, whose: str) -> tuple[Port, ...]:
    """Return the result of a user's `port()` as a tuple of ports.

    Args:
        answer: The result.
        whose: Function and file, for error messages.

    Raises:
        UserFileError: the result is neither a `Port` nor a sequence of at least one port with
            different titles.
    """
    ports = (answer,) if isinstance(answer, Port) else answer
    if not isinstance(ports, Sequence) or not all(isinstance(port, Port) for port in ports):
        raise UserFileError(
            f"{whose} returned {kind_of_answer(answer)}: expected a parity.Port, or a list of them"
        )
    if not ports:
        raise UserFileError(f"{whose} returned no port: expected at least one")
    titles = [port.title for port in ports]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise UserFileError(
            f"{whose} returned several ports called {', '.join(twice)}: give each a different name "
            "or case, such as Port(..., case='padding')"
        )
    return tuple(ports)
