"""Flags find that something is not finite; a replay finds what made it so, and nothing else."""

from __future__ import annotations

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.weights import named_leaves, replace_leaves
from parity.checkpoint_pair.whole_model import text_case
from parity.engine.measure.quantity import LOSS, Quantity, Role
from parity.megalodon.intermediates import computed, stages
from stability.core.findings import Severity
from stability.nonfinite.flags import (
    broken,
    finite,
    finite_findings,
    finite_flags,
    in_order,
    watched_loss,
    with_intermediate_flags,
)
from stability.nonfinite.replay import locate, locate_findings
from tests.helpers import model_of, rel_l2, same_program, tiny, tokens

CONFIG = tiny(num_layers=1)
IDS = jnp.asarray(tokens(CONFIG, (2, 9)))
HUGE = float(jnp.finfo(jnp.float32).max)
FC1 = "model.layers.0.ffn.fc1.weight"
OMEGA = "model.layers.0.attn.cema.omega"


@cache
def model():
    return model_of(CONFIG)


def spoiled(name: str, change):
    leaf = named_leaves(model())[name]
    return replace_leaves(model(), {name: change(leaf)})


def loss_of(model, ids):
    return model.compute_loss(ids, ids)


WATCHED = eqx.filter_jit(watched_loss(loss_of, cotangents=True))


def flags_of(model):
    _, flags = WATCHED(model, IDS)
    order = (*computed(CONFIG), LOSS)
    return in_order(flags, order)


def test_flags_cover_every_intermediate_cotangent_and_gradient() -> None:
    flags = flags_of(model())
    names = stages(CONFIG)
    expected = {*names, LOSS, *(Quantity.cotangent(n) for n in names)}
    expected |= {Quantity.gradient(name) for name in named_leaves(model())}
    assert set(flags) == expected
    assert broken(flags) == []
    (ok,) = finite_findings(flags)
    assert ok.severity is Severity.OK


def test_watching_changes_neither_loss_nor_gradients() -> None:
    (loss, gradients), _ = WATCHED(model(), IDS)
    plain, expected = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))(model(), IDS)
    # Equal to rounding: extra outputs change what XLA fuses.
    weights = {name: np.asarray(leaf) for name, leaf in named_leaves(model()).items()}
    bound = same_program(text_case("watched", CONFIG, np.asarray(IDS), weights))
    assert rel_l2(loss, plain) <= bound("loss")
    for name, gradient in named_leaves(gradients).items():
        assert rel_l2(gradient, named_leaves(expected)[name]) <= bound(f"grad/{name}"), name


def test_the_first_flag_down_is_where_it_begins() -> None:
    overflow = spoiled(OMEGA, lambda w: jnp.full_like(w, HUGE))
    down = broken(flags_of(overflow))
    assert down[0] == "layers.0.cema"
    assert "layers.0.timenorm" not in down and "embed" not in down
    (finding,) = finite_findings(flags_of(overflow))
    assert (finding.severity, finding.subject) == (Severity.ERROR, "layers.0.cema")
    assert finding.value == len(down)
    assert "locate" in finding.remedy


def test_without_cotangents_the_forward_pass_and_gradients_are_watched() -> None:
    _, flags = eqx.filter_eval_shape(watched_loss(loss_of), model(), IDS)
    assert not any(name.startswith(Role.COTANGENT) for name in flags)
    assert {LOSS, "layers.0.cema", Quantity.gradient(FC1)} <= set(flags)


def test_flags_of_leaves_skip_what_cannot_be_infinite() -> None:
    tree = {"a": jnp.ones(2), "n": jnp.arange(2), "k": jax.random.key(0), "b": jnp.array(jnp.inf)}
    flags = jax.jit(finite_flags)(tree)
    assert set(flags) == {"a", "n", "b"}
    assert broken(flags) == ["b"]
    assert not bool(finite(jnp.array([1 + 1j, jnp.nan + 0j])))


def test_intermediates_can_be_watched_without_a_gradient() -> None:
    params, static = eqx.partition(model(), eqx.is_array)
    forward = with_intermediate_flags(lambda p, ids: eqx.combine(p, static)(ids)[0])
    logits, flags = jax.eval_shape(forward, params, IDS)
    assert logits.shape == (*IDS.shape, CONFIG.vocab_size)
    assert set(flags) == set(stages(CONFIG))


def test_a_healthy_step_has_no_origin() -> None:
    # Masked scores are -inf on purpose; a softmax takes them away again.
    assert locate(loss_of, model(), IDS) is None
    (finding,) = locate_findings(jnp.sum, jnp.ones(2))
    assert finding.severity is Severity.OK


def test_a_bad_weight_is_named_as_the_argument() -> None:
    bad = spoiled(FC1, lambda w: w.at[0, 0].set(jnp.nan))
    (finding,) = locate_findings(loss_of, bad, IDS)
    assert (finding.severity, finding.value) == (Severity.ERROR, 1.0)
    assert f"argument 0.{FC1} was not finite" in finding.message
    assert "checkpoint" in finding.remedy


def test_an_overflow_is_found_at_its_operation_with_the_range_of_its_inputs() -> None:
    origin = locate(loss_of, spoiled(FC1, lambda w: jnp.full_like(w, HUGE)), IDS)
    assert origin is not None
    assert (origin.kind, origin.name) == ("operation", "dot_general")
    assert origin.source.startswith("megalodon_jax/layers/")
    assert origin.phase == "forward"
    assert all(operand.nan == operand.inf == 0 for operand in origin.inputs)
    assert max(operand.largest for operand in origin.inputs) > np.sqrt(HUGE)
    assert origin.outputs[0].inf > 0
    (finding,) = locate_findings(jnp.exp, jnp.array([1000.0]))
    assert "an overflow" in finding.remedy


def test_an_overflow_inside_a_layer_is_found_in_its_module() -> None:
    origin = locate(eqx.filter_grad(loss_of), spoiled(OMEGA, lambda w: jnp.full_like(w, HUGE)), IDS)
    assert origin is not None
    assert origin.module == "model.layers.*.attn.cema"
    assert origin.source.startswith("megalodon_jax/layers/complex_ema.py:")


@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "inside jit"])
def test_a_bad_derivative_of_a_good_value_is_found_backward(jitted: bool) -> None:
    def norm(x):
        return jnp.sqrt(jnp.sum(jnp.square(x)))

    inner = jax.jit(norm) if jitted else norm
    assert locate(inner, jnp.zeros(3)) is None
    origin = locate(jax.grad(inner), jnp.zeros(3))
    assert origin is not None and origin.name in ("div", "mul")
    assert "tests/stability/nonfinite/test_nonfinite.py:" in origin.source


def test_the_root_is_the_overflow_and_not_the_nan_that_follows() -> None:
    def follows(x):
        big = jnp.exp(x)
        return big - big

    origin = locate(follows, jnp.array([1.0, 1000.0]))
    assert origin is not None and origin.name == "exp"
    assert (origin.outputs[0].inf, origin.inputs[0].largest) == (1, 1000.0)


def test_an_infinity_put_there_on_purpose_is_no_cause() -> None:
    def masked(x):
        hidden = jnp.where(x > 0, x, -jnp.inf)
        return jnp.sum(jax.nn.softmax(hidden)) + jnp.log(x[0])

    origin = locate(masked, jnp.array([-1.0, 2.0]))
    assert origin is not None and origin.name == "log"

    def all_masked(x):
        hidden = jnp.where(x > 5, x, -jnp.inf)
        return hidden - jnp.max(hidden)

    origin = locate(all_masked, jnp.array([-1.0, 2.0]))
    # -inf - -inf: the subtraction is to blame, and what it was given is told.
    assert origin is not None and origin.name == "sub"
    assert origin.inputs[0].inf == 2


def test_a_selected_away_nan_is_forgotten() -> None:
    assert locate(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), jnp.array([-1.0, 2.0])) is None


def test_loops_and_branches_say_which_turn_it_was() -> None:
    def scanned(x):
        return jax.lax.scan(lambda c, k: (jnp.log(c - k), c), x, jnp.arange(4.0))[0]

    origin = locate(scanned, jnp.float32(3.0))
    assert origin is not None and (origin.name, origin.where) == ("log", "scan[2]")

    def branched(x):
        return jax.lax.cond(x > 0, jnp.log1p, lambda x: jnp.log(x), x)

    origin = locate(branched, jnp.float32(-1.0))
    assert origin is not None and (origin.name, origin.where) == ("log", "cond[0]")

    def looped(x):
        return jax.lax.while_loop(lambda c: c < 1e30, lambda c: c * c, x)

    origin = locate(looped, jnp.float32(1e25))
    assert origin is not None and (origin.name, origin.where) == ("mul", "while[0]")


def test_rules_of_custom_derivatives_are_replayed() -> None:
    @jax.custom_vjp
    def ruled(x):
        return x * 2

    ruled.defvjp(lambda x: (x * 2, x), lambda x, g: (g / (x - x),))
    assert locate(ruled, jnp.ones(2)) is None
    origin = locate(jax.grad(lambda x: jnp.sum(ruled(x))), jnp.ones(2))
    assert origin is not None and origin.name == "div"
    origin = locate(lambda x: jnp.sum(jax.checkpoint(jnp.log)(x)), -jnp.ones(2))
    assert origin is not None and origin.name == "log"


def test_bfloat16_and_complex_values_are_looked_at_too() -> None:
    origin = locate(lambda x: x * x, jnp.full(2, 1e30, jnp.bfloat16))
    assert origin is not None and origin.outputs[0].dtype == "bfloat16"
    origin = locate(lambda x: jnp.abs(1 / x), jnp.zeros(2, jnp.complex64))
    assert origin is not None and origin.name == "div"
