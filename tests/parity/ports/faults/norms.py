"""Bugs of normalisations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.parity.ports.faults.fault import Family, PortFault, at, configured, field


def centred(call: Any, module: Any, x: Any) -> Any:
    """Subtract the mean, as a LayerNorm does."""
    return call(x - jnp.mean(x, -1, keepdims=True))


def outside_the_root(call: Any, module: Any, x: Any) -> Any:
    """Add epsilon to the root mean square."""
    root = jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
    return x / (root + module.epsilon) * module.weight


def without_one(call: Any, module: Any, x: Any) -> Any:
    """Take the gain as it is stored."""
    root = jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + module.epsilon)
    return x / root * module.weight


def unbiased(call: Any, module: Any, x: Any) -> Any:
    """Divide the sum of squares by one less."""
    scale, bias = (module.variables["params"][name] for name in ("scale", "bias"))
    variance = jnp.var(x, -1, keepdims=True, ddof=1)
    normal = (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(variance + module.epsilon)
    return normal * scale + bias


def root_mean_square(call: Any, module: Any, x: Any) -> Any:
    """Leave the mean in, as an RMSNorm does."""
    scale, bias = (module.variables["params"][name] for name in ("scale", "bias"))
    square = jnp.mean(jnp.square(x), -1, keepdims=True)
    return x * jax.lax.rsqrt(square + module.epsilon) * scale + bias


def without_bias(call: Any, module: Any, x: Any) -> Any:
    """Leave the bias out."""
    return call(x) - module.variables["params"]["bias"]


def twice(call: Any, module: Any, x: Any) -> Any:
    """Normalise what is normalised."""
    return call(call(x))


def left_out(call: Any, module: Any, x: Any) -> Any:
    """Do not normalise."""
    return x * 1.0


def over_positions(call: Any, module: Any, x: Any) -> Any:
    """Normalise along the wrong axis."""
    normal = (x - jnp.mean(x, 1, keepdims=True)) * jax.lax.rsqrt(
        jnp.var(x, 1, keepdims=True) + module.epsilon
    )
    scale, bias = (module.variables["params"][name] for name in ("scale", "bias"))
    return normal * scale + bias


def _norm(name: str, subject: str, how: str, stage: str, plant: Any, line: str = "") -> PortFault:
    return PortFault(Family.NORMS, name, subject, how, stage, plant, line)


FAULTS = (
    _norm(
        "gpt2_layer_norm_epsilon",
        "gpt2",
        "the default epsilon, whatever the configuration says",
        r"transformer\.h\.0\.ln_1",
        field(r".*\.ln_.", epsilon=1e-5),
        "self.ln_1(",
    ),
    _norm(
        "llama_rms_epsilon",
        "llama",
        "the default epsilon, whatever the configuration says",
        r"model\.layers\.0\.input_layernorm",
        configured(rms_norm_eps=1e-6),
        "self.epsilon",
    ),
    _norm(
        "llama_rms_centred",
        "llama",
        "an RMSNorm that subtracts the mean",
        r"model\.layers\.1\.post_attention_layernorm",
        at(r"model\.layers\.1\.post_attention_layernorm", centred),
    ),
    _norm(
        "llama_rms_epsilon_outside",
        "llama",
        "x / (rms + epsilon)",
        r"model\.norm",
        at(r"model\.norm", outside_the_root),
    ),
    _norm(
        "llama_norm_twice",
        "llama",
        "the last norm is in the head and in the body",
        r"model\.norm",
        at(r"model\.norm", twice),
        "variance",
    ),
    _norm(
        "gemma_gain_without_one",
        "gemma",
        "the gain is used as it is stored",
        r"model\.layers\.0\.input_layernorm",
        at(r".*(layernorm|\.norm)", without_one),
    ),
    _norm(
        "bert_layer_norm_epsilon",
        "bert",
        "the default epsilon, whatever the configuration says",
        r"bert\.embeddings\.LayerNorm",
        configured(layer_norm_eps=1e-12),
        "self.LayerNorm(",
    ),
    _norm(
        "bert_unbiased_variance",
        "bert",
        "var(ddof=1)",
        r"bert\.encoder\.layer\.1\.output\.LayerNorm",
        at(r"bert\.encoder\.layer\.1\.output\.LayerNorm", unbiased),
    ),
    _norm(
        "bert_head_norm_left_out",
        "bert",
        "the norm of the head is forgotten",
        r"cls\.predictions\.transform\.LayerNorm",
        at(r"cls\.predictions\.transform\.LayerNorm", left_out),
    ),
    _norm(
        "vit_rms_for_layer_norm",
        "vit",
        "an RMSNorm where a LayerNorm is meant",
        r"vit\.encoder\.layer\.1\.layernorm_before",
        at(r"vit\.encoder\.layer\.1\.layernorm_before", root_mean_square),
    ),
    _norm(
        "opt_norm_bias_left_out",
        "opt",
        "one class of norms without bias for all",
        r"model\.decoder\.layers\.0\.final_layer_norm",
        at(r"model\.decoder\.layers\.0\.final_layer_norm", without_bias),
    ),
    _norm(
        "bart_norm_over_positions",
        "bart",
        "statistics along the positions",
        r"model\.encoder\.layernorm_embedding",
        at(r"model\.encoder\.layernorm_embedding", over_positions),
    ),
    _norm(
        "t5_epsilon",
        "t5",
        "the default epsilon, whatever the configuration says",
        r"encoder\.block\.0\.layer\.0\.layer_norm",
        configured(layer_norm_epsilon=1e-6),
        "self.eps",
    ),
)
