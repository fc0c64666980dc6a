"""A program's numbers are looked for among another's, and what is nowhere is named by its line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from parity.engine.programs import operations
from parity.engine.programs.unseen import Search, Seen, search
from parity.sides.traced import trace

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(6, 8)), RNG.normal(size=(8, 8))


def softmax(scores: Any, mask: Any) -> Any:
    scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def chunk(x: Any, w: Any, mask: Any) -> Any:
    return softmax(x @ w, mask)


def healthy(w: Any, x: Any) -> Any:
    mask = jnp.tril(jnp.ones((6, 8), bool))
    first = chunk(x[:4], w, mask[:4])
    rest = chunk(x[4:], w, mask[4:])
    return checkpoint_name(jnp.concatenate([first, rest]), "out")


def masked_wrongly(w: Any, x: Any) -> Any:
    mask = jnp.tril(jnp.ones((6, 8), bool))
    first = chunk(x[:4], w, mask[:4])
    tail = mask[3:-1]
    rest = chunk(x[4:], w, tail)
    return checkpoint_name(jnp.concatenate([first, rest]), "out")


def called_wrongly(w: Any, x: Any) -> Any:
    mask = jnp.tril(jnp.ones((6, 8), bool))
    first = chunk(x[:4], w, mask[:4])
    rest = chunk(x[4:] * 1.01, w, mask[4:])
    return checkpoint_name(jnp.concatenate([first, rest]), "out")


def moved(w: Any, x: Any) -> Any:
    mask = jnp.tril(jnp.ones((6, 8), bool))
    out = chunk(x, w, mask)
    return checkpoint_name(jnp.roll(out, 1, axis=0), "out")


def original() -> list[np.ndarray]:
    """Everything that the same mathematics computes in NumPy, of the whole text at once."""
    mask = np.tril(np.ones((6, 8), bool))
    scores = X @ W
    left = np.where(mask, scores, -1e300)
    weights = np.exp(left - left.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return [X, W, scores, left, left - left.max(-1, keepdims=True), weights, total, weights / total]


def searched(program: Callable[..., Any]) -> Search:
    with jax.enable_x64(True):
        trees = jnp.asarray(W), ((jnp.asarray(X),), {})
        operations, values = trace(program, trees).operations_of([W, X], "out", {})
    return search(operations, values, Seen(original()))


def line_of(program: Callable[..., Any], text: str) -> int:
    rows, start = inspect.getsourcelines(program)
    return start + next(i for i, row in enumerate(rows) if text in row)


def test_a_program_of_other_arrays_and_equal_numbers_has_no_suspects() -> None:
    assert searched(healthy).suspects == ()


def test_a_wrong_mask_is_told_by_what_it_leaves_and_named_where_it_is_made() -> None:
    found = searched(masked_wrongly)
    assert found.first is not None and found.first.mask
    # Key 4 and 5 of queries 4 and 5: one less is visible to each.
    assert np.argwhere(found.first.wrong).tolist() == [[0, 4], [1, 5]]
    made, applied = found.lines()
    assert f":{line_of(masked_wrongly, 'tail = ')} (masked_wrongly)" in made.place
    assert "tail = mask[3:-1]" in made.excerpt
    assert "makes a mask" in made.why
    assert applied.why == "applies the mask"


def test_a_function_that_is_right_elsewhere_is_named_by_its_call() -> None:
    lines = searched(called_wrongly).lines()
    assert f":{line_of(called_wrongly, 'x[4:] * 1.01')} (called_wrongly)" in lines[0].place
    assert "first operation whose result the original does not compute" in lines[0].why


def test_numbers_in_a_wrong_place_are_said_to_be_that() -> None:
    found = searched(moved)
    assert found.suspects == ()
    assert "numbers are in a wrong place" in found.lines()[0].why
    assert f":{line_of(moved, 'roll')} (moved)" in found.lines()[0].place


@pytest.mark.parametrize("value", [np.nan, 0.123])
def test_a_number_that_is_nowhere_is_unseen_and_whole_ones_are_everywhere(value: float) -> None:
    seen = Seen([X])
    array = np.asarray([0.0, -3.0, X[0, 0], X[0, 0] * (1 + 1e-14), value, -np.inf])
    assert seen.unseen(array).tolist() == [False, False, False, False, True, False]


def test_numbers_beside_masked_ones_are_seen() -> None:
    seen = Seen([np.array([0.25, -np.inf]), np.array([1e35, 0.75])])
    assert seen.unseen(np.array([0.25, 0.75, 0.5])).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_both_parts_of_a_complex_number_are_seen(dtype: type[np.complexfloating]) -> None:
    seen = Seen([np.array([[0.25 + 0.75j], [1.5 - 2.5j]], dtype)])
    array = np.array([0.25, 0.75, 1.5, -2.5, 0.5])
    assert seen.unseen(array).tolist() == [False, False, False, False, True]


def test_a_mask_is_known_in_either_polarity_and_not_by_other_shares() -> None:
    """What one program keeps, another may leave out: True and False, or 0 and -1e9."""
    mask = np.tril(np.ones((6, 8), bool), 1)
    known = operations._Known([mask.astype(float)], 1e-12)
    for other in (mask, ~mask, np.where(mask, 0.0, -1e9), np.where(mask, -1e9, 0.0)):
        assert known.has(np.asarray(other, float))
    assert not known.has(np.tril(np.ones((6, 8)), 2))
    assert not known.has(np.where(mask, 0.0, np.arange(48.0).reshape(6, 8)))
