"""Sweeps in seven parts, one for each day of the week, and how many of them a run left out."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def day_of(nodeid):
    """Return the day of a sweep's part, the same on every machine and in every worker."""
    return DAYS[zlib.crc32(nodeid.encode()) % len(DAYS)]


def has_marker(item, name):
    # pytest-testmon deselects items that it did not collect, and those have no markers.
    closest = getattr(item, "get_closest_marker", None)
    return closest is not None and closest(name) is not None


def is_sweep(item):
    return has_marker(item, "sweep")


def mark_rest(items):
    """Mark as sweeps all but the first N parameters of each test that is marked `few(N)`."""
    turns = Counter()
    for item in items:
        few = item.get_closest_marker("few")
        if few is None or is_sweep(item):
            continue
        function = item.nodeid.partition("[")[0]
        turns[function] += 1
        if turns[function] > few.args[0]:
            item.add_marker(pytest.mark.sweep)


class Sweeps:
    """Runs the sweeps of `--sweep-day` alone, and prints how many sweeps a run left out and why."""

    def __init__(self, config):
        self.config, self.left, self.long, self.other_days = config, 0, 0, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, config, items):
        """Leave out the sweeps of other days; after `-m` and `-k`, which leave out their own."""
        # Before `-m` asks for marks.
        mark_rest(items)
        result = yield
        day = config.getoption("--sweep-day")
        if day is None:
            return result
        others = [item for item in items if is_sweep(item) and day_of(item.nodeid) != day]
        if others:
            # Ours, so that the hook below does not count them as left out by -m.
            self.other_days, counted = len(others), (self.left, self.long)
            config.hook.pytest_deselected(items=others)
            self.left, self.long = counted
            left = set(others)
            items[:] = [item for item in items if item not in left]
        return result

    def pytest_deselected(self, items):
        long = [item for item in items if has_marker(item, "long")]
        self.long += len(long)
        self.left += sum(map(is_sweep, items)) - len(long)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput["sweeps"] = self.left, self.long, self.other_days

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        # Each worker of pytest-xdist collects everything, so each leaves out the same.
        theirs = getattr(node, "workeroutput", {}).get("sweeps", (0, 0, 0))
        ours = self.left, self.long, self.other_days
        self.left, self.long, self.other_days = map(max, ours, theirs)

    def pytest_terminal_summary(self, terminalreporter):
        chosen = self.config.getoption("-m") or ""
        if self.left and "sweep" in chosen:
            target = "test-ports" if "flax_models" in chosen else "test-all"
            terminalreporter.write_line(f"sweep: {self.left} not run; make {target} runs them")
        if self.other_days:
            terminalreporter.write_line(
                f"sweep: {self.other_days} of other days not run; make test-all runs them"
            )
        if self.long and chosen:
            terminalreporter.write_line(f"long: {self.long} not run; make test-long runs them")
