"""Gemma's embeddings are scaled by sqrt(3072) = 55.4256, rounded to bfloat16: 55.5.

One side rounds the constant and the other does not: 0.13 % of every hidden state.
"""

import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/google/gemma_pytorch/pull/67"
TRIED = "comparing implementations by hand"
FOUND = 'params["embed.weight"][ids] * normalizer'

torch.manual_seed(0)
WIDTH = 3072


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 8, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids) * WIDTH**0.5))


ORIGINAL = Original()
IDS = np.random.default_rng(0).integers(0, 11, (2, 6))
PARAMS = {name: jnp.asarray(x.detach().numpy()) for name, x in ORIGINAL.state_dict().items()}


def compared(normalizer):
    def twin(params, ids):
        x = params["embed.weight"][ids] * normalizer
        return jnp.tanh(x) @ params["head.weight"].T

    sides = TorchSide(ORIGINAL, IDS), FunctionSide(twin, PARAMS, IDS)
    return Port("rounded_normalizer", *sides, bfloat16=False)


def port():
    return compared(float(jnp.asarray(WIDTH**0.5, jnp.bfloat16)))


def mended():
    return compared(WIDTH**0.5)
