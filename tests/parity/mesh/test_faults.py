"""Every planted parallel bug is detected by the mesh edge alone, and reported where it is."""

from __future__ import annotations

import jax
import pytest

from tests.parity.mesh.faults import FAULTS, by_name, detect
from tests.parity.mesh.faults.fault import witness_of

QUICK = (
    "clip_by_local_norm",
    "label_of_next_shard_dropped",
    "softmax_without_global_sum",
    "router_statistics_local",
)
"""One of each witness."""
OWNERS = {fault.patch.owner: None for fault in FAULTS}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(fault.name, marks=() if fault.name in QUICK else pytest.mark.sweep)
        for fault in FAULTS
    ],
)
def test_a_planted_bug_is_found_where_it_is(name: str):
    detection = detect(by_name(name))
    assert detection.detected
    assert detection.localised, "\n".join(detection.result.sentences())


@pytest.mark.sweep
@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_a_witness_without_a_bug_holds(owner):
    report = witness_of(owner).run()
    assert report.holds, report.table()


def test_an_unknown_bug_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"no mesh fault 'none'; there are .*clip_by_local_norm"):
        by_name("none")
