"""A side written in Flax NNX: every call of a submodule is a stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parity.sides.jax_leaves import mark
from parity.sides.jax_side import DTYPES, JaxSide
from parity.sides.side import Precision

VALUE = ".value"
"""Suffix of a parameter's path in NNX, where a parameter is a variable with a `value`."""


class NNXSide(JaxSide):
    """An NNX module; stages are the results of its callable submodules, by path.

    Each run uses a fresh copy of the module, so that changes of its state, such as caches, running
    statistics and random number state, do not carry over.

    Args:
        module: the module, in the mode to be compared; usually after `module.eval()`.
        inputs: positional arguments of the call.
        call: function `call(module, *inputs, **keywords)` that is run instead of the module's
            `__call__`, for other methods or several steps; None: `__call__`.
        keywords: keyword arguments of the call.
    """

    kind = "nnx"

    def __init__(
        self,
        module: nnx.Module,
        *inputs: Any,
        call: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.call = call
        self.graph, state, self.random = nnx.split(module, nnx.Not(nnx.RngState), ...)
        super().__init__(self._in(None), state, *inputs, **keywords)

    def parameter_name(self, path: str) -> str:
        """Return a parameter's name: its path without NNX's suffix `.value`."""
        return path.removesuffix(VALUE)

    def function_in(self, precision: Precision) -> Callable[..., Any]:
        """Return a function that runs the module with the floating-point `dtype` of each of its
        submodules set to `precision`.

        The module is unchanged for float32.
        """
        if precision is Precision.FLOAT32:
            return self.function
        return self._in(DTYPES[precision])

    def _in(self, dtype: Any) -> Callable[..., Any]:
        def function(state: Any, *inputs: Any, **keywords: Any) -> Any:
            # Variables belong to the trace that created them, so each run needs new ones.
            random = jax.tree.map(lambda x: x, self.random)
            module = nnx.merge(self.graph, state, random)
            for keys, member in [*nnx.iter_modules(module)]:
                path = ".".join(map(str, keys))
                # Bypass NNX's `__setattr__`, which is for the module's own state.
                object.__setattr__(member, "__class__", _marking(type(member), path))
                if dtype is not None and _has_dtype(member):
                    setattr(member, "dtype", dtype)  # noqa: B010
            if self.call is not None:
                return self.call(module, *inputs, **keywords)
            return module(*inputs, **keywords)

        return function


@functools.cache
def _marking(cls: Any, path: str) -> Any:
    """Return a subclass of `cls` whose `__call__` names its result `path` by `checkpoint_name`.

    Classes without `__call__`, and the class of the root module, whose path is empty, are returned
    unchanged. The path is stored on the class because NNX rebuilds modules from their class at
    every transformation.
    """
    if not path or not any("__call__" in vars(base) for base in cls.__mro__):
        return cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return mark(path, cls.__call__(self, *args, **kwargs))

    names = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


def _has_dtype(module: Any) -> bool:
    """Return whether a module has a floating-point `dtype`; a module without one computes in the
    dtype of its inputs."""
    dtype = getattr(module, "dtype", None)
    return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
