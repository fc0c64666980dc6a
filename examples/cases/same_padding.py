"""A ResNet's first convolution in Flax, with the weights of torch's, gives other features.

Flax pads `"SAME"` for a stride of 2 with one row more at the end than at the beginning; torch pads
both ends alike. Nothing fails, and the shapes agree.
"""

import flax.linen as nn
import jax
import numpy as np
import torch

from parity import FlaxSide, Port, TorchSide

REPORT = "https://github.com/google/flax/issues/963"
TRIED = "predictions of whole models side by side; found by hand from another port's convolutions"
FOUND = 'padding=self.padding, name="conv"'

torch.manual_seed(0)
CHANNELS, OUT = 3, 8


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(CHANNELS, OUT, kernel_size=7, stride=2, padding=3, bias=False)
        self.head = torch.nn.Linear(OUT, 4)

    def forward(self, images):
        return self.head(torch.relu(self.conv(images)).mean((2, 3)))


class Twin(nn.Module):
    padding: object

    @nn.compact
    def __call__(self, images):
        x = images.transpose(0, 2, 3, 1)
        x = nn.Conv(OUT, (7, 7), (2, 2), use_bias=False, padding=self.padding, name="conv")(x)
        return nn.Dense(4, name="head")(jax.nn.relu(x).mean((1, 2)))


ORIGINAL = Original()
IMAGES = np.random.default_rng(0).normal(size=(2, CHANNELS, 16, 16)).astype(np.float32)


def compared(padding):
    state = {name: x.detach().numpy() for name, x in ORIGINAL.state_dict().items()}
    head = {"kernel": state["head.weight"].T, "bias": state["head.bias"]}
    conv = {"kernel": state["conv.weight"].transpose(2, 3, 1, 0)}
    twin = FlaxSide(Twin(padding), {"params": {"conv": conv, "head": head}}, IMAGES)
    return Port("same_padding", TorchSide(ORIGINAL, IMAGES), twin, bfloat16=False)


def port():
    return compared("SAME")


def mended():
    return compared(((3, 3), (3, 3)))
