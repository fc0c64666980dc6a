"""What clears an operation of suspicion and what does not, on programs of a few operations."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

from parity.engine.programs.evaluation import Evaluation
from parity.engine.programs.marks import MarkChange, Marks
from parity.engine.programs.operations import (
    SMALLEST_MASK,
    Operation,
    Recorder,
    Unknown,
    _implicated,
    _in_library,
    _roots,
    _short,
    common_frame,
    first_unknown,
    source_of,
    source_of_error,
)
from parity.engine.programs.unseen import (
    APPLIES,
    CALLS_MASK,
    IDLE,
    SAME,
    SELECT,
    Search,
    Seen,
    Suspect,
    search,
)


def op(primitive: str, parents: tuple[int, ...] = (), *source: str) -> Operation:
    return Operation(primitive, source or (f"{primitive}.py:1 (f)",), parents)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


A, B, C, D = (draw(4, 5, seed=n) for n in range(4))
MASK = np.arange(20).reshape(4, 5) % 3 > 0
WRONG = MASK ^ (np.arange(20).reshape(4, 5) < 5)
MASKED = np.where(MASK, A, -np.inf)


def suspects(operations, values, known) -> list[tuple[int, bool, bool]]:
    found = search(operations, values, Seen(known))
    return [(s.index, s.partly, s.mask) for s in found.suspects]


def test_a_result_explains_those_computed_from_it_alone():
    """Operand 9 is unknown and not computed from 0; operand 1 is computed from both."""
    operations = {0: op("a"), 9: op("b"), 1: op("add", (0, 9)), 2: op("mul", (0, 1))}
    children = {0: [1, 2], 9: [1], 1: [2], 2: []}
    assert _implicated(0, operations, children, {0, 1, 2, 9})
    assert not _implicated(0, operations, children, {0, 1, 9})
    assert not _implicated(0, operations, children, {0})
    assert _implicated(0, operations, children, {0, 1})


# Masks


def test_a_mask_is_recognised_by_numbers_that_differ_by_rounding():
    seen = Seen([A, MASKED])
    found = seen.wrongly_masked(WRONG, A * (1 + SAME / 100))
    assert found is not None and np.array_equal(found, WRONG != MASK)


def test_a_masked_array_is_similar_only_where_the_mask_keeps_its_numbers():
    assert Seen([A, MASKED]).wrongly_masked(~MASK, A) is None


def test_a_right_number_behind_a_wrong_mask_clears_neither_it_nor_what_it_is_made_of():
    """The largest number of a row may be kept by both masks."""
    operations = {
        0: op("scores"),
        1: op("angles"),
        2: op("ge", (1,)),
        3: op(SELECT, (2, 0)),
        4: op("max", (3,)),
        5: op("last", (4,)),
    }
    values = {0: A, 1: B, 2: WRONG, 3: np.where(WRONG, A, -np.inf), 4: A.max(1), 5: D}
    found = suspects(operations, values, [A, MASKED, A.max(1)])
    assert found == [(1, False, False), (3, False, True), (5, False, False)]


@pytest.mark.parametrize(("values", "clears"), [((1.5, 2.5, 3.5), True), ((1.5, 2.5, 2.5), False)])
def test_a_right_result_of_three_different_numbers_clears_what_it_is_made_of(values, clears):
    operations = {0: op("first"), 1: op("few", (0,)), 2: op("last", (1,))}
    few = np.array(values)
    found = suspects(operations, {0: D, 1: few, 2: C}, [A, few])
    assert found[0] == (2 if clears else 0, False, False)


def test_a_selection_that_masks_nothing_has_no_mask():
    operations = {0: op("scores"), 1: op("ge"), 2: op(SELECT, (1, 0)), 3: op("last", (2,))}
    values = {0: A, 1: np.ones((4, 5), bool), 2: A, 3: D}
    assert suspects(operations, values, [A, MASKED]) == [(3, False, False)]


def test_a_mask_that_is_added_in_two_steps_is_not_judged_after_the_first():
    """The other program adds both at once, so it has no array that only the first one masks."""
    padding = MASK | (np.arange(20).reshape(4, 5) < 5)
    assert (padding != MASK).any()
    operations = {
        0: op("scores"),
        1: op("padding"),
        2: op("add", (0, 1)),
        3: op("causal"),
        4: op("add", (2, 3)),
        5: op("last", (4,)),
    }
    first, second = (np.where(kept, 0.0, -np.inf) for kept in (padding, MASK))
    values = {0: A, 1: first, 2: A + first, 3: second, 4: A + first + second, 5: D}
    assert suspects(operations, values, [A, MASKED]) == [(5, False, False)]


def test_wrong_numbers_behind_a_right_mask_are_wrong_numbers():
    moved = np.where(np.arange(20).reshape(4, 5) == 1, A + 0.1, A)
    assert MASK[0, 1]
    operations = {0: op("scores"), 1: op("ge"), 2: op(SELECT, (1, 0)), 3: op("last", (2,))}
    values = {0: A, 1: MASK, 2: np.where(MASK, moved, -np.inf), 3: D}
    assert suspects(operations, values, [A, MASKED])[0] == (2, True, False)
    # Of an operand that is wrong in the same place, the operand is the first.
    values[0] = moved
    assert [index for index, *_ in suspects(operations, values, [A, MASKED])] == [0, 2, 3]


def test_the_masked_operand_is_the_one_whose_numbers_are_all_kept():
    """Another one of the shape has one of them, and stands first."""
    other = np.where(np.arange(20).reshape(4, 5) == 1, A, B)
    operations = {0: op("scores"), 1: op("ge"), 2: op("other"), 3: op(SELECT, (1, 2, 0))}
    operations[4] = op("last", (3,))
    values = {0: A, 1: WRONG, 2: other, 3: np.where(WRONG, A, -np.inf), 4: D}
    assert WRONG[0, 0] and other[0, 1] == A[0, 1]
    values[3][0, 1] = A[0, 1]
    assert (3, False, True) in suspects(operations, values, [A, MASKED])


def test_the_masked_operand_is_an_array_of_numbers_though_all_that_is_kept_is_1():
    """As numbers, truth values would be 1 wherever the mask keeps an element."""
    scores, few, more = A.copy(), np.zeros((4, 5), bool), np.zeros((4, 5), bool)
    scores[0, :3], few[0, :3] = 1.0, True
    more[:2] = True
    operations = {0: op("scores"), 1: op("ge"), 2: op(SELECT, (1, 0)), 3: op("last", (2,))}
    values = {0: scores, 1: few, 2: np.where(few, scores, -np.inf), 3: D}
    found = search(operations, values, Seen([scores, np.where(more, scores, -np.inf)]))
    assert found.first is not None and found.first.mask
    assert np.array_equal(found.first.wrong, more ^ few)


def test_a_wrong_mask_is_looked_at_before_what_is_wrong_in_part():
    operations = {0: op("part"), 1: op(SELECT)}
    part = Suspect(0, MASK, partly=True, computed=True)
    found = (part, Suspect(1, MASK, mask=True))
    first = Search(operations, {0: A, 1: A}, found, frozenset()).first
    assert first is found[1]
    assert Search(operations, {0: A, 1: A}, found[:1], frozenset()).first is part


def test_where_another_call_has_nothing_to_mask_the_mask_itself_is_named_too():
    """A line that is right there may be right by chance: the call alone proves nothing."""
    here, there = ("make.py:3 (g)", "call.py:9 (h)"), ("make.py:3 (g)", "right.py:5 (h)")
    operations = {
        0: op("scores"),
        1: op("lt"),
        2: op("and", (1,), *there),
        3: op(SELECT, (2, 0)),
        4: op("and", (1,), *here),
        5: op(SELECT, (4, 0), "apply.py:4 (k)"),
        6: op("last", (5,)),
    }
    values = {0: A, 1: MASK, 3: A, 4: WRONG, 5: np.where(WRONG, A, -np.inf), 6: D}
    makes = "makes a mask that the original does not have"
    called = [("call.py:9 (h)", CALLS_MASK), ("apply.py:4 (k)", APPLIES)]
    # Nothing is masked by a mask of one value, whichever it is.
    for nothing in (np.ones((4, 5), bool), np.zeros((4, 5), bool)):
        values[2] = nothing
        lines = search(operations, values, Seen([A, MASKED])).lines()
        told = [(line.place, line.why) for line in lines]
        assert told == [("make.py:3 (g)", makes + IDLE), *called]
    # Where that call masks something as well, and rightly, the call is what is wrong.
    values[2], values[3] = MASK, MASKED
    lines = search(operations, values, Seen([A, MASKED])).lines()
    assert [(line.place, line.why) for line in lines] == called


def test_a_line_that_both_makes_and_applies_a_mask_is_named_once():
    """And as the one that applies it: it is one of the lines that may be wrong in any case."""
    line = "both.py:3 (g)"
    operations = {
        0: op("scores"),
        1: op("iota", (), "made.py:1 (h)"),
        2: op("ge", (1,), line),
        3: op(SELECT, (2, 0), line),
        4: op("last", (3,)),
    }
    values = {0: A, 1: WRONG, 2: WRONG, 3: np.where(WRONG, A, -np.inf), 4: D}
    lines = search(operations, values, Seen([A, MASKED])).lines()
    assert [(line.place, line.why) for line in lines] == [
        ("made.py:1 (h)", "makes a mask that the original does not have"),
        (line, APPLIES),
    ]


# Numbers


def test_a_result_of_two_numbers_clears_nothing():
    operations = {0: op("wrong"), 1: op("step", (0,)), 2: op("last", (1,))}
    few = np.where(MASK, 0.25, 0.75)
    values = {0: B, 1: few, 2: D}
    assert suspects(operations, values, [A, few]) == [(0, False, False), (2, False, False)]
    # Neither does a mask that both programs have.
    mask = np.arange(SMALLEST_MASK) % 4 == 0
    compared = {0: op("wrong"), 1: op("gt", (0,)), 2: op("last", (0, 1))}
    found = first_unknown(compared, {0: B, 1: mask, 2: D}, [mask], SAME)
    assert found == Unknown(("wrong.py:1 (f)",))


def test_another_primitive_of_a_line_says_nothing_about_its_call():
    operations = {0: op("mul", (), "f.py:1 (f)", "g.py:5 (g)"), 1: op("last", (0,))}
    other = Operation("add", ("f.py:1 (f)", "g.py:6 (g)"), ())
    found = search(operations, {0: B, 1: D}, Seen([A]), beside=[other])
    assert [line.place for line in found.lines()] == ["f.py:1 (f)"]
    # Neither does one that has no line.
    found = search(operations, {0: B, 1: D}, Seen([A]), beside=[Operation("mul", (), ())])
    assert [line.place for line in found.lines()] == ["f.py:1 (f)"]


MOVES = "broadcast_in_dim concatenate gather pad reshape rev select_n slice squeeze transpose"


@pytest.mark.parametrize(
    ("primitive", "moves"),
    [*dict.fromkeys(MOVES.split(), True).items(), ("mul", False), ("dot_general", False)],
)
def test_what_only_moves_numbers_made_none_of_them_wrong(primitive: str, moves: bool):
    operations = {0: op("wrong"), 1: op(primitive, (0,)), 2: op("last", (1,))}
    found = search(operations, {0: B, 1: np.where(MASK, C, C + 0.1), 2: D}, Seen([A, C]))
    assert found.first is not None and found.first.index == (0 if moves else 1)


def test_a_line_of_two_suspects_is_named_as_that_of_the_likelier_one():
    line = "f.py:1 (f)"
    operations = {0: op("mul", (), line), 1: op("add", (0,), line), 2: op("last", (1,))}
    values = {0: B, 1: np.where(MASK, C, C + 0.1), 2: D}
    found = search(operations, values, Seen([A, C]))
    assert found.first is not None and found.first.index == 1
    why = "first operation whose result the original does not compute"
    assert [(line.place, line.why) for line in found.lines()] == [(line, why)]


# Lines


@pytest.mark.parametrize(
    ("sources", "frame"),
    [
        ([("a", "m", "z"), ("b", "m", "z")], "m"),
        ([("a", "m", "z"), (), ("m", "z"), ("z",)], "z"),
        # All of them, not most.
        ([("a", "m"), ("m",), ("q",)], ""),
        ([("x", "y"), ("y", "x")], "x"),
        ([("x", "y")], "x"),
        ([()], ""),
        ([], ""),
    ],
)
def test_the_common_line_is_the_innermost_that_all_have(sources, frame: str):
    assert common_frame([Operation("p", source, ()) for source in sources]) == frame


def recorded(function, *arrays: np.ndarray, **forced: np.ndarray) -> list[Operation]:
    recorder = Recorder()
    closed = jax.make_jaxpr(function)(*arrays)
    changes = {name: MarkChange(True, value) for name, value in forced.items()}
    Evaluation(widened=True, recorder=recorder).run(closed, list(arrays), Marks(), changes)
    return recorder.operations


def test_less_than_float32_is_narrow_and_whole_numbers_are_not(x64):
    def function(x):
        return (jnp.sin(x).astype(jnp.bfloat16), jnp.sign(x).astype(jnp.int8))

    narrow = [(o.primitive, o.narrow) for o in recorded(function, np.ones(3, np.float32))]
    assert [entry for entry in narrow if entry[0] != "sign"] == [
        ("sin", False),
        ("convert_element_type", True),
        ("convert_element_type", False),
    ]


def test_one_result_in_less_than_float32_makes_an_operation_narrow(x64):
    """Its other result may be whole numbers."""
    [operation] = (
        o
        for o in recorded(lambda x: jax.lax.top_k(x, 2), np.ones(3, jnp.bfloat16))
        if o.primitive == "top_k"
    )
    assert operation.narrow


def test_what_has_no_result_is_recorded_without_one(x64):
    def function(x):
        jax.debug.callback(lambda x: None, x)
        return jnp.sin(x)

    found = {o.primitive: o.parents for o in recorded(function, np.ones(3))}
    assert len(found) == 2 and found["sin"] == ()


def test_what_is_made_of_a_second_result_is_made_of_its_operation(x64):
    def function(x):
        first, second = jnp.split(x, 2)
        return jnp.sin(second), jnp.cos(first)

    split, *others = recorded(function, np.arange(4.0))
    assert split.primitive == "split" and [o.parents for o in others] == [(0,), (0,)]


def test_what_is_made_of_a_value_beside_its_mark_is_not_made_of_the_mark(x64):
    """A mark may be replaced by the other program's value; what reads past it is not. A mark that
    was not replaced hands on its operand."""

    def function(x):
        value = jnp.sin(x)
        return checkpoint_name(value, "stage") + 1, value * 2

    found = {o.primitive: o.parents for o in recorded(function, np.ones(3), stage=np.zeros(3))}
    assert found == {"sin": (), "name": (0,), "add": (1,), "mul": (0,)}
    closed = jax.make_jaxpr(function)(np.ones(3))
    value = np.zeros(3)
    for change in (None, MarkChange(offset=value), MarkChange(True), MarkChange(False, value)):
        recorder = Recorder()
        changes = {} if change is None else {"stage": change}
        Evaluation(True, recorder=recorder).run(closed, [np.ones(3)], Marks(), changes)
        found = {o.primitive: o.parents for o in recorder.operations}
        assert found == {"sin": (), "name": (0,), "add": (0,), "mul": (0,)}


def custom_jvp(function):
    made = jax.custom_jvp(function)
    made.defjvp(lambda primals, tangents: (function(*primals), tangents[0]))
    return made


def custom_vjp(function):
    made = jax.custom_vjp(function)
    made.defvjp(lambda x: (function(x), None), lambda _, along: (along,))
    return made


def repeated(function):
    return lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, length=1)[0]


CALLS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "a jitted custom_jvp": lambda function: jax.jit(custom_jvp(function)),
    "a custom_jvp of what is jitted": lambda function: custom_jvp(jax.jit(function)),
    "a custom_vjp of what is jitted": lambda function: custom_vjp(jax.jit(function)),
    "scan": lambda function: repeated(jax.jit(function)),
}


@pytest.mark.parametrize("called", CALLS.values(), ids=CALLS)
def test_lines_inside_of_a_call_come_before_the_line_of_the_call(x64, called):
    """Whatever JAX calls it by, and whether it traces the function within its caller or alone."""

    def inner(x):
        return jnp.sin(x)

    made = called(inner)

    def outer(x):
        return made(x)

    [operation] = (o for o in recorded(outer, np.ones(3)) if o.primitive == "sin")
    functions = [line.rpartition("(")[2].rpartition(".")[2] for line in operation.source]
    assert functions[0] == "inner)" and "outer)" in functions[1:]


class Model:
    def fails(self):
        raise ValueError


def generated(text: str):
    """Return the function `f` of a text that is in no file."""
    space: dict = {"jnp": jnp}
    exec(compile(text, "<generated>", "exec"), space)
    return space["f"]


def test_an_error_is_placed_where_it_was_raised():
    with pytest.raises(ValueError) as caught:
        Model().fails()
    assert source_of_error(caught.value).endswith("(Model.fails)")
    # Code that is in no file has no line that could be shown.
    with pytest.raises(ZeroDivisionError) as caught:
        generated("def f():\n    return 1 // 0")()
    assert source_of_error(caught.value).startswith(str(_short(Path(__file__))))


def test_a_source_line_is_in_a_file_and_named_once(x64):
    inner = generated("def f(x):\n    return jnp.sin(x)")

    def again(x, depth):
        # Within a trace, and in traces of its own.
        call = jax.jit(again, static_argnums=1) if depth % 2 else again
        return call(x, depth - 1) if depth else inner(x)

    def outer(x):
        return again(x, 6)

    [operation] = (o for o in recorded(outer, np.ones(3)) if o.primitive == "sin")
    functions = [line.rpartition(".")[2] for line in operation.source]
    assert functions[:2] == ["again)", "outer)"] and "generated" not in str(operation.source)
    assert len({*operation.source}) == len(operation.source)

    def plainly(x, depth):
        return plainly(x, depth - 1) if depth else jnp.sin(x)

    [eqn] = jax.make_jaxpr(lambda x: plainly(x, 3))(1.0).jaxpr.eqns
    assert len({*source_of(eqn)}) == len(source_of(eqn))


@pytest.mark.parametrize(
    ("name", "library"),
    [
        *dict.fromkeys(("jax", "jaxlib", "flax", "equinox", "jaxtyping", "beartype"), True).items(),
        *dict.fromkeys(("parity.engine.measure.where", "parity.sides.side"), True).items(),
        *dict.fromkeys(("parity.port.compare", "parity.port.exact"), True).items(),
        *dict.fromkeys(("parity.megalodon.cases", "megalodon_jax.layers.norms"), False).items(),
        # A port may be a module of NumPy code.
        ("numpy", False),
    ],
)
def test_lines_of_libraries_and_of_what_evaluates_a_port_are_no_lines_of_the_port(name, library):
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    assert _in_library(spec.origin) is library


def test_a_library_of_which_only_a_folder_is_left_has_no_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes the folder for a package without a file."""
    (tmp_path / "uninstalled").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("uninstalled") is not None
    assert _roots(("uninstalled", "never_installed")) == ()


@pytest.mark.parametrize(
    "fails",
    [lambda: np.linalg.inv(np.zeros((2, 2))), lambda: torch.nn.Linear(2, 3)(torch.ones(4))],
    ids=["numpy", "torch"],
)
def test_an_error_in_a_library_is_placed_at_the_line_that_called_it(fails):
    def caller():
        fails()

    with pytest.raises((ValueError, RuntimeError)) as caught:
        caller()
    assert Path(__file__).name in source_of_error(caught.value)


def test_a_path_is_relative_to_the_deepest_folder_of_the_search_path(tmp_path: Path, monkeypatch):
    deep = tmp_path / "environment" / "packages"
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(deep), "relative"])
    monkeypatch.chdir(tmp_path)
    assert _short(deep / "port" / "model.py") == Path("port/model.py")
    assert _short(tmp_path / "model.py") == Path("model.py")
    assert _short(tmp_path.parent / "model.py") == tmp_path.parent / "model.py"
