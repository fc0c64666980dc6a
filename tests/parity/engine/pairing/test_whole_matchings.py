"""Matchings and proposals stated whole: every pair, what says so, every note and what is left."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from parity.engine.pairing.constructions import Construction, Piece, copied, cut, whole
from parity.engine.pairing.layouts import identity
from parity.engine.pairing.matching import match_parameters
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.proposal import UNSURE, propose


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


W = [draw(6, 4, seed=n) for n in range(8)]
TABLE, EMBEDDED = draw(9, 4, seed=31), draw(10, 6, seed=20)
TWO = np.array([0.5, 1.5])
ORIGINAL = {
    "emb.weight": EMBEDDED,
    "l.0.q.weight": W[0],
    "l.0.k.weight": W[1],
    "l.1.q.weight": W[2],
    "l.1.k.weight": W[3],
    "l.0.norm.weight": np.ones(6),
    "l.1.norm.weight": np.ones(6),
    "l.0.q.bias": np.zeros(6),
    "l.0.s": TWO,
    "l.1.s": TWO,
    "near.weight": W[4],
    "row.weight": W[5],
    "narrow.weight": W[6],
    "shuffled.weight": W[7],
    "lost.weight": draw(3, 3, seed=30),
    "head.weight": EMBEDDED,
    "table.weight": TABLE,
}
PORT = {
    "embed.embedding": EMBEDDED,
    "b.0.query.kernel": W[0].T,
    "b.0.key.kernel": W[1].T,
    "b.1.query.kernel": W[2].T,
    "b.1.key.kernel": W[3].T,
    "b.0.ln.scale": np.ones(6),
    "b.1.ln.scale": np.ones(6),
    "b.0.query.bias": np.zeros(6),
    "b.0.s": TWO,
    "b.1.s": TWO,
    "near.kernel": W[4].T + 1e-3 * draw(4, 6, seed=40),
    "row.kernel": np.where(np.arange(6)[:, None] == 2, 0.0, W[5]).T,
    "narrow.kernel": W[6].T.astype(ml_dtypes.bfloat16).astype(np.float32),
    "shuffled.kernel": W[7][::-1][:, [1, 0, 2, 3]].T,
    "own.kernel": draw(3, 3, seed=33),
    "table.kernel": TABLE[:6],
}
TURNED = ", transposed (1, 0)"
PAIRS = {
    "embed.embedding": ("emb.weight", Means.VALUE, ""),
    "b.0.query.kernel": (f"l.0.q.weight{TURNED}", Means.VALUE, ""),
    "b.0.key.kernel": (f"l.0.k.weight{TURNED}", Means.VALUE, ""),
    "b.1.query.kernel": (f"l.1.q.weight{TURNED}", Means.VALUE, ""),
    "b.1.key.kernel": (f"l.1.k.weight{TURNED}", Means.VALUE, ""),
    "b.0.ln.scale": ("l.0.norm.weight", Means.NAME, "constant"),
    "b.1.ln.scale": ("l.1.norm.weight", Means.NAME, "constant"),
    "b.0.query.bias": ("l.0.q.bias", Means.VALUE, "constant"),
    "b.0.s": ("l.0.s", Means.NAME, "2 elements"),
    "b.1.s": ("l.1.s", Means.NAME, "2 elements"),
    "near.kernel": (f"near.weight{TURNED}", Means.NEAR, None),
    "row.kernel": (f"row.weight{TURNED}", Means.SLICE, "differs in columns 2"),
    "narrow.kernel": (
        f"narrow.weight{TURNED}", Means.ROUNDED, "the port holds values rounded to bfloat16",
    ),
    "table.kernel": (
        "table.weight[0:6]", Means.VALUE,
        "all but [0:6] of the original is in no parameter of the port",
    ),
}  # fmt: skip


def stated(matching: Matching) -> dict[str, tuple[str, Means, str]]:
    return {pair.port: (pair.construction.text(), pair.means, pair.note) for pair in matching.pairs}


def test_a_model_with_everything_in_it_is_matched_as_it_was_made():
    found = match_parameters(ORIGINAL, PORT)
    apart = np.linalg.norm(PORT["near.kernel"] - W[4].T) / np.linalg.norm(PORT["near.kernel"])
    near = f"differs in value by {apart:.1e} (relative L2)"
    expected = PAIRS | {"near.kernel": (*PAIRS["near.kernel"][:2], near)}
    # In the port's order.
    assert list(stated(found).items()) == list(expected.items())
    assert {pair.port: pair.also for pair in found.pairs if pair.also} == {
        "embed.embedding": ("head.weight",)
    }
    assert found.tied == ((("emb.weight", "head.weight"), ("embed.embedding",)),)
    other, turned = "has other values", "the same values in another order"
    assert found.unmatched_port == (
        Unmatched("shuffled.kernel", (4, 6), "shuffled.weight", turned),
        Unmatched("own.kernel", (3, 3), "lost.weight", f"of (3, 3), {other}"),
    )
    assert found.unmatched_original == (
        Unmatched("shuffled.weight", (6, 4), "shuffled.kernel", turned),
        Unmatched("lost.weight", (3, 3), "own.kernel", f"of (3, 3), {other}"),
    )
    assert not found.is_complete and Matching.from_json(found.to_json()) == found
    lines = found.text().split("\n")
    assert lines[0] == (
        "14 of 16 parameters of the port matched: 7 by value, 1 by value after rounding, "
        "4 by name, equal in value, 1 but for a slice, 1 by name, differs in value"
    )
    assert lines[1].split("  ")[0] == "port" and lines[2].endswith("also head.weight")
    assert lines[-6:] == [
        "of the port, without a counterpart:",
        "  shuffled.kernel  (4, 6)  closest: shuffled.weight, the same values in another order",
        "  own.kernel       (3, 3)  closest: lost.weight, of (3, 3), has other values",
        "of the original, without a counterpart:",
        "  shuffled.weight  (6, 4)  closest: shuffled.kernel, the same values in another order",
        "  lost.weight      (3, 3)  closest: own.kernel, of (3, 3), has other values",
    ]


def test_parameters_are_counted_among_those_of_the_port_alone():
    x, y, z = (np.random.default_rng(seed).normal(size=(4, 5)) for seed in range(3))
    for original, port, told in (
        ({"a": x, "b": y, "c": z}, {"x": x}, "1 of 1"),
        ({"a": x}, {"x": x, "y": y, "z": z}, "1 of 3"),
    ):
        text = match_parameters(original, port).text()
        assert text.startswith(f"{told} parameters of the port matched: 1 by value\n")


def test_the_other_way_round_rounding_and_ties_are_the_original_s():
    found = match_parameters(PORT, {n: x for n, x in ORIGINAL.items() if n != "table.weight"})
    pairs = stated(found)
    assert pairs["narrow.weight"] == (
        f"narrow.kernel{TURNED}", Means.ROUNDED, "the original holds values rounded to bfloat16",
    )  # fmt: skip
    # One of the original under two names of the port: each says so of the other.
    assert pairs["emb.weight"] == ("embed.embedding", Means.VALUE, "tied with head.weight")
    assert pairs["head.weight"] == ("embed.embedding", Means.VALUE, "tied with emb.weight")


def test_a_longer_table_of_the_port_is_partly_of_the_original():
    found = match_parameters({"t.weight": TABLE[:6]}, {"t.weight": TABLE})
    text, means, note = stated(found)["t.weight"]
    assert (text, means) == ("t.weight, at [0:6]", Means.SLICE)
    assert note == "only [0:6] of it comes from the original" and not found.is_complete


def test_equal_arrays_are_told_apart_by_name_and_said_to_be_equal():
    x = draw(4, 5)
    original = {f"a.{n}.w": x for n in range(3)}
    found = match_parameters(original, {f"b.{n}.w": x for n in range(2)})
    assert stated(found) == {
        f"b.{n}.w": (f"a.{n}.w", Means.NAME, "one of 3 that are equal") for n in range(2)
    }
    # The third is tied to the one that its name is most like.
    assert [pair.also for pair in found.pairs] == [(), ("a.2.w",)]


SHAPES = {
    "emb.weight": (10, 6),
    **{f"l.{i}.{n}.weight": (6, 6) for i in (0, 1) for n in "qkv"},
    "l.0.norm.weight": (6,),
    "l.1.norm.weight": (6,),
    "l.0.up.weight": (24, 6),
    "l.1.up.weight": (24, 6),
    "head.weight": (10, 6),
    "conv.weight": (5, 3, 2),
}
PORTED = {
    "embed.embedding": (10, 6),
    "b.0.qkv.kernel": (6, 18),
    "b.1.qkv.kernel": (6, 18),
    "b.norm.scale": (2, 6),
    "b.0.up.kernel": (6, 24),
    "b.1.up.kernel": (6, 24),
    "conv.kernel": (2, 3, 5),
    "lm_head.kernel": (6, 10),
    "other": (99,),
}


def zeros(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def fused(layer: int) -> str:
    places = (("q", "0:6"), ("k", "6:12"), ("v", "12:18"))
    return " + ".join(f"l.{layer}.{n}.weight{TURNED}, at [:, {at}]" for n, at in places)


def test_a_proposal_says_what_is_made_of_what_and_what_is_a_guess():
    found = propose(zeros(SHAPES), zeros(PORTED))
    guess = "fused; the order of the parts is a guess"
    assert stated(found) == {
        "embed.embedding": ("emb.weight", Means.PROPOSAL, ""),
        "b.0.qkv.kernel": (fused(0), Means.PROPOSAL, guess),
        "b.1.qkv.kernel": (fused(1), Means.PROPOSAL, guess),
        "b.norm.scale": (
            "l.0.norm.weight, at [0] + l.1.norm.weight, at [1]", Means.PROPOSAL, "a stack",
        ),
        "b.0.up.kernel": (f"l.0.up.weight{TURNED}", Means.PROPOSAL, ""),
        "b.1.up.kernel": (f"l.1.up.weight{TURNED}", Means.PROPOSAL, ""),
        "conv.kernel": ("conv.weight, transposed (2, 1, 0)", Means.PROPOSAL, ""),
        "lm_head.kernel": (f"head.weight{TURNED}", Means.PROPOSAL, ""),
    }  # fmt: skip
    assert found.unmatched_port == (Unmatched("other", (99,)),)
    assert found.unmatched_original == ()


def test_the_other_way_round_parts_are_split_and_unstacked():
    found = propose(zeros(PORTED), zeros(SHAPES))
    pairs = stated(found)
    for layer in (0, 1):
        for n, at in (("q", "0:6"), ("k", "6:12"), ("v", "12:18")):
            text, _, note = pairs[f"l.{layer}.{n}.weight"]
            assert text == f"b.{layer}.qkv.kernel[:, {at}]{TURNED}"
            assert note == "fused; the order of the parts is a guess"
        norm = pairs[f"l.{layer}.norm.weight"]
        assert norm == (f"b.norm.scale[{layer}]", Means.PROPOSAL, "a stack")
    assert found.unmatched_original == (Unmatched("other", (99,)),)


def test_what_the_port_holds_twice_is_a_second_copy():
    ports = {"embed.embedding": (10, 6), "decoder.embed.embedding": (10, 6)}
    found = propose(zeros({"embed.weight": (10, 6)}), zeros(ports))
    assert {port: (text, note) for port, (text, _, note) in stated(found).items()} == {
        "embed.embedding": ("embed.weight", ""),
        "decoder.embed.embedding": ("embed.weight", "a second copy"),
    }
    other = propose(zeros({"embed.weight": (10, 6)}), zeros(ports | {"x.y.1.z": (10, 6)}))
    assert [u.name for u in other.unmatched_port] == ["x.y.1.z"]


@pytest.mark.parametrize("more", [False, True])
def test_a_pair_without_words_in_common_is_unsure_whatever_it_says_of_itself(more: bool):
    """Nothing else has its shape, so that it is proposed; other pairs of its module support it."""
    original, port = {"alone.x": (7,)}, {"zzz.y": (7,)}
    if more:
        original |= {"alone.table": (3, 4)}
        port |= {"zzz.table": (3, 4)}
    text, _, note = stated(propose(zeros(original), zeros(port)))["zzz.y"]
    assert text == "alone.x" and UNSURE > 1.0
    assert note == ("" if more else "unsure: the names have little in common")


@pytest.mark.parametrize(("parts", "proposed"), [(4, True), (5, False)])
def test_four_parameters_are_fused_at_most(parts: int, proposed: bool):
    original = {f"m.{n}.weight": (6, 6) for n in ("a", "b", "c", "d", "e")[:parts]}
    found = propose(zeros(original), zeros({"m.all.kernel": (6, 6 * parts)}))
    assert bool(found.pairs) == proposed
    if proposed:
        assert found.pairs[0].originals == tuple(original)


def test_gradients_that_the_original_does_not_have_are_left_out():
    """Under any of the names of a tied parameter; one that a single name has is taken as it is."""
    tied = Pair("p", copied("a", (2,)), Means.VALUE, also=("b",))
    plain = Pair("q", copied("c", (2,)), Means.VALUE)
    matching, x = Matching((tied, plain)), np.array([1.0, 2.0])
    assert matching.gradients({}, {"p": x, "q": x}) == {}
    theirs, ours = matching.gradients({"c": 3 * x}, {"p": x, "q": x})["q"]
    assert theirs.tolist() == [3.0, 6.0] and ours.tolist() == [1.0, 2.0]
    for given in ({"a": x}, {"b": x}, {"a": x, "b": x.copy()}):
        assert matching.gradients(given, {"p": x})["p"][0].tolist() == [1.0, 2.0]
    assert matching.gradients({"a": x, "b": 2 * x}, {"p": x})["p"][0].tolist() == [3.0, 6.0]


def test_a_matching_is_complete_if_every_parameter_of_the_port_has_an_equal_partner():
    equal, near = (Pair("p", copied("a", (2,)), means) for means in (Means.NAME, Means.NEAR))
    lost = (Unmatched("q", (2,)),)
    # What the port does not use is none of its parameters.
    assert Matching((equal,), lost).is_complete and Matching(()).is_complete
    for pairs in ((equal,), ()):
        assert not Matching(pairs, (), lost).is_complete
    assert not Matching((equal, near)).is_complete


def test_of_three_tied_names_each_gradient_is_added_once():
    pair = Pair("p", copied("a", (2,)), Means.VALUE, also=("b", "c"))
    x, y = np.array([1.0, 2.0]), np.array([10.0, 20.0])
    for given in itertools.permutations((x, y, x.copy())):
        gradients = dict(zip("abc", given, strict=True))
        before = {name: value.copy() for name, value in gradients.items()}
        theirs, _ = Matching((pair,)).gradients(gradients, {"p": x})["p"]
        assert theirs.tolist() == [11.0, 22.0]
        # The caller's own are as they were.
        np.testing.assert_equal(gradients, before)


def halves() -> tuple[Construction, Construction]:
    """Return two constructions, each of one half of the parameter `a`."""
    first, last = (
        Construction(
            (2,), (Piece("a", cut((4,), (4,), 0, at, at + 2), identity((2,)), whole((2,))),)
        )
        for at in (0, 2)
    )
    return first, last


def test_the_parts_of_a_fusion_are_not_tied():
    """Unless the port has the fusion, or the original a part of it, under several names."""
    [pair] = match_parameters({"q": W[0], "k": W[1]}, {"p": np.concatenate(W[:2])}).pairs
    assert pair.originals == ("q", "k") and Matching((pair,)).tied == ()
    again = Pair("r", pair.construction, Means.VALUE)
    assert Matching((pair, again)).tied == ((("q", "k"), ("p", "r")),)
    other = Pair("p", pair.construction, Means.VALUE, also=("x",))
    assert Matching((other,)).tied == ((("q", "k", "x"), ("p",)),)


def test_two_parts_of_one_tensor_are_not_tied():
    first, last = halves()
    pairs = (Pair("p", first, Means.VALUE), Pair("q", last, Means.VALUE))
    assert Matching(pairs).tied == ()
    again = Pair("r", first, Means.VALUE, also=("b",))
    assert Matching((*pairs, again)).tied == ((("a", "b"), ("p", "r")),)
    # A parameter that is made of both parts is tied to another original of both.
    one = Construction((4,), tuple(replace(c.pieces[0], place=c.pieces[0].part) for c in halves()))
    assert Matching((Pair("t", one, Means.VALUE),)).tied == ()
    tied = Pair("t", one, Means.VALUE, also=("b",))
    assert Matching((tied,)).tied == ((("a", "b"), ("t",)),)
    # Each name once, whichever pairs have it.
    both = Pair("s", first, Means.VALUE, also=("b", "c"))
    assert Matching((again, both)).tied == ((("a", "b", "c"), ("r", "s")),)


def test_a_fused_parameter_without_the_gradient_of_a_part_is_left_out():
    place = [cut((4,), (4,), 0, at, at + 2) for at in (0, 2)]
    pieces = (Piece(n, whole((2,)), identity((2,)), at) for n, at in zip("ab", place, strict=True))
    matching, x = Matching((Pair("p", Construction((4,), tuple(pieces)), Means.VALUE),)), np.ones(2)
    assert matching.gradients({"a": x}, {"p": np.ones(4)}) == {}
    assert list(matching.gradients({"a": x, "b": x}, {"p": np.ones(4)})) == ["p"]


def test_a_matching_that_was_written_by_hand_may_leave_out_remarks():
    """What a pair is made of, and by what evidence, has no default."""
    entry = Matching(
        (Pair("p", copied("a", (2,)), Means.VALUE),), (Unmatched("b", (3,)),), (Unmatched("q", ()),)
    ).to_json()
    (pair,), (one,), (other,) = entry.values()
    optional = ("note", "also"), ("closest", "note"), ("note",)
    for each, fields in zip((pair, one, other), optional, strict=True):
        for field in fields:
            del each[field]
    assert Matching.from_json(entry) == Matching(
        (Pair("p", copied("a", (2,)), Means.VALUE),), (Unmatched("b", (3,)),), (Unmatched("q", ()),)
    )
    del pair["means"]
    with pytest.raises(ValueError, match="expected the field 'means' of a matching"):
        Matching.from_json(entry)
