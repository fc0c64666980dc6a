"""What the page shows of a port: the answer first, colours that follow shares, names as text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from parity.engine.measure.measurement import Kind, Verdict
from reports.page.render import render
from reports.page.sections import ports
from reports.verdict.decide import decide
from reports.verdict.history import History
from reports.verdict.replays import program, replays
from tests.reports.nights import measurement, run

BUG = "layers_0.<mlp>"


def stage(name: str, forced: float | None, tolerance: float = 1e-11) -> dict[str, Any]:
    return {
        "name": name,
        "original": name.replace("_", "."),
        "free": 0.1,
        "forced": forced,
        "tolerance": tolerance,
    }


def document(name: str = "llama", *, holds: bool = False, case: str = "") -> dict[str, Any]:
    culprit = "" if holds else BUG
    return {
        "title": f"{name}/{case}" if case else name,
        "name": name,
        "case": case,
        "file": "my port.py",
        "versions": {"torch": "2.6.0"},
        "sides": {"original": "torch", "port": "flax"},
        "holds": holds,
        "sentence": f"{name}: holds" if holds else f"{name}: diverges at {BUG}, twin.py:7 (f)",
        "text": "",
        "place": {
            "edge": "port64:original64",
            "stages": [stage("embed", 0.0), stage("norm", 5e-12), stage(BUG, 0.2)],
            "culprit": culprit,
            "original": culprit and BUG.replace("_", "."),
            "last_right": culprit and "norm",
            "worst": [] if holds else [{"index": [0, 3], "actual": 1.5, "expected": None}],
            "source": [] if holds else ["twin.py:7 (f)"],
            "mask": [],
        },
        "matching": {
            "pairs": [
                {"port": "a", "made_of": "x", "means": "by value", "note": "", "also": [],
                 "equal": True},
                {"port": "b", "made_of": "y", "means": "but for a slice", "note": "rows 5",
                 "also": ["z"], "equal": holds},
            ],
            "only_port": [],
            "only_original": [{"name": "w", "shape": [2, 3], "closest": "b", "note": ""}],
        },
        "alignment": {
            "pairs": [{"port": "norm", "original": "norm", "layout": "unchanged", "by": "value",
                       "distance": 0.0}],
            "only_port": [],
            "only_original": [{"name": "act", "shape": [], "closest": "", "note": ""}],
        },
        "bfloat16": [{"name": "norm", "port": 2e-3, "original": 1e-3, "floor": None}],
        "notices": ["torch: no float64 here"],
    }  # fmt: skip


def port_run(*documents: dict[str, Any], **changes: Any):
    rows = []
    for each in documents:
        verdict = Verdict.PASS if each["holds"] else Verdict.FAIL
        value = 1e-12 if each["holds"] else 0.2
        rows.append(
            measurement(case=each["title"], suite=each["name"], edge="port64:original64",
                        quantity=BUG, kind=Kind.BLOCK, stage=2, value=value, tolerance=1e-11,
                        verdict=verdict)
        )  # fmt: skip
    names = dict.fromkeys(each["name"] for each in documents)
    suites = [{"name": n, "status": "ran", "planned": 1, "executed": 1} for n in names]
    fields: dict[str, Any] = {"kind": "port", "ports": list(documents), "suites": suites}
    return run(*rows, **{**fields, **changes})


def page_of(night) -> str:
    return render(night, decide(night, None), History())


def test_the_page_says_where_a_port_diverges() -> None:
    page = page_of(port_run(document()))
    assert "Where it starts" in page and "twin.py:7 (f)" in page and "it starts here" in page
    # Names are data, and never markup.
    assert "<mlp>" not in page and "&lt;mlp&gt;" in page
    assert "note</span> torch: no float64 here" in page
    assert "1 of 2 equal the original" in page and "rows 5; also z" in page
    assert ">NaN<" in page.replace("nan", "NaN")
    # Nothing of a night: its sections would be empty.
    assert 'id="streaming"' not in page and "Oracle: float64 NumPy" not in page


def test_a_port_that_holds_has_no_place_where_it_starts() -> None:
    """Negative control of the one above."""
    page = page_of(port_run(document(holds=True)))
    assert "Where it starts" not in page and "it starts here" not in page
    assert "2 of 2 equal the original" in page
    assert "PASS" in page


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("verdict", [*Verdict, None], ids=str)
def test_a_port_is_green_where_its_report_and_its_gates_are(
    says: bool, verdict: Verdict | None
) -> None:
    """Neither alone: a report may know more than its gates, such as that no result was compared."""
    gate = measurement(
        case="port", suite="port", edge="port64:original64", quantity="x", tolerance=1.0,
        value=2.0 if verdict is Verdict.FAIL else 0.5,
    )  # fmt: skip
    if verdict in (Verdict.NOT_COMPARABLE, Verdict.INFO):
        gate = replace(gate, tolerance=math.nan)
    rows = [] if verdict is None else [replace(gate, verdict=verdict)]
    night = run(*rows, kind="port", ports=[document("port", holds=says)])
    [shown] = ports.ports(night)
    assert (shown["state"] == "pass") is (says and verdict is Verdict.PASS)
    whole = document("another", holds=True)
    held = replace(gate, case="another", suite="another", value=0.5, tolerance=1.0)
    both = run(*rows, held, kind="port", ports=[whole, document("port", holds=says)])
    # Those that do not hold come first.
    assert next(p["title"] for p in ports.ports(both)) == (
        "another" if shown["state"] == "pass" else "port"
    )


def test_ports_that_diverge_come_first_and_are_counted_in_the_sentence() -> None:
    night = port_run(document("a", holds=True), document("b"), document("c", case="long"))
    assert [p["title"] for p in ports.ports(night)] == ["b", "c/long", "a"]
    sentence = decide(night, None).sentence
    assert f"b: diverges at {BUG}, twin.py:7 (f)" in sentence and "1 more port" in sentence


@pytest.mark.parametrize(
    ("forced", "colour"),
    [(0.0, "h0"), (5e-16, "h0"), (5e-13, "h3"), (9e-12, "h5"), (2e-11, "fail"), (None, "fail")],
)
def test_colours_follow_the_share_of_the_tolerance(forced: float | None, colour: str) -> None:
    found = document()
    found["place"]["stages"] = [stage("norm", forced)]
    (port,) = ports.ports(port_run(found))
    assert port["stages"][0]["heat"] == colour


def test_a_night_beside_ports_keeps_its_sections() -> None:
    mixed = port_run(document(), kind="pytest", suites=[])
    assert ports.only_ports(mixed)
    other = run(measurement(suite="parity"), kind="pytest", ports=[document()])
    assert not ports.only_ports(other)
    assert 'id="streaming"' in page_of(other) and "Where it starts" in page_of(other)
    assert not ports.only_ports(run(measurement()))


def test_a_port_is_measured_again_by_its_own_command() -> None:
    night = port_run(document("a", holds=True), document("b", case="long"))
    commands = [each["command"] for each in replays(night, decide(night, None))]
    assert commands == [
        f"{program()} port 'my port.py'",
        f"{program()} port 'my port.py' --case b/long",
    ]


def entry(name: str, role: str = "output", **more: str) -> dict[str, str]:
    return {"name": name, "role": role, "port": "", **more}


def ledger(**more: Any) -> Any:
    [port] = ports.ports(port_run(document(holds=True) | more))
    return port["ledger"]


def test_what_of_the_original_was_compared_is_shown_and_what_was_not_first():
    shown = ledger(
        not_compared=[entry("w", "gradient", reason="0"), entry("cache", reason="a <b>")],
        compared=[entry("logits", port="output"), entry("head", "gradient", port="kernel")],
    )
    assert shown["sentence"] == "1 of 2 results compared, 1 of 2 derivatives compared"
    assert [row["name"] for row in shown["rows"]] == ["cache", "w", "logits", "head"]
    assert [row["outcome"] for row in shown["rows"]] == ["a <b>", "0", "compared", "compared"]
    more = {"not_compared": [entry("cache", reason="a <b>")], "compared": [entry("y")]}
    html = page_of(port_run(document(holds=True) | more))
    assert "1 of 2 results compared" in html and "a &lt;b&gt;" in html and "a <b>" not in html


def test_derivatives_by_inputs_come_last_and_open_nothing():
    """They are never compared: a table that is open for each of them would be looked at by none."""
    by_input = [entry(name, "derivative by input", reason="why") for name in ("x", "mask")]
    shown = ledger(not_compared=by_input, compared=[entry("y")])
    assert shown["left_out"] == 0
    assert [row["name"] for row in shown["rows"]] == ["y", "x", "mask"]
    assert shown["sentence"].endswith(", 0 of 2 derivatives by inputs compared")
    shown = ledger(not_compared=[*by_input, entry("cache", reason="why")], compared=[entry("y")])
    assert shown["left_out"] == 1 and shown["rows"][0]["name"] == "cache"


def test_derivatives_that_were_not_taken_are_one_line():
    shown = ledger(
        not_compared=[entry("grad/*", "gradient", reason="not asked for")], compared=[entry("y")]
    )
    assert shown["sentence"] == "1 of 1 result compared, no derivative compared"
    assert shown["rows"][0]["name"] == "all derivatives"


def test_of_many_stages_those_that_lose_most_in_bfloat16_are_shown():
    """The table has 400 rows; the sentence is about the last stage in order of computation."""
    stages = [
        {"name": f"s{i}", "port": 1e-3 * (i + 1), "original": 1e-3, "floor": None}
        for i in range(402)
    ]
    [shown] = ports.ports(port_run({**document(), "bfloat16": stages}))
    names = [row["name"] for row in shown["bfloat16"]["rows"]]
    assert names == [f"s{i}" for i in range(401, 1, -1)]
    assert shown["bfloat16"]["sentence"].startswith("s401 is off by 4.0e-01 in the port")


def test_runs_of_older_versions_have_less_of_a_ledger():
    assert ledger() is None
    shown = ledger(not_compared=[entry("cache", reason="why")])
    assert (shown["sentence"], len(shown["rows"])) == ("1 not compared", 1)


def test_the_page_of_a_user_s_tests_has_nothing_of_megalodon() -> None:
    """Rows without the report of a port; a failing one is repeated by the tests, not by a night."""
    rows = measurement(case="mlp", suite="mlp", edge="port64:original64", verdict=Verdict.FAIL)
    fields: dict[str, Any] = {"kind": "pytest", "reference": {"kind": None}}
    page = page_of(run(rows, **fields))
    assert "Measured by tests, with their own" in page
    words = ("megalodon-hf <code>", f"{program()} nightly", 'id="streaming"', 'class="account"')
    for word in words:
        assert word not in page
    # The control: a session of Megalodon has all of them.
    page = page_of(run(measurement(suite="parity", verdict=Verdict.FAIL), kind="pytest"))
    for word in words:
        assert word in page
