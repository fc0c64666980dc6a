"""What each remedy would return, for the whole run, of what storage in few bits costs.

The remedies of one leaf say nothing of a run: norms may be all that freezes, and matrices that lose
a little of each step cost as much. So every leaf's push is weighed: the size of its gradient times
the way it was to go, which is what it takes off the loss to first order. Of a leaf at which a share
m of that way is missing, push m^1.5 is lost: m would be right if the last part of a way helped as
much as the first, m^2 at the end of a parabola. An estimate, for an order of remedies; it is
compared with training in docs/stability.md "The whole run".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stability.core.number_formats import Format
from stability.core.parameter_leaves import Leaf, kind_of
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
    """Where the sizes of gradients come from."""

    def lines(self, storage: str) -> list[str]:
        """Return the remedies and, in one line, every family."""
        closing = ", ".join(f.describe() for f in self.families)
        end = f"Of the way the optimiser asks for, this arrives in {storage}: {closing}."
        if not self.remedies:
            return [end]
        title = f"For the whole run, of what parameters and moments in {storage} cost (estimated, "
        works = [f"    fix: {r.describe()}" for r in self.remedies if r.works]
        short = [f"    not enough: {r.describe()}" for r in self.remedies if not r.works]
        return [f"{title}{self.basis}):", *works[:SHOWN], *short[:SHOWN], end]


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
    sizes: Mapping[str, np.ndarray] | None = None,
    signals: Mapping[str, np.ndarray] | None = None,
    wide_moments: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> WholeRun:
    """Return what storage costs a run, and what each remedy is expected to return.

    Args:
        leaves: every parameter that is trained.
        samples: of each, as `simulate.run` draws them.
        rule: the optimiser.
        fmt: the storage in question.
        gradients: their distribution.
        sizes: of the gradients of the samples' elements; None takes all to be of one size.
        signals: of the same, `simulate.Gradients.signal`; None takes that of `gradients`.
        wide_moments: whether moments are in float32 as it is.
        say: gets a line of progress.

    Raises:
        RuntimeError: the compiler removed the rounding.
    """

    def outcomes(storage: Storage, names: Sequence[str]) -> dict[str, Outcome]:
        part, shapes = {n: samples[n] for n in names}, {n: leaves[n].shape for n in names}
        return run(part, rule, storage, gradients, STEPS, SAMPLE, shapes, signals)

    say("estimating the whole run")
    names = list(leaves)
    # What an element was to move, times the size of its gradient: what it takes off the loss.
    weight = {n: np.reshape(sizes[n], -1) if sizes else 1.0 for n in names}
    intended = {n: o.intended * weight[n] for n, o in outcomes(FLOAT32, names).items()}
    push = {n: float(np.mean(np.abs(x))) * leaves[n].size for n, x in intended.items()}

    def missing_of(found: Mapping[str, Outcome]) -> dict[str, float]:
        return {n: _missing(o, weight[n], intended[n]) for n, o in found.items()}

    nearest = missing_of(outcomes(Storage("nearest", fmt.name), names))
    cast = missing_of(outcomes(Storage("cast", fmt.name), names))
    now = nearest if wide_moments else cast
    # What is unbiased is so for all layers alike: one leaf of each kind stands for the others.
    first = {kind_of(n): n for n in reversed(names)}
    moments = 2 if isinstance(rule, AdamW) else 1
    tried = [("round stochastically, moments in float32", "stochastic", 0),
             (f"Kahan compensation in {fmt.name}, moments in float32", "kahan", 2)]  # fmt: skip
    ways: dict[str, tuple[dict[str, float], float]] = {
        "float32 parameters and moments, bfloat16 compute (AMP)": (
            dict.fromkeys(names, 0.0),
            4 + 4 * moments,
        )
    }
    for what, wrapper, more in tried:
        by_kind = missing_of(outcomes(Storage(wrapper, fmt.name), list(first.values())))
        missing = {n: by_kind[first[kind_of(n)]] for n in names}
        ways[what] = missing, fmt.bytes + more + 4 * moments
    if not wide_moments:
        ways["moments alone in float32"] = nearest, fmt.bytes + 4 * moments
    families = {n: family_of(n, leaves[n].shape) for n in names}
    total = sum(leaf.size for leaf in leaves.values())
    for family in dict.fromkeys(families.values()):
        inside = {n for n in names if families[n] == family}
        if len(inside) == len(names):
            continue
        share = sum(leaves[n].size for n in inside) / total
        width = fmt.bytes * (1 + moments) * (1 - share) + 4 * (1 + moments) * share
        ways[f"{family} alone in float32"] = (
            {n: 0.0 if n in inside else now[n] for n in names},
            width,
        )
    cost = _cost(now, push)
    remedies = [RunRemedy(what, 1 - _cost(missing, push) / cost, width)
                for what, (missing, width) in ways.items() if cost]  # fmt: skip
    basis = "gradients as in the optimiser state" if sizes else "all gradients taken to be alike"
    return WholeRun(
        _families(families, leaves, push, now), tuple(sorted(remedies, key=_order)), basis
    )


def _missing(outcome: Outcome, weight: Any, intended: np.ndarray) -> float:
    """Return the share of a leaf's weighted way that was not gone; what overshoots misses none."""
    way = np.abs(intended, dtype=np.float64).sum()
    applied = (np.asarray(outcome.last, np.float64) - np.asarray(outcome.first)) * weight
    gone = float((applied * np.sign(intended)).sum() / way) if way else 1.0
    return max(0.0, 1.0 - gone)


def _cost(missing: Mapping[str, float], push: Mapping[str, float]) -> float:
    return sum(push[n] * min(m, 1.0) ** DIMINISHING for n, m in missing.items())


def _families(
    of: Mapping[str, str],
    leaves: Mapping[str, Leaf],
    push: Mapping[str, float],
    missing: Mapping[str, float],
) -> tuple[Family, ...]:
    total, found = _cost(missing, push), []
    for family in dict.fromkeys(of.values()):
        inside = [n for n in leaves if of[n] == family]
        pushes = sum(push[n] for n in inside)
        lost = sum(push[n] * missing[n] for n in inside)
        cost = _cost({n: missing[n] for n in inside}, push)
        share = cost / total if total else 0.0
        elements = sum(leaves[n].size for n in inside)
        found.append(Family(family, elements, 1 - lost / pushes if pushes else 1.0, share))
    return tuple(sorted(found, key=lambda f: -f.cost))


def _order(remedy: RunRemedy) -> tuple[Any, ...]:
    return (False, remedy.bytes) if remedy.works else (True, -remedy.returns)
