"""Stages paired by value, name and order: in a healthy port, in a wrong one, and as pinned."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parity import pins
from parity.engine.pairing import alignment
from parity.engine.pairing.alignment import (
    HORIZON,
    AlignedBy,
    Alignment,
    AlignmentError,
    Pin,
    _evidence,
    align,
)
from parity.engine.pairing.closeness import EQUAL, MASKED, distance, entangled
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.stage_names import LEARNED, learned, similarity
from tests.helpers import roundoff

Stages = dict[str, np.ndarray]
BATCH, TIME, HEADS, SIZE = 2, 8, 4, 4
WIDTH = HEADS * SIZE
ROUNDING = float(np.finfo(np.float32).eps)


def network(layers: int = 6, wrong_from: int | None = None, moved: float = ROUNDING) -> Stages:
    """Stages of a residual network; from one layer's first stage on, each moved by `moved`."""
    weights, noise = np.random.default_rng(0), np.random.default_rng(1)

    def computed(x: np.ndarray, layer: int) -> np.ndarray:
        scale = moved if wrong_from is not None and layer >= wrong_from else ROUNDING
        return x + scale * np.std(x) * noise.normal(size=x.shape)

    def linear(x: np.ndarray) -> np.ndarray:
        return x @ weights.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)

    x = weights.normal(size=(BATCH, TIME, WIDTH))
    stages = {"model.embed": x}
    for n in range(layers):
        at = f"model.layers.{n}"
        stages[f"{at}.norm"] = y = computed(x / np.std(x, axis=-1, keepdims=True), n)
        stages[f"{at}.attn.q_proj"] = q = computed(linear(y), n)
        stages[f"{at}.attn.k_proj"] = k = computed(linear(y), n)
        stages[f"{at}.attn.out_proj"] = stages[f"{at}.attn"] = a = computed(linear(q + k), n)
        stages[f"{at}.mlp.up"] = u = computed(linear(x + a), n)
        stages[f"{at}.mlp.act"] = g = computed(np.tanh(u), n)
        stages[f"{at}.mlp.down"] = stages[f"{at}.mlp.dropout"] = d = computed(linear(g), n)
        stages[f"{at}.mlp"] = d
        # What a layer adds is a tenth of what it gets, as in the first steps of training.
        x = stages[at] = computed(x + (a + d) / 10, n)
    return stages | {
        "model.norm": computed(x, layers),
        "output.logits": computed(linear(x), layers),
    }


def names(alignment: Alignment) -> dict[str, str]:
    return {pair.port: pair.original for pair in alignment.pairs}


def renamed(name: str) -> str:
    """As another library names the same parts."""
    for one, other in (
        ("model.layers.", "decoder.Block_"),
        ("model.", "decoder."),
        ("attn.q_proj", "self_attention.query"),
        ("attn.k_proj", "self_attention.key"),
        ("attn.out_proj", "self_attention.projection"),
        (".attn", ".self_attention"),
        ("mlp.up", "mlp.fc1"),
        ("mlp.down", "mlp.fc2"),
    ):
        name = name.replace(one, other)
    return name


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=EQUAL))


# Healthy ports


def test_every_stage_of_a_healthy_port_pairs_with_its_namesake_by_value() -> None:
    original = network()
    alignment = align(original, network(moved=2 * ROUNDING, wrong_from=0))
    assert names(alignment) == {name: name for name in original}, "also those that share a value"
    assert {pair.by for pair in alignment.pairs} == {AlignedBy.VALUE}
    assert max(pair.distance for pair in alignment.pairs) < EQUAL
    assert not alignment.unaligned_port
    assert not alignment.unaligned_original


def test_values_decide_against_names() -> None:
    original = network()
    swapped = {"attn.q_proj": "attn.k_proj", "attn.k_proj": "attn.q_proj"}
    port = {
        next((n.replace(a, b) for a, b in swapped.items() if a in n), n): x
        for n, x in original.items()
    }
    pairs = names(align(original, port))
    assert pairs["model.layers.3.attn.q_proj"] == "model.layers.3.attn.k_proj"
    assert pairs["model.layers.3.attn.k_proj"] == "model.layers.3.attn.q_proj"


def test_names_decide_among_stages_of_one_value() -> None:
    original = network(1)
    port = {name: x for name, x in original.items() if not name.endswith((".down", ".dropout"))}
    alignment = align(original, port)
    assert names(alignment)["model.layers.0.mlp"] == "model.layers.0.mlp"
    alone = {"model.layers.0.mlp.down", "model.layers.0.mlp.dropout"}
    assert set(alignment.unaligned_original) == alone


def test_what_only_one_side_has_is_listed_and_no_other_stage_moves() -> None:
    original, port = network(), network()
    for n in range(6):
        del port[f"model.layers.{n}.mlp.act"]
        del original[f"model.layers.{n}.attn.k_proj"]
    extra = {"model.mask_scale": np.random.default_rng(5).normal(size=(BATCH, TIME, WIDTH))}
    alignment = align(original, port | extra)
    assert all(a == b for a, b in names(alignment).items())
    assert set(alignment.unaligned_original) == {n for n in original if n.endswith(".act")}
    lone = {n for n in port if n.endswith(".k_proj")} | set(extra)
    assert set(alignment.unaligned_port) == lone
    assert "only in the port" in alignment.text()
    assert "only in the original" in alignment.text()


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "batch and positions as one axis": lambda x: x.reshape(-1, WIDTH),
    "heads": lambda x: x.reshape(BATCH, TIME, HEADS, SIZE),
    "heads before positions": lambda x: x.reshape(BATCH, TIME, HEADS, SIZE).transpose(0, 2, 1, 3),
    "positions first": lambda x: x.transpose(1, 0, 2),
    "channels first": lambda x: x.transpose(0, 2, 1),
    "parts of a head apart": lambda x: (
        x.reshape(BATCH, TIME, WIDTH // 2, 2).swapaxes(2, 3).reshape(x.shape)
    ),
}


@pytest.mark.parametrize("lie", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("back", [False, True], ids=["port", "original"])
def test_a_stage_is_found_however_its_axes_lie(
    lie: Callable[[np.ndarray], np.ndarray], back: bool
) -> None:
    plain = network(2)
    laid = {name: lie(x) if ".attn" in name else x for name, x in plain.items()}
    original, port = (laid, plain) if back else (plain, laid)
    alignment = align(original, port)
    assert {pair.by for pair in alignment.pairs} == {AlignedBy.VALUE}
    for pair in alignment.pairs:
        assert same(pair.layout(original[pair.original]), port[pair.port])
        assert names(alignment) == {name: name for name in original}


@pytest.mark.parametrize("mask", [MASKED, -MASKED, -3.4e38, 1.7e308, np.inf, -np.inf])
def test_masks_that_are_equal_are_no_part_of_a_distance(mask: float) -> None:
    """Neither of what differs nor of the size it is relative to, however many there are."""
    rng = np.random.default_rng(4)
    e = rng.normal(size=(3, 5))
    y = e + rng.normal(size=(3, 5)) / 10
    alone = distance(y, e)
    for masks in (1, 4):
        masked = [np.concatenate([x, np.full((3, masks), mask)], axis=1) for x in (y, e)]
        assert distance(*masked) == alone
    # A mask that one side alone has is a difference, and of infinities no number.
    other = np.concatenate([y, np.zeros((3, 4))], axis=1)
    assert not distance(other, masked[1]) <= alone


@pytest.mark.parametrize("here", [0, 1, 2, 3])
@pytest.mark.parametrize("there", [0, 1, 2, 3])
def test_stages_are_paired_by_their_place_where_there_are_as_many_on_both_sides(
    here: int, there: int
) -> None:
    """Of other values and names each, behind stages of equal values that nothing follows."""
    rng = np.random.default_rng(5)

    def stages(words: str, count: int) -> Stages:
        return {word: rng.normal(size=(4, 6)) for word in words.split()[:count]}

    shared = {f"first.{n}": rng.normal(size=(4, 6)) for n in range(3)}
    ours, theirs = stages("alpha beta gamma", here), stages("red green blue", there)
    found = align(shared | theirs, shared | ours)
    placed = {p.port: p.original for p in found.pairs if p.by is AlignedBy.ORDER}
    assert placed == (dict(zip(ours, theirs, strict=True)) if here == there else {})
    assert len(found.pairs) == len(shared) + len(placed)


def test_an_unrelated_order_of_elements_is_no_layout() -> None:
    original = network(2)
    shuffled = np.random.default_rng(3).permutation(original["model.embed"].reshape(-1))
    port = original | {"model.embed": shuffled.reshape(BATCH, TIME, WIDTH)}
    (pair,) = (p for p in align(original, port).pairs if p.port == "model.embed")
    assert pair.by is AlignedBy.NAME
    assert pair.distance > 1
    assert pair.enclosed, "every value behind it agrees"


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_constants_do_not_pair_by_value(constant: float) -> None:
    x = np.full((BATCH, TIME, WIDTH), constant)
    mask = np.where(np.arange(WIDTH) > WIDTH // 2, -np.inf, constant) + x
    original = {"alpha": x, "beta": mask} | network(1)
    alignment = align(original, {"gamma": x, "delta": mask} | network(1))
    assert set(alignment.unaligned_port) == {"gamma", "delta"}
    alike = align(original, original)
    assert {p.port: (p.by, p.distance) for p in alike.pairs if p.port in ("alpha", "beta")} == {
        "alpha": (AlignedBy.NAME, 0.0),
        "beta": (AlignedBy.NAME, 0.0),
    }


# Wrong ports


@pytest.mark.parametrize("name", [lambda name: name, renamed], ids=["same names", "other names"])
@pytest.mark.parametrize("wrong_from", [0, 3])
@pytest.mark.parametrize("moved", [1e-3, 0.3, 1.0, np.nan])
def test_stages_behind_a_bug_pair_by_name_and_order(
    name: Callable[[str], str], wrong_from: int, moved: float
) -> None:
    original = network()
    port = {name(n): x for n, x in network(wrong_from=wrong_from, moved=moved).items()}
    alignment = align(original, port, outputs=(["output.logits"], ["output.logits"]))
    assert names(alignment) == {name(n): n for n in original}
    first = f"model.layers.{wrong_from}.norm"
    by = {pair.original: pair.by for pair in alignment.pairs}
    at = list(original).index(first)
    assert {by[n] for n in list(original)[:at]} == {AlignedBy.VALUE}
    assert AlignedBy.VALUE not in {by[n] for n in list(original)[at:]}


def test_a_layer_that_is_missing_pairs_no_other_layer() -> None:
    original = network()
    port = {n: x for n, x in network(wrong_from=2, moved=0.3).items() if ".layers.2" not in n}
    alignment = align(original, port)
    assert all(a == b for a, b in names(alignment).items())
    assert set(alignment.unaligned_original) == {n for n in original if ".layers.2" in n}


def test_layers_counted_from_one_pair_with_layers_counted_from_zero() -> None:
    original = network(3)
    port = {
        n.replace("layers.2", "layers.3").replace("layers.1", "layers.2")
        .replace("layers.0", "layers.1"): x
        for n, x in network(3, wrong_from=0, moved=0.3).items()
    }  # fmt: skip
    pairs = names(align(original, port))
    assert pairs["model.layers.1.mlp.up"] == "model.layers.0.mlp.up"
    assert pairs["model.layers.3"] == "model.layers.2"


def test_a_layer_that_does_nothing_is_not_the_next_one() -> None:
    original = network(4)
    port = network(4)
    # Layer 1 of the port adds nothing, so layer 2 gets what layer 1 of the original got.
    for stage in (".norm", ".attn.q_proj", ".attn.k_proj", ".mlp.up"):
        port[f"model.layers.2{stage}"] = original[f"model.layers.1{stage}"]
    port["model.layers.1"] = original["model.layers.0"]
    pairs = names(align(original, port))
    assert pairs["model.layers.2.norm"] == "model.layers.2.norm"
    assert pairs["model.layers.1"] == "model.layers.1"


def test_a_stage_executed_in_another_order_pairs_with_its_namesake() -> None:
    original = network(3)
    port = network(3, wrong_from=0, moved=1.0)
    turned = list(port)
    for n in range(3):
        q, k = (turned.index(f"model.layers.{n}.attn.{which}_proj") for which in "qk")
        turned[q], turned[k] = turned[k], turned[q]
    alignment = align(original, {name: port[name] for name in turned})
    assert names(alignment) == {name: name for name in original}


def test_the_layout_of_other_layers_holds_behind_a_bug() -> None:
    heads_first = LAYOUTS["heads before positions"]
    original = {n: heads_first(x) if ".attn" in n else x for n, x in network(4).items()}
    # The port of layers 2 and 3 forgets to transpose, on top of being wrong.
    port = network(4, wrong_from=2, moved=0.3)
    layouts = {p.port: p.layout for p in align(original, port).pairs if ".attn" in p.port}
    assert len(set(layouts.values())) == 1
    assert "transposed" in next(iter(layouts.values())).text()


def test_outputs_pair_with_outputs_alone() -> None:
    original, port = network(2), network(2)
    original["head"] = original["output.logits"]
    port = {"result" if n == "output.logits" else n: x for n, x in port.items()}
    assert names(align(original, port))["result"] in ("head", "output.logits")
    pairs = names(align(original, port, outputs=(["output.logits"], ["result"])))
    assert pairs["result"] == "output.logits"


def test_an_output_that_has_a_partner_pairs_with_no_intermediate_of_its_name() -> None:
    original, port = network(2), network(2)
    # The port calls so what it returns scaled, and returns it under another name.
    port["result"] = port["output.logits"]
    outputs = (["output.logits"], ["result"])
    assert names(align(original, port))["output.logits"] == "output.logits"
    pairs = names(align(original, port, outputs=outputs))
    assert pairs["result"] == "output.logits" and "output.logits" not in pairs
    # Likewise of the other side.
    turned = names(align(port, original, outputs=outputs[::-1]))
    assert turned["output.logits"] == "result"


@pytest.mark.parametrize("port", [{}, {"other": np.arange(7.0)}])
def test_programs_that_have_nothing_in_common_do_not_align(port: Stages) -> None:
    with pytest.raises(AlignmentError, match=r"0 of \d stages.*expected 1 at least.*same inputs"):
        align(network(1), port)


def test_too_little_says_what_does_align() -> None:
    rng = np.random.default_rng(7)
    port = {f"part{chr(97 + n)}": rng.normal(size=(BATCH, TIME, WIDTH + 1)) for n in range(20)}
    with pytest.raises(
        AlignmentError, match=r"(?s)1 of 21 stages.*expected 3.*model\.embed +model\.embed"
    ):
        align(network(6), port | {"model.embed": network(1)["model.embed"]})


# Pins


def test_a_written_alignment_is_followed_when_read(tmp_path: Path) -> None:
    original, port = network(3), network(3, wrong_from=1, moved=0.3)
    del port["model.layers.1.mlp.act"]
    alignment = align(original, port)
    pinned = pins.read(pins.write(alignment, tmp_path / "pins.json"))
    again = align(original, port, pins=pinned)
    assert names(again) == names(alignment)
    assert [p.layout for p in again.pairs] == [p.layout for p in alignment.pairs]
    assert {p.by for p in again.pairs} == {AlignedBy.PIN}
    assert again.unaligned_original.keys() == alignment.unaligned_original.keys()
    assert set(pinned) == set(alignment.pins())


def test_a_corrected_pin_decides_against_value_and_name(tmp_path: Path) -> None:
    original = network(2)
    file = pins.write(align(original, original), tmp_path / "pins.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    content["pairs"] = [{"port": "model.layers.1.norm", "original": "model.layers.0.norm"}]
    content["only_in_port"] = ["model.embed"]
    file.write_text(json.dumps(content), encoding="utf-8")
    alignment = align(original, original, pins=pins.read(file))
    assert names(alignment)["model.layers.1.norm"] == "model.layers.0.norm"
    assert set(alignment.unaligned_port) == {"model.embed", "model.layers.0.norm"}
    assert set(alignment.unaligned_original) == {"model.embed", "model.layers.1.norm"}


def test_one_pin_names_the_same_stage_of_every_layer() -> None:
    original = network(4)
    port = {
        n.replace("mlp.up", "xi.zeta"): x for n, x in network(4, 0, 1.0).items() if "act" not in n
    }
    pin = Pin("model.layers.0.xi.zeta", "model.layers.0.mlp.up")
    assert names(align(original, port, pins=[pin]))["model.layers.3.xi.zeta"] == (
        "model.layers.3.mlp.up"
    )


WRONG_PINS = {
    r"'model\.layer' of the original.*it has: model.*and \d+ more.*Correct the pin": [
        Pin("model.embed", "model.layer")
    ],
    r"'nothing' of the port, which has no such stage": [Pin("nothing", None)],
    r"'model\.embed' of the port is pinned twice": [
        Pin("model.embed", "model.norm"),
        Pin("model.embed", None),
    ],
    r"'model\.embed' \(2, 8, 16\) of the port is pinned to 'scalar' \(\)": [
        Pin("model.embed", "scalar")
    ],
    r"'empty' \(0, 3\) of the port is pinned to 'empty' \(0, 3\) .*at least one": [
        Pin("empty", "empty")
    ],
}


@pytest.mark.parametrize("message", WRONG_PINS)
def test_a_pin_that_cannot_be_followed_is_refused(message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        empty = {"empty": np.zeros((0, 3))}
        original = network(3) | empty | {"scalar": np.array(1.0)}
        align(original, network(3) | empty, pins=WRONG_PINS[message])


WRONG_FILES = {
    "": "expected pins",
    "[]": "must hold a JSON object",
    "{}": "has schema None, expected 1",
    '{"schema": 1, "pairs": {}}': "expected a list as 'pairs'",
    '{"schema": 1, "pairs": [{"port": "a"}]}': "expected a pair with `port` and `original`",
    '{"schema": 1, "pairs": [{"port": "a", "original": 1}]}': "expected the name of a stage, got 1",
    '{"schema": 1, "pairs": [{"port": "a", "original": "a", "layout": {"x": 1}}]}': (
        "the layout of 'a'"
    ),
}


@pytest.mark.parametrize("content", WRONG_FILES)
def test_a_file_that_is_no_pins_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "pins.json").write_text(content, encoding="utf-8")
    with pytest.raises(AlignmentError, match=WRONG_FILES[content]):
        pins.read(tmp_path / "pins.json")
    with pytest.raises(AlignmentError, match=r"expected pins in .*none\.json"):
        pins.read(tmp_path / "none.json")


def test_300_stages_align_within_a_second() -> None:
    original, port = network(30), network(30, wrong_from=10, moved=0.3)
    assert len(original) > 300
    seconds = []
    for _ in range(3):
        start = time.process_time()
        assert len(align(original, port).pairs) == len(original)
        seconds.append(time.process_time() - start)
    # Of the processor, and the best of three: other work on the machine is not what is asked.
    assert min(seconds) < 1


@pytest.mark.parametrize(("layer", "taught"), [(0, LEARNED), (1, 0.0)])
def test_a_pair_teaches_the_other_layers_only_if_it_is_of_one_layer(layer, taught):
    pairs = [("layers.0.mixer", f"blocks.{layer}.ema")]
    names = ["layers.2.mixer"], ["blocks.2.ema", "blocks.3.ema", "blocks.2.other"]
    assert learned(pairs, *names).tolist() == [[taught, 0.0, 0.0]]


def test_a_sum_that_cancels_says_nothing_of_stages_that_are_equal():
    """Rounding is relative to the numbers, and their sum may be far below them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, TIME, WIDTH))
    x -= x.mean()
    pairs = x.reshape(BATCH, TIME, WIDTH // 2, 2).swapaxes(2, 3).reshape(x.shape)
    y = pairs + ROUNDING * rng.normal(size=x.shape)
    assert abs(x.sum() - y.sum()) > abs(x.sum()), "the sum is rounding"
    [layout] = entangled([x], [y], [0], [0]).values()
    assert np.array_equal(layout(x), pairs)
    assert not entangled([x], [y + 1], [0], [0])


@pytest.mark.parametrize("turned", [False, True])
def test_where_equal_stages_lie_in_two_ways_a_wrong_one_lies_in_the_nearest(turned):
    """There is no usual layout to hold it to, and one of two at random is as likely wrong."""
    rng = np.random.default_rng(0)
    original = {name: rng.normal(size=(TIME, TIME)) for name in ("first", "second", "third")}
    third = original["third"].T if turned else original["third"]
    port = {"first": original["first"], "second": original["second"].T}
    port["third"] = third + 100 * EQUAL * rng.normal(size=third.shape)
    pairs = {pair.port: pair for pair in align(original, port).pairs}
    assert pairs["third"].by is AlignedBy.NAME
    assert np.array_equal(pairs["third"].layout(original["third"]), third)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_result_that_is_transposed_is_another_one_unless_a_pin_says_that_it_is_meant(pinned):
    x = np.random.default_rng(0).normal(size=(TIME, TIME))
    turned = Layout(x.shape, x.shape, (1, 0), x.shape)
    pins_of_it = [Pin("result", "result", turned)] if pinned else []
    sides = {"stage": x + 1, "result": x}, {"stage": x + 1, "result": x.T}
    found = align(*sides, outputs=(("result",), ("result",)), pins=pins_of_it)
    pair = next(pair for pair in found.pairs if pair.port == "result")
    assert (pair.layout == turned, pair.distance == 0.0) == (pinned, pinned)
    # Nobody is told that its values are equal.
    assert pair.by is (AlignedBy.PIN if pinned else AlignedBy.ORDER)


@pytest.mark.parametrize("side", ["original", "port", "both"])
def test_a_stage_pinned_to_nothing_has_no_partner_however_equal(side):
    """Its equal on the other side is left over too, and no other stage changes its partner."""
    stages = network(2)
    name = "model.layers.0.norm"
    barred = {
        "original": [Pin(None, name)],
        "port": [Pin(name, None)],
        "both": [Pin(None, name), Pin(name, None)],
    }
    found = align(stages, stages, pins=barred[side])
    assert name not in names(found) and name not in names(found).values()
    assert name in found.unaligned_original and name in found.unaligned_port
    assert len(found.pairs) == len(stages) - 1


def test_a_pinned_layout_holds_where_another_one_is_nearer():
    """A pin states what was meant: a port that is not turned as its pin says is different."""
    x = np.random.default_rng(0).normal(size=(TIME, TIME))
    turned = Layout(x.shape, x.shape, (1, 0), x.shape)
    foreign = Layout((TIME * TIME,), x.shape, (1, 0), x.shape)
    stages = {"stage": x, "other": x @ x}
    for layout, distant in ((turned, True), (None, False), (foreign, False)):
        pairs = align(stages, stages, pins=[Pin("stage", "stage", layout)]).pairs
        pair = next(pair for pair in pairs if pair.port == "stage")
        assert pair.by is AlignedBy.PIN
        assert (pair.layout == turned, pair.distance > EQUAL) == (distant, distant), layout


# Each piece of evidence alone


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape or (4, 6))


def off(x: np.ndarray, share: float, seed: int = 90) -> np.ndarray:
    """Return an array at this distance, in a direction of no meaning."""
    noise = drawn(seed, *x.shape)
    return x + share * np.linalg.norm(x) / np.linalg.norm(noise) * noise


FIRST = {"first": drawn(0)}


def test_pairs_are_in_the_order_of_the_port() -> None:
    a, b, c = (drawn(n) for n in (1, 2, 3))
    found = align({"a": a, "b": b, "c": c}, {"c": c, "a": a, "b": b})
    assert [pair.port for pair in found.pairs] == ["c", "a", "b"]


@pytest.mark.parametrize(("name", "by"), [("alpha", AlignedBy.NAME), ("red", AlignedBy.NEARNESS)])
def test_close_values_under_another_name_are_said_to_be_near(name: str, by: AlignedBy) -> None:
    x = drawn(1)
    found = align(FIRST | {"alpha": x}, FIRST | {name: off(x, 1e-3)})
    assert [(pair.port, pair.by) for pair in found.pairs[1:]] == [(name, by)]


@pytest.mark.parametrize("entangles", [False, True])
def test_the_caller_says_which_values_are_equal(entangles: bool) -> None:
    """In a usual layout and in an unusual one, such as heads interleaved in one axis."""
    x = drawn(1, 4, 8)
    y = x.reshape(4, 4, 2).transpose(0, 2, 1).reshape(4, 8) if entangles else x
    original, port = FIRST | {"alpha": x}, FIRST | {"red": off(y, 4 * EQUAL)}
    for factor in (2, 8):
        found = align(original, port, equal=factor * EQUAL)
        equal = [pair.port for pair in found.pairs if pair.by is AlignedBy.VALUE]
        assert equal == ["first", "red"][: 1 + (factor > 4)]


@pytest.mark.parametrize("agree_behind", [False, True])
def test_half_a_name_and_a_digit_pair_stages_in_another_order_where_values_diverged(
    agree_behind: bool,
) -> None:
    """Where values agree again, a stage more likely has no partner."""
    red, blue = drawn(1), drawn(2)
    behind = {f"z{n}": drawn(10 + n) for n in range(3)} if agree_behind else {}
    original = FIRST | {"x.red": red, "x.blue": blue} | behind
    port = FIRST | {"y.blue": off(blue, 0.1), "y.red": off(red, 0.1)} | behind
    found = names(align(original, port))
    expected = {} if agree_behind else {"y.blue": "x.blue", "y.red": "x.red"}
    assert {port: name for port, name in found.items() if port[0] == "y"} == expected


@pytest.mark.parametrize("agree_behind", [False, True])
def test_stages_are_counted_only_where_values_diverged_at_all_of_them(agree_behind: bool) -> None:
    """Of those behind the first stage too few agree, and of those behind the last one all."""
    behind = {"last": drawn(9)} if agree_behind else {}
    original = FIRST | {name: drawn(n) for n, name in enumerate(("a", "b", "c", "d"), 1)}
    port = FIRST | {name: drawn(n) for n, name in enumerate(("w", "x", "y", "z"), 11)}
    found = align(original | behind, port | behind)
    counted = {p.port: p.original for p in found.pairs if p.by is AlignedBy.ORDER}
    assert counted == ({} if agree_behind else dict(zip("wxyz", "abcd", strict=True)))


def test_results_that_nothing_else_pairs_are_paired_in_order() -> None:
    original = FIRST | {"m": drawn(1), "n": drawn(2), "alpha": drawn(3, 5)}
    port = FIRST | {"q": drawn(4), "result": drawn(5, 5)}
    found = align(original, port, outputs=(["alpha"], ["result"]))
    assert {(p.port, p.original, p.by) for p in found.pairs[1:]} == {
        ("result", "alpha", AlignedBy.ORDER)
    }


def test_a_result_of_another_shape_lies_as_it_is_found() -> None:
    x = drawn(1)
    found = align(FIRST | {"o": x}, FIRST | {"o": x.reshape(-1)}, outputs=(["o"], ["o"]))
    pair = found.pairs[-1]
    assert (pair.by, pair.distance, pair.layout.target) == (AlignedBy.VALUE, 0.0, (24,))


def test_every_result_pairs_with_the_result_of_its_name() -> None:
    """Also where the port returns two results exchanged, by mistake."""
    x, y, z = (drawn(n) for n in (1, 2, 3))
    returned = ["logits", "hidden", "state"]
    original = {"logits": x, "hidden": y, "state": z}
    port = {"logits": x, "hidden": z, "state": y}
    assert names(align(original, port))["hidden"] == "state"
    found = align(original, port, outputs=(returned, returned))
    assert names(found) == {name: name for name in returned}
    assert [pair.distance > 0 for pair in found.pairs] == [False, True, True]


def test_results_of_one_name_and_unequal_sizes_are_not_the_same_result() -> None:
    small, large = drawn(1, 3), drawn(2)
    returned = ["a", "b"], ["a", "b"]
    found = align({"a": large, "b": small}, {"a": small, "b": large}, outputs=returned)
    assert names(found) == {"a": "b", "b": "a"}


def test_a_wrong_stage_lies_as_equal_ones_do_and_not_as_it_is_nearest() -> None:
    """A port that forgets to transpose, and is a little wrong too, is wrong as a whole."""
    square = [drawn(n, 6, 6) for n in (1, 2)]
    original = {"first": square[0], "third": square[1]}
    port = {"first": square[0], "third": off(square[1].T, 1e-3)}
    pair = align(original, port).pairs[1]
    assert pair.by is AlignedBy.NAME and pair.layout.is_identity and pair.distance > 0.5


def test_the_layout_of_equal_stages_leads_from_the_original_s_shape_to_the_port_s() -> None:
    equal, wrong = drawn(1), drawn(2)
    port = {"first": equal.T, "third": off(wrong.reshape(6, 4), 1e-3)}
    pair = align({"first": equal, "third": wrong}, port).pairs[1]
    assert (pair.by, pair.layout.axes, pair.distance > 0.5) == (AlignedBy.NAME, (1, 0), True)


@pytest.mark.parametrize(("agreeing", "enclosed"), [(4, True), (3, False)])
def test_values_agree_again_if_a_third_of_the_next_stages_do(agreeing: int, enclosed: bool) -> None:
    own = {f"s.{n}": drawn(10 + n, n + 2, 7) for n in range(HORIZON)}
    # Stages of other sizes are nobody's partner.
    other = {f"s.{n}": drawn(50 + n, n + 2, 16) for n in range(agreeing, HORIZON)}
    pins = [Pin("x", "x")]
    found = align({"x": drawn(1)} | own, {"x": drawn(2)} | own | other, pins=pins)
    assert len(found.pairs) == 1 + agreeing and found.pairs[0].enclosed == enclosed


def test_a_pinned_layout_that_leads_to_another_shape_is_not_followed() -> None:
    x = drawn(1, 6, 6)
    other = Layout(x.shape, x.shape, (1, 0), (36,))
    pair = align({"x": x}, {"x": x}, pins=[Pin("x", "x", other)]).pairs[0]
    assert (pair.by, pair.distance, pair.layout.target) == (AlignedBy.PIN, 0.0, (6, 6))


def test_values_decide_where_most_of_them_contradict_the_numbers_of_layers() -> None:
    """The port counts from 1, and has one layer less."""
    layers = [drawn(n) for n in range(6)]
    original = {f"l.{n}.mlp": x for n, x in enumerate(layers)}
    port = {f"l.{n + 1}.mlp": x for n, x in enumerate(layers[:5])}
    found = align(original, port)
    assert names(found) == {f"l.{n + 1}.mlp": f"l.{n}.mlp" for n in range(5)}
    assert {pair.by for pair in found.pairs} == {AlignedBy.VALUE}


def test_numbers_of_layers_decide_where_nothing_else_is_equal() -> None:
    """The port's first layer is wrong, and its second passes the original's first value on."""
    layers = [drawn(n) for n in range(3)]
    original = {f"l.{n}.mlp": x for n, x in enumerate(layers)}
    port = {"l.0.mlp": drawn(7), "l.1.mlp": layers[0], "l.2.mlp": drawn(8)}
    found = align(original, port)
    assert names(found) == {name: name for name in original}
    assert {pair.by for pair in found.pairs} == {AlignedBy.NAME}


def test_a_stage_without_a_namesake_is_paired_by_value_across_layers() -> None:
    """Only stages that both have a partner by name are suspected to be in the wrong layer."""
    a, b, c = (drawn(n) for n in range(3))
    original = {"l.0.a": a, "l.1.a": b, "l.1.b": c}
    port = {"l.0.a": drawn(7), "l.1.other": a, "l.1.a": b, "l.1.b": c}
    found = align(original, port)
    assert names(found) == {"l.1.other": "l.0.a", "l.1.a": "l.1.a", "l.1.b": "l.1.b"}


def test_a_namesake_of_another_size_is_no_namesake() -> None:
    """Neither stage could be paired with the other side's stage of its layer."""
    a, end = drawn(0), drawn(1)
    original = {"l.0.a": a, "l.1.a": drawn(2, 3, 7), "end": end}
    port = {"l.0.a": drawn(3, 2, 9), "l.1.a": a, "end": end}
    found = align(original, port)
    assert names(found) == {"l.1.a": "l.0.a", "end": "end"}
    assert {pair.by for pair in found.pairs} == {AlignedBy.VALUE}


def enclosed(found: Alignment, name: str) -> bool:
    [pair] = [pair for pair in found.pairs if pair.port == name]
    return pair.enclosed


@pytest.mark.parametrize("wrong", [6, HORIZON])
def test_values_that_agree_again_much_later_do_not_enclose_a_stage(wrong: int) -> None:
    """Whether they do is read from the next stages, of which six right ones are half."""
    right = {f"last.{n}": drawn(n) for n in range(40)}
    names_of = ["first", *(f"wrong.{n}" for n in range(wrong))]
    original = {name: drawn(100 + n) for n, name in enumerate(names_of)} | right
    port = {name: drawn(200 + n) for n, name in enumerate(names_of)} | right
    assert enclosed(align(original, port), "first") == (wrong < HORIZON)


def test_a_stage_does_not_enclose_itself() -> None:
    """Nothing agrees behind the last one."""
    stages = {name: drawn(n) for n, name in enumerate(("first", "second", "last"))}
    found = align(stages, dict(stages))
    assert [enclosed(found, name) for name in stages] == [True, True, False]


@pytest.mark.parametrize("port_has_more", [False, True])
def test_values_agree_again_if_they_do_on_one_side(port_has_more: bool) -> None:
    """The other side may have stages in between that have no partner."""
    right = {f"last.{n}": drawn(n) for n in range(3)}
    extra = {f"more.{n}": drawn(50 + n, 1 + n, 7) for n in range(HORIZON - 3)}
    sides = [{"first": drawn(100 + n)} | more | right for n, more in enumerate(({}, extra))]
    original, port = sides if port_has_more else sides[::-1]
    assert enclosed(align(original, port), "first")
    # Control: on neither.
    sides = [{"first": drawn(100 + n)} | extra | right for n in range(2)]
    sides[1] = {
        name: drawn(300 + k, *x.shape) if name in extra else x
        for k, (name, x) in enumerate(sides[1].items())
    }
    assert not enclosed(align(*sides), "first")


def test_evidence_of_values_ends_at_four_digits() -> None:
    apart = np.asarray([[0.0, 1e-9, 1e-4, 1e-2, 1.0, 3.0]])
    alike, telling = np.full(apart.shape, 0.25), np.ones(apart.shape, bool)
    found = _evidence(alike, apart, telling)
    expected = [[1.25, 1.25, 1.25, 0.75, 0.25, 0.25]]
    assert (np.abs(found - expected) <= roundoff(4, np.float64)).all()
    assert (_evidence(alike, apart, ~telling) == alike).all()


def test_a_pair_by_name_has_a_name_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, end = drawn(1), off(drawn(1), 0.2), drawn(3)
    sides = {"block.up.out": a, "end": end}, {"block.gate.out": b, "end": end}
    alike = float(similarity(*map(list, sides))[0, 0])
    for decides, by in ((alike, AlignedBy.NAME), (math.nextafter(alike, 1), AlignedBy.NEARNESS)):
        monkeypatch.setattr(alignment, "DECIDES", decides)
        monkeypatch.setattr(alignment, "ENCLOSED", 0.2)
        assert align(*sides).pairs[0].by is by


def test_no_pair_by_few_words_crosses_a_pair_that_is_decided():
    """In another order of execution, half of the words are not enough."""
    draw = np.random.default_rng(0)
    names = ("one.two.gate", "b", "end"), ("y", "one.three.gate", "end")
    original, port = ({n: draw.normal(size=(3, 4)) for n in side} for side in names)
    pairs = {(p.original, p.port) for p in align(original, port, pins=[Pin("y", "b")]).pairs}
    assert pairs == {("b", "y"), ("end", "end")}
    # The control: in the same order they are.
    port = {n: port[n] for n in ("one.three.gate", "y", "end")}
    pairs = {(p.original, p.port) for p in align(original, port, pins=[Pin("y", "b")]).pairs}
    assert ("one.two.gate", "one.three.gate") in pairs
