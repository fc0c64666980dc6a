"""How yardsticks are compiled: float64 as cheaply as XLA can, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from parity.engine import yardstick
from parity.engine.yardstick import OPTIONS, compiled, yardstick_options


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The options as nobody has asked for them yet, to be changed."""
    own = dict(OPTIONS)
    monkeypatch.setattr(yardstick, "OPTIONS", own)
    yardstick_options.cache_clear()
    compiled.cache_clear()
    yield own
    yardstick_options.cache_clear()
    compiled.cache_clear()


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def test_an_option_that_xla_no_longer_has_is_left_out(options: dict[str, Any]) -> None:
    options["xla_of_a_version_that_is_not_this_one"] = 1
    assert yardstick_options() == OPTIONS


def test_an_option_that_is_wrong_is_said(options: dict[str, Any]) -> None:
    options["xla_backend_optimization_level"] = "high"
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level"):
        yardstick_options()


def test_float64_alone_is_compiled_with_them(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    monkeypatch.setattr(yardstick, "yardstick_options", lambda: {"xla_nothing_known": 1})
    assert compiled(double, "float32")(jnp.ones(3)).sum() == 6
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nothing_known"):
        compiled(double, "float64")(jnp.ones(3))
