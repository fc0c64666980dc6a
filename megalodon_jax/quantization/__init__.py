"""Low-precision matrix products, with operands quantised in blocks that share a scale."""

from megalodon_jax.quantization.formats import (
    MX,
    Scaled,
    deepseek,
    key_from,
    mx,
    nearest,
    nvfp4,
    stochastic,
)
from megalodon_jax.quantization.products import (
    BACKENDS,
    DIRECTIONS,
    Backend,
    gemm,
    operands,
    path_of,
)

__all__ = [
    "BACKENDS",
    "DIRECTIONS",
    "MX",
    "Backend",
    "Scaled",
    "deepseek",
    "gemm",
    "key_from",
    "mx",
    "nearest",
    "nvfp4",
    "operands",
    "path_of",
    "stochastic",
]
