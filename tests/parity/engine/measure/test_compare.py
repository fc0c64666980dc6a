"""Unknown is never equal, and the metrics say what they mean."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from parity.engine.measure import rounding_noise
from parity.engine.measure.compare import Comparison
from parity.engine.measure.edge import Edge
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.metrics import (
    disagreement,
    logit_metrics,
    relative_l2,
    tensor_metrics,
    top1_flips,
    ulp,
)
from parity.engine.measure.quantity import Quantity, Role, kind_of, stage_kind
from parity.megalodon.cases import by_name
from parity.megalodon.edges import MegalodonEdge
from parity.port_tolerances import PortEdge
from parity.tolerances import FORWARD, PORTS, TABLE, NoiseFloors, Rule, bound_from, rule

CASE = by_name("length_c")


@pytest.fixture
def comparison():
    return Comparison(CASE.work, MegalodonEdge.JAX64_ORACLE, NoiseFloors.load(), "float64")


@pytest.fixture
def arrays():
    B, L, D = CASE.batch_size, CASE.length, CASE.config.model_dim
    rng = np.random.default_rng(0)
    return {
        "embed": rng.normal(size=(B, L, D)),
        "logits": rng.normal(size=(B, L, CASE.config.vocab_size)),
        "loss": np.asarray(3.0),
        "grad/model.embed.weight": rng.normal(size=(CASE.config.vocab_size, D)),
    }


def verdicts(rows, quantity):
    return {m.verdict for m in rows if m.quantity == quantity and m.metric == "rel_l2"}


def spoiled(arrays, name, value):
    return arrays | {name: value}


def test_equal_arrays_pass(comparison, arrays):
    rows = comparison.run(arrays, arrays)
    assert all(verdicts(rows, name) == {Verdict.PASS} for name in arrays)


@pytest.mark.parametrize("name", ["embed", "logits", "loss", "grad/model.embed.weight"])
def test_a_wrong_digit_fails(comparison, arrays, name):
    wrong = spoiled(arrays, name, arrays[name] * (1 + 1e-9))
    assert verdicts(comparison.run(wrong, arrays), name) == {Verdict.FAIL}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_is_never_equal(comparison, arrays, bad, both):
    value = arrays["logits"].copy()
    value[0, 0, 0] = bad
    left = spoiled(arrays, "logits", value)
    rows = comparison.run(left, left if both else arrays)
    assert verdicts(rows, "logits") == {Verdict.FAIL}


@pytest.mark.parametrize("side", ["actual", "expected"])
def test_missing_and_extra_fail(comparison, arrays, side):
    less = {name: a for name, a in arrays.items() if name != "embed"}
    pair = (less, arrays) if side == "actual" else (arrays, less)
    assert verdicts(comparison.run(*pair), "embed") == {Verdict.FAIL}


@pytest.mark.parametrize(
    "change",
    [lambda a: a[..., :1], lambda a: a[None], lambda a: a.astype(np.float32)],
    ids=["broadcastable", "extra_axis", "dtype"],
)
def test_another_shape_or_dtype_fails(comparison, arrays, change):
    left = spoiled(arrays, "embed", change(arrays["embed"]))
    assert verdicts(comparison.run(left, arrays), "embed") == {Verdict.FAIL}


def test_a_narrower_dtype_fails_where_its_numbers_are_equal(comparison, arrays):
    """Equal today: in the wrong dtype by accident, and so not what the edge is about."""
    arrays = spoiled(arrays, "embed", np.ones_like(arrays["embed"]))
    narrow = spoiled(arrays, "embed", arrays["embed"].astype(np.float32))
    told = [(m.verdict, m.note) for m in comparison.run(narrow, arrays) if m.quantity == "embed"]
    assert told == [(Verdict.FAIL, "dtype float32, expected float64")]


def test_zero_comparisons_fail(comparison):
    assert [m.verdict for m in comparison.run({}, {})] == [Verdict.FAIL]


def test_a_quantity_without_a_floor_is_not_measured(arrays):
    at = Comparison(CASE.work, MegalodonEdge.JAX32_ORACLE, NoiseFloors({}), "float64")
    rows = at.run(arrays, arrays)
    assert verdicts(rows, "embed") == {Verdict.NOT_COMPARABLE}
    # Of logits no margin is clear then: that no token flips was not measured either.
    flips = [m for m in rows if m.metric == "top1_flips"]
    assert [m.verdict for m in flips] == [Verdict.NOT_COMPARABLE]
    # What is no number fails, whatever its bound.
    bad = at.run({"loss": np.asarray(np.nan)}, {"loss": arrays["loss"]})
    assert verdicts(bad, "loss") == {Verdict.FAIL}


@pytest.mark.parametrize("bound", [math.nan, math.inf, -math.inf])
def test_a_bound_that_is_not_finite_measures_nothing(comparison, bound):
    for value in (0.0, 1.0, math.inf):
        row = comparison.gate("logits", "rel_l2", value, bound)
        assert row.verdict is Verdict.NOT_COMPARABLE and row.note.startswith("not measured")
    assert comparison.gate("logits", "rel_l2", math.nan, bound).verdict is Verdict.FAIL
    row = replace(comparison.gate("logits", "rel_l2", 0.0, 1.0), tolerance=bound)
    assert row.settled().verdict is Verdict.NOT_COMPARABLE
    assert math.isnan(row.fraction)


def test_a_gate_s_value_is_no_less_than_nothing(comparison):
    row = replace(comparison.gate("logits", "rel_l2", 0.0, 0.5), value=-1.0)
    assert row.settled().verdict is Verdict.FAIL


def test_no_element_is_nothing_compared(comparison, arrays):
    empty = spoiled(arrays, "embed", np.zeros((0, 4)))
    assert verdicts(comparison.run(empty, empty), "embed") == {Verdict.NOT_COMPARABLE}
    assert verdicts(comparison.run(empty, arrays), "embed") == {Verdict.FAIL}
    # A parameter without elements has no derivative that could differ.
    gradient = "grad/model.embed.weight"
    empty = spoiled(arrays, gradient, np.zeros((0, 4)))
    assert verdicts(comparison.run(empty, empty), gradient) == {Verdict.INFO}
    assert verdicts(comparison.run(empty, arrays), gradient) == {Verdict.FAIL}


def test_no_valid_position_is_nothing_compared(comparison, arrays):
    """Two empty selections agree whatever the arrays hold."""
    nowhere = np.zeros(arrays["embed"].shape[:2], bool)
    work = replace(CASE.work, valid=nowhere)
    masked = replace(comparison, work=work, only_valid=True)
    rows = masked.run(arrays, spoiled(arrays, "embed", -arrays["embed"]))
    assert verdicts(rows, "embed") == {Verdict.NOT_COMPARABLE}
    assert verdicts(rows, "grad/model.embed.weight") == {Verdict.PASS}


def test_an_unknown_edge_is_not_measured(arrays):
    class Unknown(Edge):
        MINE = "mine:yours"

    rows = Comparison(CASE.work, Unknown.MINE, NoiseFloors.load(), "float64").run(arrays, arrays)
    assert verdicts(rows, "embed") == {Verdict.NOT_COMPARABLE}


def test_relative_l2():
    e = np.asarray([3.0, 4.0])
    assert relative_l2(e, e) == 0.0
    assert relative_l2(2 * e, e) == 1.0
    assert relative_l2(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_l2(e, np.zeros(2)) == 5.0, "off a zero there is nothing to relate it to"


def test_a_flip_counts_where_the_tolerance_cannot_explain_it():
    truth = np.asarray([[0.0, 1.0], [0.0, 5.0]])
    swapped = np.asarray([[1.01, 1.0], [0.0, 5.0]])
    assert logit_metrics(swapped, truth, np.asarray([0, 1]))["top1_agreement"] == 0.5
    # The margin of 1 is clear below a bound of 1 / sqrt(2), and a close pair above it.
    assert top1_flips(swapped, truth, 0.70) == 1
    assert top1_flips(swapped, truth, 0.71) == 0
    assert top1_flips(truth, truth, 0.0) == 0


def test_a_token_that_flips_inside_a_tensor_that_holds_fails(comparison, arrays):
    """A small row in large logits: the relative error of the tensor does not see it."""
    logits = arrays["logits"] * 1e3
    logits[0, 0] = 0.0
    logits[0, 0, :2] = [2e-9, 1e-9]
    swapped = logits.copy()
    swapped[0, 0, :2] = [1e-9, 2e-9]
    pair = (spoiled(arrays, "logits", side) for side in (swapped, logits))
    rows = {m.metric: m.verdict for m in comparison.run(*pair) if m.quantity == "logits"}
    assert rows["rel_l2"] is Verdict.PASS
    assert rows["top1_flips"] is Verdict.FAIL


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 2.0**-23), ("bfloat16", 2.0**-7)])
def test_ulps_count_gaps_of_the_dtype(dtype, gap):
    assert ulp(np.asarray([1.0, -1.5, 2.0]), dtype).tolist() == [gap, gap, 2 * gap]
    assert ulp(np.asarray([0.0, -0.0, 0.5, 0.99]), dtype).tolist() == [gap / 2] * 4
    e = np.asarray([1.0, 1.0, 1.0, 1.0])
    metrics = tensor_metrics(e + gap * np.asarray([0.0, 1.0, 1.0, 3.0]), e, dtype)
    assert metrics["ulp_p50"] == 1.0
    assert metrics["ulp_max"] == 3.0


def test_a_small_element_is_measured_against_the_size_of_the_array():
    e = np.asarray([1.0, 1.0, 1e-12])
    a = e + np.asarray([0.0, 0.0, 1e-6])
    # Against itself the last one would be a million times off.
    assert tensor_metrics(a, e, "float32")["max_rel"] < 1e-2


def test_disagreement_counts_what_is_left_when_texts_part():
    e = np.asarray([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    a = e.copy()
    assert disagreement(a, e) == 0
    a[1, 1] = 0.0
    assert disagreement(a, e) == 3, "what happens to agree later is another text"


def test_top_k_is_compared_as_a_set():
    e = np.arange(40.0)[None]
    a = e.copy()
    a[0, 39] = -1.0
    metrics = logit_metrics(a, e, np.asarray([-100]))
    assert math.isclose(metrics["topk_jaccard"], 9 / 11)


def test_nll_difference_is_the_change_of_the_mean_loss():
    rng = np.random.default_rng(1)
    e, a = rng.normal(size=(2, 5, 7))
    labels = np.asarray([0, -100, 3, 6, -100])

    def nll(x):
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        return -np.mean([np.log(p[i, t]) for i, t in enumerate(labels) if t != -100])

    difference = logit_metrics(a, e, labels)["nll_difference"]
    assert math.isclose(difference, nll(a) - nll(e))


def test_every_row_of_the_table_has_a_bound_and_a_reason():
    for row in TABLE:
        assert row.reason
        discrete = {"disagreement", "top1_flips", "changed_parameters"}
        assert row.absolute > 0 or row.noise_factor > 0 or row.metric in discrete


def test_a_rule_is_of_its_own_metric():
    """The first row of an edge and kind may be of another metric, with another bound."""
    for row in (*TABLE, *PORTS):
        for kind in row.kinds:
            found = rule(row.edge, kind, row.metric)
            assert found is not None and found.metric == row.metric


def test_no_bound_lets_through_what_it_is_there_to_stop():
    """What each bound must see is a number of the formats, not of today's measurements."""
    for kind in (*FORWARD, Kind.GRADIENT):
        wide = rule("jax64:oracle", kind)
        # Float32 in a float64 program.
        assert wide is not None and wide.absolute < rounding_noise.UNIT_ROUNDOFF
    same = rule("jax64:oracle", Kind.BLOCK, "exact_share")
    assert same is not None and same.absolute < 1  # The oracle itself.
    autocast = rule("jaxbf16:oracle", Kind.LOGITS, "error_over_autocast")
    assert autocast is not None and autocast.absolute < 1  # Autocast itself.
    narrow = rule("jaxbf16:oracle", Kind.BLOCK)
    # All that the floor moves, rounded to bfloat16 instead of the operands of products alone.
    bfloat16 = ml_dtypes.finfo(ml_dtypes.bfloat16).eps / 4
    assert narrow is not None
    assert 0 < narrow.noise_factor < float(bfloat16) / rounding_noise.UNIT_ROUNDOFF


def test_a_bound_is_the_larger_of_what_a_row_says():
    row = Rule(MegalodonEdge.JAX32_ORACLE, (Kind.BLOCK,), "reason", absolute=2.0, noise_factor=3.0)
    assert (bound_from(row, 0.5), bound_from(row, 1.0)) == (2.0, 3.0)
    assert math.isnan(bound_from(row, math.nan))


def test_kinds_follow_from_names():
    assert kind_of("grad/model.embed.weight") is kind_of("bar/logits") is Kind.GRADIENT
    assert kind_of("state/norm_mean") is Kind.STATE
    assert kind_of("step1/mu/x") is kind_of("losses") is Kind.TRAJECTORY
    assert kind_of("layers.0.q") is Kind.BLOCK


def test_a_stage_of_a_user_s_program_has_one_of_four_kinds():
    kinds = {
        "logits": Kind.LOGITS,
        "loss": Kind.LOSS,
        "grad/w": Kind.GRADIENT,
        "bar/x": Kind.GRADIENT,
    }
    kinds |= dict.fromkeys(("weights", "losses", "generated", "state/x", "step1/mu/x"), Kind.BLOCK)
    assert {name: stage_kind(name) for name in kinds} == kinds


def test_a_quantity_is_what_its_text_says():
    """Runs store the text, so it is what it always was."""
    assert Quantity.gradient("w") == "grad/w" and Quantity("grad/w").name == "w"
    assert Quantity.cotangent("layers.1.q") == "bar/layers.1.q"
    assert (Quantity("bar/layers.1.q").role, Quantity("bar/layers.1.q").stage) == (
        Role.COTANGENT,
        "q",
    )
    assert Quantity("grad/a/w").name == "a/w" and Quantity("a/x").name == "a/x"
    assert Quantity("bar/logits").stage == Quantity("logits").stage == "logits"
    assert Quantity.state("norm_mean") == "state/norm_mean"
    step, name = Quantity.after_step(50, "mu", "model.norm.weight"), "model.norm.weight"
    assert (step, step.moment, step.name) == (f"step50/mu/{name}", ("50", "mu"), name)
    # Names of parameters may have slashes themselves.
    assert Quantity.after_step(2, "drift", "step3/nu/w").name == "step3/nu/w"
    assert Quantity("losses").moment is None
    # An intermediate of somebody's port, and no step of training.
    own = Quantity("step_size.norm")
    assert (own.role, own.kind, own.moment) == (Role.VALUE, Kind.BLOCK, None)
    assert not Quantity("loss").is_activation and not Quantity.gradient("w").is_activation
    # Of all else, padding may differ.
    others = ("bar/logits", "logits", "losses", "state/x", "step1/mu/w", "layers.0.q")
    assert all(Quantity(name).is_activation for name in others)


def test_an_edge_says_its_sides_and_their_precision():
    for edge in (*MegalodonEdge, *PortEdge):
        assert ":".join(edge.sides) == str(edge) == edge.value
    assert MegalodonEdge.JAX64_ORACLE.dtype == PortEdge.PORT64_ORIGINAL64.dtype == "float64"
    assert MegalodonEdge.JAXBF16_ORACLE.dtype == "bfloat16"
    assert PortEdge.ORIGINAL32_PORT64.dtype == "float32"
    with pytest.raises(KeyError):
        MegalodonEdge.AUTOCAST_ORACLE.dtype  # noqa: B018

    class Named(Edge):
        NUMBERED = "model64layers32:other64"

    assert Named.NUMBERED.dtype == "float32", "what a name ends in"


def test_accuracy_is_our_error_over_the_references(arrays):
    edge = Comparison(CASE.work, MegalodonEdge.JAX32_ORACLE, NoiseFloors.load(), "float32")
    truth = {"logits": arrays["logits"]}

    def off(by):
        return {"logits": arrays["logits"] * (1 + by)}

    [worse] = edge.accuracy(off(1e-5), off(1e-6), truth)
    [better] = edge.accuracy(off(1e-6), off(1e-5), truth)
    assert (worse.verdict, better.verdict) == (Verdict.FAIL, Verdict.PASS)
    assert worse.value == pytest.approx(10)
    # Where both are the rounding of the result, being ten times better means nothing.
    [fine] = edge.accuracy(off(1e-8), off(1e-9), truth)
    assert fine.verdict is Verdict.PASS


def test_masked_positions_are_left_out_where_they_mean_something_else():
    case = by_name("right_padding")
    shape = (case.batch_size, case.length, case.config.vocab_size)
    truth = {"logits": np.random.default_rng(0).normal(size=shape), "loss": np.asarray(3.0)}
    wrong = {**truth, "logits": np.where(case.valid[..., None], truth["logits"], 7.0)}
    for only_valid, verdict in ((True, Verdict.PASS), (False, Verdict.FAIL)):
        floors = NoiseFloors.load()
        comparison = Comparison(
            case.work, MegalodonEdge.JAX64_ORACLE, floors, "float64", only_valid=only_valid
        )
        assert verdicts(comparison.run(wrong, truth), "logits") == {verdict}


def test_accuracy_is_of_every_block_and_of_all_gradients_together():
    """Of logits alone, or without the gradients that are no number, it would be other rows."""
    edge = Comparison(CASE.work, MegalodonEdge.JAX32_ORACLE, NoiseFloors.load(), "float32")
    rng = np.random.default_rng(3)
    names = ("logits", "layers.0.q", "grad/a", "grad/b", "loss")
    truth = {name: rng.normal(size=(3, 4)) for name in names}
    theirs = {name: x * (1 + 1e-6) for name, x in truth.items()}
    off = {"logits": 2e-6, "layers.0.q": 3e-6, "grad/a": 3e-6, "grad/b": 4e-6, "loss": 1e-6}
    ours = {name: x * (1 + off[name]) for name, x in truth.items()}
    rows = {m.quantity: m for m in edge.accuracy(ours, theirs, truth)}
    assert set(rows) == {"logits", "layers.0.q", "grad/*"}
    assert rows["layers.0.q"].value == pytest.approx(3)
    # The root mean square over gradients, of each side.
    assert rows["grad/*"].value == pytest.approx(math.sqrt(12.5))
    assert rows["grad/*"].verdict is Verdict.FAIL
    for side in (ours, theirs):
        for bad in (np.full((3, 4), np.nan), None):
            spoilt = {n: x for n, x in side.items() if bad is not None or n != "grad/a"}
            if bad is not None:
                spoilt["grad/a"] = bad
            pair = (spoilt, theirs) if side is ours else (ours, spoilt)
            [row] = [m for m in edge.accuracy(*pair, truth) if m.quantity == "grad/*"]
            assert math.isnan(row.value) and row.verdict is Verdict.FAIL


def test_a_value_at_its_tolerance_passes_and_knows_its_stage(comparison):
    assert comparison.gate("logits", "rel_l2", 1e-6, 1e-6).verdict is Verdict.PASS
    assert comparison.gate("logits", "rel_l2", 1.1e-6, 1e-6).verdict is Verdict.FAIL
    stages = [comparison.fact(name, "max_abs", 0.0).stage for name in ("embed", "layers.0.q")]
    assert 0 == stages[0] < stages[1]


def test_the_divergence_is_weighed_by_the_truth():
    e, a = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.25, 0.5]])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    found = logit_metrics(a, e, np.asarray([0]))
    assert found["kl_max"] == pytest.approx(expected)


def test_rounding_of_a_sum_is_what_sums_in_float32_lose():
    terms = 1000
    x = np.random.default_rng(0).standard_normal((2000, terms)).astype(np.float32)
    exact = x.astype(np.float64)
    # One after another; the numbers themselves are rounded already, which `summed` adds.
    lost = np.cumsum(x, axis=1)[:, -1] - exact.sum(axis=1)
    measured = np.sqrt(np.mean(np.square(lost) / np.square(exact).sum(axis=1)))
    told = math.sqrt(rounding_noise.summed(terms) ** 2 - rounding_noise.UNIT_ROUNDOFF**2)
    # A rounding error is not quite uniform, and neither is a leading digit logarithmic.
    assert 0.8 < measured / told < 1.25
    # One term alone was rounded once, and each more adds to that.
    few = [rounding_noise.summed(n) for n in range(12)]
    assert few[0] == rounding_noise.UNIT_ROUNDOFF
    assert few == sorted(set(few))
    assert rounding_noise.floor([3.0, 4.0]) == pytest.approx(math.sqrt(12.5))


def test_the_margin_is_of_the_two_best():
    """Far from the last, yet near to the second: a swap that the bound explains."""
    truth = np.asarray([[0.0, 5.0, 5.0 - 1e-6]])
    swapped = np.asarray([[0.0, 5.0 - 1e-6, 5.0]])
    assert top1_flips(swapped, truth, 1e-6) == 0
    assert top1_flips(swapped, truth, 1e-9) == 1


def test_opposite_arrays_have_a_cosine_of_minus_one():
    e = np.asarray([3.0, -4.0])
    assert tensor_metrics(-e, e, "float64")["cosine"] == pytest.approx(-1.0)
    assert math.isnan(tensor_metrics(e, np.zeros(2), "float64")["cosine"])


def test_what_another_device_computed_is_other_work(comparison):
    """Another one of anything that a value depends on gives another identity."""

    def identity(at, name="embed", metric="max_abs"):
        return at.fact(name, metric, 0.0).identity

    work = replace(CASE.work, hash="another")
    others = [
        identity(replace(comparison, device="cuda")),
        identity(replace(comparison, edge=MegalodonEdge.JAX32_ORACLE)),
        identity(replace(comparison, work=work)),
        identity(comparison, name="logits"),
        identity(comparison, metric="max_rel"),
    ]
    assert len({identity(comparison), *others}) == 1 + len(others)
    assert identity(comparison) == identity(replace(comparison))
