"""A bottleneck of a ResNet strides in its first convolution, and torch's in its second.

Shapes and parameters agree, so weights load. Keras and the first paper do the one, torch the other.
"""

import flax.linen as nn
import jax
import numpy as np
import torch

from parity import FlaxSide, Port, TorchSide

REPORT = "https://github.com/benchopt/benchmark_resnet_classif/issues/9"
TRIED = "reading the sources of three frameworks"
FOUND = "strides=self.strides[0]"

torch.manual_seed(0)
CHANNELS, INNER = 4, 6


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(CHANNELS, INNER, 1)
        self.mix = torch.nn.Conv2d(INNER, INNER, 3, stride=2, padding=1)
        self.up = torch.nn.Conv2d(INNER, CHANNELS, 1)

    def forward(self, images):
        return self.up(torch.relu(self.mix(torch.relu(self.down(images)))))


class Twin(nn.Module):
    strides: tuple

    @nn.compact
    def __call__(self, images):
        x = images.transpose(0, 2, 3, 1)
        x = jax.nn.relu(nn.Conv(INNER, (1, 1), strides=self.strides[0], name="down")(x))
        padding = ((1, 1), (1, 1))
        x = nn.Conv(INNER, (3, 3), strides=self.strides[1], padding=padding, name="mix")(x)
        return nn.Conv(CHANNELS, (1, 1), name="up")(jax.nn.relu(x)).transpose(0, 3, 1, 2)


ORIGINAL = Original()
IMAGES = np.random.default_rng(0).normal(size=(2, CHANNELS, 8, 8)).astype(np.float32)


def compared(strides):
    params = {
        name: {
            "kernel": layer.weight.detach().numpy().transpose(2, 3, 1, 0),
            "bias": layer.bias.detach().numpy(),
        }
        for name, layer in ORIGINAL.named_children()
    }
    twin = FlaxSide(Twin(strides), {"params": params}, IMAGES)
    return Port("stride_place", TorchSide(ORIGINAL, IMAGES), twin, bfloat16=False)


def port():
    return compared((2, 1))


def mended():
    return compared((1, 2))
