"""Ranges, norms, logits and entropies: against NumPy, and each finding with what triggers it."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megalodon_jax.weights import named_leaves, replace_leaves
from parity.engine.measure.quantity import Quantity
from parity.engine.programs.yardstick import compiled
from parity.megalodon.cases import Case
from parity.megalodon.intermediates import stages
from parity.megalodon.oracle import document_positions
from parity.megalodon.runner import JaxSubject, evaluate
from stability.activations.attention import (
    PEAKED,
    WEIGHT_ERROR,
    Heads,
    attention_findings,
    measure_heads,
    weight_error,
)
from stability.activations.ranges import (
    HEADROOM,
    Range,
    Ranges,
    measure_ranges,
    range_findings,
    summary,
)
from stability.core.findings import Severity
from tests.helpers import rel_l2, rounding_bound, roundoff, same_program

CASE = Case("activations", "two chunks and a tail", overrides={"num_layers": 1}, length=37)
PADDED = dataclasses.replace(CASE, padding="right")
PACKED = dataclasses.replace(PADDED, documents=((7, 20, 10), (1, 36)))
"""Documents whose chunks are not the row's."""


@cache
def model():
    return JaxSubject().load(CASE)


@cache
def measured():
    return measure_ranges(model(), CASE.batch.ids, labels=CASE.batch.labels)


@cache
def expected():
    batch = CASE.batch
    (_, intermediates), (gradients, bars) = compiled(evaluate, yardstick=False)(
        model(), jnp.asarray(batch.ids), jnp.asarray(batch.labels), None
    )
    named = {f"grad/{name}": g for name, g in named_leaves(gradients).items()}
    named |= {Quantity.cotangent(name): bar for name, bar in bars.items()}
    return {name: np.asarray(array) for name, array in (intermediates | named).items()}


def test_ranges_are_those_of_the_arrays_themselves() -> None:
    found = measured()
    assert tuple(found.intermediates) == stages(CASE.config)
    assert set(found.cotangents) == {Quantity.cotangent(name) for name in found.intermediates}
    bound = same_program(CASE)
    for name, found_range in (found.intermediates | found.cotangents).items():
        values = np.abs(expected()[name].astype(np.float64))
        norm, same = np.linalg.norm(values), bound(name)
        # No element and no norm moves by more than the norm of the difference.
        assert rel_l2(found_range.largest, values.max()) <= same * norm / values.max(), name
        assert rel_l2(found_range.rms, np.sqrt(np.mean(values**2))) <= same, name
        assert float(found_range.bad) == 0.0


@pytest.mark.sweep
def test_ranges_of_packed_documents_are_those_of_the_documents() -> None:
    batch = PACKED.batch
    arguments = model(), batch.ids, batch.mask, batch.labels
    found, bound = measure_ranges(*arguments, batch.segments), same_program(PACKED)
    expected = JaxSubject().run(PACKED)
    for name, found_range in found.cotangents.items():
        rms = np.sqrt(np.mean(expected[name].astype(np.float64) ** 2))
        assert rel_l2(found_range.rms, rms) <= bound(name), name
    # The control: rows that are one document each.
    name = "bar/layers.0.cema"
    other = measure_ranges(*arguments).cotangents[name]
    assert rel_l2(other.rms, found.cotangents[name].rms) > bound(name)


def test_gradient_norms_add_up_to_the_global_one() -> None:
    found = measured()
    assert set(found.gradients) == set(named_leaves(model()))
    by_hand = {n: expected()[f"grad/{n}"].astype(np.float64) for n in found.gradients}
    bound = same_program(CASE)
    worst = max(bound(f"grad/{name}") for name in by_hand)
    cema = [g for n, g in by_hand.items() if n.startswith("model.layers.0.attn.cema.")]
    norm = np.sqrt(sum(np.sum(g**2) for g in cema))
    assert rel_l2(found.norms["model.layers.0.attn.cema"], norm) <= worst
    total = np.sqrt(sum(np.sum(g**2) for g in by_hand.values()))
    assert rel_l2(np.linalg.norm(list(found.norms.values())), total) <= worst


def severities(**changes) -> dict[str, Severity]:
    zero = np.float32(0)
    lost = {"bfloat16": zero, "float16": zero}
    healthy = Range(np.float32(1), np.float32(1), np.float32(1), zero, lost)
    found = {"x": healthy._replace(**changes)}
    findings = range_findings(Ranges(found, {}, {}, {}))
    return {f.metric: f.severity for f in findings}


@pytest.mark.parametrize(("largest", "bf16", "fp16"), [(1.0, "ok", "ok"), (1e5, "ok", "note")])
def test_what_float16_cannot_hold_is_said(largest: float, bf16: str, fp16: str) -> None:
    found = severities(largest=np.float32(largest))
    assert found == {"largest_bfloat16": bf16, "largest_float16": fp16}


def test_what_bfloat16_cannot_hold_is_an_error_and_near_it_a_warning() -> None:
    top = float(ml_dtypes.finfo("bfloat16").max)
    # float32 reaches further than bfloat16, by less than one part in 256.
    assert severities(largest=np.finfo(np.float32).max)["largest_bfloat16"] is Severity.ERROR
    assert severities(largest=2 * top * HEADROOM)["largest_bfloat16"] is Severity.WARNING
    assert severities(largest=top * HEADROOM)["largest_bfloat16"] is Severity.OK
    lost = {"bfloat16": np.float32(0.5), "float16": np.float32(0.5)}
    assert severities(lost=lost) == {"largest_bfloat16": "warning", "largest_float16": "note"}
    assert severities(bad=np.float32(0.1)) == {"non_finite": Severity.ERROR}


def test_values_that_round_to_zero_are_counted() -> None:
    half = float(ml_dtypes.finfo("float16").smallest_subnormal) / 2
    found = summary(jnp.array([0.0, 1.0, half, half * 1.5, half / 4, -half / 8], jnp.float32))
    rounded = np.array([half, half * 1.5, half / 4, half / 8], np.float32).astype(np.float16)
    # Of the five that are not 0: those that are 0 already lose nothing.
    assert float(found.lost["float16"]) == pytest.approx(np.sum(rounded == 0) / 5)
    assert float(found.lost["bfloat16"]) == 0.0
    assert float(found.smallest) == half / 8
    empty = summary(jnp.zeros((0, 3)))
    assert float(empty.largest) == float(empty.bad) == 0.0
    huge = summary(jnp.array([3e38, jnp.inf]))
    assert (float(huge.bad), float(huge.largest)) == (0.5, float(np.float32(3e38)))
    assert np.isfinite(float(huge.rms))


def test_a_norm_whose_square_is_outside_the_format_is_told() -> None:
    (finding,) = range_findings(Ranges({}, {}, {}, {"layer": 1e-5}))
    assert "its square is outside float16" in finding.message
    (finding,) = range_findings(Ranges({}, {}, {}, {"layer": 1.0}))
    assert "square" not in finding.message
    (finding,) = range_findings(Ranges({}, {}, {}, {"layer": float("nan")}))
    assert finding.severity is Severity.ERROR


def by_hand(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Largest |logit|, mean entropy and relative entropy by head, in float64, chunk by chunk."""
    config, valid = case.config, case.batch.mask
    intermediates = expected() if case is CASE else JaxSubject().intermediates(case)
    q, k = (intermediates[f"layers.0.{name}"].astype(np.float64) for name in "qk")
    segments, (B, L) = case.batch.segments, valid.shape
    positions = np.broadcast_to(np.arange(L), (B, L))
    if segments is not None:
        positions = document_positions(segments)
    angle = positions[..., None] * config.effective_rope_base ** (
        -np.arange(config.head_dim // 2) / (config.head_dim // 2)
    )
    turn = np.exp(1j * angle)[:, :, None]
    half = config.head_dim // 2
    q, k = ((x[..., :half] + 1j * x[..., half:]) * turn for x in (q, k))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k.conj()).real
    largest = np.zeros(config.num_heads)
    entropies, shares = [], []
    for b in range(B):
        for t in range(L):
            start = t - positions[b, t] % config.chunk_size
            keys = [j for j in range(start, t + 1) if valid[b, j]]
            if not valid[b, t]:
                continue
            row = scores[b, :, t, keys].T
            largest = np.maximum(largest, np.abs(row).max(axis=1))
            weights = np.exp(row - row.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            entropy = -np.sum(weights * np.log(weights), axis=1)
            entropies.append(entropy)
            if len(keys) > 1:
                shares.append(entropy / np.log(len(keys)))
    return largest, np.mean(entropies, axis=0), np.mean(shares, axis=0)


@pytest.mark.parametrize("case", [CASE, PADDED, PACKED], ids=["whole", "padded", "packed"])
def test_heads_agree_with_a_loop_over_queries(case: Case) -> None:
    model = JaxSubject().load(case)

    def found(model: object, name: str) -> np.ndarray:
        (heads,) = measure_heads(model, case.batch.ids, case.batch.mask, case.batch.segments)
        return getattr(heads, name)

    # A logit is a sum over a head, a weight one over keys, and a mean one over tokens, besides some
    # functions of each. Weights and entropies move with logits, relative to what these are.
    config, expected = case.config, by_hand(case)
    terms = config.head_dim + config.chunk_size + case.batch.ids.size + 16
    sums = roundoff(terms) * max(1.0, expected[0].max())
    for name, value in zip(("largest", "entropy", "relative"), expected, strict=True):
        # Queries and keys are of two programs.
        bound = sums + rounding_bound(found, model, name)
        assert rel_l2(found(model, name), value) <= bound, name


def test_a_rounded_logit_moves_a_weight_by_no_more_than_is_said() -> None:
    rng = np.random.default_rng(0)
    logits = rng.uniform(1, 200, 5000)
    for fmt in ("bfloat16", "float16"):
        rounded = logits.astype(fmt).astype(np.float64)
        moved = np.abs(np.expm1(rounded - logits))
        bound = np.array([weight_error(x, fmt) for x in logits])
        assert np.all(moved <= bound)
        assert np.max(moved / bound) > 0.9
    assert weight_error(1e5, "float16") == np.inf


def of(largest: float, relative: float, entropy: float = 1.0) -> dict[str, Severity]:
    heads = Heads(*(np.array([x], np.float32) for x in (largest, entropy, relative)))
    return {f.metric: f.severity for f in attention_findings((heads,))}


def test_large_logits_and_collapsed_heads_are_found() -> None:
    assert set(of(1.0, 0.5).values()) == {Severity.OK}
    threshold = 32.0  # spacing 2^-2 above: half of it moves a weight by 13 %
    assert weight_error(threshold / 2, "bfloat16") < WEIGHT_ERROR
    assert weight_error(threshold, "bfloat16") > WEIGHT_ERROR
    assert of(threshold, 0.5)["weight_error_bfloat16"] is Severity.WARNING
    assert of(1e5, 0.5)["weight_error_float16"] is Severity.NOTE
    assert of(1.0, PEAKED / 2)["relative_entropy"] is Severity.WARNING
    assert of(1.0, 1.0)["relative_entropy"] is Severity.NOTE
    assert of(np.inf, np.nan, np.nan) == {
        "weight_error_bfloat16": Severity.ERROR,
        "weight_error_float16": Severity.NOTE,
        "relative_entropy": Severity.ERROR,
    }


def test_grown_query_gains_are_found_in_a_real_model() -> None:
    name = "model.layers.0.attn.gamma"
    grown = replace_leaves(model(), {name: named_leaves(model())[name] + 60.0})
    findings = attention_findings(measure_heads(grown, CASE.batch.ids))
    assert any(f.metric == "weight_error_bfloat16" and f.remedy for f in findings)
    assert any("single key" in f.message or f.severity is Severity.WARNING for f in findings)


@pytest.mark.parametrize("ids", [np.zeros(3, np.int32), np.zeros((2, 3), np.float32)])
def test_wrong_ids_are_refused_in_words(ids) -> None:
    for measure in (measure_heads, measure_ranges):
        with pytest.raises(ValueError, match=r"expected integers \(B, L\)"):
            measure(model(), ids)
    with pytest.raises(ValueError, match=r"labels have shape \(2, 4\)"):
        measure_ranges(model(), np.ones((2, 5), np.int32), labels=np.ones((2, 4), np.int32))
    for measure in (measure_heads, measure_ranges):
        with pytest.raises(ValueError, match=r"segment_ids are int32 \(2, 4\), expected integers"):
            measure(model(), np.ones((2, 5), np.int32), segment_ids=np.ones((2, 4), np.int32))
