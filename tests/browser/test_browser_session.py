"""A red morning in a browser: stored runs, the page that the command draws, and what a person does.

Source: docs/reports.md "What broke, and where", docs/reports.md "Two runs side by side".
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.engine.measure.measurement import Kind
from reports.registry.lookup import page_of
from reports.store.runs import write_run
from reports.store.schema import PAGE
from reports.verdict.replays import program
from tests.browser.test_browser_use import violations
from tests.helpers import cli
from tests.reports.nights import earlier, explained, failing, measurement, run

pytestmark = [pytest.mark.browser, pytest.mark.sweep]

PLACES = [
    {"case": "plain", "edge": edge, "quantity": q, "kind": kind, "stage": i}
    for edge in ("jax64:oracle", "jax32:oracle")
    for i, (q, kind) in enumerate((("layers.0.rmsnorm", Kind.BLOCK), ("logits", Kind.LOGITS)))
]
PHONE = {"width": 320, "height": 640}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A night that held, and one whose account the night made; pages as the commands draw them."""
    root = tmp_path_factory.mktemp("session") / "runs"
    held = earlier(*(measurement(**place) for place in PLACES), commit="a" * 40)
    red = run(*(failing(**place) for place in PLACES), commit="b" * 40)
    for night in (held, replace(red, explanations=(explained("plain"),))):
        folder = write_run(root, night)
        (folder / PAGE).write_text(page_of(folder), encoding="utf-8")
    return root


@pytest.fixture
def red(runs: Path) -> str:
    return (sorted(runs.iterdir())[-1] / PAGE).as_uri()


@pytest.fixture(scope="module")
def both(runs: Path) -> str:
    page = runs.parent / "both.html"
    result = cli("compare", "2026-11-19", "latest", "--out", runs, "--html", page)
    assert result.exit_code == 1
    return page.as_uri()


def in_view(page: Any, selector: str) -> bool:
    box = page.locator(selector).bounding_box()
    return -1 <= box["y"] < page.viewport_size["height"]


def test_from_the_sentence_to_the_account_to_the_command(visit, red: str) -> None:
    page = visit(red, permissions=["clipboard-read", "clipboard-write"]).page
    page.locator(".sentence a").click()
    assert in_view(page, "#starts h2")
    account = page.locator("#starts .account")
    assert "layers.0.rmsnorm" in account.locator("tr.here").first.inner_text()
    assert "model.layers.0.attn.rmsnorm" in account.inner_text()
    account.get_by_role("button", name="Copy command: explain plain").click()
    account.get_by_text("Copied", exact=True).wait_for(timeout=2000)
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == f"{program()} parity explain plain"


def test_a_count_opens_the_changes_it_counts(visit, red: str) -> None:
    page = visit(red).page
    page.get_by_role("link", name="4 new failures").click()
    assert page.url.endswith("#changes-new")
    assert page.locator("#changes-new table").is_visible()


def test_the_run_before_is_one_click_away(visit, red: str) -> None:
    page = visit(red).page
    assert "aaaaaaaaaa..bbbbbbbbbb" in page.locator("#starts").inner_text()
    page.locator("#starts a[href^='../']").first.click()
    assert page.locator("#word").inner_text() == "PASS"


def test_a_phone_folds_the_sections_and_has_no_button_for_keys(visit, red: str) -> None:
    page = visit(red, **PHONE)
    sections = page.page.locator("nav details")
    assert sections.get_attribute("open") is None
    assert "with failures" in sections.locator("summary").inner_text()
    assert not page.page.locator("[data-opens=keyboard]").is_visible()
    assert page.overflow() <= 0
    sections.locator("summary").click()
    page.page.locator("nav a", has_text="Where it starts").click()
    assert in_view(page.page, "#starts h2")


def test_a_desk_has_both(visit, red: str) -> None:
    """Negative control of the telephone."""
    page = visit(red).page
    assert page.locator("nav a").first.is_visible()
    assert not page.locator("nav summary").is_visible()
    assert page.locator("[data-opens=keyboard]").is_visible()


def test_without_a_script_the_sections_of_a_phone_are_open(visit, red: str) -> None:
    page = visit(red, java_script_enabled=False, **PHONE).page
    assert page.locator("nav a").first.is_visible()


def test_a_map_of_one_column_is_no_larger_than_its_cells(visit, red: str) -> None:
    page = visit(red).page
    cell = page.locator("#heat .cell rect").first.bounding_box()
    assert 20 < cell["height"] < 40
    assert page.locator("#heat svg").first.bounding_box()["width"] < 240


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_two_runs_side_by_side(visit, both: str, scheme: str) -> None:
    page = visit(both, color_scheme=scheme)
    page.open_details()
    assert violations(page.page) == []


def test_two_runs_fit_a_phone_and_lead_to_their_pages(visit, both: str) -> None:
    page = visit(both, **PHONE)
    page.open_details()
    assert page.overflow() <= 0
    page.page.locator(".against a").last.click()
    assert page.page.locator("#word").inner_text() == "REGRESSED"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_where_it_starts(visit, red: str, scheme: str) -> None:
    page = visit(red, color_scheme=scheme, **PHONE)
    page.open_details()
    assert violations(page.page) == []


def test_on_a_phone_a_row_of_where_it_starts_has_no_blank_lines(visit, red: str) -> None:
    page = visit(red, **PHONE).page
    rows = page.locator("#starts .cards tbody tr")
    assert rows.count() > 1
    for row in rows.all():
        cells = [cell.bounding_box() for cell in row.locator("th, td").all()]
        # Nothing is behind the edge, and each line of a row begins where the one before ends.
        assert all(box["x"] + box["width"] <= PHONE["width"] for box in cells)
        whole, lines = row.bounding_box()["height"], {box["y"]: box["height"] for box in cells}
        assert whole <= 1.5 * sum(lines.values())
    # The control: as the table it is on a desk, the last column is behind the edge.
    page.locator("#starts .cards").evaluate("table => table.classList.remove('cards')")
    last = page.locator("#starts tbody tr").first.locator("td").last.bounding_box()
    assert last["x"] + last["width"] > PHONE["width"]


@pytest.mark.parametrize("scripted", [True, False])
def test_a_word_opens_by_keyboard_and_escape_closes_it(visit, red: str, scripted: bool) -> None:
    page = visit(red, java_script_enabled=scripted).page
    word = page.locator("#word button")
    meaning = page.locator("#w-REGRESSED")
    assert not meaning.is_visible()
    word.press("Enter")
    assert meaning.is_visible()
    assert "the verdict if a tolerance broke" in meaning.inner_text()
    # It lies beside its word and over nothing of it.
    box, below = word.bounding_box(), meaning.bounding_box()
    assert below["y"] >= box["y"] + box["height"]
    page.keyboard.press("Escape")
    assert not meaning.is_visible()
    word.press("Space")
    assert meaning.is_visible()


def test_a_word_opens_by_touch_and_closes_beside_it(visit, red: str) -> None:
    page = visit(red, has_touch=True, **PHONE)
    meaning = page.page.locator("#w-REGRESSED")
    page.page.locator("#word button").tap()
    assert meaning.is_visible()
    assert page.overflow() <= 0
    assert violations(page.page) == []
    page.page.touchscreen.tap(5, 5)
    assert not meaning.is_visible()


def test_the_first_screen_says_since_when_what_acts_there_and_what_to_run(visit, red: str) -> None:
    page = visit(red, height=720).page
    following = page.locator("#verdict .next")
    assert "aaaaaaaaaa..bbbbbbbbbb" in following.inner_text()
    assert "model.layers.0.attn.rmsnorm" in following.inner_text()
    assert in_view(page, "#verdict .next")
    assert in_view(page, "#verdict .replay code")
    assert "parity explain plain" in page.locator("#verdict .replay code").inner_text()
