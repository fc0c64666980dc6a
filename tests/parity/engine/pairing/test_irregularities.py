"""Equal values in the wrong place: layouts unlike those of their kind, and exchanged originals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parity.engine.pairing.constructions import Construction, Piece, cut, whole
from parity.engine.pairing.irregularities import (
    ENOUGH,
    exchanged,
    irregularities,
    placed_by_name,
    unlike_others,
)
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.parameter_pairs import Means, Pair

TURNED = Layout((2, 3), (2, 3), (1, 0), (3, 2))
PLAIN = Layout((2, 3), (2, 3), (0, 1), (2, 3))


def pair(original: str, port: str, layout: Layout = TURNED) -> Pair:
    """A parameter of the port that is one whole parameter of the original."""
    piece = Piece(original, whole(layout.source), layout, whole(layout.target))
    return Pair(port, Construction(layout.target, (piece,)), Means.VALUE)


def kernels(count: int, *layouts: Layout) -> list[Pair]:
    """Kernels of layers, of which the last have these layouts and the others are turned."""
    every = [*[TURNED] * (count - len(layouts)), *layouts]
    return [pair(f"l.{i}.weight", f"h.{i}.kernel", each) for i, each in enumerate(every)]


def test_a_layout_is_odd_among_three_of_four_of_its_kind():
    assert unlike_others(kernels(4, PLAIN)) == {
        "h.3.kernel": "unchanged, where 3 of its kind are transposed (1, 0)"
    }
    # Two of four make no rule, and neither does one of two.
    assert unlike_others(kernels(4, PLAIN, PLAIN)) == {}
    assert unlike_others(kernels(ENOUGH - 1, PLAIN)) == {}
    assert unlike_others(kernels(4)) == {}


def test_a_kind_is_of_a_name_or_of_its_endings():
    """A kernel that lies in a module of another name is still a kernel."""
    odd = pair("head.weight", "lm_head.kernel", PLAIN)
    assert set(unlike_others([*kernels(3), odd])) == {"lm_head.kernel"}
    # A table is another kind, of another ending, and a tensor of three axes has other layouts.
    table = pair("embed.weight", "embed.embedding", PLAIN)
    assert unlike_others([*kernels(3), table]) == {}


@pytest.mark.parametrize(
    "layout",
    [
        Layout((1, 6), (1, 6), (0, 1), (1, 6)),
        Layout((6,), (6,), (0,), (6,)),
        Layout((6, 1), (6, 1), (0, 1), (6, 1)),
    ],
)
def test_what_lies_in_one_way_only_is_not_odd(layout):
    assert unlike_others(kernels(4, layout)) == {}


QUERY = ("l.0.query.weight",)
KEY = ("l.0.key.weight",)


def test_query_and_key_exchanged_are_named_both():
    right = [pair(QUERY[0], "h.0.query.kernel"), pair(KEY[0], "h.0.key.kernel")]
    crossed = [pair(KEY[0], "h.0.query.kernel"), pair(QUERY[0], "h.0.key.kernel")]
    assert exchanged(right) == {}
    assert exchanged(crossed) == {
        "h.0.query.kernel": f"holds {KEY[0]}; by name it would be {QUERY[0]}",
        "h.0.key.kernel": f"holds {QUERY[0]}; by name it would be {KEY[0]}",
    }
    assert exchanged(crossed[:1]) == {}
    # Of another shape, or of one original, there is nothing to exchange.
    other = pair(KEY[0], "h.0.query.kernel", Layout((6, 1), (6, 1), (0, 1), (6, 1)))
    assert exchanged([other, crossed[1]]) == {}
    other = pair(KEY[0], "h.0.query.kernel", PLAIN)
    assert exchanged([other, crossed[1]]) == {}
    other = pair(KEY[0], "h.0.query.kernel", Layout((6,), (6,), (0,), TURNED.target))
    assert exchanged([other, crossed[1]]) == {}
    tied = [pair(KEY[0], "h.0.query.kernel"), pair(KEY[0], "h.0.key.kernel")]
    assert exchanged(tied) == {}


def test_names_place_what_was_exchanged_and_leave_the_rest_where_it_is():
    words = ("query", "key", "value")

    def held(order: tuple[str, ...], **changes: Any) -> list[Pair]:
        made = [
            pair(f"l.0.{word}.weight", f"h.0.{place}.kernel")
            for word, place in zip(order, words, strict=True)
        ]
        return [replace(each, **changes) for each in made]

    every = [*kernels(3), *held(words)]
    assert placed_by_name(every) == placed_by_name([]) == placed_by_name(every[:1]) == {}
    crossed = held(("key", "query", "value"))
    placed = {f"h.0.{word}.kernel": f"l.0.{word}.weight" for word in words[:2]}
    assert placed_by_name([*kernels(3), *crossed]) == placed
    # In a round each of the three is in another place.
    around = held(("key", "value", "query"))
    assert placed_by_name(around) == placed | {"h.0.value.kernel": "l.0.value.weight"}
    # Values that differ are no evidence, and neither is what is a part or has another shape.
    assert placed_by_name(held(("key", "query", "value"), means=Means.NEAR)) == {}
    assert placed_by_name([replace(crossed[0], means=Means.NEAR), crossed[1]]) == {}
    part = Piece("l.0.key.weight", cut((4, 3), (4, 3), 0, 0, 2), TURNED, whole((3, 2)))
    construction = Construction((3, 2), (part,))
    assert placed_by_name([replace(crossed[0], construction=construction), crossed[1]]) == {}
    assert placed_by_name([pair("l.0.key.weight", "h.0.query.kernel", PLAIN), crossed[1]]) == {}


def test_both_of_one_parameter_are_said_and_pieces_are_left_out():
    crossed = [
        pair("l.0.query.weight", "h.0.key.kernel", PLAIN),
        pair("l.0.key.weight", "h.0.query.kernel", PLAIN),
    ]
    among = [*kernels(6), *crossed]
    notes = irregularities(among)
    assert set(notes) == {"h.0.key.kernel", "h.0.query.kernel"}
    held, lies = notes["h.0.key.kernel"].split("; by name it would be l.0.key.weight; ")
    assert held == "holds l.0.query.weight"
    assert lies == "unchanged, where 6 of its kind are transposed (1, 0)"
    # A half of a parameter lies as whoever fused it chose.
    half = cut((4, 3), (4, 3), 0, 0, 2)
    fused = Piece("l.9.weight", half, PLAIN, whole((2, 3)))
    part = Pair("h.9.kernel", Construction((2, 3), (fused,)), Means.VALUE)
    assert irregularities([*kernels(6), part]) == {}
    two = Construction((4, 3), tuple(Piece("l", whole((2, 3)), PLAIN, half) for _ in range(2)))
    assert irregularities([*kernels(6), Pair("h.9.kernel", two, Means.VALUE)]) == {}
