"""The audit of stored parameters finds what is narrow, rounded or not finite, and only that."""

from __future__ import annotations

import jax.numpy as jnp

from megalodon_jax.precision import ensure_sensitive_param_dtype, sensitive_leaves
from megalodon_jax.weights import named_leaves, replace_leaves
from stability.core.findings import Severity
from stability.storage.value_audit import audit_parameters
from tests.helpers import TINY, adapted, model_of

ALPHA = "model.layers.0.attn.cema.alpha"


def problems(model) -> list:
    return [f for f in audit_parameters(model) if f.severity is not Severity.OK]


def with_alpha(change):
    model = model_of(TINY)
    return replace_leaves(model, {ALPHA: change(named_leaves(model)[ALPHA])})


def test_a_clean_model_answers_ok_for_every_sensitive_leaf() -> None:
    model = model_of(TINY)
    findings = audit_parameters(model)
    assert {f.severity for f in findings} == {Severity.OK}
    for question in ("dtypes", "values"):
        assert {f.subject for f in findings if f.probe == question} == set(sensitive_leaves(model))


def test_a_narrow_leaf_is_found_with_its_remedy() -> None:
    (dtype, value) = problems(with_alpha(lambda a: a.astype(jnp.bfloat16)))
    assert (dtype.probe, dtype.severity, dtype.subject) == ("dtypes", Severity.ERROR, ALPHA)
    assert (dtype.value, dtype.threshold) == (2.0, 4.0)
    assert "bfloat16, expected float32" in dtype.message
    assert "ensure_sensitive_param_dtype" in dtype.remedy
    assert (value.probe, value.subject) == ("values", ALPHA)


def test_a_leaf_cast_down_and_up_is_found_by_value_alone() -> None:
    narrow = with_alpha(lambda a: a.astype(jnp.bfloat16))
    (found,) = problems(ensure_sensitive_param_dtype(narrow))
    assert (found.probe, found.severity, found.subject) == ("values", Severity.ERROR, ALPHA)
    assert (found.value, found.threshold) == (1.0, 0.0)
    assert "all 16 values are exactly bfloat16 numbers" in found.message
    assert "reload" in found.remedy


def test_values_that_are_not_finite_are_counted() -> None:
    def spoil(alpha):
        return alpha.at[0, 0, 0].set(jnp.nan).at[1, 1, 0].set(jnp.inf)

    (found,) = problems(with_alpha(spoil))
    assert (found.probe, found.severity, found.subject) == ("finite", Severity.ERROR, ALPHA)
    assert (found.value, found.threshold) == (2.0, 0.0)
    assert "2 of 16 values are NaN or infinite" in found.message


def test_an_insensitive_leaf_may_be_narrow_but_not_infinite() -> None:
    model, name = model_of(TINY), "model.layers.0.ffn.fc1.bias"
    leaf = named_leaves(model)[name]
    assert not problems(replace_leaves(model, {name: leaf.astype(jnp.bfloat16)}))
    (found,) = problems(replace_leaves(model, {name: leaf.at[0].set(jnp.inf)}))
    assert found.subject == name


def test_a_constant_leaf_is_clean_and_nothing_false_is_said_of_it() -> None:
    zeros = with_alpha(jnp.zeros_like)
    assert not problems(zeros)
    (found,) = [f for f in audit_parameters(zeros) if (f.probe, f.subject) == ("values", ALPHA)]
    assert "holds values that bfloat16 cannot" not in found.message


def test_a_parameter_without_a_role_is_listed_as_a_note() -> None:
    rows = problems(adapted())
    names = {f"model.layers.0.attn.wz.{name}" for name in ("lora_a", "steps", "key")}
    assert {row.subject for row in rows} == names
    assert {row.severity for row in rows} == {Severity.NOTE}
    assert all("other: " in row.message for row in rows)
