"""Levanter: Llama 3 with stacked layers, grouped heads and scaled rotary frequencies.

Levanter reads the state dict of Transformers itself; no weight is converted by hand.
"""

import haliax as hax
import jax
import numpy as np
import torch
from haliax.state_dict import from_torch_compatible_state_dict
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from parity import EquinoxSide, Port, TorchSide

# Haliax computes through helpers; name the lines that call them.
for helper in (hax, hax.core, hax.wrap):
    helper.__tracebackhide__ = True

INSTALL = "pip install levanter==1.2.dev1644 haliax==1.4.dev453"
NAMED = {
    "planted": "freqs = inv_freq",
}

torch.manual_seed(0)
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
ORIGINAL = LlamaForCausalLM(
    HFConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rope_theta=500_000.0,
        rope_scaling=SCALING,
    )
).eval()
with torch.no_grad():
    for parameter in ORIGINAL.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
IDS = np.random.default_rng(0).integers(0, 128, (2, 9))


def compared(**changes):
    given = HFConfig.from_dict(ORIGINAL.config.to_dict() | changes)
    model = LlamaLMHeadModel.init(
        hax.Axis("vocab", 128), LlamaConfig.from_hf_config(given), key=jax.random.key(0)
    )
    state = {name: x.numpy() for name, x in ORIGINAL.state_dict().items()}
    model = from_torch_compatible_state_dict(model, state)

    def logits(model, ids):
        ids = hax.named(ids, ("batch", "position"))
        return model(ids, AttentionMask.causal()).rearrange(("batch", "position", "vocab")).array

    return Port(
        "levanter_llama",
        TorchSide(ORIGINAL, torch.tensor(IDS), call=lambda m, ids: m(ids, use_cache=False).logits),
        EquinoxSide(model, IDS, call=logits),
    )


def port():
    return compared()


def planted():
    return compared(rope_scaling=None)
