"""Checks on traced values, and the one switch that leaves them out of a program.

A check inside a compiled function calls back to Python. `jax.export` refuses such a program, the
persistent compilation cache never stores it, and `shard_map` cannot partition it: what is deployed
or compiled once for many starts is traced without checks. What static values can tell (shapes,
dtypes, missing keys) is always checked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Bool

X = TypeVar("X")

# JAX puts the value into the key of every tracing and compilation cache, so a function that was
# traced with checks is never reused where they are off, nor the other way round.
_enabled = jax.make_user_context(default_value=True)


def traced_checks(enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which this thread traces functions with checks (the default) or without.

    It decides when a function is traced. A jitted function called on both sides of the boundary is
    traced once for each; an exported or ahead-of-time compiled one keeps what it was traced with.
    Without checks, a token id or a label outside the vocabulary gives NaN and not an error, an
    unbounded cache that is full overwrites its oldest tokens, and other bad values go unnoticed.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"traced_checks: enabled={enabled!r} must be True or False.")
    return _enabled(enabled)


def checks_enabled() -> bool:
    """Return whether functions are now traced with checks."""
    return _enabled.value


def checked(x: X, bad: Bool[Array, "..."], message: str) -> X:
    """Return `x`; where checks are on and `bad` holds anywhere, raise RuntimeError with `message`.

    Use the result: a check whose result nobody uses is removed with it. `x` is a pytree with at
    least one array.
    """
    return eqx.error_if(x, bad, message) if _enabled.value else x
