"""Elements that a few large ones hide are compared too, and a healthy port is not failed by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parity.engine.measure.measurement import Verdict
from parity.port.hidden import ROUNDINGS, Squares, hidden
from parity.port_tolerances import STUDENT, PortEdge
from tests.parity.port.test_what_was_compared import both

HUGE = 1e20


def spoil(y):
    y = y.clone()
    y[0, 0] = y[0, 0] * HUGE
    return y


def spoil_jax(y):
    return y.at[0, 0].multiply(HUGE)


WRONG = {
    "another value": lambda y: y.at[2, 3].add(0.5),
    "ten thousand roundings": lambda y: y.at[2, 3].multiply(1 + 1e-3),
    "the sign of all others": lambda y: -y.at[0, 0].multiply(-1),
    "zeros": lambda y: y.at[1:].set(0.0),
}


@pytest.mark.parametrize("gradients", [False, True])
def test_a_healthy_port_holds_beside_a_huge_element(gradients):
    report = both(spoil, spoil_jax, gradients=gradients)
    assert report.holds, report.text()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_element_beside_a_huge_one_is_found(name):
    report = both(spoil, lambda y: spoil_jax(WRONG[name](y)))
    edges = {m.edge for m in report.failures}
    # Also in float32: a port whose float32 alone is wrong is seen nowhere else.
    assert {PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32} <= edges, report.text()
    assert "which larger ones hide" in report.sentence()
    assert all(m.value > m.tolerance for m in report.failures)


def test_one_ordinary_element_among_huge_ones_is_found():
    def theirs(y):
        return y.masked_fill(torch.arange(6) < 5, HUGE) + y * torch.tensor([HUGE] * 5 + [0.0])

    def ours(y, at=5):
        grown = y.at[:, :5].multiply(HUGE)
        return grown.at[:, :5].add(HUGE).at[3, at].multiply(1.5)

    assert not both(theirs, ours).holds


def test_a_healthy_value_is_that_of_the_whole():
    """Nothing changes in the numbers of what holds, so that levels stay comparable."""
    plain = both(spoil, spoil_jax)
    rows = [m for m in plain.measurements if m.metric == "rel_l2" and m.verdict is Verdict.PASS]
    assert rows and all(m.value < m.tolerance and not m.note for m in rows)


def apart(expected, error, *, squares=0.0, bound=1e-6, **how):
    expected = np.asarray(expected, np.float64)
    actual = expected + np.asarray(error)
    options = {"absolute": 0.0, "factor": 1.0, "float64": True} | how
    full = np.broadcast_to(squares, expected.shape)
    return hidden(actual, expected, bound * np.linalg.norm(expected), mean_squares=full, **options)


def test_what_is_hidden_among_what_is_hidden_is_compared_too():
    """1e20, then 1e10, then 1: each hides the next."""
    values = [1e20, 1e10, 1.0]
    found = apart(values, [0, 0, 0.5], absolute=1e-6)
    assert found is not None and found.fraction > 1 and found.count == 1
    found = apart(values, [0, 1e6, 0], absolute=1e-6)
    assert found is not None and found.fraction > 1 and found.count == 2
    assert apart(values, [1e13, 1e3, 1e-7], absolute=1e-6).fraction < 1


def test_noise_of_the_elements_themselves_explains_an_error():
    values, noise = [1e20, 1.0, 1.0], 0.01
    error = [0, noise, -noise]
    assert apart(values, error).fraction > 1
    assert apart(values, error, squares=noise**2).fraction < 1
    # Ten floors are the room for a floor that four runs measured.
    assert apart(values, [0, 2 * STUDENT * noise, 0], squares=noise**2).fraction > 1


def test_a_kernel_that_adds_to_one_inside_is_no_failure():
    """GELU at -8 is 1e-15 as 1 + erf, whose last bit is 1e-16: noise that no perturbation shows."""
    assert apart([1e3, 1e-15], [0, 2e-16]).fraction < 1
    assert apart([1e3, 1e-15], [0, 1e-13]).fraction > 1


def test_the_room_of_many_elements_is_that_of_independent_errors():
    """A hundred elements of rounding have ten times the room of one, not a hundred times."""
    values = [1e3, *[1e-15] * 100]
    one = ROUNDINGS * 2.0**-53
    assert apart(values, [0, *[0.9 * one] * 100]).fraction < 1
    assert apart(values, [0, *[2.0 * one] * 100]).fraction > 1
    # In float32 a unit roundoff is 2^29 times as large.
    assert apart(values, [0, *[2.0 * one] * 100], float64=False).fraction < 1
    assert apart(values, [0, *[2.0 * one * 2**29] * 100], float64=False).fraction > 1


def test_a_bound_that_falls_to_a_quarter_is_followed():
    expected, error = np.asarray([100.0, 0.9, 0.2]), np.asarray([0.0, 0.0, 0.1])
    how = {"factor": 1.0, "mean_squares": np.zeros(3), "float64": True}
    found = hidden(expected + error, expected, 1.0, absolute=0.27, **how)
    assert found is not None and found.count == 1 and found.fraction > 1
    # One that falls by a third only is a last one.
    found = hidden(expected + error, expected, 1.0, absolute=0.7, **how)
    assert found is not None and found.count == 2 and found.fraction < 1


def test_an_element_as_large_as_the_bound_is_not_hidden():
    """All of it being wrong breaks the bound of the whole array."""
    expected = np.asarray([4.0, 0.5, 0.25])
    how = {"absolute": 0.0, "factor": 1.0, "mean_squares": np.zeros(3), "float64": True}
    found = hidden(expected * 1.5, expected, 0.5, **how)
    assert found is not None and (found.count, found.error) == (1, 0.125)


def test_nothing_is_hidden_where_all_is_alike_or_all_is_rounding():
    assert apart([1.0, 2.0], [0.5, 0.5]) is None
    assert apart([1.0, 2.0], [0.5, 0.5], bound=10.0) is None
    assert apart([], []) is None


def test_the_noise_of_an_element_is_of_all_seeds():
    """Three seeds that move two elements by other amounts, and a mask that does not count."""
    exact = {"x": np.array([1.0, 2.0, np.inf]), "scalar": np.array(0.0)}
    squares = Squares()
    for step in (1.0, 2.0, 4.0):
        moved = {"x": np.array([1.0 + step, 2.0, 0.0]), "scalar": np.array(-step)}
        squares.add(exact, moved)
    assert {name: x.tolist() for name, x in squares.mean().items()} == {
        "x": [7.0, 0.0, 0.0],
        "scalar": 7.0,
    }
