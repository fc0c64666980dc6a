"""Expected seconds of the parts of a night, for the estimate of the time left.

The estimate never affects a verdict. It uses the newest night on the same kind of processor, or for
a first night, which compiles every program, the table below. The pace of finished and late parts
corrects it for other machines (`parity.executors.pace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from parity.executors.pace import UNSURE, duration, makespan
from reports.provenance.environment import new_manifest
from reports.provenance.host import processor
from reports.store.manifest import read_manifest
from reports.store.runs import run_folders
from reports.store.schema import RunKind, StoreError

FIRST: Mapping[str, float] = {
    "plain": 37.0,
    "length_c_minus_1": 21.0,
    "length_c": 13.0,
    "length_c_plus_1": 18.0,
    "swiglu_rescale_scale": 22.0,
    "no_affine": 22.0,
    "multi_head": 21.0,
    "untied_head": 22.0,
    "right_padding": 22.0,
    "left_padding_as_reference": 24.0,
    "interior_padding_as_reference": 12.0,
    "pad_inside": 5.0,
    "slow_decay": 9.0,
    "large_mean": 2.0,
    "stream": 31.0,
    "stream_tokens": 17.0,
    "stream_sliding": 32.0,
    "stream_unbounded": 43.0,
    "stream_ragged": 25.0,
    "packed": 32.0,
    "left_padding": 3.0,
    "labels_at_padding": 36.0,
    "adamw": 56.0,
    "byte_lm": 79.0,
    "(seams)": 25.0,
    "(products)": 28.0,
    "(mla-moe)": 213.0,
    "(port)": 130.0,
    "(mesh)": 293.0,
    "(probes)": 67.0,
    "(controls)": 20.0,
}
"""Seconds of each part of a first night, with an empty compilation cache. Measured in one night of
610 s with two parts at a time on two cores of an AMD EPYC (family 25, model 17) that also ran
tests. `packed`, `stream_ragged` and `(port)` were measured later with `plain`, and scaled by it.
Together the parts take 23 minutes."""
SHORT = 15.0
"""Shortest expected seconds of a part that measures the pace of a machine: in shorter parts the
start of the process dominates."""
OTHER = 15.0
"""Expected seconds of a part that is not in the table, such as a new case."""
NEWEST = 5
"""Newest stored runs that are searched for times of parts."""


def expected_seconds(out: Path, names: Sequence[str]) -> tuple[dict[str, float], bool]:
    """Return the seconds of each part, and whether this kind of processor measured them."""
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
    """Return the order in which the parts of a night start: the longest first, except that one
    worker starts with two short parts.

    The longest parts take minutes, and the pace of the machine is unknown until a part is done. The
    two short parts measure it within the first minute. They delay one worker's longest part by the
    time that they would have taken later, so the night does not become longer.

    Args:
        names: Parts, the longest first.
        expected: Seconds of each.
        workers: Number of parts that run at a time.
    """
    fit = [name for name in names[workers:] if expected[name] >= SHORT]
    short = sorted(fit, key=lambda name: expected[name])[:2]
    rest = [name for name in names if name not in short]
    # The first worker takes a short part, each other worker a long one, then the first worker the
    # second short part.
    return [*short[:1], *rest[: workers - 1], *short[1:], *rest[workers - 1 :]]


def cost(expected: Mapping[str, float], workers: int, known: bool) -> str:
    """Describe how long a night will take.

    Args:
        expected: Seconds of each part, in the order in which they start.
        workers: Number of parts that run at a time.
        known: Whether the seconds were measured on this kind of processor.
    """
    seconds = makespan(list(expected.values()), workers)
    if known:
        return f"about {duration(seconds)}, like the last night on this kind of processor"
    low, high = duration(seconds / UNSURE), duration(seconds * UNSURE)
    return f"{low} to {high}: a first night compiles every program, later ones take a third of it"
