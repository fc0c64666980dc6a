"""Comparisons that would agree although something was not compared."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch

from parity import FunctionSide, Port, PortError, SideError, TorchSide, compare
from parity.engine.measure.bounds import NoiseFloors
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.measurement import Verdict
from parity.port_tolerances import PORTS, PortEdge

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
FAST = {"bfloat16": False, "gradients": False}


class Two(torch.nn.Module):
    """Two layers, and a result of any kind made from theirs."""

    def __init__(self, result):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (torch.nn.Linear(8, 5) for _ in range(2))
        self.result = result

    def forward(self, x):
        return self.result(self.a(x), self.b(x))


def twin_of(original, result):
    params = {n: jnp.asarray(x.detach().numpy().copy()) for n, x in original.named_parameters()}

    def twin(params, x):
        a, b = (x @ params[f"{n}.weight"].T + params[f"{n}.bias"] for n in ("a", "b"))
        return result(a, b)

    return FunctionSide(twin, params, X)


def asked(theirs, ours, **how):
    original = Two(theirs)
    return compare(Port("two", TorchSide(original, X), twin_of(original, ours), **(FAST | how)))


def test_results_of_one_name_are_refused_in_both_libraries() -> None:
    def nested(a, b):
        return {"p": {"q": a}, "p.q": b}

    def flat(a, b):
        return {"p": a, "q": b}

    for theirs, ours in ((nested, flat), (flat, nested)):
        with pytest.raises(SideError, match=r"two results are both named output\.p\.q"):
            asked(theirs, ours)
    assert asked(flat, flat).holds


def test_parameters_of_one_name_are_refused() -> None:
    side = FunctionSide(lambda p, x: x * p["a"]["b"] + p["a.b"], {"a": {"b": X[0]}, "a.b": X[1]}, X)
    with pytest.raises(SideError, match=r"two parameters are both named a\.b"):
        side.parameters()


@pytest.mark.parametrize("swapped", [False, True])
def test_whole_numbers_are_keys_of_the_same_name_in_both_libraries(swapped: bool) -> None:
    def ours(a, b):
        return {0: b, 1: a} if swapped else {0: a, 1: b}

    assert asked(lambda a, b: {0: a, 1: b}, ours).holds is not swapped


class Shortened(torch.nn.Module):
    """An embedding that shortens its own rows when it is called."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(10, 8, max_norm=1.0 if how == "max_norm" else None)
        self.how = how

    def forward(self, ids):
        if self.how == "data":
            self.table.weight.data.clamp_(min=0)
        return self.table(ids)


@pytest.mark.parametrize("how", ["max_norm", "data", "unchanged"])
def test_a_port_that_shares_memory_is_not_changed_by_the_original_s_call(how: str) -> None:
    original, ids = Shortened(how), np.arange(6).reshape(2, 3)
    # The memory of the module itself, as `p.detach().numpy()` gives it.
    params = {"table": original.table.weight.detach().numpy()}
    before = params["table"].copy()
    ours = FunctionSide(lambda p, ids: p["table"][ids], params, ids)
    report = compare(Port("shared", TorchSide(original, ids), ours, **FAST))
    np.testing.assert_array_equal(params["table"], before)
    assert report.holds is (how == "unchanged")


def test_one_object_as_both_sides_is_refused() -> None:
    original = Two(lambda a, b: a + b)
    for sides in ([TorchSide(original, X)] * 2, [TorchSide(original, X) for _ in range(2)]):
        with pytest.raises(PortError, match="both sides are one object"):
            compare(Port("itself", *sides, **FAST))


class Runner:
    """It runs, and is no side all the same."""

    def run(self) -> None:
        raise AssertionError("not run")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1, 2], r"expected a parity\.Port, got a list of 2: compare one port at a time"),
        ((1, 2, 3), r"expected a parity\.Port, got a tuple of 3: compare one port at a time"),
        ("mlp", r"expected a parity\.Port, got a str"),
        ("module", r"expected a side as port=, such as parity\.TorchSide.*, got a Two"),
        ("runner", r"expected a side as port=, such as parity\.TorchSide.*, got a Runner"),
    ],
)
def test_what_is_no_port_of_two_sides_is_refused_in_words(
    given: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for users: in tests beartype refuses it before.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    if given in ("module", "runner"):
        module = Two(lambda a, b: a + b)
        port = module if given == "module" else Runner()
        given = Port("no side", TorchSide(module, X), port, **FAST)
    with pytest.raises(PortError, match=told):
        compare(given)


def test_a_bound_that_zeros_would_keep_is_no_gate() -> None:
    work = Work("w", "0", ("output",))

    def gate(bound: float, value: float = 0.5, dtype: str = "float64"):
        comparison = Comparison(
            work,
            PortEdge.PORT64_ORIGINAL64,
            NoiseFloors({}, PORTS),
            dtype,
            "cpu",
            largest_bound=1.0,
        )
        return comparison.gate("output", "rel_l2", value, bound)

    assert gate(0.99).verdict is Verdict.PASS
    assert gate(1.0).verdict is Verdict.NOT_COMPARABLE
    assert "by 1100% of its norm" in gate(11.0).note
    assert gate(1.0, dtype="float32").verdict is Verdict.INFO
    # NaN fails whatever the bound is.
    assert gate(11.0, float("nan")).verdict is Verdict.FAIL


def test_no_gate_of_float32_holds_where_no_digit_is_left() -> None:
    """Of the sine of 1e17 times a number float32 has no correct digit."""
    same = asked(
        lambda a, b: torch.sin((a + b) * 1e17),
        lambda a, b: jnp.sin((a + b) * 1e17),
    )
    loose = [m for m in same.measurements if "of its norm" in m.note]
    assert len(loose) > 2 and {m.verdict for m in loose} == {Verdict.INFO}


def test_stages_repeat_and_derivatives_are_not_said_to() -> None:
    report = asked(lambda a, b: a * b, lambda a, b: a * b, gradients=True)
    assert report.holds
    rows = [m for m in report.measurements if m.metric == "rel_l2"]
    assert {m.deterministic for m in rows if not m.quantity.startswith("grad/")} == {True}
    assert {m.deterministic for m in rows if m.quantity.startswith("grad/")} == {None}


@pytest.mark.parametrize("tied", [True, False])
def test_one_parameter_that_the_port_holds_twice_is_told(tied):
    """Equal in every result today; trained, the two copies go apart."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(7, 5)

        def forward(self, ids):
            return torch.tanh(self.table(ids)) @ self.table.weight.T

    torch.manual_seed(2)
    original, ids = Tied(), np.array([[3, 1, 6, 0], [2, 5, 4, 4]])
    table = original.table.weight.detach().numpy()
    params = {"table": table} if tied else {"table": table, "head": table.copy()}

    def function(params, ids):
        return jnp.tanh(params["table"][ids]) @ params.get("head", params["table"]).T

    sides = TorchSide(original, ids), FunctionSide(function, params, ids)
    report = compare(Port("tied", *sides, bfloat16=False))
    assert report.holds, report.text()
    told = [text for text in report.notices if "trained apart" in text]
    assert len(told) == (not tied)
    assert tied or "table, head" in told[0] or "head, table" in told[0]


@pytest.mark.parametrize("rows", [7, 4])
def test_one_parameter_that_the_port_holds_in_part_is_told(rows):
    """Rows that the inputs do not use are in no result, and the port may lack them."""
    torch.manual_seed(3)
    original, ids = torch.nn.Embedding(7, 5), np.array([[3, 1, 0], [2, 2, 1]])
    params = {"table": original.weight.detach().numpy()[:rows].copy()}
    port = FunctionSide(lambda params, ids: params["table"][ids], params, ids)
    report = compare(Port("part", TorchSide(original, ids), port, bfloat16=False))
    assert report.holds, report.text()
    told = [text for text in report.notices if "only a part" in text]
    assert len(told) == (rows < 7)
    assert rows == 7 or "the original's weight: 15 of its elements" in told[0]


@pytest.mark.parametrize("apart", [True, False])
def test_two_parameters_that_the_port_holds_as_one_are_told(apart):
    """Layers that are copies of one another are equal until they are trained."""
    torch.manual_seed(4)
    layer = torch.nn.Linear(8, 8)
    layers = [copy.deepcopy(layer), layer] if apart else [layer, layer]
    original = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    params = {n: jnp.asarray(x.detach().numpy().copy()) for n, x in layer.named_parameters()}

    def twin(params, x):
        x = jnp.tanh(x @ params["weight"].T + params["bias"])
        return x @ params["weight"].T + params["bias"]

    sides = TorchSide(original, X), FunctionSide(twin, params, X)
    report = compare(Port("one", *sides, bfloat16=False))
    assert report.holds, report.text()
    told = [text for text in report.notices if "trained apart in the original" in text]
    assert len(told) == 2 * apart
    assert not apart or all(f"{i}.{name}" in "".join(told) for i in (0, 2) for name in params)


ONLY_IN_BFLOAT16 = {
    "nothing": lambda y, p: y,
    "zeros": lambda y, p: y * 0,
    "another sign": lambda y, p: -y,
    "twice": lambda y, p: 2 * y,
    "no bias": lambda y, p: y - p["a.bias"] - p["b.bias"],
}


@pytest.mark.parametrize("name", ONLY_IN_BFLOAT16)
def test_another_function_in_bfloat16_is_no_rounding(name):
    """A branch on the dtype changes all runs in bfloat16 alike: it is in no noise floor."""
    with torch.no_grad():
        original = Two(lambda a, b: a + b)
        for layer in (original.a, original.b):
            layer.bias.add_(2.0)
    params = {n: jnp.asarray(x.detach().numpy().copy()) for n, x in original.named_parameters()}

    def twin(params, x):
        a, b = (x @ params[f"{n}.weight"].T + params[f"{n}.bias"] for n in ("a", "b"))
        y = a + b
        return ONLY_IN_BFLOAT16[name](y, params) if y.dtype == jnp.bfloat16 else y

    sides = TorchSide(original, X), FunctionSide(twin, params, X)
    report = compare(Port("narrow", *sides, gradients=False))
    assert report.holds == (name == "nothing"), report.text()
    gates = [m for m in report.measurements if m.edge == PortEdge.PORTBF16_PORT64]
    assert {m.verdict for m in gates if m.metric == "rel_l2"} == {
        Verdict.PASS if name == "nothing" else Verdict.FAIL
    }


@pytest.mark.parametrize(
    ("valid", "got"),
    [
        (np.where(np.arange(8) < 5, 0.0, -np.inf)[None], r"a ndarray float64 of shape \(1, 8\)"),
        (np.ones((6, 8), int), r"a ndarray int64 of shape \(6, 8\)"),
        (np.ones(6, bool), r"a ndarray bool of shape \(6,\)"),
    ],
)
def test_a_mask_that_is_not_of_bools_is_refused(valid, got):
    """An additive mask has 0 where a position counts."""
    original = Two(lambda a, b: a + b)
    sides = TorchSide(original, X), twin_of(original, lambda a, b: a + b)
    with pytest.raises(PortError, match=f"expected valid= as a NumPy array of bools.*got .*{got}"):
        compare(Port("masked", *sides, valid=valid, **FAST))
