"""Floors of two sides add up as independent errors do, and what has none passes on no edge."""

from __future__ import annotations

import math

import numpy as np
import pytest

from parity.engine.measure.bounds import rule
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.metrics import relative_l2
from parity.engine.measure.quantity import stage_kind
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.port.hidden import Squares
from parity.port.rounding_floors import (
    SEEDS,
    Noise,
    PortBounds,
    _factor,
    floors_of,
    responses_of,
    stage_bound,
    together,
)
from parity.port_tolerances import PORTS, PortEdge
from parity.sides.side import Rounding

SIZE = 10_000
CROSS = 4 / math.sqrt(SIZE)
"""How far the product of two draws of random signs is from its mean, 0: four deviations."""
VALUE = np.random.default_rng(0).standard_normal(SIZE)


def moved(units, seed):
    signs = np.random.default_rng([seed, units]).choice([-1.0, 1.0], SIZE)
    return {"stage": VALUE * (1 + units * UNIT_ROUNDOFF * signs)}


@pytest.mark.parametrize("units", [(3, 4), (4, 3), (5, 1)])
def test_the_floor_of_a_difference_is_how_far_two_independent_errors_are_apart(units):
    sides = [floors_of({"stage": VALUE}, lambda seed, u=u: moved(u, seed)) for u in units]
    ours, theirs = (moved(u, seed)["stage"] for u, seed in zip(units, (11, 12), strict=True))
    apart = relative_l2(ours, theirs)
    floor = together(*sides)["stage"]
    assert floor**2 == pytest.approx(apart**2, rel=CROSS)
    # Neither side alone explains it.
    assert all(side["stage"] < floor for side in sides)


def test_what_one_side_did_not_measure_has_no_floor_on_either():
    for sides in (({"stage": 1e-7}, {}), ({}, {"stage": 1e-7})):
        assert math.isnan(together(*sides)["stage"])


HELD = [edge for edge in PortEdge if rule(PORTS, edge, Kind.BLOCK) is not None]


@pytest.mark.parametrize("edge", HELD)
def test_a_stage_whose_rounding_was_not_measured_passes_on_no_edge(edge):
    work = Work("port", "hash", ("measured", "stage"))
    bounds = PortBounds({edge: {"measured": UNIT_ROUNDOFF}})
    comparison = Comparison(work, edge, bounds, edge.dtype, kinds=stage_kind)
    arrays = {name: VALUE.astype(edge.dtype) for name in work.order}
    gates = {m.quantity: m for m in comparison.run(arrays, arrays) if m.metric == "rel_l2"}
    # Both sides are equal: only that nobody knows what equal means there tells the two apart.
    assert gates["measured"].verdict is Verdict.PASS
    assert gates["stage"].verdict is Verdict.NOT_COMPARABLE and gates["stage"].value == 0
    assert "no tolerance" in gates["stage"].note


@pytest.mark.parametrize("cancels", [False, True])
def test_in_what_is_all_rounding_no_element_hides(cancels):
    """The terms of such a quantity are far larger than it: each element is small beside them."""
    edge, expected = PortEdge.ORIGINAL32_PORT64, np.array([1.0, UNIT_ROUNDOFF**2])
    squares = {Rounding.OPERATIONS: {"stage": np.square(expected * UNIT_ROUNDOFF)}}
    bounds = PortBounds(
        {edge: {"stage": UNIT_ROUNDOFF}},
        {edge: {"stage": 1.0}},
        {edge: frozenset({"stage"} if cancels else ())},
        port=Noise(squares=squares),
    )
    found = bounds.hidden(edge, Kind.BLOCK, "stage", expected + UNIT_ROUNDOFF, expected)
    assert (found is None) == cancels


def test_a_kind_without_a_rule_has_no_factor():
    assert math.isnan(_factor(Kind.TOKENS)) and _factor(Kind.BLOCK) > 1.0


def test_a_bound_is_its_absolute_part_until_the_floor_needs_more():
    wide = PortEdge.PORT64_ORIGINAL64
    row = rule(PORTS, wide, Kind.BLOCK)
    assert row is not None
    floor = row.absolute / _factor(Kind.BLOCK)
    for share in (0.25, 0.5, 1.0):
        assert stage_bound(wide, Kind.BLOCK, share * floor) == pytest.approx(row.absolute)
    assert stage_bound(wide, Kind.BLOCK, 2.0 * floor) == pytest.approx(2.0 * row.absolute)


@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan])
def test_an_error_is_absolute_where_a_norm_is_no_scale(norm):
    side = Noise({"x": norm}, {Rounding.OPERATIONS: {"x": 0.0}})
    bounds = PortBounds.of(side, side)
    assert {scales["x"] for scales in bounds.scales.values()} == {1.0}


def test_nothing_is_all_rounding_whose_rounding_was_not_measured():
    assert not Noise({"x": 0.0}).is_rounding("x")
    assert Noise({"x": 0.0}, {Rounding.OPERATIONS: {"x": 0.0}}).is_rounding("x")


def test_the_mean_square_of_each_element_is_of_all_runs():
    squares, exact = Squares(), {"stage": np.zeros(2)}
    responses_of(exact, lambda seed: {"stage": np.array([float(seed), 1.0])}, squares=squares)
    assert squares.seeds == SEEDS
    expected = [sum(seed**2 for seed in range(SEEDS)) / SEEDS, 1.0]
    assert squares.mean()["stage"].tolist() == expected
