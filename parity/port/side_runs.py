"""The runs of one side of a port that a comparison needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from parity.engine.exits import exits_named
from parity.sides.projection import Valid, only_valid
from parity.sides.side import Precision, Rounding, Run, Side, SideError, Trace

MASK = 1e30
"""Size from which on a number stands for none: what is added to scores that are not to count."""


class SideRuns:
    """One side: as it is, in float64 where it can, and moved by rounding.

    Args:
        side: what runs.
        valid: positions that mean something; see `Valid`.
        whose: `original` or `port`, for messages.
        masked_outputs: whether results hold masks on purpose, as intermediates may.
        left_out: results that are not compared: these, and what is below them.

    Raises:
        SideError: the side refuses its inputs.
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
    ) -> None:
        self.side, self.valid = side, valid
        self.name = f"the {whose} ({side.kind})"
        self.masked_outputs, self.left_out = masked_outputs, left_out
        self.cotangents: dict[str, np.ndarray] | None = None
        self.shared: frozenset[str] = frozenset()
        self.notices: tuple[str, ...] = ()
        self.masked: set[str] = set()
        """Stages that have masks among their numbers."""
        self.dropped: dict[str, str] = {}
        """Results that `left_out` names, each with the name there that covers it."""
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
        with exits_named(self.name):
            trace = self._without_left_out(self.side.run(how))
        stages = only_valid(trace.stages, self.valid)
        for name, x in stages.items():
            if name in trace.outputs and not self.masked_outputs:
                # A huge result is a result unless the case says that it is a mask.
                continue
            # Moved by rounding, the lowest number there is may become an infinity.
            masks = (np.abs(x) >= MASK) & (np.isfinite(x) | (how.rounding is not None))
            if masks.any():
                self.masked.add(name)
                stages[name] = np.where(masks, np.sign(x), x)
        exact = only_valid(trace.exact, self.valid)
        return replace(trace, stages=stages, whole=trace.stages, exact=exact)

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

    def _without_left_out(self, trace: Trace) -> Trace:
        """Return a run without the results that are not to be compared."""
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
        """Return the first stage that a second run computes otherwise, bit by bit."""
        again = self.run(Run())
        second = again.stages | again.exact
        for name, value in (self.narrow.stages | self.narrow.exact).items():
            if name not in second:
                return name
            if not np.array_equal(value, second[name], equal_nan=True):
                return name
        return None


def covering(name: str, names: Collection[str]) -> str | None:
    """Return which of `names` a result is or lies below: `output.cache[0]` is in `output.cache`."""
    return next((n for n in names if name == n or name.startswith((f"{n}.", f"{n}["))), None)
