"""Gradient accumulation that averages the mean losses of its parts.

Parts with few targets weigh as much as parts with many, so training depends on how a batch is cut.
Every trainer that scaled each part's mean by the number of parts had it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/huggingface/transformers/pull/34191"
TRIED = "training curves of equal batches, cut into one and into many parts"
FOUND = "for cut in (slice(0, 2), slice(2, 4))"

torch.manual_seed(0)
WIDTH, WORDS, IGNORED = 8, 11, -100
HEAD = torch.nn.Linear(WIDTH, WORDS, bias=False)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 6, WIDTH)).astype(np.float32)
LABELS = RANDOM.integers(0, WORDS, (4, 6))
LABELS[2:, 2:] = IGNORED
PARAMS = {"weight": jnp.asarray(HEAD.weight.detach().numpy())}


class Original(torch.nn.Module):
    """The whole batch at once."""

    def __init__(self):
        super().__init__()
        self.head = HEAD

    def forward(self, x, labels):
        logits = self.head(x).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def compared(by_tokens):
    def part(params, x, labels):
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(x @ params["weight"].T), jnp.maximum(labels, 0)[..., None], -1
        )[..., 0]
        held = labels != IGNORED
        return -jnp.where(held, chosen, 0).sum(), held.sum()

    def twin(params, x, labels):
        """Two parts, one after the other."""
        parts = [part(params, x[cut], labels[cut]) for cut in (slice(0, 2), slice(2, 4))]
        if by_tokens:
            return sum(loss for loss, _ in parts) / sum(count for _, count in parts)
        means = [loss / count for loss, count in parts]
        return jnp.stack(means).mean()

    sides = TorchSide(Original(), X, LABELS), FunctionSide(twin, PARAMS, X, LABELS)
    return Port("mean_of_means", *sides, bfloat16=False)


def port():
    return compared(by_tokens=False)


def mended():
    return compared(by_tokens=True)
