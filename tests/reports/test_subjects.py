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
from parity.engine.measure.measurement import Kind
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.tolerances import MESHES, PORTS, TABLE
from reports import subject as module
from reports.nightly.document import known_differences
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
        ({"parts": (Part("(toy)", "controls"),)}, "controls"),
        ({"name": "meshes"}, "name"),
        ({"model": module.main().model, "suite": "toys"}, "model"),
        ({"section": module.registered()[1].section}, "section architectures"),
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


@pytest.mark.usefixtures("register_is_restored")
@pytest.mark.parametrize(
    "parts",
    [
        (Part("large_mean", "toy"),),
        (Part("toy)", "toy"),),
        (Part("(toy", "toy"),),
        (Part("(toy)", ""),),
        (Part("(toy)", "toy"), Part("(toy)", "toys")),
        (Part("(toy)", "toy"), Part("(toys)", "toy")),
    ],
    ids=["as a case", "unopened", "unclosed", "no suite", "one name", "one suite"],
)
def test_parts_have_names_and_suites_of_their_own(parts: tuple[Part, ...], tmp_path: Path) -> None:
    """Else one could hide that the other was not measured."""
    with pytest.raises(ValueError, match="names in parentheses, such as"):
        register(toy(tmp_path, parts=parts))
    assert module.registered()[-1].name == "meshes"


@pytest.mark.usefixtures("register_is_restored")
@pytest.mark.parametrize("name", ["large_mean", "mesh megalodon", "mxfp8"])
def test_a_case_has_one_subject(name: str, tmp_path: Path) -> None:
    """`--case` would select the one and say that the other was measured."""
    made = toy(tmp_path)
    suites = replace(made.suites(), names={"(toy)": {"toy a", name}})
    register(replace(made, suites=lambda: suites))
    with pytest.raises(ValueError, match=f"several have {name}: rename"):
        plan_of(Options(tmp_path, cases=(name,), reference="recorded"))


@pytest.mark.usefixtures("register_is_restored")
def test_no_subject_measures_the_part_of_another(tmp_path: Path) -> None:
    made = toy(tmp_path)
    measure = made.suites().measure
    suites = replace(made.suites(), measure={**measure, "(mesh)": measure["(toy)"]})
    register(replace(made, suites=lambda: suites))
    with pytest.raises(ValueError, match=r"of 'a toy' .* only one of the two: \(mesh\)$"):
        nightly(Options(tmp_path / "runs", ("mesh megalodon",), "recorded"), quiet)


def broken(*_: Any) -> Any:
    raise KeyError("of the toy")


@pytest.mark.usefixtures("register_is_restored")
@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (broken, "KeyError: 'of the toy'"),
        (lambda *_: None, "TypeError: expected a SuiteRun of suite toy, received NoneType"),
        (lambda *_: SuiteRun("mesh", 1, 1), "expected a SuiteRun of suite toy, received mesh"),
    ],
)
def test_a_part_that_raises_costs_itself_alone(measure: Any, why: str, tmp_path: Path) -> None:
    made = toy(tmp_path)
    healthy = made.suites().measure["(toy)"]
    parts = (*made.parts, Part("(toys)", "toys"))
    names = {"(toy)": {"toy a"}, "(toys)": {"toys a"}}

    def second(*_: Any) -> SuiteRun:
        suite = healthy(None, quiet, ["toys a"])
        rows = [replace(row, suite="toys") for row in suite.measurements]
        return replace(suite, name="toys", measurements=rows, contract=list(map(Gate.of, rows)))

    suites = Suites({"(toy)": measure, "(toys)": second}, names)
    register(replace(made, parts=parts, suites=lambda: suites))
    lines: list[str] = []
    options = Options(tmp_path / "runs", ("toy a", "toys a"), "recorded")
    outcome = nightly(options, lines.append)
    [toys, other] = sorted(outcome.run.manifest.suites, key=lambda suite: suite.name)
    assert (toys.name, toys.planned, toys.executed) == ("toy", 1, 0) and why in toys.reason
    assert other.whole and [m.case for m in outcome.run.measurements] == ["toys a"]
    assert outcome.decision is not None and outcome.decision.word is Word.INCOMPLETE
    assert f"  toy: did not finish: {toys.reason}" in lines


@pytest.mark.usefixtures("register_is_restored")
def test_a_broken_table_is_an_error_before_the_work(tmp_path: Path) -> None:
    register(toy(tmp_path, tables=broken))
    lines: list[str] = []
    with pytest.raises(KeyError, match="of the toy"):
        nightly(Options(tmp_path / "runs", ("toy a",), "recorded"), lines.append)
    assert lines == [] and not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("register_is_restored")
def test_a_known_difference_is_that_of_its_subject(tmp_path: Path) -> None:
    first = KNOWN_DIFFERENCES[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SUBJECTS", list(module._SUBJECTS))
        register(toy(tmp_path, tables=lambda: Tables((), (first,))))
        with pytest.raises(ValueError, match=f"received several of {first.id}$"):
            module.tables()
    register(toy(tmp_path, tables=lambda: Tables((), (replace(first, id="of a toy"),))))
    known = {"kind": Kind.KNOWN_DIFFERENCE, "value": 0.5}
    rows = [
        measurement(case="seams", suite="toy", quantity=first.id, **known),
        measurement(case="toy a", suite="toy", quantity="of a toy", **known),
        measurement(case="seams", suite="seams", quantity=KNOWN_DIFFERENCES[1].id, **known),
    ]
    told = {entry["id"]: entry.get("value") for entry in known_differences(rows)}
    measured = {"of a toy", KNOWN_DIFFERENCES[1].id}
    assert {name for name, value in told.items() if value is not None} == measured


def test_a_part_that_is_registered_elsewhere_is_no_case_of_the_model() -> None:
    assert module.suite_of_part("(mesh)") == "mesh"
    assert module.suite_of_part("large_mean") == "parity"
    assert module.suite_of_part("(a toy)") == "a toy"


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
