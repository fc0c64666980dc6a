"""The Python of our documents runs, block after block, as a reader would paste it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import ROOT

SMALLER = {
    "vocab_size=32_000": "vocab_size=64",
    "model_dim=512": "model_dim=32",
    "num_layers=8": "num_layers=1",
}
"""The first block at full size takes a minute; every other character runs as written."""


@pytest.fixture(autouse=True)
def as_a_reader(tmp_path: Path, monkeypatch):
    """An empty folder, and JAX as it comes: optax relies on the standard promotion."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        yield


def blocks(text: str) -> list[tuple[int, str]]:
    """Each Python block of a Markdown text, and the number of lines before it."""
    found = re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)
    return [(text[: block.start(1)].count("\n"), block.group(1)) for block in found]


def filled(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def run(path: Path, namespace: dict[str, Any]) -> None:
    """Execute the blocks in one namespace; a traceback shows the document's own lines."""
    found = blocks(filled(path.read_text(encoding="utf-8"), SMALLER))
    assert found
    for line, block in found:
        exec(compile("\n" * line + block, str(path), "exec"), namespace)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("docs/guide.md", marks=pytest.mark.sweep),
        "README.md",
    ],
)
def test_the_snippets_of_our_documents_run(name: str) -> None:
    namespace: dict[str, Any] = {}
    run(ROOT / name, namespace)
    assert jnp.isfinite(namespace["loss"])
