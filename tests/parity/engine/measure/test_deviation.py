"""What is said of a tensor that broke its tolerance is true of it, element by element."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from parity.engine.measure.compare import Comparison
from parity.engine.measure.deviation import (
    HIGH,
    KEPT,
    LOW,
    Deviations,
    Worst,
    bits,
    histogram,
    worst_elements,
)
from parity.engine.measure.measurement import Verdict
from parity.megalodon.cases import by_name
from parity.megalodon.edges import MegalodonEdge
from parity.tolerances import NoiseFloors

ONE = np.float32(1.0)
ULP = float(np.spacing(ONE))


def test_elements_are_counted_by_how_many_units_they_are_apart():
    expected = np.ones(7)
    apart = [0.0, 0.25, 1.0, 3.0, 2.0 ** (HIGH + 3), math.nan, math.inf]
    found = histogram(expected + ULP * np.asarray(apart), expected, "float32")
    assert sum(found) == 7
    assert (found[0], found[-1]) == (1, 2)
    assert [i for i, n in enumerate(found[1:-1]) if n] == [0, -LOW, 2 - LOW, HIGH - LOW + 1]


def test_unknown_is_never_equal():
    both = np.asarray([math.nan, math.inf, 1.0])
    assert histogram(both, both, "float32")[-1] == 2
    # All bins are there, filled or not.
    assert len(histogram(both, both, "float32")) == HIGH - LOW + 4
    assert [w.index for w in worst_elements(both, both, 9)] == [(0,), (1,)]


def test_the_worst_elements_come_first_and_equal_ones_not_at_all():
    expected = np.zeros((2, 3))
    actual = np.asarray([[0.0, -3.0, 1.0], [0.0, math.nan, 2.0]])
    found = worst_elements(actual, expected, 3)
    assert [w.index for w in found] == [(1, 1), (0, 1), (1, 2)]
    assert found[1] == Worst((0, 1), -3.0, 0.0)
    assert len(worst_elements(actual, expected, 9)) == 4


def test_indices_are_those_of_the_whole_tensor():
    """Negative control: without the positions the same element is said to be elsewhere."""
    valid = np.asarray([[False, True, True], [False, False, True]])
    whole = np.zeros((2, 3, 4))
    whole[1, 2, 3] = 5.0
    kept, zeros = whole[valid], np.zeros((3, 4))
    assert worst_elements(kept, zeros, 1, np.argwhere(valid))[0].index == (1, 2, 3)
    assert worst_elements(kept, zeros, 1)[0].index == (2, 3)


@pytest.mark.parametrize(
    ("value", "dtype", "hexadecimal"),
    [
        (1.0, "float32", "3f800000"),
        (1.0 + ULP, "float32", "3f800001"),
        (-2.0, "bfloat16", "c000"),
        (1.0, "float64", "3ff0000000000000"),
        # A value that float32 does not have keeps all its bits.
        (0.1, "float64", "3fb999999999999a"),
        (1e300, "float32", "7f800000"),
    ],
)
def test_bits_are_those_of_the_format(value, dtype, hexadecimal):
    assert bits(value, dtype) == hexadecimal


def test_only_tensors_that_fail_are_described_and_no_more_than_the_first():
    case, seen = by_name("right_padding"), Deviations()
    floors = NoiseFloors.load()
    comparison = Comparison(
        case.work, MegalodonEdge.JAX64_ORACLE, floors, "float64", only_valid=True, on_failure=seen
    )
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.cema" for i in range(KEPT + 2)]
    right = {name: rng.normal(size=(*case.valid.shape, 3)) for name in ("embed", *names)}
    wrong = {name: right[name] + (name != "embed") for name in right}
    rows = comparison.run(wrong, right)
    failed = [m.quantity for m in rows if m.metric == "rel_l2" and m.verdict is Verdict.FAIL]
    assert len(failed) == KEPT + 2
    assert [d.quantity for d in seen] == failed[:KEPT]
    first = next(iter(seen))
    assert first.shape == (int(case.valid.sum()), 3)
    assert all(case.valid[w.index[:2]] for w in first.worst)
    assert all(w.actual == wrong[first.quantity][w.index] for w in first.worst)


def test_the_tensors_of_one_edge_leave_room_for_those_of_another():
    case, seen = by_name("right_padding"), Deviations()
    right = {f"layers.{i}.cema": np.ones((*case.valid.shape, 3)) for i in range(KEPT + 2)}
    wrong = {name: 2 * x for name, x in right.items()}
    edges = MegalodonEdge.JAX64_ORACLE, MegalodonEdge.JAX32_ORACLE
    failed = []
    # Nor do those of one case take the room of another.
    works = case.work, replace(case.work, name="another")
    for edge, work in (*zip(edges, works[:1] * 2, strict=True), (edges[0], works[1])):
        comparison = Comparison(work, edge, NoiseFloors.load(), edge.dtype, on_failure=seen)
        dtype = np.dtype(edge.dtype)
        rows = comparison.run({name: x.astype(dtype) for name, x in wrong.items()}, right)
        fails = [(m.case, m.edge, m.quantity) for m in rows if m.verdict is Verdict.FAIL]
        failed += fails[:KEPT]
    assert len({(case, edge) for case, edge, _ in failed}) == 3
    assert [d.key for d in seen] == failed
