"""Compiler options for float64 reference programs ("yardsticks"), which other programs are compared
with.

A reference runs once or a few times, so compilation is most of its cost. XLA's optimisations change
only the last bits of float64, eight digits below the differences that are measured in float32. A
program that represents what users run is never compiled with these options.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

# LLVM's expensive passes cost more time than they save in a few runs on large arrays.
LARGE: dict[str, Any] = {"xla_llvm_disable_expensive_passes": True}
"""Compiler options of `jax.jit` for programs that compute large arrays."""
RUN_OFTEN: dict[str, Any] = LARGE | {"xla_backend_optimization_level": 0}
"""Options for programs that run about thirty times on larger arrays: compilation takes half the
time."""
RUN_ONCE: dict[str, Any] = RUN_OFTEN | {
    # Compiles fused operations with LLVM only, without MLIR; some are then computed several times.
    "xla_cpu_use_fusion_emitters": False,
}
"""Options for programs that run once or twice, or about thirty times on small arrays: compilation
takes a quarter of the time, a run up to eight times as long (docs/speed.md "A night")."""


@functools.cache
def compiled(function: Callable[..., Any], yardstick: bool) -> Callable[..., Any]:
    """Return a jitted function, cached; arguments may be Equinox modules.

    Args:
        function: the function to compile.
        yardstick: whether it is a float64 reference, compiled with `RUN_ONCE`; otherwise it is
            compiled with JAX's default options, as users do.
    """
    options: Any = {"compiler_options": known_options(RUN_ONCE)} if yardstick else {}
    return eqx.filter_jit(function, **options)


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the subset of compiler options that the installed XLA accepts.

    XLA adds and removes these debugging options between versions. On other devices than the CPU,
    `xla_backend_optimization_level` is left out: the GPU compiler has no level 0.

    Raises:
        jax.errors.JaxRuntimeError: XLA rejects the value of an option, or cannot compile here.
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
