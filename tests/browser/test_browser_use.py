"""The page in use: keyboard, filter, sorting, links, and what assistive technology is told."""

from __future__ import annotations

import pytest

from parity.engine.measure.measurement import Kind, Verdict
from reports.verdict.decide import Word
from reports.verdict.history import History
from tests.browser.conftest import page_of, until, written
from tests.reports.nights import earlier, failing, measurement, run

pytestmark = [pytest.mark.browser, pytest.mark.sweep]

SCHEMES = ("light", "dark")


def violations(page, part=None, rules=()):
    """Return what axe-core objects to, one line per rule with the first elements concerned."""
    from axe_playwright_python.sync_playwright import Axe

    only = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
    options = {"resultTypes": ["violations"], **only}
    found = Axe().run(page, context=part, options=options).response["violations"]
    return [f"{v['id']}: {[n['target'] for n in v['nodes'][:3]]}" for v in found]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("scheme", "rules"),
    [
        ("light", ()),
        pytest.param("dark", ("color-contrast", "link-in-text-block"), marks=pytest.mark.sweep),
    ],
)
def test_axe_finds_nothing_with_everything_unfolded(visit, few, scheme, rules):
    """Only the rules about colour can tell the dark page from the light one."""
    page = visit(few, color_scheme=scheme)
    page.open_details()
    assert page.first_failure().is_visible()
    assert violations(page.page, rules=rules) == []


def test_targets_are_large_enough_and_scrolled_regions_take_the_focus(visit, few):
    page = visit(few, width=320)
    page.open_details()
    assert page.first_failure().is_visible()
    assert violations(page.page, rules=("target-size", "scrollable-region-focusable")) == []


@pytest.mark.parametrize(
    "word",
    [w if w is Word.REGRESSED else pytest.param(w, marks=pytest.mark.sweep) for w in Word],
)
def test_axe_finds_nothing_under_any_verdict(visit, folder, word):
    night = {
        Word.PASS: run(measurement()),
        Word.REGRESSED: run(failing()),
        Word.CHANGED: run(measurement(value=2e-6)),
        Word.INCOMPLETE: run(measurement(), suites=[]),
        Word.NOT_COMPARABLE: run(measurement(verdict=Verdict.NOT_COMPARABLE)),
    }[word]
    text = page_of(night, History(earlier(measurement())))
    page = visit(written(folder, word.name, text)).page
    assert page.locator("#word").inner_text() == word
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        assert violations(page, "#verdict") == []


def test_axe_sees_a_bad_page(watched, folder):
    """Negative control: a button without a name and grey on white."""
    text = "<!doctype html><html lang=en><title>x</title><main><h1>x</h1><button></button>"
    page = watched(written(folder, "bad", text + "<p style='color:#ccc'>grey</p></main>")).page
    assert [line.split(":")[0] for line in violations(page)] == ["button-name", "color-contrast"]


# What has the focus, as one word for its kind; an element the keyboard cannot leave ends the walk.
FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  e.dataset.reached = "yes";
  return e.className || e.localName;
}"""
UNREACHED = """() => [...document.querySelectorAll("a, button, input, summary, .scroll, pre")]
  .filter(e => e.checkVisibility() && !e.disabled && !e.dataset.reached)
  .map(e => e.outerHTML.slice(0, 120))"""


def test_the_keyboard_reaches_everything(visit, broken):
    page = visit(broken).page
    reached = []
    for _ in range(400):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
        if reached[-1] is None:
            break
    assert reached[0] == "skip"
    assert reached[-1] is None
    assert page.evaluate(UNREACHED) == []


def test_the_skip_link_shows_when_it_has_the_focus_and_skips(visit, broken):
    page = visit(broken).page
    skip = page.locator(".skip")
    assert skip.bounding_box()["x"] < 0
    page.keyboard.press("Tab")
    assert skip.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.url.endswith("#verdict")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('section').id") == "verdict"


def test_the_focus_is_visible(visit, broken):
    page = visit(broken).page
    for _ in range(6):
        page.keyboard.press("Tab")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"


def test_enter_opens_a_fold_and_arrows_scroll_its_table(visit, broken):
    page = visit(broken, width=320).page
    fold = page.locator("#gradients details").last
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    assert fold.get_attribute("open") is not None
    region = fold.locator(".scroll")
    region.focus()
    page.keyboard.press("ArrowRight")
    until(page, "document.activeElement.scrollLeft > 0")
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    assert fold.get_attribute("open") is None


def filtered(visit, broken):
    page = visit(broken).page
    fold = page.locator("details", has=page.locator("input[type=search]")).first
    fold.locator("summary").click()
    return page, fold


def test_the_filter_hides_the_other_rows(visit, broken):
    _, fold = filtered(visit, broken)
    rows = fold.locator("tbody tr")
    shown = fold.locator("tbody tr:visible")
    total = rows.count()
    assert shown.count() == total > 12
    fold.get_by_label("Filter rows").fill("LAYERS.2")
    assert 0 < shown.count() < total
    assert all("layers.2" in text.lower() for text in shown.all_text_contents())
    fold.get_by_label("Filter rows").fill("no such row")
    assert shown.count() == 0
    fold.get_by_label("Filter rows").fill("")
    assert shown.count() == total


def test_the_filter_says_how_many_rows_are_left(visit, broken):
    _, fold = filtered(visit, broken)
    fold.get_by_label("Filter rows").fill("layers.2")
    shown = fold.locator("tbody tr:visible").count()
    told = fold.locator("[role=status], [aria-live=polite], output").all_inner_texts()
    assert any(str(shown) in text for text in told)


def test_a_heading_sorts_by_value_and_says_so(visit, broken):
    page, fold = filtered(visit, broken)
    head = fold.locator("thead th", has_text="Now")
    head.locator("button").focus()
    page.keyboard.press("Enter")
    cell = fold.locator("tbody tr td:nth-child(6)")
    assert head.get_attribute("aria-sort") == "descending"
    falling = [float(text) for text in cell.all_inner_texts()]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) > 3
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(text) for text in cell.all_inner_texts()] == sorted(falling)


def test_shares_sort_by_size_however_they_are_written(visit, folder):
    shares = (0.5, 12.0, 2e3, 4e-4, 1e6, 0.07, 0.96, 3.0)
    rows = [
        measurement(
            kind=Kind.GRADIENT,
            quantity=f"grad/p{i}",
            value=share * 4e-6,
            verdict=Verdict.FAIL if share > 1 else Verdict.PASS,
        )
        for i, share in enumerate(shares)
    ]
    page = visit(written(folder, "shares", page_of(run(*rows)))).page
    table = page.locator("#gradients table[data-filter]")
    page.locator("#gradients summary").last.click()
    table.locator("th button", has_text="Worst case").click()
    table.locator("th button", has_text="Used").click()
    shown = ["1.0e+06×", "2,000×", "12×", "300 %", "96 %", "50 %", "7.0 %", "<0.1 %"]
    assert table.locator("tbody .used .num").all_inner_texts() == shown


def test_a_link_to_a_section_opens_there(visit, broken):
    page = visit(f"{broken}#gradients").page
    top = page.locator("#gradients").bounding_box()["y"]
    assert -1 <= top <= 100
    for link in page.locator("nav a").all()[::4]:
        link.click()
        target = page.locator(link.get_attribute("href"))
        assert page.url.endswith(link.get_attribute("href"))
        # Rows that are drawn on the way push what comes after them down.
        page.wait_for_timeout(300)
        assert 0 <= target.locator("h1, h2").first.bounding_box()["y"] < 720


def test_a_command_can_be_copied(visit, broken):
    page = visit(broken, permissions=["clipboard-read", "clipboard-write"]).page
    block = page.locator(".replay").first
    block.get_by_role("button", name="Copy command").focus()
    page.keyboard.press("Enter")
    block.get_by_text("Copied", exact=True).wait_for(timeout=2000)
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == block.locator("code").inner_text()


def test_copying_is_told_to_assistive_technology(visit, few):
    page = visit(few, permissions=["clipboard-write"]).page
    page.get_by_role("button", name="Copy command").first.click()
    told = page.locator(".replay [role=status]", has_text="Copied")
    told.or_(page.get_by_role("button", name="Copied")).first.wait_for(timeout=1000)


def test_assistive_technology_is_told_names(visit, broken):
    page = visit(broken).page
    page.get_by_role("navigation", name="Sections").wait_for()
    page.get_by_role("heading", level=1, name="REGRESSED").wait_for()
    page.get_by_role("table", name="What was planned, what ran").wait_for()
    page.get_by_role("group", name="Suites run and not run").wait_for()
    page.get_by_role("region", name="REGRESSED").wait_for()
    unnamed = "[...document.querySelectorAll('svg:not([aria-hidden])')].filter(s => !s.ariaLabel)"
    assert page.evaluate(f"{unnamed}.length") == 0
