"""What storage costs a run, by family of parameters, and which remedies return it."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
import pytest
import torch

from stability.core.number_formats import BF16
from stability.core.parameter_leaves import Leaf, leaves_of
from stability.storage.diagnose import report
from stability.storage.known_gradients import KnownGradients, RowGradients
from stability.storage.schedule import KINDS, Schedule, parse
from stability.storage.simulate import FLOAT32, GRADIENTS, SAMPLE, STEPS, Storage, run
from stability.storage.torch_recipe import recipe
from stability.storage.torch_state import idle_rows, read_state, trained_by
from stability.storage.update_rules import SGD, AdamW, Lion, Muon
from stability.storage.whole_run import DIMINISHING, PARTS, WORKS, WholeRun, family_of, whole_run
from tests.helpers import EXACT

NORM, MATRIX, BIAS = "norm.weight", "fc.weight", "fc.bias"
TREE = {
    NORM: np.ones(64, np.float32),
    MATRIX: np.random.default_rng(0).normal(0, 0.02, (16, 8)).astype(np.float32),
    BIAS: np.zeros(16, np.float32),
}


TREE_OF_MATRIX = {MATRIX: TREE[MATRIX]}


def asked(sizes: dict[str, float] | None = None, **options) -> WholeRun:
    leaves: dict[str, Leaf] = leaves_of(TREE)
    samples = {n: np.reshape(x, -1) for n, x in TREE.items()}
    known = None
    if sizes is not None:
        signal = np.array(GRADIENTS.signal)
        rows = {n: RowGradients(np.array(sizes[n]), signal, x.shape) for n, x in TREE.items()}
        known = KnownGradients(rows, "as a test says")
    assert max(x.size for x in samples.values()) < SAMPLE
    return whole_run(leaves, samples, AdamW(3e-4), BF16, GRADIENTS, known=known, **options)


@cache
def alike() -> WholeRun:
    return asked()


def returns(run: WholeRun) -> dict[str, float]:
    return {remedy.what: remedy.returns for remedy in run.remedies}


def test_every_family_is_named_and_the_frozen_one_is_the_dearest() -> None:
    families = {f.name: f for f in alike().families}
    assert families.keys() == {"norms", "matrices", "biases"}
    assert alike().families[0].name == "norms"
    assert families["norms"].applied == 0.0
    assert families["matrices"].applied > 0.5
    assert sum(f.cost for f in alike().families) == pytest.approx(1.0)
    closing = alike().lines("bfloat16")[-1]
    assert all(f.describe() in closing for f in alike().families)


def test_what_is_right_for_every_leaf_is_right_for_the_run_and_cheapest_first() -> None:
    found = returns(alike())
    assert found["float32 parameters and moments, bfloat16 compute (AMP)"] == 1.0
    works = [r for r in alike().remedies if r.works]
    assert {r.what.split(" ")[0] for r in works} >= {"round", "Kahan", "float32"}
    assert [r.bytes for r in works] == sorted(r.bytes for r in works)
    rest = [r for r in alike().remedies if not r.works]
    assert alike().remedies == (*works, *rest)
    assert [r.returns for r in rest] == sorted((r.returns for r in rest), reverse=True)
    # All that work are shown, and not only the first three.
    shown = "\n".join(alike().lines("bfloat16"))
    assert len(works) > 3 and all(r.what in shown for r in works)
    # Moments do not thaw what a rounding freezes.
    assert found["moments alone in float32"] < WORKS


def test_a_family_returns_what_it_costs() -> None:
    costs = {f"{f.name} alone in float32": f.cost for f in alike().families}
    found = returns(alike())
    assert {what: found[what] for what in costs} == pytest.approx(costs)


def test_the_size_of_gradients_decides_and_not_the_fidelity_of_a_leaf() -> None:
    """A matrix that loses a little of a large push costs more than a norm that loses its all."""
    loud = asked({NORM: 1e-6, MATRIX: 1.0, BIAS: 1e-6})
    assert loud.families[0].name == "matrices"
    assert returns(loud)["norms alone in float32"] < returns(alike())["norms alone in float32"]
    assert loud.basis == "gradients as a test says; 200 steps at one rate, no schedule given"
    assert alike().basis.startswith("all gradients taken to be alike; ")


def test_more_of_a_way_that_is_missing_costs_more_than_in_proportion() -> None:
    families = {f.name: f for f in asked(wide_moments=True).families}
    norm, matrix = families["norms"], families["matrices"]
    missing = (1 - matrix.applied) / (1 - norm.applied)
    assert matrix.cost / norm.cost == pytest.approx(
        # One leaf a family: the ratio of their pushes times that of what is missing.
        _push_ratio() * missing**DIMINISHING
    )


def _push_ratio() -> float:
    shapes = {n: x.shape for n, x in TREE.items()}
    out = run(TREE, AdamW(3e-4), FLOAT32, GRADIENTS, STEPS, SAMPLE, shapes, burn_in=0)
    push = {n: np.abs(o.intended, dtype=np.float64).sum() for n, o in out.items()}
    return float(push[MATRIX] / push[NORM])


def steps_of_torch(dtype: torch.dtype, size: int = 2048) -> np.ndarray:
    """Steps of torch's AdamW with moments in a dtype, on the gradients the simulation draws from.

    The parameter is zero at every step, so that its own rounding takes nothing from them.
    """
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], lr=3e-4, weight_decay=0.0)
    push = torch.randint(0, 2, (size,)) * 2.0 - 1
    total = np.zeros(size)
    for _ in range(STEPS):
        drawn = 0.3 * push + (1 - 0.3**2) ** 0.5 * torch.randn(size)
        parameter.grad = (1e-3 * drawn).to(torch.bfloat16).to(dtype)
        parameter.data.zero_()
        optimizer.step()
        total += parameter.detach().double().numpy()
    return total


def test_moments_in_bfloat16_shorten_steps_as_much_as_those_of_torch() -> None:
    """A second moment that is rounded once decays by what is added less, and costs a fortieth."""
    wide, narrow = steps_of_torch(torch.float32), steps_of_torch(torch.bfloat16)
    of_torch = 1 - float((narrow * np.sign(wide)).sum() / np.abs(wide).sum())
    bias = {BIAS: np.zeros(2048, np.float32)}
    control, cast = (
        run(bias, AdamW(3e-4), storage)[BIAS].intended
        for storage in (FLOAT32, Storage("cast", BF16.name))
    )
    simulated = 1 - float((cast * np.sign(control)).sum() / np.abs(control).sum())
    # Two draws of one share, which are nearer to each other than to a fortieth of it.
    assert of_torch / 2 < simulated < 2 * of_torch
    assert of_torch > 0.01


def test_moments_cost_more_in_a_longer_run() -> None:
    shares = {
        steps: returns(asked(schedule=Schedule("constant", steps)))["moments alone in float32"]
        for steps in (200, 1000)
    }
    assert shares[200] < shares[1000]


def test_a_schedule_says_when_updates_are_lost() -> None:
    run = asked(schedule=parse("linear:warmup=100, steps=1000, end=0"))
    (line,) = run.lost
    assert "norms throughout" in line
    # A matrix loses most where the rate is small: first of all, and at the end.
    (matrices,) = re.findall(r"matrices from 0% to (\d+)% and from (\d+)% to 100% of the run", line)
    warm, decayed = (int(share) for share in matrices)
    assert 0 < warm < 10 < decayed < 100
    factor = parse("linear:warmup=100,steps=1000,end=0").factor
    # The rate at which half of the way is lost is the same on the way up as on the way down.
    assert float(factor(np.array(warm / 100))) == pytest.approx(
        float(factor(np.array(decayed / 100))), abs=2 / PARTS
    )
    assert line in run.lines("bfloat16")
    assert "linear rate, 1,000 steps, 100 of warmup, down to 0% of the rate" in run.basis
    assert asked(schedule=Schedule("constant", 200)).lost[0].count("never") == 2


def test_what_is_lost_at_a_small_rate_is_little_of_the_run() -> None:
    text = "linear:steps=200"
    families = {f.name: f for f in asked(schedule=parse(text), wide_moments=True).families}
    rates = parse(text).factor((np.arange(PARTS) + 0.5) / PARTS)
    lost = []
    for rate in rates[:: PARTS // 10]:
        shapes = {MATRIX: TREE[MATRIX].shape}
        rule = AdamW(3e-4 * float(rate))
        (outcome,) = run(TREE_OF_MATRIX, rule, Storage(), shapes=shapes).values()
        intended = np.asarray(outcome.intended, np.float64)
        gone = ((outcome.last - outcome.first) * np.sign(intended)).sum()
        lost.append(1 - gone / np.abs(intended).sum())
    weighed = float(np.average(lost, weights=rates[:: PARTS // 10]))
    # Every fifth of the parts is tried here, at its own rate, not between those that were tried.
    found = 1 - families["matrices"].applied
    assert abs(found - weighed) < abs(found - float(np.mean(lost)))


def test_a_schedule_at_one_rate_is_what_is_assumed_without_one() -> None:
    found = returns(asked(schedule=Schedule("constant", STEPS), wide_moments=True))
    assert found == pytest.approx(returns(asked(wide_moments=True)))


def test_factors_of_a_schedule_are_those_of_torch() -> None:
    rate = 0.5
    for text, kind, options in (
        ("cosine:steps=40,end=0.1", "CosineAnnealingLR", {"T_max": 40, "eta_min": 0.1 * rate}),
        ("linear:steps=40,end=0.2", "LinearLR",
         {"start_factor": 1.0, "end_factor": 0.2, "total_iters": 40}),
    ):  # fmt: skip
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        of_torch, rates = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options), []
        for _ in range(41):
            rates.append(optimizer.param_groups[0]["lr"] / rate)
            optimizer.step()
            of_torch.step()
        assert parse(text).factor(np.arange(41) / 40) == pytest.approx(rates, rel=EXACT), text
    assert parse("constant:steps=10,warmup=4").factor(np.array([0.1, 0.2, 0.4, 1.0])) == (
        pytest.approx([0.25, 0.5, 1.0, 1.0])
    )


@pytest.mark.parametrize("warmup", [0, 1, 10, 39])
@pytest.mark.parametrize("end", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_grows_to_the_whole_of_it_and_falls_to_its_end(
    kind: str, end: float, warmup: int
) -> None:
    schedule, steps = Schedule(kind, 40, warmup, end), np.arange(41)
    factors = schedule.factor(steps / 40)
    assert factors[0] == (0.0 if warmup else 1.0) and factors[warmup] == 1.0
    assert factors[:warmup] == pytest.approx(steps[:warmup] / max(warmup, 1))
    assert factors[-1] == pytest.approx(1.0 if kind == "constant" else end)
    assert (np.diff(factors[warmup:]) <= 0).all()
    # Behind its warmup it is that of a run without one, of the steps that are left.
    alone = Schedule(kind, 40 - warmup, 0, end).factor(np.linspace(0, 1, 41 - warmup))
    assert factors[warmup:] == pytest.approx(alone)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cosin:steps=10", "unknown schedule 'cosin'"),
        ("cosine", "has no steps=NUMBER"),
        ("cosine:steps=ten", "'ten' is no number"),
        ("cosine:steps=10,warm=3", "at 'warm=3'"),
        ("constant:steps=10,end=0.5", "at 'end=0.5'"),
        ("cosine:steps=10,warmup=10", "warmup=10 and steps=10: expected whole numbers"),
        ("cosine:steps=10,end=2", "end=2 must be in"),
        ("cosine:steps=10,steps=20", "at 'steps=20'"),
    ],
)
def test_a_schedule_that_is_none_is_refused(text, told) -> None:
    with pytest.raises(ValueError, match="schedule") as refused:
        parse(text)
    assert told in str(refused.value)


def test_what_loses_nothing_needs_no_remedy() -> None:
    leaves, samples = leaves_of({BIAS: np.zeros(4, np.float32)}), {BIAS: np.zeros(4, np.float32)}
    run = whole_run(leaves, samples, AdamW(0.5), BF16, GRADIENTS, wide_moments=True)
    assert run.families[0].applied > WORKS
    assert not any("moments alone" in what for what in returns(run))


@pytest.mark.parametrize(
    ("name", "shape", "family"),
    [
        ("model.embed_tokens.weight", (8, 8), "embeddings"),
        ("transformer.wte.weight", (8, 8), "embeddings"),
        ("lm_head.weight", (8, 8), "embeddings"),
        ("layers.0.q_proj.weight", (8, 8), "matrices"),
        ("conv.weight", (8, 8, 3), "kernels"),
        ("ln_1.weight", (8,), "norms"),
        ("ln_1.bias", (8,), "biases"),
        ("post_attention_layernorm.weight", (8,), "norms"),
        ("blocks.0.attn_pre.g", (8,), "norms"),
        ("layers.0.1.weight", (8,), "norms"),
        ("blocks.0.ls1.gamma", (8,), "other vectors"),
        ("scale", (), "other vectors"),
        ("temperature.weight", (), "other vectors"),
        ("layers.0.act.weight", (8,), "other vectors"),
        ("body.2.weight", (1,), "other vectors"),
        ("flow.actnorm.weight", (8,), "norms"),
    ],
)
def test_families_go_by_name_and_axes(name, shape, family) -> None:
    assert family_of(name, shape) == family


def state_of(model: torch.nn.Module, **settings):
    """The state of an optimiser after one step, of which half the tokens got a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), **({"lr": 3e-4} | settings))
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("decay", "found"), [(0.1, 0.5), (0.0, None), (100.0, 0.0)])
def test_rows_that_decay_alone_would_move_are_counted(decay, found) -> None:
    model = torch.nn.Embedding(8, 4).to(torch.bfloat16)
    # A step of the rate moves these, and is lost where the spacing is larger.
    torch.nn.init.constant_(model.weight, 0.01)
    optimizer = state_of(model, weight_decay=decay)
    leaves = leaves_of(model.state_dict())
    state = read_state("optimizer", optimizer.state_dict(), leaves)
    rule, _ = trained_by([state])
    findings = idle_rows(state, leaves, rule, BF16)
    assert [f.value for f in findings] == ([] if found is None else [found])
    if found:
        # As it says: after another step the rows without a gradient are what they were.
        before = model.weight.detach().clone()
        optimizer.step()
        assert torch.equal(before[4:], model.weight[4:])
        assert not torch.equal(before[:4], model.weight[:4])


def test_a_state_is_matched_by_shape_and_order_across_groups() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": wide, "weight_decay": 0.2}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    state = read_state("optimizer", optimizer.state_dict(), leaves_of(model.state_dict()))
    assert state.matched
    for name, parameter in model.named_parameters():
        kept = optimizer.state[parameter]["exp_avg_sq"]
        assert torch.equal(state.moments[name]["exp_avg_sq"], kept), name
    assert state.rule() == AdamW(1e-3, weight_decay=0.2)


def test_a_schedule_is_taken_from_where_it_began() -> None:
    model = torch.nn.Embedding(8, 4)
    optimizer = state_of(model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    state = read_state("optimizer", optimizer.state_dict(), leaves_of(model.state_dict()))
    assert state.rule() == AdamW(1e-3, weight_decay=0.01)
    assert state.schedule()[0].startswith("Rates of optimizer began at 0.001, now 0.0005")


def test_moments_say_how_large_gradients_are_and_whether_they_keep_their_sign() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(2, 4096))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    size = torch.tensor([[0.5], [2.0]])
    for _ in range(200):
        push, noise = torch.ones(4096), torch.randn(4096)
        parameter.grad = size * torch.stack([0.6 * push + 0.8 * noise, noise])
        optimizer.step()
    leaves = leaves_of({"w": parameter.detach()})
    rows = read_state("optimizer", optimizer.state_dict(), leaves).gradients("w")
    assert rows is not None
    # Means over 4,096 elements, of moments over a few dozen independent steps.
    assert rows.sizes == pytest.approx([0.5, 2.0], rel=0.05)
    assert rows.signals[0] == pytest.approx(0.6, abs=0.05)
    assert rows.signals[1] < 0.2


def test_the_size_of_a_row_is_the_root_mean_square_of_its_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    for _ in range(3):
        parameter.grad = torch.tensor([[1.0, -7.0], [3.0, 3.0], [0.0, 4.0]])
        optimizer.step()
    leaves = leaves_of({"w": parameter.detach()})
    rows = read_state("optimizer", optimizer.state_dict(), leaves).gradients("w")
    assert rows is not None
    assert rows.sizes == pytest.approx([5.0, 3.0, math.sqrt(8.0)])
    assert rows.rms() == pytest.approx(math.sqrt((50 + 18 + 16) / 6))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_state_of_few_steps_does_not_take_noise_for_a_push(steps) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    for _ in range(steps):
        parameter.grad = torch.randn(4096)
        optimizer.step()
    leaves = leaves_of({"w": parameter.detach()})
    rows = read_state("optimizer", optimizer.state_dict(), leaves).gradients("w")
    assert rows is not None
    # Of one step nothing can be told, and what is assumed stands; noise of three is no push of 0.3.
    assert (
        float(rows.signals) == pytest.approx(GRADIENTS.signal) if steps == 1 else rows.signals < 0.3
    )


@pytest.mark.parametrize(
    "rule", [AdamW(1e-3, 0.97, 0.2, 0.8, 1e-6), SGD(0.3, 0.7)], ids=lambda r: r.name
)
def test_a_recipe_runs_as_it_is_written(rule) -> None:
    lines = [line for line in recipe(rule) if "round_stochastically(optimizer)" in line]
    scope = {"torch": torch, "model": torch.nn.Linear(2, 2).to(torch.bfloat16)}
    exec("from stability.storage.torch_narrow import *\n" + lines[0].strip(), scope)
    optimizer = scope["optimizer"]
    assert isinstance(optimizer, getattr(torch.optim, type(rule).__name__))
    scope["model"](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    leaves = leaves_of(scope["model"].state_dict())
    assert read_state("optimizer", optimizer.state_dict(), leaves).rule() == rule


@pytest.mark.parametrize("rule", [AdamW(1e-3), SGD(), Lion(), Muon()], ids=lambda r: r.name)
def test_a_recipe_names_the_optimiser_that_was_used(rule) -> None:
    lines = "\n".join(recipe(rule))
    assert f"{type(rule).__name__}(model.parameters(), lr={rule.lr:g}" in lines
    assert "round_stochastically(optimizer)" in lines
    assert "torch.autocast" in lines


@pytest.mark.sweep
def test_a_recipe_of_torch_is_for_what_torch_trained_alone() -> None:
    tensors = {n: torch.from_numpy(x.copy()) for n, x in TREE.items()}
    text = report(tensors, AdamW(3e-4)).text()
    assert "torch_narrow.round_stochastically" in text
    assert "narrow_optimisers" not in text
    text = report(TREE, AdamW(3e-4)).text()
    assert "torch_narrow" not in text
    assert "narrow_optimisers.stochastic_adamw" in text
