"""How programs are compiled that others are measured by.

A float64 run is read once or a few times, and compiling it is most of its cost. What XLA's
optimisations change is the last bits of float64, eight digits below what float32 is asked about. A
program that stands for what users run is never compiled this way.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

LARGE: dict[str, Any] = {"xla_llvm_disable_expensive_passes": True}
"""Compiler options of `jax.jit` for what computes large arrays: LLVM's slow passes make a few runs
hardly quicker."""
RUN_OFTEN: dict[str, Any] = LARGE | {"xla_backend_optimization_level": 0}
"""For what runs some thirty times: half of the time to compile it."""
RUN_ONCE: dict[str, Any] = RUN_OFTEN | {
    # Fused operations go to LLVM without MLIR before it, which computes some of them several times.
    "xla_cpu_use_fusion_emitters": False,
}
"""For what runs once or twice: a quarter of the time to compile, and up to eight times that to run
(docs/speed.md "A night")."""


@functools.cache
def compiled(function: Callable[..., Any], yardstick: bool) -> Callable[..., Any]:
    """Return a function of modules under `jit`, compiled as users' programs or as a yardstick."""
    options: Any = {"compiler_options": known_options(RUN_ONCE)} if yardstick else {}
    return eqx.filter_jit(function, **options)


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some compiler options that XLA has here.

    They are debugging options, which come and go, and a CPU's: the GPU's compiler has no level 0.

    Raises:
        jax.errors.JaxRuntimeError: XLA takes none of a value, or compiles nothing here.
    """
    return dict(_known(tuple(options.items()), jax.default_backend()))


@functools.cache
def _known(items: tuple[tuple[str, Any], ...], backend: str) -> tuple[tuple[str, Any], ...]:
    options = dict(items)
    if backend != "cpu":
        options.pop("xla_backend_optimization_level", None)
    while True:
        try:
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or options.pop(unknown[1], None) is None:
                raise
        else:
            return tuple(options.items())
