"""Folders for megalodon-hf: verified before they are there, and nothing left where they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megalodon_jax import deployment as writing
from megalodon_jax import shards
from megalodon_jax.convert import load_from_pretrained, read_config
from megalodon_jax.weight_files import read_tensors
from megalodon_jax.weights import EMBEDDING, HEAD, weight_table
from parity.checkpoint_pair import ExportError, deployment, export_pretrained
from parity.megalodon.reference import why_unavailable
from tests.helpers import ROOT, TINY, adapted, cli, model_of, same_leaves, tiny

UNTIED = tiny(output_size=19, swiglu=True)
SIZE = "3KB"


def live() -> None:
    if reason := why_unavailable():
        pytest.skip(f"not run: {reason}")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No megalodon-hf on this machine."""
    monkeypatch.setattr(deployment, "why_unavailable", lambda: "torch is not installed")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a tokenizer, generation settings and what is no concern of an export."""
    folder = tmp_path / "source"
    folder.mkdir()
    tokenizer = {"model": {"vocab": {"a": 0, "b": 16}}, "added_tokens": [{"id": 3}]}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "generation_config.json": {"eos_token_id": [2, 3], "temperature": 0.7},
        "training_args.json": {},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.torch_ref
@pytest.mark.parametrize(
    ("config", "dtype"), [(TINY, None), (UNTIED, "bfloat16")], ids=["tied", "untied bfloat16"]
)
def test_a_folder_is_verified_by_megalodon_hf(tmp_path: Path, source: Path, config, dtype) -> None:
    live()
    model, folder = model_of(config), tmp_path / "deployed"
    export = export_pretrained(
        model, folder, tokenizer=source, generation=source, dtype=dtype, max_shard_size=SIZE
    )
    assert export.verified
    assert "its parameters are bit-identical" in export.reason
    assert export.record["logits"]["error"] <= export.record["logits"]["bound"]
    assert json.loads((folder / "export.json").read_text(encoding="utf-8")) == export.record
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} < {*names(folder)}
    assert "training_args.json" not in names(folder)
    assert "model.safetensors.index.json" in names(folder)
    assert sorted([p.name for p in tmp_path.iterdir()]) == ["deployed", "source"]
    tensors = read_tensors(folder / "model.safetensors.index.json")
    assert (HEAD in tensors) == (not config.tied)
    loaded = load_from_pretrained(folder)
    if dtype is None:
        assert same_leaves(loaded, model)
        assert loaded.config == config
    else:
        sensitive = {row.name for row in weight_table(config) if row.sensitive}
        assert {n for n, a in tensors.items() if a.dtype == np.float32} == sensitive


@pytest.mark.torch_ref
def test_auto_classes_find_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live()
    import torch
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    # Transformers copies the folder's module there, and puts it on the path of modules.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    export_pretrained(model_of(UNTIED), tmp_path / "deployed", verify=False)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "deployed", trust_remote_code=True, torch_dtype="auto"
    )
    assert type(model).__module__ == "megalodon.modeling_megalodon"
    expected = torch.from_numpy(np.array(model_of(UNTIED).lm_head.weight))
    assert torch.equal(model.lm_head.weight, expected)


def test_where_megalodon_hf_cannot_run_nothing_is_called_verified(tmp_path: Path, absent) -> None:
    export = export_pretrained(model_of(TINY), tmp_path / "deployed")
    assert not export.verified
    assert export.reason.endswith("megalodon-hf did not run: torch is not installed")
    assert same_leaves(load_from_pretrained(tmp_path / "deployed"), model_of(TINY))
    assert not export_pretrained(model_of(TINY), tmp_path / "deployed", verify=False).verified


def edit(file: str, change: Callable[[dict], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / file
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            change(content)
            path.write_text(json.dumps(content), encoding="utf-8")
        else:
            content = load_file(path)
            change(content)
            save_file(content, path, {"format": "pt"})

    return damage


BETA = "model.layers.0.attn.beta"
WEIGHTS = "model.safetensors"
DAMAGES = {
    "altered": (
        edit(WEIGHTS, lambda t: t[BETA].__setitem__((1, 3), t[BETA][1, 3] * 2)),
        rf"{BETA} differs at \[1, 3\]: the model has .*, the folder .*bit-identical",
    ),
    "missing": (edit(WEIGHTS, lambda t: t.pop(BETA)), f"{BETA} is missing from the folder"),
    "unexpected": (
        edit(WEIGHTS, lambda t: t.update(other=t[BETA])),
        "other is no parameter of the model, but is in the folder",
    ),
    "narrow": (
        edit(WEIGHTS, lambda t: t.update({BETA: t[BETA].astype(jnp.bfloat16)})),
        rf"{BETA} is bfloat16 \(2, 8\) in the folder, expected float32",
    ),
    "another model": (
        edit("config.json", lambda c: c.update(rope_base=77.0)),
        r"config.json describes another model: config.rope_base: torch 77.0, jax 10000.0",
    ),
    "a head twice": (
        edit(WEIGHTS, lambda t: t.update({HEAD: t[EMBEDDING] + 1})),
        f"{HEAD} is no parameter of the model",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_not_the_model_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    spoil, message = DAMAGES[damage]
    check = deployment.check_tensors

    def spoiled(expected: Any, folder: Path) -> None:
        spoil(folder)
        check(expected, folder)

    monkeypatch.setattr(deployment, "check_tensors", spoiled)
    with pytest.raises(ExportError, match=message):
        export_pretrained(model_of(TINY), tmp_path / "deployed")
    assert names(tmp_path) == []


def test_a_missing_shard_is_named_and_an_earlier_export_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent
) -> None:
    folder = tmp_path / "deployed"
    export_pretrained(model_of(TINY), folder, max_shard_size=SIZE)
    publish = shards._publish

    def losing(aside: Path, path: Path, names: list[str]) -> None:
        publish(aside, path, names)
        (path.parent / names[1]).unlink()

    monkeypatch.setattr(shards, "_publish", losing)
    with pytest.raises((ValueError, OSError), match=r"model-00002-of-00003\.safetensors"):
        export_pretrained(model_of(TINY, seed=5), folder, max_shard_size=SIZE)
    assert same_leaves(load_from_pretrained(folder), model_of(TINY))
    assert names(tmp_path) == ["deployed"]


@pytest.mark.torch_ref
@pytest.mark.parametrize("what", ["logits", "tensor", "config"])
def test_what_megalodon_hf_makes_of_a_folder_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    live()
    load = deployment.Deployed.load

    def other(folder: Path) -> Any:
        import torch

        found = load(folder)
        if what == "config":
            found.model.config.norm_eps = 0.5
        with torch.no_grad():
            if what == "tensor":
                found.model.model.layers[1].attn.beta[1, 2] += 1
            if what == "logits":
                # A buffer: no parameter differs, and every turn of queries and keys does.
                for layer in found.model.model.layers:
                    layer.attn.inner.rope.inv_freq *= 1.001
        return found

    monkeypatch.setattr(deployment.Deployed, "load", other)
    message = {
        "logits": r"logits differ by .*more than .*\(jax32:reference32: noise floor.*first at row "
        r"0, position [1-9]\d*, most at token \d+: JAX .*, megalodon-hf ",
        "tensor": r"model.layers.1.attn.beta differs at \[1, 2\]: the model has .*, megalodon-hf",
        "config": "megalodon-hf's configuration describes another model: config.norm_eps",
    }[what]
    with pytest.raises(ExportError, match=message):
        export_pretrained(model_of(TINY), tmp_path / "deployed")
    assert names(tmp_path) == []


def test_what_cannot_be_copied_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path
) -> None:
    folder = tmp_path / "deployed"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*one of tokenizer.json"):
        export_pretrained(model_of(TINY), folder, tokenizer=tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no generation settings at"):
        export_pretrained(model_of(TINY), folder, generation=tmp_path / "empty")
    with pytest.raises(ValueError, match=r"has token 16, and the model has vocab_size=16"):
        export_pretrained(model_of(tiny(vocab_size=16)), folder, tokenizer=source)
    with pytest.raises(ValueError, match=r"eos_token_id=17 is outside vocab_size=17"):
        export_pretrained(model_of(TINY), folder, generation={"eos_token_id": [1, 17]})
    with pytest.raises(ValueError, match=r"unexpected .*lora_a"):
        export_pretrained(adapted(), folder)
    with pytest.raises(ValueError, match=r"was not written by export_pretrained"):
        export_pretrained(model_of(TINY), source)
    assert names(tmp_path) == ["empty", "source"]


@pytest.mark.usefixtures("absent")
def test_an_export_is_replaced_as_a_whole(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "deployed"
    export_pretrained(model_of(TINY), folder, tokenizer=source, max_shard_size=SIZE)
    export_pretrained(model_of(TINY, seed=5), folder, generation={"temperature": 0.5})
    expected = [writing.CONFIG, writing.RECORD, writing.GENERATION, writing.CODE, WEIGHTS]
    assert names(folder) == sorted(expected)
    assert same_leaves(load_from_pretrained(folder), model_of(TINY, seed=5))
    assert read_config(folder / "config.json") == TINY


@pytest.mark.parametrize("available", [True, False])
def test_the_command_says_what_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: bool
) -> None:
    if available:
        monkeypatch.setattr(deployment, "why_unavailable", lambda: None)
        answer = {"verified": True, "reason": "as asked"}
        monkeypatch.setattr(deployment, "verified", lambda *_: answer)
    else:
        monkeypatch.setattr(deployment, "why_unavailable", lambda: "torch is not installed")
    asked = ("export-model", ROOT / "parity/data/byte_lm", tmp_path / "deployed", "--quiet")
    result = cli(*asked, "--json")
    said = json.loads(result.stdout)
    assert result.exit_code == said["exit_code"] == (0 if available else 3)
    assert (said["written"], said["verified"]) == (True, available)
    assert ("did not run" in said["reason"]) != available
    text = cli(*asked, "--no-verify")
    assert text.exit_code == 0
    assert text.stdout.startswith("NOT VERIFIED: ")
    assert text.stdout.rstrip().endswith("not asked for")


def test_the_command_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise ExportError("export: model.x differs at [0].")

    monkeypatch.setattr(deployment, "check_tensors", failing)
    asked = ("export-model", ROOT / "parity/data/byte_lm", tmp_path / "deployed", "--quiet")
    result = cli(*asked)
    assert result.exit_code == 1
    assert result.stdout.startswith("FAILED, nothing written: ")
    assert "model.x differs" in result.stdout
    assert not (tmp_path / "deployed").exists()
