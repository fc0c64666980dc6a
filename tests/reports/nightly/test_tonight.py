"""The page of a night that is still running has what is measured, and no verdict."""

from __future__ import annotations

import math
import re
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from parity.engine.measure.measurement import Verdict
from reports.nightly import tonight as module
from reports.nightly.fan_out import fan_out
from reports.nightly.run import Options
from reports.nightly.tonight import TONIGHT, Tonight
from reports.provenance.host import FIELDS
from reports.registry.outcome import store
from reports.store.runs import write_run
from reports.verdict.decide import Word
from tests.reports.nightly.test_fan_out import Inline, options, quiet
from tests.reports.nights import earlier, failing, measurement, run

__all__ = ["options"]
SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1}]


def part(root: Path, index: int, *rows, case: str = "", **changes) -> Path:
    """Store the part `index` of three."""
    shard = {"index": index, "count": 3}
    name = f"2026-11-20T21-30-00Z-1a2b3c4-shard-{index}-of-3"
    night = run(
        *rows, kind="shard", shard=shard, suites=SUITES, plan=["a", "b", "c"], id=name, **changes
    )
    return write_run(root / "parts", night)


def text(page: Path) -> str:
    """Return the words of a page's first section, without tags."""
    html = page.read_text(encoding="utf-8")
    body = re.search(r'<section id="verdict".*?</section>', html, re.S)
    return " ".join(re.sub(r"<[^>]*>", " ", body.group(0) if body else html).split())


def test_the_page_says_how_far_the_night_is_and_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY", 0.0)
    monkeypatch.setattr(module, "SHARE", float("inf"))
    lines: list[str] = []
    page = tmp_path / TONIGHT
    page.write_text("<p>the night before</p>", encoding="utf-8")
    with Tonight(tmp_path, 3, lines.append) as tonight:
        assert "no part is measured yet" in text(page) and "before" not in text(page)
        tonight.add(part(tmp_path, 2, measurement(case="a")))
        assert "Running 1 of 3 parts are measured. Gates so far: 1; all of them hold." in text(page)
        html = page.read_text(encoding="utf-8")
        assert not any(word in text(page) for word in Word) and 'id="as-of" data-renewed="' in html
        assert "not measured yet" in html
        tonight.add(part(tmp_path, 3, failing(case="b")))
        assert "2 of 3 parts are measured. Gates so far: 2; 1 of them do not hold." in text(page)
        outcome = store(tmp_path, run(measurement(), suites=SUITES), quiet)
        tonight.done(outcome.page)
    html = page.read_text(encoding="utf-8")
    target = f"{outcome.folder.name}/report.html"
    assert f'content="0; url={target}"' in html and (tmp_path / target).is_file()
    assert lines == [f"first page: {page.resolve()}; it is updated until the night ends"]


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "Interrupted"), (OSError, "Ended by an error")]
)
@pytest.mark.parametrize("measured", [0, 1])
def test_a_night_that_ends_early_has_no_verdict_and_is_not_renewed(
    tmp_path: Path, error: type[BaseException], state: str, measured: int
) -> None:
    with pytest.raises(error), Tonight(tmp_path, 3, quiet) as tonight:
        if measured:
            tonight.add(part(tmp_path, 1, measurement()))
        raise error
    html = (tmp_path / TONIGHT).read_text(encoding="utf-8")
    assert "data-renewed=" not in html and 'http-equiv="refresh"' not in html
    if measured:
        assert f"{state} 1 of 3 parts are measured." in text(tmp_path / TONIGHT)
        assert "There is no verdict" in text(tmp_path / TONIGHT)
    else:
        assert "ended before this page had anything to show" in html


def test_the_page_of_a_night_that_runs_leads_to_the_nights_before(tmp_path: Path) -> None:
    """It lies beside their folders, and their own pages in them."""
    before = store(tmp_path, earlier(measurement(), suites=SUITES), quiet)
    with Tonight(tmp_path, 3, quiet) as tonight:
        tonight.add(part(tmp_path, 1, measurement()))
        html = tonight.page.read_text(encoding="utf-8")
    links = {href.partition("#")[0] for href in re.findall(r'href="([^"]*report.html[^"]*)"', html)}
    assert {(tonight.page.parent / href).resolve() for href in links} == {before.page.resolve()}


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.NOT_COMPARABLE])
def test_the_first_gate_that_does_not_hold_is_on_the_page_at_once(
    tmp_path: Path, verdict: Verdict
) -> None:
    """The terminal said FAIL, and the page "all of them hold", for seven minutes."""
    now = [0.0]
    with Tonight(tmp_path, 3, quiet, clock=lambda: now[0]) as tonight:
        tonight.add(part(tmp_path, 1, measurement(case="a")))
        now[0] += 1.0
        tonight.add(part(tmp_path, 2, measurement(case="b")))
        # Negative control: a part in which all holds waits its turn.
        assert "1 of 3 parts" in text(tonight.page)
        tonight.add(part(tmp_path, 3, replace(failing(case="c"), verdict=verdict)))
        assert "3 of 3 parts are measured. Gates so far: 3; 1 of them" in text(tonight.page)


@pytest.mark.parametrize("state", ["Interrupted", "Ended by an error"])
def test_a_night_that_is_killed_while_its_last_page_is_drawn_does_not_look_as_if_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    error = KeyboardInterrupt if state == "Interrupted" else OSError
    seen: list[str] = []
    with pytest.raises(error), Tonight(tmp_path, 3, quiet) as tonight:
        tonight.add(part(tmp_path, 1, measurement()))
        assert "This page renews itself" in text(tonight.page)

        def slow(*_: object, **__: object) -> str:
            # An interrupted night is killed at about this moment.
            seen.append(tonight.page.read_text(encoding="utf-8"))
            raise RuntimeError("killed")

        monkeypatch.setattr(module, "render", slow)
        raise error
    assert seen == [(tmp_path / TONIGHT).read_text(encoding="utf-8")]
    words = text(tmp_path / TONIGHT)
    assert f"{state} 1 of 3 parts are measured." in words and "There is no verdict" in words
    assert "renews itself" not in words and "The verdict comes" not in words
    assert "data-renewed=" not in seen[0] and 'http-equiv="refresh"' not in seen[0]


@pytest.mark.parametrize(("seconds", "second"), [(2.4, 81), (0.1, 16), (30.0, 91)])
def test_drawing_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch, seconds: float, second: int
) -> None:
    now, spent, drawn = [0.0], [0.0], []

    def draw(folders, **_):
        drawn.append(len(folders))
        spent[0] += seconds
        return ""

    monkeypatch.setattr(module.Tonight, "_text", lambda self, state: draw(self._folders))
    tonight = Tonight(tmp_path, 3, quiet, clock=lambda: now[0], cost=lambda: spent[0])
    for _ in range(100):
        tonight.add(tmp_path)
        now[0] += 1.0
    # A drawing of 2.4 s of processor is 3 % of 80 s; each wait is between 15 and 90 s.
    assert drawn[:2] == [1, second]


def test_an_error_of_the_page_is_told_once_and_ends_no_night(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr(module, "render", broken)
    monkeypatch.setattr(module, "EVERY", 0.0)
    monkeypatch.setattr(module, "SHARE", float("inf"))
    lines: list[str] = []
    outcome = fan_out(options, Inline(), lines.append)
    assert outcome.decision is not None and outcome.page.is_file()
    assert [line for line in lines if "no page" in line] == [
        f"{options.out / TONIGHT} is not renewed: RuntimeError: no page"
    ]
    # There is nothing to see on it.
    assert not [line for line in lines if "first page" in line]


def test_a_page_that_cannot_be_written_at_the_end_ends_no_night(tmp_path: Path) -> None:
    lines: list[str] = []
    with Tonight(tmp_path / "runs", 3, lines.append) as tonight:
        tonight.done(tmp_path / "runs" / "a" / "report.html")
        tonight.page.unlink()
        tonight.page.mkdir()
    assert len(lines) == 1 and "is not renewed" in lines[0]


def test_a_night_leads_from_its_first_page_to_its_last(options: Options) -> None:
    lines: list[str] = []
    outcome = fan_out(replace(options, checkpoint=None), Inline(), lines.append)
    page = (options.out / TONIGHT).resolve()
    assert f"first page: {page}; it is updated until the night ends" in lines
    html = (options.out / TONIGHT).read_text(encoding="utf-8")
    assert f"url={outcome.folder.name}/report.html" in html


def test_a_part_holds_where_no_gate_of_it_fails(tmp_path: Path) -> None:
    """Rows that are told and not judged do not count, and a damaged part is told at the end."""
    told = measurement(quantity="told", verdict=Verdict.INFO, tolerance=math.nan)
    for name, rows, holds in (
        ("told", (measurement(), told), True),
        ("failing", (measurement(), failing(quantity="x")), False),
        ("unknown", (measurement(verdict=Verdict.NOT_COMPARABLE), told), False),
    ):
        assert module._holds(write_run(tmp_path, run(*rows, id=name))) is holds
    (tmp_path / "damaged").mkdir()
    assert module._holds(tmp_path / "damaged")


def test_the_page_of_a_night_makes_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    with Tonight(tmp_path / "new" / "runs", 3, quiet):
        pass
    assert (tmp_path / "new" / "runs" / TONIGHT).is_file()


def test_only_the_first_gate_that_does_not_hold_is_drawn_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(
        module.Tonight, "_text", lambda self, state: drawn.append(len(self._folders)) or ""
    )
    tonight = Tonight(tmp_path, 3, quiet, clock=lambda: 0.0, cost=lambda: 0.0)
    tonight.add(part(tmp_path, 1, measurement(case="a")))
    for index in (2, 3):
        tonight.add(folder := part(tmp_path, index, failing(case="b")))
    tonight.add(folder)
    assert drawn == [1, 2]


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Etc/GMT-14"])
def test_the_time_of_a_page_is_that_of_utc_wherever_the_night_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    """The browser tells by it whether the night still runs, which may be in another zone."""
    tonight = Tonight(tmp_path, 3, quiet)
    before = datetime.now(UTC).replace(microsecond=0)
    try:
        with monkeypatch.context() as patched:
            patched.setenv("TZ", zone)
            time.tzset()
            tonight.add(part(tmp_path, 1, measurement()))
    finally:
        time.tzset()
    html = tonight.page.read_text(encoding="utf-8")
    [renewed] = re.findall('data-renewed="([^"]*)"', html)
    assert f"As of <time>{renewed}</time>" in html
    drawn = datetime.fromisoformat(renewed)
    assert drawn.utcoffset() == timedelta(0) and before <= drawn <= datetime.now(UTC)


@pytest.mark.parametrize("part_of", [1, 2])
def test_a_page_that_cannot_be_drawn_says_so_and_at_the_end_that_the_night_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_of: int
) -> None:
    """It is drawn no more, and the error is told once, however many parts follow."""
    asked: list[str] = []

    def broken(self: Tonight, state: str) -> str:
        asked.append(state)
        raise RuntimeError("no page")

    monkeypatch.setattr(module.Tonight, "_text", broken)
    lines: list[str] = []
    page = tmp_path / TONIGHT
    with pytest.raises(KeyboardInterrupt), Tonight(tmp_path, 3, lines.append) as tonight:
        for _ in range(part_of):
            tonight.add(part(tmp_path / str(len(asked)), 1, measurement()))
            assert "cannot be drawn before its end" in text(page)
        raise KeyboardInterrupt
    assert "ended before this page had anything to show" in text(page)
    assert asked == ["running"]
    assert lines == [f"{page} is not renewed: RuntimeError: no page"]


def reloads(page: Path) -> list[str]:
    """Return after how many seconds the browser loads the page again, and another page's URL."""
    return re.findall('http-equiv="refresh" content="([^"]*)"', page.read_text(encoding="utf-8"))


def test_a_page_without_results_reloads_until_the_night_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who opened it early sees the results, or that there are none."""
    with Tonight(tmp_path, 3, quiet) as tonight:
        assert "The night has begun" in text(tonight.page)
        [seconds] = reloads(tonight.page)
        assert 0 < int(seconds) <= module.EVERY
    assert "ended before" in text(tonight.page) and not reloads(tonight.page)

    with Tonight(tmp_path, 3, quiet) as tonight:
        monkeypatch.setattr(module.Tonight, "_text", lambda self, state: 1 / 0)
        tonight.add(part(tmp_path, 1, measurement()))
        assert "cannot be drawn" in text(tonight.page)
        [seconds] = reloads(tonight.page)
        assert int(seconds) > 0
        tonight.done(tmp_path / "night" / "report.html")
    assert reloads(tonight.page) == ["0; url=night/report.html"]


def test_parts_of_several_machines_are_on_one_page(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.0)
    monkeypatch.setattr(module, "SHARE", float("inf"))
    lines: list[str] = []
    with Tonight(tmp_path, 3, lines.append) as tonight:
        for index, host in enumerate(("one", "another"), 1):
            row = measurement(case=host)
            tonight.add(part(tmp_path, index, row, host=dict.fromkeys(FIELDS, host)))
        assert "2 of 3 parts are measured. Gates so far: 2;" in text(tonight.page)
    assert not [line for line in lines if "not renewed" in line]


def test_a_page_that_cannot_be_written_says_what_it_said(tmp_path: Path, monkeypatch) -> None:
    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    lines: list[str] = []
    with monkeypatch.context() as patched, Tonight(tmp_path, 3, lines.append) as tonight:
        tonight.add(part(tmp_path, 1, measurement()))
        before = tonight.page.read_text(encoding="utf-8")
        tonight.done(tmp_path / "night" / "report.html")
        patched.setattr(Path, "write_text", full)
    assert tonight.page.read_text(encoding="utf-8") == before
    assert lines[1:] == [f"{tonight.page} is not renewed: [Errno 28] No space left on device"]


def test_a_page_costs_the_processor_time_of_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are measured in other threads while the page is drawn."""
    now, drawn = [0.0], []

    def draw(self: Tonight, state: str) -> str:
        drawn.append(state)
        start = time.process_time()

        def work() -> None:
            while time.process_time() - start < 0.5:
                pass

        busy = threading.Thread(target=work)
        busy.start()
        busy.join()
        return ""

    monkeypatch.setattr(module.Tonight, "_text", draw)
    tonight = Tonight(tmp_path, 3, quiet, clock=lambda: now[0])
    for now[0] in (0.0, module.EVERY + 0.1):
        tonight.add(tmp_path)
    # Half a second would be 3 % of 17 s.
    assert module.EVERY * module.SHARE < 0.5 and len(drawn) == 2


def test_the_next_page_is_due_some_time_after_the_last_one_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the drawing waited for a processor."""
    now, drawn = [0.0], list[float]()

    def draw(self: Tonight, state: str) -> str:
        drawn.append(now[0])
        now[0] += 40.0
        return ""

    monkeypatch.setattr(module.Tonight, "_text", draw)
    tonight = Tonight(tmp_path, 3, quiet, clock=lambda: now[0], cost=lambda: 0.0)
    for now[0] in (0.0, 41.0, 54.0, 56.0):
        tonight.add(tmp_path)
    assert drawn == [0.0, 56.0]
