"""The list of mutants fits the source, and a bug that the tool plants is found where it is."""

from __future__ import annotations

import ast
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from parity.megalodon.cases import CASES
from reports.subject import names_by_part
from tools import drawn_mutants, mutants
from tools.mutant_list import CONTROLS, MUTANTS, ROOT

EVERY = (*MUTANTS, *CONTROLS)


def test_every_mutant_is_an_edit_of_the_source_as_it_is() -> None:
    """The old text is there exactly once; the new text differs and parses."""
    for mutant in EVERY:
        source = mutant.source()
        ast.parse(source)
        assert mutant.old != mutant.new, mutant.name


def test_an_edit_of_code_that_moved_on_says_so(tmp_path: Path) -> None:
    mutant = replace(MUTANTS[0], file="module.py")
    (tmp_path / "module.py").write_text("nothing of it\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{mutant.name}: expected its old text once.*0 times"):
        mutant.source(tmp_path)
    (tmp_path / "module.py").write_text(2 * f"{mutant.old}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="2 times"):
        mutant.source(tmp_path)


def test_a_test_is_found_by_its_files_name() -> None:
    files = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(set(files)) == len(files)


def test_every_mutant_has_a_name_a_fault_and_tests_that_are_there() -> None:
    assert len({m.name for m in EVERY}) == len(EVERY)
    assert len({(m.file, m.old, m.new) for m in EVERY}) == len(EVERY)
    cases = {case.name for case in CASES}.union(*names_by_part().values())
    for mutant in EVERY:
        assert mutant.fault and mutant.tests, mutant.name
        assert set(mutant.night) <= cases, mutant.name
        assert bool(mutant.equivalent) == (mutant in CONTROLS)
        for place in mutant.tests:
            file, _, test = place.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {test.partition('[')[0]}(" in text or not test, place


@pytest.fixture
def small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one function and its tests, of which each worker has one copy."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "add.py").write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
    tests = "from add import add\n\ndef test_of_zero():\n    assert add(1, 0) == 1\n\n"
    tests += "def test_of_two():\n    assert add(1, 2) == 3\n"
    (root / "test_add.py").write_text(tests, encoding="utf-8")
    # Without it pytest would take a configuration from a folder above.
    ini = "[pytest]\nmarkers = sweep\n"
    (root / "pytest.ini").write_text(ini, encoding="utf-8")
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setattr(mutants, "_tree_of_this_worker", lambda _: copy)
    edits = {"planted": "a - b", "harmless": "b + a", "unreadable": "a +"}
    rows = [
        mutants.Mutant(name, "add.py", "fault", "a + b", new, ("test_add.py",))
        for name, new in edits.items()
    ]
    monkeypatch.setattr(mutants, "MUTANTS", rows)
    monkeypatch.setattr(mutants, "CONTROLS", ())
    return copy


def test_a_planted_mutant_is_found_and_a_harmless_edit_is_not(small_tree: Path) -> None:
    """The copy is whole again after each edit; a module that cannot be imported is found."""
    found = {name: mutants.measure(name, "") for name in ("planted", "harmless", "unreadable")}
    assert found["planted"]["test"] == "test_add.py::test_of_two"
    assert found["harmless"]["test"] == ""
    assert found["unreadable"]["test"] == "test_add.py"
    assert "a + b" in (small_tree / "add.py").read_text(encoding="utf-8")
    assert mutants.measure("", "")["test"] == ""


def test_tests_that_do_not_exist_find_nothing(small_tree: Path) -> None:
    with pytest.raises(RuntimeError, match=r"pytest ran nothing of test_absent\.py"):
        mutants.first_failure(small_tree, ["test_absent.py"])


def test_enough_mutants_and_no_control_must_be_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "CONTROLS", CONTROLS[:1])
    found = [mutants.Result(m.name, "tests/test_x.py::test_y[a|b]") for m in MUTANTS]
    healthy = mutants.Result(CONTROLS[0].name, "")
    assert mutants.judged([*found, healthy])
    assert "| `tests/test_x.py::test_y[a/b]` |" in capsys.readouterr().out.replace(
        "| tests/test_x.py::test_y[a/b] |", "| `tests/test_x.py::test_y[a/b]` |"
    )
    assert not mutants.judged([*found, replace(healthy, test="tests/test_x.py::test_y")])
    lost = int((1 - mutants.SHARE) * len(found)) + 1
    missed = [replace(r, test="") for r in found[:lost]]
    assert not mutants.judged([*missed, *found[lost:], healthy])
    assert mutants.judged([*missed[1:], *found[lost - 1 :], healthy])
    by_night = [replace(r, test="", night="REGRESSED: x") for r in found]
    assert mutants.judged([*by_night, healthy])


def test_a_draw_leaves_out_operators_that_change_nothing() -> None:
    edits = [("a.py", "core/NumberReplacer", i) for i in range(20)]
    edits += [("a.py", "core/ReplaceBinaryOperator_BitOr_Add", i) for i in range(20)]
    chosen = drawn_mutants.drawn(edits, 12, seed=3)
    assert len(chosen) == 12 and {operator for _, operator, _ in chosen} == {"core/NumberReplacer"}
    # The same seed is the same draw, in whichever order the edits are listed.
    assert chosen == drawn_mutants.drawn(edits[::-1], 12, seed=3)
    assert chosen != drawn_mutants.drawn(edits, 12, seed=4)
    assert len(drawn_mutants.drawn(edits, 50, seed=3)) == 20
