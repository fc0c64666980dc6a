"""How programs are compiled that others are measured by.

A float64 run is read once or a few times, and compiling it is most of its cost. What XLA's
optimisations change is the last bits of float64, eight digits below what float32 is asked about. A
program that stands for what users run is never compiled this way.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

RUN_OFTEN: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiler options of `jax.jit` for what runs some thirty times: half of the time to compile it."""
OPTIONS: dict[str, Any] = RUN_OFTEN | {
    # A CPU's own: fused operations go to LLVM without MLIR before it, which computes some of them
    # several times.
    "xla_cpu_use_fusion_emitters": False,
}
"""For what runs once or twice: a quarter of the time to compile, and up to eight times that to run
(docs/speed.md "A night")."""


@functools.cache
def compiled(function: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Return a function of modules under `jit`, as a yardstick where it computes in float64."""
    options: Any = {"compiler_options": yardstick_options()} if dtype == "float64" else {}
    return eqx.filter_jit(function, **options)


@functools.cache
def yardstick_options() -> dict[str, Any]:
    """Return the compiler options of `jax.jit` for a yardstick.

    They are debugging options of XLA, which come and go: one that is gone is left out.

    Raises:
        jax.errors.JaxRuntimeError: nothing compiles here.
    """
    options = dict(OPTIONS)
    while True:
        try:
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or options.pop(unknown[1], None) is None:
                raise
        else:
            return options
