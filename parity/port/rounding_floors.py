"""Noise floors of both sides of a port, by stage and derivative, and the bounds derived from them.

A noise floor is the change of a float64 result when values are perturbed by float32's roundoff.
Source: docs/your-own-port.md "What a tolerance is made of".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.bounds import EXACT_ENOUGH, rule
from parity.engine.measure.compare import Work
from parity.engine.measure.edge import Edge
from parity.engine.measure.measurement import Kind
from parity.engine.measure.metrics import relative_l2
from parity.engine.measure.quantity import stage_kind
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF, floor
from parity.port.hidden import Hidden, Squares, hidden
from parity.port_tolerances import NARROWING, PORTS, STUDENT, PortEdge
from parity.sides.side import Rounding

# A response is the norm of the change of a whole stage. Over seeds it varies by some ten per cent,
# which does not matter next to the factors of the tolerance table, 6 and more.
SEEDS = 4
"""Number of perturbed runs that measure a noise floor."""
# The response of a single number, such as a loss, varies like a normal variable. Its error divided
# by a floor of n seeds follows Student's t distribution with n degrees of freedom. Beyond 6, the
# factor of the tolerance table, are 4 in a thousand with 4 seeds and 1 in a million with 32.
MORE_SEEDS = 32
"""Number of perturbed runs if gates fail that might pass with a floor `STUDENT` times as large."""
# In seven correct ports the largest ratio of any stage was 2.3: a variance computed as a difference
# of squares against a sum of squares, with a mean near 0. With a mean of 30 standard deviations
# the same variance has a ratio of 68.
COSTLY = 8.0
"""Warn when the port's noise floor exceeds the original's by this factor."""
Floors = dict[str, float]


def floors_of(
    exact: Arrays, moved: Callable[[int], Arrays], seeds: Sequence[int] = range(SEEDS)
) -> Floors:
    """Return the relative noise floor of each array by name: the L2 norm of its change under
    rounding (root mean square over seeds), divided by its L2 norm.

    Where the array's norm is 0, the change is not divided. `responses_of` has the same arguments
    and returns the changes undivided.
    """
    norms = norms_of(exact)
    return {n: x / (norms[n] or 1.0) for n, x in responses_of(exact, moved, seeds).items()}


def responses_of(
    exact: Arrays,
    moved: Callable[[int], Arrays],
    seeds: Sequence[int] = range(SEEDS),
    squares: Squares | None = None,
) -> Floors:
    """Return the L2 norm of each array's change under rounding, by name, as a root mean square over
    seeds.

    Args:
        exact: unperturbed float64 values.
        moved: returns the same values for a seed, perturbed by rounding with signs drawn with
            that seed.
        seeds: seeds of the perturbed runs.
        squares: its `add` is called for each seed, with `exact` and the perturbed values; None: not
            needed.
    """
    responses: dict[str, list[float]] = {name: [] for name in exact}
    for seed in seeds:
        noisy = moved(seed)
        if squares is not None:
            squares.add(exact, noisy)
        for name, value in exact.items():
            # An infinity is a mask; its change is irrelevant.
            counts = np.isfinite(value)
            responses[name].append(relative_l2(noisy[name][counts], value[counts], 1.0))
    return {name: floor(values) for name, values in responses.items()}


def pooled(first: Mapping[str, float], rest: Mapping[str, float]) -> Floors:
    """Return the responses (L2 norms of changes under rounding) of all `MORE_SEEDS` runs, as a root
    mean square, by quantity.

    A quantity keeps the response of the first runs if more runs make it more than `STUDENT` times
    as large, or not finite. For a normal variable the response of four runs is too small by that
    factor in 2 of 10,000 cases; a larger growth comes from rare jumps, such as a comparison that
    rounding decides, and would hide a wrong constant.

    Args:
        first: responses of the first `SEEDS` runs.
        rest: responses of the other runs.
    """
    more = MORE_SEEDS - SEEDS
    found = {}
    for name, x in first.items():
        mean = (SEEDS * x**2 + more * rest.get(name, math.nan) ** 2) / MORE_SEEDS
        found[name] = math.sqrt(mean) if mean <= (STUDENT * x) ** 2 else x
    return found


def norms_of(arrays: Arrays) -> Floors:
    """Return the L2 norm of the finite elements of each array, by name."""
    return {n: float(np.linalg.norm(x[np.isfinite(x)])) for n, x in arrays.items()}


@dataclass(frozen=True)
class Noise:
    """L2 norms of a side's float64 values, and of the change of these values under rounding.

    Attributes:
        norms: L2 norm of each quantity.
        responses: L2 norm of the change of each quantity (root mean square over seeds), by kind of
            perturbation, then by quantity; empty if the side cannot be perturbed.
        squares: mean square over seeds of the change of each element, by kind of perturbation, then
            by quantity, in the quantity's shape.
    """

    norms: Floors = field(default_factory=dict)
    responses: Mapping[Rounding, Floors] = field(default_factory=dict)
    squares: Mapping[Rounding, Arrays] = field(default_factory=dict)

    def floors(self, kind: Rounding) -> Floors:
        """Return the relative noise floor of each quantity: the norm of its change under rounding,
        divided by its norm unless that is 0 or unknown."""
        found = self.responses.get(kind, {})
        return {name: x / (self.norms.get(name) or 1.0) for name, x in found.items()}

    def enlarged(self, factor: float) -> Noise:
        """Return the noise with `responses` multiplied by a factor; `squares` stays unchanged."""
        responses = {
            kind: {name: factor * x for name, x in found.items()}
            for kind, found in self.responses.items()
        }
        return replace(self, responses=responses)

    def is_rounding(self, name: str) -> bool:
        """Return whether a quantity is 0 up to float64 rounding.

        For example, a bias before a softmax has derivative 0, computed as a sum whose terms cancel.
        The error of a sum is at most n eps times the sum of its absolute terms (Higham 2002, 4.2),
        however small the sum is. The response to rounding measures that error. A quantity is
        rounding if the float64 tolerance would accept its norm as such an error.
        """
        response = self.responses.get(Rounding.OPERATIONS, {}).get(name, math.nan)
        return self.norms[name] <= _factor(stage_kind(name)) * NARROWING * response


def together(*floors: Mapping[str, float]) -> Floors:
    """Combine noise floors of independent errors: the root of the sum of squares, by quantity.

    NaN where a floor is missing from any of the arguments.
    """
    names = dict.fromkeys(name for each in floors for name in each)
    return {name: math.hypot(*(each.get(name, math.nan) for each in floors)) for name in names}


def narrowed(floors: Mapping[str, float]) -> Floors:
    """Scale float32 noise floors to float64, by the ratio of the unit roundoffs."""
    return {name: value * NARROWING for name, value in floors.items()}


def costly(original: Mapping[str, float], port: Mapping[str, float]) -> str | None:
    """Return a notice of the first stage whose noise floor in the port far exceeds the original's.

    None if no floor exceeds the original's by the factor `COSTLY`. No gate reports this, since each
    side is checked against the rounding of its own operations. An example is the variance, computed
    as a difference of squares of numbers with a large mean.

    Args:
        original: relative noise floors of the original, by the port's names.
        port: relative noise floors of the port, by the same names, in order of computation.
    """
    known = [name for name in port if original.get(name, 0.0) > 0]
    first = next((name for name in known if port[name] > COSTLY * original[name]), None)
    if first is None:
        return None
    return (
        f"float32 costs the port {port[first] / original[first]:.0f} times what it costs the "
        f"original from {first} on: there its algorithm loses digits, or branches on a number that "
        "rounding changes"
    )


@dataclass(frozen=True)
class PortBounds:
    """Bounds of one port: noise floors by edge (pair of runs), times the tolerance table's factors.

    Attributes:
        floors: noise floors by edge and quantity, divided by `scales`.
        scales: norms that errors are divided by, by edge and quantity: the norm of the float64
            reference, or the norm of its terms if they cancel.
        cancelled: quantities whose terms cancel to 0 up to rounding, by edge (`Noise.is_rounding`).
        original: noise of the original, for the bounds of single elements.
        port: noise of the port, for the bounds of single elements.
    """

    floors: Mapping[Edge, Mapping[str, float]]
    scales: Mapping[Edge, Mapping[str, float]] = field(default_factory=dict)
    cancelled: Mapping[Edge, frozenset[str]] = field(default_factory=dict)
    original: Noise = field(default_factory=Noise)
    port: Noise = field(default_factory=Noise)
    exact_enough: ClassVar[float] = EXACT_ENOUGH
    unknown: ClassVar[str] = "its noise floor is NaN, since simulated rounding gives no number"

    @classmethod
    def of(cls, original: Noise, port: Noise) -> PortBounds:
        """Derive the bounds from the noise of two sides.

        On each edge the L2 norms of both sides' changes under rounding are combined (`_by_edge`),
        and the result is divided by the quantity's norm in `scales`. Floors relative to each side's
        own norm could not be combined: a derivative may be exactly 0 in float64 on one side and
        nothing but rounding on the other.
        """
        sides = {"original": original, "port": port}
        floors: dict[Edge, Floors] = {}
        scales: dict[Edge, Floors] = {}
        cancelled: dict[Edge, frozenset[str]] = {}
        for edge, responses in _by_edge(original, port).items():
            left, right = (sides[name.rstrip("0123456789")] for name in edge.sides)
            reference = right if right.norms else left
            zero = frozenset(name for name in reference.norms if reference.is_rounding(name))
            own = [s.responses.get(Rounding.OPERATIONS, {}) for s in (left, right)]
            own = own[:1] if left is right else [each for each in own if each]
            # Rounding perturbs each term by one unit roundoff, so the response over the unit
            # roundoff is the norm of the terms. Where nothing rounds there are no terms, and the
            # tolerance is 0 on any scale.
            terms = {name: x / UNIT_ROUNDOFF for name, x in together(*own).items()}
            norms = {n: terms[n] if n in zero else x for n, x in reference.norms.items()}
            scales[edge] = {n: x if x > 0 and math.isfinite(x) else 1.0 for n, x in norms.items()}
            floors[edge] = {n: x / scales[edge].get(n, 1.0) for n, x in responses.items()}
            cancelled[edge] = zero
        return cls(floors, scales, cancelled, original, port)

    def bound(self, edge: Edge, kind: Kind, work: Work, quantity: str) -> float:
        """Return the largest relative L2 error that passes; NaN if no floor was measured.

        `work` has no effect.
        """
        floor = self.floors.get(edge, {}).get(quantity, math.nan)
        if quantity in self.cancelled.get(edge, ()):
            # The absolute part of a rule is relative to the quantity itself, which is 0.
            return _factor(kind, edge) * floor
        return stage_bound(edge, kind, floor)

    def without_tables(self, kind: Kind, quantity: str) -> float:
        """Return the largest relative L2 error that would pass in float64 if float32 tables
        (constant arrays) did not widen the tolerance."""
        edge = PortEdge.PORT64_ORIGINAL64
        sides = [s.responses.get(Rounding.OPERATIONS, {}) for s in (self.original, self.port)]
        response = together(*map(narrowed, filter(None, sides))).get(quantity, math.nan)
        return stage_bound(edge, kind, response / self.scales[edge].get(quantity, 1.0))

    def absolute(self, edge: Edge, kind: Kind, metric: str) -> float:
        """Return the largest passing value of a metric that has no noise floor; NaN if the
        tolerance table has no rule for it."""
        row = rule(PORTS, edge, kind, metric)
        return math.nan if row is None else row.absolute

    def hidden(
        self, edge: Edge, kind: Kind, quantity: str, actual: np.ndarray, expected: np.ndarray
    ) -> Hidden | None:
        """Return the set of hidden elements (`Hidden`) whose error, an L2 norm over the set, is
        largest relative to the set's bound.

        An element is hidden if it is too small for an error in it to break the bound of the array.
        A set has all elements below one magnitude: first the array's bound, then the bound of the
        set before it. None if no element is hidden, no noise floor was measured, some elements are
        not finite, or the terms of the quantity cancel (`cancelled`). `actual` and `expected` are
        the quantity in the left and the right run of the edge.
        """
        squares = self._squares(edge, quantity)
        row = rule(PORTS, edge, kind)
        floor = self.floors.get(edge, {}).get(quantity, math.nan)
        if squares is None or row is None or quantity in self.cancelled.get(edge, ()):
            return None
        finite = np.isfinite(actual).all() and np.isfinite(expected).all()
        if squares.shape != np.shape(expected) or not finite:
            return None
        return hidden(
            actual,
            expected,
            stage_bound(edge, kind, floor) * self.scales[edge][quantity],
            absolute=row.absolute,
            factor=_factor(kind, edge),
            mean_squares=squares,
            float64=edge is PortEdge.PORT64_ORIGINAL64,
        )

    def _squares(self, edge: Edge, quantity: str) -> np.ndarray | None:
        """Return the squared noise floor of each element of a quantity on an edge, in the
        quantity's shape: the sum of the squares that `_by_edge` combines.

        None if no side of the edge was perturbed.
        """
        operations, tables = (
            [s.squares.get(kind, {}).get(quantity) for s in (self.original, self.port)]
            for kind in (Rounding.OPERATIONS, Rounding.CONSTANTS)
        )
        of_edges: dict[Edge, Sequence[np.ndarray | None]] = {
            PortEdge.PORT64_ORIGINAL64: (*tables, *_narrowed_squares(operations)),
            PortEdge.PORT32_PORT64: operations[1:],
            PortEdge.ORIGINAL32_ORIGINAL64: operations[:1],
            PortEdge.ORIGINAL32_PORT64: operations[1:],
            PortEdge.PORT32_ORIGINAL64: operations[:1],
            PortEdge.PORT32_ORIGINAL32: (*operations, *tables),
        }
        known = [x for x in of_edges[edge] if x is not None]
        return np.asarray(np.sum(known, axis=0)) if known else None


def _narrowed_squares(squares: Iterable[np.ndarray | None]) -> list[np.ndarray | None]:
    return [None if x is None else np.asarray(x * NARROWING**2) for x in squares]


def stage_bound(edge: Edge, kind: Kind, floor: float) -> float:
    """Return the largest relative L2 error that passes, given a quantity's relative noise floor;
    NaN if the floor is NaN or the tolerance table has no rule."""
    row = rule(PORTS, edge, kind)
    if row is None:
        return math.nan
    # Float64 against float64 has a factor too: its floor covers values that stay float32 on either
    # side.
    bound = max(row.absolute, _factor(kind, edge) * floor)
    return bound if not math.isnan(floor) else math.nan


def _factor(kind: Kind, edge: Edge = PortEdge.ORIGINAL32_PORT64) -> float:
    """Return the factor on the noise floor in the tolerance of an edge; NaN if the tolerance table
    has no rule for it.

    Rules of float64 edges have no factor; the factor of edges with one float32 side is used there.
    """
    row = rule(PORTS, edge, kind)
    if row is None or row.noise_factor:
        return math.nan if row is None else row.noise_factor
    return _factor(kind)


def _by_edge(original: Noise, port: Noise) -> dict[Edge, Floors]:
    """Return the L2 norm of the difference that rounding may cause on each edge (pair of runs), by
    quantity.

    On edges between two float32 or two float64 runs, it is the root of the sum of the squares of
    both sides' responses (L2 norms of changes), to rounding of operations in the runs' dtype, and
    to float32 rounding of tables (constant arrays). On edges between a float32 and a float64 run,
    it is the response of the side with the float64 run to float32 rounding of operations.
    """
    o, p = (side.responses.get(Rounding.OPERATIONS, {}) for side in (original, port))
    tables = [side.responses.get(Rounding.CONSTANTS, {}) for side in (original, port)]
    tables = [each for each in tables if each]
    sides = [each for each in (o, p) if each]
    return {
        PortEdge.PORT64_ORIGINAL64: together(*tables, *map(narrowed, sides)),
        PortEdge.PORT32_PORT64: p,
        PortEdge.ORIGINAL32_ORIGINAL64: o,
        PortEdge.ORIGINAL32_PORT64: p,
        PortEdge.PORT32_ORIGINAL64: o,
        PortEdge.PORT32_ORIGINAL32: together(*sides, *tables),
    }
