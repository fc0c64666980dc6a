"""The register of subjects: a program that is registered is measured, judged and shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.engine.measure.contract import Gate
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.tolerances import MESHES, PORTS, TABLE
from reports import subject as module
from reports.nightly.run import Options, nightly, plan_of
from reports.page.render import render
from reports.registry.lookup import judge_stored
from reports.store.runs import read_run
from reports.store.schema import PAGE
from reports.subject import Padding, Part, Section, Subject, Suites, Tables, register
from reports.suite_run import SuiteRun
from reports.verdict.decide import Word
from tests.reports.nights import measurement, run
from tests.reports.page.test_page import section


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.fixture
def register_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SUBJECTS", list(module._SUBJECTS))


def toy(tmp_path: Path, **fields: Any) -> Subject:
    """A subject with one part, two cases and a section of the page."""

    def measure(reference: Any, report: Any, only: Any) -> SuiteRun:
        rows = [measurement(case=case, suite="toy") for case in sorted(only or ("toy a", "toy b"))]
        report(f"  toy: {len(rows)}")
        contract = [Gate.of(row) for row in rows]
        return SuiteRun("toy", len(rows), len(rows), contract=contract, measurements=rows)

    def shown(run: Any) -> dict[str, Any]:
        return {"count": sum(m.suite == "toy" for m in run.measurements)}

    template = tmp_path / "toy.html.j2"
    template.write_text('<section id="toy"><h2>{{ data.count }} toys</h2></section>\n', "utf-8")
    made = Subject(
        "a toy",
        (Part("(toy)", "toy", "toy", "why of all", section="toy"),),
        lambda: Suites({"(toy)": measure}, {"(toy)": {"toy a", "toy b"}}, {"toy a": "why of a"}),
        section=Section("toy", "Toys", template, shown),
    )
    return replace(made, **fields)


@pytest.mark.usefixtures("register_is_restored")
def test_a_registered_subject_is_measured_stored_judged_and_shown(tmp_path: Path) -> None:
    register(toy(tmp_path))
    options = Options(tmp_path / "runs", cases=("toy b",), reference="recorded")
    assert plan_of(options) == ("(toy)",)
    whole = plan_of(replace(options, cases=()))
    assert whole[-3:] == ("(toy)", "(probes)", "(controls)"), "before what clears the caches"
    lines: list[str] = []
    outcome = nightly(options, lines.append)
    assert "  toy: 1" in lines
    stored = read_run(outcome.folder)
    assert [(m.case, m.suite) for m in stored.measurements] == [("toy b", "toy")]
    assert [(suite.name, suite.planned) for suite in stored.manifest.suites] == [("toy", 1)]
    assert judge_stored(outcome.folder).decision.word is Word.PASS
    page = (outcome.folder / PAGE).read_text(encoding="utf-8")
    assert "1 toys" in section(page, "toy") and 'href="#toy"' in page


@pytest.mark.usefixtures("register_is_restored")
def test_a_subject_that_is_not_registered_is_on_no_page(tmp_path: Path) -> None:
    stored = run(measurement(case="toy a", suite="toy"))
    before = render(stored, *_judged(stored))
    register(toy(tmp_path))
    after = render(stored, *_judged(stored))
    assert "Toys" not in before and "Toys" in after


@pytest.mark.usefixtures("register_is_restored")
@pytest.mark.parametrize(
    ("fields", "both"),
    [
        ({"parts": (Part("(mesh)", "toy"),)}, r"\(mesh\)"),
        ({"parts": (Part("(toy)", "mesh"),)}, "mesh"),
        ({"suite": "controls"}, "controls"),
        ({"name": "meshes"}, "name"),
        ({"model": module.main().model}, "model"),
    ],
)
def test_subjects_share_neither_name_nor_part_nor_suite_nor_model(
    fields: dict[str, Any], both: str, tmp_path: Path
) -> None:
    count = len(module.registered())
    with pytest.raises(ValueError, match=f"both have: {both}; rename one of them"):
        register(toy(tmp_path, **fields))
    assert len(module.registered()) == count
    register(toy(tmp_path))
    assert module.registered()[-1].name == "a toy"


@pytest.mark.usefixtures("register_is_restored")
@pytest.mark.parametrize("lost", ["measure", "names"])
@pytest.mark.parametrize("more", [True, False])
def test_a_part_that_would_never_be_measured_is_an_error(
    lost: str, more: bool, tmp_path: Path
) -> None:
    made = toy(tmp_path)
    suites = made.suites()
    changed = {**getattr(suites, lost), "(other)": None} if more else {}
    register(replace(made, suites=lambda: replace(suites, **{lost: changed})))
    wrong = "(other)" if more else "(toy)"
    with pytest.raises(ValueError, match=re.escape(f"`Suites.{lost}`")) as told:
        nightly(Options(tmp_path / "runs", reference="recorded"), quiet)
    assert str(told.value).endswith(f"only one of the two: {wrong}")
    assert not (tmp_path / "runs").exists()


def test_a_night_has_the_parts_and_tables_of_all_its_subjects() -> None:
    """The order is that of stored nights."""
    names = [part.name for part in module.parts()]
    assert names == [
        *("(seams)", "(products)", "(mla-moe)", "(port)", "(mesh)"),
        *("(probes)", "(controls)"),
    ]
    assert list(module.measured()) == list(module.names_by_part()) == names[:5]
    assert module.live_suites() == {"port"}
    tables = module.tables()
    assert tables == Tables([*TABLE, *PORTS, *MESHES], list(KNOWN_DIFFERENCES))
    sections = {part.suite: part.section for part in module.parts()}
    assert sections == {
        "seams": "known-differences",
        "products": "formats",
        "mla-moe": "architectures",
        "port": "records",
        "mesh": "meshes",
        "stability": "records",
        "controls": "records",
    }


def test_a_subject_brings_nothing_that_its_record_does_not_name(tmp_path: Path) -> None:
    made, m = toy(tmp_path), measurement(case="toy a", suite="")
    assert (made.former_suite(m), made.section_of(m)) == ("", "records")
    assert (made.commands("toy a"), made.hint({"a", "b"}, {"a"})) == ((), "")
    assert made.padding([m], []) == Padding() and made.tables() == Tables((), ())
    assert (made.suite, made.committed, made.given, made.module) == ("", "", "", "")
    assert Part("(a)", "a") == Part("(a)", "a", "", "", False, "records")


def test_records_of_subjects_import_nothing_heavy() -> None:
    """Help, and the start of pytest, wait for them."""
    code = (
        "import sys, reports; from reports.subject import parts; assert parts(); "
        "print(*{'jax', 'numpy', 'pandas', 'torch'} & {*sys.modules})"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == ""


def _judged(stored: Any) -> Iterator[Any]:
    from reports.verdict.decide import decide
    from reports.verdict.history import History

    yield decide(stored, None)
    yield History()
