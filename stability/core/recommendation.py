"""Recommended training precision for a device, derived from the formats of its matrix units.

Source: docs/mla-moe.md "Precision" and "The stability guide". This guide names five GPUs and allows
float16 on all others. Megalodon's moving average remembers for longer than float16's range allows,
so float16 is never recommended here. Nothing is executed on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stability.core.devices import Capability, capability_of

NEVER = (
    "never float16 for Megalodon: gradients below 6e-8 and activations above 65,504 do not exist"
)
UNKNOWN = "unknown"
"""`Advice.precision` for an unknown device."""
_GUIDE = "the stability guide's table of GPUs (docs/mla-moe.md)"
_BF16, _BF16_FP8, _FP32 = "bfloat16", "bfloat16, then float8 after initial convergence", "float32"
_WIDE = "MLA, norms, router and EMA stay wide throughout"
_MASTERS = "float32 parameters and norms"
_ADA = "compute capability 8.9"
_GUIDED = (_ADA, *(f"compute capability {at}" for at in ("8.0", "8.6", "9.0")))
"""Names of the capabilities of the GPUs in the stability guide: RTX 4090, A100, RTX 3090, H100,
H200."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommended training precision.

    Attributes:
        precision: `UNKNOWN`, or text with one or two dtypes, such as "bfloat16" or "bfloat16, then
            float8 after initial convergence".
        reason: the deciding property of the device.
        source: sources of the recommendation and of the table of formats, joined by "; "; "none"
            for an unknown device.
        capability: capability of the device; None for an unknown device.
    """

    precision: str
    reason: str
    source: str
    capability: Capability | None = None


def recommend(device: Any) -> Advice:
    """Return the recommended training precision for a device.

    Args:
        device: a name such as "NVIDIA H200", or a device of `jax.devices()`. The compute capability
            that such a device reports takes precedence over its name.
    """
    found = capability_of(device)
    if found is None:
        name = device if isinstance(device, str) else getattr(device, "device_kind", device)
        return Advice(
            UNKNOWN,
            f"{str(name)!r} is not in the vendors' tables used here, and it reports no compute "
            "capability; look up whether its matrix units support bfloat16, and train in float32 "
            "until then",
            "none",
        )
    precision, reason, guided = _decide(found)
    source = "; ".join(filter(None, (_GUIDE if guided else "", found.source)))
    return Advice(precision, reason, source, found)


def _decide(found: Capability) -> tuple[str, str, bool]:
    """Return precision, reason, and whether the stability guide covers the device."""
    name, guided = found.name, found.name in _GUIDED
    bf16 = f"bfloat16 products in hardware ({name}), {_MASTERS}"
    if name == "CPU":
        return _FP32, "a training step on a processor is no faster in bfloat16", False
    if found.blocks:
        formats = " and ".join(found.blocks)
        return _BF16_FP8, f"{formats} products in hardware ({name}); {_WIDE}", guided
    if name == _ADA:
        # The guide lists float8 for Ada, but trains an RTX 4090 in bfloat16.
        return _BF16, f"{bf16}; float8 products too, for after convergence, if at all", guided
    if found.fp8:
        return _BF16_FP8, f"float8 products in hardware ({name}); {_WIDE}", guided
    if found.fp8_fnuz:
        fnuz = "its float8 is FNUZ, whose e4m3 ends at 240: not the format this project rounds to"
        return _BF16, f"{bf16}; {fnuz}", guided
    if found.bf16:
        return _BF16, bf16, guided
    # The guide's row "Other GPUs" applies, but recommends float16.
    reason = f"no bfloat16 matrix units ({name}); float16, the guide's choice there, breaks the EMA"
    return _FP32, reason, True
