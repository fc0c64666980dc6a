"""Penzai: GPT-NeoX with parallel blocks, partial rotary embeddings, and a projection of query, key
and value that is fused in the original.

Penzai converts the model of Transformers itself.
"""

import dataclasses
from functools import partial

import jax
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from penzai import pz
from penzai.core import named_axes
from penzai.models.transformer.variants.gpt_neox import gpt_neox_from_huggingface_model
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from parity import FunctionSide, Port, TorchSide

# Penzai computes through a helper; name the lines that call it.
named_axes.__tracebackhide__ = True

INSTALL = "pip install penzai==0.2.5"
NAMED = {
    "differs": "jax.nn.standardize",
    "planted": "self.fn)(value)",
}

torch.manual_seed(0)
ORIGINAL = GPTNeoXForCausalLM(
    GPTNeoXConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
).eval()
with torch.no_grad():
    for parameter in ORIGINAL.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
IDS = np.random.default_rng(0).integers(0, 128, (2, 9))


@pz.pytree_dataclass
class Stage(pz.nn.Layer):
    """A layer whose result becomes a stage."""

    layer: pz.nn.Layer
    name: str = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, x, **side_inputs):
        return jax.tree.map(lambda x: checkpoint_name(x, self.name), self.layer(x, **side_inputs))


def with_stages(model):
    """Give the layers that have weights the name of these weights."""

    def staged(layer):
        weights = pz.select(layer).at_instances_of(pz.Parameter).get_sequence()
        return Stage(layer, weights[0].label.rsplit("/", 1)[0])

    return pz.select(model).at_instances_of(pz.nn.Affine | pz.nn.LayerNorm).apply(staged)


def compared(eps, changed=lambda model: model):
    ORIGINAL.config.layer_norm_eps = eps
    for layer in ORIGINAL.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.eps = eps
    model = with_stages(changed(gpt_neox_from_huggingface_model(ORIGINAL)))
    model, variables = pz.unbind_params(model, freeze=True)

    def logits(params, ids):
        bound = [dataclasses.replace(x, value=params[x.label]) for x in variables]
        ids = pz.nx.wrap(ids).tag("batch", "seq")
        out = pz.bind_variables(model, bound)(
            ids, token_positions=pz.nx.arange("seq", ids.named_shape["seq"])
        )
        return out.untag("batch", "seq", "vocabulary").data_array

    return Port(
        "penzai_gpt_neox",
        TorchSide(ORIGINAL, torch.tensor(IDS), call=lambda m, ids: m(ids, use_cache=False).logits),
        FunctionSide(logits, {x.label: x.value for x in variables}, IDS),
    )


def port():
    return compared(eps=1e-6)


def differs():
    # The epsilon of Pythia, which Penzai does not give to the last norm.
    return compared(eps=1e-5)


def tanh_gelu(model):
    def changed(layer):
        return pz.nn.Elementwise(partial(jax.nn.gelu, approximate=True))

    return pz.select(model).at_instances_of(pz.nn.Elementwise).apply(changed)


def planted():
    return compared(eps=1e-6, changed=tanh_gelu)
