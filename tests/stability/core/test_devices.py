"""Device names as JAX and torch report them, what such a device multiplies, and the advice."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from stability.core.devices import capability_of
from stability.core.recommendation import NEVER, UNKNOWN, recommend

FLOAT8 = "bfloat16, then float8 after initial convergence"
NAMES = {
    "NVIDIA GB300": ("compute capability 10.3", FLOAT8),
    "NVIDIA B300 SXM6 AC": ("compute capability 10.3", FLOAT8),
    "NVIDIA GB200": ("compute capability 10.0", FLOAT8),
    "NVIDIA B200": ("compute capability 10.0", FLOAT8),
    "NVIDIA GB10": ("compute capability 12.1", FLOAT8),
    "NVIDIA Thor": ("compute capability 11.0", FLOAT8),
    "NVIDIA GeForce RTX 5090": ("compute capability 12.0", FLOAT8),
    "NVIDIA GeForce RTX 5070 Ti": ("compute capability 12.0", FLOAT8),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("compute capability 12.0", FLOAT8),
    "NVIDIA RTX PRO 4500 Blackwell": ("compute capability 12.0", FLOAT8),
    "NVIDIA H200": ("compute capability 9.0", FLOAT8),
    "NVIDIA H100 80GB HBM3": ("compute capability 9.0", FLOAT8),
    "NVIDIA H100 PCIe": ("compute capability 9.0", FLOAT8),
    "NVIDIA GH200 480GB": ("compute capability 9.0", FLOAT8),
    "NVIDIA L4": ("compute capability 8.9", "bfloat16"),
    "NVIDIA L40": ("compute capability 8.9", "bfloat16"),
    "NVIDIA L40S": ("compute capability 8.9", "bfloat16"),
    "NVIDIA RTX 6000 Ada Generation": ("compute capability 8.9", "bfloat16"),
    "NVIDIA RTX 4000 SFF Ada Generation": ("compute capability 8.9", "bfloat16"),
    "NVIDIA GeForce RTX 4090": ("compute capability 8.9", "bfloat16"),
    "NVIDIA GeForce RTX 4060 Laptop GPU": ("compute capability 8.9", "bfloat16"),
    "Orin": ("compute capability 8.7", "bfloat16"),
    "NVIDIA A10": ("compute capability 8.6", "bfloat16"),
    "NVIDIA A10G": ("compute capability 8.6", "bfloat16"),
    "NVIDIA A40": ("compute capability 8.6", "bfloat16"),
    "NVIDIA RTX A6000": ("compute capability 8.6", "bfloat16"),
    "NVIDIA RTX A4000": ("compute capability 8.6", "bfloat16"),
    "NVIDIA GeForce RTX 3090 Ti": ("compute capability 8.6", "bfloat16"),
    "NVIDIA A100-SXM4-40GB": ("compute capability 8.0", "bfloat16"),
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": ("compute capability 8.0", "bfloat16"),
    "NVIDIA A30": ("compute capability 8.0", "bfloat16"),
    "Tesla T4": ("compute capability 7.5", "float32"),
    "NVIDIA GeForce RTX 2080 Ti": ("compute capability 7.5", "float32"),
    "Quadro RTX 6000": ("compute capability 7.5", "float32"),
    "Tesla V100-SXM2-16GB": ("compute capability 7.0", "float32"),
    "Tesla P100-PCIE-16GB": ("compute capability 6.0", "float32"),
    "TPU v2": ("TPU v2", "bfloat16"),
    "TPU v4": ("TPU v4", "bfloat16"),
    "TPU v4 lite": ("TPU v4i", "bfloat16"),
    "TPU v5 lite": ("TPU v5e", "bfloat16"),
    "TPU v5": ("TPU v5", "bfloat16"),
    "TPU v6 lite": ("TPU v6e", "bfloat16"),
    "TPU7x": ("TPU v7x", FLOAT8),
    "v5litepod-8": ("TPU v5e", "bfloat16"),
    "AMD Instinct MI355X": ("gfx950", FLOAT8),
    "AMD Instinct MI325X": ("gfx942", "bfloat16"),
    "AMD Instinct MI300X": ("gfx942", "bfloat16"),
    "AMD Instinct MI250X/MI250": ("gfx90a", "bfloat16"),
    "AMD Instinct MI210": ("gfx90a", "bfloat16"),
    "AMD Instinct MI60": ("gfx906", "float32"),
    "AMD Radeon RX 7900 XTX": ("gfx1100", "bfloat16"),
    "cpu": ("CPU", "float32"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_known_by_the_name_it_reports(name):
    advice = recommend(name)
    assert (advice.capability.name, advice.precision) == NAMES[name]
    # The guide's float16 on other GPUs is never advised.
    assert "float16" not in advice.precision.replace("bfloat16", "")
    assert advice.source and advice.capability.source in advice.source
    assert advice.reason and "never float16" in NEVER


@pytest.mark.parametrize(
    "name", ["Apple M3 Max", "Intel(R) Data Center GPU Max 1550", "AMD Radeon Pro 5500M", "gpu", ""]
)
def test_an_unknown_device_gets_no_advice_in_silence(name):
    advice = recommend(name)
    assert advice.precision == UNKNOWN
    assert repr(name) in advice.reason and "reports no compute capability" in advice.reason


@pytest.mark.parametrize(
    ("told", "name", "precision"),
    [
        ("9.0", "compute capability 9.0", FLOAT8),
        ("8.9", "compute capability 8.9", "bfloat16"),
        ("7.5", "compute capability 7.5", "float32"),
        ("13.0", "compute capability 13.0", FLOAT8),
        ("gfx942:sramecc+:xnack-", "gfx942", "bfloat16"),
    ],
)
def test_a_device_that_tells_its_capability_needs_no_name(told, name, precision):
    device = SimpleNamespace(platform="gpu", device_kind="of next year", compute_capability=told)
    advice = recommend(device)
    assert (advice.capability.name, advice.precision) == (name, precision)
    # The control: without what it told, nothing is known, and the name it has is printed.
    silent = recommend(SimpleNamespace(platform="gpu", device_kind="of next year"))
    assert silent.precision == UNKNOWN and "of next year" in silent.reason


def test_what_a_device_tells_comes_before_its_name():
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA T4", compute_capability="10.0")
    found = capability_of(device)
    assert found.bf16 and found.tf32 and found.fp8 and found.blocks == ("mxfp8", "nvfp4")


def test_memory_is_what_the_device_tells():
    device = SimpleNamespace(
        platform="gpu",
        device_kind="AMD Instinct MI300X",
        compute_capability="",
        memory_stats=lambda: {"bytes_limit": 7},
    )
    found = capability_of(device)
    assert found.memory == 7 and found.fp8_fnuz and not found.fp8

    def absent():
        raise RuntimeError("not here")

    device.memory_stats = absent
    assert capability_of(device).memory is None


def test_a_device_of_this_machine_is_known():
    assert recommend(jax.devices("cpu")[0]).capability.name == "CPU"
