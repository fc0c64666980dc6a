"""Levanter: GPT-2 with stacked layers, a fused projection of query, key and value, and tied
embeddings.

Levanter reads the state dict of Transformers itself; no weight is converted by hand.
"""

import haliax as hax
import jax
import numpy as np
import torch
from haliax.state_dict import from_torch_compatible_state_dict
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel
from transformers import GPT2Config, GPT2LMHeadModel

from parity import EquinoxSide, Port, TorchSide

# Haliax computes through helpers; name the lines that call them.
for helper in (hax, hax.core, hax.wrap):
    helper.__tracebackhide__ = True

INSTALL = "pip install levanter==1.2.dev1644 haliax==1.4.dev453"
NAMED = {
    "planted": "self.eps",
}

torch.manual_seed(0)
ORIGINAL = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=2, n_head=4)
).eval()
with torch.no_grad():
    for parameter in ORIGINAL.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
IDS = np.random.default_rng(0).integers(0, 128, (2, 9))


def compared(**changes):
    config = Gpt2Config(seq_len=16, hidden_dim=32, num_layers=2, num_heads=4, **changes)
    model = Gpt2LMHeadModel.init(hax.Axis("vocab", 128), config, key=jax.random.key(0))
    state = {name: x.numpy() for name, x in ORIGINAL.state_dict().items()}
    model = from_torch_compatible_state_dict(model, state, prefix="transformer")

    def logits(model, ids):
        ids = hax.named(ids, ("batch", "position"))
        return model(ids, AttentionMask.causal()).rearrange(("batch", "position", "vocab")).array

    return Port(
        "levanter_gpt2",
        TorchSide(ORIGINAL, torch.tensor(IDS), call=lambda m, ids: m(ids, use_cache=False).logits),
        EquinoxSide(model, IDS, call=logits),
    )


def port():
    return compared()


def planted():
    return compared(layer_norm_epsilon=1e-6)
