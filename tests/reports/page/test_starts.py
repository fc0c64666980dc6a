"""The way from the headline to the failure: links, first stages, accounts, since when."""

from __future__ import annotations

import html
import re
import shlex
from dataclasses import replace

import pytest

from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.programs.source_lines import Line
from reports.cli import main
from reports.page.render import render
from reports.page.sections.starts import CASES, target
from reports.store.runs import Run
from reports.store.schema import PAGE
from reports.subjects.megalodon.padding import padding
from reports.verdict.decide import Word, decide
from reports.verdict.history import History
from reports.verdict.replays import program
from stability.core.findings import Severity
from tests.reports.nights import (
    altered,
    earlier,
    explained,
    failing,
    finding,
    measurement,
    run,
)

STAGE = {"case": "plain", "quantity": "layers.0.rmsnorm", "kind": Kind.BLOCK, "stage": 3}
LATER = {"case": "plain", "quantity": "logits", "metric": "top1_flips", "stage": 9}


def red(**changes: object) -> Run:
    """A night with a failing stage, and a count of flips that is infinitely far out behind it."""
    rows = (failing(**STAGE), failing(**LATER, value=85.0, tolerance=0.0))
    return replace(run(*rows, **changes), explanations=(explained("plain"),))


def page_of(night: Run, history: History | None = None) -> str:
    history = history or History()
    return render(night, decide(night, history.baseline), history)


def section(page: str, name: str) -> str:
    return page[page.index(f'<section id="{name}"') :].partition("</section>")[0]


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def test_the_sentence_and_every_count_lead_to_a_place_of_the_page() -> None:
    warned = finding(severity=Severity.WARNING)
    night = replace(red(), findings=(warned,))
    page = page_of(night, History(earlier(measurement(**STAGE), measurement(**LATER))))
    first = section(page, "verdict")
    assert re.search(r'<p class="sentence"><a href="#starts">2 failures, all new\.', first)
    places = dict(re.findall(r'<a href="#([^"]+)" aria-label="[\d,]+ ([^"]+)"', first))
    assert places == {"changes-new": "new failures", "records?verdict=warning": "warnings"}
    for place in places:
        assert f'id="{place.partition("?")[0]}"' in page
    # A count of nothing leads nowhere.
    assert re.search(r'<div class="zero"><dt>persisting</dt><dd>0</dd></div>', first)


@pytest.mark.parametrize(
    ("night", "place"),
    [
        (run(measurement()), ""),
        (run(failing()), "starts"),
        (run(measurement(value=2e-6)), "changes"),
        (run(measurement(), suites=[]), "suites"),
        (run(measurement(verdict=Verdict.NOT_COMPARABLE)), "starts"),
        (run(measurement(), findings=(finding(severity=Severity.ERROR),)), "starts"),
    ],
)
def test_each_verdict_leads_to_what_it_is_about(night: Run, place: str) -> None:
    decision = decide(night, earlier(measurement()))
    assert target(decision) == place
    page = render(night, decision, History(earlier(measurement())))
    assert not place or f'<section id="{place}"' in page
    assert (decision.word is Word.PASS) == ('class="sentence"><a' not in page)


def test_the_first_table_has_the_first_failing_stage_and_not_what_it_grew_to() -> None:
    table = section(page_of(red()), "verdict").partition("<table")[2]
    assert "layers.0.rmsnorm" in table.replace("<wbr>", "")
    assert "relative L2" in words(table)
    assert "top-1 flips" not in words(table)
    # Where nothing fails it is the gate that is closest to its tolerance.
    healthy = run(measurement(**STAGE, value=1e-7), measurement(case="plain"))
    assert "Closest" in words(section(page_of(healthy), "verdict").partition("<table")[2])


def test_a_failing_case_has_its_account_and_its_commands() -> None:
    told = section(page_of(red(fault="rmsnorm_plus_one_dropped")), "starts")
    text = words(told.replace("<wbr>", ""))
    assert "It starts at layers.0.rmsnorm, wrong on its own, fed the oracle's inputs" in text
    assert "2 later stages are wrong only because of what they were fed." in text
    assert "model.layers.0.attn.rmsnorm" in text
    assert "[0, 4, 2] is 0.1, expected inf" in text
    assert told.count('<tr class="here">') == 2, "around it, and among all"
    commands = [html.unescape(c) for c in re.findall(r"<pre[^>]*><code>([^<]+)</code>", told)]
    fault = "--fault rmsnorm_plus_one_dropped"
    assert commands == [
        f"{program()} parity explain plain {fault}",
        f"{program()} parity shrink plain {fault}",
        f"{program()} nightly --case plain {fault} --reference recorded",
    ]


def test_the_commands_are_ones_there_are() -> None:
    told = section(page_of(red()), "starts")
    for command in re.findall(r"<pre[^>]*><code>([^<]+)</code>", told):
        _, *arguments = shlex.split(html.unescape(command))
        group = main
        while arguments and arguments[0] in getattr(group, "commands", {}):
            group = group.commands[arguments.pop(0)]
        # Parsed, not run: an option that is not there would raise.
        group.make_context("test", arguments)


def test_what_has_no_account_says_so_and_has_commands_all_the_same() -> None:
    night = replace(red(), explanations=())
    assert "did not explain this case" in section(page_of(night), "starts")
    other = replace(red(), measurements=(failing(case="mla-moe moe", edge="port32:port64"),))
    told = section(page_of(other), "starts")
    assert "did not explain" not in told
    assert "parity explain" not in told, "no case of the triangle"
    many = run(*(failing(case=f"case {i}") for i in range(CASES + 3)))
    assert "3 more cases fail" in words(section(page_of(many), "starts"))


@pytest.mark.parametrize("note", ["2 values are 0", "columns 0 to 3 are wrong", ""])
def test_the_note_of_an_account_is_a_sentence(note: str) -> None:
    page = page_of(replace(red(), explanations=(replace(explained("plain"), note=note),)))
    told = words(section(page, "starts").replace("<wbr>", ""))
    after = told.partition("It starts at layers.0.rmsnorm")[2].partition("tolerance ")[2]
    _, _, rest = after.partition(". ")
    expected = f"{note[:1].upper()}{note[1:]}." if note else ""
    assert rest.startswith(expected) and ". columns" not in told


def test_a_case_that_holds_on_our_side_says_that() -> None:
    account = replace(explained("plain"), quantity="", meaning="no divergence.", worst=None)
    told = section(page_of(replace(red(), explanations=(account,))), "starts")
    assert "Between JAX and the oracle: no divergence." in words(told)
    assert 'class="here"' not in told


def test_a_given_checkpoint_is_part_of_its_command() -> None:
    row = failing(case="checkpoint", kind=Kind.LOGITS)
    night = altered(run(row), checkpoint={"name": "my model", "folder": "models/my model"})
    told = html.unescape(section(page_of(night), "starts"))
    assert "nightly --case byte_lm --reference recorded --checkpoint 'models/my model'" in told
    assert "parity explain" not in told


def test_since_when_names_the_run_before_with_a_link_and_the_commits() -> None:
    night = red(commit="b" * 40)
    held = earlier(measurement(**STAGE), commit="a" * 40)
    history = History(
        held,
        runs=(held.id,),
        series={failing(**STAGE).key: (0.5,)},
        manifests=(held.manifest,),
    )
    page = page_of(night, history)
    told = section(page, "starts")
    assert f'<a href="../{held.id}/{PAGE}">' in told
    # Above, the link says by its name which run it leads to: "this run" is the one on the page.
    first = section(page, "verdict")
    assert f'It last held in <a href="../{held.id}/{PAGE}">run <code>{held.id}</code></a>.' in first
    assert "commits: aaaaaaaaaa..bbbbbbbbbb" in told
    assert "git log --oneline aaaaaaaaaa..bbbbbbbbbb" in told
    elsewhere = render(night, decide(night, held), history, "nights/runs")
    assert f'<a href="nights/runs/{held.id}/{PAGE}">' in elsewhere
    # Without history there is no column.
    assert "Since when" not in section(page_of(night), "starts")


def test_no_failure_is_called_new_without_a_run_before() -> None:
    page = page_of(red())
    assert not re.search(r"\bnew failure", words(page))
    assert "failures" in words(section(page, "verdict"))
    held = History(earlier(measurement(**STAGE), measurement(**LATER)))
    assert "new failures" in words(section(page_of(red(), held), "verdict"))


def test_sections_with_failures_are_marked_and_counted() -> None:
    page = page_of(red())
    nav = page[page.index("<nav") : page.index("</nav>")]
    marked = re.findall(r'<a href="#([^"]+)">[^<]+</a> <span class="state fail">', nav)
    assert {"starts", "changes", "records", "heat"} <= set(marked)
    assert "with failures" in nav
    quiet = page_of(run(measurement()))
    assert "with failures" not in quiet[quiet.index("<nav") : quiet.index("</nav>")]


def test_the_first_screen_names_the_line_and_the_elements() -> None:
    """Negative control: a run of an earlier version has neither, and its page says nothing."""
    line = Line("model/layer.py:9 (f)", "makes a mask", "  8  y\n> 9  x < 1\n  10  z")
    account = replace(explained("plain"), where="row 0, position 3: all padding", lines=(line,))
    page = page_of(replace(red(), explanations=(account,)))
    for name in ("verdict", "starts"):
        told = words(section(page, name).replace("<wbr>", ""))
        assert "model/layer.py:9 (f)" in told and "makes a mask" in told
        assert "row 0, position 3: all padding" in told
        assert "<mark>&gt; 9  x &lt; 1</mark>" in section(page, name)
    assert "<mark>" not in page_of(red()) and "<dt>line</dt>" not in page_of(red())


def test_edges_that_part_over_padding_say_so_at_the_table() -> None:
    padded = {"case": "right_padding", "suite": "parity"}
    wrong = failing(**padded, edge="jax32:oracle")
    other = measurement(**padded, edge="jax32:reference32")
    assert "No contradiction: in right_padding" in padding([wrong, other], ()).sentence
    assert padding([wrong, other], ()).scopes["jax32:oracle"] == "Padding too."
    # Negative controls: nothing to reconcile without padding, or where both edges fail.
    plain = {"case": "plain", "suite": "parity"}
    pair = [failing(**plain, edge="jax32:oracle"), measurement(**plain, edge="jax32:reference32")]
    assert padding(pair, ()).sentence == ""
    both = [wrong, failing(**padded, edge="jax32:reference32")]
    assert padding(both, ()).sentence == ""
