"""A suite that compares something with itself is red, and every night shows that it is none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from parity.calibrate import truth
from parity.cases import by_name
from parity.controls import CONTROLS
from parity.recordings import RecordedReference
from parity.subject import JaxSubject
from parity.suite import ALL, Suite, culprit
from parity.taps import WEIGHTS
from parity.tolerances import NoiseFloors
from reports.nightly import run_controls
from reports.shards import CONTROLS_PART, SUITE_OF


def oracle(self: JaxSubject, case):
    """Answers as the JAX model would, by asking the oracle."""
    return {name: np.asarray(array, self.dtype) for name, array in truth(case).items()}


@pytest.fixture
def compared_with_itself(monkeypatch):
    monkeypatch.setattr(JaxSubject, "run", oracle)


@pytest.mark.parametrize("name", ["length_c", "stream_tokens"])
def test_the_oracle_as_subject_is_red(name, compared_with_itself):
    rows = Suite(RecordedReference()).case(by_name(name), NoiseFloors.load())
    rows = list(itertools.takewhile(lambda row: row.quantity != WEIGHTS, rows))
    found = culprit(rows)
    assert found is not None
    assert (found.edge, found.quantity, found.value) == ("jax64:oracle", ALL, 1.0)


def test_controls_are_missed_where_nothing_of_jax_is_compared(compared_with_itself):
    told = []
    suite = run_controls(RecordedReference(), told.append)
    assert suite.entry()["status"] == "failed"
    assert (suite.planned, suite.executed) == (len(CONTROLS), 0)
    assert all(control.fault.name in suite.reason for control in CONTROLS)
    assert "0 of 2 planted bugs found" in told[0]


def test_each_control_is_found_on_its_edge():
    # What the controls plant shows on no other edge: else the one would hide behind the other.
    assert {control.edge for control in CONTROLS} == {"jax64:oracle", "jax32:oracle"}
    suite = run_controls(RecordedReference(), lambda line: None)
    assert suite.entry() == {
        "name": SUITE_OF[CONTROLS_PART],
        "planned": 2,
        "executed": 2,
        "reason": "",
        "status": "ran",
    }
