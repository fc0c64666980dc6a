"""The nightly job: run the suites, store the run, judge it, and write its page."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from parity.device import device_kind
from parity.engine.measure.contract import contract_of
from parity.executors.executor import Log
from parity.executors.pace import Pace
from parity.faults import by_name as fault_by_name
from reports.nightly.document import with_tables
from reports.nightly.expected import expected_seconds
from reports.nightly.shards import Shard
from reports.provenance.code import Start
from reports.provenance.environment import Reference, describe, new_manifest
from reports.registry.outcome import Outcome, store
from reports.store.manifest import CheckpointInfo, Manifest, Time
from reports.store.runs import Run
from reports.store.schema import RunKind
from reports.subject import (
    CONTROLS_PART,
    PROBES_PART,
    Case,
    measured,
    model,
    names_by_part,
    parts,
    suite_of_part,
    tables,
)
from reports.suite_run import SuiteRun
from reports.verdict.levels import spreads_of

Step = Callable[[int, int, str], None]
"""Called with the number of finished parts, the total, and the time left in words ("" if done)."""


@dataclass(frozen=True)
class Options:
    """Options of a nightly; with the defaults it runs everything.

    Attributes:
        out: Folder of the runs.
        cases: Names of the cases to run, of any suite; if empty, all suites run.
        reference: auto, live or recorded.
        checkpoint: Folder of a checkpoint that replaces the committed one.
        fault: Name of a bug to plant.
        shard: Part of the plan to run; all of it if None.
        device: Class of device, cpu or cuda, on which JAX must compute; "" for any.
    """

    out: Path
    cases: tuple[str, ...] = ()
    reference: str = "auto"
    checkpoint: Path | None = None
    fault: str | None = None
    shard: Shard | None = None
    device: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return all options except `out`, for a worker, which has a separate output folder."""
        checkpoint = str(self.checkpoint.resolve()) if self.checkpoint else None
        shard = str(self.shard) if self.shard else None
        fields = {name: getattr(self, name) for name in ("reference", "fault", "device")}
        return {**fields, "cases": list(self.cases), "checkpoint": checkpoint, "shard": shard}

    @classmethod
    def from_json(cls, out: Path, fields: Mapping[str, Any]) -> Options:
        """Return the options that `to_json` returned as `fields`, with the output folder `out`."""
        checkpoint, shard = fields["checkpoint"], fields["shard"]
        given = {
            "cases": tuple(fields["cases"]),
            "checkpoint": Path(checkpoint) if checkpoint else None,
            "shard": Shard.parse(shard) if shard else None,
        }
        return cls(out, **{**fields, **given})


def nightly(options: Options, report: Log, step: Step = lambda *_: None) -> Outcome:
    """Run the selected suites and write the run folder.

    Args:
        options: What to run; a shard runs its part, and is stored without a verdict for merging.
        report: Receives a line as each part finishes.
        step: Receives the number of finished parts, the total, and the time left in words.

    Raises:
        ValueError: a case or fault is unknown, a case needs the live reference where only
            recordings are available, the checkpoint is inconsistent, or there are more shards than
            parts.
        FileNotFoundError: the checkpoint does not exist.
        StoreError: the output folder cannot be written, or code or checkpoint changed meanwhile.
        ReferenceUnavailableError: the live reference was requested and cannot run.
        RuntimeError: JAX computes on another class of device than the requested one.
    """
    if options.device and device_kind() != options.device:
        raise RuntimeError(
            f"expected to measure on {options.device}, but JAX computes on {device_kind()} here: "
            "install the jaxlib of that device on this machine"
        )
    started = datetime.now(UTC)
    start = Start.now([options.checkpoint])
    subject, functions = model(), measured()
    # An error of a table is raised before the work, since run.json needs all of them.
    tables()
    cases = {case.name: case for case in select_cases(options)}
    selection, plan = _selection(options), plan_of(options)
    todo = options.shard.part_of(plan) if options.shard else plan
    at = start.checked_before(_with_time_left(step, expected_seconds(options.out, todo)[0]))
    checkpoint = subject.open_checkpoint(options.checkpoint)
    # Reject a broken checkpoint before an hour of work, not after it.
    loaded = checkpoint.load()
    reference = subject.reference(options.reference)
    fault = fault_by_name(options.fault) if options.fault else None
    own = [cases[name] for name in todo if name in cases]
    report(f"comparing JAX with the oracle and megalodon-hf ({reference.kind}), cases: {len(own)}")
    if fault:
        report(f"planted on purpose: {fault.name}")
    suites: list[SuiteRun] = []
    with fault.planted() if fault else nullcontext():
        if own:
            suites.append(subject.measure(own, reference, report, at))
        for part in (part for part in todo if part in functions):
            at(todo.index(part))
            suites.append(_measured(part, functions[part], reference, report, selection[part]))
    if PROBES_PART in todo:
        at(todo.index(PROBES_PART))
        suites.append(subject.probe(checkpoint, loaded, report))
    if CONTROLS_PART in todo:
        # Last, because they clear the compilation caches.
        at(len(todo) - 1)
        suites.append(subject.control(reference, report))
    at(len(todo))
    probed = CheckpointInfo(
        name=checkpoint.folder.name,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(loaded)),
        config=loaded.config.to_dict(),
        training=checkpoint.training,
        folder=str(options.checkpoint or ""),
        content=start.content(options.checkpoint),
    )
    manifest = replace(
        _manifest(started, start, suites, reference, options.shard, plan),
        cases=tuple(map(subject.case_info, own)),
        checkpoint=probed,
        selected=options.cases,
        fault=options.fault,
    )
    run = Run(
        manifest,
        measurements=tuple(m for suite in suites for m in suite.measurements),
        findings=tuple(f for suite in suites for f in suite.findings),
        tensors=tuple(t for suite in suites for t in suite.tensors),
        explanations=tuple(e for suite in suites for e in suite.explanations),
    )
    start.check()
    return store(options.out, run, report)


def _measured(
    part: str,
    function: Callable[[Any, Log, Collection[str]], SuiteRun],
    reference: Reference,
    report: Log,
    only: Collection[str],
) -> SuiteRun:
    """Measure a part of the plan by a subject's function.

    An error, or a result that is not of the suite of the part, leaves the suite incomplete; what
    other parts measured is kept.
    """
    name = suite_of_part(part)
    try:
        suite: Any = function(reference, report, only)
        if not isinstance(suite, SuiteRun) or suite.name != name:
            what = getattr(suite, "name", type(suite).__name__)
            raise TypeError(f"expected a SuiteRun of suite {name}, received {what}")
    except Exception as error:
        suite = SuiteRun(name, planned=1, reason=f"{type(error).__name__}: {error}"[:400])
        report(f"  {name}: did not finish: {suite.reason}")
    return suite


def _with_time_left(
    step: Step, expected: Mapping[str, float], clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    """Return a function of the number of finished parts that calls `step` with the time left.

    Args:
        step: Function to call.
        expected: Seconds of each part, in the order in which they run.
        clock: Returns the current time in seconds.
    """
    pace, names, begun = Pace(dict(expected)), list(expected), clock()

    def at(done: int) -> None:
        nonlocal begun
        taken, begun = clock() - begun, clock()
        over = names[len(pace.seconds) : done]
        # Parts that finish together share the elapsed time.
        for name in over:
            pace.done(name, taken / len(over))
        step(done, len(names), pace.words({}, 1) if pace.left else "")

    return at


def plan_of(options: Options) -> tuple[str, ...]:
    """Return the parts of a night, in the order in which they run.

    Raises:
        ValueError: a case is unknown, or needs the live reference where only recordings are
            available.
        ReferenceUnavailableError: the live reference was requested and cannot run.
    """
    # With selected cases only their parts run, and a given checkpoint is always probed.
    selection = _selection(options)
    plan = tuple(case.name for case in select_cases(options))
    plan += tuple(part for part in selection if selection[part] or not options.cases)
    if model().reference(options.reference).kind != "live":
        live = [part.name for part in parts() if part.live]
        if asked := sorted(name for part in live for name in selection[part]):
            raise ValueError(
                f"{', '.join(asked)} needs megalodon-hf itself, and only recordings are available: "
                "install it (`make reference`), or leave the case out."
            )
        plan = tuple(part for part in plan if part not in live)
    plan += (PROBES_PART,) if options.checkpoint or not options.cases else ()
    return plan + (() if options.cases else (CONTROLS_PART,))


def _selection(options: Options) -> dict[str, set[str]]:
    """Return the selected names that are not cases of the model, by part of the plan."""
    return {part: names & set(options.cases) for part, names in names_by_part().items()}


def _manifest(
    started: datetime,
    start: Start,
    suites: Sequence[SuiteRun],
    reference: Reference,
    shard: Shard | None,
    plan: tuple[str, ...],
) -> Manifest:
    """Return the manifest of the run, from its suites and this machine."""
    rows = [m for suite in suites for m in suite.measurements]
    responses = {key: r for suite in suites for key, r in suite.responses.items()}
    planned = [gate for suite in suites for gate in suite.contract]
    kind = RunKind.SHARD if shard else RunKind.NIGHTLY
    manifest = with_tables(new_manifest(started, kind, start=start), rows)
    manifest = replace(
        manifest,
        environment=replace(manifest.environment, reference=describe(reference)),
        durations={suite.name: round(suite.seconds, 3) for suite in suites},
        times=tuple(
            Time(suite.name, *key, round(seconds, 3))
            for suite in suites
            for key, seconds in suite.times.items()
        ),
        suites=tuple(suite.result() for suite in suites),
        contract=contract_of(planned),
        plan=plan,
        spreads=spreads_of(rows, responses),
        stability={name: data for suite in suites for name, data in suite.shown.items()},
    )
    if shard is None:
        return manifest
    name = f"{manifest.id}-{shard.index}-of-{shard.count}"
    return replace(manifest, id=name, shard=asdict(shard))


def select_cases(options: Options) -> list[Case]:
    """Return the selected cases of the model; a given checkpoint replaces the committed one.

    Raises:
        ValueError: a name is neither a case of the model nor of another part (`names_by_part`).
    """
    subject = model()
    every = {case.name: case for case in subject.cases}
    others = {name for names in names_by_part().values() for name in names}
    own_names = [name for name in options.cases if name not in others]
    if unknown := [name for name in own_names if name not in every]:
        raise ValueError(
            f"no case {', '.join(map(repr, unknown))}; there are "
            f"{', '.join((*every, *sorted(others)))}."
        )
    cases = [every[name] for name in own_names] if options.cases else list(every.values())
    if options.checkpoint is None:
        return cases
    return [subject.with_checkpoint(case, options.checkpoint) for case in cases]
