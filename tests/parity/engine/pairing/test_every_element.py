"""Arrays are equal by all of their elements: a sample of them only says where to look."""

from __future__ import annotations

import numpy as np
import pytest

from parity.engine.pairing.alignment import AlignedBy, align
from parity.engine.pairing.closeness import EQUAL, SAMPLE, closeness
from parity.engine.pairing.fingerprints import sample_positions
from parity.engine.pairing.layouts import SAMPLES, Near, find_layout, same_values
from parity.engine.pairing.matching import match_parameters
from parity.engine.pairing.resemblance import SAMPLES as RESEMBLING
from parity.engine.pairing.resemblance import resemblance
from parity.engine.pairing.value_search import (
    Tensors,
    dissect,
    fit,
    is_constant,
    locate,
    whole_matches,
)

SHAPE = (20, 30)


def drawn(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unseen(x: np.ndarray) -> np.ndarray:
    """Flat positions that no sample looks at."""
    return np.setdiff1d(np.arange(x.size), sample_positions(x.size, SAMPLES))


def off_by_one_element(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    out.reshape(-1)[unseen(x)[7]] += 1.0
    return out


def with_two_exchanged(x: np.ndarray) -> np.ndarray:
    """The same values, so that no sum of hashes tells it apart."""
    out = x.copy()
    one, other = unseen(x)[[5, 11]]
    out.reshape(-1)[[one, other]] = x.reshape(-1)[[other, one]]
    return out


WRONG = pytest.mark.parametrize("spoil", [off_by_one_element, with_two_exchanged])


@WRONG
def test_a_whole_is_compared_whole(spoil):
    x = drawn(0)
    assert fit(x, x) is not None and fit(x, spoil(x)) is None
    assert not same_values(x, spoil(x))
    assert find_layout(x, spoil(x)) is None
    assert find_layout(x.astype(np.float64), spoil(x).astype(np.float64), Near(EQUAL)) is None
    matching = match_parameters({"layer.weight": x}, {"layer.weight": spoil(x)})
    assert not any(pair.is_equal for pair in matching.pairs)


@WRONG
def test_a_lone_part_is_compared_whole(spoil):
    x = drawn(1, (40, 30))
    part = x[20:]
    assert locate(x, part) is not None
    assert locate(x, spoil(part)) is None
    healthy, wrong = (
        match_parameters({"layer.weight": x}, {"layer.weight": p}) for p in (part, spoil(part))
    )
    assert [pair.is_equal for pair in healthy.pairs] == [True]
    assert not any(pair.is_equal for pair in wrong.pairs)


@WRONG
@pytest.mark.parametrize("axis", [0, 1])
def test_fused_parts_are_compared_whole(spoil, axis):
    parts = {name: drawn(n) for n, name in enumerate(("q", "k", "v"))}
    fused = np.concatenate([*parts.values()], axis)
    assert dissect(fused, parts) is not None
    assert dissect(fused, parts | {"k": spoil(parts["k"])}) is None
    matching = match_parameters(parts, {"qkv": fused})
    assert [pair.is_equal for pair in matching.pairs] == [True]
    wrong = match_parameters(parts | {"k": spoil(parts["k"])}, {"qkv": fused})
    assert not any(pair.is_equal for pair in wrong.pairs)


def test_a_stack_is_compared_whole():
    layers = {f"layers.{n}.weight": drawn(n) for n in range(3)}
    stacked = np.stack([*layers.values()])
    assert dissect(stacked, layers) is not None
    spoilt = layers | {"layers.2.weight": with_two_exchanged(layers["layers.2.weight"])}
    assert dissect(stacked, spoilt) is None


def test_a_constant_is_one_in_every_element():
    flat = np.ones(SHAPE, np.float32)
    assert is_constant(flat)
    assert not is_constant(off_by_one_element(flat))


def test_large_arrays_are_compared_to_their_last_row():
    x = np.zeros((3, 1 << 18), np.float32)
    y = x.copy()
    y[-1, -1] = 1.0
    assert same_values(x, x) and not same_values(x, y)


def test_whole_matches_say_what_is_in_another_order():
    x = drawn(3)
    originals, ports = Tensors({"w": x}), Tensors({"w": with_two_exchanged(x)})
    [(names, fits)] = whole_matches(originals, ports, ["w"], ["w"])
    assert (names, fits) == (("w",), [("w", {})])


def test_a_stage_with_a_nan_that_no_sample_sees_is_not_paired_by_value() -> None:
    """A NaN compares as false with every bound; the pair stays one by its place."""
    x = drawn(0, (2, SAMPLE)).astype(np.float64)
    spoiled = x.copy()
    spoiled.reshape(-1)[np.setdiff1d(np.arange(x.size), sample_positions(x.size, SAMPLE))[3]] = (
        np.nan
    )
    [healthy] = align({"a": x}, {"b": x}).pairs
    [pair] = align({"a": x}, {"b": spoiled}).pairs
    assert healthy.by is AlignedBy.VALUE
    assert pair.by is AlignedBy.ORDER and np.isnan(pair.distance)


def test_a_large_row_is_compared_as_one_block():
    x = drawn(0, (1, 1 << 19))
    assert same_values(x, x.copy()) and not same_values(x, off_by_one_element(x))


def test_a_factor_is_one_of_every_element():
    x = drawn(0, (40, 30))
    y = np.float32(3) * x
    healthy = resemblance(x, y)
    assert healthy is not None and healthy.line == pytest.approx((3.0, 0.0))
    y.reshape(-1)[np.setdiff1d(np.arange(x.size), sample_positions(x.size, RESEMBLING))[7]] += 1.0
    found = resemblance(x, y)
    assert found is None or found.line is None


def test_what_is_no_number_anywhere_resembles_nothing():
    x = drawn(0, (40, 30))
    y = x + x.std() / 8 * drawn(1, x.shape)
    assert resemblance(x, y) is not None
    y.reshape(-1)[np.setdiff1d(np.arange(x.size), sample_positions(x.size, RESEMBLING))[7]] = np.nan
    assert resemblance(x, y) is None


def test_a_stage_of_three_values_is_telling_wherever_they_are():
    x = np.zeros((2, SAMPLE))
    x.reshape(-1)[np.setdiff1d(np.arange(x.size), sample_positions(x.size, SAMPLE))[:2]] = 1.0, 2.0
    assert [side.tolist() for side in closeness([x, 0 * x], [x]).telling] == [[True, False], [True]]
