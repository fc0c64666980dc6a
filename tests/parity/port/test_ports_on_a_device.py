"""A port and its original on the same device, a processor or a GPU, without TF32."""

from __future__ import annotations

import copy

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch

from parity import FlaxSide, TorchSide
from parity.port import Port, compare
from parity.sides.side import Precision, Run
from parity.sides.torch_precision import _SETTINGS
from tests.helpers import EACH_DEVICE
from tests.parity.port import twins

# On a CPU other tests compare the same transformers every day.
MOSTLY_GPU = pytest.mark.parametrize(
    "platform",
    [
        pytest.param("cpu", marks=pytest.mark.sweep),
        pytest.param("gpu", marks=pytest.mark.cuda),
    ],
)
KINDS = {"cpu": "cpu", "gpu": "cuda"}
IMAGES = np.random.default_rng(4).standard_normal((2, 3, 9, 9)).astype(np.float32)
SETTINGS = [(backend, name) for backend, name, _ in _SETTINGS]


def compared(platform: str, bug: twins.Bug):
    kind = KINDS[platform]
    original = copy.deepcopy(twins.original()).to(kind)
    with jax.default_device(jax.devices(platform)[0]):
        # The ids are an array: they go where the module is.
        port = Port("twin", TorchSide(original, twins.IDS), twins.equinox_side(bug), device=kind)
        return compare(port)


@MOSTLY_GPU
def test_a_transformer_holds_on_the_device_of_both(platform, numerics):
    report = compared(platform, twins.Bug.NONE)
    numerics(report.measurements)
    assert report.holds, report.text()
    assert {m.device for m in report.measurements} == {KINDS[platform]}
    assert any(m.quantity.startswith("grad/") for m in report.measurements)


@MOSTLY_GPU
def test_a_wrong_scale_is_named_on_the_device_of_both(platform):
    report = compared(platform, twins.Bug.SCALE)
    assert not report.holds
    assert report.culprit is not None and report.culprit.name == "layers.1.attn.o"


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 24, 3), torch.nn.Conv2d(24, 5, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Twin(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(24, (3, 3), padding="VALID", name="first")(x.transpose(0, 2, 3, 1)))
        return nn.Conv(5, (3, 3), padding="VALID", name="second")(x).transpose(0, 3, 1, 2)


# cuDNN's convolutions are in TF32 unless told otherwise: a healthy port would be refused.
@EACH_DEVICE
def test_convolutions_hold_on_the_device_of_both(platform, numerics):
    torch.manual_seed(0)
    original = Convolutions().to(KINDS[platform])
    weights = {
        name: {
            "kernel": module.weight.detach().cpu().numpy().transpose(2, 3, 1, 0),
            "bias": module.bias.detach().cpu().numpy(),
        }
        for name, module in (("first", original.first), ("second", original.second))
    }
    with jax.default_device(jax.devices(platform)[0]):
        other = FlaxSide(Twin(), {"params": weights}, IMAGES)
        port = Port("conv", TorchSide(original, IMAGES), other, device=KINDS[platform])
        report = compare(port)
    numerics(report.measurements)
    assert report.holds, report.text()


class Asks(torch.nn.Module):
    """Returns its input, and keeps the settings of float32 products at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones(3)), []

    def forward(self, x):
        self.seen.append({getattr(backend, name) for backend, name in SETTINGS})
        if self.weight.isnan().any():
            raise ValueError("NaN")
        return x * self.weight


@pytest.fixture
def shortened():
    """torch allowed to shorten float32 products to TF32 or bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield [getattr(backend, name) for backend, name in SETTINGS]
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("fails", [False, True])
def test_torch_multiplies_float32_in_full_and_gets_its_settings_back(shortened, fails):
    module = Asks()
    if fails:
        module.weight.data[0] = torch.nan
    side = TorchSide(module, np.ones(3, np.float32))
    try:
        side.run(Run(Precision.FLOAT32))
    except Exception:
        assert fails
    assert module.seen == [{"ieee"}] or module.seen == [{False}]
    assert [getattr(backend, name) for backend, name in SETTINGS] == shortened
    assert len({*shortened}) > 1
