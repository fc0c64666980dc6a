"""The detection table: whether every planted bug is found, and at its stage.

A fault is detected if its witness (the case that shows it) exceeds a committed tolerance against
the oracle. It is localised if the first wrong stage is the one that the fault declares. Programs
run operation by operation: a fault changes the traced program, so a compiled program could not be
reused.
Source: docs/parity.md "Faults".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from megalodon_jax.checks import traced_checks
from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.executors.executor import Executor
from parity.executors.item import Item
from parity.executors.sweep import collect
from parity.faults import FAULTS, Fault
from parity.faults import by_name as fault_by_name
from parity.megalodon.cases import Case, by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.noise_floors import truth
from parity.megalodon.runner import JaxSubject
from parity.megalodon.suite import culprit
from parity.megalodon.tolerance_table import NoiseFloors

EDGES = (MegalodonEdge.JAX64_ORACLE, MegalodonEdge.JAX32_ORACLE)
"""Pairs of sides on which faults are looked for, the one with the tightest tolerance first."""
REFUSED = "load"
"""Value of `Fault.stage` for a fault that changes weights so that the strict loader must reject
them."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Result of looking for one fault in one case."""

    fault: Fault
    case: str
    edge: str = ""
    """First edge (pair of sides) on which a gate fails; empty if none does."""
    found: str = ""
    """First wrong stage on that edge; empty if nothing fails."""
    signal: float = 0.0
    """Error divided by tolerance at `found`; infinite if the error is not finite, there is no
    tolerance, or the sides cannot be compared."""
    note: str = ""
    """Note of the failing measurement, or the loader's error message."""

    @property
    def detected(self) -> bool:
        """True if any stage was reported as wrong."""
        return bool(self.found)

    @property
    def localised(self) -> bool:
        """True if the stage reported first is the one that the fault declares."""
        return self.found == self.fault.stage


@dataclass
class DetectionTable:
    """Results for all faults, and the errors of the model without a fault, as a control."""

    detections: list[Detection]
    used: dict[tuple[MegalodonEdge, Kind], float]
    """Largest ratio of an error to its tolerance in all witnesses without a fault, by edge and kind
    of quantity."""


@dataclass
class Laboratory:
    """Plants faults and compares cases with the oracle; caches what does not depend on a fault."""

    floors: NoiseFloors = field(default_factory=NoiseFloors.load)
    edges: tuple[MegalodonEdge, ...] = EDGES
    """Edges on which faults are looked for, in order."""
    compiled: bool = False
    """Compile whole programs, which is faster for a single fault; False: run each operation."""
    used: dict[tuple[MegalodonEdge, Kind], float] = field(default_factory=dict)
    """Largest ratio of an error to its tolerance in the cases that were run so far without a fault,
    by edge and kind of quantity."""
    _exact: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    _sound: set[tuple[str, MegalodonEdge]] = field(default_factory=set)

    def detect(self, fault: Fault, case: Case, edges: Sequence[MegalodonEdge] = ()) -> Detection:
        """Plant a fault, run a case, and return the result of the first edge that fails.

        If no edge fails, `edge` and `found` of the result are empty.

        Args:
            fault: the fault.
            case: the case to run.
            edges: edges to look at, in order; empty: `self.edges`.

        Raises:
            RuntimeError: the case fails without a fault too, so it cannot show one.
        """
        for edge in edges or self.edges:
            self._control(case, edge)
            try:
                found = culprit(self.rows(fault, case, edge))
            except ValueError as error:
                # A ValueError is a result only if the loader must reject the fault's weights; any
                # other is a mistake of the patch.
                if fault.stage != REFUSED:
                    raise
                return Detection(
                    fault, case.name, edge, REFUSED, math.inf, str(error).split("\n")[0]
                )
            if found is not None:
                return Detection(fault, case.name, edge, found.quantity, signal(found), found.note)
        return Detection(fault, case.name)

    def rows(self, fault: Fault | None, case: Case, edge: MegalodonEdge) -> list[Measurement]:
        """Return the measurements of a case on one edge; `fault` is planted unless it is None."""
        # Training repeats one step many times, so compiling it pays off.
        compiled = self.compiled or case.steps > 0
        planted = fault.planted(compiled=compiled) if fault else nullcontext()
        with planted, jax.disable_jit(not compiled):
            actual = JaxSubject(edge.dtype).run(case)
        if case.hash not in self._exact:
            self._exact[case.hash] = truth(case)
        comparison = Comparison(case.work, edge, self.floors, edge.dtype)
        return comparison.run(actual, self._exact[case.hash])

    def _control(self, case: Case, edge: MegalodonEdge) -> None:
        if (case.hash, edge) in self._sound:
            return
        rows = self.rows(None, case, edge)
        found = culprit(rows)
        if found is not None:
            raise RuntimeError(
                f"case {case.name} fails without a fault: {edge} at {found.quantity}, "
                f"{signal(found):.2g} times its tolerance. Repair the model first."
            )
        for row in rows:
            if row.verdict is not Verdict.INFO:
                at = edge, row.kind
                self.used[at] = max(self.used.get(at, 0.0), row.fraction)
        self._sound.add((case.hash, edge))


def signal(found: Measurement) -> float:
    """Return error divided by tolerance.

    The result is infinite if the error is not finite, there is no tolerance, or the sides cannot be
    compared.
    """
    if found.verdict is Verdict.NOT_COMPARABLE or not math.isfinite(found.value):
        return math.inf
    return math.inf if math.isnan(found.tolerance) else found.fraction


def run(
    faults: Sequence[Fault] = FAULTS,
    report: Callable[[str], None] = lambda line: None,
    executor: Executor | None = None,
    *,
    each: bool = False,
) -> DetectionTable:
    """Look for each fault in its witness case; return the results in the order of the faults.

    Args:
        faults: the faults; with an executor they must be those of the catalogue.
        report: called with lines of progress, if an executor runs.
        executor: runs batches of faults in parallel. None, or if there is only one batch: they run
            in this process.
        each: look for every fault on every edge and return one result per edge. False: stop at the
            first edge that fails.

    Raises:
        RuntimeError: a witness fails without a fault, or a worker failed.
    """
    batches = _batches(faults)
    if executor is None or len(batches) == 1:
        found = [_inline(batch, each) for batch in batches]
    else:
        answers = collect(items_of(batches, each), executor, report=report)
        found = [_table(answer.value) for answer in answers]
    order = {fault.name: i for i, fault in enumerate(faults)}
    used: dict[tuple[MegalodonEdge, Kind], float] = {}
    for part in found:
        for at, share in part.used.items():
            used[at] = max(used.get(at, 0.0), share)
    rows = [row for part in found for row in part.detections]
    return DetectionTable(sorted(rows, key=lambda row: order[row.fault.name]), used)


def _batches(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Group faults by the shape of their witness case: equal shapes share compiled operations.

    The largest group comes first.
    """
    groups: dict[tuple[int, ...], list[Fault]] = {}
    for fault in faults:
        case = by_name(fault.witness)
        groups.setdefault((case.batch_size, case.length, case.steps), []).append(fault)
    return sorted(groups.values(), key=len, reverse=True)


def _inline(batch: list[Fault], each: bool) -> DetectionTable:
    laboratory = Laboratory()
    asked = [(edge,) for edge in EDGES] if each else [()]
    detections = [
        laboratory.detect(fault, by_name(fault.witness), edges)
        for fault in batch
        for edges in asked
    ]
    return DetectionTable(detections, laboratory.used)


def items_of(batches: Sequence[Sequence[Fault]], each: bool) -> list[Item]:
    """Return one work item per batch of faults, to be run by workers.

    Items contain the names of faults, because a fault's functions are no JSON.
    """
    return [
        Item(
            f"{batch[0].witness} and cases of its shape, {len(batch)} faults",
            f"{__name__}:run_batch",
            {"names": [fault.name for fault in batch], "each": each},
        )
        for batch in batches
    ]


def run_batch(names: Sequence[str], each: bool) -> dict[str, Any]:
    """Look for the named faults; return a `DetectionTable` as JSON data; run by workers."""
    with traced_checks(False):
        done = _inline([fault_by_name(name) for name in names], each)
    return {
        "detections": [
            (k.fault.name, k.case, k.edge, k.found, k.signal, k.note) for k in done.detections
        ],
        "used": [(str(edge), str(kind), share) for (edge, kind), share in done.used.items()],
    }


def _table(value: Mapping[str, Any]) -> DetectionTable:
    """Return the `DetectionTable` that `run_batch` returned as JSON data."""
    detections = [Detection(fault_by_name(name), *rest) for name, *rest in value["detections"]]
    used = {(MegalodonEdge(edge), Kind(kind)): share for edge, kind, share in value["used"]}
    return DetectionTable(detections, used)


def missed(detections: Iterable[Detection]) -> list[Detection]:
    """Return all results of the faults that are localised in none of their results.

    Such a fault was not detected, or only at another stage.
    """
    detections = list(detections)
    localised = {row.fault.name for row in detections if row.localised}
    return [row for row in detections if row.fault.name not in localised]


def as_dict(detection: Detection) -> dict[str, Any]:
    """Return a result as a JSON object; an infinite signal becomes None."""
    return {
        "fault": detection.fault.name,
        "family": detection.fault.family.value,
        "how": detection.fault.how,
        "stage": detection.fault.stage,
        "case": detection.case,
        "edge": detection.edge,
        "detected": detection.detected,
        "found": detection.found,
        "localised": detection.localised,
        "signal": detection.signal if math.isfinite(detection.signal) else None,
        "note": detection.note,
    }
