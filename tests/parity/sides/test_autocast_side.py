"""A torch module under autocast: floors of the dtypes that the program really used."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from parity import AutocastSide, Port, SideError, TorchSide, compare
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.sides.autocast_side import Shadows
from parity.sides.side import OUTPUT, Precision, Rounding, Run
from parity.sides.torch_lift import Lift

X = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 7, 16), np.float32))
MOVED = Run(Precision.FLOAT64, Rounding.OPERATIONS)
BF16_UNITS = 2.0**-8 / UNIT_ROUNDOFF
"""Unit roundoff of bfloat16, in that of float32."""


class Block(torch.nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.mix = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.act = torch.nn.Linear(16, 24), torch.nn.GELU()
        self.down = torch.nn.Linear(24, 16)

    def forward(self, x):
        n = self.norm(x)
        x = x + self.mix(n, n, n, need_weights=False)[0]
        return x + self.down(self.act(self.up(x)))


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block()).eval()


def compared(trained, deployed, autocast=torch.bfloat16):
    sides = TorchSide(trained, X), AutocastSide(deployed, X, autocast=autocast)
    return compare(Port("autocast", *sides, gradients=False, bfloat16=False))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_a_module_under_autocast_holds_with_the_error_of_its_dtype(trained, autocast):
    report = compared(trained, trained, autocast)
    assert report.holds, report.text()
    # It did run in the low precision, and that is no remark.
    errors = [m.value for m in report.measurements if m.edge == "port32:port64"]
    assert max(errors) > torch.finfo(autocast).eps / 4
    assert not any("float32 costs" in notice for notice in report.notices)


class Cast(torch.nn.Module):
    """A module whose result passes through another dtype."""

    def __init__(self, inner, dtype):
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x):
        result = self.inner(x)
        return result.to(self.dtype).to(result.dtype)


def other_epsilon(model):
    model[1].norm.eps = 1e-3


def cast_to_integers(model):
    model[1].norm = Cast(model[1].norm, torch.int8)


def other_activation(model):
    model[0].act = torch.nn.GELU("tanh")


BUGS = {other_epsilon: "1.norm", cast_to_integers: "1.mix[0]", other_activation: "0.act"}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_difference_that_is_not_rounding_is_named_with_its_stage(trained, bug):
    deployed = copy.deepcopy(trained)
    bug(deployed)
    report = compared(trained, deployed)
    assert not report.holds
    assert report.culprit is not None
    assert report.culprit.name == BUGS[bug]


class Disabled(torch.nn.Module):
    """A module that computes in float32 whatever the surroundings ask for."""

    def __init__(self, inner, enabled):
        super().__init__()
        self.inner, self.enabled = inner, enabled

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.inner(x)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_program_that_disables_autocast_is_not_compared_under_it(enabled):
    torch.manual_seed(5)
    inner = torch.nn.Linear(16, 8)
    report = compared(Disabled(inner, False), Disabled(copy.deepcopy(inner), enabled))
    assert report.holds is enabled, report.text()
    told = [m for m in report.measurements if "no operation ran in torch.bfloat16" in m.note]
    assert len(told) == (not enabled)


class OnlyInLowPrecision(torch.nn.Module):
    """A module that computes another function of what autocast made."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x):
        y = self.inner(x)
        return self.change(y) if y.dtype == torch.bfloat16 else y


CHANGES = {
    "scaled": lambda y: y * 100,
    "negative": lambda y: -y,
    "zero": lambda y: y * 0,
    "cut": torch.relu,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_only_the_low_precision_computes_differently_is_found(trained, change):
    """The float64 run does not show it, and it must not become its own noise floor."""
    deployed = copy.deepcopy(trained)
    deployed[1].down = OnlyInLowPrecision(deployed[1].down, CHANGES[change])
    assert not compared(trained, deployed).holds


@pytest.mark.parametrize("beside", [False, True])
def test_an_output_without_a_gate_in_the_low_precision_was_not_compared(beside: bool):
    """Each of them, also behind one that was compared."""

    class Angles(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x):
            # bfloat16 has no digit left of the fraction of such an angle.
            y = self.linear(x)
            angle = torch.sin(1e4 * y)
            return (y, angle) if beside else angle

    module = Angles().eval()
    report = compared(module, module)
    assert not report.holds
    assert "in this precision" in report.text()


class Everyday(torch.nn.Module):
    """Operations that write in place, through views, and to a counter."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept", torch.zeros(16))
        self.register_buffer("order", torch.arange(16).flip(0))

    def forward(self, x):
        self.calls += 1
        y = self.linear(x).clone()
        y[..., :3].mul_(3.0)
        y.view(-1)[::2] += 1.0
        self.kept.copy_(y.float().mean((0, 1)))
        first, second = y.chunk(2, dim=-1)
        mixed = torch.cat([second, first], -1).index_select(-1, self.order)
        return torch.where(self.order > 4, mixed, torch.exp(mixed) - 1) + self.kept


def test_shadows_that_nothing_moves_are_the_float64_run():
    module = Everyday().eval()
    exact = AutocastSide(module, X).run(Run(Precision.FLOAT64)).stages[OUTPUT]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Shadows(None) as shadows:
        result = module(X.clone())
    found = shadows.of(result)
    assert result.dtype != found.dtype == torch.float64
    np.testing.assert_array_equal(found.numpy(), exact)


def test_a_perturbed_run_is_the_float64_run_and_the_effect_of_rounding():
    side = AutocastSide(Everyday().eval(), X)
    exact, moved = side.run(Run(Precision.FLOAT64)), side.run(MOVED)
    assert moved.stages.keys() == exact.stages.keys()
    for name, value in exact.stages.items():
        error = np.abs(moved.stages[name] - value).max() / np.abs(value).max()
        # Rounding changes it, but not by as much as it is.
        assert UNIT_ROUNDOFF < error < 1, name
    assert side.module.calls == 0  # put back after each run


def test_what_is_written_through_a_view_is_in_the_shadow_of_the_whole():
    with torch.no_grad(), Shadows(0) as shadows:
        whole = X.clone()
        part = whole[:1]
        part.mul_(1.7)
    wanted = shadows.of(part)
    np.testing.assert_array_equal(shadows.of(whole)[:1].numpy(), wanted.numpy())
    assert not torch.equal(wanted, 1.7 * X[:1].double())  # moved


def test_an_operation_without_floating_operands_runs_once():
    module = Everyday().eval()
    with Shadows(0):
        module(X)
    assert module.calls == 1


def test_each_operation_is_moved_by_the_roundoff_of_the_dtype_that_it_used(monkeypatch):
    units = []
    kept = Lift.moved
    monkeypatch.setattr(Lift, "moved", lambda self, x, by: (units.append(by), kept(self, x, by))[1])
    x = X.clone()

    def moves(operation, *operands):
        units.clear()
        with torch.no_grad(), Shadows(0):
            operation(*operands)
        return units.copy()

    assert moves(torch.Tensor.bfloat16, x) == [BF16_UNITS]
    assert moves(torch.Tensor.float, x.bfloat16()) == []
    assert moves(torch.mul, x, x) == [1.0]
    assert moves(torch.mul, x.bfloat16(), x.bfloat16()) == [BF16_UNITS]
    assert moves(torch.exp, x) == [4.0]
    assert moves(torch.exp, x.bfloat16()) == [BF16_UNITS]
    assert moves(torch.relu, x.bfloat16()) == []
    assert moves(torch.Tensor.copy_, x.bfloat16(), x) == [BF16_UNITS]
    assert moves(torch.Tensor.copy_, x, x.bfloat16()) == []


def test_random_numbers_are_drawn_once():
    """A second draw would make the shadow another program's, with another mask."""
    with torch.no_grad(), Shadows(0) as shadows:
        dropped = torch.nn.functional.dropout(X + 10.0, 0.5)
    np.testing.assert_array_equal(shadows.of(dropped).numpy() == 0, dropped.numpy() == 0)
    assert 0 < int((dropped == 0).sum()) < X.numel()


def test_results_in_a_low_precision_are_returned_in_float32():
    side = AutocastSide(torch.nn.Sequential(torch.nn.Linear(16, 4)), X)
    side.run(MOVED)  # its shadows must not be read in the next run
    stages = side.run().stages
    assert {x.dtype for x in stages.values()} == {np.dtype(np.float32)}
    rounded = torch.from_numpy(stages[OUTPUT]).bfloat16().float()
    np.testing.assert_array_equal(rounded.numpy(), stages[OUTPUT])


def test_what_autocast_cannot_be_asked_for_is_refused():
    with pytest.raises(SideError, match=r"bfloat16 or torch\.float16 as autocast, got .*float32"):
        AutocastSide(torch.nn.Linear(16, 4), X, autocast=torch.float32)
    side = AutocastSide(torch.nn.Linear(16, 4), X)
    with pytest.raises(SideError, match="gradients=False"):
        side.run(Run(cotangents={OUTPUT: np.zeros((2, 7, 4))}))
    with pytest.raises(SideError, match="bfloat16=False"):
        side.run(Run(Precision.BFLOAT16))


def test_a_sum_is_moved_by_as_many_terms_as_it_has(monkeypatch):
    units = []
    kept = Lift.moved
    monkeypatch.setattr(Lift, "moved", lambda self, x, by: (units.append(by), kept(self, x, by))[1])
    functional = torch.nn.functional
    x = torch.rand(3, 4, 7, 2)
    # A norm is moved as by a sum over the last axis, however many elements it normalises together:
    # what moves its elements is all of its result's noise.
    zeros, ones = torch.zeros(4), torch.ones(4)
    for norm in (
        lambda: functional.layer_norm(x, (7, 2)),
        lambda: functional.group_norm(x, 2),
        lambda: functional.batch_norm(x, None, None, training=True),
        lambda: functional.batch_norm(x, zeros, ones),
    ):
        units.clear()
        with torch.no_grad(), Shadows(0):
            norm()
        assert units[0] == math.sqrt(1 + 2 / 11)
    for terms, operation in {
        24: lambda: functional.conv2d(x, torch.rand(5, 4, 3, 2)),
        60: lambda: functional.conv_transpose2d(x, torch.rand(4, 5, 5, 3)),
        30: lambda: functional.conv_transpose2d(x, torch.rand(4, 5, 5, 3), groups=2),
    }.items():
        units.clear()
        with torch.no_grad(), Shadows(0):
            operation()
        assert units[0] == math.sqrt(1 + terms / 11)
