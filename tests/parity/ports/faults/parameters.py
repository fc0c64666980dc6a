"""Bugs of the conversion of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.parity.ports.faults.fault import Family, Parameters, PortFault, configured


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Parameters], None]:
    """Return what changes one parameter."""

    def edit(flat: Parameters) -> None:
        flat[name] = jnp.asarray(change(np.array(flat[name])))

    return edit


def exchanged(one: str, other: str) -> Callable[[Parameters], None]:
    """Return what exchanges all parameters below two paths."""

    def edit(flat: Parameters) -> None:
        for name in [name for name in flat if name.startswith(one)]:
            partner = other + name.removeprefix(one)
            flat[name], flat[partner] = flat[partner], flat[name]

    return edit


def through_bfloat16(x: np.ndarray) -> Any:
    """Round as a checkpoint in bfloat16 does."""
    return jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)


def row_lost(x: np.ndarray) -> np.ndarray:
    """Leave one row as it was initialised."""
    x[7] = 0.0
    return x


def own_head(flat: Parameters) -> None:
    """Give a tied head a matrix of its own."""
    shape = flat["transformer.wte.embedding"].shape[::-1]
    rng = np.random.default_rng(0)
    flat["lm_head.kernel"] = jnp.asarray(0.02 * rng.standard_normal(shape, np.float32))


def _fault(
    name: str, subject: str, how: str, stage: str, params: Any, plant: Any = None
) -> PortFault:
    return PortFault(Family.PARAMETERS, name, subject, how, stage, plant, None, params)


FAULTS = (
    _fault(
        "gpt2_square_transposed",
        "gpt2",
        "a square matrix is transposed; no shape tells",
        r"transformer\.h\.0\.attn\.c_proj(\.kernel)?",
        changed("transformer.h.0.attn.c_proj.kernel", np.transpose),
    ),
    _fault(
        "bert_square_transposed",
        "bert",
        "a square matrix is transposed; no shape tells",
        r"bert\.encoder\.layer\.1\.attention\.self\.key(\.kernel)?",
        changed("bert.encoder.layer.1.attention.self.key.kernel", np.transpose),
    ),
    _fault(
        "gpt2_embedding_through_bfloat16",
        "gpt2",
        "the checkpoint was saved in bfloat16 on its way",
        r"transformer\.wte(\.embedding)?",
        changed("transformer.wte.embedding", through_bfloat16),
    ),
    _fault(
        "llama_matrix_through_bfloat16",
        "llama",
        "one matrix was saved in bfloat16",
        r"model\.layers\.1\.mlp\.down_proj(\.kernel)?",
        changed("model.layers.1.mlp.down_proj.kernel", through_bfloat16),
    ),
    _fault(
        "gpt2_position_lost",
        "gpt2",
        "one row of a table is left as it was initialised",
        r"transformer\.wpe\.embedding",
        changed("transformer.wpe.embedding", row_lost),
    ),
    _fault(
        "gpt2_head_not_tied",
        "gpt2",
        "the head has a matrix of its own",
        r"lm_head\.kernel",
        own_head,
        configured(tie_word_embeddings=False),
    ),
    _fault(
        "llama_norm_not_converted",
        "llama",
        "a gain is left at one",
        r"model\.layers\.1\.input_layernorm\.weight",
        changed("model.layers.1.input_layernorm.weight", np.ones_like),
    ),
    _fault(
        "llama_gate_is_up",
        "llama",
        "gate and up exchanged in one layer",
        r"model\.layers\.1\.mlp\.(gate_proj|up_proj)",
        exchanged("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
    ),
    _fault(
        "bert_query_is_key",
        "bert",
        "queries and keys exchanged in one layer",
        r"bert\.encoder\.layer\.1\.attention\.self\.(query|key)",
        exchanged(
            "bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.1.attention.self.key"
        ),
    ),
    _fault(
        "vit_layers_exchanged",
        "vit",
        "the layers in another order",
        r"vit\.encoder\.layer\.0\.layernorm_before",
        exchanged("vit.encoder.layer.0", "vit.encoder.layer.1"),
    ),
    _fault(
        "gemma_gain_converted_to_plus_one",
        "gemma",
        "the converter adds the one that the layer adds again",
        r"model\.norm\.weight",
        changed("model.norm.weight", lambda x: x + 1),
    ),
    _fault(
        "bart_heads_permuted",
        "bart",
        "rows of a projection in the order (d, H)",
        r"model\.encoder\.layers\.1\.self_attn\.v_proj(\.kernel)?",
        changed(
            "model.encoder.layers.1.self_attn.v_proj.kernel",
            lambda x: x.reshape(-1, 4, 6).swapaxes(1, 2).reshape(x.shape),
        ),
    ),
    _fault(
        "whisper_kernel_flipped",
        "whisper",
        "a convolution's kernel from its end",
        r"model\.encoder\.conv1(\.kernel)?",
        changed("model.encoder.conv1.kernel", lambda x: x[::-1]),
    ),
    _fault(
        "opt_bias_zero",
        "opt",
        "a bias is left at zero",
        r"model\.decoder\.layers\.0\.fc1\.bias",
        changed("model.decoder.layers.0.fc1.bias", np.zeros_like),
    ),
)
