"""The commands of `python -m tools.experiments`: what they ask, print and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from stability.core import documents
from tests.helpers import model_of, tiny
from tools.experiments import drill, moe_defects, train
from tools.experiments.__main__ import main


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_help_lists_these_commands_and_no_other() -> None:
    shown = call("--help")
    assert shown.exit_code == 0
    for name in ("train", "founding-case", "gemm-drill", "drill", "defects", "guard"):
        assert f"\n  {name} " in shown.output
    assert "nightly " not in shown.output


@pytest.mark.parametrize("command", ["founding-case", "gemm-drill"])
def test_a_document_that_is_not_there_is_refused_before_anything_is_trained(command: str) -> None:
    refused = call(command, "no/such/document.md")
    assert refused.exit_code == 2
    assert "does not exist" in refused.output


def test_a_model_is_trained_as_asked_and_written(tmp_path: Path, monkeypatch: Any) -> None:
    asked = []

    def trained(config, recipe, console):
        asked.append(recipe)
        return model_of(tiny(vocab_size=256)), {"val_loss": [2.5]}

    monkeypatch.setattr(train, "train", trained)
    text = call("train", tmp_path / "model", "--steps", 3, "--seed", 5)
    assert text.exit_code == 0, text.output
    assert "model: validation loss 2.5 nats per byte" in text.output
    assert asked == [train.Recipe(steps=3, seed=5)]
    notes = json.loads((tmp_path / "model" / "training.json").read_text(encoding="utf-8"))
    assert (notes["steps"], notes["seed"], notes["batch_size"]) == (3, 5, train.Recipe().batch_size)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def interrupted(monkeypatch: Any) -> list[drill.Plan]:
    """Interrupt the drill where its training begins; return the plans that it was asked for."""
    asked: list[drill.Plan] = []

    def trained(plan: drill.Plan, report: Any) -> None:
        asked.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr(drill, "run", trained)
    return asked


def test_an_interrupted_drill_leaves_the_old_one(tmp_path: Path, monkeypatch: Any) -> None:
    asked, out = interrupted(monkeypatch), tmp_path / "drill.json"
    out.write_text("before", encoding="utf-8")
    result = call("drill", "--out", out, "--steps", 7, "--seed", 3)
    assert result.exit_code == 3
    assert asked == [drill.Plan(steps=7, seed=3)]
    assert out.read_text(encoding="utf-8") == "before"
    assert f"training {len(drill.VARIANTS)} variants for 7 steps" in result.stderr


@pytest.mark.parametrize("command", ["drill", "defects", "guard"])
def test_a_document_that_could_not_be_written_is_refused_before_training(
    command: str, tmp_path: Path
) -> None:
    result = call(command, "--out", tmp_path / "nowhere" / "some.json")
    assert result.exit_code == 2
    assert "there is no folder" in result.output


@pytest.mark.parametrize("caught", [True, False])
def test_a_defect_that_is_not_caught_ends_with_1(
    caught: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    clip = next(d for d in moe_defects.DEFECTS if d.metric == "clip_error")
    planted = clip.planted if caught else clip.healthy
    row = moe_defects.Defect("clip_error", "clipping", clip.healthy, planted).row()
    monkeypatch.setattr(moe_defects, "rows", lambda: [row])
    examined: Any = type("Examination", (), {"what": "a model", "findings": []})
    monkeypatch.setattr("stability.moe.examine.examine", lambda *arguments: examined)
    out = tmp_path / "mla_moe" / "defects.json"
    out.parent.mkdir()
    result = call("defects", "--out", out)
    assert result.exit_code == (0 if caught else 1), result.output
    assert ("| NO |" in result.output) is not caught
    assert documents.read(documents.DEFECTS, tmp_path)["defects"][0]["caught"] is caught
