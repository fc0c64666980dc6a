"""Complex parameters, stages and outputs are compared whole: modulus and angle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.rounding import Signs, pool
from parity.port import Port, compare
from parity.sides import FunctionSide, Run, TorchSide
from parity.sides.complex_pairs import as_pairs, from_pairs
from parity.sides.side import Precision
from parity.sides.torch_lift import lifted

RNG = np.random.default_rng(8)
L, D = 9, 5
X = RNG.standard_normal((2, L, D), np.float32)


def drawn(*shape):
    return as_complex(RNG.standard_normal((*shape, 2), np.float32))


def as_complex(pairs):
    return from_pairs(pairs, np.complex64)


POLES, WEIGHT, Z = drawn(L, D), RNG.standard_normal((D, D), np.float32), drawn(2, L, D)


class Filter(torch.nn.Module):
    """Multiplies a spectrum, by a parameter that is complex or, in pairs, real."""

    def __init__(self, pairs=False):
        super().__init__()
        self.poles = torch.nn.Parameter(torch.from_numpy(as_pairs(POLES) if pairs else POLES))

    def forward(self, spectrum):
        poles = self.poles if self.poles.is_complex() else torch.view_as_complex(self.poles)
        return spectrum * poles


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.filter, self.dense = Filter(), torch.nn.Linear(D, D, bias=False)
        self.dense.weight.data = torch.from_numpy(WEIGHT)

    def forward(self, x):
        return self.dense(torch.fft.ifft(self.filter(torch.fft.fft(x, dim=1)), dim=1).real)


def convolution(params, x, change):
    product = change(jnp.fft.fft(x, axis=1), params["poles"])
    product = checkpoint_name(product, "filter")
    return checkpoint_name(jnp.fft.ifft(product, axis=1).real @ params["kernel"], "dense")


def convolution_port(change):
    params = {"poles": POLES, "kernel": WEIGHT.T}
    port = FunctionSide(lambda p, x: convolution(p, x, change), params, X)
    return compare(Port("fft", TorchSide(Convolution(), X), port, bfloat16=False))


def test_a_complex_port_holds_with_the_derivatives_of_its_poles():
    report = convolution_port(lambda spectrum, poles: spectrum * poles)
    assert report.holds, report.text()
    derivatives = {m.quantity for m in report.measurements if m.kind == "gradient"}
    assert "grad/poles" in derivatives
    assert "filter" in {pair.port for pair in report.alignment.pairs}


def test_what_is_wrong_in_the_imaginary_part_alone_starts_where_it_is():
    report = convolution_port(lambda spectrum, poles: spectrum * poles.conj())
    assert report.culprit is not None
    assert report.culprit.name == "filter"
    assert "test_complex.py" in report.text()


@pytest.mark.parametrize(("scale", "holds"), [(1.0, True), (-1.0, False)])
def test_complex_inputs_outputs_and_pairs_of_a_real_parameter(scale, holds):
    def port(params, z):
        product = z * params["poles"]
        return jax.lax.complex(product.real, scale * product.imag)

    sides = TorchSide(Filter(pairs=True), Z), FunctionSide(port, {"poles": POLES}, Z)
    report = compare(Port("pairs", *sides, bfloat16=False))
    assert report.holds == holds, report.text()
    assert [pair.port for pair in report.matching.pairs] == ["poles"]


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT64])
def test_a_complex_stage_goes_on_as_what_it_is_forced_to(precision):
    params = {"poles": POLES, "kernel": WEIGHT.T}
    port = FunctionSide(lambda p, x: convolution(p, x, jnp.multiply), params, X)
    other = as_pairs(drawn(2, L, D))
    expected = np.fft.ifft(as_complex(other), axis=1).real @ WEIGHT.T
    for side in (TorchSide(Convolution(), X), port):
        trace = side.run(Run(precision, forced={"filter": other}))
        assert trace.stages["filter"].shape == (2, L, D, 2)
        error = np.abs(trace.stages["output"] - expected).max() / np.abs(expected).max()
        assert error < 8 * UNIT_ROUNDOFF  # the largest of few sums of few terms


def test_rounding_moves_the_angle_as_it_does_the_modulus():
    with jax.enable_x64(True):
        moved = Signs(pool(3, Z.size)).moved(jnp.asarray(Z, complex), 2.0**-10)
    with lifted(3) as mode:
        other = mode.moved(torch.from_numpy(Z), 2.0**-10 / UNIT_ROUNDOFF).numpy()
    for result in (np.asarray(moved), other):
        # Signs of both kinds, in both parts.
        steps = (result / Z - 1) * 2**10
        assert {-1.0, 1.0} == {*np.sign(steps.real).ravel()} == {*np.sign(steps.imag).ravel()}
        np.testing.assert_allclose(np.abs(steps.imag), 1.0, rtol=2.0**-8)


def test_pairs_keep_infinities_and_zeros_with_a_sign():
    z = np.array([complex(np.inf, -0.0), complex(-0.0, -np.inf)], np.complex64)
    back = from_pairs(as_pairs(z), z.dtype)
    assert back.view(np.float32).tobytes() == z.view(np.float32).tobytes()
    assert as_pairs(X) is X
