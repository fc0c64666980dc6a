"""`flax.nnx.GRUCell` lacks the bias inside of the reset gate, which torch's cell has.

Biases begin as zeros, so that a new cell shows nothing: only weights of a trained one do.
"""

import numpy as np
import torch
from flax import nnx

from parity import NNXSide, Port, TorchSide

REPORT = "https://github.com/google/flax/issues/5594"
TRIED = "comparing the parameters of two cells by eye"
FOUND = "not the original's: dense_i.bias"

WIDTH, LENGTH = 6, 3


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        for step in range(LENGTH):
            h = self.cell(x[:, step], h)
        return h


X = np.random.default_rng(0).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)


def through(cell, x):
    h = x[:, 0] * 0
    for step in range(LENGTH):
        h, _ = cell(h, x[:, step])
    return h


def compared(trained):
    torch.manual_seed(0)
    original = Original()
    with torch.no_grad():
        hidden = original.cell.bias_hh
        hidden[2 * WIDTH :] *= trained
    state = {name: x.detach().numpy() for name, x in original.cell.state_dict().items()}
    # Reset and update gate add both biases; the new gate's second one has no place to go to.
    bias = state["bias_ih"] + np.where(np.arange(3 * WIDTH) < 2 * WIDTH, state["bias_hh"], 0)
    cell = nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    cell.dense_i.kernel[...] = state["weight_ih"].T
    cell.dense_i.bias[...] = bias
    cell.dense_h.kernel[...] = state["weight_hh"].T
    sides = TorchSide(original, X), NNXSide(cell, X, call=through)
    # What the bias would learn is missing too, so the new cell is compared forwards only.
    return Port("gru_bias", *sides, gradients=bool(trained), bfloat16=False)


def port():
    return compared(trained=1)


def mended():
    """A new cell, whose bias is zero."""
    return compared(trained=0)
