"""Your own port: any JAX function and the torch module it was made from, by the same engine.

The truth for rounding is the port itself in float64: an original that is further from it than its
rounding explains computes something else. Where that starts is asked stage by stage, each fed the
original's values. Names are given by `jax.ad_checkpoint.checkpoint_name` in the port, and by
submodule paths in the original. Source: docs/your-own-port.md, docs/parity.md "First divergence".
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from parity.engine.bounds import NoiseFloors, bound_from, rule
from parity.engine.compare import Comparison, Work
from parity.engine.instrument import capture
from parity.engine.localize import Stage, first_divergence
from parity.engine.measurement import Kind, Measurement
from parity.engine.metrics import relative_l2
from parity.engine.rounding_noise import UNIT_ROUNDOFF, moved, responses, summed
from parity.engine.rounding_noise import floors as noise_floors
from parity.port_tolerances import PORTS, PortEdge

Arrays = dict[str, np.ndarray]
OUTPUT = "output"
"""What the result of the function is called."""
FORCED = PortEdge.PORT32_ORIGINAL32


@contextlib.contextmanager
def watched(module: Any, paths: Mapping[str, str]) -> Iterator[Arrays]:
    """Context in which the outputs of submodules of a torch module are kept, by name.

    Args:
        module: a `torch.nn.Module`.
        paths: path of a submodule by the name its output is to have; the path "" is the module.

    Raises:
        ValueError: a path leads nowhere.
    """
    kept: Arrays = {}
    known = dict(module.named_modules())
    if lost := sorted(set(paths.values()) - set(known)):
        raise ValueError(
            f"watched: no submodule {', '.join(map(repr, lost))}; there are "
            f"{', '.join(map(repr, known))}."
        )

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[name] = output.detach().cpu().numpy().copy()

        return hook

    hooks = [known[path].register_forward_hook(keep(name)) for name, path in paths.items()]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Report:
    """What was found: every gate, and every stage on its own."""

    measurements: tuple[Measurement, ...]
    stages: tuple[Stage, ...]
    """Free and forced error of each stage against the original, in the order of the port."""
    values: Arrays
    """What the port computed in float32."""
    responses: dict[str, tuple[float, ...]]
    """By quantity, the relative L2 response to each seed of rounding."""

    @property
    def holds(self) -> bool:
        """Whether every gate holds."""
        return first_divergence(self.measurements) is None

    @property
    def culprit(self) -> Stage | None:
        """The first stage that is wrong fed the right inputs; None where all gates hold."""
        return None if self.holds else next((s for s in self.stages if s.broken), None)


def check(
    function: Callable[..., Any],
    model: Any,
    inputs: tuple[Any, ...],
    original: Mapping[str, Any],
    original64: Mapping[str, Any] | None = None,
    *,
    name: str = "port",
    suite: str = "",
    device: str = "cpu",
    forced: bool = True,
) -> Report:
    """Compare a port with what its original computed.

    A derivative is a mark as well: a function that differentiates names its results
    `grad/<parameter>`, and they are held to the rules for gradients.

    Args:
        function: the port, `function(model, *inputs)`, its intermediates marked by
            `checkpoint_name`; it returns one array.
        model: float32 parameters, any pytree; matrices as (outputs, inputs).
        inputs: arrays; floating ones float32.
        original: float32 arrays by the names of the port's marks, and `OUTPUT`.
        original64: what the original computes in float64, if it can; some of the same names.
        name: what measurements call the case.
        suite: the port they are filed under; its name where it has one case only.
        device: what they call the default device.
        forced: whether every stage also runs on the original's values, which says where a
            difference starts and costs eleven more runs.

    Raises:
        ValueError: a parameter is not float32.
    """
    named = {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(model)}
    if wrong := [f"{n} {x.dtype}" for n, x in named.items() if _floating(x) and _wide(x)]:
        raise ValueError(f"check: expected float32 parameters, got {', '.join(sorted(wrong))}.")
    side = Side.of(function, model, inputs)
    exact, ours = side.run("float64"), side.run("float32")
    order = tuple(exact)
    digest = digest_of(order, model, inputs)
    noise = responses(exact, lambda rng: side.run("float64", rng, exact))
    known = NoiseFloors({name: {"hash": digest, "responses": noise}}, PORTS)
    work = Work(name, digest, order, suite=suite or name)

    def edge(sides: PortEdge, actual: Mapping[str, Any], expected: Mapping[str, Any]):
        return Comparison(work, sides, known, sides.dtype, device).run(actual, expected)

    theirs = {quantity: np.asarray(a) for quantity, a in original.items()}
    rows = edge(PortEdge.PORT32_PORT64, ours, exact)
    rows += edge(PortEdge.ORIGINAL32_PORT64, theirs, exact)
    rows += edge(PortEdge.PORT32_ORIGINAL32, ours, theirs)
    if original64 is not None:
        wide = {quantity: np.asarray(a) for quantity, a in original64.items()}
        named_too = {n: exact[n] for n in exact if n in wide}
        rows += edge(PortEdge.PORT64_ORIGINAL64, named_too, wide)
    stages = _stages(side, exact, ours, theirs) if forced else ()
    return Report(tuple(rows), stages, ours, noise)


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


def _stages(side: Side, exact: Arrays, ours: Arrays, theirs: Arrays) -> tuple[Stage, ...]:
    """Feed every stage the original's values; nothing can be said of stages it does not name."""
    forced = side.run("float32", forced=theirs)

    def perturbed(rng: np.random.Generator) -> Arrays:
        fed = {name: moved(value, rng) for name, value in exact.items()}
        return side.run("float64", rng, exact, forced=fed)

    floors, row = noise_floors(exact, perturbed), rule(PORTS, FORCED, Kind.BLOCK)
    return tuple(
        Stage(
            name,
            relative_l2(ours[name], theirs[name]),
            relative_l2(forced[name], theirs[name]),
            bound_from(row, floors[name]),
        )
        for name in exact
        if name in theirs
    )


@dataclass(frozen=True)
class Side:
    """The port, to be run in any precision, moved or forced."""

    function: Callable[..., Any]
    model: Any
    inputs: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the marks, in the order in which they are computed."""

    @classmethod
    def of(cls, function: Callable[..., Any], model: Any, inputs: tuple[Any, ...]) -> Side:
        """Trace the port once to learn its marks."""
        found: dict[str, tuple[int, ...]] = {}

        def note(model: Any, inputs: Any) -> Any:
            marked = _marked(function, model, inputs, {}, {})
            found.update({name: value.shape for name, value in marked.items()})
            return marked

        eqx.filter_eval_shape(note, *(_cast(tree, "float32", None) for tree in (model, inputs)))
        return cls(function, model, inputs, found)

    def on(self, model: Any, inputs: tuple[Any, ...]) -> Side:
        """Return the same port with other numbers of the same shapes."""
        return replace(self, model=model, inputs=inputs)

    def run(
        self,
        dtype: str,
        rng: np.random.Generator | None = None,
        exact: Arrays | None = None,
        forced: Mapping[str, np.ndarray] | None = None,
    ) -> Arrays:
        """Return marks and output; with `rng`, everything moved by what rounding does to it."""
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
            model, inputs = (_cast(tree, dtype, rng) for tree in (self.model, self.inputs))
            # Offsets of 0: a run that moves nothing is the same program as one that does.
            offsets = {name: jnp.zeros(shape, dtype) for name, shape in self.shapes.items()}
            if rng is not None and exact is not None:
                offsets = {n: jnp.asarray(moved(a, rng) - a) for n, a in exact.items()}
            held = {n: jnp.asarray(a, dtype) for n, a in (forced or {}).items() if n != OUTPUT}
            found = _compiled(self.function, model, inputs, offsets, held)
            return {name: np.asarray(found[name]) for name in self.order}

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the marks as they are computed; a compiled function returns them by alphabet."""
        return tuple(self.shapes)


def _cast(tree: Any, dtype: str, rng: np.random.Generator | None) -> Any:
    def cast(x: Any) -> Any:
        if not _floating(x):
            return x
        wide = np.asarray(x, np.float64)
        if rng is not None:
            sums = summed(x.shape[-1]) if x.ndim > 1 else UNIT_ROUNDOFF
            wide = moved(wide, rng, sums)
        return jnp.asarray(wide, dtype)

    return jax.tree.map(cast, tree)


def _marked(
    function: Callable[..., Any], model: Any, inputs: Any, offsets: Any, held: Any
) -> dict[str, Any]:
    params, static = eqx.partition(model, eqx.is_array)

    def call(params: Any, inputs: Any) -> Any:
        return function(eqx.combine(params, static), *inputs)

    output, intermediates = capture(call, offsets=offsets, forced=held)(params, inputs)
    return intermediates | {OUTPUT: output + offsets.get(OUTPUT, 0.0)}


_compiled = eqx.filter_jit(_marked)


def _floating(x: Any) -> bool:
    return eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _wide(x: Any) -> bool:
    return jnp.result_type(x) != jnp.float32 or not math.prod(np.shape(x))
