"""The quantisers are equal to the NumPy truth, bit for bit, on whatever float32 can hold."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.quantization import formats
from megalodon_jax.quantization.formats import MODES
from parity.tolerances import FIGURES
from stability.core.number_formats import E2M1, E4M3, E5M2, E8M0, Format
from stability.products import block_formats

RANDOM = 1 << 20
"""Random blocks of each format, over all modes together."""
PATTERNS = np.array(
    [0, 1, 0x3FFFFF, 0x400000, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000, 0x7FFFFF],
    np.uint32,
)
"""Fractions at and around everything a scale's mode looks at."""
compiled = {
    "mx": jax.jit(formats.mx, static_argnames=("mode", "dtype", "size")),
    "nvfp4": jax.jit(formats.nvfp4),
    "deepseek": jax.jit(formats.deepseek, static_argnames=("rows", "power_of_two", "dtype")),
}


@pytest.fixture(autouse=True)
def quiet():
    """Infinity and NaN are what half of these tests are about."""
    with np.errstate(all="ignore"):
        yield


def random(blocks: int, size: int, seed: int = 0) -> np.ndarray:
    """Half of any bits at all, NaN and infinity among them; half normal numbers of any scale."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, (blocks // 2, size), np.uint32).view(np.float32)
    scales = rng.integers(-150, 128, (blocks - blocks // 2, 1))
    normal = rng.standard_normal((len(scales), size), np.float32)
    return np.concatenate([bits, np.ldexp(normal, scales).astype(np.float32)])


def special(size: int) -> np.ndarray:
    """A block for every exponent and edge of its largest number, and those that are not numbers."""
    exponents = np.arange(255, dtype=np.uint32)[:, None] << 23
    largest = (exponents | PATTERNS).reshape(-1).view(np.float32)
    rng = np.random.default_rng(1)
    blocks = largest[:, None] * rng.uniform(-1, 1, (largest.size, size)).astype(np.float32)
    blocks[:, 3] = largest
    odd = np.zeros((6, size), np.float32)
    odd[1] = -0.0
    odd[2:, 0] = np.nan, np.inf, -np.inf, 1e-45
    odd[3:, 1] = 1.0
    return np.concatenate([blocks, odd])


def codes(x: np.ndarray) -> np.ndarray:
    """Bits of narrow values; every NaN is one."""
    wide = x.astype(np.float32)
    bits = x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint8)
    return np.where(np.isnan(wide), np.array(0xFF, bits.dtype), bits)


def assert_equal(found, truth: block_formats.Blocks) -> None:
    values = np.asarray(found.values).astype(truth.values.dtype)
    assert np.array_equal(codes(values), codes(truth.values))
    scale = np.asarray(found.scale)
    if scale.dtype == np.uint8:
        scale = scale.view(E8M0.dtype)
    assert np.array_equal(codes(scale.astype(truth.scale.dtype)), codes(truth.scale))


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=["mxfp8", "mxfp4"])
def test_mx_is_the_truth(fmt: Format, mode: str) -> None:
    for x in (random(RANDOM // len(MODES) // (1 if fmt is E4M3 else 8), 32), special(32)):
        truth = block_formats.mx(x, mode, fmt)
        assert_equal(compiled["mx"](jnp.asarray(x), mode=mode, dtype=fmt.dtype), truth)
    if (fmt, mode) == (E4M3, "ceil"):
        assert_equal(formats.mx(jnp.asarray(x)), truth)  # not compiled as a whole


@pytest.mark.sweep
def test_nvfp4_is_the_truth() -> None:
    count, rng = RANDOM // 32, np.random.default_rng(2)
    tensors = [np.ldexp(random(count, 16, i), -e).astype(np.float32) for i, e in enumerate((0, 80))]
    for exponent in (*range(-149, 126, 10), -127, 0, 0):
        spread = np.ldexp(
            rng.standard_normal((count, 16), np.float32), rng.integers(-24, 1, (count, 1))
        )
        tensors.append(np.ldexp(spread, exponent).astype(np.float32))
    finite = special(16)
    for x in (*tensors, finite, np.zeros((1, 16), np.float32)):
        assert_equal(compiled["nvfp4"](jnp.asarray(x)), block_formats.nvfp4(x))
    assert_equal(formats.nvfp4(jnp.asarray(finite)), block_formats.nvfp4(finite))
    # The tensor's own scale takes every significand here, a block of a tensor each.
    few = np.ldexp(rng.standard_normal((256, 1, 16)), rng.integers(-149, 126, (256, 1, 1)))
    each = jax.jit(jax.vmap(formats.nvfp4))(jnp.asarray(few, jnp.float32))
    for i, x in enumerate(few.astype(np.float32)):
        assert_equal(jax.tree.map(lambda a, i=i: a[i], each), block_formats.nvfp4(x))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows", [1, 128])
def test_deepseek_is_the_truth(rows: int, power_of_two: bool) -> None:
    rng, options = np.random.default_rng(3), {"rows": rows, "power_of_two": power_of_two}
    x = np.ldexp(rng.standard_normal((600, 300)), rng.integers(-60, 60, (600, 1)))
    x[:200] = np.ldexp(rng.standard_normal((200, 300)), -20)
    x = x.astype(np.float32)
    x[210, 5], x[350, 250], x[400] = np.nan, np.inf, 0.0
    x[500:, 0] = np.ldexp(448.0, 4)  # The scale of their blocks is a power of two as it is.
    truth = block_formats.deepseek(x, **options)
    assert_equal(compiled["deepseek"](jnp.asarray(x), **options), truth)
    assert np.isnan(truth.scale.astype(np.float32)).any()


def test_a_scale_that_is_rounded_another_way_is_found() -> None:
    x = random(1024, 32)
    with pytest.raises(AssertionError):
        assert_equal(compiled["mx"](jnp.asarray(x), mode="floor"), block_formats.mx(x, "ceil"))


def test_what_the_scale_bytes_say_of_blocks_that_are_no_numbers() -> None:
    x = np.zeros((4, 32), np.float32)
    x[1, 0], x[2, 0], x[3, 0] = np.nan, np.inf, 448.0
    found = compiled["mx"](jnp.asarray(x))
    assert found.scale[:, 0].tolist() == [0, 255, 254, 127]
    assert not np.asarray(found.values[0]).any()
    wide = np.asarray(found.dequantised())[:, 0, 0]
    assert np.isnan(wide[1])
    assert wide[2:].tolist() == [np.inf, 448.0]


def test_the_known_figures_of_normal_numbers() -> None:
    x = np.random.default_rng(4).standard_normal((1 << 16, 32)).astype(np.float32)
    square = np.mean(np.square(x, dtype=np.float64))
    for name, (metric, expected, slack) in FIGURES.items():
        fmt, _, mode = name.partition(" ")
        found = block_formats.nvfp4(x) if fmt == "nvfp4" else block_formats.mx(x, mode.split()[0])
        wide = found.flat(32)
        share = {
            "clipped": np.mean(np.abs(x).max(1) > E4M3.max * found.scale[:, 0].astype(float)),
            "underflow": np.mean((wide == 0) & (x != 0)),
            "mse": np.mean(np.square(wide - x)) / square,
        }[metric]
        assert abs(share - expected) <= slack, name


def test_zeros_fill_up_the_last_block() -> None:
    x = jnp.asarray(random(64, 50, 5)[32:])
    padded = jnp.pad(x, ((0, 0), (0, 14)))
    for quantise in (compiled["mx"], compiled["nvfp4"]):
        for short, whole in zip(quantise(x), quantise(padded), strict=True):
            assert np.array_equal(short, whole, equal_nan=True)


def test_stochastic_rounding_has_the_right_mean_whatever_the_bits_are() -> None:
    # 1.1 of 6 between 1 and 1.5, in tensors that differ elsewhere: keys come from all of the bits.
    x = np.random.default_rng(6).uniform(-6, 6, (1000, 4, 16)).astype(np.float32)
    x[:, :, 0], x[:, :, 1] = 6.0, 1.1

    def rounded(tensor: jax.Array) -> jax.Array:
        return formats.nvfp4(tensor, formats.key_from(tensor)).values[:, 0, 1]

    run = jax.jit(jax.vmap(rounded))
    found = np.asarray(run(x))
    assert set(np.unique(found)) == {1.0, 1.5}
    share, n = 0.2, found.size
    assert abs(np.mean(found == 1.5) - share) < 5 * np.sqrt(share * (1 - share) / n)
    assert np.array_equal(found, run(x)), "the same bits are rounded the same way"
    order = np.random.default_rng(7).permutation(16)
    key = jax.random.key_data(formats.key_from(jnp.asarray(x[0])))
    assert np.array_equal(
        key, jax.random.key_data(formats.key_from(jnp.asarray(x[0][:, order])))
    ), "no order of summation enters"


def test_stochastic_rounding_knows_the_smallest_bfloat16_numbers() -> None:
    """Below 2^-119 the grid is 2^-126: a finer unit, or its inverse, is no normal float32."""
    steps, share, n = np.arange(1, 128), 0.25, 2000
    x = np.ldexp(steps[:, None] + np.full(n, share), -126).astype(np.float32)
    run = jax.jit(lambda x: formats.stochastic(x, jnp.bfloat16, jax.random.key(2)))
    up = np.ldexp(np.asarray(run(x), np.float64), 126) - steps[:, None]
    assert set(np.unique(up)) == {0.0, 1.0}
    assert abs(np.mean(up) - share) < 5 * np.sqrt(share * (1 - share) / up.size)
    kept = np.ldexp(np.float32(1), -126) * np.arange(-128, 129, dtype=np.float32)
    assert np.array_equal(run(kept), kept)


@pytest.mark.parametrize(
    ("quantise", "message"),
    [
        (partial(formats.mx, mode="up"), r"mode='up' must be one of \('ceil', 'floor', 'even'\)"),
        (lambda x: formats.mx(x.astype(jnp.bfloat16)), r"write x\.astype\(jnp\.float32\)"),
        (lambda x: formats.nvfp4(x.astype(E5M2.dtype)), "x is float8_e5m2, expected float32"),
    ],
)
def test_what_cannot_be_quantised_says_what_to_write(quantise, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantise(jnp.ones(32))
