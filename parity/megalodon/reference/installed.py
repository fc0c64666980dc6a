"""Checks which megalodon-hf is installed, and whether its results are those we expect."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import Any

COMMIT = "082db4b"
SOURCE = "22e25a5d9788f38b"
"""Hash of the sources of `COMMIT`; version numbers are not reliable."""
ANY = "MEGALODON_HF_ANY"
"""Environment variable that allows another version, for example your own refactoring of it."""
INSTALL = (
    f'pip install "megalodon-hf @ git+https://github.com/pszemraj/megalodon-hf@{COMMIT}", '
    "or set MEGALODON_HF_SOURCE to a local checkout and run `make reference`"
)


def why_unavailable() -> str | None:
    """Return why the live reference cannot run, or None if it can, without heavy imports."""
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
            f"{COMMIT} have {SOURCE}; {INSTALL}, or set {ANY}=1 to accept it"
        )
    return None


def package() -> Any:
    """Return megalodon-hf's package.

    Imported by name, because a type checker would resolve it to `parity.megalodon`.
    """
    return importlib.import_module("megalodon")


def identity() -> str:
    """Return the commit of the installed version, or the hash of its sources if it is another."""
    found = source_hash()
    return COMMIT if found == SOURCE else f"sources {found}"


def source_hash() -> str:
    """Return a hash of the installed package's sources without its generated version file."""
    spec = importlib.util.find_spec("megalodon")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    digest = hashlib.sha256()
    for path in sorted(Path(folder) / name for folder in folders for name in os.listdir(folder)):
        if path.suffix == ".py" and path.name != "_version.py":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
