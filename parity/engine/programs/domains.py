"""Domains of operations, which a perturbed operand must not leave.

sqrt(1 - x * x) with x near 1 has an operand near 0, and a perturbation of x * x makes it negative.
A program in float32 does not compute NaN there, so the perturbed operand is reflected at the edge
of the domain: its error keeps its size. Source: docs/your-own-port.md "What a tolerance is made
of".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

DOMAINS = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10"), (0.0, math.inf)),
    "log1p": (-1.0, math.inf),
    "acosh": (1.0, math.inf),
    **dict.fromkeys(("asin", "acos", "atanh", "erf_inv", "erfinv"), (-1.0, 1.0)),
}
"""Lowest and highest operand of a real operation, by the name of a JAX primitive or a torch
operation."""


def inside(name: str, operands: Sequence[Any], where: Callable[..., Any]) -> list[Any]:
    """Return the operands of an operation, reflected into its domain.

    Args:
        name: of the operation, as in `DOMAINS`, or `pow`.
        operands: real arrays of one framework; Python numbers may stand for the second and later.
        where: that framework's `where(condition, x, y)`.
    """
    first, *rest = operands
    if name in DOMAINS:
        low, high = DOMAINS[name]
        first = where(first < low, 2 * low - first, first)
        if math.isfinite(high):
            first = where(first > high, 2 * high - first, first)
    elif name == "pow":
        # A negative base has a power only if the exponent is an integer.
        fractional = rest[0] != rest[0] // 1
        first = where((first < 0) & fractional, -first, first)
    return [first, *rest]
