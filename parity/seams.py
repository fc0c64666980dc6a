"""Deliberate differences from the reference: each has an id, a reason, a bound and a test.

Source: spec/parity.md "Seams".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seam:
    """One place where being different is the decision."""

    id: str
    reason: str
    bound: str
    """Where the difference is, and where there must be none."""


SEAMS = (
    Seam(
        "ema-mask",
        "the reference lets padding into the EMA; here masked inputs enter as 0",
        "none at valid positions under right padding; masked positions are not compared",
    ),
    Seam(
        "loss-mask",
        "the reference ignores the attention mask in the loss; here masked targets do not count",
        "none when labels at padding are -100, as in every case",
    ),
    Seam(
        "empty-loss",
        "without a valid target the reference's loss is NaN; here it is 0",
        "only when no target is valid",
    ),
    Seam(
        "untied-head",
        "Transformers 4.57 ties the head whatever output_size says; the adapter sets "
        "tie_word_embeddings=False",
        "none once the adapter has set it",
    ),
    Seam(
        "initialisation",
        "Transformers' post_init redraws every Linear and the embedding with std 0.02; here "
        "init_mode is followed",
        "initial weights only; a loaded checkpoint is not affected",
    ),
)
