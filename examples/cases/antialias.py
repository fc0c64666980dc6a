"""Images are made smaller with a filter in JAX and without one in torch, unless told otherwise.

A metric of generated images was computed on other pixels than the paper's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/sayakpaul/cmmd-pytorch/issues/4"
TRIED = "reading both sources; still open after a year"
FOUND = "jax.image.resize(images"

torch.manual_seed(0)
SIZE, SMALL = 16, 6


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(3 * SMALL * SMALL, 8)

    def forward(self, images):
        small = functional.interpolate(images, size=(SMALL, SMALL), mode="bilinear")
        return self.embed(small.flatten(1))


ORIGINAL = Original()
IMAGES = np.random.default_rng(0).uniform(size=(2, 3, SIZE, SIZE)).astype(np.float32)
PARAMS = {name: jnp.asarray(x.detach().numpy()) for name, x in ORIGINAL.state_dict().items()}


def compared(antialias):
    def twin(params, images):
        shape = (*images.shape[:2], SMALL, SMALL)
        small = jax.image.resize(images, shape, "bilinear", antialias=antialias)
        return small.reshape(len(images), -1) @ params["embed.weight"].T + params["embed.bias"]

    sides = TorchSide(ORIGINAL, IMAGES), FunctionSide(twin, PARAMS, IMAGES)
    return Port("antialias", *sides, bfloat16=False)


def port():
    return compared(antialias=True)


def mended():
    return compared(antialias=False)
