"""Weights in and out: bit for bit, strictly, and without torch where none is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from megalodon_jax import MegalodonForCausalLM, convert, shards, weight_files
from megalodon_jax.convert import (
    convert_jax_to_torch,
    load_from_pretrained,
    load_weights_from_torch,
    save_safetensors,
    state_dict,
)
from megalodon_jax.precision import audit_rounded_values, audit_sensitive_param_dtypes
from megalodon_jax.weights import EMBEDDING, HEAD, named_leaves, weight_table
from tests.helpers import TINY, arrays, model_of, same_leaves, tiny

UNTIED = tiny(output_size=19, swiglu=True)
CONFIGS = pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])


@CONFIGS
def test_a_torch_state_dict_returns_bit_for_bit(config) -> None:
    model = model_of(config)
    exported = convert_jax_to_torch(model)
    assert {n: tuple(t.shape) for n, t in exported.items() if n != HEAD or not model.tied} == {
        row.name: row.shape for row in weight_table(config)
    }
    assert same_leaves(load_weights_from_torch(model_of(config, seed=5), exported), model)


def test_a_tied_head_is_exported_as_a_copy_of_its_own() -> None:
    exported = convert_jax_to_torch(model_of(TINY))
    assert torch.equal(exported[HEAD], exported[EMBEDDING])
    assert exported[HEAD].data_ptr() != exported[EMBEDDING].data_ptr()
    arrays = state_dict(model_of(TINY))
    assert np.array_equal(arrays[HEAD], arrays[EMBEDDING])
    assert not np.shares_memory(arrays[HEAD], arrays[EMBEDDING])


def test_a_narrow_export_keeps_sensitive_parameters_in_float32() -> None:
    wide = convert_jax_to_torch(model_of(UNTIED))
    narrow = convert_jax_to_torch(model_of(UNTIED), dtype=torch.bfloat16)
    for row in weight_table(UNTIED):
        expected = wide[row.name] if row.sensitive else wide[row.name].to(torch.bfloat16)
        assert narrow[row.name].dtype == expected.dtype, row.name
        assert torch.equal(narrow[row.name], expected), row.name


def test_a_narrow_file_returns_with_its_sensitive_values_untouched(tmp_path: Path) -> None:
    model, file = model_of(UNTIED), tmp_path / "model.safetensors"
    save_safetensors(model, file, dtype=jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.float32):
        loaded = load_from_pretrained(file, UNTIED, dtype)
        leaves, original = named_leaves(loaded), named_leaves(model)
        assert audit_sensitive_param_dtypes(loaded) == {}
        assert audit_rounded_values(loaded) == {}
        for row in weight_table(UNTIED):
            if row.sensitive:
                assert np.array_equal(leaves[row.name], original[row.name])
            else:
                assert leaves[row.name].dtype == dtype
                rounded = original[row.name].astype(jnp.bfloat16)
                assert np.array_equal(leaves[row.name], rounded.astype(dtype))


def test_a_checkpoint_rounded_elsewhere_is_caught_by_the_value_audit() -> None:
    exported = convert_jax_to_torch(model_of(TINY))
    rounded = {n: t.to(torch.bfloat16) for n, t in exported.items()}
    loaded = load_weights_from_torch(model_of(TINY), rounded)
    assert audit_sensitive_param_dtypes(loaded) == {}
    assert set(audit_rounded_values(loaded)) == {
        row.name for row in weight_table(TINY) if row.sensitive
    }


WITHOUT_TORCH = """
import sys
import megalodon_jax
assert "torch" not in sys.modules
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
from megalodon_jax.convert import load_from_pretrained, save_safetensors
model = load_from_pretrained(sys.argv[1])
save_safetensors(model, sys.argv[2])
assert "torch" not in sys.modules
try:
    load_from_pretrained(sys.argv[3])
except ImportError as error:
    print(error)
"""


def test_safetensors_need_no_torch_and_pickles_say_that_they_do(tmp_path: Path) -> None:
    save_safetensors(model_of(TINY), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()), encoding="utf-8")
    pickled = tmp_path / "pytorch_model.bin"
    torch.save(convert_jax_to_torch(model_of(TINY)), pickled)
    again = tmp_path / "again.safetensors"
    root = Path(convert.__file__).parents[1]
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path), str(again), str(pickled)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert same_leaves(load_from_pretrained(again, TINY), model_of(TINY))
    assert "torch" in done.stdout
    assert str(pickled) in done.stdout or "pip install" in done.stdout


def directory(path: Path, model: MegalodonForCausalLM, **bookkeeping) -> Path:
    """A model directory as Hugging Face lays it out."""
    save_safetensors(model, path / "model.safetensors")
    fields = model.config.to_hf() | bookkeeping
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_a_hugging_face_directory_brings_its_configuration(tmp_path: Path) -> None:
    model = model_of(UNTIED)
    loaded = load_from_pretrained(directory(tmp_path, model, transformers_version="4.57.1"))
    assert loaded.config == UNTIED
    assert same_leaves(loaded, model)


def test_a_passed_configuration_wins_over_the_one_beside_the_weights(tmp_path: Path) -> None:
    directory(tmp_path, model_of(TINY))
    loaded = load_from_pretrained(tmp_path, tiny(chunk_size=7))
    assert loaded.config.chunk_size == 7
    with pytest.raises(ValueError, match=r"has shape .*, expected"):
        load_from_pretrained(tmp_path, tiny(model_dim=4))


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt"])
def test_torch_files_load(tmp_path: Path, name: str) -> None:
    model = model_of(UNTIED)
    torch.save(convert_jax_to_torch(model), tmp_path / name)
    assert same_leaves(load_from_pretrained(tmp_path / name, UNTIED), model)


def sharded(path: Path, model: MegalodonForCausalLM) -> Path:
    tensors = state_dict(model)
    first = dict(list(tensors.items())[::2])
    second = {n: t for n, t in tensors.items() if n not in first}
    files = {"one.safetensors": first, "two.safetensors": second}
    for name, content in files.items():
        save_file(content, path / name)
    index = path / "model.safetensors.index.json"
    where = {n: name for name, content in files.items() for n in content}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}), encoding="utf-8")
    return index


def test_a_sharded_index_loads_directly_and_through_its_directory(tmp_path: Path) -> None:
    model = model_of(UNTIED)
    index = sharded(tmp_path, model)
    assert same_leaves(load_from_pretrained(index, UNTIED), model)
    assert same_leaves(load_from_pretrained(tmp_path, UNTIED), model)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = sharded(tmp_path, model_of(UNTIED))
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names shard two.safetensors, which is not beside it"):
        load_from_pretrained(index, UNTIED)


def test_the_rope_rates_are_exported_on_request_and_ignored_on_loading(tmp_path: Path) -> None:
    model, file = model_of(TINY), tmp_path / "model.safetensors"
    save_safetensors(model, file, include_rope_inv_freq=True)
    extra = set(weight_files.read_tensors(file)) - set(state_dict(model))
    names = {f"model.layers.{i}.attn.inner.rope.inv_freq" for i in range(2)}
    assert extra == names
    rates = convert_jax_to_torch(model, include_rope_inv_freq=True)[min(names)]
    assert torch.equal(rates, torch.tensor([1.0, 0.01]))
    assert same_leaves(load_from_pretrained(file, TINY), model)


def test_a_tied_checkpoint_with_another_head_is_refused(tmp_path: Path) -> None:
    tensors = arrays(TINY)
    save_file(tensors | {HEAD: tensors[EMBEDDING] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs.*untied head"):
        load_from_pretrained(tmp_path, TINY)


def test_every_misfit_is_listed_with_the_file_in_one_error(tmp_path: Path) -> None:
    tensors = arrays(TINY)
    del tensors["model.norm.weight"]
    tensors["model.extra"] = np.zeros(3, np.float32)
    tensors[EMBEDDING] = tensors[EMBEDDING][:5]
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    with pytest.raises(ValueError) as raised:
        load_from_pretrained(file, TINY)
    message = str(raised.value)
    assert f"{file} does not fit the configuration, 3 problem(s)" in message
    assert "missing model.norm.weight (8,)" in message
    assert "unexpected model.extra (3,)" in message
    assert f"{EMBEDDING} has shape (5, 8), expected (17, 8)" in message


def test_a_directory_without_weights_or_configuration_says_what_it_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint; expected one of model.safe"):
        load_from_pretrained(tmp_path, TINY)
    save_safetensors(model_of(TINY), tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"config.json not found: pass config="):
        load_from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*other.safetensors"):
        load_from_pretrained(tmp_path / "other.safetensors", TINY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable JSON"),
        ("[]", "must hold a JSON object, found list"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ('{"model_type": "megalodon", "z_dim": 7}', "z_dim=7"),
        ('{"model_type": "megalodon", "num_layers": null}', "num_layers=None"),
    ],
)
def test_a_bad_config_file_is_named_with_its_fault(
    tmp_path: Path, content: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Annotations are checked in tests only; users meet the configuration's own messages.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    file = tmp_path / "config.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as raised:
        convert.read_config(file)
    assert str(file) in str(raised.value)


def nested() -> dict:
    return {"model": convert_jax_to_torch(model_of(TINY))}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.safetensors", b""),
        ("noise.safetensors", b"\xff" * 64),
        ("empty.bin", b""),
        ("noise.bin", b"garbage"),
        ("text.pt", b"hello world\n"),
        ("cut.bin", b"\x80\x02}q"),
        ("list.index.json", b"[]"),
        ("map.index.json", b'{"weight_map": ["one.safetensors"]}'),
        ("no_map.index.json", b"{}"),
    ],
)
def test_a_corrupt_file_is_a_value_error_that_names_it(
    tmp_path: Path, name: str, content: bytes
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        load_from_pretrained(file, TINY)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, 3], ids=["list", "number", "bare"])
def test_a_torch_file_that_is_no_state_dict_is_a_value_error_that_names_it(
    tmp_path: Path, content: object
) -> None:
    file = tmp_path / "training.pt"
    torch.save(content, file)
    with pytest.raises(ValueError) as raised:
        load_from_pretrained(file, TINY)
    assert str(file) in str(raised.value)


def test_the_model_of_a_training_checkpoint_is_loaded(tmp_path: Path) -> None:
    torch.save(nested(), tmp_path / "training.pt")
    assert same_leaves(load_from_pretrained(tmp_path / "training.pt", TINY), model_of(TINY))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_safetensors(model_of(TINY), file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_from_pretrained(file, TINY)


@pytest.mark.parametrize("failing", ["save_file", "replace"])
def test_an_interrupted_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    file = tmp_path / "model.safetensors"
    save_safetensors(model_of(TINY), file)
    before = file.read_bytes()

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    where = shards if failing == "save_file" else os
    monkeypatch.setattr(where, failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_safetensors(model_of(TINY, seed=5), file)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_a_saved_file_is_readable_by_torch_users(tmp_path: Path) -> None:
    from safetensors import safe_open

    file = tmp_path / "model.safetensors"
    save_safetensors(model_of(TINY), file)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert HEAD in opened.keys()  # noqa: SIM118


def test_float16_is_refused_as_storage_on_loading(tmp_path: Path) -> None:
    save_safetensors(model_of(TINY), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="param_dtype=float16 is refused"):
        load_from_pretrained(tmp_path, TINY, jnp.float16)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("float16", "dtype=float16 is refused.*Use bfloat16"), ("int8", "dtype=int8 must be one of")],
)
def test_an_export_to_a_dtype_that_loses_the_weights_is_refused(
    tmp_path: Path, dtype: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"export: {message}"):
        save_safetensors(model_of(TINY), tmp_path / "model.safetensors", dtype=dtype)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"export: {message}"):
        convert_jax_to_torch(model_of(TINY), dtype=getattr(torch, dtype))
