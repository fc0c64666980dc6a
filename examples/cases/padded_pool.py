"""Flax's average pool counts the padding, which the original leaves out.

Only the outermost pixels differ.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import torch

from parity import FlaxSide, Port, TorchSide

REPORT = "https://github.com/google/flax/issues/2401"
TRIED = "an example of two numbers; an option was added"
FOUND = "nn.avg_pool("

torch.manual_seed(0)
CHANNELS, OUT = 3, 4


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(CHANNELS, OUT, 1)
        self.pool = torch.nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)

    def forward(self, images):
        return torch.tanh(self.pool(self.conv(images)))


class Twin(nn.Module):
    count_include_pad: bool

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(OUT, (1, 1), name="conv")(images.transpose(0, 2, 3, 1))
        x = nn.avg_pool(x, (3, 3), (1, 1), ((1, 1), (1, 1)), self.count_include_pad)
        return jnp.tanh(x).transpose(0, 3, 1, 2)


ORIGINAL = Original()
IMAGES = np.random.default_rng(0).normal(size=(2, CHANNELS, 6, 6)).astype(np.float32)


def compared(count_include_pad):
    state = {name: x.detach().numpy() for name, x in ORIGINAL.state_dict().items()}
    conv = {"kernel": state["conv.weight"].transpose(2, 3, 1, 0), "bias": state["conv.bias"]}
    twin = FlaxSide(Twin(count_include_pad), {"params": {"conv": conv}}, IMAGES)
    return Port("padded_pool", TorchSide(ORIGINAL, IMAGES), twin, bfloat16=False)


def port():
    return compared(True)


def mended():
    return compared(False)
