"""131,072 tokens in float32: exact powers, no (D, N, L) array, memory linear in length.

The truth is the recurrence of docs/model.md "CEMA", in float64 NumPy, token by token. Decay is slow
as in a trained EMA: the logits of alpha' and delta' are moved by -6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM, init_cache
from megalodon_jax.layers import ComplexEMA, complex_ema
from parity.tolerances import (
    LONG_CONTEXT,
    LONG_CONTEXT_GRADIENT,
    LONG_CONTEXT_REFERENCE,
    MEMORY_PER_DOUBLING,
)
from tests.helpers import (
    EACH_DEVICE,
    logits_of,
    model_of,
    rel_l2,
    tiny,
    tokens,
)

L, D, N = 131_072, 8, 16
SLOW = -6.0
LOGITS = ("alpha", "delta", "theta")


def slow_ema(shift: float = SLOW) -> ComplexEMA:
    """Initial values, slowed down, and a gamma whose imaginary part is not 0."""
    ema = ComplexEMA(D, N, key=jax.random.key(0))
    imag = np.random.default_rng(0).standard_normal((D, N)).astype(np.float32)
    slowed = (ema.alpha + shift, ema.delta + shift, jnp.asarray(imag))
    return eqx.tree_at(lambda e: (e.alpha, e.delta, e.gamma_imag), ema, slowed)


def noise(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, D, length)).astype(np.float32)


class Poles(NamedTuple):
    """Coefficients of the recurrence in float64, each (D, N) but theta (D, 1)."""

    alpha: np.ndarray
    delta: np.ndarray
    theta: np.ndarray
    q: np.ndarray
    gamma: np.ndarray
    omega: np.ndarray


def poles_of(ema: ComplexEMA) -> Poles:
    alpha, delta, theta = (1 / (1 + np.exp(-wide(getattr(ema, n))[..., 0])) for n in LOGITS)
    phi = np.arange(1, N + 1) * theta * (2 * np.pi / N)
    q = (1 - alpha * delta) * np.exp(1j * phi)
    gamma = (wide(ema.gamma_real) + 1j * wide(ema.gamma_imag)) / np.sqrt(N)
    return Poles(alpha, delta, theta, q, gamma, wide(ema.omega))


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def recurrence(ema: ComplexEMA, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output (1, D, L) and the final state (1, D, N)."""
    poles, u = poles_of(ema), wide(x[0]).T
    h, y = np.zeros((D, N), complex), np.empty(u.shape)
    for t, now in enumerate(u):
        h = poles.q * h + poles.alpha * now[:, None]
        y[t] = np.einsum("dn,dn->d", poles.gamma, h).real + poles.omega * now
    return y.T[None], h[None]


def gradients_by_recurrence(ema: ComplexEMA, x: np.ndarray, w: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of `sum(w * y)`: the derivative of h_t by q obeys a recurrence of its own."""
    poles, u, w = poles_of(ema), wide(x[0]).T, wide(w[0]).T
    h, by_q = np.zeros((2, D, N), complex)
    sum_h, sum_by_q = np.zeros((2, D, N), complex)
    for now, weight in zip(u, w, strict=True):
        by_q = poles.q * by_q + h
        h = poles.q * h + poles.alpha * now[:, None]
        sum_h += weight[:, None] * h
        sum_by_q += weight[:, None] * by_q
    alpha, delta, theta = poles.alpha, poles.delta, poles.theta
    by_decay = -(poles.gamma * sum_by_q * poles.q / (1 - alpha * delta)).real
    by_phi = (poles.gamma * sum_by_q * 1j * poles.q).real
    by_gain = (poles.gamma * sum_h).real / alpha
    phi_by_theta = np.arange(1, N + 1) * (2 * np.pi / N)
    return {
        "alpha": ((by_gain + by_decay * delta) * alpha * (1 - alpha))[..., None],
        "delta": (by_decay * alpha * delta * (1 - delta))[..., None],
        "theta": (by_phi * phi_by_theta).sum(1)[:, None, None] * (theta * (1 - theta))[..., None],
        "gamma_real": sum_h.real / np.sqrt(N),
        "gamma_imag": -sum_h.imag / np.sqrt(N),
        "omega": (w * u).sum(0),
    }


def filtered(ema: ComplexEMA, x: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The layer, compiled anew at every call: a control may have changed its parts."""
    y, h = eqx.filter_jit(lambda ema, x: ema(x, return_state=True))(ema, jnp.asarray(x))
    assert h is not None
    assert (y.dtype, h.dtype) == (jnp.float32, jnp.complex64)
    return y, h


def gradients(ema: ComplexEMA, x: np.ndarray, w: np.ndarray) -> ComplexEMA:
    @eqx.filter_jit
    @eqx.filter_grad
    def of(ema):
        return jnp.sum(jnp.asarray(w) * ema(jnp.asarray(x))[0])

    return of(ema)


def narrow_powers(alpha, delta, theta, exponents: range, dtype):
    """What `pole_powers` would be without float64: decay and phase rounded before their power."""
    product = jax.nn.sigmoid(alpha) * jax.nn.sigmoid(delta)
    phi = jax.nn.sigmoid(theta) * jnp.arange(1, N + 1, dtype=dtype) * (2 * math.pi / N)
    j = jnp.asarray(np.array(exponents, dtype))
    radius = jnp.exp(jnp.log(1.0 - product)[..., None] * j)
    return radius * jnp.cos(phi[..., None] * j), radius * jnp.sin(phi[..., None] * j)


@EACH_DEVICE
def test_slow_poles_keep_their_digits_over_the_whole_length(monkeypatch, platform) -> None:
    with jax.default_device(jax.devices(platform)[0]):
        ema, x = slow_ema(), noise(L)
        y_true, h_true = recurrence(ema, x)
        y, h = filtered(ema, x)
        assert rel_l2(y, y_true) <= LONG_CONTEXT
        assert rel_l2(h, h_true) <= LONG_CONTEXT
        monkeypatch.setattr(complex_ema, "pole_powers", narrow_powers)
        y, h = filtered(ema, x)
        assert rel_l2(y, y_true) >= LONG_CONTEXT_REFERENCE
        assert rel_l2(h, h_true) >= LONG_CONTEXT_REFERENCE


def test_gradients_of_slow_poles_keep_their_digits(monkeypatch) -> None:
    length = L // 8
    ema, x, w = slow_ema(), noise(length), noise(length, 2)
    expected = gradients_by_recurrence(ema, x, w)
    ours = gradients(ema, x, w)
    for name, truth in expected.items():
        assert rel_l2(getattr(ours, name), truth) <= LONG_CONTEXT_GRADIENT, name
    monkeypatch.setattr(complex_ema, "pole_powers", narrow_powers)
    narrow = gradients(ema, x, w)
    for name in (*LOGITS, "gamma_real", "gamma_imag"):
        assert rel_l2(getattr(narrow, name), expected[name]) > LONG_CONTEXT_GRADIENT, name


@pytest.mark.parametrize("name", LOGITS)
def test_the_gradients_of_the_recurrence_are_its_differences(name: str) -> None:
    # Fast poles: differences of a sum that hardly moves would have no digits.
    ema, x, w = slow_ema(0.0), noise(64), noise(64, 2)
    direction = np.random.default_rng(3).standard_normal(getattr(ema, name).shape)

    def objective(step: float) -> float:
        moved = eqx.tree_at(
            lambda e: getattr(e, name), ema, wide(getattr(ema, name)) + step * direction
        )
        return float(np.sum(wide(w) * recurrence(moved, x)[0]))

    h = np.finfo(float).eps ** (1 / 3)
    slope = (objective(h) - objective(-h)) / (2 * h)
    written = np.sum(gradients_by_recurrence(ema, x, w)[name] * direction)
    assert rel_l2(written, slope) <= LONG_CONTEXT_GRADIENT


# Nothing of D N L elements.


def arrays_of(jaxpr: Any) -> Iterator[jax.core.AbstractValue]:
    """Every value a program computes, in nested programs too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for parameter in jax.tree.leaves(equation.params, is_leaf=is_program):
            if is_program(parameter):
                yield from arrays_of(getattr(parameter, "jaxpr", parameter))


def is_program(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def largest(function: Callable, *arguments: Any) -> int:
    """Elements of the largest value in a program; complex numbers count twice."""
    program, _, _ = eqx.filter_make_jaxpr(function)(*arguments)
    return max(
        math.prod(value.shape) * (1 + jnp.issubdtype(value.dtype, jnp.complexfloating))
        for value in arrays_of(program.jaxpr)
        if hasattr(value, "shape") and hasattr(value, "dtype")
    )


def signal_of(length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, D, length), jnp.float32)


def ids_of(length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def filter_of(ema, x):
    return ema(x, return_state=True)


def gradient_of(ema, x):
    def energy(both):
        y, h = filter_of(*both)
        return jnp.sum(y**2) + jnp.sum(jnp.abs(h) ** 2)

    return eqx.filter_grad(energy)((ema, x))


def with_all_powers(ema, x):
    """What the layer must not do: every power of every pole in one array."""
    p, gamma = ema.gains(x.dtype)
    q = ema.q(x.dtype)[..., None] ** jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.einsum("dn,dnl->dl", gamma * p, q).real


def with_all_powers_inside(ema, x):
    """The same in a program within a program."""
    return jax.lax.scan(lambda _, u: (None, jax.jit(with_all_powers)(ema, u)), None, x[None])[1]


@pytest.mark.parametrize("function", [filter_of, gradient_of])
def test_the_ema_holds_no_power_of_every_pole_at_every_time(function) -> None:
    assert largest(function, slow_ema(), signal_of(L)) < D * N * L


@pytest.mark.parametrize("function", [with_all_powers, with_all_powers_inside])
@pytest.mark.usefixtures("standard_promotion")
def test_an_array_of_every_power_would_be_seen(function) -> None:
    assert largest(function, slow_ema(), signal_of(L)) >= D * N * L


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


SMALL = tiny(model_dim=D, cema_ndim=N, num_layers=1, chunk_size=32)


def logits_only(model: MegalodonForCausalLM, ids):
    return model(ids)[0]


def loss_gradient(model: MegalodonForCausalLM, ids):
    return eqx.filter_grad(lambda m: m.compute_loss(ids, ids))(model)


@pytest.mark.parametrize("function", [logits_only, loss_gradient])
def test_neither_does_the_model(function) -> None:
    assert largest(function, model_of(SMALL), ids_of(L)) < D * N * L


# Memory.


def growth(function: Callable, first: Any, inputs: Callable, length: int) -> float:
    """By how much the memory of a compiled program grows per doubling, over two of them."""
    arrays, static = eqx.partition(first, eqx.is_array)

    def of(arrays, x):
        return eqx.filter(function(eqx.combine(arrays, static), x), eqx.is_array)

    small, large = (
        jax.jit(of).lower(arrays, inputs(n)).compile().memory_analysis().temp_size_in_bytes
        for n in (length, 4 * length)
    )
    assert small > 0
    return math.sqrt(large / small)


@pytest.mark.sweep  # the model below holds the filter, and its gradients
@pytest.mark.parametrize("function", [filter_of, gradient_of])
def test_memory_of_the_ema_is_linear_in_length(function) -> None:
    assert growth(function, slow_ema(), signal_of, L // 4) <= MEMORY_PER_DOUBLING


@pytest.mark.parametrize(
    "function", [pytest.param(logits_only, marks=pytest.mark.sweep), loss_gradient]
)
def test_memory_of_the_model_is_linear_in_length(function) -> None:
    assert growth(function, model_of(SMALL), ids_of, L // 4) <= MEMORY_PER_DOUBLING


def test_attention_to_everything_would_be_seen_not_to_be() -> None:
    one_chunk = tiny(num_layers=1, chunk_size=1024)
    assert growth(logits_only, model_of(one_chunk), ids_of, 128) > MEMORY_PER_DOUBLING


# The whole model.


@pytest.mark.sweep  # of long texts; test_streaming splits short ones
def test_a_model_reads_the_whole_text_and_its_pieces_alike() -> None:
    config, piece = tiny(cema_ndim=N, chunk_size=384), 1024
    model, ids = model_of(config), jnp.asarray(tokens(config, (1, L)))
    whole = np.asarray(logits_of(model, ids, None))
    assert np.all(np.isfinite(whole))
    read = eqx.filter_jit(lambda m, ids, cache: m(ids, cache=cache, return_cache=True))
    cache = init_cache(config, 1, allocate_kv=True, allocate_norm=True, allocate_ema=True)
    parts = []
    for start in range(0, L, piece):
        logits, cache = read(model, ids[:, start : start + piece], cache)
        parts.append(np.asarray(logits))
    assert rel_l2(np.concatenate(parts, axis=1), whole) <= LONG_CONTEXT
    assert int(cache.position) == L
    # The control: the last piece without what came before it.
    forgotten = logits_of(model, ids[:, -piece:], None)
    assert rel_l2(parts[-1], whole[:, -piece:]) <= LONG_CONTEXT
    assert rel_l2(forgotten, whole[:, -piece:]) > LONG_CONTEXT
