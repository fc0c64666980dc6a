"""A suite that compares something with itself is red, and every night shows that it is none."""

from __future__ import annotations

import itertools
import shutil
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.quantity import WEIGHTS
from parity.faults import controls
from parity.faults.controls import CONTROLS, Control
from parity.faults.fault import Fault
from parity.megalodon.cases import CASES, by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.noise_floors import truth
from parity.megalodon.recordings import FOLDER, RecordedReference
from parity.megalodon.runner import JaxSubject
from parity.megalodon.suite import ALL, Suite, culprit
from parity.tolerances import NoiseFloors
from reports.store.manifest import SuiteResult
from reports.subject import CONTROLS_PART, suite_of_part
from reports.subjects.megalodon.suites import run_controls
from tests.helpers import double


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
    assert suite.result().status == "failed"
    assert (suite.planned, suite.executed) == (len(CONTROLS), 0)
    assert all(control.fault.name in suite.reason for control in CONTROLS)
    assert "0 of 2 planted bugs found" in told[0]


def test_each_control_is_found_on_its_edge():
    # What the controls plant shows on no other edge: else the one would hide behind the other.
    assert {control.edge for control in CONTROLS} == {"jax64:oracle", "jax32:oracle"}
    suite = run_controls(RecordedReference(), lambda line: None)
    name = suite_of_part(CONTROLS_PART)
    assert suite.result() == SuiteResult(name, planned=2, executed=2, status="ran")


def test_a_control_found_elsewhere_is_missed(monkeypatch):
    """At another stage, on another edge, or as what could not be compared."""
    fault = double(Fault, name="planted", stage="layers.0.q", planted=nullcontext)
    control = Control(fault, MegalodonEdge.JAX32_ORACLE)
    monkeypatch.setattr(controls, "CONTROLS", (control,))
    comparison = Comparison(controls.CASE.work, control.edge, NoiseFloors({}), "float32")
    here = comparison.missing(fault.stage, "")

    def told(*rows):
        suite = double(Suite, case=lambda case, floors: iter(rows))
        [(_, text)] = controls.missed(suite, NoiseFloors({}))
        return text

    assert told(here) == ""
    assert "nothing was reported" in told()
    assert "embed was reported" in told(comparison.missing("embed", ""), here)
    assert "nothing was reported" in told(replace(here, edge="jax64:oracle"))
    assert told(replace(here, verdict=Verdict.NOT_COMPARABLE))
    earlier = replace(comparison.missing("embed", ""), edge="jax64:oracle")
    assert told(earlier, here) == ""


def test_a_case_without_a_recording_is_not_comparable(tmp_path, compared_with_itself):
    """The edges to the oracle are measured, and what is missing is said."""
    # Of the first case alone, which says where all come from.
    shutil.copy(FOLDER / f"{CASES[0].name}.safetensors", tmp_path)
    rows = list(Suite(RecordedReference(tmp_path)).case(by_name("length_c"), NoiseFloors.load()))
    last, arrived = rows[-1], next(row for row in rows if row.quantity == WEIGHTS)
    assert (arrived.verdict, arrived.tolerance) == (Verdict.PASS, 0)
    assert (last.verdict, last.edge) == (Verdict.NOT_COMPARABLE, "jax32:reference32")
    assert "no recording length_c" in last.note
