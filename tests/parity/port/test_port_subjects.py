"""The project's own models as anybody's ports: nothing is named, nothing is special-cased."""

from __future__ import annotations

import copy

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from parity.deepseek_v3 import cases as mla_moe
from parity.deepseek_v3 import reference
from parity.megalodon import cases as megalodon
from parity.megalodon.reference.installed import why_unavailable
from parity.port import Port, compare

pytestmark = pytest.mark.sweep


def mla_moe_port() -> Port:
    if reason := reference.why_unavailable():
        pytest.skip(reason)
    from parity.sides import EquinoxSide, TorchSide

    case = mla_moe.by_name("dense")
    ids = np.asarray(case.ids)
    positions = np.broadcast_to(np.arange(case.length, dtype=np.float32), ids.shape)
    original = TorchSide(
        reference._model(case.config.to_hf(), case.weights),
        ids,
        call=lambda m, i: {"loss": m(input_ids=i, labels=i, use_cache=False).loss},
    )
    port = EquinoxSide(
        case.model(),
        jnp.asarray(ids),
        positions,
        call=lambda m, i, x: {"loss": m.losses(i, x)[0]},
    )
    return Port("mla-moe", original, port, loss="output.loss")


def megalodon_port(change=lambda model: model):
    if reason := why_unavailable():
        pytest.skip(reason)
    from parity.megalodon.port import port

    return port(megalodon.by_name("plain"), change)


@pytest.mark.sweep
def test_mla_moe_holds_with_the_gradients_of_its_loss():
    report = compare(mla_moe_port())
    assert report.holds, report.text()
    assert report.matching.is_complete
    assert any(m.quantity.startswith("grad/") for m in report.measurements)


@pytest.mark.torch_ref
def test_a_wrong_epsilon_of_megalodon_is_found_where_it_is():
    def wrong(model):
        norm = copy.copy(model.model.layers[1].ffn.norm)
        object.__setattr__(norm, "eps", 2 * norm.eps)
        return eqx.tree_at(lambda m: m.model.layers[1].ffn.norm, model, norm)

    report = compare(megalodon_port(wrong))
    assert not report.holds
    assert report.culprit is not None
    assert report.culprit.name == "model.layers.1.ffn.norm"
