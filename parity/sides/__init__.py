"""Sides: the programs that are compared, wrapped in one interface for all libraries.

A side has named parameters, inputs and stages (named intermediates). The module `side` defines the
interface. For each library, another module wraps that library's programs without changing them; it
is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megalodon_jax.extras import EXTRA_OF, install
from parity.sides.side import (
    AS_IS,
    OUTPUT,
    Precision,
    Rounding,
    Run,
    Side,
    SideError,
    Trace,
)

if TYPE_CHECKING:
    from parity.sides.autocast_side import AutocastSide
    from parity.sides.captured import CapturedSide, capture, comparison_runs
    from parity.sides.equinox_side import EquinoxSide
    from parity.sides.flax_side import FlaxSide
    from parity.sides.jax_side import FunctionSide, JaxSide
    from parity.sides.nnx_side import NNXSide
    from parity.sides.onnx_side import OnnxSide
    from parity.sides.torch_side import TorchSide

_HOMES = {
    "AutocastSide": "autocast_side",
    "CapturedSide": "captured",
    "EquinoxSide": "equinox_side",
    "FlaxSide": "flax_side",
    "FunctionSide": "jax_side",
    "JaxSide": "jax_side",
    "NNXSide": "nnx_side",
    "OnnxSide": "onnx_side",
    "TorchSide": "torch_side",
    "capture": "captured",
    "comparison_runs": "captured",
}

__all__ = [
    "AS_IS",
    "OUTPUT",
    "AutocastSide",
    "CapturedSide",
    "EquinoxSide",
    "FlaxSide",
    "FunctionSide",
    "JaxSide",
    "NNXSide",
    "OnnxSide",
    "Precision",
    "Rounding",
    "Run",
    "Side",
    "SideError",
    "TorchSide",
    "Trace",
    "capture",
    "comparison_runs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'parity.sides' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"parity.sides.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise SideError(
            f"{name} needs {error.name}, which is not installed: {install(extra)}"
        ) from error
    return getattr(module, name)
