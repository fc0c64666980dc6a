"""The page of a running night renews itself at its top, and asks whether the night was killed."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from reports.page.render import SoFar, notice, render
from reports.verdict.decide import decide
from reports.verdict.history import History
from tests.browser.conftest import until
from tests.reports.nights import measurement, run

pytestmark = [pytest.mark.browser, pytest.mark.sweep]
NOW = datetime(2026, 11, 20, 21, 30, tzinfo=UTC)
WORD = "document.getElementById('word')?.textContent"


def drawn(measured: int, state: str = "running") -> str:
    """Return the page of a night of 31 parts, tall enough to scroll."""
    night = run(*(measurement(quantity=f"q{i}") for i in range(40)))
    progress = SoFar(measured, 31, state, NOW.isoformat())
    return render(night, decide(night, None), History(), ".", progress)


@pytest.fixture
def page(watched: Any, tmp_path: Path) -> Any:
    file = tmp_path / "tonight.html"
    file.write_text(drawn(1), encoding="utf-8")
    opened = watched(file.as_uri())
    opened.page.clock.install(time=NOW)
    opened.page.reload()
    return opened


def test_a_page_at_its_top_renews_itself_until_it_leads_to_the_last(page, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    file = tmp_path / "tonight.html"
    file.write_text(drawn(2), encoding="utf-8")
    page.page.clock.run_for(16_000)
    expect(page.page).to_have_title(re.compile(r"2 of 31 parts"))
    (tmp_path / "report.html").write_text("<title>PASS</title>", encoding="utf-8")
    file.write_text(notice("The night is done", 0, "report.html"), encoding="utf-8")
    page.page.clock.run_for(16_000)
    expect(page.page).to_have_title("PASS")
    assert not page.conduct.all()


def test_a_reader_who_has_scrolled_is_not_disturbed(page, tmp_path: Path) -> None:
    page.page.evaluate("scrollTo(0, 500)")
    (tmp_path / "tonight.html").write_text(drawn(2), encoding="utf-8")
    page.page.clock.run_for(60_000)
    assert page.page.title().startswith("1 of 31")


def test_a_page_that_is_old_does_not_say_that_the_night_runs(page) -> None:
    page.page.evaluate("scrollTo(0, 500)")
    page.page.clock.set_fixed_time(NOW + timedelta(minutes=16))
    assert page.page.evaluate(WORD) == "Running"
    page.page.clock.resume()
    page.page.clock.run_for(16_000)
    until(page.page, f"{WORD} == 'Stopped?'")


def test_an_interrupted_night_is_not_renewed(watched, tmp_path: Path) -> None:
    file = tmp_path / "tonight.html"
    file.write_text(drawn(1, "interrupted"), encoding="utf-8")
    opened = watched(file.as_uri())
    assert opened.page.evaluate(WORD) == "Interrupted"
    assert opened.page.evaluate("document.querySelector('[data-renewed]')") is None
