"""AdamW written from its algorithm, optax and torch take the same steps."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

from parity.engine.measure.compare import Comparison
from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Kind, Verdict
from parity.megalodon import trajectory
from parity.megalodon.cases import by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.runner import JaxSubject
from parity.tolerances import NoiseFloors

SHORT = dataclasses.replace(by_name("adamw"), steps=3)


@pytest.fixture(scope="module")
def exact():
    return trajectory.of_oracle(SHORT)


def test_the_order_names_everything_and_nothing_else(exact):
    assert set(exact) == set(SHORT.order)
    assert len(SHORT.order) == len(set(SHORT.order))


def test_the_weights_of_linear_maps_decay_and_nothing_else():
    """All sides ask the same function, so no comparison between them would see it change."""
    decaying = {name for name in SHORT.weights if trajectory.decays(name)}
    maps = ("attn.wz", "attn.wv", "attn.wr", "attn.wh1", "attn.wh2", "ffn.fc1", "ffn.fc2")
    layers = range(SHORT.config.num_layers)
    assert decaying == {f"model.layers.{i}.{name}.weight" for i in layers for name in maps}


def test_three_steps_in_float64_are_the_oracle(exact):
    rows = Comparison(SHORT.work, MegalodonEdge.JAX64_ORACLE, NoiseFloors({}), "float64").run(
        JaxSubject("float64").run(SHORT), exact
    )
    assert first_divergence(rows) is None
    assert {m.kind for m in rows} == {Kind.TRAJECTORY}


def test_the_oracle_steps_as_optax_does(exact):
    """The oracle's AdamW has a truth of its own: optax, fed the oracle's gradients."""
    hyper = trajectory.HYPER
    name = "model.layers.0.attn.wv.weight"
    start = jax.numpy.asarray(SHORT.weights[name], "float32")
    adamw = optax.adamw(
        hyper.lr, hyper.beta1, hyper.beta2, eps=hyper.eps, weight_decay=hyper.weight_decay
    )
    gradient = exact[f"step1/mu/{name}"] / (1 - hyper.beta1)
    with jax.numpy_dtype_promotion("standard"):
        update, _ = adamw.update(jax.numpy.asarray(gradient, "float32"), adamw.init(start), start)
    drift = exact[f"step1/drift/{name}"]
    rounding = np.finfo(np.float32).eps * np.abs(np.asarray(start)).max()
    assert np.allclose(np.asarray(update), drift, rtol=0, atol=rounding)


def test_every_step_sees_another_batch():
    first, second, third = trajectory.batches(SHORT)
    assert not np.array_equal(first.ids, second.ids)
    assert np.array_equal(np.roll(first.ids, 2, axis=1), third.ids)


def test_a_hyperparameter_of_one_side_is_found_where_it_acts(exact, monkeypatch):
    """The others are in the catalogue of faults."""
    hyper = dataclasses.replace(trajectory.HYPER, beta2=0.999)
    monkeypatch.setattr(trajectory, "HYPER", hyper)
    jax.clear_caches()
    actual = JaxSubject("float64").run(SHORT)
    jax.clear_caches()
    rows = Comparison(SHORT.work, MegalodonEdge.JAX64_ORACLE, NoiseFloors({}), "float64").run(
        actual, exact
    )
    found = first_divergence(rows)
    assert found is not None
    assert found.verdict is Verdict.FAIL
    assert found.quantity.startswith("step1/nu/")
