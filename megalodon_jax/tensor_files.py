"""Tensors in files, with name, shape and dtype known before any values are read.

A safetensors file, or an index with its shards, is read one tensor at a time, so that a checkpoint
larger than memory can be compared and audited. Source: docs/parity.md "Big checkpoints".
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from safetensors import SafetensorError, safe_open

from megalodon_jax.file_formats import format_of_file
from megalodon_jax.files import read_json_object

T = TypeVar("T")

_DTYPES = {
    f"{letter}{bits}": f"{kind}{bits}"
    for letter, kind in (("F", "float"), ("I", "int"), ("U", "uint"))
    for bits in (8, 16, 32, 64)
    if (letter, bits) != ("F", 8)
}
_DTYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_DTYPES |= {"F8_E8M0": "float8_e8m0fnu"}
_DTYPES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
_DTYPES |= {"BOOL": "bool", "C64": "complex64"}
"""Names of dtypes in NumPy and ml_dtypes, by their names in safetensors files."""
_OWN = frozenset(name for name in _DTYPES.values() if name.startswith("float8"))
"""Dtypes that safetensors cannot return as NumPy arrays; `FileTensor.map` reads them instead."""


def printable(name: str) -> str:
    """Return a name from a file with escapes for characters that a terminal would interpret.

    Different names have different results.
    """
    doubled = name.replace("\\", "\\\\")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in doubled)


@runtime_checkable
class Tensor(Protocol):
    """Protocol of a tensor whose values are read on request, for example from a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the stored dtype."""
        ...

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Return the tensor, or a slice of its first axis, in the stored dtype."""
        ...

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the elements of the first axis with the indices `rows`."""
        ...


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a safetensors file; the file is open only during a read."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Return the tensor, or a slice of its first axis.

        Raises:
            ValueError: the file can no longer be read.
        """
        if self.dtype in _OWN:
            return self.map()[slice(None) if rows is None else rows].copy()
        # While a file stays open, every page that was ever read stays resident.
        with open_safetensors(self.file) as file:
            return file.get_tensor(self.name) if rows is None else file.get_slice(self.name)[rows]

    def map(self) -> np.ndarray:
        """Return the tensor as a read-only memory map of the file.

        Its pages are read on use, and released with the array.

        Raises:
            ValueError: the file can no longer be read.
        """
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        # The safetensors library can only copy. The file format is: 8 bytes with the length of the
        # header, a JSON header, the tensors.
        with self.file.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                start = json.loads(file.read(length))[self.name]["data_offsets"][0]
            except (ValueError, KeyError, TypeError) as error:
                name = printable(self.name)
                raise ValueError(
                    f"{self.file} no longer holds {name}: {error!r}. It was changed after it was "
                    "opened: open it again."
                ) from error
        place = 8 + length + int(start)
        return np.memmap(self.file, self.dtype, "r", place, self.shape).view(np.ndarray)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows (elements of the first axis) with indices `rows`, reading no others."""
        if self.dtype in _OWN:
            return self.map()[rows]
        with open_safetensors(self.file) as file:
            part = file.get_slice(self.name)
            return np.concatenate([part[int(row) : int(row) + 1] for row in rows])


@dataclass(frozen=True, slots=True)
class ArrayTensor:
    """A tensor in memory, with the interface of `Tensor`."""

    array: np.ndarray
    stored_as: str = ""
    """Name of the dtype in the file that `array` was read from; empty if it is that of `array`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> str:
        """Name of the stored dtype."""
        return self.stored_as or self.array.dtype.name

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Return `array`, in its dtype, or a slice of its first axis, without copying."""
        return self.array if rows is None else self.array[rows]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows (elements of the first axis) whose indices are in `rows`."""
        return self.array[rows]


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file for NumPy (bfloat16 through ml_dtypes) within this context.

    Raises:
        FileNotFoundError, PermissionError: the file cannot be opened.
        ValueError: the file is not a safetensors file (the message names its format if known), or
            is incomplete.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(safe_open(file, framework="numpy"))
        except SafetensorError as error:
            what, advice = format_of_file(file)
            if what:
                raise ValueError(f"{file} is {what}, not a safetensors file: {advice}.") from error
            raise ValueError(
                f"{file} is not a readable safetensors file ({error}); it may be truncated: "
                "copy or export it again."
            ) from error
        yield opened


def read_file(file: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a safetensors file by name, opening it once.

    Raises:
        FileNotFoundError, PermissionError, ValueError: see `open_safetensors`.
    """
    with open_safetensors(file) as opened:
        own = {n: t for n, t in _listed(file, opened).items() if t.dtype in _OWN}
        names = opened.keys()
        return {n: own[n].read() if n in own else opened.get_tensor(n) for n in names}


def file_tensors(file: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file by name, reading only its header.

    Raises:
        ValueError: see `open_safetensors`.
    """
    with open_safetensors(file) as opened:
        return _listed(file, opened)


def is_safetensors(file: Path) -> bool:
    """Return whether a file starts with a length and a JSON header, as safetensors files do."""
    with file.open("rb") as opened:
        start = opened.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size


def _listed(file: Path, opened: Any) -> dict[str, FileTensor]:
    tensors = {}
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
        tensors[name] = FileTensor(file, name, shape, _DTYPES.get(dtype, dtype))
    return tensors


def shard_tensors(index: Path, tensors_in: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """Return the tensors of all shards that an index names, by calling `tensors_in` on each shard.

    Raises:
        ValueError: the file is not an index, a shard's name is not that of a tensor file beside it,
            a shard does not exist, or a shard holds other tensors than the index assigns to it,
            because both are from different saves.
    """
    try:
        places = dict(read_json_object(index)["weight_map"])
        shards = {shard: index.parent / shard for shard in sorted(set(places.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a shard index with a weight_map: {error!r}") from error
    for shard in shards:
        # An index that names an index, such as itself, would be followed forever.
        if "/" in shard or "\\" in shard or shard.endswith(".json") or shard in ("", ".", ".."):
            raise ValueError(
                f"{index} names the shard {printable(shard)!r}, expected the name of a tensor file "
                "beside it; export the checkpoint again into an empty folder."
            )
    tensors: dict[str, T] = {}
    for shard, file in shards.items():
        if not file.is_file():
            raise ValueError(
                f"{index} names shard {shard}, which is not beside it. Copy all shards and the "
                "index into one folder."
            )
        here = tensors_in(file)
        named = {name for name, place in places.items() if place == shard}
        if named != set(here):
            raise ValueError(
                f"{index} and shard {shard} are of different saves: the index alone names "
                f"{sorted(named - set(here))} in it, the shard alone holds "
                f"{sorted(set(here) - named)}. Export the checkpoint again into an empty folder."
            )
        tensors |= here
    return tensors
