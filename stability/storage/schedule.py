"""Learning-rate schedules: linear warmup, then a constant rate, or linear or cosine decay.

Source: docs/stability.md "A schedule".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("constant", "cosine", "linear")
_HOW = (
    "expected constant, cosine or linear and its numbers, such as "
    "cosine:warmup=100,steps=2000,end=0.1"
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates of a run, as factors on its largest learning rate.

    Raises:
        ValueError: the kind is unknown, the warmup is negative or not shorter than the run, or
            `end` is not in [0, 1].
    """

    kind: str
    """One of `KINDS`."""
    steps: int
    """Number of optimiser steps of the whole run."""
    warmup: int = 0
    """Number of initial steps over which the learning rate grows linearly from 0."""
    end: float = 0.0
    """Learning rate after the last step divided by the largest rate; ignored for a constant
    rate."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown schedule {self.kind!r}: {_HOW}.")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"schedule: warmup={self.warmup} and steps={self.steps}: expected whole numbers, "
                "0 <= warmup < steps."
            )
        if not 0.0 <= self.end <= 1.0:
            raise ValueError(f"schedule: end={self.end:g} must be in [0, 1], a factor on the rate.")

    def factor(self, share: np.ndarray) -> np.ndarray:
        """Return the factor on the largest rate at fractions `share` of the run, each in [0, 1]."""
        step = np.asarray(share, np.float64) * self.steps
        gone = np.clip((step - self.warmup) / (self.steps - self.warmup), 0, 1)
        way = {
            "constant": np.ones_like(gone),
            "linear": 1 - (1 - self.end) * gone,
            "cosine": self.end + (1 - self.end) * (1 + np.cos(math.pi * gone)) / 2,
        }[self.kind]
        return np.where(step < self.warmup, step / max(self.warmup, 1), way)

    def describe(self) -> str:
        """Return the schedule as a phrase, such as "cosine rate, 2,000 steps, 100 of warmup"."""
        first = f", {self.warmup:,} of warmup" if self.warmup else ""
        last = "" if self.kind == "constant" else f", down to {self.end:.0%} of the rate"
        return f"{self.kind} rate, {self.steps:,} steps{first}{last}"


def parse(text: str) -> Schedule:
    """Parse a schedule such as `cosine:warmup=100,steps=2000,end=0.1`.

    `steps` must be given. `warmup` and `end` are optional, and `end` is not allowed for a constant
    rate.

    Raises:
        ValueError: the text is not a schedule.
    """
    kind, _, rest = (part.strip() for part in text.partition(":"))
    allowed = {"steps": int, "warmup": int} | ({} if kind == "constant" else {"end": float})
    numbers: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in allowed or name in numbers:
            raise ValueError(f"schedule {text!r}, at {part!r}: {_HOW}.")
        try:
            numbers[name] = allowed[name](value)
        except ValueError as error:
            raise ValueError(f"schedule {text!r}: {value!r} is no number: {_HOW}.") from error
    if "steps" not in numbers:
        raise ValueError(f"schedule {text!r} has no steps=NUMBER: {_HOW}.")
    return Schedule(kind, **numbers)
