"""Runs on synthetic gradients, for every optimiser and format: prediction against measurement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stability.core.number_formats import BF16, FORMATS, Format
from stability.core.parameter_leaves import leaves_of
from stability.storage.simulate import (
    BURN_IN,
    FLOAT32,
    GRADIENTS,
    SAMPLE,
    STEPS,
    WRAPPERS,
    Gradients,
    Storage,
    run,
)
from stability.storage.survival import is_lost, measure, predict
from stability.storage.update_rules import (
    GRADIENT_RMS,
    OPTIMISERS,
    SGD,
    AdamW,
    Lion,
    Muon,
    optimiser,
)
from tests.helpers import skip_unless_computed

RNG = np.random.default_rng(0)
VECTOR = RNG.standard_normal(512).astype(np.float32)
MATRIX = (RNG.standard_normal((48, 32)) / 8).astype(np.float32)
PUSH = Gradients(signal=1.0)
SIGMAS = 5.0


@pytest.mark.parametrize("rule", [AdamW(3e-4), Lion(3e-4)], ids=lambda o: o.name)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_a_straight_push_freezes_exactly_what_the_rule_says(rule, fmt: Format) -> None:
    skip_unless_computed(fmt.name)
    # Constant gradients make every step of both exactly lr, so an element that survives the first
    # moves at once, and one that is lost is lost for ever.
    (outcome,) = run({"v": VECTOR}, rule, Storage("nearest", fmt.name), PUSH, steps=3).values()
    lost = is_lost(outcome.first, np.sign(outcome.intended) * rule.lr, fmt)
    # Where |u| is at the very edge of the gap, AdamW's rounding of lr decides.
    edge = is_lost(outcome.first, np.sign(outcome.intended) * rule.lr * (1 - 1e-4), fmt)
    assert np.array_equal(~outcome.changed[lost == edge], lost[lost == edge])
    up, down = (is_lost(fmt.round(VECTOR), np.full(512, s * rule.lr), fmt) for s in (1.0, -1.0))
    assert predict(VECTOR, rule, fmt).frozen == np.mean([up, down])
    assert np.mean(up & down) <= outcome.survival().frozen <= np.mean(up | down)


@pytest.mark.parametrize("rule", [SGD(1.0), Muon(0.02)], ids=lambda o: o.name)
def test_spread_steps_are_predicted_by_their_distribution(rule) -> None:
    noise = Gradients(signal=0.0)
    wide = run({"m": MATRIX}, rule, FLOAT32, noise, steps=40)["m"]
    per_step = wide.intended.std() / np.sqrt(40)
    predicted = rule.step(MATRIX.shape, False).size
    # Momentum adds up independent gradients coherently: at most (1 + m) / (1 - m) in variance; and
    # Newton-Schulz leaves singular values between 0.7 and 1.2.
    momentum = getattr(rule, "momentum", None) or getattr(rule, "beta", 0.0)
    assert 0.5 * predicted < per_step < 1.2 * predicted * np.sqrt((1 + momentum) / (1 - momentum))
    share = predict(MATRIX, rule).frozen
    assert 0.0 < share < 1.0
    more = predict(MATRIX, rule.with_lr(rule.lr * 4)).frozen
    assert more < share


def test_part_of_a_matrix_steps_as_the_whole_does() -> None:
    rule, noise = Muon(0.02), Gradients(signal=0.0)
    whole = np.tile(MATRIX, (2, 2))
    large = run({"m": whole}, rule, FLOAT32, noise, steps=1, size=whole.size)["m"]
    small = run({"m": whole}, rule, FLOAT32, noise, steps=1, size=600)["m"]
    assert small.intended.size <= 600 < large.intended.size
    ratio = small.intended.std() / large.intended.std()
    # Both are root mean squares of singular values between 0.7 and 1.2.
    assert 0.7 / 1.2 < ratio < 1.2 / 0.7


def test_min_lr_is_where_half_of_the_elements_move() -> None:
    for rule in (AdamW(3e-4), AdamW(3e-4, weight_decay=0.1), SGD(1.0), Muon(0.02), Lion(1e-4)):
        lr = predict(MATRIX, rule, decay=True).min_lr
        assert predict(MATRIX, rule.with_lr(lr), decay=True).frozen <= 0.5
        assert predict(MATRIX, rule.with_lr(lr * 0.99), decay=True).frozen > 0.5


def test_decay_moves_what_the_gradient_alone_would_not() -> None:
    big = np.full(8, 64.0, np.float32)
    assert predict(big, AdamW(1e-2), decay=True).frozen == 1.0
    assert predict(big, AdamW(1e-2, weight_decay=1.0), decay=True).frozen < 1.0
    assert predict(big, AdamW(1e-2, weight_decay=1.0), decay=False).frozen == 1.0


def test_a_run_is_reproducible_and_each_leaf_independent_of_the_others() -> None:
    rule = AdamW(3e-4)
    for storage in (Storage(), Storage("stochastic")):
        both = run({"a": VECTOR, "b": VECTOR}, rule, storage, steps=5)
        alone = run({"a": VECTOR}, rule, storage, steps=5)
        assert np.array_equal(both["a"].last, alone["a"].last)
        assert not np.array_equal(both["a"].intended, both["b"].intended)


def test_gradients_have_the_distribution_they_state() -> None:
    gradients, n = Gradients(signal=0.6), 20_000
    key = jax.random.key(0)
    d = gradients.directions(key, (n,))
    first, second = (np.asarray(gradients.draw(d, key, jnp.int32(t))) for t in (1, 2))
    assert set(np.unique(d)) == {-1.0, 1.0}
    # Standard error of a mean square of n values with kurtosis at most 3.
    assert abs(np.mean(first**2) / GRADIENT_RMS**2 - 1) < SIGMAS * np.sqrt(2 / n)
    share = np.mean(first * second) / GRADIENT_RMS**2
    assert abs(share - 0.6**2) < SIGMAS * np.sqrt(2 / n)
    assert np.all(np.asarray(Gradients(uphill=True).directions(key, (4,))) == 1.0)
    assert "0.001 x (0.6 d + 0.8 z)" in gradients.describe()


def _settled_adamw(size: int, steps: int) -> np.ndarray:
    """Return updates of AdamW, (steps, size), over lr, from moments as after endless training.

    Its second moment is the gradients' mean square, without error; its first moment is drawn from
    its stationary distribution: mean s d, variance (1 - s^2) (1 - b1) / (1 + b1).
    """
    rng, signal, beta1, beta2 = np.random.default_rng(1), GRADIENTS.signal, 0.9, 0.999
    d, noise = rng.choice([-1.0, 1.0], size), np.sqrt(1 - signal**2)
    m = signal * d + noise * np.sqrt((1 - beta1) / (1 + beta1)) * rng.standard_normal(size)
    v, moves = np.ones(size), []
    for _ in range(steps):
        g = signal * d + noise * rng.standard_normal(size)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        moves.append(m / np.sqrt(v))
    return np.array(moves)


@pytest.mark.parametrize("size", [0.05, 0.1, 0.3])
def test_moments_have_settled_when_counting_begins(size: float) -> None:
    """Frozen shares are those of a run that goes on, not of AdamW's first steps from zero."""
    values = (size * np.random.default_rng(0).standard_normal(SAMPLE)).astype(np.float32)
    first = BF16.round(values)

    def frozen(burn_in: int) -> float:
        (outcome,) = run({"w": values}, AdamW(3e-4), burn_in=burn_in).values()
        return outcome.survival().frozen

    # An element is frozen if each of its updates alone is lost: it is then where it was before.
    moves = 3e-4 * _settled_adamw(SAMPLE, STEPS)
    truth = np.mean(
        [np.all(is_lost(np.full(STEPS, p), u)) for p, u in zip(first, moves.T, strict=True)]
    )
    error = np.sqrt(2 * truth * (1 - truth) / SAMPLE)
    assert abs(frozen(BURN_IN) - truth) < 3 * error
    # The test can tell: from moments of zero, many more elements move.
    assert frozen(0) < truth - 6 * error


def test_filling_the_moments_neither_moves_parameters_nor_counts() -> None:
    """Sums of updates, carried losses and float32 copies are those of the counted steps."""
    for wrapper in WRAPPERS:
        storage = Storage(wrapper, "float32" if wrapper == "plain" else BF16.name)
        rule = AdamW(3e-4)
        (outcome,) = run({"w": VECTOR}, rule, storage, PUSH, steps=1).values()
        # The counted step on a constant gradient is the rate, but for Adam's epsilon. Each moment
        # is rounded to float32 up to twice a step.
        rounding = 4 * (BURN_IN + 1) * 2.0**-24
        size = rule.lr / (1 + rule.eps / GRADIENT_RMS)
        if wrapper != "cast":
            assert np.allclose(np.abs(outcome.intended), size, rtol=rounding, atol=0.0)
        applied = np.abs(outcome.last - outcome.first)
        assert np.all(applied <= rule.lr + BF16.spacing(outcome.first))


def test_any_pytree_and_any_loss_can_be_measured() -> None:
    tree = {"layer": {"kernel": jnp.asarray(MATRIX), "scale": jnp.ones(32)}}

    def loss(params, x):
        return jnp.mean(jnp.square(x @ params["layer"]["kernel"] * params["layer"]["scale"] - 1.0))

    batches = RNG.standard_normal((4, 16, 48)).astype(np.float32)
    trained = measure(tree, batches, AdamW(3e-4), loss=loss)
    synthetic = measure(tree, None, AdamW(3e-4), steps=20)
    for rows in (trained, synthetic):
        assert rows.keys() == leaves_of(tree).keys()
        assert rows["layer.scale"].frozen == 1.0
        assert rows["layer.kernel"].frozen < 1.0
    control = measure(tree, batches, AdamW(3e-4), None, loss=loss)
    assert control["layer.scale"].frozen == 0.0
    with pytest.raises(ValueError, match=r"expected a loss to train a dict"):
        measure(tree, batches)


def test_optimisers_by_name_and_wrong_ones_in_words() -> None:
    assert {n: type(optimiser(n)) for n in OPTIMISERS} == OPTIMISERS
    assert optimiser("AdamW", lr=1e-3) == AdamW(1e-3)
    with pytest.raises(ValueError, match=r"unknown optimiser 'adagrad': expected one of adamw"):
        optimiser("adagrad")
    with pytest.raises(ValueError, match=r"sgd has no setting beta7; it has lr, momentum"):
        optimiser("sgd", beta7=1.0)
    for lr in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a positive number"):
            AdamW(lr)
    with pytest.raises(ValueError, match=r"momentum=1\.0 must be in"):
        SGD(0.1, momentum=1.0)


def test_an_empty_leaf_survives() -> None:
    assert predict(np.zeros((0, 3), np.float32), 1e-3, BF16).frozen == 0.0
