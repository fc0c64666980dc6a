"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


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
