"""Calibrate the noise floor: what one unit roundoff everywhere does to each quantity.

The oracle runs again with every weight and every named intermediate multiplied by `1 +- 2^-24`,
signs at random; the floor is the root mean square of the relative L2 response over the seeds. A
float32 implementation that rounds correctly cannot be expected below it. Source: spec/parity.md
"Tolerances".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from parity import oracle
from parity.cases import NEW_TOKENS, Case
from parity.compare import relative_l2
from parity.tolerances import NOISE_FILE, NoiseFloors

UNIT_ROUNDOFF = 2.0**-24
SEEDS = 10


def truth(case: Case, *, mask_ema: bool | None = None) -> dict[str, np.ndarray]:
    """Return the oracle's arrays for a case, float64; `mask_ema` None means as configured."""
    return _run(case, case.weights, oracle.unchanged, mask_ema)


def forward_truth(case: Case) -> dict[str, np.ndarray]:
    """Return the oracle's taps of a case without cuts, float64, and no derivatives."""
    return _forward(case, case.weights, oracle.unchanged)


def noise_floors(case: Case, seeds: int = SEEDS) -> dict[str, float]:
    """Return the floor of every quantity of a case, as relative L2."""
    exact = truth(case)

    def moved(jitter: oracle.Tap) -> dict[str, np.ndarray]:
        return _run(case, _jittered(case, jitter), jitter, None)

    return _floors(exact, moved, seeds)


def forced_floors(case: Case, seeds: int = SEEDS) -> dict[str, float]:
    """Return the floor of every tap of a case computed from the taps before it, as relative L2.

    Weights, what a stage is fed and what it returns are moved, and nothing is carried on.
    """
    exact = forward_truth(case)

    def moved(jitter: oracle.Tap) -> dict[str, np.ndarray]:
        found = {}

        def tap(name: str, value: np.ndarray) -> np.ndarray:
            found[name] = jitter(name, value)
            return jitter(name, exact[name])

        _forward(case, _jittered(case, jitter), tap)
        return found

    return _floors(exact, moved, seeds)


def _forward(case: Case, weights, tap: oracle.Tap) -> dict[str, np.ndarray]:
    taps = {}

    def keep(name: str, value: np.ndarray) -> np.ndarray:
        taps[name] = tap(name, value)
        return taps[name]

    wide = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    batch, mask_ema = case.batch, case.config.mask_ema
    oracle.forward(case.config, wide, batch.ids, batch.mask, mask_ema=mask_ema, tap=keep)
    return taps


def _floors(
    exact: dict[str, np.ndarray],
    moved: Callable[[oracle.Tap], dict[str, np.ndarray]],
    seeds: int,
) -> dict[str, float]:
    squares = dict.fromkeys(exact, 0.0)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)

        def jitter(name: str, value: np.ndarray, rng: Any = rng) -> np.ndarray:
            return value * (1 + UNIT_ROUNDOFF * rng.choice([-1.0, 1.0], size=np.shape(value)))

        arrays = moved(jitter)
        for name, value in exact.items():
            squares[name] += relative_l2(arrays[name], value) ** 2
    return {name: float(np.sqrt(total / seeds)) for name, total in squares.items()}


def _jittered(case: Case, jitter: oracle.Tap) -> dict[str, np.ndarray]:
    return {name: jitter(name, w.astype(np.float64)) for name, w in case.weights.items()}


def extended(floors: NoiseFloors, cases: Iterable[Case]) -> NoiseFloors:
    """Return the floors with those of further cases measured now: a checkpoint nobody committed."""
    entries = {case.name: {"hash": case.hash, "floors": noise_floors(case)} for case in cases}
    return NoiseFloors(floors.cases | entries)


def write(cases: Iterable[Case], path: Path = NOISE_FILE) -> None:
    """Calibrate the cases and rewrite the committed table; review the change as a diff."""
    entries = {}
    for case in cases:
        floors = {name: float(f"{floor:.2e}") for name, floor in noise_floors(case).items()}
        entries[case.name] = {"hash": case.hash, "floors": floors}
    document = {"unit_roundoff": UNIT_ROUNDOFF, "seeds": SEEDS, "cases": entries}
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(document, indent=1) + "\n")
    aside.replace(path)


def _run(case: Case, weights, tap, mask_ema: bool | None) -> dict[str, np.ndarray]:
    wide = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    batch = case.batch
    if case.cuts:
        return oracle.stream(case.config, wide, batch.ids, case.cuts, NEW_TOKENS, tap=tap)
    mask_ema = case.config.mask_ema if mask_ema is None else mask_ema
    return oracle.run(
        case.config, wide, batch.ids, batch.labels, batch.mask, mask_ema=mask_ema, tap=tap
    )
