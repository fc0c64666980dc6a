"""A square kernel loaded untransposed is named where the difference starts at its use."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name as mark

from parity import FunctionSide, Port, TorchSide, compare

SIZE = 8


def made(untransposed: str = "", symmetric: bool = False, bias: float = 1.0, wide: int = SIZE):
    """Return a port of two layers; one kernel is planted untransposed, or the last bias is off."""
    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(SIZE, wide), "down": torch.nn.Linear(wide, SIZE)}
    module = torch.nn.Sequential()
    for name, layer in layers.items():
        module.add_module(name, layer)
    if symmetric:
        with torch.no_grad():
            weight = layers["down"].weight
            weight.add_(weight.T.clone())

    def forward(p, x):
        x = mark(x @ p["up"]["kernel"] + p["up"]["bias"], "up")
        return mark(x @ p["down"]["kernel"] + bias * p["down"]["bias"], "down")

    params = {}
    for name, layer in layers.items():
        weight = layer.weight.detach().numpy()
        kernel = weight if name == untransposed else weight.T
        params[name] = {"kernel": kernel.copy(), "bias": layer.bias.detach().numpy().copy()}
    x = np.random.default_rng(0).normal(size=(3, SIZE)).astype(np.float32)
    port = FunctionSide(lambda p, x: jnp.asarray(forward(p, x)), params, x)
    original = TorchSide(module, torch.tensor(x))
    return compare(Port("square", original, port, gradients=False, bfloat16=False))


@pytest.mark.parametrize("name", ["up", "down"])
def test_an_untransposed_square_kernel_is_named(name) -> None:
    report = made(name)
    assert not report.holds
    assert f"parameter {name}.kernel: is the transpose of" in report.text()


@pytest.mark.parametrize(
    "how",
    [{"symmetric": True}, {"wide": 2 * SIZE}, {}],
    ids=["symmetric", "not square", "transposed"],
)
def test_another_bug_is_not_taken_for_one(how) -> None:
    """The control: the bias is wrong, and no kernel is named."""
    report = made(bias=2.0, **how)
    assert not report.holds
    assert "is the transpose of" not in report.text()
