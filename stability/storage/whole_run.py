"""What each remedy would return, for the whole run, of what storage in few bits costs.

The remedies of one leaf say nothing of a run: norms may be all that freezes, and matrices that lose
a little of each step cost as much. So every leaf's push is weighed: the size of its gradient times
the way it was to go, which is what it takes off the loss to first order.

Of a leaf at which a share m of that way is missing, push m^1.5 is lost: m would be right if the
last part of a way helped as much as the first, m^2 at the end of a parabola. Two things take from
it, and their costs add: rounding a parameter loses the steps of some elements, and second moments
that cannot decay shorten those of all alike. An estimate, for an order of remedies; it is compared
with training in docs/stability.md "The whole run".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
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

DIMINISHING = 1.5
"""Power of the missing share of a way: between a straight slope, 1, and the end of a parabola, 2.
Set to the middle; docs/stability.md "The whole run" has what comes of it."""
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
    """What of a leaf's way is not gone."""

    rounded: float
    """Share that rounding the parameter loses, of what its optimiser asks for."""
    shrunk: float = 0.0
    """Share by which the steps that it asks for are too short, its moments being rounded."""

    @property
    def arrives(self) -> float:
        """Share of the way that is gone."""
        return (1 - self.rounded) * (1 - self.shrunk)

    @property
    def cost(self) -> float:
        """Share of the leaf's push that is lost."""
        return self.rounded**DIMINISHING + (1 - self.rounded) * self.shrunk**DIMINISHING


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

    @property
    def works(self) -> bool:
        """Whether it returns nearly all."""
        return self.returns >= WORKS

    def describe(self) -> str:
        """Return it in words."""
        gives = f"returns about {self.returns:.0%}, {self.bytes:.1f} bytes per parameter"
        return f"{self.what}: {gives} with its moments"


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
        works = [f"    fix: {r.describe()}" for r in self.remedies if r.works]
        short = [f"    not enough: {r.describe()}" for r in self.remedies if not r.works]
        return [f"{title}{self.basis}):", *works[:SHOWN], *short[:SHOWN], *ends]


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
    now, lost = model.stored(moments), ()
    if schedule is not None:
        now, lost = model.scheduled(moments, schedule)
    cost, ways = _cost(now, model.push), _ways(model, now, wide_moments)
    remedies = [RunRemedy(what, 1 - _cost(missing, model.push) / cost, width)
                for what, missing, width in ways if cost]  # fmt: skip
    sizes = "all gradients taken to be alike" if known is None else f"gradients {known.source}"
    rate = schedule.describe() if schedule else f"{STEPS} steps at one rate, no schedule given"
    basis = f"{sizes}; {rate}"
    families = _families(model.families, leaves, model.push, now)
    return WholeRun(families, tuple(sorted(remedies, key=_order)), basis, lost)


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
    """By leaf, what it takes off the loss to first order if nothing is lost."""
    families: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """By kind, one leaf that stands for the others where a property hardly differs among them."""

    def __post_init__(self) -> None:
        self.families = {n: family_of(n, leaf.shape) for n, leaf in self.leaves.items()}
        self.kinds = {kind_of(n): n for n in reversed(list(self.leaves))}
        for n, outcome in self.outcomes(FLOAT32).items():
            way = np.abs(outcome.intended * self.weight(n))
            self.push[n] = float(np.mean(way)) * self.leaves[n].size

    def outcomes(
        self, storage: Storage, names: Iterable[str] | None = None, factor: float = 1.0,
        steps: int = STEPS,
    ) -> Mapping[str, Outcome]:  # fmt: skip
        """Train samples of leaves, all of them by default, with a factor on the rate."""
        if names is None and storage in self.trained:
            return self.trained[storage]
        chosen = list(self.leaves if names is None else names)
        part, shapes = (
            {n: self.samples[n] for n in chosen},
            {n: x.shape for n, x in self.leaves.items()},
        )
        rule, known = self.rule.with_lr(self.rule.lr * factor), self.known and self.known.rows
        found = run(part, rule, storage, self.gradients, steps, SAMPLE, shapes, known)
        if names is None:
            self.trained[storage] = found
        return found

    def weight(self, name: str) -> np.ndarray | float:
        """Return the sizes of the gradients of a leaf's sample, or 1 where all are alike."""
        if self.known is None:
            return 1.0
        matrix = self.rule.matrix(self.leaves[name].shape)
        return self.known.rows[name].sampled(name, SAMPLE, matrix)[0].reshape(-1)

    def rounded(self, wrapper: str) -> dict[str, Missing]:
        """Return what a storage with moments in float32 loses of each leaf, from one of a kind."""
        storage = Storage(wrapper, self.fmt.name)
        found = self.outcomes(storage, self.kinds.values())
        missing = {n: Missing(_share(o, o.intended, self.weight(n))) for n, o in found.items()}
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


def _cost(missing: Mapping[str, Missing], push: Mapping[str, float]) -> float:
    return sum(push[n] * m.cost for n, m in missing.items())


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
