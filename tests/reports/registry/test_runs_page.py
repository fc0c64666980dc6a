"""The page of all runs: what is damaged or not judged is never green, and names are data."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from reports.page import all_runs
from reports.page.all_runs import DAMAGED, Entry, Event, GateGroup, render, standing
from reports.registry import outcome, runs_page
from reports.registry.runs_page import RUNS_PAGE, draw_runs_page
from reports.store.runs import Run, write_run
from reports.store.schema import MANIFEST, MEASUREMENTS
from reports.verdict.decide import Word
from tests.helpers import cli
from tests.reports.nights import bench, earlier, failing, measurement, run, stored_below
from tests.reports.page.test_hostile_names import HOSTILE, STEERING, steering
from tests.reports.page.test_page import Page

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
GREEN = ("pass", "changed")
SIZE = 2_000_000
"""Bytes of a page of as many runs as it shows, in an eventful life."""


def judged(night: Run, verdict: Word | str = Word.PASS) -> Run:
    return replace(night, manifest=replace(night.manifest, verdict=str(verdict)))


def stored(root: Path, *nights: Run) -> Path:
    for night in nights:
        write_run(root, night, lambda _: "<p>page</p>")
    return root


def night(day: int, verdict: Word | str = Word.PASS, **changes: object) -> Run:
    red = verdict == Word.REGRESSED
    rows = [failing() if red else measurement(), measurement(quantity="x")]
    return judged(earlier(*rows, day=day, suites=SUITES, **changes), verdict)


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', page, re.DOTALL)
    assert found
    return words(found[0])


def hero(page: str) -> tuple[str, str]:
    found = re.search(r'<section id="verdict" class="verdict ([\w-]+)"', page)
    assert found
    return found[1], section(page, "verdict")


def entry(**changes: object) -> Entry:
    base = Entry(
        "2026-11-20T21-30-00Z-1a2b3c4", "2026-11-20T21:30:00+00:00", kind="nightly",
        device="cpu x", reference="live 082db4b", commit="1a2b3c4d5e6f", verdict="PASS", gates=5,
        page=True,
    )  # fmt: skip
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]


def test_verdicts_over_time_and_what_changed_when(tmp_path: Path) -> None:
    root = stored(
        tmp_path / "runs",
        night(10),
        night(11, Word.REGRESSED, commit="a" * 40),
        night(12, Word.REGRESSED, commit="b" * 40),
        night(13, commit="c" * 40),
    )
    result = cli("list", "--html", "--out", root)
    assert (result.exit_code, result.stdout) == (0, f"{(root / RUNS_PAGE).resolve()}\n")
    page = (root / RUNS_PAGE).read_text(encoding="utf-8")
    slug, first = hero(page)
    assert slug == "pass"
    assert "PASS Newest nightly: 2026-11-13 21:30 UTC , commit cccccccccc" in first
    assert "PASS in this run; REGRESSED before." in first
    assert "4 runs, oldest first: 2 PASS, 2 REGRESSED" in section(page, "time")
    changed = section(page, "changed")
    assert "1 began to fail : baseline, JAX float32 vs oracle: logits" in changed
    assert "since run 2026-11-10T21-30-00Z-0000000 ; commits: 1a2b3c4d5e..aaaaaaaaaa" in changed
    assert "1 ceased to fail" in changed
    assert "commits: bbbbbbbbbb..cccccccccc" in changed
    assert changed.index("ceased") < changed.index("began to"), "the newest first"
    rows = section(page, "all")
    assert rows.count("1 of 2 fail") == 2 and rows.count("2 hold") == 2
    assert rows.count("✕ 1 began") == 1, "a failure that stays is no change"


def test_each_run_leads_to_its_page_and_to_the_row_that_changed(tmp_path: Path) -> None:
    root = stored(tmp_path, night(10), night(11, Word.REGRESSED))
    write_run(root, night(12))
    sorted(stored_below(root))[0].rename(root / "a #1 100% night?")
    page = draw_runs_page(root)
    links = re.findall(r'href="([^"#][^"]*)"', page)
    targets = {unquote(html.unescape(link).partition("#")[0]) for link in links} - {"data:,"}
    assert {root / target for target in targets} == {
        path / "report.html" for path in stored_below(root) if (path / "report.html").exists()
    }
    assert len(targets) == 2, "one has no page"
    assert any("report.html#r-" in link for link in links)


def test_damage_is_shown_and_never_green(tmp_path: Path) -> None:
    root = stored(tmp_path, night(10), night(11), night(12))
    assert hero(draw_runs_page(root))[0] == "pass", "control: nothing is damaged"
    oldest, _, newest = sorted(stored_below(root))
    (oldest / MEASUREMENTS).write_bytes(b"PAR1")
    page = draw_runs_page(root)
    assert hero(page)[0] == "pass" and "1 damaged folder" in hero(page)[1]
    assert f"{oldest.name} {oldest}" in section(page, "damaged")
    [row] = re.findall(rf"<tr [^>]*>(?:(?!</tr>).)*{oldest.name}.*?</tr>", page)
    assert 'data-verdict="damaged"' in row and not set(GREEN) & set(re.findall(r"[\w-]+", row))
    (newest / MANIFEST).write_text("{}", encoding="utf-8")
    slug, first = hero(draw_runs_page(root))
    assert slug == "incomplete"
    assert f"1 damaged folder may be newer: {newest.name}" in first


def test_a_damaged_folder_that_does_not_say_when_may_be_the_newest(tmp_path: Path) -> None:
    root = stored(tmp_path, night(10))
    (root / "copied").mkdir()
    (root / "copied" / MANIFEST).write_text("nonsense", encoding="utf-8")
    page = draw_runs_page(root)
    slug, first = hero(page)
    assert (slug, "may be newer: copied" in first) == ("incomplete", True)
    rows = section(page, "all")
    assert rows.index("copied") < rows.index("2026-11-10"), "in front, where the newest is"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"verdict": ""}, "not judged"),
        ({"verdict": "GREEN"}, "not judged"),
        ({"verdict": "pass"}, "not judged"),
        ({"broken": 1}, "contradicts its numbers"),
        ({"verdict": "CHANGED", "broken": 1}, "contradicts its numbers"),
        ({"gates": 0}, "contradicts its numbers"),
        ({"kind": "bench", "verdict": "PASS"}, "no verdict"),
        ({"kind": "shard"}, "no verdict"),
        ({"why": "a file is not there"}, "damaged"),
    ],
)
def test_what_is_not_shown_to_hold_is_not_green(changes: dict[str, object], word: str) -> None:
    assert standing(entry()).slug in GREEN, "control"
    found = standing(entry(**changes))
    assert found.word == word
    assert not set(found.slug.split()) & set(GREEN)
    slug, first = hero(render([entry(**changes)], "runs"))
    assert slug not in GREEN
    assert "PASS" not in first.partition("Verdicts are")[0]


def test_every_verdict_differs_in_word_sign_and_height() -> None:
    found = [standing(entry(verdict=word.value)) for word in Word] + [DAMAGED]
    assert len({(how.word, how.sign) for how in found}) == len(found)
    assert len({how.height for how in found}) == len(Word), "only damage is as high as a regression"


def test_another_device_that_does_not_pass_is_named_on_the_first_screen() -> None:
    red = entry(name="red", created="2026-11-18", device="cuda H200", verdict="REGRESSED", broken=1)
    assert "do not pass: nightly on cuda H200: REGRESSED." in hero(render([red, entry()], "r"))[1]
    mended = entry(name="m", created="2026-11-19", device="cuda H200")
    assert "do not pass" not in hero(render([red, mended, entry()], "r"))[1]


@pytest.mark.parametrize("changes", [{"fault": "rope_sign"}, {"selected": 1}])
def test_a_planted_bug_or_a_selection_is_not_the_newest_night(changes: dict[str, object]) -> None:
    later = entry(name="z", created="2026-11-21", verdict="REGRESSED", broken=1, **changes)
    slug, first = hero(render([entry(), later], "runs"))
    assert (slug, "only run of its kind" in first) == ("pass", True)


def hostile_entries() -> list[Entry]:
    group = GateGroup(HOSTILE, HOSTILE, 3, HOSTILE, HOSTILE)
    texts = dict.fromkeys(("device", "reference", "commit", "fault", "name", "verdict"), HOSTILE)
    events = (Event(HOSTILE, "not known", (group,), (group,)),)
    spoiled = f"{HOSTILE}\udcff"
    return [
        entry(name=spoiled, created=HOSTILE, subject=(HOSTILE,), events=events, broken=1),
        entry(**texts, created="2026-11-20", kind="port", subject=(HOSTILE,), events=events),
        entry(name=f"{HOSTILE}2", created=HOSTILE, why=spoiled),
        entry(name=f"{HOSTILE}3", kind=HOSTILE),
    ]


def test_names_are_text_and_nothing_that_steers_reaches_the_markup() -> None:
    page = render(hostile_entries(), HOSTILE, hostile_entries())
    assert page.encode()
    assert not STEERING.search(page), steering(page.splitlines())[:3]
    shown = html.unescape(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))
    assert not STEERING.search(shown)
    tags = Page(page).tags
    assert not any(tag == "img" for tag, _ in tags)
    assert [tag for tag, _ in tags].count("script") == 1
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert "h\\u001b[31m\\u0000\\u202e\\u2066\\u0085" in shown


def test_hostile_names_in_a_folder_of_runs(tmp_path: Path) -> None:
    rows = [failing(case=HOSTILE, quantity=HOSTILE), measurement()]
    red = earlier(*rows, day=12, suites=SUITES, commit=HOSTILE, verdict="REGRESSED")
    held = [measurement(case=HOSTILE, quantity=HOSTILE), measurement()]
    root = stored(tmp_path, earlier(*held, day=11, suites=SUITES), red)
    page = draw_runs_page(root)
    assert not STEERING.search(page)
    assert "began to fail" in page
    assert not any(tag == "img" for tag, _ in Page(page).tags)


def test_the_page_is_self_contained_and_serves_keyboard_and_screen_readers() -> None:
    events = (Event("a", "x", (GateGroup("c", "jax32:oracle", 1, "q", "m"),), ()),)
    page = render([entry(), entry(name="b", events=events), entry(name="c", why="torn")], "runs")
    tags = Page(page).tags
    assert not any(tag in ("img", "iframe", "object", "embed", "base") for tag, _ in tags)
    assert "@import" not in page and "url(" not in page and "default-src 'none'" in page
    identifiers = [a["id"] for _, a in tags if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    assert [tag for tag, _ in tags].count("h1") == 1
    inside = {str(a["href"])[1:] for t, a in tags if t == "a" and str(a["href"]).startswith("#")}
    assert inside <= set(identifiers)
    assert all("scope" in a for t, a in tags if t == "th")
    assert page.count("<table") == page.count("<caption") == page.count("<thead")


def test_older_runs_are_counted_and_the_page_says_so(tmp_path: Path, monkeypatch) -> None:
    root = stored(tmp_path, *(night(day) for day in range(10, 14)), night(14, Word.REGRESSED))
    assert "by month above" not in section(draw_runs_page(root), "all"), "control: all are shown"
    monkeypatch.setattr(runs_page, "SHOWN", 2)
    page = draw_runs_page(root)
    shown = section(page, "all")
    assert "The newest 2 of 5 runs. The other 3 are counted by month above" in shown
    assert "2026-11-12" not in shown
    # Fewer than fit, but more than half as many: each is there once.
    monkeypatch.setattr(runs_page, "SHOWN", 7)
    assert section(draw_runs_page(root), "all").count("2026-11-10") == shown.count("2026-11-13")
    assert "counted by month above" not in section(draw_runs_page(root), "all")
    assert "2026-11 4 1" in section(draw_runs_page(root), "time"), "none is counted twice"
    assert "2026-11 4 1" in section(page, "time"), "the months count all of them"


def test_a_page_of_many_eventful_runs_stays_small() -> None:
    group = GateGroup("three_chunks_tail", "jax32:reference32", 12, "layers.0.attn.cema", "rel_l2")
    events = (Event("2026-11-20T21-30-00Z-1a2b3c4", "1a2b3c4d5e..2a2b3c4d5e", (group,) * 9, ()),)
    many = [
        entry(name=f"2026-11-20T21-30-00Z-{i:07x}", broken=1, verdict="REGRESSED", events=events)
        for i in range(runs_page.SHOWN)
    ]
    older = [entry(name=str(i), created=f"20{i % 26:02d}-03-01") for i in range(8000)]
    page = render(many, "runs", older)
    assert len(page.encode()) < SIZE
    assert page.count("<li>") == all_runs.EVENTS
    assert "1,960 more runs with changes" in words(page)


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    root = stored(tmp_path, night(10), night(11, Word.REGRESSED))
    assert draw_runs_page(root) == draw_runs_page(root)


def test_a_folder_without_runs_has_a_page_that_is_not_green(tmp_path: Path) -> None:
    slug, first = hero(draw_runs_page(tmp_path))
    assert slug == "incomplete"
    assert "NO WHOLE RUN No whole run with a verdict is here." in first


def test_some_cases_alone_make_no_verdict_of_all(tmp_path: Path) -> None:
    root = stored(tmp_path, night(10, selected=["plain"]), night(11, fault="rope_sign"))
    slug, first = hero(draw_runs_page(root))
    assert slug == "incomplete"
    assert "NO WHOLE RUN The runs below ran some cases" in first


def test_a_copy_of_a_run_is_no_run_of_its_own(tmp_path: Path) -> None:
    root = stored(tmp_path, night(10))
    [folder] = stored_below(root)
    (root / "copy").mkdir()
    for path in folder.iterdir():
        (root / "copy" / path.name).write_bytes(path.read_bytes())
    assert "a copy of run" in section(draw_runs_page(root), "damaged")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of runs are not the question, and take a second each."""
    monkeypatch.setattr(outcome, "render", lambda *_: "<p>page</p>")


def test_a_night_leaves_the_page_beside_its_run(tmp_path: Path, drawn) -> None:
    root = tmp_path / "runs"
    told: list[str] = []
    outcome.store(root, run(measurement(), suites=SUITES), told.append)
    page = (root / RUNS_PAGE).read_text(encoding="utf-8")
    assert hero(page)[0] == "pass"
    assert not [line for line in told if "page of all runs" in line]
    assert sorted(p.name for p in root.iterdir() if p.name[0] != ".")[-1] == RUNS_PAGE


def test_a_page_that_cannot_be_written_ends_no_night(tmp_path: Path, drawn) -> None:
    root = tmp_path / "runs"
    (root / RUNS_PAGE).mkdir(parents=True)
    told: list[str] = []
    done = outcome.store(root, run(measurement(), suites=SUITES), told.append)
    assert done.decision is not None and done.page.is_file()
    assert any(line.startswith("the page of all runs was not written: ") for line in told)


def test_a_night_that_cannot_be_judged_is_on_the_page_as_such(tmp_path: Path, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no pins today")

    monkeypatch.setattr(outcome, "judge", fails)
    with pytest.raises(outcome.UnjudgedError):
        outcome.store(tmp_path, run(measurement(), suites=SUITES), lambda line: None)
    page = (tmp_path / RUNS_PAGE).read_text(encoding="utf-8")
    assert hero(page)[0] == "incomplete"
    assert "not judged" in section(page, "all")


def test_pruning_writes_the_page_again(tmp_path: Path) -> None:
    root = stored(tmp_path, *(night(day) for day in range(10, 15)))
    cli("prune", "--keep", "1", "--delete", "--out", root)
    assert not (root / RUNS_PAGE).exists(), "nobody asked for it"
    root = stored(tmp_path / "more", *(night(day) for day in range(10, 15)))
    cli("list", "--html", "--out", root)
    cli("prune", "--keep", "1", "--delete", "--out", root)
    page = (root / RUNS_PAGE).read_text(encoding="utf-8")
    left = {path.name for path in stored_below(root)}
    assert len(left) < 5
    assert {f"2026-11-{d}T21-30-00Z-0000000" for d in range(10, 15) if f"{d}T21" in page} == left


def test_it_is_opened_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("click.launch", opened.append)
    root = stored(tmp_path / "runs", night(10), bench())
    assert cli("open", "--list", "--out", root).exit_code == 0
    assert opened == [(root / RUNS_PAGE).resolve().as_uri()]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = cli("list", "--html", "--out", tmp_path / "nowhere")
    assert (result.exit_code, "expected a folder of runs at" in result.output) == (2, True)
    assert not (tmp_path / "nowhere").exists()


def test_a_page_and_json_are_not_asked_for_at_once(tmp_path: Path) -> None:
    assert cli("list", "--html", "--json", "--out", tmp_path).exit_code == 2
