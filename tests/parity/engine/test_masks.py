"""What masks are filled with stands for minus infinity, whatever number a dtype has for it."""

import numpy as np
import pytest

from parity.engine.metrics import MASKING, alike_masks, relative_l2

NUMBERS = np.linspace(-1, 1, 8)


def filled(dtype, lowest, numbers=NUMBERS):
    return np.concatenate([numbers, np.full(4, lowest)]).astype(dtype)


def test_masks_of_two_dtypes_are_no_difference_and_leave_the_numbers_to_be_seen():
    narrow = alike_masks(filled(np.float32, np.finfo(np.float32).min))
    wide = alike_masks(filled(np.float64, -np.inf))
    assert relative_l2(narrow, wide) < 1e-7
    moved = alike_masks(filled(np.float64, np.finfo(np.float64).min, 1.01 * NUMBERS))
    assert relative_l2(moved, wide) == pytest.approx(0.01)


def test_what_one_side_masks_and_the_other_does_not_is_a_difference():
    wide = alike_masks(filled(np.float64, -np.inf))
    assert relative_l2(alike_masks(filled(np.float64, 0.0)), wide) > 1e20
    assert relative_l2(wide, alike_masks(filled(np.float64, np.inf))) > 1e20


def test_what_is_no_number_stays_so():
    broken = alike_masks(filled(np.float64, np.nan))
    assert np.isnan(relative_l2(broken, filled(np.float64, -MASKING)))
