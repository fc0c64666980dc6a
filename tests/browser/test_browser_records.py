"""Every row of the page in use: found, filtered, sorted, linked to, opened, downloaded."""

from __future__ import annotations

import csv
import json
import math

import pytest

from parity.engine.measure.measurement import Kind, Verdict
from reports.page.sections.records import id_of
from reports.text import number, share
from tests.browser.conftest import page_of, until, written
from tests.reports.nights import measurement, regressed, run

pytestmark = [pytest.mark.browser, pytest.mark.sweep]


def rows(page):
    return page.locator("#records tbody tr:not(.detail)")


def shown(page):
    """Wait for the rows and return what is said of how many there are."""
    rows(page).first.wait_for()
    return page.locator("#records [role=status]").inner_text()


@pytest.fixture(scope="module")
def start(night):
    """Where the difference of the broken page starts."""
    found = [m for m in regressed(night).measurements if m.verdict is Verdict.FAIL]
    return min((m for m in found if m.stage >= 0), key=lambda m: (m.stage, m.edge))


def test_a_link_to_a_row_shows_it_opened_with_its_elements(visit, broken, start):
    page = visit(f"{broken}#r-{id_of(start)}").page
    row = page.locator(f"#r-{id_of(start)}")
    row.wait_for()
    assert start.quantity in row.inner_text()
    assert "target" in row.get_attribute("class")
    assert 0 <= row.bounding_box()["y"] < 720
    assert page.evaluate("document.activeElement.closest('tr').id") == f"r-{id_of(start)}"
    detail = page.locator("#records .detail")
    assert detail.locator(".histogram text", has_text="not finite").count() == 1
    assert detail.locator("svg.trend").count() == 1
    worst = detail.locator(".tensor tbody tr").all_inner_texts()
    assert [line.split("\t")[0] for line in worst[:2]] == ["[0, 0, 1]", "[1, 2, 3]"]
    assert "40e00000" in worst[1]
    assert f"--case {start.case}" in detail.inner_text()
    assert f"#r-{id_of(start)}" in detail.inner_text()


def test_a_link_in_a_table_leads_to_the_row_and_one_into_a_fold_opens_it(visit, broken, start):
    page = visit(broken).page
    page.locator("#starts a.row").first.click()
    page.locator("#records tr.target").wait_for()
    folded = page.locator("#changes details[id]").first
    page.evaluate(f"location.hash = '#{folded.get_attribute('id')}'")
    until(page, "document.querySelector('#changes details[id]').open")


def test_a_link_to_a_row_of_another_run_says_so(visit, broken):
    page = visit(f"{broken}#r-0123456789").page
    assert "no row 0123456789" in shown(page)
    assert rows(page).count() > 0


def test_what_is_filtered_is_in_the_address_and_comes_back_from_it(visit, broken):
    page = visit(f"{broken}#records").page
    everything = shown(page)
    page.get_by_label("Verdict").select_option("fail")
    page.locator("#records").get_by_label("Find").fill("layers.2")
    page.wait_for_url("**#records?*layers.2*")
    some = shown(page)
    texts = rows(page).all_inner_texts()
    assert some != everything
    assert all("layers.2" in text and "✕" in text for text in texts)
    again = visit(page.url).page
    assert shown(again) == some
    assert rows(again).all_inner_texts() == texts
    again.get_by_role("button", name="Clear").click()
    again.wait_for_url("**#records")
    assert shown(again) == everything


def test_suites_and_verdicts_can_be_chosen(visit, broken, night):
    page = visit(f"{broken}#records?suite=stability&verdict=warning").page
    warnings = sum(f.severity == "warning" for f in night.findings)
    assert shown(page) == f"{warnings} rows"
    suite = page.locator("#records").get_by_label("Suite")
    assert suite.input_value() == "stability"
    suite.select_option("parity")
    page.get_by_text("No row matches").wait_for()


def test_ten_thousand_rows_come_in_pages_and_sort_as_a_whole(visit, big):
    page = visit(f"{big.address}#records?suite=parity&sort=-value").page
    gates = [m.value for m in big.run.measurements]
    assert shown(page) == f"{len(gates):,} rows"
    values = [float(text) for text in rows(page).locator("td:nth-child(5)").all_inner_texts()]
    assert values == [float(number(v)) for v in sorted(gates, reverse=True)[: len(values)]]
    before = rows(page).first.inner_text()
    page.get_by_role("button", name="Next").click()
    page.get_by_text("Page 2 of").wait_for()
    assert rows(page).first.inner_text() != before
    assert "page=2" in page.url
    head = page.locator("#records th", has_text="Value")
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    page.get_by_text("Page 1 of").wait_for()
    assert head.get_attribute("aria-sort") == "ascending"
    # Far more rows than a page may hold are not in the document.
    assert page.locator("tr").count() < 3000


ODD = (0.0, 5e-324, 4e-9, 3.96e-6, 4e-6, 3.999e-5, 4e-5, 0.04, 0.4, 7.0, 1e308, math.nan, math.inf)


def test_numbers_are_written_as_in_the_rest_of_the_page(visit, folder):
    found = [
        measurement(quantity=f"q{i}", kind=Kind.BLOCK, value=value, tolerance=t)
        for i, (value, t) in enumerate((v, t) for v in ODD for t in (4e-6, 0.0))
    ]
    page = visit(f"{written(folder, 'numbers', page_of(run(*found)))}#records?page=1").page
    seen = {}
    for _ in range(2):
        shown(page)
        for row in rows(page).all():
            cells = [row.locator("th, td").nth(i).inner_text() for i in (0, 4, 6)]
            seen[cells[0].split()[-1]] = (cells[1], cells[2])
        if page.get_by_role("button", name="Next").is_enabled():
            page.get_by_role("button", name="Next").click()
    assert seen == {m.quantity: (number(m.value), share(m.fraction)) for m in found}


@pytest.mark.parametrize("kind", ["CSV", "JSON"])
def test_the_download_holds_every_row_exactly(visit, broken, night, kind):
    page = visit(f"{broken}#records").page
    shown(page)
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download {kind}").click()
    assert download.value.suggested_filename == f"{night.id}.{kind.lower()}"
    with open(download.value.path(), newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file)) if kind == "CSV" else json.load(file)["rows"]
    assert len(found) == len(night.measurements) + len(night.findings)
    told = {(r["case"], r["edge"], r["quantity"], r["metric"]): r for r in found}
    for m in regressed(night).measurements:
        row = told[m.case, m.edge, m.quantity, m.metric]
        assert float(row["value"]) == m.value
        assert float(row["tolerance"]) == m.tolerance or math.isnan(m.tolerance)


def test_single_keys_find_fail_step_and_can_be_switched_off(visit, broken):
    page = visit(broken).page
    page.keyboard.press("j")
    page.wait_for_url("**#starts")
    page.keyboard.press("k")
    page.wait_for_url("**#verdict")
    page.keyboard.press("/")
    until(page, "document.activeElement?.name === 'q'")
    page.keyboard.type("f?")
    assert page.locator("#records").get_by_label("Find").input_value() == "f?"
    page.locator("h1").click()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.get_by_label("single-key shortcuts").uncheck()
    page.keyboard.press("Escape")
    address = page.url
    page.keyboard.press("j")
    page.keyboard.press("?")
    assert not page.get_by_role("dialog").is_visible()
    assert page.url == address


# Where the focus is: `verdict`, `nav`, or nothing for what is before both.
PLACE = "document.activeElement.closest('#verdict, nav')?.localName ?? ''"


@pytest.mark.parametrize("width", [800, 1280])
def test_the_verdict_comes_before_the_navigation(visit, broken, width):
    page = visit(broken, width=width).page
    order = []
    while "nav" not in order and len(order) < 40:
        page.keyboard.press("Tab")
        order.append(page.evaluate(PLACE))
    assert [place for place in dict.fromkeys(order) if place] == ["section", "nav"]
