"""Input checks of all layers: sizes, shapes, and supported dtypes.

JAX broadcasts mismatched shapes and computes in any dtype, so a wrong width or float16 would give
wrong numbers without an error. Shapes and dtypes are static: the checks are free under `jax.jit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp

from megalodon_jax.config import DTYPES

Shape = tuple[int | str | EllipsisType, ...]
"""Expected shape: per axis a size, or a name, which stands for the same size throughout a call of
`check_inputs`. A leading `...` stands for any number of axes."""


def check_sizes(owner: str, **sizes: Any) -> None:
    """Check that the sizes of a layer are positive integers.

    Raises:
        ValueError: a size is not a positive integer; the message names the owner, the size and its
            value.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{owner}: {name}={size!r} must be an integer of at least 1.")


def check_positive(owner: str, **numbers: Any) -> None:
    """Check that the numbers of a layer are positive and finite.

    Raises:
        ValueError: a number is not positive and finite; the message names the owner, the number and
            its value.
    """
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{owner}: {name}={number!r} must be positive and finite.")


def check_inputs(owner: str, kind: Any = jnp.floating, **inputs: tuple[Any, Shape]) -> None:
    """Check the shapes and dtypes of arrays.

    Args:
        owner: name of the layer, for errors.
        kind: expected kind of dtype, for `jnp.issubdtype`.
        inputs: by name, an array (None if absent) and the shape it must have.

    Raises:
        ValueError: a shape or a dtype differs, or a dtype is float16; the message names the first
            such array, and says what was expected.
    """
    sizes: dict[str, int] = {}
    for name, (array, shape) in inputs.items():
        if array is None:
            continue
        found = tuple(array.shape)
        if not _fits(found, shape, sizes):
            names: Mapping[Any, Any] = {...: "..."} | sizes
            expected = ", ".join(str(names.get(size, size)) for size in shape)
            raise ValueError(f"{owner}: {name} has shape {found}, expected ({expected}).")
        _check_dtype(owner, name, array, kind)


def check_parameters(layer: Any) -> None:
    """Check that the parameters of a layer have supported dtypes.

    Raises:
        ValueError: a parameter has another dtype, for example because it was cast to float16.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        if hasattr(leaf, "dtype"):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            _check_dtype(type(layer).__name__, name, leaf, jnp.floating)


def _fits(found: tuple[int, ...], shape: Shape, sizes: dict[str, int]) -> bool:
    if shape[0] is ...:
        shape = shape[1:]
        if len(found) < len(shape):
            return False
        found = found[len(found) - len(shape) :]
    return len(found) == len(shape) and all(
        got == (sizes.setdefault(want, got) if isinstance(want, str) else want)
        for got, want in zip(found, shape, strict=True)
    )


def _check_dtype(owner: str, name: str, array: Any, kind: Any) -> None:
    dtype = jnp.dtype(array.dtype)
    if not jnp.issubdtype(dtype, kind):
        raise ValueError(f"{owner}: {name} is {dtype.name}, expected {kind.__name__}.")
    if jnp.issubdtype(dtype, jnp.floating) and dtype.name not in DTYPES:
        raise ValueError(
            f"{owner}: {name} is {dtype.name}, expected one of {DTYPES}"
            + ("; EMA states exceed the range of float16." if dtype.name == "float16" else ".")
        )
