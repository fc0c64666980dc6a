"""Sides written in JAX: stages that nobody named, and not a bit of the result changed."""

from __future__ import annotations

import re
import sys
from collections import Counter

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import parity
from megalodon_jax.extras import install
from parity import EquinoxSide, FlaxSide, FunctionSide, NNXSide, SideError
from parity.engine.measure.measurement import Kind
from parity.engine.measure.metrics import relative_l2
from parity.engine.programs import evaluation
from parity.engine.programs.jaxprs import bind
from parity.port_tolerances import PortEdge
from parity.sides.side import OUTPUT, Precision, Rounding, Run
from parity.tolerances import rule
from tests.helpers import EXACT, rel_l2, rounding_bound, roundoff

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 8), np.float32)
KEY = jax.random.key(0)
WIDE = Run(Precision.FLOAT64)
WEIGHTS = {n: RNG.standard_normal(s, np.float32) for n, s in (("up", (8, 12)), ("down", (12, 8)))}


def mlp(params, x, *, scale=1.0):
    x = checkpoint_name(x @ params["up"], "up")
    return scale * (jnp.tanh(x) @ params["down"])


# Modules, each in its library's own way: (in, out) kernels, or (out, in) in Equinox


class FlaxBlock(nn.Module):
    @nn.compact
    def __call__(self, x, *, scale=1.0):
        x = nn.LayerNorm(name="norm")(x)
        return {
            "out": nn.Dense(8, name="down")(jnp.tanh(nn.Dense(12, name="up")(x))),
            "scale": scale,
        }


class FlaxModel(nn.Module):
    @nn.compact
    def __call__(self, ids, *, scale=1.0):
        x = nn.Embed(9, 8, name="embed")(ids)
        x = x + FlaxBlock(name="first")(x)["out"]
        x = x + FlaxBlock(name="second")(x)["out"]
        return {"logits": nn.Dense(9, name="head")(x) * scale, "layers": (x, ids)}


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    parts: dict[str, eqx.nn.Linear]

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(8)
        sizes = {"up": (8, 12), "down": (12, 8)}
        self.parts = {
            n: eqx.nn.Linear(*s, key=k) for (n, s), k in zip(sizes.items(), keys, strict=True)
        }

    def __call__(self, x):
        assert isinstance(self.norm, eqx.nn.LayerNorm)
        return x + self.parts["down"](jnp.tanh(self.parts["up"](self.norm(x))))


class EquinoxModel(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list[EquinoxBlock]
    stacked: EquinoxBlock
    head: eqx.nn.Linear
    again: eqx.nn.Shared | None = None

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed, self.head = eqx.nn.Embedding(9, 8, key=key), eqx.nn.Linear(8, 9, key=key)
        self.layers = [EquinoxBlock(k) for k in keys[:2]]
        self.stacked = eqx.filter_vmap(EquinoxBlock)(keys[2:])

    @eqx.filter_jit
    def logits(self, x):
        return jax.vmap(self.head)(x)

    def __call__(self, ids, *, scale=1.0):
        x = jax.vmap(self.embed)(ids)
        for layer in (*self.layers, self.layers[0]):
            x = jax.vmap(layer)(x)
        arrays, static = eqx.partition(self.stacked, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, a: (jax.vmap(eqx.combine(a, static))(x), None), x, arrays)
        return {"logits": self.logits(x) * scale, "layers": (x, ids)}


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)

    def __call__(self, x):
        assert isinstance(self.norm, nnx.LayerNorm)
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(9, 8, rngs=rngs), nnx.Linear(8, 9, rngs=rngs)
        self.layers = nnx.List([NNXBlock(rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, ids, *, scale=1.0):
        x = self.embed(ids)
        for layer in (*self.layers, self.layers[0]):
            x = self.drop(layer(x))
        return {"logits": self.head(x) * scale, "layers": (x, ids)}


IDS = np.arange(5, dtype=np.int32)
BLOCK = ("norm", "parts.up", "parts.down")


def flax():
    module = FlaxModel()
    params = jax.device_get(module.init(KEY, IDS))
    return module, params, lambda: module.apply(params, IDS, scale=2.0)


def flax_side():
    module, params, plain = flax()
    return FlaxSide(module, params, IDS, scale=2.0), plain


def equinox_side():
    module = EquinoxModel(KEY)
    return EquinoxSide(module, IDS, scale=2.0), lambda: module(IDS, scale=2.0)


def nnx_side():
    module = NNXModel(nnx.Rngs(0))
    module.eval()
    return NNXSide(module, IDS, scale=2.0), lambda: module(IDS, scale=2.0)


def function_side():
    return (
        FunctionSide(mlp, WEIGHTS, X, scale=2.0),
        lambda: {OUTPUT: mlp(WEIGHTS, jnp.asarray(X), scale=2.0)},
    )


def _layers(count, parts, *layers):
    return [f"{layer}{'.' if p else ''}{p}{turn}" for layer, turn in layers for p in (*parts, "")]


SIDES = {
    "flax": (
        flax_side,
        [
            "embed",
            *(f"{layer}.{part}" for layer in ("first",) for part in ("norm", "up", "down")),
            "first.out",
            *(f"{layer}.{part}" for layer in ("second",) for part in ("norm", "up", "down")),
            "second.out",
            "head",
        ],
        "first.up.kernel",
    ),
    "equinox": (
        equinox_side,
        [
            "embed",
            *_layers(2, BLOCK, ("layers.0", ""), ("layers.1", ""), ("layers.0", "#2")),
            *_layers(3, BLOCK, *(("stacked", f"@{i}") for i in range(3))),
            "head",
        ],
        "layers.0.parts.up.weight",
    ),
    "nnx": (
        nnx_side,
        [
            "embed",
            *("layers.0.norm", "layers.0.up", "layers.0.down", "layers.0", "drop"),
            *("layers.1.norm", "layers.1.up", "layers.1.down", "layers.1", "drop#2"),
            *("layers.0.norm#2", "layers.0.up#2", "layers.0.down#2", "layers.0#2", "drop#3"),
            "head",
        ],
        "layers.0.up.kernel",
    ),
    "function": (function_side, ["up"], "up"),
}
each_side = pytest.mark.parametrize("kind", SIDES)


@each_side
def test_every_call_is_a_stage_and_the_result_stays_the_same(kind):
    make, stages, parameter = SIDES[kind]
    side, plain = make()
    trace, result = side.run(), plain()
    inner = [name for name in trace.stages if name not in trace.outputs]
    assert inner == stages
    assert parameter in side.parameters()
    # Whole numbers are results of their own kind, compared exactly.
    assert list(trace.exact) == ([] if kind == "function" else ["output.layers[1]"])
    assert trace.notices == () and not trace.unread
    if kind == "function":
        assert trace.outputs == (OUTPUT,)
        assert np.array_equal(trace.stages[OUTPUT], result[OUTPUT])
        return
    # Integers that come back are told: what is chosen is compared by what it is chosen from.
    assert set(trace.outputs) == {"output.logits", "output.layers[0]"}
    pairs = {"output.logits": result["logits"], "output.layers[0]": result["layers"][0]}
    if kind == "equinox":
        # A loop's body is compiled as one program. Stages are further results of it, so that XLA
        # may fuse, and round, in other places: seen on processors without AVX-512.
        for (name, value), part in zip(
            pairs.items(), (lambda out: out["logits"], lambda out: out["layers"][0]), strict=True
        ):
            bound = rounding_bound(lambda m, part=part: part(m(IDS, scale=2.0)), EquinoxModel(KEY))
            assert rel_l2(trace.stages[name], value) <= bound, name
        return
    for name, value in pairs.items():
        assert np.array_equal(trace.stages[name], value), name


@each_side
def test_float64_has_the_same_stages_and_float32_is_its_rounding(kind):
    make, stages, parameter = SIDES[kind]
    side, _ = make()
    narrow = side.run()
    last = narrow.outputs[0]
    cotangents = {last: np.ones_like(narrow.stages[last])}
    wide = side.run(Run(Precision.FLOAT64, cotangents=cotangents))
    assert list(wide.stages) == list(narrow.stages)
    assert all(x.dtype == np.float64 for x in wide.stages.values())
    errors = [relative_l2(narrow.stages[n], x) for n, x in wide.stages.items() if n != "embed"]
    noise = side.run(Run(Precision.FLOAT64, Rounding.OPERATIONS))
    floors = [relative_l2(noise.stages[n], x) for n, x in wide.stages.items() if n != "embed"]
    factor = rule(PortEdge.PORT32_PORT64, Kind.BLOCK).noise_factor
    for error, floor in zip(errors, floors, strict=True):
        assert error <= factor * floor
    assert max(errors) > 0
    assert wide.gradients[parameter].shape == side.parameters()[parameter].shape
    assert np.any(wide.gradients[parameter])
    # What follows a stage goes on from what it is given; the stage is reported as computed.
    stage = stages[len(stages) // 2]
    forced = side.run(Run(Precision.FLOAT64, forced={stage: np.zeros(wide.stages[stage].shape)}))
    assert np.array_equal(forced.stages[stage], wide.stages[stage])
    assert relative_l2(forced.stages[last], wide.stages[last]) > EXACT
    before = list(wide.stages)[: list(wide.stages).index(stage)]
    assert all(np.array_equal(forced.stages[n], wide.stages[n]) for n in before)


def test_a_forced_stage_that_does_not_exist_is_refused_with_those_that_do():
    side, _ = function_side()
    with pytest.raises(SideError, match="no stage upp; there are up"):
        side.run(Run(forced={"upp": X}))
    with pytest.raises(SideError, match="no output logits; there are output"):
        side.run(Run(cotangents={"logits": X}))


def test_a_module_is_left_as_it_was():
    module = EquinoxModel(KEY)
    before = jax.tree.structure(module)
    EquinoxSide(module, IDS).run()
    assert type(module.layers[0]) is EquinoxBlock and jax.tree.structure(module) == before
    assert EquinoxBlock.__call__.__qualname__.startswith("EquinoxBlock")
    trained = NNXModel(nnx.Rngs(0))
    state = jax.tree.map(np.asarray, nnx.state(trained, nnx.RngCount))
    side = NNXSide(trained, IDS)
    one, two = side.run(), side.run()
    # Dropout is on: each run starts from the module's own random numbers, and none moves them.
    assert np.array_equal(one.stages["drop"], two.stages["drop"])
    assert type(trained.layers[0]) is NNXBlock
    after = jax.tree.map(np.asarray, nnx.state(trained, nnx.RngCount))
    assert jax.tree.all(jax.tree.map(np.array_equal, state, after))


def test_modules_that_are_stacked_inside_of_a_call_keep_a_name():
    """Two modules of one class are told apart, and can be one pytree's leaves all the same."""

    def call(model, ids):
        checkpointed = eqx.filter_checkpoint(lambda layer, x: jax.vmap(layer)(x))
        x = jax.vmap(model.embed)(ids)
        for layer in model.layers:
            x = checkpointed(layer, x)
        return x

    stages = EquinoxSide(EquinoxModel(KEY), IDS, call=call).run().stages
    assert [n for n in stages if n.endswith("norm")] == ["layers.0.norm", "layers.1.norm"]


def test_parameters_that_are_shared_are_called_under_the_name_of_each_place():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            embed, head = eqx.nn.Embedding(9, 8, key=KEY), eqx.nn.Linear(8, 9, False, key=KEY)
            self.shared = eqx.nn.Shared(
                (embed, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight
            )

        def __call__(self, ids):
            embed, head = self.shared()
            return jax.vmap(head)(jax.vmap(embed)(ids))

    side = EquinoxSide(Tied(), IDS)
    assert list(side.run().stages) == ["shared.pytree.0", "shared.pytree.1", OUTPUT]
    assert list(side.parameters()) == ["shared.pytree.0.weight"]


def test_torch_tensors_bfloat16_parameters_and_random_keys_are_taken_as_they_are():
    weights = {n: torch.from_numpy(w).to(torch.bfloat16) for n, w in WEIGHTS.items()}

    def noisy(params, x, key):
        # Of 32 bits in bfloat16 too: of 16 they would be others, as its users would have it.
        return mlp(params, x + jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)), x

    side = FunctionSide(noisy, weights, torch.from_numpy(X), KEY)
    assert {str(x.dtype) for x in side.parameters().values()} == {"bfloat16"}
    assert side.inputs()["0"].dtype == np.float32 and set(side.inputs()) == {"0", "1"}
    trace = side.run()
    held = {n: jnp.asarray(w.float().numpy()) for n, w in weights.items()}
    expected = np.asarray(noisy(held, jnp.asarray(X), KEY)[0])
    assert np.array_equal(trace.stages["output[0]"], expected)
    # In float64 too it draws the numbers its users draw, not others of 64 bits.
    wide = side.run(WIDE)
    noise = side.run(Run(Precision.FLOAT64, Rounding.OPERATIONS)).stages["output[0]"]
    factor = rule(PortEdge.PORT32_PORT64, Kind.BLOCK).noise_factor
    exact = wide.stages["output[0]"]
    assert relative_l2(np.float64(expected), exact) <= factor * relative_l2(noise, exact)
    assert wide.notices == ("it draws random numbers, so its float32 program is run in float64",)
    low = side.run(Run(Precision.BFLOAT16))
    assert low.stages["output[0]"].dtype == jnp.bfloat16
    # Computed in bfloat16, and not merely stored: further away than the nearest such numbers are.
    nearest = relative_l2(np.float64(expected.astype(jnp.bfloat16)), np.float64(expected))
    assert nearest < relative_l2(np.float64(low.stages["output[0]"]), np.float64(expected)) < 0.1


def test_a_function_that_refuses_float64_has_its_float32_program_widened():
    def strict(params, x):
        if x.dtype == jnp.float64:
            raise TypeError("float32, please")
        return mlp(params, x)

    side = FunctionSide(strict, WEIGHTS, X)
    wide = side.run(WIDE)
    assert wide.notices == (
        "it rejects float64 (TypeError), so its float32 program is run in float64",
    )
    exact = FunctionSide(mlp, WEIGHTS, X).run(WIDE)
    assert relative_l2(wide.stages[OUTPUT], exact.stages[OUTPUT]) <= EXACT


def test_a_float64_run_is_moved_by_seeds_and_only_where_asked():
    side = FunctionSide(mlp, WEIGHTS, X)
    exact = side.run(WIDE).stages[OUTPUT]
    moved = [
        side.run(Run(Precision.FLOAT64, Rounding.OPERATIONS, seed)).stages[OUTPUT]
        for seed in range(2)
    ]
    # Terms, sums and results move by a unit each: sum |x| |w| of them behind either product.
    up, down = (np.abs(np.float64(WEIGHTS[n])) for n in ("up", "down"))
    first = roundoff(len(up) + 3) * np.abs(np.float64(X)) @ up
    inner = np.abs(np.tanh(np.float64(X) @ np.float64(WEIGHTS["up"])))
    bound = first @ down + roundoff(len(down) + 3) * inner @ down
    for x in moved:
        assert relative_l2(x, exact) > EXACT
        assert np.all(np.abs(x - exact) <= bound)
    assert not np.array_equal(*moved)
    tables = side.run(Run(Precision.FLOAT64, Rounding.CONSTANTS)).stages[OUTPUT]
    assert np.array_equal(tables, exact)


def test_an_error_is_told_with_the_shape_and_dtype_of_the_inputs():
    side = FunctionSide(mlp, WEIGHTS, X[:, :3])
    with pytest.raises(
        SideError, match=r"function side stops .*, with inputs 0 float32\[5, 3\]: \w*Error"
    ):
        side.run()


@pytest.mark.parametrize(
    ("name", "package"), [("FlaxSide", "flax"), ("NNXSide", "flax"), ("TorchSide", "torch")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, name, package):
    for loaded in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    for home in ("flax_side", "nnx_side", "torch_side", "torch_lift"):
        monkeypatch.delitem(sys.modules, f"parity.sides.{home}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    message = f"{name} needs {package}.*: {re.escape(install(package))}"
    with pytest.raises(SideError, match=message):
        getattr(parity, name)


def test_reading_every_stage_repeats_no_operation(monkeypatch):
    """The run evaluates each operation of the function once, and nothing for a mark."""
    evaluated: Counter[str] = Counter()

    def counted(eqn, inputs):
        evaluated[eqn.primitive.name] += 1
        return bind(eqn, inputs)

    def deep(params, x, watched=True):
        for name, w in params.items():
            x = jnp.tanh(x @ w)
            x = checkpoint_name(x, name) if watched else x
        return x

    monkeypatch.setattr(evaluation, "bind", counted)
    widths = {f"{i}": RNG.standard_normal((8, 8), np.float32) for i in range(5)}
    for watched in (True, False):
        side = FunctionSide(lambda p, x, on=watched: deep(p, x, on), widths, X)
        for _ in range(2):
            evaluated.clear()
            assert len(side.run().stages) == watched * len(widths) + 1
            assert evaluated == {"dot_general": 5, "tanh": 5}
