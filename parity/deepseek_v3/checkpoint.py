"""Strict reading and writing of DeepSeek-V3 directories: `config.json` and safetensors.

Tensor names are the paths of the pytree, with one exception: the experts of a layer are one stacked
array in JAX and separate tensors in files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from megalodon_jax.convert import checkpoint_file
from megalodon_jax.files import read_json_object, written_aside
from megalodon_jax.weight_files import read_tensors
from megalodon_jax.weights import named_leaves, replace_leaves, shape_problems
from parity.deepseek_v3.config import MLAMoEConfig
from parity.deepseek_v3.model import MLAMoEForCausalLM

_ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(.*)")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@cache
def abstract(config: MLAMoEConfig) -> MLAMoEForCausalLM:
    """Return a model of this configuration with shapes and dtypes in place of arrays."""
    return eqx.filter_eval_shape(MLAMoEForCausalLM, config, key=jax.random.key(0))


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors under the JAX model's names, with the experts of each layer stacked.

    `experts.0.up_proj.weight`, `experts.1.up_proj.weight`, ... become `experts.up_proj.weight` with
    the expert as first axis. Other tensors are unchanged.

    Raises:
        ValueError: numbers of experts have gaps, or shapes of experts differ.
    """
    found: dict[str, dict[int, np.ndarray]] = {}
    result = {}
    for name, tensor in tensors.items():
        if match := _ONE_EXPERT.fullmatch(name):
            found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = np.asarray(tensor)
        else:
            result[name] = np.asarray(tensor)
    for name, parts in found.items():
        shapes = {part.shape for part in parts.values()}
        if sorted(parts) != list(range(len(parts))) or len(shapes) > 1:
            raise ValueError(
                f"{name}: found experts {sorted(parts)} of shapes {sorted(shapes)}; expected "
                "experts numbered from 0 without gaps, all of one shape."
            )
        result[name] = np.stack([parts[i] for i in range(len(parts))])
    return result


def unstacked(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return tensors under DeepSeek-V3's names, one per expert: the inverse of `stacked`."""
    result = {}
    for name, tensor in tensors.items():
        array, (layer, experts, rest) = np.asarray(tensor), name.partition(".experts.")
        if experts:
            result |= {f"{layer}.experts.{i}.{rest}": part for i, part in enumerate(array)}
        else:
            result[name] = array
    return result


def build(
    config: MLAMoEConfig, tensors: Mapping[str, np.ndarray], source: str = "state dict"
) -> MLAMoEForCausalLM:
    """Build the model from tensors with DeepSeek-V3's names, which keep their dtypes.

    Args:
        config: configuration of the model.
        tensors: all parameters by name; a tied head may be included.
        source: name of the tensors' origin, for error messages.

    Raises:
        ValueError: names or shapes do not match the configuration; up to 20 problems are listed.
    """
    frame, held = abstract(config), stacked(tensors)
    expected = {name: leaf.shape for name, leaf in named_leaves(frame).items()}
    head = held.pop(_HEAD, None) if config.tie_word_embeddings else None
    if head is not None and not np.array_equal(head, held.get(_EMBEDDING, head)):
        raise ValueError(
            f"{source}: {_HEAD} differs from {_EMBEDDING}, but the configuration ties them: set "
            "tie_word_embeddings to false, or take the weights of this configuration."
        )
    if problems := shape_problems(expected, held):
        raise ValueError(
            f"{source} does not fit the configuration, {len(problems)} problem(s):\n  "
            + "\n  ".join(problems[:20])
        )
    return replace_leaves(frame, {name: jnp.asarray(held[name]) for name in expected})


def load(folder: str | os.PathLike[str]) -> MLAMoEForCausalLM:
    """Load the model from a DeepSeek-V3 directory.

    The directory has a `config.json` and safetensors, in one file or in shards. Dtypes are kept.

    Raises:
        FileNotFoundError: there is no `config.json`, or there are no weights.
        ValueError: the checkpoint has another architecture, is quantised or corrupt, or
            configuration and weights do not match.
    """
    path = Path(folder)
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} not found: expected a DeepSeek-V3 directory, with config.json and safetensors."
        )
    fields = read_json_object(file)
    if fields.get("quantization_config"):
        raise ValueError(
            f"{file}: weights are quantised in blocks with scales beside them; expand them to "
            "bfloat16 first (DeepSeek publishes the script fp8_cast_bf16.py)."
        )
    try:
        config = MLAMoEConfig.from_hf(fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
    weights = checkpoint_file(path)
    return build(config, read_tensors(weights), source=str(weights))


def save(model: MLAMoEForCausalLM, folder: str | os.PathLike[str]) -> None:
    """Write the model to a folder, as `config.json` and `model.safetensors` for Transformers.

    Each file is written under another name and then renamed, the configuration last. So a folder
    with a `config.json` is complete, unless it held another checkpoint before.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with written_aside(path / "model.safetensors") as aside:
        save_file(unstacked(named_leaves(model)), aside, metadata={"format": "pt"})
    with written_aside(path / "config.json") as aside:
        aside.write_text(json.dumps(model.config.to_hf(), indent=1) + "\n", encoding="utf-8")
