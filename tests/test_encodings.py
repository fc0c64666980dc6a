"""Text files are read and written as UTF-8 whatever the locale says."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.helpers import ROOT

PACKAGES = ("megalodon_jax", "megalodon_numerics", "parity", "stability", "reports", "tests")
POSITION = {"read_text": 0, "write_text": 1}
"""Where `encoding` stands when it is not given by name."""


def without_encoding(source: str) -> Iterator[int]:
    """Lines that leave the encoding of a text file to the locale."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(k.arg == "encoding" for k in call.keywords):
            continue
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr in POSITION:
            if len(call.args) <= POSITION[function.attr]:
                yield call.lineno
        elif isinstance(function, ast.Name) and function.id == "open":
            modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
            if "b" not in "".join(ast.unparse(mode) for mode in modes):
                yield call.lineno


def test_every_text_file_has_its_encoding_named() -> None:
    files = [ROOT / "conftest.py", *(f for p in PACKAGES for f in sorted((ROOT / p).rglob("*.py")))]
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in files
        for line in without_encoding(file.read_text(encoding="utf-8"))
    ]
    assert not found, 'add encoding="utf-8"'


@pytest.mark.parametrize(
    ("source", "left_open"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(content, newline='')", True),
        ("path.write_text(content, encoding='ascii')", False),
        ("open(path, 'w')", True),
        ("open(path, mode='rb')", False),
        ("read_text()", False),
    ],
)
def test_what_is_left_to_the_locale_is_seen(source: str, left_open: bool) -> None:
    assert list(without_encoding(source)) == [1] * left_open
