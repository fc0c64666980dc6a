"""Remedies for a frozen leaf, each measured by an optimiser run on a sample of the leaf's values.

Fidelity is the applied displacement divided by the intended one. Remedies whose fidelity is within
`ENOUGH` of 1 come first, ordered by memory. The others follow, ordered by their distance from 1.
Remedies that differ by less than the measurement error share a rank. Elements without a gradient
are not counted. Source: docs/stability.md "Remedies".
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
"""Largest |fidelity - 1| of a remedy that works. A fidelity of 0.95 acts like a learning rate 5 %
too small, and learning rates are rarely tuned to 5 %."""
ERRORS = 2.0
"""Number of standard errors (of their difference) within which two fidelities count as equal: a
95 % interval."""
STEPS, SIZE = 1000, 1024
"""Optimiser steps of a trial, and largest number of elements sampled per leaf. In 1,000 steps a
norm weight at 1 crosses about twenty bfloat16 values, so that the rounding of its end point is
negligible."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to store or update a parameter that may keep it from freezing."""

    name: str
    what: str
    """Instruction for the user."""
    wrapper: str = "nearest"
    """Key of `simulate.WRAPPERS`: how the optimiser's update is rounded."""
    wide: bool = False
    """Whether the parameter itself is stored in float32."""
    extra_bytes: int = 0
    """Bytes per parameter in addition to the stored weight, without optimiser moments."""
    lr: float = 1.0
    """Factor on the learning rate."""
    scale: float = 1.0
    """Factor on the initial value."""
    shift: float = 0.0
    """Constant subtracted before the weight is stored; the model adds it back when it uses it."""
    cast_first: bool = False
    """Whether the values were rounded to the format before they were stored in float32."""
    torch: str = ""
    """Instruction for torch users; empty if `what` holds for torch too."""

    @property
    def near_one(self) -> bool:
        """Whether the remedy applies only to weights near 1."""
        return self.scale != 1.0 or self.shift != 0.0

    def storage(self, fmt: Format) -> Storage:
        """Return the storage of the parameter under this remedy."""
        return Storage(self.wrapper, "float32" if self.wide else fmt.name)

    def bytes(self, fmt: Format) -> int:
        """Return bytes per parameter, without optimiser moments."""
        return (4 if self.wide else fmt.bytes) + self.extra_bytes

    def prepare(self, values: np.ndarray, fmt: Format) -> np.ndarray:
        """Return the values to store, float32, before they are rounded to the storage format."""
        values = np.asarray(values, np.float32)
        if self.cast_first:
            values = fmt.round(values)
        return (values * np.float32(self.scale) - np.float32(self.shift)).astype(np.float32)


# Full module paths, since they are shown to users, who have to import from them.
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
    """Bytes per parameter under the remedy, without optimiser moments."""
    lost_at_start: float
    """Relative L2 error of the initial values from their first rounding to storage."""
    idle: float = 0.0
    """Fraction of the elements without a gradient, which `survival` excludes; 0 if no element has a
    gradient, since all are then counted."""

    @property
    def miss(self) -> float:
        """Deviation |fidelity - 1| of the applied from the intended displacement; inf for NaN."""
        miss = abs(self.survival.fidelity - 1.0)
        # NaN cannot be sorted; a remedy that diverges ranks last.
        return math.inf if math.isnan(miss) else miss

    @property
    def works(self) -> bool:
        """Whether the applied displacement matches the intended one to within `ENOUGH`."""
        return self.miss <= ENOUGH

    @property
    def spread(self) -> float:
        """Half width of the 95 % confidence interval of the fidelity."""
        return ERRORS * self.survival.spread

    @property
    def settled(self) -> bool:
        """Whether other random gradients would give the same `works`, at 95 % confidence."""
        return not abs(self.miss - ENOUGH) <= self.spread

    def verdict(self) -> str:
        """Return "fix" or "not"; if uncertain, "perhaps a fix" or "perhaps not"."""
        word = "fix" if self.works else "not"
        return word if self.settled else f"perhaps {'a fix' if self.works else word}"

    def ties(self, other: Trial) -> bool:
        """Whether two remedies share a rank: their fidelities do not differ measurably.

        If one of the remedies works, both must also need equal memory and have the same error from
        the first rounding of the weights (`lost_at_start`).
        """
        alike = (self.works, other.works) == (False, False) or (
            (self.bytes, self.lost_at_start) == (other.bytes, other.lost_at_start)
        )
        apart = abs(self.miss - other.miss) if self.miss != other.miss else 0.0
        return alike and apart <= math.hypot(self.spread, other.spread)

    def describe(self, torch: bool = False) -> str:
        """Return text with the instruction, for JAX or torch, and the remedy's measured effect."""
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
    """Try remedies on every leaf; return trials by leaf name, best first.

    Remedies that only suit weights near 1 are not tried on other leaves.

    Args:
        values: leaves by name, finite, any shape.
        optimiser: the optimiser; a remedy may scale its learning rate.
        fmt: the storage format.
        remedies: the remedies to try.
        gradients: distribution of synthetic gradients.
        steps: optimiser steps.
        size: largest number of elements sampled per leaf.
        known: known gradient statistics by leaf name, which replace `gradients`; None: no leaf has
            them.

    Raises:
        ValueError: XLA cannot convert to the storage format on this processor.
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
        # Small leaves are repeated: 48 elements alone would give the fidelity to within 7 %.
        outcomes = run(
            starts, tuned, remedy.storage(fmt), gradients, steps, size, shapes, known, fill=True
        )
        for name, outcome in outcomes.items():
            first_loss = _lost_at_start(remedy, sensible[name], starts[name], fmt)
            # Only weight decay moves rows of tokens or positions that do not occur in the data.
            # They would count as frozen under every remedy and hide its effect on the other rows.
            counted = outcome.with_gradients()
            idle = 1.0 - counted.pushed.size / max(1, outcome.pushed.size)
            trials[name].append(
                Trial(remedy, counted.survival(), remedy.bytes(fmt), first_loss, idle)
            )
    return {name: rank(of_leaf) for name, of_leaf in trials.items()}


def ranks(trials: Sequence[Trial]) -> list[int]:
    """Return the rank, from 1, of each trial in a list sorted by `rank`; ties share a rank."""
    found: list[int] = []
    leader = 0
    for place, trial in enumerate(trials):
        leader = leader if trials[leader].ties(trial) else place
        found.append(leader + 1)
    return found


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials sorted: those that work, least memory first; then others, by `Trial.miss`."""

    def key(t: Trial) -> tuple[bool, float, float, float]:
        return (not t.works, t.bytes, t.lost_at_start, t.miss) if t.works else (True, t.miss, 0, 0)

    return sorted(trials, key=key)


def _about_one(values: np.ndarray) -> bool:
    return values.size > 0 and bool(np.median(np.abs(np.asarray(values) - 1.0)) < 0.5)


def _lost_at_start(remedy: Remedy, values: np.ndarray, start: np.ndarray, fmt: Format) -> float:
    # A float32 master keeps the exact values. A scaled initial value is a different model, which
    # has no loss to compare.
    if remedy.wrapper == "master" or remedy.scale != 1.0:
        return 0.0
    stored = remedy.storage(fmt).start(start) + np.float32(remedy.shift)
    norm = float(np.linalg.norm(values)) or 1.0
    return float(np.linalg.norm(stored - values)) / norm
