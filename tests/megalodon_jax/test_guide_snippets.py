"""The Python of our documents runs, block after block, as a reader would paste it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT.parent / "shared" / "sources"
SNIPPETS = ("003", "000", "001")
"""Source documents with snippets, in the order in which their names build on one another."""

SMALLER = {
    "vocab_size=32_000": "vocab_size=64",
    "model_dim=512": "model_dim=32",
    "num_layers=8": "num_layers=1",
}
"""The first block at full size takes a minute; every other character runs as written."""

PLACEHOLDERS = {
    "    ...,": "    **sizes,",
    "jax.tree.map(...)": "jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)",
}
"""What `...` stands for in the source documents."""


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
    found = blocks(filled(path.read_text(encoding="utf-8"), PLACEHOLDERS | SMALLER))
    assert found
    for line, block in found:
        exec(compile("\n" * line + block, str(path), "exec"), namespace)


def source(name: str) -> Path:
    (path,) = SOURCES.glob(f"{name}_*.txt")
    return path


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(f"docs/{d}.md", marks=pytest.mark.sweep) for d in ("guide", "first-steps")),
        "README.md",
    ],
)
def test_the_snippets_of_our_documents_run(name: str) -> None:
    namespace: dict[str, Any] = {}
    run(ROOT / name, namespace)
    assert jnp.isfinite(namespace["loss"])


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the snippets people already have are not here")
def test_the_snippets_people_already_have_run_too() -> None:
    namespace: dict[str, Any] = {"jnp": jnp}
    guide: dict[str, Any] = {}
    for _, block in blocks((ROOT / "docs/guide.md").read_text(encoding="utf-8")):
        if "sizes = {" in block:
            exec(re.search(r"^sizes = \{.*?^\}", block, re.S | re.M).group(), guide)
    namespace["sizes"] = guide["sizes"]
    for name in SNIPPETS:
        run(source(name), namespace)
    ids = jax.random.randint(namespace["key"], (4, 24), 1, namespace["config"].vocab_size)
    step = eqx.filter_jit(namespace["train_step"])
    model, state = namespace["model"], namespace["opt_state"]
    assert jnp.isfinite(step(model, state, ids, ids, namespace["key"])[2])


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the snippets people already have are not here")
def test_the_guide_carries_every_snippet_people_already_have() -> None:
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    carried = [
        line in guide.splitlines()
        for name in SNIPPETS
        for _, block in blocks(filled(source(name).read_text(encoding="utf-8"), PLACEHOLDERS))
        for line in block.splitlines()
    ]
    assert carried
    assert all(carried)
