"""A comparison end to end: a healthy twin holds, and what is planted in it is found where it is."""

from __future__ import annotations

import copy
import importlib

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity import FunctionSide, Port, PortError, SideError, TorchSide, compare
from parity.engine.measure.measurement import Verdict
from parity.port.compare import FORCED
from parity.port_tolerances import PortEdge
from tests.helpers import EXACT
from tests.parity.port.twins import (
    IDS,
    LAYERS,
    Bug,
    equinox_side,
    flax_params,
    flax_side,
    nnx_side,
    original,
    torch_side,
)

FAST = {"gradients": False, "bfloat16": False}


def found(port, theirs=None, **how):
    return compare(Port("twin", torch_side() if theirs is None else theirs, port, **(FAST | how)))


def test_a_right_twin_holds_in_float32_and_bfloat16_with_its_gradients():
    report = found(flax_side(), gradients=True, bfloat16=True)
    assert report.holds, report.text()
    assert report.culprit is None and report.notices == ()
    assert {m.edge for m in report.measurements} == {
        PortEdge.PORT64_ORIGINAL64,
        PortEdge.PORT32_PORT64,
        PortEdge.ORIGINAL32_ORIGINAL64,
        PortEdge.PORT32_ORIGINAL32,
        PortEdge.PORTBF16_PORT64,
    }
    # Every parameter and every stage but the original's dropouts has its partner.
    assert len(report.matching.pairs) == len(list(original().parameters()))
    assert not report.alignment.unaligned_port
    assert all("drop" in name for name in report.alignment.unaligned_original)
    gates = [m for m in report.measurements if m.quantity.startswith("grad/")]
    gates = [m for m in gates if m.verdict is not Verdict.INFO]
    assert len({m.quantity for m in gates}) == len(report.matching.pairs)
    # It agrees because it is the same mathematics, not because nothing was asked of it.
    assert all(m.verdict is Verdict.PASS for m in gates)
    assert report.worst(PortEdge.PORT64_ORIGINAL64).value <= EXACT


@pytest.mark.parametrize(
    "side",
    [pytest.param(side, marks=pytest.mark.sweep) for side in (equinox_side, nnx_side)],
    ids=["equinox", "nnx"],
)
def test_the_same_twin_in_another_library_holds_and_shows_the_same_bug(side):
    report = found(side())
    assert report.holds, report.text()
    assert len(report.alignment.pairs) == len(found(flax_side()).alignment.pairs)
    wrong = found(side(Bug.SCALE))
    assert wrong.culprit is not None and wrong.culprit.name == "layers.1.attn.o"


STARTS = {
    Bug.EPS: "norm1",
    Bug.SCALE: "attn.o",
    Bug.MASK: "attn.o",
    Bug.GELU: "down",
    Bug.SWAP: "attn.o",
    Bug.BIAS: "attn.o",
    Bug.ROPE: "attn.o",
    Bug.RESIDUAL: "norm2",
    Bug.LOW_SOFTMAX: "attn.o",
}
"""The first named result that is wrong fed the right inputs."""
SOURCES = {
    Bug.EPS: "(normed)",
    Bug.SCALE: "(attended)",
    Bug.MASK: "(attended)",
    Bug.GELU: "(activated",
    Bug.ROPE: "(attended)",
}


QUICK = (Bug.SCALE, Bug.GELU, Bug.LOW_SOFTMAX)


@pytest.mark.parametrize(
    "bug",
    [b if b in QUICK else pytest.param(b, marks=pytest.mark.sweep) for b in STARTS],
    ids=[bug.name.lower() for bug in STARTS],
)
def test_a_bug_is_found_at_the_stage_it_is_in(bug):
    report = found(flax_side(bug))
    assert not report.holds
    assert report.culprit is not None and report.culprit.name == f"layers_1.{STARTS[bug]}"
    assert f"diverges at layers_1.{STARTS[bug]}" in report.sentence()
    assert f"(the original's layers.1.{STARTS[bug]})" in report.sentence()
    assert report.place.worst
    if bug in SOURCES:
        assert report.place.operation is not None
        assert SOURCES[bug] in report.place.operation.source[0]
    # What is before it is right, and a low precision inside of float32 is no other mathematics.
    failures = {m.quantity for m in report.failures}
    assert not any(name.startswith("layers_0") for name in failures)
    edges = {m.edge for m in report.failures}
    assert (PortEdge.PORT64_ORIGINAL64 in edges) == (bug is not Bug.LOW_SOFTMAX)


def test_a_wrong_derivative_is_found_though_every_stage_holds():
    report = found(flax_side(Bug.GRADIENT), gradients=True)
    assert not report.holds and report.culprit is None
    assert "every stage holds, derivatives do not" in report.sentence()
    failures = {m.quantity.removeprefix("grad/") for m in report.failures}
    # What is behind the activation has the right derivatives.
    assert {"layers_1.up.kernel", "layers_0.attn.q.kernel"} <= failures
    assert not {"layers_1.down.kernel", "head.kernel", "norm.scale"} & failures


def _kernel(params, layer, *path):
    place = params[f"layers_{layer}"]
    for key in path:
        place = place[key]
    return place


def _transposed(params):
    attention = _kernel(params, 1, "attn", "o")
    attention["kernel"] = np.ascontiguousarray(attention["kernel"].T)


def _not_converted(params):
    down = _kernel(params, 1, "down")
    down["kernel"] = np.random.default_rng(1).normal(size=down["kernel"].shape).astype(np.float32)


def _one_row(params):
    params["embed"]["embedding"][7] += 1e-3


def _exchanged(params):
    first, second = (_kernel(params, i, "up") for i in range(LAYERS))
    first["kernel"], second["kernel"] = second["kernel"], first["kernel"]


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (_not_converted, {"layers_1.down.kernel"}),
        (_one_row, {"embed.embedding"}),
    ],
    ids=["not converted", "one row"],
)
def test_weights_that_are_not_the_original_s_are_named(spoil, names):
    params = flax_params()
    spoil(params)
    report = found(flax_side(params=params))
    assert not report.holds
    sentence = report.sentence()
    assert "parameters" in sentence
    assert all(name in sentence for name in names)
    assert "layers_0.down.kernel" not in sentence


@pytest.mark.parametrize(
    ("spoil", "stage", "name"),
    [
        (_transposed, "layers_1.attn.o", "layers_1.attn.o.kernel"),
        pytest.param(_exchanged, "layers_0.up", "layers_0.up.kernel", marks=pytest.mark.sweep),
    ],
    ids=["transposed", "another layer's"],
)
def test_right_values_in_the_wrong_place_are_found_where_they_are_used(spoil, stage, name):
    params = flax_params()
    spoil(params)
    report = found(flax_side(params=params))
    assert report.culprit is not None and report.culprit.name == stage
    assert name in report.text()


def test_sides_that_share_no_parameter_are_refused():
    params = flax_params()
    rng = np.random.default_rng(5)

    def other(tree):
        if isinstance(tree, dict):
            return {name: other(x) for name, x in tree.items()}
        return rng.normal(size=tree.shape).astype(np.float32)

    with pytest.raises(PortError, match="share no parameter: give the port the original's weights"):
        found(flax_side(params=other(params)))


@pytest.mark.parametrize(("fresh", "holds"), [(0.0, False), (None, True)], ids=["fresh", "unused"])
def test_a_parameter_that_only_training_would_show_is_missed(fresh, holds):
    theirs = copy.deepcopy(original())
    theirs.extra = torch.nn.Parameter(torch.zeros(theirs.head.weight.shape[0]))
    if fresh is not None:
        theirs.head.bias = theirs.extra
    report = found(flax_side(), TorchSide(theirs, IDS), gradients=True)
    assert report.holds == holds
    # Every value agrees, and only the derivative says that something is not there.
    assert [m.metric for m in report.failures] == ["unmatched"] * (not holds)
    assert ("the port does not have: extra" in report.sentence()) == (not holds)


def test_without_derivatives_a_fresh_parameter_is_noticed_and_not_called_missing():
    theirs = copy.deepcopy(original())
    theirs.extra = torch.nn.Parameter(torch.zeros(theirs.head.weight.shape[0]))
    theirs.head.bias = theirs.extra
    report = found(flax_side(), TorchSide(theirs, IDS), gradients=False)
    assert report.holds
    assert "extra" in report.text()
    assert "does not have: extra" not in report.sentence()


def test_a_parameter_without_elements_is_listed_and_the_rest_is_compared():
    def function(params, x):
        return x @ params["kernel"] + params["adapter"].sum(0)

    x, kernel = np.random.default_rng(0).standard_normal((2, 3, 3), np.float32)
    params = {"kernel": kernel, "adapter": np.zeros((0, 3), np.float32)}
    sides = (FunctionSide(function, params, x) for _ in range(2))
    report = compare(Port("empty", *sides, bfloat16=False))
    assert report.holds
    assert "not compared: gradient adapter: nothing to compare" in report.text()


def test_other_inputs_are_refused_and_counted():
    ids = IDS.copy()
    ids[0, 3] = (ids[0, 3] + 1) % 7
    with pytest.raises(SideError, match="1 of 20 elements of input 0 of the torch side"):
        found(flax_side(ids=ids))


def test_an_error_of_a_side_is_told_with_its_line_and_inputs():
    ids = np.full_like(IDS, 99)
    wanted = (
        r"torch side stops in float32 at \S+\.py:\d+ \(.*forward\), with inputs 0 int64\[2, 10\]: "
    )
    with pytest.raises(SideError, match=wanted):
        found(flax_side(ids=ids), TorchSide(original(), ids))

    def wrong(params, ids):
        return jnp.sum(params["weight"][ids], axis=7)

    line = wrong.__code__.co_firstlineno + 1
    side = FunctionSide(wrong, {"weight": np.ones((9, 2), np.float32)}, IDS)
    wanted = (
        rf"function side stops in float32 at \S+\.py:{line} \(.*wrong\), with inputs .*: ValueError"
    )
    with pytest.raises(SideError, match=wanted):
        side.run()


def test_dropout_that_is_on_is_named_with_where_it_starts():
    random = copy.deepcopy(original())
    random.layers[1].drop.train()
    report = found(flax_side(), TorchSide(random, IDS))
    assert not report.holds
    sentence = report.sentence()
    assert "the original is not deterministic" in sentence
    assert "layers.1.drop" in sentence and "evaluation mode" in sentence


@pytest.mark.parametrize("bug", [Bug.NONE, Bug.EPS], ids=["healthy", "eps"])
def test_an_original_that_refuses_float64_is_held_stage_by_stage(bug):
    """What is rounded before a stage hides an epsilon in it; fed the original's values, less does.

    The whole program's float32 explains nearly all of it, and of the stage alone a third.
    """

    def float32_only(module, ids):
        # By its bytes: a dtype that is asked for is answered as the module wants it.
        if module.head.weight.element_size() > 4:
            raise ValueError("expected float32")
        return module(ids)

    report = found(flax_side(bug), TorchSide(original(), IDS, call=float32_only))
    forced = [m for m in report.measurements if m.metric == FORCED]
    assert {m.quantity for m in forced} == {stage.name for stage in report.place.stages}
    assert {m.edge for m in forced} == {PortEdge.ORIGINAL32_PORT64}
    assert any("does not run in float64" in notice for notice in report.notices)
    failing = [m.quantity for m in forced if m.verdict is not Verdict.PASS]
    if bug is Bug.NONE:
        assert report.holds and not failing
    else:
        assert failing == ["layers_1.norm1", "layers_1.norm2"]
        assert report.culprit is not None and report.culprit.name == "layers_1.norm1"


def test_bfloat16_in_the_original_is_the_original_s():
    """The twin of a model that rounds on purpose, without that: the port is not at fault."""

    class Rounding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

        def forward(self, x):
            return self.down(self.up(x).to(torch.bfloat16).float().tanh())

    torch.manual_seed(0)
    module = Rounding().eval()
    params = {n.replace(".", "_"): p.detach().numpy() for n, p in module.named_parameters()}
    x = np.random.default_rng(0).standard_normal((4, 8), np.float32)

    def twin(p, x):
        up = np_tanh(x @ p["up_weight"].T + p["up_bias"])
        return up @ p["down_weight"].T + p["down_bias"]

    report = found(FunctionSide(twin, params, x), TorchSide(module, x))
    edges = {m.edge for m in report.failures}
    assert edges == {PortEdge.ORIGINAL32_ORIGINAL64, PortEdge.PORT32_ORIGINAL32}


def np_tanh(x):
    import jax.numpy as jnp

    return jnp.tanh(x)


def test_rows_say_on_what_class_of_device_they_were_computed(monkeypatch):
    assert {row.device for row in found(flax_side()).measurements} == {"cpu"}
    # The package has a function of the same name as the module.
    module = importlib.import_module("parity.port.compare")
    monkeypatch.setattr(module, "device_kind", lambda: "cuda")
    assert {row.device for row in found(flax_side()).measurements} == {"cuda"}
