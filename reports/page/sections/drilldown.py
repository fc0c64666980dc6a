"""Details of a failing tensor: a histogram of its errors, and its worst elements with their bits.

Pure functions from a run to plain data. Source: docs/reports.md "The page".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.engine.measure.deviation import HIGH, LOW, Deviation, Worst, bits
from parity.engine.measure.metrics import ulp
from reports.text import count, edge_name, label, number, record_id

BARS = 20
"""Maximal number of bars, besides those of equal elements and elements that are not finite."""


@dataclass(frozen=True, slots=True)
class Bin:
    """One bar of the histogram of a tensor's errors: its label and its number of elements."""

    name: str
    count: int
    odd: bool = False
    """Whether the bar counts elements that are not finite, which have no error in ULP."""


def drilldown(tensor: Deviation) -> dict[str, Any]:
    """Return the data of one failing tensor: sentence, histogram bars and worst elements."""
    elements = sum(tensor.histogram)
    equal, odd = tensor.histogram[0], tensor.histogram[-1]
    shape = " × ".join(map(str, tensor.shape)) or "a single number"
    sides = tensor.edge.split(":")
    return {
        "id": record_id(tensor.case, tensor.edge, tensor.quantity, "rel_l2"),
        "name": label(tensor.quantity),
        "case": label(tensor.case, 48),
        "edge": edge_name(tensor.edge),
        "sides": [edge_name(side) for side in (sides if len(sides) == 2 else ("left", "right"))],
        "dtype": tensor.dtype,
        "where": label(tensor.where, 300),
        "sentence": (
            f"{shape} ({tensor.dtype}): {_breaking(tensor)}{elements - equal:,} of "
            f"{count(elements, 'element')} differ{'' if elements - equal != 1 else 's'}, "
            f"{odd:,} not finite."
        ),
        "bins": _bins(tensor),
        "worst": [_element(w, tensor.dtype) for w in tensor.worst],
    }


def _breaking(tensor: Deviation) -> str:
    """Return a clause with the smallest number of elements whose correction makes the tensor pass;
    "" if it was not computed."""
    if not tensor.breaking:
        return ""
    return f"without the error of {count(tensor.breaking, 'element')} the tolerance would hold; "


def _bins(tensor: Deviation) -> list[Bin]:
    """Return the histogram's bars: elements that are equal, errors in ULP, elements not finite.

    The errors have at most `BARS` bars: empty ones at both ends are dropped, and neighbours are
    merged. The last bar is left out if all elements are finite.
    """
    equal, *between, odd = tensor.histogram
    filled = [i for i, n in enumerate(between) if n] or [0]
    first, last = filled[0], filled[-1]
    wide = -(-(last - first + 1) // BARS)
    middle = []
    for i in range(first, last + 1, wide):
        top = min(i + wide - 1, last)
        name = f"> {_power(HIGH)}" if top + LOW > HIGH else f"≤ {_power(top + LOW)}"
        middle.append(Bin(name, sum(between[i : top + 1])))
    ends = [Bin("not finite", odd, True)] if odd else []
    return [Bin("equal", equal), *middle, *ends]


def _power(exponent: int) -> str:
    """Format 2 ** `exponent`, exponent >= -1: "½", up to 512 as a number, above as "2¹⁰"."""
    if exponent < 0:
        return "½"
    digits = "⁰¹²³⁴⁵⁶⁷⁸⁹"
    raised = "".join(digits[int(digit)] for digit in str(exponent))
    return str(2**exponent) if exponent < 10 else f"2{raised}"


def _element(w: Worst, dtype: str) -> dict[str, Any]:
    ours, theirs = bits(w.actual, dtype), bits(w.expected, dtype)
    pairs = enumerate(zip(ours, theirs, strict=True))
    same = next((i for i, (a, e) in pairs if a != e), len(ours))
    units = abs(w.actual - w.expected) / float(ulp(np.asarray(w.expected), dtype))
    return {
        "index": f"[{', '.join(map(str, w.index))}]",
        "actual": _exact(w.actual, dtype),
        "expected": _exact(w.expected, "float64"),
        "actual_bits": (ours[:same], ours[same:]),
        "expected_bits": (theirs[:same], theirs[same:]),
        "apart": number(abs(w.actual - w.expected)),
        "ulps": number(units),
    }


def _exact(value: float, dtype: str) -> str:
    """Format a number with enough digits to identify it in its dtype."""
    digits = {"float64": 17, "float32": 9, "float16": 5, "bfloat16": 4}[dtype]
    return f"{value:.{digits}g}".replace("nan", "NaN").replace("inf", "Inf")
