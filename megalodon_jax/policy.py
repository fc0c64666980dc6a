"""Policies: ordered rules that give every module of a model a value, by its name.

A policy is a tuple of (pattern, value). Patterns are those of a shell (`fnmatch`: `*` also crosses
dots) and match whole dotted names, `model.layers.0.attn.wz`. The first that matches decides. A
policy is hashable and survives JSON, so it may stand in a configuration. Nothing here knows what
the values mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

Policy: TypeAlias = tuple[tuple[str, str], ...]


def as_policy(rules: Any, allowed: Collection[str], owner: str) -> Policy:
    """Return rules as a policy: a mapping in its order, or any sequence of pairs.

    Args:
        rules: what a user wrote, or JSON kept.
        allowed: the values a rule may give.
        owner: whose rules they are, for errors.

    Raises:
        ValueError: it is no sequence of pairs of strings, or a value is not allowed.
    """
    try:
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        policy = tuple((pattern, value) for pattern, value in pairs)
    except (TypeError, ValueError):
        policy = ((None, None),)
    if not all(isinstance(part, str) for pair in policy for part in pair):
        raise ValueError(
            f"{owner}={rules!r} must be one of {tuple(allowed)}, or rules (pattern, value) such as "
            f"(('model.layers.0.*', {min(allowed)!r}),)."
        )
    for pattern, value in policy:
        if value not in allowed:
            raise ValueError(
                f"{owner}: the rule {pattern!r} gives {value!r}, expected one of {tuple(allowed)}."
            )
    return policy


def resolve(policy: Policy, names: Iterable[str], default: str, owner: str) -> dict[str, str]:
    """Return the value of every name: that of the first rule that matches, else `default`.

    Args:
        policy: the rules, in order.
        names: every module a rule may be about.
        default: for what no rule matches.
        owner: whose rules they are, for errors.

    Raises:
        ValueError: a rule matches nothing, or only what earlier rules have decided already.
    """
    names = tuple(names)
    values: dict[str, str] = {}
    for pattern, value in policy:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            raise ValueError(
                f"{owner}: the pattern {pattern!r} matches no module; there are {', '.join(kinds)}."
            )
        if all(name in values for name in matched):
            raise ValueError(
                f"{owner}: the pattern {pattern!r} decides nothing, since the first match wins and "
                "earlier patterns match all of its modules; move it up, or remove it."
            )
        for name in matched:
            values.setdefault(name, value)
    return {name: values.get(name, default) for name in names}
