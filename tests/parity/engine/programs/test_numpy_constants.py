"""A function's NumPy constants have the dtypes of the mode in which it is traced."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest

from parity import FunctionSide
from parity.engine.programs import numpy_constants
from parity.sides.side import OUTPUT, Precision, Run
from tests.helpers import EXACT, close, rel_l2

X = np.linspace(0.1, 0.9, 8, dtype=np.float32).reshape(4, 2)


def made(wrapped):
    scale, rows = np.linspace(0.1, 1, 2), np.array([3, 0, 0, -1])

    def function(params, x):
        return (x * scale)[rows] * scale

    return (jax.jit(function) if wrapped else function), (X * np.float64(1) * scale)[rows] * scale


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "jit"])
@pytest.mark.parametrize("first", [Precision.FLOAT32, Precision.FLOAT64])
def test_a_function_of_numpy_constants_runs_in_both_precisions_in_any_order(first, wrapped):
    function, expected = made(wrapped)
    side = FunctionSide(function, {}, X)
    found = {}
    for precision in (first, *({Precision.FLOAT32, Precision.FLOAT64} - {first})):
        trace = side.run(Run(precision))
        assert not trace.notices
        found[precision] = trace.stages[OUTPUT]
    assert rel_l2(found[Precision.FLOAT64], expected) < EXACT
    assert not np.array_equal(found[Precision.FLOAT32], found[Precision.FLOAT64])
    assert close(found[Precision.FLOAT32], expected)


def test_an_array_is_one_constant_however_often_it_is_used():
    scale = np.linspace(0.1, 1, 2)
    numpy_constants.convert_in_each_mode()
    for wide, dtype in ((True, np.float64), (False, np.float32), (True, np.float64)):
        with jax.enable_x64(wide):
            closed = jax.make_jaxpr(lambda x: x * scale + (x - scale))(X.astype(dtype))
        (constant,) = closed.consts
        assert constant.dtype == dtype


def test_a_conversion_that_is_in_place_is_not_put_there_again():
    numpy_constants.convert_in_each_mode()
    assert numpy_constants.convert_in_each_mode.__wrapped__() is False


def test_a_constant_of_another_array_with_the_same_id_is_not_taken():
    numpy_constants.convert_in_each_mode()
    found = []
    for number in range(64):
        # Each array is freed before the next one is made, which often gets its `id`.
        found.append(numpy_constants._convert(np.full(3, number, np.int64)).tolist())
    assert found == [[number] * 3 for number in range(64)]
    kept = numpy_constants._convert(one := np.arange(3, dtype=np.int64))
    assert numpy_constants._convert(one) is kept


def test_a_converted_array_is_kept_no_longer_than_it_is_used():
    numpy_constants.convert_in_each_mode()
    one = np.linspace(0.1, 1, 3)
    kept = numpy_constants._convert(one)
    places = [place for place in numpy_constants._converted if place[0] == id(one)]
    assert len(places) == 1 and kept.shape == (3,)
    del kept
    assert not {*places} & numpy_constants._converted.keys()


@pytest.mark.parametrize(
    "dtype", [object, str, bytes, "M8[s]", "m8[s]", ">f4", np.longdouble, np.clongdouble]
)
def test_what_is_no_array_for_jax_is_refused_as_such(dtype):
    with pytest.raises(TypeError, match="is not a valid JAX type"):
        numpy_constants._convert(np.array([1]).astype(dtype))


def test_another_version_of_jax_without_these_functions_is_left_alone(monkeypatch):
    unguarded = numpy_constants.convert_in_each_mode.__wrapped__
    with monkeypatch.context() as patched:
        patched.delattr("jax._src.dtypes.canonicalize_value")
        assert unguarded() is False
    with monkeypatch.context() as patched:
        # An import of such a module is an ImportError.
        patched.setitem(sys.modules, "jax._src.literals", None)
        patched.delattr("jax._src.literals")
        assert unguarded() is False
