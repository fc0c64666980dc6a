"""How yardsticks are compiled: as cheaply as XLA can, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from parity.engine.programs import yardstick
from parity.engine.programs.yardstick import RUN_OFTEN, RUN_ONCE, compiled, known_options

GONE = {"xla_of_a_version_that_is_not_this_one": 1}
OFF = {"xla_of_another_version": False, "xla_of_a_third_version": 0}


@pytest.fixture
def fresh() -> Iterator[None]:
    """As if nothing were compiled yet, before and after."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def test_an_option_that_xla_no_longer_has_is_left_out() -> None:
    known = known_options(RUN_ONCE)
    assert known and known_options(RUN_ONCE | GONE) == known
    assert known_options(GONE) == {}
    # Whatever its value was.
    assert known_options(OFF | GONE) == {} and known_options(OFF | RUN_ONCE) == known


def test_an_option_that_is_wrong_is_said() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level"):
        known_options({"xla_backend_optimization_level": "high"})


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_another_device_is_asked_for_no_level_that_its_compiler_has_not(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert known_options(RUN_OFTEN).keys() == RUN_OFTEN.keys() - {"xla_backend_optimization_level"}


@pytest.mark.usefixtures("fresh")
def test_yardsticks_alone_are_compiled_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardstick, "known_options", lambda options: GONE)
    assert compiled(double, yardstick=False)(jnp.ones(3)).sum() == 6
    with pytest.raises(jax.errors.JaxRuntimeError, match="not_this_one"):
        compiled(double, yardstick=True)(jnp.ones(3))
