"""How long a night will take, before it begins."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from parity.executors.item import Answer, Item, State
from parity.executors.local import LocalExecutor
from parity.executors.pace import Pace
from parity.executors.progress import Progress
from reports.nightly.expected import FIRST, OTHER, SHORT, cost, expected_seconds, in_order
from reports.nightly.fan_out import LONGEST
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


def test_a_first_night_takes_the_table(tmp_path: Path) -> None:
    expected, known = expected_seconds(tmp_path / "runs", ["plain", "not in the table"])
    assert not known
    assert expected == {"plain": FIRST.get("plain", OTHER), "not in the table": OTHER}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("seconds", "workers", "known", "first"),
    [
        ((60.0, 60.0, 120.0), 2, "3 minutes", "2 minutes to 6 minutes"),
        ((120.0, 60.0, 60.0), 2, "2 minutes", "60 s to 4 minutes"),
        ((30.0, 80.0), 4, "80 s", "40 s to 3 minutes"),
    ],
)
def test_the_cost_is_told_in_words(seconds, workers, known, first) -> None:
    """A first night has a range: nobody knows yet how fast the machine is."""
    expected = {str(n): each for n, each in enumerate(seconds)}
    assert cost(expected, workers, True).startswith(f"about {known}, like the last night")
    assert cost(expected, workers, False).startswith(f"{first}: a first night compiles")


def test_the_table_is_of_one_night() -> None:
    """A slip in one entry would not show in an estimate: the sum is what its comment says."""
    assert sum(FIRST.values()) == 23 * MINUTE


LONG = [part for part in LONGEST if part in FIRST]
PLAN = LONG + [part for part in FIRST if part not in LONG]
"""Parts of a night, what takes longest first."""


def night(pace: float, workers: int, order: list[str]) -> Iterator[tuple[float, float, Progress]]:
    """Yield the seconds since the start, the seconds left in truth and the progress, once a second
    of a night in which every part takes `pace` times what is expected.
    """
    now = 0.0
    engine = LocalExecutor(workers)
    items = [Item(name, "work:double", expected=FIRST[name]) for name in order]
    progress = Progress(engine, items, lambda line: None, clock=lambda: now)
    free = [(0.0, f"local:{n}") for n in range(workers)]
    begins: list[tuple[float, float, str, str]] = []
    for name in order:
        begin, worker = heapq.heappop(free)
        end = begin + pace * FIRST[name]
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


def worst(pace: float, workers: int, order: list[str]) -> float:
    """Return the largest relative error of the estimate, from one minute on until one minute before
    the end; no part need be done by then.
    """
    errors = [0.0]
    for now, left, progress in night(pace, workers, order):
        if now >= MINUTE and left > MINUTE:
            estimate = progress.estimate()
            assert estimate is not None
            errors.append(abs(estimate - left) / left)
    return max(errors)


MINUTE = 60.0
"""Seconds."""
THIRD = 1 / 3
"""Relative error that an estimate of the time left may have."""


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_time_left_is_right_within_a_third_from_the_first_minute_on(pace, workers) -> None:
    assert worst(pace, workers, in_order(PLAN, FIRST, workers)) < THIRD


def test_without_short_parts_first_it_is_not() -> None:
    """The control: with the longest parts alone under way, a fast machine looks like any other."""
    assert worst(0.5, 2, PLAN) > THIRD


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_short_parts_first_cost_nothing(workers) -> None:
    def seconds(order: list[str]) -> float:
        *_, (now, _, _) = night(1.0, workers, order)
        return now

    order = in_order(PLAN, FIRST, workers)
    assert sorted(order) == sorted(PLAN)
    assert FIRST[order[0]] >= SHORT
    assert seconds(order) <= seconds(PLAN) + SHORT


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
    assert said.pop() == (0, len(FIRST), "12 minutes to 46 minutes left")
    for done, part in enumerate(FIRST, 1):
        now += pace * FIRST[part]
        at(done)
        left = pace * sum(list(FIRST.values())[done:])
        words = said.pop()[2]
        if left > 2 * MINUTE:
            assert words.startswith("about ")
            assert abs(float(words.split()[1]) * MINUTE - left) < THIRD * left
    assert words == ""
