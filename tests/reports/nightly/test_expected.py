"""How long a night will take, before it begins."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from parity.executors.item import Answer, Item, State
from parity.executors.local import LocalExecutor
from parity.executors.pace import Pace
from parity.executors.progress import Progress
from reports.nightly.expected import EARLY, FIRST, NEWEST, OTHER, cost, expected_seconds, in_order
from reports.nightly.run import _with_time_left
from reports.provenance.environment import new_manifest
from reports.provenance.host import processor
from reports.store.manifest import PartInfo
from reports.store.runs import write_run
from reports.store.schema import RunKind
from tests.reports.nights import earlier, measurement

HERE = processor(new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment)


def store(root: Path, day: int, seconds: float, where: str = HERE) -> Path:
    night = earlier(measurement(), day=day)
    parts = tuple(PartInfo(name, processor=where, seconds=seconds) for name in ("plain", "(mesh)"))
    return write_run(root, replace(night, manifest=replace(night.manifest, parts=parts)))


def test_the_newest_readable_night_of_this_processor_says_how_long_parts_take(
    tmp_path: Path,
) -> None:
    store(tmp_path, 15, 7.0)
    store(tmp_path, 16, 5.0)
    store(tmp_path, 17, 900.0, "another processor")
    damaged = store(tmp_path, 18, 800.0)
    (damaged / "run.json").write_text("{", encoding="utf-8")
    assert expected_seconds(tmp_path, ["plain"]) == ({"plain": 5.0}, True)
    # A part that none of them had: their nights are others.
    assert expected_seconds(tmp_path, ["plain", "new"])[1] is False


@pytest.mark.parametrize("others", [NEWEST - 1, NEWEST])
def test_only_the_newest_nights_say_how_long_parts_take(tmp_path: Path, others: int) -> None:
    store(tmp_path, 1, 7.0)
    for day in range(2, 2 + others):
        store(tmp_path, day, 5.0, "another processor")
    assert expected_seconds(tmp_path, ["plain"])[1] is (others < NEWEST)


def test_the_newest_night_is_the_last_by_name_whenever_it_was_copied_here(tmp_path: Path) -> None:
    for turn, (day, seconds) in enumerate(((16, 5.0), (15, 7.0))):
        folder = store(tmp_path, day, seconds)
        os.utime(folder, (turn, turn))
    assert expected_seconds(tmp_path, ["plain"]) == ({"plain": 5.0}, True)


def test_a_first_night_takes_the_table(tmp_path: Path) -> None:
    expected, known = expected_seconds(tmp_path / "runs", ["plain", "not in the table"])
    assert not known
    assert expected == {"plain": FIRST.get("plain", OTHER), "not in the table": OTHER}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("seconds", "workers", "known", "first"),
    [
        ((60.0, 60.0, 120.0), 2, "3 minutes", "90 s to 6 minutes"),
        ((120.0, 60.0, 60.0), 2, "120 s", "60 s to 4 minutes"),
        ((30.0, 80.0), 4, "80 s", "40 s to 160 s"),
    ],
)
def test_the_cost_is_told_in_words(seconds, workers, known, first) -> None:
    """A first night has a range: nobody knows yet how fast the machine is."""
    expected = {str(n): each for n, each in enumerate(seconds)}
    assert cost(expected, workers, True).startswith(f"about {known}, like the last night")
    assert cost(expected, workers, False).startswith(f"{first}: a first night compiles")


def test_the_table_has_no_slip() -> None:
    """A slip in one entry would not show in an estimate: the sum is what its comment says."""
    assert sum(FIRST.values()) == 923.0


PLAN = list(FIRST)
"""Parts of a night, in the order of the plan."""
LONGEST = sorted(PLAN, key=FIRST.__getitem__, reverse=True)
"""The same, the longest first: the order that ends soonest and shows results last."""
LATER = {
    "an AMD EPYC (family 25, model 1) held to SSE 4.2, beside other work": (
        "19 11 12 16 18 12 19 17 18 18 2 2 2 4 21 15 28 42 40 3 29 53 50 44 83 15 35 229 155 267 "
        "56 41"
    ),
    "an H200 and 16 processors, measured 14 at a time": (
        "37 27 27 29 31 29 30 30 30 30 8 8 7 7 31 14 37 41 42 8 27 47 67 42 81 26 26 255 124 170 "
        "115 16"
    ),
}
"""Measured seconds of the parts of other first nights, in the order of the plan; the second had no
megalodon-hf, so its `(port)` is the table's."""


def night(
    seconds: Mapping[str, float], workers: int, order: Sequence[str], start: float = 0.0
) -> Iterator[tuple[float, float, Progress]]:
    """Yield the seconds since the start, the seconds left in truth and the progress, once a second
    of a night.

    Args:
        seconds: What each part takes.
        workers: Number of parts that run at a time.
        order: Order in which the parts start.
        start: What a worker needs besides for its first part: the start of a process.
    """
    now = 0.0
    engine = LocalExecutor(workers)
    items = [Item(name, "work:double", expected=FIRST[name]) for name in order]
    progress = Progress(engine, items, lambda line: None, clock=lambda: now)
    free = [(0.0, f"local:{n}") for n in range(workers)]
    begins: list[tuple[float, float, str, str]] = []
    for name in order:
        begin, worker = heapq.heappop(free)
        end = begin + seconds[name] + (start if begin == 0 else 0)
        heapq.heappush(free, (end, worker))
        begins.append((begin, end, worker, name))
    last = max(end for _, end, *_ in begins)
    ends = sorted((end, begin, name) for begin, end, _, name in begins)
    while now < last:
        for end, begin, name in ends:
            if now - 1.0 < end <= now:
                progress.done(Answer(name, State.DONE, seconds=end - begin))
        engine._running = {w: (name, b) for b, end, w, name in begins if b <= now < end}
        yield now, last - now, progress
        now += 1.0


def errors(
    seconds: Mapping[str, float], workers: int, order: Sequence[str], start: float = 0.0
) -> list[float]:
    """Return the relative errors of the estimate, once a second from one minute on until one minute
    before the end.
    """
    found = []
    for now, left, progress in night(seconds, workers, order, start):
        if now >= MINUTE and left > MINUTE:
            estimate = progress.estimate()
            assert estimate is not None
            found.append(abs(estimate - left) / left)
    return found or [0.0]


def ends(workers: int, order: Sequence[str]) -> list[float]:
    """Return the seconds at which there are more results, if each part takes what is expected."""
    told = [(now, len(p.pace.seconds)) for now, _, p in night(FIRST, workers, order)]
    return [now for (now, count), (_, before) in pairwise(reversed(told)) if count > before][::-1]


MINUTE = 60.0
"""Seconds."""
THIRD = 1 / 3
"""Relative error that an estimate of the time left may have."""


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_time_left_is_right_within_a_third_from_the_first_minute_on(pace, workers) -> None:
    order = in_order(PLAN, FIRST, workers)
    seconds = {part: pace * each for part, each in FIRST.items()}
    # The start of a process takes some seconds as well; it is part of the first parts' times.
    assert max(errors(seconds, workers, order, start=4.0 * pace)) < THIRD


def test_with_the_longest_parts_alone_under_way_it_is_not() -> None:
    """The control: until one of them is done, a fast machine looks like any other."""
    seconds = {part: each / 2 for part, each in FIRST.items()}
    assert max(errors(seconds, 2, LONGEST)) > THIRD


@pytest.mark.parametrize("measured", LATER)
def test_in_measured_nights_of_other_machines_it_mostly_is(measured) -> None:
    """Their parts are not all slower by one factor, so an estimate may be off for a while. With a
    table of equal parts it would be off for three quarters of the time.
    """
    seconds = dict(zip(PLAN, map(float, LATER[measured].split()), strict=True))
    found = errors(seconds, 2, in_order(PLAN, FIRST, 2), start=4.0)
    assert sum(error > THIRD for error in found) < len(found) / 4


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_results_come_early_and_the_night_ends_no_later(workers) -> None:
    order = in_order(PLAN, FIRST, workers)
    assert sorted(order) == sorted(PLAN)
    assert order[0] == EARLY[0]
    (*_, last), (*_, shortest) = ends(workers, order), ends(workers, LONGEST)
    # Within a short part, since the last parts need not end together.
    assert last <= shortest + FIRST["plain"]


def test_nobody_waits_minutes_for_the_next_result() -> None:
    """With two workers and the longest parts first, both are busy for minutes."""

    def wait(order: Sequence[str]) -> float:
        return max(after - before for before, after in pairwise([0.0, *ends(2, order)]))

    third = FIRST[LONGEST[2]]
    assert wait(in_order(PLAN, FIRST, 2)) < third
    assert wait(LONGEST) > third


def test_a_part_that_is_late_says_that_the_machine_is_slow() -> None:
    pace = Pace({"(mesh)": 100.0, "plain": 40.0})
    assert pace.ratio({"(mesh)": 50.0}) == 1.0
    assert pace.ratio({"(mesh)": 300.0}) > 2.0


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
def test_one_process_says_the_time_left_after_its_first_part(pace) -> None:
    """In the order of the plan, which has no range from then on."""
    now, said = 0.0, []
    at = _with_time_left(lambda *told: said.append(told), FIRST, clock=lambda: now)
    at(0)
    assert said.pop() == (0, len(FIRST), "8 minutes to 31 minutes left")
    for done, part in enumerate(FIRST, 1):
        now += pace * FIRST[part]
        at(done)
        left = pace * sum(list(FIRST.values())[done:])
        words = said.pop()[2]
        if left > MINUTE:
            about, count, unit, _ = words.split()
            assert about == "about"
            assert abs(float(count) * {"s": 1.0, "minutes": MINUTE}[unit] - left) < THIRD * left
    assert words == ""
