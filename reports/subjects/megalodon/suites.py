"""Functions that measure the suites of Megalodon: cases, known differences, products, probes and
planted bugs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.quantization.products import BACKENDS
from parity.device import device_kind
from parity.engine.measure.measurement import Measurement, Verdict
from parity.executors.executor import Log
from parity.faults.controls import CONTROLS, missed
from parity.megalodon import DIFFERENCES, GIVEN, SUITE
from parity.megalodon import contract as megalodon_contract
from parity.megalodon.cases import Case
from parity.megalodon.explanation import explain
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.megalodon.known_differences import measure as measure_known_differences
from parity.megalodon.noise_floors import extended
from parity.megalodon.suite import Reference, Suite, culprit
from parity.tolerances import NoiseFloors
from reports.subjects.megalodon.record import PLANTED, PROBES, PRODUCTS
from reports.suite_run import SuiteRun, breakdowns_named, mark_repeats
from stability import suite as stability
from stability.products.accuracy import gates as product_gates
from stability.products.accuracy import measure as measure_products

EXPLAINED = 12
"""Maximal number of failing cases that are explained, 3 to 50 seconds each: a bug that breaks more
cases also breaks the first ones."""


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
    suite = SuiteRun(SUITE, planned=len(cases))
    suite.contract = [gate for case in cases for gate in megalodon_contract.gates(case, reference)]
    triangle = Suite(reference, device=device_kind(), on_failure=suite.tensors)
    replay = replace(triangle, on_failure=None)
    floors = extended(NoiseFloors.load(), [case for case in cases if case.name == GIVEN])
    for turn, case in enumerate(cases):
        step(turn)
        before, executed = suite.seconds, suite.executed
        with breakdowns_named(suite, f"case {case.name}: "):
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
    suite = SuiteRun(DIFFERENCES, planned)
    suite.contract = [
        gate
        for gate in megalodon_contract.known_difference_gates()
        if not only or gate.quantity in only
    ]
    with breakdowns_named(suite):
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
    suite = SuiteRun(PRODUCTS.suite, planned=len(only or BACKENDS))
    suite.contract = [gate for gate in product_gates() if not only or gate.case in only]
    with breakdowns_named(suite):
        rows = mark_repeats(
            *(list(suite.timed(iter(measure_products(device_kind())))) for _ in range(2))
        )
        suite.measurements = [row for row in rows if not only or row.case in only]
    suite.executed = len({row.case for row in suite.measurements})
    report(f"  products: {suite.passed} gates of GEMM backends hold ({suite.seconds:.1f} s)")
    return suite


def run_stability(
    checkpoint: stability.Checkpoint, model: MegalodonForCausalLM, report: Log
) -> SuiteRun:
    """Run the probes on a checkpoint; an error in one probe does not stop the others."""
    suite = SuiteRun(PROBES.suite, planned=len(stability.PROBES))
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
    suite = SuiteRun(PLANTED.suite, planned=len(CONTROLS))
    with breakdowns_named(suite):
        texts = [t for _, t in missed(Suite(reference, device=device_kind()), NoiseFloors.load())]
        suite.executed = sum(not text for text in texts)
        suite.reason = "; ".join(text for text in texts if text)[:400]
    report(
        f"  controls: {suite.executed} of {suite.planned} planted bugs found "
        f"({suite.seconds:.1f} s) {suite.reason}".rstrip()
    )
    return suite
