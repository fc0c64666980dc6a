"""Derivatives that are 0 or cancel to rounding: compared at the scale of the terms they sum.

A bias of keys shifts all scores of a query, which a softmax does not see; a shift of all logits is
invisible to a log-softmax, and a bias before an instance norm to the norm. Whether such a
derivative is 0 in float64 or 1e-17 is chance, by side and by seed.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import torch

from parity import FunctionSide, Port, Report, TorchSide, compare
from parity.engine.measure.bounds import rule
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.quantity import Quantity, stage_kind
from parity.port.rounding_floors import Noise, PortBounds
from parity.port_tolerances import PORTS, PortEdge
from parity.sides.side import Rounding

# So small that some sums cancel exactly, and others do not.
WIDTH, WORDS, LENGTH = 2, 5, 3
DEAD = 1e3
"""Threshold that no activation reaches."""
NONE = np.zeros(3, np.float32)
LEAK, LEAKY, DETACHED = np.diag(np.float32([1e-3, 1e-2, 1]))
"""Bugs of the port's derivatives: of the bias of keys, a share of what it sums; of a dead ReLU, a
slope; of the bias of queries, none."""
ZERO = ("k.bias", "v.bias", "shift", "before")
"""Parameters whose derivatives cancel."""
SILENT = ("unused.weight", "down.weight", "down.bias")
"""Parameters whose derivatives are 0 without a sum."""


class Original(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.unused = torch.nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v, self.down = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shift = torch.nn.Parameter(torch.randn(()))
        self.before = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids):
        x = self.embed(ids)
        x = x if ids.max() < WORDS else self.unused(ids)
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = x + (q @ k.mT * WIDTH**-0.5).softmax(-1) @ v
        x = x + torch.relu(self.down(x) - DEAD) + self.before
        x = x - x.mean(1, keepdim=True)
        return (x + self.shift).log_softmax(-1)


def _silent(x: Any) -> Any:
    """Return zeros that have the derivative of `x`."""
    return x - jax.lax.stop_gradient(x)


def ported(p: Any, ids: Any, bug: Any) -> Any:
    def linear(name: str, x: Any, bias: Any = None) -> Any:
        bias = p[f"{name}.bias"] if bias is None else bias
        return x @ p[f"{name}.weight"].T + bias

    leak, slope, detached = bug
    bias = p["q.bias"] - detached * _silent(p["q.bias"])
    x = p["embed.weight"][ids] + 0 * p["unused.weight"].sum()
    q, k, v = linear("q", x, bias), linear("k", x), linear("v", x)
    x = x + jax.nn.softmax(q @ k.mT * WIDTH**-0.5, -1) @ v
    low = linear("down", x) - DEAD
    x = x + jax.nn.relu(low) + slope * _silent(low) + p["before"]
    x = x - x.mean(1, keepdims=True)
    return jax.nn.log_softmax(x + p["shift"] + leak * _silent(p["k.bias"]), -1)


@cache
def _side() -> FunctionSide:
    return FunctionSide(ported, {}, None)


@cache
def report_of(seed: int, bug: int | None = None) -> Report:
    """Return the comparison of a seed; all of them share what is compiled."""
    torch.manual_seed(seed)
    original = Original().eval()
    ids = np.random.default_rng(seed).permutation(WORDS)[None, :LENGTH].astype(np.int32)
    side = copy.copy(_side())
    side.params = {n: p.detach().numpy() for n, p in original.named_parameters()}
    side.arguments = ((ids, NONE if bug is None else (LEAK, LEAKY, DETACHED)[bug]), {})
    return compare(Port("cancelled", TorchSide(original, ids), side, bfloat16=False))


SEEDS = (4, 9, 11, 31, 0)
"""In all but the last a derivative is exactly 0 in float64 on both sides, or on one of them."""
SWEEP = [pytest.param(seed, marks=pytest.mark.sweep) for seed in range(40) if seed not in SEEDS]


@pytest.mark.parametrize("seed", [*SEEDS, *SWEEP])
def test_a_healthy_port_holds_whatever_cancels(seed):
    report = report_of(seed)
    assert report.holds, report.text()
    entries = {e.name: e for e in report.ledger if e.role == "gradient"}
    # A derivative that is 0 on both sides without a sum is no comparison.
    assert all("0 everywhere on both sides" in entries[name].reason for name in SILENT)
    # One that cancels is, unless it is exactly 0 on both sides.
    notes = {m.quantity: m.note for m in report.measurements if m.metric == "rel_l2"}
    for name in ZERO:
        compared = entries[name].compared
        assert ("terms that cancel" in notes[Quantity.gradient(name)]) == compared
    others = entries.keys() - {*ZERO, *SILENT}
    assert all(entries[n].compared and not notes[Quantity.gradient(n)] for n in others)


@pytest.mark.parametrize("seed", [4, pytest.param(31, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("bug", "name"), [(0, "k.bias"), (1, "down.weight"), (2, "q.bias")])
def test_a_bug_in_such_a_derivative_is_found(seed, bug, name):
    """A share of what should cancel; a slope where there is none; none where there is one."""
    report = report_of(seed, bug)
    assert not report.holds
    assert name in report.wrong_derivatives, report.text()
    edges = {m.edge for m in report.failures if m.quantity == Quantity.gradient(name)}
    assert edges == {PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32}


class Scores(torch.nn.Module):
    """Attention with fresh biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.nn.Linear(6, 6) for _ in range(3))
        for each in (self.k, self.v):
            torch.nn.init.zeros_(each.bias)

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


def scored(p: Any, x: Any) -> Any:
    q = x @ p["q.weight"].T + p["q.bias"]
    v = x @ p["v.weight"].T + p.get("v.bias", 0)
    return jax.nn.softmax(q @ (x @ p["k.weight"].T).mT, -1) @ v


@pytest.mark.parametrize("lost", [(), ("v.bias",)])
def test_a_port_may_lack_a_bias_whose_derivative_is_rounding(lost):
    """Training moves it by rounding alone; a bias of values it moves for good."""
    original = Scores()
    x = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
    lacking = ("k.bias", *lost)
    params = {n: p.detach().numpy() for n, p in original.named_parameters() if n not in lacking}
    sides = TorchSide(original, x), FunctionSide(scored, params, x)
    report = compare(Port("scores", *sides, bfloat16=False))
    noted = [m.note for m in report.failures]
    assert noted == [f"the original's that the port does not have: {name}" for name in lost]
    assert any("k.bias" in notice for notice in report.notices)


# Bounds


def noise(norm: float, response: float) -> Noise:
    quantity = Quantity.gradient("x")
    return Noise({quantity: norm}, {Rounding.OPERATIONS: {quantity: response}})


UNITS = 2.0**-24
"""Response of terms of norm 1."""


@pytest.mark.parametrize("theirs", [0.0, 1e-17])
@pytest.mark.parametrize("ours", [0.0, 1e-17])
def test_chance_of_an_exact_zero_changes_no_bound(theirs, ours):
    """Whichever side is exactly 0 in float64, errors are relative to the terms of both."""
    bounds = PortBounds.of(noise(theirs, UNITS), noise(ours, UNITS))
    quantity, work = Quantity.gradient("x"), Work("port", "hash", ())
    edges = {
        PortEdge.PORT64_ORIGINAL64: (2**0.5, 2.0**-53),
        PortEdge.PORT32_ORIGINAL32: (2**0.5, 2.0**-24),
        PortEdge.PORT32_PORT64: (1.0, 2.0**-24),
        PortEdge.ORIGINAL32_ORIGINAL64: (1.0, 2.0**-24),
    }
    for edge, (scale, unit) in edges.items():
        assert bounds.scales[edge][quantity] == pytest.approx(scale)
        row = rule(PORTS, edge, Kind.GRADIENT) or pytest.fail()
        factor = row.noise_factor or 8
        assert bounds.bound(edge, Kind.GRADIENT, work, quantity) == pytest.approx(factor * unit)


def test_a_derivative_that_is_no_rounding_is_relative_to_itself():
    """Also where most of it cancels: it is rounding only where float64 cannot tell it from 0."""
    quantity = Quantity.gradient("x")
    for norm, cancels in ((1.0, False), (1e-6, False), (20 * 2.0**-53, False), (2.0**-52, True)):
        both = noise(norm, UNITS)
        bounds = PortBounds.of(both, both)
        assert both.is_rounding(quantity) == cancels
        for edge in (PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32):
            assert (quantity in bounds.cancelled[edge]) == cancels
            assert (bounds.scales[edge][quantity] == norm) != cancels


def test_what_sums_nothing_has_no_tolerance():
    bounds = PortBounds.of(noise(0.0, 0.0), noise(0.0, 0.0))
    quantity, work = Quantity.gradient("x"), Work("port", "hash", ())
    for edge in bounds.floors:
        comparison = Comparison(
            work, edge, bounds, edge.dtype, kinds=stage_kind, scales=bounds.scales[edge]
        )
        for value, verdict in ((0.0, Verdict.PASS), (1e-30, Verdict.FAIL)):
            sides = ({quantity: np.full(3, x, edge.dtype)} for x in (value, 0.0))
            row = comparison.run(*sides)[0]
            assert row.verdict is verdict


def test_terms_of_no_number_leave_no_bound():
    bounds = PortBounds.of(noise(0.0, UNITS), noise(0.0, math.nan))
    edge, quantity = PortEdge.PORT64_ORIGINAL64, Quantity.gradient("x")
    assert math.isfinite(bounds.scales[edge][quantity])
    assert math.isnan(bounds.bound(edge, Kind.GRADIENT, Work("port", "hash", ()), quantity))


def test_logits_that_cancel_flip_at_margins_of_their_own_size():
    """The bound is relative to terms of norm 1e17 times the logits, the margin to the logits."""
    edge = PortEdge.PORT32_ORIGINAL32
    bounds = PortBounds(
        {edge: {"logits": UNITS}}, {edge: {"logits": 1.0}}, {edge: frozenset({"logits"})}
    )
    work = Work("port", "hash", ("logits",))
    comparison = Comparison(
        work, edge, bounds, "float32", kinds=stage_kind, scales=bounds.scales[edge]
    )
    logits = np.float32([[1e-17, -1e-17, 0.0]])
    rows = {m.metric: m for m in comparison.run({"logits": -logits}, {"logits": logits})}
    assert rows["rel_l2"].verdict is rows["top1_flips"].verdict is Verdict.PASS
