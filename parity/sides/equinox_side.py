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
"""Called for a module, not for a result: its leaves are parameters."""


class EquinoxSide(JaxSide):
    """An Equinox module; stages are the results of its callable submodules, by path.

    Args:
        module: in the mode it is to be compared in; usually `eqx.nn.inference_mode(module)`.
        inputs: what it is called with.
        call: called as `call(module, *inputs, **keywords)` in place of the module itself, for other
            methods, a batch by `vmap`, or several steps.
        keywords: what it is called with by name.
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
    """Return a copy of a module at `path` that marks what it and the modules in it return."""
    # Neither `__init__`, which may do anything, nor `__setattr__`, which refuses.
    copy = object.__new__(_marking(type(module), path))
    vars(copy).update(vars(module))
    for field in dataclasses.fields(module):
        # What is static is no part of the tree: JAX could not walk it.
        if not field.metadata.get("static", False) and field.name in vars(module):
            vars(copy)[field.name] = _below(vars(module)[field.name], _joined(path, field.name))
    return copy


def _below(value: Any, path: str) -> Any:
    """Return the value of a field with the modules in it watched, in whatever pytree they lie."""

    def watched(keys: Any, leaf: Any) -> Any:
        return _watched(leaf, _joined(path, path_name(keys))) if _is_module(leaf) else leaf

    return jax.tree_util.tree_map_with_path(watched, value, is_leaf=_is_module)


@functools.cache
def _marking(cls: Any, path: str) -> Any:
    """Return a subclass whose calls mark what they return; the class itself where it has none.

    The path belongs to the class, so that a module which a transformation takes apart and puts
    together again still has it, and so that what is traced of one module is never used for another.
    """
    callable_ = any("__call__" in vars(base) for base in cls.__mro__)
    if not path or not callable_ or issubclass(cls, UNMARKED):
        return cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return mark(path, cls.__call__(self, *args, **kwargs))

    names = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    with warnings.catch_warnings():
        # Whatever Equinox warns of, it said when the class itself was made.
        warnings.simplefilter("ignore")
        return type(cls)(cls.__name__, (cls,), names)


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))
