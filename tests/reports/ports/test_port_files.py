"""The file that names ports: what it may return, and what its author is told of everything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parity.port import Port
from reports.ports import ports_of
from reports.user_module import UserFileError, functions_of
from tests.reports.ports.scripts import CASES, write_port


def test_a_port_is_found_and_what_lies_beside_its_file_is_imported(tmp_path: Path) -> None:
    path = write_port(tmp_path)
    before = list(sys.path)
    with ports_of(path) as ports:
        assert [port.title for port in ports] == ["mlp"]
        assert "settings" in sys.modules
    # A second file may have a neighbour of the same name.
    assert "settings" not in sys.modules
    assert sys.path == before


def test_several_ports_are_cases(tmp_path: Path) -> None:
    with ports_of(write_port(tmp_path, CASES)) as ports:
        assert all(isinstance(port, Port) for port in ports)
        assert [port.title for port in ports] == ["mlp/short", "mlp/long"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("answer = 1\n", "has no function `port`"),
        ("port = 1\n", "has no function `port`"),
        ("def port(): return None\n", "returned None: expected a parity.Port"),
        ("def port(): return ['a']\n", "returned a list of str: expected a parity.Port"),
        ("def port(): return []\n", "returned no port: expected"),
    ],
)
def test_a_file_that_names_no_port_is_told_what_was_expected(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "my_port.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserFileError) as refused, ports_of(path):
        pass
    assert told in str(refused.value)
    assert "my_port.py" in str(refused.value)


def test_two_ports_of_one_title_are_refused(tmp_path: Path) -> None:
    path = write_port(tmp_path, "\n\ndef port():\n    return [one(), one()]\n")
    told = "several ports called mlp: give each a different name or case"
    with pytest.raises(UserFileError, match=told), ports_of(path):
        pass


@pytest.mark.parametrize(("name", "told"), [("no.py", "does not exist"), ("", "is a folder")])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(UserFileError, match=told), ports_of(tmp_path / name):
        pass


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("import no_such_library\n", "import no_such_library", "No module named 'no_such_library'"),
        ("def port():\n    return helper()\n\n\ndef helper():\n    return {}['a']\n",
         "return {}['a']", "KeyError: 'a'"),
        ("raise SystemExit(3)\n", "raise SystemExit(3)", "SystemExit: 3"),
        ("def port(:\n", "def port(:", "SyntaxError"),
    ],
)  # fmt: skip
def test_an_error_of_the_file_is_shown_by_its_own_lines_alone(
    tmp_path: Path, text: str, line: str, error: str
) -> None:
    path = tmp_path / "my_port.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserFileError) as refused, ports_of(path):
        pass
    shown = str(refused.value)
    assert line in shown and error in shown
    assert "importlib" not in shown and "reports" not in shown


def test_a_package_beside_the_file_with_the_name_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "mine.py").write_text("X = 1\n", encoding="utf-8")
    file = tmp_path / "my_port.py"
    file.write_text("from reports.mine import X\n\ndef port(): ...\n", encoding="utf-8")
    with pytest.raises(UserFileError) as raised, functions_of(file, "port"):
        pass
    assert "'reports' is the package of megalodon-numerics" in str(raised.value)
    assert str(tmp_path / "reports") in str(raised.value)


def test_another_import_that_fails_says_nothing_of_our_packages(tmp_path: Path) -> None:
    file = tmp_path / "my_port.py"
    file.write_text("import reports.mine\n\ndef port(): ...\n", encoding="utf-8")
    with pytest.raises(UserFileError) as raised, functions_of(file, "port"):
        pass
    assert "is the package of megalodon-numerics" not in str(raised.value)
