"""Update survival: the rule is bfloat16 rounding, and what it predicts is what happens."""

from __future__ import annotations

from functools import cache

import jax
import ml_dtypes
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM
from megalodon_jax.weights import named_leaves
from stability.core.findings import Severity
from stability.core.number_formats import BF16, E4M3, E5M2, FP16, Format
from stability.core.parameter_leaves import leaves_of
from stability.storage.survival import (
    AdamW,
    Survival,
    half_gap,
    is_lost,
    measure,
    predict,
    probe,
    survival_findings,
)
from tests.helpers import tiny, tokens

CONFIG = tiny(num_layers=1)
LR = 3e-4
NORM = "model.layers.0.ffn.norm.weight"
ZERO = "model.layers.0.ffn.norm.bias"
MATRIX = "model.layers.0.ffn.fc1.weight"


def finite_bf16() -> np.ndarray:
    """Every finite bfloat16 but the zeros, in order of magnitude, as float64."""
    patterns = np.arange(1, 0x7F80, dtype=np.uint16)
    return patterns.view(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("outward", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.49, 0.5, 0.51, 0.75, 1.0])
def test_the_rule_is_round_to_nearest_even_for_every_bfloat16(
    sign: float, outward: bool, share: float
) -> None:
    # Neighbours are the adjacent bit patterns: no spacing formula takes part in this truth.
    ladder = np.concatenate([[0.0], finite_bf16()])
    p = ladder[1:-1]
    neighbour = ladder[2:] if outward else ladder[:-2]
    even = np.arange(1, len(p) + 1) % 2 == 0
    u = share * (neighbour - p)
    total = p + u
    to_p, to_neighbour = np.abs(total - p), np.abs(neighbour - total)
    kept = (to_p < to_neighbour) | ((to_p == to_neighbour) & even)
    normal = p >= float(ml_dtypes.finfo(ml_dtypes.bfloat16).smallest_normal)
    assert np.array_equal(is_lost(sign * p, sign * u)[normal], kept[normal])
    assert np.array_equal(is_lost(sign * p, sign * u), kept), "subnormals follow the same rule"
    gap = np.abs(neighbour - p) / 2
    assert np.array_equal(half_gap(sign * p, sign * (neighbour - p)), gap)


@pytest.mark.parametrize("share", [0.49, 0.5, 0.51])
def test_the_rule_is_what_the_cast_does(share: float) -> None:
    p = finite_bf16()
    p = p[(p > 2.0**-100) & (p < 2.0**100)]
    for u in (share * BF16.spacing(p), -share * BF16.spacing(p), -share / 2 * BF16.spacing(p)):
        total = (p + u).astype(np.float32)
        exact = total.astype(np.float64) == p + u
        stays = total.astype(ml_dtypes.bfloat16).astype(np.float64) == p
        assert exact.all() or share != 0.5
        assert np.array_equal(is_lost(p, u)[exact], stays[exact])


def test_a_rule_without_ties_or_powers_of_two_would_be_wrong() -> None:
    p = finite_bf16()
    half = BF16.spacing(p) / 2
    ties = is_lost(p, half)
    assert ties.any()
    assert not ties.all()
    inward = half_gap(p, -half) < half
    assert inward.any()
    assert not inward.all()


def test_the_numbers_of_the_specification() -> None:
    one = np.array([1.0])
    assert half_gap(one, one) == 2.0**-8
    assert half_gap(one, -one) == 2.0**-9
    above = np.nextafter(2.0**-8, 1)
    assert is_lost(one, np.array([2.0**-8]))
    assert not is_lost(one, np.array([above]))
    assert is_lost(one, np.array([-(2.0**-9)]))
    assert not is_lost(one, np.array([-np.nextafter(2.0**-9, 1)]))
    assert is_lost(one, np.array([LR]))
    assert is_lost(one, np.array([-LR]))
    assert BF16.round(one + 3e-3) - one == 0
    assert BF16.round(one - 3e-3) - one == -(2.0**-8), "1.30 times the intended step"


def test_elements_freeze_from_the_magnitude_of_the_specification() -> None:
    bound = 2.0 ** np.ceil(np.log2(LR) + 8)
    p = finite_bf16()
    frozen = is_lost(p, np.full(p.shape, LR)) & is_lost(p, np.full(p.shape, -LR))
    assert np.array_equal(frozen[p > bound], np.ones((p > bound).sum(), bool))
    assert not frozen[p < bound / 2].any()


def test_an_update_of_zero_changes_nothing_and_from_zero_every_step_counts() -> None:
    assert is_lost(np.array([0.7]), np.array([0.0]))
    assert not is_lost(np.zeros(2), np.array([LR, -LR])).any()
    assert predict(np.zeros(4, np.float32), LR).frozen == 0.0


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=lambda f: f.name)
def test_small_formats_follow_the_rule_completely(fmt: Format) -> None:
    kind = np.uint8 if fmt.dtype.itemsize == 1 else np.uint16
    largest = np.array(ml_dtypes.finfo(fmt.dtype).max, fmt.dtype)
    # Below the largest number, so that no sum overflows; without zero, which has no significand.
    patterns = np.arange(1, int(largest.view(kind))).astype(kind)
    p = patterns.view(fmt.dtype).astype(np.float64)
    p = np.concatenate([p, -p])
    for share in (0.2, 0.25, 0.3, 0.5, 0.7):
        for u in (share * fmt.spacing(p), -share * fmt.spacing(p)):
            total = (p + u).astype(np.float32)
            exact = total.astype(np.float64) == p + u
            assert np.array_equal(
                is_lost(p, u, fmt)[exact], (fmt.round(total).astype(np.float64) == p)[exact]
            )


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_pair_of_eight_bit_numbers_follows_the_rule(fmt: Format) -> None:
    values = np.arange(256).astype(np.uint8).view(fmt.dtype).astype(np.float64)
    values = values[np.isfinite(values)]
    p, u = (x.reshape(-1) for x in np.meshgrid(values, values))
    total = (p + u).astype(np.float32)
    # Where float32 holds the sum exactly, and no overflow, a cast is the truth.
    exact = (total.astype(np.float64) == p + u) & (np.abs(p + u) <= fmt.max) & (p != 0)
    assert exact.sum() > 0.75 * exact.size
    stays = fmt.round(total).astype(np.float64) == p
    assert np.array_equal(is_lost(p, u, fmt)[exact], stays[exact])
    assert stays[exact].any()
    assert not stays[exact].all()


@cache
def model() -> MegalodonForCausalLM:
    return MegalodonForCausalLM(CONFIG, key=jax.random.key(0))


BATCHES = np.stack([tokens(CONFIG, (4, 4), seed) for seed in range(3)])


@cache
def measured(fmt: Format | None, steps: int = 3) -> dict[str, Survival]:
    return measure(model(), BATCHES[:steps], AdamW(LR), fmt)


def test_prediction_and_measurement_agree_on_the_first_step() -> None:
    # The first step of AdamW has r = 1: every element with a gradient moves by lr.
    for name in (MATRIX, NORM, "model.layers.0.attn.wv.weight"):
        p = BF16.round(np.asarray(named_leaves(model())[name]))
        up, down = (is_lost(p, np.full(p.shape, u)) for u in (LR, -LR))
        assert np.mean(up & down) <= measured(BF16, 1)[name].frozen <= np.mean(up | down)
        assert np.mean(up & down) <= predict(p, LR).frozen <= np.mean(up | down)
    assert measured(BF16, 1)[NORM].frozen == predict(np.ones(8, np.float32), LR).frozen == 1.0
    assert 0.0 < predict(np.asarray(named_leaves(model())[MATRIX]), LR).frozen < 1.0


def test_a_norm_at_one_never_moves_and_a_bias_at_zero_does() -> None:
    assert measured(BF16)[NORM] == Survival(frozen=1.0, fidelity=0.0, error=1.0)
    assert measured(BF16)[ZERO].frozen == 0.0


def test_the_float32_control_applies_what_the_optimiser_asked_for() -> None:
    eps = np.finfo(np.float32).eps
    for name, row in measured(None).items():
        largest = np.abs(np.asarray(named_leaves(model())[name])).max()
        assert row.frozen <= 0.0, name
        # bound: three additions round by half an ulp each, of a move of about three rates.
        assert abs(row.fidelity - 1) <= 4 * eps * (largest + LR) / LR, name


def test_bfloat16_storage_is_really_rounded() -> None:
    narrow, control = measured(BF16), measured(None)
    assert narrow[NORM].fidelity == 0.0 < control[NORM].fidelity
    assert narrow[MATRIX] != control[MATRIX]
    assert narrow[MATRIX].frozen > control[MATRIX].frozen


def test_measuring_leaves_the_model_as_it_was() -> None:
    before = {n: np.asarray(x).tobytes() for n, x in named_leaves(model()).items()}
    measured(BF16)
    assert before == {n: np.asarray(x).tobytes() for n, x in named_leaves(model()).items()}


def test_a_larger_learning_rate_thaws_the_norm() -> None:
    assert predict(np.ones(8, np.float32), 2.0**-7).frozen == 0.0


def test_only_linear_weights_decay() -> None:
    decaying, plain = (AdamW(LR, weight_decay=decay).transform() for decay in (0.5, 0.0))
    params = model()
    zeros = jax.tree.map(np.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        moves = [
            named_leaves(jax.jit(t.update)(zeros, t.init(params), params)[0])
            for t in (decaying, plain)
        ]
    moved = {n for n in moves[0] if not np.array_equal(moves[0][n], moves[1][n])}
    assert moved == {
        n
        for n in named_leaves(params)
        if n.endswith(".weight") and "norm" not in n and "embed" not in n
    }


def test_the_probe_reports_every_leaf_and_warns_of_the_frozen_norm() -> None:
    findings = probe(model(), BATCHES, AdamW(LR))
    main = {f.subject: f for f in findings if f.metric == "frozen_fraction"}
    assert main.keys() == named_leaves(model()).keys()
    frozen = main[NORM]
    assert (frozen.severity, frozen.value, frozen.threshold) == (Severity.WARNING, 1.0, 0.5)
    assert "100% of its 8 elements never move at lr 0.0003" in frozen.message
    assert "float32" in frozen.remedy
    assert (main[ZERO].severity, main[ZERO].remedy) == (Severity.OK, "")
    details = {f.metric: f.value for f in findings if f.subject == NORM}
    assert details.keys() == {
        *("frozen_fraction", "predicted_frozen_fraction", "fidelity", "fidelity_float32"),
        "min_lr",
    }
    assert (details["predicted_frozen_fraction"], details["fidelity"]) == (1.0, 0.0)
    assert details["fidelity_float32"] > 0.0, "the control is stored in float32"


@pytest.mark.parametrize(("frozen", "severity"), [(0.5, Severity.OK), (0.51, Severity.WARNING)])
def test_a_leaf_is_warned_of_when_more_is_frozen_than_moves(frozen: float, severity) -> None:
    leaf = leaves_of({"w": np.ones(100, np.float32)})["w"]
    narrow, control = Survival(frozen, 1.0), Survival(0.0, 1.0)
    [main, *_] = survival_findings(leaf, narrow, control, AdamW(LR), False)
    assert (main.severity, bool(main.remedy)) == (severity, severity is Severity.WARNING)
