"""The tutorial: three planted bugs, found one after the other by what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from tests.helpers import cli, section

TEXT = section("your-own-port.md", "Tutorial: a port with three bugs")
FILES = ("original.py", "twin.py", "my_port.py")


def parts_of(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL)


def words_of(text: str) -> list[str]:
    """What lines say: their words without numbers; of tables and elements, the first."""
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        words = [word for word in line.split() if not re.match(r"-?[\d.]+(e|$)", word)]
        # Which gate uses most of its tolerance is rounding, and so is which element is the worst.
        table = "  " in line or line.startswith("[")
        first = "element" if line.startswith("[") else "".join(words[:1])
        lines.append(f"{first}{' here' if '<- here' in line else ''}" if table else " ".join(words))
    return lines


def is_part(shown: list[str], printed: list[str]) -> bool:
    """Whether all that is shown was printed, in this order."""
    rest = iter(printed)
    return all(line in rest for line in shown)


def compared(folder: Path) -> str:
    with jax.numpy_dtype_promotion("standard"):
        options = ("--out", folder / "runs", "--quiet")
        return cli("port", folder / "my_port.py", *options).stdout


@pytest.mark.sweep
def test_each_bug_of_the_tutorial_is_found_where_it_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in zip(FILES, parts_of("python"), strict=False):
        (tmp_path / name).write_text(text, encoding="utf-8")
    shown, fixes = parts_of("text"), parts_of("diff")
    assert (len(shown), len(fixes)) == (4, 3)
    for turn, expected in enumerate(shown):
        printed = words_of(compared(tmp_path))
        assert is_part(words_of(expected), printed), "\n".join(printed)
        assert words_of(expected)[0] == printed[0]
        # Negative control: no step prints what another does.
        others = [words_of(other)[0] for i, other in enumerate(shown) if i != turn]
        assert printed[0] not in others
        if turn < len(fixes):
            wrong, right = (line[1:] for line in fixes[turn].splitlines())
            twin = (tmp_path / "twin.py").read_text(encoding="utf-8")
            assert twin.count(wrong) == 1
            (tmp_path / "twin.py").write_text(twin.replace(wrong, right), encoding="utf-8")


def test_the_lines_that_the_tutorial_speaks_of_are_those_it_shows() -> None:
    """Without a comparison: each step names the line of the twin that its fix, or its user, is."""
    twin = parts_of("python")[1].splitlines()
    named = [int(re.search(r"twin\.py:(\d+)", text)[1]) for text in parts_of("text")[:3]]
    assert "self.eps" in twin[named[0] - 1]
    assert "x[..., ::2]" in twin[named[1] - 1]
    assert "jax.nn.gelu" in twin[named[2] - 1]
