"""Weight table: name, shape, dtype and role of every parameter of a configuration.

A torch name is the path of the leaf in the pytree, so nothing is listed by hand, and every existing
parameter is in the table. Conversion, strict loading, the audits and the probes use the table.
Source: docs/model.md "State dict".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.roles import SENSITIVE, Role, dotted, named_leaves, replace_leaves, role_of
from megalodon_jax.tensor_files import Tensor, printable

__all__ = [
    "EMBEDDING",
    "HEAD",
    "SENSITIVE",
    "Role",
    "Weight",
    "abstract_model",
    "build_model",
    "dotted",
    "named_leaves",
    "replace_leaves",
    "role_of",
    "shape_problems",
    "weight_table",
]

HEAD, EMBEDDING = "lm_head.weight", "model.embed.weight"


@dataclass(frozen=True, slots=True)
class Weight:
    """Row of the weight table: one parameter of a configuration."""

    name: str
    """Name in the torch state dict, and the path of the leaf in the pytree."""
    shape: tuple[int, ...]
    dtype: np.dtype
    role: Role

    @property
    def sensitive(self) -> bool:
        """Whether the parameter must be stored in at least float32."""
        return self.role in SENSITIVE


@lru_cache(maxsize=64)
def weight_table(config: MegalodonConfig) -> tuple[Weight, ...]:
    """Return the weight table of a configuration, in pytree order, without allocating weights."""
    shapes = eqx.filter_eval_shape(MegalodonForCausalLM, config, key=jax.random.key(0))
    return tuple(
        Weight(name, tuple(leaf.shape), np.dtype(leaf.dtype), role_of(name))
        for name, leaf in named_leaves(shapes).items()
    )


def abstract_model(config: MegalodonConfig) -> MegalodonForCausalLM:
    """Return a model with `jax.ShapeDtypeStruct`s for arrays, into which weights can be loaded."""
    return eqx.filter_eval_shape(MegalodonForCausalLM, config, key=jax.random.key(0))


def build_model(
    config: MegalodonConfig,
    tensors: Mapping[str, np.ndarray | Tensor],
    *,
    source: str = "state dict",
) -> MegalodonForCausalLM:
    """Build a model from named NumPy arrays or tensors in files, with strict checks.

    Tensors in files are read one at a time, after names, shapes and dtypes have been checked.

    Args:
        config: determines names, shapes and dtypes; sensitive parameters get at least float32.
        tensors: tensors by torch name. A tied `lm_head.weight` may be present if it equals the
            embedding; `*.inner.rope.inv_freq` buffers are ignored.
        source: origin of the tensors, named in errors.

    Raises:
        ValueError: tensors are missing, unexpected, mis-shaped or not floating-point, or a tied
            head differs from the embedding. One error lists every problem.
    """
    table = weight_table(config)
    given = {n: t for n, t in tensors.items() if not n.endswith("inner.rope.inv_freq")}
    _check(config, table, given, source)
    values = {row.name: jnp.asarray(_array(given[row.name]), row.dtype) for row in table}
    return replace_leaves(abstract_model(config), values)


def shape_problems(
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Any],
    optional: Collection[str] = (),
) -> list[str]:
    """Return a line for each missing, unexpected or mis-shaped tensor.

    Args:
        expected: shapes by name.
        tensors: arrays, or objects with a `shape`, by name.
        optional: further names that are allowed, whatever their shapes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    extra = sorted(set(shapes) - set(expected) - set(optional))
    return [
        *(f"missing {name} {shape}" for name, shape in expected.items() if name not in shapes),
        *(f"unexpected {printable(name)} {shapes[name]}" for name in extra),
        *(
            f"{name} has shape {shapes[name]}, expected {shape}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ),
    ]


def _array(tensor: np.ndarray | Tensor) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else tensor.read()


def _floating(dtype: Any) -> bool:
    """Return whether a dtype, given as an object or by name, is floating-point for NumPy."""
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        # Names of packed formats, which NumPy does not know.
        return False


def _check(config, table, given: Mapping[str, np.ndarray | Tensor], source: str) -> None:
    expected = {row.name: row.shape for row in table}
    optional = {HEAD} if config.tied else set()
    allowed = set(expected) | optional
    problems = shape_problems(expected, given, optional)
    problems += [
        f"{n} holds {given[n].dtype}, expected floating-point numbers"
        for n in sorted(allowed & set(given))
        if not _floating(given[n].dtype)
    ]
    if config.tied and HEAD in given and EMBEDDING in given and not problems:
        head, embed = _array(given[HEAD]), _array(given[EMBEDDING])
        if not np.array_equal(head, embed):
            problems.append(
                f"{HEAD} differs from {EMBEDDING} although the head is tied (output_size="
                f"{config.output_size}); set output_size for an untied head"
            )
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(
            f"{source} does not fit the configuration, {len(problems)} problem(s):\n  {listing}\n"
            "Check that config and checkpoint belong together (layers, widths, swiglu, "
            "norm_affine, output_size)."
        )
