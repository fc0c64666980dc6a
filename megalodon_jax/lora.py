"""LoRA: low-rank adapters on the linear maps of a model, trained, merged, saved in PEFT's format.

    model = add_lora(model, 8, alpha=16, targets=("*.attn.wv", "*.ffn.*"), key=key)
    adapters, frozen = partition_lora(model)     # what is trained, and what is not
    model = merge_lora(eqx.combine(adapters, frozen))

A folder of `save_lora` is one that PEFT loads onto megalodon-hf, and `load_lora` reads PEFT's.
Source: docs/guide.md "LoRA".
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from megalodon_jax.config import DTYPES, checked_dtype
from megalodon_jax.convert import read_tensors
from megalodon_jax.files import folder_written_aside, read_json_object
from megalodon_jax.layers.linear import Linear, linear_maps
from megalodon_jax.layers.lora import LoRALinear, init_adapter, is_lora, lora_maps
from megalodon_jax.layers.stack import StackedBlocks
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.policy import resolve
from megalodon_jax.roles import Role, dotted, role_of
from megalodon_jax.stacked import stack_layers, unstack_layers
from megalodon_jax.tensor_files import printable

__all__ = ["LoRALinear", "add_lora", "load_lora", "merge_lora", "partition_lora", "save_lora"]

Tree = TypeVar("Tree")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TORCH_WEIGHTS = "adapter_model.bin"
_PREFIX = "base_model.model."
"""PEFT's name of the wrapped model, before every name of it."""
_NAME = re.compile(r"(.+)\.(lora_[AB])\.weight")
_HEAD = "lm_head"


def add_lora(
    model: MegalodonForCausalLM,
    rank: int,
    *,
    alpha: float,
    targets: Sequence[str] = ("*",),
    dropout: float = 0.0,
    rslora: bool = False,
    dtype: DTypeLike | None = None,
    key: jax.Array,
) -> MegalodonForCausalLM:
    """Return the model with adapters on some of its linear maps; its logits are what they were.

    Args:
        model: the base model, stacked or not.
        rank: of every adapter.
        alpha: B A is added with the factor alpha / rank.
        targets: patterns of whole names of linear maps, such as `*.attn.w*` or
            `model.layers.0.ffn.*` (`megalodon_jax.policy`); all but the head by default.
        dropout: rate at which the inputs of adapters are dropped where `deterministic=False`.
        rslora: divide by the root of the rank instead (rank-stabilised LoRA).
        dtype: of the adapters; None is that of the parameters, at least float32.
        key: draws A; that of a map depends on it and on the map's name.

    Raises:
        ValueError: a pattern matches no map or only the head, a map has an adapter or a
            low-precision GEMM backend, or a number is out of range.
    """
    dtype = None if dtype is None else checked_dtype("dtype", dtype, "add_lora")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"add_lora: dropout={dropout!r} must be in [0, 1).")
    if isinstance(targets, str):
        raise ValueError(f"add_lora: targets={targets!r} must be patterns; write ({targets!r},).")
    plain = unstack_layers(model)
    names = [name for name in linear_maps(plain) if name != _HEAD]
    if _HEAD in targets:
        raise ValueError(f"add_lora: targets={tuple(targets)} name {_HEAD}: {_NO_HEAD}")
    rules = tuple((pattern, "lora") for pattern in targets)
    chosen = resolve(rules, names, "", "add_lora: targets")

    def adapter(name: str, base: Linear) -> LoRALinear:
        A, B = init_adapter(
            base, rank, key=jax.random.fold_in(key, zlib.crc32(name.encode())), dtype=dtype
        )
        return LoRALinear(base, A, B, alpha=alpha, rslora=rslora, dropout=dropout)

    wrapped = _wrapped(plain, [n for n in names if chosen[n]], adapter, "add_lora")
    return stack_layers(wrapped) if _stacked(model) else wrapped


def partition_lora(model: Tree) -> tuple[Tree, Tree]:
    """Return the adapters, and everything else: two models, each with None for the other's leaves.

    Differentiate and optimise the first; `equinox.combine` puts them together again.

    Raises:
        ValueError: the model has no adapters.
    """
    _check_adapters(model, "partition_lora")

    def trained(path: Any, _: Any) -> bool:
        return role_of(dotted(path)) is Role.LORA

    return eqx.partition(model, jax.tree_util.tree_map_with_path(trained, model))


def merge_lora(model: Tree) -> Tree:
    """Return the plain model whose weights are W + scale B A, each rounded once to W's dtype.

    A float32 model changes by the rounding of another order of operations. A bfloat16 one loses
    what is smaller than half a gap of W (`megalodon-numerics stability ADAPTERS --base CHECKPOINT`
    says how much).

    Raises:
        ValueError: the model has no adapters, for instance because they are merged already.
    """
    _check_adapters(model, "merge_lora")
    return jax.tree.map(lambda n: n.merged() if is_lora(n) else n, model, is_leaf=is_lora)


def save_lora(
    folder: str | os.PathLike[str], model: MegalodonForCausalLM, *, base: str | None = None
) -> None:
    """Write the adapters alone, as PEFT writes them, replacing a folder of adapters as a whole.

    Args:
        folder: gets `adapter_config.json` and `adapter_model.safetensors`.
        model: with adapters, stacked or not.
        base: name or path of the base model, for PEFT's automatic classes.

    Raises:
        ValueError: the model has no adapters, adapters differ in dropout or in `rslora`, or the
            folder holds something else.
        OSError: the folder cannot be written; what was there still is.
    """
    _check_adapters(model, "save_lora")
    _check_replaceable(Path(folder))
    maps = {n: m for n, m in linear_maps(unstack_layers(model)).items() if is_lora(m)}
    config = _config(maps, base)
    tensors = {
        f"{_PREFIX}{name}.{part}.weight": np.array(getattr(node, part))
        for name, node in maps.items()
        for part in ("lora_A", "lora_B")
    }
    with folder_written_aside(folder) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_lora(model: MegalodonForCausalLM, folder: str | os.PathLike[str]) -> MegalodonForCausalLM:
    """Return the model with the adapters of a folder of `save_lora` or of PEFT's LoRA.

    Args:
        model: the base model, stacked or not.
        folder: has `adapter_config.json` beside the weights.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is corrupt, the adapters are of another kind or do not fit the model, or
            the model has adapters already. All names that do not fit are listed in the one error.
    """
    folder = Path(folder)
    file = next((f for f in (folder / WEIGHTS, folder / _TORCH_WEIGHTS) if f.is_file()), None)
    if file is None or not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"no adapters at {folder}: expected {CONFIG} and {WEIGHTS} there.")
    config = read_json_object(folder / CONFIG)
    _check_kind(config, folder / CONFIG)
    plain = unstack_layers(model)
    pairs = _pairs(read_tensors(file), linear_maps(plain), config, str(file))

    def adapter(name: str, base: Linear) -> LoRALinear:
        A, B = pairs[name]
        alpha = _of_pattern(config, "alpha_pattern", name, config["lora_alpha"])
        rslora, rate = config.get("use_rslora", False), config.get("lora_dropout", 0.0)
        return LoRALinear(base, A, B, alpha=alpha, rslora=rslora, dropout=rate)

    wrapped = _wrapped(plain, list(pairs), adapter, "load_lora")
    return stack_layers(wrapped) if _stacked(model) else wrapped


_NO_HEAD = (
    "the model multiplies by the head's matrix and does not call its layer, so an adapter there "
    "would do nothing; leave it out."
)


def _wrapped(model: Tree, names: Sequence[str], adapter: Any, caller: str) -> Tree:
    """Return the model with these linear maps replaced by what `adapter(name, map)` returns."""
    maps = linear_maps(model)
    for name in names:
        if is_lora(maps[name]):
            raise ValueError(
                f"{caller}: {name} has an adapter already; merge_lora first, or choose other maps."
            )
        if maps[name].backend != "default":
            raise ValueError(
                f"{caller}: {name} is multiplied in {maps[name].backend}, expected the default "
                "backend: its low-precision product and an exact adapter are no sum of matrices. "
                "Set gemm_backend='default' for it, or leave it out."
            )

    def replaced(path: Any, node: Any) -> Any:
        name = dotted(path)
        return adapter(name, node) if name in chosen else node

    chosen = set(names)
    return jax.tree_util.tree_map_with_path(
        replaced, model, is_leaf=lambda node: isinstance(node, Linear)
    )


def _stacked(model: MegalodonForCausalLM) -> bool:
    return isinstance(model.model.layers, StackedBlocks)


def _check_adapters(model: Any, caller: str) -> None:
    if not lora_maps(model):
        raise ValueError(
            f"{caller}: expected a model with adapters, and it has none: none were added "
            "(add_lora, load_lora), or they are merged already."
        )


def _check_replaceable(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if foreign := names - {CONFIG, WEIGHTS}:
        raise ValueError(
            f"save_lora: {folder} holds {sorted(foreign)} and would be replaced as a whole; choose "
            "a folder of its own."
        )


def _config(maps: Mapping[str, LoRALinear], base: str | None) -> dict[str, Any]:
    """Return what PEFT wants to know of adapters: the commonest rank and alpha, and exceptions."""
    kinds = {(m.dropout, m.rslora) for m in maps.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"save_lora: adapters differ in (dropout, rslora), {sorted(kinds)}; the format has one "
            "of each for all of them. Save them in several folders."
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
    """Return a number as PEFT's configuration has it, whole where it is."""
    return int(number) if number.is_integer() else number


_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern"} | {
    *("alpha_pattern", "init_lora_weights", "bias")
}
_OF_TRAINING = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "megatron_core", "eva_config", "qalora_group_size"),
}
"""Fields that say where adapters are and how they came to be, which the tensors say too."""


def _check_kind(config: Mapping[str, Any], file: Path) -> None:
    """Refuse adapters whose forward pass is not that of LoRA; what is unknown is refused too."""
    problems = [
        f"{name}={value!r}"
        for name, value in config.items()
        if name not in _READ | _OF_TRAINING and value not in (None, False, {}, [])
    ]
    expected = {"peft_type": ("LORA",), "bias": ("none",)}
    # The others change the base model's weights too, which are not in the folder.
    expected["init_lora_weights"] = (True, False, "gaussian", "eva", "orthogonal")
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


def _pairs(
    tensors: Mapping[str, np.ndarray],
    maps: Mapping[str, Linear],
    config: Mapping[str, Any],
    source: str,
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return A and B by linear map, in the order of the model."""
    found: dict[str, dict[str, np.ndarray]] = {}
    problems = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None or match[1] not in maps:
            problems.append(f"unexpected {printable(name)} {tensor.shape}")
        elif match[1] == _HEAD:
            problems.append(f"{name}: {_NO_HEAD}")
        else:
            found.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in found.items():
        rank = _of_pattern(config, "rank_pattern", name, config["r"])
        out_features, in_features = maps[name].weight.shape
        for part, shape in (("lora_A", (rank, in_features)), ("lora_B", (out_features, rank))):
            at = f"{name}.{part}"
            if part not in pair:
                problems.append(f"missing {at} {shape}")
            elif pair[part].shape != shape:
                problems.append(f"{at} has shape {pair[part].shape}, expected {shape}")
    if problems or not found:
        listing = "\n  ".join(problems or ["no adapter"])
        raise ValueError(
            f"{source} does not fit the model, {len(problems)} problem(s):\n  {listing}\n"
            "Check that adapters and base model belong together."
        )
    return {
        name: (_stored(found[name]["lora_A"]), _stored(found[name]["lora_B"]))
        for name in maps
        if name in found
    }


def _stored(array: np.ndarray) -> jax.Array:
    # float16, which the model refuses, is exact in float32.
    dtype = array.dtype if array.dtype.name in DTYPES else np.dtype(np.float32)
    return jnp.asarray(array, jax.dtypes.canonicalize_dtype(dtype))


def _of_pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """Return a module's own rank or alpha: that of the first pattern that its name ends in."""
    patterns = config.get(field) or {}
    return next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", name)), default)
