"""Checkpoints from outside: what is equal passes, what is not is named, and nothing is guessed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megalodon_jax.checkpoint import save_checkpoint
from megalodon_jax.convert import load_from_pretrained
from parity.checkpoint_pair.files import open_checkpoint
from parity.megalodon.reference import why_unavailable
from reports.cli import checkpoint_pair
from reports.verdict.decide import ExitCode, Word
from tests.helpers import cli, rel_l2, rounding_bound, roundoff, tiny
from tests.parity.checkpoint_pair import synthetic

CONFIG = tiny(num_layers=3, vocab_size=256)
LENGTH = "9"
GAMMA = "model.layers.1.attn.rmsnorm.gamma"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sharded bfloat16 folder and a text; copy before changing."""
    folder = tmp_path_factory.mktemp("made")
    synthetic.write(folder / "torch", CONFIG)
    (folder / "text.txt").write_text(
        "What is equal passes, and what is not is named.", encoding="utf-8"
    )
    return folder


@pytest.fixture
def work(made, tmp_path):
    shutil.copytree(made, tmp_path / "work")
    return tmp_path / "work"


def parity(work: Path, *arguments: str):
    """The command on the checkpoint of `work`: exit code, and its JSON or its error."""
    given = ["parity", "--torch", str(work / "torch"), "--length", LENGTH, "--quiet", "--json"]
    if "--ids" not in arguments:
        given += ["--text", str(work / "text.txt")]
    if "--live" not in arguments:
        given += ["--oracle-only"]
    arguments = tuple(a for a in arguments if a != "--live")
    result = cli(*given, *arguments)
    said = json.loads(result.stdout) if result.stdout.startswith("{") else result.output
    return result.exit_code, said


def other(work: Path, config=CONFIG, **changes) -> str:
    """The path of a second folder that differs in the given parameters."""
    changes = {name.replace("__", "."): change for name, change in changes.items()}
    synthetic.write(work / "jax", config, changes=changes)
    return str(work / "jax")


def nudged(values):
    values = values.copy()
    values.flat[0] += 0.125
    return values


def spoiled(values):
    values = values.copy()
    values.flat[0] = np.nan
    return values


@pytest.mark.sweep
def test_a_sharded_checkpoint_equals_itself_layer_by_layer(work):
    code, said = parity(work, "--layerwise", "--jax", other(work))
    assert (code, said["verdict"]) == (0, "PASS")
    assert [step["name"] for step in said["layers"]] == [
        "embed",
        *(f"layers.{i}" for i in range(3)),
        "norm",
        "logits",
    ]
    assert all(row["hashes"][0] == row["hashes"][1] != "" for row in said["weights"]["rows"])
    assert said["weights"]["equal"] == len(said["weights"]["rows"]) == 84
    # The reference does not run, so nothing bears its name.
    assert {m["edge"] for m in said["measurements"]} == {"jax64:oracle", "jax32:oracle"}
    assert "bytes of" in said["how"]["text"] and "requested" in said["how"]["mode"]
    model = load_from_pretrained(work / "torch")
    ids = np.frombuffer((work / "text.txt").read_bytes(), np.uint8)[None, : int(LENGTH)]

    def loss(model):
        return model.compute_loss(ids, ids)

    # Sums over the head's width, the vocabulary and the tokens, and some functions of each.
    sums = roundoff(CONFIG.model_dim + CONFIG.vocab_size + ids.size + 16)
    bound = sums + rounding_bound(loss, model)
    assert set(said["losses"]) == {"jax", "oracle"}
    assert all(rel_l2(each, loss(model)) <= bound for each in said["losses"].values())


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.embed.weight", "embed"),
        (GAMMA, "layers.1.rmsnorm"),
        ("model.layers.1.attn.cema.theta", "layers.1.cema"),
        ("model.layers.2.attn.wh2.weight", "layers.2.attn"),
        ("model.layers.2.ffn.fc1.bias", "layers.2.ffn"),
        ("model.norm.bias", "norm"),
    ],
)
def test_a_planted_difference_is_named_with_stage_and_parameter(work, name, stage):
    # A text row of the embedding, so that the difference can show.
    def planted(values):
        return values + np.float32(0.125) if name == "model.embed.weight" else nudged(values)

    code, said = parity(work, "--layerwise", "--jax", other(work, **{name: planted}))
    assert (code, said["verdict"]) == (1, "REGRESSED")
    assert f"It starts at {stage} " in said["sentence"]
    assert f"Its parameters differ: {name}." in said["sentence"]
    assert [r["name"] for r in said["weights"]["rows"] if r["verdict"] != "pass"] == [name]
    first = next(m for m in said["measurements"] if m["verdict"] == "fail")
    assert first["quantity"] == stage


def test_forced_errors_stay_with_the_layer_that_makes_them(work):
    _, said = parity(work, "--layerwise", "--jax", other(work, **{GAMMA: nudged}))
    failed = {m["quantity"].split(".")[1] for m in said["measurements"] if m["verdict"] == "fail"}
    assert failed == {"1"}
    after = next(step for step in said["layers"] if step["name"] == "layers.2")
    assert after["free"] > 1e3 * after["forced"]
    assert after["amplification"] > 0


def test_an_untied_head_is_compared_in_blocks(work, monkeypatch):
    from parity.checkpoint_pair import layerwise

    monkeypatch.setattr(layerwise, "HEAD_AT_ONCE", 40 * CONFIG.model_dim)
    untied = tiny(num_layers=1, vocab_size=256, output_size=250)
    synthetic.write(work / "torch", untied)
    code, said = parity(work, "--layerwise", "--jax", other(work, untied))
    assert code == 0, said
    far = other(work, untied, **{"lm_head.weight": lambda v: v + np.float32(0.25)})
    code, said = parity(work, "--layerwise", "--jax", far)
    assert code == 1
    assert "It starts at logits " in said["sentence"]
    assert "Its parameters differ: lm_head.weight." in said["sentence"]


def test_whole_with_gradients_and_a_native_checkpoint(work):
    config = tiny(num_layers=1, vocab_size=256)
    synthetic.write(work / "torch", config)
    model = load_from_pretrained(work / "torch")
    save_checkpoint(work / "native", model, step=0)
    code, said = parity(work, "--jax", str(work / "native"))
    assert (code, said["verdict"]) == (0, "PASS"), said["sentence"]
    assert said["layers"] == []
    assert any(m["quantity"].startswith("grad/") for m in said["measurements"])
    # Stored in bfloat16 on one side and float32 on the other, the values are the same.
    assert any("bfloat16 and float32" in row["note"] for row in said["weights"]["rows"])
    far = load_file(work / "native" / "model.safetensors")
    far["model.layers.0.attn.beta"] += 0.125
    save_file(far, work / "far.safetensors")
    code, said = parity(work, "--jax", str(work / "far.safetensors"))
    assert code == 1
    assert "It starts at layers.0.q (" in said["sentence"]
    assert "model.layers.0.attn.beta" in said["sentence"]


@pytest.mark.torch_ref
@pytest.mark.parametrize("rescaled", [False, True])
def test_the_live_reference_layer_by_layer(work, rescaled):
    if reason := why_unavailable():
        pytest.skip(f"not run: {reason}")
    flags = {"rescale_nffn": True, "swiglu": True, "scale_emb": True} if rescaled else {}
    synthetic.write(work / "torch", tiny(num_layers=3, vocab_size=256, **flags))
    code, said = parity(work, "--live", "--layerwise")
    assert code == 0, said["sentence"]
    assert said["how"]["megalodon-hf"] == "live, float32"
    edges = {m["edge"] for m in said["measurements"]}
    assert edges == {"jax64:oracle", "jax32:oracle", "reference32:oracle", "jax32:reference32"}
    assert set(said["losses"]) == {"jax", "reference"}
    facts = [m for m in said["measurements"] if m["note"] == "free-running"]
    assert {m["edge"] for m in facts} == {"jax32:reference32"} and len(facts) == 2


def test_without_the_reference_the_run_is_incomplete(work, monkeypatch):
    monkeypatch.setattr(checkpoint_pair, "why_unavailable", lambda: "torch is not installed")
    code, said = parity(work, "--live", "--layerwise")
    assert (code, said["verdict"]) == (3, "INCOMPLETE")
    assert "The torch side did not run: torch is not installed" in said["sentence"]


@pytest.mark.parametrize("mode", [(), ("--layerwise",)])
def test_a_weight_that_is_not_finite_never_passes(work, mode):
    config = tiny(num_layers=1, vocab_size=256)
    name = "model.layers.0.attn.rmsnorm.gamma"
    synthetic.write(work / "torch", config, changes={name: spoiled})
    code, said = parity(work, *mode)
    assert code == 1
    assert f"{name} (not finite: 1 values in torch, 1 in jax)" in said["sentence"]
    assert "It starts at layers.0.rmsnorm" in said["sentence"]


def test_memory_decides_the_mode_and_is_named(work, monkeypatch):
    monkeypatch.setattr(checkpoint_pair, "available_memory", lambda: 16_000.0)
    _, said = parity(work)
    assert "more than half of the 0.00 GiB of memory" in said["how"]["mode"]
    code, said = parity(work, "--grad")
    assert code == 2
    assert "--grad needs the whole model at once" in said


def test_values_rounded_to_bfloat16_are_told(work):
    synthetic.write(work / "torch", CONFIG, np.float32)
    code, said = parity(work, "--layerwise", "--jax", other(work))
    assert code == 1
    notes = {row["note"] for row in said["weights"]["rows"] if row["verdict"] == "fail"}
    assert notes == {
        "values differ, equal once rounded to bfloat16; stored as float32 and bfloat16"
    }


def test_a_pair_of_different_models_is_not_comparable(work):
    def said_of(config):
        code, said = parity(work, "--layerwise", "--jax", other(work, config))
        assert (code, said["verdict"]) == (4, "NOT COMPARABLE")
        assert said["measurements"] == []
        return said["sentence"]

    assert "config.swiglu (torch False, jax True)" in said_of(
        tiny(num_layers=3, vocab_size=256, swiglu=True)
    )
    assert "config.num_layers (torch 3, jax 2)" in said_of(tiny(num_layers=2, vocab_size=256))


def test_missing_extra_and_misshapen_parameters_are_named(work):
    tensors = dict(everything(work / "torch"))
    del tensors["model.norm.bias"]
    tensors["model.extra"] = np.zeros(3, np.float32)
    tensors[GAMMA] = np.zeros((4,), np.float32)
    save_file(tensors, work / "jax.safetensors")
    code, said = parity(work, "--layerwise", "--jax", str(work / "jax.safetensors"))
    assert code == 4
    assert "model.norm.bias (jax: missing, expected (8,))" in said["sentence"]
    assert "model.extra (jax: extra, (3,))" in said["sentence"]
    assert f"{GAMMA} (jax: shape (4,), expected (8,))" in said["sentence"]


def test_a_tied_head_that_differs_fails(work):
    tensors = dict(everything(work / "torch"))
    tensors["lm_head.weight"] = tensors["model.embed.weight"].copy()
    save_file(tensors, work / "jax.safetensors")
    assert parity(work, "--layerwise", "--jax", str(work / "jax.safetensors"))[0] == 0
    tensors["lm_head.weight"] = nudged(tensors["lm_head.weight"])
    save_file(tensors, work / "jax.safetensors")
    code, said = parity(work, "--layerwise", "--jax", str(work / "jax.safetensors"))
    assert code == 1
    assert "lm_head.weight (jax: the head is tied and differs" in said["sentence"]
    assert "models were not run on the text." in said["sentence"]


def test_a_single_file_takes_its_config_by_option(work):
    save_file(everything(work / "torch"), work / "alone.safetensors")
    given = ("--torch", str(work / "alone.safetensors"), "--layerwise")
    code, said = parity(work, *given)
    assert code == 2
    assert "config.json not found" in said
    code, _ = parity(work, *given, "--config", str(work / "torch" / "config.json"))
    assert code == 0


def test_a_torch_file_is_read(work):
    torch = pytest.importorskip("torch")
    wide = {n: t.astype(np.float32) for n, t in everything(work / "torch").items()}
    (work / "bin").mkdir()
    tensors = {name: torch.from_numpy(t) for name, t in wide.items()}
    torch.save(tensors, work / "bin" / "pytorch_model.bin")
    shutil.copy(work / "torch" / "config.json", work / "bin")
    code, said = parity(work, "--torch", str(work / "bin"), "--layerwise")
    assert code == 0
    assert "a torch file is read as a whole" in said["how"]["mode"]


def everything(folder: Path) -> dict[str, np.ndarray]:
    stored = open_checkpoint("torch", folder)
    return {name: tensor.read() for name, tensor in stored.tensors.items()}


def shard(work: Path, index: int) -> Path:
    return sorted((work / "torch").glob("model-*.safetensors"))[index]


def test_a_missing_shard_is_named(work):
    shard(work, 2).unlink()
    code, said = parity(work)
    assert code == 2
    assert "names shard model-00002-of-00004.safetensors, which is not beside it" in said


def test_a_truncated_shard_is_named(work):
    content = shard(work, 1).read_bytes()
    shard(work, 1).write_bytes(content[: len(content) // 2])
    code, said = parity(work)
    assert code == 2
    assert "model-00001-of-00004.safetensors is not a readable safetensors file" in said


def test_an_index_of_another_export_is_refused(work):
    index = work / "torch" / "model.safetensors.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))
    places["weight_map"]["model.phantom"] = "model-00001-of-00004.safetensors"
    index.write_text(json.dumps(places), encoding="utf-8")
    code, said = parity(work)
    assert code == 2
    assert "model-00001-of-00004.safetensors are of different saves" in said
    assert "the index alone names ['model.phantom'] in it" in said


def test_a_config_of_another_model_lists_every_problem(work):
    fields = json.loads((work / "torch" / "config.json").read_text(encoding="utf-8"))
    (work / "torch" / "config.json").write_text(
        json.dumps(fields | {"swiglu": True}), encoding="utf-8"
    )
    code, said = parity(work)
    assert code == 2
    assert "does not fit its configuration, 6 problems" in said
    assert "model.layers.2.ffn.fc3.bias: torch: missing, expected (10,)" in said


def test_a_text_too_short_is_refused(work):
    (work / "text.txt").write_text("short", encoding="utf-8")
    code, said = parity(work)
    assert code == 2
    assert "gives 5 token(s), 9 are needed" in said


def test_ids_are_checked(work):
    def said_of(array):
        np.save(work / "ids.npy", array)
        code, said = parity(work, "--ids", str(work / "ids.npy"), "--layerwise")
        return code, said

    ids = np.arange(20).reshape(2, 10)
    code, said = said_of(ids)
    assert code == 0
    assert "2 x 9 tokens" in said["how"]["text"]
    ids[1, 3] = 256
    code, said = said_of(ids)
    assert code == 2
    assert "the first is 256 at row 1, position 3" in said
    code, said = said_of(ids.astype(np.float32))
    assert code == 2
    assert "expected integers of shape (L,) or (B, L)" in said


def test_a_small_vocabulary_has_no_bytes(work):
    synthetic.write(work / "torch", tiny())
    code, said = parity(work)
    assert code == 2
    assert "a vocabulary of 17 ids is smaller than the 256 values of a byte" in said


def test_a_tokeniser_beside_the_weights_is_used(work):
    pytest.importorskip("tokenizers")
    words = {"[UNK]": 0} | {w: i + 1 for i, w in enumerate(("What", "is", "equal", "not"))}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    tokeniser = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    missing = ("truncation", "padding", "added_tokens", "normalizer", "post_processor", "decoder")
    tokeniser |= {name: [] if name == "added_tokens" else None for name in missing}
    (work / "torch" / "tokenizer.json").write_text(json.dumps(tokeniser), encoding="utf-8")
    code, said = parity(work, "--layerwise")
    assert code == 0, said
    assert "through" in said["how"]["text"]


def test_the_table_names_what_the_json_does(work):
    given = ["parity", "--torch", str(work / "torch"), "--text", str(work / "text.txt")]
    given += ["--length", LENGTH, "--layerwise", "--oracle-only"]
    given += ["--jax", other(work, **{GAMMA: nudged})]
    result = cli(*given)
    assert result.exit_code == 1
    assert GAMMA in result.stdout and "Layer by layer" in result.stdout
    assert "layers.1 (3 of 6)" in result.stderr


def test_words_and_codes_are_those_of_a_run():
    pair = checkpoint_pair
    assert pair.PASS == (Word.PASS, ExitCode.PASS)
    assert pair.REGRESSED == (Word.REGRESSED, ExitCode.REGRESSION)
    assert pair.INCOMPLETE == (Word.INCOMPLETE, ExitCode.INCOMPLETE)
    assert pair.NOT_COMPARABLE == (Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE)
    assert pair.NOTHING == (Word.INCOMPLETE, ExitCode.NOTHING_SELECTED)


@pytest.mark.skipif(
    "MEGALODON_BIG_CHECKPOINT" not in os.environ,
    reason="writes 3.8 GB and takes minutes: set MEGALODON_BIG_CHECKPOINT=1",
)
def test_a_checkpoint_of_a_billion_and_a_half_in_a_quarter_of_its_size(tmp_path):
    size = synthetic.write(tmp_path / "big", synthetic.BIG, ml_dtypes.bfloat16)
    try:
        assert size / 2 >= 1.5e9
        (tmp_path / "text.txt").write_bytes(Path(__file__).read_bytes())
        command = [sys.executable, "-m", "reports.cli", "parity", "--layerwise", "--json"]
        command += ["--torch", str(tmp_path / "big"), "--text", str(tmp_path / "text.txt")]
        with (tmp_path / "said.json").open("w", encoding="utf-8") as out:
            child = subprocess.Popen(command, stdout=out)
            _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == (3 if why_unavailable() else 0)
        peak = usage.ru_maxrss * 1024
        print(f"peak {peak / 1e6:.0f} MB of {size / 1e6:.0f} MB: {100 * peak / size:.1f} %")
        assert peak < size / 4
        said = json.loads((tmp_path / "said.json").read_text(encoding="utf-8"))
        assert len(said["layers"]) == synthetic.BIG.num_layers + 3
    finally:
        shutil.rmtree(tmp_path / "big")
