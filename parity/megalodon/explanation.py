"""Explanation of a failing case: its first divergence, root cause, and source lines to look at.

The result is plain data, which `explain` prints and a nightly run stores. Source: docs/parity.md
"When a case fails".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Measurement
from parity.engine.measure.quantity import Quantity, Role
from parity.engine.programs.explanation import NOTE, Explanation
from parity.engine.programs.source_lines import Line
from parity.megalodon import stream_lines
from parity.megalodon.account import Account, account
from parity.megalodon.cases import Case
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.intermediates import parameters_of
from parity.megalodon.lines import lines, narrow_lines
from parity.megalodon.noise_floors import forward_truth
from parity.megalodon.shrink import EDGE, failure


def explain(case: Case, others: Iterable[Explanation] = ()) -> Explanation:
    """Run a case again and explain where it first differs from the oracle.

    Three failures are looked for in order, and the first one found is explained:

    1. A stage is wrong in float64 although its inputs are the oracle's.
    2. The loss, a cotangent or a gradient is wrong in float64 although every stage is correct.
    3. A stage is less accurate in float32 than its calibrated noise floor allows.

    The explanation of a stream names the call and the stage. The explanation of a trajectory, or of
    a stream of padded rows or packed documents, names only the first divergence.

    Args:
        case: the case to explain.
        others: explanations of other cases, presumably with the same bug. If one of them has source
            lines for the same stage and edge, these lines are reused, because finding lines takes 3
            to 15 seconds. If `case` is a stream and one of them has any source lines, no lines are
            searched; a note names that other case.

    Returns:
        The explanation; its `quantity` is empty if the case passes.

    Raises:
        Exception: running the case raised it, and no wrong stage was found that explains it.
    """
    if case.cuts or case.steps:
        what = "trajectory" if case.steps else "stream"
        try:
            divergence = failure(case)
        except Exception as error:
            # A stream whose logits are NaN cannot choose a token; its calls can still be examined.
            if case.steps or (told := _broken(case, error)) is None:
                raise
            return told
        if divergence is None:
            return Explanation(case.name, str(EDGE), meaning=f"the {what} holds on {EDGE}.")
        if case.steps:
            return _diverging(case, divergence, _optimiser(divergence))
        return _streaming(case, divergence, others)
    wide = account(case, "float64")
    if wide.culprit is not None:
        return _starting(wide, wide.culprit, others)
    if (divergence := failure(case)) is not None:
        return _diverging(case, divergence, _backward(divergence), wide.stages)
    narrow = account(case, "float32")
    if narrow.culprit is not None:
        return _starting(narrow, narrow.culprit, others)
    holds = (
        f"no divergence. {len(narrow.stages)} stages pass on their own, in float64 and float32; "
        "loss, cotangents and gradients pass in float64."
    )
    return Explanation(case.name, _edge(narrow), meaning=holds, stages=narrow.stages)


def _edge(report: Account) -> str:
    wide = report.dtype == "float64"
    return str(MegalodonEdge.JAX64_ORACLE if wide else MegalodonEdge.JAX32_ORACLE)


def _starting(report: Account, culprit: Stage, others: Iterable[Explanation]) -> Explanation:
    edge = _edge(report)
    found, note = _lines(report, culprit.name, edge, others)
    return Explanation(
        report.case.name,
        edge,
        culprit.name,
        culprit.forced,
        culprit.tolerance,
        "wrong on its own, fed the oracle's inputs",
        report.stages,
        report.worst,
        parameters_of(culprit.name),
        note,
        report.where,
        found,
    )


def _lines(
    report: Account, stage: str, edge: str, others: Iterable[Explanation]
) -> tuple[tuple[Line, ...], str]:
    """Return the source lines that make a stage wrong, and a note.

    The note says from which other case the lines are, or why there are none; else it is "".
    """
    # Explanations of streams (no culprit) are skipped: their lines are those of another stage than
    # their `quantity`.
    known = (o for o in others if o.culprit and o.lines and (o.quantity, o.edge) == (stage, edge))
    if (other := next(known, None)) is not None:
        return other.lines, f"source lines are those found for case {other.case}"
    exact, broken = forward_truth(report.case), [s.name for s in report.stages if s.broken]
    try:
        if report.dtype == "float64":
            return lines(report.case, stage, exact, broken), ""
        return narrow_lines(report.case, stage, exact), ""
    except Exception as error:
        # Any error: the explanation is useful without lines, and the bug may prevent finding them.
        return (), f"source lines were not found: {type(error).__name__}: {error}"[:NOTE]


def _streaming(case: Case, divergence: Measurement, others: Iterable[Explanation]) -> Explanation:
    """Explain a failing stream, with its call, stage and source lines if they can be found."""
    told = _diverging(case, divergence, _stream(divergence))
    if _rows_alone(case):
        return told

    def noted(note: str) -> Explanation:
        return replace(told, note="; ".join(filter(None, (told.note, note)))[:NOTE])

    if (other := next((o for o in others if o.lines), None)) is not None:
        # Finding lines takes thirty seconds, and this is most likely the same bug.
        return noted(f"its lines were not searched: see those of case {other.case}")
    try:
        found = stream_lines.start(case)
    except Exception as error:
        return noted(f"the wrong call was not found: {type(error).__name__}: {error}")
    if found is None:
        return noted("all stages of the examined calls are right if fed the oracle's values")
    parameters = parameters_of(found.stage)
    return replace(told, meaning=found.describe(), parameters=parameters, lines=found.lines)


def _broken(case: Case, error: Exception) -> Explanation | None:
    """Explain a stream that raised `error`; None if no wrong stage is found."""
    if _rows_alone(case) or (found := stream_lines.start(case)) is None:
        return None
    return Explanation(
        case.name,
        str(EDGE),
        found.stage,
        meaning=found.describe(),
        parameters=parameters_of(found.stage),
        note=f"the stream ended with {type(error).__name__}: {error}"[:NOTE],
        lines=found.lines,
    )


def _rows_alone(case: Case) -> bool:
    """Return whether the oracle runs each row or document of a stream alone."""
    return case.batch.padded or bool(case.documents)


def _diverging(
    case: Case, divergence: Measurement, hint: str, stages: tuple[Stage, ...] = ()
) -> Explanation:
    return Explanation(
        case.name,
        str(EDGE),
        divergence.quantity,
        divergence.value,
        divergence.tolerance,
        hint,
        stages,
        note=divergence.note,
    )


def _optimiser(divergence: Measurement) -> str:
    """Return a hint at the cause of a wrong trajectory, given its first wrong quantity."""
    moment = Quantity(divergence.quantity).moment
    if moment == ("1", "mu"):
        return (
            "The first moment is wrong after one step. Either the gradient is wrong (explain "
            "'plain'), or a change made to it is, such as decay or clipping."
        )
    if moment == ("1", "nu"):
        return "The gradient is right: the second moment is not computed correctly from its square."
    if moment == ("1", "drift"):
        return (
            "Both moments are right after one step: the update is not computed correctly from "
            "them. Look at bias correction, epsilon, learning rate and decay."
        )
    return (
        "The first step is right: a state carried from step to step is wrong, such as the step "
        "count."
    )


def _stream(divergence: Measurement) -> str:
    return (
        "States are listed in layer order, and all before the first wrong one are right. Look "
        "between it and the state before it."
    )


def _backward(divergence: Measurement) -> str:
    quantity = Quantity(divergence.quantity)
    if quantity.role is Role.COTANGENT:
        return (
            "Every stage and every cotangent after this one is right: the derivative of the "
            f"operation that uses {quantity.name} is wrong."
        )
    if quantity.role is Role.GRADIENT:
        return "Every stage and cotangent is right: only the gradient of this parameter is wrong."
    return "Every stage is right: a result computed from the logits is wrong."
