"""Looks at a training: what counts as frozen, how sure a sample is, which remedies are named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stability.core.findings import Severity
from stability.core.number_formats import BF16
from stability.storage.frozen_watch import FOLLOWED, places
from stability.storage.remedies import NOTHING, REMEDIES, Trial, rank, try_remedies
from stability.storage.simulate import Survival
from stability.storage.update_rules import AdamW
from stability.storage.watch_advice import advice, general
from stability.storage.watch_looks import KEPT, PATIENCE, Seen, Watched, error_of, follow


def watched(**shapes: tuple[int, ...]) -> Watched:
    leaves = {name: follow(name, shape, "bfloat16") for name, shape in shapes.items()}
    return Watched(leaves)


def seen(before: np.ndarray, after: np.ndarray, meant: bool = True) -> Seen:
    return Seen(before, after, np.full(before.shape, meant))


def test_an_element_that_flips_between_two_numbers_is_not_frozen() -> None:
    """It is found where it was at every second look, and in the step that is looked at."""
    watch, low = watched(flips=(8,), stays=(8,)), np.ones(8)
    for turn in range(2 * PATIENCE):
        value = low + (turn % 2)
        watch.look(turn, {"flips": seen(value, value), "stays": seen(low, low)})
    assert watch.frozen() == ["stays"]
    assert watch.latest()["flips"].frozen == 0.0


def test_nothing_is_known_before_enough_looks_and_a_change_begins_anew() -> None:
    watch, ones = watched(w=(8,)), np.ones(8)
    for turn in range(PATIENCE - 1):
        assert math.isnan(watch.look(turn, {"w": seen(ones, ones)}).leaves["w"].frozen)
        assert "not measured" in watch.findings("torch")[0].message
        assert watch.findings("torch")[0].severity is not Severity.OK
    assert watch.look(9, {"w": seen(ones, ones)}).leaves["w"].frozen == 1.0
    assert watch.look(10, {"w": seen(2 * ones, 2 * ones)}).leaves["w"].frozen == 0.0
    assert not watch.frozen()


def test_elements_without_an_update_are_no_part_of_the_share() -> None:
    """Of 8 rows 2 occur, and both stand still: all of what was meant, not a quarter."""
    watch, ones = watched(w=(8,)), np.ones(8)
    meant = np.arange(8) < 2
    for turn in range(PATIENCE):
        watch.look(turn, {"w": Seen(ones, ones, meant)})
    look = watch.latest()["w"]
    assert (look.frozen, look.elements, look.unchanged) == (1.0, 2, 1.0)


def test_a_sample_warns_only_beyond_its_error() -> None:
    """3 of 3 elements of a large leaf may be chance; 3 of 3 that are all of it are not."""
    ones = np.ones(FOLLOWED)
    few = np.arange(FOLLOWED) < 3
    watch = watched(large=(64, 64), small=(3,))
    for turn in range(PATIENCE):
        small = seen(np.ones(3), np.ones(3))
        watch.look(turn, {"large": Seen(ones, ones, few), "small": small})
    assert watch.frozen() == ["small"]
    assert error_of(1.0, 3, 3) == 0.0
    assert error_of(0.5, FOLLOWED, 10**6) == pytest.approx(0.5 / math.sqrt(FOLLOWED + 4))


def test_sizes_of_updates_and_families_weigh_by_elements() -> None:
    watch = watched(**{"a.weight": (4, 4), "b.weight": (4, 12)})
    parts = {}
    for name, change in (("a.weight", 0.0), ("b.weight", 0.25)):
        values = np.ones(len(watch.leaves[name].places))
        parts[name] = seen(values, values + change)
    look = watch.look(1, parts)
    assert look.leaves["b.weight"].update == 0.25
    assert look.families["matrices"].update == 0.25 * 48 / 64
    assert look.families["matrices"].unchanged == 16 / 64


def test_a_long_run_keeps_some_of_its_looks_and_the_newest() -> None:
    watch, ones = watched(w=(2,)), np.ones(2)
    for turn in range(3 * KEPT):
        watch.look(turn, {"w": seen(ones + turn, ones + turn + 1)})
    steps = [look.step for look in watch.looks]
    assert len(steps) <= KEPT
    assert steps == sorted(steps)
    assert steps[-1] == 3 * KEPT - 1


def test_values_that_are_not_finite_are_named() -> None:
    watch = watched(w=(2,))
    watch.look(1, {"w": seen(np.ones(2), np.full(2, np.nan))})
    assert watch.absent == {"w": "it has values that are NaN or infinite"}


def test_the_elements_followed_lie_in_many_columns() -> None:
    """Every 2,048th element of a matrix of 1,024 columns would be the first one of a row."""
    chosen = places("w", (512, 1024))
    assert len(set(chosen)) == FOLLOWED
    assert len(set(chosen % 1024)) > FOLLOWED // 2
    assert np.array_equal(chosen, places("w", (512, 1024)))
    assert not np.array_equal(chosen, places("v", (512, 1024)))


def test_the_remedies_named_are_in_the_order_of_trials_that_work() -> None:
    works = Survival(0.0, 1.0, 0.0)
    trials = [Trial(r, works, r.bytes(BF16), float(not r.wide)) for r in REMEDIES[::-1]]
    order = [trial.remedy for trial in rank(trials)]
    assert general() == [remedy for remedy in order if remedy in general()]


@pytest.mark.sweep
@pytest.mark.optimised
def test_every_remedy_that_is_named_works_in_a_trial_and_they_are_in_its_order() -> None:
    named = {remedy.name for remedy in general()}
    tried = try_remedies(
        {"norm": np.ones(64, np.float32)},
        AdamW(3e-4),
        remedies=(NOTHING, *(r for r in REMEDIES if r.name in named)),
    )["norm"]
    assert [trial.remedy for trial in tried if trial.works] == general()
    assert tried[-1].remedy is NOTHING


def test_float32_for_the_norms_comes_first_where_they_alone_stand_still() -> None:
    norm, matrix = ("norms", 64, "bfloat16"), ("matrices", 4096, "bfloat16")
    alone = advice([norm], 10_000, "torch")
    kept = "1. keep the norms in float32 (64 elements, 128 bytes more), which recovers only their"
    assert f"{kept} updates; 2. round updates" in alone
    both = advice([norm, matrix], 10_000, "jax")
    assert (
        "1. round updates stochastically (stability.storage.narrow_optimisers.stochastic_adamw)"
        in both
    )
    assert "For the norms alone: keep the norms in float32" in both
    assert "raise the learning rate" in advice([("norms", 64, "float32")], 10_000, "torch")
    assert advice([], 10, "torch") == ""
