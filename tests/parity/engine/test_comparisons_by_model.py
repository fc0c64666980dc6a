"""Metrics, rows, deviations and alignments against plain models, over drawn arrays."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from parity.engine.measure import deviation
from parity.engine.measure.bounds import FORWARD, NoiseFloors, Rule, bound_from
from parity.engine.measure.compare import METRICS_VERSION, Comparison, Work
from parity.engine.measure.contract import ContractLine
from parity.engine.measure.deviation import HIGH, LOW, Deviations, Shape, histogram, worst_elements
from parity.engine.measure.edge import Edge
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.metrics import (
    IGNORED,
    SMALL,
    TOP_K,
    disagreement,
    logit_metrics,
    relative_l2,
    tensor_metrics,
    top1_flips,
    ulp,
    without_shared_infinities,
)
from parity.engine.measure.rounding_noise import (
    SEEDS as NOISE_SEEDS,
)
from parity.engine.measure.rounding_noise import (
    UNIT_ROUNDOFF,
    floors,
    moved,
    responses,
    row_blocks,
    summed,
)
from parity.engine.measure.where import Axis
from parity.engine.pairing.alignment import HORIZON, _share, align, best_in_order
from parity.engine.pairing.closeness import EQUAL
from parity.engine.pairing.constructions import (
    Construction,
    Part,
    Piece,
    copied,
    cut,
    laid_out,
    whole,
)
from parity.engine.pairing.converter import converter_source
from parity.engine.pairing.fingerprints import sample_positions
from parity.engine.pairing.layouts import Layout, Near, identity, same_values, transposition
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.resemblance import straight_line
from parity.engine.pairing.stage_pairs import (
    AlignedBy,
    Alignment,
    AlignmentError,
    Pin,
    _nearest_names,
    check_pins,
)
from parity.engine.pairing.stage_pairs import Pair as StagePair
from parity.engine.programs.explanation import Explanation
from parity.engine.programs.marks import Branches, MarkChange, Marks, in_turn, of_turns
from parity.engine.programs.rounding import SPAN, STEP, TURN, Signs, _table_units, is_short, pool
from tests.helpers import roundoff


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


SEEDS = range(6)
SLACK = roundoff(4096, np.float64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_metrics_of_a_tensor(seed: int, dtype: str):
    rng = np.random.default_rng(seed)
    e = draw(3, 7, seed=seed) * 10.0 ** rng.integers(-6, 3, (3, 7))
    e[0, seed] = 1e-30
    a = e + draw(3, 7, seed=seed + 50) * 1e-3
    found = tensor_metrics(a, e, dtype)
    apart = [abs(x - y) for x, y in zip(a.flat, e.flat, strict=True)]
    size = math.sqrt(sum(y * y for y in e.flat) / e.size)
    info = ml_dtypes.finfo(dtype)

    def gap(x: float) -> float:
        """One unit in the last place: of the power of 2 below, and no less than a subnormal."""
        least = float(info.smallest_normal)
        power = 2.0 ** math.floor(math.log2(abs(x))) if abs(x) > least else least
        return power * float(info.eps)

    units = sorted(d / gap(y) for d, y in zip(apart, e.flat, strict=True))

    def percentile(q: float) -> float:
        place = q * (len(units) - 1)
        low = math.floor(place)
        high = min(low + 1, len(units) - 1)
        return units[low] + (place - low) * (units[high] - units[low])

    assert list(found) == ["max_abs", "max_rel", "ulp_p50", "ulp_p99", "ulp_max", "cosine"]
    assert found["max_abs"] == max(apart)
    assert found["max_rel"] == pytest.approx(
        max(d / max(abs(y), SMALL * size) for d, y in zip(apart, e.flat, strict=True)), rel=SLACK
    )
    expected = [percentile(0.5), percentile(0.99), units[-1]]
    assert [found[n] for n in ("ulp_p50", "ulp_p99", "ulp_max")] == pytest.approx(
        expected, rel=SLACK
    )
    dot = sum(x * y for x, y in zip(a.flat, e.flat, strict=True))
    norms = math.sqrt(sum(x * x for x in a.flat) * sum(y * y for y in e.flat))
    assert found["cosine"] == pytest.approx(dot / norms, rel=SLACK)
    zero = tensor_metrics(np.zeros(3), np.zeros(3), dtype)
    assert zero["max_rel"] == zero["ulp_max"] == 0.0 and math.isnan(zero["cosine"])
    assert math.isnan(tensor_metrics(a, np.zeros_like(e), dtype)["cosine"])
    assert tensor_metrics(a, np.zeros_like(e), dtype)["max_rel"] == 0.0
    for x in (1.0, -1.5, 3.0, 1e-45):
        assert float(ulp(np.asarray(x), dtype)) == gap(x)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("vocabulary", [2, 5, TOP_K, 23])
def test_metrics_of_logits(seed: int, vocabulary: int):
    e = draw(2, 4, vocabulary, seed=seed) * 3
    a = e + draw(2, 4, vocabulary, seed=seed + 70)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocabulary, (2, 4))
    labels[0, 1] = IGNORED
    found = logit_metrics(a, e, labels)
    kl, agree, jaccard, nll = [], [], [], []
    k = min(TOP_K, vocabulary)
    for x, y, label in zip(a.reshape(8, -1), e.reshape(8, -1), labels.flat, strict=True):
        p, q = np.exp(x) / np.exp(x).sum(), np.exp(y) / np.exp(y).sum()
        kl.append(sum(b * math.log(b / c) for b, c in zip(q, p, strict=True)))
        agree.append(np.argmax(p) == np.argmax(q))
        best = [set(np.argsort(-z)[:k].tolist()) for z in (x, y)]
        jaccard.append(len(best[0] & best[1]) / len(best[0] | best[1]))
        if label != IGNORED:
            nll.append(math.log(q[label] / p[label]))
    expected = {
        "kl_p50": np.percentile(kl, 50),
        "kl_p99": np.percentile(kl, 99),
        "kl_max": max(kl),
        "top1_agreement": np.mean(agree),
        "topk_jaccard": np.mean(jaccard),
        "nll_difference": np.mean(nll),
    }
    # Terms of a divergence cancel, so its rounding error is relative to them and not to the sum.
    assert found == pytest.approx(expected, rel=0, abs=SLACK) and list(found) == list(expected)
    assert logit_metrics(a, e, np.full((2, 4), IGNORED))["nll_difference"] == 0.0
    bound = 0.3
    flips = 0
    for x, y in zip(a.reshape(8, -1), e.reshape(8, -1), strict=True):
        best, second = sorted(y, reverse=True)[:2]
        clear = best - second > math.sqrt(2) * bound * math.sqrt(sum(z * z for z in y))
        flips += bool(np.argmax(x) != np.argmax(y) and clear)
    assert top1_flips(a, e, bound) == flips
    assert top1_flips(a[..., :1], e[..., :1], 0.0) == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_texts_part_where_the_first_row_does(seed: int):
    rng = np.random.default_rng(seed)
    a, e = rng.integers(0, 2, (2, 3, 6))
    a[0] = e[0]
    left = max(
        6 - next((t for t in range(6) if x[t] != y[t]), 6) for x, y in zip(a, e, strict=True)
    )
    assert disagreement(a, e) == left and disagreement(e, e) == 0.0
    assert disagreement(np.zeros((0, 4)), np.zeros((0, 4))) == 0.0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_on_either_side_is_at_no_distance(bad: float):
    x, y = np.ones(2), np.array([1.0, bad])
    for pair in ((x, y), (y, x), (y, y)):
        assert math.isnan(relative_l2(*pair)) and math.isnan(relative_l2(*pair, 2.0))


def test_a_relative_distance_has_a_scale():
    a, e = draw(3, 4), draw(3, 4, seed=1)
    apart = math.sqrt(sum((x - y) ** 2 for x, y in zip(a.flat, e.flat, strict=True)))
    norm = math.sqrt(sum(y * y for y in e.flat))
    assert relative_l2(a, e) == pytest.approx(apart / norm)
    assert relative_l2(a, e, 4.0) == pytest.approx(apart / 4)
    assert relative_l2(a, e, 0.0) == relative_l2(a - e, np.zeros((3, 4))) == pytest.approx(apart)
    for bad in (math.nan, math.inf):
        wrong = a.copy()
        wrong[1, 1] = bad
        assert math.isnan(relative_l2(wrong, e)) and math.isnan(relative_l2(e, wrong))
        assert math.isnan(relative_l2(wrong, wrong))


@pytest.mark.parametrize("truth", [None, "other"])
def test_infinities_are_shared_by_all_three(truth):
    a = np.array([np.inf, -np.inf, np.inf, np.inf, 1.0, np.nan, np.inf])
    e = np.array([np.inf, -np.inf, -np.inf, 2.0, 1.0, np.nan, np.inf])
    t = None if truth is None else np.array([np.inf, 5.0, np.inf, np.inf, 1.0, 0.0, -np.inf])
    found = without_shared_infinities(a, e, t)
    same = [0, 1, 6] if truth is None else [0]
    for left, right in zip(found, (a, e), strict=True):
        expected = right.copy()
        expected[same] = 0.0
        assert np.array_equal(left, expected, equal_nan=True)
    apart = without_shared_infinities(a, e[:3])
    assert apart[0] is a and apart[1].size == 3
    other = without_shared_infinities(a, e, a[:3])
    assert other[0] is a and other[1] is e
    finite = without_shared_infinities(a[4:5], e[4:5])
    assert finite[0].tolist() == [1.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_histogram_counts_by_powers_of_two(seed: int):
    rng = np.random.default_rng(seed)
    e = draw(60, seed=seed)
    a = e + np.spacing(e.astype(np.float32)) * 2.0 ** rng.integers(-4, 60, 60)
    a[:5] = e[:5]
    a[5], e[6], a[7], e[7] = np.nan, np.inf, np.inf, np.inf
    e[8], a[8] = 1.0, 1.0 + 2.0**-23 * 0.5
    e[9], a[9] = 1.0, 1.0 + 2.0**-23 * 0.500001
    found = histogram(a, e, "float32")
    expected = [0] * (HIGH - LOW + 4)
    for x, y in zip(a, e, strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            expected[-1] += 1
        elif x == y:
            expected[0] += 1
        else:
            level = math.ceil(math.log2(abs(x - y) / float(ulp(np.asarray(y), "float32"))))
            expected[1 + min(max(level, LOW), HIGH + 1) - LOW] += 1
    assert list(found) == expected and sum(found) == 60


@pytest.mark.parametrize("order", ["little", "big"])
def test_bits_are_the_most_significant_first_on_any_machine(monkeypatch, order: str):
    """A machine of the other order has the bytes of a number the other way round."""
    real = deviation.sys.byteorder
    monkeypatch.setattr(deviation, "sys", SimpleNamespace(byteorder=order))
    expected = "3f800001" if order == real else "0100803f"
    assert deviation.bits(1.0 + 2.0**-23, "float32") == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_the_worst_elements_are_sorted_and_placed(seed: int):
    rng = np.random.default_rng(seed)
    e = draw(3, 4, 2, seed=seed)
    a = e + rng.integers(-2, 3, (3, 4, 2))
    a[0, 0, 0] = np.nan
    apart = {i: abs(a[i] - e[i]) for i in np.ndindex(3, 4, 2)}
    apart[0, 0, 0] = math.inf
    order = sorted((i for i in apart if apart[i] > 0), key=lambda i: -apart[i])
    for limit in (0, 1, 5, 99):
        found = worst_elements(a, e, limit)
        assert [w.index for w in found] == order[:limit]
        assert [(w.actual, w.expected) for w in found[1:]] == [(a[i], e[i]) for i in order[1:limit]]
    positions = np.array([[4, 0], [5, 1], [6, 2]])
    moved_ = worst_elements(a, e, 3, positions)
    assert [w.index for w in moved_] == [(*positions[i[0]], *i[1:]) for i in order[:3]]


class Table:
    """Bounds that are a number for every quantity."""

    exact_enough: ClassVar[float] = 1e-3
    unknown: ClassVar[str] = "calibrate this case"

    def __init__(self, bound: float = 1e-6, absolute: float = 0.0) -> None:
        self.numbers = bound, absolute
        self.asked: list[tuple] = []

    def bound(self, edge: Edge, kind: Kind, work: Work, quantity: str) -> float:
        self.asked.append((edge, kind, work.name, quantity))
        return self.numbers[0]

    def absolute(self, edge: Edge, kind: Kind, metric: str) -> float:
        self.asked.append((edge, kind, metric))
        return self.numbers[1]


class SomeEdge(Edge):
    LEFT32_RIGHT64 = "left32:right64"


def comparing(bounds: Table | None = None, **how) -> Comparison:
    work = Work("case", "hash", ("x", "logits", "y"), suite="suite", **how.pop("work", {}))
    return Comparison(work, SomeEdge.LEFT32_RIGHT64, bounds or Table(), "float32", "gpu", **how)


def test_rows_hold_all_that_is_known_of_them():
    bounds = Table(0.5, 2.0)
    right = {n: draw(2, 5, seed=k) for k, n in enumerate(("y", "logits", "z", "grad/w", "x"))}
    left = {n: (x * 1.25).astype(np.float32) for n, x in right.items()}
    labels = np.array([1, IGNORED])
    rows = comparing(bounds, work={"targets": labels}).run(left, right)
    # In the order of the work, then by name; what is no stage has no place.
    assert list(dict.fromkeys(m.quantity for m in rows)) == ["x", "logits", "y", "grad/w", "z"]
    assert {m.quantity: m.stage for m in rows} == {
        "x": 0,
        "logits": 1,
        "y": 2,
        "grad/w": -1,
        "z": -1,
    }
    for m in rows:
        parts = ("hash", "left32:right64", m.quantity, m.metric, METRICS_VERSION, "gpu")
        assert m.identity == hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        assert (m.case, m.suite, m.edge, m.dtype, m.device) == (
            "case", "suite", "left32:right64", "float32", "gpu",
        )  # fmt: skip
    facts = [*tensor_metrics(right["x"], right["x"], "float32")]
    logit = [*logit_metrics(right["x"], right["x"], labels)]
    metrics = {n: [m.metric for m in rows if m.quantity == n] for n in right}
    assert metrics["x"] == metrics["grad/w"] == ["rel_l2", *facts]
    assert metrics["logits"] == ["rel_l2", "top1_flips", *facts, *logit]
    gates = [m for m in rows if m.metric == "rel_l2"]
    assert all(m.value == pytest.approx(0.25) and m.tolerance == 0.5 for m in gates)
    assert {m.verdict for m in gates} == {Verdict.PASS}
    for m in rows:
        if m.metric in (*facts, *logit):
            assert m.verdict is Verdict.INFO and math.isnan(m.tolerance)
    [flips] = [m for m in rows if m.metric == "top1_flips"]
    assert flips.tolerance == 2.0 and (flips.verdict, flips.value) == (Verdict.PASS, 0.0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_facts_are_in_units_of_the_left_side_s_dtype(dtype: str):
    right = {"x": draw(3, 4)}
    left = {"x": (right["x"] * 1.25).astype(np.dtype(dtype))}
    facts = tensor_metrics(left["x"].astype(np.float64), right["x"], dtype)
    rows = replace(comparing(Table(0.5)), dtype=dtype).run(left, right)
    assert {m.metric: m.value for m in rows} == facts | {"rel_l2": rows[0].value}


def test_logits_are_what_the_comparison_takes_for_them():
    """In a user's program a stage may have any name."""
    right = {"logits": draw(2, 5), "x": draw(2, 5, seed=1)}
    left = {n: x.astype(np.float32) for n, x in right.items()}
    kinds = {"logits": Kind.BLOCK, "x": Kind.LOGITS}
    rows = comparing(Table(0.5, 2.0), kinds=kinds.__getitem__).run(left, right)
    assert [m.quantity for m in rows if m.metric == "top1_flips"] == ["x"]


@pytest.mark.parametrize(
    ("left", "right", "note"),
    [
        ({}, {"x": draw(2)}, "missing in left32"),
        ({"x": draw(2).astype(np.float32)}, {}, "missing in right64"),
        ({"x": draw(2).astype(np.float32)}, {"x": draw(3)}, "shape (2,), expected (3,)"),
        ({"x": draw(2)}, {"x": draw(2)}, "dtype float64, expected float32"),
    ],
)
def test_what_is_no_pair_fails_with_its_reason(left, right, note: str):
    [row] = comparing().run(left, right)
    assert (row.verdict, row.note, row.value) == (Verdict.FAIL, note, math.inf)
    assert math.isnan(row.tolerance) and row.metric == "rel_l2"
    [nothing] = comparing().run({}, {})
    assert nothing.quantity == "nothing" and nothing.verdict is Verdict.FAIL


def test_only_valid_positions_of_activations_count():
    valid = np.array([[True, False], [True, True]])
    right = {"x": draw(2, 2, 3), "grad/w": draw(2, 2), "loss": draw(2, 2)}
    left = {n: x.astype(np.float32) for n, x in right.items()}
    left["x"][0, 1] += 1.0
    work = {"valid": valid, "axes": lambda name: (Axis("row"), Axis("step"), Axis("channel"))}
    told = []
    how = {"work": work, "on_failure": lambda *args: told.append(args)}
    rows = {
        m.quantity: m
        for m in comparing(**how, only_valid=True).run(left, right)
        if m.metric == "rel_l2"
    }
    assert {m.verdict for m in rows.values()} == {Verdict.PASS} and not told
    rows = {m.quantity: m for m in comparing(**how).run(left, right) if m.metric == "rel_l2"}
    assert rows["x"].verdict is Verdict.FAIL
    [(row, a, e, taken, shape)] = told
    assert row is rows["x"] and taken is None and np.array_equal(e, right["x"])
    assert np.array_equal(a, left["x"].astype(np.float64)) and a.dtype == np.float64
    assert shape.valid is valid and not shape.compared and len(shape.axes) == 3
    told.clear()
    left["x"][1, 0] += 1.0
    comparing(**how, only_valid=True).run(left, right)
    [(_, a, e, taken, shape)] = told
    assert taken.tolist() == [[0, 0], [1, 0], [1, 1]] and shape.compared
    assert np.array_equal(e, right["x"][valid])
    told.clear()
    left["grad/w"] += 1.0
    comparing(**how, only_valid=True).run(left, right)
    assert told[-1][3] is None or len(told) == 2
    gradient = next(each for each in told if each[0].quantity == "grad/w")
    assert gradient[3] is None and gradient[4].valid is None


def test_scales_and_their_share_of_the_margin():
    """A bound relative to another norm is turned into one relative to the logits themselves."""
    e = np.array([[3.0, 0.0], [0.0, 4.0]])
    a = np.array([[2.9, 3.0], [0.0, 4.0]])
    left, right = {"logits": a.astype(np.float32)}, {"logits": e}

    def flips(bound: float, **how) -> float:
        rows = comparing(Table(bound), **how).run(left, right)
        return next(m.value for m in rows if m.metric == "top1_flips")

    # Margins are 3 and 4 of norms 3 and 4: clear below 1 / sqrt(2).
    assert flips(0.7) == 1.0 and flips(0.71) == 0.0
    assert flips(0.7, scales={"logits": 10.0}) == 0.0
    assert (
        flips(0.35, scales={"logits": 5.0}) == 1.0 and flips(0.35, scales={"logits": 10.2}) == 0.0
    )
    # Logits that are 0 everywhere have no margin: no flip is clear, whatever the norm.
    nothing = comparing(Table(0.5), scales={"logits": 10.0}).run(left, {"logits": 0 * e})
    assert next(m.value for m in nothing if m.metric == "top1_flips") == 0.0
    [row] = [m for m in comparing(Table(math.nan)).run(left, right) if m.metric == "top1_flips"]
    assert row.verdict is Verdict.NOT_COMPARABLE and math.isnan(row.value)
    rows = comparing(scales={"logits": 10.0}).run(left, right)
    apart = math.sqrt(float(np.square(left["logits"].astype(float) - e).sum()))
    assert rows[0].value == pytest.approx(apart / 10)


@pytest.mark.parametrize(
    ("value", "bound", "verdict", "note"),
    [
        (1.0, 1.0, Verdict.PASS, ""),
        (1.0 + 1e-9, 1.0, Verdict.FAIL, ""),
        (math.inf, 1.0, Verdict.FAIL, ""),
        (math.nan, 1.0, Verdict.FAIL, "not a number on at least one side"),
        (0.0, math.nan, Verdict.NOT_COMPARABLE, "not measured, no tolerance: calibrate this case"),
        (0.0, math.inf, Verdict.NOT_COMPARABLE, "not measured, bound inf"),
    ],
)  # fmt: skip
def test_a_gate_is_judged(value: float, bound: float, verdict: Verdict, note: str):
    row = comparing().gate("x", "metric", value, bound)
    assert (row.verdict, row.note, row.metric) == (verdict, note, "metric")
    assert [row.value, row.tolerance] == pytest.approx([value, bound], nan_ok=True)


def test_accuracy_is_our_error_over_theirs():
    truth = {
        n: draw(3, 4, seed=k) for k, n in enumerate(("x", "logits", "loss", "grad/a", "grad/b"))
    }
    off = {"x": (4e-2, 2e-2), "logits": (1e-2, 4e-2), "loss": (1.0, 1.0), "grad/a": (3e-2, 3e-2),
           "grad/b": (4e-2, 1e-2)}  # fmt: skip
    ours, theirs = ({n: truth[n] * (1 + off[n][k]) for n in truth} for k in (0, 1))
    bounds = Table(absolute=3.0)
    rows = comparing(bounds).accuracy(ours, theirs, truth)
    assert [(m.quantity, m.metric) for m in rows] == [
        (n, "error_over_reference") for n in ("x", "logits", "grad/*")
    ]
    mean = [math.sqrt((off["grad/a"][k] ** 2 + off["grad/b"][k] ** 2) / 2) for k in (0, 1)]
    expected = [2.0, 0.25, mean[0] / mean[1]]
    assert [m.value for m in rows] == pytest.approx(expected)
    assert all(m.tolerance == 3.0 and m.verdict is Verdict.PASS for m in rows)
    # Beating what is exact enough means nothing.
    near = {"x": truth["x"] * (1 + 1e-9)}
    [row] = comparing(bounds).accuracy({"x": truth["x"] * (1 + 2e-3)}, near, {"x": truth["x"]})
    assert row.value == pytest.approx(2.0)
    [lost] = comparing(bounds).accuracy({}, near, {"x": truth["x"]})
    assert lost.verdict is Verdict.FAIL and math.isnan(lost.value)


def test_rules_and_floors_make_bounds():
    both = Rule(SomeEdge.LEFT32_RIGHT64, FORWARD, "why", absolute=2.0, noise_factor=3.0)
    other = Rule(SomeEdge.LEFT32_RIGHT64, (Kind.GRADIENT,), "why", metric="m", absolute=5.0)
    assert both.bound == "rel_l2 <= max(2.0e+00, 3 x noise floor)" and other.bound == "m <= 5.0e+00"
    assert (
        Rule(SomeEdge.LEFT32_RIGHT64, FORWARD, "why", noise_factor=2.5).bound
        == "rel_l2 <= 2.5 x noise floor"
    )
    assert Rule(SomeEdge.LEFT32_RIGHT64, FORWARD, "why").bound == "rel_l2 <= 0"
    assert bound_from(both, 1.0) == 3.0 and bound_from(both, 0.5) == 2.0
    assert math.isnan(bound_from(both, math.nan)) and bound_from(other, math.nan) == 5.0
    assert math.isnan(bound_from(None, 1.0))
    measured = {"responses": {"x": [3.0, 4.0]}}
    cases = {"case": {"hash": "hash", **measured}, "stale": {"hash": "old", **measured}}
    later = [replace(row, absolute=9.0, noise_factor=9.0) for row in (other, both)]
    # Of several rules the first decides.
    known = NoiseFloors(cases, (other, both, *later))
    work, stale = Work("case", "hash", ()), Work("stale", "new", ())
    edge = SomeEdge.LEFT32_RIGHT64
    assert known.floor(work, "x") == math.sqrt(12.5) and math.isnan(known.floor(work, "y"))
    assert known.bound(edge, Kind.BLOCK, work, "x") == 3 * math.sqrt(12.5)
    assert math.isnan(known.bound(edge, Kind.GRADIENT, work, "x"))
    assert known.absolute(edge, Kind.GRADIENT, "m") == 5.0
    assert math.isnan(known.absolute(edge, Kind.BLOCK, "m"))
    assert known.responses(stale) == {} and known.responses(Work("none", "", ())) == {}


def test_deviations_describe_a_failing_tensor_whole():
    seen = Deviations()
    e = np.zeros((4, 3)) + np.arange(1.0, 4.0)
    a = e.copy()
    a[2] += 1.0
    valid = np.array([[True, False, True], [True, True, False]])
    axes = (Axis("row"), Axis("step"), Axis("channel"))
    row = comparing().gate("x", "rel_l2", 0.5, 1e-3)
    seen(row, a, e, np.argwhere(valid), Shape(axes, valid, True))
    [found] = seen
    assert found.key == ("case", "left32:right64", "x")
    assert (found.breaking, found.shape, found.dtype) == (3, (4, 3), "float32")
    assert found.where == "row 1, step 0, all channels"
    assert [w.index for w in found.worst] == [(1, 0, 0), (1, 0, 1), (1, 0, 2)]
    assert found.histogram == histogram(a, e, "float32")
    # Not compared at valid positions alone, padding is spoken of.
    assert Shape(axes, valid).where(valid[..., None] & np.ones(3, bool)).endswith("no padding")
    assert Shape().where(np.array([True, False])) == "axis 0: 0"


def test_a_line_of_a_contract_plans_no_gate_unless_it_says_so():
    """Fields that a stored run does not have."""
    line = ContractLine("suite", "case", "edge", "block")
    assert (line.gates, line.digest) == (0, "")
    assert line.group == ("suite", "case", "edge", "block")


@pytest.mark.parametrize("seed", range(10))
def test_the_best_cells_in_order_are_worth_most_together(seed: int):
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    worth = np.where(rng.random((rows, columns)) < 0.4, 0.0, rng.random((rows, columns)))
    cells = [c for c in np.ndindex(rows, columns) if worth[c] > 0]
    best = max(
        sum(worth[c] for c in some)
        for n in range(min(rows, columns) + 1)
        for some in itertools.combinations(cells, n)
        if all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(some))
    )
    found = best_in_order(worth)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(found))
    assert all(worth[c] > 0 for c in found)
    assert sum(worth[c] for c in found) == pytest.approx(best)
    assert best_in_order(np.zeros((0, 3))) == best_in_order(np.zeros((3, 0))) == []


def test_a_share_is_of_the_first_telling_stages():
    telling = np.array([False, *[True] * (HORIZON + 3)])
    agrees = np.zeros(telling.size, bool)
    agrees[1:5] = agrees[-3:] = True
    assert _share(agrees, telling) == 4 / HORIZON
    assert _share(agrees[:4], telling[:4]) == 1.0
    assert _share(agrees, np.zeros_like(telling)) == 0.0


def test_an_alignment_is_written_as_a_table():
    lies = identity((2, 3))
    pairs = (
        StagePair("long.name", "a", lies, AlignedBy.VALUE, 1e-7),
        StagePair("b", "other", transposition((2, 3), (1, 0)), AlignedBy.ORDER, math.nan),
    )
    text = Alignment(pairs, {"c": (3,), "e": (2,)}, {"c": (2, 2), "d": (), "e": (1, 2)}).text()
    assert text.split("\n") == [
        "port stage  original stage  layout             matched by  distance",
        "long.name   a               unchanged          value       1.0e-07",
        "b           other           transposed (1, 0)  order       nan",
        "",
        "only in the port:",
        "  c (2, 2), (3,) on the other side",
        "  d ()",
        "  e (1, 2)",
        "",
        "only in the original:",
        "  c (3,), (2, 2) on the other side",
        "  e (2,)",
    ]
    assert Alignment((), {}, {}).text() == "no stage of the port has a partner"
    made = Alignment(pairs, {"c": (3,)}, {"d": ()}).pins()
    assert made == (
        Pin("long.name", "a", lies), Pin("b", "other", pairs[1].layout),
        Pin("d", None), Pin(None, "c"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ([Pin("x", "nowhere")], "'nowhere' of the original, which has no such stage"),
        ([Pin("nowhere", "a")], "'nowhere' of the port, which has no such stage"),
        ([Pin("x", "a"), Pin("y", "a")], "'a' of the original is pinned twice"),
        ([Pin("x", "a"), Pin("x", None)], "'x' of the port is pinned twice"),
        ([Pin("x", "b")], "expected two stages with equally many elements"),
        ([Pin("empty", "none")], "expected two stages with equally many elements, at least one"),
    ],
)
def test_pins_that_cannot_be_followed(pins, message: str):
    original = {"a": draw(2, 3), "b": draw(4), "none": np.zeros((0, 2))}
    port = {"x": draw(3, 2), "y": draw(6), "empty": np.zeros((0, 2))}
    with pytest.raises(AlignmentError, match=message):
        check_pins(pins, original, port)
    check_pins([Pin("x", "a"), Pin(None, "b"), Pin("y", None)], original, port)


def chain(layers: int, offset: int = 0, wrong: int | None = None, prefix: str = "l"):
    """Stages of layers, each a map of the one before; from `wrong` on other values."""
    x, stages = draw(4, 6), {}
    for n in range(layers):
        x = np.tanh(x @ draw(6, 6, seed=n)) + (0.3 * draw(4, 6, seed=99) if n == wrong else 0.0)
        stages[f"{prefix}.{n + offset}.attn"] = x
        x = x + np.tanh(x @ draw(6, 6, seed=50 + n))
        stages[f"{prefix}.{n + offset}.mlp"] = x
    return stages


@pytest.mark.parametrize("wrong", [None, 0, 2])
@pytest.mark.parametrize("offset", [0, 1])
def test_stages_pair_by_value_up_to_a_bug_and_by_name_behind_it(wrong, offset: int):
    original, port = chain(4), chain(4, offset, wrong, "blocks")
    found = align(original, port)
    partners = {
        f"blocks.{n + offset}.{kind}": f"l.{n}.{kind}" for n in range(4) for kind in ("attn", "mlp")
    }
    assert {p.port: p.original for p in found.pairs} == partners
    for p in found.pairs:
        layer = int(p.port.split(".")[1]) - offset
        right = wrong is None or layer < wrong
        assert (p.by is AlignedBy.VALUE) == right, (p.port, p.by)
        expected = relative_l2(port[p.port], original[p.original])
        assert p.distance == pytest.approx(expected, abs=SLACK)
        assert p.layout == identity((4, 6))
    assert [p.port for p in found.pairs] == list(port)
    assert found.unaligned_original == found.unaligned_port == {}


def test_what_is_left_is_counted_without_what_has_a_partner_in_another_order():
    """Behind a bug, between two pairs, one stage is left on either side: they are one."""
    g, h = draw(4, 6, seed=1), draw(4, 6, seed=2)
    behind = {f"z{n}": draw(4, 6, seed=20 + n) for n in range(6)}
    original = {"a": draw(4, 6), "g": g, "h": h, "left": draw(4, 6, seed=3), **behind}
    port = {"a": draw(4, 6), "h": h, "g": g, "quite": draw(4, 6, seed=4)}
    port |= {name: draw(4, 6, seed=40 + n) for n, name in enumerate(behind)}
    found = align(original, port)
    partners = {p.port: (p.original, p.by) for p in found.pairs}
    assert partners["quite"] == ("left", AlignedBy.ORDER)
    assert partners["g"] == ("g", AlignedBy.VALUE) and partners["h"] == ("h", AlignedBy.VALUE)
    assert all(partners[name] == (name, AlignedBy.NAME) for name in behind)


def test_outputs_pair_with_outputs_whatever_else_has_their_values():
    """The last stage and what is returned are equal; each pairs with its kind."""
    stages = chain(2)
    last = stages["l.1.mlp"]
    original = stages | {"output": last}
    port = {f"p{n}": x for n, x in enumerate(stages.values())} | {"out": last, "extra": draw(9)}
    found = align(original, port, outputs=(["output"], ["out", "extra"]))
    assert {p.port: p.original for p in found.pairs} == {
        "p0": "l.0.attn", "p1": "l.0.mlp", "p2": "l.1.attn", "p3": "l.1.mlp", "out": "output",
    }  # fmt: skip
    assert found.unaligned_port == {"extra": (9,)}
    # A transposed result is another one, also where that changes little.
    even = draw(6, 6, seed=3)
    even = even + even.T + 1e-3 * draw(6, 6, seed=4)
    [turned] = align({"out": even}, {"out": even.T}, outputs=(["out"], ["out"])).pairs
    assert turned.layout.is_identity and turned.by is AlignedBy.ORDER
    assert turned.distance > EQUAL
    # Under one name both sides' results are one result.
    swapped = {"a": draw(4, 6, seed=1), "b": draw(4, 6, seed=2)}
    turned = {"a": swapped["b"], "b": swapped["a"]}
    both = align(swapped, turned, outputs=(["a", "b"], ["a", "b"]))
    assert {p.port: p.original for p in both.pairs} == {"a": "a", "b": "b"}
    free = align(swapped, turned)
    assert {p.port: p.original for p in free.pairs} == {"a": "b", "b": "a"}


@pytest.mark.parametrize("seed", SEEDS)
def test_near_is_a_distance_and_what_is_possible_never_excludes_it(seed: int):
    rng = np.random.default_rng(seed)
    e = draw(6, 8, seed=seed) + seed
    tolerance = float(10.0 ** rng.integers(-9, -1))
    noise = draw(6, 8, seed=seed + 1)
    noise *= tolerance * np.linalg.norm(e) / np.linalg.norm(noise)
    near = Near(tolerance)
    for share in (0.99, 1.01):
        a = e + share * noise
        assert near.agrees(a, e) == (share < 1)
        if share < 1:
            order = rng.permutation(48)
            assert near.possible(a.reshape(-1)[order], e) and near.sampled(a, e)
    # All of an error in one direction is the most that sums and norms may be off by.
    most = e + tolerance * np.linalg.norm(e) / math.sqrt(48)
    assert near.possible(most, e)
    far = e + 50 * tolerance * np.linalg.norm(e) / math.sqrt(48)
    # bound: 50 times a larger tolerance is no small difference any more.
    assert not near.possible(far, e) or tolerance > 1e-3
    # bound: the same.
    assert not near.possible(e * (1 + 50 * tolerance), e) or tolerance > 1e-3
    assert not near.possible(np.full((6, 8), np.nan), e)
    assert Near(tolerance, lambda a, b: 0.0).possible(far, e)
    assert Near(0.01).sampled(1.4 * e, e) and not Near(0.01).sampled(1.6 * e, e)
    assert Near(0.2).sampled(2.5 * e, e) and not Near(0.2).sampled(2.7 * e, e)


def test_a_rounded_value_is_another_one():
    x = np.array([0.1, 0.5])
    assert not same_values(x, x.astype(np.float32)) and not same_values(x.astype(np.float32), x)
    # NumPy compares both as float8, in which 45 becomes 44.
    whole, rounded = np.array([45], np.int8), np.array([44], ml_dtypes.float8_e4m3fn)
    assert not same_values(whole, rounded) and not same_values(rounded, whole)
    assert same_values(whole - 1, rounded)


def test_equal_values_are_equal_in_any_dtype_and_size():
    x = np.arange(700_000, dtype=np.float32).reshape(7, -1)
    y = x.astype(np.float64)
    assert same_values(x, y) and same_values(x, x.copy())
    for place in ((0, 0), (6, 99_999), (3, 5)):
        z = y.copy()
        z[place] += 1
        assert not same_values(x, z)
    z = y.copy()
    z[2, 2] = np.nan
    assert same_values(z, z.copy()) and not same_values(z, y) and not same_values(x, y.reshape(-1))
    assert same_values(np.array(1.0), np.array(1, np.float32))
    assert not same_values(np.array([1.0]), np.array(1.0))


@pytest.mark.parametrize(("size", "count"), [(5, 5), (7, 7), (6, 5), (1000, 48), (3, 9), (0, 3)])
def test_samples_are_spread_sorted_and_different(size: int, count: int):
    found = sample_positions(size, count)
    assert found.tolist() == sorted(set(found.tolist())) and len(found) <= max(count, size)
    assert len(found) == size if size <= count else len(found) >= 0.8 * count
    assert not size or (found.min() >= 0 and found.max() < size)
    if size > count:
        assert np.diff(found).max() <= 3 * size / count + 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_line_goes_through_what_is_not_finite(bad: float):
    x = draw(4, 4)
    y = 2 * x
    for one, other in ((True, False), (False, True), (True, True)):
        left, right = x.copy(), y.copy()
        if one:
            left[1, 2] = bad
        if other:
            right[1, 2] = bad
        assert straight_line(left, right) is None
    assert straight_line(x, y) == pytest.approx((2.0, 0.0))
    assert straight_line(np.ones(9), y.ravel()[:9]) is None
    assert straight_line(x, np.zeros((4, 4))) is None
    assert straight_line(x, x) is None and straight_line(x, x + 1) == pytest.approx((1.0, 1.0))
    assert straight_line(x[:1], 2 * x[:1]) is None
    assert (
        straight_line(x[:1, :4].repeat(2, 1)[:, :5], 2 * x[:1, :4].repeat(2, 1)[:, :5]) is not None
    )


def test_responses_are_relative_by_seed_and_floors_their_root_mean_square():
    exact = {"x": np.array([3.0, 4.0]), "zero": np.zeros(2)}
    seen = []

    def run(rng: np.random.Generator):
        seen.append(rng.random())
        step = float(len(seen))
        return {"x": exact["x"] + np.array([0.0, step]), "zero": np.array([step, 0.0])}

    found = responses(exact, run, 3)
    assert found["x"] == pytest.approx((0.2, 0.4, 0.6)) and found["zero"] == (1.0, 2.0, 3.0)
    assert seen == [np.random.default_rng(n).random() for n in range(3)]
    seen.clear()
    assert floors(exact, run, 2)["x"] == pytest.approx(math.sqrt((0.04 + 0.16) / 2))
    seen.clear()
    assert len(responses(exact, run)["x"]) == len(seen) == NOISE_SEEDS
    floors(exact, run)
    assert len(seen) == 2 * NOISE_SEEDS


@pytest.mark.parametrize("shape", [(), (5,), (7, 3)])
def test_a_moved_array_is_one_roundoff_up_or_down(shape, monkeypatch):
    monkeypatch.setattr("parity.engine.measure.rounding_noise.BLOCK", 6)
    x = np.asarray(draw(*shape)) if shape else np.array(2.5)
    rng = np.random.default_rng(3)
    found = moved(x, rng, 2.0**-10)
    steps = (found / x - 1) * 2**10
    # Product and quotient round by 2**-53 each, which the last factor magnifies.
    assert np.allclose(np.abs(steps), 1.0, rtol=0, atol=2.0**-42) and found.shape == x.shape
    if x.size > 6:
        assert len(np.unique(np.sign(steps))) == 2
    tiny = moved(x, np.random.default_rng(3))
    # The quotient rounds once in float64, 2**-53 against steps of 2**-24.
    assert np.allclose(np.abs(tiny / x - 1), UNIT_ROUNDOFF, rtol=2.0**-27)


def test_blocks_of_rows_cover_each_row_once():
    for shape, elements in (
        ((10, 3), 7),
        ((10, 3), 100),
        ((4, 50), 7),
        ((), 5),
        ((0, 3), 5),
        ((4, 0), 3),
        ((9,), 4),
    ):
        parts = list(row_blocks(shape, elements))
        rows = [r for p in parts for r in range(p.start, p.stop)]
        count = shape[0] if shape else 1
        assert rows == list(range(count))
        width = math.prod(shape[1:])
        assert all((p.stop - p.start) * width <= max(elements, width) for p in parts)
        # As few as that allows.
        step = max(1, elements // max(1, width))
        assert len(parts) == -(-count // step)
    assert summed(1) == UNIT_ROUNDOFF * math.sqrt(1 + 1 / 11)
    assert summed(1100) == UNIT_ROUNDOFF * math.sqrt(101)


def test_both_parts_of_a_complex_number_move_on_their_own(x64):
    signs = Signs(jnp.asarray(pool(0, 32)))
    moves = (np.asarray(signs.moved(jnp.ones(32, jnp.complex128), 0.25)) - 1) / 0.25
    assert set(moves.real) == set(moves.imag) == {-1.0, 1.0}
    assert (moves.real != moves.imag).any() and (moves.real == moves.imag).any()


def test_signs_are_read_in_steps_and_turns_of_their_own(x64):
    signs = Signs(jnp.asarray(pool(0, 10)))
    bits = np.asarray(pool(0, 10)).astype(float)
    assert set(bits) == {-1.0, 1.0} and bits.size == SPAN + 10 and pool(0, 10).dtype == np.int8
    assert not np.array_equal(pool(0, 10), pool(1, 10))
    ones = jnp.ones((2, 3))
    for k in range(3):
        step = np.asarray(signs.moved(ones, 0.25))
        start = (k * STEP) % SPAN
        assert np.array_equal(step, 1 + 0.25 * bits[start : start + 6].reshape(2, 3))
    assert np.array_equal(
        Signs(jnp.asarray(pool(0, 4)), operations=0.0).moved(ones[:, :2], 0.25), ones[:, :2]
    )
    fresh = Signs(jnp.asarray(pool(0, 10)))
    turn = fresh.at(jnp.int32(2))
    assert int(turn.turn) == 3
    start = (3 * TURN) % SPAN
    assert np.array_equal(
        np.asarray(turn.moved(ones, 0.5)), 1 + 0.5 * bits[start : start + 6].reshape(2, 3)
    )
    assert int(turn.at(jnp.int32(0)).turn) == (3 * 10_125 + 1) % SPAN


def test_constants_move_where_they_were_rounded_to_float32(x64):
    bits = np.asarray(pool(2, 9)).astype(float)
    value = np.array([0.1, 0.5, 3.0, -np.inf], np.float32)
    kept = value.astype(np.float64)
    for operations, constants, factor in ((1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 0.0)):
        signs = Signs(jnp.asarray(pool(2, 9)), operations, constants)
        found = np.asarray(signs.constant(value))
        expected = kept.copy()
        expected[0] *= 1 + factor * UNIT_ROUNDOFF * bits[0]
        assert np.array_equal(found, expected) and found.dtype == np.float64
    signs = Signs(jnp.asarray(pool(2, 9)), 1.0, 1.0)
    for same in (np.array([1, 2]), np.array([0.1]), np.array([True])):
        assert signs.constant(same) is same
    short = np.asarray(signs.constant(np.array([0.5, 1.0], np.float32)))
    assert short.tolist() == [0.5, 1.0] and short.dtype == np.float64


@pytest.mark.parametrize(
    ("value", "short"),
    [(0.0, True), (1.0, True), (-1e4, True), (math.inf, True), (-math.inf, True), (4095.0, True),
     (4097.0, False), (2.0**-30, True), (0.1, False), (1e-6, False), (1 + 2.0**-11, True),
     (1 + 2.0**-12, False)],
)  # fmt: skip
def test_numbers_of_twelve_bits_mean_themselves(value: float, short: bool):
    assert bool(is_short(value)) is short


def test_a_table_of_angles_is_off_by_its_position():
    rows = np.arange(5.0)[:, None] * np.array([1.0, 0.1])
    table = np.concatenate([np.cos(rows), np.sin(rows)], axis=-1)
    assert _table_units(table).tolist() == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    heads = _table_units(np.stack([table, table]))
    assert heads.shape == (1, 5, 1) and heads.ravel().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    # Also where a row has more angles than there are rows.
    angles = np.array([[0.0], [3.0]]) * np.array([1.0, 0.9, 1.1])
    short = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    assert _table_units(short).tolist() == [[1.0], [2.0]]
    begun = np.concatenate([table, 0.5 + 0 * table], axis=-1)
    for other in (
        begun,
        table + 1,
        np.abs(table),
        table * 1.5,
        np.where(table < 0, 1.5 * table, table),
        table[1:],
        table[0],
        np.zeros((0, 4)),
    ):
        assert np.all(_table_units(other) == 1.0) and _table_units(other).shape == (1,) * other.ndim


def test_a_change_is_reported_with_its_offset_and_goes_on_with_its_value():
    x = jnp.array([1.0, 2.0])
    assert MarkChange().reported(x) is x and MarkChange().following(x) is x
    added = MarkChange(offset=jnp.array([1.0, 0.0]))
    assert added.reported(x).tolist() == [2.0, 2.0] and added.following(x) is x
    other = MarkChange(True, np.array([7, 8]))
    assert other.following(x).tolist() == [7.0, 8.0] and other.reported(x) is x
    assert other.following(x).dtype == x.dtype
    assert MarkChange(False, np.array([7, 8])).following(x) is x
    assert MarkChange(True, None).following(x) is x
    for on, expected in ((True, [7.0, 8.0]), (False, [1.0, 2.0])):
        traced = MarkChange(jnp.asarray(on), np.array([7.0, 8.0]))
        assert traced.following(x).tolist() == expected


def test_marks_have_names_of_their_own():
    marks = Marks(numbered={"q": "layers.{}.q"})
    names = ["a", "a", "q", "a", "q@3", "b#2", "b", "b"]
    expected = ["a", "a#2", "layers.0.q", "a#3", "layers.1.q", "b#2", "b", "b#3"]
    ahead = marks.next_names(names)
    assert ahead == expected and not marks.names and not marks.counts
    assert [marks.name_of(n) for n in names] == expected
    assert marks.names == set(expected) and marks.counts == {"q": 2}
    inside = marks.within()
    assert inside.name_of("q") == "q#0" and inside.name_of("q") == "q#1" and not inside.once
    once = Marks(once=True)
    once.name_of("a")
    with pytest.raises(ValueError, match="the mark 'a' is passed twice"):
        once.name_of("a")
    assert once.within().once
    assert in_turn("a", 3) == "a@3" and in_turn("a@1@2", 0) == "a@0@1@2"


def test_changes_of_turns_are_stacked():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    found = of_turns(
        [None, MarkChange(True, np.array([[1.0, 2.0]])), MarkChange(offset=np.ones(2))], shape
    )
    assert found.on.tolist() == [False, True, False]
    assert found.value.tolist() == [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    assert found.offset.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert found.value.dtype == jnp.float32
    none = of_turns([None, MarkChange(True)], shape)
    assert none.value is None and none.offset is None and none.on.tolist() == [False, True]


def test_marks_of_branches_are_one_where_name_and_shape_are():
    a, b = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)
    found = Branches.of([{"x": a, "y": a}, {"x": b, "y": a}, {"x": b, "x#2": b}])
    assert found.own == ({"x": "x", "y": "y"}, {"x": "x#2", "y": "y"}, {"x": "x#2", "x#2": "x#2#2"})
    assert {n: s.shape for n, s in found.shapes.items()} == {
        "x": (2,), "y": (2,), "x#2": (3,), "x#2#2": (3,),
    }  # fmt: skip


def converted(
    pairs: list[Pair], original: dict[str, np.ndarray]
) -> tuple[str, dict[str, np.ndarray]]:
    source = converter_source(Matching(tuple(pairs), (), (Unmatched("lost", (2, 3)),)))
    space: dict[str, Callable] = {}
    exec(compile(source, "converter", "exec"), space)
    return source, space["convert"](original)


def stacked(names: list[str], shape: tuple[int, ...]) -> Construction:
    """Return a stack of arrays along a new first axis."""
    total = (len(names), *shape)
    return Construction(
        total,
        tuple(
            Piece(
                n,
                whole(shape),
                Layout(shape, shape, tuple(range(len(shape))), (1, *shape)),
                cut(total, total, 0, i, i + 1),
            )
            for i, n in enumerate(names)
        ),
    )


def joined(names: list[str], shape: tuple[int, int], axis: int, order: list[int] | None = None):
    total = [*shape]
    total[axis] *= len(names)
    total = tuple(total)
    places = order or list(range(len(names)))
    return Construction(
        total,
        tuple(
            Piece(
                n,
                whole(shape),
                identity(shape),
                cut(total, total, axis, k * shape[axis], (k + 1) * shape[axis]),
            )
            for n, k in zip(names, places, strict=True)
        ),
    )


def test_a_converter_makes_what_the_matching_says():
    """Loops, offsets between layers, stacks, concatenations, parts and transpositions."""
    shape = (4, 6)
    original = {
        f"h.{n}.{k}.weight": draw(*shape, seed=10 * n + j)
        for n in range(1, 4)
        for j, k in enumerate("qkv")
    }
    original |= {f"e.{n}.w": draw(*shape, seed=70 + n) for n in (0, 1, 2, 5)} | {
        "table": draw(8, 6)
    }
    turn = transposition(shape, (1, 0))
    pairs = [Pair(f"l.{n}.q", laid_out(f"h.{n + 1}.q.weight", turn), Means.VALUE) for n in range(3)]
    pairs += [
        Pair(
            f"l.{n}.kv",
            joined([f"h.{n + 1}.k.weight", f"h.{n + 1}.v.weight"], shape, 1),
            Means.VALUE,
        )
        for n in range(3)
    ]
    some = Piece("table", cut((8, 6), (8, 6), 0, 2, 6), identity(shape), whole(shape))
    flat = Layout((2, 2, 6), (2, 2, 6), (0, 1, 2), (2, 12))
    seen = Piece("table", cut((8, 6), (2, 4, 6), 1, 1, 3), flat, whole((2, 12)))
    heads = Layout((8, 6), (8, 2, 3), (1, 0, 2), (2, 8, 3))
    first, second = cut((12, 6), (12, 6), 0, 0, 8), cut((12, 6), (12, 6), 0, 8, 12)
    table = Piece("table", whole((8, 6)), identity((8, 6)), first)
    appended = Construction((12, 6), (table, Piece("e.5.w", whole(shape), identity(shape), second)))
    pairs += [
        Pair("experts", stacked([f"e.{n}.w" for n in range(3)], shape), Means.VALUE),
        Pair("odd", stacked([f"e.{n}.w" for n in (0, 2, 5)], shape), Means.VALUE),
        Pair("mixed", stacked(["e.2.w", "e.0.w"], shape), Means.VALUE),
        Pair("reversed", joined(["e.0.w", "e.1.w"], shape, 0, [1, 0]), Means.VALUE),
        Pair("pair", appended, Means.VALUE),
        Pair("part", Construction(shape, (some,)), Means.VALUE),
        Pair("view", Construction((2, 12), (seen,)), Means.VALUE),
        Pair("flat", laid_out("table", Layout((8, 6), (8, 6), (0, 1), (48,))), Means.VALUE),
        Pair("heads", laid_out("table", heads), Means.VALUE),
        Pair("only", copied("table", (8, 6)), Means.VALUE),
        Pair("a.7.x", copied("e.5.w", shape), Means.VALUE),
        Pair("a.9.x", copied("e.1.w", shape), Means.VALUE),
    ]  # fmt: skip
    source, made = converted(pairs, original)
    assert list(made) and set(made) == {pair.port for pair in pairs}
    for pair in pairs:
        expected = pair.construction.from_original(original)
        assert np.array_equal(made[pair.port], expected), pair.port
        assert made[pair.port].shape == pair.construction.shape
    lines = [line.strip() for line in source.split("\n")]
    assert lines.count("for i in range(3):") == 1
    assert 'port[f"l.{i}.q"] = original[f"h.{i + 1}.q.weight"].T' in lines
    at = lines.index('port[f"l.{i}.kv"] = np.concatenate([')
    assert lines[at + 1 : at + 4] == [
        'original[f"h.{i + 1}.k.weight"],', 'original[f"h.{i + 1}.v.weight"],', "], axis=1)"
    ]  # fmt: skip
    # What fits on a line stays on it.
    assert 'port["pair"] = np.concatenate([original["table"], original["e.5.w"]], axis=0)' in lines
    assert 'port["experts"] = np.stack([original[f"e.{n}.w"] for n in range(3)])' in lines
    assert 'port["odd"] = np.stack([original[f"e.{n}.w"] for n in (0, 2, 5)])' in lines
    assert 'port["mixed"] = np.stack([original["e.2.w"], original["e.0.w"]])' in lines
    assert 'port["part"] = original["table"][2:6, :]' in lines
    assert (
        'port["view"] = original["table"].reshape((2, 4, 6))[:, 1:3, :].reshape((2, 12))' in lines
    )
    assert 'port["flat"] = original["table"].reshape((48,))' in lines
    assert 'port["heads"] = original["table"].reshape((8, 2, 3)).transpose((1, 0, 2))' in lines
    assert 'port["only"] = original["table"]' in lines
    assert 'port["a.7.x"] = original["e.5.w"]' in lines
    assert "# lost (2, 3): no parameter of the original is proposed for it" in lines
    assert source.endswith("    return port\n")
    assert max(map(len, source.split("\n"))) <= 110


def test_a_loop_inside_of_a_stack_is_of_one_name_number_and_expression():
    """Whatever differs otherwise is written piece by piece."""
    shape = (3, 3)
    names = ["a.0.w", "b.1.w", "e.0.1.w", "e.1.2.w", "a.1.w"]
    original = {name: draw(*shape, seed=n) for n, name in enumerate(names)}
    turned = stacked(["a.0.w", "a.1.w"], shape)
    first, second = turned.pieces
    turn = Layout(shape, shape, (1, 0), (1, *shape))
    turned = replace(turned, pieces=(first, replace(second, layout=turn)))
    columns = {f"c.{n}.w": draw(3, 1, seed=20 + n) for n in range(3)}
    made = {
        "patterns": stacked(["a.0.w", "b.1.w"], shape),
        "numbers": stacked(["e.0.1.w", "e.1.2.w"], shape),
        "turned": turned,
        # As many columns as rows: side by side, and no stack.
        "columns": joined([*columns], (3, 1), 1),
    }
    pairs = [Pair(port, construction, Means.VALUE) for port, construction in made.items()]
    _, found = converted(pairs, original | columns)
    for port, construction in made.items():
        assert np.array_equal(found[port], construction.from_original(original | columns)), port


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("family", [True, False])
def test_a_long_line_is_valid_source(count, family):
    """Also that of a loop inside of a concatenation, after which there is no comma."""
    numbers = range(count) if family else range(count, 0, -1)
    names = [f"model.decoder.layers.{n}.self_attention.query_projection.weight" for n in numbers]
    original = {name: draw(2, 3, seed=n) for n, name in enumerate(names)}
    pair = Pair("decoder.queries.kernel", joined(names, (2, 3), 1), Means.VALUE)
    source, made = converted([pair], original)
    assert np.array_equal(made[pair.port], pair.construction.from_original(original))
    assert (" for n in range(" in source) == family
    assert max(map(len, source.split("\n"))) <= 110


@pytest.mark.parametrize("view", [(2, 2, 6), (4, 2, 3)])
def test_pieces_that_adjoin_along_no_single_axis_are_written_one_by_one(view):
    """A grid of pieces, in the port's own axes or in a view of them."""
    shape = (4, 6) if view[-1] == 6 else view
    grid = [(i, j) for i in range(view[0]) for j in range(view[1])]
    names = [f"{'abcdefgh'[n]}.w" for n in range(len(grid))]
    pieces = tuple(
        Piece(
            name,
            whole(view[2:]),
            Layout(view[2:], view[2:], (0,), (1, 1, view[2])),
            Part(shape, view, (i, j, 0), (i + 1, j + 1, view[2])),
        )
        for name, (i, j) in zip(names, grid, strict=True)
    )
    original = {name: draw(view[2], seed=n) for n, name in enumerate(names)}
    pair = Pair("grid", Construction(shape, pieces), Means.VALUE)
    source, made = converted([pair], original)
    expected = np.stack([original[name] for name in names]).reshape(shape)
    assert np.array_equal(made["grid"], expected)
    assert (f".reshape({view})[" in source) == (view != shape)


@pytest.mark.parametrize("kind", ["part", "one place", "all places"])
def test_a_view_of_as_many_axes_is_written_too(kind):
    """Six rows of four are a view of four rows of six."""
    shape, view, half = (4, 6), (6, 4), (3, 4)
    top, bottom = (cut(shape, view, 0, start, start + 3) for start in (0, 3))
    piece = Piece("b.w", whole(half), identity(half), top)
    construction = {
        "part": Construction(half, (Piece("a.w", bottom, identity(half), whole(half)),)),
        "one place": Construction(shape, (piece,)),
        "all places": Construction(shape, (piece, replace(piece, parameter="c.w", place=bottom))),
    }[kind]
    original = {"a.w": draw(*shape), "b.w": draw(*half, seed=1), "c.w": draw(*half, seed=2)}
    _, made = converted([Pair("port", construction, Means.VALUE)], original)
    expected = construction.from_original(original)
    assert made["port"].shape == construction.shape
    assert np.array_equal(made["port"], expected) and expected.any()


def test_two_loops_nest_and_a_gap_in_numbers_is_listed():
    original = {f"h.{i}.e.{j}.w": draw(2, 3, seed=10 * i + j) for i in (1, 2) for j in (0, 2, 3)}
    pairs = [
        Pair(
            f"l.{i - 1}.x.{j}.k",
            laid_out(f"h.{i}.e.{j}.w", transposition((2, 3), (1, 0))),
            Means.VALUE,
        )
        for i in (1, 2)
        for j in (0, 2, 3)
    ]
    source, made = converted(pairs, original)
    assert "    for i in range(2):\n        for j in (0, 2, 3):\n            port[" in source
    assert 'port[f"l.{i}.x.{j}.k"] = original[f"h.{i + 1}.e.{j}.w"].T' in source
    for i, j in itertools.product((1, 2), (0, 2, 3)):
        assert np.array_equal(made[f"l.{i - 1}.x.{j}.k"], original[f"h.{i}.e.{j}.w"].T)
    # Numbers of which one is missing are no product of ranges: a line each.
    lone, again = converted(pairs[:-1], original)
    assert "for i in" not in lone and len(again) == 5
    # From 3 on; and downwards, where numbers count the other way, no offset says it.
    high = [Pair(f"l.{n}", copied(f"h.{n - 3}.w", (2,)), Means.VALUE) for n in (3, 4)]
    source, _ = converted(high, {"h.0.w": draw(2), "h.1.w": draw(2)})
    assert "for i in range(3, 5):" in source and 'original[f"h.{i - 3}.w"]' in source
    # In ascending order, whatever the order of the pairs and of a set of these numbers.
    gaps = [Pair(f"l.{n}", copied(f"h.{n}.w", (2,)), Means.VALUE) for n in (16, 8, 33)]
    source, _ = converted(gaps, {f"h.{n}.w": draw(2) for n in (16, 8, 33)})
    assert "for i in (8, 16, 33):" in source
    back = [Pair(f"l.{n}", copied(f"h.{1 - n}.w", (2,)), Means.VALUE) for n in (0, 1)]
    source, _ = converted(back, {"h.0.w": draw(2), "h.1.w": draw(2)})
    assert "for i in" not in source


@pytest.mark.parametrize(
    ("value", "tolerance", "share"),
    [
        (0.0, 0.0, 0.0),
        (1e-30, 0.0, math.inf),
        (3.0, 2.0, 1.5),
        (0.0, 2.0, 0.0),
        (math.inf, 2.0, math.inf),
    ],
)
def test_the_share_of_a_tolerance_of_0_is_none_or_infinite(value, tolerance, share):
    row = replace(comparing().gate("x", "rel_l2", 0.0, 1.0), value=value, tolerance=tolerance)
    assert row.fraction == share
    assert all(math.isnan(replace(row, tolerance=t).fraction) for t in (math.nan, math.inf))


@pytest.mark.parametrize("said", list(Verdict))
@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0, 2.0, math.inf, math.nan])
@pytest.mark.parametrize("tolerance", [1.0, math.nan, math.inf])
def test_a_verdict_that_is_no_failure_is_what_its_numbers_support(said, value, tolerance):
    """What failed stays failed; what passed, or is a fact with a tolerance, is judged again."""
    row = replace(comparing().gate("x", "rel_l2", 0.0, 1.0), verdict=said)
    found = replace(row, value=value, tolerance=tolerance).settled().verdict
    judged = said is Verdict.PASS or (said is Verdict.INFO and not math.isnan(tolerance))
    if not judged:
        assert found is said
    elif not math.isfinite(value):
        assert found is Verdict.FAIL
    elif not math.isfinite(tolerance):
        assert found is Verdict.NOT_COMPARABLE
    else:
        assert found is (Verdict.PASS if 0.0 <= value <= tolerance else Verdict.FAIL)


def test_generated_tokens_are_judged_by_what_is_left_when_they_part():
    e = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    a = e.copy()
    a[1, 2] = 0.0
    for absolute, verdict in ((1.0, Verdict.FAIL), (2.0, Verdict.PASS)):
        [row] = comparing(Table(absolute=absolute)).run({"generated": a}, {"generated": e})
        assert (row.metric, row.value, row.tolerance) == ("disagreement", 2.0, absolute)
        assert row.verdict is verdict and row.kind is Kind.TOKENS


def test_names_that_are_not_listed_are_counted():
    names = dict.fromkeys(f"l.{n}" for n in range(9))
    assert [*_nearest_names("l.3", names, 4)][-1] == "and 5 more"
    assert len([*_nearest_names("l.3", names, 9)]) == 9
    assert next(iter(_nearest_names("l.3", names, 1))) == "l.3"
    # Names that are equally unlike keep their order.
    assert [*_nearest_names("x", dict.fromkeys("cab"), 2)] == ["c", "a", "and 1 more"]


def test_only_a_stage_that_is_wrong_by_itself_is_a_culprit():
    stages = (Stage("a", 1.0, 0.0, 0.5), Stage("b", 1.0, 1.0, 0.5), Stage("c", 0.1, 1.0, 0.5))
    told = Explanation("case", "edge", "b", stages=stages)
    assert told.culprit is stages[1] and told.also_broken == ("c",) and told.carried == 1
    # What is no number in the free run alone came from its inputs too.
    assert replace(told, stages=(*stages, Stage("d", math.nan, 0.0, 0.5))).carried == 2
    # A stage that is no number though its inputs are right is wrong by itself.
    stage = Stage("d", math.nan, math.nan, 0.5)
    lost = replace(told, stages=(*stages, stage))
    assert lost.also_broken == ("c", "d") and lost.carried == 1
    assert replace(lost, quantity="d").culprit is stage
    carried = replace(told, quantity="a")
    assert carried.culprit is None and carried.also_broken == ("b", "c") and not carried.holds
