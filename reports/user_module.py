"""A Python file of the reader's, of which one function is called.

It runs as a script of its own folder does, so that it imports what lies beside it. What goes wrong
in it is theirs to mend: they are shown their own lines, and none of ours.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.engine.exits import os_exit_raises

_OURS = ("megalodon_jax", "parity", "stability", "reports")
"""Top-level packages of this project."""


class UserFileError(ValueError):
    """A file is not what was asked for; the message says what was, and shows its own lines."""


@contextmanager
def functions_of(path: Path, *names: str) -> Iterator[dict[str, Callable[..., Any]]]:
    """Context with those functions of a file that have one of these names.

    While it lasts the file's folder is where modules are looked for first; behind it, neither the
    folder nor what was imported from it is known any more.

    Raises:
        UserFileError: the file is not there, or fails.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise UserFileError(
            f"expected a Python file with a function `{names[0]}()`, but {path} {what}"
        )
    with _importing_from(path.parent.resolve()):
        module = _module(path, names[0])
        named = {name: getattr(module, name, None) for name in names}
        yield {name: function for name, function in named.items() if callable(function)}


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


def _module(path: Path, function: str) -> ModuleType:
    # A name that nothing else has: what the file imports may be called like the file itself.
    name = f"_{function}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserFileError(f"expected a Python file with a function `{function}()`, got {path}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for the module they are defined in.
    sys.modules[name] = module
    loader = spec.loader
    guarded(path, lambda: loader.exec_module(module))
    return module


def guarded(path: Path, action: Callable[[], Any]) -> Any:
    """Return what an action of the file returns.

    Raises:
        UserFileError: it raises, which is shown from the file's own lines on.
    """
    try:
        with os_exit_raises():
            return action()
    except (Exception, SystemExit) as error:
        raise UserFileError(f"{path} fails:\n{_own_traceback(path, error)}") from error


def _own_traceback(path: Path, error: BaseException) -> str:
    """Return a traceback without the frames above the first of the file's folder."""
    frames = traceback.extract_tb(error.__traceback__)
    folder = path.parent.resolve()
    own = [i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(folder)]
    lines = traceback.format_list(frames[own[0] :] if own else [])
    lines += traceback.format_exception_only(error)
    return "".join([*lines, _same_name(folder, error)]).rstrip()


def _same_name(folder: Path, error: BaseException) -> str:
    """Return what to do where the file meant a package beside it with the name of one of ours."""
    if not isinstance(error, ImportError):
        return ""
    package = (error.name or "").partition(".")[0]
    ours = Path(getattr(sys.modules.get(package), "__file__", None) or folder).resolve().parent
    theirs = folder / package
    if package not in _OURS or not theirs.is_dir() or ours in (theirs, folder):
        return ""
    return (
        f"{package!r} is the package of megalodon-numerics in this process ({ours}), not "
        f"{theirs}. Import what you need from {theirs} under another name, or load it with "
        "importlib.util.spec_from_file_location"
    )


def guarded_items(path: Path, items: Iterable[Any]) -> Iterator[Any]:
    """Yield what a generator of the file does, guarded as the call of a function is."""
    iterator, end = guarded(path, lambda: iter(items)), object()
    while (item := guarded(path, lambda: next(iterator, end))) is not end:
        yield item


def kind_of_answer(value: object) -> str:
    """Return in words what a function of a file returned."""
    if value is None:
        return "None"
    if isinstance(value, (list, tuple)):
        kinds = dict.fromkeys(type(each).__name__ for each in value)
        return f"a {type(value).__name__} of {', '.join(kinds)}"
    return f"a {type(value).__name__}"
