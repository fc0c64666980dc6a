"""The page: names are data, nothing leaves the file, every table survives odd numbers."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megalodon_jax.weights import EMBEDDING, named_leaves, replace_leaves
from parity.engine.measure.measurement import Kind, Verdict
from reports.page import svg
from reports.page.render import render
from reports.page.sections.probes import module_kind
from reports.store.runs import Run, write_run
from reports.verdict.decide import Word, decide
from reports.verdict.history import History, load_history
from stability.core import documents
from stability.core.findings import Severity
from stability.moe.fixed_bugs import reference_scatter
from stability.storage import embedding_rows
from tests.helpers import TINY, model_of
from tests.reports.nights import earlier, failing, finding, measurement, realistic, regressed, run

MEGABYTE = 1_000_000
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe\u2066\u0000",
    "n" * 300,
)
VOID = {"meta", "link", "wbr", "input", "br", "img", "path", "rect", "circle"}


class Page(HTMLParser):
    """Collects tags and attributes, and checks that elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(run: Run, baseline: Run | None = None, history: History | None = None) -> str:
    return render(run, decide(run, baseline), history or History(baseline=baseline))


@pytest.fixture(scope="module")
def night() -> Run:
    return realistic()


@pytest.fixture(scope="module")
def page(night: Run) -> str:
    return page_of(night)


def test_the_page_is_self_contained(page: str) -> None:
    for tag, attributes in Page(page).tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        for name in ("src", "href", "action"):
            target = attributes.get(name)
            assert target is None or target.startswith("#") or target == "data:,"
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_the_structure_serves_keyboard_and_screen_readers(page: str) -> None:
    tags = Page(page).tags
    identifiers = [a["id"] for _, a in tags if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    assert [tag for tag, _ in tags].count("h1") == 1
    # What follows a section is a filter of its rows.
    links = {str(a["href"])[1:].partition("?")[0] for t, a in tags if t == "a"}
    # A link leads to a place in the page or to one of the rows that travel in it.
    packed = re.search(r"<template>(.*?)</template>", page, re.DOTALL)
    assert packed
    rows = json.loads(gzip.decompress(base64.b64decode(packed[1])))["columns"]["id"]
    assert links <= set(identifiers) | {f"r-{row}" for row in rows if row}
    assert any(link.startswith("r-") for link in links)
    assert page.count("<table") == page.count("<caption") == page.count("<thead")
    assert all("scope" in a for t, a in tags if t == "th")
    regions = [a for _, a in tags if a.get("class") == "scroll"]
    assert regions
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
    labelled = (a for t, a in tags if t == "svg" and a.get("role") == "img")
    assert all(a["aria-label"] for a in labelled)


def test_equal_input_gives_equal_bytes(night: Run, page: str) -> None:
    assert page_of(realistic()) == page
    assert page_of(realistic(seed=1)) != page


def test_the_first_screen_says_what_was_compared(page: str) -> None:
    first = page[page.index('<section id="verdict"') : page.index('<section id="changes"')]
    for words in ("PASS", "JAX float64 vs oracle", "082db4b", "recorded", "Exit code 0"):
        assert words in first


@pytest.mark.parametrize("word", list(Word))
def test_every_verdict_is_shown_in_words_and_by_an_icon(word: Word) -> None:
    runs = {
        Word.PASS: run(measurement()),
        Word.REGRESSED: run(failing()),
        Word.CHANGED: run(measurement(value=2e-6)),
        Word.INCOMPLETE: run(measurement(), suites=[]),
        Word.NOT_COMPARABLE: run(measurement(verdict=Verdict.NOT_COMPARABLE)),
    }
    text = page_of(runs[word], earlier(measurement()))
    heading = re.search(r'<h1 id="word"><button [^>]+ title="([^"]+)">([^<]+)</button></h1>', text)
    assert heading is not None and heading[2] == word
    assert heading[1].startswith("the verdict ")
    assert '<svg class="icon"' in text
    Page(text)


def test_the_first_red_cell_is_marked_once_per_failing_map(night: Run) -> None:
    text = page_of(regressed(night), night)
    assert text.count('class="first"') == 3
    assert page_of(night).count('class="first"') == 0


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_data_never_markup(name: str) -> None:
    rows = [
        failing(case=name, edge=name, quantity=name, kind=kind, metric=metric, note=name)
        for kind in Kind
        for metric in ("rel_l2", name)
    ]
    result = [
        finding(probe=p, severity=s, subject=name, metric=m, message=name, remedy=name)
        for p, m in (
            ("survival", "frozen_fraction"),
            ("survival", name),
            ("dtypes", name),
            (name, "m"),
        )
        for s in (Severity.ERROR,)
    ]
    texts = {"versions": {name: name}, "flags": {name: name}, "commit": name}
    night = run(
        *rows,
        findings=tuple(result),
        **texts,
        suites=[{"name": name, "status": name, "planned": 1, "executed": 0, "reason": name}],
        cases=[{"name": name, "title": name, "why": name, "hash": name, "batch": 1, "length": 1}],
        tolerances=[{"edge": name, "kind": name, "bound": name, "reason": name}],
        seams=[{"id": name, "reason": name, "bound": name}],
        replay=[{"label": name, "command": name}],
    )
    unreadable = ((Path(name.replace("/", "_").replace("\0", "0")), name),)
    text = page_of(night, None, History(unreadable=unreadable))
    parsed = Page(text)
    assert [t for t, _ in parsed.tags].count("script") == 1
    assert not any(k.startswith("on") for _, a in parsed.tags for k in a)
    assert not any(t == "img" for t, _ in parsed.tags)
    assert "\u202e" not in text
    assert "\0" not in text
    assert "<bdi>" + "n" * 100 not in text


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 5e-324, 1e308])
@pytest.mark.parametrize("tolerance", [math.nan, 0.0, 1e-11, math.inf])
def test_odd_numbers_reach_the_page(value: float, tolerance: float) -> None:
    rows = [
        measurement(
            value=value, tolerance=tolerance, kind=kind, quantity=f"layers.0.{kind}", stage=1
        )
        for kind in Kind
    ]
    result = finding(probe="survival", metric="frozen_fraction", value=value, threshold=tolerance)
    key = ("baseline", "jax32:oracle", "layers.0.logits", "rel_l2")
    history = History(runs=("a", "b"), series={key: (value, None)})
    Page(page_of(run(*rows, findings=(result,)), None, history))


def test_an_empty_run_has_a_page() -> None:
    text = page_of(run(suites=[]))
    assert "Exit code 5" in text
    Page(text)


def test_a_curve_with_non_finite_losses_is_drawn() -> None:
    training = {"step": [0, 1, 2], "train_loss": [5.0, math.nan, 4.0], "val_step": [], "lr": 1e-3}
    night = run(measurement(), checkpoint={"name": "c", "parameters": 3, "training": training})
    assert 'class="curve train"' in page_of(night)


def test_trends_come_from_the_stored_runs(tmp_path: Path) -> None:
    write_run(tmp_path, earlier(measurement(value=2e-6)))
    night = run(measurement())
    history = load_history(tmp_path, night)
    text = render(night, decide(night, history.baseline), history)
    assert "2 runs: 25 % to 50 %, now 25 %" in text


@pytest.mark.sweep
def test_ten_thousand_measurements_stay_under_five_megabytes() -> None:
    base = realistic()
    rows = [
        failing(case=f"case {i % 97}", edge=m.edge, quantity=m.quantity, stage=m.stage, kind=m.kind)
        for i, m in enumerate(base.measurements * 3)
    ][:10_000]
    assert len(rows) == 10_000
    night = Run(base.manifest, tuple(rows), base.findings)
    baseline = earlier(*rows)
    assert len(page_of(night, baseline).encode()) < 5 * MEGABYTE


@pytest.mark.sweep
def test_ten_thousand_stages_of_one_case_stay_under_five_megabytes() -> None:
    rows = [
        failing(quantity=f"layers.{i // 5}.part{i % 5}", stage=i, kind=Kind.BLOCK)
        for i in range(10_000)
    ]
    assert len(page_of(run(*rows)).encode()) < 5 * MEGABYTE


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [
        ("model.layers.3.attn.cema.alpha", "attn.cema"),
        ("model.layers.0.attn.wz.weight", "attn"),
        ("model.layers.0.ffn.fc1.weight", "ffn"),
        ("model.embed.weight", "embed"),
        ("x", "x"),
    ],
)
def test_parameters_are_grouped_by_module(parameter: str, kind: str) -> None:
    assert module_kind(parameter) == kind


def section(page: str, name: str) -> str:
    return page[page.index(f'<section id="{name}"') :].partition("</section>")[0]


def test_a_trajectory_shows_the_worst_parameter_of_each_quantity() -> None:
    rows = [
        measurement(kind=Kind.TRAJECTORY, quantity=f"step{step}/{what}/{name}", value=value)
        for step in (1, 50)
        for what in ("mu", "nu", "drift")
        for name, value in (("a.weight", 1e-7), ("b.weight", 2e-6))
    ]
    rows.append(failing(kind=Kind.TRAJECTORY, quantity="losses"))
    told = section(page_of(run(*rows)), "trajectory")
    for words in ("first moment after step 1", "drift of the parameters after step 50", "losses"):
        assert words in told
    assert "b.weight" in told.replace("<wbr>", "")
    assert "a.weight" not in told.replace("<wbr>", "")
    assert "✕" in told


def test_bfloat16_shows_the_most_accurate_side_first() -> None:
    rows = [
        measurement(edge=f"{side}:oracle", dtype="bfloat16", value=value, verdict=Verdict.INFO)
        for side, value in (("autocast", 8e-3), ("jaxbf16", 4e-3), ("referencebf16", 1.2e-2))
    ]
    words = section(page_of(run(*rows)), "precision")
    order = ("JAX bfloat16", "reference autocast to bfloat16", "reference cast to bfloat16")
    assert [words.index(side) for side in order] == sorted(words.index(side) for side in order)
    assert "2.00" in words
    assert "3.00" in words
    assert "Not measured" in section(page_of(run(measurement())), "precision")


def test_a_known_difference_shows_what_was_measured_and_whether_it_holds() -> None:
    difference = {"id": "ema-mask", "reason": "r", "bound": "b", "measured": "a difference"}
    words = section(
        page_of(run(measurement(), seams=[{**difference, "value": 0.0625, "holds": True}])),
        "known-differences",
    )
    assert "6.2e-02" in words
    assert "a difference" in words
    assert "✕" not in words
    grown = page_of(run(measurement(), seams=[{**difference, "value": 2.0, "holds": False}]))
    assert "fail" in section(grown, "known-differences")
    # Older runs say that a difference holds which they did not measure.
    for entry in (difference, {**difference, "holds": True}):
        words = section(page_of(run(measurement(), seams=[entry])), "known-differences")
        assert "pass" not in words and "fail" not in words


def storage(name: str = "x", memory: float | None = 4.0) -> dict:
    """What the probes leave in a manifest: two layers, two remedies, a drill of two variants."""
    states = ("float32", "q in bfloat16", name)
    shared = {"leaf": name, "basis": name, "frozen": 0.0, "bytes": 2, "fidelity": 0.99}
    survived = {"frozen": 0.0, "fidelity": 1.0, "error": 0.0}
    variant = {
        "name": name,
        "what": name,
        "kind": "control",
        "bytes": 12.0,
        "held_out": 2.5,
        "norms": survived,
        "poles": survived,
        "whole": survived,
        "loss": [[1, 5.0], [2, 4.0], [3, None]],
        "norm_drift": [[0, 0.0], [3, 1e-3]],
        "pole_drift": [[0, 0.0], [3, 1e-3]],
        "memory": {"start": [2.0, memory], "end": [2.5, memory]},
    }
    frozen = {"frozen": 1.0, "fidelity": 0.0, "error": 1.0}
    blanket = {"name": f"blanket {name}", "kind": "blanket", "held_out": None, "norms": frozen}
    return {
        "poles": [
            {"layer": layer, "quantile": q, "state": state, "steps": 200, "memory": memory}
            for layer in (name, f"{name}2")
            for state in states
            for q in (0.0, 0.05, 0.5, 0.95, 1.0)
        ],
        "remedies": [
            shared | {"kind": kind, "remedy": remedy, "what": name, "works": works}
            for kind, remedy, works in (("k", name, True), (name, name, False), ("k", "z", True))
        ],
        "drill": {
            "plan": {name: name},
            "versions": {name: name},
            "quantiles": [0.0, 1.0],
            "conclusion": [name],
            "variants": [variant, variant | blanket],
        },
    }


def test_the_memory_of_the_ema_is_shown_by_layer_and_state() -> None:
    share = finding(probe="poles", subject="x", metric="collapsed_fraction", value=0.25)
    words = section(page_of(run(measurement(), findings=(share,), stability=storage())), "poles")
    assert words.count("<figure>") == 2
    # In each of the two drawings, the narrow one with a sample beside each name.
    assert words.count('class="curve') == (3 + 2) * 3
    assert words.count("25 %") == 1
    assert "q in bfloat16" in words
    assert "25 %" in words
    assert "forever" not in words
    endless = section(page_of(run(measurement(), stability=storage(memory=None))), "poles")
    assert "forever" in endless


def test_zero_rows_of_the_embedding_are_a_warning_in_words_among_the_audits() -> None:
    model = model_of(TINY)
    rows = named_leaves(model)[EMBEDDING]
    found = embedding_rows.findings(replace_leaves(model, {EMBEDDING: rows.at[3].set(0.0)}))
    night = run(measurement(), findings=tuple(found))
    text = page_of(night)
    words = section(text, "audits").partition("<h3>Embedding rows</h3>")[2]
    assert '<span class="tag warning">1 warning</span>' in words
    assert "share of rows that are zero" in words
    assert "by token: 3" in words
    assert embedding_rows.REMEDY[:40] in words
    assert decide(night, None).word is Word.PASS, "a warning is counted, and decides nothing"
    quiet = page_of(run(measurement(), findings=tuple(embedding_rows.findings(model))))
    words = section(quiet, "audits").partition("<h3>Embedding rows</h3>")[2]
    assert '<span class="tag ok">1 ok</span>' in words


def test_remedies_are_shown_by_kind_and_a_gap_is_no_zero() -> None:
    words = section(page_of(run(measurement(), stability=storage())), "remedies")
    assert words.count("0.990") == 3
    assert words.count("not applicable") == 1
    assert words.count('class="state ok"') == 2
    assert words.count('class="state warning"') == 1


def test_the_drill_shows_its_conclusion_its_curves_and_what_did_not_stay_finite() -> None:
    words = section(page_of(run(measurement(), stability=storage("said"))), "drill")
    assert "<li>said</li>" in words
    assert words.count('class="chart wide"') == words.count('class="chart narrow"') == 4
    assert "not finite" in words
    assert words.count("<tr>") == 1 + 2
    assert "inf" not in words.lower().replace("info", "")


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_a_remedy_kept_of_a_value_that_is_not_finite_is_said_in_words(value) -> None:
    shown = storage()
    shown["remedies"] = [row | {"fidelity": value} for row in shown["remedies"]]
    words = section(page_of(run(measurement(), stability=shown)), "remedies")
    assert words.count("not finite") == 3
    assert not re.search(r">(nan|inf)<", words)


def test_documents_are_shown_beside_a_night_with_probes_alone(monkeypatch) -> None:
    night = run(measurement(), stability={"poles": []})
    committed = documents.read(documents.DRILL)
    words = section(page_of(night), "drill")
    assert committed["conclusion"][0][:30] in words
    assert "measured once, not by nights" in words
    # A run of an older version holds a copy of its own.
    old = run(measurement(), stability=storage("said"))
    assert "<li>said</li>" in section(page_of(old), "drill")

    def gone(name):
        raise ValueError(name)

    monkeypatch.setattr(documents, "read", gone)
    page = page_of(night)
    assert "Not recorded" in section(page, "drill")
    assert "has one architecture only" in section(page, "architectures")


@pytest.mark.parametrize("name", ["remedies", "poles", "drill"])
def test_a_night_without_probes_says_so(name: str) -> None:
    words = section(page_of(run(measurement())), name)
    assert '<p class="muted">' in words
    assert "<table" not in words


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_the_storage_sections_are_data(name: str) -> None:
    text = page_of(run(measurement(), stability=storage(name)))
    parsed = Page(text)
    assert [t for t, _ in parsed.tags].count("script") == 1
    assert not any(k.startswith("on") for _, a in parsed.tags for k in a)
    assert not any(t == "img" for t, _ in parsed.tags)
    assert "\u202e" not in text
    assert "\0" not in text
    assert text == page_of(run(measurement(), stability=storage(name)))


def test_the_new_sections_keep_the_structure() -> None:
    text = page_of(run(measurement(), stability=storage()))
    tags = Page(text).tags
    assert text.count("<table") == text.count("<caption") == text.count("<thead")
    assert all("scope" in a for t, a in tags if t == "th")
    assert all(a["aria-label"] for t, a in tags if t == "svg" and a.get("role") == "img")
    identifiers = [a["id"] for _, a in tags if "id" in a]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("ends", [[0.0] * 9, [1.0] * 9, [0.0] * 8 + [1.0], [0.5, 0.5, 1.0]])
def test_names_of_curves_neither_overlap_nor_leave_the_drawing(ends: list[float]) -> None:
    lines = [svg.Line(f"l{i}", "v0", [(0, 0.5), (1, y)]) for i, y in enumerate(ends)]
    drawn = str(svg.chart(lines, "step", "text"))
    heights = sorted(float(y) for y in re.findall(r'class="name v0" x="644" y="([-0-9.]+)"', drawn))
    assert len(heights) == len(ends)
    assert 10 <= heights[0] <= heights[-1] <= 260
    assert all(b - a >= 13 for a, b in itertools.pairwise(heights))


def test_both_architectures_stand_side_by_side_and_a_run_without_the_second_says_so() -> None:
    port = {"case": "mla-moe long", "edge": "port32:original32", "suite": "mla-moe"}
    info = {"tolerance": math.nan, "verdict": Verdict.INFO}
    rows = (
        measurement(),
        measurement(**port, quantity="logits", value=4.2e-7, kind=Kind.LOGITS),
        measurement(
            **port, quantity="layers.1.mlp", kind=Kind.BLOCK, value=math.nan, verdict=Verdict.FAIL
        ),
        measurement(
            **port, quantity="layers.1.chosen", metric="smallest_margin", value=3e-4, **info
        ),
    )
    bug = reference_scatter("index_add_(): self (Float)", "4.57.6")
    night = run(*rows, findings=(bug,), stability={"poles": []})
    page = page_of(night)
    words = section(page, "architectures")
    assert "MLA + MoE" in words and "beyond the length it was trained at" in words
    assert "4.2e-07" in words and "1 / 2" in words and "3.0e-04" in words
    assert "still has the fourth bug" in words
    assert "mla-moe long" not in section(page, "logits")
    assert "24 of 24 planted defects caught" in words
    assert "guarded" in words and "<svg" in words
    without = section(page_of(run(measurement())), "architectures")
    assert "has one architecture only" in without


def test_no_curve_has_the_colour_of_a_failure(page: str) -> None:
    rules = re.findall(r"((?:\.v\d+(?:, )?)+) \{ --l: var\((--\w+)\); \}", page)
    colours = {name: colour for names, colour in rules for name in names.split(", ")}
    assert sorted(colours) == [f".v{i}" for i in range(9)], "as many as the trends draw"
    assert "--fail" not in colours.values()


def test_a_chart_has_a_drawing_for_telephones_with_its_names_below(page: str) -> None:
    names = ["JAX float32 vs megalodon-hf float32", "JAX bfloat16 vs oracle", "not measured"]
    points = [[(0, 0.0), (1, 1.0)], [(0, 1.0), (1, 1.0)], [(0, math.nan)]]
    lines = [svg.Line(n, f"v{i}", p) for i, (n, p) in enumerate(zip(names, points, strict=True))]
    wide, narrow = str(svg.chart(lines, "x", "nights")).split("</svg>")[:2]
    assert 'class="chart wide"' in wide and 'class="chart narrow"' in narrow
    width, height = (float(x) for x in re.search(r'viewBox="0 0 (\d+) (\d+)"', narrow).groups())
    # A letter of 11 units is then at least 9 pixels high in a window of 320.
    assert 11 * (320 - 32) / width >= 9
    found = re.findall(r'class="name v\d" x="(\d+)" y="(\d+)">([^<]+)<', narrow)
    assert [name for *_, name in found] == names[:2]
    for x, y, name in found:
        assert float(x) + 7 * len(name) <= width and 240 < float(y) <= height
    style = page[: page.index("</style>")]
    telephone = style[style.index("@media (max-width: 40rem) {\n") :]
    assert ".chart.narrow { display: none; }" in style[: -len(telephone)]
    assert ".chart.wide { display: none; }" in telephone
    assert ".chart.narrow { display: block; }" in telephone


def test_a_night_with_a_history_draws_its_trends_so(night: Run) -> None:
    keys = {m.key for m in night.measurements}
    history = History(runs=("a", "b"), series=dict.fromkeys(keys, (0.5, 0.5)), manifests=())
    section = page_of(night, history=history).partition('<section id="trends"')[2]
    figure = section.partition("</section>")[0].partition("<figure")[2].partition("</figure>")[0]
    assert 'class="chart narrow"' in figure and 'class="curve v2"' in figure
