"""Each step of matching parameters, on arrays of which this step alone decides."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from parity.engine.pairing.matching import CANDIDATES, match_parameters
from parity.engine.pairing.parameter_pairs import Matching, Means, Unmatched
from parity.engine.pairing.value_search import SMALL

Arrays = dict[str, np.ndarray]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def stated(matching: Matching) -> dict[str, tuple[str, Means, str]]:
    return {pair.port: (pair.construction.text(), pair.means, pair.note) for pair in matching.pairs}


def left(matching: Matching) -> tuple[list[str], list[str]]:
    sides = matching.unmatched_original, matching.unmatched_port
    original, port = ([each.name for each in side] for side in sides)
    return original, port


# Equal values


def test_equal_arrays_follow_what_is_certain_of_their_modules():
    """Their names say nothing; the weights beside them, which come later, have one partner each."""
    table, first, second = draw(4, 5), draw(3, 6, seed=1), draw(3, 6, seed=2)
    original = {"m.a.t": table, "m.b.t": table, "m.a.w": first, "m.b.w": second}
    port = {"x.p.t": table, "x.q.t": table, "x.p.w": second, "x.q.w": first}
    found = match_parameters(original, port)
    assert {pair.port: pair.originals for pair in found.pairs} == {
        "x.p.t": ("m.b.t",),
        "x.q.t": ("m.a.t",),
        "x.p.w": ("m.b.w",),
        "x.q.w": ("m.a.w",),
    }


def test_the_same_values_in_no_layout_are_neither_a_partner_nor_tied():
    """However much alike the names are."""
    x = draw(4, 5)
    shuffled = np.random.default_rng(1).permutation(x.reshape(-1)).reshape(4, 5)
    found = match_parameters({"one.w": x, "other.w": shuffled}, {"other.w": x})
    [pair] = found.pairs
    assert (pair.originals, pair.also) == (("one.w",), ())
    assert left(found) == (["other.w"], [])


def test_equal_arrays_that_were_rounded_are_equal_after_rounding_alone():
    x = draw(4, 5).astype(np.float32)
    rounded = x.astype(ml_dtypes.bfloat16)
    found = match_parameters(
        {f"l.{n}.w": x for n in range(2)}, {f"l.{n}.w": rounded for n in range(2)}
    )
    note = "the port holds values rounded to bfloat16; one of 2 that are equal"
    assert stated(found) == {f"l.{n}.w": (f"l.{n}.w", Means.ROUNDED, note) for n in range(2)}


@pytest.mark.parametrize("side", ["original", "port"])
def test_what_was_rounded_is_found_beside_what_rounding_leaves_as_it_is(side: str):
    """The array beside it has no partner, and is bfloat16 already."""
    x = draw(4, 5).astype(np.float32)
    rounded, short = x.astype(ml_dtypes.bfloat16), draw(3, 7, seed=1).astype(ml_dtypes.bfloat16)
    original, port = (
        ({"w": rounded}, {"v": x}) if side == "original" else ({"w": x}, {"v": rounded})
    )
    (original if side == "port" else port)["alone"] = short
    assert stated(match_parameters(original, port)) == {
        "v": ("w", Means.ROUNDED, f"the {side} holds values rounded to bfloat16")
    }


def test_a_tied_array_says_of_both_of_its_modules_which_they_are():
    """Both biases are 0 and their names fit alike; one is beside the second name of the weight."""
    table, zeros = draw(4, 5), np.zeros(12)
    original = {"a.w": table, "z.w": table, "y.bias": zeros, "z.bias": zeros}
    found = match_parameters(original, {"m.w": table, "m.bias": zeros})
    assert found.by_port["m.w"].also == ("z.w",)
    assert found.by_port["m.bias"].originals == ("z.bias",)


def test_an_array_that_has_a_partner_is_not_reordered_into_a_second_one():
    x = draw(8, 5)
    found = match_parameters({"w": x}, {"w": x, "turned": np.roll(x, 3, axis=0)})
    assert [pair.port for pair in found.pairs] == ["w"]
    assert found.unmatched_port == (
        Unmatched("turned", (8, 5), "w", "the same values in another order"),
    )


# Sums of two vectors

A, B = draw(12, seed=3), draw(12, seed=4)


def test_a_constant_is_no_term_of_a_sum():
    """A scale that is stored plus 1 is another value, though a bias beside it is 1."""
    found = match_parameters({"n.weight": A, "n.bias": np.ones(12)}, {"n.scale": A + 1})
    assert stated(found)["n.scale"] == ("n.weight", Means.NEAR, "is 1 times it plus 1")
    assert not found.is_complete


@pytest.mark.parametrize(("module", "found"), [("x", True), ("y", False)])
def test_only_vectors_of_one_module_are_added(module: str, found: bool):
    matching = match_parameters({"x.a": A, f"{module}.b": B}, {"z.bias": A + B})
    assert bool(matching.pairs) == matching.is_complete == found


def test_vectors_of_another_length_are_no_terms():
    original = {"m.scale": draw(5), "m.a": A, "m.table": draw(7, seed=1), "m.b": B}
    text, means, _ = stated(match_parameters(original, {"m.s": A + B}))["m.s"]
    assert (text, means) == ("m.a, added to m.b", Means.ROUNDED)


def test_a_sum_has_the_first_terms_that_fit():
    """A third vector is equal to the second one; it is left over, not a term as well."""
    found = match_parameters({"m.a": A, "m.b": B, "m.c": B.copy()}, {"s": A + B})
    assert found.by_port["s"].originals == ("m.a", "m.b") and left(found) == (["m.c"], [])


def test_a_sum_is_of_terms_that_are_in_nothing_else_if_there_are_any():
    """Two vectors are equal; one of them is a part of another parameter."""
    rest = draw(8, seed=5)
    original = {"m.a": A, "m.b": B, "m.c": B.copy(), "n.d": rest}
    found = match_parameters(original, {"s": A + B, "joined": np.concatenate([B, rest])})
    assert {n for pair in found.pairs for n in pair.originals} == {*original}
    assert found.is_complete and left(found) == ([], [])


def test_a_sum_whose_elements_are_interleaved_is_in_another_order():
    """It has one piece of each term, whole and at its own place: the order is in the layout."""
    total = (A + B).reshape(2, 2, 3).swapaxes(1, 2).reshape(12)
    found = match_parameters({"m.a": A, "m.b": B}, {"s": total})
    assert found.by_port["s"].means is Means.REORDERED and not found.is_complete


# Parts


def test_a_part_is_found_in_an_array_of_another_name():
    """Of as many as are tried; that of the least similar name holds it."""
    original = {f"table.extra.{n}": draw(12, 4, seed=n) for n in range(CANDIDATES)}
    whole = draw(12, 4, seed=40)
    for count in (CANDIDATES - 1, CANDIDATES):
        names = list(original)[:count]
        sides = {n: original[n] for n in names} | {"z": whole}, {"table.extra": whole[:4]}
        assert bool(match_parameters(*sides).pairs) == (count < CANDIDATES)


def test_arrays_too_small_to_hold_a_part_are_none_of_those_that_are_tried():
    original = {f"table.{n}": draw(3, 5, seed=n) for n in range(CANDIDATES)}
    original["z"] = draw(12, 4, seed=40)
    found = match_parameters(original, {"table": original["z"][4:8]})
    assert found.by_port["table"].originals == ("z",)


def test_a_part_of_two_arrays_is_of_the_one_of_its_name():
    part = draw(4, 4)
    original = {
        "table.w": np.concatenate([draw(8, 4, seed=1), part]),
        "other.w": np.concatenate([part, draw(4, 4, seed=2)]),
    }
    for names in (list(original), list(original)[::-1]):
        found = match_parameters({name: original[name] for name in names}, {"table.x": part})
        assert stated(found)["table.x"][0] == "table.w[8:12]"
        assert left(found) == (["other.w"], [])


def test_no_place_of_a_larger_array_is_filled_twice():
    """Two arrays of the original are equal, and a third one is a part of them."""
    x = draw(12, 4)
    original = {"b.w": x[3:6], "a.w": x[:6], "c.w": x[:6], "d.w": x[6:9]}
    found = match_parameters(original, {"a.w": x})
    [pair] = found.pairs
    assert pair.originals == ("a.w", "d.w")
    assert [entry.name for entry in found.unmatched_original] == ["b.w", "c.w"]
    filled = found.from_original(original)["a.w"]
    assert np.array_equal(filled, np.concatenate([x[:9], np.zeros((3, 4))]))


def test_every_array_that_a_larger_one_holds_is_named():
    first, second = draw(5, 4, seed=1), draw(5, 4, seed=2)
    port = np.concatenate([first, second, draw(10, 4, seed=3)])
    found = match_parameters({"a.w": first, "b.w": second}, {"w": port})
    note = "only [0:5], [5:10] of it comes from the original"
    assert stated(found)["w"] == ("a.w, at [0:5] + b.w, at [5:10]", Means.SLICE, note)
    assert left(found) == ([], []) and not found.is_complete


# Small arrays and constants

WEIGHTS = draw(3, 6, seed=1), draw(3, 6, seed=2)
SCALAR = np.array([2.0])


@pytest.mark.parametrize(("module", "equal"), [("x.p", True), ("x.q", False)])
def test_a_number_of_a_module_with_another_partner_is_no_equal_one(module: str, equal: bool):
    original = {"m.a.w": WEIGHTS[0], "m.b.w": WEIGHTS[1], "m.a.s": SCALAR}
    port = {"x.p.w": WEIGHTS[0], "x.q.w": WEIGHTS[1], f"{module}.s": SCALAR}
    found = match_parameters(original, port)
    assert found.is_complete == equal
    if not equal:
        told = "equal values, but the modules of the two have other partners"
        assert stated(found)["x.q.s"] == ("m.a.s", Means.NEAR, told)


@pytest.mark.parametrize("turned", [False, True])
def test_a_module_without_a_partner_stands_against_nothing(turned: bool):
    sides = {"m.a.w": WEIGHTS[0], "m.a.s": SCALAR}, {"x.p.w": WEIGHTS[0], "y.s": SCALAR}
    found = match_parameters(*(sides[::-1] if turned else sides))
    assert len(found.pairs) == 2 and found.is_complete


def test_one_of_two_equal_numbers_is_chosen_by_name():
    number = np.array([0.5])
    found = match_parameters({"a.s": number, "b.s": number}, {"a.s": number})
    assert stated(found) == {"a.s": ("a.s", Means.NAME, "1 elements")}


def test_constants_of_a_family_lie_as_their_weights_do():
    """Numbers in ascending order are a guess, which a weight that is fused otherwise corrects."""
    weights = [draw(4, 6, seed=n) for n in range(3)]
    original: Arrays = {f"m.{n}.weight": x for n, x in enumerate(weights)}
    original |= {f"m.{n}.bias": np.zeros(4) for n in range(3)}
    order = (1, 0, 2)
    port = {"m.weight": np.stack([weights[n] for n in order]), "m.bias": np.zeros((3, 4))}
    assert match_parameters(original, port).by_port["m.bias"].originals == tuple(
        f"m.{n}.bias" for n in order
    )


@pytest.mark.parametrize(
    ("query", "key", "fused", "equal"),
    [
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0, 0.0, 0.0], True),
        # Of another value; and of one that begins like the others, on either side.
        ([0.0, 0.0], [0.0, 0.0], [1.0, 1.0, 1.0, 1.0], False),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0, 0.0, 5.0], False),
        ([0.0, 5.0], [0.0, 0.0], [0.0, 0.0, 0.0, 0.0], False),
    ],
)
def test_constants_that_are_fused_have_one_value_in_every_element(query, key, fused, equal: bool):
    weights = draw(2, 6, seed=1), draw(2, 6, seed=2)
    original = {"m.q.weight": weights[0], "m.k.weight": weights[1]}
    original |= {"m.q.bias": np.array(query), "m.k.bias": np.array(key)}
    port = {"m.qk.weight": np.concatenate(weights), "m.qk.bias": np.array(fused)}
    assert match_parameters(original, port).is_complete == equal


def test_constants_that_do_not_fill_the_place_of_a_weight_are_no_part_of_a_fusion():
    """The biases have lengths of their own: 4 and 2, where the weights have 4 rows each."""
    weights = draw(4, 6, seed=1), draw(4, 6, seed=2)
    original = {"m.q.weight": weights[0], "m.k.weight": weights[1]}
    original |= {"m.q.bias": np.zeros(4), "m.k.bias": np.zeros(2)}
    port = {"m.qk.weight": np.concatenate(weights), "m.qk.bias": np.zeros(8)}
    assert left(match_parameters(original, port))[1] == ["m.qk.bias"]


def test_constants_take_the_same_fraction_of_a_fusion_as_their_weights():
    """3 of 8 rows are no whole number of 12 elements, though 4 and 8 would fill these."""
    weights = draw(3, 6, seed=1), draw(5, 6, seed=2)
    original = {"m.q.weight": weights[0], "m.k.weight": weights[1]}
    port = {"m.qk.weight": np.concatenate(weights)}
    for sizes, found in (((4, 8), False), ((6, 10), True)):
        biases = {f"m.{n}.bias": np.zeros(size) for n, size in zip("qk", sizes, strict=True)}
        matching = match_parameters(original | biases, port | {"m.qk.bias": np.zeros(sum(sizes))})
        assert matching.is_complete == ("m.qk.bias" in matching.by_port) == found


def test_a_constant_is_not_matched_in_part():
    """Its weight is: of eight rows the original has five, and says nothing of the other three."""
    weight = draw(5, 6)
    original = {"m.weight": weight, "m.bias": np.zeros(5)}
    port = {"m.weight": np.concatenate([weight, draw(3, 6, seed=1)]), "m.bias": np.zeros(8)}
    found = match_parameters(original, port)
    assert found.by_port["m.weight"].means is Means.SLICE
    assert left(found) == (["m.bias"], ["m.bias"])


def test_a_stack_of_constants_has_as_many_elements_as_its_family():
    layers = {f"l.{n}.norm": np.ones(6) for n in range(3)}
    for width in (5, 6):
        for sides in (
            (layers, {"norm": np.ones((3, width))}),
            ({"norm": np.ones((3, width))}, layers),
        ):
            assert match_parameters(*sides).is_complete == (width == 6)


# Unequal values


@pytest.mark.parametrize("first", ["far", "near"])
def test_the_nearer_of_two_arrays_has_the_partner(first: str):
    x = draw(6, 8)
    port = {name: x + noise * draw(6, 8, seed=5) for name, noise in (("far", 0.25), ("near", 0.01))}
    names = [first, *(name for name in port if name != first)]
    found = match_parameters({"w": x}, {name: port[name] for name in names})
    assert [(pair.port, pair.means) for pair in found.pairs] == [("near", Means.NEAR)]
    assert left(found) == ([], ["far"])


def test_the_nearer_array_has_the_partner_whatever_the_names_say():
    """A name that is more alike gives way to values that are."""
    x, other = draw(6, 8), draw(6, 8, seed=7)
    original = {"one.weight": x, "two.weight": other}
    port = {
        "one.weight": x + 0.25 * draw(6, 8, seed=5),
        "two.weight": x + 0.01 * draw(6, 8, seed=6),
    }
    found = match_parameters(original, port)
    assert {pair.port: pair.originals for pair in found.pairs} == {"two.weight": ("one.weight",)}
    assert left(found) == (["two.weight"], ["one.weight"])


def test_what_differs_in_a_row_may_hold_the_same_values():
    x = draw(6, 8)
    y = x.copy()
    y[2, [1, 5, 6]] = x[2, [6, 1, 5]]
    note = "differs in rows 2, the same values in another order"
    assert stated(match_parameters({"w": x}, {"w": y})) == {"w": ("w", Means.SLICE, note)}
    # Of another value too, it is not.
    y[2, 1] += 1.0
    assert stated(match_parameters({"w": x}, {"w": y}))["w"][2] == "differs in rows 2"


def test_the_closest_of_what_has_no_partner_is_of_its_size_where_names_say_nothing():
    original = {"a.w": draw(4, 5), "b.w": draw(3, 4, seed=1), "c.w": draw(4, 5, seed=2)}
    port = {"x.w": draw(3, 4, seed=3)}
    found = match_parameters(original, port)
    assert [each.closest for each in found.unmatched_port] == ["b.w"]
    assert [each.closest for each in match_parameters(port, original).unmatched_port] == ["x.w"] * 3


def test_the_closest_of_what_has_no_partner_is_of_its_name_where_no_size_is_its_own():
    original = {"a.w": draw(4, 5), "b.w": draw(3, 4, seed=1)}
    [alone] = match_parameters(original, {"b.w": draw(7, 2, seed=3)}).unmatched_port
    assert alone.closest == "b.w"


def test_the_closest_of_what_lies_in_another_order_is_of_the_other_side():
    """On either side, although the original has another array of the port's name."""
    x = draw(4, 5)
    shuffled = np.random.default_rng(1).permutation(x.reshape(-1)).reshape(4, 5)
    original = {"a.w": x, "b.w": draw(4, 5, seed=1), "c.w": draw(4, 5, seed=2)}
    found = match_parameters(original, {"b.w": shuffled, "d.w": draw(3, seed=3)})
    note, other = "the same values in another order", "of (4, 5), has other values"
    assert found.unmatched_port[0] == Unmatched("b.w", (4, 5), "a.w", note)
    assert found.unmatched_original == (
        Unmatched("a.w", (4, 5), "b.w", note),
        Unmatched("b.w", (4, 5), "b.w", other),
        Unmatched("c.w", (4, 5), "b.w", other),
    )


@pytest.mark.parametrize("shape", [(4, 5), (4, 4)])
def test_a_second_array_that_lies_in_another_way_is_not_tied(shape):
    """Its derivatives lie in another way, too, and are not added as they are."""
    x = draw(*shape)
    original = {"a.w": x, "b.w": x.T, "c.w": x}
    found = match_parameters(original, {"a.w": x})
    assert [(pair.originals, pair.also) for pair in found.pairs] == [(("a.w",), ("c.w",))]
    note = "the same values in another order"
    assert found.unmatched_original == (Unmatched("b.w", shape[::-1], "a.w", note),)
    gradients = {name: draw(*y.shape, seed=n) for n, (name, y) in enumerate(original.items())}
    theirs, _ = found.gradients(gradients, {"a.w": x})["a.w"]
    assert np.array_equal(theirs, gradients["a.w"] + gradients["c.w"])


def test_the_first_of_two_that_lie_in_another_order_is_the_closest():
    x = draw(4, 5)
    port = {name: np.random.default_rng(n).permutation(x.reshape(-1)).reshape(4, 5)
            for n, name in ((1, "c.w"), (2, "b.w"))}  # fmt: skip
    found = match_parameters({"a.w": x}, port)
    assert [(entry.name, entry.closest) for entry in found.unmatched_original] == [("a.w", "c.w")]
    assert [entry.closest for entry in found.unmatched_port] == ["a.w", "a.w"]


def test_a_part_of_two_arrays_that_names_do_not_tell_apart_is_of_the_first():
    x = draw(4, 5)
    original = {name: np.concatenate([x, draw(4, 5, seed=n)]) for n, name in enumerate("ba", 1)}
    [pair] = match_parameters(original, {"c": x}).pairs
    assert pair.originals == ("b",)


def test_a_copy_that_is_left_over_is_of_the_array_of_its_name():
    x = draw(4, 5)
    found = match_parameters({"a.w": x, "b.w": x}, {"a.w": x, "b.w": x, "b.copy.w": x})
    assert {p.port: p.originals for p in found.pairs} == {
        "a.w": ("a.w",), "b.w": ("b.w",), "b.copy.w": ("b.w",),
    }  # fmt: skip


def test_constants_of_a_module_with_a_longer_name_are_no_siblings():
    x, y = draw(4, 5), draw(4, 5, seed=1)
    original = {"a.w": x, "c.w": y, "ab.b": np.zeros(6), "c.b": np.zeros(6)}
    port = {"m.w": np.concatenate([x, y]), "m.b": np.zeros(12)}
    found = match_parameters(original, port)
    assert [pair.port for pair in found.pairs] == ["m.w"]


def test_the_first_of_equal_arrays_is_the_one_whose_rows_are_in_another_order():
    x = draw(8, 5)
    found = match_parameters({"a.w": x, "b.w": x.copy()}, {"c.w": np.roll(x, 3, axis=0)})
    assert stated(found)["c.w"][2] == "the rows or columns of a.w"


@pytest.mark.parametrize("size", range(1, SMALL + 2))
def test_names_decide_between_small_arrays_although_their_values_differ(size: int):
    arrays = {f"{name}.w": draw(size, seed=seed) for seed, name in enumerate("ab")}
    means = {pair.means for pair in match_parameters(arrays, arrays).pairs}
    assert means == {Means.NAME if size <= SMALL else Means.VALUE}


@pytest.mark.parametrize(("size", "note"), [(4, "4 elements"), (5, "constant")])
def test_the_elements_of_a_small_array_are_counted(size: int, note: str):
    found = match_parameters({"a.w": np.ones(size)}, {"a.w": np.ones(size)})
    assert stated(found) == {"a.w": ("a.w", Means.VALUE, note)}
