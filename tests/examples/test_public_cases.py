"""Differences that people reported in public: the answer is where the report says it is."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from click.testing import CliRunner

from reports.cases import HOLDS, cases, run
from reports.cli.program import main
from reports.user_module import UserFileError
from tests.helpers import ROOT

CASES = cases()
DOCUMENT = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
QUICK = ("gelu_form", "unbiased_std", "rounding_only")
"""A bug in a stage, one in a statistic, and none."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.sweep) for name in CASES],
)
@pytest.mark.filterwarnings("ignore")  # Flax tells of its own deprecations.
def test_the_answer_is_where_the_report_says(name: str) -> None:
    # As users run it: the strict promotion of our tests is none of JAX's defaults.
    with jax.numpy_dtype_promotion("standard"):
        answer = run(CASES[name])
    assert answer.as_reported, answer.text


def test_the_document_has_every_case() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `")]
    assert sorted(line.split("`")[1] for line in rows) == sorted(CASES)
    for case in CASES.values():
        [row] = [line for line in rows if line.startswith(f"| `{case.name}` ")]
        assert case.report in row
        if case.found == HOLDS:
            assert "holds" in row


BUG = '''"""A title.

More of it.
"""
from examples.cases.gelu_form import compared

REPORT = "https://example.org/1"
TRIED = "nothing"
FOUND = {found!r}


def port():
    return compared(approximate={port})


def mended():
    return compared(approximate={mended})
'''


def answer_of(folder: Path, found: str, port: bool, mended: bool):
    (folder / "own.py").write_text(
        BUG.format(found=found, port=port, mended=mended), encoding="utf-8"
    )
    return run(cases(folder)["own"])


@pytest.mark.parametrize(
    ("found", "port", "mended", "right"),
    [
        ("jax.nn.gelu(x @ params", False, True, True),
        ("another line", False, True, False),
        # No bug where one is told of, a bug where none is, and a mended port that is none.
        ("jax.nn.gelu(x @ params", True, True, False),
        ("holds", True, True, True),
        ("holds", False, True, False),
        ("jax.nn.gelu(x @ params", False, False, False),
    ],
)
def test_an_answer_is_as_reported_only_where_it_is(tmp_path, found, port, mended, right) -> None:
    assert answer_of(tmp_path, found, port, mended).as_reported is right


def test_a_case_without_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match="part of a checkout"):
        cases(tmp_path / "absent")
    own = tmp_path / "own.py"
    own.write_text('"""A title."""\n\nREPORT = "a"\nFOUND = "b"\n', encoding="utf-8")
    with pytest.raises(UserFileError, match="to have TRIED"):
        cases(tmp_path)
    own.write_text('REPORT = "a"\nFOUND = "b"\nTRIED = "c"\n', encoding="utf-8")
    with pytest.raises(UserFileError, match="to have a docstring"):
        cases(tmp_path)
    own.write_text('"""A title."""\n\nREPORT = "a"\nFOUND = "b"\nTRIED = "c"\n', encoding="utf-8")
    with pytest.raises(UserFileError, match=r"port\(\) and mended\(\), or diagnosis\(\)"):
        run(cases(tmp_path)["own"])


def test_the_command_lists_cases_and_refuses_others() -> None:
    runner = CliRunner()
    listed = runner.invoke(main, ["case"])
    assert listed.exit_code == 0
    assert all(
        name in listed.output and case.report in listed.output for name, case in CASES.items()
    )
    wrong = runner.invoke(main, ["case", "gelu"])
    assert wrong.exit_code == 2
    assert "Did you mean 'gelu_form'?" in wrong.output
