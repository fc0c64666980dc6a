"""A nightly split over several machines: the part of each shard, and merging all shards.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reports.nightly.document import with_tables
from reports.provenance.host import differences
from reports.store.manifest import Environment, Manifest, SuiteResult
from reports.store.runs import Run, read_run
from reports.store.schema import MANIFEST, RunKind, StoreError
from reports.store.shared import address_of
from reports.subject import main, parts, suite_of_part


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of a split nightly; `index` counts from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `index/count`, such as 1/3; raises ValueError if the text is malformed."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"expected K/N such as 1/3, received {text!r}")
        shard = cls(int(index), int(count))
        if not 1 <= shard.index <= shard.count:
            raise ValueError(f"expected K/N with K from 1 to N, received {text!r}")
        return shard

    def part_of(self, plan: Sequence[str]) -> tuple[str, ...]:
        """Return the parts of `plan` that this shard runs: every `count`-th one from `index` on.

        Neighbours in a plan take about the same time, so shards do, too.

        Raises:
            ValueError: there are more shards than parts.
        """
        if self.count > len(plan):
            raise ValueError(
                f"expected at most {len(plan)} shards, one per part of this plan, received "
                f"{self.count}; use fewer"
            )
        return tuple(plan[self.index - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def find_shards(places: Iterable[Path]) -> list[Path]:
    """Return the run folders at or anywhere below `places`, without hidden ones, each once.

    Raises:
        StoreError: there is no run folder at or below one of the places.
    """
    folders: list[Path] = []
    for place in places:
        here = sorted(path.parent for path in place.rglob(MANIFEST))
        here = [folder for folder in here if not folder.name.startswith(".")]
        if not here:
            where = address_of(place)
            raise StoreError(f"expected runs of `nightly --shard` in {where}, but found none.")
        folders += here
    return list(dict.fromkeys(folders))


def merge_shards(
    folders: Sequence[Path],
    partial: bool = False,
    mixed: bool = False,
    reasons: Mapping[int, str] | None = None,
) -> Run:
    """Merge the shards of a nightly into one run.

    Args:
        folders: One folder per shard, in any order.
        partial: Accept missing shards; their parts count as not run.
        mixed: Accept shards of several machines with one class of device (cpu or cuda). The merged
            run names all machines, so its values need not repeat on any single one.
        reasons: Why shards are missing, by index. If every missing shard has a reason, they are
            accepted even without `partial`.

    Raises:
        StoreError: a folder holds no shard; two folders hold the same shard or measurement; a shard
            is missing and not accepted; or shards differ in code, checkpoint, environment or plan.
            The message names the shards.
    """
    shards = sorted((_shard(folder) for folder in folders), key=lambda pair: pair[0].index)
    for other in shards[1:]:
        _check_alike(shards[0], other, mixed)
    _check_once(shards)
    indices = {shard.index for shard, _ in shards}
    count = shards[0][0].count
    missing = [f"{i}/{count}" for i in range(1, count + 1) if i not in indices]
    known = {f"{i}/{count}": reason for i, reason in (reasons or {}).items()}
    if missing and not partial and not known.keys() >= set(missing):
        raise StoreError(
            f"expected all {count} shards, but missing: {', '.join(missing)}; run them again, "
            "or merge the others with --partial: the verdict will be INCOMPLETE"
        )
    runs = [run for _, run in shards]
    rows = tuple(m for run in runs for m in run.measurements)
    findings = tuple(f for run in runs for f in run.findings)
    tensors = tuple(t for run in runs for t in run.tensors)
    explanations = tuple(e for run in runs for e in run.explanations)
    absent = {text: known.get(text, f"shard {text} is missing") for text in missing}
    manifest = with_tables(_manifest(runs, absent), rows)
    return Run(manifest, rows, findings, tensors=tensors, explanations=explanations)


def _shard(folder: Path) -> tuple[Shard, Run]:
    run = read_run(folder)
    manifest = run.manifest
    if manifest.kind is not RunKind.SHARD or manifest.shard is None:
        raise StoreError(
            f"expected a run of `nightly --shard`, but {folder} is a {manifest.kind}; "
            "name the folders of the shards only"
        )
    return Shard(**manifest.shard), run


def _check_alike(first: tuple[Shard, Run], second: tuple[Shard, Run], mixed: bool) -> None:
    (shard, one), (other_shard, other) = first, second
    here, there = one.manifest.environment, other.manifest.environment
    if mixed and here.device.kind == there.device.kind:
        there = replace(there, device=here.device, host=here.host, threads=here.threads)
    differs = list(differences(there, here))
    # A commit that only changes documents between two shards is the same code. Runs of versions
    # without a digest of the code have only the commit.
    code = ("code",) if one.manifest.code and other.manifest.code else ("commit", "dirty")
    for part in (*code, "plan", "selected", "fault", "checkpoint"):
        then, now = getattr(one.manifest, part), getattr(other.manifest, part)
        if then != now:
            differs.append(f"{part} {then} → {now}" if len(str((then, now))) < 120 else part)
    if shard.count != other_shard.count:
        differs.append(f"number of shards {shard.count} → {other_shard.count}")
    if differs:
        raise StoreError(
            f"expected shards of one nightly, but {other.id} differs from {one.id}: "
            f"{'; '.join(differs)}. Measure the odd one again, with the packages, the data and the "
            "options of the others"
        )


def _environment(runs: Sequence[Run]) -> Environment:
    """Return the environment of a run merged from `runs`, in the order of the shards.

    It is that of the first shard if all machines are equal. Otherwise it lists device and threads
    of every shard in order, so that another distribution of the work is another environment.
    """
    all_of = [run.manifest.environment for run in runs]
    if all(environment.machine == all_of[0].machine for environment in all_of):
        return all_of[0]
    names = " + ".join(str(environment.device.name) for environment in all_of)
    threads = " + ".join(str(environment.threads) for environment in all_of)
    # Several processors, without `host`, have no fingerprint: each pinned run then counts as one of
    # another machine.
    device = replace(all_of[0].device, name=names)
    return replace(all_of[0], device=device, host={}, threads=threads)


def _check_once(shards: Sequence[tuple[Shard, Run]]) -> None:
    owners: dict[str, str] = {}
    for shard, run in shards:
        for what in (f"shard {shard}", *(" ".join(m.key) for m in run.measurements)):
            # Ids do not distinguish a shard from its copy, so two folders with one shard are always
            # an error.
            if what in owners and (what.startswith("shard ") or owners[what] != run.id):
                raise StoreError(f"{owners[what]} and {run.id} both hold {what}; keep one of them")
            owners[what] = run.id


def _manifest(runs: Sequence[Run], missing: Mapping[str, str]) -> Manifest:
    manifests = [run.manifest for run in runs]
    oldest = min(manifests, key=lambda manifest: manifest.created)
    cases = {case.name: case for manifest in manifests for case in manifest.cases}
    return replace(
        oldest,
        kind=RunKind.NIGHTLY,
        id=oldest.id.partition("-shard-")[0],
        environment=_environment(runs),
        durations={
            name: round(sum(m.durations.get(name, 0.0) for m in manifests), 3)
            for name in dict.fromkeys(name for m in manifests for name in m.durations)
        },
        times=tuple(time for manifest in manifests for time in manifest.times),
        suites=_suites(manifests, oldest.plan, missing),
        cases=tuple(cases[name] for name in oldest.plan if name in cases),
        stability=next((m.stability for m in manifests if m.stability), {}),
        spreads={name: s for manifest in manifests for name, s in manifest.spreads.items()},
        shards=tuple(run.id for run in runs),
        shard=None,
        migrated_from=None,
        contract=tuple(sorted(line for m in manifests for line in m.contract)),
    )


def _suites(
    manifests: Sequence[Manifest], plan: Sequence[str], missing: Mapping[str, str]
) -> tuple[SuiteResult, ...]:
    parts: dict[str, list[SuiteResult]] = {}
    for manifest in manifests:
        for suite in manifest.suites:
            parts.setdefault(suite.name, []).append(suite)
    for text, reason in missing.items():
        for part in Shard.parse(text).part_of(plan):
            name = suite_of_part(part)
            absent = SuiteResult(name, planned=1, reason=reason)
            parts.setdefault(name, []).append(absent)
    return tuple(_sum(name, parts[name]) for name in sorted(parts, key=_order))


def _order(name: str) -> int:
    order = [main().suite, *(part.suite for part in parts())]
    return order.index(name) if name in order else len(order)


def _sum(name: str, parts: Sequence[SuiteResult]) -> SuiteResult:
    return SuiteResult(
        name=name,
        planned=sum(part.planned for part in parts),
        executed=sum(part.executed for part in parts),
        reason="; ".join(dict.fromkeys(part.reason for part in parts if part.reason)),
        status="ran" if all(part.status == "ran" for part in parts) else "failed",
    )
