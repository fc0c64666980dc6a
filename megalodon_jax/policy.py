"""Policies: ordered rules that assign a value to every module of a model, by its name.

A policy is a tuple of (pattern, value). Patterns are shell patterns (`fnmatch`: `*` also matches
dots) for whole dotted names such as `model.layers.0.attn.wz`. The first matching rule applies. A
policy is hashable and survives JSON, so it may be part of a configuration. This module does not
interpret the values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

Policy: TypeAlias = tuple[tuple[str, str], ...]
Rules: TypeAlias = Mapping[str, str] | Sequence[Sequence[str]]
"""Rules as users write them: a mapping from pattern to value, in order, or a list of such pairs."""


def as_policy(rules: Any, allowed: Collection[str], owner: str) -> Policy:
    """Convert `Rules` to a policy.

    Args:
        rules: the user's input, unchecked.
        allowed: the values a rule may assign.
        owner: name of the setting, for errors.

    Raises:
        ValueError: `rules` are not pairs of strings, or assign a value that is not allowed.
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
    """Return a value for every name: that of the first matching rule, else `default`.

    Args:
        policy: the rules, in order.
        names: names of all modules that rules may match.
        default: value of modules that no rule matches.
        owner: name of the setting, for errors.

    Raises:
        ValueError: a rule matches no name, or only names that earlier rules match already.
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
