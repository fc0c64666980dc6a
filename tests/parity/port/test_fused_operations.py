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
        lines, first = inspect.getsourcelines(function)
        number = first + next(i for i, text in enumerate(lines) if line in text)
        [named] = [text for text in report.text().splitlines() if text.strip().startswith("> ")]
        assert named.split()[1] == str(number) and line in named


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
