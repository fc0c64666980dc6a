"""What a token costs in longer sequences: time and memory.

Every length has a process of its own, so that none works with memory that a longer one left it; on
the side of `megalodon-jax` of the package index too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from reports.bench.figures import length_timings, median, row
from reports.bench.other import ABSENT, start_other
from reports.bench.worker import Work, Worker, WorkerError
from reports.bench.workloads import SIZES, arguments, in_turn
from reports.store.timings import Timing

MOST_CALLS = 8
"""Calls of the shorter lengths in a round, at most: a round of them is otherwise too short to meet
what a round of the longest meets, and the longest decides how long the bench takes."""
WORKS = ("forward", "train_step")


def bench_lengths(
    lengths: Sequence[int],
    repeats: int,
    other: Path | None,
    shared: Mapping[str, str],
    report: Callable[[str], None],
) -> list[Timing]:
    """Time forward and training step at every length, in turn, and ask how much memory they need.

    Memory is what the compiled programs ask for, not what a process holds: of a short sequence
    compiling needs more than the work does. Weights and optimiser states are the same at each
    length, so what a token costs is read from differences. The other package, where it is there,
    comes after ours has ended, for one of them may need all the memory: no rounds are paired.

    Raises:
        WorkerError: a process of ours ended early, for want of memory perhaps.
    """
    rows: list[Timing] = []
    longest = max(lengths)
    ours: dict[tuple[str, int], tuple[float, ...]] = {}
    with ExitStack() as stack:
        workers = {n: stack.enter_context(Worker(arguments("jax", n, "long"))) for n in lengths}
        for name in WORKS:
            calls = {n: min(MOST_CALLS, longest // n) for n in lengths}
            works = {str(n): _times(w.work(name), calls[n]) for n, w in workers.items()}
            rounds = in_turn(works, 1, repeats)[1]
            each = {n: tuple(t / calls[n] for t in rounds[str(n)]) for n in lengths}
            sizes = {n: worker.number(name) for n, worker in workers.items()}
            rows += length_timings(name, each, sizes, shared)
            for n in lengths:
                micros = 1e6 * median(each[n]) / n
                size = sizes[n] / 2**30
                report(f"  {name}, {n} tokens: {micros:.1f} us per token, {size:.2f} GiB")
                ours[name, n] = each[n]
    for n in lengths:
        rows += _other_at(n, {name: ours[name, n] for name in WORKS}, other, shared, report)
    return rows


def _other_at(
    length: int,
    ours: Mapping[str, Sequence[float]],
    place: Path | None,
    shared: Mapping[str, str],
    report: Callable[[str], None],
) -> list[Timing]:
    """Time the other package at a length, as many rounds as ours took, each of one call."""
    theirs: dict[str, tuple[float, ...]] = {}
    missing, beside = ABSENT, dict(shared)
    if place is not None:
        config, loss = SIZES["long"]
        try:
            with start_other(place, config, length, **loss) as worker:
                # Another version of it is another series.
                beside["identity"] += f" {worker.facts['version']}"
                for name, rounds in ours.items():
                    work = {"other": worker.work(name)}
                    theirs[name] = in_turn(work, 1, len(rounds))[1]["other"]
        except WorkerError as error:
            missing = str(error)
    rows = []
    for name, rounds in ours.items():
        work, found = f"{name}, {length} tokens", theirs.get(name, ())
        ratio = median(found) / median(rounds)
        rows.append(row(work, "other_seconds", median(found), beside, found, missing))
        rows.append(row(work, "other_ratio", ratio, beside, note=missing))
        if found:
            report(f"  {work}: {ratio:.2f} x megalodon-jax's speed")
    return rows


def _times(work: Work, calls: int) -> Work:
    return lambda count: work(count * calls)
