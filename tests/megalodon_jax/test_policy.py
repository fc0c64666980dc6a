"""Policies: the first rule that matches decides, and a rule that decides nothing is a mistake."""

from __future__ import annotations

import pytest

from megalodon_jax.policy import as_policy, resolve

NAMES = ("layers.0.attn.wz", "layers.0.ffn.fc1", "layers.1.attn.wz", "layers.1.ffn.fc1", "head")


def test_the_first_rule_that_matches_decides() -> None:
    policy = as_policy({"*.0.*": "a", "*.wz": "b"}, ("a", "b"), "field")
    assert policy == (("*.0.*", "a"), ("*.wz", "b"))
    assert as_policy([list(rule) for rule in policy], ("a", "b"), "field") == policy
    assert resolve(policy, NAMES, "rest", "field") == {
        "layers.0.attn.wz": "a",
        "layers.0.ffn.fc1": "a",
        "layers.1.attn.wz": "b",
        "layers.1.ffn.fc1": "rest",
        "head": "rest",
    }
    assert set(resolve((), NAMES, "rest", "field").values()) == {"rest"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.wx": "a"}, r"'\*\.wx' matches no module; there are layers\.\*\.attn\.wz, layers\.\*"),
        ({"*": "a", "*.wz": "b"}, r"'\*\.wz' decides nothing.*move it up"),
        ({"*": "c"}, r"the rule '\*' gives 'c', expected one of \('a', 'b'\)"),
        ("c", r"field='c' must be one of \('a', 'b'\), or rules \(pattern, value\)"),
        (7, "field=7 must be one of"),
        ([["*"]], "must be one of"),
        ([("*", 1)], "must be one of"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rules: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(as_policy(rules, ("a", "b"), "field"), NAMES, "a", "field")
