"""Parameters in another order, and sums of two: of recurrent cells, heads and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from parity.engine.pairing.converter import converter_source
from parity.engine.pairing.matching import Matching, Means, match_parameters
from parity.engine.pairing.value_search import (
    MOST_BLOCKS,
    MOST_PERMUTED,
    rearranged,
    sum_of,
)

RNG = np.random.default_rng(0)
HIDDEN, WIDTH = 5, 8
GATES = RNG.normal(size=(3 * HIDDEN, WIDTH)).astype(np.float32)
BIASES = [RNG.normal(size=3 * HIDDEN).astype(np.float32) for _ in range(2)]
ROWS = RNG.normal(size=(24, 4)).astype(np.float32)
KERNEL = RNG.normal(size=(12, 3, 2)).astype(np.float32)


def gates(x: np.ndarray, order: tuple[int, ...] = (1, 0, 2)) -> np.ndarray:
    return np.concatenate([np.split(x, 3)[i] for i in order])


def halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, first half and second half interleaved."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


ORDERS: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]] = {
    "gates": (GATES, gates),
    "gates of a bias": (BIASES[0], gates),
    "gates, transposed": (GATES, lambda x: gates(x).T),
    "gates in a circle": (GATES, lambda x: gates(x, (2, 0, 1))),
    "columns": (GATES, lambda x: np.roll(x, 3, axis=1)),
    "halves of heads": (ROWS, lambda x: halves(x, 3)),
    "halves of heads, transposed": (ROWS, lambda x: halves(x, 2).T),
    "halves of one head": (ROWS, lambda x: halves(x, 1)),
    "one head in halves": (ROWS, lambda x: np.concatenate([x[::2], x[1::2]])),
    "filters of a convolution": (KERNEL, lambda x: np.roll(x, 4, axis=0).transpose(2, 1, 0)),
    "interleaved filters": (KERNEL, lambda x: halves(x, 3).transpose(1, 0, 2)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_found_and_maps_values_there_and_back(name: str) -> None:
    source, change = ORDERS[name]
    found = rearranged("w", source, change(source))
    assert found is not None and found.is_complete and not found.adds
    np.testing.assert_array_equal(found.from_original({"w": source}), change(source))
    # It maps other values, such as those of a gradient, alike.
    other = RNG.normal(size=source.shape)
    np.testing.assert_array_equal(found.from_original({"w": other}), change(other))
    np.testing.assert_array_equal(found.adjoint(change(other))["w"], other)


def test_an_order_of_up_to_four_axes_is_found() -> None:
    for axes in (4, 5):
        x = RNG.normal(size=(6, 4, 3, 2, 2)[:axes])
        found = rearranged("w", x, np.roll(x, 2, axis=0))
        assert (found is not None) == (axes <= MOST_PERMUTED)


@pytest.mark.parametrize("blocks", [MOST_BLOCKS, MOST_BLOCKS + 1])
def test_a_few_blocks_are_an_order(blocks: int) -> None:
    x = RNG.normal(size=(2 * blocks, 3))
    found = rearranged("w", x, x.reshape(blocks, 2, 3)[::-1].reshape(x.shape))
    assert (found is not None) == (blocks <= MOST_BLOCKS)


def test_what_is_no_order_of_rows_is_not_taken_for_one() -> None:
    same = np.concatenate([GATES[:5], GATES[:5], GATES[5:10]])
    wrong = gates(GATES)
    wrong[3, 2] += 1e-6
    shuffled = GATES[np.random.default_rng(1).permutation(len(GATES))]
    assert len(GATES) > MOST_BLOCKS
    for target in (GATES, wrong, shuffled, gates(GATES).reshape(5, 24), gates(GATES)[:5]):
        assert rearranged("w", GATES, target) is None
    assert rearranged("w", same, gates(same)) is None, "equal rows could be any of them"
    # A gate that is there twice has replaced another one.
    twice = gates(GATES, (1, 1, 2))
    assert rearranged("w", GATES, twice) is None
    # Six single rows are few enough to be blocks, but too short.
    assert rearranged("w", GATES[:6], GATES[[1, 0, 3, 2, 5, 4]]) is None
    assert rearranged("w", GATES[:6], GATES[[2, 3, 0, 1, 4, 5]]) is not None


def test_a_sum_is_found_whole_in_blocks_and_in_another_order() -> None:
    a, b = BIASES
    total = a + b
    for target in (total, total[5:10], gates(total)):
        found = sum_of(("a", "b"), BIASES, target)
        assert found is not None and found.adds and found.is_complete
        np.testing.assert_array_equal(found.from_original({"a": a, "b": b}), target)
        # The derivative of the sum is that of each term.
        slope = found.adjoint(target)
        np.testing.assert_array_equal(slope["a"], slope["b"])
    # A block lies at a multiple of its length: three gates are cut at two places.
    for target in (a, a - b, total + 1e-6, total[:4], total[3:8], np.zeros(15, np.float32)):
        assert sum_of(("a", "b"), BIASES, target) is None


def test_a_constant_is_no_sum() -> None:
    """That two vectors add up to it says nothing about what it is made of."""
    a = np.arange(15.0)
    assert sum_of(("a", "b"), (a, 7.0 - a), np.full(15, 7.0)) is None
    assert sum_of(("a", "b"), (a, 7.0 - a / 2), 7.0 + a / 2) is not None


def test_a_sum_is_added_first_and_rounded_once() -> None:
    wide = [RNG.normal(size=15) for _ in range(2)]
    once = (wide[0] + wide[1]).astype(np.float32)
    twice = wide[0].astype(np.float32) + wide[1].astype(np.float32)
    assert not np.array_equal(once, twice)
    assert sum_of(("a", "b"), wide, once) is not None
    assert sum_of(("a", "b"), wide, twice) is None


def test_a_sum_in_part_is_found_in_its_blocks() -> None:
    a, b = BIASES
    total = a + b
    for target, text in (
        (
            np.concatenate([total[:10], a[10:]]),
            "a[0:10], at [0:10], added to b[0:10], at [0:10] + a[10:15], at [10:15]",
        ),
        (
            np.concatenate([b[5:10], total[:5], total[10:]]),
            "b[5:10], at [0:5] + a[0:5], at [5:10], added to b[0:5], at [5:10] + "
            "a[10:15], at [10:15], added to b[10:15], at [10:15]",
        ),
        # The end of the sum and the begin of a term are two blocks, though they adjoin.
        (
            np.concatenate([total[5:], a[:5]]),
            "a[5:15], at [0:10], added to b[5:15], at [0:10] + a[0:5], at [10:15]",
        ),
    ):
        found = sum_of(("a", "b"), BIASES, target)
        assert found is not None and found.adds and found.is_complete
        np.testing.assert_array_equal(found.from_original({"a": a, "b": b}), target)
        assert found.text() == text
    # Where a term is 0 the sum is the other term: a block there could be either.
    silent = b.copy()
    silent[10:] = 0.0
    target = np.concatenate([a[:5], (a + silent)[5:]])
    assert sum_of(("a", "b"), (a, silent), target) is None
    # No block of a sum, one element too few of a block, and a value of neither.
    for target in (
        np.concatenate([a[5:], b[:5]]),
        np.concatenate([total[:10], a[9:14]]) + np.float32(1e-6),
        np.concatenate([total[:14], np.float32([3.0])]),
    ):
        assert sum_of(("a", "b"), BIASES, target) is None


def test_the_rest_of_a_vector_that_is_in_a_sum_in_part_has_a_partner() -> None:
    """torch's GRU: the last gate's two biases stay apart."""
    a, b = BIASES
    original = {"cell.bias_ih": a, "cell.bias_hh": b, "cell.weight": GATES}
    port = {"b": np.append(a[:10] + b[:10], a[10:]), "last": b[10:], "w": GATES}
    matching = match_parameters(original, port)
    assert matching.by_port["last"].originals == ("cell.bias_hh",)
    assert not matching.unmatched_port and not matching.unmatched_original
    # Both terms are held whole, so the sum is as good as one of whole vectors.
    assert matching.by_port["b"].means is Means.ROUNDED
    # Without the last one, or with its blocks elsewhere, whether it is right is for the
    # computation to show.
    alone = match_parameters(original, {n: port[n] for n in ("b", "w")})
    assert alone.by_port["b"].means is Means.REORDERED
    moved = match_parameters(original, port | {"b": np.append(a[10:], a[:10] + b[:10])})
    assert moved.by_port["b"].means is Means.REORDERED


def cell(order: tuple[int, ...] = (0, 1, 2)) -> Matching:
    """A cell whose port has one bias, and its gates in this order."""
    original = {
        "cell.weight_ih": GATES,
        "cell.bias_ih": BIASES[0],
        "cell.bias_hh": BIASES[1],
        "head.bias": RNG.normal(size=15).astype(np.float32),
    }
    port = {"w": gates(GATES, order), "b": gates(BIASES[0] + BIASES[1], order)}
    return match_parameters(original, port)


def test_a_matrix_without_a_partner_is_no_sum_of_vectors() -> None:
    """Though the two biases of a cell could be the terms of one."""
    original = {"cell.bias_ih": BIASES[0], "cell.bias_hh": BIASES[1]}
    found = match_parameters(original, {"b": BIASES[0] + BIASES[1], "w": ROWS})
    assert [each.name for each in found.unmatched_port] == ["w"]
    assert found.by_port["b"].originals == tuple(original)


def test_a_matching_says_which_order_and_which_sum() -> None:
    found = cell().by_port
    assert found["w"].means is Means.VALUE
    assert (found["b"].means, found["b"].originals) == (
        Means.ROUNDED, ("cell.bias_ih", "cell.bias_hh"))  # fmt: skip
    assert found["b"].note == "the sum of cell.bias_ih and cell.bias_hh, rounded once"
    assert found["b"].construction.text() == "cell.bias_ih, added to cell.bias_hh"
    other = cell((1, 0, 2))
    assert other.by_port["w"].means is Means.REORDERED
    assert other.by_port["b"].means is Means.REORDERED, "a sum in another order is no equal one"
    assert not other.is_complete, "that the order is right is for the computation to show"
    assert Matching.from_json(other.to_json()) == other


def test_a_converter_adds_and_reorders() -> None:
    for order in ((0, 1, 2), (2, 0, 1)):
        matching = cell(order)
        space: dict = {}
        exec(converter_source(matching), space)
        original = {"cell.weight_ih": GATES, "cell.bias_ih": BIASES[0], "cell.bias_hh": BIASES[1]}
        port = space["convert"](original)
        np.testing.assert_array_equal(port["w"], gates(GATES, order))
        np.testing.assert_array_equal(port["b"], gates(BIASES[0] + BIASES[1], order))


ZEROS = np.zeros(3 * HIDDEN, np.float32)


def orders_with(original: dict[str, np.ndarray], port: dict[str, np.ndarray]) -> dict[str, str]:
    """Return the constructions of a port whose cell has its gates in another order."""
    cells = {"cell.weight": GATES, "cell.bias": ZEROS}
    ported = {"cell.kernel": gates(GATES), "cell.bias": ZEROS}
    found = match_parameters(cells | original, ported | port)
    assert found.by_port["cell.kernel"].means is Means.REORDERED
    return {pair.port: pair.construction.text() for pair in found.pairs}


def test_a_constant_bias_follows_the_matrix_of_its_length_alone() -> None:
    alone = orders_with({}, {})["cell.bias"]
    assert alone != "cell.bias"
    beside = orders_with({"cell.out": ROWS}, {"cell.out": halves(ROWS, 3)})
    assert beside["cell.out"] != "cell.out" and beside["cell.bias"] == alone


def test_a_bias_of_two_parts_does_not_follow_the_matrix_of_their_module() -> None:
    """Neither part has as many elements as the matrix has rows."""
    parts = {"cell.first": BIASES[0][:HIDDEN], "cell.second": BIASES[0][HIDDEN:]}
    found = orders_with(parts, {"cell.bias": BIASES[0]})
    assert all(name in found["cell.bias"] for name in parts)


def test_a_constant_bias_that_follows_a_matrix_is_said_to_be_both() -> None:
    port = {"cell.kernel": gates(GATES), "cell.bias": ZEROS}
    found = match_parameters({"cell.weight": GATES, "cell.bias": ZEROS}, port)
    assert found.by_port["cell.bias"].note == "constant; in the order of cell.kernel"


def test_a_constant_bias_follows_no_matrix_of_another_module_of_the_original() -> None:
    """The port keeps it beside its own matrix and beside one that is elsewhere in the original."""
    alone = orders_with({}, {})["cell.bias"]
    other = RNG.normal(size=GATES.shape).astype(np.float32)
    moved = gates(other, (2, 0, 1))
    beside = orders_with({"head.weight": other}, {"cell.other": moved})
    assert beside["cell.other"] != "head.weight" and beside["cell.bias"] == alone


@pytest.mark.parametrize("same", [True, False])
def test_a_bias_of_which_some_gates_are_equal_has_the_order_of_its_matrix(same: bool) -> None:
    """As that of an LSTM: 1 for the gate that forgets, 0 for the others."""

    def moved(x: np.ndarray, *order: int) -> np.ndarray:
        return np.concatenate([np.split(x, 4)[i] for i in order])

    weight = RNG.normal(size=(4 * HIDDEN, WIDTH)).astype(np.float32)
    bias = np.repeat(np.float32([0, 1, 0, 0]), HIDDEN)
    held = moved(bias, 0, 2, 1, 3) if same else moved(bias, 1, 0, 2, 3)
    assert rearranged("b", bias, held) is None
    port = {"c.w": moved(weight, 0, 2, 1, 3), "c.b": held}
    pair = match_parameters({"c.w": weight, "c.b": bias}, port).by_port["c.b"]
    if not same:
        assert pair.means is Means.SLICE and pair.construction.text() == "c.b"
        return
    assert (pair.means, pair.note) == (Means.REORDERED, "in the order of c.w")
    places = np.arange(len(bias))
    found = pair.construction.from_original({"c.b": places})
    np.testing.assert_array_equal(found, moved(places, 0, 2, 1, 3))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)])
def test_a_bias_that_is_a_constant_in_each_gate_has_the_order_of_its_matrix(
    order: tuple[int, ...],
) -> None:
    """Most of its elements differ from those in its place, so it resembles nothing."""
    bias = np.repeat(np.float32([0, 1, 2]), HIDDEN)
    original = {"c.w": GATES, "c.b": bias, "d.w": GATES[::-1] + 1}
    port = {"x.w": gates(GATES, order), "x.b": gates(bias, order), "y.w": GATES[::-1] + 1}
    pair = match_parameters(original, port).by_port["x.b"]
    assert (pair.originals, pair.means) == (("c.b",), Means.REORDERED)
    assert pair.note == "in the order of x.w"
    # Of two equal ones each has its own, though both names are nearest to one.
    equal = {f"x.bias{n}": gates(bias, order) for n in ("", "2")}
    twice = match_parameters(original | {"c.second": bias}, {"x.w": port["x.w"], **equal}).by_port
    assert twice["x.bias"].originals == ("c.b",)
    assert twice["x.bias2"].originals == ("c.second",)
    # A matrix of as many elements is no vector.
    wide = match_parameters(original | {"c.b": bias.reshape(3, HIDDEN)}, port)
    assert "x.b" in [each.name for each in wide.unmatched_port]
    wrong = match_parameters(original, port | {"x.b": gates(bias, (0, 2, 1))})
    assert "x.b" in [each.name for each in wrong.unmatched_port]
