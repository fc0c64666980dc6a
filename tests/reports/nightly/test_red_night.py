"""A red night from planting to reading: what it stores, says, draws, and is compared with."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from parity import FunctionSide, Port, compare
from parity.engine.measure.measurement import Verdict
from parity.faults import by_name as fault_by_name
from parity.megalodon.cases import by_name
from parity.megalodon.recordings import RecordedReference
from reports.nightly import accounts
from reports.nightly.shards import Shard, find_shards, merge_shards
from reports.page.render import render
from reports.page.sections.starts import starts
from reports.store.manifest import read_manifest
from reports.store.runs import Run, read_run, write_run
from reports.store.schema import PAGE, RunKind
from reports.subjects.megalodon import suites as suites_module
from reports.subjects.megalodon.suites import EXPLAINED, run_parity
from reports.verdict.decide import decide
from reports.verdict.history import History
from reports.verdict.replays import program
from tests.helpers import cli
from tests.reports.nights import (
    altered,
    earlier,
    explained,
    failing,
    measurement,
    run,
    stored_below,
)
from tests.test_citations import dangling

FAULT = "rmsnorm_plus_one_dropped"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A triangle in which every case fails, and accounts that cost nothing; who was explained."""
    asked: list[str] = []

    def case(self, case, floors):
        yield failing(case=case.name)

    def explain(case, known):
        asked.append(case.name)
        return explained(case.name)

    monkeypatch.setattr(suites_module.Suite, "case", case)
    monkeypatch.setattr(suites_module, "explain", explain)
    return asked


def night(names: list[str], lines: list[str] | None = None):
    cases = [by_name(name) for name in names]
    return run_parity(cases, RecordedReference(), (lines if lines is not None else []).append)


def test_a_failing_case_is_explained_and_one_that_holds_is_not(broken, monkeypatch) -> None:
    lines: list[str] = []
    suite = night(["plain"], lines)
    assert suite.explanations == [explained("plain")]
    assert "explained: it starts at layers.0.rmsnorm" in lines[-1]

    def holds(self, case, floors):
        yield measurement(case=case.name)

    monkeypatch.setattr(suites_module.Suite, "case", holds)
    assert night(["plain"]).explanations == []
    assert broken == ["plain"]


def test_an_account_that_breaks_down_is_said_and_changes_no_verdict(broken, monkeypatch) -> None:
    def lost(case, known):
        raise KeyError("layers.0.q")

    monkeypatch.setattr(suites_module, "explain", lost)
    lines: list[str] = []
    suite = night(["plain"], lines)
    assert "not explained: KeyError: 'layers.0.q'" in lines[-1]
    assert suite.result().status == "ran"
    assert [m.verdict for m in suite.measurements] == [Verdict.FAIL]


def test_a_night_in_which_everything_fails_explains_the_first_ones(broken) -> None:
    suite = night(["plain"] * (EXPLAINED + 2))
    assert len(suite.explanations) == len(broken) == EXPLAINED


def gelu_port(approximate: bool) -> Port:
    """A port of two stages whose second is GELU: exact, or by its tanh approximation."""

    def side(approximate: bool) -> FunctionSide:
        def program(weights, x):
            up = checkpoint_name(x @ weights["up"], "up")
            return checkpoint_name(jax.nn.gelu(up, approximate=approximate), "down")

        rng = np.random.default_rng(0)
        weights = {"up": rng.normal(size=(6, 5)).astype(np.float32)}
        return FunctionSide(program, weights, rng.normal(size=(3, 6)).astype(np.float32))

    return Port("gelu", side(False), side(approximate), bfloat16=False)


def test_a_port_of_the_night_has_its_account_in_the_same_form() -> None:
    account = accounts.of_port(compare(gelu_port(True)))
    assert account is not None
    assert (account.quantity, account.edge) == ("down", "port64:original64")
    assert account.culprit is not None
    assert account.value > account.tolerance
    assert account.worst is not None and account.worst.actual != account.worst.expected
    night = run(failing(case=account.case, suite="gelu", quantity="down"))
    red = replace(night, explanations=(account,))
    [shown] = starts(red, decide(red, None), History(), "..")["cases"]
    assert [stage["name"] for stage in shown["account"]["near"] if stage["here"]] == ["down"]
    assert shown["account"]["truth"] == "the original's"


def test_a_port_that_holds_has_none() -> None:
    assert accounts.of_port(compare(gelu_port(False))) is None


def test_a_case_without_an_account_says_what_its_comparison_said() -> None:
    note = "differs from one device at psum 'model' in my_step.py:12"
    night = run(failing(case="4x2", suite="mesh", note=note))
    [shown] = starts(night, decide(night, None), History(), "..")["cases"]
    assert (shown["account"], shown["notes"]) == (None, [note])
    assert note in html.unescape(render(night, decide(night, None), History()))


def test_shards_bring_their_accounts(tmp_path: Path) -> None:
    for k in (1, 2):
        shard = earlier(failing(case=f"c{k}"), id=f"s{k}", plan=["c1", "c2"])
        shard = altered(shard, kind=RunKind.SHARD, shard={"index": k, "count": 2})
        stored = Run(shard.manifest, shard.measurements, explanations=(explained(f"c{k}"),))
        write_run(tmp_path, stored)
    assert str(Shard(1, 2)) == "1/2"
    merged = merge_shards(find_shards([tmp_path]))
    assert [e.case for e in merged.explanations] == ["c1", "c2"]


@pytest.fixture(scope="module")
def nights(tmp_path_factory) -> Path:
    """A healthy night of one case and one with a planted bug, by the commands of a person."""
    runs = tmp_path_factory.mktemp("red") / "runs"
    common = ("--case", "plain", "--reference", "recorded", "--out", runs)
    assert cli("nightly", *common).exit_code == 0
    red = cli("nightly", *common, "--fault", FAULT)
    assert red.exit_code == 1, red.output
    return runs


@pytest.mark.sweep  # two real nights; each of its questions is asked above of synthetic ones
def test_a_planted_bug_is_led_to_from_the_headline_to_the_parameter(nights: Path) -> None:
    healthy, red = sorted(stored_below(nights))
    [account] = read_run(red).explanations
    stage = fault_by_name(FAULT).stage
    assert (account.quantity, account.edge) == (stage, "jax64:oracle")
    assert account.parameters == ("model.layers.0.attn.rmsnorm",)
    assert account.worst is not None
    assert account.where == "everywhere"
    assert "megalodon_jax/layers/norms.py:" in account.lines[0].place
    # What was planted is gone: only the night could say this.
    said = cli("gate", "latest", "--out", nights).stdout
    assert f"This gate held in run {healthy.name}" in said
    assert f"explained: {stage} is wrong on its own, fed the oracle's inputs" in said
    command = f"{program()} parity explain plain --fault {FAULT}"
    assert f"explain: {command}" in said
    page = (red / PAGE).read_text(encoding="utf-8")
    assert command in html.unescape(page)
    assert f'href="../{healthy.name}/{PAGE}"' in page
    assert re.search(r'class="sentence"><a href="#starts">\d+ failures, all new\. It starts', page)
    assert list(dangling(html.unescape(page))) == []
    again = cli("parity", "explain", "plain", "--fault", FAULT).stdout
    assert f"worst element {list(account.worst.index)}: {account.worst.actual!r}" in again


@pytest.mark.sweep
def test_the_two_nights_are_set_side_by_side(nights: Path, tmp_path: Path) -> None:
    healthy, red = sorted(stored_below(nights))
    page = tmp_path / "both.html"
    result = cli("compare", healthy, red, "--html", page, "--json")
    assert json.loads(result.stdout)["page"] == str(page)
    text = page.read_text(encoding="utf-8")
    assert healthy.name in text and red.name in text
    assert read_manifest(red).fault == FAULT and FAULT in text
