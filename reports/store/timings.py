"""What a bench says: one `Timing` per piece of work and metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

AT_MOST = frozenset(("token_ratio", "token_bytes_ratio"))
"""Metrics whose goal is the largest value wanted."""
LESS_IS_BETTER = AT_MOST | {"floor_ratio"}
"""Metrics of which less is better, with a goal or without."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One number about one piece of work.

    Metrics: `jax_seconds`, `reference_seconds` and `floor_seconds` are medians of their `rounds`;
    `ratio` is the reference's median over that of JAX, its `rounds` the ratio round by round;
    `floor_ratio` is JAX over its floor; `compile_seconds` is what the first call took beyond the
    median. `other_seconds` and `other_ratio`, over JAX, are of the package index's megalodon-jax.
    `tokens_per_second` counts all rows. `default_ratio` is the seconds on the default GEMM backend
    over those on another; `float32_ratio` those in float32 over those in bfloat16, and
    `reference_float32_ratio` the same of the reference.

    Of a length: `token_ratio` is its seconds per token over those of the shortest length;
    `program_bytes` what the compiled program asks for, `token_bytes` that of each token beyond the
    shortest length, and `token_bytes_ratio` the same over that of the next shortest. Of memory:
    `jax_peak_bytes`, `reference_peak_bytes`, and `peak_ratio`, the reference over JAX.
    """

    work: str
    metric: str
    value: float
    """NaN where it was not measured; `note` says why."""
    goal: float
    """The smallest `value` wanted, of `AT_MOST` the largest; NaN where there is none."""
    rounds: tuple[float, ...]
    """As measured, in order; empty where one number is all there is."""
    dtype: str
    device: str
    identity: str
    """Hash of configuration, lengths, dtype, machine, threads and reference; trends need it equal.
    """
    note: str = ""

    @property
    def repeats(self) -> int:
        """Number of rounds."""
        return len(self.rounds)

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal or a measurement."""
        if math.isnan(self.value) or math.isnan(self.goal):
            return None
        return self.value <= self.goal if self.metric in AT_MOST else self.value >= self.goal
