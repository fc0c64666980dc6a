"""Optimiser states: what does not decay, what stops counting, what vanishes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from stability.core.findings import Severity
from stability.core.number_formats import BF16
from stability.storage.optimiser_state import audit_global_norm, audit_state, remaining
from tests.helpers import skip_unless_computed


def state_of(dtype: str):
    return optax.adamw(1e-3).init({"w": jnp.ones(2, dtype)})


def test_a_bfloat16_second_moment_never_decays() -> None:
    assert BF16.round(np.float32(0.999)) == 1.0
    assert remaining("bfloat16", 0.999, 1000) == 1.0
    # 1000 roundings of half an ulp each, relative.
    assert abs(remaining("float32", 0.999, 1000) / 0.999**1000 - 1) < 1000 * 2.0**-24 * 2
    found = {f.metric: f for f in audit_state(state_of("bfloat16"))}
    moment, count = found["second_moment_left"], found["last_count"]
    assert found["first_moment_left"].severity is Severity.OK
    assert (moment.severity, moment.value) == (Severity.WARNING, 1.0)
    assert "100% is left, 37% should be" in moment.message
    assert "float32" in moment.remedy
    assert count.severity is Severity.OK


def test_a_float32_state_and_a_faster_decay_are_fine() -> None:
    assert {f.severity for f in audit_state(state_of("float32"))} == {Severity.OK}
    assert {f.severity for f in audit_state(state_of("bfloat16"), beta2=0.95)} == {Severity.OK}


def test_a_torch_optimiser_is_audited_by_its_state_dict() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimiser = torch.optim.AdamW([parameter], lr=3e-4)
    parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    found = {f.subject: f.severity for f in audit_state(optimiser.state_dict())}
    fine = dict.fromkeys(("state.0.exp_avg", "state.0.step"), Severity.OK)
    assert found == fine | {"state.0.exp_avg_sq": Severity.WARNING}
    before = optimiser.state[parameter]["exp_avg_sq"].clone()
    parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    assert torch.equal(before, optimiser.state[parameter]["exp_avg_sq"]), "as the audit says"


@pytest.mark.parametrize(("beta", "right"), [(0.9, True), (0.999, False)])
def test_a_first_moment_is_judged_by_its_own_decay(beta: float, right: bool) -> None:
    found = {f.metric: f for f in audit_state({"exp_avg": jnp.ones(2, jnp.bfloat16)}, beta1=beta)}
    assert (found["first_moment_left"].severity is Severity.OK) == right
    with pytest.raises(ValueError, match=r"beta1=1\.0 must be in"):
        audit_state({"exp_avg": jnp.ones(2)}, beta1=1.0)


def test_few_bits_cannot_decay_and_many_can() -> None:
    moments = {"exp_avg_sq": np.ones(2, np.uint8)}, {"exp_avg_sq": np.ones(2, np.float64)}
    (few,), (many,) = (audit_state(m) for m in moments)
    assert (few.severity, many.severity) == (Severity.WARNING, Severity.OK)


@pytest.mark.parametrize(
    ("dtype", "last"),
    [("bfloat16", 256), ("float16", 2048), ("float32", 2**24), ("int32", 2**31 - 1)],
)
def test_counters_stop_where_their_dtype_does(dtype: str, last: int) -> None:
    skip_unless_computed(dtype)
    (finding,) = audit_state({"count": jnp.zeros((), dtype)}, steps=5000)
    assert finding.value == last
    assert (finding.severity is Severity.WARNING) == (last < 5000)
    if dtype != "int32":
        one = jnp.ones((), dtype)
        assert jnp.asarray(last, dtype) + one == jnp.asarray(last, dtype)
        assert jnp.asarray(last - 1, dtype) + one == jnp.asarray(last, dtype)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 1e-25), ("float16", 1e-4)])
def test_a_norm_underflows_in_the_gradients_dtype(dtype: str, size: float) -> None:
    skip_unless_computed(dtype)
    found = audit_global_norm({"w": jnp.full(64, size, dtype)})
    assert (found.severity, found.value) == (Severity.ERROR, 0.0)
    assert "float32" in found.remedy


def test_a_norm_that_its_dtype_holds_is_fine() -> None:
    fine = audit_global_norm({"w": jnp.full(64, 1e-3, jnp.bfloat16)})
    assert fine.severity is Severity.OK
    wide = audit_global_norm(
        jax.tree.map(lambda g: g.astype(jnp.float32), {"w": jnp.full(64, 1e-4)})
    )
    assert wide.severity is Severity.OK


def test_bad_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"no arrays in this dict.*optax state"):
        audit_state({})
    with pytest.raises(ValueError, match=r"beta2=1.5 must be in \[0, 1\)"):
        audit_state(state_of("float32"), beta2=1.5)
    with pytest.raises(ValueError, match="expected a pytree of gradients"):
        audit_global_norm({})


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_norm_that_is_wrong_is_an_error_either_way(factor: float, monkeypatch) -> None:
    gradients = {"w": jnp.full(64, 1e-3)}
    norm = optax.tree.norm(gradients)
    monkeypatch.setattr(optax.tree, "norm", lambda _: factor * norm)
    assert audit_global_norm(gradients).severity is Severity.ERROR
