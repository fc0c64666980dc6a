"""Rounding inside jit: the cast, value by value; stochastic rounding without bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stability.core import number_formats, rounding
from stability.core.number_formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    Format,
    by_name,
    format_of,
)
from stability.core.rounding import check_rounding, nearest, stochastic

EACH = pytest.mark.parametrize("fmt", [*FORMATS, E2M1], ids=lambda f: f.name)
SIGMAS = 5.0
"""Standard errors a correct mean stays within: fails once in 1.7 million draws of the seed."""


def every(fmt: Format) -> np.ndarray:
    """Every finite number of a format that float32 holds as a normal number, and zero."""
    kind = np.uint8 if fmt.bytes == 1 else np.uint16
    values = np.arange(1 << fmt.bits).astype(kind).view(fmt.dtype).astype(np.float32)
    finite = values[np.isfinite(values)]
    return finite[(np.abs(finite) >= np.finfo(np.float32).tiny) | (finite == 0)]


def between(fmt: Format) -> np.ndarray:
    """A quarter, half and three quarters of the way from each number to the next."""
    ladder = np.unique(every(fmt).astype(np.float64))
    gaps = np.diff(ladder)
    points = np.concatenate([ladder[:-1] + share * gaps for share in (0.25, 0.5, 0.75)])
    points = points.astype(np.float32)
    # The gap around zero of bfloat16 lies among float32's subnormals, which the CPU flushes.
    return points[np.abs(points) >= np.finfo(np.float32).tiny]


@EACH
def test_rounding_inside_jit_is_the_cast_for_every_number_and_between_them(fmt: Format) -> None:
    x = np.concatenate(
        [every(fmt), between(fmt), np.float32([2.0, -2.0]) * np.float32(fmt.max / 2)]
    )
    assert np.array_equal(np.asarray(jax.jit(lambda v: nearest(v, fmt))(x)), fmt.round(x))
    check_rounding(fmt)


@EACH
def test_stochastic_rounding_keeps_numbers_and_moves_others_to_a_neighbour(fmt: Format) -> None:
    kept = every(fmt)
    kept = kept[(np.abs(kept) >= 2.0**-119) | (kept == 0)]
    rounded = jax.jit(lambda v: stochastic(v, fmt, jax.random.key(0)))
    assert np.array_equal(np.asarray(rounded(kept)), kept)
    x = between(fmt)
    x = x[np.abs(x) >= 2.0**-118]
    got, ladder = np.asarray(rounded(x)), np.unique(every(fmt))
    index = np.searchsorted(ladder, x)
    assert np.all((got == ladder[index]) | (got == ladder[index - 1]))


@EACH
def test_stochastic_rounding_has_the_mean_and_variance_of_a_coin(fmt: Format) -> None:
    share, n = 0.3125, 40_000
    unit = float(fmt.spacing(np.array(1.0)))
    x = jnp.full(n, 1.0 + share * unit, jnp.float32)
    up = (np.asarray(stochastic(x, fmt, jax.random.key(1)), np.float64) - 1.0) / unit
    assert set(np.unique(up)) == {0.0, 1.0}
    # Bernoulli: the mean of n has variance s(1-s)/n.
    assert abs(up.mean() - share) < SIGMAS * np.sqrt(share * (1 - share) / n)


def test_rounding_saturates_and_keeps_what_is_not_finite() -> None:
    x = jnp.float32([1e9, -1e9, jnp.nan, jnp.inf])
    for got in (
        nearest(x, E4M3),
        stochastic(x, E4M3, jax.random.key(0)),
        E4M3.clamp(np.asarray(x)),
    ):
        got = np.asarray(got)
        assert got[:2].tolist() == [448.0, -448.0]
        assert np.isnan(got[2])
    assert np.isnan(np.float32(1e9).astype(E4M3.dtype).astype(np.float32)), "why casts clamp first"


@EACH
def test_what_is_not_finite_comes_out_as_itself_whatever_is_drawn(fmt: Format) -> None:
    x = jnp.float32([jnp.inf, -jnp.inf, jnp.nan, -jnp.nan])
    drawn = jax.jit(lambda v, key: stochastic(v, fmt, key))
    for got in (
        nearest(x, fmt),
        *(drawn(x, key) for key in jax.random.split(jax.random.key(0), 8)),
    ):
        shown = np.asarray(got)
        assert shown[:2].tolist() == [np.inf, -np.inf]
        assert np.isnan(shown[2:]).all()
    clamped = fmt.clamp(np.asarray(x))
    assert clamped[:2].tolist() == [np.inf, -np.inf] and np.isnan(clamped[2:]).all()


def test_a_compiler_that_removes_the_rounding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rounding.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(rounding, "nearest", lambda x, fmt: x)
        with pytest.raises(RuntimeError, match="rounding to bfloat16 did not happen"):
            check_rounding(BF16)


def test_formats_by_name_and_dtype() -> None:
    assert by_name("float8_e5m2") is E5M2
    assert format_of(jnp.bfloat16) is BF16
    assert format_of(np.float32) is None
    with pytest.raises(ValueError, match=r"unknown storage format 'int4'.*bfloat16"):
        by_name("int4")


@EACH
def test_distinct_values_count_every_element(fmt: Format) -> None:
    x = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
    values, counts = fmt.distinct(x)
    expected, times = np.unique(np.abs(fmt.round(x)), return_counts=True)
    # Both zeros are values of a format, so magnitudes are compared.
    found = {float(v): int(counts[np.abs(values) == v].sum()) for v in expected}
    assert found == dict(zip(expected.tolist(), times.tolist(), strict=True))
    assert counts.sum() == x.size


@pytest.mark.parametrize("times", [None, np.arange(50)])
def test_distinct_values_of_many_blocks_are_those_of_one(monkeypatch, times) -> None:
    x = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    whole = BF16.distinct(x, times)
    monkeypatch.setattr(number_formats, "_BLOCK", 7)
    parts = BF16.distinct(x, times)
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert parts[1].sum() == (x.size if times is None else times.sum())
