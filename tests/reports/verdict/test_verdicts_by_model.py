"""Verdicts of many small nights are those of a model in plain Python (`rules`).

Nights, baselines, pinned runs and histories are drawn at random from few values each, so that the
rules meet: the same seeds give the same nights everywhere.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from parity.engine.measure.contract import Gate, contract_of
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.metrics import POOLED
from reports.provenance.host import FIELDS
from reports.store.manifest import PartInfo, ReferenceInfo, SuiteResult
from reports.store.runs import Run
from reports.text import edge_rank
from reports.verdict.decide import Decision, decide
from reports.verdict.history import Past
from reports.verdict.pins import pin_of
from stability.core.findings import Severity
from tests.reports.nights import finding, manifest, measurement
from tests.reports.verdict import rules
from tests.reports.verdict.rules import Night

CASES, EDGES = ("a", "b", "c"), ("jax64:oracle", "jax32:oracle", "port32:original32")
METRICS = ("rel_l2", "rel_l2", "rel_l2", POOLED, "error_over_reference", "exact_share")
KINDS = (Kind.LOGITS, Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT, Kind.LOSS, Kind.KNOWN_DIFFERENCE)
TOLERANCE = 1e-6
SHARES = (0.0, 1e-4, 0.01, 0.1, 0.2, 0.25, 0.5, 0.9, 1.0)
MACHINES = ("a", "b", "c", "unknown")
SEEDS, NIGHTS = range(6), 150
"""Seeds, and nights of each."""


def chance(rng: random.Random, p: float) -> bool:
    return rng.random() < p


def row(rng: random.Random, wild: float) -> Measurement:
    """A gate, or a number without a tolerance; `wild` is the share of what does not pass."""
    kind = rng.choice(KINDS)
    value = rng.choice(SHARES) * TOLERANCE
    tolerance, verdict = TOLERANCE, Verdict.PASS
    if chance(rng, 0.15):
        tolerance, verdict = rng.choice((math.nan, TOLERANCE)), Verdict.INFO
    if chance(rng, wild):
        value = rng.choice((2 * TOLERANCE, math.nan, math.inf, -TOLERANCE, 1e5 * TOLERANCE))
    if chance(rng, wild / 2):
        verdict = rng.choice((Verdict.FAIL, Verdict.NOT_COMPARABLE))
    if chance(rng, wild / 4):
        tolerance = rng.choice((math.inf, math.nan, 0.0))
    return measurement(
        case=rng.choice(CASES),
        edge=rng.choice(EDGES),
        quantity=f"q{rng.randrange(3)}",
        kind=kind,
        stage=rng.choice((-1, 0, 1, 2, 3)),
        metric=rng.choice(METRICS),
        value=value,
        tolerance=tolerance,
        verdict=verdict,
        identity=rng.choice("xxxxy"),
        deterministic=rng.choice((True, True, False, None)),
        device=rng.choice(("cpu", "cpu", "cpu", "cuda")),
        suite=rng.choice(("parity", "parity", "seams")),
    )


def again(rng: random.Random, m: Measurement, moved: float) -> Measurement:
    """The same gate on another night."""
    changes: dict[str, Any] = {}
    if chance(rng, moved):
        factor = rng.choice((0.1, 0.4, 0.7, 1.0, 1.2, 1.4, 2.5, 4.0, 7.0))
        changes["value"] = min(m.value * factor, TOLERANCE) if m.value > 0 else m.value
    if chance(rng, moved / 8):
        changes["value"] = 3 * TOLERANCE
    if chance(rng, 0.05):
        changes["identity"] = "z"
    if chance(rng, 0.05):
        changes["tolerance"] = 2 * m.tolerance
    if chance(rng, 0.1):
        changes["deterministic"] = rng.choice((True, False, None))
    if chance(rng, 0.03):
        changes["device"] = "cuda"
    return replace(m, **changes)


def probes(rng: random.Random, wild: float) -> tuple[Any, ...]:
    severities = (Severity.OK, Severity.NOTE, Severity.WARNING)
    return tuple(
        finding(
            probe=probe,
            subject=subject,
            value=rng.choice((1.0, 2.0)),
            severity=Severity.ERROR if chance(rng, wild) else rng.choice(severities),
        )
        for probe in ("values", "poles")
        for subject in ("s", "t")
        if chance(rng, 0.5)
    )


def planned(rows: tuple[Measurement, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        {
            (m.suite, m.case, m.edge, m.kind.value, m.quantity, m.metric): None
            for m in rows
            if rules.word_of(m) is not Verdict.INFO
        }
    )


def night(
    rng: random.Random, rows: tuple[Measurement, ...], wild: float, like: Night | None
) -> Night:
    """A night of these rows, mostly on the machine of another and with the same suites."""
    setting = f"{rng.choice(MACHINES)} {rng.choice(('recorded', 'recorded', 'live'))}"
    if like is not None and chance(rng, 0.7):
        setting = like.setting
    machine, reference = setting.split()
    names = sorted({m.suite for m in rows} | {"stability"})
    names += [n for n in ("port", "controls") if chance(rng, wild)]
    suites = tuple((n, 2, 2, "ran") for n in names if not chance(rng, wild / 4))
    if chance(rng, wild / 2) and suites:
        odd = (2, 1, "ran"), (2, 2, "failed"), (2, 3, "ran"), (0, 0, "ran"), (2, 0, "skipped")
        suites = (*suites[1:], (suites[0][0], *rng.choice(odd)))
    gates = planned(rows)
    if chance(rng, wild / 3) and gates:
        gates = rng.choice((gates[1:], (*gates, ("parity", "d", "e", "logits", "q", "rel_l2")), ()))
    if chance(rng, wild / 6) and rows:
        rows = (*rows, rng.choice(rows))
    spreads = {
        (m.case, m.edge, m.kind.value, m.metric): rng.choice(
            ((0.0, 0.0), (0.1, 0.1), (0.25, 0.1), (0.1, 0.4), (0.6, 0.3), (0.6, 0.6))
        )
        for m in rows
    }
    # What earlier runs measured of the gates that did not repeat.
    noisy = {}
    for m in rows:
        if chance(rng, 0.4):
            seen = rng.choice((0, 4, 5, 6, 8))
            apart = rng.choice(((1.0,), (0.98, 1.0, 1.03), (0.5, 1.0, 2.0)))
            away = rng.choice((1.0, 1.0, 0.2, 0.9, 0.96, 1.04, 1.1, 4.0))
            steady = [m.value * rng.choice(apart) / away for _ in range(seen)]
            noisy[m.key] = tuple(steady), chance(rng, 0.3)
    cases = sorted({m.case for m in rows})
    hosts = {case: rng.choice(("h1", "h1", "h2", "")) for case in cases if chance(rng, 0.9)}
    return Night(
        rows,
        findings=probes(rng, wild / 2),
        suites=suites,
        machine=None if machine == "unknown" else setting,
        reference=reference,
        setting=setting,
        hosts=hosts if chance(rng, 0.15) else None,
        planned=gates if chance(rng, 0.9) else None,
        old=chance(rng, wild / 8),
        fault="conjugate" if chance(rng, wild / 8) else None,
        selected=("a",) if chance(rng, 0.1) else (),
        spreads=spreads,
        noisy=noisy,
    )


def as_run(it: Night, name: str) -> Run:
    """The same as a run of the product."""
    host = dict.fromkeys(FIELDS, "known") | {"model": it.setting.split()[0]}
    document = manifest(
        id=name,
        kind="pytest" if it.planned is None else "nightly",
        host={} if it.machine is None else host,
        suites=[],
        fault=it.fault,
        selected=list(it.selected),
        spreads={" | ".join(group): list(spread) for group, spread in (it.spreads or {}).items()},
    )
    environment = replace(document.environment, reference=ReferenceInfo(it.reference))
    document = replace(
        document,
        environment=environment,
        suites=tuple(SuiteResult(n, p, e, status=s) for n, p, e, s in it.suites),
        contract=contract_of([Gate(*gate) for gate in it.planned or ()]),
        migrated_from=4 if it.old else None,
        parts=tuple(PartInfo(c, fingerprint=h, cases=(c,)) for c, h in (it.hosts or {}).items()),
    )
    return Run(document, it.rows, it.findings)


def drawn(seed: int) -> list[tuple[Night, Night | None, list[Night]]]:
    """Nights with their baseline and pinned runs."""
    rng, found = random.Random(seed), []
    for _ in range(NIGHTS):
        wild = rng.choice((0.0, 0.0, 0.0, 0.0, 0.05, 0.2, 0.5))
        moved = rng.choice((0.0, 0.0, 0.3, 1.0))
        rows = {
            m.key: m for m in (row(rng, wild) for _ in range(rng.choice((0, 1, 2, 3, 4, 6, 9))))
        }
        now = night(rng, tuple(rows.values()), wild, None)

        def other(p: float, now: Night = now, wild: float = wild) -> Night:
            kept = (again(rng, m, p) for m in now.rows if not chance(rng, 0.05 + wild / 4))
            more = [row(rng, wild) for _ in range(rng.randrange(2)) if chance(rng, wild)]
            unique = {m.key: m for m in (*kept, *more)}
            return replace(night(rng, tuple(unique.values()), wild, now), noisy={})

        then = other(moved / 2) if chance(rng, 0.8) else None
        found.append((now, then, [other(moved) for _ in range(rng.randrange(4))]))
    return found


def decided(now: Night, then: Night | None, pins: list[Night], **options: bool) -> Decision:
    past = {key: Past(values, varied) for key, (values, varied) in (now.noisy or {}).items()}
    return decide(
        as_run(now, "now"),
        None if then is None else as_run(then, "then"),
        past,
        [pin_of(as_run(pin, f"pin{i}"), {}, "why", "2026-11-01") for i, pin in enumerate(pins)],
        **options,
    )


def plain(change: tuple[Any, ...]) -> tuple[Any, ...]:
    """A change whose numbers equal those of another computation of them."""
    return tuple(f"{v:.9e}" if isinstance(v, float) else v for v in change)


def changes_of(decision: Decision) -> Counter[tuple[Any, ...]]:
    return Counter(
        plain((c.what.value, c.case, c.edge, c.quantity, c.metric, c.before, c.now))
        for c in decision.changes
    )


Drawn = list[tuple[Night, Night | None, list[Night], rules.Answer, Decision]]


@pytest.fixture(scope="module", params=SEEDS)
def nights(request: pytest.FixtureRequest) -> Drawn:
    """Nights with their baseline, pinned runs, and what model and product say of them."""
    return [(*them, rules.judge(*them), decided(*them)) for them in drawn(request.param)]


def test_every_verdict_and_every_change_is_drawn() -> None:
    """A model that is never asked agrees with anything."""
    words, whats = Counter[tuple[str, int]](), Counter[str]()
    for seed in SEEDS:
        for night_of in drawn(seed):
            answer = rules.judge(*night_of)
            words[answer.word, answer.code] += 1
            # Levels and single gates count apart.
            whats.update(f"{c[0]}{' of a level' * (c[3][:4] == 'all ')}" for c in answer.changes)
    least = {("PASS", 0), ("CHANGED", 0), ("REGRESSED", 1), ("NOT COMPARABLE", 4)}
    least |= {("INCOMPLETE", code) for code in (3, 5)}
    assert {word for word, n in words.items() if n >= 15} == least, words
    singly = {*rules.GRAVITY} - {"drifted from its level"}
    level = {"drifted from its level", "better than before", "not comparable with baseline"}
    often = {what for what, n in whats.items() if n >= 15}
    assert often == singly | {f"{what} of a level" for what in level}, whats


@pytest.mark.few(2)
def test_verdicts_and_changes_are_those_of_the_model(nights: Drawn) -> None:
    for turn, (now, then, pins, expected, decision) in enumerate(nights):
        told = f"night {turn}: {decision.sentence}"
        found, model = changes_of(decision), Counter(map(plain, expected.changes.elements()))
        assert found == model, f"{told}\n+ {found - model}\n- {model - found}"
        assert (decision.word, decision.exit_code) == (expected.word, expected.code), told
        whats = [c.what.value for c in decision.changes]
        assert whats == sorted(whats, key=rules.GRAVITY.index), told
        if turn % 10 == 0:
            # What is asked for alone is judged alike.
            alone = decided(now, then, pins, alone=True)
            assert (alone.word, repr(alone.changes)) == (decision.word, repr(decision.changes)), (
                told
            )


def test_counts_are_those_of_the_rows(nights: Drawn) -> None:
    for now, then, _, expected, decision in nights:
        words = Counter(map(rules.word_of, now.rows))
        whats = Counter(change[0] for change in expected.changes.elements())
        short = {s[0]: max(1, s[1] - s[2]) for s in now.suites if not rules.whole(s)}
        skipped = [
            n
            for name, _, _, status in now.suites
            for n in [short.get(name, 0)]
            if status == "skipped"
        ]
        counts = decision.counts
        assert (counts.gates, counts.passed, counts.not_comparable) == (
            len(now.rows) - words[Verdict.INFO],
            words[Verdict.PASS],
            words[Verdict.NOT_COMPARABLE],
        )
        assert (counts.new, counts.persisting, counts.fixed, counts.changed) == tuple(
            whats[name] for name in ("new failure", "persisting failure", "fixed", "changed")
        )
        assert counts.worse == whats["worse than its history"] + whats["drifted from its level"]
        assert (counts.not_run, counts.skipped) == (
            sum(short.values()) - sum(skipped),
            sum(skipped),
        )
        assert counts.warnings == sum(f.severity is Severity.WARNING for f in now.findings)
        assert decision.baseline_id == (None if then is None else "then")
        differs = then is not None and then.setting != now.setting
        assert bool(decision.environment) == differs


def test_levels_are_compared_with_the_runs_of_the_model(nights: Drawn) -> None:
    wide = 0
    for now, _, pins, expected, decision in nights:
        assert len(decision.comparisons) == len(expected.comparisons)
        both = zip(decision.comparisons, expected.comparisons, strict=True)
        for turn, (found, model) in enumerate(both):
            assert (found.pin.run, found.same) == (f"pin{model.pin}", model.here)
            assert (found.levels, found.comparable) == (model.levels, len(model.groups))
            assert bool(found.differs) == (pins[model.pin].setting != now.setting)
            told = {
                (d.group, ("typical", "worst").index(d.what)): (d.before, d.now, d.limit)
                for d in found.compared
            }
            assert len(told) == len(found.compared) == 2 * len(model.groups)
            for group in model.groups:
                for place, numbers in enumerate(group.numbers):
                    assert told.pop((group.name, place)) == pytest.approx(numbers)
            shares = [d.excess for d in found.compared]
            assert shares == sorted(shares, reverse=True)
            ratios = [
                numbers[0][1] / numbers[0][0] for numbers in (g.numbers for g in model.groups)
            ]
            largest = found.largest.ratio if found.largest else None
            assert largest == (max(ratios) if ratios else None)
            assert [r.group for r in found.rescaled] == list(model.rescaled)
            not_yet = {d.group: d.limit for d in found.not_yet}
            assert not_yet.keys() == {g.name for g in model.not_yet}
            assert all(not_yet[g.name] == max(n[2] for n in g.numbers) for g in model.not_yet)
            limits = list(not_yet.values())
            assert limits == sorted(limits, reverse=True)
            wide += len(limits)
            # Whom a person reads it from.
            judged = len(model.groups) - len(limits)
            assert f"{judged:,} of {model.levels:,} level" in decision.against[turn]
    assert wide, "no level is wide"


def test_where_it_starts_is_the_first_stage_of_the_gravest_case(nights: Drawn) -> None:
    several = 0
    for now, _, _, expected, decision in nights:
        new = {change[1:3] for change in expected.changes if change[0] == "new failure"}
        first: dict[tuple[str, str], tuple[Any, ...]] = {}
        for m in now.rows:
            word = rules.word_of(m)
            if word not in (Verdict.FAIL, Verdict.NOT_COMPARABLE):
                continue
            place = word is not Verdict.FAIL, m.stage < 0, m.stage
            if (m.case, m.edge) not in first or place < first[m.case, m.edge]:
                first[m.case, m.edge] = place
        assert {(m.case, m.edge) for m in decision.starts} == first.keys()
        assert len(decision.starts) == len(first)
        order = []
        for m in decision.starts:
            place = first[m.case, m.edge]
            assert (m.verdict is not Verdict.FAIL, m.stage < 0, m.stage) == place
            order.append((place[0], (m.case, m.edge) not in new))
        # Failures come first, and of those the new ones.
        assert order == sorted(order)

        def gravity(m: Measurement, new: set[tuple[str, ...]] = new) -> tuple[Any, ...]:
            fails, at = m.verdict is Verdict.FAIL, edge_rank(m.edge)
            share = m.value / m.tolerance if m.tolerance else math.inf * m.value
            finite = math.isfinite(m.tolerance) and math.isfinite(share)
            return not fails, (m.case, m.edge) not in new, at, finite, -share if finite else 0.0

        # One case after the other, by its gravest edge, in each the earliest stage first.
        gravest = {
            case: min(gravity(m) for m in decision.starts if m.case == case)
            for case in {m.case for m in decision.starts}
        }
        places = [
            (at, gravest[m.case], m.case, m.stage < 0, m.stage, edge_rank(m.edge))
            for at, m in zip(order, decision.starts, strict=True)
        ]
        assert places == sorted(places)
        several += len(places) > 1
    assert several, "nothing starts in two places"
