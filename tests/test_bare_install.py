"""A bare `pip install megalodon-numerics`: the model and `compare`, but no store and no page."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

COMPARE = """
import jax, numpy as np
import megalodon_jax
from megalodon_numerics import FunctionSide, Port, compare

weight = {"w": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)}
x = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
sides = [
    FunctionSide(lambda p, x, tanh=tanh: jax.nn.gelu(x @ p["w"], tanh), weight, x)
    for tanh in (True, True, False)
]
print([compare(Port("gelu", sides[0], other)).holds for other in sides[1:]])
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the dependencies install, and theirs, as links, and nothing else."""
    folder = tmp_path_factory.mktemp("site-packages")
    waiting, seen = [*PROJECT["dependencies"]], set()
    while waiting:
        needed = Requirement(waiting.pop())
        if needed.name in seen or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(needed.name)
        installed = distribution(needed.name)
        waiting += installed.requires or ()
        for name in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            link, source = folder / name, Path(str(installed.locate_file(name)))
            if not link.exists() and source.exists():
                link.symlink_to(source)
    for package in ("megalodon_jax", "megalodon_numerics", "parity", "stability", "reports"):
        (folder / package).symlink_to(ROOT / package)
    return folder


def python(bare: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without this environment's packages (`-S`), but with those of the folder."""
    environment = {"PYTHONPATH": str(bare), "JAX_PLATFORMS": "cpu", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, cwd=bare, env=environment, capture_output=True, text=True)


def test_a_bare_install_compares_two_programs(bare: Path) -> None:
    """One pair of equal functions holds, and another GELU does not."""
    done = python(bare, "-c", COMPARE)
    assert done.stdout.strip().splitlines()[-1:] == ["[True, False]"], done.stderr


@pytest.mark.parametrize("arguments", [("nightly",), ("--help",), ("list", "runs")])
def test_without_the_extra_a_command_says_what_to_install(bare: Path, arguments: Any) -> None:
    done = python(bare, "-m", "megalodon_numerics", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "-m pip install -e " in done.stderr and "[nightly]" in done.stderr
    # All that is missing is named at once.
    assert "click, duckdb, jinja2, msgspec, pandas, pyarrow, rich" in done.stderr


def test_without_the_extra_the_rest_of_the_packages_imports(bare: Path) -> None:
    code = (
        "import importlib, pkgutil, parity, stability, megalodon_jax\n"
        "for package in (megalodon_jax, parity, stability):\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if found.name.startswith('stability.moe.'):\n"
        "            continue  # run by commands, with a bar of rich\n"
        "        try:\n"
        "            importlib.import_module(found.name)\n"
        "        except Exception as error:\n"
        "            print(getattr(error, 'name', None) or error)\n"
    )
    done = python(bare, "-c", code)
    assert done.returncode == 0, done.stderr
    missing = {line.split(".")[0].split()[0] for line in done.stdout.splitlines()}
    # Sides and tools of other libraries; the store's and the page's are not among them.
    assert missing <= {"flax", "onnx", "ray", "torch", "transformers", "TorchSide"}


def test_extras_that_need_runs_bring_them() -> None:
    """`pip install 'megalodon-numerics[wandb]'` is one command, and has the commands too."""
    extras = PROJECT["optional-dependencies"]
    for name in ("dev", "exports", "mlflow", "ray", "s3", "wandb"):
        assert "megalodon-numerics[nightly]" in extras[name], name


def test_an_installed_package_has_the_bug_of_the_demonstration_alone(bare: Path) -> None:
    code = "from parity.faults import FAULTS; print(*(fault.name for fault in FAULTS))"
    done = python(bare, "-c", code)
    assert done.stdout.split() == ["rope_keys_one_late"], done.stderr
