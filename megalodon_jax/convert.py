"""Weights in and out: torch state dicts, safetensors files, Hugging Face directories.

Torch is imported only inside the functions that hand out or read torch tensors; safetensors files
need none. Source: docs/guide.md "Interop".
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from megalodon_jax.config import MegalodonConfig, checked_dtype, widened
from megalodon_jax.files import read_json_object, written_aside
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.tensor_files import ArrayTensor, Tensor, file_tensors, read_file, shard_tensors
from megalodon_jax.weights import EMBEDDING, HEAD, SENSITIVE, build_model, named_leaves, role_of

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
        model: the model to export.
        dtype: storage dtype of everything but the sensitive parameters, which stay in at least
            float32; None keeps what is there.
        include_rope_inv_freq: add the RoPE rates, which strict loading in torch does not expect.

    Raises:
        ValueError: `dtype` is none this project stores, such as float16.
    """
    asked = None if dtype is None else checked_dtype("dtype", dtype, "export")
    tensors = {}
    for name, leaf in named_leaves(model).items():
        target = leaf.dtype if asked is None else asked
        if role_of(name) in SENSITIVE:
            target = widened(leaf.dtype)
        tensors[name] = np.array(leaf.astype(target))
    if model.tied:
        tensors[HEAD] = tensors[EMBEDDING].copy()
    if include_rope_inv_freq:
        half, base = model.config.head_dim // 2, model.config.effective_rope_base
        rates = (base ** (-np.arange(half) / half)).astype(np.float32)
        for i in range(model.config.num_layers):
            tensors[f"model.layers.{i}.attn.inner.rope.inv_freq"] = rates.copy()
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
) -> None:
    """Write the weights to one safetensors file, aside first and then renamed.

    Raises:
        ValueError: see `state_dict`.
        OSError: the folder cannot be written; nothing is left behind.
    """
    tensors = state_dict(model, dtype=dtype, include_rope_inv_freq=include_rope_inv_freq)
    with written_aside(path) as aside:
        save_file(tensors, aside, metadata={"format": "pt"})


def load_weights_from_torch(
    model: MegalodonForCausalLM, state_dict: Mapping[str, torch.Tensor]
) -> MegalodonForCausalLM:
    """Return `model` with the weights of a torch state dict; names and shapes must match exactly.

    A prefix that a wrapper put before every name (`module.`, `_orig_mod.`) is taken off.

    Raises:
        ValueError: see `megalodon_jax.weights.build_model`.
    """
    source = "torch state dict"
    arrays = {name: _from_torch(tensor) for name, tensor in state_dict.items()}
    return build_model(model.config, unprefixed(arrays, source), source=source)


def load_from_pretrained(
    path: str | os.PathLike[str],
    config: MegalodonConfig | None = None,
    dtype: DTypeLike = jnp.float32,
    *,
    key: jax.Array | None = None,
) -> MegalodonForCausalLM:
    """Load a checkpoint: a tensor file, a sharded index, or a directory with `config.json`.

    A torch file may hold a state dict, or one under `state_dict` as those of Lightning do; a prefix
    that a wrapper put before every name (`model.`, `module.`) is taken off.

    Args:
        path: `.safetensors`, `.bin`, `.pt` or `.ckpt` file, `*.index.json`, or a directory holding
            one.
        config: the model's configuration; None reads `config.json` beside the weights.
        dtype: storage dtype of all but the sensitive parameters, which keep at least float32 and
            never pass through a narrower dtype.
        key: accepted for compatibility; a strict load leaves nothing to draw at random.

    Raises:
        FileNotFoundError: there is no checkpoint, or no `config.json` when one is needed.
        ValueError: the file is corrupt, or does not fit the configuration (all problems listed).
    """
    del key
    file = checkpoint_file(Path(path))
    if config is None:
        config = read_config(file.parent / "config.json")
    config = dataclasses.replace(config, param_dtype=dtype)
    tensors = unprefixed(read_tensors(file), str(file))
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
    return read_file(file) if file.suffix == ".safetensors" else _read_pickle(file)


def open_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file by name: unread, but those of a torch file.

    A torch file is read as a whole, because a pickle has no other way.

    Raises:
        ImportError: it is a torch file, and torch is not installed.
        ValueError: the file is corrupt, a shard of the index is missing, or index and shards are
            of different saves.
    """
    if file.name.endswith(".index.json"):
        return shard_tensors(file, open_tensors)
    if file.suffix == ".safetensors":
        return dict(file_tensors(file))
    return {name: ArrayTensor(array) for name, array in _read_pickle(file).items()}


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


def _read_pickle(file: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{file} is a torch file and torch is not installed: pip install "
            "'megalodon-numerics[torch]', or export the checkpoint as safetensors."
        ) from error
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch lets every error of its unpickler through
        raise ValueError(
            f"{file} is not a readable torch weights file: {error!r}. If it is a training "
            "checkpoint that you trust, read it with torch.load(file, weights_only=False) and pass "
            "its state_dict to load_weights_from_torch."
        ) from error
    if isinstance(tensors, Mapping) and isinstance(tensors.get("state_dict"), Mapping):
        tensors = tensors["state_dict"]
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{file} holds a {type(tensors).__name__}; save model.state_dict().")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{file}: entry {name!r} is a {type(tensor).__name__}, not a tensor; "
                "save model.state_dict(), alone or under the name 'state_dict'."
            )
    return {name: _from_torch(tensor) for name, tensor in tensors.items()}


_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def checkpoint_file(path: Path) -> Path:
    """Return the weights file that a path names: itself, or the one a folder holds.

    Raises:
        FileNotFoundError: there is none; the message lists the names that were looked for.
    """
    if path.is_dir():
        for name in _NAMES:
            if (path / name).is_file():
                return path / name
        raise FileNotFoundError(f"{path} holds no checkpoint; expected one of {', '.join(_NAMES)}.")
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}.")
    return path


def _to_torch(array: np.ndarray) -> torch.Tensor:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _from_torch(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(jnp.bfloat16)
    return tensor.numpy()
