"""`megalodon-numerics stability`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from megalodon_jax.convert import save_safetensors
from parity.megalodon.cases import BYTE_LM
from tests.helpers import cli, model_of, skip_unless_computed, tiny


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of one small layer, to be trained or spoiled."""
    config = tiny(vocab_size=256, num_layers=1)
    save_safetensors(model_of(config), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    return tmp_path


def small(tmp_path, **tensors):
    path = tmp_path / "small.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.sweep
@pytest.mark.optimised
def test_the_committed_model_gets_a_ranked_list() -> None:
    result = cli("stability", BYTE_LM)
    assert result.exit_code == 0, result.output
    assert "model.layers.*.ffn.norm.weight (4 leaves)" in result.stdout
    assert "fix: round updates stochastically" in result.stdout
    assert "probing" in result.stderr
    assert "probing" not in result.stdout


@pytest.mark.sweep
def test_json_and_quiet_leave_nothing_but_the_answer(tmp_path) -> None:
    path = small(tmp_path, weight=np.ones(64, np.float32))
    result = cli("stability", path, "--json", "--quiet", "--lr", "1e-3")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    words = json.loads(result.stdout)
    assert words["worst"] == "warning"
    assert any(r["remedy"] == "stochastic rounding" and r["works"] for r in words["remedies"])


def test_a_large_enough_rate_freezes_nothing(tmp_path) -> None:
    path = small(tmp_path, weight=np.ones(64, np.float32))
    result = cli("stability", path, "--lr", "0.1", "--quiet")
    assert result.exit_code == 0, result.output
    assert "Nothing found" in result.stdout


@pytest.mark.parametrize(
    "optimiser", ["sgd", pytest.param("lion", marks=pytest.mark.sweep), "muon"]
)
def test_every_optimiser_and_format_can_be_asked_about(tmp_path, optimiser) -> None:
    skip_unless_computed("float16")
    path = small(tmp_path, weight=np.full((8, 8), 0.5, np.float32))
    result = cli("stability", path, "--optimiser", optimiser, "--format", "float16")
    assert result.exit_code == 0, result.output
    assert "float16" in result.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="limits the instructions of x86")
def test_a_processor_that_cannot_convert_float16_is_told_in_words(tmp_path) -> None:
    path = small(tmp_path, weight=np.full((8, 8), 0.5, np.float32))
    command = [sys.executable, "-m", "reports.cli", "stability", path, "--format", "float16"]
    limited = {**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}
    words = subprocess.run(command, env=limited, capture_output=True, text=True, encoding="utf-8")
    assert words.returncode == 2, words.stderr
    assert "error: float16 cannot be computed on this processor" in words.stderr
    assert "ask about another format" in words.stderr


@pytest.mark.sweep
def test_a_torch_file_is_read(tmp_path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"norm.weight": torch.ones(64)}, path)
    result = cli("stability", path, "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("WARNING norm.weight")


@pytest.mark.sweep
@pytest.mark.optimised
def test_training_on_a_text_is_measured(folder) -> None:
    result = cli("stability", folder, "--text", BYTE_LM / "heldout.txt")
    assert result.exit_code == 0, result.output
    assert "Measured: training on 20 batches." in result.stdout


@pytest.mark.sweep
@pytest.mark.optimised
def test_weights_that_are_not_finite_are_an_error(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    result = cli("stability", folder, "--quiet")
    assert result.exit_code == 1
    assert result.stdout.startswith("ERROR model.norm.weight: 1 of 8 values are NaN or infinite")


def test_another_models_names_are_refused(folder) -> None:
    save_file({"encoder.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    result = cli("stability", folder)
    assert result.exit_code == 2
    assert "not the weights of a Megalodon" in result.output


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"not a checkpoint"])
def test_an_empty_or_foreign_file_is_refused(tmp_path, content) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    result = cli("stability", path)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no/such/place",), "no"),
        ((BYTE_LM, "--lr", "-1"), "must be a positive number"),
        ((BYTE_LM, "--lr", "nan"), "must be a positive number"),
        ((BYTE_LM, "--format", "int8"), "unknown storage format 'int8'"),
        ((BYTE_LM, "--optimiser", "adam"), "is not one of"),
        ((BYTE_LM, "--text", "no/such/text"), "no text at"),
    ],
)
def test_bad_arguments_end_in_words(arguments, said) -> None:
    result = cli("stability", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_text_too_short_to_train_on_is_refused(tmp_path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"short")
    result = cli("stability", BYTE_LM, "--text", text)
    assert result.exit_code == 2
    assert "has 5 bytes, at least" in result.output
