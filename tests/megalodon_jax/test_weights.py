"""The weight table: every parameter, under the name and shape torch gives it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonConfig, MegalodonForCausalLM, roles
from megalodon_jax.weights import (
    Role,
    build_model,
    named_leaves,
    role_of,
    shape_problems,
    weight_table,
)
from tests.helpers import arrays, tiny

V, D, Z, E, F, N, OUT = 17, 8, 8, 12, 10, 2, 19
NORMS = {"timenorm.weight", "timenorm.bias", "rmsnorm.gamma"}
ATTENTION = {
    "timenorm.weight": (D,),
    "timenorm.bias": (D,),
    "cema.alpha": (D, N, 1),
    "cema.delta": (D, N, 1),
    "cema.theta": (D, 1, 1),
    "cema.gamma_real": (D, N),
    "cema.gamma_imag": (D, N),
    "cema.omega": (D,),
    "rmsnorm.gamma": (D,),
    "wz.weight": (Z, D),
    "wz.bias": (Z,),
    "wv.weight": (E, D),
    "wv.bias": (E,),
    "wr.weight": (E, D),
    "wr.bias": (E,),
    "wh1.weight": (D, D),
    "wh1.bias": (D,),
    "wh2.weight": (D, E),
    "wh2.bias": (D,),
    "gamma": (2, Z),
    "beta": (2, Z),
}
FEED_FORWARD = {
    "norm.weight": (D,),
    "norm.bias": (D,),
    "fc1.weight": (F, D),
    "fc1.bias": (F,),
    "fc2.weight": (D, F),
    "fc2.bias": (D,),
}
GATE = {"fc3.weight": (F, D), "fc3.bias": (F,)}
SENSITIVE_NAMES = {
    *("timenorm.weight", "timenorm.bias", "rmsnorm.gamma", "norm.weight", "norm.bias"),
    *("cema.alpha", "cema.delta", "cema.theta", "cema.gamma_real", "cema.gamma_imag"),
    *("cema.omega", "gamma", "beta"),
}


def layer(index: int, attention: dict, feed_forward: dict) -> dict:
    prefix = f"model.layers.{index}."
    return {f"{prefix}attn.{n}": s for n, s in attention.items()} | {
        f"{prefix}ffn.{n}": s for n, s in feed_forward.items()
    }


def swiglu_untied() -> tuple[MegalodonConfig, dict]:
    expected = {"model.embed.weight": (V, D), "lm_head.weight": (OUT, D)}
    expected |= {"model.norm.weight": (D,), "model.norm.bias": (D,)}
    for index in range(2):
        expected |= layer(index, ATTENTION, FEED_FORWARD | GATE)
    return tiny(swiglu=True, output_size=OUT), expected


def without_affine_norms() -> tuple[MegalodonConfig, dict]:
    attention = {n: s for n, s in ATTENTION.items() if n not in NORMS}
    feed_forward = {n: s for n, s in FEED_FORWARD.items() if not n.startswith("norm.")}
    expected = {"model.embed.weight": (V, D)}
    for index in range(2):
        expected |= layer(index, attention, feed_forward)
    return tiny(norm_affine=False), expected


CONFIGS = pytest.mark.parametrize(
    "build", [swiglu_untied, without_affine_norms], ids=lambda f: f.__name__
)


@CONFIGS
def test_names_and_shapes_are_those_of_the_state_dict(build) -> None:
    config, expected = build()
    assert {row.name: row.shape for row in weight_table(config)} == expected


@CONFIGS
def test_every_array_of_a_real_model_is_in_the_table(build) -> None:
    config, _ = build()
    model = MegalodonForCausalLM(config, key=jax.random.key(0))
    leaves = named_leaves(model)
    assert len(leaves) == len(jax.tree.leaves(model))
    assert {n: (x.shape, x.dtype) for n, x in leaves.items()} == {
        row.name: (row.shape, row.dtype) for row in weight_table(config)
    }


def test_the_sensitive_set_is_ema_norms_and_the_query_key_affine() -> None:
    config, expected = swiglu_untied()
    suffixes = {
        n.split(".", 4)[-1] if ".layers." in n else n.removeprefix("model.") for n in expected
    }
    assert suffixes >= SENSITIVE_NAMES
    table = weight_table(tiny(swiglu=True, output_size=OUT, param_dtype=jnp.bfloat16))
    for row in table:
        suffix = (
            row.name.split(".", 4)[-1]
            if ".layers." in row.name
            else row.name.removeprefix("model.")
        )
        assert row.sensitive == (suffix in SENSITIVE_NAMES), row.name
        assert row.dtype == (jnp.float32 if row.sensitive else jnp.bfloat16), row.name
    assert config.sensitive_dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed.weight", Role.EMBEDDING),
        ("lm_head.weight", Role.HEAD),
        ("model.layers.11.attn.cema.omega", Role.CEMA),
        ("model.layers.0.attn.timenorm.bias", Role.NORM),
        ("model.norm.weight", Role.NORM),
        ("model.layers.0.attn.beta", Role.QK_AFFINE),
        ("model.layers.0.ffn.fc1.bias", Role.BIAS),
        ("model.layers.0.ffn.fc1.weight", Role.LINEAR),
    ],
)
def test_a_role_follows_from_the_name(name: str, role: Role) -> None:
    assert role_of(name) is role


WITHOUT_ROLE = "model.layers.0.attn.wz.lora_a"


@pytest.mark.parametrize("name", ["model.router", WITHOUT_ROLE, "scale"])
def test_a_parameter_without_a_rule_has_the_role_other(name: str) -> None:
    assert role_of(name) is Role.OTHER


def without_role(config: MegalodonConfig) -> list[str]:
    weight_table.cache_clear()
    return [row.name for row in weight_table(config) if row.role is Role.OTHER]


@CONFIGS
def test_every_parameter_of_our_model_has_a_rule(build) -> None:
    assert without_role(build()[0]) == []


def test_a_parameter_of_our_model_without_a_rule_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(roles, "_ROLES", [r for r in roles._ROLES if r[1] is not Role.QK_AFFINE])
    found = without_role(swiglu_untied()[0])
    weight_table.cache_clear()
    assert found == [f"model.layers.{i}.attn.{n}" for i in (0, 1) for n in ("gamma", "beta")]


def test_building_reports_every_problem_in_one_error() -> None:
    config = tiny()
    weights = arrays(config)
    del weights["model.norm.bias"]
    del weights["model.layers.0.attn.beta"]
    weights["model.layers.1.attn.wz.weight"] = np.zeros((3, 3), np.float32)
    weights["model.layers.2.ffn.fc1.bias"] = np.zeros(4, np.float32)
    weights["model.layers.0.attn.gamma"] = np.zeros((2, 8), np.int32)
    with pytest.raises(ValueError) as raised:
        build_model(config, weights, source="checkpoint.bin")
    message = str(raised.value)
    assert message.startswith("checkpoint.bin does not fit the configuration, 5 problem(s)")
    for problem in (
        "missing model.norm.bias (8,)",
        "missing model.layers.0.attn.beta (2, 8)",
        "model.layers.1.attn.wz.weight has shape (3, 3), expected (8, 8)",
        "unexpected model.layers.2.ffn.fc1.bias (4,)",
        "model.layers.0.attn.gamma holds int32, expected floating-point numbers",
    ):
        assert problem in message


def test_names_of_a_file_are_listed_without_their_escapes() -> None:
    names = {"evil\x1b[31m\nname": np.ones(3)}
    assert shape_problems({}, names) == ["unexpected evil\\x1b[31m\\nname (3,)"]


def test_a_tied_head_may_repeat_the_embedding_and_nothing_else() -> None:
    config = tiny()
    weights = arrays(config)
    head = weights["model.embed.weight"].copy()
    assert build_model(config, weights | {"lm_head.weight": head}).tied
    head[3, 1] = np.nextafter(head[3, 1], np.float32(9))
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed.weight"):
        build_model(config, weights | {"lm_head.weight": head})


def test_a_tied_head_of_another_shape_is_a_problem() -> None:
    config = tiny()
    head = np.zeros((19, 8), np.float32)
    with pytest.raises(ValueError, match=r"lm_head.weight"):
        build_model(config, arrays(config) | {"lm_head.weight": head})
