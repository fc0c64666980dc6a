"""Bugs of activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from transformers.modeling_flax_utils import ACT2FN

from tests.parity.ports.faults.fault import Family, PortFault, at, entry, instead


def exact_gelu(call: Any, module: Any, x: Any) -> Any:
    """Take the exact GELU for its approximation."""
    return 0.5 * x * (1 + jax.lax.erf(x / jnp.sqrt(2.0).astype(x.dtype)))


def tanh_gelu(healthy: Any, x: Any, approximate: bool = True) -> Any:
    """Approximate, whatever is asked for."""
    return healthy(x, approximate=True)


def no_activation(call: Any, module: Any, x: Any) -> Any:
    """Forget the activation between the two matrices."""
    return module.dense(x) * 1.0


def other_half(call: Any, module: Any, x: Any, deterministic: bool = True) -> Any:
    """Activate what is multiplied, not what gates."""
    hidden = module.wi_0(x) * module.act(module.wi_1(x))
    return module.wo(module.dropout(hidden, deterministic=deterministic))


def _table(name: str, subject: str, how: str, stage: str, key: str, other: Any, line: str):
    plant = entry(ACT2FN, key, other)
    return PortFault(Family.ACTIVATIONS, name, subject, how, stage, plant, line)


FAULTS = (
    _table(
        "gpt2_tanh_gelu",
        "gpt2",
        "gelu_new for gelu",
        r"transformer\.h\.0\.mlp\.c_proj",
        "gelu",
        ACT2FN["gelu_new"],
        "self.act(",
    ),
    _table(
        "llama_silu",
        "llama",
        "SiLU whatever the configuration says",
        r"model\.layers\.0\.mlp\.down_proj",
        "gelu",
        ACT2FN["silu"],
        "self.act(",
    ),
    _table(
        "gemma_exact_gelu",
        "gemma",
        "the exact GELU for its approximation",
        r"model\.layers\.0\.mlp\.down_proj",
        "gelu_pytorch_tanh",
        ACT2FN["gelu"],
        "self.act(",
    ),
    _table(
        "bert_gelu_for_relu",
        "bert",
        "GELU whatever the configuration says",
        r"bert\.encoder\.layer\.0\.intermediate",
        "relu",
        ACT2FN["gelu"],
        "self.activation(",
    ),
    _table(
        "bart_leaky_relu",
        "bart",
        "a ReLU that leaks a hundredth",
        r"model\.encoder\.layers\.0\.activation_dropout_layer",
        "relu",
        jax.nn.leaky_relu,
        "self.activation_fn(",
    ),
    _table(
        "gpt_neo_quick_gelu",
        "gpt_neo",
        "x sigmoid(1.702 x), near enough to look right",
        r"transformer\.h\.0\.mlp\.c_proj",
        "gelu",
        ACT2FN["quick_gelu"],
        "jax.nn.sigmoid",
    ),
    _table(
        "opt_relu",
        "opt",
        "ReLU whatever the configuration says",
        r"model\.decoder\.layers\.0\.fc2",
        "gelu",
        ACT2FN["relu"],
        "self.activation_fn(",
    ),
    PortFault(
        Family.ACTIVATIONS,
        "bloom_exact_gelu",
        "bloom",
        "the exact GELU for its approximation",
        r"transformer\.h\.1\.mlp\.act",
        at(r"transformer\.h\.1\.mlp\.act", exact_gelu),
    ),
    PortFault(
        Family.ACTIVATIONS,
        "whisper_tanh_gelu",
        "whisper",
        "the convolutions' GELU approximated",
        r"model\.encoder\.conv2",
        instead(jax.nn, "gelu", tanh_gelu),
    ),
    PortFault(
        Family.ACTIVATIONS,
        "vit_no_activation",
        "vit",
        "the activation between two matrices is forgotten",
        r"vit\.encoder\.layer\.1\.intermediate",
        at(r"vit\.encoder\.layer\.1\.intermediate", no_activation),
    ),
    PortFault(
        Family.ACTIVATIONS,
        "t5_gate_activation",
        "t5",
        "the other half is activated",
        r"encoder\.block\.0\.layer\.1\.DenseReluDense\.dropout",
        at(r"encoder\.block\.0\.layer\.1\.DenseReluDense", other_half),
    ),
)
