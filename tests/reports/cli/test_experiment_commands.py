"""The commands `dtypes`, `train`, `founding-case` and `gemm-drill`: what they ask and print."""

from __future__ import annotations

import json

import pytest

from stability.experiments import train
from tests.helpers import cli, model_of, tiny


def test_dtypes_shows_the_committed_tables() -> None:
    shown = cli("dtypes", "show", "float32")
    assert shown.exit_code == 0
    assert "model.layers.*.attn.cema forward fft" in shown.output
    assert "float32 jaxpr" in shown.output


@pytest.mark.parametrize("command", ["show", "check", "renew"])
def test_an_audit_that_is_not_there_is_refused_with_those_that_are(command: str) -> None:
    refused = cli("dtypes", command, "nothing")
    assert refused.exit_code == 2
    assert "no pinned table 'nothing'; there are bfloat16_compute, float32" in refused.output


@pytest.mark.parametrize("command", ["founding-case", "gemm-drill"])
def test_a_document_that_is_not_there_is_refused_before_anything_is_trained(command) -> None:
    refused = cli(command, "no/such/document.md")
    assert refused.exit_code == 2
    assert "does not exist" in refused.output


def test_a_model_is_trained_as_asked_and_written(tmp_path, monkeypatch) -> None:
    asked = []

    def trained(config, recipe, console):
        asked.append(recipe)
        return model_of(tiny(vocab_size=256)), {"val_loss": [2.5]}

    monkeypatch.setattr(train, "train", trained)
    text = cli("train", tmp_path / "model", "--steps", 3, "--seed", 5)
    assert text.exit_code == 0, text.output
    assert "model: validation loss 2.5 nats per byte" in text.output
    assert asked == [train.Recipe(steps=3, seed=5)]
    notes = json.loads((tmp_path / "model" / "training.json").read_text(encoding="utf-8"))
    assert (notes["steps"], notes["seed"], notes["batch_size"]) == (3, 5, train.Recipe().batch_size)
    assert (tmp_path / "model" / "model.safetensors").is_file()
