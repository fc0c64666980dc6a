"""Training the byte-level model: honest split, reproducible steps, whole folders."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM
from megalodon_jax.convert import load_from_pretrained
from megalodon_jax.training import make_step
from stability.core.byte_text import read_text, windows
from stability.suite import LENGTH, STEPS, Checkpoint
from tests.helpers import model_of, same_leaves, tiny
from tools.experiments import train
from tools.experiments.train import Recipe, optimiser, write

CONFIG = tiny(vocab_size=256, num_layers=1)
RECIPE = Recipe(steps=2, batch_size=2, length=4, warmup=1)


def paragraphs(text: np.ndarray) -> set[str]:
    return {piece.strip() for piece in text.tobytes().decode().split("\n\n")} - {""}


def test_training_and_held_out_text_share_no_paragraph() -> None:
    text, held_out = read_text()
    assert paragraphs(text).isdisjoint(paragraphs(held_out))
    assert len(text) > len(held_out) > train.HELDOUT_BYTES
    assert all(np.array_equal(a, b) for a, b in zip(read_text(), (text, held_out), strict=True))


def test_the_topics_do_quote_each_other() -> None:
    # Without this the split above would prove nothing.
    from pydoc_data.topics import topics

    pieces = [piece for topic in topics.values() for piece in set(topic.split("\n\n"))]
    assert len(set(pieces)) < len(pieces)


@cache
def compiled():
    transform = optimiser(RECIPE)
    return make_step(transform), transform


def two_steps(seed: int):
    step, transform = compiled()
    model = MegalodonForCausalLM(CONFIG, key=jax.random.key(seed))
    state = transform.init(eqx.filter(model, eqx.is_array))
    losses = []
    for starts in ([0, 50], [100, 150]):
        ids = windows(read_text()[0], np.array(starts), 4)
        model, state, loss = step((ids, None), model, state)
        losses.append(float(loss))
    return model, losses


def test_two_steps_are_reproducible_bit_for_bit() -> None:
    (first, losses), (again, losses_again), (other, _) = two_steps(0), two_steps(0), two_steps(1)
    assert losses == losses_again
    assert same_leaves(first, again)
    assert not same_leaves(first, other)


def test_windows_are_the_bytes_of_the_text() -> None:
    text = np.frombuffer(b"abcdefgh", np.uint8)
    assert windows(text, np.array([0, 3]), 3).tolist() == [[97, 98, 99], [100, 101, 102]]


def test_the_learning_rate_warms_up_from_zero() -> None:
    params = {"norm.weight": np.ones(2, np.float32)}
    transform = optimiser(RECIPE)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        update = jax.jit(transform.update)
        first, state = update(params, transform.init(params), params)
        second, _ = update(params, state, params)
    assert not np.any(first["norm.weight"])
    assert np.any(second["norm.weight"])


@pytest.fixture
def written(tmp_path: Path) -> Path:
    out = tmp_path / "byte_lm"
    write(out, model_of(CONFIG), {"lr": 1e-3, "beta2": 0.98, "weight_decay": 0.1})
    return out


def test_a_written_folder_is_a_checkpoint(written: Path) -> None:
    assert {p.name for p in written.iterdir()} == {
        *("model.safetensors", "config.json", "training.json", "heldout.txt")
    }
    assert same_leaves(load_from_pretrained(written), model_of(CONFIG))
    assert (written / "heldout.txt").stat().st_size == train.HELDOUT_BYTES
    assert json.loads((written / "training.json").read_text(encoding="utf-8"))["lr"] == 1e-3
    checkpoint = Checkpoint(written, written / "heldout.txt")
    assert (checkpoint.optimiser.lr, checkpoint.optimiser.beta2) == (1e-3, 0.98)
    assert checkpoint.optimiser.weight_decay == 0.1
    assert checkpoint.batches().shape == (STEPS, 4, LENGTH)
    (written / "training.json").unlink()
    assert checkpoint.optimiser.lr == 3e-4


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "name"),
    [(train, "save_safetensors"), (train, "read_text"), (Path, "rename"), (shutil, "rmtree")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_interrupted_write_leaves_the_old_folder(
    written: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    before = contents(written)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(written, model_of(CONFIG, seed=5), {})
    assert contents(written) == before or same_leaves(
        load_from_pretrained(written), model_of(CONFIG, seed=5)
    )
    if name != "rmtree":
        assert [p.name for p in written.parent.iterdir()] == [written.name]


def test_writing_again_replaces_the_folder_whole(written: Path) -> None:
    write(written, model_of(CONFIG, seed=5), {})
    assert same_leaves(load_from_pretrained(written), model_of(CONFIG, seed=5))
    assert [p.name for p in written.parent.iterdir()] == [written.name]
