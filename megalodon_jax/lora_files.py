"""A folder of LoRA adapters in PEFT's format, independent of any model.

    adapter_config.json          rank, alpha, scaling, and names of the maps with adapters
    adapter_model.safetensors    for each of these, `base_model.model.MAP.lora_A.weight` (rank, in)
                                 and `base_model.model.MAP.lora_B.weight` (out, rank)

Source: docs/guide.md "LoRA".
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megalodon_jax.files import folder_written_aside, read_json_object
from megalodon_jax.layers.lora import scale_of
from megalodon_jax.tensor_files import printable
from megalodon_jax.weight_files import read_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TORCH_WEIGHTS = "adapter_model.bin"
_PREFIX = "base_model.model."
"""Prefix that PEFT puts before the name of every parameter."""
_NAME = re.compile(r"(.+)\.(lora_[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one linear map, which adds `scale B A` to its matrix."""

    A: np.ndarray
    """Matrix (rank, in), applied first."""
    B: np.ndarray
    """Matrix (out, rank)."""
    alpha: float
    rslora: bool = False
    """Whether alpha is divided by the square root of the rank instead of the rank."""
    dropout: float = 0.0
    """Dropout rate of the adapter's inputs in training."""

    @property
    def rank(self) -> int:
        """Rank of the adapter: the number of rows of A."""
        return self.A.shape[0]

    @property
    def scale(self) -> float:
        """Factor by which B A is multiplied: alpha / rank, or alpha / sqrt(rank) with `rslora`."""
        return scale_of(self.alpha, self.rank, self.rslora)


def write_adapters(
    folder: str | os.PathLike[str], adapters: Mapping[str, Adapter], *, base: str | None = None
) -> None:
    """Write a folder of adapters; an earlier folder of adapters is replaced.

    Args:
        folder: the folder to write.
        adapters: adapters by the names of their linear maps.
        base: name or path of the base model, stored for PEFT; None stores none.

    Raises:
        ValueError: adapters differ in dropout or in `rslora`, or the folder holds other files than
            adapters.
        OSError: the folder cannot be written; its former content is unchanged.
    """
    _check_replaceable(Path(folder))
    config = _config(adapters, base)
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = adapter.A
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = adapter.B
    with folder_written_aside(folder) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapters(folder: str | os.PathLike[str]) -> dict[str, Adapter]:
    """Return the adapters of a folder by the names of their linear maps.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is corrupt, or the adapters are not plain LoRA. One error lists all
            unexpected, missing or mis-shaped tensors.
    """
    folder = Path(folder)
    file = next((f for f in (folder / WEIGHTS, folder / _TORCH_WEIGHTS) if f.is_file()), None)
    if file is None or not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"no adapters at {folder}: expected {CONFIG} and {WEIGHTS} there.")
    config = read_json_object(folder / CONFIG)
    _check_kind(config, folder / CONFIG)
    found: dict[str, dict[str, np.ndarray]] = {}
    problems = []
    for name, tensor in read_tensors(file).items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            problems.append(f"unexpected {printable(name)} {tensor.shape}")
        else:
            found.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in found.items():
        rank = _of_pattern(config, "rank_pattern", name, config["r"])
        for part, axis in (("lora_A", 0), ("lora_B", 1)):
            at = f"{printable(name)}.{part}"
            if part not in pair:
                problems.append(f"missing {at}")
            elif pair[part].ndim != 2 or pair[part].shape[axis] != rank:
                shape = pair[part].shape
                problems.append(f"{at} has shape {shape}, expected rank {rank} on axis {axis}")
    if problems or not found:
        listing = "\n  ".join(problems or ["no adapter"])
        raise ValueError(f"{file} does not fit {CONFIG}, {len(problems)} problem(s):\n  {listing}")
    rslora, rate = config.get("use_rslora", False), config.get("lora_dropout", 0.0)
    alphas = {n: _of_pattern(config, "alpha_pattern", n, config["lora_alpha"]) for n in found}
    return {
        name: Adapter(pair["lora_A"], pair["lora_B"], float(alphas[name]), rslora, rate)
        for name, pair in found.items()
    }


def _check_replaceable(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if foreign := names - {CONFIG, WEIGHTS}:
        raise ValueError(
            f"{folder} holds {sorted(foreign)}, which saving adapters there would delete; choose "
            "another folder."
        )


def _config(maps: Mapping[str, Adapter], base: str | None) -> dict[str, Any]:
    """Return PEFT's `adapter_config.json`: the most common rank and alpha, others by pattern.

    Raises:
        ValueError: adapters differ in dropout or in `rslora`.
    """
    kinds = {(m.dropout, m.rslora) for m in maps.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"adapters differ in (dropout, rslora), {sorted(kinds)}, but PEFT's format has one "
            "value of each per folder. Give all adapters the same values."
        )
    [(rate, rslora)] = kinds
    [(rank, _)] = Counter(m.rank for m in maps.values()).most_common(1)
    [(alpha, _)] = Counter(m.alpha for m in maps.values()).most_common(1)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": rate,
        "use_rslora": rslora,
        "target_modules": list(maps),
        "rank_pattern": {re.escape(n): m.rank for n, m in maps.items() if m.rank != rank},
        "alpha_pattern": {
            re.escape(n): _whole(m.alpha) for n, m in maps.items() if m.alpha != alpha
        },
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _whole(number: float) -> int | float:
    """Return a number as PEFT stores it: an int if it is whole."""
    return int(number) if number.is_integer() else number


_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern"} | {
    *("alpha_pattern", "init_lora_weights", "bias")
}
_OF_TRAINING = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "megatron_core", "eva_config", "qalora_group_size"),
}
"""Fields of the configuration that are ignored: they concern training only, or say which maps have
adapters, which the names of the tensors say too."""


def _check_kind(config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for adapters whose forward pass is not plain LoRA, or unknown settings."""
    problems = [
        f"{name}={value!r}"
        for name, value in config.items()
        if name not in _READ | _OF_TRAINING and value not in (None, False, {}, [])
    ]
    expected: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",),
        "bias": ("none",),
        # Other initialisations also change the base model's weights, which are not in the folder.
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    }
    problems += [
        f"{name}={config[name]!r}"
        for name, allowed in expected.items()
        if config.get(name, allowed[0]) not in allowed
    ]
    problems += [f"no {name}" for name in ("peft_type", "r", "lora_alpha") if name not in config]
    if problems:
        raise ValueError(
            f"{file}: expected plain LoRA, found {', '.join(problems)}; convert or merge the "
            "adapters with PEFT first."
        )


def _of_pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """Return a map's rank or alpha: the value of the first pattern that matches its name's end.

    `field` is the field of `config` that holds values by pattern; without a match, return
    `default`.
    """
    patterns = config.get(field) or {}
    return next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", name)), default)
