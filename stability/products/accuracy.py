"""Accuracy of low-precision products against float64 products of the same rounded operands.

The expected values are independent of the backend: operands are quantised by
`stability.products.block_formats` and multiplied in float64. No format prescribes the rounding of
rotated operands or the random values of stochastic rounding, so these are taken from the backend
after a check: rotated operands must be a signed Hadamard transform, and stochastically rounded
values must be neighbours of the exact ones with unbiased errors. If a check fails, the expected
values are NaN, so that the gate fails. Source: docs/formats.md "What runs".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.quantization.products import (
    BACKENDS,
    DIRECTIONS,
    ROTATION,
    Backend,
    gemm,
    operands,
    rotated,
)
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.contract import Gate
from parity.engine.measure.measurement import Measurement
from parity.engine.measure.quantity import kind_of
from parity.tolerances import PRODUCTS, UNBIASED, NoiseFloors
from stability.core.number_formats import E2M1
from stability.products import block_formats

SHAPES = {"tokens": 75, "in": 100, "out": 52}
"""Sizes of the compared products, not multiples of a block, so that padding is tested too."""
QUANTITIES: tuple[str, ...] = ("product", "grad/input", "grad/weight")
FORMATS = {"mxfp8": block_formats.mx, "nvfp4": block_formats.nvfp4}


SUITE = "products"
"""Name of the suite in stored runs."""


def gates() -> Iterator[Gate]:
    """Yield the gates (comparisons with a tolerance) that `measure` must report.

    There is one gate for every product of every backend.
    """
    for name in BACKENDS:
        for quantity in QUANTITIES:
            yield Gate(SUITE, name, str(PRODUCTS), kind_of(quantity).value, quantity)


def measure(device: str = "cpu") -> Iterator[Measurement]:
    """Yield the errors of every backend's product and its two gradients, with their tolerances.

    Args:
        device: name of the device, as recorded in the measurements; it selects no device.
    """
    tokens, width, out = SHAPES.values()
    rng = np.random.default_rng(0)
    sizes = (tokens, width), (out, width), (tokens, out)
    x, weight, dy = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    for name, backend in BACKENDS.items():
        products, rotation, draws = _step(name, backend, *map(jnp.asarray, (x, weight, dy)))
        actual = dict(zip(QUANTITIES, map(np.asarray, products), strict=True))
        pairs = _truth(backend, x, weight, dy, rotation, draws)
        exact = dict(zip(QUANTITIES, (a @ b.T for a, b in pairs), strict=True))
        identity = hashlib.sha256(repr((name, SHAPES, backend)).encode()).hexdigest()[:16]
        work = Work(name, identity, QUANTITIES, suite=SUITE)
        yield from Comparison(work, PRODUCTS, NoiseFloors({}), "float32", device).run(actual, exact)


@partial(jax.jit, static_argnums=(0, 1))
def _step(name: str, backend: Backend, x: jax.Array, weight: jax.Array, dy: jax.Array) -> Any:
    """Return a backend's (three products, rotated operands, stochastically rounded operands).

    The products are the forward product, the input gradient and the weight gradient.

    The rotated operands are None if the backend does not rotate; the stochastically rounded
    operands are None if the backend does not round stochastically. A single program computes
    everything, which saves compilations.
    """
    y, pull = jax.vjp(lambda x, weight: gemm(x, weight, name), x, weight)
    rotation = [rotated(a.T) for a in (dy, x)] if backend.rotated else None
    draws = [operands(d, backend, x, weight, dy)[0] for d in DIRECTIONS[1:]]
    return (y, *pull(dy)), rotation, draws if backend.stochastic else None


def _truth(
    backend: Backend, x: np.ndarray, weight: np.ndarray, dy: np.ndarray, rotation: Any, draws: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the float64 operands of the three products: three pairs (rows, k) and (columns, k).

    `rotation` and `draws` are the backend's rotated and stochastically rounded operands, or None.
    """
    forward, gradients = FORMATS[backend.forward], FORMATS[backend.gradients]
    tokens = [dy.T, x.T]
    if rotation is not None:
        tokens = [rotation_or_nan(a, np.asarray(b)) for a, b in zip(tokens, rotation, strict=True)]
    lefts = [gradients(dy), gradients(tokens[0])]
    if draws is not None:
        lefts = [
            draw_or_nan(left, a, np.asarray(ours.values))
            for left, a, ours in zip(lefts, (dy, tokens[0]), draws, strict=True)
        ]
    pairs = (
        (forward(x), forward(weight)),
        (lefts[0], gradients(weight.T)),
        (lefts[1], gradients(tokens[1])),
    )
    return [(_flat(a), _flat(b)) for a, b in pairs]


def rotation_or_nan(x: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Return `ours` if it is `x` rotated as by `ROTATION`, up to float32 rounding, else NaN.

    The rotation is a Hadamard transform of blocks of `x` after a multiplication by fixed signs.

    The expected values use `ours` and not the exact transform, since no format prescribes the order
    of additions and thus the rounding.

    Args:
        x: operand before the rotation, (..., k).
        ours: operand rotated by the backend.
    """
    size = len(ROTATION)
    parity = np.bitwise_count(np.arange(size)[:, None] & np.arange(size)) % 2
    hadamard = np.sign(ROTATION[:, :1]) * (1.0 - 2.0 * parity) / np.sqrt(size)
    parts = block_formats.blocks(x, size)
    exact = (parts @ hadamard).reshape(*x.shape[:-1], -1)
    # Error bound of a float32 sum of `size` products in any order: `size` unit roundoffs times the
    # sum of magnitudes.
    bound = 2.0**-24 * size * (np.abs(parts) @ np.abs(hadamard)).reshape(exact.shape)
    equal = exact.shape == ours.shape and bool(np.all(np.abs(ours - exact) <= bound))
    return ours if equal else np.full_like(exact, np.nan)


def draw_or_nan(
    nearest: block_formats.Blocks, x: np.ndarray, ours: np.ndarray
) -> block_formats.Blocks:
    """Return `nearest` with the values `ours`, or with NaN if stochastic rounding cannot give them.

    Each value must be one of the two neighbours of the exact one. The sums of the errors, of the
    errors times the sign of the exact value, and of the squared errors must each be within
    `UNBIASED` standard deviations of its expectation.

    Args:
        nearest: `x` quantised to nearest, for the scales.
        x: the exact operand.
        ours: values that the backend drew, in the shape of `nearest.values`.
    """
    scale = nearest.scale.astype(np.float64)[..., None] * nearest.outer
    scaled = block_formats.blocks(x, nearest.values.shape[-1]) / scale
    step = E2M1.spacing(scaled)
    share = np.abs(scaled) / step % 1.0
    variance = step**2 * share * (1.0 - share)
    errors = ours.astype(np.float64) - scaled
    sums = (
        (np.sum(errors), np.sum(variance)),
        (np.sum(np.sign(scaled) * errors), np.sum(variance)),
        # The squares distinguish stochastic rounding from rounding to nearest, whose errors are
        # smaller.
        (
            np.sum(errors**2 - variance),
            np.sum(step**2 * variance * (1.0 - 2.0 * share) ** 2),
        ),
    )
    possible = (
        np.all(np.abs(errors) < step)
        and np.array_equal(E2M1.round(ours), ours)
        and all(abs(total) <= UNBIASED * np.sqrt(expected) for total, expected in sums)
    )
    return nearest._replace(values=ours if possible else np.full_like(ours, np.nan))


def _flat(quantised: block_formats.Blocks) -> np.ndarray:
    wide = quantised.dequantised()
    return wide.reshape(len(wide), -1)
