"""The main job: run the suites, judge, store, and write one page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from megalodon_jax.quantization.products import BACKENDS
from parity.deepseek_v3 import comparison as mla_moe
from parity.engine.compare import OnFailure
from parity.engine.deviation import Deviations
from parity.engine.measurement import Measurement, Verdict
from parity.faults import by_name as fault_by_name
from parity.faults.controls import CONTROLS, missed
from parity.megalodon.cases import BYTE_LM, CASES, Case, by_name
from parity.megalodon.known_differences import SEAMS
from parity.megalodon.known_differences import measure as measure_seams
from parity.megalodon.noise_floors import extended
from parity.megalodon.suite import Reference, Suite, choose_reference, culprit
from parity.pooling import POOLED
from parity.tolerances import NoiseFloors
from reports.nightly.shards import (
    CONTROLS_PART,
    MLA_MOE_PART,
    PROBES_PART,
    PRODUCTS_PART,
    SEAMS_PART,
    Shard,
)
from reports.page.render import render
from reports.provenance.device import device_kind
from reports.provenance.environment import describe, environment
from reports.registry.lookup import held_against, judge
from reports.store.runs import Run, write_run
from reports.store.schema import RunKind, kind_of
from reports.verdict.changes import key_of
from reports.verdict.decide import Decision
from reports.verdict.document import case_entry, derived
from reports.verdict.levels import Calibrated, spreads_of
from stability import suite as stability
from stability.core.findings import Finding
from stability.moe.fixed_bugs import reference_scatter
from stability.products.accuracy import measure as measure_products

Report = Callable[[str], None]
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """What a nightly does; the defaults are the whole of it."""

    out: Path
    cases: tuple[str, ...] = ()
    reference: str = "auto"
    checkpoint: Path | None = None
    fault: str | None = None
    shard: Shard | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished nightly: the run, its verdict, and where it was stored."""

    run: Run
    decision: Decision | None
    """None for a shard, which is judged when all of them are merged."""
    folder: Path
    held: tuple[str, ...] = ()
    """One line for each run that levels were held against, and each golden that could not be."""

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
    findings: list[Finding] = field(default_factory=list)
    responses: dict[Calibrated, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """What rounding does to the quantities of each case (`reports.verdict.levels.spreads_of`)."""

    def entry(self) -> dict[str, Any]:
        status = "ran" if self.executed == self.planned and not self.reason else "failed"
        fields = ("name", "planned", "executed", "reason")
        return {name: getattr(self, name) for name in fields} | {"status": status}


def nightly(options: Options, report: Report, step: Step = lambda done, planned: None) -> Outcome:
    """Run everything and write the run folder.

    Args:
        options: What to run; a shard runs its part of it and is stored to be merged.
        report: Gets a line as each part finishes.
        step: Gets how many parts are done, and of how many.

    Raises:
        ValueError: an unknown case or fault, a checkpoint that does not hold together, or more
            shards than there are parts.
        FileNotFoundError: the checkpoint is not there.
        StoreError: the output folder cannot be written.
        ReferenceUnavailableError: the live reference was asked for and cannot run.
    """
    started = datetime.now(UTC)
    cases = {case.name: case for case in select_cases(options)}
    # A few cases are asked for to answer a question about those cases, and a checkpoint is given to
    # have it probed.
    asked = {part: names & set(options.cases) for part, names in elsewhere().items()}
    plan = (*cases, *(p for p in MEASURED if asked[p] or not options.cases))
    plan += (PROBES_PART,) if options.checkpoint or not options.cases else ()
    plan += () if options.cases else (CONTROLS_PART,)
    parts = options.shard.part_of(plan) if options.shard else plan
    checkpoint = open_checkpoint(options.checkpoint)
    # A broken checkpoint is refused before an hour of work, not after it.
    model = checkpoint.load()
    reference = choose_reference(options.reference)
    fault = fault_by_name(options.fault) if options.fault else None
    mine = [cases[name] for name in parts if name in cases]
    report(f"comparing JAX with the oracle and megalodon-hf ({reference.kind}), cases: {len(mine)}")
    if fault:
        report(f"planted on purpose: {fault.name}")
    done = _Done(options.shard, plan, reference)
    with fault.planted() if fault else nullcontext():
        if mine:
            done.add(
                *run_parity(
                    mine, reference, report, lambda n: step(n, len(parts)), on_failure=done.tensors
                )
            )
        for part in (part for part in parts if part in MEASURED):
            done.add(*MEASURED[part](reference, report, asked[part]))
    if PROBES_PART in parts:
        step(parts.index(PROBES_PART), len(parts))
        findings, done.shown, probes = run_stability(checkpoint, model, report)
        done.findings += findings
        done.suites.append(probes)
    if CONTROLS_PART in parts:
        # Last, because they throw away what is compiled.
        step(len(parts) - 1, len(parts))
        done.suites.append(run_controls(reference, report))
    step(len(parts), len(parts))
    tested = {
        "cases": [case_entry(case) for case in mine],
        "checkpoint": _about(checkpoint, model),
        "selected": list(options.cases),
        "fault": options.fault,
    }
    return store(options.out, done.run(started, tested), report)


def _about(checkpoint: stability.Checkpoint, model: Any) -> dict[str, Any]:
    return {
        "name": checkpoint.folder.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model)),
        "config": model.config.to_dict(),
        "training": checkpoint.training,
    }


def store(root: Path, run: Run, report: Report) -> Outcome:
    """Judge a run, write it with its page, and return both; a shard is stored as it is.

    Raises:
        StoreError: the folder cannot be written; `report` got the verdict before.
    """
    if kind_of(run.manifest) is RunKind.SHARD:
        return Outcome(run, None, write_run(root, run))
    found = judge(root, run)
    run = replace(run, manifest={**run.manifest, "verdict": found.decision.word.value})
    page = render(run, found.decision, found.history)
    # Should the disk be full, the night's answer is not lost with the night's numbers.
    report(f"verdict: {found.decision.word}")
    folder = write_run(root, run, page)
    return Outcome(run, found.decision, folder, tuple(held_against(found)))


@dataclass
class _Done:
    """What a nightly has so far."""

    shard: Shard | None
    plan: tuple[str, ...]
    reference: Reference
    measurements: list[Measurement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    suites: list[_Suite] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)
    tensors: Deviations = field(default_factory=Deviations)
    responses: dict[Calibrated, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def add(self, rows: list[Measurement], suite: _Suite) -> None:
        self.measurements += rows
        self.findings += suite.findings
        self.responses |= suite.responses
        self.suites.append(suite)

    def run(self, started: datetime, tested: dict[str, Any]) -> Run:
        kind = RunKind.SHARD if self.shard else RunKind.NIGHTLY
        document = {
            **environment(started, kind),
            "reference": describe(self.reference),
            "durations": {suite.name: round(suite.seconds, 3) for suite in self.suites},
            "suites": [suite.entry() for suite in self.suites],
            **tested,
            **derived(self.measurements, tested["fault"]),
            "spreads": spreads_of(self.measurements, self.responses),
            "stability": self.shown,
        }
        if self.shard:
            document["id"] += f"-{self.shard.index}-of-{self.shard.count}"
            document |= {"shard": asdict(self.shard), "plan": list(self.plan)}
        return Run(
            document,
            tuple(self.measurements),
            tuple(self.findings),
            tensors=tuple(self.tensors),
        )


def select_cases(options: Options) -> list[Case]:
    """Return the cases of the triangle that are asked for; a checkpoint of the user's takes the
    committed one's place.

    Raises:
        ValueError: a name is neither one of theirs nor one of another suite (`elsewhere`).
    """
    others = {name for names in elsewhere().values() for name in names}
    mine = [name for name in options.cases if name not in others]
    if unknown := [name for name in mine if name not in {case.name for case in CASES}]:
        raise ValueError(
            f"no case {', '.join(map(repr, unknown))}; there are "
            f"{', '.join((*(case.name for case in CASES), *sorted(others)))}."
        )
    cases = [by_name(name) for name in mine] if options.cases else list(CASES)
    if options.checkpoint is None:
        return cases
    mine = {"name": "checkpoint", "why": f"{options.checkpoint.name} on held-out text"}
    return [
        replace(case, checkpoint=options.checkpoint, **mine) if case.checkpoint else case
        for case in cases
    ]


def elsewhere() -> dict[str, set[str]]:
    """Return what can be asked for besides cases of the triangle, by the part of the plan."""
    return {
        SEAMS_PART: {seam.id for seam in SEAMS},
        PRODUCTS_PART: set(BACKENDS),
        MLA_MOE_PART: {case.title for case in mla_moe.CASES},
    }


def open_checkpoint(folder: Path | None) -> stability.Checkpoint:
    """Return the user's checkpoint, or the committed one; text comes from beside the weights."""
    folder = folder or BYTE_LM
    own = folder / "heldout.txt"
    return stability.Checkpoint(folder, own if own.is_file() else BYTE_LM / "heldout.txt")


def run_parity(
    cases: Sequence[Case],
    reference: Reference,
    report: Report,
    step: Callable[[int], None] = lambda done: None,
    on_failure: OnFailure | None = None,
) -> tuple[list[Measurement], _Suite]:
    """Run the triangle twice; a case that breaks down leaves the suite incomplete, never green.

    The second time costs a tenth of the first, which compiles, and tells what repeats.
    """
    suite, clock = _Suite("parity", planned=len(cases)), time.perf_counter()
    triangle = Suite(reference, device=device_kind(), on_failure=on_failure)
    replay = Suite(reference, device=device_kind())
    floors = extended(NoiseFloors.load(), [case for case in cases if case.name == "checkpoint"])
    measurements: list[Measurement] = []
    for turn, case in enumerate(cases):
        step(turn)
        start = time.perf_counter()
        try:
            rows = list(triangle.case(case, floors))
            rows = replayed(rows, list(replay.case(case, floors)))
        except (ArithmeticError, RuntimeError, TypeError, KeyError, ValueError) as error:
            suite.reason = f"case {case.name}: {type(error).__name__}: {error}"[:400]
            report(f"  {case.name}: did not finish: {suite.reason}")
            continue
        measurements += rows
        suite.executed += 1
        suite.responses[case.name, "rel_l2"] = floors.responses(case.work)
        report(f"  {case.name}: {_said(rows)} ({time.perf_counter() - start:.1f} s)")
    suite.seconds = time.perf_counter() - clock
    return measurements, suite


def run_seams(
    reference: Reference, report: Report, only: Collection[str] = ()
) -> tuple[list[Measurement], _Suite]:
    """Measure every deliberate difference, or those asked for by id; one that cannot be measured
    leaves the suite incomplete.
    """
    suite, clock = _Suite("seams", planned=len(only or SEAMS)), time.perf_counter()
    rows: list[Measurement] = []
    try:
        for row in measure_seams(reference, device_kind()):
            if not only or row.quantity in only:
                rows.append(row)
                suite.executed += 1
        rows = replayed(rows, list(measure_seams(reference, device_kind())))
    except (ArithmeticError, RuntimeError, ValueError) as error:
        suite.reason = f"{type(error).__name__}: {error}"[:400]
    suite.seconds = time.perf_counter() - clock
    open_ = sum(row.verdict is Verdict.PASS for row in rows)
    report(f"  seams: {open_} of {suite.planned} are what they were ({suite.seconds:.1f} s)")
    return rows, suite


def run_products(
    _: Reference, report: Report, only: Collection[str] = ()
) -> tuple[list[Measurement], _Suite]:
    """Compare every GEMM backend, or those asked for, with float64 on what it multiplied."""
    suite, clock = _Suite("products", planned=len(only or BACKENDS)), time.perf_counter()
    rows: list[Measurement] = []
    try:
        rows = replayed(*(list(measure_products(device_kind())) for _ in range(2)))
        rows = [row for row in rows if not only or row.case in only]
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        suite.reason = f"{type(error).__name__}: {error}"[:400]
    suite.executed = len({row.case for row in rows})
    suite.seconds = time.perf_counter() - clock
    held = sum(row.verdict is Verdict.PASS for row in rows)
    report(f"  products: {held} gates of GEMM backends hold ({suite.seconds:.1f} s)")
    return rows, suite


def run_mla_moe(
    reference: Reference, report: Report, only: Collection[str] = ()
) -> tuple[list[Measurement], _Suite]:
    """Compare the second architecture, or the cases of it that are asked for, with Transformers,
    live where megalodon-hf is and it can.
    """
    suite, clock = _Suite("mla-moe", planned=len(only or mla_moe.CASES)), time.perf_counter()
    which = "auto" if reference.kind == "live" else "recorded"
    rows: list[Measurement] = []
    said: dict[str, Finding] = {}
    try:
        for case in (c for c in mla_moe.CASES if not only or c.title in only):
            answer = mla_moe.answer(case, which)
            once, again = (mla_moe.compare(case, answer, device=device_kind()) for _ in range(2))
            rows += replayed(once.measurements, again.measurements)
            suite.responses[case.title, "rel_l2"] = once.report.responses
            pool = mla_moe.pooled(case, answer.kind == "live", device_kind())
            rows += pool.measurements
            suite.responses[case.title, POOLED] = pool.responses
            suite.executed += 1
            found = reference_scatter(answer.refusal, answer.versions["transformers"])
            said[found.message] = found
    except (ArithmeticError, RuntimeError, TypeError, KeyError, ValueError) as error:
        suite.reason = f"{type(error).__name__}: {error}"[:400]
    suite.findings = [found for found in said.values() if found.value]
    suite.seconds = time.perf_counter() - clock
    held = sum(row.verdict is Verdict.PASS for row in rows)
    report(f"  mla-moe: {held} gates hold ({suite.seconds:.1f} s)")
    return rows, suite


Measured = Callable[[Reference, Report, Collection[str]], tuple[list[Measurement], _Suite]]
MEASURED: dict[str, Measured] = {
    SEAMS_PART: run_seams,
    PRODUCTS_PART: run_products,
    MLA_MOE_PART: run_mla_moe,
}
"""Suites beside the cases that measure something, by their part of a plan (`shards`)."""


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


def run_controls(reference: Reference, report: Report) -> _Suite:
    """Plant the controls; one that the triangle does not find leaves the suite incomplete."""
    suite, clock = _Suite("controls", planned=len(CONTROLS)), time.perf_counter()
    try:
        told = list(missed(Suite(reference, device=device_kind()), NoiseFloors.load()))
        suite.executed = sum(not text for _, text in told)
        suite.reason = "; ".join(text for _, text in told if text)[:400]
    except (ArithmeticError, RuntimeError, TypeError, KeyError, ValueError) as error:
        suite.reason = f"{type(error).__name__}: {error}"[:400]
    suite.seconds = time.perf_counter() - clock
    report(
        f"  controls: {suite.executed} of {suite.planned} planted bugs found "
        f"({suite.seconds:.1f} s) {suite.reason}".rstrip()
    )
    return suite


def replayed(rows: Sequence[Measurement], again: Sequence[Measurement]) -> list[Measurement]:
    """Return `rows` that know whether doing the same work again gave the same bits."""
    values = {key_of(m): m.value for m in again}

    def repeats(m: Measurement) -> bool:
        second = values.get(key_of(m), math.inf)
        return second == m.value or (math.isnan(second) and math.isnan(m.value))

    return [replace(m, deterministic=repeats(m)) for m in rows]


def _said(rows: Sequence[Measurement]) -> str:
    found = culprit(rows)
    if found is None:
        return f"{sum(m.verdict is Verdict.PASS for m in rows)} gates hold"
    return f"{found.verdict.upper()} at {found.quantity} ({found.edge}) {found.note}".rstrip()
