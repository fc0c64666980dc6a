"""The suites of a night: functions that measure one suite each, and its result `SuiteRun`.

A suite that raises an error stores the error as its reason and counts as incomplete, never as
passed: docs/verdicts.md "Word and exit code".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.quantization.products import BACKENDS
from parity.deepseek_v3 import comparison as mla_moe
from parity.deepseek_v3 import contract as mla_moe_contract
from parity.device import device_kind
from parity.engine.measure.contract import Gate
from parity.engine.measure.deviation import Deviations
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.metrics import POOLED
from parity.engine.programs.explanation import Explanation
from parity.executors.executor import Log
from parity.faults.controls import CONTROLS, missed
from parity.megalodon import GIVEN
from parity.megalodon import contract as megalodon_contract
from parity.megalodon.cases import Case, by_name
from parity.megalodon.explanation import explain
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.megalodon.known_differences import measure as measure_known_differences
from parity.megalodon.noise_floors import extended
from parity.megalodon.suite import Reference, Suite, culprit
from parity.mesh import contract as mesh_contract
from parity.mesh import suite as meshes
from parity.mesh.tolerance_table import MeshEdge
from parity.port import compare as compare_port
from parity.tolerances import NoiseFloors
from reports.nightly import accounts
from reports.nightly.shards import (
    CONTROLS_PART,
    KNOWN_DIFFERENCES_PART,
    MESH_PART,
    MLA_MOE_PART,
    PORT_PART,
    PROBES_PART,
    PRODUCTS_PART,
    SUITE_OF,
)
from reports.store.manifest import SuiteResult
from reports.verdict.decide import LIVE_SUITES
from reports.verdict.levels import Calibrated
from stability import suite as stability
from stability.core.findings import Finding
from stability.moe.fixed_bugs import reference_scatter
from stability.products.accuracy import gates as product_gates
from stability.products.accuracy import measure as measure_products

AS_A_PORT = {"port/plain": "plain"}
"""Cases of Megalodon that are also compared as a user's port would be, by the title of the port.
One case is enough: pairing stages without names works in the same way for all."""
EXPLAINED = 12
"""Maximal number of failing cases that are explained, 3 to 50 seconds each: a bug that breaks more
cases also breaks the first ones."""


@dataclass
class SuiteRun:
    """One suite of a night: its measurements, and how much of its plan it executed."""

    name: str
    planned: int
    executed: int = 0
    reason: str = ""
    """Why the suite is incomplete; empty if nothing went wrong."""
    seconds: float = 0.0
    times: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds by case and edge, for comparisons that are timed one by one. For probes, the case is
    the name of the probe and the edge is empty."""
    contract: list[Gate] = field(default_factory=list)
    """Gates that must be measured, determined before the measurement."""
    measurements: list[Measurement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    tensors: Deviations = field(default_factory=Deviations)
    explanations: list[Explanation] = field(default_factory=list)
    responses: dict[Calibrated, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Relative L2 changes of each quantity, one for each rounding perturbation, by (case, metric),
    valid on all edges, or by (case, metric, edge): the `responses` of
    `reports.verdict.levels.spreads_of`."""
    shown: dict[str, Any] = field(default_factory=dict)
    """Plain data for sections of the page."""

    def result(self) -> SuiteResult:
        """Return the entry of this suite in a manifest."""
        status = "ran" if self.executed == self.planned and not self.reason else "failed"
        return SuiteResult(self.name, self.planned, self.executed, self.reason, status)

    def timed(self, rows: Iterator[Measurement]) -> Iterator[Measurement]:
        """Yield `rows`, and add the time that computing each row takes to `times`.

        The time of a program that several comparisons share counts for the first of them.
        """
        while True:
            start = time.perf_counter()
            row = next(rows, None)
            if row is None:
                return
            key = row.case, row.edge
            self.times[key] = self.times.get(key, 0.0) + time.perf_counter() - start
            yield row

    @property
    def passed(self) -> int:
        """Number of gates that hold."""
        return sum(row.verdict is Verdict.PASS for row in self.measurements)


@contextmanager
def _breakdowns_named(suite: SuiteRun, what: str = "") -> Iterator[None]:
    """Context that times its body and stores an error in it as the suite's `reason`: `what`, then
    the error.

    Bugs of this project, such as a KeyError, are caught too: other suites continue, and the night
    is INCOMPLETE.
    """
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        suite.reason = f"{what}{type(error).__name__}: {error}"[:400]
    finally:
        suite.seconds += time.perf_counter() - start


def run_parity(
    cases: Sequence[Case],
    reference: Reference,
    report: Log,
    step: Callable[[int], None] = lambda done: None,
) -> SuiteRun:
    """Compare oracle, JAX and reference twice for each case; an error in one does not stop others.

    The second run reuses compiled programs and takes a tenth of the first one's time. It shows
    which values of JAX and the reference repeat; the oracle runs only once.

    Args:
        cases: Cases to compare.
        reference: Reference to compare with.
        report: Receives a line for each case.
        step: Receives the number of finished cases before each case.
    """
    suite = SuiteRun("parity", planned=len(cases))
    suite.contract = [gate for case in cases for gate in megalodon_contract.gates(case, reference)]
    triangle = Suite(reference, device=device_kind(), on_failure=suite.tensors)
    replay = replace(triangle, on_failure=None)
    floors = extended(NoiseFloors.load(), [case for case in cases if case.name == GIVEN])
    for turn, case in enumerate(cases):
        step(turn)
        before, executed = suite.seconds, suite.executed
        with _breakdowns_named(suite, f"case {case.name}: "):
            rows = list(suite.timed(triangle.case(case, floors)))
            rows = mark_repeats(rows, list(suite.timed(replay.case(case, floors))))
            triangle.truths.clear()
            suite.measurements += rows
            suite.responses[case.name, "rel_l2"] = floors.responses(case.work)
            suite.executed += 1
        answer = _summary(rows) if suite.executed > executed else f"did not finish: {suite.reason}"
        report(f"  {case.name}: {answer} ({suite.seconds - before:.1f} s)")
        if suite.executed > executed and any(m.verdict is Verdict.FAIL for m in rows):
            _account(suite, case, report)
    return suite


def _account(suite: SuiteRun, case: Case, report: Log) -> None:
    """Add the explanation of a failing case to its suite, while a planted fault is still in place.

    Best effort: an error here is reported and never changes the verdict.
    """
    if len(suite.explanations) >= EXPLAINED:
        return
    start = time.perf_counter()
    try:
        explanation = explain(case, suite.explanations)
    except Exception as error:
        report(f"    not explained: {type(error).__name__}: {error}"[:400])
    else:
        suite.explanations.append(explanation)
        where = explanation.quantity or "nowhere between JAX and the oracle"
        report(f"    explained: it starts at {where} ({time.perf_counter() - start:.1f} s)")
    suite.seconds += time.perf_counter() - start


def _summary(rows: Sequence[Measurement]) -> str:
    worst = culprit(rows)
    if worst is None:
        return f"{sum(m.verdict is Verdict.PASS for m in rows)} gates hold"
    return f"{worst.verdict.upper()} at {worst.quantity} ({worst.edge}) {worst.note}".rstrip()


def run_known_differences(
    reference: Reference, report: Log, only: Collection[str] = ()
) -> SuiteRun:
    """Measure every known difference, or only those whose ids are in `only`."""
    planned = len(only or KNOWN_DIFFERENCES)
    suite = SuiteRun(SUITE_OF[KNOWN_DIFFERENCES_PART], planned)
    suite.contract = [
        gate
        for gate in megalodon_contract.known_difference_gates()
        if not only or gate.quantity in only
    ]
    with _breakdowns_named(suite):
        for row in suite.timed(iter(measure_known_differences(reference, device_kind()))):
            if not only or row.quantity in only:
                suite.measurements.append(row)
                suite.executed += 1
        again = list(suite.timed(iter(measure_known_differences(reference, device_kind()))))
        suite.measurements = mark_repeats(suite.measurements, again)
    same = f"{suite.passed} of {planned}"
    report(f"  known differences: {same} are unchanged ({suite.seconds:.1f} s)")
    return suite


def run_products(_: Reference, report: Log, only: Collection[str] = ()) -> SuiteRun:
    """Compare every GEMM backend, or only those named in `only`, with float64 products."""
    suite = SuiteRun(SUITE_OF[PRODUCTS_PART], planned=len(only or BACKENDS))
    suite.contract = [gate for gate in product_gates() if not only or gate.case in only]
    with _breakdowns_named(suite):
        rows = mark_repeats(
            *(list(suite.timed(iter(measure_products(device_kind())))) for _ in range(2))
        )
        suite.measurements = [row for row in rows if not only or row.case in only]
    suite.executed = len({row.case for row in suite.measurements})
    report(f"  products: {suite.passed} gates of GEMM backends hold ({suite.seconds:.1f} s)")
    return suite


def run_mla_moe(reference: Reference, report: Log, only: Collection[str] = ()) -> SuiteRun:
    """Compare the second architecture with Transformers, in all cases or those named in `only`.

    Transformers runs live if it can and if the night's `reference` is live; else its recorded
    results are used.
    """
    cases = [case for case in mla_moe.CASES if not only or case.title in only]
    suite = SuiteRun(SUITE_OF[MLA_MOE_PART], planned=len(cases))
    which = "auto" if reference.kind == "live" else "recorded"
    findings: dict[str, Finding] = {}
    with _breakdowns_named(suite):
        for case in cases:
            answer = mla_moe.answer(case, which)
            ours, device = mla_moe.side(case), device_kind()
            suite.contract += mla_moe_contract.gates(case, answer, ours)
            once, again = (mla_moe.compare(case, answer, ours, device=device) for _ in range(2))
            suite.measurements += mark_repeats(once.measurements, again.measurements)
            if (account := accounts.of_port(once.report)) is not None:
                suite.explanations.append(account)
            pool = mla_moe.pooled(case, answer.kind == "live", device)
            suite.responses[case.title, "rel_l2"] = pool.first
            suite.measurements += pool.measurements
            suite.responses[case.title, POOLED] = pool.responses
            suite.executed += 1
            finding = reference_scatter(answer.refusal, answer.versions["transformers"])
            findings[finding.message] = finding
    suite.findings = [finding for finding in findings.values() if finding.value]
    report(f"  mla-moe: {suite.passed} gates hold ({suite.seconds:.1f} s)")
    return suite


def run_port(_: Reference, report: Log, only: Collection[str] = ()) -> SuiteRun:
    """Compare Megalodon with megalodon-hf as a user's port, derivatives included.

    Stages are paired without names, and each tolerance comes from a noise floor measured in the
    same run. Needs the live reference. `only` selects titles of `AS_A_PORT`; empty selects all.
    """
    from parity.megalodon.port import port  # needs torch

    titles = [title for title in AS_A_PORT if not only or title in only]
    suite = SuiteRun(SUITE_OF[PORT_PART], planned=len(titles))
    with _breakdowns_named(suite):
        for title in titles:
            made = port(by_name(AS_A_PORT[title]), gradients=True)
            made = replace(made, name="port", case=AS_A_PORT[title], device=device_kind())
            once, again = (compare_port(made) for _ in range(2))
            # The second run must measure the gates of the first, so its contract is used.
            suite.contract += again.contract
            suite.measurements += mark_repeats(once.measurements, again.measurements)
            if (account := accounts.of_port(once)) is not None:
                suite.explanations.append(account)
            suite.executed += 1
    report(f"  as a user's port: {suite.passed} gates hold ({suite.seconds:.1f} s)")
    return suite


def run_mesh(_: Reference, report: Log, only: Collection[str] = ()) -> SuiteRun:
    """Compare training on one device with training on meshes of eight devices.

    `only` selects models, such as `mesh megalodon`, or cases (a model on one mesh); empty selects
    all.
    """
    suite = SuiteRun(SUITE_OF[MESH_PART], planned=meshes.planned(only))
    with _breakdowns_named(suite):
        suite.contract = list(mesh_contract.gates(only))
        suite.measurements, responses = meshes.measure(only)
        # Only for float32: float64 errors are so small that a level counts them with the least
        # value, a fraction of the tolerance (`DRIFT_SHARE`), on any machine.
        suite.responses.update(
            {(case, "rel_l2", str(MeshEdge.MESH32_ONE32)): of for case, of in responses.items()}
        )
    suite.executed = len({row.case for row in suite.measurements})
    report(f"  mesh: {suite.passed} gates hold on {suite.executed} meshes ({suite.seconds:.1f} s)")
    return suite


MEASURED: dict[str, Callable[[Reference, Log, Collection[str]], SuiteRun]] = {
    KNOWN_DIFFERENCES_PART: run_known_differences,
    PRODUCTS_PART: run_products,
    MLA_MOE_PART: run_mla_moe,
    PORT_PART: run_port,
    MESH_PART: run_mesh,
}
"""Functions that run the suites other than cases, probes and controls, by part of a plan."""
LIVE = frozenset(part for part in MEASURED if SUITE_OF[part] in LIVE_SUITES)
"""Parts that need the live reference; a recorded night has none of them."""


def elsewhere() -> dict[str, set[str]]:
    """Return the names that `--case` accepts besides cases of suite `parity`, by part of the plan.

    They are cases of other suites, models trained on meshes, known differences and GEMM backends.
    """
    return {
        KNOWN_DIFFERENCES_PART: {difference.id for difference in KNOWN_DIFFERENCES},
        PRODUCTS_PART: set(BACKENDS),
        MLA_MOE_PART: {case.title for case in mla_moe.CASES},
        PORT_PART: set(AS_A_PORT),
        MESH_PART: {*meshes.SUBJECTS, *meshes.CASES},
    }


def run_stability(
    checkpoint: stability.Checkpoint, model: MegalodonForCausalLM, report: Log
) -> SuiteRun:
    """Run the probes on a checkpoint; an error in one probe does not stop the others."""
    suite = SuiteRun(SUITE_OF[PROBES_PART], planned=len(stability.PROBES))
    report(f"probing {checkpoint.folder.name}: {', '.join(stability.PROBES)}")
    start = time.perf_counter()
    probed = stability.run(checkpoint, model)
    suite.seconds = time.perf_counter() - start
    suite.findings, suite.shown, suite.executed = probed.findings, probed.shown, probed.executed
    suite.times = {(name, ""): seconds for name, seconds in probed.seconds.items()}
    suite.reason = "; ".join(probed.failures)[:400]
    for failure in probed.failures:
        report(f"  did not finish: {failure}")
    return suite


def run_controls(reference: Reference, report: Log) -> SuiteRun:
    """Plant the bugs that the comparison must find; a missed one leaves the suite incomplete."""
    suite = SuiteRun(SUITE_OF[CONTROLS_PART], planned=len(CONTROLS))
    with _breakdowns_named(suite):
        texts = [t for _, t in missed(Suite(reference, device=device_kind()), NoiseFloors.load())]
        suite.executed = sum(not text for text in texts)
        suite.reason = "; ".join(text for text in texts if text)[:400]
    report(
        f"  controls: {suite.executed} of {suite.planned} planted bugs found "
        f"({suite.seconds:.1f} s) {suite.reason}".rstrip()
    )
    return suite


def mark_repeats(rows: Sequence[Measurement], again: Sequence[Measurement]) -> list[Measurement]:
    """Return `rows` with `deterministic` set: whether a repetition of the work gave the same value.

    Args:
        rows: Measurements.
        again: Measurements of the repetition; a row that they lack counts as not repeated.
    """
    values = {m.key: m.value for m in again}

    def repeats(m: Measurement) -> bool:
        second = values.get(m.key)
        if second is None:
            return False
        return second == m.value or (math.isnan(second) and math.isnan(m.value))

    return [replace(m, deterministic=repeats(m)) for m in rows]
