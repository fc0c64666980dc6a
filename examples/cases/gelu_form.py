"""Gemma's gate with the exact GELU; it was trained with the tanh approximation.

Both activations are called `gelu`. They differ by up to 5e-4, in every layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/huggingface/transformers/pull/29402"
TRIED = "comparing implementations by hand"
FOUND = "jax.nn.gelu(x @ params"

torch.manual_seed(0)
WIDTH, HIDDEN = 16, 32


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


ORIGINAL = Original()
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
PARAMS = {name: jnp.asarray(x.detach().numpy().T) for name, x in ORIGINAL.state_dict().items()}


def compared(approximate):
    def twin(params, x):
        gate = jax.nn.gelu(x @ params["gate.weight"], approximate=approximate)
        return (gate * (x @ params["up.weight"])) @ params["down.weight"]

    sides = TorchSide(ORIGINAL, X), FunctionSide(twin, PARAMS, X)
    return Port("gelu_form", *sides, bfloat16=False)


def port():
    return compared(approximate=False)


def mended():
    return compared(approximate=True)
