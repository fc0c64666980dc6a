"""Digests of the files an item reads, which depend on content and not on paths.

An input is named by the path of a file or a folder, or by `module:NAME`: the Python files of an
installed package, which may lie elsewhere on another machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MISSING = "missing"
"""Digest of an input that does not exist."""
MODULE = "module:"
# Kernels count time in steps of some milliseconds, so two changes within one step share a stamp.
_SETTLED = 0.1
"""Seconds after its last change from which a file's stamp identifies its content."""
_Stamp = tuple[int, int, int, int]
_digests: dict[str, tuple[_Stamp, str]] = {}


def contents(names: Iterable[str]) -> dict[str, str]:
    """Return the current digest of each input by its name."""
    return {name: content(name) for name in names}


def changed(inputs: Mapping[str, str]) -> list[str]:
    """Return the names of inputs whose content does not match their digest."""
    return [name for name, digest in inputs.items() if content(name) != digest]


def content(name: str) -> str:
    """Return the current digest of an input; `MISSING` if it does not exist."""
    if name.startswith(MODULE):
        files = _module_files(name.removeprefix(MODULE))
    else:
        place = Path(name)
        files = dict(files_below(place)) if place.is_dir() else {"": place}
    digest = hashlib.sha256()
    try:
        for relative in sorted(files):
            digest.update(f"{relative}\0{digest_of_file(files[relative])}\n".encode())
    except OSError:
        return MISSING
    return digest.hexdigest() if files else MISSING


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder and its subfolders, with their relative names.

    Hidden files, compiled Python and anything but regular files are skipped (reading a pipe would
    never end).
    """
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and not name.endswith(".pyc") and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, read again only if its stamp changed.

    Raises:
        OSError: it cannot be read.
    """
    before = _stamp(path)
    known = _digests.get(str(path))
    if known is not None and known[0] == before:
        return known[1]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A file that was written during the read, or just before it, is read again next time.
    if _stamp(path) == before and time.time() - before[3] / 1e9 > _SETTLED:
        _digests[str(path)] = before, digest
    return digest


def _stamp(path: Path) -> _Stamp:
    """Return a stamp that changes with a file. Its ctime, unlike its mtime, cannot be set back."""
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ino, state.st_ctime_ns


def _module_files(module: str) -> dict[str, Path]:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = (pair for folder in folders for pair in files_below(Path(folder)))
    return {name: path for name, path in found if path.suffix == ".py"}
