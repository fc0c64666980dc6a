"""Writes tensors to safetensors files: one file, or shards with an index.

Names and index are those of Hugging Face: `model-00001-of-00003.safetensors`, and
`model.safetensors.index.json` with the shard of each tensor and the total size in bytes. Tensors
are read into memory one shard at a time, so a save needs memory for its largest shard. Source:
docs/guide.md "Interop".
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
from safetensors.numpy import save_file

from megalodon_jax.files import flush, written_aside
from megalodon_jax.tensor_files import Tensor

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FORMAT = {"format": "pt"}
"""Metadata of each file; Transformers rejects a file whose metadata names no framework."""


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    max_shard_size: int | str | None = None,
) -> list[Path]:
    """Write tensors to one safetensors file, or to shards if they exceed a size.

    Everything is written to temporary files and then renamed. Files of an earlier save with names
    derived from `path` are deleted once the new files are complete, so that no loader finds a
    mixture.

    Args:
        tensors: the tensors, by name.
        path: the file, `.safetensors`; names of shards and index are derived from it.
        max_shard_size: largest size of a shard in bytes, as a number or text such as "5GB" or
            "500MiB"; a larger tensor gets a separate shard. None writes one file.

    Returns:
        Paths of the written files, the index last.

    Raises:
        ValueError: `max_shard_size` is invalid, or several shards are needed and `path` does not
            end in `.safetensors`.
        OSError: the folder cannot be written; its former content is unchanged.
    """
    path = Path(path)
    sizes = {n: jnp.dtype(t.dtype).itemsize * math.prod(t.shape) for n, t in tensors.items()}
    groups = _groups(sizes, None if max_shard_size is None else parsed_size(max_shard_size))
    if len(groups) == 1:
        with written_aside(path) as aside:
            _write(groups[0], tensors, aside)
        # Loaders look for a single file first, so the old shards may remain until the new file is
        # in place.
        _remove([_index_of(path), *_shards_of(path)])
        return [path]
    if path.suffix != SUFFIX:
        raise ValueError(
            f"save_safetensors: {path} is to be split by max_shard_size={max_shard_size}, so its "
            f"name must end in {SUFFIX}: shards and index are named after it."
        )
    names = [f"{path.stem}-{i + 1:05}-of-{len(groups):05}{SUFFIX}" for i in range(len(groups))]
    places = {tensor: n for n, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        for name, group in zip(names, groups, strict=True):
            _write(group, tensors, aside / name)
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (aside / _index_of(path).name).write_text(text, encoding="utf-8")
        for file in aside.iterdir():
            # A temporary folder's files are readable by the owner only.
            file.chmod(0o644)
            flush(file)
        _publish(aside, path, names)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [*(path.parent / name for name in names), _index_of(path)]


def parsed_size(size: int | str) -> int:
    """Return the number of bytes that `size` means: 5000, "5000", "5GB" (10^9) or "5GiB" (2^30).

    Raises:
        ValueError: `size` cannot be parsed, or is not positive.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper())
    number = float(found[1]) * _UNITS.get(found[2], 0) if found else 0
    if number < 1:
        raise ValueError(
            f"max_shard_size={size!r} must be a positive number of bytes, such as 5_000_000_000, "
            '"5GB" or "500MiB".'
        )
    return int(number)


def _groups(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Split names, in order, into groups of at most `limit` bytes; a larger tensor is a group."""
    groups: list[list[str]] = [[]]
    room = math.inf if limit is None else limit
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = math.inf if limit is None else limit
        groups[-1].append(name)
        room -= size
    return groups


def _write(names: Iterable[str], tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensors[name].read() for name in names}, file, metadata=_FORMAT)


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}{INDEX}")


def _shards_of(path: Path) -> list[Path]:
    """Return existing files named like shards of `path`, such as those of an earlier save."""
    name = re.compile(rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}")
    return sorted(file for file in path.parent.iterdir() if name.fullmatch(file.name))


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _publish(aside: Path, path: Path, names: list[str]) -> None:
    """Move shards and index from the folder `aside` to their places, the index last.

    Loaders read shards only through an index. If new shards have the names of old ones, the old
    index is moved away first. So a process killed between two renames leaves shards without an
    index, which no loader accepts, and never an index of one save with shards of another. After an
    error the old files are restored.
    """
    index, folder = _index_of(path), path.parent
    stale = [file for file in _shards_of(path) if file.name not in names]
    held = aside / "previous"
    held.mkdir()
    try:
        if any((folder / name).exists() for name in names):
            for name in (index.name, *names):
                if (folder / name).exists():
                    (folder / name).rename(held / name)
        for name in (*names, index.name):
            (aside / name).replace(folder / name)
    except BaseException:
        # Once the index is in place, the new checkpoint is complete.
        if (aside / index.name).exists():
            _remove(folder / name for name in names if not (aside / name).exists())
            for file in held.iterdir():
                file.rename(folder / file.name)
        raise
    # Loaders would prefer a single file of an earlier save to the index.
    _remove([path, *stale])
    flush(folder)
