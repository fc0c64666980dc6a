"""The run that was broken on purpose, and its checkpoints."""

from __future__ import annotations

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parity.deepseek_v3.cases import TINY, by_name
from parity.deepseek_v3.checkpoint import build
from parity.deepseek_v3.model import MLAMoEForCausalLM
from stability.core import documents
from stability.moe import fit, options
from stability.recovery.guard import GuardConfig, Verdict, guard
from tests.helpers import ROOT, same_leaves
from tools.experiments import moe_defects
from tools.experiments import moe_training as training


@pytest.fixture(scope="module")
def told():
    return {v["name"]: v for v in documents.read(documents.TRAINING)["variants"]}


def test_the_guard_survives_what_breaks_the_run_without_it(told):
    at = documents.read(documents.TRAINING)["plan"]["injected_at"]
    peak = {n: max(x for i, x in v["loss"] if i >= at) for n, v in told.items()}
    assert peak["broken"] > 2 * peak["healthy"]
    assert told["guarded"]["held_out"] < told["broken"]["held_out"]
    assert told["guarded"]["events"]["rollback"] >= 1
    assert told["guarded"]["rate"] < 1
    # The control: a guard that speaks in a healthy run would prove nothing.
    assert told["healthy"]["events"]["skip"] == told["healthy"]["events"]["rollback"] == 0


def test_the_router_loss_is_logged_apart(told):
    for variant in told.values():
        assert len(variant["router_z"]) == len(variant["loss"])


def test_an_emergency_is_tighter_slower_and_clips():
    normal, emergency = training.NORMAL, training.EMERGENCY
    assert emergency.max_norm < normal.max_norm
    assert emergency.lr < normal.lr
    assert emergency.warmup > normal.warmup
    assert emergency.activation_limit is not None


def test_extreme_activations_are_clipped():
    case = by_name("dense")
    config = replace(case.config, activation_limit=100.0)
    block, limited = (build(c, case.weights).model.layers[0] for c in (case.config, config))
    x = jnp.full((1, 2, TINY.hidden_size), 1e6, jnp.float32)
    positions = jnp.zeros((1, 2), jnp.int32)
    assert float(jnp.max(jnp.abs(eqx.filter_jit(limited)(x, positions).hidden))) == 100.0
    assert float(jnp.max(jnp.abs(eqx.filter_jit(block)(x, positions).hidden))) > 1e5


def test_a_checkpoint_of_a_run_comes_back(tmp_path):
    model = MLAMoEForCausalLM(
        replace(TINY, num_hidden_layers=1, min_moe_layer=1), key=jax.random.key(0)
    )
    state = guard(optax.sgd(0.1), GuardConfig()).init(model)
    store = fit.folder_of(tmp_path, model)
    store.save(3, 7, model, state, keep=1)
    again, held, batch = store.load(3, state)
    assert batch == 7
    assert same_leaves(again, model)
    assert same_leaves(held, state)
    (store.path(3) / "leaves.eqx").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"leaves\.eqx cannot be read"):
        store.load(3, state)


def test_a_run_without_a_guard_ends_where_it_is_not_finite(monkeypatch):
    small = replace(options.TINY_LM, num_hidden_layers=1, min_moe_layer=0)
    monkeypatch.setattr(training, "TINY_LM", small)
    # The step of batch 2 leaves parameters that are not finite.
    plan = training.Plan(steps=8, injected_at=2, lr_factor=np.inf, batch_size=2, length=8)
    preset = replace(training.NORMAL, warmup=0)
    outcome = training.train("broken", "", plan, preset, guarded=False)
    at, loss = outcome.loss[-1]
    assert at == 3
    assert not np.isfinite(loss)
    assert np.isfinite([x for _, x in outcome.loss[:-1]]).all()
    assert outcome.ended.startswith(f"at batch {at} the loss is {loss:g}, ")
    (variant,) = training.document(plan, [outcome])["variants"]
    assert variant["ended"] == outcome.ended
    assert variant["loss"][-1] == [at, None]
    told = training.table(training.document(plan, [outcome]))
    assert f"; ended early: {outcome.ended} |" in told


def test_a_run_without_a_guard_ends_at_a_gradient_that_is_not_finite(monkeypatch):
    """The loss of that batch is finite."""
    small = replace(options.TINY_LM, num_hidden_layers=1, min_moe_layer=0)
    monkeypatch.setattr(training, "TINY_LM", small)

    def scripted(transform):
        def step(model, state, batch):
            verdict = Verdict.SKIPPED_GRADIENT if int(batch[3]) == 2 else Verdict.ACCEPTED
            values = jnp.int32(verdict), jnp.float32(np.inf), jnp.float32(1.5)
            report = state.report
            report = eqx.tree_at(lambda r: (r.verdict, r.norm, r.loss), report, values)
            return model, eqx.tree_at(lambda s: s.report, state, report)

        return step

    monkeypatch.setattr(training, "_step", scripted)
    plan = training.Plan(steps=6, injected_at=5, batch_size=2, length=8)
    outcome = training.train("steep", "", plan, training.NORMAL, guarded=False)
    assert outcome.loss == [(number, 1.5) for number in range(3)]
    assert outcome.ended == "at batch 2 the loss is 1.5, its gradient norm inf"


def test_a_plan_that_injects_after_its_end_is_refused():
    with pytest.raises(ValueError, match="injected_at=9 must lie between 0 and steps=5"):
        training.Plan(steps=5, injected_at=9)


@pytest.mark.parametrize(
    ("name", "table"),
    [(documents.DEFECTS, moe_defects.table), (documents.TRAINING, training.table)],
)
def test_the_document_shows_what_was_stored(name, table):
    text = (ROOT / "docs" / "mla-moe.md").read_text(encoding="utf-8")
    assert table(documents.read(name)) in text, f"run {documents.COMMANDS[name]} and copy it"


def test_a_missing_result_names_its_command(tmp_path):
    with pytest.raises(ValueError, match=r"run `python -m tools.experiments guard`"):
        documents.read(documents.TRAINING, tmp_path)


def test_every_committed_defect_was_caught():
    assert all(d["caught"] for d in documents.read(documents.DEFECTS)["defects"])
