"""Audits of sensitive parameters: the dtype they have, and the digits they still hold."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.precision import (
    audit_rounded_values,
    audit_sensitive_param_dtypes,
    ensure_sensitive_param_dtype,
    other_leaves,
    sensitive_leaves,
)
from megalodon_jax.weights import named_leaves, replace_leaves, weight_table
from tests.helpers import TINY, adapted, model_of, same_leaves

ALPHA = "model.layers.0.attn.cema.alpha"
GAMMA = "model.layers.1.attn.rmsnorm.gamma"
BIAS = "model.layers.0.ffn.fc1.bias"


def narrowed(model, *names: str):
    leaves = named_leaves(model)
    return replace_leaves(model, {n: leaves[n].astype(jnp.bfloat16) for n in names})


def test_a_model_as_built_is_clean() -> None:
    model = model_of(TINY)
    assert audit_sensitive_param_dtypes(model) == {}
    assert audit_rounded_values(model) == {}


def test_the_dtype_audit_names_exactly_the_sensitive_leaves_that_are_narrow() -> None:
    found = audit_sensitive_param_dtypes(narrowed(model_of(TINY), ALPHA, GAMMA, BIAS))
    assert found == {ALPHA: jnp.bfloat16, GAMMA: jnp.bfloat16}


def test_a_blanket_cast_is_seen_on_every_sensitive_leaf() -> None:
    model = model_of(TINY)
    cast = narrowed(model, *named_leaves(model))
    expected = {row.name for row in weight_table(TINY) if row.sensitive}
    assert set(audit_sensitive_param_dtypes(cast)) == expected
    assert set(audit_sensitive_param_dtypes(model, expected_dtype="bfloat16")) == expected


def test_a_model_that_already_fits_is_returned_unchanged() -> None:
    model = model_of(TINY)
    assert same_leaves(ensure_sensitive_param_dtype(model), model)


def test_casting_back_mends_the_dtype_and_only_the_value_audit_sees_the_loss() -> None:
    model = model_of(TINY)
    mended = ensure_sensitive_param_dtype(narrowed(model, ALPHA, BIAS))
    assert audit_sensitive_param_dtypes(mended) == {}
    assert audit_rounded_values(mended) == {ALPHA: named_leaves(model)[ALPHA].size}
    assert named_leaves(mended)[BIAS].dtype == jnp.bfloat16, "insensitive leaves are left alone"


def test_one_wide_value_clears_a_leaf() -> None:
    model = ensure_sensitive_param_dtype(narrowed(model_of(TINY), ALPHA))
    alpha = sensitive_leaves(model)[ALPHA]
    wide = jnp.asarray(np.float32(1) + np.finfo(np.float32).eps)
    cleared = replace_leaves(model, {ALPHA: alpha.at[0, 0, 0].set(wide)})
    assert audit_rounded_values(cleared) == {}


def test_a_repeated_value_proves_nothing() -> None:
    model = model_of(TINY)
    trivial = {n: jnp.ones_like(leaf) for n, leaf in sensitive_leaves(model).items()}
    assert audit_rounded_values(replace_leaves(model, trivial)) == {}


def test_the_audits_work_on_any_pytree_with_known_names() -> None:
    class Head(eqx.Module):
        norm: dict

    tree = Head({"weight": jnp.asarray([1.0, 1.5], jnp.bfloat16)})
    assert audit_sensitive_param_dtypes(tree) == {"norm.weight": jnp.bfloat16}


def test_sensitive_parameters_are_not_cast_to_float16() -> None:
    message = "ensure_sensitive_param_dtype: dtype=float16 is refused.*Use bfloat16 or float32"
    with pytest.raises(ValueError, match=message):
        ensure_sensitive_param_dtype(model_of(TINY), dtype=jnp.float16)


def test_what_has_no_role_is_listed_and_sensitive_only_when_told() -> None:
    model = adapted()
    prefix = "model.layers.0.attn.wz."
    assert other_leaves(model).keys() == {prefix + n for n in ("lora_a", "steps", "key")}
    assert audit_sensitive_param_dtypes(model) == {}
    name = prefix + "lora_a"
    narrow = replace_leaves(model, {name: model.model.layers[0].attn.wz.lora_a.astype("bfloat16")})
    assert audit_sensitive_param_dtypes(narrow) == {}
    assert audit_sensitive_param_dtypes(narrow, also=["*.lora_a"]) == {name: jnp.bfloat16}
    mended = ensure_sensitive_param_dtype(narrow, also=["*.lora_a"])
    assert audit_sensitive_param_dtypes(mended, also=[name]) == {}
    with pytest.raises(ValueError, match=r"also=\*\.lora_c matches no parameter; .*lora_a"):
        audit_sensitive_param_dtypes(model, also=["*.lora_c"])
