"""Checks on traced values, and a switch that leaves them out of a program.

A check inside a compiled function calls back to Python. `jax.export` rejects such a program, the
persistent compilation cache never stores it, and `shard_map` cannot partition it. So programs that
are deployed, or compiled once for many starts, are traced without checks. Properties known while
tracing (shapes, dtypes, missing keys) are always checked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Bool

X = TypeVar("X")

# JAX includes the value in the key of every tracing and compilation cache, so a function traced
# with checks is never reused where they are off, nor the reverse.
_enabled = jax.make_user_context(default_value=True)


def traced_checks(enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which this thread traces functions with or without checks of values.

    The default is with checks. The setting takes effect when a function is traced. A jitted
    function called both inside and outside of the context is traced once with and once without
    checks; an exported or ahead-of-time compiled function keeps the setting of its trace. Without
    checks, a token id or label outside the vocabulary gives NaN instead of an error, a full
    unbounded cache overwrites its oldest tokens, and other bad values go unnoticed.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"traced_checks: enabled={enabled!r} must be True or False.")
    return _enabled(enabled)


def checks_enabled() -> bool:
    """Return whether functions are now traced with checks of array values (`traced_checks`)."""
    return _enabled.value


def checked(x: X, bad: Bool[Array, "..."], message: str) -> X:
    """Return `x`; with `traced_checks` on, raise RuntimeError(message) if `bad` is True anywhere.

    Use the result in place of `x`: the compiler removes a check whose result is unused. `x` is a
    pytree with at least one array.
    """
    return eqx.error_if(x, bad, message) if _enabled.value else x
