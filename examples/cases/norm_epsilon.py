"""Layer norms with another epsilon: 1e-6 in Flax, 1e-5 in torch.

On inputs of usual size the outputs agree to four digits, which a loose comparison lets pass.
"""

import flax.linen as nn
import numpy as np
import torch

from parity import FlaxSide, Port, TorchSide

REPORT = "https://github.com/OpenNMT/CTranslate2/pull/951"
TRIED = "a constant of an engine, aligned with torch's"
FOUND = "nn.LayerNorm(epsilon=self.epsilon"

torch.manual_seed(0)
WIDTH = 16


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.down = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


class Twin(nn.Module):
    epsilon: float

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="up")(x)
        x = nn.LayerNorm(epsilon=self.epsilon, name="norm")(x)
        return nn.Dense(WIDTH, name="down")(x)


ORIGINAL = Original()
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)


def compared(epsilon):
    state = {name: x.detach().numpy() for name, x in ORIGINAL.state_dict().items()}
    dense = {
        name: {"kernel": state[f"{name}.weight"].T, "bias": state[f"{name}.bias"]}
        for name in ("up", "down")
    }
    norm = {"scale": state["norm.weight"], "bias": state["norm.bias"]}
    twin = FlaxSide(Twin(epsilon), {"params": {**dense, "norm": norm}}, X)
    return Port("norm_epsilon", TorchSide(ORIGINAL, X), twin, bfloat16=False)


def port():
    return compared(1e-6)


def mended():
    return compared(1e-5)
