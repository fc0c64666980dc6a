"""The command that installs one of this project's extras, for messages to people."""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXTRA_OF = {"torch": "torch", "flax": "flax", "onnx": "onnx", "onnxruntime": "onnx"}
"""Extras of this project, by name of the package that they install and a user's file may import."""
_CHECKOUT = Path(__file__).resolve().parents[1]


def install(extra: str) -> str:
    """Return the shell command that installs an extra, such as `torch`, beside this package.

    In a checkout the command is, for example, `.venv/bin/python -m pip install -e '.[torch]'`. It
    calls the running Python, since a bare `pip` may belong to another environment, and installs the
    checkout, since the project may not be on the user's package index. Paths below the current
    folder are relative.
    """
    if not (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install 'megalodon-numerics[{extra}]'"
    return f"{_short(Path(sys.executable))} -m pip install -e '{_short(_CHECKOUT)}[{extra}]'"


def _short(path: Path) -> str:
    try:
        return os.fspath(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        # Elsewhere, or the current folder was deleted.
        return os.fspath(path)
