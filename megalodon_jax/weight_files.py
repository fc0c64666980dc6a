"""Tensors of a checkpoint file in any supported format: safetensors, an index of shards, or torch.

The content of a file decides its format. Only an index is recognized by its name, `.index.json`.
Source: docs/stability.md "Which files".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megalodon_jax.tensor_files import (
    Tensor,
    file_tensors,
    is_safetensors,
    read_file,
    shard_tensors,
)
from megalodon_jax.torch_files import is_torch_file, read_torch_file


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint file, by name, as NumPy arrays (bfloat16: ml_dtypes).

    Raises:
        ImportError, ValueError: see `open_tensors`.
    """
    # `open_tensors` is not used, since each of its tensors opens the file and reads the header.
    if file.name.endswith(".index.json"):
        return shard_tensors(file, read_tensors)
    if reads_as_safetensors(file):
        return read_file(file)
    return {name: tensor.read() for name, tensor in read_torch_file(file).model(file).items()}


def open_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file by name, without reading their values yet.

    Exception: a torch file that does not have torch's zip format is read as a whole.

    Raises:
        ImportError: the file is a torch file, and torch is not installed.
        ValueError: the file is corrupt, a shard of the index is missing, or index and shards are
            from different saves.
    """
    if file.name.endswith(".index.json"):
        return shard_tensors(file, open_tensors)
    if reads_as_safetensors(file):
        return dict(file_tensors(file))
    return dict(read_torch_file(file).model(file))


def reads_as_safetensors(file: Path) -> bool:
    """Return whether to read a file as safetensors: by its content, or its suffix if unclear."""
    return (file.suffix == ".safetensors" and not is_torch_file(file)) or is_safetensors(file)
