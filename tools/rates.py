"""Error rates of the verdict: synthetic histories, judged night by night by the actual rules.

`python -m tools.rates` prints the table of docs/verdicts.md. Source: docs/verdicts.md
"Comparability".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from parity.engine.measure.contract import Gate, contract_of
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.tolerances import NOISE_WINDOW
from reports.provenance.host import FIELDS
from reports.store.manifest import Device, Environment, Manifest, SuiteResult
from reports.store.runs import Run
from reports.verdict.decide import Decision, Word, decide
from reports.verdict.history import Key, Past
from reports.verdict.pins import Pin, pin_of

LEVEL, TOLERANCE, NOISE = 1e-6, 4e-6, 0.1
"""A value well within its tolerance, and the relative noise of a value that does not repeat."""
QUIET = 2 * NOISE_WINDOW
"""Nights before the event; alarms in the second half of them are false."""
NIGHTS = 45
"""Nights observed from the event on."""
KEY: Key = ("plain", "jax32:oracle", "logits", "rel_l2")

Values = Callable[[np.random.Generator, int], float]
"""Value of a night, given a source of noise and the nights since the event (negative before)."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of history."""

    name: str
    value: Values
    alarm: Word
    """Verdict expected after the event."""
    repeats: bool = False
    """Whether a replay is bit-identical."""
    nights: int = NIGHTS
    """Number of nights observed; 0 if there is no event."""


def noisy(level: Callable[[int], float]) -> Values:
    """Return log-normal noise of relative size `NOISE` around a level that depends on the night."""
    return lambda rng, n: level(n) * LEVEL * math.exp(NOISE * rng.standard_normal())


def exact(level: Callable[[int], float]) -> Values:
    """Return values without noise."""
    return lambda rng, n: level(n) * LEVEL


def bimodal(share: float) -> Values:
    """Return an error that is three times as large on a random fraction of the nights."""
    return lambda rng, n: LEVEL * (3.0 if rng.random() < share else 1.0)


def _after(factor: float) -> Callable[[int], float]:
    return lambda n: factor if n >= 0 else 1.0


def _once(factor: float) -> Callable[[int], float]:
    return lambda n: factor if n == 0 else 1.0


def _daily(n: int) -> float:
    return 1.01 ** max(0, n + 1)


REGRESSED, CHANGED = Word.REGRESSED, Word.CHANGED
SCENARIOS = (
    Scenario("repeats exactly, nothing happens", exact(lambda n: 1.0), CHANGED, True, 0),
    Scenario("repeats, last bit differs one night", exact(_once(1 + 2**-52)), CHANGED, True, 1),
    Scenario("repeats, 1 % worse from one night on", exact(_after(1.01)), CHANGED, True, 1),
    Scenario("repeats, 1 % worse every night", exact(_daily), REGRESSED, True),
    Scenario("10 % noise, nothing happens", noisy(lambda n: 1.0), REGRESSED, nights=0),
    Scenario("10 % noise, 1 % worse from one night on", noisy(_after(1.01)), REGRESSED),
    Scenario("10 % noise, 1.15 times from one night on", noisy(_after(1.15)), REGRESSED),
    Scenario("10 % noise, 1.5 times from one night on", noisy(_after(1.5)), REGRESSED),
    Scenario("10 % noise, 1 % worse every night", noisy(_daily), REGRESSED),
    Scenario("two modes, 1 and 3 times, one night in two", bimodal(0.5), REGRESSED, nights=0),
    Scenario("two modes, 1 and 3 times, one night in ten", bimodal(0.1), REGRESSED, nights=0),
    Scenario("10 % noise, one Inf", noisy(_once(math.inf)), REGRESSED, nights=1),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Measured rates of one scenario."""

    scenario: Scenario
    false: int
    """Number of alarms on nights before the event, out of `quiet` nights."""
    quiet: int
    found: tuple[int | None, ...]
    """For each history, nights until the alarm, 0 for the first night; None if there was none."""

    def within(self, nights: int) -> float:
        """Return the fraction of histories with an alarm within this number of nights."""
        return sum(n is not None and n < nights for n in self.found) / len(self.found)


def measure(scenario: Scenario, histories: int, seed: int = 0) -> Rate:
    """Judge every night of a number of histories; each ends at the first alarm after the event."""
    false, quiet = 0, 0
    found: list[int | None] = []
    for history in range(histories):
        rng = np.random.default_rng([seed, history])
        first: int | None = None
        for night, decision in _nights(scenario, rng):
            alarm = decision.word is scenario.alarm
            if night >= 0 and alarm:
                first = night
                break
            if night < 0:
                quiet, false = quiet + 1, false + alarm
        found.append(first)
    return Rate(scenario, false, quiet, tuple(found))


def _nights(scenario: Scenario, rng: np.random.Generator) -> Iterator[tuple[int, Decision]]:
    """Yield the verdict of each night, judged as by `reports.registry.lookup.judge`; numbers are
    negative before the event. The baseline is pinned in the middle of the quiet nights.
    """
    values: list[float] = []
    pinned: tuple[Pin, ...] = ()
    before = None
    for night in range(-QUIET, scenario.nights):
        value = scenario.value(rng, night)
        run = _run(value, scenario.repeats)
        seen = {} if scenario.repeats else {KEY: Past(tuple(values[-NOISE_WINDOW:]), True)}
        if len(values) == NOISE_WINDOW:
            pinned = (pin_of(run, seen, "synthetic", "2026-11-20"),)
        if len(values) >= NOISE_WINDOW:
            yield night, decide(run, before, seen, pinned)
        values.append(value)
        before = run


def _run(value: float, repeats: bool) -> Run:
    row = Measurement(
        *KEY[:3], Kind.LOGITS, 1, KEY[3], value, TOLERANCE, Verdict.PASS, "float32", "cpu", "same",
        deterministic=repeats, suite="parity",
    )  # fmt: skip
    # One machine throughout: levels of another machine have wider limits.
    machine = Environment(device=Device("cpu"), host=dict.fromkeys(FIELDS, "synthetic"))
    suite = SuiteResult("parity", planned=1, executed=1, status="ran")
    contract = contract_of([Gate.of(row)])
    manifest = Manifest(
        "night", "2026-11-20", environment=machine, suites=(suite,), contract=contract
    )
    return Run(manifest, (row,))


def table(histories: int) -> str:
    """Return the measured rates as a Markdown table."""
    lines = [
        "| history of one gate | alarm | false alarms | 1st night | 3 nights | 7 nights "
        f"| {NIGHTS} nights | median night |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for scenario in SCENARIOS:
        rate = measure(scenario, histories)
        cells = ["", "", "", "", ""]
        if scenario.nights:
            spans = (1, 3, 7, NIGHTS) if scenario.nights > 1 else (1,)
            cells[: len(spans)] = [f"{100 * rate.within(n):.1f} %" for n in spans]
            ordered = sorted(NIGHTS if n is None else n for n in rate.found)
            middle = ordered[len(ordered) // 2]
            cells[4] = "never" if middle == NIGHTS else str(middle + 1)
        false = f"{rate.false} of {rate.quiet:,}"
        lines.append(f"| {scenario.name} | {scenario.alarm} | {false} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(1000))
