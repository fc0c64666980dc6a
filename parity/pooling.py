"""Accuracy of a port pooled over draws of weights and inputs: one draw is one throw of dice.

The gates of a small model respond to rounding together: one rounded weight moves all that follows
it, and the 26 gates of a case are worth one or two independent numbers. A level that is to mean
something on a second machine needs more draws of the same program. See docs/verdicts.md.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from parity.engine import rounding_noise
from parity.engine.bounds import NoiseFloors, bound_from, rule
from parity.engine.compare import Comparison, Work
from parity.engine.instrument import capture
from parity.engine.measurement import Measurement
from parity.engine.metrics import relative_l2
from parity.engine.quantity import kind_of
from parity.engine.rounding_noise import UNIT_ROUNDOFF, moved, summed
from parity.engine.yardstick import RUN_OFTEN, known_options
from parity.port_tolerances import PORTS, PortEdge
from parity.sides.side import OUTPUT

POOLED = "rel_l2_pooled"
"""The metric: geometric mean, over draws, of the relative L2 of a quantity. A root mean square is
that of the worst draw, and scatters as it does: 0.27 in ln where this scatters 0.1."""
DRAWS = 16
"""At 16 the levels of the second architecture on the two most different hosts measured were 0.95
to 1.13 of each other; at one, 0.4 to 3.5 (docs/verdicts.md)."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Draw:
    """One draw of the same program's parameters and inputs."""

    model: Any
    """Any pytree of parameters, float32; matrices as (outputs, inputs)."""
    inputs: tuple[Any, ...]
    """Arrays; floating ones float32."""
    original: Mapping[str, np.ndarray] | None = None
    """What the original computes of it in float32, where it is at hand."""


@dataclass(frozen=True)
class Pool:
    """What draws of a port say together."""

    measurements: tuple[Measurement, ...]
    responses: dict[str, tuple[float, ...]]
    """By quantity, the relative L2 response of each draw to one seed of rounding."""
    first: dict[str, tuple[float, ...]]
    """By quantity, that of the first draw to each of several seeds."""


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
        function: the port, `function(model, *inputs)`, which returns one array; its intermediates
            are marked by `checkpoint_name`, and so are derivatives, as `grad/<parameter>`.
        draws: of equal shapes, so that they share two programs; originals for all or for none.
        name: what measurements call the case.
        suite: the port they are filed under; its name where it has one case only.
        device: what they call the default device.
    """
    program = Program.of(function, draws[0].model, draws[0].inputs)
    live = all(draw.original is not None for draw in draws)
    edges = tuple(PortEdge)[1 : 4 if live else 2]
    responses: dict[str, list[float]] = {}
    first: dict[str, tuple[float, ...]] = {}
    errors: dict[tuple[PortEdge, str], list[float]] = {}
    repeats = dict.fromkeys(program.order, True)
    digest = hashlib.sha256(repr(program.order).encode())
    for seed, draw in enumerate(draws):
        one = program.on(draw.model, draw.inputs)
        exact, ours, again = (one.run(dtype) for dtype in ("float64", "float32", "float32"))
        noisy = one.run("float64", np.random.default_rng(seed), exact)
        first = first or one.responses(exact)
        digest.update(digest_of(one.order, draw.model, draw.inputs).encode())
        sides = {"port64": exact, "port32": ours, "original32": draw.original or {}}
        for quantity in program.order:
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
    work = Work(name, digest.hexdigest()[:16], program.order, suite=suite or name)
    rows = []
    for (edge, quantity), values in errors.items():
        bound = bound_from(rule(PORTS, edge, kind_of(quantity)), _mean(responses[quantity]))
        comparison = Comparison(work, edge, NoiseFloors({}, PORTS), edge.dtype, device)
        row = comparison.gate(quantity, POOLED, _mean(values), bound)
        rows.append(replace(row, deterministic=repeats[quantity]))
    return Pool(tuple(rows), {name: tuple(values) for name, values in responses.items()}, first)


@dataclass(frozen=True)
class Program:
    """The port by its marks, to be run on one draw after the other, in two precisions, or moved."""

    function: Callable[..., Any]
    model: Any
    inputs: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the marks, in the order in which they are computed."""

    @classmethod
    def of(cls, function: Callable[..., Any], model: Any, inputs: tuple[Any, ...]) -> Program:
        """Trace the port once to learn its marks."""
        found: dict[str, tuple[int, ...]] = {}

        def note(model: Any, inputs: Any) -> Any:
            marked = _marked(function, model, inputs, {})
            found.update({name: value.shape for name, value in marked.items()})
            return marked

        eqx.filter_eval_shape(note, *(_cast(tree, "float32", None) for tree in (model, inputs)))
        return cls(function, model, inputs, found)

    def on(self, model: Any, inputs: tuple[Any, ...]) -> Program:
        """Return the same port with other numbers of the same shapes."""
        return replace(self, model=model, inputs=inputs)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the marks as they are computed; a compiled function returns them by alphabet."""
        return tuple(self.shapes)

    def run(
        self, dtype: str, rng: np.random.Generator | None = None, exact: Arrays | None = None
    ) -> Arrays:
        """Return marks and output; with `rng`, everything moved by what rounding does to it."""
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
            model, inputs = (_cast(tree, dtype, rng) for tree in (self.model, self.inputs))
            # Offsets of 0: a run that moves nothing is the same program as one that does.
            offsets = {name: jnp.zeros(shape, dtype) for name, shape in self.shapes.items()}
            if rng is not None and exact is not None:
                offsets = {n: jnp.asarray(moved(a, rng) - a) for n, a in exact.items()}
            compiled = _yardstick() if dtype == "float64" else _compiled
            found = compiled(self.function, model, inputs, offsets)
            return {name: np.asarray(found[name]) for name in self.order}

    def responses(self, exact: Arrays) -> dict[str, tuple[float, ...]]:
        """Return the relative L2 response of every quantity, seed by seed."""
        return rounding_noise.responses(exact, lambda rng: self.run("float64", rng, exact))


def digest_of(order: tuple[str, ...], model: Any, inputs: tuple[Any, ...]) -> str:
    """Return a hash of all that decides the numbers but the code: equal hashes mean equal work."""
    found = hashlib.sha256(repr(order).encode())
    named = {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(model)}
    arrays = {**named, **{f"input {i}": x for i, x in enumerate(jax.tree.leaves(inputs))}}
    for name, x in sorted(arrays.items()):
        if not eqx.is_array_like(x):
            continue
        held = np.ascontiguousarray(x)
        found.update(f"{name} {held.shape} {held.dtype}".encode() + held.tobytes())
    return found.hexdigest()[:16]


def _cast(tree: Any, dtype: str, rng: np.random.Generator | None) -> Any:
    def cast(x: Any) -> Any:
        if not eqx.is_array_like(x) or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        wide = np.asarray(x, np.float64)
        if rng is not None:
            sums = summed(x.shape[-1]) if x.ndim > 1 else UNIT_ROUNDOFF
            wide = moved(wide, rng, sums)
        return jnp.asarray(wide, dtype)

    return jax.tree.map(cast, tree)


def _marked(function: Callable[..., Any], model: Any, inputs: Any, offsets: Any) -> dict[str, Any]:
    params, static = eqx.partition(model, eqx.is_array)

    def call(params: Any, inputs: Any) -> Any:
        return function(eqx.combine(params, static), *inputs)

    output, intermediates = capture(call, offsets=offsets)(params, inputs)
    return intermediates | {OUTPUT: output + offsets.get(OUTPUT, 0.0)}


_compiled = eqx.filter_jit(_marked)


@functools.cache
def _yardstick() -> Callable[..., Any]:
    options: Any = {"compiler_options": known_options(RUN_OFTEN)}
    return eqx.filter_jit(_marked, **options)


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean, 0 where one of them is 0, and NaN where one is no number."""
    if not all(math.isfinite(value) for value in values):
        return math.nan
    return 0.0 if 0.0 in values else math.exp(sum(map(math.log, values)) / len(values))
