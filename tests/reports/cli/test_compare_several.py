"""More than two runs side by side: `compare A B C`, as text, JSON and a page."""

from __future__ import annotations

import html
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from parity.engine.measure.measurement import Verdict
from reports.page import several as several_page
from reports.page import side_by_side
from reports.page.several import render
from reports.registry.several import _edges, table
from reports.store.runs import Run, write_run
from reports.store.schema import PAGE
from reports.text import contrast_all
from reports.verdict.changes import What
from reports.verdict.decide import Word
from reports.verdict.several import compare_runs
from stability.core.findings import Severity
from tests.helpers import cli
from tests.reports.nights import bench, earlier, failing, finding, measurement, stored_below
from tests.reports.page.test_hostile_names import HOSTILE, STEERING, hostile, named, steering
from tests.reports.page.test_page import Page

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]


def night(*rows, day: int, **changes: object) -> Run:
    return earlier(*rows, day=day, suites=SUITES, **changes)


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A good night, a bad one, one of another value, one without a gate, one equal to the first."""
    root = tmp_path / "runs"
    x = measurement(quantity="x")
    for held in (
        night(measurement(), x, day=10),
        night(failing(), x, day=11, commit="b" * 40),
        night(measurement(value=1.0000001e-6), x, day=12),
        night(x, day=13),
        night(measurement(), x, day=14),
    ):
        write_run(root, held, lambda _: "<p>page</p>")
    return root


def compared(root: Path, *days: int, more: tuple[object, ...] = ()):
    return cli("compare", *(f"2026-11-{day}" for day in days), "--out", root, *more)


def test_runs_are_columns_and_what_differs_anywhere_is_a_row(runs: Path) -> None:
    result = compared(runs, 10, 11, 12, 13, 14)
    assert result.exit_code == 1
    first, *lines = result.stdout.splitlines()
    assert first.startswith("REGRESSED: run 2026-11-11T21-30-00Z-0000000 against run 2026-11-10")
    assert [line[:2] for line in lines[:5]] == [f"{i}:" for i in range(1, 6)]
    assert "PASS: Equal: all 2 gates are the same in both runs." in lines[4]
    heads, verdicts, held, row = (re.split(r"\s{2,}", line.strip()) for line in lines[5:])
    assert heads == ["1", "2", "3", "4", "5"]
    assert verdicts == ["verdict", "PASS", "REGRESSED", "CHANGED", "PASS", "PASS"]
    assert held == [
        "gates held, JAX float32 vs oracle",
        "2 / 2",
        "1 / 2",
        "2 / 2",
        "1 / 1",
        "2 / 2",
    ]
    name, *cells = row
    assert name == "logits in baseline (JAX float32 vs oracle), relative L2"
    same = "1.000000000e-06"
    assert cells == [same, "9.000000000e-06 ✕", "1.000000100e-06", "–", same]


@pytest.mark.parametrize("verdict", [*Verdict], ids=str)
def test_only_a_gate_that_passes_is_counted_as_held(verdict: Verdict) -> None:
    """In the terminal, on the page of several runs and on that of two."""
    blank = {"value": math.nan} if verdict is Verdict.NOT_COMPARABLE else {}
    blank |= {"tolerance": math.nan} if verdict is Verdict.INFO else {}
    made = failing(quantity="x") if verdict is Verdict.FAIL else measurement(quantity="x", **blank)
    made = replace(made, verdict=verdict)
    nights = [night(measurement(), made, day=day) for day in (10, 11)]
    held, gates = 1 + (verdict is Verdict.PASS), 1 + (verdict is not Verdict.INFO)
    several = compare_runs(nights)
    assert _edges(several) == [("jax32:oracle", [f"{held} / {gates}"] * 2)]
    [edge] = several_page._edges(nights)
    assert edge["cells"] == [[held, gates]] * 2
    [edge] = side_by_side._edges(nights[0], several.decisions[0], nights[1], several.decisions[1])
    assert [side["held"] for side in edge["sides"]] == [f"{held} / {gates}"] * 2
    for each in nights:
        assert side_by_side.facts_of(each)["gates held"] == f"{held} of {gates}"


def test_the_exit_code_is_that_of_the_gravest_verdict(runs: Path) -> None:
    assert compared(runs, 11, 10, 14).exit_code == 0, "both mended what the first fails"
    assert compared(runs, 10, 12, 14).exit_code == 0
    assert compared(runs, 10, 14, 11).exit_code == 1
    assert compared(runs, 10, 11, 14).exit_code == 1


def test_equal_runs_have_no_row(runs: Path) -> None:
    write_run(runs, night(measurement(), measurement(quantity="x"), day=15))
    result = compared(runs, 10, 14, 15)
    assert result.exit_code == 0
    assert result.stdout.count("Equal: all 2 gates") == 3
    assert "logits in baseline (JAX float32 vs oracle), relative" not in result.stdout


def test_the_json_has_the_rows_and_keeps_what_two_runs_have(runs: Path) -> None:
    document = json.loads(compared(runs, 10, 11, 13, more=("--json",)).stdout)
    validate(document, json.loads(cli("schema", "compare").stdout))
    assert [run["verdict"] for run in document["runs"]] == ["PASS", "REGRESSED", "PASS"]
    assert (document["verdict"], document["changes"][0]["what"]) == ("REGRESSED", "new failure")
    [row] = document["rows"]
    assert [cell and cell["state"] for cell in row["cells"]] == ["pass", "fail", None]
    assert [cell and cell["what"] for cell in row["cells"]] == [None, "new failure", None]
    two = json.loads(compared(runs, 10, 11, more=("--json",)).stdout)
    assert "rows" not in two and two["changes"] == document["changes"]


def test_the_page_has_a_column_for_each_and_leads_to_their_pages(
    runs: Path, tmp_path: Path
) -> None:
    page = tmp_path / "deep" / "all.html"
    page.parent.mkdir()
    result = compared(runs, 10, 11, 13, more=("--html", page))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, str(page))
    text = page.read_text(encoding="utf-8")
    told = words(text[text.index("<body") :])
    assert "REGRESSED Run 2 against run 1: 1 new failure." in told
    assert "✓ pass 1.0e-06 ✕ fail 9.0e-06 new failure – not measured" in told
    assert "2 / 2 ✕ fail 1 / 2 ✓ pass 1 / 1" in told
    assert "✓ pass ✕ fail logits ✓ pass" in told
    links = {a.partition("#")[0] for a in re.findall(r'href="([^"#]+\.html[^"]*)', text)}
    there = {os.path.normpath(page.parent / html.unescape(a).replace("%20", " ")) for a in links}
    days = ("2026-11-10", "2026-11-11", "2026-11-13")
    assert there == {str(f / PAGE) for f in stored_below(runs) if f.name.startswith(days)}
    tags = Page(text).tags
    assert "default-src 'none'" in text and not any(tag in ("img", "iframe") for tag, _ in tags)
    assert text.count("<table") == text.count("<caption") == text.count("<thead")


def test_other_work_is_marked_and_never_compared() -> None:
    first = night(measurement(), day=10)
    other = night(measurement(identity="other"), day=11)
    red = night(failing(identity="third"), day=12)
    several = compare_runs([first, other, red])
    [row] = several.rows
    cells = [cell for cell in row.cells if cell]
    assert [cell.other_work for cell in cells] == [False, True, True]
    assert [decision.word for decision in several.decisions] == [
        Word.PASS,
        Word.NOT_COMPARABLE,
        Word.REGRESSED,
    ]
    assert not any(found.compared for found in several.agreements)


def test_other_work_is_marked_where_the_first_run_has_no_such_gate() -> None:
    """A gate that is new and passes is no change, but its value is not one of the same work."""
    nights = [
        night(day=10),
        night(measurement(), day=11),
        night(measurement(identity="other"), day=12),
        night(failing(), day=13),
    ]
    several = compare_runs(nights)
    [row] = several.rows
    assert [cell and cell.what for cell in row.cells] == [None, None, None, What.NEW]
    *_, last = table(several)[1]
    assert last[1:] == ["–", "1.0e-06", "1.0e-06 (other work)", "9.0e-06 ✕"]


def test_gates_of_one_run_alone_are_told_by_which_run_has_them() -> None:
    more = night(measurement(), measurement(quantity="x"), measurement(quantity="y"), day=11)
    several = compare_runs([night(measurement(), day=10), more, night(day=12)])
    assert [(found.only_before, found.only_now) for found in several.agreements] == [(0, 2), (1, 0)]


@pytest.mark.parametrize("turned", [False, True])
def test_a_row_is_placed_by_the_gravest_of_its_changes(turned: bool) -> None:
    x, y = measurement(quantity="x", value=2e-6), measurement(quantity="y", value=2e-6)
    later = [
        night(failing(), replace(x, value=1e-6), y, day=11),
        night(measurement(value=2e-6), failing(quantity="x"), replace(y, value=1e-6), day=12),
    ]
    several = compare_runs(
        [night(measurement(), x, y, day=10), *(later[::-1] if turned else later)]
    )
    found = {row.gravest.quantity: row.gravest.what for row in several.rows}
    assert found == {"logits": What.NEW, "x": What.NEW, "y": What.CHANGED}
    assert several.rows[-1].gravest.quantity == "y"


def test_errors_of_probes_are_rows_too() -> None:
    bad = finding(severity=Severity.ERROR, value=3.0)
    several = compare_runs(
        [
            night(measurement(), day=d, findings=f)
            for d, f in ((10, (finding(),)), (11, (bad,)), (12, ()))
        ]
    )
    [row] = several.rows
    assert row.key == ("probe values", "", "model.embed.weight", "max")
    assert [cell and cell.state for cell in row.cells] == ["pass", "fail", None]
    *_, last = table(several)[1]
    assert last == ["model.embed.weight in probe values, max", "1.0e+00", "3.0e+00 ✕", "–"]


def test_mathematics_comes_before_rounding_and_thousands_are_marked() -> None:
    edges = ("jax32:oracle", "jax64:oracle")
    several = compare_runs([night(measurement(), day=day) for day in (10, 11)])
    rows = [measurement(edge=e, quantity=f"q{i}") for e in edges for i in range(1001)]
    big = night(*rows, day=12)
    held = "1,001 / 1,001"
    assert _edges(replace(several, runs=(big, several.runs[1]))) == [
        ("jax64:oracle", [held, "–"]),
        ("jax32:oracle", [held, "1 / 1"]),
    ]


@pytest.mark.parametrize("several", [True, False])
def test_a_page_that_cannot_be_written_leaves_the_old_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old", encoding="utf-8")
    write = Path.write_text

    def full(self: Path, text: str, **how: Any) -> int:
        write(self, "half", **how)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    days = (10, 11, 12) if several else (10, 11)
    told = compared(runs, *days, more=("--html", page))
    assert told.exit_code == 2 and "No space left" in told.output
    assert page.read_text(encoding="utf-8") == "old"


def test_what_could_not_be_compared_is_not_green() -> None:
    blocked = measurement(verdict=Verdict.NOT_COMPARABLE)
    several = compare_runs(
        [night(m, day=d) for d, m in ((10, measurement()), (11, measurement()), (12, blocked))]
    )
    assert several.decisions[several.gravest].word is Word.NOT_COMPARABLE
    assert "not-comparable" in render(several, ("a", "b", "c"))


def test_hostile_names_are_text() -> None:
    before = hostile()
    old = earlier(*before.measurements[:3], commit=HOSTILE, fault=HOSTILE, verdict=HOSTILE)
    odd = earlier(named(measurement(), "metric", "edge", "suite"), day=18)
    text = render(compare_runs([old, before, odd]), ("../a", "../b", "../c"))
    assert not STEERING.search(text), steering(text.splitlines())[:3]
    assert not any(tag == "img" for tag, _ in Page(text).tags)


def test_a_run_without_a_verdict_is_refused(runs: Path) -> None:
    write_run(runs, bench(day=19))
    result = cli("compare", "2026-11-10", "2026-11-11", "2026-11-19", "--out", runs)
    assert (result.exit_code, "is a bench" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([1.0, 2.0, None], ["1.0e+00", "2.0e+00", "–"]),
        ([1.0, 1.0001], ["1.000000e+00", "1.000100e+00"]),
        ([0.0, math.nan, math.inf, 1.0], ["0", "NaN", "Inf", "1.0e+00"]),
        ([None, None], ["–", "–"]),
    ],
)
def test_numbers_have_the_digits_that_tell_them_apart(values, texts) -> None:
    assert contrast_all(values) == texts
