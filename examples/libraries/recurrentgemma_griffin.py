"""RecurrentGemma of Google DeepMind: gated linear recurrences, and local attention with one key and
value for all heads.

`adopt` converts the parameters; a person answers where the two projections of an MLP are stacked.
"""

import json
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from recurrentgemma.jax import Griffin, GriffinConfig, TemporalBlockType, complex_lib
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from parity import FlaxSide, Port, TorchSide, adopt

INSTALL = "pip install recurrentgemma==1.0.1 einops==0.8.2 typeguard==2.13.3 sentencepiece==0.2.3"
NAMED = {
    "differs": "window_cond = ",
    "planted": "log_a = ",
}
PROJECTIONS = "gate_proj", "up_proj"
ANSWERS = {
    f"blocks.{{}}.mlp_block.ffw_up.{ours}": [
        f"model.layers.{{}}.mlp_block.{name}.{theirs}" for name in PROJECTIONS
    ]
    for ours, theirs in (("w", "weight"), ("b", "bias"))
}
IDS = np.random.default_rng(0).integers(0, 128, (2, 9))


def sides(window, softplus=complex_lib.softplus):
    """Return the sides with an attention window, and with the port's own random parameters."""
    torch.manual_seed(0)
    original = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=128,
            # Transformers rounds the factor sqrt(hidden_size) to bfloat16, which 8 is.
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            attention_window_size=window,
            block_types=("recurrent", "recurrent", "attention"),
        )
    ).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    recurrent, attention = TemporalBlockType.RECURRENT, TemporalBlockType.ATTENTION
    model = Griffin(
        GriffinConfig(
            vocab_size=128,
            width=64,
            mlp_expanded_width=48,
            num_heads=4,
            lru_width=64,
            block_types=(recurrent, recurrent, attention),
            embeddings_scale_by_sqrt_dim=True,
            attention_window_size=window,
            logits_soft_cap=30.0,
        ),
        gradient_checkpointing=False,
    )
    inputs = jnp.asarray(IDS), jnp.broadcast_to(jnp.arange(9), (2, 9))

    def logits(model, params, *inputs):
        with mock.patch.object(complex_lib, "softplus", softplus):
            return model.apply(params, *inputs, return_cache=False)[0]

    side = FlaxSide(model, model.init(jax.random.key(0), *inputs), *inputs, call=logits)
    ids = torch.tensor(IDS)
    return TorchSide(original, ids, call=lambda m, ids: m(ids, use_cache=False).logits), side


with tempfile.TemporaryDirectory() as folder:
    answers = Path(folder) / "answers.json"
    answers.write_text(json.dumps({"answers": ANSWERS}), encoding="utf-8")
    # The windows are longer than the text.
    PARAMETERS = adopt(Port("recurrentgemma", *sides(window=16)), answers=answers).parameters


def compared(**changes):
    original, side = sides(**changes)
    return Port("recurrentgemma_griffin", original, side.with_parameters(PARAMETERS))


def port():
    return compared(window=16)


def differs():
    # In a forward pass, Transformers does not limit attention to the window.
    return compared(window=4)


def planted():
    return compared(window=16, softplus=jnp.exp)
