"""Differences that people reported in public, reproduced in small: `examples/cases/NAME.py`.

A case is a Python file with a docstring, three constants and functions. `REPORT` is the address of
the report, `TRIED` describes how people searched for the cause, and `FOUND` is text that must occur
in the result (its source line or its sentence), or `holds` if there is no bug. `port()` returns the
`parity.Port` with the reported bug, `mended()` the same one without it; a case about storage has
`diagnosis()` instead, which returns a `stability` diagnosis. Source: docs/cases.md.
"""

from __future__ import annotations

import ast
import linecache
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.user_module import UserFileError, functions_of

if TYPE_CHECKING:
    from parity.port import Report

FOLDER = Path(__file__).parents[1] / "examples" / "cases"
"""Folder of the cases in a checkout; an installed package does not have it."""
HOLDS = "holds"
"""Value of `FOUND` for a case whose two sides agree: there is no bug to find."""
_CONSTANTS = ("REPORT", "TRIED", "FOUND")
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+) \(.*\)")


@dataclass(frozen=True, slots=True)
class Case:
    """A publicly reported difference between two implementations, with the file to reproduce it."""

    name: str
    path: Path
    title: str
    """First paragraph of the file's docstring, in one line."""
    text: str
    """Docstring of the case's file after its first paragraph."""
    report: str
    """URL of the public report of the difference."""
    tried: str
    """The search for the cause as the report describes it, as a sentence."""
    found: str
    """Text that must occur in `line` or `sentence` of the `CaseResult`; `HOLDS` if there is no
    bug."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of a case: of its comparison, or of its diagnosis of low-precision storage."""

    sentence: str
    """Result of the comparison in one sentence. For a diagnosis its first line that contains
    `Case.found`, or "" if none does."""
    text: str
    """Whole report of the comparison or diagnosis, several lines."""
    line: str
    """Source line that the report of the comparison names first, without indentation; "" if it
    names none, and for a diagnosis."""
    mended: str
    """Result in one sentence of the comparison without the cause; "" for a diagnosis."""
    as_reported: bool
    """Whether `Case.found` occurs in the result (for `HOLDS`: whether the comparison passes) and,
    for a comparison, it passes once the cause is removed."""
    seconds: float


def cases(folder: Path = FOLDER) -> dict[str, Case]:
    """Return all cases by name, without running their files.

    Raises:
        UserFileError: the folder does not exist, or a file lacks its docstring or a constant.
    """
    if not folder.is_dir():
        raise UserFileError(
            f"expected the cases in {folder}: they are part of a checkout, not of an installed "
            "package. Clone the repository and run the command there."
        )
    return {path.stem: _case(path) for path in sorted(folder.glob("*.py"))}


def run(case: Case) -> CaseResult:
    """Compare the two sides of a case, as reported and with the cause removed; or, for a case
    about low-precision storage, run its diagnosis.

    A file with `diagnosis()` is about storage; any other needs both `port()` and `mended()`.

    Raises:
        UserFileError: the file cannot be loaded, or lacks these functions.
    """
    # Listing cases needs no JAX, whose import takes seconds.
    from parity.port import compare

    start = time.perf_counter()
    with functions_of(case.path, "port", "mended", "diagnosis") as given:
        if "diagnosis" in given:
            answer = _diagnosed(case, given["diagnosis"]())
        elif {"port", "mended"} <= given.keys():
            answer = _compared(case, compare(given["port"]()), compare(given["mended"]()))
        else:
            raise UserFileError(
                f"expected {case.path} to have the functions port() and mended(), or diagnosis()"
            )
    return CaseResult(*answer, time.perf_counter() - start)


def _case(path: Path) -> Case:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    values = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    title, _, text = (ast.get_docstring(tree) or "").partition("\n\n")
    absent = [name for name in _CONSTANTS if not isinstance(values.get(name), str)]
    if absent or not title:
        what = ", ".join(absent) or "a docstring"
        raise UserFileError(f"expected {path} to have {what}: see docs/cases.md")
    report, tried, found = (str(values[name]) for name in _CONSTANTS)
    return Case(path.stem, path, " ".join(title.split()), text, report, tried, found)


def _compared(case: Case, report: Report, mended: Report) -> tuple[str, str, str, str, bool]:
    sentence, line = report.sentence(), named_line(report)
    right = report.holds if case.found == HOLDS else case.found in line or case.found in sentence
    if case.found != HOLDS and report.holds:
        right = False
    return sentence, report.text(), line, mended.sentence(), right and mended.holds


def _diagnosed(case: Case, diagnosis: Any) -> tuple[str, str, str, str, bool]:
    text = diagnosis.text()
    told = [line for line in text.splitlines() if case.found in line]
    return (told or [""])[0], text, "", "", bool(told)


def named_line(report: Report) -> str:
    """Return the text of the source line that a report of a comparison names first, or ""."""
    operation = report.place.operation
    lines = () if operation is None else operation.mask or operation.source
    found = _PLACE.fullmatch(str(lines[0])) if lines else None
    if found is None:
        return ""
    # The report names the file relative to the root of its repository.
    path = Path(found["file"])
    path = path if path.is_file() else FOLDER / path.name
    return linecache.getline(str(path), int(found["line"])).strip()
