"""Derivatives that are 0 or cancel to rounding: compared at the scale of the terms they sum.

A bias of keys shifts all scores of a query, which a softmax does not see; a shift of all logits is
invisible to a log-softmax, and a bias before an instance norm to the norm. Whether such a
derivative is 0 in float64 or 1e-17 is chance, by side and by seed.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import torch

from parity import FunctionSide, Port, Report, TorchSide, compare
from parity.engine.quantity import Quantity
from parity.port_tolerances import PortEdge

# So small that some sums cancel exactly, and others do not.
WIDTH, WORDS, LENGTH = 2, 5, 3
DEAD = 1e3
"""Threshold that no activation reaches."""
NONE = np.zeros(3, np.float32)
LEAK, LEAKY, DETACHED = np.diag(np.float32([1e-3, 1e-2, 1]))
"""Bugs of the port's derivatives: of the bias of keys, a share of what it sums; of a dead ReLU, a
slope; of the bias of values, none."""
ZERO = ("k.bias", "shift", "before")
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
    bias = p["v.bias"] - detached * _silent(p["v.bias"])
    x = p["embed.weight"][ids] + 0 * p["unused.weight"].sum()
    q, k, v = linear("q", x), linear("k", x), linear("v", x, bias)
    x = x + jax.nn.softmax(q @ k.mT * WIDTH**-0.5, -1) @ v + leak * _silent(p["k.bias"])
    low = linear("down", x) - DEAD
    x = x + jax.nn.relu(low) + slope * _silent(low) + p["before"]
    x = x - x.mean(1, keepdims=True)
    return jax.nn.log_softmax(x + p["shift"], -1)


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
@pytest.mark.parametrize(("bug", "name"), [(0, "k.bias"), (1, "down.bias"), (2, "v.bias")])
def test_a_bug_in_such_a_derivative_is_found(seed, bug, name):
    """A share of what should cancel; a slope where there is none; none where there is one."""
    report = report_of(seed, bug)
    assert not report.holds
    assert name in report.wrong_derivatives, report.text()
    edges = {m.edge for m in report.failures if m.quantity == Quantity.gradient(name)}
    assert edges == {PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32}
