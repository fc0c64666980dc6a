"""Low-precision matrix products: both operands quantised along the contraction, summed in float32.

A linear map has three products: forward, gradient of the input and gradient of the weight. Each
sums over another axis, so each quantises its own two operands, from unquantised values. Master
weights, activations between products and everything else keep their precision, and checkpoints do
not depend on backends.

    mxfp8                     MXFP8 in all three (e4m3, blocks of 32, scales rounded up)
    nvfp4                     NVFP4 in all three; output gradients are rounded stochastically, and
                              both operands of the weight gradient are first rotated by a random
                              Hadamard transform of 16 tokens
    mxfp8-nvfp4               MXFP8 forward, the gradients as in nvfp4
    nvfp4-nearest             nvfp4 without the stochastic rounding
    nvfp4-unrotated           nvfp4 without the rotation
    nvfp4-nearest-unrotated   nvfp4 without stochastic rounding and rotation

Stochastic rounding needs no external key. The key is derived from the bits of the weight
(`formats.key_from`), and each element's random number from its position in the whole array. So the
same weights give the same noise on every machine, with 64-bit types on or off, in every sharding
under `jax.jit`, and when a block is recomputed. After an update, and for another matrix, the noise
differs. Gradients are not suitable as the source of the key: their last bits depend on the order of
sums, and so on the machine and the sharding.

Microbatches of one step have the same weights and so the same noise. Each microbatch applies the
noise to different values, so the sum of their gradients is still unbiased. Inside `jax.shard_map`
an array is a shard, and all shards with equally many tokens draw the same noise.

Only reverse-mode differentiation is supported: gradients are separate products with their own
quantisation, not transposes of a map that could run forward. `jax.jvp` through a low-precision
backend raises a TypeError.

Sources: OCP Microscaling Formats (MX) v1.0; "Pretraining Large Language Models with NVFP4" (NVIDIA
2025), section 4; docs/formats.md "Use".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from megalodon_jax.quantization.formats import E2M1, E4M3, MX, NV_BLOCK, Scaled, key_from, mx, nvfp4

Format = Literal["mxfp8", "nvfp4"]
Direction = Literal["forward", "input_grad", "weight_grad"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
Path = Literal["scaled matmul", "emulated"]
Operands = tuple[MX, MX] | tuple[Scaled, Scaled]


@dataclass(frozen=True, slots=True)
class Backend:
    """Number formats of a linear map's forward product and of its two gradients, and options."""

    forward: Format
    gradients: Format
    stochastic: bool = False
    """Whether output gradients are rounded stochastically."""
    rotated: bool = False
    """Whether a Hadamard transform over tokens spreads outliers, in the weight gradient only."""


BACKENDS = {
    "mxfp8": Backend("mxfp8", "mxfp8"),
    "mxfp8-nvfp4": Backend("mxfp8", "nvfp4", stochastic=True, rotated=True),
    "nvfp4": Backend("nvfp4", "nvfp4", stochastic=True, rotated=True),
    "nvfp4-nearest": Backend("nvfp4", "nvfp4", rotated=True),
    "nvfp4-unrotated": Backend("nvfp4", "nvfp4", stochastic=True),
    "nvfp4-nearest-unrotated": Backend("nvfp4", "nvfp4"),
}
"""Backends by the names that `MegalodonConfig.gemm_backend` accepts, except "default"."""


def gemm(
    x: Float[Array, "... in"], weight: Float[Array, "out in"], backend: str
) -> Float[Array, "... out"]:
    """Return `x @ weight.T` on a low-precision backend, in float32, differentiable in reverse mode.

    If the block size does not divide the contracted axis, zeros are appended, which have no effect.
    Gradients use the same backend.

    Args:
        x: activations, rounded to float32 if they are wider.
        weight: (out, in), as in torch.
        backend: a key of `BACKENDS`.

    Raises:
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"gemm: backend={backend!r} must be one of {tuple(BACKENDS)}.")
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    y: Any = _gemm(rows, weight.astype(jnp.float32), BACKENDS[backend])
    return y.reshape(*x.shape[:-1], weight.shape[0])


def operands(
    direction: Direction,
    backend: Backend,
    x: Float[Array, "tokens in"],
    weight: Float[Array, "out in"],
    dy: Float[Array, "tokens out"] | None = None,
) -> Operands:
    """Return the operands of one of the three products, both quantised along the contracted axis.

    Args:
        direction: "forward", x (tokens, in) by weight (out, in); "input_grad", dy (tokens, out) by
            weight^T (in, out); "weight_grad", dy^T (out, tokens) by x^T (in, tokens).
        backend: the formats and options.
        x, weight: float32.
        dy: gradient of the output, float32; None for "forward".
    """
    if dy is None:
        return _quantised(backend.forward, x), _quantised(backend.forward, weight)
    # A separate key per product: the errors of the two gradients must be independent.
    key = jax.random.fold_in(key_from(weight), DIRECTIONS.index(direction))
    key, fmt = key if backend.stochastic else None, backend.gradients
    if direction == "input_grad":
        return _quantised(fmt, dy, key), _quantised(fmt, weight.T)
    left, right = (rotated(a.T) if backend.rotated else a.T for a in (dy, x))
    return _quantised(fmt, left, key), _quantised(fmt, right)


def product(pair: Operands, path: Path) -> Float[Array, "rows columns"]:
    """Return `a @ b.T` for the quantised operands a (rows, k) and b (columns, k), in float32.

    `path` is a result of `path_of`.
    """
    a, b = pair
    if isinstance(a, MX) and isinstance(b, MX):
        if path == "scaled matmul":
            scales = [jax.lax.bitcast_convert_type(q.scale, jnp.float8_e8m0fnu) for q in pair]
            return _scaled_matmul([_codes(q.values, E4M3) for q in pair], scales)
        return _emulated(a.dequantised(), b.dequantised())
    assert isinstance(a, Scaled) and isinstance(b, Scaled)
    if path == "scaled matmul":
        scales = [q.scale.astype(E4M3) for q in (a, b)]
        y = _scaled_matmul([_codes(q.values, E2M1) for q in (a, b)], scales)
    else:
        y = _emulated(a.inner(), b.inner())
    return y * a.outer * b.outer


def path_of() -> Path:
    """Return how products are computed on the default device.

    "scaled matmul" is `jax.nn.scaled_matmul`, one instruction on Blackwell, where this project
    has never been run. "emulated" multiplies the dequantised values exactly and adds in float32,
    also on Hopper and Ada: their float8 units add with about 13 bits (docs/formats.md "What runs").
    """
    device = jax.devices()[0]
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return "scaled matmul" if device.platform == "gpu" and major == "10" else "emulated"


def rotated(x: Float[Array, "... k"]) -> Float[Array, "... n"]:
    """Apply the 16-point Hadamard transform `ROTATION` to each 16 values of the last axis.

    The axis is padded with zeros. The transform's random signs are always the same. It is
    orthogonal, so rotating both operands does not change their product.

    The transform adds in a fixed order, by elementwise additions (butterflies). The order of
    additions in a matrix product would depend on the processor and the library, and a difference of
    one ULP in the largest magnitude of a tensor changes its NVFP4 scale, and thereby every element
    of the product.
    """
    short = -x.shape[-1] % NV_BLOCK
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, short),))
    # The first column of a Hadamard matrix is all ones, so this column holds the signs / 4, exact.
    parts = x.reshape(-1, NV_BLOCK) * ROTATION[:, 0]
    for half in (2**i for i in range(NV_BLOCK.bit_length() - 1)):
        pairs = parts.reshape(-1, 2, half)
        left, right = pairs[:, 0], pairs[:, 1]
        parts = jnp.stack([left + right, left - right], axis=1)
    return parts.reshape(x.shape)


def check_widths(*operands: jax.Array) -> None:
    """Check that no operand is already quantised or float16.

    Raises:
        ValueError: an operand has 8 bits or fewer, or is float16.
    """
    for operand in operands:
        if operand.dtype.itemsize < 2 or operand.dtype == jnp.float16:
            raise ValueError(
                f"matmul: an operand is {operand.dtype.name}, expected float32 or bfloat16. Pass "
                "x.astype(jnp.float32); for low precision set gemm_backend, which quantises."
            )


def _rotation() -> np.ndarray:
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < NV_BLOCK:
        hadamard = np.kron(np.array([[1, 1], [1, -1]], np.float32), hadamard)
    # The signs are drawn once for all layers and steps: they only need to treat no token specially.
    signs = np.random.default_rng(NV_BLOCK).choice(np.array([-1, 1], np.float32), NV_BLOCK)
    return signs[:, None] * hadamard / np.sqrt(np.float32(NV_BLOCK))


ROTATION = _rotation()
"""(16, 16) float32: random signs times a Hadamard matrix, divided by 4; its entries are exact."""


def _quantised(format: Format, x: jax.Array, key: jax.Array | None = None) -> Any:
    return mx(x) if format == "mxfp8" else nvfp4(x, key)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gemm(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], backend: Backend
) -> Float[Array, "tokens out"]:
    return product(operands("forward", backend, x, weight), path_of())


def _forward(x: jax.Array, weight: jax.Array, backend: Backend) -> tuple[jax.Array, Any]:
    return _gemm(x, weight, backend), (x, weight)


def _backward(backend: Backend, kept: Any, dy: jax.Array) -> tuple[jax.Array, ...]:
    (x, weight), path = kept, path_of()
    return tuple(product(operands(d, backend, x, weight, dy), path) for d in DIRECTIONS[1:])


_gemm.defvjp(_forward, _backward)


def _codes(values: jax.Array, dtype: Any) -> jax.Array:
    """Convert blocks (rows, n, block) to (1, rows, k) in a narrow dtype that holds them exactly."""
    return values.astype(dtype).reshape(1, values.shape[0], -1)


def _scaled_matmul(codes: list[jax.Array], scales: list[jax.Array]) -> jax.Array:
    (a, b), (a_scale, b_scale) = codes, scales
    return jax.nn.scaled_matmul(a, b, a_scale[None], b_scale[None], jnp.float32)[0]


def _emulated(
    a: Float[Array, "rows n block"], b: Float[Array, "columns n block"]
) -> Float[Array, "rows columns"]:
    """Return `a @ b.T`, blocks joined, in float32, for values of at most 6 significant bits.

    Such values are exact in bfloat16, so a GPU can use its tensor cores. A CPU, which is slow in
    bfloat16, uses float32.
    """
    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    left, right = (q.reshape(q.shape[0], -1).astype(dtype) for q in (a, b))
    return jax.lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
