"""Sharded files: whole or not at all, never two saves mixed, and no second copy in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from megalodon_jax import shards, stack_layers
from megalodon_jax.convert import load_from_pretrained, save_safetensors, state_dict
from megalodon_jax.leaf_tensors import leaf_tensors
from megalodon_jax.roles import Role, role_of
from megalodon_jax.shards import parsed_size
from megalodon_jax.weight_files import read_tensors
from tests.helpers import ROOT, TINY, adapted, model_of, same_leaves, tiny

SIZE = "3KB"
"""Makes three shards of TINY."""
INDEX = "model.safetensors.index.json"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the shards of TINY."""
    save_safetensors(model_of(TINY), tmp_path / "model.safetensors", max_shard_size=SIZE)
    return tmp_path


def test_shards_and_index_are_those_of_hugging_face(saved: Path) -> None:
    shard = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(saved) == [*shard, INDEX]
    index = json.loads((saved / INDEX).read_text(encoding="utf-8"))
    held = {name: load_file(saved / name) for name in shard}
    assert index["weight_map"] == {t: name for name, content in held.items() for t in content}
    sizes = [sum(a.nbytes for a in content.values()) for content in held.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= parsed_size(SIZE)
    expected = state_dict(model_of(TINY))
    found = {t: a for content in held.values() for t, a in content.items()}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[n], expected[n]) for n in expected)
    assert same_leaves(load_from_pretrained(saved, TINY), model_of(TINY))


def test_a_model_that_fits_is_one_file_and_a_large_tensor_a_shard(tmp_path: Path) -> None:
    save_safetensors(model_of(TINY), tmp_path / "model.safetensors", max_shard_size="1GB")
    assert names(tmp_path) == ["model.safetensors"]
    save_safetensors(model_of(TINY), tmp_path / "model.safetensors", max_shard_size=1)
    assert len(names(tmp_path)) == len(state_dict(model_of(TINY))) + 1
    assert same_leaves(load_from_pretrained(tmp_path, TINY), model_of(TINY))


@pytest.mark.parametrize(
    ("size", "number"), [(5, 5), ("5", 5), ("5GB", 5 * 10**9), ("1.5 kib", 1536), ("2MiB", 2**21)]
)
def test_a_size_is_read(size: int | str, number: int) -> None:
    assert parsed_size(size) == number


@pytest.mark.parametrize("size", [0, -1, "GB", "5 GBytes", "0.1", ""])
def test_a_size_that_is_none_is_refused(size: int | str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size=.* must be a positive number of bytes"):
        save_safetensors(model_of(TINY), tmp_path / "model.safetensors", max_shard_size=size)
    assert names(tmp_path) == []


def test_a_file_of_another_name_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_safetensors(model_of(TINY), tmp_path / "weights.bin", max_shard_size=SIZE)


@pytest.mark.parametrize("size", [None, SIZE, "1500"], ids=["one file", "same names", "others"])
def test_a_save_replaces_all_of_the_one_before(saved: Path, size: str | None) -> None:
    (saved / "config.json").write_text("{}", encoding="utf-8")
    other = model_of(TINY, seed=5)
    save_safetensors(other, saved / "model.safetensors", max_shard_size=size)
    assert same_leaves(load_from_pretrained(saved, TINY), other)
    held = {"model.safetensors"} if size is None else set(_named(saved)) | {INDEX}
    assert set(names(saved)) == held | {"config.json"}
    save_safetensors(model_of(TINY), saved / "model.safetensors", max_shard_size=SIZE)
    assert same_leaves(load_from_pretrained(saved, TINY), model_of(TINY))


def _named(folder: Path) -> list[str]:
    return list(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())


class Interrupted(BaseException):
    """As a signal would."""


def failing_at(owner: Any, name: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == nth:
            raise Interrupted
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("size", [SIZE, "1500"], ids=["same names", "others"])
@pytest.mark.parametrize(
    ("owner", "name", "nth"),
    [
        (shards, "save_file", 2),
        (shards, "flush", 1),
        (Path, "write_text", 1),
        *((Path, "replace", nth) for nth in (1, 2, 4)),
    ],
)
def test_an_interrupted_save_leaves_the_old_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, size: str
) -> None:
    before = files(saved)
    with monkeypatch.context() as broken, pytest.raises(Interrupted):
        failing_at(owner, name, nth, broken)
        save_safetensors(model_of(TINY, seed=5), saved / "model.safetensors", max_shard_size=size)
    assert files(saved) == before


def test_old_files_that_step_aside_return(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(saved)
    for nth in (1, 3):
        with monkeypatch.context() as broken, pytest.raises(Interrupted):
            failing_at(Path, "rename", nth, broken)
            save_safetensors(model_of(TINY, 5), saved / "model.safetensors", max_shard_size=SIZE)
        assert files(saved) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.helpers import TINY, adapted, model_of
from megalodon_jax.convert import save_safetensors

replace, left = Path.replace, int(sys.argv[2])
def counted(path, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(path, target)
Path.replace = counted
save_safetensors(model_of(TINY, seed=5), sys.argv[1], max_shard_size="3KB")
"""


def test_a_kill_between_renames_leaves_no_checkpoint_rather_than_a_mixed_one(saved: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(saved / "model.safetensors"), "2"]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == -9
    with pytest.raises(ValueError, match="holds several checkpoints: name one of model-00001"):
        load_from_pretrained(saved, TINY)


def test_a_missing_shard_is_named(saved: Path) -> None:
    (saved / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names shard model-00002-of-00003.safetensors, which is"):
        load_from_pretrained(saved, TINY)


def test_stacked_layers_are_written_one_by_one(tmp_path: Path) -> None:
    stacked = stack_layers(model_of(TINY))
    tensors = leaf_tensors(stacked)
    assert tensors.keys() == leaf_tensors(model_of(TINY)).keys()
    save_safetensors(stacked, tmp_path / "model.safetensors", max_shard_size=SIZE)
    assert same_leaves(load_from_pretrained(tmp_path, TINY), model_of(TINY))


def test_a_narrow_export_is_cut_by_the_bytes_it_has(tmp_path: Path) -> None:
    model, file = model_of(tiny(swiglu=True, output_size=19)), tmp_path / "model.safetensors"
    save_safetensors(model, file, dtype=jnp.bfloat16, max_shard_size=SIZE)
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    expected = state_dict(model, dtype=jnp.bfloat16)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in expected.values())
    found = read_tensors(tmp_path / INDEX)
    assert {n: a.dtype for n, a in found.items()} == {n: a.dtype for n, a in expected.items()}
    assert all(np.array_equal(found[n], expected[n]) for n in expected)


def test_a_parameter_without_a_role_is_saved_and_named_on_loading(tmp_path: Path) -> None:
    model, file = adapted(), tmp_path / "model.safetensors"
    save_safetensors(model, file, dtype=jnp.bfloat16)
    tensors, prefix = read_tensors(file), "model.layers.0.attn.wz."
    added = {n.removeprefix(prefix): a for n, a in tensors.items() if role_of(n) is Role.OTHER}
    assert {n: str(a.dtype) for n, a in added.items()} == {
        "lora_a": "bfloat16", "steps": "int32", "key": "uint32"
    }  # fmt: skip
    assert added["steps"] == 3
    assert np.array_equal(added["key"], jax.random.key_data(jax.random.key(7)))
    with pytest.raises(ValueError, match=r"3 problem\(s\)") as raised:
        load_from_pretrained(file, TINY)
    assert all(f"unexpected {prefix}{name}" in str(raised.value) for name in added)


MEMORY = """
import resource, sys
import jax, jax.numpy as jnp
from megalodon_jax import MegalodonConfig, MegalodonForCausalLM
from megalodon_jax import convert

def peak():
    lines = open("/proc/self/status").read().split("\\n")
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024

def reset():
    open("/proc/self/clear_refs", "w").write("5")

config = MegalodonConfig(
    vocab_size=8192, model_dim=512, num_layers=int(sys.argv[2]), num_heads=1, z_dim=256,
    value_dim=1024, ffn_hidden_dim=2048, cema_ndim=4, chunk_size=64, norm_num_groups=8,
)
shapes = jax.eval_shape(lambda: MegalodonForCausalLM(config, key=jax.random.key(0)))
model = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes)
size = sum(x.nbytes for x in jax.tree.leaves(model))
reset(); start = peak()
if sys.argv[3] == "save_safetensors":
    convert.save_safetensors(model, sys.argv[1], max_shard_size=sys.argv[4], dtype=sys.argv[5])
else:
    dtype = None if sys.argv[5] == "None" else sys.argv[5]
    convert.state_dict(model, dtype=dtype)
print(size, peak() - start)
"""


def memory_of(file: Path, what: str, *, layers: int = 8, dtype: str = "bfloat16"):
    command = [sys.executable, "-c", MEMORY, str(file), str(layers), what, "16MB", dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.sweep
def test_a_save_takes_the_memory_of_a_shard_and_not_of_the_model(tmp_path: Path) -> None:
    """In a process of its own, by the system's count; a copy of all is the negative control."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux counts the peak of a part of a process")
    size, taken = memory_of(tmp_path / "model.safetensors", "save_safetensors")
    # A shard, and its largest tensor in the old and the new dtype.
    assert taken < size / 2
    _, copied = memory_of(tmp_path / "model.safetensors", "state_dict", dtype="None")
    assert copied > size / 2
