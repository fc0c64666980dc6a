"""Distances, places and constructions of arrays against plain NumPy, over drawn arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from parity.engine.measure.metrics import relative_l2
from parity.engine.pairing import analogy
from parity.engine.pairing import closeness as closeness_module
from parity.engine.pairing.analogy import by_families, by_siblings
from parity.engine.pairing.closeness import (
    EQUAL,
    MASKED,
    closeness,
    distance,
    entangled,
    plain_layouts,
)
from parity.engine.pairing.constructions import (
    Construction,
    Part,
    Piece,
    copied,
    cut,
    laid_out,
    whole,
)
from parity.engine.pairing.fingerprints import fingerprint, sample_positions
from parity.engine.pairing.layouts import Layout, candidates, identity, take, transposition
from parity.engine.pairing.matching import match_parameters
from parity.engine.pairing.parameter_pairs import Means, Pair
from parity.engine.pairing.resemblance import (
    MOST_RANGES,
    ROUNDED,
    Resemblance,
    differing_slices,
    ranges,
    resemblance,
    straight_line,
)
from parity.engine.pairing.value_search import (
    MOST_STARTS,
    SMALL,
    Sums,
    Tensors,
    compositions,
    dissect,
    fit,
    is_constant,
    locate,
    of_parts,
    orders_of,
    part_of,
    rearranged,
)
from tests.helpers import roundoff


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def far(x: np.ndarray, y: np.ndarray) -> float:
    """Return |y - x| / |x| with masks as 0; 0 and infinity for a size 0."""
    x, y = (np.where(np.abs(a) < MASKED, a, 0.0) for a in (x, y))
    norm = float(np.linalg.norm(x))
    return float(np.linalg.norm(y - x)) / norm if norm else float(np.any(y))


STAGES = {
    "first": draw(2, 3, 4),
    "turned": draw(2, 3, 4).transpose(0, 2, 1),
    "heads": draw(2, 3, 4).reshape(2, 12),
    "near": draw(2, 3, 4) * 1.25,
    "other": draw(2, 3, 4, seed=3),
    "zeros": np.zeros((2, 3, 4)),
    "scalar": np.array(2.0),
    "masks": np.where(draw(6, 4) > 0, -MASKED, 1.0),
    "mixed": np.where(np.arange(24).reshape(6, 4) % 5 > 0, draw(6, 4), -np.inf),
    "empty": np.zeros((0, 3)),
    "odd": draw(5),
}


def test_every_stage_is_compared_with_every_other_of_its_size_in_its_nearest_layout():
    names = list(STAGES)
    original, port = [STAGES[n] for n in names], [STAGES[n] for n in names[::-1][:9]]
    found = closeness(original, port)
    for (i, x), (j, y) in itertools.product(enumerate(original), enumerate(port)):
        if x.size != y.size or not x.size:
            assert math.isinf(found.distance[i, j]) and (i, j) not in found.layouts
            continue
        layout = found.layouts[i, j]
        assert layout.source == x.shape and layout.target == y.shape
        near = [far(each(x), y) for each in plain_layouts(x.shape, y.shape)]
        # Cancellation of the binomial formula, over the size.
        room = math.sqrt(roundoff(64, np.float64))
        assert abs(found.distance[i, j] - far(layout(x), y)) <= room
        assert 0.95 * found.distance[i, j] <= min(near) + room
        if min(near) <= EQUAL:
            assert found.distance[i, j] <= EQUAL
    tell = dict(zip(names, found.telling[0].tolist(), strict=True))
    few = {"zeros", "scalar", "masks", "empty"}
    assert {n for n, telling in tell.items() if not telling} == few
    assert found.telling[1].tolist() == [tell[n] for n in names[::-1][:9]]


def test_of_layouts_that_agree_the_simplest_is_meant():
    """Of nearly equal distances too: a layout that is nearer by a hundredth is nearer by chance."""
    x = np.ones((3, 3))
    assert closeness([x], [x]).layouts[0, 0] == identity((3, 3))
    y = draw(3, 3)
    half = (y + y.T) / 2 + (y - y.T) / 200
    assert closeness([half], [y]).layouts[0, 0] == identity((3, 3))
    turned = closeness([y], [y.T]).layouts[0, 0]
    assert turned.axes == (1, 0)
    # Equal up to rounding in both layouts: that of the other one is smaller by chance.
    even = (y + y.T) / 2 + (y - y.T) * EQUAL / 1000
    assert closeness([even], [even.T]).layouts[0, 0] == identity((3, 3))


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [((2, 3), (2, 3), 1), ((3, 3), (3, 3), 2), ((2, 3), (3, 2), 2), ((6,), (2, 3), 2)],
)
def test_plain_layouts_are_different_orders_the_simplest_first(source, target, count):
    layouts = plain_layouts(source, target)
    numbers = np.arange(math.prod(source)).reshape(source)
    orders = [layout(numbers).tobytes() for layout in layouts]
    assert len(set(orders)) == len(orders) == count
    assert np.array_equal(layouts[0](numbers).ravel(), numbers.ravel())
    assert plain_layouts(source, (7,)) == ()


def test_heads_interleaved_in_one_axis_are_found_among_those_that_are_asked_for():
    x = draw(4, 8)
    # (heads, 2) as (2, heads): the layout splits an axis that both sides have whole.
    y = x.reshape(4, 4, 2).transpose(0, 2, 1).reshape(4, 8)
    original, port = [draw(4, 8, seed=5), x, x], [y, draw(4, 8, seed=7), y]
    found = entangled(original, port, [0, 1], [1, 2])
    assert set(found) == {(1, 2)} and np.array_equal(found[1, 2](x), y)
    assert entangled(original, port, [0], [0]) == {}
    off = y * (1 + 4 * EQUAL)
    assert entangled([x], [off], [0], [0]) == {}
    assert set(entangled([x], [off], [0], [0], equal=8 * EQUAL)) == {(0, 0)}
    # A mask is none of the numbers, whatever stands for it on either side.
    hidden = np.arange(32).reshape(4, 8) % 7 == 0
    over = hidden.reshape(4, 4, 2).transpose(0, 2, 1).reshape(4, 8)
    masked = np.where(hidden, -np.inf, x), np.where(over, -2 * MASKED, y)
    assert set(entangled([masked[0]], [masked[1]], [0], [0])) == {(0, 0)}
    # Sums are as far apart as the arrays may be.
    wide = y * (1 + 64 * EQUAL)
    assert set(entangled([x], [wide], [0], [0], equal=128 * EQUAL)) == {(0, 0)}
    # Sums differ by more where one number is most of an array, and the difference is everywhere.
    one = np.where(np.arange(32).reshape(4, 8) == 0, 1.0, 0.0)
    assert set(entangled([one], [one + EQUAL / 8], [0], [0])) == {(0, 0)}
    # A sum that cancels says nothing: the size of the terms does.
    odd = np.concatenate([x[:2], -x[:2] * (1 + EQUAL / 2)])
    even = odd.reshape(4, 4, 2).transpose(0, 2, 1).reshape(4, 8)
    assert set(entangled([odd], [even], [0], [0])) == {(0, 0)}


SHAPES = [((4, 6), (6, 4)), ((2, 3, 4), (3, 8)), ((4, 6), (4, 2, 3)), ((2, 1, 5), (5, 2)), ((), ())]


@pytest.mark.parametrize(("source", "target"), SHAPES)
def test_elements_are_taken_where_a_layout_brings_them(source, target):
    x = draw(*source)
    for layout in candidates(source, target):
        laid = layout(x)
        positions = np.random.default_rng(1).integers(0, x.size, 7)
        assert np.array_equal(take(layout, x, positions), laid.reshape(-1)[positions])
        assert np.array_equal(layout.inverse(laid), x)
        found = fit(x, laid)
        assert found is not None and np.array_equal(found(x), laid)
        assert Layout.from_json(layout.to_json()) == layout
    assert fit(x, np.asarray(x.reshape(target) + 1.0)) is None


def test_the_layouts_of_two_shapes_are_every_permutation_that_leads_there():
    """Brute force: each order of the axes, and of the axes with one split in two."""
    source, target = (4, 6), (6, 4)
    numbers = np.arange(24).reshape(source)
    found = {layout(numbers).tobytes() for layout in candidates(source, target)}
    assert candidates(source, target)[0] == Layout(source, source, (0, 1), target)
    assert numbers.T.tobytes() in found
    for groups in (2,):
        split = numbers.reshape(4, groups, 3)
        assert {
            split.transpose(p).reshape(target).tobytes() for p in ((1, 2, 0), (2, 1, 0))
        } & found
    assert candidates(source, (5, 5)) == ()


def box(seed: int) -> tuple[Part, np.ndarray]:
    """Return a drawn part of a (4, 6) array seen as (2, 2, 6), and what it selects."""
    rng = np.random.default_rng(seed)
    starts = [int(rng.integers(0, n)) for n in (2, 2, 6)]
    stops = [int(rng.integers(a + 1, n + 1)) for a, n in zip(starts, (2, 2, 6), strict=True)]
    part = Part((4, 6), (2, 2, 6), tuple(starts), tuple(stops))
    selects = np.zeros((2, 2, 6), bool)
    selects[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))] = True
    return part, selects.reshape(4, 6)


@pytest.mark.parametrize("seed", range(6))
def test_a_part_is_a_box_and_is_added_to_in_place(seed):
    part, selects = box(seed)
    x = draw(4, 6)
    assert np.array_equal(part(x).ravel(), x[selects])
    every = bool(selects.all())
    assert part.is_whole == every and part.shape == ((4, 6) if every else part(x).shape)
    added = x.copy()
    part.accumulate(added, np.full(part.shape, 2.0))
    assert np.array_equal(added, x + 2.0 * selects)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (whole((4, 6)), ""),
        (cut((4, 6), (4, 6), 0, 1, 3), "[1:3]"),
        (cut((4, 6), (4, 6), 0, 0, 1), "[0]"),
        (cut((4, 6), (4, 6), 1, 4, 6), "[:, 4:6]"),
        (cut((4, 6), (2, 2, 6), 1, 1, 2), " as (2, 2, 6)[:, 1]"),
        (Part((4, 6), (4, 6), (0, 5), (2, 6)), "[0:2, 5]"),
    ],
)
def test_a_part_is_written_as_an_index(part, text):
    assert part.text() == text


def test_a_construction_is_written_piece_by_piece():
    turn = transposition((2, 3), (1, 0))
    assert laid_out("w", turn).text() == "w, transposed (1, 0)"
    assert copied("w", [2, 3]).text() == "w"
    # Axes of one add nothing; elements in another order do.
    assert laid_out("w", Layout((2, 3), (2, 3), (0, 1), (1, 2, 3))).text() == "w"
    assert (
        laid_out("w", Layout((2, 3), (2, 3), (0, 1), (6,))).text() == "w, reshaped (2, 3) -> (6,)"
    )
    # An axis of one in another place is not there where the port has it.
    moved = Layout((2, 1), (2, 1), (0, 1), (1, 2))
    assert laid_out("w", moved).text() == "w, reshaped (2, 1) -> (1, 2)"
    turned = Layout((3, 3), (3, 3), (1, 0), (1, 3, 3))
    assert laid_out("w", turned).text() == "w, transposed (1, 0), reshaped (3, 3) -> (1, 3, 3)"
    pieces = (
        Piece("a", cut((4, 3), (4, 3), 0, 0, 2), identity((2, 3)), cut((4, 3), (4, 3), 0, 2, 4)),
        Piece("b", whole((3, 2)), transposition((3, 2), (1, 0)), cut((4, 3), (4, 3), 0, 0, 2)),
    )
    made = Construction((4, 3), pieces)
    assert made.text() == "a[0:2], at [2:4] + b, transposed (1, 0), at [0:2]"
    assert made.parameters == ("a", "b") and made.is_complete
    assert not Construction((4, 3), pieces[:1]).is_complete
    assert Construction.from_json(made.to_json()) == made
    a, b = draw(4, 3), draw(3, 2, seed=1)
    assert np.array_equal(made.from_original({"a": a, "b": b}), np.concatenate([b.T, a[:2]]))
    with pytest.raises(KeyError, match="expected the array a, b of the original"):
        made.from_original({"c": a})
    # A gradient goes back by the transposed map: <A x, y> = <x, A* y>, piece by piece.
    y = draw(4, 3, seed=2)
    back = made.adjoint(y)
    assert np.array_equal(back["a"], np.concatenate([y[2:], np.zeros((2, 3))]))
    assert np.array_equal(back["b"], y[:2].T)
    twice = Construction((4, 3), (pieces[0], Piece("a", *_like(pieces[0]))))
    assert np.array_equal(twice.adjoint(y)["a"][:2], y[2:] + y[:2])


def _like(piece: Piece) -> tuple[Part, Layout, Part]:
    return piece.part, piece.layout, cut((4, 3), (4, 3), 0, 0, 2)


def brute_groups(sizes: dict[str, int], prints: dict[str, int], size: int, wanted: int):
    """Return sets of one to three arrays whose sizes and fingerprints sum to those of a whole."""
    return {
        frozenset(group)
        for n in (1, 2, 3)
        for group in itertools.combinations(sizes, n)
        if sum(sizes[g] for g in group) == size
        and sum(prints[g] for g in group) % 2**64 == wanted % 2**64
    }


@pytest.mark.parametrize("seed", range(3))
def test_groups_are_those_whose_fingerprints_sum_to_that_of_the_whole(seed):
    rng = np.random.default_rng(seed)
    parts = {
        name: rng.normal(size=(int(n), 3)) for name, n in zip("abcde", (2, 2, 4, 6, 6), strict=True)
    }
    tensors = Tensors(parts)
    sums = Sums(tensors, list(parts), 12 * 3 + 1)
    sizes = {n: x.size for n, x in parts.items()}
    prints = {n: fingerprint(x) for n, x in parts.items()}
    for chosen in ("a", "ab", "abc", "ace", "de", "bd"):
        made = np.concatenate([parts[n] for n in chosen])
        found = list(sums.groups(made.size, fingerprint(made)))
        expected = brute_groups(sizes, prints, made.size, fingerprint(made))
        assert set(map(frozenset, found)) == expected == {frozenset(chosen)}
    assert list(sums.groups(5, 7)) == []


def test_a_whole_family_is_one_part_of_a_sum():
    parts = {f"l.{i}.w": draw(2, 2, seed=i) for i in range(4)} | {"extra": draw(3, 2, seed=9)}
    made = np.concatenate([parts["extra"], *(parts[f"l.{i}.w"] for i in range(4))])
    found = list(
        Sums(Tensors(parts), list(parts), made.size + 1).groups(made.size, fingerprint(made))
    )
    assert frozenset(parts) in set(map(frozenset, found))


def test_no_part_is_taken_twice_for_one_whole():
    """A family and one of its own arrays add up to a whole that no parts fill."""
    parts = {f"l.{i}.w": draw(2, 3, seed=i) for i in range(2)}
    made = np.concatenate([parts["l.0.w"], parts["l.1.w"], parts["l.0.w"]])
    sums = Sums(Tensors(parts), list(parts), made.size + 1)
    assert list(sums.groups(made.size, fingerprint(made))) == []
    assert list(compositions(Tensors({"w": made}), Tensors(parts), ["w"], list(parts))) == []


def test_parts_may_adjoin_along_two_axes_that_are_merged():
    """Of two layers of three experts each, one part has four experts and the other two."""
    parts = {"first": draw(4, 5), "last": draw(2, 5, seed=1)}
    fused = np.concatenate([*parts.values()]).reshape(2, 3, 5)
    pieces = dissect(fused, parts)
    assert pieces is not None and [n for n, *_ in pieces] == ["first", "last"]
    assert np.array_equal(of_parts(fused.shape, pieces).from_original(parts), fused)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("turned", [False, True])
def test_parts_are_found_where_they_lie_in_a_whole(axis, turned):
    sizes = (2, 4, 6)
    parts = {f"p{n}": draw(*((n, 5) if axis == 0 else (5, n)), seed=n) for n in sizes}
    whole_ = np.concatenate([parts["p4"], parts["p2"], parts["p6"]], axis=axis)
    given = {n: np.ascontiguousarray(x.T) if turned else x for n, x in parts.items()}
    pieces = dissect(whole_, given)
    assert pieces is not None and [name for name, *_ in pieces] == ["p4", "p2", "p6"]
    for name, place, layout in pieces:
        assert np.array_equal(layout(place(whole_)), given[name])
        made = part_of(name, place, layout)
        assert made.parameters == (name,)
        assert np.array_equal(made.from_original({name: whole_}), given[name])
    made = of_parts(whole_.shape, pieces)
    assert made.is_complete and np.array_equal(made.from_original(given), whole_)
    assert dissect(whole_ + 1.0, given) is None


def test_heads_of_query_key_and_value_lie_in_groups():
    q, k, v = (draw(4, 2, 3, seed=n) for n in range(3))
    fused = np.concatenate([q, k, v], axis=1).reshape(24, 3)
    parts = {n: x.reshape(8, 3) for n, x in zip("qkv", (q, k, v), strict=True)}
    pieces = dissect(fused, parts)
    assert pieces is not None and sorted(n for n, *_ in pieces) == ["k", "q", "v"]
    assert np.array_equal(of_parts((24, 3), pieces).from_original(parts), fused)


@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_may_alternate_row_by_row(names, rows, axis):
    """Gate, up, gate, up: with two parts of one row each there are most groups."""
    parts = {n: draw(6, 4, seed=k) for k, n in enumerate(names)}
    groups = [x.reshape(6 // rows, rows, 4) for x in parts.values()]
    fused = np.concatenate(groups, axis=1).reshape(6 * len(names), 4)
    if axis:
        fused, parts = fused.T, {n: x.T for n, x in parts.items()}
    pieces = dissect(fused, parts)
    assert pieces is not None and [n for n, *_ in pieces] == list(names)
    assert np.array_equal(of_parts(fused.shape, pieces).from_original(parts), fused)
    one = locate(fused, parts["b"])
    assert one is not None and np.array_equal(one[1](one[0](fused)), parts["b"])


def test_a_stack_of_fusions_is_taken_apart_layer_by_layer():
    parts = {
        f"l.{i}.{n}": draw(2, 3, seed=10 * i + k) for i in range(3) for k, n in enumerate("ab")
    }
    stacked = np.stack([np.concatenate([parts[f"l.{i}.b"], parts[f"l.{i}.a"]]) for i in range(3)])
    pieces = dissect(stacked, parts)
    assert pieces is not None and len(pieces) == 6
    for name, place, layout in pieces:
        assert np.array_equal(layout(place(stacked)), parts[name])
    wrong = dict(parts) | {"l.2.a": parts["l.2.a"] + 1}
    assert dissect(stacked, wrong) is None


@pytest.mark.parametrize("axis", [0, 1])
def test_each_layer_of_a_stack_may_order_its_parts_in_its_own_way(axis):
    """Side by side in a layer, parts of several layers adjoin along no single axis."""
    parts = {f"l.{i}.{n}": draw(2, 3, seed=10 * i + k) for i in (0, 1) for k, n in enumerate("ab")}
    orders = (("l.0.b", "l.0.a"), ("l.1.a", "l.1.b"))
    stacked = np.stack([np.concatenate([parts[n] for n in names], axis) for names in orders])
    # In whatever order they are listed: layers lie in the order of their numbers.
    for listed in (parts, dict(reversed(parts.items()))):
        pieces = dissect(stacked, listed)
        assert pieces is not None and sorted(n for n, *_ in pieces) == sorted(parts)
        for name, place, layout in pieces:
            assert np.array_equal(layout(place(stacked)), parts[name])
        made = of_parts(stacked.shape, pieces)
        assert made.is_complete and np.array_equal(made.from_original(parts), stacked)


@pytest.mark.parametrize("start", [0, 2, 3, 7])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_lone_part_is_located_at_its_ends_and_at_multiples_of_its_length(start, axis):
    array = draw(*((10, 4) if axis == 0 else (4, 10)))
    part = np.take(array, range(start, start + 3), axis)
    at = locate(array, part)
    reachable = start in {0, 7, *range(0, 7, 3)}
    assert (at is not None) == reachable
    if at is not None:
        place, layout = at
        assert np.array_equal(layout(place(array)), part)
        assert (place.starts[axis], place.stops[axis]) == (start, start + 3)
    assert locate(array, part + 1.0) is None
    # All of it is no part.
    assert locate(array, array) is None


def test_a_part_with_nan_is_located_by_nan():
    array = draw(10, 4)
    array[3] = np.nan
    at = locate(array, array[3:6])
    assert at is not None and at[0].starts == (3, 0)
    assert locate(np.nan_to_num(array), array[3:6]) is None
    assert locate(array, np.full((2, 4), np.nan)) is None


def test_a_part_at_the_end_of_a_long_array_is_located():
    """However many multiples of its length come before."""
    count = MOST_STARTS + 6
    array = draw(3 * count + 1, 2)
    at = locate(array, array[-3:])
    assert at is not None and at[0].starts == (3 * count - 2, 0)


def test_wholes_take_each_part_once():
    parts = {n: draw(2, 3, seed=k) for k, n in enumerate("abcd")}
    wholes = {
        "w": np.concatenate([parts["a"], parts["b"]]),
        "v": np.concatenate([parts["c"], parts["d"]]),
    }
    wholes["again"] = wholes["w"].copy()
    found = dict(compositions(Tensors(wholes), Tensors(parts), list(wholes), list(parts)))
    assert {n: [p for p, *_ in pieces] for n, pieces in found.items()} == {
        "w": ["a", "b"],
        "v": ["c", "d"],
    }
    # Of equal parts, each whole takes one of each.
    parts |= {"a2": parts["a"].copy(), "b2": parts["b"].copy()}
    every = list(compositions(Tensors(wholes), Tensors(parts), list(wholes), list(parts)))
    assert [name for name, _ in every] == ["w", "v", "again"]
    assert sorted(part for _, pieces in every for part, *_ in pieces) == sorted(parts)
    assert list(compositions(Tensors(wholes), Tensors(parts), list(wholes), [])) == []
    assert list(compositions(Tensors(wholes), Tensors(parts), [], list(parts))) == []


def test_what_is_ambiguous_is_constant_or_very_small():
    late = np.zeros(5000)
    late[4321] = 1.0
    arrays = {
        "small": draw(SMALL),
        "large": draw(SMALL + 1),
        "ones": np.ones((3, 4)),
        "late": late,
        "turned": np.zeros((3, 4)).T,
        "empty": np.zeros((0, 9)),
    }
    tensors = Tensors(arrays)
    assert {n for n in arrays if tensors.ambiguous(n)} == {"small", "ones", "turned", "empty"}
    assert {n for n, x in arrays.items() if is_constant(x)} == {"ones", "turned", "empty"}
    assert tensors.size("ones") == 12 and tensors.shapes["empty"] == (0, 9)


def test_only_what_is_wider_is_rounded_and_ambiguity_stays():
    arrays = {
        "wide": np.array([1.0, 1.0 + 2.0**-40, 2.0, 3.0, 4.0]),
        "narrow": np.array([1.5, 2.5], np.float16),
        "ids": np.array([1, 2, 2**40 + 1]),
        "huge": np.array([1e300, 1.0]),
    }
    tensors = Tensors(arrays)
    single = np.dtype(np.float32)
    assert [tensors.rounds(n, single) for n in arrays] == [True, False, False, True]
    assert not tensors.rounds("narrow", np.dtype(np.float16))
    assert not tensors.ambiguous("wide")
    rounded = tensors.rounded(single)
    assert rounded["wide"].tolist() == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert rounded["wide"].dtype == np.float64 and rounded["huge"][0] == np.inf
    assert rounded["ids"].tolist() == arrays["ids"].tolist()
    assert rounded["narrow"].dtype == np.float16 and tensors["wide"][1] > 1.0
    assert rounded._ambiguous is tensors._ambiguous
    assert rounded.fingerprint("wide") != tensors.fingerprint("wide")


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "3"),
        ([3, 8, 9, 10], "3, 8:11"),
        ([0, 1], "0:2"),
        ([0, 2, 4, 6], "0, 2, 4, 6"),
        ([0, 2, 4, 6, 8], "0, 2, 4, 6 and 1 more"),
        ([0, 2, 4, 6, 8, 9, 11], "0, 2, 4, 6 and 2 more"),
        ([], ""),
    ],
)
def test_indices_are_written_as_the_first_ranges(indices, text):
    assert MOST_RANGES == 4 and ranges(indices) == text


def differs(shape: tuple[int, ...], *index: object) -> str:
    x = draw(*shape)
    y = x.copy()
    y[index] += 1.0
    return differing_slices(x, y)


def test_differences_are_named_by_the_axis_that_they_take_the_least_of():
    assert differs((4, 6), 1, 2) == "one element, [1, 2]"
    assert differs((4, 6), 1) == "rows 1"
    assert differs((4, 6), slice(None), [1, 4]) == "columns 1, 4"
    # A quarter of the rows is less than a third of the columns.
    assert differs((4, 6), 2, slice(0, 2)) == "rows 2"
    assert differs((6, 4), slice(0, 4), 3) == "columns 3"
    assert differs((8,), slice(1, 4)) == "elements 1:4"
    assert differs((2, 3, 8), 1, 1, slice(0, 2)) == "indices of axis 2: 0:2"
    # Half of an axis is a slice of it; more is everywhere.
    assert differs((4, 6), slice(0, 2)) == "rows 0:2"
    assert differs((4, 6), slice(0, 3)) == ""
    # Of axes of which equal shares differ, the first is named.
    for count in (1, 3):
        index = slice(0, count), slice(0, count)
        assert differs((6, 6), *index) == ("one element, [0, 0]" if count == 1 else "rows 0:3")
    assert differs((6, 6), [1, 4], [2, 5]) == "rows 1, 4"
    # Axes of one index say nothing.
    assert differs((1, 4), 0, slice(0, 2)) == "columns 0:2"
    x = np.array([np.nan, 1.0, 2.0, 3.0])
    assert differing_slices(x, np.array([np.nan, 1.0, 2.0, 4.0])) == "one element, [3]"
    assert differing_slices(x, np.array([0.0, 0.0, 2.0, 3.0])) == "elements 0:2"


def test_the_distance_of_a_line_is_that_of_all_elements():
    x = draw(40, 30)
    found = resemblance(x, x + 1.0)
    assert found is not None and found.line is not None
    assert found.distance == relative_l2(x, x + 1.0)


def test_what_resembles_is_told_in_words():
    lies = identity((2,))
    assert Resemblance(lies, 0.5, line=(2.0, 0.0)).text() == "is 2 times it"
    assert Resemblance(lies, 0.5, line=(2.0, -1.0)).text() == "is 2 times it plus -1"
    assert Resemblance(lies, 0.5, slices="rows 3").text() == "differs in rows 3"
    assert Resemblance(lies, 0.5).text() == "differs in value by 5.0e-01 (relative L2)"


def test_a_resemblance_is_in_the_layout_in_which_most_is_equal_or_nearest():
    x = draw(6, 8)
    scaled = resemblance(x, 3.0 * x.T + 2.0)
    assert scaled is not None and scaled.line == pytest.approx((3.0, 2.0))
    assert scaled.layout.axes == (1, 0)
    y = x.T.copy()
    y[2] += 1.0
    found = resemblance(x, y)
    assert found is not None and found.layout.axes == (1, 0)
    assert found.slices == "rows 2" and found.line is None
    assert found.distance == pytest.approx(np.linalg.norm(x.T - y) / np.linalg.norm(y))
    noisy = x + 0.25 * draw(6, 8, seed=4)
    near = resemblance(x, noisy)
    assert near is not None and near.slices == "" and near.layout == identity((6, 8))
    assert near.distance == pytest.approx(np.linalg.norm(x - noisy) / np.linalg.norm(noisy))
    assert resemblance(x, draw(6, 8, seed=4)) is None
    assert resemblance(x, np.full((6, 8), np.nan)) is None
    # However far: a slice that differs is one.
    huge = x.copy()
    huge[1] = 1e6
    told = resemblance(x, huge)
    assert told is not None and told.slices == "rows 1"


def matched(original, port):
    found = match_parameters(original, port)
    return {pair.port: (pair.construction.text(), pair.means, pair.note) for pair in found.pairs}


def test_constants_follow_the_weights_of_their_module():
    """Biases are fused as the kernels are, in their order, and heads by heads."""
    kernels = {f"attn.{n}.weight": draw(4, 6, seed=k) for k, n in enumerate(("q", "k", "v"))}
    biases = {f"attn.{n}.bias": np.zeros(4) for n in ("q", "k", "v")}
    fused = {
        "attn.qkv.kernel": np.concatenate([*kernels.values()]).T,
        "attn.qkv.bias": np.zeros(12),
    }
    found = matched(kernels | biases, fused)
    text, means, _ = found["attn.qkv.bias"]
    assert means is Means.NAME
    assert text == "attn.q.bias, at [0:4] + attn.k.bias, at [4:8] + attn.v.bias, at [8:12]"
    back = matched(fused, kernels | biases)
    assert [back[f"attn.{n}.bias"][0] for n in ("q", "k", "v")] == [
        "attn.qkv.bias[0:4]",
        "attn.qkv.bias[4:8]",
        "attn.qkv.bias[8:12]",
    ]
    # One of another value, or another size, is no part of it.
    other = biases | {"attn.k.bias": np.ones(4)}
    assert "attn.qkv.bias" not in {
        port
        for port, (_, means, _) in matched(kernels | other, fused).items()
        if means is Means.NAME
    }
    longer = fused | {"attn.qkv.bias": np.zeros(13)}
    assert "attn.qkv.bias" not in matched(kernels | biases, longer)


@pytest.mark.parametrize(
    ("weights", "biases", "order"),
    [
        (("wq", "wk"), ("bq", "bk"), ("bq", "bk")),
        (("k_weight", "q_weight"), ("q_bias", "k_bias"), ("k_bias", "q_bias")),
        (("k_weight", "q_weight"), ("k_bias", "q_bias"), ("k_bias", "q_bias")),
    ],
)
def test_each_weight_of_one_module_has_a_bias_of_its_own(weights, biases, order):
    """Names decide which, or else their order; another parameter of the module is none of them."""
    kernels = {f"attn.{n}": draw(6, 4, seed=k) for k, n in enumerate(weights)}
    zeros = {f"attn.{n}": np.zeros(6) for n in biases}
    fused = {"qk.weight": np.concatenate([*kernels.values()]), "qk.bias": np.zeros(12)}
    text = f"attn.{order[0]}, at [0:6] + attn.{order[1]}, at [6:12]"
    for more in ({}, {"attn.scale": np.zeros(6)}):
        assert matched(kernels | zeros | more, fused)["qk.bias"][0] == text
    back = matched(fused, kernels | zeros)
    assert [back[f"attn.{n}"][0] for n in order] == ["qk.bias[0:6]", "qk.bias[6:12]"]
    del zeros[f"attn.{order[1]}"]
    assert "qk.bias" not in matched(kernels | zeros, fused)


def test_a_constant_follows_one_of_several_weights_of_its_module():
    """The first of them that it can follow."""
    weights = {f"m.{n}.weight": draw(4, 6, seed=k) for k, n in enumerate("ab")}
    originals = Tensors(weights | {"m.a.bias": np.zeros(4), "m.b.bias": np.zeros(4)})
    ports = Tensors(
        {"p.one": weights["m.a.weight"], "p.two": weights["m.b.weight"], "p.c": np.zeros(4)}
    )
    pairs = {
        port: Pair(port, copied(f"m.{n}.weight", (4, 6)), Means.VALUE)
        for port, n in (("p.one", "a"), ("p.two", "b"))
    }
    found = list(by_siblings(originals, ports, ["m.a.bias", "m.b.bias"], ["p.c"], pairs))
    assert [(port, made.parameters) for port, made in found] == [("p.c", ("m.a.bias",))]


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e6, -1.0])
def test_a_summand_is_one_whatever_the_size_of_the_numbers(size: float):
    """And what adding up rounds is none."""
    x = size * (draw(5, 7) + 3.0)
    plus = 0.125 * size
    factor, summand = straight_line(x, 2.0 * x + plus) or (0.0, 0.0)
    assert (factor, summand / size) == pytest.approx((2.0, 0.125))
    noise = ROUNDED * 2.0**-6 * size * draw(5, 7, seed=1)
    assert straight_line(x, 2.0 * x + noise) == (pytest.approx(2.0), 0.0)


def test_heads_of_biases_are_grouped_as_those_of_the_kernels():
    q, k = (draw(3, 2, 5, seed=n) for n in range(2))
    original = {"m.q.weight": q.reshape(6, 5), "m.k.weight": k.reshape(6, 5)}
    original |= {"m.q.bias": np.ones(6), "m.k.bias": np.ones(6)}
    port = {"m.qk.weight": np.concatenate([q, k], axis=1).reshape(12, 5), "m.qk.bias": np.ones(12)}
    text, _, _ = matched(original, port)["m.qk.bias"]
    assert text == (
        "m.q.bias, reshaped (6,) -> (3, 2), at  as (3, 4)[:, 0:2] + "
        "m.k.bias, reshaped (6,) -> (3, 2), at  as (3, 4)[:, 2:4]"
    )


def test_constants_of_stacked_layers_go_by_families():
    parts = {f"layers.{i}.norm.weight": np.ones(6) for i in range(3)}
    parts |= {f"layers.{i}.bias_norm.bias": np.zeros(6) for i in range(3)}
    stacked = {"layers.norm.scale": np.ones((3, 6)), "layers.bias_norm.bias": np.zeros((3, 6))}
    found = matched(parts, stacked)
    ones = " + ".join(
        f"layers.{i}.norm.weight, at {place}" for i, place in enumerate(("[0]", "[1]", "[2]"))
    )
    assert found["layers.norm.scale"][0] == ones
    back = matched(stacked, parts)
    assert back["layers.2.norm.weight"][0] == "layers.norm.scale[2]"
    assert back["layers.1.bias_norm.bias"][0] == "layers.bias_norm.bias[1]"
    # Scalars of layers are one vector.
    scalars = {f"layers.{i}.scale": np.ones(()) for i in range(6)}
    vector = {"layers.scale": np.ones(6)}
    assert matched(scalars, vector)["layers.scale"][0].endswith("layers.5.scale, at  as (6, 1)[5]")
    assert matched(vector, scalars)["layers.4.scale"][0] == "layers.scale as (6, 1)[4]"
    tensors = Tensors(parts), Tensors({"norm": np.ones((2, 9))})
    # 18 elements of three layers are no stack of three where the first axis has two.
    names = [n for n in parts if "bias" not in n]
    assert list(by_families(*tensors, names, ["norm"], {})) == []
    assert list(by_siblings(*tensors, names, ["norm"], {})) == []


@pytest.mark.parametrize(
    ("shape", "count", "stack"),
    [((6, 4), 6, True), ((2, 3, 4), 6, True), ((6,), 6, True), ((4, 6), 6, False), ((), 1, False)],
)
def test_a_stack_counts_its_layers_by_its_first_axes(shape, count: int, stack: bool):
    assert analogy._is_stack(shape, count) is stack


def test_a_part_of_a_first_axis_is_the_same_fraction_of_another_array():
    half = cut((6, 4), (2, 3, 4), 0, 1, 2)
    assert analogy._scaled(half, (12,)) == cut((12,), (12,), 0, 6, 12)
    assert analogy._scaled(half, (7,)) is None
    # Two thirds of each of two groups are 3 elements of 9, but 9 elements are no two groups.
    grouped = cut((6,), (2, 3), 1, 0, 2)
    assert analogy._scaled(grouped, (18,)) == cut((18,), (2, 9), 1, 0, 6)
    assert analogy._scaled(grouped, (9,)) is None


def test_a_constant_is_in_one_stack_alone():
    """Experts of a layer, or one expert of all layers; each stack is of parts that are left."""
    parts = {f"l.{i}.e.{j}.s": np.ones(4) for i in range(2) for j in range(3)}
    wholes = {"a.s": np.ones((3, 4)), "b.s": np.ones((2, 4)), "c.s": np.ones((3, 4))}
    tensors = Tensors(parts), Tensors(wholes)
    made = dict(by_families(*tensors, list(parts), list(wholes), {}))
    used = [name for construction in made.values() for name in construction.parameters]
    assert made and len(used) == len(set(used))
    back = [port for port, _ in by_families(*tensors[::-1], list(wholes), list(parts), {})]
    assert back and len(back) == len(set(back))


def test_a_large_array_of_a_few_odd_values_can_be_told_from_a_constant():
    """Though none of them is in the sample that is looked at first."""
    size = 3 * closeness_module.SAMPLE
    sampled = sample_positions(size, closeness_module.SAMPLE)
    odd = np.setdiff1d(np.arange(size), sampled)[:2]
    x = np.zeros(size)
    x[odd[0]] = 1.0
    two = x.copy()
    x[odd[1]] = 2.0
    assert closeness([x, two], [two, x, np.zeros(size)]).telling[0].tolist() == [True, False]
    assert closeness([two], [two, x, np.zeros(size)]).telling[1].tolist() == [False, True, False]


def test_rows_of_a_square_matrix_are_not_told_from_its_columns():
    """The order of a matrix says how a vector beside it lies only if one axis has its length."""
    order = (3, 4, 5, 0, 1, 2)
    for shape, axis, orders in (
        ((6, 4), 0, {order}),
        ((4, 6), 1, {order}),
        ((6, 6), 0, set()),
        ((6, 6), 1, set()),
    ):
        x = draw(*shape)
        made = rearranged("w", x, np.take(x, order, axis))
        assert made is not None and orders_of(made, "w") == orders


@pytest.mark.parametrize("size", [1e-3, 0.5, 1.0, 40.0])
def test_a_distance_is_relative_whatever_the_size(size: float):
    e = draw(3, 4)
    e *= size / np.linalg.norm(e)
    assert distance(1.5 * e, e) == pytest.approx(0.5)
    assert distance(e, np.zeros((3, 4))) == pytest.approx(size)


def test_axes_of_one_element_allow_no_other_layouts():
    for target in ((3, 2, 4), (2, 4, 3), (4, 6)):
        padded = (target[0], 1, *target[1:], 1)
        assert len(plain_layouts((6, 4), padded)) == len(plain_layouts((6, 4), target))


def test_an_equal_element_makes_no_layout_the_nearest():
    x = draw(6, 6)
    y = x.T + 0.1 * draw(6, 6, seed=1)
    y[0, 1] = x[0, 1]
    found = resemblance(x, y)
    assert found is not None and found.layout.axes == (1, 0)


def test_a_part_of_the_first_axis_alone_is_written_without_the_others():
    assert cut((4, 5, 6), (4, 5, 6), 0, 0, 2).text() == "[0:2]"


def test_layers_of_a_stack_are_counted_by_the_first_number_of_a_name():
    parts = {f"l.{i}.w{n}": draw(5, 3, seed=2 * i + n) for i in (0, 1) for n in (0, 1)}
    layers = [[parts[f"l.{i}.w{n}"] for n in order] for i, order in enumerate(((0, 1), (1, 0)))]
    found = dissect(np.stack([np.concatenate(each, axis=1) for each in layers]), parts)
    assert found is not None and {name for name, *_ in found} == {*parts}


def test_what_is_no_number_resembles_nothing_if_differences_are_everywhere():
    x = draw(8, 8)
    odd = np.indices(x.shape).sum(0) % 2 > 0
    y = np.where(odd, x + 1e-3, x)
    assert resemblance(x, y) is not None
    y[0, 1] = np.nan
    assert resemblance(x, y) is None
