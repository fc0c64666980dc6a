"""Annotated signatures are checked while testing, in every package."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from megalodon_jax.loss import next_token_loss
from parity.engine.measure.metrics import relative_l2
from reports.page.glossary import anchor
from reports.page.sections import facts
from stability.storage.frozen_watch import places
from tests.annotations import ARRAYS, NAMES
from tests.helpers import ROOT

PACKAGES = ("megalodon_jax", "parity", "stability", "reports")

NOT_FOR_BEARTYPE = {"NamedTuple", "ParamSpec", "TYPE_CHECKING", "wraps"}
"""Names whose modules hold annotations that beartype cannot look up. `functools.wraps` gives a
wrapper the annotations of the function that it wraps, which are written in another module."""


def needs_jaxtyping(path: Path) -> bool:
    """Whether a module annotates arrays by jaxtyping, or names that beartype cannot look up."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imports = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    # Packages import for type checkers what they import on first use, and annotate nothing by it.
    if path.name == "__init__.py":
        names.discard("TYPE_CHECKING")
    return "jaxtyping" in imports or bool(names & NOT_FOR_BEARTYPE)


def test_jaxtyping_checks_the_modules_that_need_it() -> None:
    """Beartype alone would compare no shapes, and would fail at names that it cannot look up."""
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    needing = {name for name, path in modules.items() if needs_jaxtyping(path)}
    checked = tuple(f"{package}." for package in (*ARRAYS, *NAMES))
    assert {*NAMES} <= needing
    assert {name for name in needing if not f"{name}.".startswith(checked)} == set()


def test_a_wrong_argument_is_refused_in_every_package() -> None:
    logits, labels = jnp.zeros((2, 5, 7)), jnp.zeros((2, 5), jnp.int32)
    next_token_loss(logits, labels)
    with pytest.raises(TypeCheckError, match="labels"):
        next_token_loss(logits, labels[:1])
    wrong: Any = 3
    with pytest.raises(TypeCheckError, match="shape"):
        places("embed", wrong)
    with pytest.raises(TypeError, match="expected"):
        relative_l2(np.zeros(3), wrong)
    with pytest.raises(TypeError, match="word"):
        anchor(wrong)


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "label", lambda *_: 3)
    with pytest.raises(TypeError, match="moment"):
        facts.moment("no time")
