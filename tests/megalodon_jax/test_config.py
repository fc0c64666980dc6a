"""The configuration: every rule names its field, and every form of it says the same thing."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from megalodon_jax import MegalodonConfig
from megalodon_jax.weights import weight_table
from tests.helpers import TINY, tiny

DTYPES = ("param_dtype", "compute_dtype", "accum_dtype", "softmax_dtype")
SIZES = (
    *("vocab_size", "model_dim", "num_layers", "num_heads", "z_dim", "value_dim"),
    *("ffn_hidden_dim", "cema_ndim", "chunk_size", "norm_num_groups", "max_positions"),
)


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Annotations are checked in tests only; users meet the configuration's own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}={value} must be at least 1"):
        tiny(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "hidden_dropout"])
def test_a_dropout_rate_lies_between_0_and_1(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}={value} must be in \[0, 1\]"):
        tiny(**{name: value})
    assert getattr(tiny(**{name: 1.0}), name) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_dim": 9}, r"z_dim=9 must be a multiple of num_heads=2"),
        ({"value_dim": 9}, r"value_dim=9 must be a multiple of num_heads=2"),
        ({"z_dim": 6}, r"z_dim=6 must be an even width per head"),
        ({"model_dim": 9}, r"model_dim=9 must be a multiple of norm_num_groups=2"),
        (
            {"max_cache_len": 3},
            r"max_cache_len=3 must be None or an integer of at least chunk_size=4",
        ),
        ({"max_cache_len": 9.5}, r"max_cache_len=9.5 must be None or an integer"),
        ({"max_cache_len": "9"}, r"max_cache_len='9' must be None or an integer"),
        ({"output_size": 0}, r"output_size=0 must be -1 or positive"),
        ({"output_size": -2}, r"output_size=-2 must be -1 or positive"),
        ({"pad_token_id": 17}, r"pad_token_id=17 must be None or a token below vocab_size=17"),
        ({"pad_token_id": -1}, r"pad_token_id=-1 must be None or a token below vocab_size=17"),
        ({"init_mode": "kaiming"}, r"init_mode='kaiming' must be one of \('he'"),
        ({"gemm_backend": "cutlass"}, r"gemm_backend='cutlass' must be one of \('default'"),
        (
            {"compute_dtype": "float32", "accum_dtype": "bfloat16"},
            r"accum_dtype=.*bfloat16.* must be no narrower than compute_dtype=float32",
        ),
    ],
)
def test_a_broken_rule_names_field_value_and_rule(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


@pytest.mark.parametrize("name", DTYPES)
def test_float16_is_refused_everywhere(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=float16 is refused.*bfloat16 or float32"):
        tiny(**{name: jnp.float16})


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("value", ["int32", "complex64", "float8_e5m2"])
def test_other_dtypes_are_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} must be one of"):
        tiny(**{name: value})


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("value", ["no_such_dtype", None])
def test_what_is_no_dtype_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        tiny(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["norm_eps", "rope_base"])
def test_what_is_divided_by_or_raised_is_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}={value} must be positive and finite"):
        tiny(**{name: value})
    assert getattr(tiny(**{name: 2.0}), name) == 2.0


def of_type(kind: str) -> list[str]:
    return [f.name for f in dataclasses.fields(MegalodonConfig) if str(f.type).startswith(kind)]


@pytest.mark.parametrize("value", [8.0, "8", None, True])
@pytest.mark.parametrize("name", of_type("int"))
def test_what_is_no_integer_is_refused_by_name(name: str, value: object) -> None:
    if (value is None and name.endswith("token_id")) or (name, value) == ("max_cache_len", None):
        assert getattr(tiny(**{name: None}), name) is None
        return
    with pytest.raises(ValueError, match=rf"\b{name}={value!r} must be (None, |None or )?an int"):
        tiny(**{name: value})


@pytest.mark.parametrize("value", ["no", "false", 0, 1, None])
@pytest.mark.parametrize("name", of_type("bool"))
def test_what_is_no_flag_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}={value!r} must be True or False"):
        tiny(**{name: value})
    assert {getattr(tiny(**{name: flag}), name) for flag in (True, False)} == {True, False}


@pytest.mark.parametrize("value", ["0.1", [0.1], True])
@pytest.mark.parametrize("name", of_type("float"))
def test_a_rate_that_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=rf"\b{name}={re.escape(repr(value))} must be (None or )?a num"
    ):
        tiny(**{name: value})


@pytest.mark.parametrize("name", ["dropout", "norm_eps"])
def test_only_the_rope_base_may_be_absent(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=None must be a number"):
        tiny(**{name: None})
    assert tiny(rope_base=None).rope_base is None


@pytest.mark.parametrize("name", DTYPES)
def test_float64_needs_64_bit_jax(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=float64 needs 64-bit JAX"):
        tiny(**{name: "float64"})
    with jax.enable_x64(True):
        assert TINY.with_dtype("float64").sensitive_dtype == jnp.float64


def test_equal_configurations_hash_equal_however_dtypes_are_written() -> None:
    left, right = tiny(compute_dtype=jnp.bfloat16), tiny(compute_dtype="bfloat16")
    assert left == right
    assert hash(left) == hash(right)
    assert left != TINY
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.model_dim = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_a_dict_of_json_values_round_trips() -> None:
    config = tiny(compute_dtype="bfloat16", rope_base=5e4, max_cache_len=9, dropout=0.1)
    assert MegalodonConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_field_is_refused_and_the_right_reader_named() -> None:
    with pytest.raises(ValueError, match=r"unknown fields \['hidden_size'\].*from_hf"):
        MegalodonConfig.from_dict({"model_dim": 8, "hidden_size": 8})


def test_a_hugging_face_config_is_read_past_its_bookkeeping() -> None:
    bookkeeping = {
        "model_type": "megalodon",
        "architectures": ["MegalodonForCausalLM"],
        "transformers_version": "4.57.1",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "gradient_checkpointing": True,
    }
    sizes = TINY.to_hf()
    del sizes["gradient_checkpointing"]
    assert MegalodonConfig.from_hf(sizes | bookkeeping) == tiny(use_checkpoint=True)


def test_a_config_object_is_read_like_its_dict() -> None:
    class Remote:
        def to_dict(self) -> dict:
            return TINY.to_hf()

    assert MegalodonConfig.from_hf(Remote()) == TINY


def test_another_models_config_is_refused() -> None:
    with pytest.raises(ValueError, match="model_type is 'llama', expected 'megalodon'"):
        MegalodonConfig.from_hf({"model_type": "llama"})


def test_the_7b_setup_is_that_of_megalodon_hf() -> None:
    config = MegalodonConfig.from_7b()
    assert (config.model_dim, config.num_layers, config.num_heads) == (4096, 32, 4)
    assert (config.z_dim, config.value_dim, config.ffn_hidden_dim) == (1024, 8192, 11264)
    assert (config.chunk_size, config.norm_num_groups, config.rope_base) == (4096, 64, 1e5)
    assert config.swiglu
    assert parameters(config) == 8_463_687_680


def parameters(config: MegalodonConfig) -> int:
    return sum(math.prod(row.shape) for row in weight_table(config))


def of_the_original(config: MegalodonConfig, tied: bool) -> int:
    """Parameters of the original implementation, counted by hand from its layers."""
    D, Z, E, F, N = (
        config.model_dim, config.z_dim, config.value_dim, config.ffn_hidden_dim, config.cema_ndim,
    )  # fmt: skip
    norms, cema = 2 * D + D + 2 * D, D * N * 4 + 2 * D
    maps = D * (Z + 2 * E + D) + (Z + 2 * E + D) + E * D
    ffn = (3 if config.swiglu else 2) * D * F
    block = norms + cema + maps + 4 * Z + ffn
    return config.num_layers * block + 2 * D + config.vocab_size * D * (1 if tied else 2)


@pytest.mark.parametrize(
    ("name", "count", "original"),
    [
        ("mega200M", 187_915_264, 220.6e6),
        ("mega1.3B", 1_277_511_680, 1.343e9),
        ("mega1.3B_pg19", 1_327_898_624, 1.328e9),
        ("mega7.1B", 6_986_932_224, 7.117e9),
        ("mega7.3B", 7_255_531_520, 7.386e9),
    ],
)
def test_presets_have_the_sizes_of_the_original(name: str, count: int, original: float) -> None:
    config = MegalodonConfig.preset(name)
    assert config.tied and config.chunk_size == 2048 and config.vocab_size == 32_000
    assert parameters(config) == count
    tied = name == "mega1.3B_pg19"
    theirs = of_the_original(config, tied)
    assert theirs == pytest.approx(original, rel=1e-3)  # bound: four digits of a count in a table
    biases = config.num_layers * (
        config.ffn_hidden_dim * (1 + config.swiglu) + 2 * config.model_dim
    )
    head = 0 if tied else config.vocab_size * config.model_dim
    assert count == theirs + biases - head


def test_a_preset_takes_changes_and_an_unknown_one_is_refused() -> None:
    config = MegalodonConfig.preset("mega7.3B", chunk_size=4096, vocab_size=100)
    assert (config.chunk_size, config.vocab_size, config.ffn_hidden_dim) == (4096, 100, 8192)
    with pytest.raises(ValueError, match="no preset '7B'; there are mega200M, mega1"):
        MegalodonConfig.preset("7B")


def test_the_defaults_are_the_200m_setup() -> None:
    config = MegalodonConfig()
    assert (config.model_dim, config.num_layers, config.num_heads) == (1024, 12, 1)
    assert (config.z_dim, config.value_dim, config.ffn_hidden_dim) == (256, 2048, 2560)
    assert (config.cema_ndim, config.chunk_size, config.norm_num_groups) == (16, 2048, 32)
    assert (config.vocab_size, config.output_size, config.swiglu) == (32_000, -1, False)


def test_properties_follow_from_the_fields() -> None:
    assert (TINY.head_dim, TINY.value_head_dim) == (4, 6)
    assert (TINY.effective_rope_base, tiny(rope_base=7.0).effective_rope_base) == (10_000.0, 7.0)
    assert TINY.effective_max_cache_len == 4
    for window in (TINY.chunk_size, 9):
        assert tiny(max_cache_len=window).effective_max_cache_len == window
    assert tiny(cache_unbounded=True).effective_max_cache_len is None
    assert (TINY.tied, tiny(output_size=17).tied, tiny(output_size=5).tied) == (True, True, False)
    assert tiny(param_dtype="bfloat16").sensitive_dtype == jnp.float32
