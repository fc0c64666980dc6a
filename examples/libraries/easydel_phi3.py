"""EasyDeL: Phi-3 with grouped heads and fused projections, of query, key and value and of the two
inner matrices of the MLP.

EasyDeL loads the folder that Transformers saves; no weight is converted by hand. It makes the table
of its rotary embeddings in bfloat16, whatever dtype it is asked for.
"""

import tempfile
from types import SimpleNamespace
from unittest import mock

import easydel
import jax.numpy as jnp
import numpy as np
import torch
from easydel.infra import base_config
from transformers import Phi3Config, Phi3ForCausalLM

from parity import NNXSide, Port, TorchSide

INSTALL = "pip install easydel==0.3.0"
NAMED = {
    "differs": "astype(jnp.bfloat16)",
    "differs_by_default": "jnp.take(embedding",
    "planted": "+ self.eps)",
}

torch.manual_seed(0)
ORIGINAL = Phi3ForCausalLM(
    Phi3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        pad_token_id=0,
    )
).eval()
with torch.no_grad():
    for parameter in ORIGINAL.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
FLOAT32 = SimpleNamespace(**vars(jnp) | {"bfloat16": jnp.float32})
IDS = np.random.default_rng(0).integers(1, 128, (2, 9))


def compared(table, torch_dtype=torch.float32, attn_dtype=jnp.float32, **changes):
    with tempfile.TemporaryDirectory() as folder:
        ORIGINAL.save_pretrained(folder)
        model = easydel.AutoEasyDeLModelForCausalLM.from_pretrained(
            folder,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            config_kwargs={"attn_mechanism": "vanilla", "attn_dtype": attn_dtype, **changes},
            from_torch=True,
            torch_dtype=torch_dtype,
        )

    def logits(model, ids):
        with model.mesh, mock.patch.object(base_config, "jnp", table):
            return model(input_ids=ids).logits

    return Port(
        "easydel_phi3",
        TorchSide(ORIGINAL, torch.tensor(IDS), call=lambda m, ids: m(ids, use_cache=False).logits),
        NNXSide(model, IDS, call=logits),
    )


def port():
    return compared(FLOAT32)


def differs():
    return compared(jnp)


def differs_by_default():
    # Weights pass through float16 and attention is computed in bfloat16, although the caller asks
    # for float32.
    return compared(jnp, torch.float16, jnp.bfloat16)


def planted():
    return compared(FLOAT32, rms_norm_eps=1e-6)
