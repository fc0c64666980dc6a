"""What an account says of a case: which question finds it, and what its answer means."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parity.engine.measure.localize import Stage
from parity.engine.programs.explanation import Explanation
from parity.megalodon import explanation as module
from parity.megalodon.account import Account
from parity.megalodon.cases import by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.explanation import explain
from tests.reports.nights import failing

PLAIN = by_name("plain")
RIGHT = Stage("layers.0.cema", free=1e-16, forced=1e-16, tolerance=1e-11)
FED = replace(RIGHT, name="layers.0.inner", free=1e-3)
WRONG = replace(RIGHT, name="layers.0.mid", free=1e-3, forced=1e-3)


def asked(monkeypatch, *, wide=(RIGHT,), divergence=None, narrow=(RIGHT,)):
    """Have an account find these stages, and a comparison this first divergence."""

    def account(case, dtype):
        return Account(case, dtype, wide if dtype == "float64" else narrow, None)

    monkeypatch.setattr(module, "account", account)
    monkeypatch.setattr(module, "failure", lambda case: divergence)


def test_a_stage_wrong_on_its_own_is_named_before_all_else(monkeypatch):
    other, lost = replace(WRONG, name="layers.1.mid"), replace(FED, name="out", free=math.nan)
    asked(monkeypatch, wide=(RIGHT, FED, WRONG, other, lost), divergence=failing(quantity="loss"))
    told = explain(PLAIN)
    assert (told.quantity, told.edge) == ("layers.0.mid", MegalodonEdge.JAX64_ORACLE)
    assert told.culprit == WRONG and not told.holds
    assert told.also_broken == ("layers.1.mid",)
    assert told.carried == 2, "fed what was wrong already, or NaN"


def test_then_what_is_wrong_although_every_stage_is_right(monkeypatch):
    asked(monkeypatch, divergence=failing(quantity="loss"), narrow=(WRONG,))
    told = explain(PLAIN)
    assert (told.quantity, told.culprit) == ("loss", None)
    assert told.stages == (RIGHT,)


@pytest.mark.sweep
def test_then_a_stage_that_only_float32_shows(monkeypatch):
    asked(monkeypatch, narrow=(RIGHT, WRONG))
    told = explain(PLAIN)
    assert (told.quantity, told.edge) == ("layers.0.mid", MegalodonEdge.JAX32_ORACLE)


def test_what_holds_says_how_much_was_asked(monkeypatch):
    asked(monkeypatch, narrow=(RIGHT, replace(FED, free=0.0)))
    told = explain(PLAIN)
    assert told.holds and told.culprit is None
    assert "2 stages pass on their own" in told.meaning


MEANINGS = {
    "loss": "a result computed from the logits is wrong",
    "bar/layers.1.timenorm": "the operation that uses layers.1.timenorm is wrong",
    "grad/model.embed.weight": "only the gradient of this parameter",
}


@pytest.mark.parametrize("quantity", MEANINGS)
def test_what_a_wrong_derivative_means(quantity, monkeypatch):
    asked(monkeypatch, divergence=failing(quantity=quantity))
    assert MEANINGS[quantity] in explain(PLAIN).meaning


STEPS = {
    "step1/mu/embed": "first moment is wrong after one step. Either the gradient",
    "step1/nu/embed": "gradient is right: the second moment",
    "step1/drift/embed": "Both moments are right after one step",
    "step2/mu/embed": "The first step is right",
}


@pytest.mark.parametrize("quantity", STEPS)
def test_what_a_wrong_step_means(quantity, monkeypatch):
    asked(monkeypatch, divergence=failing(quantity=quantity))
    told = explain(by_name("adamw"))
    assert STEPS[quantity] in told.meaning
    assert told.stages == ()


def test_a_stream_without_a_wrong_stage_has_only_its_first_divergence(monkeypatch):
    asked(monkeypatch, wide=(WRONG,))
    monkeypatch.setattr("parity.megalodon.stream_lines.start", lambda case: None)
    assert explain(by_name("stream")) == Explanation(
        "stream", "jax64:oracle", meaning="the stream holds on jax64:oracle."
    )
    asked(monkeypatch, divergence=failing(quantity="state/layers.0.k", note="shape"))
    told = explain(by_name("stream"))
    assert (told.quantity, told.stages) == ("state/layers.0.k", ())
    assert (
        told.note == "shape; all stages of the examined calls are right if fed the oracle's values"
    )
    assert "all before the first wrong one are right" in told.meaning
