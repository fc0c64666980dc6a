"""Import and export of weights: torch state dicts, safetensors files, Hugging Face directories.

Torch is imported only inside functions that return or read torch tensors; safetensors files do not
need it. Source: docs/guide.md "Interop".
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
from megalodon_jax.tensor_files import ArrayTensor, Tensor
from megalodon_jax.torch_files import to_numpy
from megalodon_jax.weight_files import open_tensors
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
        model: the model to export, its layers stacked or not.
        dtype: storage dtype of all except the sensitive parameters, which keep their dtype, but at
            least float32; None keeps the present dtypes.
        include_rope_inv_freq: add the float32 buffers `*.rope.inv_freq` (d/2), by which angle, in
            radians, RoPE rotates each pair of features per token. Strict loading in torch does not
            expect them.

    Raises:
        ValueError: `dtype` is not supported, for example float16.
    """
    tensors = exported_tensors(model, dtype=dtype)
    arrays = {name: np.array(tensor.read()) for name, tensor in tensors.items()}
    if model.tied:
        # Strict loading in torch needs the head, and one array cannot be saved under two names.
        arrays[HEAD] = arrays[EMBEDDING].copy()
    return arrays | (_rope_rates(model.config) if include_rope_inv_freq else {})


def exported_tensors(
    model: MegalodonForCausalLM, *, dtype: DTypeLike | None = None
) -> dict[str, Tensor]:
    """Return the weights by torch name, copied only when a `Tensor` is read; without a tied head.

    Parameters that a user added (`Role.OTHER`) are included; non-floating ones keep their dtype.

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
    """Return a state dict that loads strictly into megalodon-hf.

    A tied head is included, as a copy of the embedding.

    Args:
        model: the model to export.
        dtype: torch dtype of all except the sensitive parameters; None keeps the present dtypes.
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
    """Write the weights to a safetensors file or to shards, atomically.

    Tensors are copied when they are written, so one shard is in memory at a time.

    Args:
        model: the model to save, its layers stacked or not.
        path: the file; shards are named after it, `model-00001-of-00003.safetensors` and
            `model.safetensors.index.json`.
        dtype: see `state_dict`.
        include_rope_inv_freq: see `state_dict`.
        max_shard_size: largest size of a file in bytes, as a number or text such as "5GB"; None
            writes one file.

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
    """Return a model with the weights of a torch state dict, and the configuration of `model`.

    The layers of the returned model are not stacked, even if those of `model` are.

    Names and shapes must match exactly, except for a prefix that a wrapper put before every name
    (`module.`, `_orig_mod.`), which is removed.

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
    """Load a model: from a tensor file, an index of shards, a directory, or the Hugging Face hub.

    A directory holds weights and `config.json`, or steps of `megalodon_jax.orbax_checkpoints`, of
    which the newest is loaded.

    A torch file may hold a state dict or a training checkpoint that contains one
    (`megalodon_jax.torch_files`); a prefix that a wrapper put before every name (`model.`,
    `module.`) is removed.

    Args:
        path: a `.safetensors`, `.bin`, `.pt`, `.ckpt` or `*.index.json` file, or a directory that
            holds one. A path that does not exist and looks like "org/name" is treated as an id of
            the Hugging Face hub, if huggingface_hub is installed.
        config: the model's configuration; None reads `config.json` beside the weights.
        dtype: storage dtype of all except the sensitive parameters, which keep at least float32 and
            never pass through a narrower dtype.
        key: ignored; accepted for compatibility.
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
    # Opened unread: reading all tensors now would hold the weights in memory twice.
    tensors = unprefixed(open_tensors(file), str(file))
    return build_model(config, tensors, source=str(file))


def read_config(path: Path) -> MegalodonConfig:
    """Read a `config.json`, written either by this package (with dtypes) or by Hugging Face.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not JSON, or does not describe a Megalodon.
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


def unprefixed(tensors: Mapping[str, T], source: str) -> dict[str, T]:
    """Return the tensors by name, without the prefix that a wrapper put before every name.

    The prefix is what precedes the embedding's name. Names without it are kept, so that strict
    loading reports them.

    Raises:
        ValueError: there are several prefixes, and so several models; the message begins with
            `source`, which names the file or argument that the tensors are from.
    """
    suffix = f".{EMBEDDING}"
    found = sorted(name.removesuffix(EMBEDDING) for name in tensors if f".{name}".endswith(suffix))
    if len(found) > 1:
        raise ValueError(
            f"{source} holds {len(found)} models, under the prefixes {found}: choose one, and pass "
            "its state dict to megalodon_jax.convert.load_weights_from_torch."
        )
    prefix = found[0] if found else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


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
