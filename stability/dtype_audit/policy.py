"""The dtype policy: rules on the dtypes a model may compute in, and their check on an audit table.

Rules are read from `stability/data/dtype_policy.toml`, whose header explains the kinds of rules.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from stability.core.findings import Finding, Severity
from stability.dtype_audit.families import CONVERT, FAMILIES
from stability.dtype_audit.jaxpr import PROMOTION, ROUND_TRIP
from stability.dtype_audit.rows import Row, is_narrow

PROBE = "dtype_audit"
VERSION = 1
KINDS = ("forbidden", "wide", "accumulator", "promotion", "elided")
SOURCE = "stability/data/dtype_policy.toml"
_SCOPE_KEYS = ("modules", "families", "phases", "views")
_RULE_KEYS = {"name", "kind", "severity", "remedy", "dtypes", "allowed", *_SCOPE_KEYS}


@dataclass(frozen=True, slots=True)
class Scope:
    """Rows of the dtype audit to which a rule or an exception applies; an empty field means all.

    Attributes:
        modules: shell patterns for `Row.module`.
        families, phases, views: allowed values of these fields of `Row`.
    """

    modules: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    views: tuple[str, ...] = ()

    def holds(self, row: Row) -> bool:
        """Whether all fields select the row."""
        return (
            (not self.modules or any(fnmatchcase(row.module, m) for m in self.modules))
            and (not self.families or row.family in self.families)
            and (not self.phases or row.phase in self.phases)
            and (not self.views or row.view in self.views)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the dtype policy."""

    name: str
    kind: str
    """One of `KINDS`; see `broken_by`."""
    severity: Severity
    """Severity of a violation."""
    remedy: str
    scope: Scope = field(default_factory=Scope)
    dtypes: tuple[str, ...] = ()
    """Forbidden dtypes; only for the kind "forbidden"."""
    allowed: tuple[tuple[Scope, str], ...] = ()
    """Exceptions: pairs (scope, reason)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The dtype policy: all rules, in the order of the file."""

    rules: tuple[Rule, ...]

    def check(self, rows: Iterable[Row]) -> list[Finding]:
        """Return a finding per rule and violating row, and an OK finding per rule that holds.

        Args:
            rows: tables of one or several views (jaxpr, HLO, torch) of the same program. Rules of
                the kind "elided" find nothing unless rows of the jaxpr and of HLO are given.
        """
        table = tuple(rows)
        findings: list[Finding] = []
        for rule in self.rules:
            broken = [
                row
                for row in broken_by(rule, table)
                if not any(scope.holds(row) for scope, _ in rule.allowed)
            ]
            findings += [_finding(rule, row) for row in broken] or [_clean(rule, table)]
        return findings


def load_policy(path: Path | None = None) -> Policy:
    """Read a dtype policy file; the committed file if `path` is None.

    Raises:
        ValueError: the file is not a policy, or a rule is invalid: an unknown key, kind, severity
            or family, a missing remedy, or an exception without a reason. The message names the
            rule.
    """
    file = path or resources.files("stability") / "data" / "dtype_policy.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"dtype policy: {file} is not TOML: {error}.") from error
    if content.get("version") != VERSION or not content.get("rule"):
        raise ValueError(
            f"dtype policy: {file} has version {content.get('version')!r} and "
            f"{len(content.get('rule', ()))} rules, expected version {VERSION} and 1 rule or more."
        )
    return Policy(tuple(_rule(entry) for entry in content["rule"]))


def broken_by(rule: Rule, table: tuple[Row, ...]) -> list[Row]:
    """Return the rows that violate a rule, before exceptions are applied.

    Rows in the rule's scope violate it, by its kind, if

    - "forbidden": a dtype of an input, the result or `accum` is among the rule's;
    - "wide": an input or the result is a float of fewer than 32 bits;
    - "accumulator": the result is a float of fewer than 32 bits;
    - "promotion": the row is an implicit conversion of an operand;
    - "elided": the row is a rounding in the jaxpr that the compiled program lacks.
    """
    inside = [row for row in table if rule.scope.holds(row)]
    match rule.kind:
        case "forbidden":
            return [row for row in inside if row.dtypes & set(rule.dtypes)]
        case "wide":
            return [row for row in inside if any(map(is_narrow, _numbers(row)))]
        case "accumulator":
            return [row for row in inside if row.output and is_narrow(row.output)]
        case "promotion":
            return [row for row in inside if row.how == PROMOTION]
        case _:
            return _elided(inside)


def _elided(rows: list[Row]) -> list[Row]:
    """Return jaxpr rows of roundings that the compiled code of their module and phase lacks."""
    compiled = [row for row in rows if row.view == "hlo"]
    if not compiled:
        return []

    def kept(asked: Row) -> bool:
        here = (row for row in compiled if (row.module, row.phase) == (asked.module, asked.phase))
        return any(
            row.family == CONVERT and (row.output == asked.output or row.op == "reduce-precision")
            for row in here
        )

    return [row for row in rows if row.how == ROUND_TRIP and not kept(row)]


def _numbers(row: Row) -> tuple[str, ...]:
    return tuple(d for d in (*row.inputs, row.output) if d not in ("", "other"))


def _finding(rule: Rule, row: Row) -> Finding:
    place = f" at {row.source}" if row.source else ""
    subject = f"{row.module or '(no module)'} {row.op}"
    source = f"{SOURCE}, {rule.name}"
    message = f"{row.view}: {row.describe()}, {row.count} times{place}"
    return Finding(
        PROBE,
        rule.severity,
        subject,
        rule.name,
        float(row.count),
        0.0,
        source,
        message,
        rule.remedy,
    )


def _clean(rule: Rule, table: tuple[Row, ...]) -> Finding:
    count = sum(rule.scope.holds(row) for row in table)
    message = f"{count} kinds of operation in its scope, no violation"
    source = f"{SOURCE}, {rule.name}"
    return Finding(PROBE, Severity.OK, rule.name, rule.name, 0.0, 0.0, source, message)


def _rule(entry: Mapping[str, Any]) -> Rule:
    name = str(entry.get("name", "?"))
    _require(name, not set(entry) - _RULE_KEYS, f"unknown keys {sorted(set(entry) - _RULE_KEYS)}")
    _require(name, entry.get("kind") in KINDS, f"kind must be one of {KINDS}")
    severities = tuple(s.value for s in Severity)
    _require(name, entry.get("severity") in severities, f"severity must be one of {severities}")
    _require(name, bool(entry.get("remedy")), "a remedy is missing")
    _require(
        name,
        (entry["kind"] == "forbidden") == bool(entry.get("dtypes")),
        "dtypes belong to kind 'forbidden', and only to it",
    )
    allowed = entry.get("allowed", ())
    _require(name, all(a.get("reason") for a in allowed), "an exception has no reason")
    return Rule(
        name,
        entry["kind"],
        Severity(entry["severity"]),
        entry["remedy"],
        _scope(name, entry),
        tuple(entry.get("dtypes", ())),
        tuple((_scope(name, a), a["reason"]) for a in allowed),
    )


def _scope(name: str, entry: Mapping[str, Any]) -> Scope:
    parts = {k: tuple(entry.get(k, ())) for k in _SCOPE_KEYS}
    unknown = sorted(set(parts["families"]) - set(FAMILIES))
    _require(name, not unknown, f"unknown families {unknown}, expected some of {FAMILIES}")
    return Scope(**parts)


def _require(name: str, holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"dtype policy: rule {name!r}: {problem}; correct {SOURCE}.")
