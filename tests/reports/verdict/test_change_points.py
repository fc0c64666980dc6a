"""Change points of a history: how often nothing is called a change, and what is found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from reports.verdict import change_points as change_points_module
from reports.verdict.change_points import FALSE_ALARM, SHORTEST, change_points

Noise = Callable[[np.random.Generator, int], np.ndarray]
NOISES: dict[str, Noise] = {
    "normal": lambda rng, n: 0.1 * rng.normal(size=n),
    "heavy tails": lambda rng, n: 0.05 * rng.standard_t(1.5, size=n),
    "two modes": lambda rng, n: 0.7 * (rng.random(n) < 0.3),
}


def series(seed: int, n: int, noise: str = "normal", *steps: tuple[int, float]) -> list[float]:
    """Ratios around 5, times `factor` from each `index` on."""
    logs = NOISES[noise](np.random.default_rng(seed), n)
    for index, factor in steps:
        logs[index:] += math.log(factor)
    return list(5 * np.exp(logs))


@pytest.mark.parametrize("noise", NOISES)
def test_noise_alone_alarms_as_rarely_as_is_said(noise: str) -> None:
    count = 200
    alarms = sum(bool(change_points(series(seed, 18, noise))) for seed in range(count))
    # More than this many come once in a million when every series alarms with FALSE_ALARM.
    assert alarms <= stats.binom.isf(1e-6, count, FALSE_ALARM)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("index", [4, 12, 21])
def test_a_change_is_found_where_it_is(index: int, factor: float) -> None:
    noisy = series(3, 25, "normal", (index, factor))
    [change] = change_points(noisy)
    assert change.index == index
    assert change.before == pytest.approx(np.median(noisy[:index]))
    assert change.after == pytest.approx(np.median(noisy[index:]))
    assert (change.ratio > 1) == (factor > 1)


def test_changes_within_what_lies_behind_a_change_are_at_their_place() -> None:
    """Seven changes: whichever is found first, some are found in a part of a part behind it."""
    places = list(range(8, 64, 8))
    # Noise of a hundredth moves no place.
    noise = 1 + 0.01 * np.random.default_rng(2).normal(size=64)
    changes = change_points([float(3.0 ** (i // 8) * x) for i, x in enumerate(noise)])
    assert [c.index for c in changes] == places
    assert all(one.after == two.before for one, two in itertools.pairwise(changes))


@pytest.mark.parametrize("factors", [(2.0, 0.25), (4.0, 0.6)])
def test_two_changes_are_found_in_order(factors: tuple[float, float]) -> None:
    """Whichever is larger, and so is found first: the other lies before or after it."""
    changes = change_points(series(1, 40, "normal", (12, factors[0]), (27, factors[1])))
    assert [c.index for c in changes] == [12, 27]
    assert changes[0].after == changes[1].before


@pytest.mark.parametrize(
    ("seed", "runs", "steps"),
    [
        # The first cut is fitted to three levels at once, and lies in the middle one.
        (15, 34, [(8, 2.0), (15, 2.0)]),
        (234, 26, [(9, 1.4), (21, 1.6)]),
        # A level is seen only once the cut beside it is at its place.
        (41, 47, [(10, 2.0), (15, 3.0), (19, 2.0), (39, 0.5)]),
    ],
)
def test_on_a_staircase_each_change_is_where_it_is(
    seed: int, runs: int, steps: list[tuple[int, float]]
) -> None:
    changes = change_points(series(seed, runs, "normal", *steps))
    assert [c.index for c in changes] == [index for index, _ in steps]


def test_the_starts_of_levels_are_counted_from_the_first_run() -> None:
    """Before they are fitted again, which mends most of those that are counted from elsewhere."""
    logs = np.log(series(3, 60, "normal", (20, 50.0), (40, 3.0)))
    assert change_points_module._split(logs, 0) == [20, 40]
    assert change_points_module._split(logs, 100) == [120, 140]


@pytest.mark.parametrize("reached", [8, 9, 10])
def test_a_hundredth_of_a_thousand_orders_is_rare_and_the_one_at_hand_is_one_of_them(
    reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """9 of 999 permutations and the observed order are 10 of 1,000: at most 1 % reach the gain."""
    turns = iter(range(999))

    def gains(rows: np.ndarray) -> np.ndarray:
        return np.array([[float(next(turns) < reached)] for _ in rows])

    monkeypatch.setattr(change_points_module, "_gains", gains)
    assert change_points_module._is_rare(np.zeros(12), 1.0) == (reached <= 9)


@pytest.mark.parametrize("place", [0, 9, 18, 19])
def test_an_outlier_is_no_change_and_hides_none(place: int) -> None:
    alone = series(5, 20)
    alone[place] *= 50
    assert change_points(alone) == ()
    # At a place of its own: beside the change it moves where the change is seen.
    changed = series(5, 20, "normal", (13, 2.0))
    changed[place] *= 50
    assert [c.index for c in change_points(changed)] == [13]


def test_gaps_keep_their_places() -> None:
    whole = series(7, 16, "normal", (8, 3.0))
    lost = [None, math.nan, math.inf, 0.0, -1.0]
    gaps: list[float | None] = [None, *whole[:4], *lost, *whole[4:], math.inf, None]
    [change] = change_points(gaps)
    assert change.index == 8 + 1 + len(lost)
    assert change.ratio == change_points(whole)[0].ratio


@pytest.mark.parametrize("values", [[], [5.0], [5.0] * 30, [5.0, 9.0] * SHORTEST])
def test_what_is_short_or_constant_has_none(values: list[float]) -> None:
    assert change_points(values) == ()


def test_a_change_by_a_last_bit_is_one_only_without_noise() -> None:
    exact = [5.0] * 12 + [np.nextafter(5.0, 6.0)] * 12
    # Equal to the last bits of what logarithms can tell apart: never a change.
    assert change_points(exact) == ()
    assert [c.index for c in change_points([5.0] * 12 + [5.05] * 12)] == [12]


def test_a_change_is_tested_by_999_permutations_that_are_always_the_same(monkeypatch) -> None:
    seeds: list[object] = []
    drawn: list[np.ndarray] = []
    make = np.random.default_rng

    class Spy:
        def __init__(self, seed: Any = None) -> None:
            seeds.append(seed)
            self.rng = make(seed)

        def permuted(self, rows: np.ndarray, axis: int) -> np.ndarray:
            drawn.append(self.rng.permuted(rows, axis=axis))
            return drawn[-1]

    noisy = series(3, 25, "normal", (12, 2.0))
    monkeypatch.setattr(change_points_module.np.random, "default_rng", Spy)
    assert [c.index for c in change_points(noisy)] == [12]
    whole = [rows for rows in drawn if rows.shape[1] == len(noisy)]
    # With the order at hand a thousand: probabilities in thousandths.
    assert sum(map(len, whole)) == 999
    assert set(seeds) == {0}
    # The batches of one test are not one batch again and again.
    assert len({rows.tobytes() for rows in whole}) == len(whole)


def test_the_same_runs_have_the_same_changes() -> None:
    noisy = series(11, 30, "heavy tails", (15, 1.3))
    assert change_points(noisy) == change_points(noisy)
