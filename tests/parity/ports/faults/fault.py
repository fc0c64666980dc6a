"""What a bug planted in a Flax model of Transformers is, and what its patches are made of.

Nothing of a model's source is changed: methods of its modules are intercepted, functions of its
module replaced, its configuration or its parameters changed, and only while the port is compared.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import flax.linen as nn

Parameters = dict[str, Any]
"""Arrays by path, such as `lm_head.kernel`."""


class Family(StrEnum):
    """Where in a port a bug is made."""

    NORMS = "norms"
    ACTIVATIONS = "activations"
    ATTENTION = "attention"
    MASKS = "masks"
    POSITIONS = "positions"
    WIRING = "wiring"
    PARAMETERS = "parameters"
    PRECISION = "precision"
    GRADIENTS = "gradients"


@dataclass(frozen=True)
class Plant:
    """A patch, and the function of ours that does what is wrong."""

    context: Callable[[Any], contextlib.AbstractContextManager[Any]]
    """Of the Flax model; the bug is there inside of it."""
    code: Callable[..., Any] | None = None
    """None where nothing of ours is on the way: a number that is another one."""

    def lines(self) -> range:
        """Return the lines of the wrong function in its file."""
        if self.code is None:
            return range(0)
        source, start = inspect.getsourcelines(self.code)
        return range(start, start + len(source))

    def file(self) -> str:
        """Return the end of the path of the file that has the wrong function."""
        name = self.code.__code__.co_filename if self.code is not None else ""
        return "/".join(name.split("/")[-2:])


@dataclass(frozen=True)
class PortFault:
    """A bug: how people make it, where it is, and what should be said of it."""

    family: Family
    name: str
    subject: str
    """The Flax model."""
    how: str
    stage: str
    """The first stage that is wrong on its own, or the parameter that is another one."""
    plant: Plant | None = None
    line: str | None = ""
    """A part of the model's own line that is first wrong; empty where that is a line of the plant,
    None where no line is."""
    params: Callable[[Parameters], None] | None = None
    """Edits the converted parameters."""
    gradients: bool = False
    """Whether only derivatives show it."""

    @contextlib.contextmanager
    def planted(self, model: Any) -> Iterator[None]:
        """Context in which a Flax model has this bug, but for its parameters."""
        with contextlib.nullcontext() if self.plant is None else self.plant.context(model):
            yield


def at(path: str, change: Callable[..., Any]) -> Plant:
    """Replace calls of modules: `change(call, module, *its arguments)` returns the result.

    Args:
        path: regular expression of the whole path.
        change: called in place of the module.
    """
    pattern = re.compile(path)

    def faulty(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        here = ".".join(context.module.path)
        if context.method_name != "__call__" or not pattern.fullmatch(here):
            return call(*args, **kwargs)
        return change(call, context.module, *args, **kwargs)

    return Plant(lambda model: nn.intercept_methods(faulty), change)


def field(path: str, **values: Any) -> Plant:
    """Call modules with other values of their fields."""

    def change(call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in values.items():
            # Frozen, as a module is once it is bound.
            object.__setattr__(module, name, value)
        return call(*args, **kwargs)

    return Plant(at(path, change).context)


def instead(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Replace a function of a module or class: `change(healthy, *its arguments)`."""

    @contextlib.contextmanager
    def context(model: Any) -> Iterator[None]:
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        healthy = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            return change(healthy, *args, **kwargs)

        with patch.object(owner, name, staticmethod(faulty) if static else faulty):
            yield

    return Plant(context, change)


def entry(table: dict[str, Any], key: str, value: Any) -> Plant:
    """Replace an entry of a table, such as that of activations."""
    return Plant(lambda model: patch.dict(table, {key: value}))


def configured(**values: Any) -> Plant:
    """Let the port alone have another configuration."""

    @contextlib.contextmanager
    def context(model: Any) -> Iterator[None]:
        healthy = {name: getattr(model.config, name) for name in values}
        for name, value in values.items():
            setattr(model.config, name, value)
        try:
            yield
        finally:
            for name, value in healthy.items():
                setattr(model.config, name, value)

    return Plant(context)
