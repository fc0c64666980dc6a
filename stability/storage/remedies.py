"""Remedies for a frozen leaf, each tried on the user's own values by a real optimiser run.

Ranked by measured fidelity and by memory: remedies that apply what the optimiser asked for to
within `ENOUGH` come first, cheapest first; the others follow, best first. Remedies that the spread
of the measurement does not tell apart share a rank. Elements without a gradient do not count.
Source: docs/stability.md "Remedies".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stability.core.number_formats import BF16, Format
from stability.core.parameter_leaves import Leaf, sample
from stability.storage.simulate import GRADIENTS, Gradients, Known, Storage, Survival, run
from stability.storage.update_rules import Optimiser

ENOUGH = 0.05
"""Largest |fidelity - 1| of a remedy that works: a learning rate is rarely known to 5 %."""
ERRORS = 2.0
"""Standard errors within which two fidelities are a tie: 95 %."""
STEPS, SIZE = 1000, 1024
"""Long enough for a norm at 1 to cross about twenty numbers of bfloat16, so that a single rounding
of its end point is no longer what is measured."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to store or move a parameter."""

    name: str
    what: str
    """What to do, in words."""
    wrapper: str = "nearest"
    """A key of `simulate.WRAPPERS`."""
    wide: bool = False
    """Whether the parameter itself is stored in float32."""
    extra_bytes: int = 0
    """Bytes per parameter that the remedy adds to the stored weight; moments are not counted."""
    lr: float = 1.0
    """Factor on the learning rate."""
    scale: float = 1.0
    """Factor on the initial value."""
    shift: float = 0.0
    """What is subtracted from the value before it is stored, and added where it is used."""
    cast_first: bool = False
    """Whether the values went through the format before they were stored wide."""
    torch: str = ""
    """What to do in torch, where that is said in other words."""

    @property
    def near_one(self) -> bool:
        """Whether it makes sense for weights about 1 only."""
        return self.scale != 1.0 or self.shift != 0.0

    def storage(self, fmt: Format) -> Storage:
        """Return how the parameter is kept."""
        return Storage(self.wrapper, "float32" if self.wide else fmt.name)

    def bytes(self, fmt: Format) -> int:
        """Return bytes per parameter, optimiser moments not counted."""
        return (4 if self.wide else fmt.bytes) + self.extra_bytes

    def prepare(self, values: np.ndarray, fmt: Format) -> np.ndarray:
        """Return the values to store, float32, before the storage rounds them."""
        values = np.asarray(values, np.float32)
        if self.cast_first:
            values = fmt.round(values)
        return (values * np.float32(self.scale) - np.float32(self.shift)).astype(np.float32)


# Whole paths: they are what a person has to import.
_JAX, _TORCH = "stability.storage.narrow_optimisers", "stability.storage.torch_narrow"
NOTHING = Remedy("nothing", "store the parameter narrow and round each update to nearest")
REMEDIES = (
    Remedy("float32 parameters", "keep parameters in float32, compute in bfloat16 (AMP)", "plain",
           wide=True),
    Remedy("float32 master", "keep a float32 master beside the narrow copy", "master",
           extra_bytes=4),
    Remedy("stochastic rounding",
           f"round updates stochastically ({_JAX}.stochastic_adamw)", "stochastic",
           torch=f"round updates stochastically ({_TORCH}.round_stochastically)"),
    Remedy("Kahan, bfloat16", f"compensate in bfloat16 ({_JAX}.kahan_adamw)", "kahan",
           extra_bytes=2, torch=f"compensate in bfloat16 ({_TORCH}.compensate)"),
    Remedy("Kahan, float32", "compensate in float32 (kahan_adamw, compensation_dtype=float32)",
           "kahan float32", extra_bytes=4, torch="compensate in float32"),
    Remedy("zero-centred", "store the weight less 1 and add 1 where it is used", shift=1.0),
    Remedy("smaller init", "start the weight at a tenth", scale=0.1),
    Remedy("larger lr", "multiply the learning rate of this group by 10", lr=10.0),
    Remedy("cast, then restore", "cast to the format, then store this leaf in float32 again",
           "plain", wide=True, cast_first=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """The measured effect of a remedy on one leaf."""

    remedy: Remedy
    survival: Survival
    bytes: int
    """Bytes per parameter with it, optimiser moments not counted."""
    lost_at_start: float
    """Relative L2 of what storing the values for the first time took from them."""
    idle: float = 0.0
    """Share of the elements that have no gradient, and so are not in `survival`."""

    @property
    def miss(self) -> float:
        """How far the applied displacement is from the intended one, |fidelity - 1|."""
        miss = abs(self.survival.fidelity - 1.0)
        # NaN has no place in an order: a remedy that diverges is the worst one.
        return math.inf if math.isnan(miss) else miss

    @property
    def works(self) -> bool:
        """Whether what was applied is what was intended, to within `ENOUGH`."""
        return self.miss <= ENOUGH

    @property
    def spread(self) -> float:
        """Half the width of the interval that has the fidelity at 95 %."""
        return ERRORS * self.survival.spread

    @property
    def settled(self) -> bool:
        """Whether another draw of gradients would hardly change whether it works."""
        return not abs(self.miss - ENOUGH) <= self.spread

    def verdict(self) -> str:
        """Return in a word or two whether it works."""
        word = "fix" if self.works else "not"
        return word if self.settled else f"perhaps {'a fix' if self.works else word}"

    def ties(self, other: Trial) -> bool:
        """Whether the measurement tells neither of two remedies of equal memory to be better."""
        alike = (self.works, other.works) == (False, False) or (
            (self.bytes, self.lost_at_start) == (other.bytes, other.lost_at_start)
        )
        apart = abs(self.miss - other.miss) if self.miss != other.miss else 0.0
        return alike and apart <= math.hypot(self.spread, other.spread)

    def describe(self, torch: bool = False) -> str:
        """Return the remedy and its measured effect in words, of JAX or of torch."""
        what = (torch and self.remedy.torch) or self.remedy.what
        between = f" ± {self.spread:.3f}" if round(self.spread, 3) else ""
        of = " of those with a gradient" if self.idle else ""
        return (
            f"{what}: fidelity {self.survival.fidelity:.3f}{between}, "
            f"{self.survival.frozen:.0%}{of} frozen, {self.bytes} bytes per parameter"
        )


def try_remedies(
    values: Mapping[str, np.ndarray | Leaf],
    optimiser: Optimiser,
    fmt: Format = BF16,
    *,
    remedies: Sequence[Remedy] = (NOTHING, *REMEDIES),
    gradients: Gradients = GRADIENTS,
    steps: int = STEPS,
    size: int = SIZE,
    known: Known = None,
) -> dict[str, list[Trial]]:
    """Return the trials of every leaf, best first; remedies that make no sense for it are left out.

    Args:
        values: leaves by name, finite, any shape.
        optimiser: steps them, at its own learning rate unless the remedy changes that.
        fmt: the storage the remedies are for.
        remedies: which to try.
        gradients: the distribution gradients are drawn from.
        steps: optimiser steps.
        size: elements sampled of each leaf.
        known: gradients of leaves that are not those of `gradients`.

    Raises:
        RuntimeError: the compiler removed the rounding.
    """
    trials: dict[str, list[Trial]] = {name: [] for name in values}
    shapes = {n: x.shape for n, x in values.items()}
    samples = {
        n: sample(x.read() if isinstance(x, Leaf) else x, n, size, optimiser.matrix(x.shape))
        for n, x in values.items()
    }
    for remedy in remedies:
        sensible = {n: x for n, x in samples.items() if not remedy.near_one or _about_one(x)}
        starts = {n: remedy.prepare(x, fmt) for n, x in sensible.items()}
        tuned = optimiser.with_lr(optimiser.lr * remedy.lr)
        # Of 48 elements alone a fidelity would be known to 7 %.
        outcomes = run(
            starts, tuned, remedy.storage(fmt), gradients, steps, size, shapes, known, fill=True
        )
        for name, outcome in outcomes.items():
            first_loss = _lost_at_start(remedy, sensible[name], starts[name], fmt)
            # Rows of tokens or positions that no text had are decayed at most. Counted, they would
            # freeze half of a leaf under every remedy, and say nothing of what it does to the rest.
            counted = outcome.with_gradients()
            idle = 1.0 - counted.pushed.size / max(1, outcome.pushed.size)
            trials[name].append(
                Trial(remedy, counted.survival(), remedy.bytes(fmt), first_loss, idle)
            )
    return {name: rank(of_leaf) for name, of_leaf in trials.items()}


def ranks(trials: Sequence[Trial]) -> list[int]:
    """Return the rank of each trial of a ranked list; trials that tie share one."""
    found: list[int] = []
    leader = 0
    for place, trial in enumerate(trials):
        leader = leader if trials[leader].ties(trial) else place
        found.append(leader + 1)
    return found


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Order trials: what works first, cheapest first; then the rest, best first."""

    def key(t: Trial) -> tuple[bool, float, float, float]:
        return (not t.works, t.bytes, t.lost_at_start, t.miss) if t.works else (True, t.miss, 0, 0)

    return sorted(trials, key=key)


def _about_one(values: np.ndarray) -> bool:
    return values.size > 0 and bool(np.median(np.abs(np.asarray(values) - 1.0)) < 0.5)


def _lost_at_start(remedy: Remedy, values: np.ndarray, start: np.ndarray, fmt: Format) -> float:
    # A master keeps the wide values; another init is another model, not a loss.
    if remedy.wrapper == "master" or remedy.scale != 1.0:
        return 0.0
    stored = remedy.storage(fmt).start(start) + np.float32(remedy.shift)
    norm = float(np.linalg.norm(values)) or 1.0
    return float(np.linalg.norm(stored - values)) / norm
