"""Transformers of other libraries on meshes of eight devices, sound and with a bug each."""

from __future__ import annotations

from unittest import mock

import jax
import pytest

from tests.parity.mesh.transformers import (
    MESHES,
    ROWS,
    Exchange,
    equinox_step,
    flax_step,
)

WALK = pytest.mark.sweep


@pytest.fixture(autouse=True)
def as_their_users():
    """JAX as it comes: Flax and optax rely on the standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("step", [equinox_step, pytest.param(flax_step, marks=WALK)])
@pytest.mark.parametrize(
    "mesh", [MESHES[3], *(pytest.param(mesh, marks=WALK) for mesh in MESHES[:3])], ids=str
)
def test_a_sound_transformer_holds(step, mesh):
    wide = step().on([mesh]).run(precisions=("float64",))
    assert wide.holds, wide.table()
    marks = {m.quantity for m in wide.measurements}
    assert {"logits", "loss"} < marks and any(name.startswith("grad/") for name in marks)


@WALK
@pytest.mark.parametrize("step", [equinox_step, flax_step])
def test_a_sound_transformer_holds_in_float32(step):
    report = step().on([MESHES[3]]).run(precisions=("float32",))
    assert report.holds, report.table()


def mean_of_means(total, count):
    return jax.lax.pmean(total / count, ROWS)


def bias_on_every_device(y, bias):
    return jax.lax.psum(y + bias, "tensor")


def parts(step, mesh, **methods):
    faulty = {name: staticmethod(method) for name, method in methods.items()}
    with mock.patch.multiple(Exchange, **faulty):
        report = step().on([mesh]).run(precisions=("float64",), reorder=False, forced=False)
    (result,) = report.results
    return result


def test_a_mean_of_means_in_flax_is_found_at_the_loss():
    result = parts(flax_step, MESHES[0], mean=mean_of_means)
    assert (result.start, result.before) == ("loss", "token_loss")
    assert ("all-reduce", ("data",)) in {(c.operation, c.axes) for c in result.suspects}


def test_a_bias_added_by_every_device_in_equinox_is_found_at_the_attention():
    result = parts(equinox_step, MESHES[1], attended=bias_on_every_device)
    assert (result.start, result.before) == ("attention", "heads")
    (collective,) = result.suspects
    assert (collective.operation, collective.axes) == ("all-reduce", ("tensor",))
    assert collective.source.startswith("test_transformers.py:")
