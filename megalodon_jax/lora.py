"""LoRA: low-rank adapters for the linear maps of a model, with training, merging and PEFT files.

    model = add_lora(model, 8, alpha=16, targets=("*.attn.wv", "*.ffn.*"), key=key)
    adapters, frozen = partition_lora(model)     # trained leaves, and the others
    model = merge_lora(eqx.combine(adapters, frozen))

PEFT can load a folder written by `save_lora` into megalodon-hf, and `load_lora` reads PEFT's
folders. Source: docs/guide.md "LoRA".
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megalodon_jax.config import DTYPES, checked_dtype
from megalodon_jax.layers.linear import Linear, linear_maps
from megalodon_jax.layers.lora import LoRALinear, init_adapter, is_lora, lora_maps
from megalodon_jax.layers.stack import StackedBlocks
from megalodon_jax.lora_files import Adapter, read_adapters, write_adapters
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.policy import resolve
from megalodon_jax.roles import Role, dotted, role_of
from megalodon_jax.stacked import stack_layers, unstack_layers
from megalodon_jax.tensor_files import printable

__all__ = ["LoRALinear", "add_lora", "load_lora", "merge_lora", "partition_lora", "save_lora"]

Tree = TypeVar("Tree")
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
    """Return the model with adapters on some of its linear maps; its logits do not change yet.

    Args:
        model: the base model, its layers stacked or not.
        rank: rank of every adapter.
        alpha: numerator of the factor alpha / rank by which B A is multiplied.
        targets: patterns for full names of linear maps, such as `*.attn.w*` or
            `model.layers.0.ffn.*` (`megalodon_jax.policy`); by default all maps except the head.
        dropout: dropout rate of the adapters' inputs, applied with `deterministic=False` only.
        rslora: divide alpha by the square root of the rank instead (rank-stabilised LoRA).
        dtype: dtype of the adapters; None means `param_dtype`, but at least float32.
        key: PRNG key for A; the draw for a map also depends on the map's name.

    Raises:
        ValueError: a pattern matches no map or only the head, a map already has an adapter or has a
            low-precision GEMM backend, `rank` is not a positive integer, `alpha` is not finite and
            above 0, or `dropout` is outside [0, 1).
    """
    dtype = None if dtype is None else checked_dtype("dtype", dtype, "add_lora")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"add_lora: dropout={dropout!r} must be in [0, 1).")
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"add_lora: alpha={alpha!r} must be a finite number above 0.")
    if isinstance(targets, str):
        raise ValueError(
            f"add_lora: targets={targets!r} must be a sequence of patterns; write ({targets!r},)."
        )
    plain = unstack_layers(model)
    names = [name for name in linear_maps(plain) if name != _HEAD]
    if _HEAD in targets:
        raise ValueError(f"add_lora: targets={tuple(targets)} contain {_HEAD}: {_NO_HEAD}")
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
    """Split a model into (adapters, everything else), each with None in place of the other part's
    leaves.

    Differentiate and optimise the adapters; `equinox.combine` joins both parts again.

    Raises:
        ValueError: the model has no adapters.
    """
    _check_adapters(model, "partition_lora")

    def trained(path: Any, _: Any) -> bool:
        return role_of(dotted(path)) is Role.LORA

    return eqx.partition(model, jax.tree_util.tree_map_with_path(trained, model))


def merge_lora(model: Tree) -> Tree:
    """Return the plain model whose weights are W + scale B A, each rounded once to W's dtype.

    The results of a float32 model change by rounding errors only. A bfloat16 model loses changes
    smaller than half the spacing of bfloat16 numbers at W (`megalodon-numerics stability ADAPTERS
    --base CHECKPOINT` reports how much is lost).

    Raises:
        ValueError: the model has no adapters, for example because they are already merged.
    """
    _check_adapters(model, "merge_lora")
    return jax.tree.map(lambda n: n.merged() if is_lora(n) else n, model, is_leaf=is_lora)


def save_lora(
    folder: str | os.PathLike[str], model: MegalodonForCausalLM, *, base: str | None = None
) -> None:
    """Write only the adapters, in PEFT's format; an earlier folder of adapters is replaced.

    Args:
        folder: receives `adapter_config.json` and `adapter_model.safetensors`.
        model: model with adapters, its layers stacked or not.
        base: name or path of the base model, for PEFT's automatic classes.

    Raises:
        ValueError: the model has no adapters, adapters differ in dropout or in `rslora`, or the
            folder holds other files than adapters.
        OSError: the folder cannot be written; its former content is unchanged.
    """
    _check_adapters(model, "save_lora")
    adapters = {
        name: Adapter(np.array(m.lora_A), np.array(m.lora_B), m.alpha, m.rslora, m.dropout)
        for name, m in lora_maps(unstack_layers(model)).items()
    }
    write_adapters(folder, adapters, base=base)


def load_lora(model: MegalodonForCausalLM, folder: str | os.PathLike[str]) -> MegalodonForCausalLM:
    """Return the model with the adapters of a folder, written by `save_lora` or by PEFT.

    Args:
        model: the base model, its layers stacked or not.
        folder: folder with `adapter_config.json` and the weights.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is corrupt, the adapters are not plain LoRA or do not fit the model, or
            the model already has adapters. One error lists all names that do not fit.
    """
    plain, adapters = unstack_layers(model), read_adapters(folder)
    _check_fit(adapters, linear_maps(plain), str(folder))

    def adapter(name: str, base: Linear) -> LoRALinear:
        a = adapters[name]
        A, B = _stored(a.A), _stored(a.B)
        return LoRALinear(base, A, B, alpha=a.alpha, rslora=a.rslora, dropout=a.dropout)

    wrapped = _wrapped(plain, list(adapters), adapter, "load_lora")
    return stack_layers(wrapped) if _stacked(model) else wrapped


_NO_HEAD = (
    "the model multiplies by the head's matrix without calling its layer, so an adapter on the "
    "head would do nothing; leave lm_head out."
)


def _wrapped(model: Tree, names: Sequence[str], adapter: Any, caller: str) -> Tree:
    """Replace the linear maps `names` of a model by the results of `adapter(name, map)`.

    Raises:
        ValueError: a map has an adapter already, or a low-precision GEMM backend; the message
            begins with `caller`, the name of the calling function.
    """
    maps = linear_maps(model)
    for name in names:
        if is_lora(maps[name]):
            raise ValueError(
                f"{caller}: {name} has an adapter already; merge_lora first, or choose other "
                "matrices."
            )
        if maps[name].backend != "default":
            raise ValueError(
                f"{caller}: {name} is multiplied in {maps[name].backend}, expected the default "
                "backend: a low-precision product plus an exact adapter is not the product of one "
                f"matrix. Set gemm_backend='default' for {name}, or choose other matrices."
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
            f"{caller}: expected a model with adapters, and it has none: add them with add_lora or "
            "load_lora first, unless they are merged already."
        )


def _stored(array: np.ndarray) -> jax.Array:
    # The model does not support float16; float32 holds all float16 values exactly.
    dtype = array.dtype if array.dtype.name in DTYPES else np.dtype(np.float32)
    return jnp.asarray(array, jax.dtypes.canonicalize_dtype(dtype))


def _check_fit(adapters: Mapping[str, Adapter], maps: Mapping[str, Linear], source: str) -> None:
    """Check that every adapter fits the sizes of the linear map it is named after.

    Raises:
        ValueError: a map does not exist, is the head or has other sizes; the message begins with
            `source`, the origin of the adapters, and lists every problem.
    """
    problems = []
    for name, adapter in adapters.items():
        sizes = (adapter.B.shape[0], adapter.A.shape[1])
        if name == _HEAD:
            problems.append(f"{name}: {_NO_HEAD}")
        elif name not in maps:
            problems.append(f"unexpected {printable(name)} {sizes}")
        elif maps[name].weight.shape != sizes:
            problems.append(f"{name} has shape {maps[name].weight.shape}, its adapter {sizes}")
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(
            f"{source} does not fit the model, {len(problems)} problem(s):\n  {listing}\n"
            "Load the adapters into the base model that they were trained on."
        )
