"""`torch.std` divides by n - 1, `jnp.std` and `numpy.std` by n.

Asked since 2017, again and again; torch keeps its default. Where it normalises images or rewards,
a port is off by a factor near one.
"""

import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/pytorch/pytorch/issues/50010"
TRIED = "printing both numbers"
FOUND = "x.std(-1"

torch.manual_seed(0)
WIDTH = 12


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH)
        self.down = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.up(x)
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-4)
        return self.down(x)


ORIGINAL = Original()
X = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)
PARAMS = {name: jnp.asarray(x.detach().numpy()) for name, x in ORIGINAL.state_dict().items()}


def compared(ddof):
    def twin(params, x):
        x = x @ params["up.weight"].T + params["up.bias"]
        spread = x.std(-1, ddof=ddof, keepdims=True)
        x = (x - x.mean(-1, keepdims=True)) / (spread + 1e-4)
        return x @ params["down.weight"].T + params["down.bias"]

    sides = TorchSide(ORIGINAL, X), FunctionSide(twin, PARAMS, X)
    return Port("unbiased_std", *sides, bfloat16=False)


def port():
    return compared(ddof=0)


def mended():
    return compared(ddof=1)
