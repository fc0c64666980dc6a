"""One image alone and the same image in a batch give other bits. No bug.

Products of another shape add in another order. The tolerance follows from that rounding; a bug
would have to be larger.
"""

import jax
import numpy as np

from parity import FunctionSide, Port

REPORT = "https://github.com/jax-ml/jax/issues/9102"
TRIED = "allclose of a batch with its images one by one; a comparison with torch"
FOUND = "holds"

RANDOM = np.random.default_rng(0)
PARAMS = {"kernel": RANDOM.normal(size=(32, 1, 3, 3)).astype(np.float32)}
IMAGES = RANDOM.normal(size=(4, 1, 14, 14)).astype(np.float32)


def batch(params, images):
    return jax.lax.conv_general_dilated(images, params["kernel"], (1, 1), "SAME")


def one_by_one(params, images):
    def one(image):
        return batch(params, image[None])[0]

    return jax.lax.map(one, images)


def port():
    sides = (FunctionSide(f, PARAMS, IMAGES) for f in (batch, one_by_one))
    return Port("batch_of_one", *sides, bfloat16=False)


mended = port
