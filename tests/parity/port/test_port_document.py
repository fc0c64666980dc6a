"""The snippets of docs/your-own-port.md: they run, and say what the document says."""

from __future__ import annotations

import re

import jax

from tests.helpers import ROOT
from tests.megalodon_jax.test_guide_snippets import blocks

DOCUMENT = ROOT / "docs" / "your-own-port.md"


def test_the_document_runs_and_says_what_it_prints(capsys):
    # The tutorial is a test of its own.
    text, namespace = DOCUMENT.read_text(encoding="utf-8").split("\n## Tutorial")[0], {}
    with jax.numpy_dtype_promotion("standard"):
        for line, block in blocks(text):
            exec(compile("\n" * line + block, str(DOCUMENT), "exec"), namespace)
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    shown = re.findall(r"```\n\n```text\n(.*?)```", text, re.DOTALL)
    expected = [line for line in "".join(shown).splitlines() if line]
    # Rounding differs from machine to machine; what is said does not.
    assert [words_of(line) for line in printed] == [words_of(line) for line in expected]
    assert printed[-1] == expected[-1] == "it starts at activated"


def words_of(line: str) -> tuple[str, bool]:
    """What a line says: its first word, wherever the file lies, and whether it starts there."""
    word = re.sub(r"\S+\.(py|md):\d+|^\d+$", "FILE:LINE", line.split()[0])
    return "[...]" if word.startswith("[") else word, "<- here" in line
