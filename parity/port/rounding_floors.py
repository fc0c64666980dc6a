"""What rounding alone does to each side of a port, stage by stage, and the bounds made of it.

Source: docs/your-own-port.md "What a tolerance is made of".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from parity.engine.bounds import EXACT_ENOUGH, bound_from, rule
from parity.engine.compare import Work
from parity.engine.edge import Edge
from parity.engine.measurement import Kind
from parity.engine.metrics import relative_l2
from parity.engine.rounding_noise import floor
from parity.port_tolerances import NARROWING, PORTS, PortEdge

SEEDS = 4
"""Runs by which a floor is measured. A response is a norm over all elements of a stage, and four of
them agree within some ten per cent; the factors of the table are 6 and more."""
COSTLY = 8.0
"""Floors of a port over its original's from which that is told. Of seven healthy pairs the largest
was 2.3 at any stage (variances as differences of squares against sums of squares, means near 0);
such a variance under a mean of 30 deviations has 68."""
Arrays = Mapping[str, np.ndarray]
Floors = dict[str, float]


def floors_of(exact: Arrays, moved: Callable[[int], Arrays], seeds: int = SEEDS) -> Floors:
    """Return the root mean square, over seeds, of how far each array is moved, relative to it."""
    responses: dict[str, list[float]] = {name: [] for name in exact}
    for seed in range(seeds):
        noisy = moved(seed)
        for name, value in exact.items():
            # An infinity masks; how far it moves is no question.
            counts = np.isfinite(value)
            responses[name].append(relative_l2(noisy[name][counts], value[counts]))
    return {name: floor(values) for name, values in responses.items()}


def together(*floors: Mapping[str, float]) -> Floors:
    """Return the floor of a difference of independent errors: the root of the sum of squares."""
    names = dict.fromkeys(name for each in floors for name in each)
    return {name: math.hypot(*(each.get(name, math.nan) for each in floors)) for name in names}


def narrowed(floors: Mapping[str, float]) -> Floors:
    """Return what float64 rounds where float32 rounds `floors`."""
    return {name: value * NARROWING for name, value in floors.items()}


def costly(original: Mapping[str, float], port: Mapping[str, float]) -> str | None:
    """Return a notice of where float32 costs the port far more than the original, if it does.

    Each side is held to what its own operations round, so an algorithm that loses digits explains
    its loss: the variance as a difference of squares, of numbers with a large mean, is one.
    """
    known = [name for name in port if original.get(name, 0.0) > 0]
    first = next((name for name in known if port[name] > COSTLY * original[name]), None)
    if first is None:
        return None
    return (
        f"float32 costs the port {port[first] / original[first]:.0f} times what it costs the "
        f"original from {first} on, by the operations it is made of: a way to compute it that "
        "loses digits, or decides by a number that one rounding turns"
    )


@dataclass(frozen=True)
class PortBounds:
    """The bounds of one port: the table's factors of the floors of each edge."""

    floors: Mapping[Edge, Mapping[str, float]]
    exact_enough: ClassVar[float] = EXACT_ENOUGH

    def bound(self, edge: Edge, kind: Kind, work: Work, quantity: str) -> float:
        """Return the largest relative L2 that passes; NaN where no floor was measured."""
        return stage_bound(edge, kind, self.floors.get(edge, {}).get(quantity, math.nan))

    def absolute(self, edge: Edge, kind: Kind, metric: str) -> float:
        """Return the largest value of a metric other than relative L2 that passes."""
        row = rule(PORTS, edge, kind, metric)
        return math.nan if row is None else row.absolute


def stage_bound(edge: Edge, kind: Kind, floor: float) -> float:
    """Return the bound of a quantity by its floor; see `PortBounds`."""
    row = rule(PORTS, edge, kind)
    if row is None or row.noise_factor:
        return bound_from(row, floor)
    # Float64 against float64: what is float32 on either side all the same has a floor too.
    wider = rule(PORTS, PortEdge.ORIGINAL32_PORT64, kind)
    factor = math.nan if wider is None else wider.noise_factor
    return max(row.absolute, factor * floor) if not math.isnan(floor) else math.nan
