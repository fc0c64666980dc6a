"""Strict reading and writing of DeepSeek-V3 directories: `config.json` and safetensors.

Names are paths of the pytree, except that experts are stacked here and separate modules there.
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
    """Return a model with shapes and dtypes instead of arrays."""
    return eqx.filter_eval_shape(MLAMoEForCausalLM, config, key=jax.random.key(0))


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename tensors to ours: `experts.0.up_proj.weight`, ... become one `experts.up_proj`.

    Raises:
        ValueError: numbers of experts have gaps, or shapes differ.
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
                f"{name}: experts {sorted(parts)} of shapes {sorted(shapes)}; expected all from 0 "
                "on, of one shape."
            )
        result[name] = np.stack([parts[i] for i in range(len(parts))])
    return result


def unstacked(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Rename tensors to DeepSeek-V3's: the inverse of `stacked`."""
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
    """Build the model from a state dict with DeepSeek-V3's names, keeping its dtypes.

    Raises:
        ValueError: names or shapes do not match the configuration; all problems are listed.
    """
    frame, held = abstract(config), stacked(tensors)
    expected = {name: leaf.shape for name, leaf in named_leaves(frame).items()}
    head = held.pop(_HEAD, None) if config.tie_word_embeddings else None
    if head is not None and not np.array_equal(head, held.get(_EMBEDDING, head)):
        raise ValueError(f"{source}: {_HEAD} differs from {_EMBEDDING} although it is tied.")
    if problems := shape_problems(expected, held):
        raise ValueError(
            f"{source} does not fit the configuration, {len(problems)} problem(s):\n  "
            + "\n  ".join(problems[:20])
        )
    return replace_leaves(frame, {name: jnp.asarray(held[name]) for name in expected})


def load(folder: str | os.PathLike[str]) -> MLAMoEForCausalLM:
    """Load a DeepSeek-V3 directory: `config.json` beside safetensors, whole or in shards.

    Raises:
        FileNotFoundError: there is no `config.json` or no weights.
        ValueError: it has another architecture, is quantised or corrupt, or configuration and
            weights do not match.
    """
    path = Path(folder)
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} not found: expected a DeepSeek-V3 directory.")
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
    """Write `config.json` and `model.safetensors` in Transformers' format.

    Files are written aside and renamed, the configuration last, so that a folder with a
    `config.json` is complete.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with written_aside(path / "model.safetensors") as aside:
        save_file(unstacked(named_leaves(model)), aside, metadata={"format": "pt"})
    with written_aside(path / "config.json") as aside:
        aside.write_text(json.dumps(model.config.to_hf(), indent=1) + "\n", encoding="utf-8")
