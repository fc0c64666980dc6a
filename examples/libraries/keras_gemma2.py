"""Keras: Gemma 2 with soft caps, a sliding window, norms after each half of a block, and tied
embeddings.

Keras loads the folder that Transformers saves; no weight is converted by hand.
"""

import os
import sys
import tempfile
from unittest import mock

os.environ["KERAS_BACKEND"] = "jax"
import keras
import keras_hub
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from transformers import Gemma2Config, Gemma2ForCausalLM

from parity import FunctionSide, Port, TorchSide

# Keras computes through helpers; name the lines that call them.
for name, module in [*sys.modules.items()]:
    if name.startswith(("keras.src.ops", "keras.src.backend")):
        vars(module)["__tracebackhide__"] = True

INSTALL = "pip install keras-hub==0.32.0 keras==3.15.0"
NAMED = {
    "planted": "sliding_mask = ops.triu",
}

torch.manual_seed(0)
ORIGINAL = Gemma2ForCausalLM(
    Gemma2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=4,
        attn_implementation="eager",
    )
).eval()
with torch.no_grad():
    for parameter in ORIGINAL.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
IDS = np.random.default_rng(0).integers(1, 128, (2, 9))


def with_stages(function):
    """Call `function` with every Keras layer's result as a stage with the layer's name."""
    call = keras.layers.Layer.__call__

    def marked(layer, *args, **keywords):
        result = call(layer, *args, **keywords)
        return checkpoint_name(result, layer.path) if keras.ops.is_tensor(result) else result

    def function_with_stages(*args):
        with mock.patch.object(keras.layers.Layer, "__call__", marked):
            return function(*args)

    return function_with_stages


def compared(**changes):
    with tempfile.TemporaryDirectory() as folder:
        ORIGINAL.save_pretrained(folder)
        model = keras_hub.models.GemmaCausalLM.from_preset(
            folder, preprocessor=None, dtype="float32"
        )
    for block in model.backbone.transformer_layers:
        vars(block.attention).update(changes)
    params = {x.path: np.asarray(x) for x in model.trainable_variables}

    def logits(params, ids):
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(IDS)}
        weights = [params[x.path] for x in model.trainable_variables]
        return model.stateless_call(weights, model.non_trainable_variables, inputs)[0]

    return Port(
        "keras_gemma2",
        TorchSide(ORIGINAL, torch.tensor(IDS), call=lambda m, ids: m(ids, use_cache=False).logits),
        FunctionSide(with_stages(logits), params, IDS),
    )


def port():
    return compared()


def planted():
    return compared(sliding_window_size=5)
