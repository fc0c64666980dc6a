"""Low-precision products against float64 on the same quantised operands, forward and backward.

What is left is how the product is taken: which operand meets which, along which axis, summed in
what. That the operands are quantised right is another question, answered bit for bit by
`stability.block_formats`. Source: spec/stability.md "Formats".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.gemm import BACKENDS, DIRECTIONS, Backend, gemm, operands
from parity.cases import Work
from parity.compare import Comparison
from parity.results import Measurement
from parity.tolerances import PRODUCTS, NoiseFloors

SHAPES = {"tokens": 75, "in": 100, "out": 52}
"""None a multiple of a block."""
QUANTITIES: tuple[str, ...] = ("product", "grad/input", "grad/weight")


def measure(device: str = "cpu") -> Iterator[Measurement]:
    """Yield the error of every backend's three products, and a failure where one is too large."""
    tokens, width, out = SHAPES.values()
    rng = np.random.default_rng(0)
    sizes = (tokens, width), (out, width), (tokens, out)
    x, weight, dy = (jnp.asarray(rng.standard_normal(size).astype(np.float32)) for size in sizes)
    for name, backend in BACKENDS.items():
        taken, pairs = _step(name, backend, x, weight, dy)
        actual = dict(zip(QUANTITIES, map(np.asarray, taken), strict=True))
        wide = [[_flat(np.asarray(q, np.float64)) for q in pair] for pair in pairs]
        exact = dict(zip(QUANTITIES, (a @ b.T for a, b in wide), strict=True))
        identity = hashlib.sha256(repr((name, SHAPES, backend)).encode()).hexdigest()[:16]
        work = Work(name, identity, QUANTITIES)
        yield from Comparison(work, PRODUCTS, NoiseFloors({}), "float32", device).run(actual, exact)


@partial(jax.jit, static_argnums=(0, 1))
def _step(
    name: str, backend: Backend, x: jax.Array, weight: jax.Array, dy: jax.Array
) -> tuple[Any, Any]:
    """Return the three products, and the dequantised operands of each; one compilation."""
    y, pull = jax.vjp(lambda x, weight: gemm(x, weight, name), x, weight)
    pairs = [
        tuple(q.dequantised() for q in operands(d, backend, x, weight, given))
        for d, given in zip(DIRECTIONS, (None, dy, dy), strict=True)
    ]
    return (y, *pull(dy)), pairs


def _flat(blocks: np.ndarray) -> np.ndarray:
    return blocks.reshape(len(blocks), -1)
