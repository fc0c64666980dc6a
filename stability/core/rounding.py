"""Rounding inside jit that the compiler may not remove, to nearest and stochastically.

XLA may elide a float32 -> bfloat16 -> float32 round trip as excess precision. Lost updates and
Kahan error terms would then vanish. `lax.reduce_precision` and integer arithmetic on the bits
cannot be elided, and `check_rounding` compares compiled code with NumPy's cast.
Source: docs/stability.md "Rounding".
"""

from __future__ import annotations

from functools import lru_cache

import jax
import numpy as np

from megalodon_jax.quantization import formats
from stability.core.number_formats import Format


def nearest(x: jax.Array, fmt: Format) -> jax.Array:
    """Round float32 values to the nearest number of `fmt`, ties to even; the result is float32.

    See `megalodon_jax.quantization.formats.nearest`.
    """
    return formats.nearest(x, fmt.dtype)


def stochastic(x: jax.Array, fmt: Format, key: jax.Array) -> jax.Array:
    """Round float32 values up or down in `fmt` at random, so that the mean is exact.

    See `megalodon_jax.quantization.formats.stochastic`.
    """
    return formats.stochastic(x, fmt.dtype, key)


@lru_cache(maxsize=16)
def check_conversion(fmt: Format) -> None:
    """Check that compiled code can convert between float32 and a format's dtype.

    XLA's CPU compiler turns a float16 conversion into an F16C instruction. On a processor without
    F16C it emits a call to a library function that is not linked, and the program does not load.

    Raises:
        ValueError: the conversion does not compile on this processor.
    """
    try:
        both = jax.jit(lambda wide, narrow: (wide.astype(fmt.dtype), narrow.astype(np.float32)))
        both.lower(np.float32(1), fmt.dtype.type(1)).compile()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{fmt.name} cannot be computed on this processor: XLA compiles no conversion between "
            f"float32 and {fmt.name}. For float16 it needs the F16C instructions, which x86 "
            "processors have had since 2012: run this on one that has them, without a limit such "
            "as --xla_cpu_max_isa in XLA_FLAGS, or ask about another format. XLA's error: "
            f"{error}"
        ) from error


@lru_cache(maxsize=16)
def check_rounding(fmt: Format) -> None:
    """Check that compiled code rounds as NumPy's cast does; every rounding probe calls this first.

    Raises:
        RuntimeError: a value that the compiled program returned differs from NumPy's cast.
    """
    rng = np.random.default_rng(0)
    scale = np.float32(2.0) ** rng.integers(-6, 6, 256).astype(np.float32)
    x = (rng.standard_normal(256).astype(np.float32) * scale).astype(np.float32)
    got = np.asarray(jax.jit(lambda v: nearest(v, fmt))(x))
    wrong = int(np.sum(got != fmt.round(x)))
    if wrong:
        raise RuntimeError(
            f"rounding to {fmt.name} did not happen: {wrong} of {x.size} values from the compiled "
            "program differ from NumPy's cast, so this probe's results would be wrong. A flag such "
            "as xla_allow_excess_precision may have removed the rounding: check XLA_FLAGS."
        )
