"""Atomic writing of files and folders, and reading of files within limits."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
JSON_BYTES = 64 * 2**20
"""Largest JSON file that is read, in bytes. The largest that this project writes has a few MB."""
JSON_DEPTH = 64
"""Deepest JSON nesting that is read. This project writes at most 8 levels."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")
_NO_BRACKET = bytes(c for c in range(256) if c not in b"[]{}")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def written_aside(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide a path to write to, which becomes `target` if the block ends without an error.

    The file is written beside `target`, since a rename between file systems would copy. If the
    block raises, `target` is unchanged and nothing is left behind.

    Raises:
        OSError: the folder does not exist, or cannot be written.
    """
    path = Path(target)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        # A temporary file is readable by its owner only; this one should be readable by others.
        aside.chmod(0o644)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_written_aside(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide an empty folder, which replaces `target` if the block ends without an error.

    Missing parents are created. An interruption leaves a hidden folder beside `target`, which may
    be deleted if `target` exists.

    Raises:
        OSError: the folder cannot be written; its former content is unchanged.
    """
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        yield aside
        # A temporary folder is readable by its owner only; this one should be readable by others.
        aside.chmod(0o755)
        for path_inside in aside.rglob("*"):
            path_inside.chmod(0o755 if path_inside.is_dir() else 0o644)
            flush(path_inside)
        flush(aside)
        _publish(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_limited(file: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    A named pipe would block, and a device may be endless, so neither is read.

    Raises:
        OSError: the file cannot be read, or is a loop of symbolic links.
        ValueError: the file is not regular, or is larger than the limit.
    """
    _check_regular(file, file.stat())
    # The path may have become a pipe since; opening one without O_NONBLOCK would wait for a writer.
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as opened:
        status = os.fstat(handle)
        _check_regular(file, status)
        # One more byte detects growth. Reading `limit` bytes would allocate them at once.
        content = opened.read(min(status.st_size, limit) + 1)
    if len(content) > limit:
        raise ValueError(f"{file} has more than {limit:,} bytes, the most that is read")
    return content


def _check_regular(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ValueError(f"{file} must be a regular file, and is {found}")


def parse_json_object(content: bytes, file: Path) -> dict[str, Any]:
    """Parse the content of a JSON file that must hold an object; `file` is its path, for errors.

    Raises:
        ValueError: the content is not JSON, has more than `JSON_DEPTH` levels, or is not an object.
    """
    if _depth(content) > JSON_DEPTH:
        raise ValueError(f"{file} is JSON nested more than {JSON_DEPTH} levels deep")
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(value).__name__}.")
    return value


def _depth(content: bytes) -> int:
    """Return the nesting depth of JSON; 0 if it has at most `JSON_DEPTH` opening brackets.

    Counts brackets without recursion, since deep nesting would exceed Python's recursion limit.
    """
    if content.count(b"[") + content.count(b"{") <= JSON_DEPTH:
        return 0
    # Without backslashes every other quote starts a string, which needs no pattern.
    simple = b"\\" not in content
    outside = b"".join(content.split(b'"')[::2]) if simple else _STRING.sub(b"", content)
    # 1 for an opening bracket and -1, as a signed byte, for a closing one.
    steps = np.frombuffer(outside.translate(_STEPS, _NO_BRACKET), np.int8)
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object, within `JSON_BYTES` and `JSON_DEPTH`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not JSON, not an object, too large, too deep, or not regular.
    """
    return parse_json_object(read_limited(file, JSON_BYTES), file)


def _publish(aside: Path, target: Path) -> None:
    """Move the folder `aside` to `target`, replacing a folder there.

    Where the system supports it (Linux), the two folders are exchanged in one step; `aside` then
    holds the former content. Elsewhere the old folder is renamed first, and deleted when the new
    folder is in its place; if that fails, the old folder gets its name back.

    Raises:
        OSError: the folder cannot be replaced; its former content is unchanged.
    """
    if not target.exists():
        aside.rename(target)
    elif not _exchanged(aside, target):
        previous = aside.with_name(f"{aside.name}.previous")
        try:
            target.rename(previous)
            aside.rename(target)
        except BaseException:
            if previous.exists() and not target.exists():
                previous.rename(target)
            raise
        shutil.rmtree(previous, ignore_errors=True)
    flush(target.parent)


def _exchanged(left: Path, right: Path) -> bool:
    """Exchange two folders in one step; return False if the system or file system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if exchange is None:
        return False
    names = os.fsencode(left), os.fsencode(right)
    return exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
