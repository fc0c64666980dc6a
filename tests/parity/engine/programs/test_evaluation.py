"""The evaluation: marks are seen and replaced wherever they are, and float64 means all of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from scipy.special import erfinv

from parity.engine.measure.metrics import relative_l2
from parity.engine.programs import evaluation
from parity.engine.programs.evaluation import UNROLLED, Evaluation, _are_few
from parity.engine.programs.instrument import capture
from parity.engine.programs.marks import MarkChange, Marks
from parity.engine.programs.operations import Recorder
from parity.engine.programs.rounding import Signs, pool
from parity.engine.programs.rounding_rules import UNITS
from tests.helpers import EXACT, close, roundoff

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
DOUBLED = np.float64([1.0, 2.0, 4.0])


def evaluate(function, *args, changes=None):
    """Return result, marks and notices, as the program is."""
    closed, marks, notices = jax.make_jaxpr(function)(*args), Marks(), {}
    outputs = Evaluation(notices=notices).run(closed, list(args), marks, changes)
    return outputs[0], marks, tuple(notices)


def widened(function, *args, signs=None):
    """Return the result in float64 and what was noticed."""
    closed, notices = jax.make_jaxpr(function)(*args), {}
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        how = Evaluation(True, signs, notices)
        inputs = [np.float64(x) if np.asarray(x).dtype == np.float32 else x for x in args]
        run = jax.jit(lambda inputs: how.run(closed, inputs, Marks())[0])
        return np.asarray(run(inputs)), tuple(notices)


def test_arguments_are_widened_as_all_else_is():
    """As if they had been widened before, and numbers without a fraction stay what they are."""
    third = np.float32(1 / 3)

    def function(x, n, z):
        return x * third, n + 1, z * z

    whole, turned = np.int32(2), np.complex64(1 + 2j)
    closed = jax.make_jaxpr(function)(X, whole, turned)
    with jax.enable_x64(True):
        narrow = Evaluation(True).run(closed, [X, whole, turned], Marks())
        before = [np.float64(X), whole, np.complex128(turned)]
        wide = Evaluation(True).run(closed, before, Marks())
    assert [value.dtype for value in narrow] == [np.float64, np.int32, np.complex128]
    for one, other in zip(narrow, wide, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(narrow[0], np.float64(X) * np.float64(third))


# Where a mark can be


def in_scan(x):
    def body(carry, factor):
        carry = checkpoint_name(carry * factor, "inner")
        return carry + 1.0, None

    return jax.lax.scan(body, x, jnp.asarray([2.0, 3.0]))[0]


def in_reversed_scan(x):
    def body(carry, factor):
        return checkpoint_name(carry * factor, "inner") + 1.0, None

    return jax.lax.scan(body, x, jnp.asarray([3.0, 2.0]), reverse=True)[0]


def in_remat(x):
    return jax.checkpoint(lambda x: checkpoint_name(2.0 * x, "inner") + 1.0)(x)


def in_jit(x):
    return jax.jit(lambda x: checkpoint_name(2.0 * x, "inner") + 1.0)(x)


def in_vmap(x):
    return jax.vmap(lambda row: checkpoint_name(2.0 * row, "inner") + 1.0)(x)


def in_cond(x):
    def yes(x):
        return checkpoint_name(2.0 * x, "inner") + 1.0

    def no(x):
        return checkpoint_name(3.0 * x, "other") + 1.0

    return jax.lax.cond(x[0, 0] < 0, yes, no, x)


@jax.custom_jvp
def _doubled(x):
    return checkpoint_name(2.0 * x, "inner") + 1.0


_doubled.defjvp(lambda primals, tangents: (_doubled(*primals), 2.0 * tangents[0]))


def in_custom(x):
    return _doubled(x)


def nested(x):
    """A scan of a scan and of a branch."""

    def turn(carry, i):
        carry = jax.lax.scan(lambda c, f: (checkpoint_name(c * f, "deep"), None), carry, TWO)[0]
        carry = jax.lax.cond(
            i > 0, lambda c: checkpoint_name(c + 1.0, "branch"), lambda c: c, carry
        )
        return carry, None

    return jax.lax.scan(turn, x, jnp.arange(2))[0]


TWO = jnp.asarray([2.0, 0.5])
CONSTRUCTS = {
    "jit": (in_jit, {"inner": 2 * X}),
    "remat": (in_remat, {"inner": 2 * X}),
    "vmap": (in_vmap, {"inner": 2 * X}),
    "custom": (in_custom, {"inner": 2 * X}),
    "cond": (in_cond, {"inner": 2 * X}),
    "scan": (in_scan, {"inner@0": 2 * X, "inner@1": 3 * (2 * X + 1)}),
    "reversed": (in_reversed_scan, {"inner@1": 2 * X, "inner@0": 3 * (2 * X + 1)}),
}
each_construct = pytest.mark.parametrize("construct", CONSTRUCTS)


def passed(marks):
    return {n: np.asarray(x) for n, x in marks.values.items() if bool(marks.passed.get(n, True))}


@each_construct
def test_a_mark_is_seen_wherever_it_is_and_changes_no_bit(construct):
    function, expected = CONSTRUCTS[construct]
    result, marks, notices = evaluate(function, X)
    assert np.array_equal(result, function(X))
    assert list(passed(marks)) == list(expected)
    for name, value in expected.items():
        assert close(passed(marks)[name], value)
    assert notices == ()


@each_construct
def test_a_mark_is_replaced_wherever_it_is_and_reported_as_computed(construct):
    function, expected = CONSTRUCTS[construct]
    last, computed = list(expected.items())[-1]
    result, marks, _ = evaluate(function, X, changes={last: MarkChange(True, X - 7)})
    assert close(result, X - 7 + 1)
    assert close(passed(marks)[last], computed)


def test_one_turn_of_a_loop_is_replaced_and_the_next_goes_on_from_it():
    result, marks, _ = evaluate(in_scan, X, changes={"inner@0": MarkChange(True, 0 * X)})
    assert close(marks.values["inner@1"], 3.0)
    assert close(result, 4.0)
    untouched, _, _ = evaluate(in_scan, X, changes={"inner@2": MarkChange(True, 0 * X)})
    assert np.array_equal(untouched, in_scan(X))


def test_a_branch_not_taken_passes_no_mark():
    _, marks, _ = evaluate(in_cond, X)
    assert not bool(marks.passed["other"])
    result, marks, _ = evaluate(in_cond, -X)
    assert not bool(marks.passed["inner"])
    assert close(marks.values["other"], -3 * X)
    assert np.array_equal(result, in_cond(-X))


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_a_mark_has_a_value_only_where_every_branch_around_it_is_taken(outer, inner):
    def deep(x, outer, inner):
        def chosen(x):
            y = checkpoint_name(2.0 * x, "outside")
            return jax.lax.cond(inner, lambda y: checkpoint_name(3.0 * y, "deep"), jnp.sin, y)

        return jax.lax.cond(outer, chosen, jnp.cos, x)

    result, marks, _ = evaluate(deep, X, outer, inner)
    taken = {name: bool(value) for name, value in marks.passed.items()}
    assert taken == {"outside": outer, "deep": outer and inner}
    assert np.array_equal(result, deep(X, outer, inner))


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int32])
def test_a_mark_of_a_branch_that_is_not_taken_is_no_number(dtype, taken):
    """Where its dtype has something that is none."""

    def function(x, taken):
        return jax.lax.cond(taken, lambda x: checkpoint_name(x + x, "inner"), lambda x: x, x)

    x = np.arange(1, 4).astype(dtype)
    _, marks = capture(function)(x, taken)
    if taken:
        assert np.array_equal(marks["inner"], x + x)
    elif dtype is not np.int32:
        assert np.all(np.isnan(marks["inner"]))


def test_nested_turns_are_named_from_the_outermost_in():
    result, marks, _ = evaluate(nested, X)
    assert list(passed(marks)) == ["deep@0@0", "deep@0@1", "deep@1@0", "deep@1@1", "branch@1"]
    assert close(passed(marks)["deep@1@0"], 2 * X)
    assert np.array_equal(result, nested(X))
    result, _, _ = evaluate(nested, X, changes={"deep@1@1": MarkChange(True, 5 * X)})
    assert close(result, 5 * X + 1)


def test_marks_of_two_branches_are_one_where_they_have_one_shape():
    def chosen(x):
        short = lambda x: checkpoint_name(x[0], "a").sum() + checkpoint_name(x, "b").sum()  # noqa: E731
        whole = lambda x: checkpoint_name(x, "a").sum() + checkpoint_name(2 * x, "b").sum()  # noqa: E731
        return jax.lax.cond(x[0, 0] < 0, whole, short, x)

    _, marks, _ = evaluate(chosen, X)
    assert {name: x.shape for name, x in passed(marks).items()} == {"a#2": (2, 3), "b": (2, 3)}
    assert close(marks.values["b"], 2 * X)


def test_a_mark_in_a_while_loop_is_noticed_and_not_seen():
    def loop(x):
        return jax.lax.while_loop(
            lambda c: jnp.all(c < 4), lambda c: checkpoint_name(c + 1.0, "inner"), x
        )

    result, marks, notices = evaluate(loop, X)
    assert np.array_equal(result, loop(X)) and not marks.values
    assert notices == ("marks in a while loop are not captured: they have many values",)
    value, notices = widened(loop, X)
    assert value.dtype == np.float64 and close(value, loop(X)) and len(notices) == 1
    # Whatever else was noticed before.
    found = {"an earlier remark": None}
    Evaluation(notices=found).run(jax.make_jaxpr(loop)(X), [X], Marks())
    assert [*found] == ["an earlier remark", *notices]


def test_a_loop_is_compiled_as_the_program_has_it():
    """Turns that are compiled together may be fused, and fused operations may have other bits."""

    def body(c, row):
        return checkpoint_name(c * row, "inner"), None

    def function(x):
        return jax.lax.scan(body, x, jnp.ones(6), reverse=True, unroll=3)[0]

    closed = jax.make_jaxpr(function)(X)
    run = jax.make_jaxpr(lambda x: Evaluation().run(closed, [x], Marks()))(X)
    [before], [after] = (
        [e.params for e in program.eqns if e.primitive.name == "scan"] for program in (closed, run)
    )
    for parameter in ("length", "reverse", "unroll"):
        assert before[parameter] == after[parameter]


@pytest.mark.parametrize("in_float64", [False, True])
def test_a_loop_of_no_turns_passes_no_mark(in_float64: bool):
    """A model without layers, or a text that ends before its first chunk."""

    def none(x):
        body = lambda c, row: (checkpoint_name(c + row, "inner"), c)  # noqa: E731
        return jax.lax.scan(body, x, jnp.zeros((0, 3)))

    closed, marks = jax.make_jaxpr(none)(X), Marks()
    with jax.enable_x64(in_float64):
        last, rows = Evaluation(in_float64).run(closed, [X], marks)
    assert np.array_equal(last, X) and rows.shape == (0, 2, 3) and not marks.values
    assert last.dtype == rows.dtype == (np.float64 if in_float64 else np.float32)


def test_a_loop_that_carries_a_random_key_is_entered():
    def draws(x):
        def body(key, _):
            key, own = jax.random.split(key)
            return key, checkpoint_name(jax.random.normal(own, ()), "draw")

        return x.sum() + jax.lax.scan(body, jax.random.key(0), None, length=2)[1].sum()

    result, marks, _ = evaluate(draws, X)
    assert list(marks.values) == ["draw@0", "draw@1"]
    # Not bit for bit: the loop draws in one compiled program and the evaluation step by step, which
    # SSE 4.2 rounds in another way.
    assert close(result, draws(X), 64), "the terms of the sum cancel"
    value, _ = widened(draws, X)
    assert close(value, draws(X), 64), "the terms of the sum cancel"


# `capture`, which is made of it


def test_capture_counts_turns_and_differentiates_into_them():
    counted = capture(in_scan, numbered={"inner": "layers.{}.inner"})
    result, marks = counted(X)
    assert list(marks) == ["layers.0.inner", "layers.1.inner"]
    assert np.array_equal(result, in_scan(X))

    def moved(offset):
        return capture(in_scan, offsets={"inner@0": offset})(X)[0].sum()

    assert close(jax.grad(moved)(jnp.zeros_like(X)), 3.0)
    held = capture(in_scan, numbered={"inner": "q{}"}, forced={"q0": jnp.zeros_like(X)})(X)[0]
    assert close(held, 4.0)


def test_capture_says_of_a_branch_not_taken_that_it_has_no_value():
    _, marks = jax.jit(capture(in_cond))(X)
    assert np.all(np.isnan(marks["other"])) and close(marks["inner"], 2 * X)


def test_capture_refuses_a_second_value_of_a_name_inside_of_a_loop_too():
    def twice(x):
        body = lambda c, _: (checkpoint_name(checkpoint_name(c, "q") + 1.0, "q"), None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=2)[0]

    with pytest.raises(ValueError, match="the mark 'q' is passed twice"):
        capture(twice)(X)
    # Templates of other marks change nothing about this one.
    with pytest.raises(ValueError, match="the mark 'q' is passed twice"):
        capture(twice, numbered={"k": "k.{}"})(X)
    counted = capture(twice, numbered={"q": "q.{}"})(X)[1]
    assert [float(x[0, 0]) for x in counted.values()] == [-1.0, 0.0, 0.0, 1.0]


def test_marks_stay_in_a_program_that_is_differentiated():
    """Policies of rematerialisation choose by them what is kept."""

    def function(x):
        return checkpoint_name(x * 2, "kept").sum()

    closed = jax.make_jaxpr(function)(X)
    for differentiable in (False, True):
        evaluation = Evaluation(differentiable=differentiable)
        run = jax.make_jaxpr(lambda x, e=evaluation: e.run(closed, [x], Marks()))(X)
        names = [e.params["name"] for e in run.eqns if e.primitive.name == "name"]
        assert names == (["kept"] if differentiable else [])


def test_capture_keeps_a_derivative_that_a_function_defines_itself():
    @jax.custom_jvp
    def straight_through(x):
        return checkpoint_name(jnp.round(x), "inner")

    straight_through.defjvp(lambda xs, ts: (straight_through(*xs), ts[0]))
    gradient = jax.grad(lambda x: capture(straight_through)(x)[0].sum())(X)
    assert np.array_equal(gradient, np.ones_like(X))


# Everything in float64


def _scatter(x):
    return jnp.zeros((3,), jnp.bfloat16).at[jnp.asarray([0, 2, 0])].add(x[0].astype(jnp.bfloat16))


def _reduce(x):
    return jax.lax.reduce(x.astype(jnp.bfloat16), jnp.bfloat16(0), jax.lax.add, (1,))


@jax.custom_vjp
def _scaled(x):
    return (x.astype(jnp.bfloat16) * 3).astype(jnp.float32)


_scaled.defvjp(lambda x: (_scaled(x), None), lambda _, g: (g.astype(jnp.bfloat16).astype(g.dtype),))


def _low_dot(x):
    low = x.astype(jnp.bfloat16)
    return jax.lax.dot_general(
        low, low.T, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16
    )


def _grown(x):
    """A loop whose condition has one constant and whose body has two others."""
    limit, factor, step = x.max() + 20, x.min() + 1.25, x.mean()
    return jax.lax.while_loop(lambda c: c.max() < limit, lambda c: c * factor + step, x)


def _grown_exactly(x):
    limit, factor, step = x.max() + 20, x.min() + 1.25, x.mean()
    while x.max() < limit:
        x = x * factor + step
    return x


CASTS = {
    "bfloat16": (lambda x: jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32), np.exp),
    "float16": (lambda x: x.astype(jnp.float16).astype(jnp.float32), lambda x: x),
    "dot": (_low_dot, lambda x: x @ x.T),
    "iota": (
        lambda x: x * jnp.cos(jax.lax.iota(jnp.float32, 3) * 0.5),
        lambda x: x * np.cos(np.arange(3) * 0.5),
    ),
    "scatter": (_scatter, lambda x: np.asarray([x[0, 0] + x[0, 2], 0.0, x[0, 1]])),
    "reduce": (_reduce, lambda x: x.sum(1)),
    "mean": (lambda x: jnp.mean(x, 1, dtype=jnp.float32), lambda x: x.mean(1)),
    "cumsum": (lambda x: jnp.cumsum(x.astype(jnp.bfloat16), 1), lambda x: x.cumsum(1)),
    "custom_jvp": (
        lambda x: jax.nn.relu(x.astype(jnp.bfloat16)) ** 2,
        lambda x: np.maximum(x, 0) ** 2,
    ),
    "custom_vjp": (_scaled, lambda x: 3 * x),
    "its gradient": (jax.grad(lambda x: (_scaled(x) ** 2).sum()), lambda x: 6 * x),
    "fft": (lambda x: jnp.fft.rfft(x, axis=1).real, lambda x: np.fft.rfft(x, axis=1).real),
    "softmax": (
        lambda x: jax.nn.softmax(x.astype(jnp.bfloat16), axis=1),
        lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True),
    ),
    "literal": (lambda x: x / jnp.sqrt(6), lambda x: x / np.sqrt(6)),
    "convert": (lambda x: jax.lax.reduce_precision(x, 8, 7), lambda x: x),
    "sorted": (lambda x: jnp.sort(-x.astype(jnp.bfloat16), axis=1), lambda x: np.sort(-x, axis=1)),
    "while": (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: (c * 1.5).astype(c.dtype), x / 3),
        lambda x: x / 3 * 1.5**3,
    ),
    "while of constants": (_grown, _grown_exactly),
    "scan": (
        lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x.astype(jnp.bfloat16), TWO)[0],
        lambda x: np.sin(np.sin(x)),
    ),
}


@pytest.mark.parametrize("cast", CASTS)
def test_what_a_program_casts_to_less_is_float64_all_the_same(cast):
    function, exact = CASTS[cast]
    # Thirds: no product or sum of them is exact in less than float64.
    x = np.float32(X / 3 + 0.1)
    value, notices = widened(function, x)
    assert value.dtype == np.float64 and notices == ()
    expected = exact(np.float64(x))
    assert relative_l2(value, expected) <= EXACT
    # As it is, the program is further away: the agreement above is not for want of rounding.
    # NumPy rounds to float16 on any processor; XLA compiles no such cast for one without F16C.
    narrow = np.float64(np.float16(x) if cast == "float16" else jax.jit(function)(x))
    if cast not in ("mean", "while"):
        assert relative_l2(narrow, expected) > EXACT


def test_random_numbers_are_those_the_program_draws():
    """In float64 `jax.random` would draw others: of 64 bits."""
    key, low = jax.random.key(1), np.nextafter(np.float32(-1), np.float32(0))

    def drawn(x):
        return jax.random.uniform(key, x.shape)

    def even(x):
        return jax.random.uniform(key, x.shape, minval=low, maxval=1.0)

    def noisy(x):
        return x + jax.random.normal(key, x.shape)

    # A uniform number is 23 bits and exact; on another interval it is scaled and moved.
    assert np.array_equal(widened(drawn, X)[0], np.float64(drawn(X)))
    uniform, _ = widened(even, X)
    assert close(uniform, even(X), roundings=3)
    # A normal number is a function of a uniform one, here in float64; its constant is float32.
    value, _ = widened(noisy, X)
    assert value.dtype == np.float64
    assert relative_l2(value, X + np.float64(np.float32(np.sqrt(2))) * erfinv(uniform)) <= EXACT


def test_random_numbers_are_drawn_as_the_program_does_it():
    """In one of two ways, which it may choose for a part of itself."""

    def drawn(x):
        with jax.threefry_partitionable(False):
            return x + jax.random.uniform(jax.random.key(1), x.shape)

    expected = drawn(X)
    assert not close(expected, X + jax.random.uniform(jax.random.key(1), X.shape))
    assert close(widened(drawn, X)[0], expected)
    assert np.array_equal(evaluate(lambda x: checkpoint_name(drawn(x), "inner"), X)[0], expected)


def test_what_has_no_float64_is_done_as_it_is_and_noticed():
    def called(x):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return 2.0 * jax.pure_callback(lambda x: np.float32(x) + np.float32(1), shape, x)

    value, notices = widened(called, X)
    assert close(value, 2 * (X + 1))
    assert [n.partition(":")[0] for n in notices] == [
        "pure_callback ran in its own dtype instead of float64"
    ]


# Recorded operations


def from_the_end(x):
    """A loop backwards, whose turns return rows; its first turn takes another branch."""

    def turn(carry, i):
        carry = checkpoint_name(carry * 2.0, "inner")
        carry = jax.lax.cond(
            i > 0, lambda c: checkpoint_name(c + 1.0, "branch"), lambda c: c, carry
        )
        return carry, carry[0] + i

    return jax.lax.scan(turn, x, jnp.arange(3.0), reverse=True)


def recorded(function, changes=None):
    """Evaluate in float64 with and without a record; return both, and the record."""
    closed, recorder, found = jax.make_jaxpr(function)(X), Recorder(), []
    with jax.enable_x64(True):
        for each in (None, recorder):
            marks = Marks()
            outputs = Evaluation(True, recorder=each).run(closed, [X], marks, changes)
            found.append((outputs, marks.values, marks.passed))
    return *found, recorder


# Branches are not recorded, so neither are their marks.
@pytest.mark.parametrize(
    ("function", "replaced", "fed"),
    [
        (from_the_end, None, []),
        (from_the_end, "inner@1", ["inner"]),
        (from_the_end, "branch@2", []),
        (nested, "deep@1@0", ["deep"]),
    ],
)
def test_a_record_of_a_loop_changes_no_result_and_no_mark(function, replaced, fed):
    changes = {replaced: MarkChange(True, np.float64(X - 7))} if replaced else {}
    still, seen, recorder = recorded(function, changes)
    for one, other in zip(still[0], seen[0], strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == np.float64
        assert np.array_equal(one, other)
    for one, other in zip(still[1:], seen[1:], strict=True):
        assert list(one) == list(other) and one
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert [o.mark for o in recorder.operations if o.fed] == fed


def masked(x):
    mask = checkpoint_name(x > 0, "mask")
    return jnp.where(~mask, x, 2 * x), mask


def noisy(x):
    key = checkpoint_name(jax.random.key(1), "key")
    count = checkpoint_name(jnp.arange(3, dtype=jnp.int8), "count")
    return x + jax.random.uniform(key, x.shape), count * count


@pytest.mark.parametrize("function", [masked, noisy])
def test_a_record_changes_nothing_about_marks_of_any_dtype(function):
    """A mask stays one, and so does a random key, which is no number."""
    still, seen, recorder = recorded(function)
    for one, other in zip(still[0], seen[0], strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    assert [*still[1]] == [*seen[1]] == [o.mark for o in recorder.operations if o.mark]
    assert all(x.dtype == seen[1][name].dtype for name, x in still[1].items())


def test_a_record_of_a_loop_knows_what_each_turn_is_made_of():
    _, _, recorder = recorded(from_the_end)
    operations = recorder.operations
    products = [i for i, o in enumerate(operations) if o.primitive == "mul"]
    marks = [i for i, o in enumerate(operations) if o.mark == "inner"]
    branches = [i for i, o in enumerate(operations) if o.primitive == "cond"]
    assert len(products) == len(marks) == len(branches) == 3
    # A turn starts from the one before it: backwards, and what is marked comes of what is not.
    assert operations[products[0]].parents == ()
    assert [operations[i].parents for i in products[1:]] == [(i,) for i in branches[:-1]]
    assert [operations[i].parents for i in marks] == [(i,) for i in products]
    values = [np.asarray(recorder.values[i]) for i in products]
    assert close(values[1], 2 * (2 * X + 1)) and close(values[2], 2 * (4 * X + 3))
    # The rows of all turns are one result, made of each turn's own, the first turn's last.
    rows = operations[-1]
    assert rows.primitive == "scan" and close(recorder.values[-1][2], 2 * X[0] + 1 + 2)
    sums = [i for i, o in enumerate(operations) if o.primitive == "add"]
    assert rows.parents == tuple(reversed(sums)) and len(sums) == 3
    # Each turn reads its own element of what the loop runs through.
    read = [i for i, o in enumerate(operations[:-1]) if o.primitive == "scan"]
    assert [float(recorder.values[i]) for i in read] == [2.0, 1.0, 0.0]
    assert all(r in operations[s].parents for r, s in zip(read, sums, strict=True))


def test_a_loop_of_too_many_operations_is_recorded_as_one():
    def turning(length: int, operations: int):
        def turn(carry, _):
            for _ in range(operations):
                carry = carry * 0.5
            return carry, None

        return lambda x: jax.lax.scan(turn, x, None, length=length)[0]

    def few(length: int, operations: int):
        scan = jax.make_jaxpr(turning(length, operations))(X).eqns[0]
        return _are_few(scan.params["jaxpr"], length)

    assert few(UNROLLED // 4, 4) and few(1, 1)
    assert not few(UNROLLED // 4 + 1, 4)
    assert not few(UNROLLED // 4, 5)
    assert not few(0, 4)
    for length, primitives in ((2, ["mul"] * 6), (UNROLLED, ["scan"])):
        recorder = recorded(turning(length, 3))[-1]
        assert [o.primitive for o in recorder.operations] == primitives


def inner_scan(c):
    return jax.lax.scan(lambda c, _: (c * 0.5, None), c, None, length=5)[0]


def inner_while(c):
    return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 0.5), (0, c))[1]


@pytest.mark.parametrize("inner", [inner_scan, inner_while])
@pytest.mark.parametrize(("most", "products"), [(30, 15), (14, 0)])
def test_the_operations_of_a_loop_are_counted_in_each_turn_of_the_loop_around_it(
    inner, most: int, products: int, monkeypatch
):
    """Each loop alone has few operations."""
    monkeypatch.setattr(evaluation, "UNROLLED", most)

    def function(x):
        return jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=3)[0]

    closed, courses = jax.make_jaxpr(function)(X), {}
    [outer] = closed.eqns
    assert _are_few(outer.params["jaxpr"], 3)
    for _ in range(2):
        recorder = Recorder(courses)
        with jax.enable_x64(True):
            [found] = Evaluation(True, recorder=recorder).run(closed, [X], Marks())
        courses = {place: int(value) for place, (_, value) in recorder.asked.items()} | courses
    assert [o.primitive for o in recorder.operations].count("mul") == products
    assert close(found, X / 2**15)


def test_the_operations_inside_of_a_call_are_counted_as_those_of_the_loop(monkeypatch):
    monkeypatch.setattr(evaluation, "UNROLLED", 10)
    called = jax.jit(lambda c: jnp.sin(jnp.cos(c * 0.5)))

    def function(x):
        return jax.lax.scan(lambda c, _: (called(c), None), x, None, length=3)[0]

    assert [o.primitive for o in recorded(function)[-1].operations] == ["scan"]


# What rounding does

SEEDS = 3
CAUTION = 8.0
"""Most by which the response of a program to rounding may exceed its true error: of what is always
rounded up or down by a whole unit, and of functions that are better than their worst."""
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


def _normed(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


def _attended(q, k, v):
    return jax.nn.softmax(q @ k.T / 4.0, axis=-1) @ v


def _convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


ROUNDED = {
    "matmul": (jnp.matmul, lambda: (normal(16, 256), normal(256, 32))),
    "softmax": (lambda x: jax.nn.softmax(4.0 * x, axis=-1), lambda: (normal(16, 64),)),
    "layer norm": (_normed, lambda: (normal(16, 64) + 3, normal(64))),
    "cumsum": (lambda x: jnp.cumsum(x, -1), lambda: (normal(8, 256),)),
    "cancellation": (lambda x, y: (x + y) - x, lambda: (100 * normal(16, 64), normal(16, 64))),
    "convolution": (_convolved, lambda: (normal(2, 8, 12, 12), normal(8, 8, 3, 3))),
    "attention": (_attended, lambda: (normal(32, 16), normal(32, 16), normal(32, 16))),
    "recurrence": (
        lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=8)[0],
        lambda: (normal(16, 32), normal(32, 32) / 6),
    ),
    # Of signs that are the same in every turn each element would drift, sqrt(turns) times as far.
    "many turns": (
        lambda x, w: jax.lax.scan(lambda c, w: (c * w, None), x, w)[0],
        lambda: (normal(64), np.exp(normal(1024, 64) / 64)),
    ),
    "many turns of two loops": (
        lambda x, w: jax.lax.scan(
            lambda c, w: (jax.lax.scan(lambda c, w: (c * w, None), c, w)[0], None), x, w
        )[0],
        lambda: (normal(64), np.exp(normal(32, 32, 64) / 64)),
    ),
    "many turns of a while loop": (
        lambda x, w: jax.lax.while_loop(
            lambda s: s[0] < len(w), lambda s: (s[0] + 1, s[1] * w[s[0]]), (jnp.int32(0), x)
        )[1],
        lambda: (normal(64), np.exp(normal(1024, 64) / 64)),
    ),
}


@functools.cache
def response_of(name):
    """Return a compiled evaluation of a program: of inputs, signs and what they move."""
    function, make = ROUNDED[name]
    closed = jax.make_jaxpr(function)(*make())
    return jax.jit(
        lambda inputs, signs, on: Evaluation(True, Signs(signs, on)).run(closed, inputs, Marks())[0]
    )


@pytest.mark.parametrize("name", ROUNDED)
def test_a_program_responds_to_rounding_as_much_as_it_rounds(name):
    function, make = ROUNDED[name]
    with jax.default_matmul_precision("highest"):
        run = response_of(name)
        for _ in range(SEEDS):
            inputs = make()
            error = np.asarray(jax.jit(function)(*inputs))
            with jax.enable_x64(True):
                wide = [np.float64(x) for x in inputs]
                exact = np.asarray(run(wide, pool(0, 2**16), 0.0))
                moved = [np.asarray(run(wide, pool(s, 2**16), 1.0)) for s in range(SEEDS)]
            response = np.sqrt(np.mean([relative_l2(x, exact) ** 2 for x in moved]))
            assert 0.7 <= response / relative_l2(error, exact) <= CAUTION


def test_a_running_sum_of_many_terms_responds_more_than_one_of_few():
    """What adding up loses grows with the number of terms; of numbers that cancel it is seen."""
    function, make = ROUNDED["cumsum"]
    responses = []
    with jax.enable_x64(True):
        for inputs in (make()[0], make()[0][:, :4]):
            wide = np.float64(inputs)
            closed = jax.make_jaxpr(function)(inputs)
            exact = np.cumsum(wide, -1)
            moved = [
                Evaluation(True, Signs(pool(s, wide.size))).run(closed, [wide], Marks())[0]
                for s in range(SEEDS)
            ]
            responses.append(np.mean([relative_l2(np.asarray(x), exact) for x in moved]))
    assert responses[0] > 2 * responses[1]


def test_a_response_is_another_for_other_signs_and_none_for_none():
    run, inputs = response_of("matmul"), ROUNDED["matmul"][1]()
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wide = [np.float64(x) for x in inputs]
        still, again, one, other = (
            np.asarray(run(wide, pool(seed, 2**16), on))
            for seed, on in ((0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0))
        )
    assert np.array_equal(still, again)
    assert not np.array_equal(one, other) and not np.array_equal(one, still)


def _low(x):
    return jnp.exp(x.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_cast_to_bfloat16_is_not_excused_in_a_float32_program():
    error = relative_l2(np.asarray(_low(X)), np.exp(np.float64(X)))
    exact, _ = widened(_low, X)
    floor = relative_l2(widened(_low, X, signs=Signs(pool(0, 64)))[0], exact)
    assert floor < UNITS["bfloat16"] / 1000 < error
    # In a program that is meant to be bfloat16, it is.
    narrow = relative_l2(widened(_low, X, signs=Signs(pool(0, 64), narrow=True))[0], exact)
    assert error / CAUTION < narrow < CAUTION * error


TABLE = np.float32(np.sin(np.arange(12).reshape(4, 3)))


@pytest.mark.parametrize(
    ("function", "moves"),
    [
        (lambda x: x @ jnp.asarray(TABLE).T, True),
        (lambda x: x * 0.1, True),
        (lambda x: x + 1e-5, True),
        (lambda x: x * 0.5 - 1e4, False),
        (lambda x: jnp.tanh(x @ x.T), False),
        (lambda x: x * jnp.asarray([1, 2, 3]), False),
    ],
    ids=["table", "tenth", "epsilon", "half", "operations", "integers"],
)
def test_constants_moves_what_is_float32_in_a_float64_program_and_nothing_else(function, moves):
    with jax.numpy_dtype_promotion("standard"):
        exact, _ = widened(function, X)
        moved, _ = widened(function, X, signs=Signs(pool(0, 64), operations=0.0, constants=1.0))
    assert (relative_l2(moved, exact) > roundoff(16, np.float64)) == moves


@pytest.mark.parametrize("what", ["operations", "constants"])
def test_in_a_table_only_what_was_rounded_moves(what):
    """The mask of an attention with slopes: -1e4 and 0 are meant, what lies between was rounded."""
    table = np.float32([[-1e4, 0.0, 0.1], [1.0, 1 / 3, -0.5]])
    is_rounded = np.array([[False, False, True], [False, True, False]])

    def function(x):
        return jnp.where(x > 2, x, jnp.asarray(table))

    on = {"operations": 0.0, "constants": 0.0, what: 1.0}
    moved, _ = widened(function, X, signs=Signs(pool(0, 64), **on))
    assert np.array_equal(moved != np.float64(table), is_rounded)


def _causal(x):
    # Positions in float32, as Keras counts them.
    positions = jnp.arange(9, dtype=jnp.float32) + jnp.float32(3)
    return jnp.where(positions[:, None] - 3 >= jnp.arange(9, dtype=jnp.float32), x, 0.0)


def test_positions_counted_in_float32_are_exact():
    x = np.ones((9, 9), np.float32)
    for seed in range(4):
        assert np.array_equal(widened(_causal, x, signs=Signs(pool(seed, 256)))[0], np.tril(x))


def test_frequencies_made_of_counters_are_rounded():
    def frequencies(x):
        return x * 10_000.0 ** (-jnp.arange(8, dtype=jnp.float32) / 7)

    x = np.ones(8, np.float32)
    exact, moved = widened(frequencies, x)[0], widened(frequencies, x, signs=Signs(pool(0, 64)))[0]
    assert 0 < relative_l2(moved, exact) < roundoff(8)
    assert (moved[1:] != exact[1:]).all()


def test_a_mark_without_a_name_is_no_stage():
    def function(x):
        return jax.lax.cond(x[0, 0] < 0, lambda x: checkpoint_name(x, None), jnp.sin, x) + 1.0

    def loop(x):
        step = lambda c: checkpoint_name(c + 1.0, None)  # noqa: E731
        return jax.lax.while_loop(lambda c: jnp.all(c < 4), step, x)

    assert evaluate(loop, X)[2] == ()
    plain = evaluate(lambda x: checkpoint_name(x, None) * 2.0, X)
    assert np.array_equal(plain[0], X * 2) and not plain[1].values
    assert np.array_equal(evaluate(function, X)[0], X + 1)


def test_a_part_of_a_program_on_a_mesh_runs_in_its_own_dtype_and_that_is_noted():
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    spec = jax.sharding.PartitionSpec
    summed = jax.shard_map(
        lambda x: jax.lax.psum(jnp.sin(x), "x"), mesh=mesh, in_specs=spec("x"), out_specs=spec()
    )
    result, notices = widened(lambda x: 2 * summed(x), X, signs=Signs(pool(0, 64)))
    assert result.dtype == np.float64
    assert 0 < relative_l2(result, 2 * np.sin(np.float64(X))) < roundoff(8)
    [notice] = notices
    assert notice.startswith("shard_map ran in its own dtype instead of float64")


def test_one_mark_may_be_replaced_and_another_one_offset():
    def function(x):
        a = checkpoint_name(x * 2, "a")
        return checkpoint_name(a + 1, "b") * 3

    both = capture(function, offsets={"a": 1.0}, forced={"b": jnp.float32(5.0)})
    result, marks = both(jnp.float32(1.0))
    assert (float(result), float(marks["a"]), float(marks["b"])) == (15.0, 3.0, 4.0)
    # One mark that is both goes on as its replacement and is reported with its offset.
    both = capture(function, offsets={"a": 1.0}, forced={"a": jnp.float32(5.0)})
    result, marks = both(jnp.float32(1.0))
    assert (float(result), float(marks["a"]), float(marks["b"])) == (18.0, 3.0, 6.0)
    result, marks = capture(function, offsets={"a": 1.0})(jnp.float32(1.0))
    assert (float(result), float(marks["b"])) == (12.0, 4.0)
    result, marks = capture(function, forced={"a": jnp.float32(5.0)})(jnp.float32(1.0))
    assert (float(result), float(marks["a"]), float(marks["b"])) == (18.0, 2.0, 6.0)


def test_a_captured_function_takes_and_returns_what_it_did_before():
    """Trees of arrays, in the order in which it names them."""

    def function(params, rows):
        y = checkpoint_name(params["b"] * 2, "inner") + params["a"]
        return {"last": rows[1] - y, "first": (y, rows[0])}

    arguments = {"b": X, "a": X + 1}, (X + 2, X + 3)
    result, marks = capture(function)(*arguments)
    assert jax.tree.all(jax.tree.map(np.array_equal, result, function(*arguments)))
    assert np.array_equal(marks["inner"], X * 2)


@pytest.mark.parametrize("integers_first", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_integers_in_a_product_are_exact(integers_first: bool, wide: bool):
    """A mask of heads may be an integer array: one that was perturbed would be cut to 0."""
    mask = np.ones((3, 8) if wide else (3,), np.int32)
    x = np.linspace(0.5, 2.0, 3 if wide else 12, dtype=np.float32).reshape(3, -1)

    def product(mask, x):
        first, second = (mask, x) if integers_first else (x, mask)
        return jax.lax.dot_general(
            first, second, (((), ()), ((0,), (0,))), preferred_element_type=jnp.float32
        )

    exact, _ = widened(product, mask, x)
    moved, notices = widened(product, mask, x, signs=Signs(pool(0, 64)))
    assert 0 < relative_l2(moved, exact) < roundoff(8) and not notices


def test_an_integer_that_fits_into_its_float_is_exact():
    """As the mask of `scores - 1e30 * (1.0 - mask)`, whose 1 must not become 1 + 6e-8."""
    numbers = np.array([0, 1, -7, 2**24 - 1, 2**24 + 2, -(2**28 + 64)], np.int32)
    signs = Signs(pool(0, 64))
    moved, _ = widened(lambda x: x.astype(jnp.float32), numbers, signs=signs)
    assert (moved == numbers).tolist() == [True, True, True, True, False, False]
    assert np.all(np.abs(moved - numbers) <= roundoff(2) * np.abs(numbers))
    on, _ = widened(lambda x: x.astype(jnp.float32), np.array([True, False]), signs=signs)
    assert on.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("literal", [True, 3])
def test_a_literal_that_is_cast_is_exact(literal: bool | int):
    cast = jax.jit(lambda n: jax.lax.convert_element_type(n, jnp.float32))
    moved, notices = widened(
        lambda x: x + cast(literal) - cast(literal), X, signs=Signs(pool(0, 64))
    )
    assert relative_l2(moved, np.float64(X)) < roundoff(16) and not notices
