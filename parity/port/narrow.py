"""Errors of both sides in bfloat16 against float64, and whether rounding explains the port's error.

Source: docs/your-own-port.md "In bfloat16".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Kind, Measurement
from parity.engine.measure.metrics import relative_l2, without_shared_infinities
from parity.port.correspondence import Correspondence
from parity.port.ledger import NO_OUTPUT
from parity.port.rounding_floors import norms_of, responses_of, stage_bound
from parity.port.side_runs import SideRuns
from parity.sides.captured import CapturedSide
from parity.sides.side import Precision, Rounding, Run, SideError


@dataclass(frozen=True, slots=True)
class NarrowStage:
    """Relative L2 errors of the port and of the original at one stage in bfloat16; NaN if unknown.

    Each side's error is measured against the same side's float64 run, or the original's against its
    float32 run if the original has no float64 run.
    """

    name: str
    port: float
    original: float
    floor: float
    """Noise floor: relative L2 error explained by rounding the port's operations to bfloat16."""

    @property
    def ratio(self) -> float:
        """The port's error over the original's; NaN for 0 over 0."""
        if self.original == 0.0:
            return math.nan if self.port == 0.0 else math.inf
        return self.port / self.original


def compare_narrow(
    comparison: Comparison, together_: Correspondence, original: SideRuns, port: SideRuns
) -> tuple[tuple[NarrowStage, ...], tuple[Measurement, ...], tuple[str, ...]]:
    """Return the errors of the stages, measurements (gates and informational ones), and notices.

    The notices say which side could not run or be perturbed, and why. There are no stages if the
    port has no float64 run or did not run in bfloat16. If only the original ran in bfloat16, and
    the port is not a capture, one measurement reports the port's first output as not compared.

    Args:
        comparison: settings of the bfloat16 edge; creates the measurements.
        together_: the pairs of stages and parameters.
        original: runs of the original.
        port: runs of the port.
    """
    if port.wide is None:
        return (), (), ("bfloat16 is not compared: the port has no float64 to compare it with",)
    truth = port.wide.stages
    notices: tuple[str, ...] = ()
    theirs: Mapping[str, float] | None = None
    try:
        narrow = together_.stages(original.run(Run(Precision.BFLOAT16)).stages)
        exact = together_.stages(original.best.stages)
        theirs = {name: relative_l2(_wide(narrow[name]), exact[name]) for name in narrow}
    except SideError as error:
        notices = (f"the original does not run in bfloat16: {error}",)
    try:
        ours = port.run(Run(Precision.BFLOAT16)).stages
    except SideError as error:
        # A capture without bfloat16 runs shows nothing about the port.
        if theirs is None or isinstance(port.side, CapturedSide):
            return (), (), (f"bfloat16 is not compared: {error}",)
        why = (
            f"the original runs in bfloat16 and the port does not: {error}. If the port is not "
            "meant to run in bfloat16, set Port(bfloat16=False)"
        )
        # A case may compare whole numbers and bools only.
        first, *_ = (*port.best.outputs, *port.best.exact, NO_OUTPUT)
        return (), (comparison.unmeasured(first, why),), ()
    theirs = theirs or {}
    floors, why = _floors(port, truth)
    notices += why

    def apart(name: str, value: np.ndarray) -> float:
        pair = _wide(ours[name]), value
        masked = name not in port.best.outputs or port.masked_outputs
        return relative_l2(*(without_shared_infinities(*pair) if masked else pair))

    stages = tuple(
        NarrowStage(
            name,
            apart(name, value),
            theirs.get(name, math.nan),
            floors.get(name, math.nan),
        )
        for name, value in truth.items()
        if name in ours
    )
    rows = []
    for stage in stages:
        # NaN fails, with or without a noise floor of its stage. If no floor is known at all, the
        # port could not be perturbed, which a notice reports; if only this stage's floor is
        # missing, the gate reports the stage as not measured.
        if floors or math.isnan(stage.port):
            bound = stage_bound(comparison.edge, Kind.BLOCK, stage.floor)
            rows.append(comparison.gate(stage.name, "rel_l2", stage.port, bound))
        if not math.isnan(stage.ratio):
            rows.append(comparison.fact(stage.name, "error_over_original", stage.ratio))
    return stages, tuple(rows), notices


def _floors(
    port: SideRuns, truth: Mapping[str, np.ndarray]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the noise floor of each stage of the port in bfloat16, and notices.

    The floor includes the rounding of parameters and inputs to bfloat16. It is the change of the
    port's bfloat16 program, not the distance to its float64 program: a port that computes something
    else in bfloat16, by a branch on the dtype, would have a floor as large as its error. If the
    floors cannot be measured, the first result is empty, and one notice says why.
    """

    def run(how: Run) -> dict[str, np.ndarray]:
        stages = port.run(how).stages
        return {name: stages.get(name, np.full_like(x, math.nan)) for name, x in truth.items()}

    try:
        still = run(Run(Precision.BFLOAT16, still=True))
        moved = partial(Run, Precision.BFLOAT16, Rounding.OPERATIONS)
        responses = responses_of(still, lambda seed: run(moved(seed)))
    except SideError as error:
        return {}, (f"the port's errors in bfloat16 have no tolerance: {error}",)
    norms = norms_of(truth)
    return {name: x / (norms[name] or 1.0) for name, x in responses.items()}, ()


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)
