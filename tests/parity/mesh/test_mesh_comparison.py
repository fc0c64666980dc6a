"""The mesh edge on a small step of two layers: silent where it must be, and right where not."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parity.engine.measure.measurement import Verdict
from parity.engine.programs.yardstick import RUN_ONCE
from parity.mesh import (
    MeshComparison,
    MeshReport,
    compare_meshes,
    layouts,
    mesh_of,
    out_of_sync,
    program,
)
from parity.mesh.replay import Replay

SPECS = ({"up": P(None, "tensor"), "down": P("tensor")}, P("data"), P())
MESHES = ({"data": 8, "tensor": 1}, {"data": 2, "tensor": 4})


class Parallel:
    """What a bug replaces: one method for each exchange between devices."""

    checked = True

    @staticmethod
    def add_partial(y):
        return jax.lax.psum(y, "tensor")

    @staticmethod
    def mean(total, count):
        return jax.lax.psum(total, "data") / jax.lax.psum(count, "data")

    @staticmethod
    def keep(key, shape):
        """The rows of this device of one mask for the whole batch."""
        rows = shape[0] * jax.lax.axis_size("data")
        mask = jax.random.bernoulli(key, 0.8, (rows, *shape[1:]))
        return jax.lax.dynamic_slice_in_dim(mask, jax.lax.axis_index("data") * shape[0], shape[0])

    @staticmethod
    def gradient(g):
        return g


def step(weights, x, seed):
    def local(up, down, x, seed):
        h = checkpoint_name(jnp.tanh(x @ up), "hidden")
        y = checkpoint_name(Parallel.add_partial(h @ down), "sum")

        def body(y, _):
            y = checkpoint_name(jnp.sin(y), "turn")
            return y, None

        y, _ = jax.lax.scan(body, y, None, length=2)
        y = checkpoint_name(jnp.where(Parallel.keep(jax.random.key(seed), y.shape), y, 0.0), "kept")
        valid = (x[:, :1] > -0.5).astype(y.dtype)
        return Parallel.mean(jnp.sum(valid * y**2), jnp.sum(valid))

    def loss(weights):
        sharded = jax.shard_map(
            local,
            in_specs=(P(None, "tensor"), P("tensor"), P("data"), P()),
            out_specs=P(),
            check_vma=Parallel.checked,
        )
        return sharded(weights["up"], weights["down"], x, seed)

    value, grad = jax.value_and_grad(loss)(weights)
    return {"loss": value, "grad": jax.tree.map(Parallel.gradient, grad), "seed": seed + 1}


@functools.cache
def numbers():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {"up": draw(8, 16), "down": draw(16, 8)}, draw(16, 8), np.int32(3)


ORDERS = 6


def compared(meshes=MESHES, **options) -> MeshReport:
    return MeshComparison(step, numbers(), SPECS, meshes).run(**options)


def bug(**methods):
    patches = {n: m if n == "checked" else staticmethod(m) for n, m in methods.items()}
    return mock.patch.multiple(Parallel, **patches)


@functools.cache
def sound() -> MeshReport:
    return compared(orders=ORDERS)


def test_a_healthy_step_holds_on_every_mesh_in_both_precisions():
    report = sound()
    assert report.holds and report.culprit is None
    assert {m.edge for m in report.measurements} == {"mesh64:one64", "mesh32:one32"}
    wide, narrow = (
        {m.quantity: m for m in report.measurements if m.edge == e and m.metric == "rel_l2"}
        for e in ("mesh64:one64", "mesh32:one32")
    )
    assert list(wide) == ["hidden", "sum", "turn", "kept", "loss", "grad/down", "grad/up"]
    assert list(narrow) == list(wide)
    exact = [m for m in report.measurements if m.quantity == "seed"]
    assert {m.metric for m in exact} == {"unequal", "replicas"}
    assert report.table().count("holds: 32 gates") == 2
    # The scatter of a level between machines follows from how each quantity responds.
    for result in report.results:
        assert result.responses.keys() == narrow.keys()
        assert all(len(of) == ORDERS for of in result.responses.values())
        assert max(result.responses["grad/up"]) > 0
    # Tolerances are from a fixed number of orders.
    alone = compared(MESHES[:1], precisions=("float32",), watched=()).measurements
    expected = {m.quantity: m.tolerance for m in alone if m.metric == "rel_l2"}
    same_mesh = [m for m in report.results[0].measurements if m.edge == "mesh32:one32"]
    found = {m.quantity: m.tolerance for m in same_mesh if m.metric == "rel_l2"}
    assert expected and expected.items() <= found.items()


def test_the_collectives_of_the_program_have_their_axes_and_lines():
    result = sound().results[1]
    sums = [c for c in result.collectives if c.axes == ("tensor",)]
    assert sums and sums[0].operation == "all-reduce" and sums[0].bytes == 8 * 8 * 4
    assert sums[0].source.startswith("test_mesh_comparison.py:")


def devices():
    return jax.sharding.get_abstract_mesh().size


def add_twice(y):
    return jax.lax.psum(jax.lax.psum(y, "tensor"), "tensor")


def add_narrow(y):
    return jax.lax.psum(y.astype(jnp.bfloat16), "tensor").astype(y.dtype)


def one_and_a_half(y):
    return jax.lax.psum(y, "tensor") * (1.5 if devices() > 1 else 1.0)


WRONG = {
    "missing": ({"add_partial": lambda y: y, "checked": False}, "sum"),
    "twice": ({"add_partial": add_twice, "checked": False}, "sum"),
    "wrong axis": ({"add_partial": lambda y: jax.lax.psum(y, "data"), "checked": False}, "sum"),
    "mean for sum": ({"add_partial": lambda y: jax.lax.pmean(y, "tensor")}, "sum"),
    "in bfloat16": ({"add_partial": add_narrow}, "sum"),
    "mean of means": ({"mean": lambda total, n: jax.lax.pmean(total / n, "data")}, "loss"),
    "one key": ({"keep": lambda key, shape: jax.random.bernoulli(key, 0.8, shape)}, "kept"),
    "gradient scaled": ({"gradient": lambda g: g * devices()}, "grad/down"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_parallel_bug_is_found_where_it_is(name: str):
    methods, stage = WRONG[name]
    with bug(**methods):
        report = compared(MESHES[1:], reorder=False, forced=name == "missing")
    (result,) = report.results
    assert not report.holds and result.start == stage
    if stage == "sum":
        assert result.before == "hidden"
        assert bool(result.suspects) is (name != "missing")
    if name == "wrong axis":
        assert {c.axes for c in result.suspects} == {("data",)}
    if name == "in bfloat16":
        assert result.broken.value < 0.01


def test_what_was_not_reduced_is_told_by_its_replicas():
    with bug(add_partial=lambda y: y, checked=False):
        (result,) = compared(MESHES[1:], reorder=False, forced=False).results
    (row,) = [m for m in result.measurements if (m.quantity, m.metric) == ("sum", "replicas")]
    assert row.verdict is Verdict.FAIL and row.value == 6
    assert "no collective is involved" in "\n".join(result.sentences())


def refused(self, eqn, value, taken, forced, mark=Replay._mark):
    if forced:
        raise TypeError("no such type")
    return mark(self, eqn, value, taken, forced)


def test_stages_fed_right_values_are_right_where_an_error_was_only_carried():
    with bug(add_partial=one_and_a_half):
        (result,) = compared(MESHES[1:], reorder=False).results
    broken = {stage.name for stage in result.stages if stage.broken}
    assert "sum" in broken and not broken & {"hidden", "turn", "kept"}
    refusal = mock.patch.object(Replay, "_mark", refused)
    with bug(add_partial=one_and_a_half), refusal:
        (result,) = compared(MESHES[1:], reorder=False).results
    assert result.stages == () and result.start == "sum"
    assert "marks cannot be replaced: TypeError: no such type" in [*result.sentences()][-1]


def test_replicas_of_an_argument_that_drifted_apart_are_found():
    mesh = mesh_of({"data": 2, "tensor": 1})
    sharding = NamedSharding(mesh, P())
    parts = [jax.device_put(np.float32(v), d) for v, d in zip((1, 2), jax.devices(), strict=False)]
    drifted = jax.make_array_from_single_device_arrays((), sharding, parts)
    assert out_of_sync({"w": drifted, "v": jnp.ones(2)}) == {"w": 1}
    layout = layouts((drifted,), (P(),), [mesh])
    report = compare_meshes(lambda w: {"twice": w * 2}, (drifted,), layout, precisions=["float64"])
    assert not report.holds
    failed = {m.metric for m in report.measurements if m.verdict is Verdict.FAIL}
    assert failed == {"replicas"}


def test_a_function_that_narrows_says_so_in_float64():
    def narrow(x):
        return {"loss": jnp.sum(x.astype(jnp.float32))}

    step = MeshComparison(narrow, (np.ones(8, np.float32),), (P("data"),), MESHES[:1])
    (row,) = (m for m in step.run().measurements if m.verdict is Verdict.FAIL)
    assert row.note == "dtype float32, expected float64"


def test_a_function_that_does_not_run_there_is_a_failure_and_no_error():
    step = MeshComparison(lambda x: x, (np.ones(6, np.float32),), (P("data"),), MESHES[:1])
    report = step.run()
    assert not report.holds
    assert "does not run here" in report.measurements[-1].note


@pytest.mark.parametrize(
    ("returned", "broken"),
    [
        (lambda: None, "nothing"),
        (lambda: {"text": "done"}, "nothing"),
        (lambda: {"loss": 0.5, "count": np.int32(devices())}, "count"),
        (lambda: {"rate": np.float32(0.1), "size": 0.5 * devices()}, "size"),
    ],
)
def test_results_that_are_no_arrays_are_compared_and_nothing_does_not_hold(returned, broken):
    step = MeshComparison(lambda x: returned(), (np.ones(8, np.float32),), (P("data"),), MESHES[:1])
    (result,) = step.run(reorder=False).results
    assert not result.holds and result.start == broken
    assert [m.quantity for m in result.measurements if m.verdict is Verdict.FAIL] == [broken]


def test_two_values_of_one_name_are_refused():
    def twice(x):
        first = checkpoint_name(checkpoint_name(x, "q"), "q")
        return {"q#1": first, "output/q#1": x, "a": {"b": x}, "a/b": x}

    step = MeshComparison(twice, (np.ones(8, np.float32),), (P("data"),), MESHES[:1])
    with pytest.raises(ValueError, match=r"are called a/b, output/q#1\. .* rename a key"):
        step.run()


def test_bad_input_is_refused_with_what_to_do():
    with pytest.raises(
        ValueError, match=r"needs 4096 devices, but there are \d+\. .*--devices 4096"
    ):
        MeshComparison(step, numbers(), SPECS, [{"data": 4096, "tensor": 1}]).run()
    meshes = [mesh_of({"data": 2}), mesh_of({"tensor": 2})]
    x = (np.ones(4, np.float32),)
    with pytest.raises(ValueError, match=r"the same axes, got .*give every mesh all axes"):
        compare_meshes(lambda x: x, x, [NamedSharding(m, P()) for m in meshes])
    with pytest.raises(ValueError, match=r"expected trees of NamedSharding"):
        compare_meshes(lambda x: x, x, [P()])
    with pytest.raises(ValueError, match=r"precisions among float64, float32, got \('half',"):
        compare_meshes(lambda x: x, x, [NamedSharding(meshes[0], P())], precisions=("half",))
    with pytest.raises(ValueError, match=r"at least 4 float32 runs .* got orders=3\."):
        compare_meshes(lambda x: x, x, [NamedSharding(meshes[0], P())], orders=3)


def test_infinities_and_names_are_the_user_s():
    """Masked scores are equal where both are masked, and a float may be called anything."""

    def scored(x):
        scores = jnp.where(np.tri(8, dtype=bool), x @ x.T, -jnp.inf)
        scores = checkpoint_name(scores, "scores")
        # Summed over devices where there are several, in another order than one device takes.
        return {"generated": jnp.mean(x), "logits": jnp.sum(jnp.exp(scores))}

    mesh = mesh_of({"data": 8})
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    report = compare_meshes(scored, (x,), [(NamedSharding(mesh, P("data")),)])
    assert report.holds, report.table()
    assert {"scores", "generated", "logits"} <= {m.quantity for m in report.measurements}


def test_options_are_those_of_float32_alone_and_their_rows_are_other_work(monkeypatch):
    asked = []
    monkeypatch.setattr(program, "known_options", lambda o: asked.append(o) or {})
    mesh = mesh_of({"data": 2})
    layout = [(NamedSharding(mesh, P("data")),)]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    fast = {"xla_backend_optimization_level": 0}
    works = {}
    for name, options in (("users", {}), ("fast", {"compiler_options": fast})):
        asked.clear()
        report = compare_meshes(lambda x: {"twice": x * 2}, (x,), layout, **options)
        works[name] = {m.identity for m in report.measurements}
        # Float64 on one device and on the mesh; float32 on both, and with reordered sums.
        assert asked.count(RUN_ONCE) == 2
        assert asked.count(options.get("compiler_options", {})) == 3
    assert works["users"] and not works["users"] & works["fast"]


def test_one_device_is_not_compared_with_itself():
    step = MeshComparison(lambda x: x * 2, (np.ones((4, 4)),), P("data"), [{"data": 1}])
    with pytest.raises(ValueError, match=r"at least two devices, got \{'data': 1\}"):
        step.run()
