"""Layouts are found where there are some, the simplest first, and not seen where there are none."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from parity.engine.pairing import layouts
from parity.engine.pairing.conventions import Conventions
from parity.engine.pairing.fingerprints import sample_positions
from parity.engine.pairing.layouts import (
    MOST_AXES,
    Layout,
    Near,
    _merges,
    candidates,
    find_layout,
    find_layouts,
    identity,
    transposition,
)

D, H, d, B, L = 16, 4, 8, 2, 6
WEIGHT = (H * d, D)
HEADS = (B * H, L, d)

CASES = {
    "unchanged": (WEIGHT, lambda x: x),
    "transposed (1, 0)": (WEIGHT, lambda x: x.T),
    "reshaped (32, 16) -> (4, 8, 16)": (WEIGHT, lambda x: x.reshape(H, d, D)),
    "reshaped (32, 16) -> (4, 8, 16), transposed (2, 0, 1)": (
        WEIGHT,
        lambda x: x.reshape(H, d, D).transpose(2, 0, 1),
    ),
    "transposed (1, 2, 0), reshaped (4, 8, 16) -> (32, 16)": (
        (D, H, d),
        lambda x: x.transpose(1, 2, 0).reshape(H * d, D),
    ),
    "reshaped (8, 6, 8) -> (2, 4, 6, 8), transposed (0, 2, 1, 3)": (
        HEADS,
        lambda x: x.reshape(B, H, L, d).transpose(0, 2, 1, 3),
    ),
    "reshaped (8, 6, 8) -> (2, 4, 6, 8), transposed (0, 2, 1, 3), reshaped (2, 6, 4, 8) -> "
    "(2, 6, 32)": (HEADS, lambda x: x.reshape(B, H, L, d).transpose(0, 2, 1, 3).reshape(B, L, -1)),
    "reshaped (32, 16) -> (1, 32, 16)": (WEIGHT, lambda x: x[None]),
    "transposed (2, 1, 0)": ((5, 3, 2), lambda x: x.transpose(2, 1, 0)),
}


def generic(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def one_minus_cosine(x, y):
    return 1 - float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


@pytest.mark.parametrize("text", CASES)
def test_a_layout_is_found_named_and_inverted(text):
    shape, move = CASES[text]
    source = generic(shape)
    target = np.ascontiguousarray(move(source))
    layout = find_layout(source, target)
    assert layout is not None
    assert layout.text() == text
    assert np.array_equal(layout(source), target)
    assert np.array_equal(layout.inverse(target), source)
    assert layout.reversed.reversed(source).shape == target.shape
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize("text", CASES)
def test_one_element_off_is_no_layout(text):
    shape, move = CASES[text]
    source = generic(shape)
    target = move(source).copy()
    target.flat[target.size // 2] = np.nextafter(target.flat[target.size // 2], np.float32(9))
    assert find_layout(source, target) is None


def test_two_heads_exchanged_is_no_layout():
    source = generic(WEIGHT)
    target = source.reshape(H, d, D)[[1, 0, 2, 3]].reshape(WEIGHT)
    assert find_layout(source, target) is None


def test_the_simplest_layout_of_a_constant_is_as_it_is():
    layouts = list(find_layouts(np.ones((4, 4)), np.ones((4, 4))))
    assert layouts[0].is_identity
    assert transposition((4, 4), (1, 0)) in layouts


def test_square_matrices_tell_as_it_is_from_transposed():
    source = generic((16, 16))
    assert find_layout(source, source) == identity((16, 16))
    assert find_layout(source, source.T) == transposition((16, 16), (1, 0))


def test_values_count_and_not_the_dtype_that_holds_them():
    narrow = generic(WEIGHT).astype(ml_dtypes.bfloat16)
    wide = narrow.astype(np.float32).T
    assert find_layout(narrow, wide) == transposition(WEIGHT, (1, 0))
    assert find_layout(generic(WEIGHT), wide) is None, "rounding is a difference"


def test_nearly_equal_values_are_found_within_the_tolerance_only():
    source = generic(HEADS)
    target = CASES["reshaped (8, 6, 8) -> (2, 4, 6, 8), transposed (0, 2, 1, 3)"][1](source)
    relative = 2.0**-10
    off = target * np.float32(1 + relative)
    assert find_layout(source, off) is None
    assert find_layout(source, off, Near(relative / 2)) is None
    layout = find_layout(source, off, Near(2 * relative))
    assert layout is not None
    assert np.array_equal(layout(source), target)


def test_the_order_in_which_a_sum_is_rounded_is_no_difference():
    x = np.random.default_rng(0).normal(size=(300, 200))
    y = np.ascontiguousarray(x.T)
    assert x.sum() != y.sum()
    assert find_layout(x, y, Near(0.0)) == transposition(x.shape, (1, 0))


@pytest.mark.parametrize("axes", [MOST_AXES, MOST_AXES + 1])
def test_arrays_of_a_few_axes_are_permuted(axes: int):
    """By their values, and by a convention that their shapes decide."""
    x = np.arange(math.factorial(axes + 1)).reshape(range(2, axes + 2))
    turned = transposition(x.shape, tuple(range(axes))[::-1])
    few = axes <= MOST_AXES
    assert find_layout(x, x.T) == (turned if few else None)
    proposed = Conventions({}, {}, {}).layout("a.w", "b.w", x.shape, x.T.shape)
    assert (proposed == turned) == few


def test_another_distance_may_decide():
    source = generic(WEIGHT)
    target = 3 * source.T
    assert find_layout(source, target, Near(2.0**-8)) is None
    assert find_layout(source, target, Near(2.0**-8, one_minus_cosine)) is not None


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (3, 3), (1, 1, 9), (2, 1, 5), (9,)])
def test_large_arrays_are_compared_in_blocks_of_whatever_shape(shape, monkeypatch):
    monkeypatch.setattr(layouts, "BLOCK", 4)
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    assert layouts.same_values(x, x.astype(np.float64))
    for index in np.ndindex(shape):
        other = x.copy()
        other[index] += 1
        assert not layouts.same_values(x, other)


def test_minus_zero_is_zero():
    plain = np.arange(6.0).reshape(2, 3)
    signed = np.where(plain == 0, -0.0, plain).T
    layout = find_layout(plain, signed)
    assert layout is not None and layout.axes == (1, 0)


def test_nan_agrees_with_nan_exactly_and_never_nearly():
    source = generic(WEIGHT)
    source[3, 4] = np.nan
    assert find_layout(source, source.T) == transposition(WEIGHT, (1, 0))
    assert find_layout(source, source.T, Near(1.0)) is None


def test_scalars_and_axes_of_one():
    scalar = np.full((), 3, np.float32)
    layout = find_layout(scalar, scalar.reshape(1, 1))
    assert layout is not None
    assert layout.target == (1, 1)


def test_nothing_takes_a_shape_to_one_of_another_size():
    assert candidates((4, 4), (4, 5)) == ()
    assert find_layout(np.zeros((0, 3)), np.zeros((3, 0))) is None


def test_errors_name_what_came():
    with pytest.raises(
        ValueError, match=r"layout of arrays of shape \(4, 4\) got an array of shape \(4, 5\)"
    ):
        identity((4, 4))(np.zeros((4, 5)))
    with pytest.raises(ValueError, match="three shapes with equally many elements"):
        Layout((4, 4), (2, 8), (0, 0), (4, 4))
    with pytest.raises(ValueError, match="expected the fields source"):
        Layout.from_json({"source": [4]})
    # One of a newer version, with a field that this one would leave out.
    with pytest.raises(ValueError, match="got after, axes, before, source, target"):
        Layout.from_json(identity((4,)).to_json() | {"after": [4]})


def test_a_layout_of_as_many_axes_tells_each_shape_that_it_goes_through():
    assert Layout((4, 6), (4, 6), (1, 0), (3, 8)).text() == (
        "transposed (1, 0), reshaped (6, 4) -> (3, 8)"
    )
    assert Layout((4, 6), (8, 3), (1, 0), (3, 8)).text() == (
        "reshaped (4, 6) -> (8, 3), transposed (1, 0)"
    )


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout((2, 3), (6,), (0,), (2, 3)), "unchanged"),
        (Layout((6,), (2, 3), (0, 1), (6,)), "unchanged"),
        (Layout((6,), (2, 3), (0, 1), (2, 3)), "reshaped (6,) -> (2, 3)"),
        (Layout((2, 3), (2, 3), (0, 1), (3, 2)), "reshaped (2, 3) -> (3, 2)"),
        (Layout((4, 9), (4, 3, 3), (0, 2, 1), (4, 9)), None),
        (Layout((3, 3), (3, 3), (1, 0), (3, 3)), "transposed (1, 0)"),
    ],
)
def test_a_layout_is_the_identity_where_shape_and_order_stay(layout: Layout, text: str | None):
    """The shape that it goes through does not matter; the reverse changes as much."""
    x = np.arange(math.prod(layout.source)).reshape(layout.source)
    stays = layout(x).shape == x.shape and np.array_equal(layout(x), x)
    for each in (layout, layout.reversed):
        assert each.is_identity == stays == (each.text() == "unchanged")
    assert text is None or layout.text() == text


def test_axes_merge_where_their_products_are_all_of_the_shape():
    assert _merges([2, 3, 4], [6, 4]) and _merges([], [])
    assert not _merges([2, 3], [6, 4]) and not _merges([6, 4], [6]) and not _merges([4, 6], [6, 4])


@pytest.mark.parametrize(
    "parts",
    [
        ((2, 3), (2, 3), (0, 1), (7,)),
        ((2, 3), (4, 2), (0, 1), (6,)),
        ((5,), (2, 3), (0, 1), (6,)),
        ((2, 3), (2, 3), (0, 0), (6,)),
        ((2, 3), (2, 3), (0,), (6,)),
    ],
)
def test_a_layout_has_one_size_and_a_permutation(parts):
    with pytest.raises(
        ValueError, match="three shapes with equally many elements and a permutation"
    ):
        Layout(*parts)


@pytest.mark.parametrize("split", [(2, 3), (3, 2)])
def test_an_axis_is_split_in_either_order(split: tuple[int, int]):
    x = np.random.default_rng(0).normal(size=(6, 4))
    y = x.reshape(*split, 4).transpose(1, 0, 2).reshape(split[1], 4 * split[0])
    layout = find_layout(x, y)
    assert layout is not None and np.array_equal(layout(x), y)


def test_both_halves_of_an_axis_may_merge_with_others():
    x = np.arange(128).reshape(4, 4, 8)
    y = x.reshape(2, 2, 4, 8).transpose(0, 2, 1, 3).reshape(8, 16)
    layout = find_layout(x, y)
    assert layout is not None and np.array_equal(layout(x), y)


def test_no_layout_splits_an_array_into_more_axes_than_are_permuted():
    shape = (4, *[2] * (MOST_AXES - 1))
    found = candidates(shape, shape[::-1])
    assert len(found) > 1 and {len(layout.before) for layout in found} == {MOST_AXES}
    # With one axis less there is room to split one.
    found = candidates((16, *shape[2:-1]), (4, 4, *shape[2:-1]))
    assert {len(layout.before) for layout in found} == {MOST_AXES - 2, MOST_AXES - 1}


def test_a_difference_within_the_tolerance_may_be_in_the_few_elements_that_are_compared_first():
    """There it is a larger share than of the whole array."""
    tolerance = 1e-5
    x = np.where(np.random.default_rng(0).random((100, 100)) < 0.5, -1.0, 1.0)
    y = x.T.copy()
    at = sample_positions(x.size, layouts.SAMPLES)[0]
    norm = np.linalg.norm(x)
    for share, found in ((0.9, True), (2.0, False)):
        y.reshape(-1)[at] = x.T.reshape(-1)[at] + share * tolerance * norm
        layout = find_layout(x, y, layouts.Near(tolerance))
        assert (layout is not None) == found
