"""bfloat16 on both sides, each compared with the oracle.

JAX computes products in bfloat16 with float32 parameters. torch computes products in bfloat16 under
autocast, or everything if the whole model is cast. Neither side is the truth for the other, so
their errors against the oracle are compared. Source: docs/parity.md "bfloat16".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parity.engine.measure.compare import Bounds, Comparison
from parity.engine.measure.measurement import Measurement
from parity.engine.measure.metrics import logit_metrics, relative_l2
from parity.engine.measure.quantity import LOGITS, LOSS, kind_of
from parity.megalodon.cases import Case
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.runner import JaxSubject

CASES = ("plain", "byte_lm")
"""Names of the cases measured in bfloat16: an untrained and a trained model."""
OURS, AUTOCAST = MegalodonEdge.JAXBF16_ORACLE, MegalodonEdge.AUTOCAST_ORACLE
MODES = {AUTOCAST: "autocast", MegalodonEdge.REFERENCEBF16_ORACLE: "cast"}
"""Mode of megalodon-hf (`reference.low_precision.MODES`) by its edge to the oracle."""


def measure(
    case: Case,
    theirs: Mapping[str, np.ndarray],
    exact: Mapping[str, np.ndarray],
    floors: Bounds,
    device: str = "cpu",
) -> Iterator[Measurement]:
    """Yield the bfloat16 errors of the JAX model and of both modes of megalodon-hf.

    All three are measured on logits and loss, the JAX model on every intermediate too. Only the JAX
    model has gates: its error on logits and intermediates, and the ratio of its logits' error to
    megalodon-hf's error under autocast. The loss has no gate: the error of a scalar may be near 0
    by chance.

    Args:
        case: a case without cuts and steps.
        theirs: megalodon-hf's results, `autocast/logits`, `cast/loss` and so on.
        exact: the oracle's arrays of the case.
        floors: float32 noise floors, which the tolerance table scales to bfloat16.
        device: device named in the measurements.
    """
    answers = {OURS: JaxSubject("bfloat16").intermediates_and_loss(case)}
    for edge, mode in MODES.items():
        answers[edge] = {n: theirs[f"{mode}/{n}"] for n in (LOGITS, LOSS)}
    errors = {}
    for edge, arrays in answers.items():
        at = Comparison(case.work, edge, floors, "bfloat16", device)
        for name in (*(n for n in exact if n in arrays and n != LOSS), LOSS):
            errors[edge, name] = error = relative_l2(arrays[name], exact[name])
            if edge is OURS and name != LOSS:
                bound = floors.bound(edge, kind_of(name), case.work, name)
                yield at.gate(name, "rel_l2", error, bound)
            else:
                yield at.fact(name, "rel_l2", error)
        wide = np.asarray(arrays[LOGITS], np.float64)
        for metric, value in logit_metrics(wide, exact[LOGITS], case.targets).items():
            yield at.fact(LOGITS, metric, value)
    ratio = errors[OURS, LOGITS] / errors[AUTOCAST, LOGITS]
    at = Comparison(case.work, OURS, floors, "bfloat16", device)
    yield at.judged(LOGITS, "error_over_autocast", ratio)
