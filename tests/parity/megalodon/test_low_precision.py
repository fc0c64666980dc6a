"""bfloat16 is judged by its error against the oracle, ours over autocast's."""

from __future__ import annotations

import numpy as np
import pytest

from parity.engine.measure.measurement import Verdict
from parity.megalodon import low_precision
from parity.megalodon.cases import by_name
from parity.megalodon.noise_floors import truth
from parity.tolerances import NoiseFloors

CASE = by_name("plain")


@pytest.fixture(scope="module")
def exact():
    return truth(CASE)


def gate(rows):
    (found,) = (m for m in rows if m.metric == "error_over_autocast")
    return found


@pytest.mark.torch_ref
def test_every_side_has_an_error_and_ours_is_the_least(reference, exact):
    theirs = reference.low_precision(CASE)
    rows = list(low_precision.measure(CASE, theirs, exact, NoiseFloors({})))
    errors = {m.edge: m.value for m in rows if (m.quantity, m.metric) == ("logits", "rel_l2")}
    assert set(errors) == {low_precision.OURS, *low_precision.MODES}
    assert min(errors, key=errors.__getitem__) == "jaxbf16:oracle"
    assert gate(rows).verdict is Verdict.PASS


@pytest.mark.torch_ref
def test_an_autocast_more_accurate_than_ours_fails(reference, exact):
    theirs = dict(reference.low_precision(CASE))
    theirs["autocast/logits"] = exact["logits"].astype(np.float32)
    assert gate(low_precision.measure(CASE, theirs, exact, NoiseFloors({}))).verdict is Verdict.FAIL


@pytest.mark.torch_ref
def test_every_intermediate_of_ours_is_gated(reference, exact):
    rows = list(
        low_precision.measure(CASE, reference.low_precision(CASE), exact, NoiseFloors.load())
    )
    gated = {m.quantity for m in rows if m.edge == "jaxbf16:oracle" and m.tolerance > 0}
    assert gated >= {"layers.0.q", "layers.1.attn", "norm", "logits"}
    assert "loss" not in gated, "the error of a scalar is near 0 by luck"
