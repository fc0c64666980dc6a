"""Speed, side by side: the same weights and work in JAX and in megalodon-hf, in one run.

Absolute times of a shared machine drift, so the two sides alternate and medians are compared as
ratios. Two floors are measured in the same run: the products alone (GEMM), and for decoding the
bytes of the parameters over the measured copy bandwidth.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import equinox as eqx
import jax

from megalodon_jax.config import GemmBackend, MegalodonConfig
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.quantization.products import Format, path_of
from parity.megalodon.reference import LiveReference, why_unavailable
from parity.megalodon.reference import identity as installed
from reports.bench.workloads import (
    CONFIG,
    DECODE_STEPS,
    LENGTH,
    Work,
    copy_floor,
    gemm_floor,
    inputs,
    jax_workloads,
    peak_memory,
    reference_workloads,
    seconds,
)
from reports.provenance.environment import describe, new_manifest
from reports.store.manifest import Environment, ReferenceInfo
from reports.store.runs import Run, RunKind
from reports.store.timings import Timing

GOALS = {
    ("forward", "ratio"): 6.0,
    ("train_step", "ratio"): 7.0,
    ("prefill", "ratio"): 1.8,
    ("decode", "ratio"): 1.4,
    ("train_step", "peak_ratio"): 2.0,
}
"""What JAX should reach on two cores, in multiples of megalodon-hf; 2 in memory is half of it."""

FORMATS: tuple[Format, ...] = ("mxfp8", "nvfp4")
"""Backends that a training step is timed on, against the default one."""

VERSION = 1
"""Raised when what is timed, or how, changes: earlier runs then leave the trend."""

PASSES = {"forward": 1, "prefill": 1, "train_step": 3}
"""Products of each work, in forward passes: going back takes twice those of going forward."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Times:
    """Seconds of one piece of work, one entry per round; without the reference, none of its."""

    first: float
    """JAX's first call, which compiles."""
    jax: tuple[float, ...]
    reference: tuple[float, ...]
    floor: tuple[float, ...]


def bench(repeats: int, memory: bool, report: Report) -> Run:
    """Measure speed, and peak memory where asked; return the run, ready for the store.

    Both sides run on JAX's device, CPU or GPU, with float32 products: a GPU shortens none to TF32.
    """
    clock, manifest = time.perf_counter(), new_manifest(datetime.now(UTC), RunKind.BENCH)
    environment = manifest.environment
    # Before anything else is in memory, and never beside something that is being timed.
    peaks = {side: _peak(side, memory, report) for side in ("jax", "reference")}
    with jax.default_matmul_precision("highest"):
        times, missing = measure(CONFIG, LENGTH, repeats, report)
        backends = measure_backends(CONFIG, LENGTH, repeats, report)
    shared = {
        "dtype": str(CONFIG.compute_dtype),
        "device": str(environment.device.kind),
        "identity": identity(CONFIG, LENGTH, environment),
    }
    rows = [row for work, part in times.items() for row in timings(work, part, missing, shared)]
    rows += [row for name, pair in backends.items() for row in backend_timings(name, *pair, shared)]
    reference = ReferenceInfo("absent", detail=missing)
    if not missing:
        live = LiveReference()
        reference = replace(describe(live), threads=live.provenance["threads"])
    manifest = replace(
        manifest,
        environment=replace(environment, reference=reference),
        durations={"bench": round(time.perf_counter() - clock, 3)},
        workload={
            "batch": 1,
            "length": LENGTH,
            "decode_steps": DECODE_STEPS,
            "repeats": repeats,
            "config": CONFIG.to_dict(),
        },
    )
    return Run(manifest, timings=(*rows, *memory_timings(peaks, shared)))


def measure(
    config: MegalodonConfig, length: int, repeats: int, report: Report
) -> tuple[dict[str, Times], str]:
    """Time every piece of work, the two sides in turn.

    Returns the times by work, and why there are none of the reference ("" when there are).
    """
    model, ids = inputs(config, length)
    theirs: Mapping[str, Work] = {}
    missing = ""
    try:
        theirs = reference_workloads(model, ids)
    except RuntimeError as error:
        missing = str(error)
        report(f"JAX alone: {missing}")
    floors = _floors(model, length, repeats)
    times = {}
    for name, work in jax_workloads(model, ids).items():
        count = DECODE_STEPS if name == "decode" else 1
        first, other = seconds(work, count), theirs.get(name)
        if other:
            seconds(other, count)
        rounds = [
            (seconds(work, count), seconds(other, count) if other else math.nan)
            for _ in range(repeats)
        ]
        ours, reference = zip(*rounds, strict=True)
        times[name] = Times(first, ours, reference if other else (), floors[name])
        speed = f", {_median(reference) / _median(ours):.2f} x the reference's speed"
        report(f"  {name}: {_median(ours):.3f} s{speed if other else ''}")
    return times, missing


def measure_backends(
    config: MegalodonConfig, length: int, repeats: int, report: Report
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return seconds of a training step on the default backend and on each format, in turn."""

    def step(backend: GemmBackend) -> Work:
        work = jax_workloads(*inputs(replace(config, gemm_backend=backend), length))["train_step"]
        work(1)
        return work

    times, default = {}, step("default")
    for name in FORMATS:
        work = step(name)
        ours, other = zip(*((seconds(default), seconds(work)) for _ in range(repeats)), strict=True)
        times[name] = ours, other
        ratio = _median(other) / _median(ours)
        report(f"  train_step on {name} ({path_of(name)}): {ratio:.2f} x the default's time")
    return times


def backend_timings(
    backend: str,
    default: tuple[float, ...],
    rounds: tuple[float, ...],
    shared: Mapping[str, str],
) -> tuple[Timing, ...]:
    """Return the rows of a GEMM backend: its seconds, and the default's speed over its own."""
    work, paired = f"train_step on {backend}", zip(default, rounds, strict=True)
    return (
        _row(work, "jax_seconds", _median(rounds), shared, rounds),
        _row(
            work,
            "default_ratio",
            _median(default) / _median(rounds),
            shared,
            tuple(d / r for d, r in paired),
        ),
    )


def timings(work: str, times: Times, missing: str, shared: Mapping[str, str]) -> tuple[Timing, ...]:
    """Return the rows of one piece of work; what needs the reference is NaN where it is missing.

    Args:
        work: its name.
        times: what was measured.
        missing: why the reference was not run.
        shared: dtype, device and identity.
    """
    ours, other, floor = map(_median, (times.jax, times.reference, times.floor))
    paired = tuple(r / j for j, r in zip(times.jax, times.reference, strict=False))
    return (
        _row(work, "jax_seconds", ours, shared, times.jax),
        _row(work, "reference_seconds", other, shared, times.reference, missing),
        _row(work, "ratio", other / ours, shared, paired, missing),
        _row(work, "floor_seconds", floor, shared, times.floor),
        _row(work, "floor_ratio", ours / floor, shared),
        _row(work, "compile_seconds", max(0.0, times.first - ours), shared),
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
        _row("train_step", "jax_peak_bytes", ours, shared, note=why),
        _row("train_step", "reference_peak_bytes", other, shared, note=why),
        _row("train_step", "peak_ratio", other / ours, shared, note=why),
    )


def identity(config: MegalodonConfig, length: int, environment: Environment) -> str:
    """Return the hash of everything but code and versions that decides how long the work takes."""
    device, threads = asdict(environment.device), environment.threads
    reference = installed() if why_unavailable() is None else "absent"
    parts = (VERSION, reference, config.to_dict(), length, DECODE_STEPS, device, threads)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _row(
    work: str,
    metric: str,
    value: float,
    shared: Mapping[str, str],
    rounds: tuple[float, ...] = (),
    note: str = "",
) -> Timing:
    goal = GOALS.get((work, metric), math.nan) if shared["device"] == "cpu" else math.nan
    return Timing(
        work, metric, value, goal, rounds, note=note if math.isnan(value) else "", **shared
    )


def _peak(side: str, memory: bool, report: Report) -> float | str:
    if not memory:
        return "peak memory was not asked for"
    if side == "reference" and (why := why_unavailable()):
        return why
    try:
        peak = peak_memory(side)
    except RuntimeError as error:
        report(f"  train_step peak memory, {side}: {error}")
        return str(error)
    report(f"  train_step peak memory, {side}: {peak / 2**30:.2f} GiB")
    return peak


def _floors(model: MegalodonForCausalLM, length: int, repeats: int) -> dict[str, tuple[float, ...]]:
    products = gemm_floor(model.config, length)
    products(1)
    one = [seconds(products) for _ in range(repeats)]
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    floors = {work: tuple(passes * t for t in one) for work, passes in PASSES.items()}
    return {**floors, "decode": copy_floor(DECODE_STEPS * parameters, repeats)}


def _median(rounds: Sequence[float]) -> float:
    return statistics.median(rounds) if rounds else math.nan
