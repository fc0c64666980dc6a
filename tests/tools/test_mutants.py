"""The list of mutants fits the source, and a bug that the tool plants is found where it is."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parity.megalodon.cases import CASES
from reports.nightly.suites import elsewhere
from tools import mutants
from tools.mutant_list import (
    CONTROLS,
    MUTANTS,
    ROOT,
    bench,
    blind,
    blind_second,
    blind_third,
    commands,
    equivalent,
    executors,
    interchange,
    layers,
    lora,
    meshes,
    model,
    packed_streams,
    parity,
    ports,
    reports,
    stability,
    systematic,
    torch_runs,
)
from tools.mutant_list.survivors import ARGUED

EVERY = (*MUTANTS, *CONTROLS)
LEAST = 165
"""Mutants that were asked for, and a few."""


def test_every_mutant_is_an_edit_of_the_source_as_it_is() -> None:
    """The old text is there exactly once, the new one is another and Python."""
    for mutant in EVERY:
        source = mutant.source()
        ast.parse(source)
        assert mutant.old != mutant.new, mutant.name


def test_no_group_is_left_out() -> None:
    modules = (
        *(bench, blind, blind_second, blind_third, commands, equivalent, executors),
        *(interchange, layers, lora, meshes, model, packed_streams),
        *(parity, ports, reports, stability, systematic, torch_runs),
    )
    groups = [group for module in modules for group in vars(module).values()]
    listed = {m for group in groups if isinstance(group, tuple) for m in group}
    assert {m for m in listed if isinstance(m, mutants.Mutant)} == set(EVERY)


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
    assert len(MUTANTS) >= LEAST and len(CONTROLS) == 6
    assert len({m.name for m in EVERY}) == len(EVERY)
    assert len({(m.file, m.old, m.new) for m in EVERY}) == len(EVERY)
    assert ARGUED.keys() <= {m.name for m in MUTANTS}
    cases = {case.name for case in CASES}.union(*elsewhere().values())
    for mutant in EVERY:
        assert mutant.fault and mutant.tests, mutant.name
        assert set(mutant.night) <= cases, mutant.name
        assert bool(mutant.equivalent) == (mutant in CONTROLS)
        for place in mutant.tests:
            file, _, test = place.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {test.partition('[')[0]}(" in text or not test, place


def test_the_document_has_every_mutant() -> None:
    """Whoever changes the list runs what is new and writes the document."""
    text = mutants.DOCUMENT.read_text(encoding="utf-8")
    body = text.partition(f"<!-- {mutants.TABLE}: begin -->")[2]
    named = re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)
    assert named == [m.name for m in MUTANTS]
    assert "NOT ARGUED" not in text


# What the planted and the harmless edit are made in: a process of its own, since a process that has
# threads must not fork.
PLANT = """
import json, sys
from pathlib import Path
import parity.executors.item  # as a worker has; the copy has another parity
from tools import mutants
from tools.mutant_list import Mutant

root = Path(sys.argv[1])
tree = mutants.Tree(root / "copy", root)
test = "test_add.py"
bad = mutants.healthy(tree, [test], root / "healthy.json")
edits = {"planted": "a - b", "harmless": "b + a", "endless": "add(a, b)"}
results = [
    mutants.by_pytest(tree, Mutant(name, "add.py", "fault", "a + b", new, (test,)), [test], bad)
    for name, new in edits.items()
]
whole = (root / "copy" / "add.py").read_bytes() == (root / "add.py").read_bytes()
print(json.dumps({"bad": bad, "places": {r.mutant: r.place for r in results}, "whole": whole}))
"""


def test_a_planted_mutant_is_found_and_a_harmless_edit_is_not(tmp_path: Path) -> None:
    """What fails on the healthy tree is no find, and the copy is whole again after each edit."""
    files = {
        "add.py": "from parity import ZERO\n\ndef add(a, b):\n    return a + b + ZERO\n",
        "parity.py": "ZERO = 0\n",
        "test_add.py": "from add import add\n\n"
        "def test_broken_anyway():\n    assert not 'healthy'\n\n"
        "def test_of_zero():\n    assert add(1, 0) == 1\n\n"
        "def test_of_two():\n    assert add(1, 2) == 3\n",
    }
    for folder in (tmp_path, tmp_path / "copy"):
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-c", PLANT, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["bad"] == ["test_add.py::test_broken_anyway"]
    assert said["places"] == {
        "planted": "test_add.py::test_of_two",
        "harmless": "",
        "endless": "test_add.py::test_of_zero",
    }
    assert said["whole"]


def test_results_are_kept_by_edit_and_the_last_one_counts(tmp_path: Path) -> None:
    mutant, path = MUTANTS[0], tmp_path / "results.jsonl"
    missed = mutants.Result(mutant.name, mutants.digest_of(mutant, "pytest"), "pytest", "", "", 1.0)
    mutants.Results(path).add(missed)
    assert mutants.survivors(mutants.Results(path)) == [mutant]
    assert "NOT ARGUED" in mutants.argued(mutants.Results(path), {})
    assert mutants.argued(mutants.Results(path), {mutant.name: "because"}).endswith("because")
    mutants.Results(path).add(replace(missed, place="tests/test_x.py::test_y[1]"))
    known = mutants.Results(path)
    assert known.found(mutant) and not mutants.survivors(known)
    assert "| `test_x.py::test_y[1]` |" in mutants.table(known, [mutant])
    other = replace(mutant, new=f"{mutant.new}  # another edit")
    assert known.of(other, "pytest") is None
    assert "| not run |" in mutants.table(known, [other])


def test_failures_are_read_with_what_they_say() -> None:
    output = (
        "FAILED tests/a.py::test_b[x y] - assert 1 == 2\n"
        "ERROR tests/c.py - ValueError: no\nFAILED tests/d.py::test_e\n"
    )
    assert mutants.failures(output) == [
        ("tests/a.py::test_b[x y]", "assert 1 == 2"),
        ("tests/c.py", "ValueError: no"),
        ("tests/d.py::test_e", ""),
    ]


@pytest.mark.parametrize(
    ("sentence", "place"),
    [
        (
            "3 failures, all new. It starts at layers.0.q in case plain (JAX float64 vs oracle): x",
            "layers.0.q in case plain",
        ),
        ("1 new failure. Probe dtype_audit on model: said.", "dtype_audit on model"),
        ("Nothing failed, but suite parity is not whole.", "Nothing failed, but suite parity"),
    ],
)
def test_a_night_is_told_by_where_it_starts(sentence: str, place: str) -> None:
    assert mutants.stage_of(sentence).startswith(place)


def test_mutants_take_turns_by_file() -> None:
    files = [m.file for m in mutants.in_turns(EVERY)]
    different = len(set(files))
    assert len(set(files[:different])) == different
    assert sorted(files) == sorted(m.file for m in EVERY)
