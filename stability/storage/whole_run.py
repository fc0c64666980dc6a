"""Rank remedies for a whole run by the share of the cost of low-precision storage they return.

The remedies of one leaf do not rank remedies for a run: norms may be all that freezes, and matrices
that lose a little of each step may cost as much. So each leaf is weighed by its push, the loss
decrease to first order: gradient norm times intended displacement.

A leaf that misses a share m of its displacement loses push times m^p. p is 1 on a straight slope
and 2 at the end of a parabola; runs measured between 1.5 and 2. Two costs add: rounding a parameter
loses the steps of some elements, and second moments that cannot decay shorten all steps alike.
Random rounding errors of relative mean square e would cost push times e at the end of a parabola
and nothing on a slope; none to a quarter of that was measured, since later steps correct them. The
range of an estimate is that of both factors, the standard error of the sampled elements, and for
remedies of some leaves alone the error of adding costs up (`INTERPLAY`). All of it is compared with
training in docs/stability.md "The whole run".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stability.core.number_formats import Format
from stability.core.parameter_leaves import Leaf, kind_of
from stability.storage.known_gradients import KnownGradients
from stability.storage.schedule import Schedule
from stability.storage.simulate import (
    FLOAT32,
    SAMPLE,
    STEPS,
    Gradients,
    Outcome,
    Storage,
    run,
)
from stability.storage.update_rules import AdamW, Optimiser

DIMINISHING = 1.75
"""Power of the missing share of a displacement: the middle of `POWERS`."""
POWERS = {1.5: 0.0, DIMINISHING: 0.1, 2.0: 0.25}
"""Powers between which trained models lie, and the part of the mean square of random errors that
costs; docs/stability.md "The whole run" has the measurements."""
JACKKNIFE = 8
"""Parts of the sampled elements, each left out once, for the standard error of an estimate."""
ERRORS = 2.0
"""Standard errors that a range extends beyond the powers': 95 %."""
RESOLUTION = 0.01
"""Difference below which two remedies are a tie at any rate: shares are shown in percent."""
INTERPLAY = 0.125
"""Error of a remedy for some leaves or moments alone, as a share of the cost: costs are added up,
and families compensate one another. Measured up to 0.124, beyond what `POWERS` explain."""
WORKS = 0.9
"""Share of the cost that a remedy for the run returns: what is left is a tenth."""
SHOWN = 3
"""Remedies shown of each sort."""
PARTS = 50
"""Parts of a run with a schedule, of one rate each: what is said of them is to 2 %."""
HALVINGS = 6
"""How often the largest rate is halved for the rates that are tried, down to a 64th: what a run
does below that is a hundredth of its way or less."""
LONG = 2000
"""Steps for which moments are followed of a run that is longer: the memory of beta2 0.999 twice."""


class Missing(NamedTuple):
    """What a leaf's displacement lacks."""

    rounded: float
    """Share that rounding the parameter loses, of what its optimiser asks for."""
    shrunk: float = 0.0
    """Share by which the steps that it asks for are too short, its moments being rounded."""
    noise: float = 0.0
    """Mean square of the random errors of rounding, relative to that of the displacement."""

    @property
    def arrives(self) -> float:
        """Share of the displacement that is applied."""
        return (1 - self.rounded) * (1 - self.shrunk)

    def cost(self, power: float = DIMINISHING) -> float:
        """Share of the leaf's push that is lost."""
        lost = self.rounded**power + (1 - self.rounded) * self.shrunk**power
        return min(1.0, lost + POWERS[power] * self.noise)


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters of one sort."""

    name: str
    elements: int
    arrives: float
    """Share of the way the optimiser asks for that is gone, weighed by push."""
    cost: float
    """Share of what storage costs the run."""

    def describe(self) -> str:
        """Return it in words."""
        return f"{self.name} {self.arrives:.0%} ({self.cost:.0%} of the cost)"


@dataclass(frozen=True, slots=True)
class RunRemedy:
    """A way to train the whole model."""

    what: str
    returns: float
    """Expected share of the cost that it returns."""
    bytes: float
    """Per parameter, the optimiser's moments included."""
    low: float
    high: float
    """Range of `returns`, over `POWERS` and the sampled elements."""
    rank: int = 1
    """Place by `returns`; remedies that the range does not tell apart share one."""

    @property
    def works(self) -> bool:
        """Whether it returns nearly all."""
        return self.returns >= WORKS

    @property
    def settled(self) -> bool:
        """Whether all of its range works, or none of it."""
        return (self.low >= WORKS) == (self.high >= WORKS)

    def describe(self) -> str:
        """Return it in words."""
        between = f"{self.low:.0%} to {self.high:.0%}"
        exact = f"{self.low:.0%}" == f"{self.high:.0%}"
        gives = f"returns about {self.returns:.0%}{'' if exact else f' ({between})'}"
        return f"{self.what}: {gives}, {self.bytes:.1f} bytes per parameter with its moments"


@dataclass(frozen=True, slots=True)
class WholeRun:
    """What storage costs a run, by family, and what helps."""

    families: tuple[Family, ...]
    """Dearest first."""
    remedies: tuple[RunRemedy, ...]
    """What works first, cheapest of it first; the rest by what it returns."""
    basis: str
    """What gradients and rates are taken to be."""
    lost: tuple[str, ...] = ()
    """With a schedule, when each family loses more than half of its way."""

    def lines(self, storage: str) -> list[str]:
        """Return the remedies and, in one line, every family."""
        closing = ", ".join(f.describe() for f in self.families)
        end = f"Of the way the optimiser asks for, this arrives in {storage}: {closing}."
        ends = [end, *self.lost]
        if not self.remedies:
            return ends
        title = f"For the whole run, of what parameters and moments in {storage} cost (estimated, "
        works = [r for r in self.remedies if r.works]
        short = [r for r in self.remedies if not r.works]
        shown = [
            *((f"    {'fix' if r.settled else 'perhaps a fix'}", r) for r in works[:SHOWN]),
            *((f"    {'not enough' if r.settled else 'perhaps'}", r) for r in short[:SHOWN]),
        ]
        lines = [f"{begin}: {r.describe()}{_tie(r, shown)}" for begin, r in shown]
        return [f"{title}{self.basis}):", *lines, *ends]


def _tie(remedy: RunRemedy, shown: Sequence[tuple[str, RunRemedy]]) -> str:
    """Return in words that a remedy returns as much as one that is shown before it."""
    first = next(other for _, other in shown if other.rank == remedy.rank)
    return "" if first is remedy else f"; a tie with {first.what.partition(',')[0]}"


def family_of(name: str, shape: tuple[int, ...]) -> str:
    """Return the sort of a parameter, by its name and its axes."""
    if len(shape) >= 2:
        table = re.search(r"emb|wte|wpe|lm_head|tok_", name, re.IGNORECASE)
        return "embeddings" if table else "matrices" if len(shape) == 2 else "kernels"
    if name.endswith("bias"):
        return "biases"
    return "norms" if re.search(r"norm|(^|\.)ln|bn\d*\.", name, re.IGNORECASE) else "other vectors"


def whole_run(
    leaves: Mapping[str, Leaf],
    samples: Mapping[str, np.ndarray],
    rule: Optimiser,
    fmt: Format,
    gradients: Gradients,
    *,
    known: KnownGradients | None = None,
    wide_moments: bool = False,
    schedule: Schedule | None = None,
    trained: Mapping[Storage, Mapping[str, Outcome]] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> WholeRun:
    """Return what storage costs a run, and what each remedy is expected to return.

    Args:
        leaves: every parameter that is trained.
        samples: of each, as `simulate.run` draws them.
        rule: the optimiser.
        fmt: the storage in question.
        gradients: their distribution, where nothing is known of them.
        known: what is known of them; None takes all to be of one size.
        wide_moments: whether moments are in float32 as it is.
        schedule: the rates of the run; None takes `STEPS` steps at the optimiser's own.
        trained: outcomes of `simulate.run` that are there already, for all leaves.
        say: gets a line of progress.

    Raises:
        RuntimeError: the compiler removed the rounding.
    """
    say("estimating the whole run")
    model = _Model(leaves, samples, rule, fmt, gradients, known, dict(trained or {}))
    moments = "nearest" if wide_moments else "cast"

    def estimate() -> tuple[_Estimate, tuple[str, ...]]:
        now, lost = model.stored(moments), ()
        if schedule is not None:
            now, lost = model.scheduled(moments, schedule)
        return _Estimate(dict(model.push), now, _ways(model, now, wide_moments)), lost

    whole, lost = estimate()
    parts = []
    for part in range(JACKKNIFE):
        model.leave_out(part)
        parts.append(estimate()[0])
    model.leave_out(None)
    sizes = "all gradients taken to be alike" if known is None else f"gradients {known.source}"
    rate = schedule.describe() if schedule else f"{STEPS} steps at one rate, no schedule given"
    basis = f"{sizes}; {rate}"
    families = _families(model.families, leaves, whole.push, whole.now)
    return WholeRun(families, _remedies(whole, parts), basis, lost)


@dataclass(frozen=True)
class _Estimate:
    """What storage costs by leaf, from some of the sampled elements."""

    push: Mapping[str, float]
    now: Mapping[str, Missing]
    ways: list[tuple[str, Mapping[str, Missing], float]]
    """Remedies: in words, what is missing with them, bytes per parameter."""

    def returns(self) -> np.ndarray | None:
        """Return the share of the cost each remedy returns, (remedies, powers); None of no cost."""
        costs = [_cost(self.now, self.push, p) for p in POWERS]
        if not all(costs):
            return None
        of_way = ([_cost(missing, self.push, p) for p in POWERS] for _, missing, _ in self.ways)
        return 1 - np.array(list(of_way)) / np.array(costs)

    def partial(self, missing: Mapping[str, Missing]) -> bool:
        """Whether a remedy leaves rounding of some leaves as it is."""
        return any(0 < m.rounded == self.now[n].rounded for n, m in missing.items())


def _remedies(whole: _Estimate, parts: Sequence[_Estimate]) -> tuple[RunRemedy, ...]:
    """Return the remedies in their order, with ranges and ranks."""
    returns = whole.returns()
    if returns is None:
        return ()
    partial = np.array([whole.partial(missing) for _, missing, _ in whole.ways])
    left_out = [found for part in parts if (found := part.returns()) is not None]
    order = np.argsort(-returns[:, 1], kind="stable")
    ranks = np.zeros(len(order), int)
    leader = order[0]
    for place, number in enumerate(order):
        ahead = returns[leader] - returns[number]
        errors = _errors([found[leader] - found[number] for found in left_out])
        # A tie: some power, or another draw of the elements, puts them the other way round.
        least = INTERPLAY if partial[leader] or partial[number] else RESOLUTION
        tied = bool(np.any(ahead <= np.maximum(ERRORS * errors, least)))
        leader = leader if tied else number
        ranks[number] = ranks[leader] if tied and number != leader else place + 1
    errors = _errors(left_out)
    around = INTERPLAY * partial
    low = np.min(returns - ERRORS * errors, axis=1) - around
    high = np.minimum(1.0, np.max(returns + ERRORS * errors, axis=1) + around)
    low = np.where(partial, np.maximum(low, 0.0), low)
    remedies = [
        RunRemedy(what, float(returns[i, 1]), width, float(low[i]), float(high[i]), int(ranks[i]))
        for i, (what, _, width) in enumerate(whole.ways)
    ]
    return tuple(sorted(remedies, key=_order))


def _errors(left_out: Sequence[np.ndarray]) -> np.ndarray:
    """Return standard errors from estimates that each leave out one part of the elements."""
    values = np.array(left_out)
    return np.sqrt((len(values) - 1) / len(values) * np.sum((values - values.mean(0)) ** 2, 0))


@dataclass
class _Model:
    """A model's leaves, and what is missing of their ways by how they are stored."""

    leaves: Mapping[str, Leaf]
    samples: Mapping[str, np.ndarray]
    rule: Optimiser
    fmt: Format
    gradients: Gradients
    known: KnownGradients | None
    trained: dict[Storage, Mapping[str, Outcome]]
    push: dict[str, float] = field(default_factory=dict)
    """By leaf, the loss decrease to first order if nothing is lost."""
    families: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """By kind, one leaf that stands for the others where a property hardly differs among them."""
    left_out: int | None = None
    """Part of the sampled elements that does not count, of `JACKKNIFE`."""
    runs: dict[Any, Mapping[str, Outcome]] = field(default_factory=dict)
    weights: dict[str, np.ndarray | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.families = {n: family_of(n, leaf.shape) for n, leaf in self.leaves.items()}
        self.kinds = {kind_of(n): n for n in reversed(list(self.leaves))}
        self.leave_out(None)

    def leave_out(self, part: int | None) -> None:
        """Leave one part of every leaf's elements out, or none."""
        self.left_out = part
        for n, outcome in self.outcomes(FLOAT32).items():
            way = np.abs(outcome.intended * self.weight(n))
            self.push[n] = float(np.mean(way)) * self.leaves[n].size

    def _part(self, values: np.ndarray) -> np.ndarray:
        """Return the elements that count; all of them if none would be left."""
        if self.left_out is None or values.size < 2:
            return values
        return values[np.arange(values.size) % min(JACKKNIFE, values.size) != self.left_out]

    def outcomes(
        self, storage: Storage, names: Iterable[str] | None = None, factor: float = 1.0,
        steps: int = STEPS,
    ) -> Mapping[str, Outcome]:  # fmt: skip
        """Train samples of leaves, all of them by default, with a factor on the rate."""
        chosen = tuple(self.leaves if names is None else names)
        key = storage, chosen, factor, steps
        if key not in self.runs:
            self.runs[key] = self._trained(storage, chosen, factor, steps)
        return {n: Outcome(*map(self._part, outcome)) for n, outcome in self.runs[key].items()}

    def _trained(
        self, storage: Storage, names: tuple[str, ...], factor: float, steps: int
    ) -> Mapping[str, Outcome]:
        at_hand = (tuple(self.leaves), 1.0, STEPS) == (names, factor, steps)
        if at_hand and storage in self.trained:
            return self.trained[storage]
        part, shapes = (
            {n: self.samples[n] for n in names},
            {n: x.shape for n, x in self.leaves.items()},
        )
        rule, known = self.rule.with_lr(self.rule.lr * factor), self.known and self.known.rows
        return run(part, rule, storage, self.gradients, steps, SAMPLE, shapes, known)

    def weight(self, name: str) -> np.ndarray | float:
        """Return the sizes of the gradients of a leaf's sample, or 1 where all are alike."""
        if self.known is None:
            return 1.0
        if name not in self.weights:
            matrix = self.rule.matrix(self.leaves[name].shape)
            sizes = self.known.rows[name].sampled(name, SAMPLE, matrix)[0]
            self.weights[name] = sizes.reshape(-1)
        return self._part(np.asarray(self.weights[name]))

    def rounded(self, wrapper: str) -> dict[str, Missing]:
        """Return what a storage with moments in float32 loses of each leaf, from one of a kind."""
        storage = Storage(wrapper, self.fmt.name)
        found = self.outcomes(storage, self.kinds.values())
        missing = {}
        for n, o in found.items():
            share = _share(o, o.intended, self.weight(n))
            missing[n] = Missing(share, noise=_noise(o, self.weight(n)))
        return {n: missing[self.kinds[kind_of(n)]] for n in self.leaves}

    def stored(self, wrapper: str) -> dict[str, Missing]:
        """Return what parameters in the format lose at one rate, moments as the wrapper has them.

        Args:
            wrapper: `cast` for moments in the format, `nearest` for moments in float32.
        """
        wide, narrow = self.outcomes(FLOAT32), self.outcomes(Storage(wrapper, self.fmt.name))
        missing = {}
        for n, outcome in narrow.items():
            rounded = _share(outcome, outcome.intended, self.weight(n))
            missing[n] = Missing(rounded, _shrunk(outcome, wide[n], self.weight(n)))
        return missing

    def scheduled(
        self, wrapper: str, schedule: Schedule
    ) -> tuple[dict[str, Missing], tuple[str, ...]]:
        """Return what they lose over a run, and when each family loses more than half."""
        names, steps = list(self.kinds.values()), min(schedule.steps, LONG)
        wide = self.outcomes(FLOAT32, names, 1.0, steps)
        narrow = self.outcomes(Storage(wrapper, self.fmt.name), names, 1.0, steps)
        shrunk = {n: _shrunk(narrow[n], wide[n], self.weight(n)) for n in names}
        rates = schedule.factor((np.arange(PARTS) + 0.5) / PARTS)
        tried = 2.0 ** -np.arange(HALVINGS, -1.0, -1.0)
        nearest = Storage("nearest", self.fmt.name)
        of_rate = [self.outcomes(nearest, names, float(factor)) for factor in tried]
        rounded: dict[str, np.ndarray] = {}
        for n in names:
            shares = [_share(found[n], found[n].intended, self.weight(n)) for found in of_rate]
            rounded[n] = np.interp(np.log2(np.maximum(rates, tried[0])), np.log2(tried), shares)
        total = {n: Missing(float(np.average(rounded[n], weights=rates)), shrunk[n]) for n in names}
        missing = {n: total[self.kinds[kind_of(n)]] for n in self.leaves}
        return missing, self._when(rounded)

    def _when(self, rounded: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Return the line that says in which parts of a run less than half of a way arrives."""
        words = []
        for family in dict.fromkeys(self.families.values()):
            inside = [n for n in self.leaves if self.families[n] == family]
            pushes = np.array([self.push[n] for n in inside])
            ways = np.array([rounded[self.kinds[kind_of(n)]] for n in inside])
            lost = np.average(ways, axis=0, weights=pushes if pushes.any() else None) > 0.5
            words.append(f"{family} {_parts(lost)}")
        return (f"Rounding takes more than half of the way: {', '.join(words)}.",)


def _ways(
    model: _Model, now: Mapping[str, Missing], wide_moments: bool
) -> list[tuple[str, Mapping[str, Missing], float]]:
    """Return remedies: in words, what is missing with them, bytes per parameter."""
    fmt, moments = model.fmt, 2 if isinstance(model.rule, AdamW) else 1
    ways: list[tuple[str, Mapping[str, Missing], float]] = [
        ("float32 parameters and moments, bfloat16 compute (AMP)",
         dict.fromkeys(now, Missing(0.0)), 4 + 4 * moments),
        ("round stochastically, moments in float32",
         model.rounded("stochastic"), fmt.bytes + 4 * moments),
        (f"Kahan compensation in {fmt.name}, moments in float32",
         model.rounded("kahan"), fmt.bytes + 2 + 4 * moments),
    ]  # fmt: skip
    if not wide_moments:
        wide = {n: m._replace(shrunk=0.0) for n, m in now.items()}
        ways.append(("moments alone in float32", wide, fmt.bytes + 4 * moments))
    total = sum(leaf.size for leaf in model.leaves.values())
    for family in dict.fromkeys(model.families.values()):
        inside = {n for n, each in model.families.items() if each == family}
        if len(inside) == len(now):
            continue
        share = sum(model.leaves[n].size for n in inside) / total
        width = fmt.bytes * (1 + moments) * (1 - share) + 4 * (1 + moments) * share
        missing = {n: Missing(0.0) if n in inside else m for n, m in now.items()}
        ways.append((f"{family} alone in float32", missing, width))
    return ways


def _share(outcome: Outcome, intended: np.ndarray, weight: Any) -> float:
    """Return the share of a weighted way that was not gone; what overshoots misses none."""
    applied = np.asarray(outcome.last, np.float64) - np.asarray(outcome.first)
    return _short(applied * weight, intended * weight)


def _shrunk(outcome: Outcome, wide: Outcome, weight: Any) -> float:
    """Return the share by which what was asked for falls short of what float32 asks for."""
    return _short(outcome.intended * weight, wide.intended * weight)


def _noise(outcome: Outcome, weight: Any) -> float:
    """Return the mean square of errors about the mean displacement, relative to its own."""
    applied = (np.asarray(outcome.last, np.float64) - np.asarray(outcome.first)) * weight
    intended = np.asarray(outcome.intended, np.float64) * weight
    square = float(np.sum(intended**2))
    share = float(np.sum(applied * intended)) / square if square else 0.0
    noise = float(np.sum((applied - share * intended) ** 2)) / square if square else 0.0
    return 1.0 if math.isnan(noise) else noise


def _short(gone: np.ndarray, way: np.ndarray) -> float:
    """Return the share of a displacement that is missing, in [0, 1]; all of it if it is NaN."""
    whole = np.abs(way, dtype=np.float64).sum()
    share = float((gone * np.sign(way)).sum() / whole) if whole else 1.0
    # Python's maximum of 0 and NaN is 0, which would say that nothing is missing.
    return 1.0 if math.isnan(share) else min(1.0, max(0.0, 1.0 - share))


def _parts(lost: np.ndarray) -> str:
    """Return in words in which parts of a run something is so."""
    if lost.all() or not lost.any():
        return "all along" if lost.all() else "never"
    edges = np.flatnonzero(np.diff(np.concatenate([[0], lost.astype(int), [0]]))) / len(lost)
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return f"from {' and from '.join(f'{a:.0%} to {b:.0%}' for a, b in pairs)} of the run"


def _cost(
    missing: Mapping[str, Missing], push: Mapping[str, float], power: float = DIMINISHING
) -> float:
    return sum(push[n] * m.cost(power) for n, m in missing.items())


def _families(
    of: Mapping[str, str],
    leaves: Mapping[str, Leaf],
    push: Mapping[str, float],
    missing: Mapping[str, Missing],
) -> tuple[Family, ...]:
    total, found = _cost(missing, push), []
    for family in dict.fromkeys(of.values()):
        inside = [n for n in leaves if of[n] == family]
        pushes = sum(push[n] for n in inside)
        gone = sum(push[n] * missing[n].arrives for n in inside)
        cost = _cost({n: missing[n] for n in inside}, push)
        share = cost / total if total else 0.0
        elements = sum(leaves[n].size for n in inside)
        found.append(Family(family, elements, gone / pushes if pushes else 1.0, share))
    return tuple(sorted(found, key=lambda f: -f.cost))


def _order(remedy: RunRemedy) -> tuple[Any, ...]:
    return (False, remedy.bytes) if remedy.works else (True, -remedy.returns)
