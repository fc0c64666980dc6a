"""Ranks remedies for a whole run by the fraction of the cost of narrow storage that they avoid.

The remedy that helps one leaf most need not help the run most. For example, norms may be the only
parameters that freeze, while matrices, which lose a little of each step, cost as much. Each leaf is
therefore weighted by its push, the loss decrease to first order: gradient size x intended
displacement.

A leaf that loses a fraction m of its displacement costs push x m^p. In theory p is 1 on a constant
slope and 2 at the minimum of a parabola; in trained models it was between 1.5 and 2. Two costs add
up: rounding a parameter loses the steps of some elements, and second moments that cannot decay
shorten all steps.

Random rounding errors of relative mean square e would cost push x e at the minimum of a parabola
and nothing on a slope. Trained models showed between 0 and a quarter of that, because later steps
correct the errors. The range of an estimate covers both factors, the standard error of the sampled
elements, and, for remedies of some leaves alone, the error of adding up costs (`INTERPLAY`).
docs/stability.md "The whole run" compares the estimates with training.
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
    Simulated,
    Storage,
    run,
)
from stability.storage.update_rules import AdamW, Optimiser

DIMINISHING = 1.75
"""Default power p in the cost push x m^p of a lost fraction m: the middle of `POWERS`."""
POWERS = {1.5: 0.0, DIMINISHING: 0.1, 2.0: 0.25}
"""Powers p that cover the range seen in trained models. For each p, the fraction of the mean square
of random rounding errors that counts as cost. Measurements are in docs/stability.md "The whole
run"."""
JACKKNIFE = 8
"""Number of parts into which the sampled elements are divided. Each part is left out once, to
estimate standard errors."""
ERRORS = 2.0
"""Number of standard errors by which the range of an estimate extends beyond its values for
`POWERS`: a 95 % interval."""
RESOLUTION = 0.01
"""Difference of two remedies' avoided fractions up to which they tie: 1 %, the shown precision."""
INTERPLAY = 0.125
"""Error of the avoided fraction of the cost, for remedies that change only some leaves or only the
moments. Costs are added up, although families of parameters compensate for one another. In
training, the avoided fraction was up to 0.124 outside the range of `POWERS`."""
WORKS = 0.9
"""Fraction of the cost that a remedy must avoid to count as a fix."""
SHOWN = 3
"""Largest number of remedies shown among those that do not work; all that work are shown."""
PARTS = 50
"""Number of intervals of constant rate into which a schedule is divided: 2 % of the run each."""
HALVINGS = 6
"""For a schedule, lost displacement is simulated at the largest learning rate and after 1 to this
many halvings of the rate, down to 1/64. Lower rates get the lost fraction at 1/64: at such rates a
run covers at most about a hundredth of its displacement."""
LONG = 2000
"""Largest number of steps for which moments are simulated: twice the memory of beta2 = 0.999."""


class Missing(NamedTuple):
    """Fractions of a leaf's intended displacement that one kind of storage loses, by cause."""

    rounded: float
    """Fraction of the requested updates (those that the optimiser returns) that rounding the
    parameter loses."""
    shrunk: float = 0.0
    """Fraction by which the requested updates are too short because moments are rounded."""
    noise: float = 0.0
    """Mean square of random rounding errors, relative to that of the intended displacement."""

    @property
    def applied(self) -> float:
        """Fraction of the intended displacement that was applied."""
        return (1 - self.rounded) * (1 - self.shrunk)

    def cost(self, power: float = DIMINISHING) -> float:
        """Return the leaf's cost as a fraction of its push (loss decrease to first order).

        The result is in [0, 1]. `power` is the power p of the lost fraction, a key of `POWERS`.
        """
        lost = self.rounded**power + (1 - self.rounded) * self.shrunk**power
        return min(1.0, lost + POWERS[power] * self.noise)


@dataclass(frozen=True, slots=True)
class Family:
    """Effect of storage on one family of parameters (norms, matrices, ...)."""

    name: str
    elements: int
    """Number of elements of all leaves."""
    applied: float
    """Fraction of the intended displacement that is applied: mean over leaves, weighted by push
    (loss decrease to first order)."""
    cost: float
    """Fraction of the run's total storage cost that this family causes."""

    def describe(self) -> str:
        """Return text such as "norms 0% (73% of the cost)": applied fraction and cost."""
        return f"{self.name} {self.applied:.0%} ({self.cost:.0%} of the cost)"


@dataclass(frozen=True, slots=True)
class RunRemedy:
    """A remedy for the whole model, and its estimated effect."""

    what: str
    """The remedy, as text."""
    returns: float
    """Expected fraction of the cost of storage that the remedy avoids; 1 is all of it."""
    bytes: float
    """Bytes per parameter, including the optimiser's moments."""
    low: float
    """Lower end of the range of `returns`, over `POWERS` and two standard errors of sampling."""
    high: float
    """Upper end of the range of `returns`."""
    rank: int = 1
    """Rank by `returns`, 1 is best; remedies that do not differ significantly share a rank."""

    @property
    def works(self) -> bool:
        """Whether the remedy avoids at least the fraction `WORKS` of the cost."""
        return self.returns >= WORKS

    @property
    def settled(self) -> bool:
        """Whether the whole range of `returns` is on one side of `WORKS`."""
        return (self.low >= WORKS) == (self.high >= WORKS)

    def describe(self) -> str:
        """Return text with the remedy, the fraction of the cost it avoids, and its memory."""
        between = f"{self.low:.0%} to {self.high:.0%}"
        exact = f"{self.low:.0%}" == f"{self.high:.0%}"
        gives = f"returns about {self.returns:.0%}{'' if exact else f' ({between})'}"
        return f"{self.what}: {gives}, {self.bytes:.1f} bytes per parameter with its moments"


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Cost of storage for a run by family of parameters, and the remedies."""

    families: tuple[Family, ...]
    """Families sorted by cost, largest first."""
    remedies: tuple[RunRemedy, ...]
    """Remedies that work, least memory first, then the others, largest `returns` first. Empty if
    storage costs nothing."""
    basis: str
    """Assumptions on gradients and learning rates, as text."""
    lost: tuple[str, ...] = ()
    """With a schedule: when each family loses more than half of its displacement, as text."""

    def lines(self, storage: str) -> list[str]:
        """Return lines for a terminal: the remedies, then one line with all families.

        Args:
            storage: name of the storage format.
        """
        closing = ", ".join(f.describe() for f in self.families)
        end = f"Fraction of the intended displacement applied in {storage}: {closing}."
        ends = [end, *self.lost]
        if not self.remedies:
            return ends
        title = f"Whole run: cost of {storage} storage, and the part a remedy returns (estimated, "
        works = [r for r in self.remedies if r.works]
        short = [r for r in self.remedies if not r.works]
        shown = [
            *((f"    {'fix' if r.settled else 'perhaps a fix'}", r) for r in works),
            *((f"    {'not enough' if r.settled else 'perhaps'}", r) for r in short[:SHOWN]),
        ]
        lines = [f"{begin}: {r.describe()}{_tie(r, shown)}" for begin, r in shown]
        return [f"{title}{self.basis}):", *lines, *ends]


def _tie(remedy: RunRemedy, shown: Sequence[tuple[str, RunRemedy]]) -> str:
    """Return "; a tie with REMEDY" if an earlier shown remedy has the same rank, else ""."""
    first = next(other for _, other in shown if other.rank == remedy.rank)
    return "" if first is remedy else f"; a tie with {first.what.partition(',')[0]}"


def family_of(name: str, shape: tuple[int, ...]) -> str:
    """Return the family of a parameter, from its name and shape.

    Families are embeddings, matrices, kernels (more than two axes), norms, biases, other vectors.
    """
    if len(shape) >= 2:
        table = re.search(r"emb|wte|wpe|lm_head|tok_", name, re.IGNORECASE)
        return "embeddings" if table else "matrices" if len(shape) == 2 else "kernels"
    if name.endswith("bias"):
        return "biases"
    if shape and re.search(r"norm|(^|\.)ln|bn\d*\.", name, re.IGNORECASE):
        return "norms"
    # A vector called `weight`, `gain` or `g` is a scale, as of a norm; those of LayerScale are
    # called gamma or lambda. torch's PReLU calls its slopes `weight` too, one for all or for each
    # channel; they are no norms.
    activation = re.search(r"prelu|(^|\.)(act|act_fn|activation)\d*\.", name, re.IGNORECASE)
    scales = re.search(r"(^|\.)(weight|gain|g)$", name, re.IGNORECASE)
    return "norms" if scales and shape not in ((), (1,)) and not activation else "other vectors"


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
    say: Callable[[str], None] = lambda line: None,
) -> WholeRun:
    """Estimate the cost of narrow storage to a run, and the fraction of it each remedy avoids.

    The cost is the additional loss; the module's docstring says how it is estimated.

    Args:
        leaves: all trained parameters by name.
        samples: a sample of each leaf's values, as drawn by `simulate.run`.
        rule: the optimiser.
        fmt: the storage format of parameters and moments.
        gradients: distribution of synthetic gradients, if none are known.
        known: known gradient statistics; None assumes gradients of one size in all leaves.
        wide_moments: whether moments are stored in float32 already.
        schedule: learning-rate schedule of the run; None: `simulate.STEPS` steps at the optimiser's
            learning rate.
        say: called with a line of progress text.

    Raises:
        ValueError: XLA cannot convert to the storage format on this processor.
        RuntimeError: the compiler removed the rounding.
    """
    say("estimating the whole run")
    model = _Model(leaves, samples, rule, fmt, gradients, known)
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
    """Cost of storage by leaf, estimated from all or a part of the sampled elements."""

    push: Mapping[str, float]
    """Loss decrease to first order if no update is lost, by leaf."""
    now: Mapping[str, Missing]
    """Lost displacement without a remedy, by leaf."""
    ways: list[tuple[str, Mapping[str, Missing], float]]
    """Remedies: (description, lost displacement by leaf with the remedy, bytes per parameter)."""

    def returns(self) -> np.ndarray | None:
        """Return the fraction of the cost that each remedy avoids, an array (remedies, powers).

        Its columns are the powers p of `POWERS`. None if the cost is 0 for one of them.
        """
        costs = [_cost(self.now, self.push, p) for p in POWERS]
        if not all(costs):
            return None
        of_way = ([_cost(missing, self.push, p) for p in POWERS] for _, missing, _ in self.ways)
        return 1 - np.array(list(of_way)) / np.array(costs)

    def partial(self, missing: Mapping[str, Missing]) -> bool:
        """Whether a remedy leaves the fraction lost to rounding unchanged in at least one leaf.

        `missing` is the lost displacement by leaf with the remedy. Leaves that lose nothing without
        a remedy do not count.
        """
        return any(0 < m.rounded == self.now[n].rounded for n, m in missing.items())


def _remedies(whole: _Estimate, parts: Sequence[_Estimate]) -> tuple[RunRemedy, ...]:
    """Return the remedies with ranges and ranks, in the order of `WholeRun.remedies`.

    Each estimate in `parts` omits another part of the sampled elements.
    """
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
        # A tie: for some power, or within two standard errors, the order could be reversed.
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
    """Return jackknife standard errors from estimates that each omit one part of the elements."""
    values = np.array(left_out)
    return np.sqrt((len(values) - 1) / len(values) * np.sum((values - values.mean(0)) ** 2, 0))


@dataclass
class _Model:
    """Simulated runs of a model's leaves, and the lost displacements derived from them."""

    leaves: Mapping[str, Leaf]
    samples: Mapping[str, np.ndarray]
    rule: Optimiser
    fmt: Format
    gradients: Gradients
    known: KnownGradients | None
    push: dict[str, float] = field(default_factory=dict)
    """Loss decrease to first order if no update is lost, by leaf."""
    families: dict[str, str] = field(default_factory=dict)
    """Family by leaf."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Name of the first leaf of each kind (path without layer numbers). Where leaves of a kind
    hardly differ, only this leaf is simulated."""
    left_out: int | None = None
    """Index of the omitted part of the sampled elements, below `JACKKNIFE`; None: no part."""
    runs: dict[Any, Mapping[str, Simulated]] = field(default_factory=dict)
    """Cache of simulated runs of all sampled elements, by arguments of `outcomes`."""
    weights: dict[str, np.ndarray | float] = field(default_factory=dict)
    """Cache of gradient sizes by leaf, of all sampled elements."""

    def __post_init__(self) -> None:
        self.families = {n: family_of(n, leaf.shape) for n, leaf in self.leaves.items()}
        self.kinds = {kind_of(n): n for n in reversed(list(self.leaves))}
        self.leave_out(None)

    def leave_out(self, part: int | None) -> None:
        """Omit one part of every leaf's sampled elements (None: no part) and recompute `push`."""
        self.left_out = part
        for n, outcome in self.outcomes(FLOAT32).items():
            way = np.abs(outcome.intended * self.weight(n))
            self.push[n] = float(np.mean(way, dtype=np.float64)) * self.leaves[n].size

    def _part(self, values: np.ndarray) -> np.ndarray:
        """Return the elements that are not omitted, or all of them if none would remain."""
        if self.left_out is None or values.size < 2:
            return values
        return values[np.arange(values.size) % min(JACKKNIFE, values.size) != self.left_out]

    def outcomes(
        self, storage: Storage, names: Iterable[str] | None = None, factor: float = 1.0,
        steps: int = STEPS,
    ) -> Mapping[str, Simulated]:  # fmt: skip
        """Return simulated runs by leaf name, at `factor` times the optimiser's learning rate.

        `names` are the leaves to simulate; None: all. Elements of the omitted part are left out.
        Runs are cached.
        """
        chosen = tuple(self.leaves if names is None else names)
        key = storage, chosen, factor, steps
        if key not in self.runs:
            self.runs[key] = self._trained(storage, chosen, factor, steps)
        return {n: Simulated(*map(self._part, outcome)) for n, outcome in self.runs[key].items()}

    def _trained(
        self, storage: Storage, names: tuple[str, ...], factor: float, steps: int
    ) -> Mapping[str, Simulated]:
        part, shapes = (
            {n: self.samples[n] for n in names},
            {n: x.shape for n, x in self.leaves.items()},
        )
        rule, known = self.rule.with_lr(self.rule.lr * factor), self.known and self.known.rows
        # No burn-in: a training run begins with moments of zero. The error of moments in few bits
        # grows with each step, so a burn-in would add errors of steps before the run.
        return run(part, rule, storage, self.gradients, steps, SAMPLE, shapes, known, burn_in=0)

    def weight(self, name: str) -> np.ndarray | float:
        """Return the gradient sizes of a leaf's sampled elements, or 1 if none are known."""
        if self.known is None:
            return 1.0
        if name not in self.weights:
            matrix = self.rule.matrix(self.leaves[name].shape)
            sizes = self.known.rows[name].sampled(name, SAMPLE, matrix)[0]
            self.weights[name] = sizes.reshape(-1)
        return self._part(np.asarray(self.weights[name]))

    def rounded(self, wrapper: str) -> dict[str, Missing]:
        """Return the lost displacement by leaf, with float32 moments; simulates one leaf per kind.

        Args:
            wrapper: key of `simulate.WRAPPERS`, such as "stochastic".
        """
        storage = Storage(wrapper, self.fmt.name)
        found = self.outcomes(storage, self.kinds.values())
        missing = {}
        for n, o in found.items():
            share = _share(o, o.intended, self.weight(n))
            missing[n] = Missing(share, noise=_noise(o, self.weight(n)))
        return {n: missing[self.kinds[kind_of(n)]] for n in self.leaves}

    def stored(self, wrapper: str) -> dict[str, Missing]:
        """Return the lost displacement by leaf, if parameters are stored in the format.

        The learning rate is constant.

        Args:
            wrapper: `cast` for moments in the format, `nearest` for float32 moments.
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
        """Return the lost displacement by leaf over a schedule, and a tuple with one line of text.

        The line says when, as fractions of the run, each family loses more than half of its
        displacement.

        Args:
            wrapper: as for `stored`.
            schedule: the learning-rate schedule.
        """
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
        """Return a tuple with one line: when each family loses more than half of its displacement.

        `rounded` maps the first leaf of each kind to its lost fractions in the intervals (PARTS,).
        """
        words = []
        for family in dict.fromkeys(self.families.values()):
            inside = [n for n in self.leaves if self.families[n] == family]
            pushes = np.array([self.push[n] for n in inside])
            ways = np.array([rounded[self.kinds[kind_of(n)]] for n in inside])
            lost = np.average(ways, axis=0, weights=pushes if pushes.any() else None) > 0.5
            words.append(f"{family} {_parts(lost)}")
        return (f"Rounding loses more than half of the displacement: {', '.join(words)}.",)


def _ways(
    model: _Model, now: Mapping[str, Missing], wide_moments: bool
) -> list[tuple[str, Mapping[str, Missing], float]]:
    """Return remedies: (description, lost displacement by leaf with it, bytes per parameter).

    `now` is the lost displacement by leaf without a remedy.
    """
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


def _share(outcome: Simulated, intended: np.ndarray, weight: Any) -> float:
    """Return the lost fraction of a displacement weighted by gradient sizes; 0 for overshooting."""
    applied = np.asarray(outcome.last, np.float64) - np.asarray(outcome.first)
    return _short(applied * weight, intended * weight)


def _shrunk(outcome: Simulated, wide: Simulated, weight: Any) -> float:
    """Return the fraction by which requested updates are shorter than those of a float32 run."""
    return _short(outcome.intended * weight, wide.intended * weight)


def _noise(outcome: Simulated, weight: Any) -> float:
    """Return the mean square of the random errors, relative to that of the intended displacement.

    Random errors are the applied displacement minus f times the intended one, for the mean applied
    fraction f.
    """
    applied = (np.asarray(outcome.last, np.float64) - np.asarray(outcome.first)) * weight
    intended = np.asarray(outcome.intended, np.float64) * weight
    square = float(np.sum(intended**2))
    share = float(np.sum(applied * intended)) / square if square else 0.0
    noise = float(np.sum((applied - share * intended) ** 2)) / square if square else 0.0
    return 1.0 if math.isnan(noise) else noise


def _short(gone: np.ndarray, way: np.ndarray) -> float:
    """Return the fraction of a displacement `way` that is missing if only `gone` was applied.

    In [0, 1]: 0 if `way` is zero everywhere; 1 if the result is NaN.
    """
    whole = np.abs(way, dtype=np.float64).sum()
    share = float((gone * np.sign(way)).sum() / whole) if whole else 1.0
    # In Python max(0, NaN) is 0, which would mean that nothing is missing.
    return 1.0 if math.isnan(share) else min(1.0, max(0.0, 1.0 - share))


def _parts(lost: np.ndarray) -> str:
    """Return text such as "from 0% to 2% of the run", for the intervals in which `lost` is true."""
    if lost.all() or not lost.any():
        return "throughout" if lost.all() else "never"
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
        gone = sum(push[n] * missing[n].applied for n in inside)
        cost = _cost({n: missing[n] for n in inside}, push)
        share = cost / total if total else 0.0
        elements = sum(leaves[n].size for n in inside)
        found.append(Family(family, elements, gone / pushes if pushes else 1.0, share))
    return tuple(sorted(found, key=lambda f: -f.cost))


def _order(remedy: RunRemedy) -> tuple[Any, ...]:
    return (False, remedy.bytes) if remedy.works else (True, -remedy.returns)
