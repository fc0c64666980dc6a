"""Rows of a bench (`Timing`) with their goals, computed from measured seconds and bytes.

Pure functions; nothing is measured here. A bench repeats each work in several rounds.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megalodon_jax.config import MegalodonConfig
from parity.megalodon.reference import identity as installed
from parity.megalodon.reference import why_unavailable
from parity.tolerances import MEMORY_PER_DOUBLING
from reports.bench.workloads import DECODE_STEPS
from reports.store.manifest import Environment
from reports.store.timings import Timing

GOALS = {
    ("forward", "ratio"): 6.0,
    ("train_step", "ratio"): 7.0,
    ("prefill", "ratio"): 1.8,
    ("decode", "ratio"): 1.4,
    ("generate", "ratio"): 1.0,
    ("train_step", "peak_ratio"): 2.0,
}
"""Smallest wanted ratios megalodon-hf / JAX of seconds (or peak bytes) on two CPU cores, by work
and metric."""
LENGTH_GOALS = {"token_ratio": 1.3, "token_bytes_ratio": MEMORY_PER_DOUBLING / 2}
"""Largest wanted ratio of the cost per token of a long sequence to that of a shorter one, by
metric."""
VERSION = 3
"""Version of the timed work and of the method. Increase it when one of them changes, so that trends
start anew."""


@dataclass(frozen=True)
class Times:
    """Seconds of one piece of work in each round, by side; () for a side that did not run."""

    first: float
    """Seconds of JAX's first call, which compiles."""
    jax: tuple[float, ...]
    reference: tuple[float, ...]
    floor: tuple[float, ...]
    """Seconds of the work's lower bound: its matrix products, or copying the parameters."""
    other: tuple[float, ...] = ()
    """Seconds of `megalodon-jax` from the package index (PyPI)."""


def timings(work: str, times: Times, missing: str, shared: Mapping[str, str]) -> tuple[Timing, ...]:
    """Return the rows (`Timing`) of one piece of work; those of a missing reference are NaN.

    They are the median seconds of JAX, of the reference and of the lower bound, the ratios of
    medians reference / JAX and JAX / lower bound, and the seconds of compilation.

    Args:
        work: Name of the work.
        times: Measured seconds.
        missing: Why the reference was not run; "" if it was.
        shared: Dtype, device and identity of all rows.
    """
    ours, floor = median(times.jax), median(times.floor)
    return (
        row(work, "jax_seconds", ours, shared, times.jax),
        *compared(work, "reference", times.jax, times.reference, missing, shared),
        row(work, "floor_seconds", floor, shared, times.floor),
        row(work, "floor_ratio", ours / floor, shared),
        row(work, "compile_seconds", max(0.0, times.first - ours), shared),
    )


def compared(
    work: str,
    side: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    missing: str,
    shared: Mapping[str, str],
) -> tuple[Timing, ...]:
    """Return two rows (`Timing`) about another side: its median seconds, and these divided by JAX's
    median seconds. Each row also has the values of the rounds.

    Args:
        work: Name of the work.
        side: "reference" or "other" (PyPI's megalodon-jax).
        ours: Seconds of JAX in each round.
        theirs: Seconds of the side in each round; empty if it did not run, which gives NaN.
        missing: Why the side did not run.
        shared: Dtype, device and identity of the rows.
    """
    ratio = "ratio" if side == "reference" else f"{side}_ratio"
    paired = tuple(t / j for j, t in zip(ours, theirs, strict=False))
    return (
        row(work, f"{side}_seconds", median(theirs), shared, theirs, missing),
        row(work, ratio, median(theirs) / median(ours), shared, paired, missing),
    )


def variant_timings(
    work: str,
    metric: str,
    base: Sequence[float],
    rounds: Sequence[float],
    shared: Mapping[str, str],
) -> tuple[Timing, ...]:
    """Return two rows (`Timing`) about a variant of some work: its median seconds, and the base's
    median seconds divided by these. Each row also has the values of the rounds.

    Args:
        work: Name of the rows, such as "forward in bfloat16": the work and its variant.
        metric: Name of the speed-up, base / variant: `default_ratio` or `float32_ratio`.
        base: Seconds of the unchanged work in each round, measured alternately with `rounds`.
        rounds: Seconds of the variant in each round.
        shared: Dtype, device and identity.
    """
    paired = tuple(b / r for b, r in zip(base, rounds, strict=True))
    return (
        row(work, "jax_seconds", median(rounds), shared, rounds),
        row(work, metric, median(base) / median(rounds), shared, paired),
    )


def memory_timings(
    peaks: Mapping[str, float | str], shared: Mapping[str, str]
) -> tuple[Timing, ...]:
    """Return three rows (`Timing`) about the peak memory of a training step: JAX's bytes, the
    reference's bytes, and reference / JAX.

    `peaks` has for the sides "jax" and "reference" the bytes, or the reason why they were not
    measured; rows without bytes are NaN.
    """
    why = next((peak for peak in peaks.values() if isinstance(peak, str)), "")
    ours, other = (
        math.nan if isinstance(peaks[side], str) else float(peaks[side])
        for side in ("jax", "reference")
    )
    return (
        row("train_step", "jax_peak_bytes", ours, shared, note=why),
        row("train_step", "reference_peak_bytes", other, shared, note=why),
        row("train_step", "peak_ratio", other / ours, shared, note=why),
    )


def length_timings(
    work: str,
    rounds: Mapping[int, Sequence[float]],
    sizes: Mapping[int, float],
    shared: Mapping[str, str],
) -> tuple[Timing, ...]:
    """Return the rows (`Timing`) of some work at several lengths: seconds, bytes, cost per token.

    Seconds are medians over the rounds; seconds per token are divided by those of the shortest
    length. Memory per token is the increase in bytes from the shortest length, divided by the
    increase in tokens; its ratio is to the memory per token of the second shortest length.

    Args:
        work: Name of the work.
        rounds: Seconds of one call in each round, by length; equally many rounds per length.
        sizes: Memory of the compiled program in bytes, by length.
        shared: Dtype, device and identity.
    """
    lengths = sorted(rounds)
    shortest = lengths[0]
    slopes = {n: (sizes[n] - sizes[shortest]) / (n - shortest) for n in lengths[1:]}
    out: list[Timing] = []
    for n in lengths:
        name, own = f"{work}, {n} tokens", rounds[n]
        out.append(row(name, "jax_seconds", median(own), shared, own))
        out.append(row(name, "program_bytes", sizes[n], shared))
        if n == shortest:
            continue
        scale = shortest / n
        paired = tuple(scale * t / s for s, t in zip(rounds[shortest], own, strict=True))
        ratio = scale * median(own) / median(rounds[shortest])
        out.append(row(name, "token_ratio", ratio, shared, paired))
        out.append(row(name, "token_bytes", slopes[n], shared))
        if n != lengths[1]:
            out.append(row(name, "token_bytes_ratio", slopes[n] / slopes[lengths[1]], shared))
    return tuple(out)


def identity(config: MegalodonConfig, length: int, environment: Environment, *more: object) -> str:
    """Return a hash of all that determines the duration of the work, except code and versions.

    It covers all fields of the processor, since two processors of one name can differ in vector
    units. `more` has further values that the work depends on.
    """
    device, threads = asdict(environment.device), environment.threads
    host = sorted(environment.host.items())
    reference = installed() if why_unavailable() is None else "absent"
    sizes = (config.to_dict(), length, DECODE_STEPS)
    parts = (VERSION, reference, sizes, device, host, threads, *more)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def row(
    work: str,
    metric: str,
    value: float,
    shared: Mapping[str, str],
    rounds: Sequence[float] = (),
    note: str = "",
) -> Timing:
    """Return one row (`Timing`) with its goal from `GOALS` or `LENGTH_GOALS`; the goal is NaN on a
    GPU, or if none is set.

    `note` says why `value` is NaN; it is not stored if `value` is a number.
    """
    goal = math.nan
    if shared["device"] == "cpu":
        # "generate, 8 rows" has the goal of generate; decoding 8 rows has no goal.
        kind = "generate" if work.startswith("generate,") else work
        goal = GOALS.get((kind, metric), LENGTH_GOALS.get(metric, math.nan))
    return Timing(
        work, metric, value, goal, tuple(rounds), note=note if math.isnan(value) else "", **shared
    )


def median(rounds: Sequence[float]) -> float:
    """Return the median of the rounds' values; NaN if there are none."""
    return statistics.median(rounds) if rounds else math.nan
