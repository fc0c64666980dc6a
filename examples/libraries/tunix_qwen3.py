"""Tunix: Qwen3 with a mixture of experts, grouped heads, and norms of query and key.

Tunix loads the folder that Transformers saves; no weight is converted by hand.
"""

import copy
import tempfile

import jax.numpy as jnp
import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from tunix.models.qwen3.model import ModelConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors

from parity import NNXSide, Port, TorchSide

INSTALL = "pip install google-tunix==0.1.7"
NAMED = {
    "differs": "fraction =",
    "planted": "+ self.norm_eps)",
}

torch.manual_seed(0)
ORIGINAL = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_theta=1_000_000.0,
    )
).eval()
with torch.no_grad():
    for parameter in ORIGINAL.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
IDS = np.random.default_rng(0).integers(0, 128, (2, 9))


def compared(original=ORIGINAL, eps=1e-6):
    config = ModelConfig(
        num_layers=2,
        vocab_size=128,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=original.config.rope_theta,
        norm_eps=eps,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(folder)
        model = create_model_from_safe_tensors(folder, config)
    length = IDS.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), IDS.shape)
    mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(IDS), length, length))

    def logits(model, ids):
        return model(ids, positions, None, mask)[0]

    return Port(
        "tunix_qwen3",
        TorchSide(original, torch.tensor(IDS), call=lambda m, ids: m(ids, use_cache=False).logits),
        NNXSide(model, IDS, call=logits),
    )


def port():
    return compared()


def differs():
    # As Qwen3-4B-Instruct-2507, whose rotary base is another.
    config = copy.deepcopy(ORIGINAL.config)
    config.rope_theta = 5_000_000.0
    original = Qwen3MoeForCausalLM(config).eval()
    original.load_state_dict(ORIGINAL.state_dict())
    return compared(original)


def planted():
    return compared(eps=1e-5)
