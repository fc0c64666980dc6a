"""Deliberate differences from megalodon-hf, each with an id, a reason, a bound and a test.

A known difference is measured against megalodon-hf, live or recorded. Its size must stay within the
range in which it was accepted: if it grows or vanishes, one of the implementations has changed.
Source: docs/parity.md "Known differences".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.metrics import relative_l2
from parity.megalodon import DIFFERENCES
from parity.megalodon.cases import by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.runner import JaxSubject
from parity.megalodon.tolerance_table import KNOWN_DIFFERENCE_BOUNDS

EDGE = MegalodonEdge.JAX32_REFERENCE32
INITIAL_SPREAD = 0.02
"""Standard deviation of the initial weights in Transformers' post_init (`initializer_range`)."""


@dataclass(frozen=True, slots=True)
class KnownDifference:
    """One deliberate difference between this project and megalodon-hf."""

    id: str
    reason: str
    """The behaviour of megalodon-hf, and the behaviour of this project."""
    bound: str
    """Inputs on which the difference occurs, and those on which it must not."""
    measured: str
    """Definition of the measured number, in words."""
    measure: Callable[[np.ndarray], float]
    """Computes the measured number from megalodon-hf's result (`Facts.known_differences`); NaN: it
    cannot be measured, which fails."""


@runtime_checkable
class Facts(Protocol):
    """A reference, live or recorded, that has megalodon-hf's results for the known differences."""

    def known_differences(self) -> dict[str, np.ndarray]:
        """Return the reference's result for every known difference, by id."""
        ...


def _ema_mask(theirs: np.ndarray) -> float:
    case = by_name("left_padding")
    ours = JaxSubject().intermediates(case)["logits"]
    return relative_l2(ours[case.valid], theirs[case.valid])


def _empty_loss(theirs: np.ndarray) -> float:
    ours = JaxSubject().loss_without_targets(by_name("plain"))
    return ours if np.isnan(theirs) else math.nan


KNOWN_DIFFERENCES = (
    KnownDifference(
        "ema-mask",
        "padding enters the EMA of the reference; here masked inputs enter as 0",
        "none at valid positions under right padding; masked positions are not compared",
        "relative L2 of the logits at valid positions behind left padding",
        _ema_mask,
    ),
    KnownDifference(
        "loss-mask",
        "the reference ignores the attention mask in the loss; here masked targets do not count",
        "none when labels at padding are -100",
        "relative difference of the loss with labels at padding",
        lambda theirs: relative_l2(JaxSubject().run(by_name("labels_at_padding"))["loss"], theirs),
    ),
    KnownDifference(
        "empty-loss",
        "without a valid target the reference's loss is NaN; here it is 0",
        "only when no target is valid",
        "our loss where the reference's is NaN",
        _empty_loss,
    ),
    KnownDifference(
        "untied-head",
        "Transformers 4.57 ties the head whatever output_size says; `to_hf` sets "
        "tie_word_embeddings=False",
        "none once tie_word_embeddings=False is set",
        "largest difference of head and embedding in a reference without that setting",
        float,
    ),
    KnownDifference(
        "initialisation",
        "Transformers' post_init redraws every linear weight and the embedding with standard "
        f"deviation {INITIAL_SPREAD}; here init_mode is followed, except that 'he' "
        "draws tokens so that logits start with a deviation of 1/2",
        "initial weights only; a loaded checkpoint is not affected",
        f"relative distance of the reference's spread from {INITIAL_SPREAD} under init_mode=he",
        lambda theirs: abs(float(theirs) / INITIAL_SPREAD - 1),
    ),
)


def work_hash() -> str:
    """Return a hash of the cases and ids of all known differences, which identifies recordings."""
    cases = ("left_padding", "labels_at_padding", "plain", "untied_head")
    parts = [by_name(name).hash for name in cases] + [
        difference.id for difference in KNOWN_DIFFERENCES
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def measure(reference: Facts, device: str = "cpu") -> Iterator[Measurement]:
    """Yield one measurement per known difference.

    A measurement fails if the measured number is outside its range in `KNOWN_DIFFERENCE_BOUNDS`, or
    NaN.

    Raises:
        RecordingError: `reference` is recorded, and has no recording of these cases.
    """
    facts = reference.known_differences()
    for difference in KNOWN_DIFFERENCES:
        value = difference.measure(facts[difference.id]) if difference.id in facts else math.nan
        yield _judged(difference, value, device)


def _judged(difference: KnownDifference, value: float, device: str) -> Measurement:
    least, most = KNOWN_DIFFERENCE_BOUNDS[difference.id]
    note = ""
    if not value >= least:
        note = f"expected at least {least:g}: the known difference may no longer exist"
    return Measurement(
        case=DIFFERENCES,
        edge=str(EDGE),
        quantity=difference.id,
        kind=Kind.KNOWN_DIFFERENCE,
        stage=-1,
        metric="seam",
        value=value,
        tolerance=most,
        # Comparisons with NaN are false, so NaN fails.
        verdict=Verdict.PASS if least <= value <= most else Verdict.FAIL,
        dtype="float32",
        device=device,
        identity=hashlib.sha256(repr((difference.id, work_hash(), device)).encode()).hexdigest()[
            :16
        ],
        note=note,
        suite=DIFFERENCES,
    )
