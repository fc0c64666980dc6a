"""Loads a user's Python file and calls its functions.

The file runs like a script in its own folder, so it can import modules beside it. Errors in it are
reported with a traceback that shows the user's lines only.
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

from megalodon_jax.extras import EXTRA_OF, install
from parity.engine.programs.exits import os_exit_raises

_OURS = ("megalodon_jax", "parity", "stability", "reports")
"""Top-level packages of this project."""


class UserFileError(ValueError):
    """A user's Python file is missing, unusable or raised an error.

    The message says what was expected, or shows the part of the traceback in the user's folder.
    """


@contextmanager
def functions_of(path: Path, *names: str) -> Iterator[dict[str, Callable[..., Any]]]:
    """Context that yields those functions of a file that are called `names`, by name.

    Names that the file lacks are left out; the caller checks for them. The first of `names` stands
    for the expected function in error messages.

    Inside the context the file's folder comes first in `sys.path`. On exit, the folder and the
    modules imported from it are removed from `sys.path` and `sys.modules`.

    Raises:
        UserFileError: the file does not exist, or raises an error.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
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
    # A virtual environment may lie in the folder; its packages are not the user's modules.
    return (
        file is not None
        and Path(file).is_relative_to(folder)
        and "site-packages" not in Path(file).parts
    )


def _module(path: Path, function: str) -> ModuleType:
    # A unique name: the file may import a module that has the file's own name.
    name = f"_{function}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserFileError(f"expected a Python file with a function `{function}()`, got {path}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in sys.modules.
    sys.modules[name] = module
    loader = spec.loader
    guarded(path, lambda: loader.exec_module(module))
    return module


def guarded(path: Path, action: Callable[[], Any]) -> Any:
    """Call a function that runs code of the user's file at `path`, and return its result.

    Raises:
        UserFileError: the code raises an error or exits; the message shows the part of the
            traceback in the file's folder.
    """
    try:
        with os_exit_raises():
            return action()
    except (Exception, SystemExit) as error:
        text = f"{path} fails:\n{_own_traceback(path, error)}{_not_installed(error)}"
        raise UserFileError(text) from error


def _not_installed(error: BaseException) -> str:
    """Return how to install the package whose import failed if an extra of ours has it; else ""."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRA_OF:
        return ""
    return f"\n{package} is not installed: {install(EXTRA_OF[package])}"


def _own_traceback(path: Path, error: BaseException) -> str:
    """Return an error as text, with its traceback from the first frame in the folder of `path` on.

    Without such a frame there is no traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    folder = path.parent.resolve()
    own = [i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(folder)]
    lines = traceback.format_list(frames[own[0] :] if own else [])
    lines += traceback.format_exception_only(error)
    return "".join([*lines, _same_name(folder, error)]).rstrip()


def _same_name(folder: Path, error: BaseException) -> str:
    """Return advice if an import failed because of a package in `folder`; "" for other errors.

    Such a package has the name of one of this project's packages (`_OURS`).
    """
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
    """Yield the items of a generator in the user's file at `path`.

    Raises:
        UserFileError: the generator raises an error.
    """
    iterator, end = guarded(path, lambda: iter(items)), object()
    while (item := guarded(path, lambda: next(iterator, end))) is not end:
        yield item


def kind_of_answer(value: object) -> str:
    """Describe the type of a user function's result in words, such as "a list of int"."""
    if value is None:
        return "None"
    if isinstance(value, (list, tuple)):
        kinds = dict.fromkeys(type(each).__name__ for each in value)
        return f"a {type(value).__name__} of {', '.join(kinds)}"
    return f"a {type(value).__name__}"
