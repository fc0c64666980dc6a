"""Shares and costs of a run: of what they are a share, what weighs them, what is never measured.

Outcomes are made up here, so that each expected number follows from the definition alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability.core.findings import Finding, Severity
from stability.core.number_formats import BF16
from stability.core.parameter_leaves import leaves_of
from stability.storage import remedies, simulate, whole_run
from stability.storage.diagnosis import Diagnosis
from stability.storage.remedies import (
    ENOUGH,
    NOTHING,
    REMEDIES,
    Trial,
    rank,
    ranks,
    try_remedies,
)
from stability.storage.schedule import Schedule, parse
from stability.storage.simulate import FLOAT32, GRADIENTS, Simulated, Storage, Survival, summary
from stability.storage.survival import frozen_finding
from stability.storage.torch_state import TorchState, audit_torch
from stability.storage.update_rules import AdamW
from stability.storage.whole_run import DIMINISHING, HALVINGS, PARTS, POWERS, Missing

RATE = 2.0**-10
"""A power of two, so that factors on it are exact."""
SHARE = st.floats(0.0, 1.0)


@given(rounded=SHARE, shrunk=SHARE)
def test_what_rounding_took_cannot_be_taken_again(rounded: float, shrunk: float) -> None:
    missing = Missing(rounded, shrunk)
    assert missing.applied == (1 - rounded) * (1 - shrunk)
    assert 0.0 <= missing.cost() <= 1.0
    assert Missing(rounded).cost() == rounded**DIMINISHING
    assert Missing(0.0, shrunk).cost() == shrunk**DIMINISHING
    # A leaf that does not move at all costs its whole push, however short its steps are.
    assert Missing(1.0, shrunk).cost() == 1.0
    assert missing.cost() >= max(Missing(rounded).cost(), 0.0)
    # The shorter steps are those of what rounding left.
    assert missing.cost() - Missing(rounded).cost() == pytest.approx(
        (1 - rounded) * Missing(0.0, shrunk).cost(), abs=np.finfo(float).eps
    )


def test_random_errors_cost_nothing_on_a_slope_and_a_part_at_the_end_of_a_parabola() -> None:
    costs = [Missing(0.0, noise=0.5).cost(power) for power in POWERS]
    assert costs == [0.5 * part for part in POWERS.values()]
    assert costs[0] == 0.0 < costs[1] < costs[2]
    # However large, they take no more than the whole push.
    assert Missing(1.0, noise=9.0).cost(2.0) == 1.0


def way(size: int, asked: float, arrives: float) -> Simulated:
    """Elements that were each asked to go as far, and of which a share arrived."""
    intended = np.full(size, asked)
    return Simulated(
        np.zeros(size), arrives * intended, intended, np.ones(size, bool), np.ones(size, bool)
    )


class Trained:
    """Stands for `simulate.run`: what storage takes depends on name and rate as said."""

    def __init__(self, lost: Any, shorter: float = 1.0, pushes: Mapping[str, float] | None = None):
        self.lost, self.shorter, self.pushes = lost, shorter, pushes or {}

    def __call__(
        self, part: Mapping[str, Any], rule: AdamW, storage: Storage, *rest: Any, burn_in: int
    ) -> Any:
        assert burn_in == 0, "a run begins with moments of zero"
        found = {}
        for name, sample in part.items():
            asked, factor = rule.lr * self.pushes.get(name, 1.0), rule.lr / RATE
            if storage == FLOAT32:
                found[name] = way(sample.size, asked, 1.0)
            else:
                short = self.shorter if storage.wrapper == "cast" else 1.0
                found[name] = way(sample.size, asked * short, 1 - self.lost(name, factor))
        return found


def asked(
    monkeypatch: pytest.MonkeyPatch, trained: Trained, shapes: Mapping[str, Sequence[int]],
    **options: Any,
) -> whole_run.WholeRun:  # fmt: skip
    monkeypatch.setattr(whole_run, "run", trained)
    tree = {n: np.zeros(tuple(shape), np.float32) for n, shape in shapes.items()}
    samples = {n: np.zeros(4, np.float32) for n in tree}
    return whole_run.whole_run(leaves_of(tree), samples, AdamW(RATE), BF16, GRADIENTS, **options)


def test_a_leaf_weighs_as_many_elements_as_it_has(monkeypatch) -> None:
    """Samples of both are equal: a bias of 8 elements costs an eighth of a matrix of 64."""
    found = asked(monkeypatch, Trained(lambda n, f: 0.25), {"fc.bias": (8,), "fc.weight": (8, 8)})
    costs = {f.name: f.cost for f in found.families}
    assert costs == pytest.approx({"matrices": 8 / 9, "biases": 1 / 9})
    assert [f.name for f in found.families] == ["matrices", "biases"]
    assert {f.name: f.elements for f in found.families} == {"matrices": 64, "biases": 8}


def test_short_steps_and_lost_ones_are_told_apart(monkeypatch) -> None:
    """Moments make steps a fifth shorter, and rounding takes half of what is left of them."""
    found = asked(monkeypatch, Trained(lambda n, f: 0.5, shorter=0.8), {"fc.weight": (8, 8)})
    [family] = found.families
    assert family.applied == pytest.approx(0.5 * 0.8)
    returned = {r.what: r.returns for r in found.remedies}
    whole, rounded = Missing(0.5, 0.2).cost(), Missing(0.5).cost()
    assert returned["moments alone in float32"] == pytest.approx(1 - rounded / whole)
    assert returned["round stochastically, moments in float32"] == pytest.approx(
        1 - rounded / whole
    )


@pytest.mark.parametrize("text", ["linear:steps=100", "cosine:warmup=20,steps=100,end=0.01"])
def test_between_the_rates_that_are_tried_a_share_follows_their_logarithm(monkeypatch, text):
    """The share lost is linear in the logarithm of the rate here: interpolation adds no error."""

    def lost(name: str, factor: float) -> float:
        return -math.log2(factor) / (2 * HALVINGS)

    schedule = parse(text)
    found = asked(monkeypatch, Trained(lost), {"fc.weight": (8, 8)}, schedule=schedule)
    rates = schedule.factor((np.arange(PARTS) + 0.5) / PARTS)
    # Below the smallest rate that is tried its share stands for all.
    shares = [lost("", max(rate, 2.0**-HALVINGS)) for rate in rates]
    assert found.families[0].applied == pytest.approx(1 - np.average(shares, weights=rates))


def test_a_family_loses_where_most_of_its_push_is_lost(monkeypatch) -> None:
    """One large matrix freezes and three small ones do not: by push that is most of the family."""
    shapes = {"big.weight": (32, 32), **{f"{n}.weight": (4, 4) for n in "abc"}}
    trained = Trained(lambda n, f: 1.0 if n == "big.weight" else 0.0)
    found = asked(monkeypatch, trained, shapes, schedule=Schedule("constant", 100))
    assert found.lost == (
        "Rounding loses more than half of the displacement: matrices throughout.",
    )
    # And the other way round, where the small ones are pushed a thousand times as hard.
    trained.pushes = {f"{n}.weight": 1000.0 for n in "abc"}
    found = asked(monkeypatch, trained, shapes, schedule=Schedule("constant", 100))
    assert found.lost == ("Rounding loses more than half of the displacement: matrices never.",)


def test_a_way_that_is_no_number_is_missing_and_not_whole() -> None:
    nan, one = np.array([math.nan]), np.array([1.0])
    assert whole_run._short(nan, one) == 1.0
    assert whole_run._short(one, nan) == 1.0
    assert whole_run._short(one, one) == 0.0
    assert whole_run._short(-one, one) == whole_run._short(0 * one, one) == 1.0
    # What overshoots misses nothing; what is asked to go nowhere loses nothing.
    assert whole_run._short(2 * one, one) == whole_run._short(one, 0 * one) == 0.0


def test_only_what_the_optimiser_moves_can_be_frozen() -> None:
    """Rows of tokens that never occur would hide that half of the others stands still."""
    intended = np.array([0.0, 0.0, 0.0, 0.0, 1.0, -1.0])
    last = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    found = summary(np.zeros(6), last, intended, last != 0)
    assert (found.frozen, found.fidelity) == (0.5, 0.5)
    assert found.error == pytest.approx(math.sqrt(0.5))
    # The other direction: what moved by itself takes nothing from the share.
    assert summary(np.zeros(6), 1 + last, intended, np.arange(6) < 4).frozen == 1.0
    assert summary(np.zeros(2), np.ones(2), np.zeros(2), np.ones(2, bool)) == Survival(0.0, 1.0)


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        ([0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1], 0.5),
        ([0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], 0.0),
        ([0, 1, 1, 1], [1, 0, 0, 0], 1.0),
        ([0, 0], [0, 0], None),
    ],
)
def test_squares_underflow_only_where_there_is_a_gradient(first, second, share) -> None:
    moments = {"exp_avg": torch.tensor(first) * 1.0, "exp_avg_sq": torch.tensor(second) * 1.0}
    state = TorchState("optimizer", ({"betas": (0.9, 0.999)},), {"w": moments})
    found = [f for f in audit_torch(state) if f.metric == "underflown"]
    if share is None:
        assert found == []
        return
    [one] = found
    assert one.value == share
    assert (one.severity is Severity.ERROR) == (share > 0)


def test_a_remedy_that_diverges_is_the_last_in_any_order() -> None:
    trials = [
        Trial(remedy, Survival(0.0, fidelity), 2, 0.0)
        for remedy, fidelity in zip((NOTHING, *REMEDIES), (math.nan, 0.2, 1.0, 0.9), strict=False)
    ]
    for order in (trials, trials[::-1]):
        shown = [t.survival.fidelity for t in rank(order)]
        assert shown[:3] == [1.0, 0.9, 0.2]
        assert math.isnan(shown[3])
        assert [t.works for t in rank(order)] == [True, False, False, False]


def trial(fidelity: float, spread: float, remedy: int = 0, size: int = 4) -> Trial:
    return Trial(REMEDIES[remedy], Survival(0.0, fidelity, spread=spread), size, 0.0)


def test_remedies_that_the_spread_does_not_tell_apart_share_a_rank() -> None:
    """0.5 and 0.6 are 0.1 apart: with standard errors of 0.05 a tie, with 0.01 an order."""
    for spread, places in ((0.05, [1, 2, 2, 4]), (0.01, [1, 2, 3, 4]), (0.0, [1, 2, 3, 4])):
        trials = [trial(f, spread) for f in (0.5, 0.1, 0.6, 1.0)]
        assert ranks(rank(trials)) == places
    # Memory is known exactly: of two that work the cheaper one is the first.
    assert ranks(rank([trial(1.0, 0.01, size=2), trial(1.0, 0.01, size=4)])) == [1, 2]
    assert ranks(rank([trial(1.01, 0.01), trial(1.0, 0.01)])) == [1, 1]
    # Two that diverge are not told apart, and neither ties with one that does not.
    assert ranks(rank([trial(math.nan, math.nan), trial(0.2, 0.0)])) == [1, 2]


@pytest.mark.parametrize(
    ("fidelity", "spread", "verdict"),
    [
        (1.0, 0.001, "fix"),
        (1.0 - ENOUGH + 0.01, 0.02, "perhaps a fix"),
        (1.0 - ENOUGH - 0.01, 0.02, "perhaps not"),
        (1.0 - ENOUGH - 0.01, 0.001, "not"),
        (math.nan, math.nan, "not"),
    ],
)
def test_a_verdict_that_another_draw_would_change_is_a_perhaps(fidelity, spread, verdict) -> None:
    assert trial(fidelity, spread).verdict() == verdict


def test_the_text_calls_a_tie_a_tie() -> None:
    kind = "norm.weight"
    message = frozen_finding(kind, 1.0, "stands still", "")
    for spread, ties in ((0.05, 1), (0.001, 0)):
        trials = {kind: rank([trial(f, spread, i) for i, f in enumerate((1.0, 0.5, 0.6))])}
        text = Diagnosis([message], trials, {kind: kind}, {kind: {}}, [], 0.0).text()
        assert text.count("a tie with the one above") == ties
        assert f"fidelity 0.600 ± {2 * spread:.3f}" in text
        # What does not work is not shown as a fix because it is among the first three.
        assert text.count("    fix: ") + text.count("    perhaps a fix: ") == 1


def test_kinds_that_freeze_in_part_are_named_largest_first() -> None:
    def finding(subject: str, share: float) -> Finding:
        return replace(
            frozen_finding(subject, share, "stands still", "", Severity.NOTE),
            metric="predicted_frozen_fraction",
        )

    shares = {"layers.0.wq": 0.15, "layers.1.wq": 0.4, "head": 0.49, "a": 0.5, "b": 0.05, "c": 0.1}
    found = [finding(name, share) for name, share in shares.items()]
    text = Diagnosis(found, {}, {}, {"head": {}}, [], 0.0).text()
    assert "less than the 50% of a warning: head 49%, layers.*.wq 40%, c 10%." in text
    text = Diagnosis([*found, finding("d", 0.2)], {}, {}, {"head": {}}, [], 0.0).text()
    assert "head 49%, layers.*.wq 40%, d 20% and 1 more." in text
    assert "Frozen" not in Diagnosis(found[3:5], {}, {}, {"head": {}}, [], 0.0).text()


def test_a_standard_error_of_the_elements_is_the_spread_of_draws() -> None:
    """Of 200 leaves of 48 elements each, drawn alike."""
    rng = np.random.default_rng(0)
    intended = rng.choice([-1.0, 1.0], (200, 48)) * rng.uniform(0.5, 2, (200, 48))
    applied = intended * rng.normal(1.0, 0.25, (200, 48))
    changed = np.ones(48, bool)
    found = [summary(np.zeros(48), a, i, changed) for a, i in zip(applied, intended, strict=True)]
    drawn = float(np.std([each.fidelity for each in found], ddof=1))
    claimed = float(np.mean([each.spread for each in found]))
    # A standard deviation from 200 draws is itself known to 5 %; four times that.
    assert claimed == pytest.approx(drawn, rel=0.2)
    assert summary(np.zeros(1), np.ones(1), np.ones(1), np.ones(1, bool)).spread == 0.0


@pytest.mark.sweep
def test_leaves_of_48_elements_have_one_verdict_whatever_is_drawn(monkeypatch) -> None:
    """Stochastic rounding on 40 equal norms, each with draws of its own."""
    stochastic = next(r for r in REMEDIES if r.name == "stochastic rounding")
    norms = {f"layers.{i}.norm.weight": np.ones(48, np.float32) for i in range(40)}

    def verdicts() -> tuple[set[bool], set[str]]:
        found = try_remedies(norms, AdamW(3e-4), remedies=[stochastic])
        trials = [trial for [trial] in found.values()]
        return {t.works for t in trials}, {t.verdict() for t in trials}

    works, words = verdicts()
    assert works == {True}
    assert words <= {"fix", "perhaps a fix"}
    # The control: 48 elements alone do change places, and their spread says so.
    monkeypatch.setattr(remedies, "run", lambda *rest, fill: simulate.run(*rest, fill=False))
    works, words = verdicts()
    assert works == {True, False}
    assert "not" not in words and "perhaps not" in words


def spread_out(shares: Mapping[str, Sequence[float]]) -> Any:
    """Outcomes whose elements arrive in the shares given, in turn."""

    def train(
        part: Mapping[str, Any], rule: AdamW, storage: Storage, *rest: Any, burn_in: int
    ) -> Any:
        found = {}
        for name, sample in part.items():
            intended = np.ones(sample.size)
            lost = storage.wrapper in ("cast", "nearest")
            arrives = np.resize(shares[name], sample.size) if lost else intended
            found[name] = Simulated(
                np.zeros(sample.size), arrives, intended, intended > 0, intended > 0
            )
        return found

    return train


@pytest.mark.parametrize(
    ("matrix", "norm", "tie"),
    [
        # Of 16 pushes one part in 4 is lost, of 1 push all: 16/4^1.5 = 2, and 1 at 4^2.
        ([0.75], [0.0], True),
        ([0.5], [0.0], False),
        # The mean is the same, and other elements would put them the other way round.
        ([1.0, 1.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25], True),
    ],
)
def test_families_that_another_power_or_draw_would_exchange_are_a_tie(
    monkeypatch, matrix, norm, tie
) -> None:
    shapes = {"fc.weight": (4, 4), "norm.weight": (1,)}
    monkeypatch.setattr(whole_run, "run", spread_out({"fc.weight": matrix, "norm.weight": norm}))
    tree = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
    samples = {"fc.weight": np.zeros(16, np.float32), "norm.weight": np.zeros(8, np.float32)}
    found = whole_run.whole_run(
        leaves_of(tree), samples, AdamW(RATE), BF16, GRADIENTS, wide_moments=True
    )
    alone = {r.what.split(" ")[0]: r for r in found.remedies if "alone" in r.what}
    assert (alone["matrices"].rank == alone["norms"].rank) == tie
    assert any("a tie with" in line for line in found.lines("bfloat16") if "alone" in line) == tie
    for remedy in found.remedies:
        assert remedy.low <= remedy.returns <= remedy.high
    # What returns all of it whatever the power has no range.
    exact = next(r for r in found.remedies if r.what.startswith("float32"))
    assert (exact.low, exact.returns, exact.high, exact.rank) == (1.0, 1.0, 1.0, 1)
