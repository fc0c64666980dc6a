"""Text output of `parity explain` and `parity shrink`: where and why a case fails."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from parity.engine.measure.localize import Stage
from parity.engine.programs.explanation import Explanation
from parity.megalodon import explanation
from parity.megalodon.cases import SMALL, Case
from parity.megalodon.shrink import shrink
from reports.text import number

AROUND = 3
"""Number of stages shown before and after the culprit, the first stage wrong on right inputs."""


def explain(case: Case, fault: str | None) -> tuple[str, bool]:
    """Return the explanation of a case as text, and whether the case passes.

    The caller plants `fault`; here it only completes the printed command.
    """
    account = explanation.explain(case)
    if account.holds:
        table = f"\n{_table(account.stages)}" if account.stages else ""
        return f"{case.name}: {account.meaning}{table}", True
    planted = f" --fault {shlex.quote(fault)}" if fault else ""
    replay = f"replay: megalodon-numerics parity explain {shlex.quote(case.name)}{planted}"
    lines = _forward(account) if account.culprit else _behind(account)
    return "\n".join([*lines, replay]), False


def shrink_case(case: Case, fault: str | None, report) -> str:
    """Return text on the smallest case that still fails, with Python code that reproduces it.

    The caller plants `fault`; here it only completes the code. `report` receives progress lines.
    """
    smallest, divergence = shrink(case, report)
    changed = {
        name: getattr(smallest, name)
        for name in ("length", "batch_size", "padding", "overrides", "cuts")
        if getattr(smallest, name) != getattr(case, name)
    }
    fields = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    made = f"by_name({case.name!r})"
    made = f"dataclasses.replace({made}, {fields})" if fields else made
    modules = ["import dataclasses", "from parity.megalodon.cases import by_name"]
    if fault:
        modules.append("from parity.faults import by_name as fault_by_name")
    # `account` cannot explain a stream (a case with cuts), so print its first failure instead.
    module, look = ("shrink", "failure") if smallest.cuts else ("account", "account")
    modules.append(f"from parity.megalodon.{module} import {look}")
    seen = f"print({look}(case){'' if smallest.cuts else '.culprit'})"
    if fault:
        seen = f"with fault_by_name({fault!r}).planted():\n    {seen}"
    code = [*modules, f"case = {made}", seen]
    config = json.dumps({k: v for k, v in smallest.config.to_dict().items() if k in SMALL})
    return (
        f"{smallest.name}: {smallest.batch_size} x {smallest.length} tokens still differ from "
        f"the oracle at {divergence.quantity} (relative L2 {number(divergence.value)})\n"
        f"config: {config}\n\n" + "\n".join(code)
    )


def _size(account: Explanation) -> str:
    return f"relative L2 {number(account.value)}, tolerance {number(account.tolerance)}"


def _behind(account: Explanation) -> list[str]:
    """Return lines on a failure without a culprit: all stages are right on right inputs, or there
    are no stages.
    """
    start = f"{account.case}: first divergence at {account.quantity}, {account.edge}"
    lines = [f"{start}: {_size(account)} {account.note}".rstrip(), account.meaning]
    lines += _lines(account)
    if account.parameters:
        lines.append(f"parameters that act there: {', '.join(account.parameters)}")
    return lines


def _lines(account: Explanation) -> list[str]:
    texts = ([f"{line.place}: {line.why}", *_indented(line.excerpt)] for line in account.lines)
    return [text for of_line in texts for text in of_line]


def _forward(account: Explanation) -> list[str]:
    at = next(i for i, s in enumerate(account.stages) if s.name == account.quantity)
    lines = [
        f"{account.case}: first divergence at {account.quantity}, {account.edge}: "
        f"{account.meaning}: {_size(account)}",
        _table(account.stages[max(0, at - AROUND) : at + AROUND + 1]),
    ]
    if account.where:
        lines.append(f"elements that break the tolerance: {account.where}")
    lines += _lines(account)
    if account.note:
        lines.append(account.note)
    if account.worst is not None:
        worst = account.worst
        lines.append(
            f"worst element {list(worst.index)}: {worst.actual!r}, expected {worst.expected!r}"
        )
    if account.also_broken:
        lines.append(f"also wrong on their own: {', '.join(account.also_broken)}")
    lines.append(
        f"{account.carried} later stages are wrong only because of what they were fed"
        if account.carried
        else "no other stage is wrong because of it"
    )
    if account.parameters:
        lines.append(f"parameters that act there: {', '.join(account.parameters)}")
    return lines


def _indented(excerpt: str) -> list[str]:
    return [f"    {text}".rstrip() for text in excerpt.split("\n") if excerpt]


def _table(stages: Sequence[Stage]) -> str:
    header = ("", "stage", "free", "forced", "tolerance", "amplification")
    rows = [
        (
            "x" if s.broken else "",
            s.name,
            *(number(v) for v in (s.free, s.forced, s.tolerance, s.amplification)),
        )
        for s in stages
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )
