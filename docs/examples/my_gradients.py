"""Gradients to try `megalodon-numerics stability --gradients` on: the byte-level model's, on text.

A torch file yields `model, loss` for each batch: docs/stability.md "Gradients of your own".
"""

from pathlib import Path

import equinox as eqx
import numpy as np

from megalodon_jax.convert import load_from_pretrained

FOLDER = Path(__file__).parents[2] / "parity" / "data" / "byte_lm"
ROWS, LENGTH = 4, 128


@eqx.filter_jit
@eqx.filter_grad
def gradient_of_loss(model, ids):
    """Return gradients as a model of the same structure."""
    return model.compute_loss(ids, labels=ids)


def gradients():
    """Yield the gradients of eight batches; `stability --gradients FILE` calls this."""
    model = load_from_pretrained(FOLDER)
    text = np.frombuffer((FOLDER / "heldout.txt").read_bytes(), np.uint8).astype(np.int32)
    for batch in range(8):
        start = batch * ROWS * LENGTH
        ids = text[start : start + ROWS * LENGTH].reshape(ROWS, LENGTH)
        yield gradient_of_loss(model, ids)
