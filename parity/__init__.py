"""Parity: comparison of two programs that should compute the same results from the same inputs.

`sides` wraps a torch, Flax, NNX or Equinox module as a side, and `port` compares two sides.
`tasks` compares two language models on a text, `self_agreement` one language model with itself, run
in two ways, and `deployed` a model in few bits with the trained one. `engine` has the parts that
depend on no library or model. Most other packages compare one model each. Names are imported on
first use, so that only the libraries of the sides in use are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalodon_jax.lazy import on_first_use

if TYPE_CHECKING:
    from parity.deployed import Deployment, compare_deployed
    from parity.port import Adoption, Port, PortError, Report, adopt, compare
    from parity.self_agreement import batch_agreement, stream_agreement
    from parity.sides import (
        AutocastSide,
        CapturedSide,
        EquinoxSide,
        FlaxSide,
        FunctionSide,
        NNXSide,
        OnnxSide,
        SideError,
        TorchSide,
        capture,
        comparison_runs,
    )
    from parity.tasks import LanguageModel, TaskError, greedy_agreement, text_agreement

_ROOMS = {
    "parity.deployed": ("Deployment", "compare_deployed"),
    "parity.port": ("Adoption", "Port", "PortError", "Report", "adopt", "compare"),
    "parity.self_agreement": ("batch_agreement", "stream_agreement"),
    "parity.sides": (
        "AutocastSide",
        "CapturedSide",
        "EquinoxSide",
        "FlaxSide",
        "FunctionSide",
        "NNXSide",
        "OnnxSide",
        "SideError",
        "TorchSide",
        "capture",
        "comparison_runs",
    ),
    "parity.tasks": ("LanguageModel", "TaskError", "greedy_agreement", "text_agreement"),
}
__all__ = [
    "Adoption",
    "AutocastSide",
    "CapturedSide",
    "Deployment",
    "EquinoxSide",
    "FlaxSide",
    "FunctionSide",
    "LanguageModel",
    "NNXSide",
    "OnnxSide",
    "Port",
    "PortError",
    "Report",
    "SideError",
    "TaskError",
    "TorchSide",
    "adopt",
    "batch_agreement",
    "capture",
    "compare",
    "compare_deployed",
    "comparison_runs",
    "greedy_agreement",
    "stream_agreement",
    "text_agreement",
]

__getattr__, __dir__ = on_first_use(__name__, _ROOMS)
