"""The torch side: every submodule is a stage, float64 means all of it, nothing is left behind."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from parity import SideError, TorchSide
from parity.engine.measure.measurement import Kind
from parity.engine.measure.metrics import relative_l2
from parity.port_tolerances import PortEdge
from parity.sides.side import OUTPUT, Precision, Rounding, Run, fields_of
from parity.sides.torch_side import _replaced
from parity.tolerances import rule
from tests.helpers import EXACT

WIDE = Run(Precision.FLOAT64)
X = np.random.default_rng(0).standard_normal((5, 8), np.float32)


@dataclass
class Both:
    first: torch.Tensor
    second: torch.Tensor | None = None


class Returns(torch.nn.Module):
    """Gives its input back in some structure."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.act = torch.nn.ReLU(inplace=True)
        self.pair, self.named = Returns(lambda x: (x, [2 * x])), Returns(lambda x: {"a": x, "n": 3})
        self.both = Returns(lambda x: Both(x))

    def forward(self, x, *, scale=1.0):
        x = self.down(self.act(self.up(x)))
        first, (second,) = self.pair(x)
        x = self.both(self.named(first + second)["a"]).first
        return {"logits": self.down(self.act(self.up(x))) * scale, "hidden": x}


def model():
    torch.manual_seed(0)
    return Model().eval()


def test_every_call_is_a_stage_by_path_field_and_count_and_no_bit_changes():
    module = model()
    trace = TorchSide(module, X, scale=2.0).run()
    assert list(trace.stages) == [
        *("up", "act", "down", "pair[0]", "pair[1][0]", "named.a", "both.first"),
        *("up#2", "act#2", "down#2", "output.logits", "output.hidden"),
    ]
    assert trace.outputs == ("output.logits", "output.hidden")
    with torch.no_grad():
        plain = module(torch.from_numpy(X), scale=2.0)
        up = module.up(torch.from_numpy(X)).numpy()
    assert np.array_equal(trace.stages["output.logits"], plain["logits"].numpy())
    # What is done in place further on does not reach a stage that was read before.
    assert np.array_equal(trace.stages["up"], up) and (up < 0).any()
    assert np.array_equal(trace.stages["act"], np.maximum(up, 0))


def after(module, stage, free):
    """What `Model` returns where a stage is ones, by the lines of it that follow."""
    ones = torch.ones_like(torch.from_numpy(free[stage]))
    if stage == "act#2":
        return module.down(ones)
    if stage == "down":
        ones = ones + 2 * ones
    elif stage == "pair[1][0]":
        ones = torch.from_numpy(free["down"]) + ones
    return module.down(torch.relu(module.up(ones)))


@pytest.mark.parametrize("how", [Run(), WIDE], ids=["float32", "float64"])
def test_a_forced_stage_is_what_follows_goes_on_from(how):
    module = model()
    side = TorchSide(module, X)
    free = side.run(how)
    dtype = torch.float64 if how is WIDE else torch.float32
    for stage in ("down", "pair[1][0]", "named.a", "both.first", "act#2"):
        forced = side.run(Run(how.precision, forced={stage: np.ones_like(free.stages[stage])}))
        assert np.array_equal(forced.stages[stage], free.stages[stage])
        before = list(free.stages)[: list(free.stages).index(stage)]
        assert all(np.array_equal(forced.stages[n], free.stages[n]) for n in before)
        with torch.no_grad():
            expected = after(module.to(dtype), stage, free.stages).numpy()
        module.float()
        # The same calls on the same numbers: equal bits, and other ones than without.
        assert np.array_equal(forced.stages["output.logits"], expected), stage
        assert not np.array_equal(expected, free.stages["output.logits"])


class Named(NamedTuple):
    one: torch.Tensor
    other: object


STRUCTURES = {
    "numbers as keys": lambda x: {0: x, 7: {1: x}},
    "digits as keys": lambda x: {"0": x, "a": {"12": x, "b3": x}},
    "named": lambda x: Named(x, (x, [x, Both(x, x)])),
    "ordered": lambda x: OrderedDict(a=x, b=None, c=3),
    "pairs": lambda x: [{"re": x.to(torch.complex64)}, x],
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_every_field_of_a_result_is_forced_by_its_name_and_no_other(make):
    """A name that reached no field would leave the free value, which the report called forced."""
    value = make(torch.ones(3))
    names = [n for n, x in fields_of(value, "out") if isinstance(x, torch.Tensor)]
    for name in names:
        pairs = (3, 2) if name.endswith("re") else (3,)
        forced = dict(fields_of(_replaced(value, name="out", by={name: np.zeros(pairs)}), "out"))
        assert list(forced) == [n for n, _ in fields_of(value, "out")]
        assert [n for n in names if not forced[n].any()] == [name]


class Casts(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.lin, self.function = torch.nn.Linear(8, 8), function

    def forward(self, x):
        return self.lin(self.function(x))


def _in_place(x):
    x = x.to(torch.bfloat16)
    x *= 3
    x[:, 0] = 1
    return x.float()


CASTS = {
    "float": (lambda x: x.double().float() / 3, lambda x: x / 3),
    "bfloat16": (lambda x: torch.exp(x.to(torch.bfloat16)).float(), torch.exp),
    "dtype argument": (
        lambda x: torch.softmax(x.half(), -1, dtype=torch.float32),
        lambda x: torch.softmax(x, -1),
    ),
    "in place": (
        _in_place,
        lambda x: torch.cat([torch.ones_like(x[:, :1]), 3 * x[:, 1:]], 1),
    ),
    "view": (lambda x: x.to(torch.bfloat16).view(4, 10).T.reshape(5, 8).float(), None),
    "made inside": (
        lambda x: x * torch.arange(8, dtype=torch.float32).mul(0.1).cos(),
        lambda x: x * torch.arange(8, dtype=torch.float64).mul(0.1).cos(),
    ),
}


@pytest.mark.parametrize("cast", CASTS)
def test_what_a_module_casts_to_less_is_float64_forward_and_backward(cast):
    function, exact = CASTS[cast]
    torch.manual_seed(1)
    module, x = Casts(function).eval(), X + np.float32(0.1)
    exact = exact or (lambda x: x.view(4, 10).T.reshape(5, 8))
    g = np.random.default_rng(1).standard_normal((5, 8), np.float32)
    run = TorchSide(module, x).run(Run(Precision.FLOAT64, cotangents={OUTPUT: g}))
    held = Casts(exact).double()
    held.load_state_dict(module.state_dict())
    expected = held(torch.from_numpy(x).double())
    expected.backward(torch.from_numpy(g).double())
    assert relative_l2(run.stages[OUTPUT], expected.detach().numpy()) <= EXACT
    gradient = held.lin.weight.grad.numpy()
    assert relative_l2(run.gradients["lin.weight"], gradient) <= EXACT
    # The module as it is does round: the agreement is the lift's.
    narrow = TorchSide(module, x).run().stages[OUTPUT]
    assert relative_l2(np.float64(narrow), run.stages[OUTPUT]) > EXACT


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    def forward(self, x):
        scores = self.norm(self.up(x))
        return torch.softmax(scores @ scores.T / 8, -1) @ x


class Elementwise(torch.nn.Module):
    """Sums nothing: each operation rounds its own result and no more."""

    def forward(self, x):
        return (torch.exp(x) / 3).sin() * x


class Particular(torch.nn.Module):
    """Refuses all but float32, and makes what it needs in the dtype that it is told."""

    def __init__(self, refused=(torch.float64,)):
        super().__init__()
        self.up, self.down, self.refused = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8), refused

    def forward(self, x):
        if x.dtype in self.refused or self.up.weight.dtype in self.refused:
            raise ValueError(f"expected float32, got {x.dtype}")
        x = self.up(x).to(x.dtype)
        x = torch.view_as_real(torch.fft.rfft(x, norm="ortho").to(torch.complex64)).flatten(1)
        x = x * torch.arange(14, dtype=x.dtype).mul(0.1).cos()
        return self.down(x[:, :12])


def test_a_module_that_refuses_float64_computes_in_it_unseen():
    torch.manual_seed(2)
    module = Particular().eval()
    side = TorchSide(module, X)
    open_to_all = copy.deepcopy(module)
    open_to_all.refused = ()
    # Whatever is made of the dtype it is told is made in float64 all the same.
    how = Run(Precision.FLOAT64, cotangents={OUTPUT: np.ones((5, 8), np.float32)})
    trace, exact = side.run(how), TorchSide(open_to_all, X).run(how)
    assert trace.stages.keys() == exact.stages.keys() >= {"up", "down"}
    assert all(relative_l2(a, exact.stages[n]) <= EXACT for n, a in trace.stages.items())
    assert all(relative_l2(a, exact.gradients[n]) <= EXACT for n, a in trace.gradients.items())
    assert trace.stages["up"].dtype == np.float64
    assert [n for n in trace.notices if "refuses float64" in n] and not exact.notices
    # What it is fed keeps its digits, too.
    share = 2.0**-40
    fed = {"up": exact.stages["up"] * (1 + share)}
    one, other = (s.run(Run(Precision.FLOAT64, forced=fed)) for s in (side, TorchSide(module, X)))
    assert share / 8 < relative_l2(one.stages[OUTPUT], exact.stages[OUTPUT]) < 8 * share
    assert np.array_equal(one.stages[OUTPUT], other.stages[OUTPUT])
    # In float32 and bfloat16 it is what it was, and what refuses anything says so itself.
    assert not side.run().notices
    with pytest.raises(SideError, match="expected float32, got"):
        TorchSide(Particular((torch.float64, torch.float32)), X).run(WIDE)


class Keeps(torch.nn.Module):
    """Turns in the plane, by numbers that it keeps in float32 whatever it is asked to be in."""

    def __init__(self):
        super().__init__()
        self.turn = torch.nn.Parameter(torch.linspace(0.1, 0.8, 8))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.turn.data = self.turn.data.float()
        return self

    def forward(self, x):
        return (torch.complex(self.turn.float().cos(), self.turn.float()) * x).abs()


def test_what_a_module_keeps_in_float32_has_derivatives_in_float64():
    module = Keeps()
    g = np.random.default_rng(3).standard_normal((5, 8), np.float32)
    run = TorchSide(module, X).run(Run(Precision.FLOAT64, cotangents={OUTPUT: g}))
    t, x = np.float64(module.turn.detach().numpy()), np.float64(X)
    # d/dt |x| sqrt(cos(t)^2 + t^2)
    slope = (t - np.sin(t) * np.cos(t)) / np.hypot(np.cos(t), t)
    assert relative_l2(run.gradients["turn"], (g * np.abs(x) * slope).sum(0)) <= EXACT
    assert module.turn.dtype == torch.float32


@pytest.mark.parametrize("kind", [Normed, Elementwise])
def test_a_module_responds_to_rounding_as_much_as_it_rounds(kind):
    torch.manual_seed(2)
    x = np.random.default_rng(2).standard_normal((24, 64), np.float32)
    side = TorchSide(kind().eval(), x)
    narrow, exact = side.run(), side.run(WIDE)
    moved = [side.run(Run(Precision.FLOAT64, Rounding.OPERATIONS, seed)) for seed in range(4)]
    for name, value in exact.stages.items():
        error = relative_l2(narrow.stages[name], value)
        response = np.sqrt(np.mean([relative_l2(m.stages[name], value) ** 2 for m in moved]))
        assert 0.7 <= response / error <= 10
    assert not np.array_equal(moved[0].stages[OUTPUT], moved[1].stages[OUTPUT])
    # No buffer: nothing that was made in float32 is left in a float64 run.
    tables = side.run(Run(Precision.FLOAT64, Rounding.CONSTANTS))
    assert np.array_equal(tables.stages[OUTPUT], exact.stages[OUTPUT])


def test_a_cast_to_bfloat16_is_not_excused_in_a_float32_module():
    torch.manual_seed(1)
    side = TorchSide(Casts(CASTS["bfloat16"][0]).eval(), X)
    exact = side.run(WIDE).stages[OUTPUT]
    error = relative_l2(side.run().stages[OUTPUT], exact)
    moved = side.run(Run(Precision.FLOAT64, Rounding.OPERATIONS)).stages[OUTPUT]
    factor = rule(PortEdge.ORIGINAL32_ORIGINAL64, Kind.BLOCK).noise_factor
    # bfloat16 rounds 2^16 times as coarsely: nothing near its error is left to float32's noise.
    assert factor * relative_l2(moved, exact) < error


def test_a_buffer_is_moved_with_the_constants_unless_both_sides_hold_it():
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(1.0, 9.0).sin())

        def forward(self, x):
            return x * self.table

    side = TorchSide(Table(), X)
    assert "table" in side.parameters()
    exact = side.run(WIDE).stages[OUTPUT]
    moved, shared = (
        side.run(Run(Precision.FLOAT64, Rounding.CONSTANTS, shared=names)).stages[OUTPUT]
        for names in (frozenset(), frozenset({"table"}))
    )
    assert 0 < relative_l2(moved, exact) <= np.finfo(np.float32).eps
    assert np.array_equal(shared, exact)


def test_a_module_is_left_as_it_was():
    module = model().train()
    state = {name: p.clone() for name, p in module.state_dict().items()}
    side = TorchSide(module, X)
    random, default = torch.get_rng_state(), torch.get_default_dtype()
    for precision in Precision:
        cotangents = {"output.logits": X}
        side.run(Run(precision, cotangents=cotangents))
    side.run(Run(Precision.FLOAT64, Rounding.OPERATIONS))
    side.run(Run(Precision.FLOAT64, Rounding.CONSTANTS))
    refused = TorchSide(module, X[:, :3])
    with pytest.raises(SideError):
        refused.run(WIDE)
    assert module.training and torch.get_default_dtype() is default
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks for m in module.modules())
    assert all(p.grad is None and p.dtype is torch.float32 for p in module.parameters())
    assert all(torch.equal(state[name], p) for name, p in module.state_dict().items())


def test_an_error_is_told_with_the_shape_and_dtype_of_the_inputs():
    wanted = r"torch side stops .*, with inputs 0 float32\[5, 3\]: RuntimeErr"
    with pytest.raises(SideError, match=wanted):
        TorchSide(model(), X[:, :3]).run()
    with pytest.raises(SideError, match=r"no output logits; there are output.logits"):
        TorchSide(model(), X).run(Run(cotangents={"logits": X}))
    with pytest.raises(SideError, match=r"no stage upp; there are up"):
        TorchSide(model(), X).run(Run(forced={"upp": X}))


def test_bfloat16_parameters_and_other_methods():
    module = model().to(torch.bfloat16)
    side = TorchSide(module, X, call=lambda m, x: m.up(x))
    trace = side.run()
    assert list(trace.stages) == ["up", OUTPUT]
    assert str(side.parameters()["up.weight"].dtype) == "bfloat16"
    # Held in bfloat16, computed in float32: the module itself stays what it is.
    assert trace.stages[OUTPUT].dtype == np.float32
    assert module.up.weight.dtype is torch.bfloat16
    assert str(side.run(Run(Precision.BFLOAT16)).stages[OUTPUT].dtype) == "bfloat16"


class Halves(torch.nn.Module):
    """Writes to what it is called with."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x, places):
        places += 1
        return x.mul_(0.5) * self.scale + places


def test_what_a_module_writes_to_its_inputs_reaches_no_other_run():
    x, places = np.ones(4, np.float32), np.arange(4)
    side = TorchSide(Halves(), x, places)
    outputs = [side.run(Run(precision)).stages["output"] for precision in Precision for _ in "ab"]
    for output in outputs:
        np.testing.assert_array_equal(output.astype(np.float64), 0.5 * 3.0 + np.arange(4) + 1)
    np.testing.assert_array_equal(side.inputs()["1"], np.arange(4))


def test_a_stage_inside_of_torch_func_is_named_as_not_seen():
    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.outside = torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.outside(torch.vmap(lambda row: self.inside(row).tanh())(x))

    torch.manual_seed(0)
    module = Rows()
    trace = TorchSide(module, X).run(WIDE)
    assert [*trace.stages] == ["outside", OUTPUT]
    assert trace.notices == ("results inside torch.func are not captured: inside",)
    one_by_one = module.double()(torch.from_numpy(X).double())
    assert relative_l2(trace.stages[OUTPUT], one_by_one.detach().numpy()) <= EXACT
    assert TorchSide(model(), X).run(WIDE).notices == ()


class Between(torch.nn.Module):
    """A submodule that returns what `store` makes of a product, and a result made from that."""

    def __init__(self, store: Any, result: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, generator=torch.manual_seed(0)))
        self.sub, self.result = torch.nn.Module(), result
        self.sub.forward = store

    def forward(self, x: Any) -> Any:
        return self.result(self.sub(x @ self.weight))


def nested(x: Any) -> Any:
    return torch.nested.as_nested_tensor([x[:1], x[1:]])


NEW = pytest.mark.filterwarnings("ignore:.*(prototype|beta):UserWarning")
"""Torch warns that its nested and CSR tensors may change."""


@NEW
@pytest.mark.parametrize(
    ("store", "result"),
    [
        (lambda x: x.to_sparse_csr(), lambda x: x.to_dense()),
        (nested, lambda x: torch.cat(x.unbind())),
        # A result is made dense; only between two modules the tensor is left out.
        (lambda x: x.to_sparse(), lambda x: x),
    ],
    ids=["csr", "nested", "sparse result"],
)
def test_tensors_that_are_not_dense_are_left_out_with_a_notice(store, result) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    net = Between(store, result)
    trace = TorchSide(net, x).run(Run(cotangents={"output": np.ones((3, 4), np.float32)}))
    assert trace.outputs == ("output",) and "sub" not in trace.stages
    np.testing.assert_array_equal(trace.stages["output"], (x @ net.weight).detach().numpy())
    np.testing.assert_array_equal(trace.gradients["weight"][:, 0], x.sum(0).numpy())
    assert "results that are no dense tensors are not captured: sub" in trace.notices


@NEW
def test_a_nested_result_is_refused_with_what_to_return() -> None:
    with pytest.raises(SideError, match=r"output, a nested tensor: return .*to_padded_tensor"):
        TorchSide(Between(lambda x: x, nested), torch.ones(3, 4)).run()


@pytest.mark.parametrize("given", [None, 1e-3])
def test_a_norm_without_epsilon_keeps_that_of_float32_in_float64(given):
    """torch's default is that of the dtype, so a wider run would be another program."""
    x = 1e-3 * torch.as_tensor(X)
    side = TorchSide(torch.nn.RMSNorm(8, eps=given), x)
    eps = torch.finfo(torch.float32).eps if given is None else given
    wanted = torch.nn.functional.rms_norm(x.double(), (8,), eps=eps)
    np.testing.assert_array_equal(side.run(WIDE).stages[OUTPUT], wanted.numpy())


class Recurrent(torch.nn.Module):
    """Adds its state of the last call, which it keeps in attributes."""

    def __init__(self, start=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 0.5))
        self.state = start
        self.total, self.seen, self.calls = torch.zeros(8), {}, 0

    def forward(self, x):
        y = self.weight * x + self.total * len(self.seen) * self.calls
        if self.state is not None:
            y = y + self.state
        self.state = y
        self.total += y.detach().sum(0)
        self.seen["last"] = y
        self.calls += 1
        self.note = "called"
        return y


@pytest.mark.parametrize("started", [False, True])
def test_every_run_begins_with_the_state_that_the_module_was_given_with(started: bool):
    start = torch.ones(8, requires_grad=True) * 2.0 if started else None
    inner = Recurrent(start)
    side = TorchSide(torch.nn.Sequential(inner), X)
    before = dict(vars(inner))
    cotangents = {OUTPUT: np.ones_like(X)}
    one, two = (side.run(Run(cotangents=cotangents)) for _ in range(2))
    assert np.array_equal(one.stages[OUTPUT], X * 0.5 + (2 if started else 0))
    assert np.array_equal(one.stages[OUTPUT], two.stages[OUTPUT])
    assert [*one.gradients] == [*two.gradients] == ["0.weight"]
    assert vars(inner) == before and inner.state is start
    assert not inner.seen and not inner.total.any()
    assert one.updated == two.updated == ("0.state", "0.total")


class Lazy(torch.nn.Module):
    """Makes its weight in its first call."""

    built = False

    def forward(self, x):
        if not self.built:
            self.weight, self.built = torch.nn.Parameter(torch.randn(8)), True
        return x * self.weight


def test_what_a_first_call_makes_stays_with_what_says_so():
    side = TorchSide(Lazy(), X)
    first = side.run().stages[OUTPUT]
    assert np.array_equal(side.run().stages[OUTPUT], first)


def test_a_weight_that_each_call_computes_again_is_no_state():
    with pytest.warns(FutureWarning, match="weight_norm"):
        module = torch.nn.utils.weight_norm(torch.nn.Linear(8, 8))
    side = TorchSide(torch.nn.Sequential(module), X)
    cotangents = {OUTPUT: np.ones((5, 8), np.float32)}
    for precision in (Precision.FLOAT32, Precision.FLOAT64):
        for _ in range(2):
            trace = side.run(Run(precision, cotangents=cotangents))
            assert {*trace.gradients} == {"0.bias", "0.weight_g", "0.weight_v"}
            assert not trace.updated


class Counts(torch.nn.Module):
    """Returns a count and a mask that it also keeps, and caches in a buffer that starts empty."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", None)
        self.register_buffer("mean", torch.zeros(8))
        self.mask = torch.zeros(8, dtype=torch.bool)

    def forward(self, x):
        self.count += 3
        self.mask |= True
        start = 0.0 if self.cache is None else self.cache
        self.cache = x * self.weight
        # In place, with a derivative: the buffer becomes a result of this call.
        self.mean += self.cache.mean(0)
        return self.cache + start + self.mean, self.count, self.mask


def test_results_are_what_the_call_returned_and_the_next_call_starts_anew():
    module = Counts()
    side = TorchSide(module, X)
    cotangents = {f"{OUTPUT}[0]": np.ones_like(X)}
    one, two = (side.run(Run(cotangents=cotangents)) for _ in range(2))
    for trace in (one, two):
        assert trace.exact[f"{OUTPUT}[1]"] == 3 and trace.exact[f"{OUTPUT}[2]"].all()
        assert np.array_equal(trace.stages[f"{OUTPUT}[0]"], one.stages[f"{OUTPUT}[0]"])
        assert {*trace.updated} == {"count", "cache", "mean", "mask"}
    assert module.cache is None and not module.count and not module.mask.any()
    assert module.mean.is_leaf and not module.mean.requires_grad and not module.mean.any()
    # The user's own backward pass works, too.
    module(torch.from_numpy(X))[0].sum().backward()
    assert module.weight.grad is not None


class Window(torch.nn.Module):
    """Writes its input to rows of a tensor that it holds, and returns the whole."""

    def __init__(self):
        super().__init__()
        self.weight, self.rows = torch.nn.Parameter(torch.ones(8)), torch.zeros(7, 8)

    def forward(self, x):
        self.rows[1:6] = x * self.weight
        return self.rows * 1.0


def test_what_is_written_to_an_attribute_is_there_in_every_precision():
    side = TorchSide(Window(), X)
    for precision in Precision:
        for _ in range(2):
            found = side.run(Run(precision)).stages[OUTPUT]
            assert not found[0].any() and found[1:6].any(1).all()
            if precision is Precision.FLOAT64:
                assert np.array_equal(found[1:6], X)


class Deep(torch.nn.Module):
    """Keeps states in containers inside containers, one of which holds itself."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.layers = OrderedDict(first=[torch.zeros(8), ({"calls": 0}, deque([1.0], 3))])
        self.names = defaultdict(set)
        self.layers["all"] = [self.layers]

    def forward(self, x):
        total, (counts, last) = self.layers["first"]
        y = self.weight * x + total + counts["calls"] + sum(last) + len(self.names["called"])
        total += x.sum(0)
        counts["calls"] += 1
        last.append(2.0)
        self.names["called"].add("once")
        self.layers["first"][0] = total * 2.0
        return y


def test_states_in_containers_of_containers_are_restored():
    module = Deep()
    side = TorchSide(module, X)
    runs = [side.run(Run(precision)) for precision in (*Precision, *Precision)]
    # The module adds the one number in the deque.
    assert np.array_equal(runs[0].stages[OUTPUT], X + 1)
    for one, two in zip(runs, runs[len(Precision) :], strict=False):
        assert np.array_equal(one.stages[OUTPUT], two.stages[OUTPUT])
    total, (counts, last) = module.layers["first"]
    assert not total.any() and counts == {"calls": 0} and [*last] == [1.0] and last.maxlen == 3
    assert module.layers["all"] == [module.layers] and not module.names


class Assigns(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x):
        self.calls = self.calls + 1.0
        return x + self.calls


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_buffer_that_torchscript_assigns_is_restored():
    inner = torch.jit.script(Assigns())
    side = TorchSide(torch.nn.Sequential(inner), X)
    one, two = side.run(), side.run()
    assert np.array_equal(one.stages[OUTPUT], X + 1) and one.updated == ("0.calls",)
    assert np.array_equal(two.stages[OUTPUT], one.stages[OUTPUT])
    assert not inner.calls.any()


class Holds(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held, self.weight = held, torch.nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        return x * self.weight


def test_a_module_that_holds_a_nested_tensor_runs_in_float64():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert np.array_equal(TorchSide(Holds(rows), X).run(WIDE).stages[OUTPUT], X * 0.5)


def test_a_module_that_cannot_be_copied_says_so():
    side = TorchSide(Holds(threading.Lock()), X)
    assert np.array_equal(side.run().stages[OUTPUT], X * np.float32(0.5))
    with pytest.raises(SideError, match=r"deepcopy of Holds fails, .*TypeError: .*lock"):
        side.run(WIDE)
