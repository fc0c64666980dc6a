"""Accuracy of a port pooled over draws of weights and inputs: one draw is one throw of dice.

The gates of a small model respond to rounding together: one rounded weight moves all that follows
it, and the 26 gates of a case are worth one or two independent numbers. A level that is to mean
something on a second machine needs more draws of the same program. See docs/verdicts.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.engine.bounds import NoiseFloors, bound_from, rule
from parity.engine.compare import Comparison, Work
from parity.engine.measurement import Measurement
from parity.engine.metrics import relative_l2
from parity.engine.quantity import kind_of
from parity.port import Side, digest_of
from parity.port_tolerances import PORTS, PortEdge

POOLED = "rel_l2_pooled"
"""The metric: geometric mean, over draws, of the relative L2 of a quantity. A root mean square is
that of the worst draw, and scatters as it does: 0.27 in ln where this scatters 0.1."""
DRAWS = 16
"""At 16 the levels of the second architecture on the two most different hosts measured were 0.95
to 1.13 of each other; at one, 0.4 to 3.5 (docs/verdicts.md)."""


@dataclass(frozen=True)
class Draw:
    """One draw of the same program's parameters and inputs, as `parity.port.check` takes them."""

    model: Any
    inputs: tuple[Any, ...]
    original: Mapping[str, np.ndarray] | None = None
    """What the original computes of it in float32, where it is at hand."""


@dataclass(frozen=True)
class Pool:
    """What draws of a port say together."""

    measurements: tuple[Measurement, ...]
    responses: dict[str, tuple[float, ...]]
    """By quantity, the relative L2 response of each draw to one seed of rounding."""


def pool(
    function: Callable[..., Any],
    draws: Sequence[Draw],
    *,
    name: str,
    suite: str = "",
    device: str = "cpu",
) -> Pool:
    """Measure the error of a port over draws, and the noise floor of that error.

    Every draw runs in float32 twice, which tells what repeats, in float64, and in float64 moved by
    rounding with a seed of its own. The bound is that of a single draw, with the floor of the pool.

    Args:
        function: the port, as `parity.port.check` takes it.
        draws: of equal shapes, so that they share two programs; originals for all or for none.
        name: what measurements call the case.
        suite: the port they are filed under, as of `parity.port.check`.
        device: what they call the default device.
    """
    side = Side.of(function, draws[0].model, draws[0].inputs)
    live = all(draw.original is not None for draw in draws)
    edges = tuple(PortEdge)[1 : 4 if live else 2]
    responses: dict[str, list[float]] = {}
    errors: dict[tuple[PortEdge, str], list[float]] = {}
    repeats = dict.fromkeys(side.order, True)
    digest = hashlib.sha256(repr(side.order).encode())
    for seed, draw in enumerate(draws):
        one = side.on(draw.model, draw.inputs)
        exact, ours, again = (one.run(dtype) for dtype in ("float64", "float32", "float32"))
        noisy = one.run("float64", np.random.default_rng(seed), exact)
        digest.update(digest_of(one.order, draw.model, draw.inputs).encode())
        sides = {"port64": exact, "port32": ours, "original32": draw.original or {}}
        for quantity in side.order:
            same = np.array_equal(ours[quantity], again[quantity], equal_nan=True)
            repeats[quantity] &= same
            apart = relative_l2(noisy[quantity], exact[quantity])
            responses.setdefault(quantity, []).append(apart)
            for edge in edges:
                actual, expected = (sides[s].get(quantity) for s in edge.sides)
                error = math.nan
                if actual is not None and expected is not None:
                    error = relative_l2(actual, expected)
                errors.setdefault((edge, quantity), []).append(error)
    work = Work(name, digest.hexdigest()[:16], side.order, suite=suite or name)
    rows = []
    for (edge, quantity), values in errors.items():
        bound = bound_from(rule(PORTS, edge, kind_of(quantity)), _mean(responses[quantity]))
        comparison = Comparison(work, edge, NoiseFloors({}, PORTS), edge.dtype, device)
        row = comparison.gate(quantity, POOLED, _mean(values), bound)
        rows.append(replace(row, deterministic=repeats[quantity]))
    return Pool(tuple(rows), {name: tuple(values) for name, values in responses.items()})


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean, 0 where one of them is 0, and NaN where one is no number."""
    if not all(math.isfinite(value) for value in values):
        return math.nan
    return 0.0 if 0.0 in values else math.exp(sum(map(math.log, values)) / len(values))
