"""Constant outputs, whose agreement proves nothing: any two programs that return only 0 agree.

Source: docs/parity.md "Fail closed".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.measurement import Measurement, Verdict


def is_constant(x: np.ndarray) -> bool:
    """Return whether all finite elements are equal, or no element is finite.

    An array of one element counts as constant only if the element is 0.
    """
    values = x[np.isfinite(x)]
    if not values.size:
        return True
    return bool((values == values[0]).all()) and (x.size > 1 or bool(values[0] == 0))


def without_constants(rows: Iterable[Measurement], one: Arrays, other: Arrays) -> list[Measurement]:
    """Return `rows` (measurements), where gates that pass on two constant arrays only inform.

    Constants that differ still fail.

    Args:
        rows: gates and informational measurements.
        one: compared elements of one side, by quantity.
        other: compared elements of the other side, by quantity. Measurements of quantities that
            are not in both mappings are returned unchanged.
    """
    notes = {
        name: f"nothing compared: {_value_of(one[name])} on both sides"
        for name in one.keys() & other.keys()
        if is_constant(one[name]) and is_constant(other[name])
    }
    return [
        replace(row, verdict=Verdict.INFO, tolerance=math.nan, note=notes[row.quantity])
        if row.quantity in notes and row.verdict is Verdict.PASS
        else row
        for row in rows
    ]


def _value_of(x: np.ndarray) -> str:
    values = x[np.isfinite(x)]
    # Adding 0 turns -0 into 0.
    return f"{values[0] + 0:.6g} everywhere" if values.size else "no finite number"
