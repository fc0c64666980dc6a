"""Digests of the files that a work item reads.

An input is named by the path of a file or folder, or by `module:NAME`, which stands for the Python
files of an installed package or the file of a module. Digests depend on content, not on where a
folder or package lies, so they can be compared between machines.
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
"""Prefix of the name of an installed package or module."""
# Kernels count time in steps of some milliseconds. Two changes within one step give the same stamp.
_SETTLED = 0.1
"""Seconds that a file must be unchanged before its stamp (size, times) identifies its content."""
_Stamp = tuple[int, int, int, int]
_digests: dict[str, tuple[_Stamp, str]] = {}


def contents(names: Iterable[str]) -> dict[str, str]:
    """Return the digest of the current content of each input (file, folder or module), by name."""
    return {name: content(name) for name in names}


def changed(inputs: Mapping[str, str]) -> list[str]:
    """Return the names of the inputs whose current content no longer has its digest in `inputs`."""
    return [name for name, digest in inputs.items() if content(name) != digest]


def content(name: str) -> str:
    """Return the digest of the current content of an input: SHA-256 in hex.

    It covers the contents of the input's files and, in a folder or module, their relative paths.
    `MISSING` if the input does not exist, is an empty folder, or cannot be read.

    Args:
        name: path of a file or folder, or `module:NAME` for the Python files of a package or
            module.
    """
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
    """Yield the relative path and the path of every file of a folder and its subfolders.

    Hidden files and folders, compiled Python, and anything but regular files are skipped: reading a
    pipe would never end.
    """
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and not name.endswith(".pyc") and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex; it is read again only if its size or times changed.

    Raises:
        OSError: the file cannot be read.
    """
    before = _stamp(path)
    known = _digests.get(str(path))
    if known is not None and known[0] == before:
        return known[1]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # The digest of a file that was written during or just before the read is not cached.
    if _stamp(path) == before and time.time() - before[3] / 1e9 > _SETTLED:
        _digests[str(path)] = before, digest
    return digest


def _stamp(path: Path) -> _Stamp:
    """Return size, mtime, inode and ctime of a file, which change if its content does.

    Unlike the mtime, the ctime cannot be set back.
    """
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ino, state.st_ctime_ns


def _module_files(module: str) -> dict[str, Path]:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.submodule_search_locations is None and spec.origin:
        # A module in one file.
        return {"": Path(spec.origin)}
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = (pair for folder in folders for pair in files_below(Path(folder)))
    return {name: path for name, path in found if path.suffix == ".py"}
