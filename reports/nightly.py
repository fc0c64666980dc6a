"""The main job: run the suites, judge, store, and write one page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from megalodon_jax.gemm import BACKENDS
from parity.calibrate import extended
from parity.cases import BYTE_LM, CASES, Case, by_name
from parity.faults import by_name as fault_by_name
from parity.products import measure as measure_products
from parity.results import Kind, Measurement, Verdict
from parity.seams import SEAMS
from parity.seams import measure as measure_seams
from parity.suite import Reference, Suite, choose_reference, culprit
from parity.tolerances import TABLE, NoiseFloors
from reports.environment import describe, device_kind, environment
from reports.history import load_history
from reports.page.render import render
from reports.store import Run, RunKind, write_run
from reports.verdicts import Decision, decide
from stability import suite as stability
from stability.findings import Finding

Report = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What a nightly does; the defaults are the whole of it."""

    out: Path
    cases: tuple[str, ...] = ()
    reference: str = "auto"
    checkpoint: Path | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished nightly: the run, its verdict, and where it was stored."""

    run: Run
    decision: Decision
    folder: Path

    @property
    def page(self) -> Path:
        """The page to open."""
        return self.folder / "report.html"


@dataclass
class _Suite:
    name: str
    planned: int
    executed: int = 0
    reason: str = ""
    seconds: float = 0.0

    def entry(self) -> dict[str, Any]:
        status = "ran" if self.executed == self.planned and not self.reason else "failed"
        fields = ("name", "planned", "executed", "reason")
        return {name: getattr(self, name) for name in fields} | {"status": status}


def nightly(options: Options, report: Report) -> Outcome:
    """Run everything and write the run folder; `report` gets a line as each part finishes.

    Raises:
        ValueError: an unknown case or fault, or a checkpoint that does not hold together.
        FileNotFoundError: the checkpoint is not there.
        StoreError: the output folder cannot be written.
        ReferenceUnavailableError: the live reference was asked for and cannot run.
    """
    started = datetime.now(UTC)
    cases = select_cases(options)
    checkpoint = open_checkpoint(options.checkpoint)
    # A broken checkpoint is refused before an hour of work, not after it.
    model = checkpoint.load()
    reference = choose_reference(options.reference)
    fault = fault_by_name(options.fault) if options.fault else None
    report(
        f"comparing JAX with the oracle and megalodon-hf ({reference.kind}), cases: {len(cases)}"
    )
    if fault:
        report(f"planted on purpose: {fault.name}")
    with fault.planted() if fault else nullcontext():
        measurements, parity = run_parity(cases, reference, report)
        suites = [parity]
        # A few cases are asked for to answer a question about those cases.
        if not options.cases:
            rows, suite = run_seams(reference, report)
            measurements, suites = measurements + rows, [*suites, suite]
            rows, suite = run_products(report)
            measurements, suites = measurements + rows, [*suites, suite]
    findings, shown, probes = run_stability(checkpoint, model, report)
    suites.append(probes)
    document = {
        **environment(started, RunKind.NIGHTLY),
        "reference": describe(reference),
        "durations": {suite.name: round(suite.seconds, 3) for suite in suites},
        "suites": [suite.entry() for suite in suites],
        "cases": [_case_entry(case) for case in cases],
        "tolerances": _tolerances(),
        "seams": _seams(measurements),
        "checkpoint": {
            "name": checkpoint.folder.name,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(model)),
            "config": model.config.to_dict(),
            "training": checkpoint.training,
        },
        "stability": shown,
        "replay": _replay(measurements, options),
        "fault": options.fault,
    }
    run = Run(document, tuple(measurements), tuple(findings))
    history = load_history(options.out, run)
    decision = decide(run, history.baseline)
    folder = write_run(options.out, run, render(run, decision, history))
    return Outcome(run, decision, folder)


def select_cases(options: Options) -> list[Case]:
    """Return the cases asked for; a checkpoint of the user's takes the committed one's place."""
    cases = [by_name(name) for name in options.cases] if options.cases else list(CASES)
    if options.checkpoint is None:
        return cases
    mine = {"name": "checkpoint", "why": f"{options.checkpoint.name} on held-out text"}
    return [
        replace(case, checkpoint=options.checkpoint, **mine) if case.checkpoint else case
        for case in cases
    ]


def open_checkpoint(folder: Path | None) -> stability.Checkpoint:
    """Return the user's checkpoint, or the committed one; text comes from beside the weights."""
    folder = folder or BYTE_LM
    own = folder / "heldout.txt"
    return stability.Checkpoint(folder, own if own.is_file() else BYTE_LM / "heldout.txt")


def run_parity(
    cases: Sequence[Case], reference: Reference, report: Report
) -> tuple[list[Measurement], _Suite]:
    """Run the triangle; a case that breaks down leaves the suite incomplete, never green."""
    suite, clock = _Suite("parity", planned=len(cases)), time.perf_counter()
    triangle = Suite(reference, device=device_kind())
    floors = extended(NoiseFloors.load(), [case for case in cases if case.name == "checkpoint"])
    measurements: list[Measurement] = []
    for case in cases:
        start = time.perf_counter()
        try:
            rows = list(triangle.case(case, floors))
        except (ArithmeticError, RuntimeError, TypeError, KeyError, ValueError) as error:
            suite.reason = f"case {case.name}: {type(error).__name__}: {error}"[:400]
            report(f"  {case.name}: did not finish: {suite.reason}")
            continue
        measurements += rows
        suite.executed += 1
        report(f"  {case.name}: {_said(rows)} ({time.perf_counter() - start:.1f} s)")
    suite.seconds = time.perf_counter() - clock
    return measurements, suite


def run_seams(reference: Reference, report: Report) -> tuple[list[Measurement], _Suite]:
    """Measure every deliberate difference; one that cannot be leaves the suite incomplete."""
    suite, clock = _Suite("seams", planned=len(SEAMS)), time.perf_counter()
    rows: list[Measurement] = []
    try:
        for row in measure_seams(reference, device_kind()):
            rows.append(row)
            suite.executed += 1
    except (ArithmeticError, RuntimeError, ValueError) as error:
        suite.reason = f"{type(error).__name__}: {error}"[:400]
    suite.seconds = time.perf_counter() - clock
    open_ = sum(row.verdict is Verdict.PASS for row in rows)
    report(f"  seams: {open_} of {len(SEAMS)} are what they were ({suite.seconds:.1f} s)")
    return rows, suite


def run_products(report: Report) -> tuple[list[Measurement], _Suite]:
    """Compare every GEMM backend with float64 on the operands it multiplied."""
    suite, clock = _Suite("products", planned=len(BACKENDS)), time.perf_counter()
    rows: list[Measurement] = []
    try:
        rows += measure_products(device_kind())
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        suite.reason = f"{type(error).__name__}: {error}"[:400]
    suite.executed = len({row.case for row in rows})
    suite.seconds = time.perf_counter() - clock
    held = sum(row.verdict is Verdict.PASS for row in rows)
    report(f"  products: {held} gates of GEMM backends hold ({suite.seconds:.1f} s)")
    return rows, suite


def run_stability(
    checkpoint: stability.Checkpoint, model: Any, report: Report
) -> tuple[list[Finding], dict[str, Any], _Suite]:
    """Run the probes on the checkpoint; one that breaks down leaves the suite incomplete."""
    suite, clock = _Suite("stability", planned=len(stability.PROBES)), time.perf_counter()
    report(f"probing {checkpoint.folder.name}: {', '.join(stability.PROBES)}")
    said = stability.run(checkpoint, model)
    suite.executed, suite.reason = said.executed, "; ".join(said.failures)[:400]
    suite.seconds = time.perf_counter() - clock
    for failure in said.failures:
        report(f"  did not finish: {failure}")
    return said.findings, said.shown, suite


def _said(rows: Sequence[Measurement]) -> str:
    found = culprit(rows)
    if found is None:
        return f"{sum(m.verdict is Verdict.PASS for m in rows)} gates hold"
    return f"{found.verdict.upper()} at {found.quantity} ({found.edge}) {found.note}".rstrip()


def _case_entry(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "title": case.why,
        "why": case.why,
        "hash": case.hash,
        "batch": case.batch_size,
        "length": case.length,
        "config": case.config.to_dict(),
    }


def _seams(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    values = {m.quantity: m for m in measurements if m.kind is Kind.SEAM}
    entries = []
    for seam in SEAMS:
        found = values.get(seam.id)
        entry = {name: getattr(seam, name) for name in ("id", "reason", "bound", "measured")}
        if found is not None and math.isfinite(found.value):
            entry["value"] = found.value
        entry["holds"] = found is None or found.verdict is Verdict.PASS
        entries.append(entry)
    return entries


def _tolerances() -> list[dict[str, str]]:
    return [
        {"edge": row.edge, "kind": kind, "bound": row.bound, "reason": row.reason}
        for row in TABLE
        for kind in row.kinds
    ]


def _replay(measurements: Sequence[Measurement], options: Options) -> list[dict[str, str]]:
    command = ".venv/bin/megalodon-numerics nightly"
    entries = [{"label": "everything", "command": "make nightly"}]
    broken = {m.case for m in measurements if m.verdict is Verdict.FAIL}
    fault = f" --fault {options.fault}" if options.fault else ""
    return entries + [
        {"label": name, "command": f"{command} --case {name}{fault}"} for name in sorted(broken)
    ]
