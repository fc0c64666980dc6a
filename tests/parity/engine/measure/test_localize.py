"""Where a difference starts: every stage on its own, the account of it, and the smallest case."""

from __future__ import annotations

import math
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.layers import complex_ema
from megalodon_jax.layers.norms import RMSNorm
from parity.engine.measure.measurement import Measurement
from parity.engine.measure.quantity import Quantity
from parity.faults import by_name as fault_by_name
from parity.megalodon import shrink as shrink_module
from parity.megalodon.account import account
from parity.megalodon.cases import Case, by_name
from parity.megalodon.intermediates import parameters_of
from parity.megalodon.runner import JaxSubject
from parity.megalodon.shrink import LEAST, failure, shrink
from reports.cli.views.explain import explain, shrink_case
from tests.helpers import EXACT, rel_l2
from tests.reports.nights import failing

PLAIN = by_name("plain")
CEMA = fault_by_name("cema_gamma_conjugated")


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.sweep)])
def test_no_stage_of_a_healthy_model_is_wrong_on_its_own(dtype: str) -> None:
    told = account(PLAIN, dtype)
    assert told.culprit is None
    assert told.worst is None
    assert len(told.stages) == 23


def test_the_culprit_is_the_stage_that_is_wrong_when_fed_the_right_inputs() -> None:
    with CEMA.planted():
        told = account(PLAIN)
    assert told.culprit is not None
    assert told.culprit.name == "layers.0.cema"
    assert parameters_of(told.culprit.name) == ("model.layers.0.attn.cema",)
    assert [s.name for s in told.stages if s.broken] == ["layers.0.cema", "layers.1.cema"]
    after = told.stages[told.stages.index(told.culprit) + 1]
    assert after in told.carried, "wrong in the run as it is, right on its own"
    assert not any(stage.broken for stage in told.carried)
    assert after.amplification > 1e6
    assert told.worst is not None
    assert told.worst.actual != told.worst.expected


def test_a_stage_that_is_not_a_number_is_the_culprit() -> None:
    def poisoned(call):
        return lambda self, x: call(self, x) * jnp.asarray(jnp.nan, x.dtype)

    jax.clear_caches()  # what is compiled ignores a patch, and must not keep it
    with patch.object(RMSNorm, "__call__", poisoned(RMSNorm.__call__)):
        told = account(PLAIN, "float32")
    jax.clear_caches()
    assert told.culprit is not None
    assert told.culprit.name == "layers.0.rmsnorm"
    assert math.isnan(told.culprit.forced)


def test_a_forced_stage_goes_on_with_what_it_is_given() -> None:
    subject = JaxSubject("float64")
    free = subject.intermediates(PLAIN)
    forced = subject.intermediates(PLAIN, {"layers.0.cema": np.zeros_like(free["layers.0.cema"])})
    # As computed, by another program.
    assert rel_l2(forced["layers.0.cema"], free["layers.0.cema"]) <= EXACT
    assert not np.any(forced["layers.0.rmsnorm"])


def test_a_stream_has_no_stages_to_force() -> None:
    with pytest.raises(ValueError, match=r"stream is a cached stream.*case 'plain'"):
        account(by_name("stream"))


@pytest.mark.sweep
def test_an_account_names_stage_parameters_and_replay() -> None:
    with CEMA.planted():
        text, holds = explain(PLAIN, CEMA.name)
    assert not holds
    assert text.startswith("plain: first divergence at layers.0.cema, jax64:oracle")
    assert "parameters that act there: model.layers.0.attn.cema" in text
    assert text.endswith(f"parity explain plain --fault {CEMA.name}")


@pytest.mark.sweep  # in float64 the healthy model is asked above
def test_an_account_of_a_healthy_case_says_what_holds() -> None:
    text, holds = explain(PLAIN, None)
    assert holds
    assert "no divergence. 23 stages pass on their own" in text


def test_a_wrong_derivative_is_found_behind_a_right_value() -> None:
    convolution = complex_ema.causal_convolution
    wrong = jax.custom_vjp(convolution)

    def negated(pull_back, y_bar):
        x_bar, kernel_bar = pull_back(y_bar)
        return -x_bar, kernel_bar

    wrong.defvjp(lambda x, kernel: jax.vjp(convolution, x, kernel), negated)
    jax.clear_caches()  # what is compiled already has the right one
    with patch.object(complex_ema, "causal_convolution", wrong):
        text, holds = explain(PLAIN, None)
    assert not holds
    assert "first divergence at bar/layers.1.timenorm" in text
    assert "the operation that uses layers.1.timenorm is wrong" in text


def test_a_failing_case_shrinks_to_one_layer_and_fails_at_the_same_intermediate() -> None:
    with CEMA.planted():
        case, found = shrink(by_name("length_c"), lambda line: None)
        assert failure(case, forward_only=True) is not None
    assert found.quantity == "layers.0.cema"
    assert (case.config.num_layers, case.batch_size, case.config.model_dim) == (1, 1, 4)
    assert case.length <= 3
    assert failure(case, forward_only=True) is None, "without the fault the small case holds"


@pytest.mark.parametrize("name", ["stream", "length_c"])
def test_a_case_that_always_fails_shrinks_to_the_end_and_its_code_runs(name, monkeypatch, capsys):
    quantity = Quantity.state("norm_mean") if name == "stream" else "layers.0.cema"
    tried: list[Case] = []

    def fails(case: Case, *, forward_only: bool = False) -> Measurement | None:
        tried.append(case)
        assert len(tried) < 200, "the search goes round and round"
        # The boldest change, the first to be tried, makes it go away: all others follow.
        return None if len(tried) == 2 else failing(quantity=quantity)

    monkeypatch.setattr(shrink_module, "failure", fails)
    # Of one token, too, this one is wrong: the printed code plants it for good.
    text = shrink_case(by_name(name), "ema_through_bfloat16", lambda line: None)
    smallest = tried[-1]
    assert (smallest.length, smallest.batch_size, smallest.config.num_layers) == (1, 1, 1)
    assert smallest.cuts == ((1,) if name == "stream" else ())
    assert all(smallest.config.to_dict()[field] == size for field, size in LEAST.items())
    exec(text.partition("\n\n")[2], {})
    assert tried[-1] == smallest
    assert str(quantity) in capsys.readouterr().out


def test_there_is_nothing_to_shrink_in_a_case_that_holds() -> None:
    with pytest.raises(ValueError, match=r"length_c holds on jax64:oracle.*--fault"):
        shrink_case(by_name("length_c"), None, lambda line: None)
