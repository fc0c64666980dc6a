"""The page in a real browser: it stays within its file, fits every window, and reads at a glance.

Source: docs/reports.md "The page".
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from reports.provenance.host import processor
from reports.store.manifest import PartInfo
from reports.verdict.history import History
from tests.browser.conftest import page_of, written
from tests.reports.nights import H200, earlier, measurement, on_gpu, run

pytestmark = pytest.mark.browser

WIDTHS = (320, 768, 1280, 3840)
PAPER = (718, 1047)
"""A4 less margins of one centimetre, in CSS pixels at 96 to the inch."""

TABLES = "main section:not(#records) > .scroll table, details[open] table"
"""Tables that are read without unfolding anything."""


def test_nothing_leaves_the_page_and_nothing_is_logged(visit, broken):
    page = visit(broken)
    page.open_details()
    page.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.page.locator("input[type=search]").first.fill("layers")
    page.page.locator("th button:not(.word)").first.click()
    page.page.locator(".replay button").first.click()
    page.page.wait_for_load_state("networkidle")
    assert page.conduct.all() == []


MISCONDUCT = """<!doctype html><title>x</title>
<link rel=stylesheet href="https://example.invalid/a.css"><img src="http://example.invalid/x.png">
<script>console.warn("loud"); alert("boo"); fetch("https://example.invalid/f").catch(() => 0);
throw new Error("wrong")</script>"""


def test_misconduct_is_seen(watched, folder):
    """Negative control: a page that phones, talks, asks and fails is caught at all four."""
    visit = watched(written(folder, "misconduct", MISCONDUCT))
    visit.page.wait_for_load_state("networkidle")
    conduct = visit.conduct
    asked = "".join(conduct.requests)
    assert all(name in asked for name in ("a.css", "x.png", "/f"))
    assert "warning: loud" in conduct.logged
    assert conduct.errors == ["wrong"]
    assert conduct.dialogs == ["boo"]


def test_the_policy_of_the_page_stops_requests_by_itself(watched, broken):
    page = watched(broken)
    script = "fetch('https://example.invalid/').then(() => 'sent', () => 'stopped')"
    assert page.page.evaluate(script) == "stopped"
    assert any("Content Security Policy" in line for line in page.conduct.logged)


def test_no_window_scrolls_sideways(visit, broken):
    page = visit(broken)
    for unfold in (lambda: None, page.open_details):
        unfold()
        for width in WIDTHS:
            assert page.overflow(width) <= 0, width


def test_a_night_on_a_gpu_says_which_and_fits_every_window(visit, folder, few_nights_on_gpus):
    page = visit(written(folder, "gpu", few_nights_on_gpus))
    page.open_details()
    for width in WIDTHS:
        assert page.overflow(width) <= 0, width
    row = page.page.locator("#environment tr", has_text="device").first.inner_text()
    assert "driver 570.1" in row and "driver 580.65.06" in row
    assert row.count("NVIDIA H200 (compute capability 9.0, memory 143771 MiB") == 2
    measured = page.page.locator("#environment tr", has_text="measured on")
    assert measured.count() == 2
    assert "slow_decay" in measured.filter(has_text="node-b").inner_text()


@pytest.fixture
def few_nights_on_gpus(night) -> str:
    """A night on two H200s whose drivers differ, after one with the older driver alone."""
    older = H200 | {"driver": "570.1"}
    before = on_gpu(earlier(*night.measurements), host=older)
    now = on_gpu(night)
    parts = [
        PartInfo(case, node, "", processor(on_gpu(night, host=host).manifest.environment), 16)
        for case, node, host in (("baseline", "node-a", H200), ("slow_decay", "node-b", older))
    ]
    now = replace(now, manifest=replace(now.manifest, parts=tuple(parts)))
    return page_of(now, History(before))


def test_a_page_that_is_too_wide_is_seen(watched, folder):
    text = "<!doctype html><title>x</title><div style='width: 400px'>x</div>"
    assert watched(written(folder, "wide", text), width=320).overflow() > 0


@pytest.mark.parametrize("kind", ["healthy", "broken"])
def test_the_first_screen_holds_the_verdict(visit, request, kind):
    page = visit(request.getfixturevalue(kind)).page
    for part in ("#word", ".sentence", ".counts", ".overview", ".against", ".overview .spark"):
        for found in page.locator(part).all():
            box = found.bounding_box()
            assert 0 <= box["y"] < box["y"] + box["height"] <= 720, part
    assert page.locator(".overview .spark").count() == (4 if kind == "broken" else 0)


@pytest.mark.parametrize("kind", ["healthy", "broken"])
def test_the_first_table_fits_a_telephone(visit, request, kind):
    page = visit(request.getfixturevalue(kind), width=390).page
    too_wide = "e => { const s = e.closest('.scroll'); return s.scrollWidth - s.clientWidth }"
    assert page.locator(".overview").evaluate(too_wide) <= 0
    # Nothing is lost by it: what the head of a column said stands in each card.
    heads = page.locator(".overview [data-head]").evaluate_all(
        "all => all.map(e => getComputedStyle(e, '::before').content)"
    )
    assert heads and "none" not in heads


def test_verdict_and_tables_need_no_script(visit, broken):
    page = visit(broken, java_script_enabled=False).page
    assert page.locator("#word").inner_text() == "REGRESSED"
    parts = page.locator(f".sentence, .counts dd, {TABLES}")
    assert parts.count() > 15
    assert all(part.is_visible() for part in parts.all())
    scripted = "input[type=search]:visible, th button:not(.word), .replay button"
    assert page.locator(scripted).count() == 0
    assert "Without JavaScript" in page.locator("#records").inner_text()
    page.locator("section summary").first.click()
    assert page.locator("section details .scroll").first.is_visible()


def test_the_colours_follow_the_system(visit, healthy):
    def light(scheme):
        page = visit(healthy, color_scheme=scheme).page
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.strip("rgb()").split(",")))

    assert light("dark") < 150 < 600 < light("light")


def cut(page):
    """Return the captions of tables that end right of the paper."""
    return page.evaluate(
        "[...document.querySelectorAll('table')].filter(t => t.checkVisibility()"
        " && t.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(t => t.caption.textContent)"
    )


def on_paper(visit, address, **options):
    page = visit(address, width=PAPER[0], height=PAPER[1], **options).page
    page.emulate_media(media="print")
    return page


SHEETS = 2
"""Of A4, for a desk."""


def sheets(page):
    """Return on how many sheets of A4 a page is printed."""
    return len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))


@pytest.mark.sweep
def test_print_is_a_summary_of_two_sheets(visit, broken, healthy, big):
    page = on_paper(visit, broken)
    for part in page.locator("#word, .sentence, .counts, .overview, #starts > .scroll table").all():
        assert part.is_visible()
    for part in page.locator("nav, input[type=search], .replay button, #records, #logits").all():
        assert not part.is_visible()
    assert "on the page itself" in page.locator("footer .paper").inner_text()
    assert sheets(page) <= SHEETS
    assert sheets(on_paper(visit, healthy)) <= SHEETS
    assert sheets(on_paper(visit, big.address)) <= SHEETS, "however much failed"


def test_more_than_two_sheets_are_seen(watched, folder):
    """Negative control."""
    text = "<!doctype html><title>x</title><p>x</p>" + "<p style='break-before: page'>x</p>" * 2
    assert sheets(watched(written(folder, "sheets", text)).page) == SHEETS + 1


def test_print_cuts_no_table(visit, broken):
    assert cut(on_paper(visit, broken)) == []


def test_print_is_dark_on_white_under_a_dark_system(visit, healthy):
    page = on_paper(visit, healthy, color_scheme="dark")
    colour = page.evaluate("getComputedStyle(document.body).color")
    assert sum(map(int, colour.strip("rgb()").split(","))) < 200


def test_an_empty_history_says_so(visit, healthy):
    page = visit(healthy).page
    assert "no history yet" in page.locator(".overview").inner_text()
    assert "no earlier run" in page.locator("#changes").inner_text()


def test_an_empty_run_has_a_page_that_fits(visit, folder: Path):
    page = visit(written(folder, "empty", page_of(run(suites=[]))))
    assert "Exit code 5" in page.page.locator(".against").inner_text()
    assert page.overflow(width=320) <= 0


def test_one_measurement_fits(visit, folder: Path):
    page = visit(written(folder, "one", page_of(run(measurement()))), width=320)
    assert page.page.locator("#word").inner_text() == "PASS"
    assert page.overflow() <= 0
