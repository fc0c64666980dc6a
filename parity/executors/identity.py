"""Identity of the program in this process: its code, package versions, and settings.

Two processes with equal identities compute the same on equal processors. The code is identified by
the content of this project's packages, including their data (recordings, noise floors, texts,
pinned runs) but not their documents; a commit would not cover uncommitted changes. The identity of
a nightly run is fixed when it starts. NumPy, JAX and torch are not imported here.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import platform
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path

from parity.executors.inputs import digest_of_file, files_below

ROOT = Path(__file__).parents[2]
"""Folder that contains the packages."""
PACKAGES = ("megalodon_jax", "parity", "stability", "reports")
"""Packages whose files are the code of a run."""
FAULTS = "tools/faults"
"""Folder of the catalogue of planted bugs, whose files count as code of a run too."""
NUMERICS = (
    "jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "equinox", "optax", "autograd", "flax",
    "jaxtyping", "safetensors", "torch", "transformers", "megalodon-hf",
)  # fmt: skip
"""Other packages whose versions may change results; those not installed have no version."""
PREFIXES = (
    "JAX_", "XLA_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "DNNL_", "NPY_",
    "CUBLAS_", "NVIDIA_TF32_",
)  # fmt: skip
"""Prefixes of environment variables that select kernels or dtypes."""
HARMLESS = (
    "JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_LOG",
    "JAX_TRACEBACK", "JAX_DEBUG", "XLA_PYTHON_CLIENT",
)  # fmt: skip
"""Prefixes of variables that match `PREFIXES` but change no result: caches, logging, memory."""
_HEADER, _WORD = 16, 0xFFFFFFFF
"""Bytes in the header of a bytecode file, and mask of one of its 32-bit fields (PEP 552)."""
DOCUMENTS = ("README.md",)
"""Names of files in the packages that no program reads; they do not count as code."""


@dataclass(frozen=True)
class Identity:
    """Everything that determines the results of a process, apart from its inputs and processor."""

    code: str
    """Digest of the files of `PACKAGES` and `FAULTS` (`code`)."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python and of `NUMERICS`, by name."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values of environment variables that may change results, by name."""

    @classmethod
    def here(cls) -> Identity:
        """Return the identity of this process."""
        return cls(code(), versions(), settings())

    def differences(self, other: Identity) -> list[str]:
        """Return one text per difference, such as "jax 0.10.1 → 0.10.2" (this identity's value →
        that of `other`); empty if the identities are equal."""
        found = []
        if self.code != other.code:
            found.append(f"code {self.code} → {other.code}")
        for mine, theirs in ((self.versions, other.versions), (self.settings, other.settings)):
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    found.append(f"{name} {mine.get(name, 'none')} → {theirs.get(name, 'none')}")
        return found


@cache
def code() -> str:
    """Return the digest (12 hex digits) of the files of `PACKAGES` and `FAULTS`.

    The files are read at the first call in this process.
    """
    return _digest(_first_files())


def code_on_disk() -> str:
    """Return the digest (12 hex digits) of the files of `PACKAGES` and `FAULTS` on disk now."""
    return _digest(package_files())


def package_files() -> dict[str, str]:
    """Return the current digest of every file of `PACKAGES` and `FAULTS`, by path such as
    `parity/taps.py`.
    """
    found: dict[str, str] = {}
    for package in (*PACKAGES, FAULTS):
        for name, path in files_below(ROOT / package):
            if path.name not in DOCUMENTS:
                try:
                    found[f"{package}/{name}"] = digest_of_file(path)
                except FileNotFoundError:
                    # An editor may have renamed the file while saving.
                    continue
    return found


def changed_files() -> list[str]:
    """Return the paths of files of `PACKAGES` and `FAULTS` that changed, were added or removed.

    The files are compared with their content at the first call of `code` or of this function.
    """
    first, now = _first_files(), package_files()
    return sorted(name for name in first.keys() | now.keys() if first.get(name) != now.get(name))


def stale_bytecode() -> list[str]:
    """Return the source files for which Python would run outdated bytecode (a stale `.pyc`).

    Python trusts bytecode if size and mtime of the source match. Both can stay the same when a file
    is replaced, but its ctime cannot. So bytecode that is older than the source's ctime is compared
    with newly compiled bytecode.
    """
    found = []
    for package in (*PACKAGES, FAULTS):
        for name, path in files_below(ROOT / package):
            if path.suffix == ".py" and _is_stale(path, Path(cache_from_source(str(path)))):
                found.append(f"{package}/{name}")
    return found


def _is_stale(source: Path, stored: Path) -> bool:
    with suppress(OSError, EOFError, ValueError, TypeError, struct.error):
        if stored.stat().st_mtime_ns >= source.stat().st_ctime_ns:
            return False
        content, bytecode = source.read_bytes(), stored.read_bytes()
        flags, changed, size = struct.unpack("<III", bytecode[4:_HEADER])
        now = source.stat()
        if flags or (changed, size) != (int(now.st_mtime) & _WORD, now.st_size & _WORD):
            # Python will compile the source again.
            return False
        return marshal.loads(bytecode[_HEADER:]) != compile(
            content, str(source), "exec", dont_inherit=True
        )
    return False


class Watch:
    """Calls `changed_files`, at most once per interval, because a call takes a few ms.

    Args:
        every: length of the interval in seconds.
    """

    def __init__(self, every: float = 1.0) -> None:
        self.every = every
        self._looked = -every

    def changed(self, now: bool = False) -> list[str]:
        """Return the paths of the changed files (`changed_files`).

        If the last check was less than `every` seconds ago, return an empty list without a check,
        unless `now` is set.
        """
        if not now and time.monotonic() - self._looked < self.every:
            return []
        found = changed_files()
        self._looked = time.monotonic()
        return found


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the installed packages of `NUMERICS`, by name."""
    found = {"python": platform.python_version()}
    for package in NUMERICS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the values of environment variables that may change results (`PREFIXES`), by name;
    empty values are left out.

    Args:
        environment: environment variables by name; None: those of this process.
    """
    environment = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(environment.items())
        if value and name.startswith(PREFIXES) and not name.startswith(HARMLESS)
    }


@cache
def _first_files() -> Mapping[str, str]:
    return package_files()


def _digest(files: Mapping[str, str]) -> str:
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]
