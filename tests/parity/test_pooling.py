"""Draws pooled: what is averaged and how, what repeats, and a port that is wrong in one draw."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from parity import pooling
from parity.engine.measure.bounds import bound_from, rule
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.metrics import POOLED, relative_l2
from parity.pooling import Draw, pool
from parity.port_tolerances import PORTS, PortEdge


def port(weight, x):
    return jnp.tanh(checkpoint_name(x @ weight.T, "scores")) @ weight


def drawn(seed: int, scale: float = 1.0) -> Draw:
    rng = np.random.default_rng(seed)
    weight, x = (rng.normal(size=(6, 6)).astype(np.float32) for _ in range(2))
    # The original computes in float32 too, one product after another.
    q = np.einsum("ij,kj->ik", x, weight) * np.float32(scale)
    original = {"scores": q, "output": np.einsum("ik,kj->ij", np.tanh(q), weight)}
    return Draw(jnp.asarray(weight), (jnp.asarray(x),), original)


def rows(draws: list[Draw]):
    found = pool(port, draws, name="pooled")
    return {(m.edge, m.quantity): m for m in found.measurements}, found.responses


def test_a_level_is_the_geometric_mean_over_draws() -> None:
    draws = [drawn(seed) for seed in range(4)]
    measured, responses = rows(draws)
    assert {m.metric for m in measured.values()} == {POOLED}
    assert {edge for edge, _ in measured} == {
        *("port32:port64", "original32:port64", "port32:original32"),
    }
    assert all(m.verdict is Verdict.PASS and m.deterministic for m in measured.values())
    errors = []
    for draw in draws:
        weight, (x,) = np.asarray(draw.model, np.float64), draw.inputs
        assert draw.original is not None
        errors.append(relative_l2(draw.original["scores"], np.asarray(x, np.float64) @ weight.T))
    expected = np.exp(np.mean(np.log(errors)))
    assert measured["original32:port64", "scores"].value == pytest.approx(expected)
    # The worst draw alone, or a root mean square, would be another number.
    assert measured["original32:port64", "scores"].value < np.sqrt(np.mean(np.square(errors)))
    assert {name: len(values) for name, values in responses.items()} == {"scores": 4, "output": 4}


def test_without_originals_our_own_error_is_pooled() -> None:
    alone = [Draw(d.model, d.inputs) for d in map(drawn, range(2))]
    assert {edge for edge, _ in rows(alone)[0]} == {"port32:port64"}


def test_an_original_that_computes_something_else_fails_and_nan_is_no_mean() -> None:
    """The negative controls: a thousandth off in every draw, and a NaN in one of them."""
    off, _ = rows([drawn(seed, 1.001) for seed in range(2)])
    assert off["original32:port64", "scores"].verdict is Verdict.FAIL
    assert off["port32:port64", "scores"].verdict is Verdict.PASS
    spoiled = drawn(1)
    assert spoiled.original is not None
    bad = {**spoiled.original, "scores": np.full((6, 6), np.nan, np.float32)}
    one, _ = rows([drawn(0), Draw(spoiled.model, spoiled.inputs, bad)])
    assert one["original32:port64", "scores"].verdict is Verdict.FAIL


def test_other_draws_are_other_work() -> None:
    one, other = (rows([drawn(seed) for seed in seeds])[0] for seeds in ((0, 1), (0, 2)))
    key = ("port32:port64", "output")
    assert one[key].identity != other[key].identity


class Answers:
    """A program whose draws are told apart: the model is how far rounding moves its output."""

    order = ("output",)

    def __init__(self, signs: list[int], response: float = 0.0) -> None:
        self.signs, self.response = signs, response

    def on(self, model, inputs) -> Answers:
        return Answers(self.signs, model)

    def responses(self, exact) -> dict[str, tuple[float, ...]]:
        return dict.fromkeys(exact, (self.response, 2 * self.response))

    def run(self, dtype, rng=None, exact=None) -> dict[str, np.ndarray]:
        if rng is not None:
            self.signs.append(int(rng.integers(2**62)))
        return {"output": np.asarray([1.0 + (0.0 if rng is None else self.response)])}


def test_a_bound_is_of_all_draws_whose_signs_are_their_own(monkeypatch) -> None:
    signs: list[int] = []
    monkeypatch.setattr(pooling.Program, "of", lambda *_: Answers(signs))
    monkeypatch.setattr(pooling, "digest_of", lambda *_: "")
    draws = [Draw(10.0**-n, ()) for n in (5, 4, 3)]
    found = pool(port, draws, name="answers")
    # With the same signs, draws would be one draw of rounding, thrown three times.
    assert len(set(signs)) == len(signs) == 3
    assert found.responses["output"] == pytest.approx((1e-5, 1e-4, 1e-3))
    assert found.first == {"output": (1e-5, 2e-5)}
    [row] = found.measurements
    one = rule(PORTS, PortEdge.PORT32_PORT64, Kind.BLOCK)
    # The geometric mean, where the worst draw alone would allow ten times as much.
    assert row.tolerance == pytest.approx(bound_from(one, 1e-4))


def test_a_draw_that_rounding_makes_no_number_of_leaves_no_bound(monkeypatch) -> None:
    monkeypatch.setattr(pooling.Program, "of", lambda *_: Answers([]))
    monkeypatch.setattr(pooling, "digest_of", lambda *_: "")
    [row] = pool(port, [Draw(1e-5, ()), Draw(np.nan, ())], name="answers").measurements
    assert row.verdict is Verdict.NOT_COMPARABLE and np.isnan(row.tolerance)


def test_a_pool_repeats_if_every_draw_does(monkeypatch) -> None:
    """The first draw gives other bits when it is run again, the last does not."""
    turn = iter(range(100))

    class Flaky:
        order = ("output",)

        def __init__(self, first: bool) -> None:
            self.first = first

        def on(self, model, inputs) -> Flaky:
            return Flaky(model == 0)

        def responses(self, exact) -> dict[str, tuple[float, ...]]:
            return dict.fromkeys(exact, (1e-07,))

        def run(self, dtype, rng=None, exact=None) -> dict[str, np.ndarray]:
            off = 1e-7 * next(turn) if self.first and dtype == "float32" else 1e-8
            return {"output": np.asarray([1.0 + off + (rng is not None) * 1e-7])}

    monkeypatch.setattr(pooling.Program, "of", lambda *_: Flaky(False))
    monkeypatch.setattr(pooling, "digest_of", lambda *_: "")
    for draws, repeats in (((0, 1), False), ((1, 1), True)):
        [row] = pool(port, [Draw(d, ()) for d in draws], name="flaky").measurements
        assert row.deterministic is repeats
