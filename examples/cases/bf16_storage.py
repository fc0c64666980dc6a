"""A fine-tuning run in bfloat16 throughout stops learning where float32 goes on.

At a rate of 2e-5 most steps are smaller than half the distance to the next bfloat16 number: norms
stand still, and so do the larger elements of every matrix.
"""

import ml_dtypes
import numpy as np

from stability.diagnose import report

REPORT = "https://github.com/meta-pytorch/torchtune/issues/2254"
TRIED = "loss curves, another reduction of gradients, other models and rates"
FOUND = "100% of its 64 elements never move"

RANDOM = np.random.default_rng(0)


def diagnosis():
    leaves = {}
    for layer in range(2):
        leaves[f"layers.{layer}.norm.weight"] = np.ones(64)
        leaves[f"layers.{layer}.up.weight"] = RANDOM.normal(0, 0.05, (64, 64))
    narrow = {name: x.astype(ml_dtypes.bfloat16) for name, x in leaves.items()}
    return report(narrow, "adamw", settings={"lr": 2e-5})
