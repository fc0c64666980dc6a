"""The runs of one side of a port that a comparison needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from parity.sides.projection import Valid, only_valid
from parity.sides.side import Precision, Rounding, Run, Side, SideError, Trace

MASK = 1e30
"""Size from which on a number stands for none: what is added to scores that are not to count."""


class SideRuns:
    """One side: as it is, in float64 where it can, and moved by rounding.

    Args:
        side: what runs.
        valid: positions that mean something; see `Valid`.

    Raises:
        SideError: the side refuses its inputs.
    """

    def __init__(self, side: Side, valid: Valid) -> None:
        self.side, self.valid = side, valid
        self.cotangents: dict[str, np.ndarray] | None = None
        self.shared: frozenset[str] = frozenset()
        self.notices: tuple[str, ...] = ()
        self.masked: set[str] = set()
        """Stages that have masks among their numbers."""
        self.narrow = self.run(Run())
        self.unrepeatable = self._unrepeatable()
        self.wide: Trace | None = None
        try:
            self.wide = self.run(Run(Precision.FLOAT64))
            self.notices = tuple(f"{side.kind}: {notice}" for notice in self.wide.notices)
        except SideError as error:
            self.notices = (f"{side.kind} has no float64 here: {error}",)

    @property
    def best(self) -> Trace:
        """The most precise run there is."""
        return self.narrow if self.wide is None else self.wide

    def run(self, how: Run) -> Trace:
        """Return a run, zero where positions are not valid and 1 or -1 where there is a mask.

        The lowest number of a dtype is another one in float64, and next to it no other counts.
        """
        trace = self.side.run(how)
        stages = only_valid(trace.stages, self.valid)
        for name, x in stages.items():
            # Moved by rounding, the lowest number there is may become an infinity.
            masks = (np.abs(x) >= MASK) & (np.isfinite(x) | (how.rounding is not None))
            if masks.any():
                self.masked.add(name)
                stages[name] = np.where(masks, np.sign(x), x)
        return replace(trace, stages=stages, whole=trace.stages)

    def differentiate(self, cotangents: Mapping[str, np.ndarray]) -> None:
        """Run again with derivatives, which all runs have from here on."""
        self.cotangents = dict(cotangents)
        self.narrow = self.run(Run(cotangents=self.cotangents))
        if self.wide is not None:
            self.wide = self.run(Run(Precision.FLOAT64, cotangents=self.cotangents))

    def moved(
        self, rounding: Rounding, seed: int, forced: Mapping[str, np.ndarray] | None = None
    ) -> Trace:
        """Return a float64 run moved by the signs of a seed; forced, it has no derivatives."""
        how = Run(Precision.FLOAT64, rounding, seed, shared=self.shared)
        if forced is None:
            return self.run(replace(how, cotangents=self.cotangents))
        return self.run(replace(how, forced=forced))

    def _unrepeatable(self) -> str | None:
        """Return the first stage that a second run computes otherwise, bit by bit."""
        again = self.run(Run())
        for name, value in self.narrow.stages.items():
            if name not in again.stages:
                return name
            if not np.array_equal(value, again.stages[name], equal_nan=True):
                return name
        return None
