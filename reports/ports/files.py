"""The file that names a person's ports: a script with a function `port()`.

It runs as a script of its own folder does, so that it imports what lies beside it. What goes wrong
in it is theirs to mend: they are shown their own lines, and none of ours.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.port import Port
from parity.sides import Side

FUNCTION = "port"
"""What a file calls the function that returns its ports."""
SIDE = "side"
"""What a file calls the function that returns one side alone, to be captured."""


class PortFileError(ValueError):
    """A file does not name ports; the message says what was expected and shows its own lines."""


@contextmanager
def ports_of(path: Path) -> Iterator[tuple[Port, ...]]:
    """Context with the ports that `port()` in a file returns: one `Port`, or several.

    While it lasts the file's folder is where modules are looked for first; behind it, neither the
    folder nor what was imported from it is known any more.

    Raises:
        PortFileError: the file is not there, fails, or has no `port` that returns ports.
    """
    with _functions_of(path) as functions:
        if FUNCTION not in functions:
            raise PortFileError(
                f"{path} has no function `{FUNCTION}`: expected `def {FUNCTION}()` that returns a "
                "parity.Port, or a list of them"
            )
        yield as_ports(_guarded(path, functions[FUNCTION]), f"{FUNCTION}() of {path}")


@contextmanager
def side_of(path: Path, which: str, case: str = "") -> Iterator[tuple[Side, Port | None]]:
    """Context with one side that a file names, and the port it is of, if it is of one.

    Args:
        path: a file with a function `side()`, or with a function `port()`.
        which: `original` or `port`: the side of the latter.
        case: title or case of the port, where there are several.

    Raises:
        PortFileError: the file is not there, fails, or has neither.
    """
    with _functions_of(path) as functions:
        if SIDE in functions:
            answer = _guarded(path, functions[SIDE])
            if not isinstance(answer, Side):
                raise PortFileError(
                    f"{SIDE}() of {path} returned {_kind(answer)}: expected a side, such as "
                    "parity.TorchSide(module, inputs)"
                )
            yield answer, None
            return
        if FUNCTION not in functions:
            raise PortFileError(
                f"{path} has no function `{SIDE}` and no function `{FUNCTION}`: expected `def "
                f"{SIDE}()` that returns a side, or `def {FUNCTION}()` that returns a parity.Port"
            )
        ports = as_ports(_guarded(path, functions[FUNCTION]), f"{FUNCTION}() of {path}")
        chosen = [port for port in ports if case in ("", port.title, port.case)]
        if len(chosen) != 1:
            titles = ", ".join(port.title for port in ports)
            raise PortFileError(f"expected the case of one port of {path}; there are {titles}")
        yield getattr(chosen[0], which), chosen[0]


@contextmanager
def _functions_of(path: Path) -> Iterator[dict[str, Callable[..., Any]]]:
    """Context with the functions of a file that we know the names of."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise PortFileError(
            f"expected a Python file with a function `{FUNCTION}()`, but {path} {what}"
        )
    with _importing_from(path.parent.resolve()):
        module = _module(path)
        named = {name: getattr(module, name, None) for name in (FUNCTION, SIDE)}
        yield {name: function for name, function in named.items() if callable(function)}


def as_ports(answer: object, whose: str) -> tuple[Port, ...]:
    """Return what a function returned as ports.

    Raises:
        PortFileError: it is neither a `Port` nor several of different titles.
    """
    ports = (answer,) if isinstance(answer, Port) else answer
    if not isinstance(ports, Sequence) or not all(isinstance(port, Port) for port in ports):
        raise PortFileError(
            f"{whose} returned {_kind(answer)}: expected a parity.Port, or a list of them"
        )
    if not ports:
        raise PortFileError(f"{whose} returned no port at all: expected one at least")
    titles = [port.title for port in ports]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise PortFileError(
            f"{whose} returned several ports called {', '.join(twice)}: give each a name or a "
            "case of its own, such as Port(..., case='padding')"
        )
    return tuple(ports)


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if _lies_in(sys.modules[name], folder):
                del sys.modules[name]


def _lies_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    # Where a virtual environment lies in the folder, its packages are installed, not written there.
    return (
        file is not None
        and Path(file).is_relative_to(folder)
        and "site-packages" not in Path(file).parts
    )


def _module(path: Path) -> ModuleType:
    # A name that nothing else has: what the file imports may be called like the file itself.
    name = f"_port_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise PortFileError(f"expected a Python file with a function `{FUNCTION}()`, got {path}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for the module they are defined in.
    sys.modules[name] = module
    loader = spec.loader
    _guarded(path, lambda: loader.exec_module(module))
    return module


def _guarded(path: Path, action: Callable[[], Any]) -> Any:
    """Return what an action of the file returns.

    Raises:
        PortFileError: it raises, which is shown from the file's own lines on.
    """
    try:
        return action()
    except (Exception, SystemExit) as error:
        raise PortFileError(f"{path} fails:\n{_own_traceback(path, error)}") from error


def _own_traceback(path: Path, error: BaseException) -> str:
    """Return a traceback without the frames above the first of the file's folder."""
    frames = traceback.extract_tb(error.__traceback__)
    folder = path.parent.resolve()
    own = [i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(folder)]
    lines = traceback.format_list(frames[own[0] :] if own else [])
    lines += traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, (list, tuple)):
        kinds = dict.fromkeys(type(each).__name__ for each in value)
        return f"a {type(value).__name__} of {', '.join(kinds)}"
    return f"a {type(value).__name__}"
