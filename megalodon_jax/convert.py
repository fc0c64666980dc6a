"""Weights in and out: torch state dicts, safetensors files, Hugging Face directories.

Torch is imported only inside the functions that hand out or read torch tensors; safetensors files
need none. Source: docs/guide.md "Interop".
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megalodon_jax.config import MegalodonConfig, checked_dtype, widened
from megalodon_jax.files import read_json_object
from megalodon_jax.leaf_tensors import leaf_tensors
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.pretrained import checkpoint_file, located
from megalodon_jax.shards import save_tensors
from megalodon_jax.tensor_files import (
    ArrayTensor,
    Tensor,
    file_tensors,
    is_safetensors,
    read_file,
    shard_tensors,
)
from megalodon_jax.torch_files import (
    is_torch_file,
    read_torch_file,
    to_numpy,
)
from megalodon_jax.weights import EMBEDDING, HEAD, SENSITIVE, build_model, role_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def state_dict(
    model: MegalodonForCausalLM,
    *,
    dtype: DTypeLike | None = None,
    include_rope_inv_freq: bool = False,
) -> dict[str, np.ndarray]:
    """Return the weights as NumPy arrays by torch name.

    Args:
        model: the model to export, stacked or not.
        dtype: storage dtype of everything but the sensitive parameters, which stay in at least
            float32; None keeps what is there.
        include_rope_inv_freq: add the RoPE rates, which strict loading in torch does not expect.

    Raises:
        ValueError: `dtype` is none this project stores, such as float16.
    """
    tensors = exported_tensors(model, dtype=dtype)
    arrays = {name: np.array(tensor.read()) for name, tensor in tensors.items()}
    if model.tied:
        # Strict loading in torch asks for the head, and two names of one array are not saved.
        arrays[HEAD] = arrays[EMBEDDING].copy()
    return arrays | (_rope_rates(model.config) if include_rope_inv_freq else {})


def exported_tensors(
    model: MegalodonForCausalLM, *, dtype: DTypeLike | None = None
) -> dict[str, Tensor]:
    """Return the weights by torch name, to be read one at a time; a tied head is the embedding's.

    Parameters that are not ours (`Role.OTHER`) are among them; those that are no floating-point
    numbers keep their dtype.

    Args:
        model: see `state_dict`.
        dtype: see `state_dict`.

    Raises:
        ValueError: see `state_dict`.
    """
    asked = None if dtype is None else checked_dtype("dtype", dtype, "export")
    tensors: dict[str, Tensor] = {}
    for name, tensor in leaf_tensors(model).items():
        target = np.dtype(tensor.dtype)
        if jnp.issubdtype(target, jnp.floating):
            target = target if asked is None else asked
            if role_of(name) in SENSITIVE:
                target = widened(tensor.dtype)
        tensors[name] = dataclasses.replace(tensor, dtype=target.name)
    return tensors


def convert_jax_to_torch(
    model: MegalodonForCausalLM,
    *,
    dtype: torch.dtype | None = None,
    include_rope_inv_freq: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a state dict that loads strictly into megalodon-hf; a tied head is a copy.

    Args:
        model: the model to export.
        dtype: torch dtype of everything but the sensitive parameters; None keeps what is there.
        include_rope_inv_freq: see `state_dict`.

    Raises:
        ValueError: see `state_dict`.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    arrays = state_dict(model, dtype=name, include_rope_inv_freq=include_rope_inv_freq)
    return {name: _to_torch(array) for name, array in arrays.items()}


def save_safetensors(
    model: MegalodonForCausalLM,
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    include_rope_inv_freq: bool = False,
    max_shard_size: int | str | None = None,
) -> None:
    """Write the weights to a safetensors file, or to shards of it; aside first and then renamed.

    Tensors are copied when they are written: a shard of them is in memory at a time.

    Args:
        model: the model to save, stacked or not.
        path: the file; shards are called after it, `model-00001-of-00003.safetensors` and
            `model.safetensors.index.json`.
        dtype: see `state_dict`.
        include_rope_inv_freq: see `state_dict`.
        max_shard_size: most bytes of a file, a number or such as "5GB"; None writes one file.

    Raises:
        ValueError: see `state_dict` and `megalodon_jax.shards.save_tensors`.
        OSError: the folder cannot be written; nothing is left behind.
    """
    tensors = exported_tensors(model, dtype=dtype)
    if model.tied:
        tensors[HEAD] = tensors[EMBEDDING]
    if include_rope_inv_freq:
        tensors |= {n: ArrayTensor(rates) for n, rates in _rope_rates(model.config).items()}
    save_tensors(tensors, path, max_shard_size)


def load_weights_from_torch(
    model: MegalodonForCausalLM, state_dict: Mapping[str, torch.Tensor]
) -> MegalodonForCausalLM:
    """Return a model like `model` with the weights of a torch state dict, its layers one by one.

    Names and shapes must match exactly. A prefix that a wrapper put before every name (`module.`,
    `_orig_mod.`) is taken off.

    Raises:
        ValueError: see `megalodon_jax.weights.build_model`.
    """
    source = "torch state dict"
    arrays = {name: to_numpy(tensor) for name, tensor in state_dict.items()}
    return build_model(model.config, unprefixed(arrays, source), source=source)


def load_from_pretrained(
    path: str | os.PathLike[str],
    config: MegalodonConfig | None = None,
    dtype: DTypeLike = jnp.float32,
    *,
    key: jax.Array | None = None,
    revision: str | None = None,
) -> MegalodonForCausalLM:
    """Load a checkpoint: a tensor file, a sharded index, a directory, or a model of a hub.

    A directory holds weights and `config.json`, or the steps of `megalodon_jax.orbax_checkpoints`,
    of which the newest is loaded.

    A torch file may hold a state dict or a training checkpoint with one in it
    (`megalodon_jax.torch_files`); a prefix that a wrapper put before every name (`model.`,
    `module.`) is taken off.

    Args:
        path: `.safetensors`, `.bin`, `.pt` or `.ckpt` file, `*.index.json`, or a directory holding
            one. What is not there as a path and looks like "org/name" is taken for an id of the
            Hugging Face hub, where huggingface_hub is installed.
        config: the model's configuration; None reads `config.json` beside the weights.
        dtype: storage dtype of all but the sensitive parameters, which keep at least float32 and
            never pass through a narrower dtype.
        key: accepted for compatibility; a strict load leaves nothing to draw at random.
        revision: branch, tag or commit of a hub id.

    Raises:
        FileNotFoundError: there is no checkpoint (the message says what was tried), or no
            `config.json` when one is needed.
        ValueError: the file is corrupt, or does not fit the configuration (all problems listed).
    """
    from megalodon_jax.orbax_checkpoints import is_orbax, model_arrays

    del key
    place = located(path, revision)
    if is_orbax(place):
        saved, arrays = model_arrays(place)
        config = dataclasses.replace(config or saved, param_dtype=dtype)
        return build_model(config, arrays, source=str(place))
    file = checkpoint_file(place)
    if config is None:
        config = read_config(file.parent / "config.json")
    config = dataclasses.replace(config, param_dtype=dtype)
    # Unread: with every tensor in memory beside the model, it would be there twice.
    tensors = unprefixed(open_tensors(file), str(file))
    return build_model(config, tensors, source=str(file))


def read_config(path: Path) -> MegalodonConfig:
    """Read a `config.json`, ours (with dtypes) or Hugging Face's.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not JSON, or describes no Megalodon.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: pass config=..., or put config.json there.")
    fields = read_json_object(path)
    try:
        if "model_type" in fields or "compute_dtype" not in fields:
            return MegalodonConfig.from_hf(fields)
        return MegalodonConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a checkpoint file as NumPy arrays (bfloat16 through ml_dtypes).

    Raises:
        ValueError: see `open_tensors`.
    """
    # Not by `open_tensors`: each of its tensors opens the file and reads the whole header again.
    if file.name.endswith(".index.json"):
        return shard_tensors(file, read_tensors)
    if reads_as_safetensors(file):
        return read_file(file)
    return {name: tensor.read() for name, tensor in read_torch_file(file).model(file).items()}


def open_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file by name, unread.

    Raises:
        ImportError: it is a torch file, and torch is not installed.
        ValueError: the file is corrupt, a shard of the index is missing, or index and shards are
            of different saves.
    """
    if file.name.endswith(".index.json"):
        return shard_tensors(file, open_tensors)
    if reads_as_safetensors(file):
        return dict(file_tensors(file))
    return dict(read_torch_file(file).model(file))


def unprefixed(tensors: Mapping[str, T], source: str) -> dict[str, T]:
    """Return the tensors without the prefix that a wrapper of the model put before its names.

    Names without the prefix stay, for the strict load to list.

    Raises:
        ValueError: there are several prefixes, so several models.
    """
    suffix = f".{EMBEDDING}"
    found = sorted(name.removesuffix(EMBEDDING) for name in tensors if f".{name}".endswith(suffix))
    if len(found) > 1:
        raise ValueError(
            f"{source} holds {len(found)} models, under the prefixes {found}: pass the one you "
            "want to load_weights_from_torch, as a state dict of its own."
        )
    prefix = found[0] if found else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def reads_as_safetensors(file: Path) -> bool:
    """Whether a file is read as safetensors: by what it begins with, and in doubt by its name."""
    return (file.suffix == ".safetensors" and not is_torch_file(file)) or is_safetensors(file)


def _rope_rates(config: MegalodonConfig) -> dict[str, np.ndarray]:
    half, base = config.head_dim // 2, config.effective_rope_base
    rates = (base ** (-np.arange(half) / half)).astype(np.float32)
    layers = range(config.num_layers)
    return {f"model.layers.{i}.attn.inner.rope.inv_freq": rates.copy() for i in layers}


def _to_torch(array: np.ndarray) -> torch.Tensor:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
