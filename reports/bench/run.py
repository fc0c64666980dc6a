"""Speed compared with megalodon-hf: the same weights and work on both sides, in one run.

Absolute times on a shared machine drift, so the sides alternate and medians are compared as ratios.
Two floors are measured in the same run: the matrix products alone, and for decoding the size of the
parameters divided by the measured copy bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from megalodon_jax.checks import traced_checks
from megalodon_jax.config import MegalodonConfig
from megalodon_jax.model import MegalodonForCausalLM
from parity.executors.executor import Log
from parity.megalodon.reference import LiveReference, why_unavailable
from reports.bench.figures import Times, compared, identity, median, memory_timings, timings
from reports.bench.lengths import bench_lengths
from reports.bench.nights import bench_nights, check_commit
from reports.bench.other import ABSENT, start_other
from reports.bench.variants import PROMPT, bench_backends, bench_bfloat16, bench_rows
from reports.bench.worker import Worker, WorkerError
from reports.bench.workloads import (
    CONFIG,
    DECODE_STEPS,
    LENGTH,
    LONG,
    Work,
    copy_floor,
    gemm_floor,
    in_turn,
    inputs,
    jax_workloads,
    peak_memory,
    reference_workloads,
    seconds,
)
from reports.provenance.environment import describe, new_manifest
from reports.store.manifest import Manifest, ReferenceInfo
from reports.store.runs import Run, RunKind
from reports.store.timings import Timing

PASSES = {"forward": 1, "prefill": 1, "train_step": 3}
"""Lower bound of each work's time, as a multiple of the time of a forward pass's matrix products.
A backward pass has twice as many products."""


@dataclass(frozen=True)
class Options:
    """Options of a bench, which always times forward, training step, prefill and decoding."""

    repeats: int = 3
    """Number of rounds."""
    memory: bool = True
    """Whether to measure peak memory."""
    lengths: tuple[int, ...] = ()
    """Lengths in tokens whose cost per token is compared, at least two; () for none."""
    rows: tuple[int, ...] = ()
    """Batch sizes, in rows, at which decoding and generation are also timed; () for none."""
    bfloat16: bool = False
    """Whether to time products in bfloat16 too."""
    nights: str = ""
    """Commit whose nights are compared with this version's (`bench.nights`); "" for none."""
    other: Path | None = None
    """Folder or environment with PyPI's `megalodon-jax` (`reports.bench.other`); None for none."""


def bench(options: Options, report: Log) -> Run:
    """Do the measurements that `options` select, and return them as a run that can be stored.

    All sides run on JAX's device, CPU or GPU, with float32 products and without TF32. Programs are
    traced without checks on values, since megalodon-hf has none.

    Raises:
        NightsError: `options.nights` is no commit, or its nights could not be measured.
        WorkerError: one of our processes ended early.
    """
    if options.nights:
        check_commit(options.nights)
    clock, manifest = time.perf_counter(), new_manifest(datetime.now(UTC), RunKind.BENCH)
    environment = manifest.environment
    # Peak memory comes first: nothing else uses memory yet, and nothing is being timed.
    peaks = {side: _peak(side, options.memory, report) for side in ("jax", "reference")}

    def shared(config: MegalodonConfig, length: int, *more: object) -> dict[str, str]:
        return {
            "dtype": str(config.compute_dtype),
            "device": str(environment.device.kind),
            "identity": identity(config, length, environment, *more),
        }

    repeats, base = options.repeats, shared(CONFIG, LENGTH)
    long: list[Timing] = []
    if options.lengths:
        longest = shared(LONG, max(options.lengths), *sorted(options.lengths))
        long = bench_lengths(options.lengths, repeats, options.other, longest, report)
    with jax.default_matmul_precision("highest"), traced_checks(False):
        with _other(options.other, report) as (other, absent):
            times, missing = measure(CONFIG, LENGTH, repeats, report, other)
            version = str(other.facts["version"]) if other else ""
        beside = shared(CONFIG, LENGTH, version)
        rows = [r for work, part in times.items() for r in timings(work, part, missing, base)]
        for work, part in times.items():
            rows += compared(work, "other", part.jax, part.other, absent, beside)
        rows += bench_backends(CONFIG, LENGTH, repeats, base, report)
        if options.bfloat16:
            ours, theirs = ({**part, "dtype": "bfloat16"} for part in (base, beside))
            rows += bench_bfloat16(CONFIG, LENGTH, repeats, options.other, ours, theirs, report)
        several = shared(CONFIG, PROMPT, version)
        rows += bench_rows(CONFIG, options.rows, repeats, options.other, several, report)
    rows += (*memory_timings(peaks, base), *long)
    if options.nights:
        rows += bench_nights(options.nights, base, report)
    manifest = _described(manifest, options, missing, version or absent)
    manifest = replace(manifest, durations={"bench": round(time.perf_counter() - clock, 3)})
    return Run(manifest, timings=tuple(rows))


def measure(
    config: MegalodonConfig,
    length: int,
    repeats: int,
    report: Log,
    other: Worker | None = None,
) -> tuple[dict[str, Times], str]:
    """Time every piece of work that has a floor (lower bound), alternating between the sides.

    The sides are JAX, megalodon-hf if it can run here, and `other` if given.

    Returns:
        The times by name of the work, and why megalodon-hf is missing ("" if it ran).
    """
    model, ids = inputs(config, length)
    theirs: Mapping[str, Work] = {}
    missing = ""
    try:
        theirs = reference_workloads(model, ids)
    except RuntimeError as error:
        missing = str(error)
        report(f"only JAX is timed: {missing}")
    floors = _floors(model, length, repeats)
    ours, times = jax_workloads(model, ids), {}
    for name in (name for name in ours if name in floors):
        sides = {"jax": ours[name]}
        sides |= {"reference": theirs[name]} if name in theirs else {}
        sides |= {"other": other.work(name)} if other else {}
        first, t = in_turn(sides, DECODE_STEPS if name == "decode" else 1, repeats)
        rounds = (t.get(side, ()) for side in ("jax", "reference", "other"))
        own, reference, others = rounds
        times[name] = Times(first["jax"], own, reference, floors[name], others)
        speeds = {"the reference": reference, "megalodon-jax": others}
        said = [f"{median(r) / median(own):.2f} x {who}'s speed" for who, r in speeds.items() if r]
        report(f"  {name}: {', '.join((f'{median(own):.3f} s', *said))}")
    return times, missing


@contextmanager
def _other(place: Path | None, report: Log) -> Iterator[tuple[Worker | None, str]]:
    """Context that yields the process of PyPI's megalodon-jax and "", or None and the reason."""
    with ExitStack() as stack:
        worker, why = None, ABSENT
        if place is not None:
            try:
                worker, why = stack.enter_context(start_other(place, CONFIG, LENGTH)), ""
            except WorkerError as error:
                why = str(error)
                report(f"PyPI's megalodon-jax is not timed: {why}")
        yield worker, why


def _described(manifest: Manifest, options: Options, missing: str, other: str) -> Manifest:
    reference = ReferenceInfo("absent", detail=missing)
    if not missing:
        live = LiveReference()
        reference = replace(describe(live), threads=live.provenance["threads"])
    workload: dict[str, Any] = {
        "batch": 1,
        "length": LENGTH,
        "decode_steps": DECODE_STEPS,
        "repeats": options.repeats,
        "megalodon-jax": other,
        "lengths": list(options.lengths),
        "rows": list(options.rows),
        "nights": options.nights,
        "config": CONFIG.to_dict(),
    }
    return replace(
        manifest,
        environment=replace(manifest.environment, reference=reference),
        workload=workload,
    )


def _peak(side: str, memory: bool, report: Log) -> float | str:
    if not memory:
        return "peak memory was not requested"
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
