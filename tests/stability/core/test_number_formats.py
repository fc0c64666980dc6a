"""Formats: what follows from the bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from stability.core.number_formats import BF16, E2M1, E4M3, E5M2, E8M0, FP16, Format

FORMATS = pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2, E2M1], ids=lambda f: f.name)


def positive(fmt: Format) -> np.ndarray:
    """Zero and every positive finite number of the format, ascending."""
    kind = np.uint8 if fmt.dtype.itemsize == 1 else np.uint16
    largest = np.array(ml_dtypes.finfo(fmt.dtype).max, fmt.dtype)
    patterns = np.arange(int(largest.view(kind)) + 1).astype(kind)
    return patterns.view(fmt.dtype).astype(np.float64)


def test_the_numbers_of_bfloat16() -> None:
    assert (BF16.mantissa_bits, BF16.min_exponent) == (7, -126)
    assert BF16.spacing(np.array(1.0)) == 2.0**-7
    assert BF16.spacing(np.array(np.nextafter(1.0, 0))) == 2.0**-8
    smallest = ml_dtypes.finfo(ml_dtypes.bfloat16).smallest_normal
    assert float(smallest) == 2.0**BF16.min_exponent


def test_e2m1_is_these_numbers() -> None:
    assert positive(E2M1).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert E2M1.bits == 4


def test_e8m0_is_every_power_of_two_there_is_a_byte_for() -> None:
    values = np.arange(256).astype(np.uint8).view(E8M0.dtype).astype(np.float64)
    assert np.array_equal(values[:255], np.ldexp(1.0, np.arange(-127, 128)))
    assert np.isnan(values[255])
    assert (E8M0.min_exponent, E8M0.max_exponent, E8M0.mantissa_bits) == (-127, 127, 0)
    assert E8M0.min_normal == E8M0.min_subnormal == values[0]


@FORMATS
def test_limits_follow_from_the_bits(fmt: Format) -> None:
    values = positive(fmt)
    assert values[1] == fmt.min_subnormal
    assert values[-1] == fmt.max
    assert np.frexp(values[-1])[1] - 1 == fmt.max_exponent
    assert fmt.min_normal in values
    gaps = np.diff(values)
    # Below it numbers are as far apart as just above, from twice as large on farther.
    assert set(gaps[values[1:] <= 2 * fmt.min_normal]) == {fmt.min_subnormal}
    assert np.all(gaps[values[:-1] >= 2 * fmt.min_normal] > fmt.min_subnormal)


@FORMATS
def test_the_spacing_is_the_distance_to_the_next_number(fmt: Format) -> None:
    values = positive(fmt)
    assert np.array_equal(fmt.spacing(values[:-1]), np.diff(values))
    assert np.array_equal(fmt.spacing(-values[1:-1]), np.diff(values)[1:])


@FORMATS
def test_rounding_keeps_numbers_of_the_format_and_moves_others(fmt: Format) -> None:
    values = positive(fmt)
    assert np.array_equal(fmt.round(values), values.astype(np.float32))
    between = values[-2] + 0.75 * (values[-1] - values[-2])
    assert fmt.round(np.array(between)) == np.float32(values[-1]) != np.float32(between)


@FORMATS
def test_ties_go_to_even(fmt: Format) -> None:
    values = positive(fmt)
    middle = (values[:-1] + values[1:]) / 2
    index = np.arange(len(values) - 1)
    even = np.where(index % 2 == 0, values[:-1], values[1:])
    exact = middle.astype(np.float32) == middle
    assert np.array_equal(fmt.round(middle)[exact], even[exact].astype(np.float32))


@FORMATS
def test_a_cast_of_what_is_beyond_the_range_ends_at_it(fmt: Format) -> None:
    """A cast of its own accord gives NaN or infinity, and so would everything stored in it."""
    beyond = np.float32([np.finfo(np.float32).max, -np.finfo(np.float32).max])
    assert fmt.round(beyond).tolist() == [fmt.max, -fmt.max]
