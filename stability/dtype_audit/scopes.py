"""Name scopes for modules, which put a module's path into the name stack of each of its equations.

`announced` copies a model so that every method of its modules runs inside `jax.named_scope`. The
copy has other classes than the model, so that the two share no entries of JAX's trace caches.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import Any, TypeVar

import equinox as eqx
import jax

from stability.dtype_audit.rows import Phase

Model = TypeVar("Model")

ROOT = "root"
"""Scope of the outermost module's `__call__`; its other methods run in scopes of their names."""
_MARK = "~"
_SCOPE = re.compile(rf"{_MARK}([\w.*]+)")


def announced(model: Model) -> Model:
    """Return a copy of the model whose Equinox modules each run in a name scope of their own path.

    Members of a list or tuple are all called `*`, so that equal layers share one trace. Arrays are
    not copied. A model that is no module and no list, tuple or dict is returned unchanged.
    """
    return _announced(model, "")


def module_of(stack: str) -> str:
    """Return the path of the innermost module in a name stack; empty if there is none."""
    modules = _SCOPE.findall(stack)
    return modules[-1] if modules else ""


def phase_of(stack: str) -> Phase:
    """Return the phase of a name stack: `forward`, `jvp` or `backward`."""
    if "transpose(" in stack:
        return "backward"
    return "jvp" if "jvp(" in stack else "forward"


def _announced(node: Any, path: str) -> Any:
    if isinstance(node, eqx.Module):
        copy = object.__new__(_announcing(type(node), path, _methods(type(node))))
        for field in dataclasses.fields(node):  # pyright: ignore[reportArgumentType]
            value = getattr(node, field.name)
            static = field.metadata.get("static", False)
            below = value if static else _announced(value, _join(path, field.name))
            object.__setattr__(copy, field.name, below)
        return copy
    if type(node) in (list, tuple):
        return type(node)(_announced(member, _join(path, "*")) for member in node)
    if type(node) is dict:
        return {key: _announced(member, _join(path, str(key))) for key, member in node.items()}
    return node


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@functools.lru_cache(maxsize=1024)
def _announcing(cls: type, path: str, methods: tuple[tuple[str, Any], ...]) -> type:
    """Return the subclass of `cls` whose methods run in scopes, cached so that traces are shared.

    The methods are an argument, so that a class with a replaced method gets a new subclass.
    """
    scoped = {
        name: _scoped(method, path if path else ROOT if name == "__call__" else name)
        for name, method in methods
    }
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, **scoped})


def _methods(cls: type) -> tuple[tuple[str, Any], ...]:
    members = ((name, _plain_method(cls, name)) for name in dir(cls))
    return tuple((name, method) for name, method in members if method is not None)


def _plain_method(cls: type, name: str) -> Any:
    """Return a method as a function; None for properties, static methods and other members."""
    if name.startswith("_") and name != "__call__":
        return None
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None or not issubclass(owner, eqx.Module) or owner is eqx.Module:
        return None
    if isinstance(inspect.getattr_static(cls, name), (property, staticmethod, classmethod)):
        return None
    member = getattr(cls, name)
    return member if inspect.isfunction(member) else None


def _scoped(method: Any, path: str) -> Any:
    @functools.wraps(method)
    def run(self, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_MARK + path):
            return method(self, *args, **kwargs)

    return run
