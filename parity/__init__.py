"""Parity: comparison of two programs that should compute the same thing, on the same work.

`engine` compares any two programs. `sides` wraps a torch, Flax, NNX or Equinox module, and `port`
compares two sides. The other packages are the subjects compared so far. Everything is imported on
first use, because a side needs its library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalodon_jax.lazy import on_first_use

if TYPE_CHECKING:
    from parity.port import Port, PortError, Report, compare
    from parity.sides import (
        CapturedSide,
        EquinoxSide,
        FlaxSide,
        FunctionSide,
        NNXSide,
        SideError,
        TorchSide,
        capture,
        comparison_runs,
    )

_ROOMS = {
    "parity.port": ("Port", "PortError", "Report", "compare"),
    "parity.sides": (
        "CapturedSide",
        "EquinoxSide",
        "FlaxSide",
        "FunctionSide",
        "NNXSide",
        "SideError",
        "TorchSide",
        "capture",
        "comparison_runs",
    ),
}
__all__ = [
    "CapturedSide",
    "EquinoxSide",
    "FlaxSide",
    "FunctionSide",
    "NNXSide",
    "Port",
    "PortError",
    "Report",
    "SideError",
    "TorchSide",
    "capture",
    "compare",
    "comparison_runs",
]

__getattr__, __dir__ = on_first_use(__name__, _ROOMS)
