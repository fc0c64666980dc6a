"""Metrics and rows of a few numbers, each worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.constants import is_constant, without_constants
from parity.engine.measure.contract import Breaches, ContractLine, Gate
from parity.engine.measure.deviation import Deviations
from parity.engine.measure.localize import Stage, first_divergence
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.metrics import (
    SMALL,
    log_softmax,
    logit_metrics,
    relative_l2,
    tensor_metrics,
    top1_flips,
)
from parity.engine.measure.quantity import kind_of, stage_kind
from parity.engine.pairing.alignment import _evidence
from parity.engine.pairing.closeness import MASKED, closeness, distance
from parity.engine.pairing.conventions import nearness
from parity.engine.pairing.fingerprints import fingerprint
from parity.engine.pairing.resemblance import SMALL as FEW
from parity.engine.pairing.resemblance import straight_line
from parity.engine.programs.operations import SMALLEST_MASK, _is_mask
from parity.port.rounding_floors import PortBounds
from parity.port_tolerances import PortEdge
from tests.reports.nights import measurement


def test_elements_are_apart_in_absolute_and_relative_terms_and_in_units():
    """The root mean square of the truth is 2, so that an element below 0.002 counts as small."""
    e = np.array([-4.0, 0.0, 0.0, 0.0])
    assert math.sqrt(np.mean(e**2)) == 2.0
    a = e + np.array([2.0, SMALL, 0.0, 0.0])
    found = tensor_metrics(a, e, "float32")
    assert found["max_abs"] == 2.0 and found["max_rel"] == pytest.approx(0.5)
    # Against 2 SMALL, not against 0.
    found = tensor_metrics(e + np.array([0.0, -3 * SMALL, 0.0, 0.0]), e, "float32")
    assert found["max_rel"] == pytest.approx(1.5)
    e = np.full(200, 1.5)
    a = e.copy()
    units = float(np.spacing(np.float32(1.5)))
    a[:100], a[-1] = 1.5 - 2 * units, 1.5 + 8 * units
    found = tensor_metrics(a, e, "float32")
    assert (found["ulp_p50"], found["ulp_p99"], found["ulp_max"]) == (2.0, 2.0, 8.0)
    assert found["cosine"] == pytest.approx(1.0)
    right = tensor_metrics(np.array([1.0, 0.0]), np.array([1.0, 1.0]), "float32")
    assert right["cosine"] == pytest.approx(math.sqrt(0.5))
    nothing = tensor_metrics(np.empty(0), np.empty(0), "float32")
    assert (nothing["max_abs"], nothing["max_rel"]) == (0.0, 0.0)
    assert math.isnan(nothing["cosine"]) and len(nothing) == 3


def test_a_distance_is_relative_to_the_second_array_or_to_a_scale():
    a, e = np.array([3.0, 5.0]), np.array([3.0, 4.0])
    assert relative_l2(a, e) == 1 / 5 and relative_l2(a, e, 10.0) == 1 / 10
    assert relative_l2(a, np.zeros(2)) == math.hypot(3, 5)
    assert relative_l2(a, e, 0.0) == 1.0


def test_logits_are_compared_as_what_a_reader_makes_of_them():
    """Probabilities of 1/4 and 3/4 against 1/2 and 1/2, of the first of two tokens."""
    e = np.log(np.array([[0.25, 0.75], [0.5, 0.5]]))
    a = np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    found = logit_metrics(a, e, np.array([1, -100]))
    assert found["kl_max"] == pytest.approx(kl) and found["kl_p50"] == pytest.approx(kl / 2)
    assert found["kl_p99"] == pytest.approx(0.99 * kl)
    assert found["nll_difference"] == pytest.approx(math.log(1.5))
    # Both tokens of two are among the ten most likely; the first is another than the truth's.
    assert found["topk_jaccard"] == 1.0 and found["top1_agreement"] == 0.5
    assert logit_metrics(a, e, np.array([-100, -100]))["nll_difference"] == 0.0
    # Of one token nothing else is ever the most likely.
    assert top1_flips(a[:, :1], e[:, 1:], 0.0) == 0.0
    assert np.exp(log_softmax(1e3 + np.log([1.0, 3.0]))) == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize(
    ("values", "constant"),
    [
        ([], True),
        ([np.inf, np.nan], True),
        ([2.0, 2.0], True),
        ([2.0, np.inf, 2.0], True),
        ([2.0, np.inf], True),
        ([2.0, 3.0], False),
        ([0.0], True),
        # A single number, such as a loss, is something.
        ([2.0], False),
    ],
)
def test_an_array_of_one_value_says_nothing(values, constant):
    assert is_constant(np.array(values)) is constant


def test_agreement_of_two_constants_is_a_note_and_their_difference_still_fails():
    rows = [
        measurement(quantity="same"),
        measurement(quantity="other", verdict=Verdict.FAIL),
        measurement(quantity="varies"),
        measurement(quantity="unknown"),
        measurement(quantity="zero"),
    ]
    two, some = np.full(2, 2.0), np.arange(2.0)
    one = {"same": two, "other": two, "varies": two, "zero": np.full(2, -0.0)}
    other = {"same": two, "other": 2 * two, "varies": some, "zero": np.zeros(2), "unknown": two}
    same, *kept, zero = without_constants(rows, one, other)
    assert kept == rows[1:-1]
    assert (same.verdict, same.note) == (
        Verdict.INFO,
        "nothing compared: 2 everywhere on both sides",
    )
    assert math.isnan(same.tolerance) and zero.note.startswith("nothing compared: 0 everywhere")
    # Either way round.
    assert without_constants(rows, other, one)[1:4] == rows[1:4]
    # Only what passed: what was not compared for another reason keeps it, and so does a fact.
    kept = [replace(rows[0], verdict=v) for v in Verdict if v is not Verdict.PASS]
    assert len(kept) == 3 and without_constants(kept, one, one) == kept


def compared(scales=None, **changes):
    work = Work("port", "hash", ("first", "second"), suite="suite")
    edge = PortEdge.PORT32_ORIGINAL32
    bounds = PortBounds({edge: {"first": 0.5, "second": 0.5}})
    options = {"kinds": stage_kind, "scales": scales or {}} | changes
    return Comparison(work, edge, bounds, "float32", "gpu", **options)


def test_rows_come_in_the_order_of_work_and_say_which_work_it_is():
    x = np.array([3.0, 4.0], np.float32)
    some = {"new": x, "second": x, "first": x}
    rows = [m for m in compared().run(some, some) if m.metric == "rel_l2"]
    assert [(m.quantity, m.stage) for m in rows] == [("first", 0), ("second", 1), ("new", -1)]
    assert {(m.case, m.edge, m.dtype, m.device, m.suite) for m in rows} == {
        ("port", "port32:original32", "float32", "gpu", "suite")
    }
    assert len({m.identity for m in rows}) == 3
    again = [m for m in compared().run(some, some) if m.metric == "rel_l2"]
    assert [m.identity for m in again] == [m.identity for m in rows]


def test_an_error_is_relative_to_its_scale():
    x = np.array([3.0, 4.0], np.float32)
    moved = {"first": x + np.array([0, 1], np.float32)}
    [plain, *_] = compared().run(moved, {"first": x})
    [scaled, *_] = compared({"first": 2.0}).run(moved, {"first": x})
    assert (plain.value, scaled.value) == (0.2, 0.5)
    assert plain.tolerance == scaled.tolerance == 12 * 0.5


def test_a_sentence_counts_what_was_not_measured():
    """A line with as many gates as planned has others: at least one is missing."""
    line = ContractLine("s", "case", "edge", "block", 5, "digest")
    found = Breaches(missing=((line, 2), (line, 5)))
    assert "at least 4 planned gates were not measured, first: block gates of" in found.sentence()
    assert found.sentence().endswith("2 of 5")
    assert "at least 1 planned gate was" in Breaches(missing=((line, 5),)).sentence()
    gates = tuple(Gate("s", f"case {n}", "edge", "block", "q") for n in (1, 2))
    twice = Breaches(doubled=gates, unplanned=gates[1:]).sentence()
    assert twice == (
        "2 gates measured more than once, first: q (rel_l2) of case case 1 (edge); "
        "1 gate not in the contract, first: q (rel_l2) of case case 2 (edge)"
    )
    assert Breaches().sentence() == "" and Kind.BLOCK == "block"


def test_stages_are_apart_relative_to_the_original_without_masks():
    """A mask is of the size named or beyond; equal ones are no difference, others are."""
    x, y = np.array([MASKED, 3.0, -2 * MASKED, 4.0]), np.array([MASKED, 3.0, -2 * MASKED, 6.0])
    assert distance(y, x) == 2 / 5
    assert distance(x, y) == pytest.approx(2 / math.hypot(3, 6))
    assert distance(np.array([MASKED, 0.0]), np.zeros(2)) == MASKED
    assert distance(np.array([np.inf, 5.0]), np.array([np.inf, 4.0])) == 1 / 4
    for bad in (np.inf, -np.inf, np.nan):
        assert math.isnan(distance(np.array([bad, 5.0]), np.array([1.0, 4.0])))
    assert math.isnan(distance(np.array([np.nan]), np.array([np.nan])))
    assert distance(np.array([2.0]), np.array([0.0])) == 2.0
    # Of every two of one size at once, and in the layout that is nearest.
    found = closeness([x, x[1::2]], [y, x.reshape(2, 2).T, y[1::2]])
    assert found.distance[0] == pytest.approx([2 / 5, 0.0, math.inf])
    assert found.distance[1].tolist() == [math.inf, math.inf, pytest.approx(2 / 5)]
    assert found.layouts[0, 1](x).tolist() == x.reshape(2, 2).T.tolist()
    assert [side.tolist() for side in found.telling] == [[True, False], [True, True, False]]


def test_evidence_is_a_quarter_for_each_digit_that_agrees_and_for_names():
    apart = np.array([2.0, 1.0, 0.1, 0.01, 1e-4, 0.0, 0.1])
    telling = np.array([True] * 6 + [False])
    found = _evidence(np.full(7, 0.5), apart, telling)
    assert found == pytest.approx([0.5, 0.5, 0.75, 1.0, 1.5, 1.5, 0.5])


@pytest.mark.parametrize(
    ("source", "target", "near"),
    [
        ((2, 3), (3, 2), 1.0),
        ((2, 1, 3), (3, 2), 1.0),
        ((6,), (2, 3), 0.5),
        # Of so many axes no permutation is tried: only that one side is a vector tells.
        ((128,), (2,) * 7, 0.5),
        ((2, 3), (1, 6), 0.5),
        ((4, 6), (4, 2, 3), 0.5),
        ((2, 3), (7,), -math.inf),
        ((4, 9), (6, 6), -math.inf),
    ],
)
def test_shapes_are_near_that_permute_merge_or_split_axes(source, target, near):
    assert nearness(source, target) == near


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        # Stages come before what has none, such as the loss, and failures before what was not
        # compared, wherever they stand.
        (((-1, "fail"), (1, "fail"), (0, "fail"), (2, "fail")), 2),
        (((-1, "fail"), (1, "fail")), 1),
        (((0, "not comparable"), (3, "fail"), (-1, "fail")), 1),
        (((2, "not comparable"), (1, "not comparable"), (0, "pass")), 1),
        (((0, "pass"), (1, "info")), None),
        # The first that was measured of two at one stage.
        (((1, "fail"), (1, "fail")), 0),
        ((), None),
    ],
)
def test_a_divergence_is_the_earliest_stage_that_failed(rows, first):
    made = [
        measurement(stage=at, verdict=Verdict(word), quantity=f"q{i}")
        for i, (at, word) in enumerate(rows)
    ]
    found = first_divergence(made)
    assert found == (None if first is None else made[first])


def test_an_error_is_amplified_by_what_it_became_over_what_it_was_fed():
    assert Stage("x", 6.0, 2.0, 2.0).amplification == 3.0
    assert all(Stage("x", free, 0.0, 2.0).amplification == math.inf for free in (1.0, math.nan))
    assert math.isnan(Stage("x", 0.0, 0.0, 2.0).amplification)
    # At its tolerance a stage is right, and not a number is wrong.
    assert not Stage("x", 0.0, 2.0, 2.0).broken
    assert all(Stage("x", 0.0, forced, 2.0).broken for forced in (2.5, math.nan, math.inf))


def test_a_fingerprint_is_of_the_values_in_any_order_and_of_nothing_else():
    x = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    prints = {fingerprint(each) for each in (x, x.T, x[::-1], x.astype(np.float64), x.reshape(-1))}
    assert len(prints) == 1
    other = x.copy()
    other[3, 4] = np.nextafter(other[3, 4], np.float32(9))
    assert len({fingerprint(each) for each in (x, other, 2 * x, x[1:], np.append(x, x[0]))}) == 5
    assert fingerprint(np.array([0.0, 1.0])) == fingerprint(np.array([1.0, -0.0]))


def test_a_straight_line_is_a_factor_and_a_summand_other_than_1_and_0():
    x = np.random.default_rng(1).standard_normal(FEW + 1)
    assert straight_line(x, 3 * x + 2) == pytest.approx((3.0, 2.0))
    assert straight_line(x, 1 * x + 2) == pytest.approx((1.0, 2.0))
    assert straight_line(x, 3 * x) == (pytest.approx(3.0), 0.0)
    assert straight_line(x, x) is None and straight_line(x, 0 * x + 2) is None
    # So few numbers lie on a line by chance.
    assert straight_line(x[1:], 3 * x[1:]) is None
    bent = 3 * x
    bent[0] += 1
    assert straight_line(x, bent) is None
    assert straight_line(x, np.where(x == x[0], np.nan, 3 * x)) is None
    assert straight_line(0 * x + 1, 0 * x + 2) is None


@pytest.mark.parametrize(
    ("size", "values", "mask"), [(0, 2, True), (-1, 2, False), (0, 3, False), (9, 1, False)]
)
def test_a_mask_has_two_values_and_enough_elements(size, values, mask):
    assert _is_mask(np.arange(SMALLEST_MASK + size) % values) == mask


@pytest.mark.parametrize(
    ("dtype", "verdict"), [("float32", Verdict.INFO), ("float64", Verdict.NOT_COMPARABLE)]
)
def test_a_bound_as_large_as_the_numbers_proves_nothing(dtype: str, verdict: Verdict):
    at = replace(compared(largest_bound=1.0), dtype=dtype)
    row = at.gate("first", "rel_l2", 0.25, 1.0)
    note = "not measured: rounding alone may change it by 100% of its norm"
    assert (row.verdict, row.note, row.value) == (verdict, note, 0.25)
    assert at.gate("first", "rel_l2_pooled", 0.25, 1.5).verdict is verdict
    # Below it, and of what is not relative to the numbers, a bound is one; and NaN always fails.
    assert at.gate("first", "rel_l2", 0.25, 0.5).verdict is Verdict.PASS
    assert at.gate("first", "rel_l2", 0.75, 0.5).verdict is Verdict.FAIL
    assert at.gate("first", "ulp_max", 1.5, 2.0).verdict is Verdict.PASS
    assert at.gate("first", "ulp_max", 2.5, 2.0).verdict is Verdict.FAIL
    assert at.gate("first", "rel_l2", math.nan, 1.0).verdict is Verdict.FAIL


def test_what_is_no_number_has_no_facts():
    x = np.array([3.0, math.nan], np.float32)
    [row] = compared().run({"first": x}, {"first": np.array([3.0, 4.0])})
    assert row.verdict is Verdict.FAIL and math.isnan(row.value)


def test_a_tensor_is_described_if_it_fails_and_not_if_nothing_was_compared():
    told = []
    at = compared(on_failure=lambda m, *_: told.append(m.quantity))
    x = {"first": np.ones(2, np.float32), "unknown": np.ones(2, np.float32)}
    rows = at.run(x, {name: 100 * value for name, value in x.items()})
    gates = {m.quantity: m.verdict for m in rows if m.metric == "rel_l2"}
    assert gates == {"first": Verdict.PASS, "unknown": Verdict.NOT_COMPARABLE} and told == []
    at.run({name: 100 * value for name, value in x.items()}, x)
    assert told == ["first"]


@pytest.mark.parametrize(("shape", "tokens"), [((), 0), ((3,), 1), ((2, 3), 2)])
def test_logits_choose_a_token_for_each_row_of_their_last_axis(shape, tokens: int):
    """Of no axis, none."""
    right = np.broadcast_to([0.0, 1.0, 2.0], shape) if shape else np.asarray(2.0)
    left = np.asarray(right[..., ::-1] if shape else right, np.float32)
    floors = PortBounds({PortEdge.PORT32_ORIGINAL32: {"logits": 0.01}})
    rows = replace(compared(), floors=floors).run({"logits": left}, {"logits": right})
    assert [m.value for m in rows if m.metric == "top1_flips"] == [tokens] * bool(shape)


def test_labels_are_those_of_the_valid_positions():
    """Padding first: without a selection, labels would be those of other positions."""
    valid = np.array([[False, True, True]])
    e = np.log(np.array([[[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]]))
    a = np.log(np.array([[[0.9, 0.1], [0.5, 0.5], [0.25, 0.75]]])).astype(np.float32)
    plain = compared(only_valid=True)
    work = replace(plain.work, valid=valid, targets=np.array([[0, 1, 0]]))
    rows = replace(plain, work=work).run({"logits": a}, {"logits": e})
    [found] = [m.value for m in rows if m.metric == "nll_difference"]
    assert found == pytest.approx((math.log(1.5) + math.log(2.0)) / 2)


def test_derivatives_of_intermediates_are_no_gradients_of_parameters():
    x = np.array([3.0, 4.0])
    truth = {"grad/w": x, "bar/first": x}
    off = {"grad/w": x * 1.5, "bar/first": x * 9}
    rows = compared(kinds=kind_of).accuracy(off, {"grad/w": x * 1.25, "bar/first": x}, truth)
    assert [(m.quantity, m.value) for m in rows] == [("grad/*", pytest.approx(2.0))]
    # Which names are intermediates, the comparison says.
    state = {"state/x": x}
    for kinds, names in ((kind_of, []), (stage_kind, ["state/x"])):
        rows = compared(kinds=kinds).accuracy(state, state, state)
        assert [m.quantity for m in rows] == names
    # What the reference does not have is no number.
    [lost] = compared(kinds=kind_of).accuracy(off, {}, {"grad/w": x})
    assert lost.verdict is Verdict.FAIL and math.isnan(lost.value)


def test_bounds_are_asked_for_the_kind_that_a_program_s_names_have():
    """In a user's program `state/x` is an ordinary stage."""
    asked = []

    class Asked(PortBounds):
        def bound(self, edge, kind, work, quantity):
            asked.append(kind)
            return 1.0

        def absolute(self, edge, kind, metric):
            asked.append(kind)
            return 1.0

    x = {"state/x": np.ones(2, np.float32)}
    for kinds, kind in ((stage_kind, Kind.BLOCK), (kind_of, Kind.STATE)):
        at = replace(compared(kinds=kinds), floors=Asked({}))
        rows = [*at.run(x, x), at.judged("state/x", "metric", 0.0)]
        assert asked == [kind, kind] and {m.kind for m in rows} == {kind}
        asked.clear()


@pytest.mark.parametrize(("dtype", "described"), [("bfloat16", 1), ("int32", 0)])
def test_only_tensors_of_floating_point_are_described_in_units(dtype: str, described: int):
    seen = Deviations()
    row = replace(compared(), dtype=dtype).gate("first", "rel_l2", 1.0, 0.5)
    seen(row, np.zeros(2), np.ones(2))
    assert len(list(seen)) == described and seen.seen.total() == 1
