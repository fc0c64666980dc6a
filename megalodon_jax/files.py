"""Files that are there whole or not at all, and JSON that holds an object."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def written_aside(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Context with a path to write to, which becomes `target` when the block ends without an error.

    The file is written beside `target`, since a rename between file systems is a copy. Where the
    block raises, `target` stays what it was and nothing is left behind.

    Raises:
        OSError: the folder is not there, or cannot be written.
    """
    path = Path(target)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        # A temporary file is its owner's alone; this one is to be read by others.
        aside.chmod(0o644)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(content).__name__}.")
    return content
