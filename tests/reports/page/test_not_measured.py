"""What failed, was not measured or could not be compared looks green nowhere on the page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.port_tolerances import PortEdge
from reports.page import side_by_side
from reports.page.render import render
from reports.page.sections import (
    facts,
    heat,
    marks,
    ports,
    records,
    starts,
    tables,
    trends,
    what_if,
)
from reports.page.sections.meshes import meshes
from reports.store.runs import Run
from reports.subjects.mla_moe.section import architectures
from reports.verdict.decide import decide
from reports.verdict.history import History
from stability.core.findings import Severity
from tests.reports.nights import earlier, failing, finding, manifest, measurement, run
from tests.reports.page.test_port_page import document, port_run

BAD = pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.NOT_COMPARABLE])
VALUES = pytest.mark.parametrize("value", [math.nan, 0.0, 1.0])
"""What a gate that does not hold may have stored: a number within the tolerance proves nothing."""
INFO: dict[str, Any] = {"tolerance": math.nan, "verdict": Verdict.INFO}


def pair(verdict: Verdict, value: float = math.nan, **shared: Any) -> list[Measurement]:
    """A gate that holds with a large share, and one of the same kind that does not."""
    good = measurement(**shared, quantity="a", value=3.9e-6, stage=1)
    return [good, measurement(**shared, quantity="b", value=value, verdict=verdict, stage=2)]


@given(st.lists(st.sampled_from(list(Verdict)), max_size=5))
def test_a_group_holds_only_if_it_has_gates_and_all_of_them_hold(verdicts: list[Verdict]) -> None:
    gates = [v for v in verdicts if v is not Verdict.INFO]
    state = tables.state_of(measurement(verdict=v) for v in verdicts)
    assert (state == "pass") == (bool(gates) and set(gates) == {Verdict.PASS})
    assert (state == "fail") == (Verdict.FAIL in gates)
    assert (state == "info") == (not gates)


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, 1e-5])
@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_gate_is_what_has_a_verdict_whatever_its_tolerance(verdict, tolerance) -> None:
    """What could not be compared has none, and is a gate that does not hold."""
    row = measurement(quantity="b", verdict=verdict, tolerance=tolerance)
    data = tables.frame([measurement(), row])
    gated = verdict is not Verdict.INFO
    assert len(tables.gates_of(data)) == 1 + gated
    [first] = tables.overview(data, History())
    assert (first["gates"], first["passed"]) == (1 + gated, 1 + (verdict is Verdict.PASS))
    assert (first["state"] == "pass") is (verdict in (Verdict.PASS, Verdict.INFO))
    matrix = tables.matrix(data, Kind.LOGITS)
    assert (matrix["gates"], matrix["failing"]) == (
        1 + gated, int(verdict not in (Verdict.PASS, Verdict.INFO))
    )  # fmt: skip


@BAD
@VALUES
def test_the_first_table_counts_what_holds_and_shows_what_does_not(verdict, value) -> None:
    rows = pair(verdict, value)
    [edge] = tables.overview(tables.frame(rows), History())
    assert (edge["passed"], edge["gates"]) == (1, 2)
    assert edge["state"] == tables.STATES[verdict] != "pass"
    shown = edge["gate"]
    assert (shown.quantity, shown.state) == ("b", edge["state"])
    if verdict is Verdict.NOT_COMPARABLE:
        assert shown.value == "not comparable"
    night = run(*rows)
    page = render(night, decide(night, None), History())
    first = page[page.index('<table class="overview ') :].partition("</table>")[0]
    assert "✓" not in first and " 1 / 2" in first


@BAD
@VALUES
def test_the_table_of_cases_counts_what_holds(verdict, value) -> None:
    listed = [{"name": n, "title": "t", "why": "t"} for n in ("baseline", "whole", "told", "none")]
    rows = [*pair(verdict, value), measurement(case="whole"), measurement(case="told", **INFO)]
    shown = {case["name"]: case for case in facts.cases(manifest(cases=listed), rows)}
    assert (shown["baseline"]["state"], shown["baseline"]["held"]) == (
        tables.STATES[verdict],
        "1 / 2",
    )
    assert (shown["whole"]["state"], shown["whole"]["held"]) == ("pass", "1 / 1")
    # A number without a tolerance is no gate that holds.
    assert (shown["told"]["state"], shown["told"]["held"]) == ("warning", "no gate")
    assert (shown["none"]["state"], shown["none"]["held"]) == ("warning", "not run")


@BAD
@VALUES
def test_every_table_of_a_kind_shows_the_gate_that_does_not_hold(verdict, value) -> None:
    state = tables.STATES[verdict]
    logits = tables.frame(pair(verdict, value, kind=Kind.LOGITS))
    table = tables.matrix(logits, Kind.LOGITS)
    assert (table["failing"], table["gates"]) == (1, 2)
    assert table["worst"]["state"] == table["rows"][0]["cells"][0].state == state
    [metrics] = tables.metric_tables(logits, Kind.LOGITS, History())
    assert metrics["failing"] == 1
    assert [row["cell"].state for row in metrics["rows"]] == [state, "pass"]
    derivatives = tables.frame(
        [m for case in ("x", "y") for m in pair(verdict, value, kind=Kind.GRADIENT, case=case)]
    )
    [parameters] = tables.parameter_tables(derivatives)
    assert parameters["failing"] == 2
    assert [(row["cell"].state, row["failing"], row["cases"]) for row in parameters["rows"]] == [
        (state, 2, 2),
        ("pass", 0, 2),
    ]
    moments = tables.trajectory_rows(tables.frame(pair(verdict, value, kind=Kind.TRAJECTORY)))
    assert moments["failing"] == 1
    assert [row["cells"][0].state for row in moments["rows"]] == ["pass", state]


@BAD
@VALUES
def test_a_heat_map_shows_and_counts_the_stage_that_does_not_hold(verdict, value) -> None:
    rows = pair(verdict, value, kind=Kind.BLOCK)
    [edge] = heat.heat_maps(tables.frame(rows), decide(run(*rows), None))
    assert edge["worst"].summary.startswith("1 of 2 stages outside tolerance; first at b, worst b")
    [(_, [good]), (_, [bad])] = edge["worst"].rows
    assert (good.state, good.first, bad.state, bad.first) == (
        "pass",
        False,
        tables.STATES[verdict],
        True,
    )
    if verdict is Verdict.NOT_COMPARABLE:
        assert bad.log10 is None


@BAD
@VALUES
def test_meshes_and_the_second_architecture_count_what_holds(verdict, value) -> None:
    on_mesh = {"case": "mesh megalodon data=8", "edge": "mesh64:one64", "suite": "mesh"}
    view = meshes(run(*pair(verdict, value, **on_mesh)))
    assert view is not None
    [row] = view["rows"]
    assert (view["failing"], row["state"], row["held"]) == (1, "fail", "1 / 2")
    assert (row["cells"][0]["state"], row["cells"][0]["quantity"]) == ("fail", "b")
    port = {"case": "mla-moe long", "edge": str(PortEdge.PORT32_ORIGINAL32)}
    night = run(*pair(verdict, value, **port), measurement(**{**port, "case": "told"}, **INFO))
    shown = architectures(night)
    assert shown is not None
    by_name = {case["name"]: case for case in shown["cases"]}
    long, told = by_name["mla-moe long"], by_name["told"]
    assert (long["state"], long["gates"]) == (tables.STATES[verdict], "1 / 2")
    assert (told["state"], told["gates"]) == ("info", "0 / 0")
    assert shown["gates"] == ("not in this run", "1 of 2")


def test_the_worst_logits_of_an_architecture_are_those_that_are_no_number() -> None:
    port = {"case": "mla-moe long", "edge": str(PortEdge.PORT32_ORIGINAL32)}
    rows = [measurement(**port, quantity=q, value=v) for q, v in (("a", math.nan), ("b", 1e-7))]
    for order in (rows, rows[::-1]):
        shown = architectures(run(*order))
        assert shown is not None
        assert shown["cases"][0]["logits"] == "NaN"
        assert "NaN" in {row["mla_moe"] for row in shown["rows"]}


@BAD
def test_a_port_holds_only_if_its_report_and_its_gates_do(verdict) -> None:
    whole, wrong = document("whole", holds=True), document("wrong", holds=True)
    night = port_run(whole, wrong)
    bad = measurement(case="wrong", suite="wrong", edge="port64:original64", verdict=verdict)
    none = port_run(document("none", holds=True)).manifest.ports
    for rows, documents in (((*night.measurements, bad), (whole, wrong)), ((), none)):
        shown = {p["title"]: p for p in ports.ports(run(*rows, ports=list(documents)))}
        assert [name for name, p in shown.items() if p["state"] == "pass"] == (
            ["whole"] if rows else []
        )
        # Those that do not hold come first.
        assert next(iter(shown)) != "whole"
    [edge] = shown_edges(night.measurements, bad)
    assert (edge["state"], edge["held"]) == ("fail", "1 / 2")
    assert edge["used"]["state"] == "fail"


def shown_edges(rows: tuple[Measurement, ...], bad: Measurement) -> list[dict[str, Any]]:
    night = run(*rows, bad, ports=[document("wrong", holds=True)])
    return ports.ports(night)[0]["edges"]


@BAD
@VALUES
def test_two_runs_side_by_side_count_what_holds(verdict, value) -> None:
    before, after = earlier(measurement(quantity="a", **INFO)), run(*pair(verdict, value))
    then, now = decide(before, None), decide(after, before)
    [edge] = side_by_side._edges(before, then, after, now)
    assert edge["sides"][0] is None
    assert (edge["sides"][1]["state"], edge["sides"][1]["held"]) == (
        tables.STATES[verdict],
        "1 / 2",
    )
    assert edge["sides"][1]["starts"]
    [case] = side_by_side._cases(before, then, after, now)
    # A number without a tolerance, in the earlier run, is nothing that did not fail.
    assert [side["state"] for side in case["sides"]] == ["info", tables.STATES[verdict]]
    assert case["sides"][0]["size"] == "not measured"


def errors() -> Run:
    return run(
        measurement(),
        findings=(
            finding(severity=Severity.ERROR, subject="a", message="holds NaN"),
            finding(severity=Severity.ERROR, subject="b", probe="poles"),
            finding(severity=Severity.WARNING, subject="c"),
        ),
    )


def test_errors_of_probes_are_counted_wherever_failures_are() -> None:
    night = errors()
    decision = decide(night, None)
    shown = starts.starts(night, decision, History(), "..")
    assert shown["failing"] == 2
    assert [f["subject"] for f in shown["findings"]] == ["a", "b"]
    tallies = {t["what"]: t["n"] for t in starts.counts(decision)}
    assert (tallies["failures"], tallies["warnings"]) == (2, 1)
    marked = marks.of_sections(night.measurements, night.findings, decision)
    assert {marked["audits"], marked["poles"]} == {"fail"}
    page = render(night, decision, History())
    assert f"✕ {len(marked)} with failures" in page and "holds NaN" in page
    told = dict(side_by_side.facts_of(night))
    assert (told["findings that are errors"], told["warnings"]) == ("2", "1")


def test_changes_that_are_not_shown_are_counted() -> None:
    decision = decide(run(failing(quantity="a"), failing(quantity="b")), None)
    [group] = tables.change_rows(decision.changes, False, limit=1)
    assert (len(group["rows"]), group["total"]) == (1, 2)


def test_a_change_of_a_whole_group_leads_to_no_row() -> None:
    """The page has a row for each gate and none for a group: a link to it would lead nowhere."""
    gate = failing(quantity="a")
    [of_one] = decide(run(gate), None).changes
    of_group = replace(of_one, quantity="all logits gates", kind="logits")
    [group] = tables.change_rows([of_one, of_group])
    assert [row["id"] for row in group["rows"]] == [records.id_of(gate), ""]


def test_what_was_skipped_and_what_did_not_run_are_counted_apart() -> None:
    part = {"name": "a", "planned": 5, "executed": 3, "status": "failed", "reason": "r"}
    left = {"name": "b", "planned": 7, "executed": 0, "status": "skipped", "reason": "r"}
    decision = decide(run(measurement(), suites=[part, left]), None)
    tallies = {t["what"]: (t["n"], t["href"]) for t in starts.counts(decision)}
    assert tallies["not run"] == (2, "suites")
    assert tallies["skipped"] == (7, "suites")


@BAD
def test_where_it_starts_tells_a_failure_from_what_could_not_be_compared(verdict) -> None:
    night = run(*pair(verdict))
    [row] = starts.starts(night, decide(night, None), History(), "..")["rows"]
    assert (row["quantity"], row["state"]) == ("b", tables.STATES[verdict])


def test_the_trend_of_an_edge_ends_with_a_gap_where_a_gate_is_no_number_now() -> None:
    """The largest of a share and NaN is NaN, in whichever order Python compares them."""
    rows = [measurement(quantity="a"), failing(quantity="b", value=math.nan)]
    for order in (rows, rows[::-1]):
        history = History(runs=("x",), series={m.key: (0.5,) for m in order})
        shown = trends.trends(tables.frame(order), history)
        assert shown is not None
        [line] = shown["lines"]
        assert line.points[0] == (-1, math.log10(0.5))
        assert math.isnan(line.points[1][1])


def test_a_section_with_what_could_not_be_compared_is_marked_and_is_not_red() -> None:
    night = run(*pair(Verdict.NOT_COMPARABLE, kind=Kind.GRADIENT), measurement())
    marked = marks.of_sections(night.measurements, (), decide(night, None))
    assert marked == {"gradients": "blocked"}
    page = render(night, decide(night, None), History())
    assert "with failures" not in page
    both = run(*night.measurements, failing(kind=Kind.GRADIENT, quantity="c"))
    marked = marks.of_sections(both.measurements, (), decide(both, None))
    assert marked["gradients"] == "fail"


@pytest.mark.parametrize(
    ("entry", "state"),
    [({"value": 0.1, "holds": True}, "pass"), ({"value": 0.1, "holds": False}, "fail"),
     ({"holds": True}, "info"), ({}, "info"), ({"holds": False}, "fail")],
)  # fmt: skip
def test_a_known_difference_holds_only_where_it_was_measured(entry, state) -> None:
    [shown] = facts.known_differences(manifest(seams=[{"id": "d", "bound": "b", **entry}]))
    assert shown["state"] == state


def test_a_bfloat16_side_without_a_number_is_never_the_best() -> None:
    shared: dict[str, Any] = {"dtype": "bfloat16", **INFO}
    rows = [
        measurement(edge="autocast:oracle", value=math.nan, **shared),
        measurement(edge="jaxbf16:oracle", value=4e-3, **shared),
        measurement(edge="jax32:oracle", value=8e-3, **shared),
        # This side has a loss and no logits.
        measurement(edge="referencebf16:oracle", quantity="loss", value=0.0, **shared),
    ]
    for order in (rows, rows[::-1]):
        shown = tables.precision_rows(tables.frame(order))
        assert [row["times"] for row in shown] == ["1.00", "2.00", "–", "–"]
        assert [row["logits"] for row in shown[:2]] == ["4.0e-03", "8.0e-03"]
        assert {row["logits"] for row in shown[2:]} == {"NaN"}


def test_a_product_that_could_not_be_measured_is_beyond_its_bounds() -> None:
    row = {"gemm": "model.layers.0.a", "direction": "forward", "format": "nvfp4", "error": 0.1,
           "mse": 0.1, "underflow": 0.0, "clipped": 0.0, "fraction": 0.5}  # fmt: skip
    spoiled = {**row, "gemm": "model.layers.1.a", "error": None, "mse": None, "fraction": None}
    both = [
        {**each, "direction": direction}
        for each in (spoiled, row)
        for direction in ("forward", "input_grad", "weight_grad")
    ]
    for rows in (both, both[::-1]):
        shown = what_if.section(run(stability={"what if": rows}))
        assert shown is not None
        assert (shown["beyond"], shown["products"]) == (3, 6)
        assert {r["state"] for r in shown["rows"]} == {"note"}
        assert {r["worst"] for r in shown["rows"]} == {"NaN"}
        assert "model.layers.1.a at Inf" in shown["maps"][0].summary
