"""Accuracy of a port, pooled over several draws of weights and inputs.

The errors of a small model's stages are strongly correlated: one rounded weight perturbs everything
downstream, so the 26 gates of a case are worth one or two independent numbers. A comparison of
error levels between machines therefore needs more draws of the same program. See docs/verdicts.md.
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

from parity.engine.measure import rounding_noise
from parity.engine.measure.bounds import NoiseFloors, bound_from, rule
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.measurement import Measurement
from parity.engine.measure.metrics import POOLED, relative_l2
from parity.engine.measure.quantity import kind_of
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF, moved, summed
from parity.engine.programs.instrument import capture
from parity.engine.programs.yardstick import RUN_ONCE, known_options
from parity.port_tolerances import PORTS, PortEdge
from parity.sides.side import OUTPUT

DRAWS = 16
"""Number of draws. Between the two most different hosts measured, the error levels of the second
architecture (MLA + MoE) have ratios of 0.95 to 1.13 with 16 draws, and 0.4 to 3.5 with one
(docs/verdicts.md)."""


@dataclass(frozen=True)
class Draw:
    """One random draw of a program's parameters and inputs."""

    model: Any
    """Any pytree of float32 parameters; matrices have the shape (outputs, inputs)."""
    inputs: tuple[Any, ...]
    """Inputs of the program: arrays; floating-point arrays are float32."""
    original: Mapping[str, np.ndarray] | None = None
    """Stages (named intermediates) that the original computed in float32, by the port's names; None
    if the original is not available."""


@dataclass(frozen=True)
class Pool:
    """Results of `pool`: errors of a port, and its responses to simulated rounding."""

    measurements: tuple[Measurement, ...]
    """One gate per quantity and edge (pair of runs), with the metric `POOLED`."""
    responses: dict[str, tuple[float, ...]]
    """Relative L2 change under simulated rounding, by quantity: one value per draw, each with
    another seed."""
    first: dict[str, tuple[float, ...]]
    """Relative L2 change of the first draw under simulated rounding, by quantity: one value per
    seed."""


def pool(
    function: Callable[..., Any],
    draws: Sequence[Draw],
    *,
    name: str,
    suite: str = "",
    device: str = "cpu",
) -> Pool:
    """Measure the error of a port over draws, and the noise floor of that error.

    Every draw runs four times: twice in float32, to find the quantities with equal bits in both
    runs; in float64; and in float64 perturbed by simulated rounding, with another seed for each
    draw. The first draw is also perturbed with several seeds, for `Pool.first`. Errors and noise
    floors are pooled as geometric means. The tolerance rule for a single draw gives the bound from
    the pooled noise floor.

    Args:
        function: the port, `function(model, *inputs)`, which returns one array. The port marks its
            intermediates by `checkpoint_name`; derivatives are marked as `grad/<parameter>`.
        draws: draws of equal shapes, so that all share two compiled programs. If a draw has no
            `original`, every draw is compared with the port's own float64 run only.
        name: name of the case in the measurements.
        suite: suite of the measurements; "": the name of the case.
        device: class of the device in the measurements, "cpu" or "cuda".
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
    """A port with its parameters and inputs, ready to run.

    Its marks are the intermediates named by `checkpoint_name`, and the output, `OUTPUT`.
    """

    function: Callable[..., Any]
    model: Any
    inputs: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the marks by name, in order of computation."""

    @classmethod
    def of(cls, function: Callable[..., Any], model: Any, inputs: tuple[Any, ...]) -> Program:
        """Trace the port once to find its marks; return the program."""
        found: dict[str, tuple[int, ...]] = {}

        def note(model: Any, inputs: Any) -> Any:
            marked = _marked(function, model, inputs, {})
            found.update({name: value.shape for name, value in marked.items()})
            return marked

        eqx.filter_eval_shape(note, *(_cast(tree, "float32", None) for tree in (model, inputs)))
        return cls(function, model, inputs, found)

    def on(self, model: Any, inputs: tuple[Any, ...]) -> Program:
        """Return this program with other parameters and inputs of the same shapes."""
        return replace(self, model=model, inputs=inputs)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the marks, in order of computation."""
        return tuple(self.shapes)

    def run(
        self,
        dtype: str,
        rng: np.random.Generator | None = None,
        exact: dict[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the port and return its marks by name, in order of computation.

        Args:
            dtype: "float32" or "float64".
            rng: draws the signs that perturb every parameter and input by float32's rounding error;
                None: no perturbation.
            exact: marks of the unperturbed run, by name. If given with `rng`, every mark is
                perturbed too, by float32's rounding error of its value in `exact`.
        """
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
            model, inputs = (_cast(tree, dtype, rng) for tree in (self.model, self.inputs))
            # Zero offsets let unperturbed and perturbed runs share one compiled program.
            offsets = {name: jnp.zeros(shape, dtype) for name, shape in self.shapes.items()}
            if rng is not None and exact is not None:
                offsets = {n: jnp.asarray(moved(a, rng) - a) for n, a in exact.items()}
            compiled = _yardstick() if dtype == "float64" else _compiled
            found = compiled(self.function, model, inputs, offsets)
            return {name: np.asarray(found[name]) for name in self.order}

    def responses(self, exact: dict[str, np.ndarray]) -> dict[str, tuple[float, ...]]:
        """Return the relative L2 change of every quantity under simulated rounding, one per seed.

        Args:
            exact: unperturbed float64 results.
        """
        return rounding_noise.responses(exact, lambda rng: self.run("float64", rng, exact))


def digest_of(order: tuple[str, ...], model: Any, inputs: tuple[Any, ...]) -> str:
    """Return a hash of the marks' names and of the values of parameters and inputs.

    The hash has 16 hex digits.

    Args:
        order: names of the marks.
        model: pytree of parameters.
        inputs: inputs of the program.
    """
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
    options: Any = {"compiler_options": known_options(RUN_ONCE)}
    return eqx.filter_jit(_marked, **options)


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean of values; NaN if a value is not finite, else 0 if a value is 0."""
    if not all(math.isfinite(value) for value in values):
        return math.nan
    return 0.0 if 0.0 in values else math.exp(sum(map(math.log, values)) / len(values))
