"""`parity explain` and `parity shrink`: a failing case as an account a person can act on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from parity.engine.localize import Stage
from parity.engine.measurement import Measurement
from parity.engine.quantity import Quantity, Role
from parity.megalodon.account import Account, account
from parity.megalodon.cases import SMALL, Case
from parity.megalodon.intermediates import parameters_of
from parity.megalodon.shrink import EDGE, failure, shrink
from reports.text import number

AROUND = 3
"""Stages shown on either side of the culprit."""


def explain(case: Case, fault: str | None) -> tuple[str, bool]:
    """Return the account of a case and whether it holds.

    Asked in this order: is any stage wrong in float64, fed the right inputs; is loss, a cotangent
    or a gradient wrong although every stage is right; is any stage less accurate in float32 than
    calibrated. The first yes is explained.
    """
    planted = f" --fault {shlex.quote(fault)}" if fault else ""
    replay = f"replay: megalodon-numerics parity explain {shlex.quote(case.name)}{planted}"
    if case.cuts or case.steps:
        what, hint = (
            ("trajectory", _optimiser) if case.steps else ("stream", _streams_have_no_intermediates)
        )
        divergence = failure(case)
        if divergence is None:
            return f"{case.name}: the {what} holds on {EDGE}.", True
        return f"{_headline(case, divergence)}\n{hint(divergence)}\n{replay}", False
    for dtype in ("float64", "float32"):
        report = account(case, dtype)
        if report.culprit is not None:
            return f"{_forward(report, report.culprit)}\n{replay}", False
        if dtype == "float64" and (divergence := failure(case)) is not None:
            return f"{_headline(case, divergence)}\n{_backward(divergence)}\n{replay}", False
    count = len(report.stages)
    return (
        f"{case.name}: no divergence. {count} stages hold on their own, in float64 and float32; "
        f"loss, cotangents and gradients hold in float64.\n{_table(report.stages)}",
        True,
    )


def shrink_case(case: Case, fault: str | None, report) -> str:
    """Return the smallest case that still fails, as text with a replay in Python."""
    smallest, divergence = shrink(case, report)
    changed = {
        name: getattr(smallest, name)
        for name in ("length", "batch_size", "padding", "overrides", "cuts")
        if getattr(smallest, name) != getattr(case, name)
    }
    fields = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    code = [
        "import dataclasses",
        "from parity.megalodon.cases import by_name",
        "from parity.megalodon.account import account",
        f"case = dataclasses.replace(by_name({case.name!r}), {fields})"
        if fields
        else f"case = by_name({case.name!r})",
    ]
    if fault:
        code.insert(2, "from parity.faults import by_name as fault_by_name")
        code.append(f"with fault_by_name({fault!r}).planted():")
    look = "account(case).culprit" if not smallest.cuts else "shrink.failure(case)"
    if smallest.cuts:
        code.insert(1, "from parity import shrink")
    code.append(f"{'    ' if fault else ''}print({look})")
    config = json.dumps({k: v for k, v in smallest.config.to_dict().items() if k in SMALL})
    return (
        f"{smallest.name}: {smallest.batch_size} x {smallest.length} tokens still leave the oracle "
        f"at {divergence.quantity} (relative L2 {number(divergence.value)})\nconfig: {config}\n\n"
        + "\n".join(code)
    )


def _headline(case: Case, divergence: Measurement) -> str:
    return (
        f"{case.name}: first divergence at {divergence.quantity}, {EDGE}: relative L2 "
        f"{number(divergence.value)}, tolerance {number(divergence.tolerance)} {divergence.note}"
    ).rstrip()


def _optimiser(divergence: Measurement) -> str:
    """Say what a trajectory's first wrong quantity means."""
    moment = Quantity(divergence.quantity).moment
    if moment == ("1", "mu"):
        return (
            "The first moment is wrong after one step: the gradient is (explain 'plain'), or what "
            "is added to it, such as decay or a clip."
        )
    if moment == ("1", "nu"):
        return "The gradient is right: the second moment is not made of its square as it should be."
    if moment == ("1", "drift"):
        return (
            "Both moments are right after one step: bias correction, epsilon, learning rate or "
            "decay is wrong where they become an update."
        )
    return "The first step is right: what is carried from step to step is wrong, such as the count."


def _streams_have_no_intermediates(divergence: Measurement) -> str:
    return (
        "States are in order of the layers: what comes before the first wrong one is right, so "
        f"look between it and the state before it ({divergence.case} is a stream: no other names)."
    )


def _backward(divergence: Measurement) -> str:
    quantity = Quantity(divergence.quantity)
    if quantity.role is Role.COTANGENT:
        return (
            "Every stage is right, and so is every cotangent behind this one: the derivative of "
            f"what is computed from {quantity.name} is wrong."
        )
    if quantity.role is Role.GRADIENT:
        return (
            "Every stage and every cotangent is right: only the derivative by this parameter is "
            "wrong."
        )
    return "Every stage is right: what is computed from the logits is wrong."


def _forward(report: Account, culprit: Stage) -> str:
    name, where = report.case.name, f"jax{report.dtype.removeprefix('float')}:oracle"
    at = report.stages.index(culprit)
    alone = "wrong on its own, fed the oracle's inputs"
    lines = [
        f"{name}: first divergence at {culprit.name}, {where}: {alone}: relative L2 "
        f"{number(culprit.forced)}, tolerance {number(culprit.tolerance)}",
        _table(report.stages[max(0, at - AROUND) : at + AROUND + 1]),
    ]
    if report.worst is not None:
        worst = report.worst
        lines.append(
            f"worst element {list(worst.index)}: {worst.actual!r}, expected {worst.expected!r}"
        )
    others = [s.name for s in report.stages if s.broken and s is not culprit]
    if others:
        lines.append(f"also wrong on their own: {', '.join(others)}")
    lines.append(
        f"{len(report.carried)} later stages are wrong only because of what they were fed"
        if report.carried
        else "no other stage is wrong because of it"
    )
    if acting := parameters_of(culprit.name):
        lines.append(f"parameters that act there: {', '.join(acting)}")
    return "\n".join(lines)


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
