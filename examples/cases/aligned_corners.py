"""A depth model upsamples with aligned corners, which `jax.image.resize` cannot do.

Both place the outermost pixels differently, and all others between them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/google/flax/issues/2210"
TRIED = "printing both results for a small array"
FOUND = "jax.image.resize(x"

torch.manual_seed(0)
SIZE, LARGE = 5, 10


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(SIZE, SIZE)
        self.larger = torch.nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)

    def forward(self, x):
        return torch.tanh(self.larger(self.mix(x)))


ORIGINAL = Original()
X = np.random.default_rng(0).normal(size=(2, 3, SIZE, SIZE)).astype(np.float32)
PARAMS = {name: jnp.asarray(x.detach().numpy()) for name, x in ORIGINAL.state_dict().items()}


def compared(aligned):
    def larger(x):
        shape = (*x.shape[:2], LARGE, LARGE)
        if not aligned:
            return jax.image.resize(x, shape, "bilinear")
        scale = jnp.full(2, (LARGE - 1) / (SIZE - 1), x.dtype)
        move = (1 - scale) / 2
        return jax.image.scale_and_translate(x, shape, (2, 3), scale, move, "bilinear")

    def twin(params, x):
        return jnp.tanh(larger(x @ params["mix.weight"].T + params["mix.bias"]))

    sides = TorchSide(ORIGINAL, X), FunctionSide(twin, PARAMS, X)
    return Port("aligned_corners", *sides, bfloat16=False)


def port():
    return compared(aligned=False)


def mended():
    return compared(aligned=True)
