"""What the page's sections and its embedded rows are made of, before any markup."""

from __future__ import annotations

import base64
import gzip
import json
import math
from dataclasses import replace

import pytest

from parity.engine.measure.deviation import HIGH, LOW, Deviation, Worst
from parity.engine.measure.measurement import Kind, Verdict
from reports.page.render import DRILLED, render
from reports.page.sections import facts, marks, watching
from reports.page.sections.drilldown import BARS, drilldown
from reports.page.sections.heat import MAPS, heat_maps
from reports.page.sections.meshes import meshes
from reports.page.sections.records import COLUMNS, embed, id_of
from reports.page.sections.tables import frame
from reports.page.sections.trends import trends
from reports.store.runs import StoreError, read_run, write_run
from reports.store.tensors import TENSORS
from reports.verdict.decide import decide
from reports.verdict.history import History
from stability.core.findings import Severity
from tests.reports.nights import described, earlier, failing, finding, manifest, measurement, run


def unpacked(night, history=None, drilldowns=None):
    rows = night.measurements
    text = embed(rows, night, history or History(), drilldowns or {})
    return json.loads(gzip.decompress(base64.b64decode(text)))


def column(document, name):
    result = document["columns"][name]
    return result if isinstance(result, list) else [result["names"][i] for i in result["at"]]


def test_rows_are_embedded_exactly_and_the_worst_come_first():
    night = run(
        measurement(value=1 / 3e6),
        failing(quantity="a", value=math.nan),
        failing(quantity="b", value=5e-5),
        measurement(metric="cosine", value=1.0, tolerance=math.nan, verdict=Verdict.INFO),
        findings=(finding(severity=Severity.ERROR, subject="w"), finding(subject="fine")),
    )
    result = unpacked(night)
    assert tuple(result["columns"]) == COLUMNS
    assert column(result, "quantity") == ["a", "b", "w", "logits", "fine", "logits"]
    assert column(result, "value")[:2] == ["nan", 5e-5]
    assert 1 / 3e6 in column(result, "value")
    assert column(result, "suite").count("stability") == 2
    # What only informs is no row to link to.
    assert [bool(i) for i in column(result, "id")] == [True] * 5 + [False]


def test_an_error_of_a_probe_stands_between_the_gates_that_fail_and_those_that_hold():
    """With the worst rows first, an error below a gate at 99 % of its tolerance goes unread."""
    found = [finding(severity=severity, subject=severity.value) for severity in Severity]
    rows = failing(quantity="broken"), measurement(quantity="held", value=3.96e-6)
    for order in (found, found[::-1]):
        document = unpacked(run(*rows, findings=tuple(order)))
        quantities = column(document, "quantity")
        assert quantities[:2] == ["broken", "error"]
        assert quantities.index("warning") < quantities.index("ok") < quantities.index("note")


def test_an_id_is_the_same_every_night_and_of_one_row_only():
    m = measurement()
    assert id_of(m) == id_of(replace(m, value=2.0, verdict=Verdict.FAIL, identity="other"))
    others = [replace(m, **{name: "x"}) for name in ("case", "edge", "quantity", "metric")]
    assert len({id_of(n) for n in (m, *others)}) == 5
    # Parts are kept apart: moving a letter across them is another row.
    assert id_of(replace(m, case="ab", edge="c")) != id_of(replace(m, case="a", edge="bc"))


def test_a_trend_is_in_hundredths_of_a_decade_with_gaps():
    m = measurement()
    shares = (0.1, None, 1.0, math.inf, 0.0)
    history = History(runs=tuple("abcde"), series={m.key: shares})
    result = unpacked(run(m), history)
    assert result["nights"] == list("abcde")
    assert result["trends"] == {"0": [-100, None, 0, "x", -900]}


def test_a_replay_quotes_what_it_is_given():
    name = "a case; rm -rf /"
    night = run(measurement(case=name), cases=[{"name": name}], fault="f g")
    command = unpacked(night)["replay"][name]
    quoted = "nightly --case 'a case; rm -rf /' --fault 'f g' --reference recorded"
    assert command.endswith(quoted)


def nights(m, shares):
    names = tuple(f"n{i}" for i in range(len(shares)))
    return History(runs=names, series={m.key: tuple(shares)})


@pytest.mark.parametrize(("now", "moved"), [(0.5, 0), (0.52, 0), (0.75, 1), (0.25, 1)])
def test_gates_that_left_their_median_are_named(now, moved):
    m = measurement(value=now * 4e-6)
    result = trends(frame([m]), nights(m, [0.5, 0.49, 0.51, None, 0.5] * 13))
    assert result["nights"] == 66
    assert len(result["moved"]) == moved
    assert [r["cell"].id for r in result["moved"]] == [id_of(m)] * moved
    points = result["lines"][0].points
    assert len(points) == 66
    assert points[-1] == (0, math.log10(now))
    assert math.isnan(points[3][1])


@pytest.mark.parametrize("odd", range(7))
@pytest.mark.parametrize("now", [0.5, 0.75])
def test_a_gate_moved_from_the_median_of_all_nights_whichever_of_them_was_odd(now, odd):
    """Neither the night before nor a mean, which one odd night would move."""
    shares = [0.5, 0.5, None, 0.5, 0.5, math.nan, 0.5]
    shares[odd] = 0.9
    m = measurement(value=now * 4e-6)
    moved = trends(frame([m]), nights(m, shares))["moved"]
    assert [row["factor"] for row in moved] == ([pytest.approx(1.5)] if now == 0.75 else [])


def test_a_trend_shows_what_was_not_measured_as_a_gap():
    m = failing(value=math.nan)
    result = trends(frame([m]), nights(m, [math.nan, 0.5, None]))
    assert [math.isfinite(y) for _, y in result["lines"][0].points] == [False, True, False, False]
    assert not result["infinite"]
    assert trends(frame([m]), History()) is None


@pytest.mark.parametrize("largest", [0.5, 3e7])
def test_a_failure_at_a_tolerance_of_0_is_above_every_other(largest):
    """Negative control of what a chart once did: the line had a gap, and ended where it held."""
    exact = failing(quantity="tokens", tolerance=0.0, value=2.0, edge="jax32:oracle")
    other = failing(quantity="logits", value=largest * 4e-6, edge="jax64:oracle")
    history = History(runs=("a", "b"), series={exact.key: (math.inf, 0.0), other.key: (0.5, 0.5)})
    result = trends(frame([exact, other]), history)
    by_name = {line.name: [y for _, y in line.points] for line in result["lines"]}
    exactly, otherwise = by_name["JAX float32 vs oracle"], by_name["JAX float64 vs oracle"]
    assert exactly[0] == exactly[2] > max(*otherwise, 0.0) and exactly[1] < 0.0
    assert otherwise[2] == pytest.approx(math.log10(largest))
    assert result["infinite"]


def test_a_stage_with_several_gates_is_as_bad_as_its_worst():
    """Negative control of what a map once did: the gate that came last stood for the stage."""
    rows = [
        measurement(quantity="layers.0.cema", kind=Kind.BLOCK, stage=1),
        failing(value=4e-3, stage=2),
        measurement(metric="top1_flips", value=0.0, tolerance=0.0, stage=2),
    ]
    [edge] = heat_maps(frame(rows), decide(run(*rows), None))
    assert "1 of 2 stages" in edge["worst"].summary
    [logits] = dict(edge["worst"].rows)["logits"]
    assert (logits.state, logits.log10) == ("fail", pytest.approx(3.0))


def test_the_first_map_is_of_the_case_where_a_difference_starts_and_the_others_follow_once():
    """A case that cannot be judged has the worst rank; the verdict names the failing one first."""
    stage = {"quantity": "layers.0.cema", "kind": Kind.BLOCK, "stage": 1}
    cases = [
        measurement(case="tight", value=3.9e-6, **stage),
        measurement(case="blocked", value=math.nan, verdict=Verdict.NOT_COMPARABLE, **stage),
        *(measurement(case=f"case {i}", value=1e-9, **stage) for i in range(MAPS)),
        failing(case="fails", **stage),
    ]
    for rows in (cases, cases[::-1]):
        [edge] = heat_maps(frame(rows), decide(run(*rows), None))
        shown = [m.case for m in (edge["worst"], *edge["others"])]
        assert shown[:3] == ["fails", "blocked", "tight"]
        assert len(shown) == len(set(shown)) == MAPS
        assert edge["omitted"] == len(cases) - MAPS == 3


def test_a_stream_has_no_heat_map_where_there_are_cases_with_stages():
    rows = [
        failing(case="stream", stage=0),
        measurement(case="plain", quantity="layers.0.cema", kind=Kind.BLOCK, stage=1),
    ]
    [edge] = heat_maps(frame(rows), decide(run(*rows), None))
    assert edge["worst"].case == "plain"
    assert edge["others"] == []


def test_the_environment_is_set_against_the_baseline():
    now = manifest(versions={"jax": "2", "new": "1"}, threads=4)
    then = manifest(versions={"jax": "1", "old": "1"}, threads=4)
    result = facts.environment(now, then)
    assert ("jax", "1", "2") in result["changed"]
    assert ("new", "absent", "1") in result["changed"]
    assert ("old", "1", "absent") in result["changed"]
    assert ("threads", "4", "4") in result["same"]
    assert facts.environment(now, now)["changed"] == []
    assert facts.environment(now, None)["changed"] == []


def test_the_environment_of_a_night_on_workers_names_hosts_and_how_many_workers_died():
    part = {"processor": "EPYC", "threads": 4, "fingerprint": "f"}
    parts = [
        part | {"name": "a", "node": "m", "attempts": 1},
        part | {"name": "b", "node": "m", "attempts": 3},
        part | {"name": "c", "node": "n", "fingerprint": ""},
    ]
    rows = dict(facts.machine(manifest(parts=parts)))
    assert rows["measured on m: EPYC, 4 threads, fingerprint f"] == "a, b"
    assert rows["measured on n: EPYC, 4 threads, fingerprint ?"] == "c"
    # The last worker of a part finished it, and only those before it died.
    assert rows["workers that died and were replaced"] == "b: 2"
    nobody_died = dict(facts.machine(manifest(parts=[parts[0], parts[2]])))
    assert "workers that died and were replaced" not in nobody_died


def test_a_case_says_what_held_and_what_was_not_compared_and_why():
    rows = [
        measurement(case="a"),
        failing(case="a"),
        measurement(case="b", verdict=Verdict.NOT_COMPARABLE, note="no recording"),
    ]
    listed = [{"name": n, "title": "t", "why": "t"} for n in "abc"]
    a, b, c = facts.cases(manifest(cases=listed), rows)
    assert (a["state"], a["held"]) == ("fail", "1 / 2")
    assert b["reasons"] == ["JAX float32 vs oracle: no recording"]
    assert (c["state"], c["held"]) == ("warning", "not run")


TENSOR = Deviation(
    *("baseline", "jax32:oracle", "logits", "float32", (2, 3)),
    (1, 0, 2, *(0,) * (HIGH - 1), 1, 1, 1),
    (Worst((1, 2), 1.0, 1.0000001192092896), Worst((0, 0), math.inf, -0.5)),
)


def test_a_tensor_is_told_with_both_values_and_their_bits():
    words = drilldown(TENSOR)
    assert words["sentence"] == "2 × 3 (float32): 5 of 6 elements differ, 1 not finite."
    names = {b.name: b.count for b in words["bins"]}
    assert names["equal"] == 1
    # From 1 to beyond 2⁵² there are more powers than bars: each bar holds three of them.
    assert names["≤ 4"] == names["> 2⁵²"] == 2
    assert names["not finite"] == 1
    assert len(words["bins"]) <= BARS + 2
    assert sum(b.count for b in words["bins"]) == sum(TENSOR.histogram)
    near, odd = words["worst"]
    assert near["index"] == "[1, 2]"
    assert near["actual_bits"] == ("3f80000", "0")
    assert near["expected_bits"] == ("3f80000", "1")
    assert near["ulps"] == "1.0e+00"
    assert (odd["actual"], odd["apart"]) == ("Inf", "Inf")


def test_bars_are_powers_of_two_where_there_is_room():
    counts = (0, 3, 0, 5, *(0,) * (HIGH - LOW), 0)
    bins = drilldown(replace(TENSOR, histogram=counts))["bins"]
    assert [(b.name, b.count) for b in bins] == [("equal", 0), ("≤ ½", 3), ("≤ 1", 0), ("≤ 2", 5)]


def test_the_last_power_of_two_has_a_bar_and_what_is_beyond_it_another():
    between = [0] * (HIGH - LOW + 2)
    between[HIGH - LOW], between[HIGH - LOW + 1] = 3, 5
    bins = drilldown(replace(TENSOR, histogram=(0, *between, 0)))["bins"]
    assert [(b.name, b.count) for b in bins] == [("equal", 0), ("≤ 2⁵²", 3), ("> 2⁵²", 5)]


def test_failing_tensors_are_stored_and_read_back(tmp_path):
    night = run(failing(), tensors=(TENSOR,))
    folder = write_run(tmp_path, night)
    assert (folder / TENSORS).is_file()
    assert read_run(folder).tensors == (TENSOR,)
    (folder / TENSORS).write_bytes(b"PAR1 cut short")
    with pytest.raises(StoreError, match=r"tensors\.parquet is not the file that was stored"):
        read_run(folder)
    (folder / TENSORS).unlink()
    with pytest.raises(StoreError, match=TENSORS):
        read_run(folder)


def test_a_night_without_failures_stores_no_tensors(tmp_path):
    assert not (write_run(tmp_path, run(measurement())) / TENSORS).exists()


def test_the_page_of_a_bad_night_with_a_history_is_the_same_twice():
    rows = [failing(case=f"c{i}", quantity=f"layers.0.q{i}", stage=i) for i in range(9)]
    history = nights(rows[0], [0.5, 0.6])
    pages = [
        render(night, decide(night, earlier(measurement())), history)
        for night in (run(*rows, tensors=described(rows)) for _ in range(2))
    ]
    assert pages[0] == pages[1]
    assert pages[0].count('class="tensor"') == 6


def test_only_so_many_tensors_travel_with_the_page():
    rows = [failing(case=f"c{i}") for i in range(DRILLED + 5)]
    night = run(*rows, tensors=described(rows))
    text = render(night, decide(night, None), History())
    assert f"{DRILLED - 6} more failing tensors" in text
    assert "5 more only in <code>tensors.parquet</code>" in text


def on_mesh(case, **fields):
    fields = {"edge": "mesh64:one64", "suite": "mesh"} | fields
    return measurement(case=f"mesh megalodon {case}", **fields)


def test_meshes_are_rows_and_the_one_that_parts_comes_first_with_its_reason():
    night = run(
        on_mesh("data=8 tensor=1", value=5e-13, tolerance=1e-12),
        on_mesh("data=8 tensor=1", edge="mesh32:one32"),
        on_mesh("data=8 tensor=1", metric="replicas", value=0.0, tolerance=0.0),
        on_mesh(
            "data=2 tensor=4", quantity="loss", verdict=Verdict.FAIL, note="not a number on a side"
        ),
        on_mesh("data=2 tensor=4", quantity="q", verdict=Verdict.FAIL, note="starts at q; <q>"),
        on_mesh("data=2 tensor=4", metric="replicas", value=3.0, tolerance=0.0),
        on_mesh("data=2 tensor=4", metric="bias", tolerance=math.nan, verdict=Verdict.INFO),
    )
    view = meshes(night)
    bad, good = view["rows"]
    assert view["failing"] == 1 and len(view["edges"]) == 2
    assert (bad["mesh"], bad["state"], bad["held"]) == ("data=2 × tensor=4", "fail", "0 / 3")
    # The gate with the reason is where it starts, wherever its failure stands.
    assert (bad["start"], bad["note"], bad["copies"]) == ("q", "starts at q; <q>", "0 / 1")
    assert (good["mesh"], good["state"], good["copies"]) == ("data=8", "pass", "1 / 1")
    assert good["start"] == good["note"] == "" and good["cells"][0]["share"] == "50 %"
    assert bad["cells"][1] is None
    page = render(night, decide(night, None), History())
    assert "&lt;q&gt;" in page and "1 of 2 differ from one device" in page
    assert marks.section_of(night.measurements[3]) == "meshes"


def test_a_run_without_meshes_has_no_section_of_them():
    night = run(measurement())
    assert meshes(night) is None
    assert 'id="meshes"' not in render(night, decide(night, None), History())


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2026-11-20T01:30:59+02:00", "2026-11-19 23:30 UTC"),
        ("2026-11-20T01:30:59+00:00", "2026-11-20 01:30 UTC"),
        ("2026-11-20T01:30:59", "2026-11-20 01:30 UTC"),
        ("yesterday", "yesterday"),
    ],
)
def test_a_moment_is_shown_in_utc(created: str, shown: str) -> None:
    assert facts.moment(created) == shown


@pytest.mark.parametrize(
    ("framework", "shown"),
    [
        ("torch", ("skipped steps", "3 with gradients that were not finite")),
        ("transformers", ("skipped steps", "3 with gradients that were not finite")),
        ("optax", ("skipped looks", "3 at updates that were all 0 or not finite")),
    ],
)
def test_what_a_watched_training_skipped_is_named(framework: str, shown: tuple[str, str]) -> None:
    assert shown in watching._facts({"framework": framework, "skipped": 3})
