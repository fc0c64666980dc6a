"""`activations`, as a user meets it: what one step says of narrow formats."""

from __future__ import annotations

import json
import math
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import pytest

from reports.cli.views import activations
from tests.helpers import cli, model_of, tiny

MODEL = model_of(tiny(vocab_size=256))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Have a checkpoint hold `model`; eight tokens compile and run sooner than 256."""

    def load(model=MODEL):
        monkeypatch.setattr(activations, "load_from_pretrained", lambda path: model)
        monkeypatch.setattr("reports.user_text.STEP", (2, 8))

    return load


def test_a_healthy_step_passes_and_says_how_much_it_looked_at(loaded, tmp_path: Path) -> None:
    loaded()
    text = tmp_path / "text"
    text.write_bytes(bytes(range(16)))
    result = cli("activations", tmp_path, "--text", text)
    assert result.exit_code == 0, result.output
    assert "0 warnings or worse" in result.output
    assert "one step on 16 tokens of text" in result.stderr


def test_what_leaves_a_format_is_named_with_its_remedy(loaded, tmp_path: Path) -> None:
    """Negative control of the one above."""
    weight = MODEL.model.layers[1].ffn.fc1.weight
    broken = jnp.full_like(weight, math.inf)
    loaded(eqx.tree_at(lambda model: model.model.layers[1].ffn.fc1.weight, MODEL, broken))
    result = cli("activations", tmp_path, "--json")
    assert result.exit_code == 1, result.output
    errors = [row for row in json.loads(result.stdout) if row["severity"] == "error"]
    assert "layers.1.ffn" in {row["subject"] for row in errors}
    assert "layers.0.ffn" not in {row["subject"] for row in errors}
    shown = cli("activations", tmp_path).output
    assert "ERROR layers.1.ffn: " in shown and "stability.nonfinite.replay.locate" in shown


def test_a_text_that_is_too_short_is_refused(loaded, tmp_path: Path) -> None:
    loaded()
    (tmp_path / "short").write_bytes(b"15 bytes, no 16")
    result = cli("activations", tmp_path, "--text", tmp_path / "short")
    assert (result.exit_code, "at least 16 bytes" in result.output) == (2, True)
