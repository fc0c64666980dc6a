"""No export is green where the run is not, and each says what it was compared with and where."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from reports.exports import arrow_file, junit, openmetrics, step
from reports.exports.levels import largest_shares
from reports.store.runs import Run, write_run
from reports.verdict.decide import decide
from stability.core.findings import Severity
from tests.reports.nights import failing, finding, measurement, run

WHOLE = {"name": "parity", "status": "ran", "planned": 2, "executed": 2, "reason": ""}
LOST = {**WHOLE, "name": "port", "status": "skipped", "executed": 0, "reason": "no reference"}
SHARE = "megalodon_numerics_tolerance_used_ratio"
VALUES = (math.nan, math.inf, 0.0, 1e-6, 1.0)
NUMBERS = st.sampled_from(VALUES)
INFO: dict[str, Any] = {"tolerance": math.nan, "verdict": Verdict.INFO}

gates = st.builds(
    lambda verdict, value, tolerance, case: measurement(
        verdict=verdict, value=value, tolerance=tolerance, case=case
    ),
    st.sampled_from(list(Verdict)),
    NUMBERS,
    NUMBERS,
    st.sampled_from(("a", "b")),
)
findings = st.builds(
    lambda severity, probe: finding(severity=severity, probe=probe),
    st.sampled_from(list(Severity)),
    st.sampled_from(("values", "poles")),
)


def parsed(night: Run) -> JUnitXml:
    return JUnitXml.fromstring(junit(night, decide(night, None)).encode())


def samples(night: Run) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(openmetrics(night, decide(night, None))):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(gates, max_size=4, unique_by=lambda m: (m.case, m.verdict)),
    found=st.lists(findings, max_size=2),
    whole=st.booleans(),
)
def test_an_export_is_green_exactly_where_the_run_is(rows, found, whole) -> None:
    night = run(*rows, findings=tuple(found), suites=[WHOLE] if whole else [WHOLE, LOST])
    decision = decide(night, None)
    document = parsed(night)
    broken = {
        f"{case.classname}/{case.name}"
        for suite in document
        for case in suite
        if any(isinstance(result, Failure | Error) for result in case.result)
    }
    assert bool(broken) == bool(decision.exit_code)
    assert (document.failures + document.errors > 0) == bool(decision.exit_code)
    # Of what was measured, a test passes only if each of its gates does.
    for case in {m.case for m in rows}:
        verdicts = {m.verdict for m in night.measurements if m.case == case} - {Verdict.INFO}
        name = f"parity.{case}/JAX float32 vs oracle"
        assert (name in broken) == bool(verdicts - {Verdict.PASS})
    assert ("suites/port" in broken) == (not whole)
    for probe in {f.probe for f in found}:
        bad = any(f.probe == probe and f.severity is Severity.ERROR for f in found)
        assert (f"probes/{probe}" in broken) == bad
    [code] = samples(night)["megalodon_numerics_exit_code"]
    values = step(night, decision).values
    assert code.value == values["exit_code"] == decision.exit_code


@given(m=gates)
def test_a_share_is_that_of_a_gate_that_holds_or_beyond_the_tolerance(m: Measurement) -> None:
    shares = largest_shares([m])
    if m.verdict is Verdict.INFO:
        assert shares == {}
        return
    [share] = shares.values()
    comparable = math.isfinite(m.value) and math.isfinite(m.tolerance)
    if m.verdict is Verdict.PASS and comparable:
        assert share == m.fraction
    else:
        assert share > 1
    # The largest of a group stays the largest, whichever comes first.
    small = measurement(case=m.case, value=4e-9)
    for rows in ([m, small], [small, m]):
        assert largest_shares(rows) == {key: max(share, small.fraction) for key in shares}


@pytest.mark.parametrize("status", ["ran", "failed", "skipped"])
@pytest.mark.parametrize(("planned", "executed"), [(2, 2), (2, 1), (2, 0), (0, 0), (1, 2)])
def test_a_suite_is_green_only_where_it_did_all_that_it_planned(status, planned, executed) -> None:
    """Whatever it says of itself."""
    suite = {**WHOLE, "name": "port", "status": status, "planned": planned, "executed": executed}
    night = run(measurement(), suites=[WHOLE, suite])
    whole = night.manifest.suites[1].whole
    assert whole is ((status, planned, executed) == ("ran", 2, 2))
    results = {f"{c.classname}/{c.name}": list(c.result) for s in parsed(night) for c in s}
    assert ("suites/port" in results) is not whole
    assert all(isinstance(result, Error) for result in results.get("suites/port", ()))
    assert "suites/parity" not in results


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_tracker_counts_as_held_what_passes_and_nothing_else(verdict: Verdict) -> None:
    gate = measurement(quantity="b", verdict=verdict)
    if verdict in (Verdict.NOT_COMPARABLE, Verdict.INFO):
        gate = measurement(quantity="b", verdict=verdict, tolerance=math.nan)
    elif verdict is Verdict.FAIL:
        gate = failing(quantity="b")
    night = run(measurement(), gate, suites=[WHOLE])
    values = step(night, decide(night, None)).values
    assert values["gates/parity"] == 1 + (verdict is not Verdict.INFO)
    assert values["gates_held/parity"] == 1 + (verdict is Verdict.PASS)
    assert values["count/passed"] == values["gates_held/parity"]


def test_a_comparison_without_a_tolerance_is_skipped_and_not_passed() -> None:
    night = run(measurement(), measurement(case="told", **INFO), suites=[WHOLE])
    document = parsed(night)
    by_name = {c.classname: list(c.result) for suite in document for c in suite}
    assert by_name["parity.baseline"] == []
    [told] = by_name["parity.told"]
    assert isinstance(told, Skipped) and "no tolerance applies" in told.message
    assert (document.failures, document.errors, document.skipped) == (0, 0, 1)


def test_what_could_not_be_compared_is_an_error_and_what_is_wrong_a_failure() -> None:
    other = {"verdict": Verdict.NOT_COMPARABLE, "value": 0.0, "note": "another shape"}
    night = run(measurement(case="a", **other), failing(case="b"), suites=[WHOLE, LOST])
    results = {c.classname: list(c.result) for suite in parsed(night) for c in suite}
    [blocked], [wrong] = results["parity.a"], results["parity.b"]
    assert isinstance(blocked, Error) and "another shape" in blocked.message
    assert isinstance(wrong, Failure)
    assert blocked.message.endswith("; 1 of 1 gate")
    [missing] = results["suites"]
    assert isinstance(missing, Error) and missing.message == "no reference"


@pytest.mark.parametrize("kind", ["live", "recorded", "absent"])
def test_every_export_tells_a_live_reference_from_a_recorded_one(kind: str, tmp_path: Path) -> None:
    night = run(
        measurement(),
        findings=(finding(severity=Severity.ERROR), finding(subject="other")),
        suites=[WHOLE],
        reference={"kind": kind},
        device={"kind": "cuda", "name": "H200"},
        fault="planted",
    )
    decision = decide(night, None)
    found = samples(night)
    for series in found.values():
        for sample in series:
            told = {name: sample.labels[name] for name in ("reference", "device", "fault")}
            assert told == {"reference": kind, "device": "cuda", "fault": "planted"}
    counted = {
        (s.labels["probe"], s.labels["severity"]): s.value
        for s in found["megalodon_numerics_findings"]
    }
    assert counted == {("values", "error"): 1.0, ("values", "ok"): 1.0}
    one = step(night, decision)
    assert (one.facts["reference"], one.facts["device"]) == (kind, "cuda")
    # Curves go on over nights of both kinds, so each step says which it is.
    assert one.values["reference_live"] == (kind == "live")
    assert one.values["device/cuda"] == 1.0
    properties = ET.fromstring(junit(night, decision)).iter("property")
    facts = {p.get("name"): p.get("value") for p in properties}
    assert (facts["reference"], facts["device"], facts["planted fault"]) == (
        kind,
        "cuda",
        "planted",
    )
    folder, to = write_run(tmp_path, night), tmp_path / "a.arrow"
    arrow_file(night, decision, folder, to)
    table = pa.ipc.open_file(to).read_all()
    assert set(table["reference"].to_pylist()) == {kind}
    assert set(table["run_verdict"].to_pylist()) == {"REGRESSED"}


def test_suites_that_share_the_name_of_a_curve_are_added_up() -> None:
    rows = (
        measurement(suite="port:a", case="x"),
        failing(suite="port-a", case="y"),
        measurement(suite="port-a", case="z", kind=Kind.LOSS, verdict=Verdict.NOT_COMPARABLE),
    )
    night = run(*rows)
    values = step(night, decide(night, None)).values
    assert (values["gates/port-a"], values["gates_held/port-a"]) == (3.0, 1.0)


def test_series_that_share_their_visible_labels_are_one_with_the_gravest_value() -> None:
    night = run(failing(case="a\x1b"), measurement(case="a\\u001b"), suites=[WHOLE])
    [share] = samples(night)[SHARE]
    assert share.labels["case"] == "a\\u001b"
    assert share.value == pytest.approx(failing().fraction)


def test_no_character_that_steers_a_terminal_leaves_in_a_text() -> None:
    name = "n\x1b[2J\x00\u202e<b>"
    night = run(
        failing(case=name, edge=name, quantity=name, note=name, suite=name),
        findings=(finding(severity=Severity.ERROR, probe=name, subject=name, message=name),),
        suites=[{**LOST, "name": name, "status": name, "reason": name}],
        id=f"2026-11-20T21-30-00Z-{name}",
        commit=name,
        reference={"kind": name},
        device={"kind": name, "name": name},
        fault=name,
        durations={name: 1.0},
    )
    decision = decide(night, None)
    one = step(night, decision)
    texts = [junit(night, decision), openmetrics(night, decision), one.run, *one.facts.values()]
    for text in (*texts, *one.values):
        assert not set("\x00\x1b\u202e") & set(text)
    parsed(night)


def test_a_test_has_a_time_where_it_was_measured_and_none_elsewhere() -> None:
    timed = {"suite": "parity", "case": "a", "edge": measurement().edge, "seconds": 1.25}
    odd = [{**timed, "case": case, "seconds": s} for case, s in (("c", math.nan), ("d", -1.0))]
    night = run(
        *(measurement(case=case, suite="parity") for case in "abcd"),
        findings=(finding(probe="values"), finding(probe="poles")),
        durations={"parity": 3.0, "stability": 2.0},
        times=[timed, *odd, {"suite": "stability", "case": "poles", "seconds": 0.5}],
    )
    root = ET.fromstring(junit(night, decide(night, None)))
    times = {test.get("classname"): test.get("time") for test in root.findall("testsuite/testcase")}
    assert {times[f"parity.{case}"] for case in "bcd"} == {None}
    assert times["parity.a"] == "1.250"
    probes = {x.get("name"): x.get("time") for x in root.findall("testsuite[@name='probes']/*")}
    assert probes == {"values": None, "poles": "0.500"}
    suites = {suite.get("name"): suite.get("time") for suite in root}
    assert suites == {"parity": "3.000", "probes": "2.000", "verdict": None}
