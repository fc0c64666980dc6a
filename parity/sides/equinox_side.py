"""A side written in Equinox: every call of a submodule is a stage."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from parity.sides.jax_leaves import mark, path_name
from parity.sides.jax_side import JaxSide

UNMARKED = (eqx.nn.Shared,)
"""Module classes whose calls return a module rather than a result; these calls are no stages."""


class EquinoxSide(JaxSide):
    """An Equinox module; stages are the results of its callable submodules, by path.

    Args:
        module: the module, in the mode to be compared; usually `eqx.nn.inference_mode(module)`.
        inputs: positional arguments of the call.
        call: function `call(module, *inputs, **keywords)` that is run instead of the module's
            `__call__`, for other methods, a batch by `vmap`, or several steps; None: `__call__`.
        keywords: keyword arguments of the call.
    """

    kind = "equinox"

    def __init__(
        self,
        module: eqx.Module,
        *inputs: Any,
        call: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.call = call
        super().__init__(self._called, module, *inputs, **keywords)

    def _called(self, module: Any, *inputs: Any, **keywords: Any) -> Any:
        watched = _watched(module, "")
        if self.call is None:
            return watched(*inputs, **keywords)
        return self.call(watched, *inputs, **keywords)


def _watched(module: eqx.Module, path: str) -> Any:
    """Return a copy of a module that names its results, and those of its submodules, by their
    paths, with `checkpoint_name`; `path` is that of the module itself."""
    # `__init__` may have side effects and `__setattr__` rejects changes, so bypass both.
    copy = object.__new__(_marking(type(module), path))
    vars(copy).update(vars(module))
    for field in dataclasses.fields(module):
        # A static field is not part of the pytree, so JAX cannot traverse it.
        if not field.metadata.get("static", False) and field.name in vars(module):
            vars(copy)[field.name] = _below(vars(module)[field.name], _joined(path, field.name))
    return copy


def _below(value: Any, path: str) -> Any:
    """Return a field's value with each module in it replaced by its copy from `_watched`.

    The modules may be nested in any pytree.
    """

    def watched(keys: Any, leaf: Any) -> Any:
        return _watched(leaf, _joined(path, path_name(keys))) if _is_module(leaf) else leaf

    return jax.tree_util.tree_map_with_path(watched, value, is_leaf=_is_module)


@functools.cache
def _marking(cls: Any, path: str) -> Any:
    """Return a subclass of `cls` whose `__call__` names its result `path` by `checkpoint_name`.

    Classes without `__call__`, those in `UNMARKED` and the class of the root module, whose path is
    empty, are returned unchanged. The path is stored on the class, so that a module keeps it when a
    transformation flattens and rebuilds the module, and so that a trace cached for one module is
    never reused for another.
    """
    callable_ = any("__call__" in vars(base) for base in cls.__mro__)
    if not path or not callable_ or issubclass(cls, UNMARKED):
        return cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return mark(path, cls.__call__(self, *args, **kwargs))

    names = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    with warnings.catch_warnings():
        # Equinox already issued these warnings when the class itself was defined.
        warnings.simplefilter("ignore")
        return type(cls)(cls.__name__, (cls,), names)


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))
