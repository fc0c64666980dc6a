"""A nightly in parts, on several machines: what each part does, and one run out of all of them.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.store.runs import Run, read_run
from reports.store.schema import MANIFEST, RunKind, StoreError, kind_of
from reports.verdict.changes import environment_diff, key_of
from reports.verdict.document import derived

KNOWN_DIFFERENCES_PART, PRODUCTS_PART, MLA_MOE_PART = "(seams)", "(products)", "(mla-moe)"
PROBES_PART, CONTROLS_PART = "(probes)", "(controls)"
"""Parts of a nightly's plan that are no case; no case can be named so."""
SUITE_OF = {
    KNOWN_DIFFERENCES_PART: "seams",
    PRODUCTS_PART: "products",
    MLA_MOE_PART: "mla-moe",
    PROBES_PART: "stability",
    CONTROLS_PART: "controls",
}
"""The suite that each of them is; cases are the suite `parity`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `k/n`. Raises ValueError where it is none."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"expected K/N such as 1/3, received {text!r}")
        shard = cls(int(index), int(count))
        if not 1 <= shard.index <= shard.count:
            raise ValueError(f"expected K/N with K from 1 to N, received {text!r}")
        return shard

    def part_of(self, plan: Sequence[str]) -> tuple[str, ...]:
        """Return every `count`-th part of a plan, from `index` on: neighbours cost about the same.

        Raises:
            ValueError: there are more shards than parts.
        """
        if self.count > len(plan):
            raise ValueError(
                f"expected at most {len(plan)} shards, one per part of this plan, received "
                f"{self.count}; ask for fewer"
            )
        return tuple(plan[self.index - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def find_shards(places: Iterable[Path]) -> list[Path]:
    """Return the run folders at or anywhere below each of `places`.

    Raises:
        StoreError: there is none in one of them.
    """
    found: list[Path] = []
    for place in places:
        here = sorted(path.parent for path in place.rglob(MANIFEST))
        here = [folder for folder in here if not folder.name.startswith(".")]
        if not here:
            raise StoreError(f"expected runs of `nightly --shard` in {place}, and there are none.")
        found += here
    return list(dict.fromkeys(found))


def merged(folders: Sequence[Path], partial: bool = False, mixed: bool = False) -> Run:
    """Return the nightly that shards are the parts of.

    Args:
        folders: One folder per shard, in any order.
        partial: Accept that shards are missing: what they planned counts as not run.
        mixed: Accept several machines of one class of device: the run names all of them, so that no
            value of it is ever held to repeat elsewhere.

    Raises:
        StoreError: a folder holds no shard; two hold the same one or the same measurement; one is
            missing; or they were made by another commit, in another environment or for another
            plan. The message names them.
    """
    shards = sorted((_shard(folder) for folder in folders), key=lambda pair: pair[0].index)
    first = shards[0][1]
    for _, other in shards[1:]:
        _check_alike(first, other, mixed)
    _check_once(shards)
    indices = {shard.index for shard, _ in shards}
    count = shards[0][0].count
    missing = [f"{i}/{count}" for i in range(1, count + 1) if i not in indices]
    if missing and not partial:
        raise StoreError(
            f"expected all {count} shards, and missing {', '.join(missing)}; run them again, or "
            "merge what is there with --partial: the verdict will be INCOMPLETE"
        )
    runs = [run for _, run in shards]
    rows = tuple(m for run in runs for m in run.measurements)
    findings = tuple(f for run in runs for f in run.findings)
    tensors = tuple(t for run in runs for t in run.tensors)
    manifest = _manifest(runs, missing) | derived(rows, first.manifest["fault"])
    return Run(manifest, rows, findings, tensors=tensors)


def _shard(folder: Path) -> tuple[Shard, Run]:
    run = read_run(folder)
    if kind_of(run.manifest) is not RunKind.SHARD:
        raise StoreError(
            f"expected a run of `nightly --shard`, {folder} is a {kind_of(run.manifest)}; "
            "name the folders of the shards only"
        )
    return Shard(**run.manifest["shard"]), run


def _check_alike(first: Run, other: Run, mixed: bool) -> None:
    same = _machine(first.manifest) if mixed else {}
    same = {name: part for name, part in same.items() if _class(first) == _class(other)}
    differs = list(environment_diff(Run({**other.manifest, **same}), first))
    for part in ("commit", "dirty", "plan", "selected", "fault", "checkpoint"):
        then, now = first.manifest.get(part), other.manifest.get(part)
        if then != now:
            differs.append(f"{part} {then} → {now}" if len(str((then, now))) < 120 else part)
    count, others = first.manifest["shard"]["count"], other.manifest["shard"]["count"]
    if count != others:
        differs.append(f"number of shards {count} → {others}")
    if differs:
        raise StoreError(
            f"expected shards of one nightly, but {other.id} differs from {first.id}: "
            f"{'; '.join(differs)}. Merge runs of one commit, made alike"
        )


def _class(run: Run) -> object:
    return (run.manifest.get("device") or {}).get("kind")


def _machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest.get(name) for name in ("device", "host", "threads")}


def _machines(runs: Sequence[Run]) -> dict[str, Any]:
    """Return device and threads of all of `runs`: one machine's, or every shard's in order, so that
    the same work on another of the machines is another environment.
    """
    machines = [_machine(run.manifest) for run in runs]
    if all(machine == machines[0] for machine in machines):
        return machines[0]
    names = " + ".join(str((machine["device"] or {}).get("name")) for machine in machines)
    threads = " + ".join(str(machine["threads"]) for machine in machines)
    # Several processors are no known one: such a run is held against other machines only.
    return {"device": {**machines[0]["device"], "name": names}, "host": {}, "threads": threads}


def _check_once(shards: Sequence[tuple[Shard, Run]]) -> None:
    owners: dict[str, str] = {}
    for shard, run in shards:
        for what in (f"shard {shard}", *(" ".join(key_of(m)) for m in run.measurements)):
            # A copy of a shard has its id too: every claim is made once per folder.
            if what in owners and (what.startswith("shard ") or owners[what] != run.id):
                raise StoreError(f"{owners[what]} and {run.id} both hold {what}; keep one of them")
            owners[what] = run.id


def _manifest(runs: Sequence[Run], missing: Sequence[str]) -> dict[str, Any]:
    oldest = min((run.manifest for run in runs), key=lambda manifest: manifest["created"])
    plan = list(oldest["plan"])
    cases = {case["name"]: case for run in runs for case in run.manifest["cases"]}
    shown = next((run.manifest["stability"] for run in runs if run.manifest["stability"]), {})
    return {
        **{name: value for name, value in oldest.items() if name not in ("shard", "plan")},
        **_machines(runs),
        "kind": RunKind.NIGHTLY.value,
        "id": oldest["id"].partition("-shard-")[0],
        "durations": _summed(run.manifest["durations"] for run in runs),
        "suites": _suites(runs, plan, missing),
        "cases": [cases[name] for name in plan if name in cases],
        "stability": shown,
        "spreads": {n: s for run in runs for n, s in run.manifest["spreads"].items()},
        "shards": [run.id for run in runs],
    }


def _summed(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = round(total.get(name, 0.0) + seconds, 3)
    return total


def _suites(runs: Sequence[Run], plan: Sequence[str], missing: Sequence[str]) -> list[Any]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for entry in run.manifest["suites"]:
            found.setdefault(entry["name"], []).append(entry)
    for text in missing:
        for part in Shard.parse(text).part_of(plan):
            lost = {"planned": 1, "executed": 0, "reason": f"shard {text} is missing"}
            found.setdefault(SUITE_OF.get(part, "parity"), []).append(lost | {"status": "failed"})
    return [_suite(name, found[name]) for name in sorted(found, key=_order)]


def _order(name: str) -> int:
    known = ("parity", *SUITE_OF.values())
    return known.index(name) if name in known else len(known)


def _suite(name: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole = all(entry["status"] == "ran" for entry in entries)
    reasons = dict.fromkeys(entry["reason"] for entry in entries if entry["reason"])
    return {
        "name": name,
        "planned": sum(entry["planned"] for entry in entries),
        "executed": sum(entry["executed"] for entry in entries),
        "reason": "; ".join(reasons),
        "status": "ran" if whole else "failed",
    }
