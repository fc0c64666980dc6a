"""The runs of one side of a port comparison."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.exits import exits_named
from parity.sides.projection import Valid, only_valid
from parity.sides.side import (
    Precision,
    Rounding,
    Run,
    Side,
    SideError,
    TakesExactParameters,
    Trace,
)

MASK = 1e30
"""Magnitude from which a number counts as a mask, such as one added to attention scores."""


class SideRuns:
    """Runs of one side: unmodified, in float64 if possible, and perturbed by rounding.

    Args:
        side: the side to run.
        valid: mask of the positions to compare; see `Valid`.
        whose: `original` or `port`, for messages.
        masked_outputs: whether numbers of magnitude `MASK` or more in outputs count as masks, such
            as those added to attention scores; in other stages they always do.
        left_out: names of outputs that are not compared; a name includes every field below it.
        sums: float64 values, by name, of the parameters in which this side stores the rounded sum
            of parameters of the other side; used in float64 runs.

    Raises:
        SideError: the side rejects its inputs.
        ExitError: the side ended the program.
    """

    def __init__(
        self,
        side: Side,
        valid: Valid,
        whose: str = "side",
        *,
        masked_outputs: bool = False,
        left_out: Collection[str] = (),
        sums: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.sums = sums or {}
        self.side, self.valid = _with_exact(side, self.sums), valid
        self.name = f"the {whose} ({side.kind})"
        self.masked_outputs, self.left_out = masked_outputs, left_out
        self.cotangents: dict[str, np.ndarray] | None = None
        self.shared: frozenset[str] | None = None
        self.notices: tuple[str, ...] = ()
        self.masked: set[str] = set()
        """Names of stages with a number of magnitude `MASK` or more in any run so far."""
        self.dropped: dict[str, str] = {}
        """The entry of `left_out` that excludes an output, by the output's name."""
        self.narrow = self.run(Run())
        self.unrepeatable = self._unrepeatable()
        self.wide: Trace | None = None
        try:
            self.wide = self.run(Run(Precision.FLOAT64))
            self.notices = tuple(f"{side.kind}: {notice}" for notice in self.wide.notices)
        except SideError as error:
            self.notices = (f"{side.kind} does not run in float64: {error}",)

    @property
    def best(self) -> Trace:
        """The most precise run available."""
        return self.narrow if self.wide is None else self.wide

    def run(self, how: Run, side: Side | None = None) -> Trace:
        """Run the side once; set invalid positions to zero, and numbers that count as masks
        (`masked_outputs`) to their sign, 1 or -1.

        Masks are replaced because they may differ between dtypes, such as the lowest number of each
        dtype, and would dominate every norm.

        Args:
            how: settings of the run.
            side: a copy of the side with other parameters or inputs; None: the side itself.
        """
        with exits_named(self.name):
            trace = self._without_left_out((side or self.side).run(how))
        stages = only_valid(trace.stages, self.valid)
        for name, x in stages.items():
            if name in trace.outputs and not self.masked_outputs:
                # A huge output is an output unless the case declares masks.
                continue
            # Perturbed by rounding, the lowest number of a dtype may overflow to infinity.
            masks = (np.abs(x) >= MASK) & (np.isfinite(x) | (how.rounding is not None))
            if masks.any():
                self.masked.add(name)
                stages[name] = np.where(masks, np.sign(x), x)
        exact = only_valid(trace.exact, self.valid)
        return replace(trace, stages=stages, whole=trace.stages, exact=exact)

    def differentiate(self, cotangents: Mapping[str, np.ndarray]) -> None:
        """Repeat the float32 and float64 runs with derivatives.

        Later perturbed runs (`moved`) compute derivatives too.

        Args:
            cotangents: cotangents of the outputs, by output name.
        """
        self.cotangents = dict(cotangents)
        self.narrow = self.run(Run(cotangents=self.cotangents))
        if self.wide is not None:
            self.wide = self.run(Run(Precision.FLOAT64, cotangents=self.cotangents))

    def moved(
        self, rounding: Rounding, seed: int, forced: Mapping[str, np.ndarray] | None = None
    ) -> Trace:
        """Return a float64 run perturbed by rounding with random signs.

        Args:
            rounding: which values are perturbed.
            seed: seed of the signs.
            forced: values that replace stages; the run then computes no derivatives.
        """
        how = Run(Precision.FLOAT64, rounding, seed, shared=self.shared)
        side = self.side
        if rounding is Rounding.OPERATIONS and self.sums:
            # Each sum was rounded once, to the dtype of the parameter that stores it.
            random = np.random.default_rng((seed, len(self.sums)))
            stored = side.parameters()
            side = _with_exact(
                side,
                {
                    name: x * (1 + _roundoff(stored[name]) * random.choice((-1.0, 1.0), x.shape))
                    for name, x in self.sums.items()
                },
            )
        if forced is None:
            return self.run(replace(how, cotangents=self.cotangents), side)
        return self.run(replace(how, forced=forced), side)

    def _without_left_out(self, trace: Trace) -> Trace:
        """Return the results of a run without the outputs in `left_out`, and add the names of the
        removed outputs to `dropped`."""
        names = (*trace.outputs, *trace.exact, *trace.unread)
        dropped = {n: top for n in names if (top := covering(n, self.left_out)) is not None}
        if not dropped:
            return trace
        self.dropped |= dropped
        return replace(
            trace,
            stages={n: x for n, x in trace.stages.items() if n not in dropped},
            outputs=tuple(n for n in trace.outputs if n not in dropped),
            exact={n: x for n, x in trace.exact.items() if n not in dropped},
            unread={n: kind for n, kind in trace.unread.items() if n not in dropped},
        )

    def _unrepeatable(self) -> str | None:
        """Return the name of the first stage or output that differs in a second float32 run; None
        if both runs are equal."""
        again = self.run(Run())
        second = again.stages | again.exact
        for name, value in (self.narrow.stages | self.narrow.exact).items():
            if name not in second:
                return name
            if not np.array_equal(value, second[name], equal_nan=True):
                return name
        return None


def _roundoff(x: np.ndarray) -> float:
    """Return the unit roundoff of an array's dtype, or float32's if that is larger."""
    return max(UNIT_ROUNDOFF, float(ml_dtypes.finfo(x.dtype).eps) / 2)


def _with_exact(side: Side, values: Mapping[str, np.ndarray]) -> Side:
    """Return a copy of a side whose float64 runs use `values` for the parameters of these names;
    `side` itself if `values` is empty."""
    if not values:
        return side
    assert isinstance(side, TakesExactParameters)
    return side.with_exact(values)


def covering(name: str, names: Collection[str]) -> str | None:
    """Return the first of `names` that equals or contains the output `name`; None if there is none.

    For example, `output.cache` contains `output.cache[0]`.
    """
    return next((n for n in names if name == n or name.startswith((f"{n}.", f"{n}["))), None)
