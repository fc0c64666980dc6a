"""Variants of the bench's work: products in another format, in bfloat16, several rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from megalodon_jax.config import GemmBackend, MegalodonConfig
from megalodon_jax.quantization.products import Format, path_of
from parity.executors.executor import Log
from reports.bench.figures import compared, median, row, variant_timings
from reports.bench.other import ABSENT, start_other
from reports.bench.worker import WorkerError
from reports.bench.workloads import (
    DECODE_STEPS,
    Work,
    in_turn,
    inputs,
    jax_workloads,
    reference_workloads,
)
from reports.store.timings import Timing

FORMATS: tuple[Format, ...] = ("mxfp8", "nvfp4")
"""GEMM backends whose training step is timed against the default one."""
PROMPT, NEW_TOKENS = 64, 32
"""For `bench_rows`: tokens per row of the prompt, and number of tokens that `generate` adds."""
WORKS = ("forward", "train_step", "decode", "generate")
"""Names of the work for which PyPI's megalodon-jax is timed."""
Shared = Mapping[str, str]


def bench_backends(
    config: MegalodonConfig, length: int, repeats: int, shared: Shared, report: Log
) -> list[Timing]:
    """Time a training step with each GEMM backend of `FORMATS`, alternating with the default."""

    def step(backend: GemmBackend) -> Work:
        return jax_workloads(*inputs(replace(config, gemm_backend=backend), length))["train_step"]

    rows: list[Timing] = []
    default = step("default")
    for name in FORMATS:
        _, rounds = in_turn({"default": default, name: step(name)}, 1, repeats)
        both = rounds["default"], rounds[name]
        rows += variant_timings(f"train_step on {name}", "default_ratio", *both, shared)
        ratio = median(both[1]) / median(both[0])
        report(f"  train_step on {name} ({path_of()}): {ratio:.2f} x the default's time")
    return rows


def bench_bfloat16(
    config: MegalodonConfig,
    length: int,
    repeats: int,
    other: Path | None,
    shared: Shared,
    beside: Shared,
    report: Log,
) -> list[Timing]:
    """Time forward and training step with products in bfloat16, and the reference under autocast.

    The variants alternate: JAX and the reference, each in float32 and in bfloat16, and PyPI's
    megalodon-jax in bfloat16 if `other` says where it is installed.

    `shared` has dtype, device and identity of the rows. `beside` has them for the rows about PyPI's
    package: the identity includes that package's version, so a new version starts new trends in
    these rows only.
    """
    narrow = replace(config, compute_dtype=jnp.bfloat16)
    model, ids = inputs(config, length)
    sides = {
        "float32": jax_workloads(model, ids),
        "bfloat16": jax_workloads(*inputs(narrow, length)),
    }
    missing = ""
    try:
        sides["reference"] = reference_workloads(model, ids)
        sides["autocast"] = reference_workloads(model, ids, autocast=True)
    except RuntimeError as error:
        missing = str(error)
    rows: list[Timing] = []
    with ExitStack() as stack:
        theirs, absent = _other_side(stack, other, narrow, length)
        sides |= theirs
        for name in ("forward", "train_step"):
            work = f"{name} in bfloat16"
            _, t = in_turn({side: works[name] for side, works in sides.items()}, 1, repeats)
            ours = t["bfloat16"]
            rows += variant_timings(work, "float32_ratio", t["float32"], ours, shared)
            rows += compared(work, "reference", ours, t.get("autocast", ()), missing, shared)
            rows += compared(work, "other", ours, t.get("other", ()), absent, beside)
            ratio = median(t.get("reference", ())) / median(t.get("autocast", ()))
            rows.append(row(work, "reference_float32_ratio", ratio, shared, note=missing))
            speed = median(t["float32"]) / median(ours)
            report(f"  {work}: {speed:.2f} x the speed in float32 (the reference's: {ratio:.2f})")
    return rows


def _other_side(
    stack: ExitStack, place: Path | None, config: MegalodonConfig, length: int, rows: int = 1
) -> tuple[dict[str, dict[str, Work]], str]:
    """Return {"other": work of PyPI's megalodon-jax} and "", or {} and why the package is missing.

    Closing `stack` ends the package's process.
    """
    if place is None:
        return {}, ABSENT
    try:
        worker = stack.enter_context(start_other(place, config, length, rows))
    except WorkerError as error:
        return {}, str(error)
    return {"other": {name: worker.work(name) for name in WORKS}}, ""


def bench_rows(
    config: MegalodonConfig,
    counts: Sequence[int],
    repeats: int,
    other: Path | None,
    shared: Shared,
    report: Log,
) -> list[Timing]:
    """Time decoding and generation with each batch size in `counts`, alternating between the sides.

    The sides are JAX, megalodon-hf if it can run here, and PyPI's megalodon-jax at `other`, if any.
    """
    rows: list[Timing] = []
    for count in counts:
        with ExitStack() as stack:
            model, ids = inputs(config, PROMPT, count)
            sides = {"jax": jax_workloads(model, ids)}
            missing = {"reference": ""}
            try:
                sides["reference"] = reference_workloads(model, ids)
            except RuntimeError as error:
                missing["reference"] = str(error)
            theirs, missing["other"] = _other_side(stack, other, config, PROMPT, count)
            sides |= theirs
            for name, tokens in (("decode", DECODE_STEPS), ("generate", NEW_TOKENS)):
                works = {side: works[name] for side, works in sides.items()}
                rounds = in_turn(works, tokens, repeats)[1]
                rows += _row_timings(name, count, tokens, rounds, missing, shared, report)
    return rows


def _row_timings(
    name: str,
    count: int,
    tokens: int,
    rounds: Mapping[str, tuple[float, ...]],
    missing: Mapping[str, str],
    shared: Shared,
    report: Log,
) -> list[Timing]:
    work, ours = f"{name}, {count} {'row' if count == 1 else 'rows'}", rounds["jax"]
    out = [row(work, "jax_seconds", median(ours), shared, ours)]
    for side, why in missing.items():
        out += compared(work, side, ours, rounds.get(side, ()), why, shared)
    speed = count * tokens / median(ours)
    report(f"  {work}: {speed:.0f} tokens per second")
    each = tuple(count * tokens / t for t in ours)
    return [*out, row(work, "tokens_per_second", speed, shared, each)]
