"""The rules of docs/verdicts.md in plain Python, written from the document and not from the code.

A model for tests: short, slow, of the same inputs. Where it and the product differ, one of the two
is wrong.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.metrics import POOLED
from parity.tolerances import (
    DRIFT_DEVIATIONS,
    DRIFT_SHARE,
    DRIFT_TYPICAL,
    DRIFT_WORST,
    NOISE_FLOOR,
    NOISE_LEAST,
    NOISE_MADS,
)
from stability.core.findings import Finding, Severity

RECENT, UNSEEN = 7, 3.0
LEVELLED = {Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT, Kind.STATE, Kind.TRAJECTORY}
GRAVITY = (
    *("new failure", "persisting failure", "worse than its history", "drifted from its level"),
    *("fixed", "no longer measured", "changed", "better than before"),
    "not comparable with baseline",
)


@dataclass(frozen=True)
class Night:
    """A run as the model sees it.

    Attributes:
        rows: with the verdict that a suite wrote down.
        findings: of probes.
        suites: name, planned, executed and status.
        machine: what it was made on, reference included; None where that cannot be read.
        reference: live or recorded.
        setting: all that its environment is.
        hosts: by case, the host that measured it; empty for a run of one host.
        planned: gates, each as suite, case, edge, kind, quantity and metric; None for a run that
            knows no contract.
        old: whether it was stored before there were contracts.
        fault: bug that was planted.
        selected: cases that were asked for.
        port: whether it is a run of ports.
        spreads: deviations over rounding, by group.
        noisy: by key, earlier values and whether a replay varied.
    """

    rows: tuple[Measurement, ...]
    findings: tuple[Finding, ...] = ()
    suites: tuple[tuple[str, int, int, str], ...] = ()
    machine: str | None = "a"
    reference: str = "recorded"
    setting: str = "a"
    hosts: Mapping[str, str] | None = None
    planned: tuple[tuple[str, ...], ...] | None = None
    old: bool = False
    fault: str | None = None
    selected: tuple[str, ...] = ()
    port: bool = False
    spreads: Mapping[tuple[str, ...], tuple[float, float]] | None = None
    noisy: Mapping[Any, tuple[tuple[float, ...], bool]] | None = None


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def word_of(m: Measurement) -> Verdict:
    """What the numbers of a row support, whatever it says of itself."""
    if m.verdict in (Verdict.FAIL, Verdict.NOT_COMPARABLE):
        return m.verdict
    if m.verdict is Verdict.INFO and math.isnan(m.tolerance):
        return Verdict.INFO
    if not math.isfinite(m.value):
        return Verdict.FAIL
    if not math.isfinite(m.tolerance):
        return Verdict.NOT_COMPARABLE
    return Verdict.PASS if 0 <= m.value <= m.tolerance else Verdict.FAIL


def step(value: float, past: Sequence[float]) -> float | None:
    """How many times its median a value is, where it left what was seen."""
    seen = [math.log10(v) for v in past if 0 < v < math.inf]
    if len(seen) < NOISE_LEAST or not 0 < value < math.inf:
        return None
    now, five = math.log10(value), math.log10(NOISE_FLOOR)
    middle = statistics.median(seen)
    mad = statistics.median([abs(v - middle) for v in seen])
    if abs(now - middle) <= NOISE_MADS * mad or abs(now - middle) <= five:
        return None
    if min(seen) - five <= now <= max(seen) + five:
        return None
    return 10 ** (now - middle)


def beside_baseline(m: Measurement, old: Measurement | None, exact: bool) -> str | None:
    """How a row stands beside the baseline's; exact where its value should repeat."""
    word = word_of(m)
    if old is None:
        return "new failure" if word is Verdict.FAIL else None
    if old.identity != m.identity:
        if word is Verdict.INFO:
            return None
        return "new failure" if word is Verdict.FAIL else "not comparable with baseline"
    if word is Verdict.FAIL:
        return "persisting failure" if word_of(old) is Verdict.FAIL else "new failure"
    if word is Verdict.PASS and word_of(old) is Verdict.FAIL:
        return "fixed"
    alike = exact and old.deterministic is not False and m.device == old.device
    return "changed" if alike and not same(m.value, old.value) else None


def changes_of_rows(now: Night, then: Night | None) -> list[tuple[Any, ...]]:
    before = {m.key: m for m in then.rows} if then else {}
    found = []
    for m in now.rows:
        past, varied = (now.noisy or {}).get(m.key, ((), False))
        repeats, old = m.deterministic is True and not varied, before.get(m.key)
        exact = repeats and then is not None and equal_hosts(now, then, m.case)
        what = beside_baseline(m, old, exact)
        number = old.value if old is not None and old.identity == m.identity else None
        if what is None and not repeats and word_of(m) is Verdict.PASS:
            times = step(m.value, past)
            if times is not None:
                what = "worse than its history" if times > 1 else "better than before"
                number = m.value / times
        if what is not None:
            found.append((what, *m.key, number, m.value))
    keys = {m.key for m in now.rows}
    gone = [m for m in before.values() if m.key not in keys and word_of(m) is not Verdict.INFO]
    return found + [("no longer measured", *m.key, m.value, None) for m in gone]


def equal_hosts(now: Night, then: Night, case: str) -> bool:
    if all(len(set((night.hosts or {}).values())) <= 1 for night in (now, then)):
        return now.setting == then.setting
    hosts = [(n.hosts or {}).get(case, "" if n.hosts else n.machine or "") for n in (now, then)]
    return bool(hosts[0]) and hosts[0] == hosts[1]


def changes_of_findings(now: Night, then: Night | None) -> list[tuple[Any, ...]]:
    def name(f: Finding) -> tuple[str, str, str, str]:
        return f"probe {f.probe}", "", f.subject, f.metric

    wrong, before = (
        {name(f): f.value for f in night.findings if f.severity is Severity.ERROR} if night else {}
        for night in (now, then)
    )
    there, found = {name(f) for f in now.findings}, []
    whole = {(f.probe, f.source) for f in now.findings if f.metric == "changes"}
    sources = {name(f): (f.probe, f.source) for f in then.findings} if then else {}
    for key, value in wrong.items():
        old = before.get(key)
        found.append(("new failure" if old is None else "persisting failure", *key, old, value))
    for key, value in before.items():
        if key not in wrong:
            what = "fixed" if key in there or sources[key] in whole else "no longer measured"
            found.append((what, *key, value, None))
    return found


@dataclass(frozen=True)
class Group:
    work: tuple[str, ...]
    typical: float
    worst: float
    tolerance: float
    floored: bool
    spread: tuple[float, float]


def digits(value: float) -> float:
    return float(f"{value:.2e}")


def levels(night: Night, settle: Any) -> dict[tuple[str, ...], Group]:
    """Where the gates of each group stand."""
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for m in night.rows:
        ratio = m.metric in ("error_over_reference", "exact_share")
        measured = math.isfinite(m.value) and 0 < m.tolerance < math.inf
        if m.kind in LEVELLED and not ratio and measured:
            groups.setdefault((m.case, m.edge, m.kind.value, m.metric), []).append(m)
    found = {}
    for name, rows in groups.items():
        if name[3] == "rel_l2" and (*name[:3], POOLED) in groups:
            continue
        settled, low = [], False
        for m in rows:
            past = (night.noisy or {}).get(m.key, ((), False))[0]
            value, floor = settle([*past, m.value][-RECENT:]), DRIFT_SHARE * m.tolerance
            low |= value < floor
            settled.append(max(value, floor))
        found[name] = Group(
            tuple(sorted(m.identity for m in rows)),
            digits(statistics.geometric_mean(settled)),
            digits(max(settled)),
            digits(statistics.geometric_mean([m.tolerance for m in rows])),
            low,
            (night.spreads or {}).get(name, (0.0, 0.0)),
        )
    return found


@dataclass(frozen=True)
class Beside:
    """One group beside a pinned run's: for the mean and the largest, before, now and the limit."""

    name: tuple[str, ...]
    numbers: tuple[tuple[float, float, float], ...]

    def excess(self, which: int) -> float:
        before, now, limit = self.numbers[which]
        return abs(math.log(now / before)) / math.log(limit)

    @property
    def furthest(self) -> tuple[float, float, float] | None:
        """What left its limit, by the larger share of what passes."""
        broken = [
            (-self.excess(i), i)
            for i, (before, now, limit) in enumerate(self.numbers)
            if not 1 / limit <= now / before <= limit
        ]
        return self.numbers[min(broken)[1]] if broken else None

    @property
    def grown(self) -> tuple[float, float, float] | None:
        """What grew by more than may pass unseen, of what rounding explains beyond that."""
        wide = [n for n in self.numbers if n[2] > UNSEEN and n[1] / n[0] > UNSEEN]
        return max(wide, key=lambda n: n[1] / n[0], default=None)


@dataclass(frozen=True)
class Comparison:
    pin: int
    here: bool
    levels: int
    groups: tuple[Beside, ...]
    rescaled: tuple[tuple[str, ...], ...]
    not_yet: tuple[Beside, ...]


def comparisons(now: Night, pins: Sequence[Night]) -> list[Comparison]:
    """The run's levels with those of runs of its machine, and with those of others' machines.

    Of each of the two, a level is compared with the first run that has it.
    """

    def beside(name: tuple[str, ...], old: Group, new: Group, here: bool) -> Beside:
        numbers = []
        for which, base in (("typical", DRIFT_TYPICAL), ("worst", DRIFT_WORST)):
            place = ("typical", "worst").index(which)
            s = max(old.spread[place], new.spread[place])
            wide = max(base, math.exp(DRIFT_DEVIATIONS * math.sqrt(2) * s))
            limit = base if here else wide
            numbers.append((getattr(old, which), getattr(new, which), limit))
        return Beside(name, tuple(numbers))

    own = [
        i for i, pin in enumerate(pins) if now.machine is not None and pin.machine == now.machine
    ]
    others = [i for i in range(len(pins)) if i not in own] if own else list(range(len(pins)))
    others = [i for i in others if now.machine is None or pins[i].machine != now.machine]
    alike = [i for i in others if pins[i].reference == now.reference]
    others = alike + [i for i in others if i not in alike]
    chosen = [(i, True) for i in own] + [(i, False) for i in others]
    ours, found, held = levels(now, statistics.median), [], set[tuple[str, ...]]()
    seen: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
    for i, here in chosen:
        groups, rescaled = [], []
        theirs = levels(pins[i], max)
        for name, new in ours.items():
            old = theirs.get(name)
            if old is None or old.work != new.work or name in seen[here]:
                continue
            if old.tolerance != new.tolerance and (old.floored or new.floored):
                rescaled.append(name)
            else:
                groups.append(beside(name, old, new, here))
        if not groups and not rescaled and any(each.here == here for each in found):
            continue
        seen[here] |= {g.name for g in groups} | {*rescaled}
        not_yet = [g for g in groups if max(n[2] for n in g.numbers) > UNSEEN]
        not_yet = [g for g in not_yet if g.name not in held]
        found.append(Comparison(i, here, len(ours), tuple(groups), tuple(rescaled), tuple(not_yet)))
        if here:
            held |= {g.name for g in groups}
    return found


def changes_of_levels(found: Sequence[Comparison]) -> tuple[list[tuple[Any, ...]], int]:
    """Changes of groups, and how many may be rounding and may be a loss."""
    changes, unseen = [], 0
    for comparison in found:
        for group in comparison.groups:
            name = (*group.name[:2], f"all {group.name[2]} gates", group.name[3])
            if (far := group.furthest) is not None:
                what = "drifted from its level" if far[1] > far[0] else "better than before"
                changes.append((what, *name, far[0], far[1]))
            elif group in comparison.not_yet and (far := group.grown) is not None:
                changes.append(("not comparable with baseline", *name, far[0], far[1]))
                unseen += 1
        for name in comparison.rescaled:
            name = (*name[:2], f"all {name[2]} gates", name[3])
            changes.append(("not comparable with baseline", *name, None, None))
    return changes, unseen


def contract_holds(night: Night) -> bool:
    """Whether what was planned was measured, once, and nothing else."""
    if night.fault or len({m.key for m in night.rows}) < len(night.rows):
        return False
    if night.planned is None:
        return True
    if night.old:
        return False
    gates = Counter(
        (m.suite, m.case, m.edge, m.kind.value, m.quantity, m.metric)
        for m in night.rows
        if word_of(m) is not Verdict.INFO
    )
    suites = {name for name, *_ in night.suites}
    planned = {gate[0] for gate in night.planned}
    without = suites - planned - {"stability", "controls"}
    return gates == Counter(night.planned) and planned <= suites and not without


def whole(suite: tuple[str, int, int, str]) -> bool:
    _, planned, executed, status = suite
    return status == "ran" and planned == executed and planned > 0


@dataclass(frozen=True)
class Answer:
    word: str
    code: int
    changes: Counter[tuple[Any, ...]]
    comparisons: tuple[Comparison, ...]


def whole_night(now: Night, then: Night | None) -> bool:
    """Whether every suite did what it planned, and none of the baseline's is missing."""
    known = {name for name, *_ in now.suites}
    if then is not None and (now.reference, then.reference) == ("recorded", "live"):
        # Nothing but megalodon-hf itself answers it.
        known.add("port")
    before = [] if then is None or now.selected else [s[0] for s in then.suites if whole(s)]
    return bool(now.suites) and all(map(whole, now.suites)) and known >= set(before)


def work_of(night: Night) -> set[tuple[str, ...]]:
    """Suites and groups of gates, as docs/verdicts.md "Retired work" has them."""
    gates = {m for m in night.rows if not math.isnan(m.tolerance)}
    kinds = {m: m.kind.value if m.kind is Kind.GRADIENT or not night.port else "" for m in gates}
    groups = {(m.case, m.edge, kinds[m]) for m in gates}
    return {(name,) for name, *_ in night.suites} | groups


def judge(
    now: Night, then: Night | None, pins: Sequence[Night], earlier: Sequence[Night] = ()
) -> Answer:
    """The verdict, in the order of docs/verdicts.md "Word and exit code".

    `earlier` are whole runs of the same kind, subject, reference and class of device.
    """
    gone = set().union(*map(work_of, earlier)) - work_of(now)
    if now.planned is None or now.selected:
        gone = set()
    compared = comparisons(now, pins)
    of_levels, unseen = changes_of_levels(compared)
    changes = [*changes_of_rows(now, then), *changes_of_findings(now, then), *of_levels]
    count = Counter(change[0] for change in changes)
    words = Counter(word_of(m) for m in now.rows)
    gates = sum(words.values()) - words[Verdict.INFO]
    alike = then is not None and now.setting == then.setting
    moved = count["changed"] or (count["fixed"] and alike)
    order = (
        (count["new failure"] + count["persisting failure"], "REGRESSED", 1),
        (not whole_night(now, then) and (now.suites or gates), "INCOMPLETE", 3),
        (any(len(work) == 1 for work in gone), "INCOMPLETE", 3),
        (words[Verdict.NOT_COMPARABLE], "NOT COMPARABLE", 4),
        (not gates, "INCOMPLETE", 5),
        (not contract_holds(now), "INCOMPLETE", 3),
        (gone, "INCOMPLETE", 3),
        (count["worse than its history"] + count["drifted from its level"], "REGRESSED", 1),
        (unseen, "NOT COMPARABLE", 4),
        (then is not None and moved, "CHANGED", 0),
        (True, "PASS", 0),
    )
    word, code = next((word, code) for holds, word, code in order if holds)
    return Answer(word, code, Counter(changes), tuple(compared))
