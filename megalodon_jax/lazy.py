"""Names of a package that are imported on first use, so that importing the package needs no JAX.

Commands that only read stored runs start a second earlier without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def on_first_use(package: str, rooms: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` (PEP 562) of a package.

    Args:
        package: Name of the package.
        rooms: The package's names by the module that defines them.
    """
    homes = {name: module for module, names in rooms.items() for name in names}

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return attribute
