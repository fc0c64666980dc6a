"""A night on an executor: each part of its plan is a work item, and the results form one run.

A part is a shard like those of `nightly --shard`, and `shards` merges them. Source:
docs/many-machines.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.executors.executor import Executor, Log
from parity.executors.inputs import MODULE, contents
from parity.executors.item import Answer, Item, Needs, State
from parity.executors.sweep import Answers, run
from reports.nightly.expected import cost, expected_seconds, in_order
from reports.nightly.run import Options, nightly, plan_of
from reports.nightly.shards import Shard, find_shards, merge_shards
from reports.nightly.tonight import Tonight
from reports.provenance.code import Start
from reports.provenance.gpu import repeatable_flags
from reports.provenance.host import fingerprint, processor
from reports.registry.outcome import Outcome, finish, store
from reports.store.manifest import Environment, Manifest, PartInfo, read_manifest
from reports.store.runs import Run, read_run
from reports.store.schema import MANIFEST, StoreError
from reports.subject import main, model

UNFINISHED = ".unfinished"
"""Hidden folder beside the runs that holds the parts of unfinished nights."""
MEMORY = 3 * 2**30
"""Peak memory of a part of a night, in bytes; the mesh suite has a second process."""
SHARE = 1 / 16
"""Fraction of a GPU that a part of a night needs. Its arrays are small and its time goes into
tracing and compiling, so processors limit how many parts run at a time."""
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment variables of a process that shares its GPU: the first process would otherwise reserve
three quarters of the GPU's memory."""


def items_of(options: Options) -> list[Item]:
    """Return the parts of a night as work items, in the order of the plan.

    Args:
        options: Options of the night, without a shard.

    Raises:
        ValueError: a case is unknown, or needs the live reference where only recordings are
            available.
        ReferenceUnavailableError: the live reference was requested and cannot run.
    """
    plan = plan_of(options)
    # Every worker must use the same kind of reference as this machine.
    if options.reference == "auto":
        kind = "recorded" if model().reference("auto").kind == "recorded" else "live"
        options = replace(options, reference=kind)
    needs = Needs(memory=MEMORY)
    if options.device == "cuda":
        # The machine of the GPU need not be this one.
        environment = {**SHARED, "XLA_FLAGS": repeatable_flags()}
        needs = Needs(gpus=SHARE, memory=MEMORY, environment=environment)
    # The data files of the packages are included in the digest of the code.
    names = [str(options.checkpoint.resolve())] if options.checkpoint else []
    live = [f"{MODULE}{main().module}"] if options.reference == "live" else []
    inputs = contents([*names, *live])
    shards = [replace(options, shard=Shard(i, len(plan))) for i in range(1, len(plan) + 1)]
    return [
        Item(
            part,
            f"{__name__}:measure",
            {"options": one.to_json(), "part": part},
            needs,
            True,
            inputs,
        )
        for part, one in zip(plan, shards, strict=True)
    ]


def measure(folder: Path, options: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Measure one part of a night on a worker, and leave its run folder in `folder`.

    Args:
        folder: Output folder of the worker.
        options: `Options.to_json` of the part.
        part: Name of the part.

    Returns:
        {"lines": [...]}: the indented lines of the part's report, which the driver repeats.

    Raises:
        ValueError: the part is another one here, where other subjects are registered.
    """
    lines: list[str] = []
    asked = Options.from_json(folder, options)
    here = asked.shard.part_of(plan_of(asked)) if asked.shard else ()
    if here != (part,):
        raise ValueError(
            f"expected to measure {part}, but by the subjects registered on this machine the part "
            f"{asked.shard} is {', '.join(here)}: install the same version on all machines"
        )
    with model().unchecked():
        nightly(asked, lines.append)
    return {"lines": [line for line in lines if line.startswith("  ")]}


def fan_out(
    options: Options,
    executor: Executor,
    report: Log,
    resume: bool = True,
) -> Outcome:
    """Run a night on an executor and write its run folder.

    If an earlier attempt at the same night was interrupted, its finished parts are reused.

    Args:
        options: Options of the night, without a shard.
        executor: Executes the parts; closed at the end.
        report: Receives a line as each part finishes.
        resume: Whether to reuse finished parts of an interrupted night; otherwise they are deleted.

    Raises:
        ItemError: another process is running this night.
        StoreError: no part was measured (as with an unknown fault), the folder cannot be written,
            or the code or the checkpoint changed meanwhile.
        ValueError: a case is unknown or needs the live reference, or the checkpoint is
            inconsistent.
        FileNotFoundError: the checkpoint does not exist.
        ReferenceUnavailableError: the live reference was requested and cannot run.
    """
    start = Start.now([options.checkpoint])
    items = items_of(options)
    if options.checkpoint is not None:
        # Reject a broken checkpoint now, not after an hour in each part.
        model().open_checkpoint(options.checkpoint).load()
    names = " ".join(sorted(f"{item.name} {item.digest()}" for item in items))
    place = options.out / UNFINISHED / hashlib.sha256(names.encode()).hexdigest()[:12]
    expected, known_here = expected_seconds(options.out, [item.name for item in items])
    by_part = {item.name: item for item in items}
    order = in_order(list(by_part), expected, executor.workers)
    expected = {part: expected[part] for part in order}
    items = [replace(by_part[part], expected=expected[part]) for part in order]
    by_part = {item.name: item for item in items}
    report(
        f"a night of {len(items)} parts on {executor.name}: "
        f"{cost(expected, executor.workers, known_here)}"
    )
    with Answers.opened(place) as answers:
        if not resume:
            answers.discard()
        known: dict[str, Answer] = {}
        found: dict[str, Path] = {}
        with Tonight(options.out, len(items), report) as tonight:
            with (
                _kept_parts_named(executor, items, answers, report),
                closing(run(items, executor, answers, report)) as measured,
            ):
                for answer in measured:
                    # A failed worker may have noticed a change of the code first.
                    start.check(now=answer.state is not State.DONE)
                    known[answer.name] = answer
                    for line in (answer.value or {}).get("lines", ()):
                        report(line)
                    if answer.state is State.DONE:
                        [folder] = find_shards([answers.files(by_part[answer.name])])
                        found[answer.name] = folder
                        tonight.add(folder)
            if not found:
                raise StoreError(
                    "expected parts of a night, but none was measured: "
                    + "; ".join(f"{name}: {a.reason}" for name, a in known.items())[:800]
                )
            start.check()
            folders = {item.name: found[item.name] for item in items if item.name in found}
            outcome = _stored(options, items, known, folders, report)
            tonight.done(outcome.page)
        answers.discard()
    return outcome


@contextmanager
def _kept_parts_named(
    executor: Executor, items: Sequence[Item], answers: Answers, report: Log
) -> Iterator[None]:
    """Context in which an interrupt (Ctrl-C) reports how many parts are kept, and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        kept = sum(answers.read(item) is not None for item in items)
        report(
            f"interrupted: {kept} of {len(items)} parts are measured and kept in {answers.folder}; "
            f"the same command with --executor {executor.name} resumes from them"
        )
        raise


def _stored(
    options: Options,
    items: Sequence[Item],
    known: Mapping[str, Answer],
    folders: Mapping[str, Path],
    report: Log,
) -> Outcome:
    """Store and judge the run merged from the parts.

    If an earlier attempt at this night was killed after it had stored the run, that run is judged
    and nothing new is stored.

    Args:
        options: Options of the night.
        items: All parts of the night.
        known: Answer of each part, its result or why it failed, by name of the part.
        folders: Run folders of the measured parts, by name.
        report: Receives a line for each part whose workers died.
    """
    reasons = {
        Shard.parse(
            item.arguments["options"]["shard"]
        ).index: f"{item.name}: {known[item.name].reason}"
        for item in items
        if item.name not in folders
    }
    merged = merge_shards(list(folders.values()), mixed=True, reasons=reasons)
    infos = tuple(_part(known[name], folder) for name, folder in folders.items())
    order = {part: turn for turn, part in enumerate(plan_of(options))}
    infos = tuple(sorted(infos, key=lambda info: order[info.name]))
    manifest = replace(merged.manifest, parts=infos)
    merged = replace(merged, manifest=replace(manifest, environment=_environment(manifest)))
    # A previous attempt may have stored the run and died before it cleaned up. If another run began
    # in the same second, the id of this one has a numeric suffix.
    for place in sorted(options.out.glob(f"{merged.id}*/{MANIFEST}")):
        if _same_night(read_manifest(place.parent), merged.manifest):
            # It may have died before it judged the run or drew its page.
            return finish(place.parent, read_run(place.parent), report)
    for info in infos:
        if info.attempts > 1:
            report(f"  {info.name}: {info.attempts - 1} of its workers died, and another finished")
    return store(options.out, merged, report)


def _same_night(one: Manifest, other: Manifest) -> bool:
    """Return whether two runs are the same night: equal shards, code, plan and options, and the
    same gates that must be measured.

    Equal ids of the shards do not suffice. They consist of a second and a commit, so two nights
    that begin in the same second share them, even with different code, checkpoints and options.
    """
    names = ("shards", "code", "plan", "selected", "fault", "checkpoint", "contract")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _environment(manifest: Manifest) -> Environment:
    """Return the environment of a merged night.

    If its parts ran on several hosts, it names each distinct processor and number of threads once,
    and has no `host`.
    """
    environment = manifest.environment
    if len({part.fingerprint for part in manifest.parts}) <= 1:
        return environment
    processors = sorted({part.processor for part in manifest.parts})
    threads = sorted({str(part.threads) for part in manifest.parts})
    device = replace(environment.device, name=" + ".join(processors))
    return replace(environment, device=device, host={}, threads=" + ".join(threads))


def _part(answer: Answer, folder: Path) -> PartInfo:
    shard: Run = read_run(folder)
    environment = shard.manifest.environment
    return PartInfo(
        name=answer.name,
        node=answer.place.node,
        fingerprint=fingerprint(environment) or "",
        processor=processor(environment),
        threads=environment.threads,
        seconds=round(answer.seconds, 3),
        attempts=answer.attempts,
        cases=tuple(dict.fromkeys(m.case for m in shard.measurements)),
    )
