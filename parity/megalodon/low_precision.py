"""bfloat16 on both sides, each by its own error against the oracle.

JAX computes products in bfloat16 with float32 parameters; torch does so under autocast, or is cast
as a whole. No side is the truth for another, so the question is which one is worse, and by how
much. Source: docs/parity.md "bfloat16".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parity.engine.compare import Bounds, Comparison, kind_of
from parity.engine.measurement import Measurement
from parity.engine.metrics import logit_metrics, relative_l2
from parity.megalodon.cases import Case
from parity.megalodon.runner import JaxSubject

CASES = ("plain", "byte_lm")
"""What is measured: an untrained model and a trained one."""
OURS = "jaxbf16"
SIDES = {OURS: "", "autocast": "autocast", "referencebf16": "cast"}
"""Who stands on the left of each edge to the oracle, and its mode in the reference."""


def measure(
    case: Case,
    theirs: Mapping[str, np.ndarray],
    exact: Mapping[str, np.ndarray],
    floors: Bounds,
    device: str = "cpu",
) -> Iterator[Measurement]:
    """Yield the error of every side on logits and loss, and gate ours, also over autocast's.

    Ours is known for every intermediate. The error of the loss, a scalar, is near 0 by luck: no
    gate.

    Args:
        case: one without cuts and steps.
        theirs: `autocast/logits`, `cast/loss` and so on, from the reference.
        exact: the oracle's arrays of the case.
        floors: those of float32, which the table scales.
        device: what this ran on.
    """
    ours = JaxSubject("bfloat16").intermediates_and_loss(case)
    answers = {OURS: ours}
    for side, mode in SIDES.items():
        if mode:
            answers[side] = {n: theirs[f"{mode}/{n}"] for n in ("logits", "loss")}
    errors = {}
    for side, arrays in answers.items():
        edge = Comparison(case.work, f"{side}:oracle", floors, "bfloat16", device)
        for name in (*(n for n in exact if n in arrays and n != "loss"), "loss"):
            errors[side, name] = error = relative_l2(arrays[name], exact[name])
            if side == OURS and name != "loss":
                bound = floors.bound(edge.edge, kind_of(name), case.work, name)
                yield edge.gate(name, "rel_l2", error, bound)
            else:
                yield edge.fact(name, "rel_l2", error)
        wide = np.asarray(arrays["logits"], np.float64)
        for metric, value in logit_metrics(wide, exact["logits"], case.targets).items():
            yield edge.fact("logits", metric, value)
    ratio = errors[OURS, "logits"] / errors["autocast", "logits"]
    at = Comparison(case.work, f"{OURS}:oracle", floors, "bfloat16", device)
    yield at.judged("logits", "error_over_autocast", ratio)
