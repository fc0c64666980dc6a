"""Flax twins of Transformers' models, converted by Transformers: matched and proposed as they are.

What is right is known independently: every element of the torch model is a number of its own, and
after the conversion each number says where it came from. docs/tables/ports-parameters.md has the
table.
"""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from parity.engine.pairing.converter import converter_source
from parity.engine.pairing.irregularities import irregularities
from parity.engine.pairing.matching import match_parameters
from parity.engine.pairing.proposal import propose

pytestmark = [
    pytest.mark.sweep,
    # What Transformers and Flax say of their own future is no fault of a port.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
LAYERS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = {"vocab_size": 61, "max_position_embeddings": 32}
IMAGE = {"image_size": 8, "patch_size": 2}
MODELS = {
    "Llama": ("ForCausalLM", LAYERS | TEXT | {"num_key_value_heads": 1}),
    "Bert": ("ForPreTraining", LAYERS | TEXT),
    "GPT2": ("LMHeadModel", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "Bloom": ("ForCausalLM", {"vocab_size": 61, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "ViT": ("ForImageClassification", LAYERS | IMAGE),
}


class Twins:
    """A model of Transformers and its Flax twin: generic values, numbered values, unconverted."""

    def __init__(self, name):
        import torch
        import transformers

        ending, arguments = MODELS[name]
        config = getattr(transformers, f"{name}Config")(**arguments)
        self.model = getattr(transformers, name + ending)(config)
        self.twin = getattr(transformers, f"Flax{name}{ending}")(config, seed=1)
        self.unconverted = flat(self.twin.params)
        rng = np.random.default_rng(0)
        unique = {t.data_ptr(): t for t in self.model.state_dict().values()}.values()
        unique = [t for t in unique if t.is_floating_point()]
        for tensor in unique:
            tensor.copy_(torch.from_numpy(rng.standard_normal(tensor.shape).astype(np.float32)))
        self.original, self.port = self.state(), self.converted()
        at = 1
        for tensor in unique:
            count = tensor.numel()
            tensor.copy_(torch.arange(at, at + count, dtype=torch.float32).reshape(tensor.shape))
            at += count
        self.numbers, self.numbered = self.state(), self.converted()

    def state(self):
        return {name: t.detach().numpy().copy() for name, t in self.model.state_dict().items()}

    def converted(self):
        from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

        tree = flat(convert_pytorch_state_dict_to_flax(self.model.state_dict(), self.twin))
        return {name: tree[name] for name in self.unconverted}


def flat(params):
    tree = jax.tree.map(np.asarray, dict(params))
    return {".".join(path): value for path, value in flatten_dict(tree).items()}


@pytest.fixture(scope="module", params=MODELS)
def twins(request):
    # Transformers' Flax models promote as JAX does by default.
    with jax.numpy_dtype_promotion("standard"):
        return Twins(request.param)


def wrong(result, expected):
    assert set(result) <= set(expected)
    return [
        name
        for name in expected
        if name not in result or not np.array_equal(result[name], expected[name])
    ]


def test_a_converted_twin_is_matched_by_value(twins):
    matching = match_parameters(twins.original, twins.port)
    assert matching.is_complete, matching.text()
    assert wrong(matching.from_original(twins.numbers), twins.numbered) == []
    assert irregularities(matching.pairs) == {}


def test_a_twin_that_is_not_converted_gets_the_converter_of_transformers(twins):
    module = {}
    exec(converter_source(propose(twins.original, twins.unconverted)), module)
    assert wrong(module["convert"](twins.numbers), twins.numbered) == []


def test_one_wrong_parameter_is_the_one_that_is_told(twins):
    port = dict(twins.port)
    name = max(port, key=lambda name: port[name].size)
    port[name] = port[name].copy()
    port[name].flat[7] += 1
    matching = match_parameters(twins.original, port)
    assert [pair.port for pair in matching.pairs if not pair.is_equal] == [name]
    assert "one element" in matching.by_port[name].note
