"""Torch optimisers on bfloat16 parameters: nothing is lost, and a continued run is the same run."""

from __future__ import annotations

import copy

import pytest
import torch

from stability.storage.torch_narrow import (
    CARRY,
    compensate,
    round_stochastically,
    stochastic,
)
from tests.helpers import roundoff

STEPS, RATE = 1000, 1e-4


def run(attach, kind=torch.optim.SGD, dtype=torch.bfloat16, size: int = 4000):
    """Ones that are pushed down by 1e-4 a thousand times: exactly 0.9 remain."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = kind([parameter], lr=RATE)
    if attach is not None:
        attach(optimizer)
    for _ in range(STEPS):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.dtype == dtype
    return parameter.detach().float(), optimizer


def test_plain_bfloat16_stays_where_it_is() -> None:
    """What the others are compared with."""
    assert torch.equal(run(None)[0], torch.ones(4000))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam])
def test_stochastic_rounding_is_right_on_average(kind) -> None:
    values, optimizer = run(round_stochastically, kind)
    wide = run(None, kind, torch.float32)[0].mean()
    # A walk of N coins, of at most displacement times gap each, over 4,000 elements.
    spread = (0.1 * 2.0**-8 / 4000) ** 0.5
    assert abs(float(values.mean() - wide)) < 5 * spread
    moments = [x for state in optimizer.state.values() for x in state.values() if x is not None]
    assert {x.dtype for x in moments} <= {torch.float32}


def test_kahan_is_right_for_each_element() -> None:
    values, optimizer = run(compensate, torch.optim.AdamW, size=4)
    wide = run(None, torch.optim.AdamW, torch.float32, 4)[0]
    (state,) = optimizer.state.values()
    whole = values + state[CARRY].float()
    # Half a gap of bfloat16 below 1, then what its carry rounds over a thousand steps.
    assert (values - wide).abs().max() <= 2.0**-9
    assert (whole - wide).abs().max() <= STEPS * 2.0**-9 * 2.0**-9
    assert state["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("attach", [round_stochastically, compensate])
def test_a_run_continued_from_its_state_is_the_same_run(attach) -> None:
    def start():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        attach(optimizer)
        return model, optimizer

    def steps(model, optimizer, seed):
        torch.manual_seed(seed)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()

    model, optimizer = start()
    steps(model, optimizer, 1)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 2)
    again, continued = start()
    again.load_state_dict(kept[0])
    continued.load_state_dict(kept[1])
    for q, saved in zip(again.parameters(), kept[1]["state"].values(), strict=True):
        # Bit for bit: five steps later a rounded moment may have been lost in bfloat16 parameters.
        assert all(torch.equal(value, continued.state[q][name]) for name, value in saved.items())
    steps(again, continued, 2)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert continued.state[q]["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("attach", [round_stochastically, compensate])
def test_a_run_with_moments_in_bfloat16_goes_on_with_wide_ones(attach) -> None:
    """The run that the advice is about: plain AdamW on bfloat16 parameters."""
    gradient = torch.linspace(-1, 1, 8)

    def stepped(optimizer, parameter) -> None:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()

    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([parameter], lr=RATE)
    stepped(plain, parameter)
    state = copy.deepcopy(plain.state_dict())
    assert state["state"][0]["exp_avg"].dtype == torch.bfloat16
    optimizer = torch.optim.AdamW([parameter], lr=RATE)
    attach(optimizer)
    optimizer.load_state_dict(state)
    stepped(optimizer, parameter)
    (held,) = optimizer.state.values()
    assert held["exp_avg"].dtype == held["exp_avg_sq"].dtype == torch.float32
    # The moment of two equal gradients: each term is rounded once, by its own format.
    expected = (
        0.9 * state["state"][0]["exp_avg"].float() + 0.1 * gradient.to(torch.bfloat16).float()
    )
    bound = roundoff(4) * expected.abs().max()
    assert (held["exp_avg"] - expected).abs().max() <= bound


def test_a_schedule_and_gradients_in_bfloat16_work_on() -> None:
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    hooks = round_stochastically(optimizer)
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        schedule.step()
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    hooks.remove()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 8)


def test_only_neighbours_are_drawn_and_what_is_not_finite_stays() -> None:
    wide = torch.tensor([1.0, 1.001, -1.001, 0.0, torch.inf, torch.nan, 3e38])
    drawn = torch.stack([stochastic(wide).float() for _ in range(64)])
    assert set(drawn[:, 0].tolist()) == {1.0}
    assert set(drawn[:, 1].tolist()) == {1.0, 1.0078125}
    assert set(drawn[:, 2].tolist()) == {-1.0, -1.0078125}
    assert set(drawn[:, 3].tolist()) == {0.0}
    assert torch.isinf(drawn[:, 4]).all()
    assert torch.isnan(drawn[:, 5]).all()


def test_no_draw_makes_a_number_of_what_is_none() -> None:
    """Random bits carry: from a NaN with all of them set they would reach the sign and make 0."""
    patterns = [0x7F800000, -0x800000, 0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000]
    wide = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert torch.isnan(wide[2:]).all()
    for _ in range(64):
        drawn = stochastic(wide).float()
        assert drawn[:2].tolist() == [torch.inf, -torch.inf]
        assert torch.isnan(drawn[2:]).all()


@pytest.mark.parametrize("attach", [round_stochastically, compensate])
def test_a_parameter_that_became_infinite_stays_so(attach) -> None:
    """A carry of infinity less infinity would make it NaN one step later."""
    start = torch.tensor([torch.inf, -torch.inf, 3e38, 1.0])
    parameter = torch.nn.Parameter(start.to(torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    attach(optimizer)
    for _ in range(3):
        parameter.grad = torch.tensor([0.0, 0.0, -3e38, 1.0]).to(torch.bfloat16)
        optimizer.step()
    assert parameter[:3].tolist() == [torch.inf, -torch.inf, torch.inf]
    assert parameter[3].item() == -2.0


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a torch\.optim\.Optimizer"):
        compensate(object())
    wide = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no parameter of this optimiser is bfloat16"):
        compensate(torch.optim.AdamW(wide.parameters()))
    _, stepped = run(None, torch.optim.AdamW, size=2)
    with pytest.raises(ValueError, match="keeps exp_avg, exp_avg_sq in bfloat16 already"):
        round_stochastically(stepped)
