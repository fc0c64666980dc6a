"""Domains of operations such as sqrt, and reflection of perturbed operands into them.

In sqrt(1 - x * x) with x near 1 a perturbation of x * x may make the operand negative, although the
program in float32 does not compute NaN there. So the operand is reflected at the boundary of the
domain, which keeps the size of its error. Source: docs/your-own-port.md "What a tolerance is made
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
        name: name of the operation. Operands are returned unchanged unless it is `pow` or a key of
            `DOMAINS`.
        operands: real arrays of one framework; all but the first may be Python numbers.
        where: the framework's `where(condition, x, y)`.
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
