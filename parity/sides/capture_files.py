"""Files of a capture, a folder with the stored runs of a side.

    manifest.json                 schema, environment, runs; per array file, shape, dtype, sha256
    parameters-000.safetensors    optional
    inputs-000.safetensors
    run-00-000.safetensors        results of run 00: stages, gradients, integer and bool outputs

The last number counts files of at most `SHARD` bytes. Every array is checked against its hash when
first read, so that damaged arrays are rejected.
Source: docs/your-own-port.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from megalodon_jax.files import read_json_object
from megalodon_jax.tensor_files import FileTensor, file_tensors
from parity.sides.side import SideError

KIND, SCHEMA = "capture of a side", 2
"""Values of the manifest's fields `kind` and `schema`. Schema 1 did not store integer and bool
results."""
MANIFEST = "manifest.json"
# safetensors copies all arrays of a file in memory to write it. 256 MiB is small beside the weights
# of a model that needs several files.
SHARD = 1 << 28
"""Largest number of bytes of arrays per file, unless a single array is larger."""


@dataclass(frozen=True)
class Row:
    """Entry of one array in the manifest."""

    name: str
    file: str
    """Name of the file; empty if the capture stores only the array's hash."""
    key: str
    """The array's name in the file."""
    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @classmethod
    def of(cls, name: str, array: np.ndarray, file: str = "", key: str = "") -> Row:
        """Return the manifest's entry of an array, with its hash.

        `file` is the name of the file that holds the array, and `key` the array's name in that
        file; "" if the capture stores only the hash.
        """
        return cls(name, file, key, array.shape, array.dtype.name, digest(array))

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Row:
        """Return the entry that `to_json` wrote."""
        return cls(**{**entry, "shape": tuple(entry["shape"])})

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON data."""
        return asdict(self)

    def text(self) -> str:
        """Describe the array by dtype, shape and the first 16 digits of its hash."""
        return f"{self.dtype}{list(self.shape)} sha256 {self.sha256[:16]}"


def digest(array: np.ndarray) -> str:
    """Return the hexadecimal SHA-256 of an array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data).hexdigest()


def write_arrays(folder: Path, name: str, arrays: Mapping[str, np.ndarray]) -> list[Row]:
    """Write arrays to files of up to `SHARD` bytes; return their manifest entries, in order.

    Args:
        folder: folder of the capture.
        name: start of the file names, such as "inputs" for `inputs-000.safetensors`.
        arrays: arrays by name.

    Raises:
        SideError: an array has a dtype that safetensors does not support.
    """
    rows: list[Row] = []
    shard: dict[str, np.ndarray] = {}
    count = 0

    def close() -> None:
        nonlocal count
        if not shard:
            return
        file = f"{name}-{count:03}.safetensors"
        try:
            save_file(shard, folder / file)
        except (SafetensorError, KeyError, ValueError) as error:
            dtypes = ", ".join(sorted({x.dtype.name for x in shard.values()}))
            raise SideError(
                f"{file} cannot be written ({error}); it has arrays of {dtypes}, expected real "
                f"numbers of at most 64 bits: return other dtypes from the side"
            ) from error
        count += 1
        shard.clear()

    for at, (key, array) in enumerate(arrays.items()):
        if sum(x.nbytes for x in shard.values()) + array.nbytes > SHARD:
            close()
        # Keys are numbers because safetensors reserves some names.
        rows.append(Row.of(key, array, f"{name}-{count:03}.safetensors", str(at)))
        # Not `ascontiguousarray`, which turns a scalar into a vector.
        shard[str(at)] = np.asarray(array, order="C")
    close()
    return rows


# The values are annotated as Any: a runtime type checker would read one to determine its type.
class StoredArrays(Mapping[str, Any]):
    """Arrays of a capture by name, in order, memory-mapped from their files on each access.

    Args:
        folder: folder of the capture.
        rows: the arrays' entries in the manifest.
    """

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        self.folder, self.rows = folder, {row.name: row for row in rows}
        self._sound: set[str] = set()
        self._tensors: dict[str, dict[str, FileTensor]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array as a read-only memory map of its file.

        Raises:
            KeyError: there is no array of this name.
            SideError: the file is missing or damaged, or holds a different array.
        """
        row = self.rows[name]
        try:
            if row.file not in self._tensors:
                self._tensors[row.file] = file_tensors(self.folder / row.file)
            array = self._tensors[row.file][row.key].map()
        except (OSError, ValueError, KeyError) as error:
            raise SideError(
                f"{name} of the capture {self.folder} cannot be read from {row.file} ({error}): "
                f"copy the capture again, or capture the side again"
            ) from error
        if name not in self._sound:
            check(array, row, f"{name} of the capture {self.folder}")
            self._sound.add(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def check(array: np.ndarray, row: Row, what: str) -> None:
    """Check an array's shape, dtype and hash against its entry in the manifest.

    Args:
        array: the array.
        row: the array's entry in the manifest.
        what: the array's description in the error message.

    Raises:
        SideError: the array differs from the entry.
    """
    here = Row.of(row.name, array)
    if (here.shape, here.dtype, here.sha256) != (row.shape, row.dtype, row.sha256):
        raise SideError(
            f"{what} is {here.text()}, expected {row.text()} as captured: copy the capture again, "
            f"or capture the side again"
        )


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest: `content` with kind, schema and a hash of the manifest itself."""
    manifest = {"kind": KIND, "schema": SCHEMA, **content}
    manifest["sha256"] = _digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest written by `write_manifest`.

    Raises:
        SideError: the manifest is missing, was changed, or has another kind or schema.
    """
    file = folder / MANIFEST
    if not file.is_file():
        left = sorted(path.name for path in folder.parent.glob(f".{folder.name}.*"))
        hint = f" An interrupted capture may have left {', '.join(left)} there." if left else ""
        raise SideError(f"no capture at {folder}: it has no {MANIFEST}.{hint} Capture it first.")
    try:
        manifest = read_json_object(file)
    except ValueError as error:
        raise SideError(f"{error} Copy the capture again.") from error
    came = (manifest.get("kind"), manifest.get("schema"))
    if came != (KIND, SCHEMA):
        raise SideError(
            f"{file} is of kind {came[0]!r} and schema {came[1]!r}, expected {KIND!r} and "
            f"{SCHEMA}: read it with the version that wrote it, or capture the side again."
        )
    if manifest.get("sha256") != _digest(manifest):
        raise SideError(
            f"{file} was changed after it was written (its sha256 differs): copy the capture "
            "again, or capture the side again."
        )
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
