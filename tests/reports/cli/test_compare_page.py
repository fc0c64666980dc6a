"""Two runs side by side: `compare --html`."""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from parity.engine.measure.measurement import Kind, Verdict
from reports.page import side_by_side
from reports.page.side_by_side import CASES
from reports.store.runs import write_run
from reports.store.schema import PAGE
from reports.verdict.decide import decide
from tests.helpers import cli
from tests.reports.nights import bench, earlier, failing, measurement, run, stored_below

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
STAGE = {"quantity": "layers.0.cema", "kind": Kind.BLOCK, "stage": 2}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A good night, and one with a failing stage on another commit."""
    root = tmp_path / "runs of mine"
    held = earlier(measurement(**STAGE), measurement(), suites=SUITES, day=18, commit="a" * 40)
    write_run(root, held, lambda night: "<p>old</p>")
    fails = run(failing(**STAGE), failing(), failing(case="other"), suites=SUITES, commit="b" * 40)
    write_run(root, fails, lambda night: "<p>new</p>")
    return root


def compared(runs: Path, page: Path, *more: str):
    return cli("compare", "2026-11-18", "2026-11-20", "--out", runs, "--html", page, *more)


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def test_both_runs_stand_side_by_side(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    result = compared(runs, page)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == str(page)
    text = page.read_text(encoding="utf-8")
    assert "REGRESSED" in text
    told = words(text[text.index("<body") :])
    assert "✓ pass 2 / 2closest:" in told and "✕ fail 0 / 3starts at layers.0.cema" in told
    assert "nothing fails" in told and "not measured" in told
    assert text.count('<svg class="heat"') == 2, "one map of each run"
    assert "git log --oneline aaaaaaaaaa..bbbbbbbbbb" in text


def test_its_links_lead_to_the_pages_of_both(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "down" / "both.html"
    page.parent.mkdir(parents=True)
    compared(runs, page)
    text = page.read_text(encoding="utf-8")
    first, second = re.findall(r'From <a href="([^"]+)">.* to <a href="([^"]+)">', text)[0]
    assert "2026-11-18" in first and "2026-11-20" in second
    links = re.findall(r'href="([^"#]+\.html)', text)
    there = {os.path.normpath(page.parent / html.unescape(a).replace("%20", " ")) for a in links}
    assert there == {str(folder / PAGE) for folder in stored_below(runs)}


def test_what_a_later_run_repaired_is_last_and_facts_that_differ_are_marked(tmp_path: Path) -> None:
    many = [failing(case=f"case{i:02d}", **STAGE) for i in range(CASES + 2)]
    held = [replace(m, value=0.0, verdict=Verdict.PASS) for m in many]
    before = earlier(failing(case="repaired", **STAGE), *held, suites=SUITES, commit="a" * 40)
    fresh = failing(case="fresh", **STAGE)
    after = run(measurement(case="repaired", **STAGE), *many, fresh, suites=SUITES, commit="b" * 40)
    decisions = decide(before, None), decide(after, before)
    rows = side_by_side._cases(before, decisions[0], after, decisions[1])
    assert [row["case"] for row in rows][-1] == "repaired"
    assert [side["state"] for side in rows[-1]["sides"]] == ["fail", "pass"]
    [row] = [row for row in rows if row["case"] == "fresh"]
    assert [side["state"] for side in row["sides"]] == ["info", "fail"]
    [edge] = side_by_side._edges(before, decisions[0], after, decisions[1])
    assert [side["held"] for side in edge["sides"]] == ["62 / 63", "1 / 64"]
    text = side_by_side.render(before, decisions[0], after, decisions[1], ("a", "b"))
    assert "4 more cases and comparisons fail" in text
    assert "case repaired" not in words(text), "the map is where the later run starts to fail"
    differs = {name for name, *_, marked in side_by_side._facts(before, after) if marked}
    assert {"commit", "when", "gates held"} <= differs
    assert not {"planted fault", "processor", "cases"} & differs


def test_the_commits_between_are_said_without_a_page_too(runs: Path) -> None:
    result = cli("compare", "2026-11-18", "2026-11-20", "--out", runs)
    assert "commits: aaaaaaaaaa..bbbbbbbbbb" in result.stdout


def test_the_page_is_named_in_json(runs: Path, tmp_path: Path) -> None:
    document = json.loads(compared(runs, tmp_path / "both.html", "--json").stdout)
    assert document["page"] == str(tmp_path / "both.html")
    assert document["verdict"] == "REGRESSED"


def test_equal_input_gives_equal_bytes(runs: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    compared(runs, first)
    compared(runs, second)
    assert first.read_bytes() == second.read_bytes()


def test_what_cannot_be_compared_or_written_leaves_nothing(runs: Path, tmp_path: Path) -> None:
    write_run(runs, bench(day=19))
    page = tmp_path / "both.html"
    result = cli("compare", "2026-11-19", "2026-11-20", "--out", runs, "--html", page)
    assert result.exit_code == 2
    assert "is a bench" in result.output
    assert not page.exists()
    result = compared(runs, tmp_path / "nowhere" / "both.html")
    assert result.exit_code == 2
    assert "nowhere" in result.output
