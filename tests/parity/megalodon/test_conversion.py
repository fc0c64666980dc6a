"""Weights go round through both formats and arrive byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from parity.megalodon.cases import by_name
from parity.megalodon.conversion import changed, round_trip, value_hash

CASES = [by_name(name) for name in ("plain", "untied_head", "no_affine", "byte_lm")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_arrives(case):
    assert changed(round_trip(case), case.weights) == []


def test_one_bit_is_a_change():
    given = by_name("plain").weights
    name = "model.layers.1.attn.cema.theta"
    held = dict(given)
    held[name] = np.nextafter(given[name], np.float32(np.inf))
    assert changed(held, given) == [name]


def test_a_missing_and_an_extra_name_are_changes():
    given = {"a": np.zeros(2), "b": np.zeros(2)}
    assert changed({"a": np.zeros(2), "c": np.zeros(2)}, given) == ["b", "c"]


def test_a_hash_tells_dtype_and_shape_apart():
    zeros = np.zeros(4, np.float32)
    others = (zeros.astype(np.int32), zeros.reshape(2, 2), -zeros)
    assert value_hash(zeros) not in {value_hash(other) for other in others}


def test_no_byte_changes_unseen():
    given = np.arange(3, dtype=np.float32)
    seen = set()
    for byte in range(given.nbytes):
        held = given.copy()
        held.view(np.uint8)[byte] ^= 1
        seen.add(value_hash(held))
    assert len(seen - {value_hash(given)}) == given.nbytes
