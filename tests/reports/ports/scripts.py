"""Files as a person writes them: an MLP in torch, its twin in Flax, and a function `port`."""

from __future__ import annotations

from pathlib import Path

PORT = """
import flax.linen as nn
import jax
import numpy as np
import torch

from parity import FlaxSide, Port, TorchSide
from settings import APPROXIMATE


class Twin(nn.Module):
    approximate: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(6, name="up")(x)
        x = jax.nn.gelu(x, approximate=self.approximate)
        return nn.Dense(4, name="down")(x)


def one(case="", length=3, approximate=APPROXIMATE):
    torch.manual_seed(0)
    original = torch.nn.Sequential()
    original.add_module("up", torch.nn.Linear(4, 6))
    original.add_module("gelu", torch.nn.GELU())
    original.add_module("down", torch.nn.Linear(6, 4))
    x = np.random.default_rng(0).normal(size=(length, 4)).astype(np.float32)
    params = {
        name: {"kernel": layer.weight.detach().numpy().T, "bias": layer.bias.detach().numpy()}
        for name, layer in (("up", original.up), ("down", original.down))
    }
    return Port(
        "mlp",
        original=TorchSide(original, x),
        port=FlaxSide(Twin(approximate), {"params": params}, x),
        case=case,
        gradients=False,
        bfloat16=False,
    )
"""
ONE = "\n\ndef port():\n    return one()\n"
CASES = '\n\ndef port():\n    return [one("short"), one("long", 5)]\n'


def write_port(folder: Path, ending: str = ONE, approximate: bool = False) -> Path:
    """Write a port and what it imports from beside it, `settings.py`; return the port's file."""
    (folder / "settings.py").write_text(f"APPROXIMATE = {approximate}\n", encoding="utf-8")
    path = folder / "my_port.py"
    path.write_text(PORT + ending, encoding="utf-8")
    return path
