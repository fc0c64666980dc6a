"""Checks which version of megalodon-hf is installed, and whether it is the supported one."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import Any

COMMIT = "082db4b"
"""Supported commit of megalodon-hf."""
SOURCE = "22e25a5d9788f38b"
"""Hash of the sources of `COMMIT` (`source_hash`); the package's version number is not reliable."""
ANY = "MEGALODON_HF_ANY"
"""Environment variable that, if set, allows any version of megalodon-hf, such as your own."""
INSTALL = (
    f'pip install "megalodon-hf @ git+https://github.com/pszemraj/megalodon-hf@{COMMIT}", '
    "or set MEGALODON_HF_SOURCE to a local checkout and run `make reference`"
)
"""Instructions to install megalodon-hf, for error messages."""


def why_unavailable() -> str | None:
    """Return why megalodon-hf cannot run here and what to do; None if it can run.

    torch and megalodon-hf are not imported.
    """
    for package in ("torch", "transformers", "megalodon"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; {INSTALL}"
    version = metadata.version("transformers")
    major, minor = (int(part) for part in version.split(".")[:2])
    if not (4, 45) <= (major, minor) < (5, 0):
        return f"transformers {version} is installed, megalodon-hf needs >=4.45,<5"
    if (found := source_hash()) != SOURCE and not os.environ.get(ANY):
        return (
            f"another megalodon-hf is installed: its sources have hash {found}, those of commit "
            f"{COMMIT} have {SOURCE}; {INSTALL}, or set {ANY}=1 to accept the installed one"
        )
    return None


def package() -> Any:
    """Import and return megalodon-hf's package, `megalodon`."""
    # Imported by name: a type checker would take `import megalodon` for `parity.megalodon`.
    return importlib.import_module("megalodon")


def identity() -> str:
    """Return `COMMIT` if that is installed, else "sources " and the hash of what is installed."""
    found = source_hash()
    return COMMIT if found == SOURCE else f"sources {found}"


def source_hash() -> str:
    """Return a hash of the installed package's .py files, without the generated `_version.py`."""
    spec = importlib.util.find_spec("megalodon")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    digest = hashlib.sha256()
    for path in sorted(Path(folder) / name for folder in folders for name in os.listdir(folder)):
        if path.suffix == ".py" and path.name != "_version.py":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
