"""Every layer passes one suite: widths, dtypes, compilation, jit, streaming, nothing, gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from megalodon_jax import MegalodonBlock, MegalodonConfig
from megalodon_jax.config import widened
from megalodon_jax.layers import (
    ChunkedAttention,
    ComplexEMA,
    LayerNorm,
    Linear,
    LoRALinear,
    MegalodonAttention,
    NormalizedFFN,
    RMSNorm,
    RotaryEmbedding,
    TimestepNorm,
)
from megalodon_jax.layers.lora import init_adapter
from megalodon_jax.types import AttentionCache, NormState
from megalodon_jax.weights import abstract_model
from tests.helpers import EXACT, TINY, rel_l2, rounding_bound, tiny

B, L, D, H, d, e = 2, 6, TINY.model_dim, TINY.num_heads, 4, 6
CUT = 4
FEATURES, HEADS, CHANNELS = (B, L, D), (B, L, H, d), (B, D, L)


@dataclass(frozen=True)
class Layer:
    """How one layer is made and called.

    `call(layer, inputs, state)` returns the output and the state after it; `time` is the axis of
    time. A layer without a state returns None. The config-driven layers work on activations in
    `accum_dtype`; ChunkedAttention takes any dtype and returns `accum_dtype` by design.
    """

    name: str
    make: Callable[[MegalodonConfig, jax.Array], Any]
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[[Any, tuple, Any], tuple[Any, Any]]
    time: int = 1


def sensitive(config: MegalodonConfig) -> np.dtype:
    return config.sensitive_dtype


def position(state):
    return jnp.zeros((), jnp.int32) if state is None else state


def rotate(layer, inputs, state):
    start = position(state)
    return layer(*inputs, start), start + inputs[0].shape[1]


def adapted(base: Linear, key: jax.Array) -> LoRALinear:
    """The map with an adapter of rank 3."""
    return LoRALinear(base, *init_adapter(base, 3, key=key), alpha=2.0)


LAYERS = (
    Layer(
        "Linear",
        lambda c, k: Linear(D, H, c, key=k),
        (FEATURES,),
        lambda m, x, s: (m(*x), s),
    ),
    Layer(
        "RMSNorm",
        lambda c, k: RMSNorm(D, dtype=sensitive(c)),
        (FEATURES,),
        lambda m, x, s: (m(*x), s),
    ),
    Layer(
        "LayerNorm",
        lambda c, k: LayerNorm(D, dtype=sensitive(c)),
        (FEATURES,),
        lambda m, x, s: (m(*x), s),
    ),
    Layer(
        "TimestepNorm",
        lambda c, k: TimestepNorm(D, 2, dtype=sensitive(c)),
        (FEATURES,),
        lambda m, x, s: m(*x, s),
    ),
    Layer(
        "ComplexEMA",
        lambda c, k: ComplexEMA(D, 2, sensitive(c), key=k),
        (CHANNELS,),
        lambda m, x, s: m(*x, s, True),
        2,
    ),
    Layer("RotaryEmbedding", lambda c, k: RotaryEmbedding(d), (HEADS, HEADS), rotate),
    Layer(
        "ChunkedAttention",
        lambda c, k: ChunkedAttention(c),
        (HEADS, HEADS, (B, L, H, e)),
        lambda m, x, s: m(*x, None, s, True),
    ),
    Layer(
        "MegalodonAttention",
        lambda c, k: MegalodonAttention(c, key=k),
        (FEATURES,),
        lambda m, x, s: m(*x, None, s, True),
    ),
    Layer(
        "NormalizedFFN",
        lambda c, k: NormalizedFFN(c, 0, key=k),
        (FEATURES, FEATURES),
        lambda m, x, s: (m(*x), s),
    ),
    Layer(
        "MegalodonBlock",
        lambda c, k: MegalodonBlock(c, 0, key=k),
        (FEATURES,),
        lambda m, x, s: m(*x, None, s, True),
    ),
    Layer(
        "LoRALinear",
        lambda c, k: adapted(Linear(D, H, c, key=k), k),
        (FEATURES,),
        lambda m, x, s: (m(*x), s),
    ),
)
every = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)


@eqx.filter_jit
def run(call, made, inputs, state=None):
    return call(made, inputs, state)


@cache
def made(layer: Layer, dtype: str) -> Any:
    """The layer with no parameter at its initial value; a parameter at 0 hides its own bugs."""
    rng = np.random.default_rng(0)
    frame = eqx.filter_eval_shape(layer.make, TINY.with_dtype(dtype), jax.random.key(0))
    return jax.tree.map(lambda p: jnp.asarray(0.5 * rng.standard_normal(p.shape), p.dtype), frame)


def inputs_of(layer: Layer, dtype: str, seed: int = 1) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in layer.shapes)


def cut(layer: Layer, inputs: tuple, start: int, stop: int) -> tuple:
    return tuple(jax.lax.slice_in_dim(x, start, stop, axis=layer.time) for x in inputs)


def shapes_of(layer: Layer, dtype: str, inputs: tuple | None = None):
    config = TINY.with_dtype(dtype)
    frame = eqx.filter_eval_shape(layer.make, config, jax.random.key(0))
    return eqx.filter_eval_shape(layer.call, frame, inputs or inputs_of(layer, dtype), None)


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_dtype_is_preserved_and_states_are_wide(layer: Layer, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        output, state = shapes_of(layer, dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(output)} == {jnp.dtype(dtype)}
        assert jax.tree.leaves(output)[0].shape[:2] == layer.shapes[0][:2]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            kv = jax.tree_util.keystr(path).endswith((".k", ".v"))
            allowed = (jnp.dtype(dtype),) if kv else (jnp.dtype("int32"), widened(dtype))
            real = jnp.dtype(jnp.finfo(leaf.dtype).dtype) if leaf.dtype.kind == "c" else leaf.dtype
            assert real in allowed, path


@pytest.mark.parametrize("name", ["ChunkedAttention", "MegalodonAttention", "MegalodonBlock"])
def test_bfloat16_compute_returns_the_accumulator(name: str) -> None:
    layer = next(layer for layer in LAYERS if layer.name == name)
    config = tiny(compute_dtype="bfloat16", param_dtype="bfloat16")
    frame = eqx.filter_eval_shape(layer.make, config, jax.random.key(0))
    given = "bfloat16" if name == "ChunkedAttention" else "float32"
    output, state = eqx.filter_eval_shape(layer.call, frame, inputs_of(layer, given), None)
    assert output.dtype == config.accum_dtype == jnp.float32
    ring = state if name == "ChunkedAttention" else state.attn
    assert ring.k.dtype == ring.v.dtype == jnp.bfloat16


@pytest.mark.parametrize("layer", LAYERS[1:6], ids=lambda layer: layer.name)
def test_bfloat16_is_worked_on_in_float32_and_rounded_once(layer: Layer) -> None:
    module, inputs = made(layer, "float32"), inputs_of(layer, "bfloat16")
    wide = tuple(x.astype(jnp.float32) for x in inputs)
    narrow, exact = (run(layer.call, module, x)[0] for x in (inputs, wide))
    bound = rounding_bound(lambda m, x: jax.tree.leaves(run(layer.call, m, x)[0])[0], module, wide)
    for got, expected in zip(jax.tree.leaves(narrow), jax.tree.leaves(exact), strict=True):
        got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        # Half a unit in the last place, and what two programs in float32 may differ by.
        once = float(jnp.finfo(jnp.bfloat16).eps) / 2 * np.abs(expected)
        assert np.all(np.abs(got - expected) <= once + bound * np.linalg.norm(expected))


@every
@pytest.mark.usefixtures("x64")
def test_jit_is_eager_and_compiles_once(layer: Layer, caplog) -> None:
    module = made(layer, "float64")
    first, second = (inputs_of(layer, "float64", seed) for seed in (1, 2))
    other, _ = run(layer.call, module, second)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        output, _ = run(layer.call, module, first)
        assert not any("Compiling" in record.getMessage() for record in caplog.records)
    eager, _ = layer.call(module, first, None)
    assert all(map(close, jax.tree.leaves(output), jax.tree.leaves(eager)))
    assert not any(map(close, jax.tree.leaves(other), jax.tree.leaves(eager)))


def close(actual, expected) -> bool:
    return rel_l2(actual, expected) <= EXACT


@every
@pytest.mark.usefixtures("x64")
def test_streamed_is_whole(layer: Layer) -> None:
    module, inputs = made(layer, "float64"), inputs_of(layer, "float64")
    whole, expected = run(layer.call, module, inputs)
    head, state = run(layer.call, module, cut(layer, inputs, 0, CUT))
    tail, final = run(layer.call, module, cut(layer, inputs, CUT, L), state)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=layer.time), head, tail)
    assert all(map(close, jax.tree.leaves(joined), jax.tree.leaves(whole)))
    assert all(map(close, jax.tree.leaves(final), jax.tree.leaves(expected)))
    if state is None or layer.name == "ChunkedAttention":
        return
    # The control: without its state the second part is another one.
    fresh, _ = run(layer.call, module, cut(layer, inputs, CUT, L))
    assert not any(map(close, jax.tree.leaves(fresh), jax.tree.leaves(tail)))


@every
@pytest.mark.parametrize("axis", ["rows", "time"])
def test_nothing_in_nothing_out(layer: Layer, axis: str) -> None:
    along = 0 if axis == "rows" else layer.time
    nothing = tuple(jax.lax.slice_in_dim(x, 0, 0, axis=along) for x in inputs_of(layer, "float32"))
    for state in [None] if axis == "rows" else [None, shapes_of(layer, "float32")[1]]:
        frame = eqx.filter_eval_shape(layer.make, TINY, jax.random.key(0))
        output, _ = eqx.filter_eval_shape(layer.call, frame, nothing, state)
        expected, _ = shapes_of(layer, "float32")
        for got, full in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
            assert got.shape == (*full.shape[:along], 0, *full.shape[along + 1 :])
            assert got.dtype == full.dtype


@every
def test_no_rows_continue_a_stream_of_no_rows(layer: Layer) -> None:
    nobody = tuple(x[:0] for x in inputs_of(layer, "float32"))
    _, state = shapes_of(layer, "float32", nobody)
    frame = eqx.filter_eval_shape(layer.make, TINY, jax.random.key(0))
    _, after = eqx.filter_eval_shape(layer.call, frame, nobody, state)
    assert [leaf.shape for leaf in jax.tree.leaves(after)] == [
        leaf.shape for leaf in jax.tree.leaves(state)
    ]


@eqx.filter_jit
def gradients(call, made, inputs):
    def objective(arguments):
        made, inputs = arguments
        output, _ = call(made, inputs, None)
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(output))

    return eqx.filter_grad(objective)((made, inputs))


@every
def test_gradients_are_finite_and_reach_every_parameter(layer: Layer) -> None:
    module, inputs = made(layer, "float32"), inputs_of(layer, "float32")
    grads = jax.tree_util.tree_leaves_with_path(gradients(layer.call, module, inputs))
    assert grads
    for path, grad in grads:
        assert np.all(np.isfinite(grad)), path
        assert np.any(np.asarray(grad) != 0), path
    at_zero = gradients(layer.call, module, tuple(jnp.zeros_like(x) for x in inputs))
    assert all(np.all(np.isfinite(grad)) for grad in jax.tree.leaves(at_zero))


@pytest.fixture
def as_users_have_it():
    """Annotations are checked in tests only; users meet the layers' own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def resized(shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every axis by one more, and by a size that would broadcast."""
    for axis, size in enumerate(shape):
        for other in (size + 1, 1):
            yield axis, (*shape[:axis], other, *shape[axis + 1 :])


@every
@pytest.mark.usefixtures("as_users_have_it")
def test_inputs_of_another_width_are_refused_by_name(layer: Layer) -> None:
    frame = eqx.filter_eval_shape(layer.make, TINY, jax.random.key(0))
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in layer.shapes]
    eqx.filter_eval_shape(layer.call, frame, tuple(inputs), None)
    for i, shape in enumerate(layer.shapes):
        for axis, changed in resized(shape):
            if len(layer.shapes) == 1 and axis in (0, layer.time):
                continue  # As many rows and tokens as there are.
            wrong = [*inputs[:i], jax.ShapeDtypeStruct(changed, jnp.float32), *inputs[i + 1 :]]
            with pytest.raises(ValueError, match=r"^\w+: \w+ has shape .*, expected \("):
                eqx.filter_eval_shape(layer.call, frame, tuple(wrong), None)


def narrowed(tree: Any) -> Iterator[tuple[str, Any]]:
    """The tree with one leaf at a time in float16, where its values are no counts."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for i, (path, leaf) in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            others = [leaf for _, leaf in leaves]
            others[i] = jax.ShapeDtypeStruct(leaf.shape, jnp.float16)
            yield jax.tree_util.keystr(path), jax.tree.unflatten(structure, others)


@every
@pytest.mark.usefixtures("as_users_have_it")
def test_float16_is_refused_wherever_it_comes_from(layer: Layer) -> None:
    frame = eqx.filter_eval_shape(layer.make, TINY, jax.random.key(0))
    given = inputs_of(layer, "float32"), shapes_of(layer, "float32")[1]
    eqx.filter_eval_shape(layer.call, frame, *given)
    cases = [(at, (frame, *rest)) for at, rest in narrowed(given)]
    cases += [(at, (cast, *given)) for at, cast in narrowed(frame)]
    assert len(cases) >= len(layer.shapes) + len(jax.tree.leaves(frame))
    for at, arguments in cases:
        with pytest.raises(ValueError, match=r"is float16|float16, expected"):
            eqx.filter_eval_shape(layer.call, *arguments)
            pytest.fail(f"{at} in float16 was accepted")


MAKERS = {
    "RMSNorm": (RMSNorm, {"dim": 4}, {"eps": 1e-5}),
    "LayerNorm": (LayerNorm, {"dim": 4}, {"eps": 1e-5}),
    "TimestepNorm": (TimestepNorm, {"num_features": 4, "num_groups": 2}, {"eps": 1e-5}),
    "ComplexEMA": (partial(ComplexEMA, key=jax.random.key(0)), {"embed_dim": 4, "ndim": 2}, {}),
    "RotaryEmbedding": (RotaryEmbedding, {"dim": 4}, {"base": 7.0}),
    "Linear": (
        partial(Linear, config=TINY, key=jax.random.key(0)),
        {"in_features": 4, "out_features": 2},
        {},
    ),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.usefixtures("as_users_have_it")
def test_a_layer_is_not_made_of_what_is_no_size_nor_of_float16(name: str) -> None:
    make, sizes, numbers = MAKERS[name]
    wrong = [(n, value) for n in sizes for value in (0, -2, 2.0, True, None)]
    wrong += [(n, value) for n in numbers for value in (0.0, -1.0, math.inf, math.nan)]
    for argument, value in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: {argument}={value} must be"):
            make(**sizes | numbers | {argument: value})
    if name in ("RotaryEmbedding", "Linear"):
        return  # Has no dtype of its own.
    with pytest.raises(ValueError, match=f"^{name}: dtype=float16 is refused"):
        make(**sizes, dtype=jnp.float16)


def test_no_state_is_made_of_float16() -> None:
    with pytest.raises(ValueError, match=r"^NormState.fresh: dtype=float16 is refused"):
        NormState.fresh(B, 2, jnp.float16)
    with pytest.raises(ValueError, match=r"^AttentionCache.empty: dtype=float16 is refused"):
        AttentionCache.empty(TINY, B, 4, jnp.float16)


@pytest.mark.usefixtures("as_users_have_it")
def test_a_model_cast_to_float16_is_refused_wherever_it_was_cast() -> None:
    def call(model, ids, mask):
        return model(ids, mask, return_cache=False)[0]

    ids, mask = jnp.zeros((B, L), jnp.int32), jnp.ones((B, L), bool)
    frame = abstract_model(tiny(num_layers=1, swiglu=True, output_size=19))
    eqx.filter_eval_shape(call, frame, ids, mask)
    for at, cast in narrowed(frame):
        with pytest.raises(ValueError, match="float16"):
            eqx.filter_eval_shape(call, cast, ids, mask)
            pytest.fail(f"{at} in float16 was accepted")
