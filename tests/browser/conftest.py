"""One Chromium per worker, and pages that report everything they did that a page must not do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.engine.measure.measurement import Verdict
from reports.page.render import render
from reports.store.runs import Run
from reports.verdict.decide import decide
from reports.verdict.history import History
from tests.browser.chromium import executable
from tests.reports.nights import bench, described, earlier, explained, noise, realistic, regressed

ARGUMENTS = ("--no-sandbox", "--disable-gpu")


@dataclass
class Conduct:
    """What a page did beyond showing itself; all of it stays empty for a good page."""

    requests: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        return [*self.requests, *self.logged, *self.errors, *self.dialogs]


def until(page: Any, holds: str, seconds: float = 10.0) -> None:
    """Wait for an expression to hold.

    Playwright's own `wait_for_function` asks again from within the page, where the page's policy
    forbids evaluating text; it fails where the first answer is no.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(holds):
        assert time.monotonic() < end, f"never held: {holds}"
        page.wait_for_timeout(20)


@dataclass
class Visit:
    """A page opened in a context of its own, with its conduct."""

    page: Any
    conduct: Conduct

    def open_details(self) -> None:
        """Unfold everything, as a reader could."""
        self.page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")

    def first_failure(self) -> Any:
        """Find the rows that fail and open the first, by keyboard; return what it opens to."""
        self.page.keyboard.press("f")
        until(self.page, "!!document.activeElement?.closest('#records tbody')")
        self.page.keyboard.press("Enter")
        return self.page.locator("#records .detail")

    def overflow(self, width: int | None = None) -> int:
        """Return by how many pixels the page is wider than its window, made `width` wide."""
        if width:
            self.page.set_viewport_size({"width": width, "height": 720})
        return self.page.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
            " - document.documentElement.clientWidth"
        )


@dataclass(frozen=True)
class Big:
    """The largest page there should be, and what it cost to make."""

    run: Run
    address: str
    size: int
    seconds: float


def written(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


def page_of(run: Run, history: History | None = None) -> str:
    history = history or History()
    return render(run, decide(run, history.baseline), history)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=executable(), args=list(ARGUMENTS))
        yield chrome
        chrome.close()


def _watch(context: Any, conduct: Conduct) -> Any:
    """Return a new page whose every step outside is stopped and written down."""

    def stop(route: Any) -> None:
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    def ask(request: Any) -> None:
        # A data: address is part of the file; anything else but the file itself is a way out.
        if not request.is_navigation_request() and not request.url.startswith("data:"):
            conduct.requests.append(request.url)

    def refuse(dialog: Any) -> None:
        conduct.dialogs.append(dialog.message)
        dialog.dismiss()

    context.route("**/*", stop)
    page = context.new_page()
    page.on("request", ask)
    page.on("console", lambda m: conduct.logged.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: conduct.errors.append(str(e)))
    page.on("dialog", refuse)
    return page


@pytest.fixture
def watched(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Open an address in an offline context; the test judges the conduct itself."""
    contexts = []

    def visit(address: str, width: int = 1280, height: int = 720, **options: Any) -> Visit:
        size = {"width": width, "height": height}
        context = browser.new_context(offline=True, viewport=size, **options)
        contexts.append(context)
        conduct = Conduct()
        page = _watch(context, conduct)
        page.goto(address)
        return Visit(page, conduct)

    yield visit
    for context in contexts:
        context.close()


@pytest.fixture
def visit(watched: Callable[..., Visit]) -> Iterator[Callable[..., Visit]]:
    """Like `watched`, and every page opened in any test must have behaved by its end."""
    visits: list[Visit] = []

    def open_page(address: str, **options: Any) -> Visit:
        visits.append(watched(address, **options))
        return visits[-1]

    yield open_page
    assert [visit.conduct.all() for visit in visits] == [[] for _ in visits]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def night() -> Run:
    return realistic()


@pytest.fixture(scope="session")
def healthy(folder: Path, night: Run) -> str:
    """The page of a first night on which everything held."""
    return written(folder, "healthy", page_of(night))


def bad_night(night: Run) -> str:
    """The page that uses most sections: failures, a baseline, trends of 70 nights, two benches."""
    baseline = earlier(*night.measurements, day=19)
    keys = {(m.case, m.edge, m.quantity, m.metric): m.fraction for m in night.measurements}
    series = {key: (value, None, *(value,) * 67) for key, value in keys.items()}
    names = tuple(f"night {i}" for i in range(69))
    history = History(baseline, names, series, (), (bench(17), bench(18)))
    red = replace(regressed(night), explanations=(explained("slow_decay"),))
    return page_of(red, replace(history, manifests=(baseline.manifest,) * 69))


@pytest.fixture(scope="session")
def broken(folder: Path, night: Run) -> str:
    return written(folder, "broken", bad_night(night))


@pytest.fixture(scope="session")
def big(folder: Path, night: Run) -> Big:
    """10,000 failing measurements over 97 cases, a baseline that held, and 90 nights of each."""
    rows = [
        replace(m, case=f"case {i % 97}", value=4e-6 * (1.5 + noise(i)), tolerance=4e-6)
        for i, m in enumerate(night.measurements * 3)
    ][:10_000]
    failing = [m if m.metric != "rel_l2" else replace(m, verdict=Verdict.FAIL) for m in rows]
    nights = tuple(f"night {i}" for i in range(89))
    shares = np.random.default_rng(0).uniform(0.2, 0.8, (len(rows), len(nights))).tolist()
    keys = ((m.case, m.edge, m.quantity, m.metric) for m in rows)
    series = {key: tuple(found) for key, found in zip(keys, shares, strict=True)}
    baseline = earlier(*(replace(m, value=1e-6) for m in rows))
    run = Run(night.manifest, tuple(failing), night.findings, tensors=described(failing))
    history = History(baseline, nights, series)
    start = time.process_time()
    text = page_of(run, history)
    seconds = time.process_time() - start
    return Big(run, written(folder, "big", text), len(text.encode()), seconds)


@pytest.fixture(scope="session")
def few(folder: Path, night: Run) -> str:
    """The same with little of each kind, for checks that take their time on every element."""
    kept = [
        m
        for m in night.measurements
        if m.case in ("baseline", "slow_decay")
        and m.edge in ("jax32:oracle", "reference32:oracle")
        and not re.search(r"layers\.[02]", m.quantity)
    ]
    findings = tuple(f for f in night.findings if not re.search(r"layers\.[02]", f.subject))
    return written(folder, "few", bad_night(Run(night.manifest, tuple(kept), findings)))
