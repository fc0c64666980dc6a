"""Configuration of a model: sizes, dropout rates and dtypes; validated when created, hashable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megalodon_jax.policy import Policy, Rules, as_policy

InitMode = Literal["he", "xavier", "bert", "gaussian", "none"]
GemmBackend = Literal[
    "default",
    "mxfp8",
    "mxfp8-nvfp4",
    "nvfp4",
    "nvfp4-nearest",
    "nvfp4-unrotated",
    "nvfp4-nearest-unrotated",
]

HF_MODEL_TYPE = "megalodon"
DTYPES = ("float32", "bfloat16", "float64")
_DTYPE_FIELDS = ("param_dtype", "compute_dtype", "accum_dtype", "softmax_dtype")
_SIZES = (
    "vocab_size",
    "model_dim",
    "num_layers",
    "num_heads",
    "z_dim",
    "value_dim",
    "ffn_hidden_dim",
    "cema_ndim",
    "chunk_size",
    "norm_num_groups",
    "max_positions",
)
_RATES = ("dropout", "attention_dropout", "hidden_dropout")
# Fields are checked by their annotation, so that no field of these types can be forgotten.
_TYPES = {
    "bool": (lambda value: type(value) is bool, "True or False"),
    "int": (lambda value: type(value) is int, "an integer"),
    "float": (
        lambda value: type(value) is not bool and isinstance(value, (int, float)),
        "a number",
    ),
}
# Fields with another name in megalodon-hf: from its name to ours.
_HF_NAMES = {"gradient_checkpointing": "use_checkpoint"}


@dataclasses.dataclass(frozen=True)
class MegalodonConfig:
    """Sizes, dropout rates and dtypes of a model; the defaults are the preset "mega200M".

    Frozen and hashable, so it can be a static argument under `jax.jit`. Symbols are the
    paper's: D `model_dim`, H `num_heads`, Z `z_dim`, E `value_dim`, F `ffn_hidden_dim`,
    N `cema_ndim`, C `chunk_size`, G `norm_num_groups`, V `vocab_size`.

    Four dtypes set the precision: parameters are stored in `param_dtype` (precision-sensitive ones
    never below float32), operands of matrix products are rounded to `compute_dtype`, products and
    all activations between them are kept in `accum_dtype`, and softmax and loss are computed in
    `softmax_dtype`.

    Raises:
        ValueError: a field has an invalid value; the message names the field, its value and the
            rule.
    """

    vocab_size: int = 32_000
    model_dim: int = 1024
    num_layers: int = 12
    num_heads: int = 1
    z_dim: int = 256
    value_dim: int = 2048
    ffn_hidden_dim: int = 2560
    cema_ndim: int = 16
    chunk_size: int = 2048
    max_cache_len: int | None = None
    """Number of tokens whose keys and values a cache retains; None means `chunk_size`."""
    cache_unbounded: bool = False
    """Whether a cache retains all tokens, whatever `max_cache_len` is."""
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    rope_base: float | None = None
    """Base of the rotary embedding's frequencies; None means 10 000."""
    swiglu: bool = False
    """Whether a third matrix gates the hidden features of feed-forward nets."""
    rescale_nffn: bool = False
    """Whether layer i, from 0, multiplies its feed-forward output by `0.1 * 0.5**i`."""
    scale_emb: bool = False
    """Whether embeddings are multiplied by sqrt(D)."""
    norm_affine: bool = True
    """Whether norms have trainable gains and biases."""
    mask_ema: bool = True
    """Whether masked tokens enter the EMA as zeros; False (as megalodon-hf): with their values."""
    dropout: float = 0.0
    """Dropout rate of the two outputs that a block (attention, FFN) adds to its residual stream."""
    attention_dropout: float = 0.0
    """Dropout rate of attention weights."""
    hidden_dropout: float = 0.0
    """Dropout rate of the normalised EMA output, gated attention output and FFN hidden features."""
    pad_token_id: int | None = 0
    """Id of the padding token, whose embedding gets no gradient; None: every embedding gets one."""
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2
    """Id of the token that ends a text, several ids (stored as a tuple), or None."""
    max_positions: int = 1_000_000
    """Not used here; a field of megalodon-hf's configuration that conversions preserve."""
    init_mode: InitMode = "he"
    """Distribution of initial weights (`megalodon_jax.layers.linear.init_weight`)."""
    use_checkpoint: bool = False
    """Whether the backward pass recomputes each block (with `deterministic=False` only)."""
    scan_layers: bool = False
    """Whether consecutive layers of equal structure run as one loop, with one compiled body."""
    output_size: int = -1
    """Number of logits of a separate head. With -1 or `vocab_size` there is no separate head: the
    embedding matrix is the head."""
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    accum_dtype: DTypeLike = jnp.float32
    softmax_dtype: DTypeLike = jnp.float32
    gemm_backend: GemmBackend | Rules = "default"
    """Backend of products with the blocks' weight matrices (`megalodon_jax.quantization.products`):
    one backend name, or rules (pattern of matrix names, backend name). The first rule that matches
    a matrix applies; a matrix that no rule matches has backend "default". Rules may match the
    output head, `lm_head`, to which a single backend name does not apply."""

    def __post_init__(self) -> None:
        for name in _DTYPE_FIELDS:
            object.__setattr__(self, name, checked_dtype(name, getattr(self, name)))
        self._check_types()
        for name in _SIZES:
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in _RATES:
            _require(self, name, 0.0 <= getattr(self, name) <= 1.0, "in [0, 1]")
        if self.gemm_backend not in get_args(GemmBackend):
            rules = as_policy(
                self.gemm_backend, get_args(GemmBackend), "MegalodonConfig: gemm_backend"
            )
            object.__setattr__(self, "gemm_backend", rules or "default")
        self._check_divisibility()
        self._check_ranges()
        self._check_dtypes()

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            kind, value = str(field.type).removesuffix(" | None"), getattr(self, field.name)
            optional = kind != field.type
            if kind not in _TYPES or (optional and value is None):
                continue
            holds, rule = _TYPES[kind]
            _require(self, field.name, holds(value), f"None or {rule}" if optional else rule)
        ends = self.eos_token_id
        if isinstance(ends, (list, tuple)):
            object.__setattr__(self, "eos_token_id", tuple(ends))
        several = ends if isinstance(ends, (list, tuple)) else [0 if ends is None else ends]
        integers = bool(several) and all(type(token) is int for token in several)
        _require(self, "eos_token_id", integers, "None, an integer or a list of them")

    def _check_divisibility(self) -> None:
        heads, groups = self.num_heads, self.norm_num_groups
        _require(self, "z_dim", self.z_dim % heads == 0, f"a multiple of num_heads={heads}")
        _require(self, "value_dim", self.value_dim % heads == 0, f"a multiple of num_heads={heads}")
        _require(
            self, "z_dim", self.head_dim % 2 == 0, f"an even width per head, for RoPE (/{heads})"
        )
        _require(
            self,
            "model_dim",
            self.model_dim % groups == 0,
            f"a multiple of norm_num_groups={groups}",
        )

    def _check_ranges(self) -> None:
        for name in ("norm_eps", "rope_base"):
            value = getattr(self, name)
            _require(self, name, value is None or 0 < value < math.inf, "positive and finite")
        _require(
            self,
            "max_cache_len",
            self.max_cache_len is None or self.max_cache_len >= self.chunk_size,
            f"None or an integer of at least chunk_size={self.chunk_size}",
        )
        _require(
            self, "output_size", self.output_size == -1 or self.output_size >= 1, "-1 or positive"
        )
        _require(
            self,
            "pad_token_id",
            self.pad_token_id is None or 0 <= self.pad_token_id < self.vocab_size,
            f"None or a token below vocab_size={self.vocab_size}",
        )
        kinds = get_args(InitMode)
        _require(self, "init_mode", self.init_mode in kinds, f"one of {kinds}")

    def _check_dtypes(self) -> None:
        accum, compute = jnp.dtype(self.accum_dtype), jnp.dtype(self.compute_dtype)
        _require(
            self,
            "accum_dtype",
            accum.itemsize >= compute.itemsize,
            f"no narrower than compute_dtype={compute.name}",
        )
        _require(
            self,
            "gemm_backend",
            self.gemm_backend == "default" or accum.itemsize <= 4,
            f"'default' with accum_dtype={accum.name}: low-precision products sum in float32",
        )

    @property
    def head_dim(self) -> int:
        """Width of one query/key head, Z/H."""
        return self.z_dim // self.num_heads

    @property
    def value_head_dim(self) -> int:
        """Width of one value head, E/H."""
        return self.value_dim // self.num_heads

    @property
    def effective_rope_base(self) -> float:
        """RoPE base in use: `rope_base`, or 10 000."""
        return 10_000.0 if self.rope_base is None else float(self.rope_base)

    @property
    def effective_max_cache_len(self) -> int | None:
        """Number of tokens whose keys and values a cache retains; None if unbounded."""
        if self.cache_unbounded:
            return None
        return self.chunk_size if self.max_cache_len is None else self.max_cache_len

    @property
    def gemm_policy(self) -> Policy:
        """`gemm_backend` as rules (pattern of full names of linear maps, backend name)."""
        chosen: Any = self.gemm_backend
        # A single name excludes the head, the most expensive and most sensitive matrix.
        return (("model.*", chosen),) if isinstance(chosen, str) else chosen

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding matrix (docs/model.md "State dict")."""
        return self.output_size in (-1, self.vocab_size)

    @property
    def sensitive_dtype(self) -> np.dtype:
        """Storage dtype of precision-sensitive parameters: `param_dtype`, but at least float32."""
        return widened(self.param_dtype)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> MegalodonConfig:
        """Return the configuration of a model size of the original Megalodon.

        Sizes, SwiGLU, the embedding's scale and a `chunk_size` of 2,048 are those of the table in
        the original's code. As in megalodon-hf, the head is the embedding (the original has a
        separate V x D matrix, except for pg19), and feed-forward maps and the map `wh2` of gated
        attention outputs have biases (the original's have none). docs/guide.md "Sizes" counts the
        parameters of each size.

        Args:
            name: a key of `PRESETS`, such as "mega7.1B".
            changes: fields to change, such as `vocab_size` or `chunk_size`.

        Raises:
            ValueError: there is no such preset, or a field in `changes` has an invalid value.
        """
        if name not in PRESETS:
            raise ValueError(
                f"MegalodonConfig.preset: no preset {name!r}; there are {', '.join(PRESETS)}."
            )
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_7b(cls) -> MegalodonConfig:
        """Return the configuration of megalodon-hf's `from_7b_setup`: 8.46 billion parameters.

        It has SwiGLU and a feed-forward width of 11,264. The original has no such size:
        `preset("mega7.1B")` has this width without SwiGLU, and `preset("mega7.3B")` has SwiGLU with
        a width of 8,192.
        """
        return cls.preset("mega7.1B", swiglu=True, chunk_size=4096, rope_base=100_000.0)

    def with_dtype(self, dtype: DTypeLike) -> MegalodonConfig:
        """Return this configuration with all four dtypes set to `dtype`."""
        return dataclasses.replace(self, **dict.fromkeys(_DTYPE_FIELDS, dtype))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, dtypes as names; `scan_layers` only if it is True."""
        fields = dataclasses.asdict(self)
        if not self.scan_layers:
            # The field was added later: configurations written or hashed before must not change.
            del fields["scan_layers"]
        if not isinstance(self.gemm_backend, str):
            fields["gemm_backend"] = [list(rule) for rule in self.gemm_policy]
        if isinstance(self.eos_token_id, tuple):
            fields["eos_token_id"] = list(self.eos_token_id)
        return fields | {name: jnp.dtype(fields[name]).name for name in _DTYPE_FIELDS}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MegalodonConfig:
        """Build a configuration from the result of `to_dict`.

        Raises:
            ValueError: a key is not a field of the configuration, or a field has an invalid value.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(
                f"MegalodonConfig.from_dict: unknown fields {unknown}; "
                f"expected only {sorted(known)}. "
                "For a Hugging Face config use MegalodonConfig.from_hf."
            )
        return cls(**fields)

    @classmethod
    def from_hf(cls, config: Any) -> MegalodonConfig:
        """Convert a megalodon-hf configuration: an object, or the dict of its `config.json`.

        Fields unrelated to the mathematics (Transformers' bookkeeping) are ignored. An
        `output_size` of None becomes -1. Inverse of `to_hf`.

        Raises:
            ValueError: `model_type` is not "megalodon", `tie_word_embeddings` contradicts
                `output_size`, or a field has an invalid value.
        """
        fields = dict(config) if isinstance(config, Mapping) else dict(config.to_dict())
        if fields.get("model_type", HF_MODEL_TYPE) != HF_MODEL_TYPE:
            raise ValueError(
                f"MegalodonConfig.from_hf: model_type is {fields['model_type']!r}, "
                f"expected {HF_MODEL_TYPE!r}."
            )
        fields = {_HF_NAMES.get(name, name): value for name, value in fields.items()}
        if fields.get("output_size", -1) is None:
            fields["output_size"] = -1
        known = {field.name for field in dataclasses.fields(cls)}
        found = cls(**{name: value for name, value in fields.items() if name in known})
        if fields.get("tie_word_embeddings") and not found.tied:
            raise ValueError(
                f"MegalodonConfig.from_hf: output_size={found.output_size} means a separate head, "
                "but with tie_word_embeddings=True megalodon-hf uses the embedding as its head; "
                "set tie_word_embeddings=False, or output_size=-1."
            )
        return found

    def to_hf(self) -> dict[str, Any]:
        """Return the content of megalodon-hf's `config.json`, a dict of JSON values.

        The dict is also valid as keyword arguments of megalodon-hf's configuration class. It
        includes fields unknown to megalodon-hf, which stores but does not use them.
        """
        names = {ours: theirs for theirs, ours in _HF_NAMES.items()}
        fields = {names.get(name, name): value for name, value in self.to_dict().items()}
        # Transformers ties the head whatever output_size says, unless this field is False.
        fields |= {"model_type": HF_MODEL_TYPE, "tie_word_embeddings": self.tied}
        return dict(sorted((fields | {"architectures": ["MegalodonForCausalLM"]}).items()))


_1_3B = {
    "model_dim": 2048,
    "num_layers": 24,
    "num_heads": 2,
    "z_dim": 512,
    "value_dim": 4096,
    "ffn_hidden_dim": 4864,
    "norm_num_groups": 64,
}
_7B = {
    "model_dim": 4096,
    "num_layers": 32,
    "num_heads": 4,
    "z_dim": 1024,
    "value_dim": 8192,
    "ffn_hidden_dim": 11_264,
    "norm_num_groups": 64,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "mega200M": {},
    "mega1.3B": _1_3B,
    "mega1.3B_pg19": _1_3B | {"ffn_hidden_dim": 3584, "swiglu": True, "scale_emb": True},
    "mega7.1B": _7B,
    "mega7.3B": _7B | {"ffn_hidden_dim": 8192, "swiglu": True},
}
"""Configuration fields by model size, as named in the original implementation (XuezheMax/megalodon,
`megalodon/model/mega.py`, `ModelStore`); other fields have the defaults of `MegalodonConfig`."""


def widened(dtype: DTypeLike) -> np.dtype:
    """Return `dtype`, or float32 if `dtype` is narrower. Used for sums and sensitive parameters."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype(jnp.float32)


def _require(config: MegalodonConfig, name: str, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"MegalodonConfig: {name}={getattr(config, name)!r} must be {rule}.")


def checked_dtype(name: str, value: DTypeLike | None, owner: str = "MegalodonConfig") -> np.dtype:
    """Convert `value` to a NumPy dtype, and check that the model supports it.

    Errors name the argument (`name`) and the class or function it was given to (`owner`).

    Raises:
        ValueError: the dtype is not float32, bfloat16 or float64, or is float64 without 64-bit
            JAX.
    """
    try:
        dtype = None if value is None else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None:
        raise ValueError(f"{owner}: {name}={value} must be one of {DTYPES}.")
    if dtype.name == "float16":
        raise ValueError(
            f"{owner}: {name}=float16 is refused: EMA states exceed its range. "
            "Use bfloat16 or float32."
        )
    if dtype.name not in DTYPES:
        raise ValueError(f"{owner}: {name}={dtype.name} must be one of {DTYPES}.")
    if dtype.name == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"{owner}: {name}=float64 needs 64-bit JAX. "
            "Set jax_enable_x64, or work inside `with jax.enable_x64(True):`."
        )
    return dtype
