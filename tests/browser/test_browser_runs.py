"""The page of all runs and that of several, in Chromium: filter, links, telephones, axe-core."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.registry.runs_page import write_runs_page
from reports.store.runs import write_run
from reports.verdict.decide import Word
from tests.browser.test_browser_use import violations
from tests.helpers import cli
from tests.reports.nights import bench, stored_below
from tests.reports.registry.test_runs_page import judged, night, stored

pytestmark = [pytest.mark.browser, pytest.mark.sweep]

FILTER = "#filter [name={}]"
VISIBLE = (
    "[...document.querySelectorAll('#list tbody tr')].filter((row) => row.offsetHeight).length"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nights on two devices, a red one, a planted bug, a bench, one not judged and one damaged."""
    root = tmp_path_factory.mktemp("all") / "runs"
    gpu = {"device": {"kind": "cuda", "name": "NVIDIA H200"}}
    stored(
        root,
        night(8),
        night(10, commit="a" * 40),
        night(11, Word.REGRESSED, commit="b" * 40),
        night(12, Word.CHANGED, **gpu),
        night(13, Word.REGRESSED, fault="rope_sign"),
        judged(night(14), ""),
        night(15),
    )
    write_run(root, bench(day=16))
    damaged = next(f for f in stored_below(root) if f.name.startswith("2026-11-08"))
    (damaged / "measurements.parquet").write_bytes(b"PAR1")
    write_runs_page(root)
    return root


@pytest.fixture
def address(root: Path) -> str:
    return (root / "index.html").as_uri()


def test_the_filter_finds_runs_and_is_part_of_the_address(visit, address: str) -> None:
    page = visit(address).page
    assert page.evaluate(VISIBLE) == 8
    page.select_option(FILTER.format("verdict"), "REGRESSED")
    assert page.evaluate(VISIBLE) == 2
    assert page.locator("#filter .told").inner_text() == "2 of 8 runs"
    page.fill(FILTER.format("commit"), "B" * 40)
    assert page.evaluate(VISIBLE) == 1
    again = visit(page.url).page
    assert again.evaluate(VISIBLE) == 1
    assert again.locator("#list tbody tr:visible").inner_text().count("1 of 2 fail") == 1
    again.click("#filter button")
    assert (
        again.evaluate("new Promise((done) => setTimeout(done)).then(() => " + VISIBLE + ")") == 8
    )
    again.fill(FILTER.format("q"), "rope_SIGN")
    assert again.evaluate(VISIBLE) == 1
    again.fill(FILTER.format("q"), "")
    again.select_option(FILTER.format("device"), "cuda NVIDIA H200")
    assert again.evaluate(VISIBLE) == 1


def test_runs_in_which_something_changed_are_found(visit, address: str) -> None:
    page = visit(address).page
    page.check(FILTER.format("changed"))
    shown = page.locator("#list tbody tr:visible").all_inner_texts()
    assert [("began" in text, "ceased" in text) for text in shown] == [
        (True, False),
        (False, True),
        (True, False),
    ]


def test_a_bar_leads_to_its_run_and_a_name_to_its_page(visit, address: str) -> None:
    page = visit(address).page
    page.select_option(FILTER.format("verdict"), "damaged")
    page.locator("#time .strip .regressed").first.click()
    row = page.locator("#list tr.target")
    assert "REGRESSED" in row.inner_text() and row.is_visible()
    row.locator("a").first.click()
    assert page.url.endswith("/report.html") and page.inner_text("p") == "page"


def test_without_a_script_every_run_is_there(visit, address: str) -> None:
    page = visit(address, java_script_enabled=False).page
    assert page.locator("#list tbody tr:visible").count() == 8
    assert not page.locator("#filter").is_visible()


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_its_window(visit, address: str, width: int) -> None:
    page = visit(address, width=width)
    page.open_details()
    assert page.overflow() <= 0
    if width < 640:
        inside = "(e) => e.scrollWidth - e.clientWidth"
        assert page.page.locator("#all .scroll").evaluate(inside) <= 0, "a run is a card"
        assert page.page.locator("#time .scroll").first.evaluate(inside) <= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_page_of_all_runs(visit, address: str, scheme: str) -> None:
    page = visit(address, color_scheme=scheme)
    page.open_details()
    assert violations(page.page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_page_of_several_runs(
    visit, root: Path, tmp_path: Path, scheme
) -> None:
    file = tmp_path / "several.html"
    names = ("2026-11-10", "2026-11-11", "2026-11-15")
    assert cli("compare", *names, "--out", root, "--html", file).exit_code == 1
    page = visit(file.as_uri(), color_scheme=scheme)
    assert violations(page.page) == []
    assert page.overflow(390) <= 0


def test_on_a_phone_both_of_two_runs_are_within_the_window(
    visit, root: Path, tmp_path: Path
) -> None:
    """The second run was out of sight: each table was wider than the window."""
    file = tmp_path / "two.html"
    cli("compare", "2026-11-10", "2026-11-11", "--out", root, "--html", file)
    page = visit(file.as_uri(), width=390)
    page.open_details()
    assert page.overflow() <= 0
    wide = "(all) => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText)"
    assert page.page.locator(".scroll").evaluate_all(wide) == []
    rows = page.page.locator("#changes tbody tr")
    assert rows.first.is_visible()
    # The filter of long tables hides rows, which are displayed as cards here.
    rows.first.evaluate("(e) => { e.hidden = true; }")
    assert not rows.first.is_visible()


def test_printed_it_is_a_summary(visit, address: str) -> None:
    page = visit(address).page
    page.emulate_media(media="print")
    assert not page.locator("#filter").is_visible()
    assert page.locator("#time .strip").first.is_visible()
    assert page.locator("#changed li").first.is_visible()
