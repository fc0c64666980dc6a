"""A convolution differs between the two libraries by more than `isclose` allows. No bug.

Both sum 27 products of float32 in another order. `numpy.isclose` compares each element with itself,
also where large terms cancel. Here the tolerance follows from the rounding noise of both programs.
"""

import jax
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/jax-ml/jax/issues/11790"
TRIED = "assert isclose on every element; highest precision of products"
FOUND = "holds"

torch.manual_seed(0)
CONV = torch.nn.Conv2d(3, 3, kernel_size=3)
IMAGES = np.random.default_rng(0).uniform(size=(1, 3, 48, 48)).astype(np.float32)
PARAMS = {name: x.detach().numpy() for name, x in CONV.state_dict().items()}


def twin(params, images):
    out = jax.lax.conv_general_dilated(images, params["weight"], (1, 1), "VALID")
    return out + params["bias"][:, None, None]


def port():
    sides = TorchSide(CONV, IMAGES), FunctionSide(twin, PARAMS, IMAGES)
    return Port("rounding_only", *sides, bfloat16=False)


mended = port
