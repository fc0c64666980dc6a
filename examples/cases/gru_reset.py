"""A GRU whose reset gate acts before the product of the state, as in the first paper.

torch applies it after the product. With a state of zero, as in the first step, both are equal.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/tracel-ai/burn/pull/2704"
TRIED = "tests of one step, which could not show it"
FOUND = "(reset * h) @ hidden"

torch.manual_seed(0)
WIDTH, LENGTH = 6, 4


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        for step in range(LENGTH):
            h = self.cell(x[:, step], h)
        return h


ORIGINAL = Original()
X = np.random.default_rng(0).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)
PARAMS = {name: jnp.asarray(x.detach().numpy()) for name, x in ORIGINAL.state_dict().items()}


def compared(reset_first):
    def twin(params, x):
        inputs = jnp.split(params["cell.weight_ih"].T, 3, -1)
        states = jnp.split(params["cell.weight_hh"].T, 3, -1)
        bias_x, bias_h = (jnp.split(params[f"cell.bias_{n}"], 3) for n in ("ih", "hh"))
        hidden, offset = states[2], bias_h[2]
        h = jnp.zeros((len(x), WIDTH), x.dtype)
        for step in range(LENGTH):
            moved = [x[:, step] @ w + b for w, b in zip(inputs, bias_x, strict=True)]
            reset = jax.nn.sigmoid(moved[0] + h @ states[0] + bias_h[0])
            update = jax.nn.sigmoid(moved[1] + h @ states[1] + bias_h[1])
            if reset_first:
                new = jnp.tanh(moved[2] + (reset * h) @ hidden + offset)
            else:
                new = jnp.tanh(moved[2] + reset * (h @ hidden + offset))
            h = (1 - update) * new + update * h
        return h

    sides = TorchSide(ORIGINAL, X), FunctionSide(twin, PARAMS, X)
    return Port("gru_reset", *sides, bfloat16=False)


def port():
    return compared(reset_first=True)


def mended():
    return compared(reset_first=False)
