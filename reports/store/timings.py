"""Results of a bench (speed and memory measurement): one `Timing` per piece of work and metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

AT_MOST = frozenset(("token_ratio", "token_bytes_ratio"))
"""Metrics whose goal is an upper limit."""
LESS_IS_BETTER = AT_MOST | {"floor_ratio"}
"""Metrics of which a smaller value is better, with or without a goal."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One number, named by `metric`, about one piece of work.

    Medians over `rounds`, in seconds: `jax_seconds`, `reference_seconds`, `floor_seconds` (lower
    bound: the matrix products alone or, for decoding, reading the parameters), and `other_seconds`
    for the package index's megalodon-jax. `compile_seconds` is the time of the first call minus the
    median. `tokens_per_second` is JAX's speed, over all rows of the batch.

    Ratios of seconds: `ratio` is reference / JAX, with the ratio of each round in `rounds`;
    `floor_ratio` is JAX / floor; `other_ratio` is other / JAX; `default_ratio` is the default GEMM
    backend / the one that `work` names; `float32_ratio` is float32 / bfloat16, and
    `reference_float32_ratio` the same of the reference.

    Nights: `night_seconds` and `commit_seconds` are the processor seconds of a night of this
    version and of another commit, and `commit_ratio` is the other commit's / this version's.
    `night_programs`, `commit_programs` and `programs_ratio` are the same for the number of compiled
    programs.

    Per length: `token_ratio` is seconds per token relative to the shortest length; `program_bytes`
    the memory of the compiled program; `token_bytes` its growth per token beyond the shortest
    length; `token_bytes_ratio` that growth relative to that of the second shortest length. Memory:
    `jax_peak_bytes`, `reference_peak_bytes`, and `peak_ratio`, reference / JAX.
    """

    work: str
    metric: str
    value: float
    """Measured number; NaN if it was not measured, `note` then says why."""
    goal: float
    """Smallest wanted `value`, or the largest for `AT_MOST`; NaN without a goal."""
    rounds: tuple[float, ...]
    """Measurements of the single rounds, in order; empty if there is only one number."""
    dtype: str
    device: str
    identity: str
    """Hash of configuration, lengths, dtype, machine, threads and reference; a trend has only
    timings of one identity."""
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
