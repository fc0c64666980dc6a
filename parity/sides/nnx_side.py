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
"""What NNX's paths end with: a parameter is a variable that has a value."""


class NNXSide(JaxSide):
    """An NNX module; stages are the results of its callable submodules, by path.

    The module itself is left as it is: each run is on a copy, so that what a call changes, such as
    a cache, running statistics or the state of random numbers, starts over.

    Args:
        module: in the mode it is to be compared in; usually after `module.eval()`.
        inputs: what it is called with.
        call: called as `call(module, *inputs, **keywords)` in place of the module itself, for other
            methods or several steps.
        keywords: what it is called with by name.
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
        """Return the path without what the value of a variable is called."""
        return path.removesuffix(VALUE)

    def function_in(self, precision: Precision) -> Callable[..., Any]:
        """Return the module with every `dtype` it was given set to that precision."""
        if precision is Precision.FLOAT32:
            return self.function
        return self._in(DTYPES[precision])

    def _in(self, dtype: Any) -> Callable[..., Any]:
        def function(state: Any, *inputs: Any, **keywords: Any) -> Any:
            # A variable belongs to the trace that made it: a run makes its own.
            random = jax.tree.map(lambda x: x, self.random)
            module = nnx.merge(self.graph, state, random)
            for keys, member in [*nnx.iter_modules(module)]:
                path = ".".join(map(str, keys))
                # Past NNX's `__setattr__`, which is for what the module holds.
                object.__setattr__(member, "__class__", _marking(type(member), path))
                if dtype is not None and _has_dtype(member):
                    setattr(member, "dtype", dtype)  # noqa: B010
            if self.call is not None:
                return self.call(module, *inputs, **keywords)
            return module(*inputs, **keywords)

        return function


@functools.cache
def _marking(cls: Any, path: str) -> Any:
    """Return a subclass whose calls mark what they return; the class itself where it has none.

    The path belongs to the class: NNX takes modules apart and puts them together again at every
    transformation, and makes them of their class.
    """
    if not path or not any("__call__" in vars(base) for base in cls.__mro__):
        return cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return mark(path, cls.__call__(self, *args, **kwargs))

    names = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


def _has_dtype(module: Any) -> bool:
    """Whether a module was told what to compute in; without, it follows its inputs."""
    dtype = getattr(module, "dtype", None)
    return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
