"""Configuration of an MLA + mixture-of-experts decoder, with DeepSeek-V3's names and constraints.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.1; YaRN (arXiv 2309.00071);
docs/mla-moe.md "The stability guide" (`min_moe_layer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

MODEL_TYPE = "deepseek_v3"
"""`model_type` in the `config.json` of a DeepSeek-V3 checkpoint."""


@dataclass(frozen=True)
class Yarn:
    """YaRN: RoPE extended beyond the trained length. Fields are those of `rope_scaling`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def amplitude(self) -> float:
        """Factor on cosine and sine of the rotation angles."""
        if self.mscale and self.mscale_all_dim:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature(1.0)

    def temperature(self, scale: float) -> float:
        """Return `0.1 scale ln(factor) + 1` (YaRN, section 3.4); 1 if `factor` is at most 1."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class MLAMoEConfig:
    """Configuration of the model, with DeepSeek-V3's field names.

    Raises:
        ValueError: a field has an invalid value, or fields contradict each other; the message names
            the fields and their values.
    """

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    q_lora_rank: int | None = 96
    """Width of compressed queries; None: queries are not compressed."""
    kv_lora_rank: int = 64
    """Width of compressed keys and values; a cache holds these and the rotary key."""
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    """Width of the rotary part; its key is shared by all heads and not compressed."""
    v_head_dim: int = 32
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    """Number of the `n_group` groups that a token may choose experts from: those with the
    largest sums of their two largest values of score plus selection bias."""
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    """"sigmoid" (DeepSeek-V3) or "softmax"."""
    min_moe_layer: int = 4
    """Number of dense layers, which come first; DeepSeek's `first_k_dense_replace`."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    """Whether RoPE rotates pairs of neighbouring elements; False: pairs of elements
    i and i + qk_rope_head_dim / 2."""
    rope_scaling: Yarn | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    activation_limit: float | None = None
    """Clip each element of the hidden states to this magnitude after each block; None: no
    clipping."""
    dropout: float = 0.0
    """Dropout rate in training, of the embedding and of the outputs of attention and MLP."""

    def __post_init__(self) -> None:
        for expected, holds in self._rules():
            if not holds:
                raise ValueError(f"MLAMoEConfig: {expected}.")

    def _rules(self) -> list[tuple[str, bool]]:
        E, G = self.n_routed_experts, self.n_group
        k, picked = self.num_experts_per_tok, self.topk_group
        positive = [f.name for f in fields(self) if f.type == "int" and f.name not in _MAY_BE_ZERO]
        small = [n for n in positive if getattr(self, n) < 1]
        said = ", ".join(f"{n}={getattr(self, n)}" for n in small)
        rank, each = self.q_lora_rank, E // max(G, 1)
        return [
            (f"sizes must be at least 1, got {said}", not small),
            (f"q_lora_rank={rank} must be None or at least 1", rank is None or rank >= 1),
            (
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: rotations act on pairs",
                self.qk_rope_head_dim % 2 == 0,
            ),
            (
                f"n_routed_experts={E} must be a multiple of n_group={G}",
                E % max(G, 1) == 0,
            ),
            (f"topk_group={picked} must be at most n_group={G}", picked <= G),
            (
                f"num_experts_per_tok={k} must be at most {picked * each}, the experts that can be "
                f"chosen: topk_group={picked} groups of {each}, of n_routed_experts={E}",
                k <= picked * each,
            ),
            (
                f"a group is scored by its best two experts, but n_routed_experts={E} in "
                f"n_group={G} leaves {each} in each",
                each >= 2,
            ),
            (
                f"min_moe_layer={self.min_moe_layer} must be between 0 and num_hidden_layers="
                f"{self.num_hidden_layers}",
                0 <= self.min_moe_layer <= self.num_hidden_layers,
            ),
            (
                f"activation_limit={self.activation_limit} must be None or positive",
                self.activation_limit is None or self.activation_limit > 0,
            ),
            (f"dropout={self.dropout} must be from 0 to below 1", 0.0 <= self.dropout < 1.0),
            (
                f"scoring_func={self.scoring_func!r} must be 'sigmoid' or 'softmax'",
                self.scoring_func in ("sigmoid", "softmax"),
            ),
        ]

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key per head: non-rotary and rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """Factor on the products of queries and keys: 1/sqrt(qk_head_dim).

        With YaRN and an `mscale_all_dim` other than 0, times the square of
        `rope_scaling.temperature(mscale_all_dim)`.
        """
        yarn = self.rope_scaling
        stretch = yarn.temperature(yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
        return self.qk_head_dim**-0.5 * stretch**2

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has routed experts."""
        return layer >= self.min_moe_layer

    def rotations(self) -> np.ndarray:
        """Return the rotation rate of each pair in radians per position.

        The result is float64, (qk_rope_head_dim / 2,).
        """
        d, theta, yarn = self.qk_rope_head_dim, self.rope_theta, self.rope_scaling
        plain = theta ** (-np.arange(0, d, 2) / d)
        if yarn is None:
            return plain

        def pair_that_turns(times: float) -> float:
            turns = yarn.original_max_position_embeddings / (times * 2 * math.pi)
            return d * math.log(turns) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(yarn.beta_slow)), d - 1)
        # 0.001 avoids a division by zero; it is the value that Transformers uses.
        width = high - low or 0.001
        stretched = np.clip((np.arange(d // 2) - low) / width, 0.0, 1.0)
        return plain * (1.0 - stretched) + plain / yarn.factor * stretched

    def to_hf(self) -> dict[str, Any]:
        """Return the configuration as the content of a DeepSeek-V3 `config.json`."""
        held = asdict(self)
        held["first_k_dense_replace"] = held.pop("min_moe_layer")
        # DeepSeek-V3 does not know these two fields of training; they are written only if used.
        if self.activation_limit is None:
            held.pop("activation_limit")
        if not self.dropout:
            held.pop("dropout")
        if self.rope_scaling is not None:
            held["rope_scaling"] = {"type": "yarn", **held["rope_scaling"]}
            reach = self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings
            held["max_position_embeddings"] = int(reach)
        more = {"num_key_value_heads": self.num_attention_heads, "model_type": MODEL_TYPE}
        return held | more

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> MLAMoEConfig:
        """Return the configuration from the content of a DeepSeek-V3 `config.json`.

        Fields that this model does not use are ignored.

        Raises:
            ValueError: the content describes another architecture or an unsupported feature, or
                fields contradict each other.
        """
        if (kind := given.get("model_type")) != MODEL_TYPE:
            raise ValueError(
                f"this is a checkpoint of {kind!r}, expected model_type {MODEL_TYPE!r}; a "
                "Megalodon loads with megalodon_jax.convert.load_from_pretrained."
            )
        held = dict(given)
        if "first_k_dense_replace" in held:
            held["min_moe_layer"] = held["first_k_dense_replace"]
        held["rope_scaling"] = _yarn(held.get("rope_scaling"), held)
        known = {f.name for f in fields(cls)}
        config = cls(**{name: value for name, value in held.items() if name in known})
        config._refuse_what_is_missing(given)
        return config

    def _refuse_what_is_missing(self, given: Mapping[str, Any]) -> None:
        expected = {
            "qk_head_dim": self.qk_head_dim,
            "num_key_value_heads": self.num_attention_heads,
            "attention_bias": False,
            "hidden_act": "silu",
        }
        for name, value in expected.items():
            if (found := given.get(name, value)) not in (value, None):
                raise ValueError(
                    f"config.json has {name}={found!r}, which this model does not support: given "
                    f"the other fields, expected {value!r}."
                )


def _yarn(given: Any, whole: Mapping[str, Any]) -> Yarn | None:
    if given is None or isinstance(given, Yarn):
        return given
    kind = given.get("rope_type", given.get("type"))
    if kind in (None, "default"):
        return None
    if kind != "yarn":
        raise ValueError(
            f"config.json: rope_scaling has the type {kind!r}; this model supports only 'yarn'."
        )
    known = {f.name for f in fields(Yarn)}
    held = {n: v for n, v in given.items() if n in known and v is not None}
    held.setdefault("original_max_position_embeddings", whole.get("max_position_embeddings"))
    try:
        return Yarn(**held)
    except TypeError as error:
        raise ValueError(
            f"config.json: rope_scaling {dict(given)} is incomplete: {error}"
        ) from error


_MAY_BE_ZERO = ("min_moe_layer",)
SMALL = MLAMoEConfig()
"""Default configuration. This project chose its widths: docs/mla-moe.md "Limits"."""
SIZES = {
    "small": SMALL,
    "medium": replace(
        SMALL,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        q_lora_rank=384,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=2048,
        moe_intermediate_size=384,
    ),
    "large": replace(
        SMALL,
        hidden_size=1536,
        num_hidden_layers=24,
        num_attention_heads=16,
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_nope_head_dim=96,
        qk_rope_head_dim=32,
        v_head_dim=96,
        intermediate_size=4096,
        moe_intermediate_size=768,
        n_routed_experts=32,
    ),
    "xl": replace(
        SMALL,
        hidden_size=2048,
        num_hidden_layers=32,
        num_attention_heads=16,
        q_lora_rank=1024,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=5632,
        moe_intermediate_size=1024,
        n_routed_experts=64,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
    ),
}


def by_size(name: str) -> MLAMoEConfig:
    """Return the configuration of a size, one of the names in `SIZES`.

    Raises:
        ValueError: there is no such size.
    """
    if name not in SIZES:
        raise ValueError(f"unknown size {name!r}: expected one of {', '.join(SIZES)}.")
    return SIZES[name]
