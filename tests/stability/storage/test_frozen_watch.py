"""The watch: parameters that stand still under gradients are named, and only those."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from stability.core.findings import Severity
from stability.storage.frozen_watch import FOLLOWED, advance, frozen, start, watch_torch
from stability.storage.narrow_optimisers import apply_updates

PATIENCE = 5


def looped(steps: int, gradient: float = 1.0):
    """Watch after plain AdamW 3e-4 on a bfloat16 norm at 1 and a matrix near 0."""
    params = {"norm": jnp.ones(8, jnp.bfloat16), "matrix": jnp.full((40, 20), 1e-3, jnp.bfloat16)}
    transform = optax.adamw(3e-4)
    grads = jax.tree.map(lambda p: jnp.full_like(p, gradient), params)
    state, watch = transform.init(params), start(params)

    @jax.jit
    def step(params, state, watch):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transform.update(grads, state, params)
        params = apply_updates(params, updates)
        return params, state, advance(watch, params, grads)

    for _ in range(steps):
        params, state, watch = step(params, state, watch)
    return watch


def test_a_jax_loop_learns_of_the_frozen_norm_and_of_nothing_else() -> None:
    (found,) = frozen(looped(PATIENCE), PATIENCE)
    assert (found.subject, found.severity, found.value) == ("norm", Severity.WARNING, 1.0)
    assert "have not changed for 5 steps although their gradients were not zero" in found.message
    assert "float32" in found.remedy


def test_patience_and_gradients_count() -> None:
    assert not frozen(looped(PATIENCE - 1), PATIENCE)
    assert not frozen(looped(PATIENCE, gradient=0.0), PATIENCE), "without a push nothing is frozen"


def test_a_change_starts_the_count_anew_and_few_elements_are_followed() -> None:
    watch, ones = start({"w": jnp.ones(5000)}), {"w": jnp.ones(5000)}
    assert watch.last["w"].size <= FOLLOWED
    watch = advance(watch, ones, ones)
    assert frozen(watch, 1)
    watch = advance(watch, {"w": 2 * ones["w"]}, ones)
    assert not frozen(watch, 1)
    assert not frozen(advance(watch, {"w": 2 * ones["w"]}, {"other": ones["w"]}), 1)


def test_elements_without_a_gradient_take_nothing_from_the_share() -> None:
    """Of 8 rows 2 occur, and one of these stands still: half, not an eighth."""
    rows = np.ones((8, 4), np.float32)
    gradient = np.zeros_like(rows)
    gradient[:2] = 1.0
    watch = start({"w": jnp.asarray(rows)})
    for turn in range(PATIENCE):
        # One element of the first row moves on, so that more than half stand still.
        rows[1], rows[0, 0] = rows[1] + 1.0, rows[0, 0] + 1.0
        watch = advance(watch, {"w": jnp.asarray(rows)}, {"w": jnp.asarray(gradient)})
        assert not frozen(watch, PATIENCE), turn
    rows_of_torch = torch.nn.Parameter(torch.ones(8, 4))
    optimiser, reports = torch.optim.SGD([rows_of_torch], lr=0.0), []
    watch_torch(optimiser, [("w", rows_of_torch)], patience=PATIENCE, report=reports.append)
    for _ in range(PATIENCE):
        rows_of_torch.grad = torch.from_numpy(gradient.copy())
        watch = advance(watch, {"w": jnp.asarray(rows)}, {"w": jnp.asarray(gradient)})
        optimiser.step()
    (found,), (of_torch,) = frozen(watch, PATIENCE), reports
    assert found.value == of_torch.value == 1.0
    assert found.message.startswith("100% of the 8 elements followed")


def torch_loop(dtype: torch.dtype, steps: int):
    layer = torch.nn.LayerNorm(16).to(dtype)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=3e-4, weight_decay=0.0)
    reports = []
    watch = watch_torch(
        optimiser, layer.named_parameters(), patience=PATIENCE, report=reports.append
    )
    for _ in range(steps):
        optimiser.zero_grad()
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimiser.step()
    return layer, optimiser, watch, reports


def test_a_torch_loop_reports_the_founding_case_once() -> None:
    layer, optimiser, watch, reports = torch_loop(torch.bfloat16, 3 * PATIENCE)
    assert [f.subject for f in reports] == ["weight"]
    assert torch.equal(layer.weight, torch.ones_like(layer.weight)), "to(bfloat16) and AdamW 3e-4"
    assert [f.subject for f in watch.findings()] == ["weight"]
    watch.remove()
    before = watch._watch.still["weight"].copy()
    optimiser.step()
    assert (watch._watch.still["weight"] == before).all()


def test_the_same_loop_in_float32_is_silent() -> None:
    assert not torch_loop(torch.float32, 3 * PATIENCE)[3]


def test_bad_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="nothing to watch in this dict"):
        start({"count": jnp.arange(3)})
    with pytest.raises(ValueError, match="patience=0 must be at least 1"):
        frozen(start({"w": jnp.ones(1)}), 0)
    with pytest.raises(ValueError, match=r"dict has no register_step_post_hook.*torch.optim"):
        watch_torch({}, [])
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match=r"no parameters; pass model.named_parameters"):
        watch_torch(optimiser, [])
    with pytest.raises(ValueError, match="watch_torch: patience=0 must be at least 1"):
        watch_torch(optimiser, [("w", torch.ones(1))], patience=0)
