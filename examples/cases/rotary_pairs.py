"""Llama's rotary embedding by halves, given weights trained with neighbouring pairs.

Both conventions rotate pairs of channels. A checkpoint of one needs its query and key rows in
another order for the other; a converter left them as they were.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/huggingface/nanotron/pull/427"
TRIED = "nothing failed: exported models were silently worse"
FOUND = "jnp.split(x, 2, -1)"

torch.manual_seed(0)
WIDTH, HEADS, LENGTH = 16, 2, 5
HEAD = WIDTH // HEADS
ANGLES = np.arange(LENGTH)[:, None] * 100.0 ** -(np.arange(HEAD // 2) / (HEAD // 2))


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def rotated(self, x):
        angles = torch.as_tensor(ANGLES).to(x.dtype)
        cos, sin = angles.cos(), angles.sin()
        even, odd = x[..., ::2], x[..., 1::2]
        pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return pairs.flatten(-2)

    def forward(self, x):
        heads = (len(x), LENGTH, HEADS, HEAD)
        q, k, v = (layer(x).reshape(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = self.rotated(q) @ self.rotated(k).transpose(2, 3) / HEAD**0.5
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


ORIGINAL = Original()
X = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)
PARAMS = {name: jnp.asarray(x.detach().numpy()) for name, x in ORIGINAL.state_dict().items()}


def compared(neighbours):
    def split(x):
        return (x[..., ::2], x[..., 1::2]) if neighbours else jnp.split(x, 2, -1)

    def rotated(x):
        angles = jnp.asarray(ANGLES, x.dtype)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = split(x)
        return first * cos - second * sin, first * sin + second * cos

    def twin(params, x):
        def heads(name):
            return (x @ params[f"{name}.weight"].T).reshape(len(x), LENGTH, HEADS, HEAD)

        q, k = heads("q").swapaxes(1, 2), heads("k").swapaxes(1, 2)
        both = [a @ b.swapaxes(2, 3) for a, b in zip(rotated(q), rotated(k), strict=True)]
        weights = jax.nn.softmax((both[0] + both[1]) / HEAD**0.5, -1)
        out = (weights @ heads("v").swapaxes(1, 2)).swapaxes(1, 2)
        return out.reshape(x.shape) @ params["o.weight"].T

    sides = TorchSide(ORIGINAL, X), FunctionSide(twin, PARAMS, X)
    return Port("rotary_pairs", *sides, bfloat16=False)


def port():
    return compared(neighbours=False)


def mended():
    return compared(neighbours=True)
