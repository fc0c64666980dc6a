"""Cost per token in longer sequences: time and memory.

Each length runs in a separate process, also for PyPI's `megalodon-jax`, so that none reuses memory
that a longer one allocated.
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
"""Largest number of calls per round at a shorter length. Several calls make a round last as long as
one at the longest length, so that both average over equally much other load on the machine; the
limit bounds the duration of the bench."""
WORKS = ("forward", "train_step")
"""Names of the work that is timed at each length."""


def bench_lengths(
    lengths: Sequence[int],
    repeats: int,
    other: Path | None,
    shared: Mapping[str, str],
    report: Callable[[str], None],
) -> list[Timing]:
    """Time forward and training step, alternating between the lengths, and measure their memory.

    Memory is that of the compiled programs, not of the process: for a short sequence compiling
    needs more than the work does. Weights and optimiser states are the same at each length, so the
    memory per token follows from differences. PyPI's megalodon-jax runs after our processes ended,
    because either may need all the memory; so its rounds are not paired with ours.

    Args:
        lengths: Tokens per sequence, at least two lengths.
        repeats: Number of rounds.
        other: Where PyPI's megalodon-jax is installed (`start_other`); None to leave it out.
        shared: Dtype, device and identity of the rows.
        report: Receives lines of progress.

    Raises:
        WorkerError: one of our processes ended early, for example for lack of memory.
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
    """Return the rows (`Timing`) of PyPI's megalodon-jax at one length.

    `ours` has this project's seconds in each round, by work.

    The package runs as many rounds. If it is not installed (`place` is None) or fails, the rows are
    NaN with the reason.
    """
    theirs: dict[str, tuple[float, ...]] = {}
    missing, beside = ABSENT, dict(shared)
    if place is not None:
        config, loss = SIZES["long"]
        try:
            with start_other(place, config, length, **loss) as worker:
                # Each version of the other package has a trend of its own.
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
