"""What a bench says of its seconds and bytes: the rows of a run, with their goals.

Pure functions from rounds to `Timing`s; nothing is measured here.
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
"""What JAX should reach on two cores, in multiples of megalodon-hf; 2 in memory is half of it."""
LENGTH_GOALS = {"token_ratio": 1.3, "token_bytes_ratio": MEMORY_PER_DOUBLING / 2}
"""What a long sequence may cost per token, in multiples of a short one."""
VERSION = 3
"""Raised when what is timed, or how, changes: earlier runs then leave the trend."""


@dataclass(frozen=True)
class Times:
    """Seconds of one piece of work, one entry per round; without the reference, none of its."""

    first: float
    """JAX's first call, which compiles."""
    jax: tuple[float, ...]
    reference: tuple[float, ...]
    floor: tuple[float, ...]
    other: tuple[float, ...] = ()
    """Of `megalodon-jax` of the package index."""


def timings(work: str, times: Times, missing: str, shared: Mapping[str, str]) -> tuple[Timing, ...]:
    """Return the rows of one piece of work; what needs the reference is NaN where it is missing.

    Args:
        work: its name.
        times: what was measured.
        missing: why the reference was not run.
        shared: dtype, device and identity.
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
    """Return the seconds of another side, "reference" or "other", and their ratio to JAX's."""
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
    """Return the rows of another way to do some work: its seconds, and its speed over the base's.

    Args:
        work: its name, with how it is done.
        metric: what the speed is called: `default_ratio` or `float32_ratio`.
        base: seconds of the usual way, in turn with `rounds`.
        rounds: its own seconds.
        shared: dtype, device and identity.
    """
    paired = tuple(b / r for b, r in zip(base, rounds, strict=True))
    return (
        row(work, "jax_seconds", median(rounds), shared, rounds),
        row(work, metric, median(base) / median(rounds), shared, paired),
    )


def memory_timings(
    peaks: Mapping[str, float | str], shared: Mapping[str, str]
) -> tuple[Timing, ...]:
    """Return the rows on peak memory, from bytes by side, or the reason why there are none."""
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
    """Return the rows of some work over lengths in tokens.

    Args:
        work: its name.
        rounds: seconds of one call by length, the same number of rounds each.
        sizes: bytes of the program by length.
        shared: dtype, device and identity.
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
    """Return the hash of everything but code and versions that decides how long the work takes.

    The whole processor counts: one name is sold with a dozen vector units. `more` is what else the
    work depends on.
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
    """Return one row; `note` is kept where there is no value, and goals are those of a CPU."""
    goal = math.nan
    if shared["device"] == "cpu":
        # "generate, 8 rows" has the goal of generate; what decodes 8 rows has none of its own.
        kind = "generate" if work.startswith("generate,") else work
        goal = GOALS.get((kind, metric), LENGTH_GOALS.get(metric, math.nan))
    return Timing(
        work, metric, value, goal, tuple(rounds), note=note if math.isnan(value) else "", **shared
    )


def median(rounds: Sequence[float]) -> float:
    """Return the median, NaN of nothing."""
    return statistics.median(rounds) if rounds else math.nan
