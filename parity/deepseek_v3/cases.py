"""The five cases compared with Transformers' DeepSeek-V3: configuration, weights and inputs.

The fields of a case determine its weights and token ids, byte for byte on every machine. Source:
docs/mla-moe.md "Parity".
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megalodon_jax.weights import named_leaves
from parity.deepseek_v3 import SUBJECT
from parity.deepseek_v3.checkpoint import abstract, build, unstacked
from parity.deepseek_v3.config import MLAMoEConfig, Yarn
from parity.deepseek_v3.model import MLAMoEForCausalLM

BUFFER = "e_score_correction_bias"
"""Name of the router's selection bias. It has no gradient, and is a buffer in Transformers."""
TINY = MLAMoEConfig(
    vocab_size=24,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    intermediate_size=24,
    moe_intermediate_size=8,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    min_moe_layer=1,
)
"""Configuration with two layers, the second sparse; each case changes single fields of it."""


@dataclass(frozen=True)
class Case:
    """One configuration with weights and token ids, all determined by the fields."""

    name: str
    why: str
    """Feature that the case tests, in words, for the page and for lists of cases."""
    config: MLAMoEConfig
    length: int = 14
    """Tokens per row."""
    batch: int = 1
    """Number of rows."""
    bias: float = 0.0
    """Standard deviation of the selection bias; 0: the bias is 0."""
    draw: int = 0
    """Number of the random draw of weights and token ids. `comparison.pooled` takes the
    geometric mean of the errors of several draws."""

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Weights by DeepSeek-V3's names, float32.

        All differ from their initial values, except a selection bias of standard deviation 0.
        """
        rng = np.random.default_rng([0, self.draw] if self.draw else 0)
        drawn = {}
        for name, leaf in named_leaves(abstract(self.config)).items():
            std = self.bias if name.endswith(BUFFER) else leaf.shape[-1] ** -0.5
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            drawn[name] = (centre + std * rng.normal(size=leaf.shape)).astype(np.float32)
        return unstacked(drawn)

    @cached_property
    def ids(self) -> np.ndarray:
        """Token ids (B, L) int32."""
        rng = np.random.default_rng([1, self.draw] if self.draw else 1)
        return rng.integers(0, self.config.vocab_size, (self.batch, self.length)).astype(np.int32)

    @property
    def title(self) -> str:
        """Name of the case in measurements; it differs from names of Megalodon's cases."""
        return f"{SUBJECT} {self.name}"

    @property
    def hash(self) -> str:
        """Hash (16 hex digits) of configuration, weights and ids; equal hashes mean equal work."""
        digest = hashlib.sha256(json.dumps(self.config.to_hf(), sort_keys=True).encode())
        for name in sorted(self.weights):
            digest.update(name.encode() + self.weights[name].tobytes())
        digest.update(self.ids.tobytes())
        return digest.hexdigest()[:16]

    def model(self) -> MLAMoEForCausalLM:
        """Return the JAX model with these weights."""
        return build(self.config, self.weights, self.name)


CASES = (
    Case("dense", "dense layers only", replace(TINY, min_moe_layer=2)),
    Case("moe", "a dense and a sparse layer", TINY),
    Case(
        "grouped",
        "experts in groups, a selection bias, two shared experts, scaled weights",
        replace(
            TINY,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=3,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
        ),
        batch=2,
        length=8,
        bias=0.1,
    ),
    Case(
        "tied",
        "a tied head, queries not compressed, halves rotated, weights not normalised",
        replace(
            TINY,
            tie_word_embeddings=True,
            q_lora_rank=None,
            rope_interleave=False,
            norm_topk_prob=False,
        ),
    ),
    Case(
        "long",
        "beyond the length it was trained at, by YaRN",
        replace(TINY, rope_scaling=Yarn(4.0, 32, mscale=1.0, mscale_all_dim=0.8)),
        length=96,
    ),
)


def by_name(name: str) -> Case:
    """Return the case called `name`.

    Raises:
        ValueError: there is no such case.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"unknown case {name!r}: expected one of {', '.join(c.name for c in CASES)}.")
