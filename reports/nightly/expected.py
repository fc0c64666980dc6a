"""Seconds that the parts of a night are expected to take, for the estimate of the time left.

An estimate and no measurement: it changes no verdict. The parts of the newest night that this kind
of processor ran say most. A first night takes the table below, which compiles everything; the pace
of the parts that are done or late corrects for another machine (`parity.executors.pace`).
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
"""Seconds of each part of a first night with an empty compilation cache: one night, two parts at a
time on two cores of an AMD EPYC (family 25, model 17) that ran tests beside it, 610 s in all.
`packed`, `stream_ragged` and `(port)` were measured later, beside `plain`, and scaled by it."""
SHORT = 15.0
"""Expected seconds from which a part says how fast a machine is: the start of a process takes some
of them anywhere."""
OTHER = 15.0
"""Seconds of a part that the table does not have, such as a case added since."""
NEWEST = 5
"""Stored runs that are asked for their parts, the newest first."""


def expected_seconds(out: Path, names: Sequence[str]) -> tuple[dict[str, float], bool]:
    """Return the seconds of each part, and whether a night on this kind of processor says so."""
    here = processor(new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment)
    for folder in sorted(run_folders(out), reverse=True)[:NEWEST]:
        try:
            parts = read_manifest(folder).parts
        except StoreError:
            # Listing the runs names it; an estimate is no place for that.
            continue
        seconds = {part.name: part.seconds for part in parts if part.processor == here}
        if all(seconds.get(name, 0.0) > 0.0 for name in names):
            return {name: seconds[name] for name in names}, True
    return {name: FIRST.get(name, OTHER) for name in names}, False


def in_order(names: Sequence[str], expected: Mapping[str, float], workers: int) -> list[str]:
    """Return parts of a night in the order they are begun in: what takes longest first, and two
    short ones before that on one of the workers.

    The longest parts take minutes, and the pace of the machine is not known until a part is done.
    The two short parts say it within the first minute. They delay the longest part of one worker
    by as much, and leave what they took to nobody: the night is as long as before.

    Args:
        names: Parts, what takes longest first.
        expected: Seconds of each.
        workers: How many run at a time.
    """
    fit = [name for name in names[workers:] if expected[name] >= SHORT]
    short = sorted(fit, key=lambda name: expected[name])[:2]
    rest = [name for name in names if name not in short]
    # The first worker takes one, each other worker a long part, and the first one the second.
    return [*short[:1], *rest[: workers - 1], *short[1:], *rest[workers - 1 :]]


def cost(expected: Mapping[str, float], workers: int, known: bool) -> str:
    """Return in words what a night will cost.

    Args:
        expected: Seconds of each part, in the order they are begun in.
        workers: How many run at a time.
        known: Whether a night on this kind of processor took them.
    """
    seconds = makespan(list(expected.values()), workers)
    if known:
        return f"about {duration(seconds)}, as the last night on this kind of processor"
    low, high = duration(seconds / UNSURE), duration(seconds * UNSURE)
    return f"{low} to {high}: a first night compiles every program, later ones take a third of it"
