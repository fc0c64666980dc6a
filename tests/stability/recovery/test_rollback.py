"""A run with injected faults ends where the clean run ends, and its log says what happened when."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megalodon_jax import MegalodonForCausalLM
from stability.recovery.guard import GuardConfig, guard
from stability.recovery.rollback import (
    CheckpointFolder,
    Event,
    RecoveryConfig,
    RecoveryFailedError,
    Run,
    guarded_run,
)
from tests.helpers import tiny

MODEL = tiny(num_layers=1, init_mode="xavier")
GUARD = GuardConfig(window=24, warmup=8, patience=3)
RECOVERY = RecoveryConfig(save_every=20, keep=3, horizon=30)
STEPS, RATE, WITHIN = 300, 1e-2, 0.02
NONE, NAN_GRADIENT, INFINITE_LOSS = 0, 1, 2
TX = guard(optax.adamw(optax.cosine_decay_schedule(RATE, STEPS, 0.05)), GUARD)


def text(number: int) -> np.ndarray:
    """A batch (8, 12) of a Markov chain: the next id is mostly the last one plus a constant."""
    rng = np.random.default_rng(number)
    jumps = rng.choice([1, 3, 7], (8, 12), p=[0.7, 0.2, 0.1])
    return (np.cumsum(jumps, axis=1) % (MODEL.vocab_size - 1) + 1).astype(np.int32)


@eqx.filter_jit(donate="all")
def train(model, state, batch):
    ids, fault = batch
    loss, grads = eqx.filter_value_and_grad(lambda m: m.compute_loss(ids, ids))(model)
    loss = jnp.where(fault == INFINITE_LOSS, jnp.inf, loss)
    grads = jax.tree.map(lambda g: jnp.where(fault == NAN_GRADIENT, jnp.nan, g), grads)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        params = eqx.filter(model, eqx.is_array)
        updates, state = TX.update(grads, state, params, value=loss)
    return eqx.apply_updates(model, updates), state


@eqx.filter_jit
def loss_of(model, ids):
    return model.compute_loss(ids, ids)


HELD_OUT = np.concatenate([text(10_000 + i) for i in range(8)])


def evaluated(run: Run) -> float:
    return float(loss_of(run.model, jnp.asarray(HELD_OUT)))


def clean(number: int):
    return jnp.asarray(text(number)), jnp.int32(NONE)


def start(folder: Path, data=clean, *, steps: int = STEPS, config=RECOVERY, **options) -> Run:
    model = MegalodonForCausalLM(MODEL, key=jax.random.key(0))
    state = TX.init(eqx.filter(model, eqx.is_array))
    return guarded_run(
        *(train, model, state, data),
        steps=steps,
        folder=folder,
        guard_config=GUARD,
        config=config,
        **options,
    )


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory) -> tuple[float, Run]:
    run = start(tmp_path_factory.mktemp("clean"))
    return evaluated(run), run


def kinds(run: Run) -> list[str]:
    return [event.kind for event in run.events if event.kind != "save"]


def test_the_clean_run_learns_and_the_guard_leaves_it_alone(clean_run, tmp_path: Path) -> None:
    loss, run = clean_run
    untrained = evaluated(start(tmp_path, steps=0))
    assert loss < untrained / 2
    assert (run.step, run.batch, run.rate) == (STEPS, STEPS, 1.0)
    assert not set(kinds(run)) - {"clip"}


class Faults:
    """Batches with a NaN gradient, an infinite loss and a stretch of poison; the newest
    checkpoint is spoiled just before the rollback needs it."""

    poison = range(93, 99)

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, number: int):
        if number == self.poison.start:
            newest = max(self.folder.iterdir()) / "model.safetensors"
            newest.write_bytes(newest.read_bytes()[:-7])
        if number in self.poison:
            rng = np.random.default_rng(number)
            noise = rng.integers(1, MODEL.vocab_size, (8, 12)).astype(np.int32)
            return jnp.asarray(noise), jnp.int32(NONE)
        faults = {41: NAN_GRADIENT, 57: INFINITE_LOSS}
        return jnp.asarray(text(number)), jnp.int32(faults.get(number, NONE))


def test_a_run_with_faults_ends_within_two_percent_of_the_clean_one(
    clean_run, tmp_path: Path
) -> None:
    said: list[Event] = []
    run = start(tmp_path, Faults(tmp_path), log=said.append)
    assert said == run.events
    assert run.step == STEPS
    assert evaluated(run) <= clean_run[0] * (1 + WITHIN)

    def about(batch: int) -> list[tuple[str, str]]:
        return [(e.kind, e.message) for e in run.events if e.batch == batch and e.kind != "save"]

    assert [kind for kind, _ in about(41)] == ["skip"]
    assert "the gradient norm nan" in about(41)[0][1]
    assert about(57) == [("skip", "the loss is inf")]
    for number in (93, 94, 95):
        assert any(k == "skip" and "above" in message for k, message in about(number))
    # Two steps were skipped before: 80 steps were kept at batch 82, and its checkpoint is spoiled.
    corrupt, rollback = (
        next(e for e in run.events if e.kind == k) for k in ("corrupt", "rollback")
    )
    assert corrupt.message.startswith("step-00000080")
    assert "to step-00000060, on with batch 104" in rollback.message
    assert (corrupt.batch, rollback.batch) == (96, 104)
    assert (run.rate, run.restored) == (1.0, 60)
    assert "step 91, batch 93: skip: the loss is" in "\n".join(e.describe() for e in run.events)


def test_without_the_guard_the_same_faults_ruin_the_run() -> None:
    # The negative control: otherwise surviving them would prove nothing.
    model = MegalodonForCausalLM(MODEL, key=jax.random.key(0))
    plain = optax.sgd(RATE)
    state = plain.init(eqx.filter(model, eqx.is_array))
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), eqx.filter(model, eqx.is_array))
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(plain.update)(grads, state, eqx.filter(model, eqx.is_array))
    ruined = eqx.filter_jit(eqx.apply_updates)(model, updates)
    assert not np.isfinite(float(loss_of(ruined, jnp.asarray(HELD_OUT))))


def test_an_interrupted_run_resumes_bit_for_bit(clean_run, tmp_path: Path) -> None:
    start(tmp_path, steps=45)
    resumed = start(tmp_path)
    assert [e.message for e in resumed.events if e.kind == "resume"] == ["from step-00000040"]
    assert resumed.batch == STEPS
    assert evaluated(resumed) == clean_run[0]


def test_trouble_that_returns_goes_back_further_and_cuts_the_rate_then_stops(
    tmp_path: Path,
) -> None:
    def broken(number: int):
        return jnp.asarray(text(number)), jnp.int32(NAN_GRADIENT if number >= 45 else NONE)

    said: list[Event] = []
    config = dataclasses.replace(RECOVERY, max_cuts=2)
    with pytest.raises(RecoveryFailedError, match=r"cut 2 times, to 0\.25 of the original"):
        start(tmp_path, broken, config=config, log=said.append)
    story = [(e.kind, e.message) for e in said if e.kind not in ("save", "skip")]
    story = [(kind, message.partition(",")[0]) for kind, message in story]
    assert story == [
        ("rollback", "to step-00000040"),
        ("cut", "the learning rate to 0.5 of the original"),
        ("rollback", "to step-00000020"),
        ("cut", "the learning rate to 0.25 of the original"),
        ("rollback", "to step-00000000"),
        ("stop", "cut 2 times in vain"),
    ]
    assert len([e for e in said if e.kind == "skip"]) == 4 * GUARD.patience
    batches = [e.batch for e in said if e.kind == "skip"]
    assert len(set(batches)) == len(batches)


def test_a_cut_rate_outlives_the_checkpoint_it_returns_to(tmp_path: Path) -> None:
    def hiccups(number: int):
        bad = number in (*range(25, 28), *range(42, 45))
        return jnp.asarray(text(number)), jnp.int32(NAN_GRADIENT if bad else NONE)

    run = start(tmp_path, hiccups, steps=60)
    assert kinds(run).count("cut") == 1
    assert (run.rate, float(run.state.rate)) == (RECOVERY.factor, RECOVERY.factor)
    assert float(start(tmp_path, steps=61).state.rate) == RECOVERY.factor


def test_without_a_readable_checkpoint_it_stops_and_says_so(tmp_path: Path) -> None:
    def broken(number: int):
        for folder in CheckpointFolder(tmp_path).folder.glob("step-*"):
            (folder / "manifest.json").write_text("{", encoding="utf-8")
        return jnp.asarray(text(number)), jnp.int32(NAN_GRADIENT)

    with pytest.raises(RecoveryFailedError, match="no checkpoint can be read"):
        start(tmp_path, broken)


def test_a_state_that_is_not_the_guards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrap the whole optimiser"):
        guarded_run(train, None, (), clean, steps=1, folder=tmp_path, guard_config=GUARD)  # pyright: ignore


@pytest.mark.parametrize(
    "wrong", [{"save_every": 0}, {"factor": 1.0}, {"skip_batches": -1}, {"max_cuts": 0}]
)
def test_a_wrong_number_is_named(wrong) -> None:
    with pytest.raises(ValueError, match=f"RecoveryConfig: {next(iter(wrong))}="):
        RecoveryConfig(**wrong)


def test_the_log_knows_auxiliary_losses_apart_from_the_loss(tmp_path: Path) -> None:
    tx = guard(optax.sgd(0.1), GUARD, auxiliary=("router",))

    @cache
    def compiled():
        def step(model, state, batch):
            updates, state = tx.update(
                {"w": jnp.ones(2)},
                state,
                model,
                value=jnp.float32(1.0),
                auxiliary={"router": jnp.where(batch == 3, jnp.nan, 0.5)},
            )
            return optax.apply_updates(model, updates), state

        return jax.jit(step)

    store = CheckpointFolder(tmp_path, save_one=lambda *a, **k: None)
    params = {"w": jnp.ones(2)}
    run = guarded_run(
        *(compiled(), params, tx.init(params), jnp.int32),
        steps=6,
        folder=tmp_path,
        guard_config=GUARD,
        store=store,
    )
    assert [(e.batch, e.message) for e in run.events if e.kind == "auxiliary"] == [
        (3, "router is nan")
    ]
    assert "skip" not in kinds(run)
