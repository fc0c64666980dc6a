"""The line of a bug inside of a scan, and of one before a mark that the original does not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

from parity import FunctionSide, Port, TorchSide, compare
from parity.engine.programs import evaluation

WIDTH, HIDDEN, LAYERS = 6, 5, 3
X = np.random.default_rng(0).normal(size=(2, 4, WIDTH)).astype(np.float32)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(WIDTH, HIDDEN, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


def recurrent(bug: str = "") -> Callable[..., Any]:
    def port(params: Any, x: jax.Array) -> jax.Array:
        p = params["cell"]

        def step(carry: Any, row: jax.Array) -> Any:
            h, c = carry
            z = row @ p["weight_ih_l0"].T + h @ p["weight_hh_l0"].T
            i, f, g, o = jnp.split(z + p["bias_ih_l0"] + p["bias_hh_l0"], 4, -1)
            forget = jax.nn.sigmoid(f + (1.0 if bug == "forget" else 0.0))
            candidate = g if bug == "candidate" else jnp.tanh(g)
            c = forget * c + jax.nn.sigmoid(i) * candidate
            return ((h := jax.nn.sigmoid(o) * jnp.tanh(c)), c), h

        zero = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
        _, h = jax.lax.scan(step, (zero, zero), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(h, 0, 1)

    return port


class Settled(torch.nn.Module):
    """Repeats a layer until its result settles; the sign of the input chooses the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x) if x.sum() < 0 else torch.sin(x)
        for _ in range(LAYERS):
            h = torch.tanh(0.5 * self.cell(h) + x)
        return h


def settled(bug: str = "") -> Callable[..., Any]:
    def port(params: Any, x: jax.Array) -> jax.Array:
        p = params["cell"]

        def layer(state: Any) -> Any:
            turn, h = state
            if bug == "choice in a loop":
                return turn + 1, jax.lax.cond(turn == 1, wrong, right, h)
            product = h @ p["weight"].T + p["bias"]
            scaled = (0.6 if bug == "loop" else 0.5) * product
            return turn + 1, jnp.tanh(scaled + x)

        def right(h: jax.Array) -> jax.Array:
            return jnp.tanh(0.5 * (h @ p["weight"].T + p["bias"]) + x)

        def wrong(h: jax.Array) -> jax.Array:
            shifted = 0.5 * (h @ p["weight"].T + p["bias"]) + 1.01 * x
            return jnp.tanh(shifted)

        def other(x: jax.Array) -> jax.Array:
            doubled = (1.01 if bug == "choice" else 1.0) * x
            return jnp.sin(doubled)

        h = jax.lax.cond(x.sum() < 0, jnp.tanh, other, x)
        h = checkpoint_name(h, "start") if bug != "choice" else h
        return jax.lax.while_loop(lambda s: s[0] < LAYERS, layer, (0, h))[1]

    return port


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stacked(bug: str = "") -> Callable[..., Any]:
    def port(params: Any, x: jax.Array) -> jax.Array:
        layers = [params["layers"][str(i)] for i in range(LAYERS)]

        def layer(h: jax.Array, at: Any) -> Any:
            p, number = at
            u = jnp.tanh(h @ p["up"]["weight"].T + p["up"]["bias"])
            v = u @ p["down"]["weight"].T
            scale = jnp.where(number == 1, 1.01, 1.0) if bug == "bias" else 1.0
            v = v + scale * p["down"]["bias"]
            return checkpoint_name(h + v, "h"), None

        stack = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        return jax.lax.scan(layer, x, (stack, jnp.arange(LAYERS)))[0]

    return port


def _compared(module: torch.nn.Module, function: Callable[..., Any]) -> Any:
    params: dict[str, Any] = {}
    for name, value in module.named_parameters():
        *path, leaf = name.split(".")
        place = params
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = value.detach().numpy()
    sides = TorchSide(module, X), FunctionSide(function, params, X)
    return compare(Port("loop", *sides, gradients=False, bfloat16=False))


CASES = {
    "forget": (Recurrent, recurrent, "forget = jax.nn.sigmoid", "output"),
    "candidate": (Recurrent, recurrent, "c = forget * c", "output"),
    "bias": (Deep, stacked, "v = v + scale", "h@1"),
    "loop": (Settled, settled, "scaled = ", "output"),
    "choice": (Settled, settled, "doubled = ", "output"),
    "choice in a loop": (Settled, settled, "shifted = ", "output"),
}
FRAMES = {"bias": "layer", "loop": "layer", "choice": "other", "choice in a loop": "wrong"}


@pytest.mark.parametrize("bug", CASES)
def test_the_line_inside_of_a_loop_is_named(bug: str, monkeypatch) -> None:
    torch.manual_seed(0)
    module, port, line, stage = CASES[bug]
    original = module()
    assert _compared(original, port()).holds
    function = port(bug)
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, text in enumerate(lines) if line in text)
    report = _compared(original, function)
    assert f"diverges at {stage}" in report.text()
    inner = FRAMES.get(bug, "step")
    assert report.sentence().endswith(f"({function.__qualname__}.<locals>.{inner})")
    assert f"{__name__.rpartition('.')[2]}.py:{number} " in report.sentence()
    # A loop with more operations is compared as one: its call is named.
    monkeypatch.setattr(evaluation, "UNROLLED", 0)
    found = f".py:{number} " in _compared(original, function).sentence()
    assert found == (bug == "choice")


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not a call of the module, so that the port's mark of its result has no partner.
        second = self.second.weight, self.second.bias
        return torch.sin(1.5 * torch.nn.functional.linear(torch.tanh(self.first(x)), *second))


def twice(bug: str = "") -> Callable[..., Any]:
    def port(params: Any, x: jax.Array) -> jax.Array:
        first, second = params["first"], params["second"]
        x = checkpoint_name(x @ first["weight"].T + first["bias"], "first")
        product = jnp.tanh(x) @ second["weight"].T
        bias = second["bias"] * 1.01 if bug == "factor" else second["bias"]
        shifted = product - bias if bug == "sign" else product + bias
        if bug == "factor":
            shifted = jnp.concatenate([shifted, jnp.cos(shifted)])
        both = checkpoint_name(shifted, "the port's own")
        return jnp.sin(1.5 * both[: len(x)])

    return port


@pytest.mark.parametrize(("bug", "line"), [("factor", "bias = "), ("sign", "shifted = ")])
def test_a_mark_without_a_partner_hides_nothing_before_it(bug: str, line: str) -> None:
    """It is not fed the original's value, so that what follows it is not where the bug is."""
    torch.manual_seed(0)
    original = Twice()
    assert _compared(original, twice()).holds
    function = twice(bug)
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, text in enumerate(lines) if line in text)
    told = _compared(original, function)
    assert "diverges at output" in told.sentence() and f".py:{number} " in told.sentence()


class Padded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def padded(bug: str = "") -> Callable[..., Any]:
    def port(params: Any, x: jax.Array) -> jax.Array:
        kernel = jnp.transpose(params["conv"]["weight"], (2, 1, 0))
        sides = (0, 2) if bug else (1, 1)
        dimensions = ("NCH", "HIO", "NCH")
        y = jax.lax.conv_general_dilated(x, kernel, (2,), [sides], dimension_numbers=dimensions)
        return y + params["conv"]["bias"][:, None]

    return port


def test_a_parameter_in_another_layout_is_not_what_the_original_does_not_do() -> None:
    torch.manual_seed(0)
    original = Padded()
    assert _compared(original, padded()).holds
    function = padded("sides")
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, text in enumerate(lines) if "conv_general" in text)
    assert f".py:{number} " in _compared(original, function).sentence()
