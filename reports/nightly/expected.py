"""Expected seconds of the parts of a night, for the estimate of the time left.

The estimate never affects a verdict. It uses the newest night on the same kind of processor, or for
a first night, which compiles every program, the table `FIRST`. The pace of finished and late parts
corrects it for other machines (`parity.executors.pace`).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from parity.executors.pace import UNSURE, duration, makespan
from reports.provenance.environment import new_manifest
from reports.provenance.host import processor
from reports.store.manifest import read_manifest
from reports.store.runs import run_folders
from reports.store.schema import RunKind, StoreError
from reports.subject import PROBES_PART

FIRST: Mapping[str, float] = {
    "plain": 26.0,
    "length_c_minus_1": 13.0,
    "length_c": 14.0,
    "length_c_plus_1": 16.0,
    "swiglu_rescale_scale": 15.0,
    "no_affine": 16.0,
    "multi_head": 18.0,
    "untied_head": 17.0,
    "right_padding": 18.0,
    "left_padding_as_reference": 17.0,
    "interior_padding_as_reference": 4.0,
    "pad_inside": 4.0,
    "slow_decay": 4.0,
    "large_mean": 2.0,
    "stream": 16.0,
    "stream_tokens": 10.0,
    "stream_sliding": 18.0,
    "stream_unbounded": 20.0,
    "stream_ragged": 23.0,
    "left_padding": 2.0,
    "labels_at_padding": 14.0,
    "packed": 32.0,
    "stream_documents": 35.0,
    "adamw": 46.0,
    "byte_lm": 59.0,
    "(seams)": 10.0,
    "(products)": 23.0,
    "(mla-moe)": 127.0,
    "(port)": 97.0,
    "(mesh)": 136.0,
    "(probes)": 54.0,
    "(controls)": 17.0,
}
"""Seconds of each part of a first night, with an empty compilation cache and two parts at a time on
two quiet cores of an AMD EPYC (family 25, model 1). Geometric means of two nights: one with
recordings (507 s), one with megalodon-hf (592 s), in which cases that train take twice as long.
`stream_documents` and `(port)` come from the second night alone: the first had another order, in
which `stream_documents` did more work, and did not run `(port)`. `(mesh)` and `(mla-moe)` come from
a later night with recordings (374 s). Together the parts take 923 s."""
EARLY = ("plain", "stream_tokens", PROBES_PART)
"""Parts of a night that start first, so that the page shows the most telling results early: one
case, one stream, and the probes of norms and EMA parameters."""
# A long part that starts at the last moment would end the night late if it takes longer than
# expected. In replays of three measured first nights (971, 1,148 and 1,378 s of work), 0.9 kept the
# end within 2 % of the shortest possible with 2 workers, and a result came at least every 83 s.
RESERVE = 0.9
"""Share of a night's expected duration within which its long parts should end."""
OTHER = 15.0
"""Expected seconds of a part that is not in the table, such as a new case."""
NEWEST = 5
"""Number of newest stored runs that are searched for the seconds of parts."""


def expected_seconds(out: Path, names: Sequence[str]) -> tuple[dict[str, float], bool]:
    """Return the expected seconds by part, and whether this kind of processor measured them.

    Processors are of one kind if `processor` names them alike. The seconds come from the newest run
    in `out` that measured all parts `names` on this kind of processor. If none of the `NEWEST` runs
    did, they come from `FIRST`, with `OTHER` for a part that `FIRST` lacks.
    """
    here = processor(new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment)
    for folder in sorted(run_folders(out), reverse=True)[:NEWEST]:
        try:
            parts = read_manifest(folder).parts
        except StoreError:
            # Listing the runs reports it.
            continue
        seconds = {part.name: part.seconds for part in parts if part.processor == here}
        if all(seconds.get(name, 0.0) > 0.0 for name in names):
            return {name: seconds[name] for name in names}, True
    return {name: FIRST.get(name, OTHER) for name in names}, False


def in_order(names: Sequence[str], expected: Mapping[str, float], workers: int) -> list[str]:
    """Return the order in which the parts of a night start, for early results and a short night.

    One worker at a time runs the longest parts, which take minutes; the other workers run the parts
    `EARLY` and then the cases in the order of the plan. So the page has new results all the time,
    and the finished parts measure the pace of the machine. If the longest waiting part would
    otherwise end after the fraction `RESERVE` of the night's shortest possible duration, a free
    worker starts it at once.

    Args:
        names: Parts, in the order of the plan.
        expected: Expected seconds of each part, by name.
        workers: Number of parts that run at a time.
    """
    waiting = sorted(names, key=lambda name: EARLY.index(name) if name in EARLY else len(EARLY))
    seconds = [expected[name] for name in names]
    goal = RESERVE * max(sum(seconds) / workers, max(seconds))
    free = [(0.0, worker) for worker in range(workers)]
    # For each worker, the seconds of its part.
    running: dict[int, float] = {}
    order: list[str] = []
    while waiting:
        now, worker = heapq.heappop(free)
        running.pop(worker, None)
        longest = max(expected[name] for name in waiting)
        long = next(name for name in waiting if expected[name] == longest)
        short = waiting[0] if waiting[0] in EARLY else next((n for n in waiting if n != long), long)
        # The first worker begins with `EARLY`, so that there is a result within a minute.
        lane = worker > 0 and all(each < longest for each in running.values())
        late = bool(order) and now + expected[short] + longest > goal
        part = long if lane or late else short
        waiting.remove(part)
        order.append(part)
        running[worker] = expected[part]
        heapq.heappush(free, (now + expected[part], worker))
    return order


def cost(expected: Mapping[str, float], workers: int, known: bool) -> str:
    """Describe in words how long a night will take.

    Args:
        expected: Expected seconds of each part, in the order in which they start.
        workers: Number of parts that run at a time.
        known: Whether the seconds were measured on this kind of processor.
    """
    seconds = makespan(list(expected.values()), workers)
    if known:
        return f"about {duration(seconds)}, like the last night on this kind of processor"
    low, high = duration(seconds / UNSURE), duration(seconds * UNSURE)
    return f"{low} to {high}: a first night compiles every program, later ones take a third of it"
