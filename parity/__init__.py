"""Parity: two programs that should compute the same thing, compared on the same work.

`engine` compares any two programs, `sides` makes one of a module of torch, Flax, NNX or Equinox,
and `port` compares two of them; the rooms beside them are what was compared so far. Nothing is
imported before it is asked for: a side needs its library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.port import Port, PortError, Report, check, compare, watched
    from parity.sides import FlaxSide, JaxSide, SideError, TorchSide

_ROOMS = {
    "parity.port": ("Port", "PortError", "Report", "check", "compare", "watched"),
    "parity.sides": ("FlaxSide", "JaxSide", "SideError", "TorchSide"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "FlaxSide",
    "JaxSide",
    "Port",
    "PortError",
    "Report",
    "SideError",
    "TorchSide",
    "check",
    "compare",
    "watched",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'parity' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
