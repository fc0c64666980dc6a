"""Operations, their lines and their numbers: searches over programs that are written down."""

from __future__ import annotations

import inspect
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity.engine.measure.where import ALL_PADDING, FILLED, RANGES, REGIONS, Axis, where
from parity.engine.pairing.constructions import cut, laid_out
from parity.engine.pairing.conventions import CONVENTIONS, Conventions
from parity.engine.pairing.irregularities import (
    exchanged,
    irregularities,
    placed_by_name,
    unlike_others,
)
from parity.engine.pairing.layouts import Layout, identity, transposition
from parity.engine.pairing.parameter_pairs import Means, Pair
from parity.engine.pairing.value_search import part_of
from parity.engine.programs.evaluation import Evaluation
from parity.engine.programs.marks import Marks
from parity.engine.programs.operations import (
    FEWEST,
    MASKING,
    SMALLEST_MASK,
    Operation,
    Recorder,
    Unknown,
    _shares,
    first_narrow,
    first_unknown,
)
from parity.engine.programs.source_lines import LINES, Line, excerpt
from parity.engine.programs.unseen import (
    APPLIES,
    CALLS,
    CALLS_MASK,
    SAME,
    SELECT,
    Search,
    Seen,
    Suspect,
    _telling,
    mask_of,
    search,
)


def op(primitive: str, parents: tuple[int, ...] = (), *source: str, **how) -> Operation:
    return Operation(primitive, source or (f"{primitive}.py:1 (f)",), parents, **how)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


A, B, C, D = (draw(4, 5, seed=n) for n in range(4))
MASK = np.arange(20).reshape(4, 5) % 3 > 0


def test_the_first_unknown_operation_is_one_that_nothing_known_follows():
    """0 is known; 1 leads to 2, which is known; 3 is unknown and leads nowhere; 4 is the stage."""
    operations = {
        0: op("a"),
        1: op("b", (0,)),
        2: op("c", (1,)),
        3: op("d", (2,)),
        4: op("e", (3,)),
    }
    values = {0: A, 1: B, 2: C, 3: D, 4: A + B}
    known = [A.T, C[::-1].reshape(-1)]
    assert first_unknown(operations, values, known, 1e-9) == Unknown(("d.py:1 (f)",))
    # What is wrong is known to be wrong, even where its numbers are found.
    found = first_unknown(operations, values, [A, C, D, A + B], 1e-9)
    assert found == Unknown(("e.py:1 (f)",))
    # An operation without a line is passed over, and so is one whose numbers say nothing.
    values[3], nameless = np.ones((4, 5)), operations | {4: Operation("e", (), (3,))}
    assert first_unknown(nameless, values, known, 1e-9) is None


@pytest.mark.parametrize("right", [0, 1, 3], ids=str)
@pytest.mark.parametrize("primitive", ["scan", "slice"])
def test_a_loop_s_operand_is_right_only_if_every_iteration_s_part_is(primitive: str, right: int):
    """0 is read in three parts, of which the first `right` are known; a single slice may be one of
    several of a fused result, whose other parts are wrong later."""
    parts = {n: op(primitive, (0,)) for n in (1, 2, 3)}
    operations = {0: op("made")} | parts | {4: op("end", (1, 2, 3))}
    values = {0: A[:3], 1: A[0], 2: A[1], 3: A[2], 4: B}
    found = first_unknown(operations, values, [A[n] for n in range(right)], 1e-9)
    assert found is not None
    first = {0: "made", 1: "made" if primitive == "scan" else "slice", 3: "end"}[right]
    assert found.source == (f"{first}.py:1 (f)",)
    # Of a loop of one iteration that part is the whole, and what follows from one of two is enough.
    once = {0: op("made"), 1: op(primitive, (0,)), 2: op("known", (1,)), 3: op(primitive, (0,))}
    values = {0: A[:1], 1: A[0], 2: B, 3: A[0], 4: C}
    found = first_unknown(once | {4: op("end", (3,))}, values, [B], 1e-9)
    assert found is not None and found.source == (f"{primitive}.py:1 (f)",)
    # What the loop stacks is no part of an operand.
    stacked = {0: op("made"), 1: op("scan", (0,)), 2: op("scan", (1,)), 3: op("end", (2,))}
    values = {0: A[0], 1: A, 2: A[0] + 1, 3: B}
    found = first_unknown(stacked, values, [A], 1e-9)
    assert found is not None and found.source == ("scan.py:1 (f)",)
    assert operations[0].source != found.source


@pytest.mark.parametrize(
    ("other", "known"),
    [
        (lambda x: x, True),
        (lambda x: x.T[::-1], True),
        # Each of the other's numbers as often as the array is broadcast, and no oftener.
        (lambda x: np.repeat(x, 3), True),
        (lambda x: np.concatenate([x.ravel(), x.ravel()]), True),
        (lambda x: np.append(x, 1.0), False),
        (lambda x: x + 1e-3, False),
        (lambda x: x * (1 + 1e-7), True),
        # What only masks is no number of it.
        (lambda x: np.append(x, [-MASKING, math.inf]), True),
        (lambda x: x[:2], False),
    ],
)
def test_numbers_are_known_in_any_order_and_any_number_of_times(other, known: bool):
    operations = {0: op("a"), 1: op("z", (0,))}
    values = {0: A, 1: B}
    found = first_unknown(operations, values, [np.asarray(other(A))], 1e-6)
    assert found is not None and found.source == (("z" if known else "a") + ".py:1 (f)",)
    # Broadcast in the program, and once in the other one.
    values = {0: np.asarray(other(A)), 1: B}
    found = first_unknown(operations, values, [A], 1e-6)
    assert found is not None and found.source == (("z" if known else "a") + ".py:1 (f)",)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_numbers_of_one_sign_are_known_but_for_rounding_whatever_their_sign(sign: float):
    """The largest magnitude is the first number of the ascending ones, or the last."""
    numbers = sign * np.geomspace(1e-9, 1.0, 20)
    found = first_unknown(
        {0: op("a"), 1: op("z", (0,))}, {0: numbers * (1 + 1e-7), 1: B}, [numbers], 1e-6
    )
    assert found == Unknown(("z.py:1 (f)",))


def test_copies_that_rounding_moved_up_and_down_are_as_one() -> None:
    """The middle one of each number's copies is compared."""
    same = 1e-6
    moves = np.random.default_rng(4).permuted(np.tile([-1.5, 0.0, 1.5], (20, 1)), axis=1)
    copies = A.reshape(-1, 1) * (1 + same * moves)
    found = first_unknown({0: op("a"), 1: op("z", (0,))}, {0: copies, 1: B}, [A], same)
    assert found == Unknown(("z.py:1 (f)",))


@pytest.mark.parametrize(("error", "known"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("place", [0, 50, 99])
def test_all_of_the_error_may_be_one_number_s(place: int, error: float, known: bool):
    """The error of an array is its norm, however it lies."""
    numbers, same = np.linspace(1.0, 2.0, 100), 1e-6
    other = numbers.copy()
    other[place] += error * same * np.linalg.norm(numbers)
    found = first_unknown({0: op("a"), 1: op("z", (0,))}, {0: other, 1: B}, [numbers], same)
    assert found == Unknown((("z" if known else "a") + ".py:1 (f)",))


def test_a_mask_is_known_by_its_shares_and_named_where_it_is_made():
    mask = np.arange(SMALLEST_MASK) % 4 == 0
    other = np.arange(SMALLEST_MASK) % 2 == 0
    big = draw(SMALLEST_MASK, seed=9)
    operations = {
        0: op("iota"),
        1: op("ge", (0,)),
        2: op("and", (1,)),
        3: op("mul", (2, 9)),
        4: op("out", (3,)),
    }
    values = {0: np.arange(SMALLEST_MASK), 1: other, 2: mask, 3: big, 4: big + 1}
    found = first_unknown(operations, values, [other.astype(float)], 1e-9)
    assert found == Unknown(("mul.py:1 (f)",), ("and.py:1 (f)",))
    both = first_unknown(operations, values, [], 1e-9)
    assert both == Unknown(("mul.py:1 (f)",), ("ge.py:1 (f)", "and.py:1 (f)"))
    # Lines are in the order in which the masks are made, however many operations there are.
    long = {n: op(f"p{n}", (n - 1,) if n else ()) for n in range(12)}
    masks = dict.fromkeys(range(12), mask) | {0: np.arange(SMALLEST_MASK), 10: big, 11: big + 1}
    found = first_unknown(long, masks, [], 1e-9)
    assert found == Unknown(("p10.py:1 (f)",), tuple(f"p{n}.py:1 (f)" for n in range(1, 10)))
    apart = {n: op(f"p{n}") for n in (1, 8, 16, 33)} | {
        40: op("z", (33, 8, 16, 1)),
        41: op("e", (40,)),
    }
    masks = dict.fromkeys(apart, mask) | {40: big, 41: big + 1}
    found = first_unknown(apart, masks, [], 1e-9)
    assert found == Unknown(("z.py:1 (f)",), tuple(f"p{n}.py:1 (f)" for n in (1, 8, 16, 33)))
    # As many as another mask has: that is the same mask, however it lies.
    rolled = first_unknown(operations, values, [np.roll(mask, 1), other], 1e-9)
    assert rolled == Unknown(("mul.py:1 (f)",))


@pytest.mark.parametrize(
    ("values", "telling"),
    [
        (np.array([1.0, 2.0, 3.0]), True),
        (np.array([1.0, 2.0, 2.0, 1.0]), False),
        (np.array([1.0, 2.0, MASKING]), False),
        (np.array([1, 2, 3]), False),
        (np.array([1.0, 2.0]), False),
    ],
)
def test_three_different_numbers_tell_an_array(values: np.ndarray, telling: bool):
    assert FEWEST == 3
    operations = {0: op("a"), 1: op("z", (0,))}
    found = first_unknown(operations, {0: values, 1: B}, [], 1e-9)
    assert found is not None and found.source == (("a" if telling else "z") + ".py:1 (f)",)


def test_an_unknown_result_is_passed_over_if_what_it_joins_is_wrong_without_it():
    """A sum of two biases (0) is added to a product (2) of what is wrong already (1)."""
    operations = {0: op("bias"), 1: op("wrong"), 2: op("product", (1,)), 3: op("add", (0, 2))}
    values = {0: A, 1: B, 2: C, 3: D}
    assert first_unknown(operations, values, [], 1e-9) == Unknown(("wrong.py:1 (f)",))
    # If the product is known, the sum of biases is all that can be wrong.
    assert first_unknown(operations, values, [B, C], 1e-9) == Unknown(("bias.py:1 (f)",))
    # It is used by itself elsewhere, or twice, or made into more before it joins.
    alone = operations | {4: op("exp", (0,)), 5: op("end", (3, 4))}
    assert first_unknown(alone, values | {4: A * A, 5: B * B}, [], 1e-9) == Unknown(
        ("bias.py:1 (f)",)
    )
    twice = {0: op("bias"), 1: op("exp", (0,)), 2: op("add", (0, 1))}
    assert first_unknown(twice, {0: A, 1: B, 2: C}, [], 1e-9) == Unknown(("bias.py:1 (f)",))
    # Two that need one another are told by the first.
    both = {0: op("a"), 1: op("b"), 2: op("add", (0, 1))}
    assert first_unknown(both, {0: A, 1: B, 2: C}, [], 1e-9) == Unknown(("a.py:1 (f)",))


def test_the_first_operation_in_less_than_float32_is_named_by_its_line():
    operations = {
        2: op("c", (), narrow=True),
        0: op("a"),
        1: Operation("b", (), (), narrow=True),
    }
    assert first_narrow(operations) == Unknown(("c.py:1 (f)",))
    assert first_narrow({0: op("a")}) is None
    both = {1: op("b", (), narrow=True), 0: op("a", (), narrow=True)}
    assert first_narrow(both) == Unknown(("a.py:1 (f)",))


def test_a_window_is_what_lies_between_fed_marks():
    recorder = Recorder()
    recorder.operations = [
        op("in"),
        op("name", (0,), mark="first", fed=True),
        op("a", (1,)),
        op("b", (2, 0)),
        op("name", (3,), mark="second", fed=True),
        op("c", (4, 2)),
        op("alone"),
        op("name", (5,), mark="third"),
    ]
    assert recorder.window(3) == [0, 2, 3]
    assert recorder.window(5) == [2, 5]
    assert recorder.window(4) == [0, 2, 3, 4]
    beside = [o.primitive for o in recorder.beside({"third"})]
    assert beside == ["in", "b", "alone"]
    assert [o.primitive for o in recorder.beside(())] == ["in", "a", "b", "c", "alone"]
    assert [o.primitive for o in recorder.beside({"first", "second", "third"})] == ["alone"]
    # What was not fed is the program's own result, and does not end a window.
    recorder.operations[4] = op("name", (3,), mark="second")
    assert recorder.window(5) == [0, 2, 3, 5]
    recorder.operations[1] = op("name", (0,), mark="first")
    assert recorder.window(2) == [0, 2]


def test_what_follows_a_call_is_not_inside_of_it(x64):
    """Lines of a call are those of what is done in it, and of nothing behind it."""
    recorder = Recorder()

    def inner(x):
        return jnp.sin(x)

    def outer(x):
        y = jax.jit(inner)(x)
        return jnp.cos(y)

    closed = jax.make_jaxpr(outer)(jnp.ones(3))
    Evaluation(widened=True, recorder=recorder).run(closed, [np.ones(3)], Marks())
    sources = {o.primitive: o.source for o in recorder.operations}
    first = inspect.getsourcelines(outer)[1]
    calls = {
        name: [line for line in source if f":{first + 1} " in line]
        for name, source in sources.items()
    }
    assert calls["sin"] and not calls["cos"]
    assert any(f":{first + 2} " in line for line in sources["cos"])
    assert recorder.operations[-1].parents == (len(recorder.operations) - 2,)


def test_numbers_are_unseen_that_are_nowhere_within_reach():
    seen = Seen([A, np.array([1 + 2j, 0.25 - 0.75j]), np.array([3, 4])])
    reach = SAME * math.sqrt(float(np.mean(A**2)))
    moved = A.copy()
    moved[0, 0] += 0.5 * reach
    moved[1, 1] += 4 * reach
    moved[2, 2], moved[3, 3], moved[3, 4] = 7.0, -MASKING, np.nan
    expected = np.zeros((4, 5), bool)
    expected[1, 1] = expected[3, 4] = True
    assert np.array_equal(seen.unseen(moved), expected)
    # Within reach of the size of most numbers, not of the largest.
    apart = np.append(A, 1e3)
    apart[0] += 2 * SAME * math.sqrt(float(np.mean(apart**2)))
    assert np.flatnonzero(Seen([A]).unseen(apart)).tolist() == [0]
    # Parts of complex numbers are numbers; and neither end of the list is beyond reach.
    assert not seen.unseen(np.array([0.25, -0.75])).any()
    low, high = A.min(), A.max()
    assert not Seen([A]).unseen(np.array([low, high])).any()
    assert Seen([A]).unseen(np.array([low - 1, high + 1])).all()
    assert Seen([]).unseen(np.array([0.3])).all()


def test_a_mask_is_wrong_where_it_keeps_what_the_other_masks_or_the_other_way_round():
    theirs = np.where(MASK, A, -np.inf)
    seen = Seen([A, theirs, np.where(~MASK, B, -np.inf)])
    kept = MASK.copy()
    kept[0, 0], kept[0, 1] = True, False
    assert not MASK[0, 0] and MASK[0, 1]
    found = seen.wrongly_masked(kept, A)
    assert found is not None and np.argwhere(found).tolist() == [[0, 0], [0, 1]]
    assert not np.any(seen.wrongly_masked(MASK, A))
    # Of a number that is wrong itself nothing is known; of what is masked nowhere, nothing at all.
    wrong = A.copy()
    wrong[0, 0] += 1e-3
    found = seen.wrongly_masked(kept, wrong)
    assert found is not None and np.argwhere(found).tolist() == [[0, 1]]
    assert seen.wrongly_masked(kept, D) is None
    assert Seen([A]).wrongly_masked(kept, A) is None


def test_the_counterpart_of_a_masked_array_shares_what_is_kept_and_not_what_is_masked():
    """Another array may keep more of the numbers, all of which this one masks."""
    few = np.arange(20).reshape(4, 5) < 5
    seen = Seen([np.where(few, A, -np.inf), np.where(~few, A, -np.inf)])
    kept = few.copy()
    kept[0, 0], kept[1, 0] = False, True
    found = seen.wrongly_masked(kept, A)
    assert found is not None and np.argwhere(found).tolist() == [[0, 0], [1, 0]]


def test_a_mask_that_is_repeated_has_the_same_shares():
    assert _shares(MASK) == _shares(np.stack([MASK] * 3)) != _shares(MASK[:2])
    # One element more is another mask.
    many = np.arange(30_000)
    assert _shares(many < 10_000) == _shares(many[:3] < 1) != _shares(many < 10_001)


def test_masked_numbers_tell_nothing():
    assert not _telling(np.array([1.5, 2.5, -np.inf, -2 * MASKING]))
    assert _telling(np.array([1.5, 2.5, 3.5, -np.inf]))


def test_the_first_result_of_an_operation_is_recorded():
    [eqn] = jax.make_jaxpr(lambda x: jax.lax.top_k(x, 2))(jnp.arange(4.0)).eqns
    recorder = Recorder()
    largest, indices, x = np.array([3.0, 2.0]), np.array([3, 2]), np.arange(4.0)
    recorder.note(eqn, [x], [largest, indices])
    assert recorder.values == [largest] and recorder.producer(indices) == 0
    # An array that is made later must not get the identity of one that is gone.
    held = weakref.ref(indices)
    del indices
    assert held() is not None


def test_a_loop_repeats_what_is_in_it_until_it_ends():
    recorder = Recorder()
    with recorder.turn(1, 3):
        with recorder.turn(0, 5):
            assert recorder.times == 15
        assert recorder.times == 3
    assert recorder.times == 1


def searched(operations, values, known, beside=()):
    found = search(operations, values, Seen(known), "the oracle", beside)
    return found, [(s.index, s.partly, s.mask) for s in found.suspects]


def test_suspects_are_what_is_nowhere_and_leads_to_nothing_that_is_right():
    half = np.where(np.arange(20).reshape(4, 5) < 10, C, C + 0.1)
    operations = {
        0: op("a"),
        1: op("other_way", (0,)),
        2: op("back", (1,)),
        3: op("partly", (2,)),
        4: op("wholly", (3,)),
        5: op("ids", (4,)),
        6: op("last", (4,)),
    }
    values = {0: A, 1: B, 2: A * 2, 3: half, 4: D, 5: np.arange(20), 6: A * 2}
    found, suspects = searched(operations, values, [A, A * 2, C])
    # The last is wrong although its numbers are known; whole numbers are judged nowhere.
    assert suspects == [(3, True, False), (4, False, False)]
    assert found.fine == {0, 1, 2} and found.first is found.suspects[0]
    why = "first operation whose result the oracle does not compute"
    assert [(line.place, line.why) for line in found.lines()] == [("partly.py:1 (f)", why)]
    assert np.array_equal(found.suspects[0].wrong, half != C)
    # Where all of each is wrong, the first, down to the last.
    values[3] = B + 0.5
    found, suspects = searched(operations, values, [A, A * 2, C])
    assert suspects == [(3, False, False), (4, False, False)]
    down = f"{why}: the bug is in it or in a later operation, up to wholly.py:1 (f)"
    assert [line.why for line in found.lines()] == [down]


def test_what_only_moves_numbers_is_not_where_they_went_wrong():
    half = np.where(MASK, C, C + 0.1)
    operations = {0: op("wrong"), 1: op("reshape", (0,)), 2: op("part", (1,)), 3: op("z", (2,))}
    part = np.where(MASK, A, A + 0.1)
    values = {0: B, 1: half, 2: part, 3: D}
    found, _ = searched(operations, values, [A, C])
    assert found.first is not None and found.first.index == 2
    before = "runs before it, in a computation that the oracle does not do"
    lines = [(line.place, line.why) for line in found.lines()]
    # The first of them first: a wrong angle makes all that follows it wrong as a whole.
    assert lines[1:] == [("wrong.py:1 (f)", before), ("reshape.py:1 (f)", before)]


@pytest.mark.parametrize(
    ("product", "after", "first"),
    [
        # Right where it is the operand's number: the suspects before it stay suspects.
        (A, None, 0),
        # Right in numbers of its own, or followed by a result that is: all before it may be right.
        (C, None, 2),
        (A, C, 2),
    ],
)
def test_numbers_of_an_operand_show_nothing_about_how_a_result_was_computed(product, after, first):
    """The first token attends to itself alone: its result is right whatever its key is."""
    operations = {0: op("keys"), 1: op("values"), 2: op("product", (0, 1)), 3: op("z", (2,))}
    last = D + 0.3 if after is None else np.where(MASK, after, D + 0.3)
    values = {0: B, 1: A, 2: np.where(MASK, product, D), 3: last}
    found, suspects = searched(operations, values, [A, C])
    assert [index for index, *_ in suspects] == [0, 2, 3]
    assert found.first is not None and found.first.index == first
    # Either may be the cause, so both are named.
    assert {line.place for line in found.lines()} >= {"keys.py:1 (f)", "product.py:1 (f)"}


def test_a_wrong_mask_is_looked_at_first_and_named_where_it_is_made():
    wrong = MASK.copy()
    wrong[0] = ~wrong[0]
    operations = {
        0: op("scores"),
        1: op("iota", (), "make.py:2 (g)", "call.py:9 (h)"),
        2: op("ge", (1,), "make.py:3 (g)", "call.py:9 (h)"),
        3: op(SELECT, (2, 0), "apply.py:4 (k)"),
        4: op("exp", (3,)),
        5: op("last", (4,)),
    }
    masked = np.where(wrong, A, -np.inf)
    values = {0: A, 1: wrong, 2: wrong, 3: masked, 4: B + 0.3, 5: D}
    known = [A, np.where(MASK, A, -np.inf), C]
    found, suspects = searched(operations, values, known)
    assert suspects[0] == (3, False, True) and mask_of(3, operations, values) == [1, 2]
    makes = "makes a mask that the oracle does not have"
    assert [(line.place, line.why) for line in found.lines()] == [
        ("make.py:3 (g)", makes),
        ("make.py:2 (g)", makes),
        ("apply.py:4 (k)", APPLIES),
    ]
    # Made rightly when it is called from elsewhere: the call is what is wrong.
    beside = [
        op("iota", (), "make.py:2 (g)", "right.py:9 (h)"),
        op("ge", (), "make.py:3 (g)", "right.py:9 (h)"),
    ]
    found, _ = searched(operations, values, known, beside)
    assert [(line.place, line.why) for line in found.lines()] == [
        ("call.py:9 (h)", CALLS_MASK),
        ("apply.py:4 (k)", APPLIES),
    ]
    # Made rightly by the same calls, as in another turn of a loop: neither line is what is wrong.
    found, _ = searched(operations, values, known, [operations[1], operations[2]])
    assert [line.place for line in found.lines()] == ["apply.py:4 (k)"]
    # The right mask is no suspect.
    values[3] = np.where(MASK, A, -np.inf)
    assert 3 not in [s.index for s in searched(operations, values, known)[0].suspects]


def test_a_function_that_is_right_elsewhere_is_named_by_its_call():
    source = ("f.py:1 (f)", "g.py:5 (g)", "h.py:7 (h)", "i.py:8 (i)", "j.py:9 (j)")
    operations = {0: op("mul", (), *source), 1: op("z", (0,))}
    values = {0: B, 1: D}
    beside = [op("mul", (), "f.py:1 (f)", "g.py:6 (g)", "h.py:7 (h)")]
    found, _ = searched(operations, values, [A], beside)
    assert [line.place for line in found.lines()] == ["g.py:5 (g)", "f.py:1 (f)"]
    assert found.lines()[0].why == CALLS
    # Callers are named of the line itself, three of them.
    assert found.lines()[1].why.endswith("; called from g.py:5 (g), h.py:7 (h), i.py:8 (i)")
    # Another primitive on that line tells nothing, and the same way of calls tells none apart.
    other = [op("add", (), *source)]
    found, _ = searched(operations, values, [A], other)
    assert [line.place for line in found.lines()] == ["f.py:1 (f)"]
    alike = [op("mul", (), *source)]
    found, _ = searched(operations, values, [A], alike)
    assert [line.place for line in found.lines()] == ["f.py:1 (f)"]
    # A line may compute several numbers, and not all of them are wrong in the wrong call.
    found, _ = searched(operations, values, [A], [*alike, *beside])
    assert [line.place for line in found.lines()] == ["g.py:5 (g)", "f.py:1 (f)"]


def test_where_each_number_is_known_the_last_lines_are_named():
    operations = {n: op(f"p{n}", (n - 1,) if n else ()) for n in range(LINES + 2)}
    values = {n: draw(3, 3, seed=n) for n in operations}
    found, suspects = searched(operations, values, [*values.values()])
    assert suspects == [] and found.first is None
    last = [f"p{n}.py:1 (f)" for n in range(LINES + 1, 1, -1)]
    assert [line.place for line in found.lines()] == last
    assert all(
        line.why.startswith("near the end of the stage: the oracle") for line in found.lines()
    )
    bare = Search({0: Operation("x", (), ())}, {}, (Suspect(0, np.ones(1, bool)),), frozenset())
    assert bare.lines() == []


def test_a_text_around_a_line_is_numbered_and_shifted(tmp_path, monkeypatch):
    text = [
        "def f():",
        "    if x:",
        "        a = 1",
        "",
        "        b = 2",
        "    return",
        "",
        "",
        "z",
        "y",
    ]
    (tmp_path / "m.py").write_text("\n".join(text), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert excerpt("m.py:5 (f)", 2) == "\n".join(
        ["  3      a = 1", "  4", "> 5      b = 2", "  6  return", "  7"]
    )
    assert excerpt("m.py:1 (f)", 1) == "> 1  def f():\n  2      if x:"
    # Numbers are as wide as the last one.
    assert excerpt("m.py:9 (f)", 1).split("\n") == ["   8", ">  9  z", "  10  y"]
    assert len(excerpt("m.py:5 (f)").split("\n")) == 7
    for place in ("m.py:0 (f)", "m.py:11 (f)", "n.py:1 (f)", "m.py:1", "m.py"):
        assert excerpt(place) == "" and Line.at(place, "why") == Line(place, "why", "")
    assert excerpt("m.py:10 (f)", 0) == "> 10  y"
    (tmp_path / "bad.py").write_bytes(b"\xff\n")
    assert excerpt("bad.py:1 (f)") == ""


AXES = (Axis("row"), Axis("position", "chunk", 4), Axis("channel", "head", 3))
SHAPE = (3, 10, 6)
VALID = np.ones(SHAPE[:2], bool)
VALID[0, 8:] = False


def at(*index: object) -> np.ndarray:
    found = np.zeros(SHAPE, bool)
    found[index] = True
    return found


EVERY = slice(None)
SENTENCES = [
    (at(0, 8), "row 0, position 8, all channels: all padding, in chunk 2, the tail of 2"),
    (at(0, slice(6, None)), "row 0, positions 6-9, all channels: padding too"),
    (at(1, slice(4, 8)), "row 1, positions 4-7, all channels: no padding, chunk 1"),
    (at(EVERY, slice(0, 8)), "all rows, positions 0-7, all channels: no padding, chunks 0-1"),
    (at(EVERY, [2, 6]), "all rows, positions 2, 6, all channels: no padding, "
                        "place 2 of chunks 0-1"),
    (at(EVERY, [0, 4, 8]), "all rows, positions 0, 4, 8, all channels: padding too, "
                           "the first of chunks 0-2"),
    (at(EVERY, [3, 7]), "all rows, positions 3, 7, all channels: no padding, "
                        "the last of chunks 0-1"),
    (at(EVERY, [1, 2]), "all rows, positions 1-2, all channels: no padding, in chunk 0"),
    (at(EVERY, [1, 6]), "all rows, positions 1, 6, all channels: no padding"),
    (at(EVERY, slice(0, 10, 2)), "all rows, every 2nd position from 0 to 8, all channels: "
                                 "padding too"),
    (at(EVERY, EVERY, [0, 3]), "all rows, all positions, channels 0, 3: padding too, "
                               "the first of heads 0-1"),
    (at(EVERY, EVERY, slice(3, 6)), "all rows, all positions, channels 3-5: padding too, head 1"),
    (at([0, 2], 3, 4), "rows 0, 2, position 3, channel 4: no padding, in chunk 0, in head 1"),
    (at(), "everywhere"),
    (at() & VALID[..., None], None),
    (at(1, 3) | at(2, 5, slice(0, 3)),
     "row 1, position 3, all channels; row 2, position 5, channels 0-2: no padding, in chunk 0, "
     "in chunk 1, head 0"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SENTENCES)))
def test_a_sentence_is_the_smallest_description(number: int):
    differs, sentence = SENTENCES[number]
    if sentence is not None:
        assert where(differs, AXES, VALID) == sentence
    else:
        assert where(differs, AXES, VALID).endswith("no padding")
    # Without padding among what was compared, none is spoken of.
    inside = where(differs & VALID[..., None], AXES, VALID, VALID)
    assert "padding" not in inside
    assert where(differs, AXES).replace("everywhere", "") == where(
        differs, AXES, np.ones(SHAPE[:2], bool)
    ).replace("everywhere", "")


def test_regions_that_fit_along_several_axes_are_split_along_the_first():
    differs = np.zeros((6, 6), bool)
    differs[0, :4] = differs[:4, 0] = True
    assert where(differs) == "axis 0: 0, axis 1: 0-3; axis 0: 1-3, axis 1: 0"
    assert where(differs.T) == where(differs)


def test_ranges_that_are_many_are_counted():
    line = np.zeros(30, bool)
    line[[0, 3, 6, 9]] = True
    assert RANGES == 4 and where(line, (Axis("step"),)) == "steps 0, 3, 6, 9"
    line[12] = True
    assert where(line, (Axis("step"),)) == "every 3rd step from 0 to 12"
    assert where(line) == "axis 0: every 3rd from 0 to 12"
    line[13] = True
    assert where(line, (Axis("step"),)) == "6 of 30 steps from 0 to 13"
    assert where(line) == "axis 0: 6 of 30 from 0 to 13"
    # The first step and the last are no rule for those between.
    uneven = np.zeros(30, bool)
    uneven[[0, 2, 5, 7, 10, 12]] = True
    assert where(uneven, (Axis("step"),)) == "6 of 30 steps from 0 to 12"
    many = np.zeros(4000, bool)
    many[::11] = True
    assert where(many, (Axis("step"),)) == "every 11th step from 0 to 3993"
    many[5] = True
    assert where(many, (Axis("step"),)) == "365 of 4,000 steps from 0 to 3993"


@pytest.mark.parametrize(
    ("n", "text"),
    [(2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st"),
     (22, "22nd"), (111, "111th"), (101, "101st")],
)  # fmt: skip
def test_ordinals(n: int, text: str):
    line = np.zeros(7 * n, bool)
    line[::n] = True
    assert where(line, (Axis("step"),)) == f"every {text} step from 0 to {6 * n}"


def test_shares_of_regions_are_said_where_they_are_not_nearly_all():
    """Nine of ten elements of a region are the region; fewer are a share of it."""
    block = np.zeros((10, 12), bool)
    block[:5, :4] = True
    assert where(block) == "axis 0: 0-4, axis 1: 0-3"
    block[0, 0] = block[3, 2] = False
    assert FILLED == 0.9 and where(block) == "axis 0: 0-4, axis 1: 0-3"
    block[1, 1] = False
    assert where(block) != "axis 0: 0-4, axis 1: 0-3"
    # Rows and columns that differ in nearly all layers, and nine of ten pairs of them.
    layers = np.repeat(~np.eye(10, dtype=bool)[None], 10, axis=0)
    layers[3, 0, 1] = False
    assert where(layers) == "everywhere"
    layers[:, 0, 1] = False
    assert where(layers) == "89 % of all elements"
    rng = np.random.default_rng(1)
    assert where(np.eye(200) > 0) == "under 1 % of all elements"
    inside = np.zeros((300, 300), bool)
    inside[50:250, 50:250] = np.eye(200)
    assert where(inside) == "under 1 % of axis 0: 50-249, axis 1: 50-249"
    assert where(np.eye(100) > 0) == "1 % of all elements"
    assert where(rng.random((40, 50)) < 0.5).startswith("50 % of all elements")
    three = np.zeros((9, 9), bool)
    for k in range(3):
        three[3 * k, 3 * k] = True
    assert REGIONS == 3 and where(three).count(";") == 2
    three[8, 8] = True
    assert ";" not in where(three)


def test_padding_alone_is_called_that():
    assert ALL_PADDING == "all padding"
    assert where(at(0, slice(8, None)), AXES, VALID).count(ALL_PADDING) == 1
    assert where(at(0, 8) | at(1, 1), AXES, VALID).count("padding too") == 1
    # What was compared is everything if the mask is of other axes.
    assert where(at(0, 8), AXES, VALID, np.ones((3, 9), bool)) == where(at(0, 8), AXES, VALID)
    # One block is no block, and a tail is one alone.
    assert where(at(0, 8)[0], (Axis("step", "chunk", 10), AXES[2])) == "step 8, all channels"
    assert where(at(1, slice(4, None)), AXES, VALID).endswith("no padding, chunks 1-2")
    # Names of more axes than there are name none of them.
    assert where(at(0, 8)[0], AXES) == "axis 0: 8, all of axis 1"
    # A mask of other axes says nothing, and a scalar has no place.
    assert "padding" not in where(at(0, 8), AXES, np.ones((3, 9), bool))
    assert where(np.array(True)) == where(np.zeros(3, bool)) == ""
    assert where(at(0, 8), AXES, VALID, VALID) == ""
    assert where(np.array([[True]]), (Axis("row"), Axis("column"))) == "everywhere"


def pair(port: str, original: str, layout: Layout, **how) -> Pair:
    return Pair(port, laid_out(original, layout), Means.VALUE, **how)


TURN, KEEP = transposition((4, 4), (1, 0)), identity((4, 4))


def kernels(*turned: bool, shape: tuple[int, int] = (4, 4)) -> list[Pair]:
    lay = [transposition(shape, (1, 0)) if t else identity(shape) for t in turned]
    return [pair(f"l.{n}.kernel", f"h.{n}.weight", each) for n, each in enumerate(lay)]


def test_the_exception_is_one_of_three_quarters_of_at_least_three():
    told = {"l.1.kernel": "unchanged, where 3 of its kind are transposed (1, 0)"}
    assert unlike_others(kernels(True, False, True, True)) == told
    assert unlike_others(kernels(True, False, True)) == {}
    assert unlike_others(kernels(True, False, True, False)) == {}
    assert unlike_others(kernels(False, True)) == {}
    assert unlike_others(kernels(True, False, True, True, shape=(4, 1))) == {}
    # Vectors lie in one way; and pieces of parameters are no whole ones.
    parts = [
        Pair("l.9.kernel", part_of("h.9.weight", cut((8, 4), (8, 4), 0, 0, 4), KEEP), Means.VALUE)
    ]
    assert irregularities([*kernels(True, True, True), *parts]) == {}
    # Three dimensions are another kind than two.
    deep = [pair(f"c.{n}.kernel", f"d.{n}.weight", identity((2, 3, 4))) for n in range(2)]
    assert unlike_others([*kernels(True, True, True), *deep]) == {}
    names = ("q", "k", "v", "o")
    mixed = [pair(f"{n}.kernel", f"{n}.weight", KEEP if n == "v" else TURN) for n in names]
    mixed += [pair(f"{n}{n}.kernel", f"{n}{n}.weight", identity((4,))) for n in "abcdefghijkl"]
    assert list(unlike_others(mixed)) == ["v.kernel"]
    # Nor are two orders of different numbers of axes comparable.
    cubes = [
        pair(f"l.{n}.kernel", f"h.{n}.weight", transposition((4, 4, 4), (2, 1, 0)))
        for n in range(1, 4)
    ]
    assert unlike_others([*kernels(True), *cubes]) == {}


def test_exchanged_parameters_are_named_by_what_names_would_have():
    names = {"a.query.kernel": "h.key.weight", "a.key.kernel": "h.query.weight",
             "a.value.kernel": "h.value.weight"}  # fmt: skip
    pairs = [pair(port, name, KEEP) for port, name in names.items()]
    assert exchanged(pairs) == {
        "a.query.kernel": "holds h.key.weight; by name it would be h.query.weight",
        "a.key.kernel": "holds h.query.weight; by name it would be h.key.weight",
    }
    # Of other shapes, or of one original, nothing can be exchanged.
    wide = [pairs[0], pair("a.key.kernel", "h.query.weight", identity((4, 5))), pairs[2]]
    assert exchanged(wide) == {} and exchanged(pairs[:1]) == {} and exchanged([]) == {}
    tied = [
        pair("a.query.kernel", "h.key.weight", KEEP),
        pair("a.key.kernel", "h.key.weight", KEEP),
    ]
    assert exchanged(tied) == {}
    both = irregularities([*kernels(True, True, True, True), *pairs])
    assert both["a.query.kernel"].startswith(
        "holds h.key.weight; by name it would be h.query.weight"
    )


def test_conventions_are_torch_s_against_flax_s_and_haiku_s():
    """(out, in, ...) becomes (..., in, out)."""
    for (first, second, axes), order in CONVENTIONS.items():
        assert first == "weight" and second in ("kernel", "w")
        assert order == (*range(2, axes), 1, 0) or (axes == 3 and order == (2, 1, 0))
    assert {(second, axes) for _, second, axes in CONVENTIONS} == {
        *(("kernel", n) for n in (2, 3, 4, 5)), *(("w", n) for n in (2, 3, 4)),
    }  # fmt: skip


def test_neighbours_whose_shapes_decide_have_a_vote():
    shapes_o = {"h.0.weight": (3, 4), "h.1.weight": (5, 5), "g.weight": (6, 6), "v.weight": (2, 7)}
    shapes_p = {
        "l.0.kernel": (3, 4),
        "l.1.kernel": (5, 5),
        "m.x.kernel": (6, 6),
        "k.kernel": (7, 2),
    }
    pairs = {"l.0.kernel": "h.0.weight", "k.kernel": "v.weight"}
    known = Conventions(pairs, shapes_o, shapes_p)
    # Layer 0 lies as it is in a port that does not follow the table, so layer 1 does too.
    assert known.axes("h.1.weight", "l.1.kernel", (5, 5), (5, 5)) == (0, 1)
    # One vote for either elsewhere: the first that was counted.
    assert known.axes("g.weight", "m.x.kernel", (6, 6), (6, 6)) in ((0, 1), (1, 0))
    none = Conventions({}, shapes_o, shapes_p)
    assert none.axes("h.1.weight", "l.1.kernel", (5, 5), (5, 5)) == (1, 0)
    assert none.axes("h.1.kernel", "l.1.weight", (5, 5, 5, 5), (5, 5, 5, 5)) == (3, 2, 0, 1)
    assert none.axes("h.1.table", "l.1.embedding", (5, 5), (5, 5)) == (0, 1)
    # An order that does not fit is none.
    assert none.axes("h.weight", "l.kernel", (3, 4), (3, 4)) == (0, 1)
    assert none.axes("h.table", "l.embedding", (3, 4), (4, 3)) == (1, 0)
    # Of several that fit, the first.
    assert none.axes("h.table", "l.embedding", (5, 5, 3), (3, 5, 5)) == (2, 0, 1)
    # A vote is the order of the original's axes: that of (2, 3, 4) in (4, 2, 3), not its reverse.
    cube, other = {"h.0.weight": (2, 3, 4), "h.1.weight": (5, 5, 5)}, {"l.0.kernel": (4, 2, 3)}
    voted = Conventions({"l.0.kernel": "h.0.weight"}, cube, other)
    assert voted.axes("h.1.weight", "l.1.kernel", (5, 5, 5), (5, 5, 5)) == (2, 0, 1)
    # Squares cast no vote.
    square = Conventions({"l.1.kernel": "h.1.weight"}, shapes_o, shapes_p)
    assert not any(square.votes.values())


def test_the_order_with_most_votes_is_taken_and_not_the_first():
    names = ("x", "y", "z")
    shapes_o = {f"{n}.weight": (3, 4) for n in names}
    shapes_p = {"m.x.kernel": (3, 4), "n.y.kernel": (4, 3), "o.z.kernel": (4, 3)}
    pairs = dict(zip(shapes_p, shapes_o, strict=True))
    known = Conventions(pairs, shapes_o, shapes_p)
    assert known.axes("u.weight", "p.u.kernel", (5, 5), (5, 5)) == (1, 0)


def test_parameters_of_another_layout_are_in_nobody_s_place():
    exchanged = [pair("q.kernel", "k.weight", KEEP), pair("k.kernel", "q.weight", KEEP)]
    others = [pair("v.kernel", "o.weight", KEEP), pair("o.kernel", "v.weight", TURN)]
    found = placed_by_name([*exchanged, *others])
    assert found == {"q.kernel": "q.weight", "k.kernel": "k.weight"}


def test_neighbours_two_modules_above_have_a_vote_before_all_others():
    square = (5, 5)
    shapes_o = {"h.0.a.weight": (3, 4), "x.weight": (2, 7), "y.weight": (2, 7)}
    shapes_p = {"l.0.a.kernel": (3, 4), "m.x.kernel": (7, 2), "m.y.kernel": (7, 2)}
    pairs = {"l.0.a.kernel": "h.0.a.weight", "m.x.kernel": "x.weight", "m.y.kernel": "y.weight"}
    known = Conventions(pairs, shapes_o, shapes_p)
    assert known.axes("h.1.b.weight", "l.1.b.kernel", square, square) == (0, 1)
    assert known.axes("h.1.b.weight", "n.b.kernel", square, square) == (1, 0)


def test_neighbours_in_the_same_module_have_a_vote_before_those_of_the_module_above():
    shapes_o = {f"h.0.{n}.weight": (3, 4) for n in "abc"}
    shapes_p = {"l.0.a.kernel": (3, 4), "l.0.b.kernel": (4, 3), "l.0.c.kernel": (4, 3)}
    known = Conventions(dict(zip(shapes_p, shapes_o, strict=True)), shapes_o, shapes_p)
    assert known.axes("h.1.a.weight", "l.1.a.kernel", (5, 5), (5, 5)) == (0, 1)
    assert known.axes("h.1.d.weight", "l.1.d.kernel", (5, 5), (5, 5)) == (1, 0)


def test_kernels_with_heads_are_matrices_that_lie_the_other_way():
    none = Conventions({}, {}, {})
    x = draw(6, 10)
    into = none.layout("q.weight", "q.kernel", (6, 10), (10, 2, 3))
    assert np.array_equal(into(x), x.T.reshape(10, 2, 3))
    out = none.layout("o.weight", "o.kernel", (6, 10), (2, 5, 6))
    assert np.array_equal(out(x), x.T.reshape(2, 5, 6))
    back = none.layout("q.kernel", "q.weight", (10, 2, 3), (6, 10))
    assert np.array_equal(back(x.T.reshape(10, 2, 3)), x)
    # Of other endings it is reshaped.
    plain = none.layout("q.table", "q.embedding", (6, 10), (2, 3, 10))
    assert np.array_equal(plain(x), x.reshape(2, 3, 10))
    turnable = none.layout("q.table", "q.embedding", (6, 10), (2, 5, 6))
    assert np.array_equal(turnable(x), x.reshape(2, 5, 6))
    # A bias has nothing to turn.
    bias = none.layout("q.bias", "q.bias", (6,), (2, 3))
    assert np.array_equal(bias(x[:, 0]), x[:, 0].reshape(2, 3))
    merged = none.layout("q.weight", "q.kernel", (4, 15), (6, 10))
    assert np.array_equal(merged(x.reshape(4, 15)), x)


def test_elements_that_were_not_compared_leave_no_holes_in_a_region():
    """A region that is wrong throughout is one, though some padding within it was left out."""
    compared = np.ones(SHAPE[:2], bool)
    compared[1, 5::2] = False
    differs = np.zeros(SHAPE, bool)
    differs[:2, 4:] = compared[:2, 4:, None]
    assert (
        where(differs, AXES, None, compared) == "rows 0-1, positions 4-9, all channels: chunks 1-2"
    )
    assert where(differs, AXES) != where(differs, AXES, None, compared)


def test_positions_that_were_not_compared_change_no_description_of_the_others():
    """In every row the last one: what differs in half of the channels is not all of a region."""
    rows, positions, channels = np.indices((4, 5, 6))
    differs, compared = (rows + channels) % 2 == 0, positions[..., 0] < 4
    assert where(differs, compared=compared) == where(differs[:, :4]) != ""
    assert "everywhere" not in where(differs, compared=compared)
