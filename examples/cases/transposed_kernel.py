"""Flax's transposed convolution with torch's kernel: both axes of the kernel are reversed.

The report was closed with "does not give the same result". With `transpose_kernel=True`, and the
channels in torch's order, it does.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import torch

from parity import FlaxSide, Port, TorchSide

REPORT = "https://github.com/jax-ml/jax/issues/11252"
TRIED = "one layer alone, permuted weights; closed without an answer"
FOUND = "x = layer(x)"

torch.manual_seed(0)
CHANNELS, OUT, FACTOR = 3, 4, 2


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.larger = torch.nn.ConvTranspose2d(CHANNELS, OUT, FACTOR, stride=FACTOR)

    def forward(self, images):
        return torch.tanh(self.larger(images))


class Twin(nn.Module):
    transpose_kernel: bool

    @nn.compact
    def __call__(self, images):
        sizes, turned = (FACTOR, FACTOR), self.transpose_kernel
        x = images.transpose(0, 2, 3, 1)
        layer = nn.ConvTranspose(
            OUT, sizes, sizes, padding="VALID", transpose_kernel=turned, name="larger"
        )
        x = layer(x)
        return jnp.tanh(x).transpose(0, 3, 1, 2)


ORIGINAL = Original()
IMAGES = np.random.default_rng(0).normal(size=(2, CHANNELS, 5, 5)).astype(np.float32)


def compared(transpose_kernel):
    state = {name: x.detach().numpy() for name, x in ORIGINAL.state_dict().items()}
    # torch: (in, out, height, width). Flax wants (height, width, out, in) if it is to transpose.
    order = (2, 3, 1, 0) if transpose_kernel else (2, 3, 0, 1)
    larger = {"kernel": state["larger.weight"].transpose(order), "bias": state["larger.bias"]}
    twin = FlaxSide(Twin(transpose_kernel), {"params": {"larger": larger}}, IMAGES)
    return Port("transposed_kernel", TorchSide(ORIGINAL, IMAGES), twin, bfloat16=False)


def port():
    return compared(False)


def mended():
    return compared(True)
