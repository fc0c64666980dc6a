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
"""Suffix of NNX's paths: a parameter is a variable with a `value`."""


class NNXSide(JaxSide):
    """An NNX module; stages are the results of its callable submodules, by path.

    Each run uses a copy of the module, so that state changed by a call, such as a cache, running
    statistics or random number state, starts over.

    Args:
        module: in the mode it is to be compared in; usually after `module.eval()`.
        inputs: positional arguments of the call.
        call: called as `call(module, *inputs, **keywords)` in place of the module itself, for other
            methods or several steps.
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
        """Return the path without NNX's `.value` suffix."""
        return path.removesuffix(VALUE)

    def function_in(self, precision: Precision) -> Callable[..., Any]:
        """Return the module with every `dtype` attribute set to that precision."""
        if precision is Precision.FLOAT32:
            return self.function
        return self._in(DTYPES[precision])

    def _in(self, dtype: Any) -> Callable[..., Any]:
        def function(state: Any, *inputs: Any, **keywords: Any) -> Any:
            # A variable belongs to the trace that made it, so each run makes new ones.
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
    """Return a subclass whose calls mark their results, or the class itself if it is not callable.

    The path is stored on the class because NNX rebuilds modules from their class at every
    transformation.
    """
    if not path or not any("__call__" in vars(base) for base in cls.__mro__):
        return cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return mark(path, cls.__call__(self, *args, **kwargs))

    names = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


def _has_dtype(module: Any) -> bool:
    """Whether the module sets a computation dtype; otherwise it follows its inputs."""
    dtype = getattr(module, "dtype", None)
    return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
