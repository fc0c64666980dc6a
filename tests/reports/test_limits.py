"""Limits, windows and times of reports in units to read: to change one is a decision.

Most are far from anything that a test reaches, so that a slip would show on somebody's machine.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from reports.nightly import expected, fan_out, pytest_session
from reports.registry import lookback, lookup, runs_page, shared_index
from reports.store import (
    addresses,
    claims,
    examine,
    gathered,
    index,
    manifest,
    objects,
    reader,
    schema,
    seal,
    several,
    shared,
)
from reports.subjects.megalodon import suites
from reports.verdict import (
    change_points,
    completeness,
    drift,
    history,
    levels,
    pins,
    since,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
HOUR = 60 * 60.0

LIMITS = {
    # Files that are read whole, and what they may unpack to: a night has 2 MB and 60,000 rows.
    (reader, "PARQUET_BYTES"): 256 * MIB,
    (reader, "UNPACKED_BYTES"): GIB,
    (reader, "ROWS"): 2_000_000,
    (reader, "VALUES"): 16_000_000,
    (gathered, "BYTES"): GIB,
    (index, "INDEX_BYTES"): 512 * MIB,
    (pins, "LARGEST"): 16 * MIB,
    (addresses, "_LONGEST"): 4 * KIB,
    # Ten thousand runs at once.
    (index, "AT_ONCE"): 512,
    (gathered, "RUNS"): 64,
    (gathered, "FEW"): 16,
    (examine, "BATCH"): 262_144,
    (examine, "BATCH_BYTES"): 256 * MIB,
    (several, "SHARE"): 1_000,
    (several, "AHEAD"): 0.6,
    (several, "MOST"): 4,
    (several, "LONGEST"): HOUR / 2,
    (shared_index, "TOGETHER"): 256,
    (shared, "REQUESTS"): 64,
    # Writers that were killed, and requests that were lost.
    (shared, "ABANDONED"): HOUR,
    (gathered, "LEFT_OVER"): HOUR,
    (shared_index, "JUDGED"): timedelta(hours=1),
    (objects, "TRIES"): 6,
    (objects, "PAUSE"): 0.1,
    (claims, "COLLISION"): 0.05,
    # Earlier runs that a verdict, a trend or an estimate looks at.
    (history, "WINDOW"): 90,
    (levels, "RECENT"): 7,
    (lookback, "LATEST"): 14,
    (expected, "NEWEST"): 5,
    (drift, "UNSEEN"): 3.0,
    (change_points, "FALSE_ALARM"): 0.01,
    (change_points, "SHORTEST"): 3,
    (change_points, "LEAST_RUNS"): 10,
    (lookup, "AHEAD"): 0.05,
    # Lines and characters that a person is shown.
    (lookup, "SHOWN"): 20,
    (lookup, "NAMED"): 5,
    (runs_page, "SHOWN"): 2_000,
    (since, "SHORT"): 10,
    (pytest_session, "_REASON"): 400,
    # Parts of a night.
    (suites, "EXPLAINED"): 12,
    (expected, "RESERVE"): 0.9,
    (expected, "OTHER"): 15.0,
    (fan_out, "MEMORY"): 3 * GIB,
    (lookback, "EVERYTHING"): 2**31 - 1,
}


def _name(each: object) -> str:
    return each[1] if isinstance(each, tuple) else str(each)


@pytest.mark.parametrize(("place", "limit"), LIMITS.items(), ids=_name)
def test_a_limit_is_the_one_that_was_decided(place, limit) -> None:
    module, name = place
    assert getattr(module, name) == limit


def test_one_schema_brought_checksums_seals_and_contracts() -> None:
    """Older runs are read without all three, newer ones with all of them."""
    assert manifest.CHECKED == seal.FIRST_SEALED == completeness.FIRST_SCHEMA == schema.SCHEMA == 5
    assert sorted(schema.MIGRATIONS) == list(range(1, schema.SCHEMA))
    assert pins.SCHEMA == 4
