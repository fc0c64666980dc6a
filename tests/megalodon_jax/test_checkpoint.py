"""Native checkpoints: bit for bit, whole or not at all, and refused when anything differs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from megalodon_jax import checkpoint, files
from megalodon_jax.checkpoint import load_checkpoint, save_checkpoint
from megalodon_jax.convert import load_from_pretrained
from megalodon_jax.precision import audit_sensitive_param_dtypes
from megalodon_jax.roles import named_leaves, replace_leaves
from tests.helpers import TINY, adapted, model_of, same_leaves, tiny, tokens

NARROW = tiny(output_size=19, swiglu=True, param_dtype="bfloat16")
IDS = jnp.asarray(tokens(TINY, (2, 9)))
OPTIMISER = optax.adamw(1e-2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with optimiser state, at step 3."""
    model = model_of(TINY)
    save_checkpoint(tmp_path / "run", model, step=3, opt_state=state_of(model))
    return tmp_path / "run"


def state_of(model: Any) -> Any:
    return OPTIMISER.init(eqx.filter(model, eqx.is_array))


def siblings(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


@pytest.mark.parametrize("config", [TINY, NARROW], ids=["tied", "bfloat16"])
def test_a_model_returns_bit_for_bit(config, tmp_path: Path) -> None:
    model, folder = model_of(config), tmp_path / "deep" / "run"
    save_checkpoint(folder, model, step=0)
    loaded = load_checkpoint(folder)
    assert (loaded.step, loaded.opt_state, loaded.model.config) == (0, None, config)
    assert same_leaves(loaded.model, model)
    assert audit_sensitive_param_dtypes(loaded.model) == {}
    assert same_leaves(load_from_pretrained(folder, dtype=config.param_dtype), model)
    assert siblings(folder) == ["run"]


def test_the_manifest_says_what_is_in_the_folder(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["step"] == 3
    assert manifest["packages"]["jax"] == jax.__version__
    assert manifest["dtype_policy"]["sensitive_dtype"] == "float32"
    row = manifest["files"]["optimizer.safetensors"]["0.mu.model.embed.weight"]
    assert (row["shape"], row["dtype"]) == ([TINY.vocab_size, TINY.model_dim], "float32")
    assert "0.count" in manifest["files"]["optimizer.safetensors"]


def test_every_kind_of_leaf_of_an_optimiser_state_returns(tmp_path: Path) -> None:
    state = {
        "count": jnp.asarray(7, jnp.int32),
        "key": jax.random.split(jax.random.key(3)),
        "other key": jax.random.key(4, impl="rbg"),
        "moments": (jnp.arange(4, dtype=jnp.bfloat16), np.zeros((0, 2), np.float32), None),
        "rate": jnp.asarray(0.1),
        "seen": jnp.asarray([True, False]),
    }
    save_checkpoint(tmp_path / "run", model_of(TINY), step=1, opt_state=state)
    like = jax.eval_shape(lambda: state)
    loaded = load_checkpoint(tmp_path / "run", opt_state_like=like).opt_state
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert loaded["rate"].weak_type
    for name in ("key", "other key"):
        # The dtype of a key is its implementation.
        assert loaded[name].dtype == state[name].dtype
        loaded[name], state[name] = (jax.random.key_data(s[name]) for s in (loaded, state))
    assert same_leaves(loaded, state)


def test_resuming_is_bit_identical_to_not_stopping(tmp_path: Path) -> None:
    @eqx.filter_jit
    def train(model, state, key):
        def loss(m):
            return m.compute_loss(IDS, IDS, deterministic=False, key=key)

        updates, state = OPTIMISER.update(eqx.filter_grad(loss)(model), state, model)
        return eqx.apply_updates(model, updates), state

    def run(model, state, start, stop):
        for step in range(start, stop):
            model, state = train(model, state, jax.random.fold_in(jax.random.key(0), step))
        return model, state

    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        model = model_of(tiny(dropout=0.1, num_layers=1))
        start = model, state_of(model)
        through = run(*start, 0, 6)
        half = run(*start, 0, 3)
        save_checkpoint(tmp_path / "run", half[0], step=3, opt_state=half[1])
        like = eqx.filter_eval_shape(state_of, model)
        back = load_checkpoint(tmp_path / "run", opt_state_like=like)
        resumed = run(back.model, back.opt_state, back.step, 6)
    assert same_leaves(resumed, through)
    assert not same_leaves(resumed, half)


def edit(name: str, change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Damage a JSON file, or the tensors of a safetensors file."""

    def damage(folder: Path) -> None:
        file = folder / name
        content = (
            json.loads(file.read_text(encoding="utf-8"))
            if file.suffix == ".json"
            else load_file(file)
        )
        change(content)
        if file.suffix == ".json":
            file.write_text(json.dumps(content), encoding="utf-8")
        else:
            save_file(content, file)

    return damage


def forge(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Change the manifest and sign it again."""

    def signed(manifest: dict) -> None:
        change(manifest)
        manifest["sha256"] = checkpoint._digest(manifest)

    return edit("manifest.json", signed)


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-3])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def other_layers(folder: Path) -> None:
    """A configuration that manifest and config.json agree on, and the tensors do not."""
    edit("config.json", lambda c: c.update(num_layers=1))(folder)
    forge(lambda m: m["config"].update(num_layers=1))(folder)


W = "model.norm.weight"
DAMAGES = {
    "no folder": (shutil.rmtree, FileNotFoundError, "no checkpoint at"),
    "no model": (without("model.safetensors"), FileNotFoundError, "incomplete: model.safetensors"),
    "no optimizer": (without("optimizer.safetensors"), FileNotFoundError, "incomplete: optimizer"),
    "no config": (without("config.json"), FileNotFoundError, "config.json is missing"),
    "no manifest": (without("manifest.json"), FileNotFoundError, "manifest.json is missing"),
    "cut model": (cut("model.safetensors"), ValueError, "not a readable safetensors file"),
    "cut manifest": (cut("manifest.json"), ValueError, "not readable JSON"),
    "list": (
        lambda f: (f / "config.json").write_text("[]", encoding="utf-8"),
        ValueError,
        "a JSON object, found list",
    ),
    "schema": (forge(lambda m: m.update(schema=2)), ValueError, "schema 2, expected .* and 1"),
    "kind": (forge(lambda m: m.pop("kind")), ValueError, "of kind None"),
    "step": (edit("manifest.json", lambda m: m.update(step=4)), ValueError, "was changed after"),
    "value": (
        edit("model.safetensors", lambda t: t.update({W: t[W] + 1})),
        ValueError,
        rf"1 difference\(s\):\n  {W} is float32 \(8,\) sha256 \w+, expected float32 \(8,\)",
    ),
    "missing": (edit("model.safetensors", lambda t: t.pop(W)), ValueError, f"missing {W}: float32"),
    "unexpected": (
        edit("model.safetensors", lambda t: t.update(other=t[W])),
        ValueError,
        "unexpected other: float32",
    ),
    "shape": (
        edit("model.safetensors", lambda t: t.update({W: t[W].reshape(2, 4)})),
        ValueError,
        rf"{W} is float32 \(2, 4\)",
    ),
    "dtype": (
        edit("model.safetensors", lambda t: t.update({W: t[W].astype(np.float16)})),
        ValueError,
        rf"{W} is float16 \(8,\)",
    ),
    "moment": (
        edit("optimizer.safetensors", lambda t: t["0.count"].__iadd__(1)),
        ValueError,
        r"0\.count is int32 \(\)",
    ),
    "config": (
        edit("config.json", lambda c: c.update(num_layers=1)),
        ValueError,
        r"config.json contradicts manifest.json.*\n  num_layers is 1, expected 2",
    ),
    "layers": (
        other_layers,
        ValueError,
        r"does not fit config.json.*\n  unexpected model.layers.1",
    ),
}


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_differs_is_refused_with_a_reason(saved: Path, damage, error, message) -> None:
    like = state_of(model_of(TINY))
    assert load_checkpoint(saved, opt_state_like=like).step == 3
    damage(saved)
    with pytest.raises(error, match=message):
        load_checkpoint(saved, opt_state_like=like)


def flip(file: Path, tensor: str, byte: int) -> None:
    """Change one bit in a byte of a tensor, as a disk does; negative ones count from its end."""
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8:header])[tensor]["data_offsets"]
    content[header + (start if byte >= 0 else end) + byte] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("byte", [0, 4095, 4096, 5000, -1])
def test_no_byte_of_a_large_tensor_changes_unseen(tmp_path: Path, byte: int) -> None:
    model = model_of(tiny(vocab_size=300, num_layers=1))
    state = {"moment": jnp.arange(3000, dtype=jnp.float32)}
    tensors = {
        "model.safetensors": ("model.embed.weight", model.model.embed.weight),
        "optimizer.safetensors": ("moment", state["moment"]),
    }
    save_checkpoint(tmp_path / "run", model, step=1, opt_state=state)
    load_checkpoint(tmp_path / "run", opt_state_like=state)
    for name, (tensor, leaf) in tensors.items():
        assert leaf.nbytes > 2 * 4096
        flip(tmp_path / "run" / name, tensor, byte)
        with pytest.raises(ValueError, match=rf"1 difference\(s\):\n  {tensor} is float32"):
            load_checkpoint(tmp_path / "run", opt_state_like=state)
        flip(tmp_path / "run" / name, tensor, byte)


def test_an_optimiser_state_of_another_structure_is_refused(saved: Path, tmp_path: Path) -> None:
    like = state_of(model_of(TINY))
    for other in (optax.sgd(1e-2, momentum=0.9), optax.adamw(1e-2, mu_dtype=jnp.bfloat16)):
        with pytest.raises(ValueError, match="is not of the structure of opt_state_like"):
            other_like = other.init(eqx.filter(model_of(TINY), eqx.is_array))
            load_checkpoint(saved, opt_state_like=other_like)
    save_checkpoint(tmp_path / "bare", model_of(TINY), step=3)
    with pytest.raises(ValueError, match=r"saved without optimizer\.safetensors"):
        load_checkpoint(tmp_path / "bare", opt_state_like=like)


class Interrupted(BaseException):
    """As a signal would."""


def interrupt(*_: Any, **__: Any) -> None:
    raise Interrupted


BREAKS = [
    (checkpoint, "save_file"),
    (checkpoint, "_digest"),
    (files, "flush"),
    (Path, "write_text"),
    (files, "_exchanged"),
]


@pytest.mark.parametrize(("owner", "name"), BREAKS, ids=[name for _, name in BREAKS])
def test_an_interrupted_save_leaves_the_old_one(saved: Path, monkeypatch, owner, name) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, interrupt)
        with pytest.raises(Interrupted):
            save_checkpoint(saved, model_of(TINY, seed=5), step=4)
    assert load_checkpoint(saved).step == 3
    assert siblings(saved) == ["run"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_finished_save_replaces_all_of_the_old_one(saved: Path, monkeypatch, exchange) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    model = model_of(TINY, seed=5)
    save_checkpoint(saved, model, step=4)
    assert load_checkpoint(saved).step == 4
    assert same_leaves(load_checkpoint(saved).model, model)
    assert not (saved / "optimizer.safetensors").exists()
    assert siblings(saved) == ["run"]


@pytest.mark.parametrize("nth", [1, 2])
def test_without_exchange_a_failed_rename_brings_the_old_one_back(
    saved: Path, monkeypatch, nth: int
) -> None:
    calls, rename = [], Path.rename

    def failing(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == nth:
            raise Interrupted
        return rename(path, target)

    monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", failing)
        with pytest.raises(Interrupted):
            save_checkpoint(saved, model_of(TINY, seed=5), step=4)
    assert load_checkpoint(saved).step == 3
    assert siblings(saved) == ["run"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    (saved / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_text("exported", encoding="utf-8")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for folder in (saved, tmp_path / "weights", tmp_path / "file"):
        with pytest.raises(ValueError, match="is not a checkpoint folder"):
            save_checkpoint(folder, model_of(TINY), step=4)
    assert load_checkpoint(saved).step == 3
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", model_of(TINY), step=4)
    assert load_checkpoint(tmp_path / "empty").step == 4


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    model, one = model_of(TINY), jnp.zeros(1)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    states = {
        "leaf 'rate' of opt_state is a float, not an array": {"rate": 0.1},
        "leaf 'a.b' of opt_state is the name of two leaves": {"a": {"b": one}, "a.b": one},
        "leaf 'm' of opt_state is weakly typed": {"m": jnp.broadcast_to(jnp.asarray(0.1), (2,))},
    }
    with pytest.raises(ValueError, match=rf"(?s)not what its configuration says.*{W} is bfloat16"):
        save_checkpoint(tmp_path / "run", cast, step=0)
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        save_checkpoint(tmp_path / "run", model, step=-1)
    for message, state in states.items():
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path / "run", model, step=0, opt_state=state)
    assert not list(tmp_path.iterdir())


def test_torch_is_never_imported(saved: Path) -> None:
    program = (
        "import sys; from megalodon_jax.checkpoint import *\n"
        "back = load_checkpoint(sys.argv[1])\n"
        "save_checkpoint(sys.argv[1], back.model, step=back.step + 1)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(saved)], check=True, timeout=120)
    assert load_checkpoint(saved).step == 4


KEY = "model.layers.0.attn.wz.key"


def key_data(model: Any) -> jax.Array:
    return jax.random.key_data(named_leaves(model)[KEY])


def test_what_somebody_added_to_a_model_is_saved_and_returns(tmp_path: Path) -> None:
    model, folder = adapted(), tmp_path / "run"
    save_checkpoint(folder, model, step=1)
    loaded = load_checkpoint(folder, model_like=jax.eval_shape(adapted)).model
    assert named_leaves(loaded)[KEY].dtype == named_leaves(model)[KEY].dtype
    assert same_leaves(*(replace_leaves(m, {KEY: key_data(m)}) for m in (loaded, model)))
    with pytest.raises(ValueError, match=r"3 difference\(s\):\n  unexpected model.*wz.key: uint32"):
        load_checkpoint(folder)
    with pytest.raises(ValueError, match=r"not of the structure of model_like, 3 difference"):
        load_checkpoint(folder, model_like=model_of(TINY))
    with pytest.raises(ValueError, match=r"of another configuration, 1 difference\(s\):\n  chunk"):
        load_checkpoint(folder, model_like=model_of(tiny(chunk_size=8)))
