"""The detection table: every planted fault is run, and must be found where it is.

A fault counts as detected when its witness case breaks a shipped tolerance on an edge against the
oracle, and as localised when the culprit is the stage it declares. Programs run operation by
operation: a fault changes what is traced, so compiled ones could not be kept from one fault to
the next. Source: docs/parity.md "Faults".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np

from megalodon_jax.checks import traced_checks
from parity.engine.compare import Comparison
from parity.engine.measurement import Kind, Measurement, Verdict
from parity.faults import FAULTS, Fault
from parity.faults import by_name as fault_by_name
from parity.megalodon.cases import Case, by_name
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.noise_floors import truth
from parity.megalodon.runner import JaxSubject
from parity.megalodon.suite import culprit
from parity.megalodon.tolerance_table import NoiseFloors

EDGES = (MegalodonEdge.JAX64_ORACLE, MegalodonEdge.JAX32_ORACLE)
"""The edges that need no reference, sharpest first."""
REFUSED = "load"
"""The stage of a fault that the strict loader refuses."""


@dataclass(frozen=True, slots=True)
class Detection:
    """What became of one fault on one case."""

    fault: Fault
    case: str
    edge: str = ""
    """The first edge that sees it; empty where none does."""
    found: str = ""
    """The stage the culprit names; empty where nothing is wrong."""
    signal: float = 0.0
    """Error over tolerance at the culprit; infinite where the two cannot be compared."""
    note: str = ""

    @property
    def detected(self) -> bool:
        """Whether anything was reported."""
        return bool(self.found)

    @property
    def localised(self) -> bool:
        """Whether what was reported is where the fault is."""
        return self.found == self.fault.stage


@dataclass
class DetectionTable:
    """What became of every fault, and how much of its tolerances a healthy model used."""

    detections: list[Detection]
    used: dict[tuple[MegalodonEdge, Kind], float]
    """Largest share of a tolerance, by edge and kind, in the witnesses without a fault."""


@dataclass
class Laboratory:
    """Runs cases against the oracle; what does not depend on the fault is done once."""

    floors: NoiseFloors = field(default_factory=NoiseFloors.load)
    edges: tuple[MegalodonEdge, ...] = EDGES
    compiled: bool = False
    """Compile whole programs: for one fault on its own that is less work."""
    used: dict[tuple[MegalodonEdge, Kind], float] = field(default_factory=dict)
    """Largest share of a tolerance so far, by edge and kind, without a fault."""
    _exact: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    _sound: set[tuple[str, MegalodonEdge]] = field(default_factory=set)

    def detect(self, fault: Fault, case: Case, edges: Sequence[MegalodonEdge] = ()) -> Detection:
        """Plant a fault and return what the first edge that objects says.

        Raises:
            RuntimeError: the case fails without a fault: nothing could be concluded from it.
        """
        for edge in edges or self.edges:
            self._control(case, edge)
            try:
                found = culprit(self.rows(fault, case, edge))
            except ValueError as error:
                # Only the loader may refuse; elsewhere an error is a mistake of the patch.
                if fault.stage != REFUSED:
                    raise
                return Detection(
                    fault, case.name, edge, REFUSED, math.inf, str(error).split("\n")[0]
                )
            if found is not None:
                return Detection(fault, case.name, edge, found.quantity, signal(found), found.note)
        return Detection(fault, case.name)

    def rows(self, fault: Fault | None, case: Case, edge: MegalodonEdge) -> list[Measurement]:
        """Return what the suite measures on one edge with a fault planted, or with none."""
        # The same step many times over is worth compiling.
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
                f"{signal(found):.2g} times its tolerance. Mend that first."
            )
        for row in rows:
            if row.verdict is not Verdict.INFO:
                at = edge, row.kind
                self.used[at] = max(self.used.get(at, 0.0), row.fraction)
        self._sound.add((case.hash, edge))


def signal(found: Measurement) -> float:
    """Return error over tolerance; infinite for what is no number or has no tolerance."""
    if found.verdict is Verdict.NOT_COMPARABLE or not math.isfinite(found.value):
        return math.inf
    return math.inf if math.isnan(found.tolerance) else found.fraction


def run(
    faults: Sequence[Fault] = FAULTS,
    report: Callable[[str], None] = lambda line: None,
    workers: int = 1,
    *,
    each: bool = False,
) -> DetectionTable:
    """Return the detection of each fault on its witness, in the order of the faults.

    Args:
        faults: which; with more than one worker they are found by name in the catalogue.
        report: called with a line of progress.
        workers: processes to share the work.
        each: ask every edge about every fault, a row for each; not only those before the first
            that objects.

    Raises:
        RuntimeError: a witness fails without a fault.
    """
    batches = _batches(faults)
    if workers == 1 or len(batches) == 1:
        found = [_inline(batch, each) for batch in batches]
    else:
        found = list(_in_processes(batches, report, workers, each))
    order = {fault.name: i for i, fault in enumerate(faults)}
    used: dict[tuple[MegalodonEdge, Kind], float] = {}
    for part in found:
        for at, share in part.used.items():
            used[at] = max(used.get(at, 0.0), share)
    rows = [row for part in found for row in part.detections]
    return DetectionTable(sorted(rows, key=lambda row: order[row.fault.name]), used)


def _batches(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Group faults by the shape of their witness, since equal shapes share compiled operations."""
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


def _in_processes(
    batches: list[list[Fault]], report: Callable[[str], None], workers: int, each: bool
) -> Iterator[DetectionTable]:
    # A forked process would inherit the locks of JAX's threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        work = [pool.submit(_batch, [fault.name for fault in batch], each) for batch in batches]
        try:
            for done in as_completed(work):
                rows, used = done.result()
                detections = [Detection(fault_by_name(name), *rest) for name, *rest in rows]
                names = {detection.fault.name for detection in detections}
                report(f"  {detections[0].case} and cases of its shape: {len(names)} faults")
                yield DetectionTable(detections, used)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _batch(names: list[str], each: bool) -> tuple[list[tuple[Any, ...]], dict]:
    """Run a batch in a process of its own; a fault holds functions, so only its name travels."""
    with traced_checks(False):
        done = _inline([fault_by_name(name) for name in names], each)
    rows = [(k.fault.name, k.case, k.edge, k.found, k.signal, k.note) for k in done.detections]
    return rows, done.used


def missed(detections: Iterable[Detection]) -> list[Detection]:
    """Return the faults that were missed: undetected, or reported at another stage."""
    detections = list(detections)
    localised = {row.fault.name for row in detections if row.localised}
    return [row for row in detections if row.fault.name not in localised]


def as_dict(detection: Detection) -> dict[str, Any]:
    """Return a detection as JSON values; an infinite signal is None."""
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
