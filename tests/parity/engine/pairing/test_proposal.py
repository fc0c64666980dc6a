"""A port that is not converted yet gets a mapping by name and shape, as a converter that runs."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from parity.engine.pairing.constructions import Construction, copied
from parity.engine.pairing.converter import converter_source
from parity.engine.pairing.matching import match_parameters
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.proposal import propose

D, H, d, LAYERS = 16, 4, 4, 3


def numbered(shapes):
    """Return arrays whose elements are all different: what lies where can be read off."""
    sizes = np.cumsum([0, *(np.prod(shape) for shape in shapes.values())])
    return {
        name: np.arange(at, at + np.prod(shape), dtype=np.float32).reshape(shape)
        for at, (name, shape) in zip(sizes, shapes.items(), strict=False)
    }


def torch_like():
    shapes = {"model.embed_tokens.weight": (40, D), "model.embed_positions.weight": (12, D)}
    for i in range(LAYERS):
        base = f"model.layers.{i}"
        for name in "qkvo":
            shapes[f"{base}.self_attn.{name}_proj.weight"] = (D, D)
            shapes[f"{base}.self_attn.{name}_proj.bias"] = (D,)
        shapes[f"{base}.mlp.fc1.weight"] = (24, D)
        shapes[f"{base}.mlp.fc2.weight"] = (D, 24)
        shapes[f"{base}.input_layernorm.weight"] = (D,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (D,)
    return numbered(shapes | {"model.norm.weight": (D,), "lm_head.weight": (40, D)})


WORDS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}


def port_name(name):
    """Return what another author would call it."""
    if "embed" in name:
        return name.replace("model.embed_", "").replace("weight", "embed.embedding")
    for torch_word, word in WORDS.items():
        name = name.replace(torch_word, word)
    leaf = "scale" if "norm" in name else "kernel"
    name = name.replace("model.layers.", "blocks_").replace("self_attn", "attention")
    name = name.replace("model.norm", "final_norm").replace("input_layernorm", "input_norm")
    return name.replace("post_attention_layernorm", "post_attention_norm").replace("weight", leaf)


def flax_like(original):
    return {
        port_name(name): x.T.copy() if port_name(name).endswith("kernel") else x
        for name, x in original.items()
    }


def unconverted(port):
    return {name: np.zeros_like(x) for name, x in sorted(port.items())}


def converted(matching, original):
    source = converter_source(matching)
    module = {}
    exec(compile(source, "converter", "exec"), module)
    return module["convert"](original), source


def agrees(result, port):
    return set(result) == set(port) and all(np.array_equal(result[n], port[n]) for n in port)


def test_a_proposal_converts_a_port_with_other_names():
    original = torch_like()
    port = flax_like(original)
    matching = propose(original, unconverted(port))
    assert {pair.means for pair in matching.pairs} == {Means.PROPOSAL}
    assert not matching.unmatched_port
    assert not matching.unmatched_original
    result, source = converted(matching, original)
    assert agrees(result, port), matching.text()
    assert match_parameters(original, result).is_complete
    loop = """\
    for i in range(3):
        port[f"blocks_{i}.attention.key.bias"] = original[f"model.layers.{i}.self_attn.k_proj.bias"]
"""
    assert loop in source
    assert max(map(len, source.splitlines())) <= 120


def test_a_number_that_all_names_of_a_loop_have_stays():
    names = {f"model.1.layers.{i}.mlp.0.weight": f"stage_2.block_{i}.weight" for i in range(4)}
    original = numbered(dict.fromkeys(names, (7, 5)))
    port = {new: original[name] for name, new in names.items()}
    result, source = converted(match_parameters(original, port), original)
    assert agrees(result, port)
    assert (
        """\
    for i in range(4):
        port[f"stage_2.block_{i}.weight"] = original[f"model.1.layers.{i}.mlp.0.weight"]
"""
        in source
    )


def test_square_kernels_are_transposed_by_convention_and_by_their_neighbours():
    original = numbered({"a.weight": (D, D), "b.weight": (D, D), "b.up.weight": (24, D)})
    port = {"a.kernel": original["a.weight"].T, "b.kernel": original["b.weight"].T,
            "b.up.kernel": original["b.up.weight"].T}  # fmt: skip
    assert agrees(converted(propose(original, unconverted(port)), original)[0], port)
    same = {name.replace("weight", "kernel"): x for name, x in original.items()}
    result, _ = converted(propose(original, unconverted(same)), original)
    assert agrees(result, same), "the matrix whose shape says (in, out) decides for the others"
    equinox = dict(original)
    assert agrees(converted(propose(original, unconverted(equinox)), original)[0], equinox)


@pytest.mark.parametrize("axes", [(2, 1, 0), (2, 3, 1, 0)])
def test_kernels_of_convolutions_follow_the_convention(axes):
    original = numbered({"conv.weight": (6, 6, 3, 3)[: len(axes)], "conv.bias": (6,)})
    port = {
        "conv.kernel": original["conv.weight"].transpose(axes),
        "conv.bias": original["conv.bias"],
    }
    assert agrees(converted(propose(original, unconverted(port)), original)[0], port)


def test_kernels_with_heads_are_reshaped():
    original = numbered({"q_proj.weight": (H * d, 24), "o_proj.weight": (24, H * d)})
    port = {
        "query.kernel": original["q_proj.weight"].T.reshape(24, H, d),
        "out.kernel": original["o_proj.weight"].T.reshape(H, d, 24),
    }
    assert agrees(converted(propose(original, unconverted(port)), original)[0], port)


def test_layers_are_stacked_and_unstacked():
    original = torch_like()
    single = flax_like(original)
    names = [n.removeprefix("blocks_0.") for n in single if n.startswith("blocks_0.")]
    port = {n: x for n, x in single.items() if "blocks" not in n}
    port |= {f"blocks.{n}": np.stack([single[f"blocks_{i}.{n}"] for i in range(3)]) for n in names}
    matching = propose(original, unconverted(port))
    assert not matching.unmatched_port, matching.text()
    result, source = converted(matching, original)
    assert agrees(result, port)
    line = 'original[f"model.layers.{n}.self_attn.q_proj.weight"].T for n in range(3)'
    assert f'port["blocks.attention.query.kernel"] = np.stack([{line}])' in source
    back = propose(port, unconverted(original))
    assert agrees(converted(back, port)[0], original)


def test_query_key_and_value_are_fused_and_split():
    original = torch_like()
    single = flax_like(original)
    port = {n: x for n, x in single.items() if not any(w in n for w in ("query", "key", "value"))}
    for i in range(LAYERS):
        base = f"blocks_{i}.attention"
        for leaf in ("kernel", "bias"):
            parts = [single[f"{base}.{word}.{leaf}"] for word in ("query", "key", "value")]
            port[f"{base}.qkv.{leaf}"] = np.concatenate(parts, axis=-1)
    matching = propose(original, unconverted(port))
    assert agrees(converted(matching, original)[0], port), matching.text()
    assert "guess" in matching.by_port["blocks_0.attention.qkv.kernel"].note
    back = propose(port, unconverted(original))
    assert agrees(converted(back, port)[0], original), back.text()


def test_numbers_decide_between_layers():
    original = torch_like()
    port = flax_like(original)
    wrong = dict(port)
    first, second = (f"blocks_{i}.mlp.fc1.kernel" for i in range(2))
    wrong[first], wrong[second] = port[second], port[first]
    result, _ = converted(propose(original, unconverted(port)), original)
    assert not agrees(result, wrong)
    one_based = {
        re.sub(r"blocks_(\d)", lambda match: f"blocks_{int(match[1]) + 1}", name): x
        for name, x in port.items()
    }
    result, source = converted(propose(original, unconverted(one_based)), original)
    assert agrees(result, one_based)
    assert "{i - 1}" in source


def test_what_has_no_counterpart_is_named_and_not_invented():
    original = torch_like()
    port = flax_like(original) | {"value_head.dense.kernel": np.zeros((D, 7), np.float32)}
    matching = propose(original | {"causal.mask": np.zeros((9, 9))}, unconverted(port))
    assert [left.name for left in matching.unmatched_port] == ["value_head.dense.kernel"]
    assert [left.name for left in matching.unmatched_original] == ["causal.mask"]
    assert "# value_head.dense.kernel (16, 7): no parameter of the original" in converter_source(
        matching
    )


def test_a_shape_that_only_two_parameters_have_pairs_them_even_of_other_layers():
    """Beside a second candidate, parameters of different layers are left without a partner."""
    original, port = {"h.0.weight": (3, 5)}, {"l.7.mu": (3, 5)}
    alone = propose(numbered(original), unconverted(numbered(port)))
    assert [(p.port, p.construction.parameters) for p in alone.pairs] == [
        ("l.7.mu", ("h.0.weight",))
    ]
    assert "unsure" in alone.pairs[0].note
    for more, other in (({"h.1.weight": (3, 5)}, {}), ({}, {"l.8.nu": (3, 5)})):
        several = propose(numbered(original | more), unconverted(numbered(port | other)))
        assert not several.pairs and len(several.unmatched_port) == len(port | other)


def test_a_matching_by_value_prints_as_a_converter_too():
    original = torch_like()
    port = flax_like(original)
    names = ["blocks_0.attention.query.kernel", "blocks_0.attention.key.kernel"]
    fused = np.stack([port.pop(n).reshape(D, H, d) for n in names], axis=2).reshape(D, -1)
    port["blocks_0.attention.qk.kernel"] = fused
    matching = match_parameters(original, port)
    assert matching.is_complete
    assert agrees(converted(matching, original)[0], port)


def proposed(original: dict[str, tuple[int, ...]], port: dict[str, tuple[int, ...]]):
    """Return what each parameter of the port is made of, and which have no proposal."""
    matching = propose(numbered(original), unconverted(numbered(port)))
    left = {entry.name for entry in matching.unmatched_port}
    return {pair.port: pair.originals for pair in matching.pairs}, left


@pytest.mark.parametrize(
    ("second", "stack"),
    [
        # Of layers of two shapes, of another size, and with a layer more than the original has.
        ((5, 3), (2, 2, 3)),
        ((2, 3), (2, 2, 7)),
        ((2, 3), (3, 2, 3)),
    ],
)
def test_what_does_not_fill_a_stack_is_not_stacked(second, stack):
    original, port = {"l.0.w": (2, 3), "l.1.w": second}, {"l.w": stack}
    assert proposed(original, port) == ({}, {"l.w"})
    assert proposed({"l.0.w": (2, 3), "l.1.w": (2, 3)}, {"l.w": (2, 2, 3)})[1] == set()


@pytest.mark.parametrize("back", [False, True])
def test_a_number_without_axes_is_no_stack(back):
    """Such as a count of batches that only one side has."""
    single = {f"l.{n}.w": (2, 3) for n in range(2)}
    stack = {"count": (), "l.w": (2, 2, 3)}
    made, left = proposed(stack, single) if back else proposed(single, stack)
    stacked = {"l.w": ("l.0.w", "l.1.w")}
    assert made == (dict.fromkeys(single, ("l.w",)) if back else stacked)
    assert left == (set() if back else {"count"})


@pytest.mark.parametrize("back", [False, True])
def test_stacked_filters_are_turned_the_same_way_there_and_back(back):
    """An order of four axes that is not its own inverse, as that of a matrix is."""
    original = numbered({f"l.{n}.conv.weight": (6, 6, 3, 3) for n in range(2)})
    filters = [original[name].transpose(2, 3, 1, 0) for name in sorted(original)]
    port = {"l.conv.kernel": np.stack(filters)}
    sides = (port, original) if back else (original, port)
    result, _ = converted(propose(sides[0], unconverted(sides[1])), sides[0])
    assert agrees(result, sides[1])


def test_a_stack_follows_what_is_certain_beside_it():
    """The biases' shapes show which modules are the same; by their places it would be the other."""
    original = {f"l.{n}.{name}.w": (2, 3) for name in "pq" for n in range(2)}
    original |= {"l.0.p.b": (7,), "l.0.q.b": (9,)}
    port = {"m.r.w": (2, 2, 3), "m.s.w": (2, 2, 3), "m.r.b": (9,), "m.s.b": (7,)}
    made, left = proposed(original, port)
    assert made["m.r.w"] == ("l.0.q.w", "l.1.q.w") and made["m.s.w"] == ("l.0.p.w", "l.1.p.w")
    assert not left


def test_a_fusion_is_of_the_module_of_its_name_and_each_part_is_used_once():
    square = (6, 6)
    original = {f"{name}.weight": square for name in ("m.q", "m.k", "x.a", "x.b")}
    made, left = proposed(original, {"m.qk.kernel": (6, 12)})
    assert made == {"m.qk.kernel": ("m.q.weight", "m.k.weight")} and not left
    del original["x.a.weight"], original["x.b.weight"]
    made, left = proposed(original, {"m.qk.kernel": (6, 12), "m.other.kernel": (6, 12)})
    assert [*made.values()] == [("m.q.weight", "m.k.weight")] and len(left) == 1


@pytest.mark.parametrize("back", [False, True])
def test_matrices_of_several_lengths_are_fused_the_other_way_round(back):
    """As of an attention with fewer keys than queries, in which no matrix is square."""
    original = numbered({f"m.{n}.weight": (rows, 6) for n, rows in (("q", 8), ("k", 4), ("v", 4))})
    port = {"m.qkv.kernel": np.concatenate([*original.values()]).T}
    sides = (port, original) if back else (original, port)
    result, _ = converted(propose(sides[0], unconverted(sides[1])), sides[0])
    assert agrees(result, sides[1])


def test_what_names_do_not_tell_apart_keeps_its_order():
    """The parts of a fusion, and two parameters that may be one."""
    original = {f"m.{name}.weight": (6, 6) for name in "ba"}
    port = {"n.d.kernel": (6, 12), "n.c.kernel": (6, 12)}
    [pair] = propose(numbered(original), numbered(port)).pairs
    assert (pair.port, pair.originals) == ("n.d.kernel", ("m.b.weight", "m.a.weight"))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_each_fusion_is_of_its_own_module_in_whatever_order_they_come(turned, back):
    order = ("self", "cross")
    parts = {f"{at}.{n}.weight": (6, 6) for at in order for n in ("query", "key")}
    fused = {f"{at}.both.kernel": (6, 12) for at in (order[::-1] if turned else order)}
    made, left = proposed(fused, parts) if back else proposed(parts, fused)
    assert not left and len(made) == len(parts if back else fused)
    for port, originals in made.items():
        assert {name.split(".")[0] for name in originals} == {port.split(".")[0]}


def test_only_parameters_of_one_ending_are_fused():
    for ending, found in (("scale", True), ("offset", False)):
        original = {"m.q.scale": (6,), f"m.k.{ending}": (6,)}
        assert bool(proposed(original, {"m.all.x": (12,)})[0]) == found


def test_the_last_word_of_a_path_says_which_part_of_a_fusion_it_is():
    """Both modules are below one that is called after its keys."""
    original = {f"key.{name}.weight": (6, 6) for name in ("value", "query")}
    made, _ = proposed(original, {"key.both.kernel": (6, 12)})
    assert made == {"key.both.kernel": ("key.query.weight", "key.value.weight")}


def test_names_that_fit_alike_follow_what_is_certain_beside_them():
    """The weights' shapes show which modules are the same; a guess does not confirm itself."""
    # In this order the names alone, and their places, pair `p` with `r`.
    original = {"m.p.weight": (3, 4), "m.q.weight": (5, 4), "m.p.bias": (7,), "m.q.bias": (7,)}
    port = {"n.r.weight": (5, 4), "n.s.weight": (3, 4), "n.r.bias": (7,), "n.s.bias": (7,)}
    matching = propose(numbered(original), numbered(port))
    assert {p.port: p.originals for p in matching.pairs} == {
        "n.r.weight": ("m.q.weight",), "n.s.weight": ("m.p.weight",),
        "n.r.bias": ("m.q.bias",), "n.s.bias": ("m.p.bias",),
    }  # fmt: skip
    # Once it is the other one's, an original is used a second time only as such.
    del original["m.q.bias"]
    matching = propose(numbered(original), numbered(port))
    notes = {p.port: p.note for p in matching.pairs if p.originals == ("m.p.bias",)}
    assert notes == {"n.r.bias": "a second copy", "n.s.bias": ""}


def test_an_expert_is_in_a_stack_of_its_layer_or_of_its_number_and_not_in_both():
    original = {f"l.{i}.e.{j}.w": (4, 5) for i in range(2) for j in range(3)}
    made, left = proposed(original, {"a.w": (3, 4, 5), "b.w": (2, 4, 5)})
    assert made == {"a.w": ("l.0.e.0.w", "l.0.e.1.w", "l.0.e.2.w")} and left == {"b.w"}


def test_what_the_original_fills_in_part_keeps_its_place_in_a_converter():
    """The rest of it is 0, and it has the port's shape."""
    rows = [np.random.default_rng(n).normal(size=(5, 4)) for n in range(4)]
    original = {"a.w": rows[0], "b.w": rows[1]}
    result, _ = converted(match_parameters(original, {"w": np.concatenate(rows)}), original)
    assert np.array_equal(result["w"], np.concatenate([*rows[:2], np.zeros((10, 4))]))


@pytest.mark.parametrize("alone", [0, 3])
def test_a_converter_adds_what_the_port_stores_as_a_sum(alone):
    """Whole, or beside elements that are those of one term alone, as in a GRU."""
    one, other = (np.random.default_rng(n).normal(size=9).astype(np.float32) for n in range(2))
    total = one + other
    total[9 - alone :] = one[9 - alone :]
    original = {"cell.bias_ih": one, "cell.bias_hh": other}
    matching = match_parameters(original, {"cell.bias": total})
    assert [pair.construction.adds for pair in matching.pairs] == [True]
    assert agrees(converted(matching, original)[0], {"cell.bias": total})


@pytest.mark.parametrize("depth", [5, 6])
def test_more_numbers_than_there_are_indices_are_written_out(depth):
    original = {
        f"w.{'.'.join(n)}": np.full(2, float(int("".join(n), 2)))
        for n in itertools.product("01", repeat=depth)
    }
    pairs = [Pair(f"x{name[1:]}", copied(name, (2,)), Means.PROPOSAL) for name in original]
    result, source = converted(Matching(tuple(pairs), (), ()), original)
    assert agrees(result, {f"x{name[1:]}": x for name, x in original.items()})
    assert ("for i in range(2):" in source) == (depth == 5)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_a_converter_puts_pieces_in_their_places_in_whatever_order_they_are_listed(order):
    """Someone may have edited them, and parts of unequal lengths are no stack."""
    original = numbered({"a.w": (2, 4), "b.w": (3, 4), "c.w": (4, 4)})
    whole = np.concatenate([*original.values()])
    [pair] = match_parameters(original, {"w": whole}).pairs
    pieces = tuple(pair.construction.pieces[n] for n in order)
    pair = replace(pair, construction=Construction(pair.construction.shape, pieces))
    assert agrees(converted(Matching((pair,)), original)[0], {"w": whole})


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_what_has_no_element_is_no_fusion(shape, back):
    """Such as an adapter of rank 0, beside parameters that could be fused."""
    parts, empty = {"m.q.weight": (3, 4), "m.k.weight": (3, 4)}, {"m.qk.weight": shape}
    made, left = proposed(empty, parts) if back else proposed(parts, empty)
    assert (made, left) == ({}, set(parts if back else empty))


def test_a_side_without_parameters_has_no_partner_for_those_of_the_other():
    some = numbered({"a.w": (2, 3), "b": (4,)})
    for original, port in ((some, {}), ({}, some), ({}, {})):
        matching = propose(original, port)
        assert not matching.pairs
        assert [entry.name for entry in matching.unmatched_original] == [*original]
        assert [entry.name for entry in matching.unmatched_port] == [*port]


@pytest.mark.parametrize("seed", range(12))
def test_a_converter_takes_each_parameter_from_its_own_original(seed):
    """Whichever numbers there are, with holes among them, shifted, or in no order at all."""
    rng = np.random.default_rng(seed)
    grid = list(itertools.product(range(3), range(1, 3)))
    kept = [grid[n] for n in sorted(rng.permutation(len(grid))[: rng.integers(1, len(grid) + 1)])]
    if rng.random() < 0.5:
        theirs = [(i + 2, j - 1) for i, j in kept]
    else:
        theirs = [grid[n] for n in rng.permutation(len(grid))[: len(kept)]]
    original = numbered({f"m.{i}.e{j}.w": (2, 3) for i, j in theirs})
    pairs = [
        Pair(f"l.{i}.x{j}", copied(name, (2, 3)), Means.VALUE)
        for (i, j), name in zip(kept, original, strict=True)
    ]
    result, _ = converted(Matching(tuple(pairs)), original)
    assert agrees(result, {p.port: original[p.originals[0]] for p in pairs})


@pytest.mark.parametrize(
    "names",
    [
        {"block_0.w": "layer_00.w", "block_1.w": "layer_01.w"},
        {"layer_00.w": "b.0.w", "layer_01.w": "b.1.w"},
        {"w{x}": "w{n}", 'w"q': "a\\b", "it's": "new\nline"},
        {"l.10.w": "m.10.w", "l.11.w": "m.11.w"},
        # Digits of another script, which int() reads too.
        {"l.1\u0660.w": "m.1\u0660.w", "l.1\u0661.w": "m.1\u0661.w"},
        {"l.1\u0660.w": "m.w"},
    ],
)
def test_a_converter_keeps_names_as_they_are(names):
    pairs = tuple(Pair(p, copied(o, (3,)), Means.PROPOSAL) for p, o in names.items())
    arrays = {o: np.arange(3.0) + i for i, o in enumerate(names.values())}
    made, _ = converted(Matching(pairs, (), (Unmatched("a\nb", (2,)),)), arrays)
    assert agrees(made, {p: arrays[o] for p, o in names.items()})


CELL = 5


def torch_cell(gates, width, suffix="_l0"):
    rows = CELL * gates
    sizes = {"weight_ih": (rows, width), "weight_hh": (rows, CELL)}
    sizes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
    return numbered({f"cell.{name}{suffix}": shape for name, shape in sizes.items()})


def flax_cell(original, gates, suffix="_l0"):
    """One module for each gate and term; the biases of the input are those of the state too."""
    port = {}
    for term, prefix in (("ih", "i"), ("hh", "h")):
        for letter, rows in zip(
            gates, np.split(original[f"cell.weight_{term}{suffix}"], len(gates)), strict=True
        ):
            port[f"rnn.{prefix}{letter}.kernel"] = rows.T
    one, two = (np.split(original[f"cell.bias_{t}{suffix}"], len(gates)) for t in ("ih", "hh"))
    if gates == "ifgo":
        return port | {f"rnn.h{g}.bias": a + b for g, a, b in zip(gates, one, two, strict=True)}
    last = {"rnn.in.bias": one[2], "rnn.hn.bias": two[2]}
    return port | {"rnn.ir.bias": one[0] + two[0], "rnn.iz.bias": one[1] + two[1], **last}


def shuffled(arrays):
    return dict(sorted(arrays.items()))


def made(original, port):
    matching = propose(original, port)
    assert not matching.unmatched_original and not matching.unmatched_port
    return converted(matching, original)[0]


@pytest.mark.parametrize("gates", ["ifgo", "rzn"])
@pytest.mark.parametrize("width", [CELL, 6])
@pytest.mark.parametrize("suffix", ["_l0", "", "_l1_reverse"])
def test_gates_with_modules_of_their_own_are_proposed_in_torch_s_order(gates, width, suffix):
    """Also where a matrix of the input has the shape of that of the state."""
    original = torch_cell(len(gates), width, suffix)
    port = flax_cell(original, gates, suffix)
    assert agrees(made(original, shuffled(port)), port)
    assert agrees(made(dict(reversed(original.items())), dict(reversed(port.items()))), port)
    # A cell that lacks a gate is none: its parts have the order of other fused parameters.
    less = {name: x for name, x in port.items() if ".ii." not in name and ".ir." not in name}
    assert propose(original, less).unmatched_original


def test_gates_of_each_layer_are_those_of_the_input_or_of_the_state():
    """Whichever of the two a layer lists first; all matrices have one shape."""
    original = numbered(
        {f"cell.weight_{t}_l{n}": (4 * CELL, CELL) for n in range(2) for t in ("ih", "hh")}
    )
    port = {
        f"rnn.{n}.{term}{letter}.kernel": rows.T
        for n, order in enumerate(("hi", "ih"))
        for term in order
        for letter, rows in zip(
            "ifgo", np.split(original[f"cell.weight_{term}h_l{n}"], 4), strict=True
        )
    }
    assert agrees(made(original, port), port)


@pytest.mark.parametrize("names", [("ih", "hh"), ("input", "hidden"), ("input", "recurrent")])
@pytest.mark.parametrize("word", ["bias_{}", "{}_bias", "{}Bias", "b_{}"])
def test_two_biases_of_a_recurrent_cell_are_proposed_as_a_sum(names, word):
    one, two = (word.format(name) for name in names)
    original = numbered({f"a.{one}": (8,), "a.kernel": (8, 3), f"a.{two}": (8,)})
    total = original[f"a.{one}"] + original[f"a.{two}"]
    port = {"a.kernel": original["a.kernel"], "a.bias": total}
    if word not in ("bias_{}", "{}_bias"):
        # A capital letter is part of no such word, and `b` is no bias.
        assert propose(original, port).unmatched_original
        return
    assert agrees(made(original, port), port)
    # Both terms exist, and neither is added to the other.
    assert agrees(made(original, original), original)
    # Two that are the biases of two cells, and two of unequal shapes.
    for other, shape in ((f"b.{two}", (8,)), (f"a.{two}", (4,))):
        apart = numbered({f"a.{one}": (8,), "a.kernel": (8, 3), other: shape})
        assert propose(apart, port).unmatched_original


def test_a_port_without_telling_names_stores_the_only_sum_of_its_shape():
    original = torch_cell(4, 3)
    total = original["cell.bias_ih_l0"] + original["cell.bias_hh_l0"]
    port = {"w": original["cell.weight_ih_l0"], "u": original["cell.weight_hh_l0"], "v": total}
    assert agrees(made(original, port), port)
    # Not where the port has two such parameters, or the original a third of this shape.
    assert propose(original, port | {"x": total}).unmatched_port
    assert len(propose(original | {"cell.scale": total}, port).unmatched_original) == 2


@pytest.mark.parametrize("bias", ["cell.bias", "gru.bias"])
def test_the_second_bias_of_a_last_gate_may_be_stored_apart(bias):
    """Equinox's GRU: the state's bias of the last gate is not added to the input's."""
    original = torch_cell(3, 6)
    one, two = original["cell.bias_ih_l0"], original["cell.bias_hh_l0"]
    port = {
        "cell.weight_ih": original["cell.weight_ih_l0"],
        "cell.weight_hh": original["cell.weight_hh_l0"],
        bias: one + np.append(two[: 2 * CELL], np.zeros(CELL, np.float32)),
        f"{bias}_n": two[2 * CELL :],
    }
    assert agrees(made(original, port), port)
    assert agrees(made(dict(reversed(original.items())), port), port)


@pytest.mark.parametrize("other", [(), (1,), (CELL - 1,), (CELL, 1), (3 * CELL + 1,)], ids=str)
def test_another_parameter_of_that_name_is_no_part_of_a_bias(other):
    """Such as a scale that is a single number: the bias is the whole sum."""
    original = torch_cell(3, 6)
    port = {
        "cell.weight_ih": original["cell.weight_ih_l0"],
        "cell.weight_hh": original["cell.weight_hh_l0"],
        "cell.bias": original["cell.bias_ih_l0"] + original["cell.bias_hh_l0"],
        "cell.bias_n": np.zeros(other),
    }
    matching = propose(original, port)
    assert [entry.name for entry in matching.unmatched_port] == ["cell.bias_n"]
    assert np.array_equal(converted(matching, original)[0]["cell.bias"], port["cell.bias"])


@pytest.mark.parametrize("transposed", [True, False])
def test_matrices_with_the_names_of_modules_are_proposed_in_one_order(transposed):
    """`x @ wq`, as in a function of arrays: shapes of the feed-forward block show the order."""
    words = {"wq": "attn.q_proj", "wk": "attn.k_proj", "w1": "mlp.gate_proj", "w2": "mlp.down_proj"}
    sizes = {"w1": (24, D), "w2": (D, 24)}
    names = {
        f"layers.{i}.{word}": f"layers.{i}.{n}.weight" for i in (0, 1) for word, n in words.items()
    }
    original = numbered({n: sizes.get(p.rpartition(".")[2], (D, D)) for p, n in names.items()})
    port = {p: original[n].T if transposed else original[n] for p, n in names.items()}
    assert agrees(made(original, port), port)
