"""Integer and bool outputs of two sides: paired by name and shape, compared exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Measurement

METRIC = "unequal"
"""Metric: number of differing elements. The gate passes only if it is 0."""


def exact_partners(original: Arrays, port: Arrays) -> dict[str, str]:
    """Return the name of the port's integer or bool output that corresponds to each one of the
    original, by name of the original's output.

    The partner is the port's output of the same name, else the port's first output of the same
    shape that is not yet a partner. Outputs without a partner are left out.

    Args:
        original: integer and bool arrays by name.
        port: likewise.
    """
    partners = {name: name for name in original if name in port}
    rest = [name for name in port if name not in partners]
    for name, x in original.items():
        if name in partners:
            continue
        other = next((n for n in rest if port[n].shape == x.shape), None)
        if other is not None:
            partners[name] = other
            rest.remove(other)
    return partners


def compare_exactly(
    comparison: Comparison, original: Arrays, port: Arrays, partners: Mapping[str, str]
) -> list[Measurement]:
    """Return one gate for each integer or bool output of either side.

    Args:
        comparison: settings of the edge; creates the measurements.
        original: integer and bool arrays by name.
        port: likewise.
        partners: the port's names by the original's (`exact_partners`).
    """
    rows = []
    for name, expected in original.items():
        if name not in partners:
            note = "the original returns whole numbers or bools here, and the port does not"
            rows.append(comparison.missing(name, note, METRIC))
            continue
        mine = partners[name]
        why = _mismatch(port[mine], expected)
        if why:
            rows.append(comparison.missing(mine, why, METRIC))
        elif not expected.size:
            rows.append(comparison.unmeasured(mine, "nothing to compare: no elements", METRIC))
        else:
            differ = int(np.sum(port[mine] != expected))
            row = comparison.judged(mine, METRIC, float(differ))
            note = f"{differ} of {expected.size} whole numbers or bools differ" if differ else ""
            rows.append(replace(row, note=note))
    for mine in (name for name in port if name not in partners.values()):
        note = "the port returns whole numbers or bools here, and the original does not"
        rows.append(comparison.missing(mine, note, METRIC))
    return rows


def _mismatch(actual: np.ndarray, expected: np.ndarray) -> str:
    """Return why two integer or bool arrays cannot be compared; empty if they can."""
    if actual.shape != expected.shape:
        return f"expected shape {expected.shape}, received {actual.shape}"
    if (actual.dtype == bool) != (expected.dtype == bool):
        return f"expected {expected.dtype}, received {actual.dtype}"
    return ""
