"""Runs a jitted function on one mesh in one precision, and assembles its values on the host.

Arguments are sharded as requested. Values are NumPy arrays by name, each with the number of
replicas that are not bit-identical. Source: docs/sharding.md "What is compared".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, NamedSharding

from parity.engine.programs.exits import exits_named
from parity.engine.programs.numpy_constants import convert_in_each_mode
from parity.engine.programs.yardstick import RUN_ONCE, known_options
from parity.mesh.placement import (
    Placement,
    assembled,
    path_name,
    placements,
    replica_differences,
    spec_of,
)
from parity.mesh.replay import MARK, Mark, Operation, Replay, body_of, marks_of

OUTPUT = "output"
"""Name of the result of a function that returns a single array, and prefix of result names that
would start with an index."""


@dataclass
class Values:
    """Marks and results of one run, assembled on the host."""

    arrays: dict[str, np.ndarray]
    """Marks and results by name, in order of computation."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Number of devices whose replica differs in any bit from the first replica, by name."""
    placements: dict[str, Placement] = field(default_factory=dict)
    """Placement with which the blocks of each mark inside `shard_map` were assembled, by name."""


@dataclass
class Program:
    """A function on one mesh, its arguments, and the program that was compiled last."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Pytrees; their arrays are placed on the mesh, other leaves are static."""
    shardings: Any
    """Tree of `NamedSharding`s of one mesh, with the structure of `arguments` or a prefix of it."""
    mesh: Mesh
    options: dict[str, Any] = field(default_factory=dict)
    """Compiler options of float32 programs."""
    declared: Mapping[str, Placement] = field(default_factory=dict)
    """Placements of marks inside `shard_map`, by name; placements of other marks follow from
    shapes."""
    compiled_text: str = ""
    """HLO text of the program compiled last."""
    result_names: tuple[str, ...] = ()
    """Names of the results of `compiled_text`, in order."""
    watched_text: str = ""
    """HLO text of the last compiled program whose results include the marks."""
    watched_names: tuple[str, ...] = ()
    """Names of the results of `watched_text`, in order."""
    found: dict[str, Placement] = field(default_factory=dict)
    """Placements with which the marks of `watched_text` were assembled, by name."""
    known_marks: tuple[str, ...] = ()
    """Names of all marks, once the program has run with them."""
    unread: dict[str, str] = field(default_factory=dict)
    """Types of the results that are neither arrays nor numbers, and so cannot be compared, by
    name."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, by name."""
        return dict(self.mesh.shape)

    def run(
        self,
        dtype: str,
        whole: dict[str, np.ndarray] | None = None,
        *,
        watched: bool = True,
        forced: dict[str, np.ndarray] | None = None,
        operation: Callable[[Any], Operation] | None = None,
        seeds: int = 0,
    ) -> Values | list[Values]:
        """Compile and run the function; return its values, or with `seeds` one `Values` per seed.

        Args:
            dtype: "float64" casts floating and complex arguments and enables 64-bit types;
                "float32" runs the function unmodified. In both, JAX's default precision of matrix
                products is "highest".
            whole: one device's values by name; the devices' blocks of a mark are assembled to the
                shape of its value.
            watched: return marks too. False: run the user's program unmodified; `whole`, `forced`,
                `operation` and `seeds` are then ignored.
            forced: values that replace marks in the rest of the computation, by name; the computed
                marks are still the ones returned.
            operation: returns, for a traced seed, the function that evaluates each equation
                instead of JAX.
            seeds: number of seeds to run; 0: one run.

        Raises:
            ValueError: the function cannot be traced, or names of results are not unique.
        """
        with self._context(dtype):
            closed, names, call, leaves = self._traced(dtype)
            if not watched:
                return self._plain(call, leaves, names, closed)
            held = {n: jnp.asarray(a) for n, a in (forced or {}).items()}
            specs = {n: spec_of(p) for n, p in self.declared.items()}
            replay = Replay()

            def replayed(seed: Any, held: Any, leaves: list[Any]) -> Any:
                nonlocal replay
                done = operation(seed) if operation else None
                replay = Replay(forced=held, placements=specs, operation=done)
                outputs, taken = replay.run(closed, leaves)
                return dict(zip(names, outputs, strict=True)), taken

            lowered = jax.jit(replayed).lower(jnp.int32(0), held, leaves)
            options = RUN_ONCE if dtype == "float64" else self.options
            compiled = lowered.compile(known_options(options))
            self.known_marks = tuple(replay.marks)
            self.compiled_text = compiled.as_text() or ""
            self.result_names = (*sorted(names), *sorted(replay.marks))
            runs = []
            for seed in range(max(seeds, 1)):
                outputs, taken = compiled(jnp.int32(seed), held, leaves)
                runs.append(self._values(closed, names, replay.marks, outputs, taken, whole))
            return runs if seeds else runs[0]

    @contextlib.contextmanager
    def _context(self, dtype: str) -> Iterator[None]:
        # "highest": at default precision, products on an accelerator may round their operands, a
        # second source of differences.
        wide = jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()
        with wide, jax.default_matmul_precision("highest"), jax.set_mesh(self.mesh):
            yield

    def planned(self, dtype: str, watched: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the values that `run` would return, by name, by tracing only.

        Args:
            dtype: as in `run`.
            watched: include marks.
        """
        with self._context(dtype):
            closed, names, _, _ = self._traced(dtype)
            found = dict(zip(names, closed.out_avals, strict=True))
            if watched:
                found |= _mark_avals(closed.jaxpr)
            return {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in found.items()}

    def _traced(self, dtype: str) -> tuple[ClosedJaxpr, list[str], Callable[..., Any], list[Any]]:
        """Return the jaxpr, the names of its results, the traced function and its arguments."""
        arguments, static = self._placed(dtype)
        leaves, tree = jax.tree.flatten(arguments)

        def call(*leaves: Any) -> Any:
            result = self.function(*eqx.combine(jax.tree.unflatten(tree, leaves), static))
            self.unread = _unread(result)
            return eqx.filter(jax.tree.map(lambda x: _numbers(x, dtype), result), eqx.is_array)

        convert_in_each_mode()
        with exits_named("the function that is compared on meshes"):
            closed, shape = jax.make_jaxpr(call, return_shape=True)(*leaves)
        return closed, _result_names(shape, marks_of(closed)), call, leaves

    def _placed(self, dtype: str) -> tuple[Any, Any]:
        """Return two trees: the arrays of the arguments, placed on the mesh, and static leaves."""
        spread = jax.tree.broadcast(self.shardings, self.arguments)
        arrays, static = eqx.partition(self.arguments, _is_array)

        def place(leaf: Any, sharding: NamedSharding) -> Any:
            if not isinstance(leaf, jax.Array):
                leaf = np.asarray(leaf)
            elif leaf.sharding.device_set != sharding.device_set:
                leaf = leaf if _is_key(leaf) else np.asarray(leaf)
            array = jax.device_put(leaf, sharding)
            if dtype != "float64" or _is_key(array):
                return array
            # Cast on the mesh, so that unequal replicas stay unequal.
            wide = {jnp.floating: jnp.float64, jnp.complexfloating: jnp.complex128}
            kind = next((k for k in wide if jnp.issubdtype(array.dtype, k)), None)
            return array if kind is None else array.astype(wide[kind])

        return jax.tree.map(place, arrays, eqx.filter(spread, _mask(arrays))), static

    def _plain(
        self, call: Callable[..., Any], leaves: list[Any], names: list[str], closed: ClosedJaxpr
    ) -> Values:
        compiled = jax.jit(call).lower(*leaves).compile(known_options(self.options))
        self.compiled_text, self.result_names = compiled.as_text() or "", tuple(names)
        outputs = dict(zip(names, jax.tree.leaves(compiled(*leaves)), strict=True))
        return self._values(closed, names, {}, outputs, {}, None)

    def _values(
        self,
        closed: ClosedJaxpr,
        names: list[str],
        marks: Mapping[str, Mark],
        outputs: Mapping[str, Any],
        taken: Mapping[str, Any],
        whole: dict[str, np.ndarray] | None,
    ) -> Values:
        found = Values({})
        for name in computed_order(closed, names, bool(marks)):
            value = taken[name] if name in marks else outputs[name]
            mark = marks.get(name)
            if mark is None or not mark.axes:
                found.replicas[name] = replica_differences(value)
                found.arrays[name] = host(value)
            else:
                self._gather(found, mark, host(value), None if whole is None else whole.get(name))
        return found

    def _gather(self, found: Values, mark: Mark, value: np.ndarray, whole: Any) -> None:
        stack = np.moveaxis(value, mark.loops, 0)
        sizes = {axis: self.sizes[axis] for axis in mark.axes}
        block = stack.shape[1:]
        shape = block if whole is None else whole.shape
        if mark.name in self.declared:
            ways = [self.declared[mark.name]]
        else:
            ways = list(placements(shape, block, sizes, mark.varying))
        candidates = [(way, *assembled(stack, way, sizes)) for way in ways]
        if not candidates:
            # No placement gives the expected shape. Take one block: the comparison then reports
            # that the shapes differ.
            candidates = [(((),) * len(block), stack[0], 0)]
        if whole is None or len(candidates) == 1:
            way, array, differing = candidates[0]
        else:
            # Several placements fit the shapes; choose the one closest to one device's value.
            way, array, differing = min(candidates, key=lambda c: _distance(c[1], c[2], whole))
        found.arrays[mark.name], found.replicas[mark.name] = array, differing
        found.placements[mark.name] = way


def _distance(array: np.ndarray, differing: int, whole: np.ndarray) -> tuple[bool, float]:
    apart = np.abs(array.astype(np.float64) - whole.astype(np.float64))
    return differing > 0, float(np.sum(apart)) if np.isfinite(apart).all() else np.inf


def host(value: Any) -> np.ndarray:
    """Return an array as a NumPy array of real numbers.

    A complex array gets a last axis (re, im); a PRNG key becomes its integers. Floats narrower than
    float32 become float32, which is exact.
    """
    if _is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if np.iscomplexobj(array):
        array = np.stack([np.real(array), np.imag(array)], axis=-1)
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(np.float32) if narrow else array


def computed_order(closed: ClosedJaxpr, names: list[str], watched: bool = True) -> list[str]:
    """Return the names of results, and of marks if `watched`, in order of computation.

    The position of a result is that of the equation that produces it, also inside calls and loops.
    So the gradient of the last layer, which is complete first, comes first.
    """
    births: list[tuple[tuple[int, ...], str]] = []
    if watched:
        births += [(place, name) for place, name, _ in _numbered_marks(closed.jaxpr)]
    for name, atom in zip(names, closed.jaxpr.outvars, strict=True):
        births.append((_birth(closed.jaxpr, atom), name))
    return [name for _, name in sorted(births, key=lambda birth: birth[0])]


def _birth(jaxpr: Jaxpr, atom: Any) -> tuple[int, ...]:
    for index, eqn in enumerate(jaxpr.eqns):
        if any(atom is out for out in eqn.outvars):
            body = body_of(eqn)
            if body is None:
                return (index,)
            place = next(i for i, out in enumerate(eqn.outvars) if out is atom)
            return (index, *_birth(body[0], body[0].outvars[place]))
    return (-1,)


def _mark_avals(jaxpr: Jaxpr) -> dict[str, Any]:
    return {name: aval for _, name, aval in _numbered_marks(jaxpr)}


def _numbered_marks(jaxpr: Jaxpr) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """Yield position, name and abstract value of every mark; repeated names are numbered.

    A position is the index of the equation, preceded by those of the equations that contain it.
    """
    passed: dict[str, int] = {}
    for place, name, aval in _mark_places(jaxpr, ()):
        count = passed[name] = passed.get(name, -1) + 1
        yield place, f"{name}#{count}" if count else name, aval


def _mark_places(jaxpr: Jaxpr, at: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    for index, eqn in enumerate(jaxpr.eqns):
        body = body_of(eqn)
        if eqn.primitive.name == MARK:
            yield (*at, index), eqn.params["name"], eqn.outvars[0].aval
        elif body is not None:
            yield from _mark_places(body[0], (*at, index))


def _result_names(shape: Any, marks: list[str]) -> list[str]:
    """Return the names of results, in order.

    Args:
        shape: pytree of the results.
        marks: names of all marks.

    Raises:
        ValueError: a name occurs twice among results and marks.
    """
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(shape):
        name = path_name(path)
        # A name that is an index, or that a mark has, is prefixed.
        plain = name and not name[0].isdigit() and name not in marks
        names.append(name if plain else f"{OUTPUT}/{name}".rstrip("/"))
    every = [*names, *marks]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise ValueError(
            f"compare_meshes: several results or marks are called {', '.join(twice)}. A result is "
            "named by its keys in the returned tree, joined by /; rename a key or a mark."
        )
    return names


def _numbers(x: Any, dtype: str) -> Any:
    """Return `x` as a JAX array if it is a Python or NumPy number, else unchanged."""
    if isinstance(x, jax.Array) or not eqx.is_array_like(x):
        return x
    kind = np.asarray(x).dtype
    if not (jnp.issubdtype(kind, np.number) or kind == np.bool_):
        return x
    # The number is no traced value, so casting the arguments to float64 did not widen it.
    wide = dtype == "float64" and jnp.issubdtype(kind, np.floating)
    return jnp.asarray(x, jnp.float64 if wide else None)


def _unread(result: Any) -> dict[str, str]:
    """Return the types of results that cannot be compared, as text, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(result)
    return {
        path_name(path) or OUTPUT: f"a {type(x).__name__}, not an array"
        for path, x in leaves
        if not eqx.is_array_like(x)
    }


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, (np.ndarray, np.generic))


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _mask(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x is not None, arrays, is_leaf=lambda x: x is None)
