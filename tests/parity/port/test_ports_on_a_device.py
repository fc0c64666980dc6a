"""A port and its original on the same device, a processor or a GPU, without TF32."""

from __future__ import annotations

import contextlib
import copy

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch

from parity import FlaxSide, TorchSide
from parity.port import Port, compare
from parity.sides.side import Precision, Run, SideError
from parity.sides.torch_precision import FULL, _parts, full_precision
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


def settings() -> list[object]:
    """torch's settings of float32 products, by both of its interfaces where they can be read."""
    found: list[object] = [torch.get_float32_matmul_precision()]
    found += [part.fp32_precision for part in _parts()]
    return found + [b.allow_tf32 for b in (torch.backends.cuda.matmul, torch.backends.cudnn)]


class Asks(torch.nn.Module):
    """Returns its input, and keeps the settings of float32 products at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, seen = torch.nn.Parameter(torch.ones(3)), []
        # Not an attribute: each run gives a module its attributes back.
        self.seen = lambda: seen

    def forward(self, x):
        # Read by cudnn.flags, a context in which recurrent layers are called.
        with torch.backends.cudnn.flags(enabled=False):
            pass
        self.seen().append(settings())
        if self.weight.isnan().any():
            raise ValueError("NaN")
        return x * self.weight


@pytest.fixture(params=["highest", "medium"])
def allowed(request: pytest.FixtureRequest):
    """torch as it comes, or allowed to shorten float32 products to TF32 or bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield settings()
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("fails", [False, True])
def test_torch_multiplies_float32_in_full_and_gets_its_settings_back(allowed, fails):
    module = Asks()
    if fails:
        module.weight.data[0] = torch.nan
    side = TorchSide(module, np.ones(3, np.float32))
    with pytest.raises(SideError) if fails else contextlib.nullcontext():
        side.run(Run(Precision.FLOAT32))
    [seen] = module.seen()
    assert not {"tf32", "bf16", True} & {*seen[1:]}
    # Negative control: it was allowed before, and is so again.
    assert {"tf32", "bf16", True} & {*allowed[1:]}
    assert settings() == allowed


def test_settings_of_torch_s_newer_interface_are_kept_too():
    part = torch.backends.cudnn.conv if hasattr(torch.backends.cudnn, "conv") else None
    if part is None:
        pytest.skip("not run: this torch has one interface")
    before = part.fp32_precision
    try:
        for value in ("tf32", "ieee"):
            part.fp32_precision = value
            with full_precision():
                assert part.fp32_precision in FULL
            assert part.fp32_precision == value
    finally:
        part.fp32_precision = before
