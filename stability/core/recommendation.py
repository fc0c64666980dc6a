"""In which precision to train on a device, and why.

Source: docs/mla-moe.md "The stability guide", but for its float16: Megalodon's moving average
remembers for longer than float16 reaches, and the guide's own advice elsewhere is bfloat16. Decided
by name; nothing is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NEVER = (
    "never float16 for Megalodon: gradients below 6e-8 and activations above 65,504 do not exist"
)


@dataclass(frozen=True, slots=True)
class Advice:
    """A precision to train in, and why."""

    precision: str
    reason: str


_HOPPER = Advice(
    "bfloat16, then float8 after initial convergence",
    "float8 products in hardware; MLA, norms, router and EMA stay wide throughout",
)
_AMPERE = Advice("bfloat16", "bfloat16 products in hardware, float32 parameters and norms")
_OTHER = Advice("float32", "this device is not known to multiply bfloat16 as fast as float32")
_RULES = (
    (r"\b(G?H100|G?H200)\b", _HOPPER),
    (r"\bA100\b", _AMPERE),
    (r"\b(RTX )?(30[5-9]0|40[5-9]0)\b", _AMPERE),
)


def recommend(device: str) -> Advice:
    """Return what to train in on a device by its name, such as "NVIDIA H200"."""
    return next((a for pattern, a in _RULES if re.search(pattern, device, re.IGNORECASE)), _OTHER)
