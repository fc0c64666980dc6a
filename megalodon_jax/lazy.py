"""Names of a package that are imported on first use, so that importing the package needs no JAX.

Without JAX, commands that only read stored runs start a second earlier.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def on_first_use(
    package: str, rooms: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` (PEP 562), which import names on first use.

    Args:
        package: Name of the package.
        rooms: For each module, the names that the package exports from it.
    """
    homes = {name: module for module, names in rooms.items() for name in names}

    def attribute(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        # A module of the package, such as `megalodon_jax.model`, is an attribute too.
        try:
            if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
        except ValueError:
            pass
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute, lambda: sorted(homes)
