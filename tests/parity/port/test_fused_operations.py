"""A fused operation of the original is compared step by step: the line named is where they part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity import FunctionSide, Port, TorchSide, compare

WIDTH = 16
X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)


class Normed(torch.nn.Module):
    """A LayerNorm, which torch computes in one operation, and a map behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, eps=1e-3)
        self.map = torch.nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(self.norm(x))


def twin(eps: float, ddof: int) -> Callable[..., Any]:
    """The same in steps."""

    def port(params: Any, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        squares = jnp.sum(jnp.square(x - mean), axis=-1, keepdims=True)
        variance = squares / (WIDTH - ddof)
        widened = variance + eps
        y = (x - mean) * jax.lax.rsqrt(widened)
        y = y * params["norm"]["weight"] + params["norm"]["bias"]
        return y @ params["map"]["weight"].T + params["map"]["bias"]

    return port


@pytest.mark.parametrize(
    ("eps", "ddof", "line"),
    [(1e-3, 0, ""), (1e-5, 0, "widened = variance"), (1e-3, 1, "variance = squares")],
)
def test_the_line_of_a_wrong_step_of_a_norm_is_named(eps: float, ddof: int, line: str) -> None:
    """The right variance before a wrong epsilon is not what the original does not do."""
    torch.manual_seed(0)
    module, params = Normed(), {"norm": {}, "map": {}}
    with torch.no_grad():
        module.norm.weight.normal_()
        module.norm.bias.normal_()
    for name, value in module.named_parameters():
        part, leaf = name.split(".")
        params[part][leaf] = value.detach().numpy()
    function = twin(eps, ddof)
    sides = TorchSide(module, X), FunctionSide(function, params, X)
    report = compare(Port("norm", *sides, gradients=False, bfloat16=False))
    assert report.holds == (not line)
    if line:
        assert _named_line(report.text()) == _line_of(function, line)


def _line_of(function: Callable[..., Any], line: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, text in enumerate(lines) if line in text)


def _named_line(report: str) -> int:
    """Return the number of the first line of source that a report points at."""
    return next(int(text.split()[1]) for text in report.splitlines() if text.strip()[:2] == "> ")


HEADS, GROUPS, LENGTH = 4, 2, 6
ROWS = np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)
EACH = WIDTH // HEADS


class Attention(torch.nn.Module):
    """Causal attention with two heads per key, which torch computes in one function."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.q = torch.nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (torch.nn.Linear(WIDTH, GROUPS * EACH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, EACH)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attend = torch.nn.functional.scaled_dot_product_attention
        y = attend(q, key=k, value=v, is_causal=True, scale=self.scale, enable_gqa=True)
        return y.transpose(1, 2).reshape(x.shape)


def attention_twin(scale: float, seen: int = 0) -> Callable[..., Any]:
    """The same in steps; `seen` is the number of later tokens that are visible."""

    def port(params: Any, x: jax.Array) -> jax.Array:
        q, k, v = (
            (x @ params[n]["weight"].T + params[n]["bias"]).reshape(2, LENGTH, -1, EACH)
            for n in ("q", "k", "v")
        )
        k, v = (jnp.repeat(y, HEADS // GROUPS, axis=2) for y in (k, v))
        product = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = product * scale
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool), seen)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)

    return port


@pytest.mark.parametrize(
    ("scale", "seen", "line"),
    [
        (EACH**-0.5, 0, ""),
        (1 / EACH, 0, "scores = product * scale"),
        (EACH**-0.5, 1, "mask = jnp.tril"),
    ],
)
def test_the_line_of_a_wrong_step_of_attention_is_named(scale: float, seen: int, line: str) -> None:
    """torch never computes the product of queries and keys without a part of the scale."""
    torch.manual_seed(0)
    module, function = Attention(), attention_twin(scale, seen)
    params = {
        name: {leaf: x.detach().numpy() for leaf, x in part.named_parameters()}
        for name, part in module.named_children()
    }
    sides = TorchSide(module, ROWS), FunctionSide(function, params, ROWS)
    report = compare(Port("attention", *sides, gradients=False, bfloat16=False))
    assert report.holds == (not line)
    if line:
        assert _named_line(report.text()) == _line_of(function, line)


def test_steps_of_an_operation_in_place_are_those_before_it_writes() -> None:
    class Moved(torch.nn.Module):
        def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return x.clone().addcdiv_(a, b, value=-0.5)

    x, a, b = (np.random.default_rng(seed).uniform(1, 2, size=(3, 5)) for seed in range(3))
    results = TorchSide(Moved(), x, a, b).operation_results()
    assert any(r.shape == x.shape and np.allclose(r, a / b, rtol=0, atol=0) for r in results)
    np.testing.assert_array_equal(results[-1], x - 0.5 * (a / b))


def test_operations_are_listed_without_training_the_original() -> None:
    """The steps of a batch norm in training write its running statistics, as the norm does."""
    side = TorchSide(torch.nn.BatchNorm1d(WIDTH).train(), X)
    first, second = side.operation_results(), side.operation_results()
    assert len(first) == len(second) > 3
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
