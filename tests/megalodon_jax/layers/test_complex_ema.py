"""ComplexEMA: the fast convolution is the recurrence, and long memory keeps its digits."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.layers import ComplexEMA, complex_ema
from megalodon_jax.layers.complex_ema import causal_convolution, response
from parity.tolerances import LOST_APPLIED
from tests.helpers import EXACT, rel_l2, rounding_bound, roundoff

B, D, N = 2, 3, 4


def ema_of(dtype="float64", **logits: float) -> ComplexEMA:
    rng = np.random.default_rng(0)
    ema = ComplexEMA(D, N, jnp.dtype(dtype), key=jax.random.key(0))
    imag = jnp.asarray(rng.standard_normal((D, N)), dtype)
    ema = eqx.tree_at(lambda e: e.gamma_imag, ema, imag)
    for name, value in logits.items():
        leaf = getattr(ema, name)
        ema = eqx.tree_at(lambda e, n=name: getattr(e, n), ema, jnp.full_like(leaf, value))
    return ema


def signal(length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((B, D, length)))


def state() -> jax.Array:
    real, imag = np.random.default_rng(2).standard_normal((2, B, D, N))
    return jnp.asarray(real + 1j * imag)


@eqx.filter_jit
def fast(ema, x, h=None, mask=None):
    return ema(x, h, True, mask)


@eqx.filter_jit
def truth(ema, x, h):
    def body(h, u):
        y, h = ema.step(u, h)
        return h, y

    h, y = jax.lax.scan(body, h, jnp.moveaxis(x, -1, 0))
    return jnp.moveaxis(y, 0, -1), h


@pytest.mark.parametrize("length", [1, 2, 13, 16])
@pytest.mark.usefixtures("x64")
def test_the_convolution_is_the_recurrence(length: int) -> None:
    ema, x = ema_of(), signal(length)
    y, h = fast(ema, x, state())
    y_true, h_true = truth(ema, x, state())
    assert rel_l2(y, y_true) <= EXACT
    assert rel_l2(h, h_true) <= EXACT


@pytest.mark.usefixtures("x64")
def test_no_initial_state_is_a_zero_state_and_the_output_needs_no_state() -> None:
    ema, x = ema_of(), signal(13)
    y, h = fast(ema, x)
    y_true, h_true = truth(ema, x, jnp.zeros_like(state()))
    assert rel_l2(y, y_true) <= EXACT
    assert rel_l2(h, h_true) <= EXACT
    bare, nothing = ema(x)
    assert nothing is None
    assert rel_l2(bare, y_true) <= EXACT


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.usefixtures("x64")
def test_a_kernel_one_step_off_is_not_the_recurrence(late: int) -> None:
    ema, x = ema_of(), signal(13)
    p, gamma = ema.gains(x.dtype)
    tables = ema.power_tables(13, x.dtype)
    weights = np.asarray(gamma) * np.asarray(p) * np.asarray(ema.q(x.dtype)) ** late
    kernel = response(jnp.asarray(weights), tables, 13)
    y = causal_convolution(x, kernel) + ema.omega[:, None] * x
    error = rel_l2(y, truth(ema, x, jnp.zeros_like(state()))[0])
    assert (error <= EXACT) == (late == 0)


@pytest.mark.usefixtures("x64")
def test_two_halves_with_the_state_between_are_the_whole() -> None:
    ema, x = ema_of(), signal(13)
    whole, end = fast(ema, x)
    first, h = fast(ema, x[..., :5])
    second, h = fast(ema, x[..., 5:], h)
    assert rel_l2(jnp.concatenate([first, second], -1), whole) <= EXACT
    assert rel_l2(h, end) <= EXACT
    forgotten, _ = fast(ema, x[..., 5:])
    assert rel_l2(forgotten, whole[..., 5:]) > EXACT


@pytest.mark.usefixtures("x64")
def test_a_masked_token_enters_as_zero() -> None:
    ema, x = ema_of(), signal(13)
    mask = jnp.asarray(np.random.default_rng(3).random((B, 13)) < 0.6)
    y, h = fast(ema, x, None, mask)
    y_zeroed, h_zeroed = fast(ema, jnp.where(mask[:, None], x, 0.0))
    assert rel_l2(y, y_zeroed) <= EXACT
    assert rel_l2(h, h_zeroed) <= EXACT
    assert rel_l2(y, fast(ema, x)[0]) > EXACT


def test_the_filter_is_at_rest_until_the_first_valid_token() -> None:
    ema = ema_of("float32")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((B, D, 40)), jnp.float32)
    mask = jnp.ones((B, 40), bool).at[0, :7].set(False).at[1, 3:9].set(False)
    y, _ = fast(ema, x, None, mask)
    assert not np.any(y[0, :, :7]), "left padding: nothing has come in"
    assert np.all(y[1, :, 3:9]), "interior padding: what came before goes on"


def test_a_channel_of_zeros_is_at_rest_and_keeps_its_derivative() -> None:
    """A group of one feature starts with an exact 0 (docs/model.md "CEMA")."""
    ema = ema_of("float32")
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((B, D, 40)), jnp.float32)
    x = x.at[0, 1, :7].set(0.0).at[1, 2].set(0.0).at[1, 0, 3:9].set(0.0)
    y, _ = fast(ema, x)
    assert not np.any(y[0, 1, :7])
    assert not np.any(y[1, 2])
    assert np.all(y[1, 0, 3:9]), "zeros after the start: what came before goes on"
    assert np.all(y[0, 0, :7]), "another channel has started"
    kernel = response(jnp.ones((D, N), jnp.complex64), ema.power_tables(40, x.dtype), 40)
    assert np.any(causal_convolution(x, kernel)[0, 1, :7]), "the transform alone leaves noise"

    def weighted(x: jax.Array, c: jax.Array, run) -> jax.Array:
        return jnp.sum(c * run(ema, x, jnp.zeros((B, D, N), jnp.complex64))[0])

    cotangent = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    got, expected = (jax.grad(weighted)(x, cotangent, run) for run in (fast, truth))
    for part in ((0, 1, slice(0, 7)), (1, 2)):
        assert rel_l2(got[part], expected[part]) <= roundoff(40 * N)


def test_an_empty_sequence_keeps_the_state() -> None:
    ema, x = ema_of("float32"), jnp.zeros((B, D, 0))
    h = state().astype(jnp.complex64)
    y, kept = ema(x, h, return_state=True)
    assert y.shape == (B, D, 0)
    assert np.array_equal(kept, h)
    _, fresh = ema(x, return_state=True)
    assert fresh is not None
    assert (fresh.shape, fresh.dtype) == ((B, D, N), jnp.complex64)
    assert not np.any(fresh)


def test_bfloat16_input_is_widened_inside_and_narrowed_once_at_the_end() -> None:
    ema = ema_of("float32")
    x = signal(13).astype(jnp.bfloat16)
    y, _ = fast(ema, x)
    assert y.dtype == jnp.bfloat16
    wide = x.astype(jnp.float32)
    exact = np.asarray(fast(ema, wide)[0], np.float64)
    # Rounded once, of two programs in float32.
    once = float(jnp.finfo(jnp.bfloat16).eps) / 2 * np.abs(exact)
    bound = rounding_bound(lambda *given: fast(*given)[0], ema, wide) * np.linalg.norm(exact)
    assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= once + bound)


def long_memory_output(ema: ComplexEMA, x: np.ndarray, coefficients: type) -> np.ndarray:
    """The recurrence in float64, its poles rounded to `coefficients` first."""
    wide = [np.asarray(a, np.float64) for a in (ema.alpha, ema.delta, ema.theta)]
    alpha, delta, theta = (1 / (1 + np.exp(-a[..., 0])) for a in wide)
    phi = np.arange(1, N + 1) * theta * (2 * np.pi / N)
    q = ((1 - alpha * delta) * np.exp(1j * phi)).astype(coefficients).astype(complex)
    gamma = (np.asarray(ema.gamma_real) + 1j * np.asarray(ema.gamma_imag)) / np.sqrt(N)
    h, out = np.zeros((B, D, N), complex), []
    for u in np.moveaxis(x.astype(np.float64), -1, 0):
        h = q * h + alpha * u[..., None]
        out.append((gamma * h).real.sum(-1))
    return np.stack(out, -1) + np.asarray(ema.omega, np.float64)[:, None] * x


def test_long_memory_is_more_exact_than_float32_coefficients_allow() -> None:
    ema = ema_of("float32", alpha=-6.0, delta=-6.0, omega=0.0)
    # A small phase lets slow poles accumulate instead of cancelling.
    ema = eqx.tree_at(lambda e: e.theta, ema, jnp.full_like(ema.theta, -9.0))
    x = np.random.default_rng(4).standard_normal((B, D, 4096)).astype(np.float32)
    expected = long_memory_output(ema, x, np.complex128)
    naive = rel_l2(long_memory_output(ema, x, np.complex64), expected)
    ours = rel_l2(fast(ema, jnp.asarray(x))[0], expected)
    assert ours < naive / 10


@eqx.filter_jit
def by_rounded_poles(ema, x, h):
    q = ema.q(x.dtype)

    def body(h, u):
        p, gamma = ema.gains(u.dtype)
        h = q * h + (p * u[..., None]).astype(h.dtype)
        return h, jnp.sum(jnp.real(gamma * h), axis=-1) + ema.omega * u

    h, y = jax.lax.scan(body, h, jnp.moveaxis(x, -1, 0))
    return jnp.moveaxis(y, 0, -1), h


def test_a_long_stream_of_single_tokens_applies_what_rounding_the_poles_lost() -> None:
    with jax.enable_x64(True):
        wide = ema_of("float64", alpha=-6.0, delta=-6.0, theta=-6.0)
        wide = jax.tree.map(lambda a: a.astype(jnp.float32).astype(a.dtype), wide)
        x = signal(4096).astype(jnp.float32).astype(jnp.float64)
        _, exact = truth(wide, x, jnp.zeros((B, D, N), complex))
        exact, x = np.asarray(exact), np.asarray(x, np.float32)
        narrow = jax.tree.map(lambda a: np.asarray(a, np.float32), wide)
    narrow = jax.tree.map(jnp.asarray, narrow)
    start = jnp.zeros((B, D, N), jnp.complex64)
    _, stepped = truth(narrow, jnp.asarray(x), start)
    _, rounded = by_rounded_poles(narrow, jnp.asarray(x), start)
    assert rel_l2(stepped, exact) <= LOST_APPLIED * rel_l2(rounded, exact)


@pytest.mark.parametrize("logit", [pytest.param(60.0, id="|q|=0"), pytest.param(-60.0, id="|q|=1")])
def test_gradients_at_saturated_poles_are_finite(logit: float) -> None:
    ema = ema_of("float32", alpha=logit, delta=logit)
    x = signal(13).astype(jnp.float32)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def energy(ema):
        y, h = ema(x, state().astype(jnp.complex64), return_state=True)
        return jnp.sum(y**2) + jnp.sum(jnp.abs(h) ** 2)

    value, gradient = energy(ema)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_a_pole_at_zero_remembers_nothing() -> None:
    ema = ema_of("float32", alpha=60.0, delta=60.0)
    x = signal(13).astype(jnp.float32)
    late = x.at[..., 0].add(1.0)
    change = np.abs(np.asarray(fast(ema, late)[0] - fast(ema, x)[0])).max(axis=(0, 1))
    assert change[0] > 0
    # What is left at later times is rounding of the transform, not memory. Per butterfly stage a
    # transform is off by less than 8 units (Higham, Theorem 24.2), and three are 5 stages each.
    slack = roundoff(3 * 5 * 8) * np.linalg.norm(fast(ema, late)[0], axis=-1).max()
    assert change[1:].max() < 2 * slack


def test_initial_parameters_follow_their_distributions() -> None:
    ema = ComplexEMA(64, 16, key=jax.random.key(0))
    size = 64 * 16
    for logits in (ema.alpha, ema.delta):
        assert abs(np.mean(logits)) < 5 * 0.2 / np.sqrt(size)
        assert abs(np.std(logits) / 0.2 - 1) < 5 / np.sqrt(2 * size)
    alike = np.corrcoef(np.ravel(ema.alpha), np.ravel(ema.delta))[0, 1]
    assert abs(alike) < 5 / np.sqrt(size), "the two are drawn independently"
    assert abs(np.std(ema.gamma_real) - 1) < 5 / np.sqrt(2 * size)
    assert not np.any(ema.gamma_imag)
    assert np.abs(ema.omega).max() <= 1.0
    schedule = np.exp(-np.arange(1, 65) * np.log(64) / 64)
    drawn = 1 / (1 + np.exp(-np.sort(np.asarray(ema.theta, np.float64).ravel())))
    assert rel_l2(drawn, np.sort(schedule)) < 64 * np.finfo(np.float32).eps
    assert np.any(np.diff(np.asarray(ema.theta).ravel()) > 0), "the schedule is permuted"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("steps", [1, 10**6])
def test_powers_of_a_slow_pole_keep_their_digits(steps: int) -> None:
    """1 - x has 7 of them left where the memory is a billion tokens long."""
    decay = np.array([1e-3, 1e-6, 1e-9])
    logit = np.log(decay) - np.log1p(-decay)
    sure = np.full_like(logit, 40.0)  # Its sigmoid is 1 in float64.
    logits = (jnp.asarray(a)[:, None] for a in (logit, sure, -sure))
    real, imag = complex_ema._powers64(*logits, [steps])
    # The first terms of the series of the logarithm; the next is below 1e-10 of them all.
    log_radius = -decay * (1 + decay / 2 + decay**2 / 3 + decay**3 / 4)
    assert rel_l2(jnp.hypot(real, imag).ravel(), np.exp(steps * log_radius)) <= EXACT


@pytest.mark.usefixtures("x64")
def test_the_first_power_needs_no_logarithm() -> None:
    """Alone it is 1 - alpha' delta'; among others their exponential, which rounds in between."""
    logits = [jnp.asarray(x)[:, None] for x in np.random.default_rng(0).normal(0, 6, (3, 64))]
    alone, among = (complex_ema._powers64(*logits, powers) for powers in ([1], [1, 2]))
    eps = np.finfo(np.float64).eps
    # A rounded logarithm, at most that of eps, is off by as many eps of the power; the rest rounds
    # once each: logarithm, exponential, difference and product.
    bound = (4 - np.log(eps)) * eps
    for one, other in zip(alone, among, strict=True):
        np.testing.assert_allclose(one[..., 0], other[..., 0], rtol=bound, atol=0)
    saturated = [jnp.full((1, 1), 80.0)] * 2 + [jnp.full((1, 1), -80.0)]
    assert complex_ema._powers64(*saturated, [1])[0].item() == eps, "an ulp inside of 0"
