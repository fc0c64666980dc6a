"""The package with a unique name: light to import, and clear where another package shadows ours."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megalodon_numerics
import parity
from tests.helpers import ROOT


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose first folder of modules is `folder`, ours the second."""
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def package(folder: Path, name: str) -> Path:
    """Write a foreign package, which fails when it is run as if it were ours."""
    file = folder / name / "__init__.py"
    file.parent.mkdir()
    file.write_text("mine = 1\n", encoding="utf-8")
    return file


def test_nothing_of_ours_and_nothing_heavy_is_imported_with_the_package_and_the_plugin(tmp_path):
    heavy = ("jax", "numpy", "torch", "megalodon_jax", "parity", "stability", "reports")
    code = (
        "import sys, megalodon_numerics, megalodon_numerics.pytest_plugin\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert python(tmp_path, code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", megalodon_numerics.__all__)
def test_every_name_is_there(name):
    assert getattr(megalodon_numerics, name) is not None


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Prot'"):
        getattr(megalodon_numerics, "Prot")  # noqa: B009


def test_the_type_checker_sees_the_names_that_there_are():
    tree = ast.parse((ROOT / "megalodon_numerics/__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {alias.name for line in block.body for alias in getattr(line, "names", ())}
    assert sorted(seen) == megalodon_numerics.__all__
    # What `parity` exports is written there first; a name added there is missed here.
    assert set(parity.__all__) <= seen


def test_a_foreign_package_costs_only_what_needs_ours(tmp_path):
    foreign = package(tmp_path, "reports")
    code = (
        "import reports; from megalodon_numerics import Port; assert reports.mine == 1\n"
        "import parity; assert Port is parity.Port\n"
        "try:\n    import megalodon_numerics; megalodon_numerics.reports\n"
        "except ImportError as error:\n    print(error)"
    )
    shown = python(tmp_path, code)
    assert f"another one first: {foreign.resolve()}" in shown.stdout, shown.stderr
    assert "Rename or move that one" in shown.stdout
    assert str(ROOT / "reports") in shown.stdout


@pytest.mark.parametrize("imported", [False, True])
def test_a_foreign_package_that_is_needed_is_named(tmp_path, imported):
    foreign = package(tmp_path, "megalodon_jax")
    code = ("import megalodon_jax\n" if imported else "") + "from megalodon_numerics import compare"
    shown = python(tmp_path, code)
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1].startswith("ImportError: megalodon_numerics needs its own")
    assert str(foreign.resolve()) in shown.stderr.splitlines()[-1]


def test_the_command_runs_ours_beside_a_foreign_package(tmp_path):
    package(tmp_path, "reports")
    package(tmp_path, "parity")
    code = (
        "import sys; from megalodon_numerics.__main__ import main\n"
        "sys.argv[1:] = ['list', 'nowhere']; main()"
    )
    shown = python(tmp_path, code)
    assert "Traceback" not in shown.stderr
    assert shown.returncode in (0, 2, 5)
    assert "nowhere" in shown.stdout + shown.stderr


TEST = """
def test_mine(port_report):
    import reports
    assert reports.mine == 1
"""


@pytest.mark.parametrize("shadowed", ["reports", "parity"])
def test_the_plugin_says_which_file_shadows_ours(tmp_path, shadowed):
    foreign = package(tmp_path, shadowed)
    (tmp_path / "conftest.py").write_text("", encoding="utf-8")
    (tmp_path / "test_mine.py").write_text(TEST, encoding="utf-8")

    def session(*arguments):
        plugin = ("-q", "-p", "no:cacheprovider", "-p", "megalodon_numerics.pytest_plugin")
        return python(
            tmp_path, f"import pytest; raise SystemExit(pytest.main({[*plugin, *arguments]}))"
        )

    alone, stored = session(), session("--numerics-run", "runs")
    if shadowed == "reports":
        assert alone.returncode == 0, alone.stdout
    else:
        assert f"another one first: {foreign.resolve()}" in alone.stdout.replace("\nE   ", "")
    assert stored.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"another one first: {foreign.resolve()}" in stored.stderr


@pytest.mark.parametrize("words", [["--help"], ["list", "--out", "runs"]])
def test_a_command_imports_jax_after_it_knows_where_programs_are_stored(tmp_path, words):
    """JAX reads the place once, when it is imported; and help must not wait for it."""
    code = (
        "import os, sys\n"
        "from megalodon_numerics import __main__ as program\n"
        "sys.meta_path.insert(0, program._OwnFirst())\n"
        f"sys.argv = ['megalodon-numerics', *{words!r}]\n"
        "class At:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jax':\n"
        "            print('jax:', os.environ.get('JAX_COMPILATION_CACHE_DIR'))\n"
        "sys.meta_path.insert(0, At())\n"
        "try:\n"
        "    program._command()\n"
        "except SystemExit:\n"
        "    import jax\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("jax:")]
    wanted = "None" if words == ["--help"] else f"{tmp_path}/megalodon-numerics/jax/"
    assert len(told) == 1, done.stdout + done.stderr
    assert told[0].startswith(f"jax: {wanted}")
