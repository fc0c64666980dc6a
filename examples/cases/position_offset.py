"""RoBERTa's positions begin at `padding_idx + 1`; those of a packed batch began at 0.

Every token read the position embedding of another token, two rows too early. Nothing failed, and
the embeddings of texts became worse.
"""

import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/huggingface/sentence-transformers/pull/3879"
TRIED = "benchmarks of retrieval, which became slightly worse"
FOUND = 'params["position.weight"][begin + jnp.arange'

torch.manual_seed(0)
WIDTH, LENGTH, PADDING = 8, 6, 1


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.word = torch.nn.Embedding(11, WIDTH)
        self.position = torch.nn.Embedding(LENGTH + PADDING + 1, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, ids):
        positions = PADDING + 1 + torch.arange(ids.shape[1])
        return self.norm(self.word(ids) + self.position(positions))


ORIGINAL = Original()
IDS = np.random.default_rng(0).integers(2, 11, (2, LENGTH))
PARAMS = {name: jnp.asarray(x.detach().numpy()) for name, x in ORIGINAL.state_dict().items()}


def compared(begin):
    def twin(params, ids):
        word = params["word.weight"][ids]
        position = params["position.weight"][begin + jnp.arange(ids.shape[1])]
        x = word + position
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * params["norm.weight"] + params["norm.bias"]

    sides = TorchSide(ORIGINAL, IDS), FunctionSide(twin, PARAMS, IDS)
    return Port("position_offset", *sides, bfloat16=False)


def port():
    return compared(0)


def mended():
    return compared(PADDING + 1)
