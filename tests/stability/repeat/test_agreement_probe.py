"""A model's agreement with itself: in a batch, token by token, and what makes it red."""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from parity.engine.measure.measurement import Kind
from parity.megalodon.edges import MegalodonEdge
from parity.tasks import LanguageModel
from parity.tolerances import rule
from stability.core.findings import Severity
from stability.repeat import agreement
from stability.repeat.agreement import BATCH, STREAM, findings
from tests.helpers import TINY, model_of

IDS = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 2 * TINY.chunk_size + 3), np.int32)


@functools.cache
def model():
    return model_of(TINY)


def severities(found):
    return {finding.subject: finding.severity for finding in found}


def test_a_healthy_model_agrees_with_itself_up_to_rounding():
    found = findings(model(), IDS)
    assert severities(found) == {BATCH: Severity.OK, STREAM: Severity.OK}
    # Rounding only, and not nothing: a stream sums in another order.
    assert 0 < found[1].value < found[1].threshold
    assert found[0].threshold == found[1].threshold


def test_the_limit_is_that_of_two_runs_against_float64(monkeypatch):
    error = 0.25
    monkeypatch.setattr(agreement, "_wide", lambda model: lambda ids: scores(ids, error))
    monkeypatch.setattr(agreement, "_whole", lambda model: scores)
    monkeypatch.setattr(agreement, "_stepwise", lambda model: lambda ids: scores(ids, 0.0))
    known = rule(MegalodonEdge.JAX32_ORACLE, Kind.LOGITS)
    before, after = (
        LanguageModel("", lambda ids, by=by: scores(ids, by)).log_probabilities(IDS)
        for by in (error, 0.0)
    )
    own = np.abs(after - before)[np.maximum(after, before) >= math.log(1e-3)].max()
    for finding in findings(model(), IDS):
        assert finding.threshold == 2 * known.noise_factor * own


def scores(ids, by=0.0):
    """Logits of the next token after each; those of the last token of all rise by `by`."""
    table = np.random.default_rng(1).standard_normal((TINY.vocab_size, TINY.vocab_size))
    table[:, -1] += by
    return table[ids]


@pytest.mark.parametrize("alone", [False, True])
def test_a_scale_that_batches_have_and_single_rows_lack_is_an_error(monkeypatch, alone):
    """Whichever of them is wrong: its error against float64 must not become the limit."""
    whole = agreement._whole

    def scaled(model):
        run = whole(model)
        return lambda ids: run(ids) * (1 + 0.1 * ((len(ids) == 1) == alone))

    monkeypatch.setattr(agreement, "_whole", scaled)
    assert severities(findings(model(), IDS))[BATCH] is Severity.ERROR


def test_a_state_that_is_lost_between_tokens_is_an_error(monkeypatch):
    decode = agreement.decode_step
    fresh = agreement.init_cache

    def forgetful(model, cache, token):
        logits, after = decode(model, cache, token)
        return logits, fresh(model.config, len(token)) if int(after.position.max()) == 4 else after

    monkeypatch.setattr(agreement, "decode_step", forgetful)
    found = findings(model(), IDS)
    assert severities(found) == {BATCH: Severity.OK, STREAM: Severity.ERROR}
    assert "look for" in found[1].remedy


def test_a_model_that_answers_nan_is_an_error_and_no_crash():
    broken = eqx.tree_at(lambda m: m.model.norm.weight, model(), replace_fn=lambda x: x * jnp.nan)
    found = findings(broken, IDS)
    assert severities(found) == {BATCH: Severity.ERROR, STREAM: Severity.ERROR}
    assert all(math.isnan(finding.value) for finding in found)
    assert "NaN" in found[0].message


@pytest.mark.parametrize("subject", [BATCH, STREAM])
def test_an_error_of_its_own_without_a_bound_measures_nothing(monkeypatch, subject):
    def excluded(ids):
        logits = scores(ids)
        logits[..., -1] = -np.inf
        return logits

    monkeypatch.setattr(agreement, "_wide", lambda model: excluded)
    monkeypatch.setattr(agreement, "_whole", lambda model: scores)
    monkeypatch.setattr(agreement, "_stepwise", lambda model: lambda ids: scores(ids, 0.0))
    finding = next(f for f in findings(model(), IDS) if f.subject == subject)
    assert finding.severity is Severity.ERROR
    assert finding.message.startswith("not measured")
