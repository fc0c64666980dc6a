"""The runs of one side of a port comparison."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from parity.engine.programs.exits import exits_named
from parity.sides.projection import Valid, only_valid
from parity.sides.side import Precision, Rounding, Run, Side, SideError, Trace

MASK = 1e30
"""Magnitude from which a number is a mask, such as one added to scores to exclude them."""


class SideRuns:
    """Runs of one side: unmodified, in float64 if possible, and perturbed by rounding.

    Args:
        side: the side to run.
        valid: meaningful positions; see `Valid`.
        whose: `original` or `port`, for messages.
        masked_outputs: whether outputs contain masks on purpose, as intermediates may.
        left_out: outputs that are not compared, including everything below them.

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
    ) -> None:
        self.side, self.valid = side, valid
        self.name = f"the {whose} ({side.kind})"
        self.masked_outputs, self.left_out = masked_outputs, left_out
        self.cotangents: dict[str, np.ndarray] | None = None
        self.shared: frozenset[str] = frozenset()
        self.notices: tuple[str, ...] = ()
        self.masked: set[str] = set()
        """Stages that contain masks."""
        self.dropped: dict[str, str] = {}
        """Outputs covered by `left_out`, each with the entry that covers it."""
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
        """The most precise run available."""
        return self.narrow if self.wide is None else self.wide

    def run(self, how: Run) -> Trace:
        """Run the side; set invalid positions to zero and masks to 1 or -1.

        A mask such as the lowest number of a dtype differs between dtypes, and would dominate every
        norm.
        """
        with exits_named(self.name):
            trace = self._without_left_out(self.side.run(how))
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
        """Run again with derivatives, which all later runs have too."""
        self.cotangents = dict(cotangents)
        self.narrow = self.run(Run(cotangents=self.cotangents))
        if self.wide is not None:
            self.wide = self.run(Run(Precision.FLOAT64, cotangents=self.cotangents))

    def moved(
        self, rounding: Rounding, seed: int, forced: Mapping[str, np.ndarray] | None = None
    ) -> Trace:
        """Return a float64 run perturbed by the signs of a seed; without derivatives if forced."""
        how = Run(Precision.FLOAT64, rounding, seed, shared=self.shared)
        if forced is None:
            return self.run(replace(how, cotangents=self.cotangents))
        return self.run(replace(how, forced=forced))

    def _without_left_out(self, trace: Trace) -> Trace:
        """Return a run without the outputs that are not to be compared."""
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
        """Return the first stage whose bits differ in a second run; None if there is none."""
        again = self.run(Run())
        second = again.stages | again.exact
        for name, value in (self.narrow.stages | self.narrow.exact).items():
            if name not in second:
                return name
            if not np.array_equal(value, second[name], equal_nan=True):
                return name
        return None


def covering(name: str, names: Collection[str]) -> str | None:
    """Return the entry of `names` that is or contains an output: `output.cache[0]` is in
    `output.cache`."""
    return next((n for n in names if name == n or name.startswith((f"{n}.", f"{n}["))), None)
