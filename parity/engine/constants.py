"""Constants on both sides: programs that return 0 everywhere agree whatever they compute.

Source: docs/parity.md "Fail closed".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from parity.engine.measurement import Measurement, Verdict

Arrays = Mapping[str, np.ndarray]


def is_constant(x: np.ndarray) -> bool:
    """Whether an array says nothing: no finite element, one value everywhere, or a single 0."""
    values = x[np.isfinite(x)]
    if not values.size:
        return True
    return bool((values == values[0]).all()) and (x.size > 1 or bool(values[0] == 0))


def without_constants(rows: Iterable[Measurement], one: Arrays, other: Arrays) -> list[Measurement]:
    """Return rows in which agreement between two constants is a note, and no gate.

    Constants that differ still fail.

    Args:
        rows: Gates and facts.
        one: What counts, of one side, by the rows' quantities; others are left alone.
        other: The same of the other side.
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
    # Plus 0, which takes the sign from a negative 0.
    return f"{values[0] + 0:.6g} everywhere" if values.size else "no finite number"
