"""What programs return, and what is told of the rest: nothing that differs goes unseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity import FunctionSide, Port, SideError, TorchSide, compare
from parity.engine.measure.measurement import Verdict
from parity.sides.side import Precision, Run
from tests.helpers import roundoff

WIDTH = 6
X = np.random.default_rng(2).standard_normal((4, WIDTH)).astype(np.float32)
FAST: dict[str, Any] = {"gradients": False, "bfloat16": False}


class Head(torch.nn.Module):
    """A linear map, and what `then` makes of it."""

    def __init__(self, then, **buffers) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.then = then
        for name, value in buffers.items():
            self.register_buffer(name, torch.as_tensor(value))

    def forward(self, x):
        return self.then(self, self.head(x))


def both(theirs, ours, given=X, how=FAST, **buffers):
    """The torch module, and the function `ours` of the same linear map, compared."""
    module = Head(theirs, **buffers)
    params = {"weight": module.head.weight.detach().numpy(), "bias": module.head.bias.detach()}
    side = FunctionSide(lambda p, x: ours(x @ p["weight"].T + p["bias"]), params, given)
    return compare(Port("returned", TorchSide(module, given), side, **how))


@dataclass
class Out:
    """Of this, JAX knows nothing."""

    y: object


RETURNED = {
    "the last operation is missing": (lambda m, y: y.softmax(-1), lambda y: y),
    "exchanged": (lambda m, y: (y, y.exp()), lambda y: (jnp.exp(y), y)),
    "transposed": (lambda m, y: y.T @ y @ y.T @ y + y[:1], lambda y: (y.T @ y @ y.T @ y + y[:1]).T),
    "in a dataclass": (lambda m, y: Out(y), lambda y: Out(3 * y)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_result_is_held_to_the_result_of_its_name(name):
    theirs, ours = RETURNED[name]
    report = both(theirs, ours)
    assert any(m.quantity.startswith("output") for m in report.failures), report.text()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda m, y: (y, y.exp()), lambda y: (y, jnp.exp(y))),
        (lambda m, y: Out(y), Out),
        (
            lambda m, y: y.masked_fill(torch.ones_like(y).tril() == 0, -torch.inf),
            lambda y: jnp.where(jnp.tril(jnp.ones_like(y)) == 0, -jnp.inf, y),
        ),
    ],
    ids=["two", "dataclass", "infinities"],
)
def test_what_returns_the_same_holds(theirs, ours):
    report = both(theirs, ours, how=FAST | {"masked_outputs": True})
    assert report.holds and not report.notices, report.text()


def test_a_table_that_the_port_does_not_use_is_told():
    table = X[:, 0].copy()
    report = both(lambda m, y: y, lambda y: y, unused=table)
    assert report.holds and "no parameter of the port holds the original's unused" in " ".join(
        report.notices
    )


def test_a_frozen_module_holds_and_says_that_no_derivative_was_compared():
    module = Head(lambda m, y: y).requires_grad_(False)
    params = {"weight": module.head.weight.numpy(), "bias": module.head.bias.numpy()}
    side = FunctionSide(lambda p, x: x @ p["weight"].T + p["bias"], params, X)
    report = compare(Port("frozen", TorchSide(module, X), side, bfloat16=False))
    assert report.holds
    assert report.notices == ("no derivative is compared: the original has no trained parameter",)


def test_a_program_that_returns_no_floats_is_refused():
    with pytest.raises(SideError, match="expected the module to return floating tensors"):
        both(lambda m, y: y.argmax(-1), lambda y: y)
    with pytest.raises(SideError, match="expected the function to return floating arrays"):
        both(lambda m, y: y, lambda y: y.argmax(-1))


def test_a_mask_of_zeros_and_ones_excuses_nothing():
    mask = np.tril(np.ones((4, WIDTH), np.float32))
    keep = torch.as_tensor(mask)

    def theirs(m, y):
        return torch.nn.functional.gelu(y) * m.mask - 1e4 * (1 - m.mask)

    def ours(y, tanh):
        return jax.nn.gelu(y, approximate=tanh) * mask - 1e4 * (1 - mask)

    assert both(theirs, lambda y: ours(y, False), mask=keep).holds
    report = both(theirs, lambda y: ours(y, True), mask=keep)
    # Tables are moved, and 1e4 times what moves a one would hide the other GELU.
    assert not report.holds
    gates = [m for m in report.measurements if m.verdict is not Verdict.INFO]
    # Were a one of the mask moved by a unit roundoff, a kept element would move by 1e4 of them.
    assert gates and all(m.tolerance < 1e4 * roundoff(1) for m in gates)


def test_a_module_that_keeps_writes_or_freezes_is_run_as_it_is():
    def kept(m, y):
        m.last = y.softmax(-1)
        m.seen += 1
        return y * m.turn.real + y.roll(1, -1) * m.turn.imag, m.seen

    turn = torch.polar(torch.tensor(1.0), torch.tensor(0.3))
    module = Head(kept, seen=torch.zeros(()), turn=turn)
    side = TorchSide(module.requires_grad_(False), X)
    narrow = side.run(Run(cotangents={"output[0]": np.ones_like(X)}))
    wide = side.run(Run(Precision.FLOAT64))
    # A complex table keeps its imaginary part, and the module its state.
    # The sums of a linear map with its bias, two products with the table and their sum.
    weight, bias = (np.abs(getattr(module.head, n).numpy()) for n in ("weight", "bias"))
    size = np.abs(X) @ weight.T + bias
    size = size * np.abs(turn.real.numpy()) + np.roll(size, -1, axis=1) * np.abs(turn.imag.numpy())
    off = np.abs(narrow.stages["output[0]"] - wide.stages["output[0]"])
    assert np.all(off <= roundoff(WIDTH + 4) * size)
    assert narrow.stages["output[1]"] == wide.stages["output[1]"] == 1 and module.seen == 0
    assert not any(g.any() for g in narrow.gradients.values())
