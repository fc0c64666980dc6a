"""The command that installs an extra is one that works where it is shown."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from megalodon_jax import extras
from reports.user_module import UserFileError, functions_of
from tests.helpers import ROOT


def test_from_a_checkout_it_names_the_checkout_and_the_python_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    python, *rest, target = shlex.split(extras.install("torch"))
    assert (python, rest) == (sys.executable, ["-m", "pip", "install", "-e"])
    assert target == f"{ROOT}[torch]"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    assert extras.install("s3") == ".venv/bin/python -m pip install -e '.[s3]'"


def test_from_a_wheel_it_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    assert extras.install("torch") == "pip install 'megalodon-numerics[torch]'"


def test_the_extras_of_packages_exist_and_bring_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, extra in extras.EXTRA_OF.items():
        assert any(want.startswith(package) for want in project["optional-dependencies"][extra])


@pytest.mark.parametrize("module", ["torch.nn", "no_such_module"])
def test_a_file_whose_import_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"import {module}\ndef port(): ...\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch.nn", raising=False)
    with pytest.raises(UserFileError) as raised, functions_of(path, "port"):
        pass
    named = f"torch is not installed: {extras.install('torch')}"
    assert (named in str(raised.value)) is (module == "torch.nn")
