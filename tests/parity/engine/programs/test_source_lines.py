"""A line is shown with the text around it, as the file is when it is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

from parity.engine.programs.operations import source_of
from parity.engine.programs.source_lines import AROUND, Line, excerpt


def test_an_excerpt_has_numbers_and_marks_the_line(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("".join(f"    line {n}\n" for n in range(1, 30)), encoding="utf-8")
    rows = excerpt(f"{file}:9 (Layer.__call__)").split("\n")
    assert len(rows) == 2 * AROUND + 1
    assert rows[AROUND] == ">  9  line 9"
    assert rows[AROUND + 1] == "  10  line 10"


def test_a_file_is_found_below_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.py").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert Line.at("model.py:1 (<module>)", "why") == Line(
        "model.py:1 (<module>)", "why", "> 1  x = 1"
    )


def test_a_file_of_the_current_folder_is_before_one_of_an_installed_package(
    tmp_path: Path, monkeypatch
) -> None:
    for place in ("here", "installed", "second"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "model.py").write_text(f"x = {place!r}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / place) for place in ("installed", "second")])
    assert excerpt("model.py:1 (f)") == "> 1  x = 'here'"
    (tmp_path / "here" / "model.py").unlink()
    assert excerpt("model.py:1 (f)") == "> 1  x = 'installed'"
    # A folder of that name is no file.
    (tmp_path / "here" / "model.py").mkdir()
    assert excerpt("model.py:1 (f)") == "> 1  x = 'installed'"


def test_lines_are_counted_as_python_counts_them(tmp_path: Path, monkeypatch) -> None:
    """A form feed, as old sources have between functions, ends no line."""
    name = "layer:2.py"
    (tmp_path / name).write_bytes(b"a = 1\n\x0c\nb = '\x1c'\r\nc = 3\r\n")
    monkeypatch.chdir(tmp_path)
    assert excerpt(f"{name}:4 (<module>)", 0) == "> 4  c = 3"
    assert excerpt(f"{name}:5 (<module>)", 0) == ""


@pytest.mark.parametrize("place", ["model.py:7 (f)", "absent.py:1 (f)", "nowhere", ""])
def test_a_line_that_is_not_there_has_no_excerpt(place: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.py").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert excerpt(place) == ""


def test_a_file_in_another_encoding_has_no_excerpt(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    assert excerpt("model.py:1 (f)") == ""


@pytest.mark.parametrize("hidden", [True, False])
def test_the_operations_of_a_hidden_module_are_their_caller_s(
    hidden: bool, tmp_path: Path, monkeypatch
) -> None:
    helper = tmp_path / f"helper_{hidden}.py"
    text = f"__tracebackhide__ = {hidden}\ndef double(x):\n    return x + x\n"
    helper.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(helper.stem, helper)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, helper.stem, module)
    spec.loader.exec_module(module)

    def port(x):
        return module.double(x)

    [eqn] = jax.make_jaxpr(port)(1.0).jaxpr.eqns
    named = source_of(eqn)[0]
    assert (Path(__file__).name in named, helper.name in named) == (hidden, not hidden)
