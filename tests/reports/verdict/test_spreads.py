"""How far rounding scatters a level: estimates of a deviation from few draws, without a bias."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest

from parity.engine.measure.measurement import Kind, Measurement
from parity.engine.measure.metrics import POOLED
from parity.tolerances import DRIFT_SHARE
from reports.verdict.levels import (
    STILL,
    levels,
    spread_by_jackknife,
    spread_over_seeds,
    spreads_of,
)
from tests.reports.nights import measurement

SEEDS = 4


def responses(gates: int = 3, draws: int = SEEDS) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(size=(gates, draws))) * 1e-7


def test_over_seeds_it_is_the_deviation_by_n_minus_1() -> None:
    """By n it would be 0.87 of that for four seeds: levels would be called drifted too soon."""
    values = responses()
    typical, worst = spread_over_seeds(values.tolist())
    assert typical == pytest.approx(np.std(np.log(values).mean(axis=0), ddof=1))
    assert worst == pytest.approx(np.std(np.log(values.max(axis=0)), ddof=1))
    by_n = np.std(np.log(values).mean(axis=0))
    assert typical / by_n == pytest.approx(math.sqrt(SEEDS / (SEEDS - 1)))


def test_over_draws_it_is_the_deviation_of_their_mean() -> None:
    """Of one gate the jackknife is exact: the deviation of a draw over the root of their number."""
    values = responses(gates=1)
    typical, worst = spread_by_jackknife(values.tolist())
    one = np.std(np.log(values[0]), ddof=1) / math.sqrt(SEEDS)
    assert typical == pytest.approx(one) and worst == pytest.approx(one)
    # Gates that move together scatter their mean as one does; and the mean of several counts.
    alike = np.repeat(values, 3, axis=0)
    assert spread_by_jackknife(alike.tolist())[0] == pytest.approx(one)
    several = responses()
    means = np.log(several).mean(axis=0).tolist()
    expected = statistics.stdev(means) / math.sqrt(SEEDS)
    assert spread_by_jackknife(several.tolist())[0] == pytest.approx(expected)


def test_two_draws_are_enough_for_a_deviation() -> None:
    two = responses(gates=1, draws=2)
    one = np.std(np.log(two[0]), ddof=1) / math.sqrt(2)
    assert spread_by_jackknife(two.tolist())[0] == pytest.approx(one)


def test_one_draw_has_no_deviation() -> None:
    assert spread_over_seeds([[1e-7]]) == spread_by_jackknife([[1e-7]]) == STILL
    # A seed that some gate does not respond to has no logarithm, unless the gate has a floor.
    assert spread_over_seeds([[1e-7, 0.0], [1e-7, 2e-7]]) == STILL
    lifted = spread_over_seeds([[1e-7, 0.0], [1e-7, 2e-7]], [1e-8, 1e-8])
    assert lifted == spread_over_seeds([[1e-7, 1e-8], [1e-7, 2e-7]]) != STILL
    # Below the floor all responses are alike, also those that are not 0.
    assert spread_over_seeds([[1e-20, 1e-12, 3e-9]], [1e-8]) == (0.0, 0.0)
    # Of what is no number nothing is known, whatever the floor.
    for bad in (math.nan, math.inf):
        assert spread_over_seeds([[1e-7, bad], [1e-7, 2e-7]], [1e-8, 1e-8]) == STILL


def test_the_order_of_gates_is_no_work() -> None:
    """Shards and workers give the rows of one night in any order."""
    rows = [measurement(quantity=name, identity=name) for name in ("a", "b", "c")]
    [level], [turned] = (levels(each, {}).values() for each in (rows, rows[::-1]))
    assert level == turned
    [other] = levels(rows[:2], {}).values()
    assert other.work != level.work


def test_a_group_has_a_spread_where_all_its_gates_are_calibrated() -> None:
    """Over seeds, or where draws were pooled by the jackknife; with three digits, as stored."""

    def gate(quantity: str, metric: str = "rel_l2", case: str = "a", **changes: Any) -> Measurement:
        changes = {"tolerance": 1e-5, **changes}
        return measurement(case=case, quantity=quantity, metric=metric, **changes)

    x, y = responses(gates=2).tolist()
    rows = [gate("x"), gate("y"), gate("x", POOLED, "b"), gate("y", POOLED, "b")]
    rows += [gate("x", case="c"), gate("z", case="c"), gate("x", case="d"), gate("x", case="e")]
    rows += [gate("y", kind=Kind.BLOCK), gate("x", case="f"), gate("x", case="f", edge="one:two")]
    calibrated = {"x": x, "y": y}
    found = spreads_of(
        rows,
        {
            ("a", "rel_l2"): calibrated,
            ("b", POOLED): calibrated,
            # Of the gates of c one has no response; d was calibrated in another metric.
            ("c", "rel_l2"): calibrated,
            ("d", POOLED): calibrated,
            # Of one edge alone.
            ("f", "rel_l2", "one:two"): calibrated,
        },
    )
    # As in a level, a response counts with at least a share of the tolerance.
    floor = DRIFT_SHARE * rows[0].tolerance
    assert min(x) < floor < max(x)
    expected = {
        "a | jax32:oracle | logits | rel_l2": spread_over_seeds([x, y], [floor, floor]),
        f"b | jax32:oracle | logits | {POOLED}": spread_by_jackknife([x, y]),
        "a | jax32:oracle | block | rel_l2": spread_over_seeds([y], [floor]),
        "f | one:two | logits | rel_l2": spread_over_seeds([x], [floor]),
    }
    assert found == {
        name: tuple(float(f"{value:.2e}") for value in spread) for name, spread in expected.items()
    }
    assert len(set(found.values())) == 4 and not set(found.values()) & set(expected.values())


def test_the_responses_of_one_edge_come_before_those_of_all() -> None:
    x, y = responses(gates=2).tolist()
    row = measurement(case="a", tolerance=1e-12)
    calibrated = {("a", "rel_l2"): {"logits": x}, ("a", "rel_l2", row.edge): {"logits": y}}
    [found] = spreads_of([row], calibrated).values()
    [alone] = spreads_of([row], {("a", "rel_l2"): {"logits": y}}).values()
    assert found == alone != STILL
    # They are all that is known of that edge: those of all edges fill no gap.
    calibrated["a", "rel_l2", row.edge] = {"loss": y}
    assert spreads_of([row], calibrated) == {}


def test_a_gate_that_does_not_respond_to_a_draw_is_left_out_of_the_jackknife() -> None:
    values = responses(gates=2).tolist()
    assert spread_by_jackknife([*values, [0.0, *values[0][1:]]]) == spread_by_jackknife(values)
    assert spread_by_jackknife([[0.0] * SEEDS]) == STILL


def test_the_spread_of_the_largest_is_that_of_the_gate_that_is_largest() -> None:
    small, large = responses(gates=2)
    several, alone = (
        spread_by_jackknife(rows.tolist())
        for rows in (np.stack([small, large * 1e6]), (large * 1e6)[None])
    )
    assert several[1] == pytest.approx(alone[1])


def test_a_level_counts_with_no_less_than_its_floor_and_comes_in_the_order_of_its_name() -> None:
    rows = [measurement(case=case, value=1e-20) for case in ("b", "a")]
    found = levels(rows, {})
    assert [case for case, *_ in found] == ["a", "b"]
    floor = float(f"{DRIFT_SHARE * rows[0].tolerance:.2e}")
    assert {(level.worst, level.floored) for level in found.values()} == {(floor, 1)}
    # One gate that was pooled is enough for the group not to have a level of single draws.
    one = [measurement(metric=POOLED), measurement()]
    assert [metric for *_, metric in levels(one, {})] == [POOLED]
    # Another error of the same gates keeps its level.
    more = [*one, measurement(metric="max_abs")]
    assert {metric for *_, metric in levels(more, {})} == {POOLED, "max_abs"}


@pytest.mark.parametrize("other", [{"kind": Kind.LOGITS}, {"case": "b"}, {"edge": "jax64:oracle"}])
def test_a_pooled_level_stands_for_the_gates_of_its_own_kind_case_and_edge(
    other: dict[str, Any],
) -> None:
    gates = [
        measurement(kind=Kind.BLOCK, metric=metric) for metric in ("rel_l2", POOLED, "max_abs")
    ]
    alone = measurement(**{"kind": Kind.BLOCK, **other})
    kept = {(m.case, m.edge, m.kind.value, m.metric) for m in (*gates[1:], alone)}
    assert levels([*gates, alone], {}).keys() == kept
