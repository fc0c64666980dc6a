"""Low-precision products: the right operands, along the right axis, and nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import megalodon_jax
from megalodon_jax import MegalodonConfig
from megalodon_jax.checkpoint import load_checkpoint, save_checkpoint
from megalodon_jax.convert import load_from_pretrained
from megalodon_jax.layers.linear import linear_maps, matmul
from megalodon_jax.quantization.formats import MX, Scaled
from megalodon_jax.quantization.products import (
    BACKENDS,
    DIRECTIONS,
    ROTATION,
    Direction,
    gemm,
    operands,
    path_of,
    product,
    rotated,
)
from megalodon_jax.weights import abstract_model, build_model, named_leaves
from parity.engine.measure.metrics import relative_l2
from stability.products import block_formats
from tests.helpers import EACH_DEVICE, TINY, arrays, dot_bound, roundoff, tiny

TOKENS, IN, OUT = 37, 50, 20
rng = np.random.default_rng(0)
X, WEIGHT, DY = (
    rng.standard_normal(shape).astype(np.float32)
    for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT))
)
QUANTISERS = {"mxfp8": block_formats.mx, "nvfp4": block_formats.nvfp4}


def both_ways(backend: str, x=X, weight=WEIGHT, dy=DY) -> list[np.ndarray]:
    """Product and both gradients."""

    @jax.jit
    def run(x, weight, dy):
        y, pull = jax.vjp(lambda x, weight: gemm(x, weight, backend), x, weight)
        return y, *pull(dy)

    return [np.asarray(a) for a in run(x, weight, dy)]


def butterflies(parts: np.ndarray) -> np.ndarray:
    """Return the Hadamard transform of float32 rows, neighbours added first."""
    if parts.shape[-1] == 1:
        return parts
    left, right = (butterflies(half) for half in np.split(parts, 2, axis=-1))
    return np.concatenate([left + right, left - right], axis=-1)


def spread(a: np.ndarray) -> np.ndarray:
    """Return the rotated rows, float32, zeros after their end."""
    parts = block_formats.blocks(a, 16).astype(np.float32) * ROTATION[:, 0]
    return butterflies(parts).reshape(len(a), -1)


Pair = tuple[np.ndarray, np.ndarray]


def truth(backend: str, along: int = -1) -> list[Pair]:
    """The operands of both ways in float64; quantised `along` an axis, the contraction is -1."""
    recipe = BACKENDS[backend]

    def quantised(a: np.ndarray, b: np.ndarray, fmt: str) -> Pair:
        taken = []
        for x in (a, b):
            x = np.moveaxis(x, along, -1)
            wide = QUANTISERS[fmt](x).flat(x.shape[-1])
            taken.append(np.moveaxis(wide, -1, along))
        return taken[0], taken[1]

    of_tokens = (spread(DY.T), spread(X.T)) if recipe.rotated else (DY.T, X.T)
    return [
        quantised(X, WEIGHT, recipe.forward),
        quantised(DY, WEIGHT.T, recipe.gradients),
        quantised(*of_tokens, recipe.gradients),
    ]


SCALES = 2
"""Roundings of a product after its sum: it is multiplied with the scales of both tensors."""


def within(found: np.ndarray, pair: Pair, more: int = SCALES) -> bool:
    """Whether a float32 product is that of two float64 operands, in any order of summation."""
    a, b = pair
    return bool(np.all(np.abs(found - a @ b.T) <= dot_bound(a, b, more)))


@EACH_DEVICE
@pytest.mark.parametrize("backend", ["mxfp8", "nvfp4-nearest", "nvfp4-nearest-unrotated"])
def test_products_are_those_of_the_truth_s_operands(backend: str, platform: str) -> None:
    """On a GPU by whatever path it has: scaled matmul, or emulated in bfloat16."""
    exact, wrong = truth(backend), truth(backend, along=0)
    if backend == "mxfp8":
        # e4m3 rounds alike under any power of two, unless a number is very small.
        wrong = [(X, WEIGHT), (DY, WEIGHT.T), (DY.T, X.T)]
    with jax.default_device(jax.devices(platform)[0]):
        results = both_ways(backend)
    for found, right, other in zip(results, exact, wrong, strict=True):
        assert within(found, right)
        assert not within(found, other), "along the other axis"


def test_a_rotation_adds_in_one_order_everywhere() -> None:
    """A matrix product adds in blocks of the processor, and its last bit would move all scales."""
    ours = np.asarray(jax.jit(rotated)(X))
    assert np.array_equal(ours, spread(X))
    parts = block_formats.blocks(X, 16)
    exact = (parts @ ROTATION.astype(np.float64)).reshape(ours.shape)
    size = (np.abs(parts) @ np.abs(ROTATION)).reshape(ours.shape)
    assert np.all(np.abs(ours - exact) <= roundoff(16) * size)


def test_stochastic_gradients_are_right_on_average_and_repeat() -> None:
    def gradients(scale: jax.Array) -> tuple[jax.Array, ...]:
        weight = WEIGHT * scale
        dx, dw = jax.vjp(lambda x, w: gemm(x, w, "nvfp4-unrotated"), X, weight)[1](jnp.asarray(DY))
        return dx / scale, dw

    # Scaling by powers of two changes nothing but the bits that the key is made from.
    run = jax.jit(jax.vmap(gradients))
    scales = np.ldexp(np.float32(1), np.arange(-16, 16)).astype(np.float32)
    drawn = jax.tree.map(np.asarray, run(scales))
    nearest = [a @ b.T for a, b in truth("nvfp4-nearest-unrotated")[1:]]
    again = jax.tree.map(np.asarray, run(scales))
    for found, same, exact, nearby in zip(
        drawn, again, (DY @ WEIGHT, DY.T @ X), nearest, strict=True
    ):
        assert np.array_equal(found, same)
        assert not np.array_equal(found[0], found[1])
        # What is left is the other operand's rounding, and what the mean of 32 has not averaged.
        each = np.mean([relative_l2(np.asarray(one, np.float64), exact) for one in found])
        mean = relative_l2(np.mean(np.asarray(found, np.float64), 0), exact)
        assert mean < min(each, relative_l2(nearby, exact))


@partial(jax.jit, static_argnums=(0, 1))
def rounded(direction: Direction, backend: str, dy, weight=WEIGHT, x=X) -> jax.Array:
    """What the output gradient becomes in one of the products."""
    taken = operands(direction, BACKENDS[backend], jnp.asarray(x), jnp.asarray(weight), dy)
    return taken[0].values


GRADIENTS: tuple[Direction, ...] = DIRECTIONS[1:]


@pytest.mark.parametrize("direction", GRADIENTS)
def test_noise_belongs_to_the_weights_and_not_to_last_bits_of_gradients(direction) -> None:
    before = rounded(direction, "nvfp4-unrotated", DY)
    # An element that sets no scale moves by an ulp, as it does when a sum has another order.
    small = np.unravel_index(np.argsort(np.abs(DY), axis=None)[DY.size // 8], DY.shape)
    moved = DY.copy()
    moved[small] = np.nextafter(moved[small], np.float32(9))
    after = rounded(direction, "nvfp4-unrotated", moved)
    assert np.sum(np.asarray(before != after)) <= 1
    updated = WEIGHT.copy()
    updated[3, 4] = np.nextafter(updated[3, 4], np.float32(9))
    assert np.sum(np.asarray(before != rounded(direction, "nvfp4-unrotated", DY, updated))) > 9
    with jax.enable_x64(True):
        assert np.array_equal(before, rounded(direction, "nvfp4-unrotated", DY))


def test_the_two_gradients_round_with_noise_of_their_own() -> None:
    # Equal to its transpose, so that both products read the same numbers at the same places.
    square = rng.standard_normal((TOKENS, TOKENS)).astype(np.float32)
    square = square + square.T
    given = (square, rng.standard_normal((TOKENS, IN)).astype(np.float32), X)
    left, right = (np.asarray(rounded(d, "nvfp4-nearest-unrotated", *given)) for d in GRADIENTS)
    assert np.array_equal(left, right)
    left, right = (np.asarray(rounded(d, "nvfp4-unrotated", *given)) for d in GRADIENTS)
    apart = left != right
    # Each element goes up in one and down in the other with probability 2 p (1 - p), 1/3 for a p
    # that is uniform.
    assert np.mean(apart) > 1 / 6


ON_EIGHT = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from megalodon_jax.quantization.products import BACKENDS, DIRECTIONS, operands
rng = np.random.default_rng(0)
dy, weight, x = (rng.standard_normal(s).astype("f") for s in ((64, 48), (48, 32), (64, 32)))
mesh = Mesh(np.array(jax.devices()), "data")
over = NamedSharding(mesh, PartitionSpec("data"))
@jax.jit
def run(dy, weight, x):
    pairs = [operands(d, BACKENDS["nvfp4-unrotated"], x, weight, dy) for d in DIRECTIONS[1:]]
    return [left.values for left, _ in pairs]
alone, split = run(dy, weight, x), run(*(jax.device_put(a, over) for a in (dy, weight, x)))
assert len(jax.devices()) == 8 and len(split[0].sharding.device_set) == 8
assert all(np.array_equal(a, b) for a, b in zip(alone, split))
print("the same")
"""


@pytest.mark.sweep  # eight devices in a process of its own
def test_noise_is_the_same_in_every_sharding() -> None:
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(Path(megalodon_jax.__file__).parents[1])
    command = [sys.executable, "-c", ON_EIGHT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.stdout == "the same\n", done.stderr


def test_a_rotation_is_orthogonal_and_its_entries_are_exact() -> None:
    assert np.array_equal(ROTATION @ ROTATION.T, np.eye(16, dtype=np.float32))
    assert set(np.abs(ROTATION).ravel()) == {0.25}


def flat(blocks: MX | Scaled, length: int) -> np.ndarray:
    """What an operand holds, without the zeros after its end."""
    wide = np.asarray(blocks.dequantised(), np.float64)
    return wide.reshape(len(wide), -1)[:, :length]


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["mxfp8", "nvfp4-nearest-unrotated"])
def test_zeros_after_the_contraction_change_nothing(backend: str) -> None:
    """The same operands to the bit; a product of another shape may be summed in other blocks."""

    def pad(a: np.ndarray) -> np.ndarray:
        return np.pad(a, ((0, 0), (0, 14)))

    padded = both_ways(backend, pad(X), pad(WEIGHT))
    for short, whole, pair in zip(both_ways(backend), padded, truth(backend), strict=True):
        assert within(short, pair) and within(whole[:, : short.shape[1]], pair)
        assert not np.any(whole[:, short.shape[1] :])

    @partial(jax.jit, static_argnums=0)
    def taken(direction: Direction, *given: jax.Array) -> tuple[MX | Scaled, ...]:
        dy = None if direction == "forward" else jnp.asarray(DY)
        return operands(direction, BACKENDS[backend], *given, dy)

    for direction, lengths in zip(DIRECTIONS, (IN, OUT, TOKENS), strict=True):
        pairs = taken(direction, X, WEIGHT), taken(direction, pad(X), pad(WEIGHT))
        for short, whole in zip(*pairs, strict=True):
            one, other = flat(short, lengths), flat(whole, lengths)
            assert np.array_equal(one, other[: len(one)])


def test_other_paths_take_the_same_product() -> None:
    assert path_of() == "emulated"

    def take(x, weight, name: str, path: str):
        return product(operands("forward", BACKENDS[name], x, weight), path)

    run = jax.jit(take, static_argnums=(2, 3))
    assert within(np.asarray(run(X, WEIGHT, "mxfp8", "emulated")), truth("mxfp8")[0], more=0)
    for name in ("mxfp8", "nvfp4"):
        traced = run.trace(X, WEIGHT, name, "scaled matmul")
        # This machine can lower to a GPU, if not run on it.
        assert "block_scaled" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("backend", ["mxfp8", "nvfp4"])
def test_a_block_that_is_no_number_spoils_its_row_or_its_column(backend: str) -> None:
    x, weight = X.copy(), WEIGHT.copy()
    x[3, 1], weight[5, 40] = np.nan, np.nan

    @jax.jit
    def taken(x, weight):
        return product(operands("forward", BACKENDS[backend], x, weight), "emulated")

    expected = np.zeros((TOKENS, OUT), bool)
    for given, row, column in (((x, WEIGHT), 3, None), ((X, weight), None, 5), ((x, weight), 3, 5)):
        expected[:] = False
        if row is not None:
            expected[row] = True
        if column is not None:
            expected[:, column] = True
        assert np.array_equal(np.isnan(taken(*given)), expected)


@pytest.mark.parametrize(
    ("capability", "path"),
    [
        ("8.0", "emulated"),
        # Its float8 units add with about 13 bits: 4.6e-5 off where emulation is 2.4e-8 off.
        ("9.0", "emulated"),
        ("10.0", "scaled matmul"),
        ("12.0", "emulated"),
        ("gfx942", "emulated"),
    ],
)
def test_the_path_follows_the_device(monkeypatch, capability, path) -> None:
    device = type("Device", (), {"platform": "gpu", "compute_capability": capability})()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert path_of() == path


RULES = {"*.layers.0.*": "mxfp8", "*.fc1": "nvfp4", "lm_head": "mxfp8"}


def test_rules_choose_by_module_and_a_name_leaves_the_head_out() -> None:
    model = abstract_model(tiny(gemm_backend=RULES))
    chosen = {name: linear.backend for name, linear in linear_maps(model).items()}
    assert chosen["model.layers.0.attn.wz"] == chosen["model.layers.0.ffn.fc1"] == "mxfp8"
    assert chosen["model.layers.1.ffn.fc1"] == "nvfp4"
    assert chosen["model.layers.1.attn.wz"] == "default"
    assert model.head_backend == "mxfp8"
    for size in (-1, 11):
        model = abstract_model(tiny(gemm_backend="nvfp4", output_size=size))
        chosen = {name: linear.backend for name, linear in linear_maps(model).items()}
        assert {model.head_backend, chosen.pop("lm_head", "default")} == {"default"}
        assert set(chosen.values()) == {"nvfp4"}


@pytest.mark.parametrize(
    ("backend", "products"),
    [("default", 0), ("mxfp8", 7), ({"lm_head": "mxfp8"}, 1), ({"*.fc?": "nvfp4"}, 2)],
)
def test_a_program_has_as_many_low_precision_products_as_were_asked_for(backend, products) -> None:
    model = abstract_model(tiny(num_layers=1, gemm_backend=backend))
    ids = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    program = eqx.filter_make_jaxpr(lambda model, ids: model(ids)[0])(model, ids)[0]
    assert str(program).count("name=_gemm") == products


def test_gradients_of_weights_keep_float32_beside_bfloat16() -> None:
    config = tiny(compute_dtype=jnp.bfloat16)
    run = jax.jit(jax.grad(lambda w: matmul(jnp.asarray(X), w, config, "mxfp8").sum()))
    moved = run(jnp.asarray(WEIGHT))
    assert moved.dtype == jnp.float32
    assert np.any(moved != moved.astype(jnp.bfloat16).astype(jnp.float32))


def test_checkpoints_know_nothing_of_backends(tmp_path) -> None:
    model = build_model(tiny(), arrays(tiny()))
    save_checkpoint(tmp_path / "plain", model, step=3)
    moved = load_from_pretrained(tmp_path / "plain", config=tiny(gemm_backend=RULES))
    save_checkpoint(tmp_path / "narrow", moved, step=3)
    back = load_checkpoint(tmp_path / "narrow").model
    assert back.config == moved.config
    assert back.head_backend == "mxfp8"
    assert jax.tree.structure(back) == jax.tree.structure(moved)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "narrow")]
    assert files[0] == files[1]
    for name, leaf in named_leaves(model).items():
        assert np.array_equal(leaf, named_leaves(back)[name]), name


def test_the_configuration_keeps_rules_through_json() -> None:
    config = tiny(gemm_backend=RULES)
    assert config.gemm_backend == tuple(RULES.items())
    assert hash(config) == hash(tiny(gemm_backend=list(RULES.items())))
    assert MegalodonConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert tiny(gemm_backend=()).gemm_backend == "default"


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("fp4", r"gemm_backend='fp4' must be one of \('default', 'mxfp8', "),
        ({"*": "fp4"}, r"the rule '\*' gives 'fp4'"),
        ({"*.wx": "mxfp8"}, r"'\*\.wx' matches no module; there are model\.layers\.\*\.attn\.wz"),
    ],
)
def test_a_backend_that_is_not_there_is_refused_in_words(backend: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abstract_model(tiny(gemm_backend=backend))


def test_what_does_not_go_together_says_what_to_write() -> None:
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match="'default' with accum_dtype=float64"),
    ):
        tiny(gemm_backend="mxfp8").with_dtype("float64")
    narrow = jnp.ones((2, IN), jnp.float8_e4m3fn)
    for config in (tiny(), replace(tiny(), gemm_backend="mxfp8")):
        with pytest.raises(ValueError, match=r"float8_e4m3fn.*Pass x\.astype\(jnp\.float32\)"):
            matmul(narrow, jnp.asarray(WEIGHT), config)
    with pytest.raises(ValueError, match="backend='fp4' must be one of"):
        gemm(jnp.asarray(X), jnp.asarray(WEIGHT), "fp4")


def test_each_direction_has_the_format_of_its_backend() -> None:
    kinds = {"mxfp8": MX, "nvfp4": Scaled}
    x, weight, dy = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 32), (8, 32), (4, 8)))
    for backend in BACKENDS.values():
        for direction in DIRECTIONS:
            forward = direction == "forward"
            quantised = partial(operands, direction, backend)
            pair = jax.eval_shape(quantised, x, weight, None if forward else dy)
            kind = kinds[backend.forward if forward else backend.gradients]
            assert all(isinstance(part, kind) for part in pair), (backend, direction)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_is_taken_for_the_default(backend: str) -> None:
    x, weight = jnp.ones((4, 32)), jnp.ones((8, 32))

    def program(name: str) -> str:
        return str(jax.make_jaxpr(lambda x, weight: matmul(x, weight, TINY, name))(x, weight))

    assert ("custom_vjp" in program(backend), "custom_vjp" in program("default")) == (True, False)
