"""A port to try `megalodon-numerics port` on: an MLP, and its copy with the weights transposed.

Set `APPROXIMATE` to True: the copy then uses another GELU, and the run is REGRESSED.
"""

import jax
import numpy as np

from parity import FunctionSide, Port

APPROXIMATE = False


def original(weights, x):
    """The program that is right: weights are (in, out)."""
    hidden = jax.nn.gelu(x @ weights["up"] + weights["bias"], approximate=False)
    return hidden @ weights["down"]


def copy(weights, x):
    """The program in question: weights are (out, in), as torch has them."""
    hidden = jax.nn.gelu(x @ weights["up"].T + weights["bias"], approximate=APPROXIMATE)
    return hidden @ weights["down"].T


def port():
    """Return what is compared; `port FILE` calls this."""
    rng = np.random.default_rng(0)
    shapes = {"up": (8, 12), "bias": (12,), "down": (12, 4)}
    weights = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    transposed = {name: array.T for name, array in weights.items()}
    x = rng.normal(size=(5, 8)).astype(np.float32)
    return Port("mlp", FunctionSide(original, weights, x), FunctionSide(copy, transposed, x))
