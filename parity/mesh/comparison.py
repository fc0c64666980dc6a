"""Comparison of a jitted function on one device and on meshes, and location of the difference.

float64 is compared first, where only the order of sums may differ. The unmodified function follows;
there, the noise floor is the change of its results on one device when sums are reordered
(`parity.mesh.reordering`). Source: docs/sharding.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parity.engine.measure.bounds import NoiseFloors
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.constants import without_constants
from parity.engine.measure.localize import Stage, first_divergence
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.metrics import relative_l2, without_shared_infinities
from parity.engine.measure.quantity import kind_of
from parity.mesh.collectives import CompiledProgram, between
from parity.mesh.placement import Placement, path_name, placement_of
from parity.mesh.program import Program, Values
from parity.mesh.reordering import SEEDS, reordered
from parity.mesh.report import MeshReport, MeshResult
from parity.mesh.tolerance_table import MESHES, MeshEdge

EDGES = {"float64": MeshEdge.MESH64_ONE64, "float32": MeshEdge.MESH32_ONE32}
"""Compared pair of sides by precision; "float32" stands for the unmodified function."""
COMPARES = ("rel_l2", "unequal", "disagreement")
"""Metrics that compare a result on the mesh with the result on one device. The metric `replicas` is
left out: it compares copies of one result on several devices of the mesh."""
REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError, KeyError, AttributeError)
"""Exceptions that JAX raises if a program cannot run on a mesh."""


def compare_meshes(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    shardings: Sequence[Any],
    *,
    name: str = "step",
    marks: Mapping[str, PartitionSpec] | None = None,
    precisions: Sequence[str] = ("float64", "float32"),
    watched: Sequence[str] = ("float64", "float32"),
    reorder: bool = True,
    forced: bool = True,
    masked_outputs: bool = False,
    orders: int = SEEDS,
    compiler_options: Mapping[str, Any] | None = None,
    suite: str = "mesh",
    device: str = "cpu",
) -> MeshReport:
    """Compare a function's results on one device with those on each of several meshes.

    Results are named by their path in the returned pytree, such as `loss` or `grad/w1`. Marks
    (intermediates named with `jax.ad_checkpoint.checkpoint_name`) are compared too, by that name.
    The function is traced again with each mesh as the current one, so that `jax.shard_map` finds
    the mesh. An argument that already has the requested sharding on that mesh is used unchanged,
    even if its replicas differ.

    Args:
        function: function of the arguments; returns any pytree.
        arguments: pytrees. Their arrays are placed on the mesh; other leaves are not changed.
        shardings: for each mesh a tree of `NamedSharding`s, with the structure of the arguments or
            a prefix of it (`layouts` makes these trees). All meshes have the same axis names.
        name: first part of the case name in measurements; the mesh is appended.
        marks: shardings of marks inside `shard_map`, by name. For a mark without one, the devices'
            blocks are assembled so that they give the shape on one device. If several arrangements
            of the blocks do, the one whose values are closest to those on one device is chosen.
        precisions: "float64", "float32" or both; "float32" is the unmodified function, in whatever
            dtype it computes.
        watched: precisions in which marks are compared too. For the unmodified function this
            compiles a second program.
        reorder: if a float64 bound is exceeded, measure the response to reordered sums, and report
            a failure only if the error exceeds the bound with this response as noise floor too.
        forced: after a failure, compute every mark again from one device's values of the marks
            before it, to find the first one that is wrong by itself.
        masked_outputs: accept infinite elements of results, such as masked scores, if one device
            has the same infinities in float64. Otherwise an infinite result fails.
        orders: number of float32 runs with reordered sums on one device, at least `SEEDS`.
            Tolerances come from the first `SEEDS` runs; `MeshResult.responses` has all.
        compiler_options: options of `jax.jit` for float32 programs; None: none, as users compile.
            Float64 programs are always compiled with `parity.engine.programs.yardstick.RUN_ONCE`.
        suite: name of the suite in the measurements.
        device: device named in the measurements.

    Raises:
        ValueError: no mesh or a mesh of one device is given, meshes have different axes, a
            precision is unknown, there are too few orders, or names of results are not unique.
        Exception: any exception that the function raises on one device. On a mesh, `REFUSALS` are
            reported as a failure of that mesh.
    """
    meshes = [_mesh_of(layout) for layout in shardings]
    axes = {mesh.axis_names for mesh in meshes}
    if len(axes) != 1:
        raise ValueError(
            f"compare_meshes: expected meshes with the same axes, got {sorted(axes) or 'none'}; "
            "give every mesh all axes, with size 1 where it does not use one."
        )
    if alone := [dict(mesh.shape) for mesh in meshes if mesh.size == 1]:
        raise ValueError(
            f"compare_meshes: expected meshes of at least two devices, got {alone[0]}: one device "
            "would be compared with itself."
        )
    if not precisions or set(precisions) - set(EDGES):
        raise ValueError(
            f"compare_meshes: expected precisions among {', '.join(EDGES)}, got {precisions}."
        )
    if orders < SEEDS:
        raise ValueError(
            f"compare_meshes: expected at least {SEEDS} float32 runs with reordered sums, from "
            f"which tolerances are computed, got orders={orders}."
        )
    options = dict(compiler_options or {})
    one = _One(function, arguments, shardings[0], meshes[0], frozenset(watched), orders, options)
    declared = {n: tuple(spec) for n, spec in (marks or {}).items()}
    results = []
    for mesh, layout in zip(meshes, shardings, strict=True):
        program = Program(function, arguments, layout, mesh, options)
        case = f"{name} {mesh_name(mesh)}"
        sides = _Sides(
            one, program, declared, case, suite, device, frozenset(watched), masked_outputs
        )
        results.append(sides.result(precisions, reorder, forced))
    return MeshReport(name, tuple(results))


def layouts(
    arguments: tuple[Any, ...],
    specs: Any,
    meshes: Iterable[Mesh],
) -> list[Any]:
    """Return the shardings of a function's arguments on each mesh, for `compare_meshes`.

    Args:
        arguments: arguments of the function.
        specs: a tree of `PartitionSpec`s that is a prefix of the arguments. Or a function that
            returns the `PartitionSpec` of a leaf, given the leaf's path (such as `0/w1`), the leaf
            and the mesh.
        meshes: the meshes.
    """
    return [_layout(arguments, specs, mesh) for mesh in meshes]


def _layout(arguments: tuple[Any, ...], specs: Any, mesh: Mesh) -> Any:
    if callable(specs) and not isinstance(specs, PartitionSpec):
        spread = specs

        def rule(path: Any, leaf: Any) -> Any:
            return spread(path_name(path), leaf, mesh)

        specs = jax.tree_util.tree_map_with_path(rule, arguments)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def mesh_name(mesh: Mesh) -> str:
    """Return the axis sizes of a mesh as text, such as `data=2 tensor=4`."""
    return sizes_name(mesh.shape)


def sizes_name(sizes: Mapping[str, int]) -> str:
    """Return axis sizes as text, such as `data=2 tensor=4`."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


@dataclass
class _One:
    """Results of the function on one device; computed once for all meshes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    layout: Any
    """Shardings of the arguments on the mesh `like`."""
    like: Mesh
    """One of the meshes, whose axis names the mesh of one device gets."""
    watched: frozenset[str]
    """Precisions in which marks are compared too."""
    orders: int
    """Number of float32 runs with reordered sums."""
    options: dict[str, Any]
    """Compiler options of float32 programs."""
    _values: dict[str, Values] = field(default_factory=dict)
    _responses: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        shape = (1,) * len(self.like.axis_names)
        devices = np.asarray(self.like.devices).reshape(-1)[:1].reshape(shape)
        mesh = Mesh(devices, self.like.axis_names, axis_types=self.like.axis_types)
        layout = jax.tree.map(lambda s: NamedSharding(mesh, s.spec), self.layout)
        return Program(self.function, self.arguments, layout, mesh, self.options)

    def values(self, dtype: str) -> Values:
        if dtype not in self._values:
            self._values[dtype] = _both(self.program, dtype, None, dtype in self.watched)
        return self._values[dtype]

    def responses(self, dtype: str) -> dict[str, tuple[float, ...]]:
        """Return how much each floating-point value changes if sums are reordered.

        The result has, by name of the value, one relative L2 change per run with reordered sums.
        """
        if dtype not in self._responses:
            exact = self.values(dtype).arrays
            seeds = self.orders if dtype == "float32" else SEEDS
            runs = self.program.run(dtype, operation=reordered, seeds=seeds)
            assert isinstance(runs, list)
            self._responses[dtype] = {
                n: tuple(relative_l2(*without_shared_infinities(run.arrays[n], a)) for run in runs)
                for n, a in exact.items()
                if np.issubdtype(a.dtype, np.floating)
            }
        return self._responses[dtype]


@dataclass
class _Sides:
    """Comparison of one mesh with one device, one precision after the other.

    `declared` has the `PartitionSpec` (as a tuple) of each mark inside `shard_map`, by name of the
    mark. `watched` has the precisions in which marks are compared too.
    """

    one: _One
    program: Program
    declared: Mapping[str, tuple[Any, ...]]
    case: str
    suite: str
    device: str
    watched: frozenset[str]
    masked_outputs: bool = False

    def result(self, precisions: Sequence[str], reorder: bool, forced: bool) -> MeshResult:
        rows: list[Measurement] = []
        for dtype in precisions:
            # An exception on one device is an error of the caller's function, so it is raised.
            self.one.values(dtype)
            try:
                there = self._there(dtype)
            except REFUSALS as error:
                comparison = self._comparison(dtype, (), {})
                rows.append(comparison.missing("program", f"does not run here: {_brief(error)}"))
                return MeshResult(self.case, tuple(rows))
            measured = self._measure(dtype, there, reorder)
            measured = self._require_a_result(dtype, measured, there)
            rows += measured
            if (broken := first_divergence(measured)) is not None:
                explained = self._explained(rows, dtype, broken, forced)
                return replace(explained, responses=self._responses(precisions))
        program = CompiledProgram(self.program.compiled_text, self.program.sizes)
        return MeshResult(
            self.case,
            tuple(rows),
            collectives=tuple(program.collectives()),
            order=self._order(),
            responses=self._responses(precisions),
            not_compared=self._not_compared(rows),
        )

    def _responses(self, precisions: Sequence[str]) -> Mapping[str, tuple[float, ...]]:
        return self.one.responses("float32") if "float32" in precisions else {}

    def _order(self) -> tuple[str, ...]:
        values = next(iter(self.one._values.values()), None)
        return () if values is None else tuple(values.arrays)

    def _there(self, dtype: str) -> Values:
        whole = self.one.values(dtype)
        self.program.declared = _declared(self.declared, whole.arrays)
        return _both(self.program, dtype, whole.arrays, dtype in self.watched)

    def _measure(self, dtype: str, there: Values, reorder: bool) -> list[Measurement]:
        whole = self.one.values(dtype)
        nothing = dict.fromkeys(whole.arrays, (0.0,))
        responses = nothing if dtype == "float64" else self.one.responses(dtype)
        rows = self._rows(dtype, there, whole, responses)
        if dtype == "float64" and reorder and _may_be_rounding(rows):
            rows = self._rows(dtype, there, whole, self.one.responses(dtype))
        return rows

    def _rows(
        self, dtype: str, there: Values, whole: Values, responses: Mapping[str, Any]
    ) -> list[Measurement]:
        comparison = self._comparison(dtype, tuple(whole.arrays), responses)
        exact = {n for n, a in whole.arrays.items() if not np.issubdtype(a.dtype, np.floating)}
        sides = [
            {n: a for n, a in side.arrays.items() if n not in exact} for side in (there, whole)
        ]
        for n in sides[0].keys() & sides[1].keys():
            truth = self._truth(n)
            if truth is not None and (self.masked_outputs or n in self.program.known_marks):
                shared = without_shared_infinities(sides[0][n], sides[1][n], truth)
                sides[0][n], sides[1][n] = shared
        # Without floating-point results only integers are compared. If there are no results at all,
        # `Comparison.run` reports that.
        rows = comparison.run(*sides) if any(sides) or not exact else []
        for n in sorted(exact):
            rows.append(comparison.judged(n, "unequal", _unequal(there.arrays, whole.arrays, n)))
        for n, differing in there.replicas.items():
            rows.append(comparison.judged(n, "replicas", float(differing)))
        return rows

    def _truth(self, name: str) -> np.ndarray | None:
        """Return one device's float64 value of a mark or result; None if float64 was not run."""
        values = self.one._values.get("float64")
        return None if values is None else values.arrays.get(name)

    def _require_a_result(
        self, dtype: str, rows: Sequence[Measurement], there: Values
    ) -> list[Measurement]:
        """Return measurements `rows` without the gates of constant results, which prove nothing.

        If no result has a gate left, a measurement "not comparable" is added, so that the mesh
        fails.
        `there` has the values on the mesh.
        """
        whole = self.one.values(dtype).arrays
        results = {n: a for n, a in whole.items() if n not in self.program.known_marks}
        rows = without_constants(rows, results, there.arrays)
        if set(results) - self._uncompared(rows, results).keys():
            return rows
        comparison = self._comparison(dtype, (), {})
        note = f"no result was compared: {'; '.join(sorted({m.note for m in rows if m.note}))}"
        return [*rows, comparison.unmeasured("outputs", note.rstrip(": "), "compared")]

    def _uncompared(self, rows: Iterable[Measurement], results: Iterable[str]) -> dict[str, str]:
        """Return the reason for each result that no gate compares with one device, by name."""
        found: dict[str, list[Measurement]] = {n: [] for n in results}
        for row in rows:
            if row.quantity in found and row.metric in COMPARES:
                found[row.quantity].append(row)
        return {
            n: next((m.note for m in own if m.note), "it has no gate")
            for n, own in found.items()
            if not any(
                m.verdict in (Verdict.PASS, Verdict.FAIL) and np.isfinite(m.tolerance) for m in own
            )
        }

    def _not_compared(self, rows: Sequence[Measurement]) -> dict[str, str]:
        """Return precision and reason, as text, for each result that was not compared, by name."""
        reasons = {n: f"{kind}: return an array" for n, kind in self.program.unread.items()}
        for dtype, values in self.one._values.items():
            results = [n for n in values.arrays if n not in self.program.known_marks]
            own = [row for row in rows if row.edge == EDGES[dtype]]
            if own:
                missed = self._uncompared(own, results)
                reasons |= {n: f"{dtype}: {why}" for n, why in missed.items()}
        return reasons

    def _comparison(self, dtype: str, order: tuple[str, ...], responses: Any) -> Comparison:
        # The hash covers the case, its stages and the options, which change rounding. The code is
        # not hashed: runs record the commit.
        key = (self.case, order, *sorted(self.one.options.items()))
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        # Always the first SEEDS responses: tolerances must not depend on `orders`.
        first = {name: of[:SEEDS] for name, of in responses.items()}
        floors = NoiseFloors({self.case: {"hash": digest, "responses": first}}, MESHES)
        work = Work(self.case, digest, order, suite=self.suite)
        return Comparison(work, EDGES[dtype], floors, dtype, self.device, kinds=kind_of_mark)

    def _explained(
        self, rows: list[Measurement], dtype: str, broken: Measurement, forced: bool
    ) -> MeshResult:
        stages, refused = self._stages(dtype, rows) if forced else ((), "")
        start = next((s.name for s in stages if s.broken), broken.quantity)
        program, names = self._watched(dtype)
        order = tuple(self.one.values(dtype).arrays)
        failing = {m.quantity for m in rows if m.verdict is Verdict.FAIL}
        before = order[: order.index(start)] if start in order else ()
        sound = [n for n in before if n not in failing]
        return MeshResult(
            self.case,
            tuple(rows),
            stages=stages,
            start=start,
            before=sound[-1] if sound else "",
            collectives=tuple(program.collectives()),
            suspects=between(program, names, start, sound),
            order=order,
            refused=refused,
            not_compared=self._not_compared(rows),
        )

    def _watched(self, dtype: str) -> tuple[CompiledProgram, tuple[str, ...]]:
        """Return the compiled program whose results include the marks, and the results' names."""
        return (
            CompiledProgram(self.program.watched_text, self.program.sizes),
            self.program.watched_names,
        )

    def _stages(self, dtype: str, rows: Iterable[Measurement]) -> tuple[tuple[Stage, ...], str]:
        """Return free and forced relative L2 error of every stage, and a reason if there are none.

        Forced: the stage is computed on the mesh from one device's values of the marks before it.
        The reason is empty if there are errors, or if the program has no marks.
        """
        whole = self.one.values(dtype)
        free = {m.quantity: m for m in rows if m.metric == "rel_l2" and m.edge == EDGES[dtype]}
        fed = {n: a for n, a in whole.arrays.items() if n in self.program.known_marks}
        if not fed:
            return (), ""
        known = self.program.declared
        try:
            self.program.declared = {**self.program.found, **known}
            there = self.program.run(dtype, whole.arrays, forced=fed)
        except REFUSALS as error:
            # Values cannot be replaced in every program: the types of `shard_map` may forbid it.
            return (), _brief(error)
        finally:
            self.program.declared = known
        assert isinstance(there, Values)
        stages = (
            Stage(n, m.value, relative_l2(there.arrays[n], whole.arrays[n]), m.tolerance)
            for n, m in free.items()
            if n in there.arrays and there.arrays[n].shape == whole.arrays[n].shape
        )
        return tuple(stages), ""


def kind_of_mark(name: str) -> Kind:
    """Return the kind of a mark or result, by its name; never `TOKENS`, but `BLOCK` instead.

    Values of the kind `TOKENS` must be equal, without a tolerance. Users choose the names, so a
    mark called `generated` may hold floating-point values.
    """
    kind = kind_of(name)
    return Kind.BLOCK if kind is Kind.TOKENS else kind


def _both(
    program: Program, dtype: str, whole: dict[str, np.ndarray] | None, watched: bool
) -> Values:
    """Run a program; return the values of its results and, if `watched`, of its marks.

    Marks come from a program that returns them as extra results. Below float64, the results come
    from the user's unmodified program. `whole` has one device's values, as for `Program.run`.
    """
    values = program.run(dtype, whole, watched=watched)
    assert isinstance(values, Values)
    if not watched:
        return values
    program.watched_text, program.watched_names = program.compiled_text, program.result_names
    program.found = dict(values.placements)
    if dtype != "float64" and program.known_marks:
        # Marks as extra results prevent fusions and so change rounding. Hence the results come from
        # the program without them.
        plain = program.run(dtype, watched=False)
        assert isinstance(plain, Values)
        for name, array in plain.arrays.items():
            values.arrays[name], values.replicas[name] = array, plain.replicas[name]
    return values


def _declared(
    declared: Mapping[str, tuple[Any, ...]], whole: dict[str, np.ndarray]
) -> dict[str, Placement]:
    return {
        n: placement_of(PartitionSpec(*spec), whole[n].ndim)
        for n, spec in declared.items()
        if n in whole
    }


def _may_be_rounding(rows: Iterable[Measurement]) -> bool:
    """Return whether gates fail, and each failing gate has a finite relative L2 error.

    Unequal replicas or integers, and values that are not finite, cannot be due to rounding.
    """
    broken = [m for m in rows if m.verdict is Verdict.FAIL]
    return bool(broken) and all(m.metric == "rel_l2" and np.isfinite(m.value) for m in broken)


def _unequal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], name: str) -> float:
    if name not in actual or actual[name].shape != expected[name].shape:
        return float("inf")
    return float(np.sum(actual[name] != expected[name]))


def _mesh_of(layout: Any) -> Mesh:
    leaves = jax.tree.leaves(layout)
    wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, NamedSharding)]
    if wrong or not leaves:
        raise ValueError(
            f"compare_meshes: expected trees of NamedSharding, got {', '.join(wrong) or 'none'}; "
            "layouts() makes them from PartitionSpecs."
        )
    return leaves[0].mesh


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
