"""The page in a real browser on odd data: hostile names, NaN and Inf, ten thousand measurements."""

from __future__ import annotations

import math

import pytest

from parity.engine.measure.deviation import HIGH, LOW, Deviation, Worst
from parity.engine.measure.measurement import Kind
from reports.store.runs import Run
from reports.verdict.history import History
from stability.core.findings import Severity
from tests.browser.conftest import page_of, until, written
from tests.reports.nights import earlier, failing, finding, measurement, run

pytestmark = [pytest.mark.browser, pytest.mark.sweep]

MEGABYTE = 1_000_000
HOSTILE = {
    "script": "</script><script>alert(1)</script>",
    "image": "<img src=x onerror=alert(1)>",
    "svg": '"><svg onload=alert(1)>',
    "template": "${alert(1)}{{ 7 * 7 }}",
    "style": "</style><style>body{display:none}</style>",
    "right-to-left": "safe\u202egnp.exe\u2066 \u05d0\u05d1\u05d2",
    "long": "n" * 300,
    "long and wide": "\u6f22" * 300,
}


def named(name: str) -> Run:
    """A night in which everything a run can name has the same name."""
    rows = [
        failing(case=name, edge=name, quantity=q, kind=kind, metric=metric, note=name, stage=1)
        for kind in Kind
        for metric in ("rel_l2", name)
        for q in (name, f"layers.0.{name}")
    ]
    shared = {"severity": Severity.ERROR, "subject": name, "message": name, "remedy": name}
    found = [
        finding(probe=probe, metric=metric, **shared)
        for probe in ("survival", "dtypes", "values", name)
        for metric in ("frozen_fraction", name)
    ]
    worst = (Worst((0,), math.nan, 1.0),)
    return run(
        *rows,
        findings=tuple(found),
        tensors=(
            Deviation(name, name, name, "float32", (1,), (0,) * (HIGH - LOW + 3) + (1,), worst),
        ),
        versions={name: name},
        flags={name: name},
        commit=name,
        fault=name,
        suites=[{"name": name, "status": name, "planned": 1, "executed": 0, "reason": name}],
        cases=[{"name": name, "title": name, "why": name, "hash": name, "batch": 1, "length": 1}],
        tolerances=[{"edge": name, "kind": name, "bound": name, "reason": name}],
        seams=[{"id": name, "reason": name, "bound": name, "measured": name}],
        replay=[{"label": name, "command": name}],
        checkpoint={"name": name, "parameters": 1, "config": {name: name}},
    )


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_name_is_only_text(visit, folder, kind):
    name = HOSTILE[kind]
    address = written(folder, f"hostile-{kind}", page_of(named(name), History(earlier())))
    page = visit(address)
    page.open_details()
    assert page.first_failure().inner_text()
    for field in page.page.locator("input[type=search]:visible").all():
        field.fill(name)
    assert page.page.locator("script").count() == 1
    assert page.page.locator("img, style >> nth=1").count() == 0
    assert page.page.locator("#word").is_visible()
    shown = name[:8] if kind in ("right-to-left", "long", "long and wide") else name
    assert shown[:4] in page.page.locator("#tolerances").inner_text()
    assert page.overflow() <= 0
    assert page.overflow(width=320) <= 0


def test_an_override_cannot_turn_the_text_around_it(visit, folder):
    page = visit(written(folder, "turned", page_of(named(HOSTILE["right-to-left"])))).page
    text = page.locator("body").inner_text()
    assert not {"\u202e", "\u2066"} & set(text)
    assert "safe\\u202egnp.exe" in text


ODD = {"hole": math.nan, "endless": math.inf, "big": 1e308, "small": 5e-324, "zero": 0.0}


def odd() -> Run:
    """Every odd value in every table, with and without a tolerance."""
    rows = [
        measurement(
            case=case, quantity=f"layers.0.{kind}", kind=kind, stage=1, value=v, tolerance=t
        )
        for case, v in ODD.items()
        for t in (math.nan, 1e-11)
        for kind in Kind
    ]
    found = [finding(probe="survival", metric="frozen_fraction", value=v) for v in ODD.values()]
    return run(*rows, findings=tuple(found))


def test_nan_and_inf_are_shown_as_failures(visit, folder):
    page = visit(written(folder, "odd", page_of(odd())))
    page.open_details()
    for shown in ("NaN", "Inf"):
        cells = page.page.locator("#logits td.fail", has_text=shown)
        assert cells.count() > 0
        assert "✕" in cells.first.inner_text()
    words = set(page.page.locator("main").inner_text().split())
    assert not words & {"nan", "inf", "undefined"}
    assert page.overflow() <= 0
    assert page.overflow(width=320) <= 0


def test_non_finite_values_sort_as_the_worst(visit, folder):
    rows = [failing(case=f"c{i}", value=v) for i, v in enumerate((9e-6, math.nan, 7e-5, math.inf))]
    page = visit(written(folder, "sorted", page_of(run(*rows), History(earlier(measurement())))))
    page.open_details()
    table = page.page.locator("#changes table[data-filter]").first
    table.locator("th button", has_text="Now").click()
    shown = table.locator("tbody td:nth-child(6)").all_inner_texts()
    assert set(shown[:2]) == {"NaN", "Inf"}
    assert shown[2:] == ["7.0e-05", "9.0e-06"]


@pytest.mark.sweep  # a measurement of time, which a busy machine disturbs
def test_ten_thousand_measurements_open_quickly(visit, big, record_property):
    assert len(big.run.measurements) == 10_000
    assert big.size < 5 * MEGABYTE
    assert big.seconds < 10.0
    # A busy machine may be late once; a page that is too heavy is late every time.
    paints = [first_paint(visit(big.address).page) for _ in range(3)]
    record_property("cost", {"bytes": big.size, "build s": big.seconds, "paint ms": paints})
    print(f"{big.size:,} bytes, built in {big.seconds:.1f} s, first paint {min(paints):.0f} ms")
    assert min(paints) < 1000.0


def first_paint(page):
    """Milliseconds from the navigation to the first paint with content."""
    until(page, "performance.getEntriesByName('first-contentful-paint').length > 0")
    return page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")


def test_a_page_that_is_too_heavy_is_late(watched, folder):
    """Negative control: half a second of script before any content."""
    busy = "<script>for (const t = performance.now(); performance.now() < t + 500;);</script>"
    heavy = f"<!doctype html><title>x</title>{busy}<p>late</p>"
    assert first_paint(watched(written(folder, "heavy", heavy)).page) > 500.0
