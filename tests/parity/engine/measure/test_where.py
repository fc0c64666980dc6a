"""Where elements differ is said by rows, positions, chunks, heads and padding, and is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.engine.measure.metrics import relative_l2
from parity.engine.measure.where import FILLED, Axis, culprits, where
from tests.helpers import roundoff

AXES = (Axis("row"), Axis("position", "chunk", 16), Axis("channel", "head", 24))
SHAPE = (2, 53, 48)
VALID = np.ones(SHAPE[:2], bool)
VALID[0, 49:] = False
VALID[1, 40:] = False


def at(*index: object) -> np.ndarray:
    found = np.zeros(SHAPE, bool)
    found[index] = True
    return found


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        (
            at(0, slice(49, None)),
            "row 0, positions 49-52, all channels: all padding, in chunk 3, the tail of 5",
        ),
        (at(slice(None), slice(None), slice(24, 48)), "head 1"),
        (at(slice(None), slice(15, None, 16)), "the last of chunks 0-2"),
        (at(slice(None), slice(16, 48)), "chunks 1-2"),
        # The last chunk is whole with the five positions that it has.
        (
            at(1, slice(48, None)),
            "row 1, positions 48-52, all channels: all padding, chunk 3, the tail of 5",
        ),
        (at(1, slice(32, None)), "row 1, positions 32-52, all channels: padding too, chunks 2-3"),
        (at(1, 4, 7), "row 1, position 4, channel 7: no padding, in chunk 0, in head 0"),
        (at(1, slice(0, None, 7), 7), "every 7th position from 0 to 49"),
        (at(slice(None), [0, 2, 5, 9, 20]), "5 of 53 positions from 0 to 20"),
        (~VALID[..., None] & at(), "row 1, positions 40-52, all channels: all padding"),
        (at(), "everywhere"),
    ],
)
def test_a_sentence_names_the_region_and_what_it_is(differs: np.ndarray, sentence: str) -> None:
    assert sentence in where(differs, AXES, VALID)


def test_axes_without_names_are_numbered() -> None:
    assert where(at(0, slice(49, None))) == "axis 0: 0, axis 1: 49-52, all of axis 2"
    assert where(at(0, slice(49, None)), AXES[:2]) == where(at(0, slice(49, None)))


def test_an_axis_of_one_index_is_not_mentioned() -> None:
    assert where(np.array([[[True], [False], [False]]])) == "axis 1: 0"


def test_differences_are_split_into_as_few_regions_as_there_may_be() -> None:
    """Along the first axis these two overlapping boxes are three."""
    differs = np.zeros((6, 6), bool)
    differs[:2, :2] = differs[1:3, 2:4] = True
    assert where(differs) == "axis 0: 0-1, axis 1: 0-1; axis 0: 1-2, axis 1: 2-3"
    assert where(differs.T) == "axis 0: 0-1, axis 1: 0-1; axis 0: 2-3, axis 1: 1-2"


def test_an_axis_of_too_many_regions_hides_no_other_axis() -> None:
    """Four different rows, of three different columns."""
    stairs = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)
    assert where(stairs, [Axis("row"), Axis("column")]) == (
        "rows 0-1, column 0; rows 1-2, column 1; rows 2-3, column 2"
    )
    assert where(stairs.T).count(";") == 2


def test_a_part_of_a_split_is_split_again_as_long_as_regions_are_few() -> None:
    """No axis alone parts these three boxes: the second layer has two of them."""
    differs = np.zeros((2, 6, 6), bool)
    differs[0][np.ix_([1, 5], [0, 5])] = True
    differs[1, :2, :2] = differs[1, 1:3, 2:4] = True
    boxes = ("0, axis 1: 1, 5, axis 2: 0, 5", "1, axis 1: 0-1, axis 2: 0-1")
    third = "1, axis 1: 1-2, axis 2: 2-3"
    assert where(differs) == "; ".join(f"axis 0: {box}" for box in (*boxes, third))
    # A fourth is one too many.
    differs[1, 5, 5] = True
    assert ";" not in where(differs)


def test_nothing_is_said_of_a_scalar_and_of_what_does_not_differ() -> None:
    assert where(np.asarray(True)) == ""
    assert where(np.zeros(SHAPE, bool), AXES) == ""


def test_padding_is_named_only_where_it_was_compared() -> None:
    inside = at() & VALID[..., None]
    assert where(inside, AXES, VALID) != where(inside, AXES, VALID, compared=VALID) == "everywhere"
    assert "padding" not in where(at(0, 3), AXES, VALID, compared=VALID)
    assert "no padding" in where(at(0, 3), AXES, VALID)
    assert "padding too" in where(at(0, slice(40, None)), AXES, VALID)


def test_only_compared_elements_are_described() -> None:
    compared = np.ones(SHAPE[:2], bool)
    compared[0, 10:] = False
    # Row 0 differs from position 4 on, and was compared up to position 9.
    assert where(at(0, slice(4, None)), AXES, compared=compared).startswith(
        "row 0, positions 4-9, all channels"
    )
    assert where(at(0, slice(10, None)), AXES, compared=compared) == ""
    compared[1] = False
    # All that was compared of an axis is all of it.
    assert where(at(0, slice(None), slice(0, 24)), AXES, compared=compared) == (
        "all rows, all positions, channels 0-23: head 0"
    )
    # Every second position of row 0 was compared, and all of those differ.
    compared = np.ones(SHAPE[:2], bool)
    compared[0, ::2] = False
    assert where(at(0), AXES, compared=compared) == "row 0, all positions, all channels"


def test_all_compared_rows_are_all_rows() -> None:
    differs = np.zeros((5, 20), bool)
    for row in range(4):
        differs[row, [0, row + 1, 5 + row, 9]] = True
    axes = (Axis("row"), Axis("position"))
    rows = np.arange(5) < 4
    share = f"{100 * 16 / 40:.0f} %"
    assert where(differs, axes, compared=rows) == f"{share} of all rows, positions 0-9"
    assert where(differs, axes) == f"{share} of rows 0-3, positions 0-9"


def test_a_share_is_one_of_the_compared_elements() -> None:
    rng = np.random.default_rng(5)
    compared = rng.permutation(100).reshape(10, 10) < 80
    differs = compared & (rng.permutation(100).reshape(10, 10) < 75)
    share = 100 * differs.sum() / compared.sum()
    assert 60 < share < 85, "the drawn pattern fills no region"
    assert where(differs, compared=compared) == f"{share:.0f} % of all elements"


@pytest.mark.parametrize(
    ("left", "sentence"),
    [(2, "row 0, all positions, all channels"), (12, "88 % of row 0, all positions")],
)
def test_a_region_is_filled_if_nine_tenths_of_it_differ(left: int, sentence: str) -> None:
    """Elements that are right by accident do not part a wrong region."""
    differs = np.zeros((2, 10, 10), bool)
    differs[0] = True
    differs[0].flat[np.random.default_rng(3).permutation(100)[:left]] = False
    assert where(differs, (Axis("row"), Axis("position"), Axis("channel"))).startswith(sentence)
    assert where(differs[0]) == ("everywhere" if left == 2 else "88 % of all elements")


def test_the_last_block_is_a_tail_only_if_it_is_shorter() -> None:
    axes = (Axis("position", "chunk", 4),)
    assert where(np.arange(8) >= 4, axes) == "positions 4-7: chunk 1"
    assert where(np.arange(7) >= 4, axes) == "positions 4-6: chunk 1, the tail of 3"


@pytest.mark.parametrize("length", [7, 8, 9])
def test_an_axis_of_one_block_is_not_described_by_it(length: int) -> None:
    differs = np.arange(length) < 3
    note = ": in chunk 0" if length > 8 else ""
    assert where(differs, (Axis("position", "chunk", 8),)) == f"positions 0-2{note}"


def test_blocks_that_are_apart_are_named_apart() -> None:
    axes = (Axis("position", "chunk", 4),)
    positions = np.arange(24)
    assert where((positions // 4) % 2 == 0, axes) == "positions 0-3, 8-11, 16-19: chunks 0, 2, 4"
    firsts = np.isin(positions, [0, 4, 12])
    assert where(firsts, axes) == "positions 0, 4, 12: the first of chunks 0-1, 3"


def test_up_to_four_blocks_are_listed() -> None:
    axes = (Axis("position", "chunk", 4), Axis("channel", "head", 4))
    differs = np.zeros((16, 16), bool)
    differs[[0, 5], [0, 6]] = True
    two = "position 0, channel 0; position 5, channel 6"
    assert where(differs, axes) == f"{two}: in chunk 0, in head 0, in chunk 1, in head 1"
    differs[10, 12] = True
    assert where(differs, axes) == f"{two}; position 10, channel 12"


def test_elements_without_a_pattern_are_counted_and_not_listed() -> None:
    scattered = np.random.default_rng(0).random(SHAPE) > 0.9
    assert where(scattered, AXES, VALID) == "10 % of all elements"
    scattered = np.random.default_rng(0).random(SHAPE) > 0.3
    assert where(scattered, AXES, VALID) == "70 % of all elements"
    for n, share in ((10, "1 %"), (11, "under 1 %")):
        diagonal = np.zeros((n, n, n), bool)
        diagonal[range(n), range(n), range(n)] = True
        assert where(diagonal) == f"{share} of all elements"


@pytest.mark.parametrize(
    ("step", "ordinal"), [(2, "2nd"), (3, "3rd"), (11, "11th"), (21, "21st"), (112, "112th")]
)
def test_equal_steps_are_an_ordinal(step: int, ordinal: str) -> None:
    differs = np.zeros(step * 6, bool)
    differs[::step] = True
    assert where(differs, [Axis("position")]) == f"every {ordinal} position from 0 to {step * 5}"


def test_rows_that_differ_at_other_positions_are_told_apart() -> None:
    sentence = where(at(0, slice(3, 5)) | at(1, slice(8, 10)), AXES)
    assert "row 0, positions 3-4" in sentence and "row 1, positions 8-9" in sentence


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_one_block_of_elements_is_named_by_its_bounds(seed: int, depth: int) -> None:
    """Negative control: with half of the block left out, its bounds are not called all of it."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 9, depth))
    starts = [int(rng.integers(0, n)) for n in shape]
    ends = [int(rng.integers(a + 1, n + 1)) for a, n in zip(starts, shape, strict=True)]
    block = np.zeros(shape, bool)
    block[tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))] = True
    sentence = where(block)
    for k, (a, b, n) in enumerate(zip(starts, ends, shape, strict=True)):
        if block.all():
            assert sentence == "everywhere"
        elif b - a == n:
            assert f"all of axis {k}" in sentence
        else:
            assert f"axis {k}: {a}" + (f"-{b - 1}" if b > a + 1 else "") in sentence
    thinned = block & (rng.random(shape) < 0.5)
    # With nearly all of it left they are.
    if 0 < thinned.sum() < FILLED * block.sum():
        assert where(thinned) != sentence


# Two norms of 36 squares, their quotient, and the subtractions below them.
SLACK = roundoff(2 * 36 + 8, np.float64)


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 0.3))
def test_without_the_culprits_a_tensor_would_hold(seed: int, tolerance: float) -> None:
    rng = np.random.default_rng(seed)
    expected = rng.normal(size=(4, 9))
    actual = expected + rng.normal(size=(4, 9)) * 10.0 ** rng.integers(-8, 1, (4, 9))
    found = culprits(actual, expected, tolerance)
    mended = np.where(found, expected, actual)
    assert relative_l2(mended, expected) <= tolerance * (1 + SLACK)
    assert found.any() == (relative_l2(actual, expected) > tolerance)
    if found.any():
        # The fewest: with the least of them left wrong it does not hold.
        least = np.where(found, np.abs(actual - expected), math.inf).argmin()
        mended.flat[least] = actual.flat[least]
        assert relative_l2(mended, expected) > tolerance * (1 - SLACK)


@pytest.mark.parametrize(
    ("tolerance", "room"),
    [(0.0, False), (-1.0, False), (math.nan, False), (math.inf, False), (0.001, True), (1.0, True)],
)
@pytest.mark.parametrize("wrong", [0, 1, 7, 12])
def test_what_is_right_is_never_a_culprit(tolerance: float, room: bool, wrong: int) -> None:
    """Whatever passes: an element without an error breaks nothing."""
    rng = np.random.default_rng(wrong)
    expected = rng.normal(size=12)
    actual = expected.copy()
    actual[rng.permutation(12)[:wrong]] += 1.0
    for scale in (expected, np.zeros(12)):
        found = culprits(actual - expected + scale, scale, tolerance)
        differs = actual - expected + scale != scale
        assert not (found & ~differs).any()
        # Without room for any error, each of them is one.
        if not room:
            assert (found == differs).all()


@pytest.mark.parametrize("size", [1e-300, 1e-35, 1e300])
def test_culprits_do_not_depend_on_the_size_of_numbers(size: float) -> None:
    """No square overflows or underflows; only relative errors count."""
    expected = np.asarray([3.0, -4.0, 1.0, 2.0]) * size
    actual = expected + np.asarray([1e-3, 0.0, 0.5, 0.0]) * size
    assert culprits(actual, expected, 0.01).tolist() == [False, False, True, False]


def test_what_is_not_finite_hides_no_other_error() -> None:
    """The norm of what is known has no room for the error of the second element."""
    expected, actual = np.asarray([1e6, 1.0, 2.0]), np.asarray([math.nan, 1.1, 2.0])
    assert culprits(actual, expected, 0.01).tolist() == [True, True, False]


def test_what_is_not_finite_is_a_culprit_unless_both_sides_have_it() -> None:
    expected = np.asarray([1.0, math.inf, -math.inf, 2.0, math.inf])
    actual = np.asarray([1.0, math.inf, math.inf, math.nan, 3.0])
    assert culprits(actual, expected, 1.0).tolist() == [False, False, True, True, True]


def test_what_is_not_finite_is_a_culprit_beside_zeros() -> None:
    found = culprits(np.array([np.nan, 0.0, 1.0]), np.zeros(3), 1e-3)
    assert found.tolist() == [True, False, True]


def test_differences_that_take_more_than_three_regions_are_one_with_its_share() -> None:
    differs = np.zeros((2, 4, 8), bool)
    differs[0, 0, :2] = differs[0, 2, 4:6] = differs[1, 1, :3] = differs[1, 3, 5:] = True
    assert ";" not in where(differs) and " % of " in where(differs)
