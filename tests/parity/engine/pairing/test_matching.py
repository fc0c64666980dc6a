"""Parameters are matched by what they hold, and what only looks alike is not."""

import json
import time

import ml_dtypes
import numpy as np
import pytest

from parity.engine.pairing.matching import Matching, Means, match_parameters
from parity.engine.pairing.resemblance import differing_slices

D, H, d, LAYERS = 16, 4, 4, 3
RNG = np.random.default_rng(7)


def generic(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def torch_like(layers=LAYERS):
    """An original with every kind of parameter: matrices, biases, norms, an embedding."""
    result = {"model.embed_tokens.weight": generic(40, D)}
    for i in range(layers):
        base = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            result[f"{base}.self_attn.{name}.weight"] = generic(D, D)
            result[f"{base}.self_attn.{name}.bias"] = generic(D)
        result[f"{base}.mlp.up_proj.weight"] = generic(24, D)
        result[f"{base}.mlp.down_proj.weight"] = generic(D, 24)
        result[f"{base}.input_layernorm.weight"] = generic(D)
        result[f"{base}.post_attention_layernorm.weight"] = generic(D)
    return result | {"model.norm.weight": generic(D)}


LEAVES = {"embed_tokens.weight": "embedding", "norm.weight": "scale", "proj.weight": "kernel"}


def flax_name(name):
    for ending, leaf in LEAVES.items():
        if name.endswith(ending):
            name = name.removesuffix("weight") + leaf
    return name.removeprefix("model.")


def flax_like(original):
    return {
        flax_name(name): np.ascontiguousarray(x.T) if name.endswith("proj.weight") else x.copy()
        for name, x in original.items()
    }


def truth(original):
    return {flax_name(name): (name,) for name in original}


def mapping(matching):
    return {pair.port: pair.originals for pair in matching.pairs}


def reproduces(matching, original, port):
    made = matching.from_original(original)
    return all(np.array_equal(made[name], np.asarray(port[name], np.float32)) for name in made)


def test_a_converted_model_is_matched_whole_and_by_value():
    original = torch_like()
    port = flax_like(original)
    matching = match_parameters(original, port)
    assert mapping(matching) == truth(original)
    assert matching.is_complete
    assert not matching.unmatched_original
    assert {pair.means for pair in matching.pairs} == {Means.VALUE}
    assert reproduces(matching, original, port)
    pair = matching.by_port["layers.1.self_attn.q_proj.kernel"]
    assert pair.construction.text() == "model.layers.1.self_attn.q_proj.weight, transposed (1, 0)"


def test_names_play_no_part_where_values_decide():
    original = torch_like()
    port = {f"x{i}": x for i, x in enumerate(reversed(flax_like(original).values()))}
    names = [f"x{i}" for i in range(len(port))]
    assert mapping(match_parameters(original, port)) == dict(
        zip(names, ((name,) for name in reversed(original)), strict=True)
    )


def test_one_element_off_is_told_with_its_place():
    original = torch_like()
    port = flax_like(original)
    port["layers.1.mlp.up_proj.kernel"][3, 5] += 1
    matching = match_parameters(original, port)
    pair = matching.by_port["layers.1.mlp.up_proj.kernel"]
    assert not matching.is_complete
    assert pair.means is Means.SLICE
    assert "one element, [3, 5]" in pair.note
    assert sum(not pair.is_equal for pair in matching.pairs) == 1


def test_a_row_that_was_not_copied_is_told():
    original = torch_like()
    port = flax_like(original)
    port["embed_tokens.embedding"][5] = 0
    pair = match_parameters(original, port).by_port["embed_tokens.embedding"]
    assert pair.means is Means.SLICE
    assert pair.note == "differs in rows 5"


def test_what_is_no_number_on_both_sides_does_not_differ():
    x = np.arange(12.0).reshape(4, 3)
    x[:, 0] = np.nan
    y = x.copy()
    y[2, 1] = -1.0
    assert differing_slices(x, y) == "one element, [2, 1]"


def test_exchanged_heads_do_not_match():
    original = torch_like()
    port = flax_like(original)
    name = "layers.0.self_attn.q_proj.kernel"
    port[name] = port[name].reshape(D, H, d)[:, [1, 0, 2, 3]].reshape(D, D)
    matching = match_parameters(original, port)
    pair = matching.by_port[name]
    assert pair.means is Means.REORDERED
    assert not pair.is_equal and not matching.is_complete
    assert pair.construction.text() == (
        "model.layers.0.self_attn.q_proj.weight[4:8], transposed (1, 0), at [:, 0:4] + "
        "model.layers.0.self_attn.q_proj.weight[0:4], transposed (1, 0), at [:, 4:8] + "
        "model.layers.0.self_attn.q_proj.weight[8:16], transposed (1, 0), at [:, 8:16]"
    )


def test_rows_in_another_order_are_not_equal_and_say_so():
    original = torch_like()
    port = flax_like(original)
    name = "layers.0.self_attn.q_proj.kernel"
    port[name] = np.roll(port[name], 1, axis=0)
    matching = match_parameters(original, port)
    pair = matching.by_port[name]
    assert (pair.means, pair.is_equal) == (Means.REORDERED, False)
    assert pair.note == "the rows or columns of model.layers.0.self_attn.q_proj.weight"
    # Elements in no order of rows or columns are unmatched, and say so.
    port[name] = np.sort(port[name], axis=None).reshape(port[name].shape)
    matching = match_parameters(original, port)
    (left,) = matching.unmatched_port
    assert left.name == name
    assert left.closest == "model.layers.0.self_attn.q_proj.weight"
    assert left.note == "the same values in another order"
    assert [u.name for u in matching.unmatched_original] == [left.closest]


def test_values_that_are_nearly_equal_are_told_with_their_distance():
    original = torch_like()
    port = flax_like(original)
    name = "layers.2.mlp.down_proj.kernel"
    noise = generic(24, D)
    port[name] = port[name] + np.linalg.norm(port[name]) / np.linalg.norm(noise) * noise / 128
    pair = match_parameters(original, port).by_port[name]
    assert pair.means is Means.NEAR
    assert pair.note == "differs in value by 7.8e-03 (relative L2)"
    assert pair.originals == ("model.layers.2.mlp.down_proj.weight",)


def test_other_values_are_unmatched_with_the_closest_by_name():
    original = torch_like()
    port = flax_like(original)
    name = "layers.2.mlp.down_proj.kernel"
    port[name] = generic(24, D)
    (left,) = match_parameters(original, port).unmatched_port
    assert left.name == name
    assert left.closest == "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("narrow", ["port", "original"])
def test_what_has_been_through_a_narrow_format_is_told(dtype, narrow):
    original = torch_like()
    port = flax_like(original)
    sides = {"original": original, "port": port}
    for name, x in sides[narrow].items():
        sides[narrow][name] = x.astype(dtype).astype(np.float32)
    matching = match_parameters(original, port)
    assert mapping(matching) == truth(flax_like_names(original))
    assert {pair.means for pair in matching.pairs} == {Means.ROUNDED}
    note = f"the {narrow} holds values rounded to {np.dtype(dtype).name}"
    assert {pair.note for pair in matching.pairs} == {note}


def flax_like_names(original):
    return dict.fromkeys(original)


def test_one_unit_in_the_last_place_of_bfloat16_is_not_rounding():
    original = torch_like()
    port = {n: x.astype(ml_dtypes.bfloat16) for n, x in flax_like(original).items()}
    name = "layers.0.mlp.up_proj.kernel"
    bits = port[name].view(np.uint16)
    bits += 1
    matching = match_parameters(original, port)
    assert matching.by_port[name].means is Means.NEAR
    assert sum(pair.means is Means.ROUNDED for pair in matching.pairs) == len(port) - 1


def test_arrays_held_in_bfloat16_on_one_side_only_match_by_value():
    original = {n: x.astype(ml_dtypes.bfloat16) for n, x in torch_like().items()}
    port = {n: x.astype(np.float32) for n, x in flax_like(original).items()}
    assert {pair.means for pair in match_parameters(original, port).pairs} == {Means.VALUE}


def fused(original, join, transpose=True):
    """Return a port whose query, key and value are one, joined by `join` of (H, d, D) arrays."""
    port = flax_like(original)
    for i in range(LAYERS):
        base, parts = f"layers.{i}.self_attn", ("q_proj", "k_proj", "v_proj")
        kernels = [original[f"model.{base}.{p}.weight"].reshape(H, d, D) for p in parts]
        biases = [original[f"model.{base}.{p}.bias"].reshape(H, d, 1) for p in parts]
        port = {n: x for n, x in port.items() if not any(f"{base}.{p}" in n for p in parts)}
        port[f"{base}.qkv.kernel"] = join(kernels).T.copy() if transpose else join(kernels)
        port[f"{base}.qkv.bias"] = join(biases).reshape(-1)
    return port


JOINS = {
    "one after the other": lambda xs: np.concatenate([x.reshape(D, -1) for x in xs]),
    "head by head": lambda xs: np.stack(xs, axis=1).reshape(3 * D, -1),
    "key first": lambda xs: np.concatenate([x.reshape(D, -1) for x in (xs[1], xs[0], xs[2])]),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("transpose", [True, False])
def test_fused_query_key_and_value_are_matched(join, transpose):
    original = torch_like()
    port = fused(original, JOINS[join], transpose)
    matching = match_parameters(original, port)
    assert matching.is_complete
    assert not matching.unmatched_original
    assert {pair.means for pair in matching.pairs} == {Means.VALUE}
    parts = {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"}
    assert set(matching.by_port["layers.1.self_attn.qkv.kernel"].originals) == parts
    assert reproduces(matching, original, port)


@pytest.mark.parametrize("join", JOINS)
def test_a_fused_original_is_split(join):
    split = torch_like()
    whole = fused(split, JOINS[join])
    matching = match_parameters(whole, flax_like(split))
    assert matching.is_complete
    assert not matching.unmatched_original
    assert reproduces(matching, whole, flax_like(split))


def test_fused_with_one_wrong_head_does_not_match():
    original = torch_like()
    port = fused(original, JOINS["head by head"])
    name = "layers.0.self_attn.qkv.kernel"
    port[name] = port[name].reshape(D, H, 3, d)[:, :, [0, 2, 1]].reshape(D, -1)
    matching = match_parameters(original, port)
    assert matching.is_complete, "key and value exchanged is a construction, and a readable one"
    pieces = matching.by_port[name].construction.pieces
    assert [p.parameter.split(".")[-2] for p in pieces] == ["q_proj", "v_proj", "k_proj"]
    port[name][0, 0] += 1
    matching = match_parameters(original, port)
    assert not matching.is_complete
    assert not any(pair.port == name and pair.is_equal for pair in matching.pairs)


def stacked(original):
    names = [n.removeprefix("model.layers.0.") for n in original if "layers.0." in n]
    port = {n: x for n, x in flax_like(original).items() if "layers." not in n}
    for name in names:
        arrays = [original[f"model.layers.{i}.{name}"] for i in range(LAYERS)]
        arrays = [x.T if name.endswith("proj.weight") else x for x in arrays]
        port["layers." + flax_name(name)] = np.stack(arrays)
    return port


def test_stacked_layers_are_matched_both_ways():
    original = torch_like()
    port = stacked(original)
    matching = match_parameters(original, port)
    assert matching.is_complete
    assert not matching.unmatched_original
    assert reproduces(matching, original, port)
    names = tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(LAYERS))
    assert matching.by_port["layers.mlp.up_proj.kernel"].originals == names
    back = match_parameters(port, original)
    assert back.is_complete
    assert reproduces(back, port, original)


def test_layers_stacked_in_another_order_are_seen_in_the_construction():
    original = torch_like()
    port = stacked(original)
    port["layers.mlp.up_proj.kernel"] = port["layers.mlp.up_proj.kernel"][[1, 0, 2]]
    originals = match_parameters(original, port).by_port["layers.mlp.up_proj.kernel"].originals
    assert [name.split(".")[2] for name in originals] == ["1", "0", "2"]


def test_layers_and_experts_stacked_and_fused():
    original = {
        f"layers.{i}.experts.{j}.{name}.weight": generic(6, D)
        for i in range(2)
        for j in range(4)
        for name in ("gate", "up")
    }
    experts = {
        f"layers.{i}.experts.{name}": np.stack(
            [original[f"layers.{i}.experts.{j}.{name}.weight"].T for j in range(4)]
        )
        for i in range(2)
        for name in ("gate", "up")
    }
    both = {
        f"experts.{name}": np.stack([experts[f"layers.{i}.experts.{name}"] for i in range(2)])
        for name in ("gate", "up")
    }
    one = {"gate_up": np.concatenate([both["experts.gate"], both["experts.up"]], axis=-1)}
    for port in (experts, both):
        matching = match_parameters(original, port)
        assert matching.is_complete, matching.text()
        assert not matching.unmatched_original
        assert reproduces(matching, original, port)
    assert not match_parameters(original, one).is_complete, "what is not looked for is not claimed"


def test_a_tensor_used_twice_is_tied():
    original = torch_like()
    port = flax_like(original) | {"lm_head.kernel": original["model.embed_tokens.weight"].T.copy()}
    matching = match_parameters(original, port)
    name = "model.embed_tokens.weight"
    assert matching.by_port["lm_head.kernel"].originals == (name,)
    assert matching.tied == (((name,), ("embed_tokens.embedding", "lm_head.kernel")),)
    # Whoever reads either row sees it, and nowhere else.
    notes = {pair.port: pair.note for pair in matching.pairs if "tied" in pair.note}
    assert notes == {
        "embed_tokens.embedding": "tied with lm_head.kernel",
        "lm_head.kernel": "tied with embed_tokens.embedding",
    }
    twice = original | {"lm_head.weight": original[name]}
    matching = match_parameters(twice, flax_like(original))
    assert matching.by_port["embed_tokens.embedding"].also == ("lm_head.weight",)
    assert not matching.unmatched_original
    assert match_parameters(original, flax_like(original)).tied == ()


def test_gradients_of_tied_copies_are_summed():
    table = generic(40, D)
    inside, outside = generic(40, D), generic(40, D)
    total = {"wte.weight": inside + outside}
    port = {"wte.embedding": table, "head.kernel": table.T.copy()}
    matching = match_parameters({"wte.weight": table}, port)
    copies = {"wte.embedding": inside, "head.kernel": outside.T.copy()}
    for name, (expected, actual) in matching.gradients(total, copies).items():
        assert np.array_equal(expected, actual), name
    (one,) = matching.gradients(total, {"wte.embedding": inside}).values()
    assert not np.array_equal(*one), "without the other copy's part it is not the gradient"
    original = {"wte.weight": table, "head.weight": table.copy()}
    matching = match_parameters(original, {"wte.embedding": table})
    single = {"wte.embedding": inside + outside}
    separate = {"wte.weight": inside, "head.weight": outside}
    shared = {"wte.weight": inside + outside, "head.weight": inside + outside}
    for gradients in (separate, shared):
        expected, actual = matching.gradients(gradients, single)["wte.embedding"]
        assert np.array_equal(expected, actual)


def test_gradients_go_the_way_of_the_values():
    original = torch_like()
    port = fused(original, JOINS["head by head"])
    matching = match_parameters(original, port)
    gradients = {name: generic(*x.shape) for name, x in original.items()}
    mapped = matching.from_original(gradients)
    for expected, actual in matching.gradients(gradients, mapped).values():
        assert np.array_equal(expected, actual)
    back = {}
    for pair in matching.pairs:
        back |= pair.construction.adjoint(mapped[pair.port])
    assert all(np.array_equal(back[name], gradients[name]) for name in gradients)


def constant(arrays):
    """Return arrays with biases of zero and norms of one, as an initialisation has them."""
    return {
        name: np.zeros_like(x)
        if name.endswith("bias")
        else np.ones_like(x)
        if "norm" in name
        else x
        for name, x in arrays.items()
    }


def test_constants_are_matched_by_name_and_it_is_said():
    original = constant(torch_like())
    port = constant(flax_like(original))
    matching = match_parameters(original, port)
    assert mapping(matching) == truth(original)
    means = {pair.means for pair in matching.pairs if "norm" in pair.port or "bias" in pair.port}
    assert means == {Means.NAME}


@pytest.mark.parametrize("join", JOINS)
def test_constants_that_are_fused_follow_their_siblings(join):
    original = constant(torch_like())
    port = constant(fused(original, JOINS[join]))
    for one, other in ((original, port), (port, original)):
        matching = match_parameters(one, other)
        assert matching.is_complete, matching.text()
        assert not matching.unmatched_original
    pair = match_parameters(original, port).by_port["layers.2.self_attn.qkv.bias"]
    assert set(pair.originals) == {f"model.layers.2.self_attn.{p}_proj.bias" for p in "qkv"}


def test_constants_that_are_stacked_follow_their_families():
    original = constant(torch_like())
    port = stacked(original)
    for one, other in ((original, port), (port, original)):
        matching = match_parameters(one, other)
        assert matching.is_complete, matching.text()
        assert not matching.unmatched_original
    names = tuple(f"model.layers.{i}.post_attention_layernorm.weight" for i in range(LAYERS))
    pair = match_parameters(original, port).by_port["layers.post_attention_layernorm.scale"]
    assert pair.originals == names


def test_a_constant_of_another_value_does_not_match():
    original = constant(torch_like())
    port = constant(flax_like(original))
    port["layers.0.input_layernorm.scale"] = np.zeros(D, np.float32)
    matching = match_parameters(original, port)
    assert [left.name for left in matching.unmatched_port] == ["layers.0.input_layernorm.scale"]
    assert [left.name for left in matching.unmatched_original] == [
        "model.layers.0.input_layernorm.weight"
    ]


def test_small_arrays_go_by_name():
    original = {"a.scale": np.float32([0.5]), "b.scale": np.float32([2.0])}
    port = {"b.scale": np.float32([0.5]), "a.scale": np.float32([0.5])}
    matching = match_parameters(original, port)
    assert matching.by_port["a.scale"].originals == ("a.scale",)
    assert "b.scale" not in matching.by_port, "its value is that of another by accident"


def test_identical_arrays_go_by_name_and_number():
    table = generic(D, D)
    original = {f"layers.{i}.rel.weight": table for i in range(4)}
    port = {f"blocks_{i}.rel.kernel": table.T.copy() for i in reversed(range(4))}
    matching = match_parameters(original, port)
    assert mapping(matching) == {
        f"blocks_{i}.rel.kernel": (f"layers.{i}.rel.weight",) for i in range(4)
    }
    assert {pair.means for pair in matching.pairs} == {Means.NAME}


def test_a_padded_table_is_matched_in_part():
    original = torch_like()
    port = flax_like(original)
    port["embed_tokens.embedding"] = np.concatenate(
        [port["embed_tokens.embedding"], generic(24, D)]
    )
    pair = match_parameters(original, port).by_port["embed_tokens.embedding"]
    assert pair.means is Means.SLICE
    assert pair.note == "only [0:40] of it comes from the original"
    back = match_parameters(port, original)
    assert back.by_port["model.embed_tokens.weight"].means is Means.VALUE
    assert "[0:40]" in back.by_port["model.embed_tokens.weight"].construction.text()


def test_a_kernel_that_is_not_transposed_is_told():
    original = torch_like()
    port = flax_like(original)
    name = "layers.1.self_attn.q_proj.kernel"
    assert not any(pair.note for pair in match_parameters(original, port).pairs)
    port[name] = original["model.layers.1.self_attn.q_proj.weight"]
    notes = {p.port: p.note for p in match_parameters(original, port).pairs if p.note}
    assert notes.keys() == {name}
    assert notes[name].startswith("unchanged, where ")
    assert notes[name].endswith("are transposed (1, 0)")


@pytest.mark.parametrize(
    ("one", "other"),
    [("0.self_attn.q_proj", "0.self_attn.k_proj"), ("1.mlp.up_proj", "2.mlp.up_proj"),
     ("0.input_layernorm", "0.post_attention_layernorm")],
)  # fmt: skip
def test_parameters_that_are_exchanged_are_told(one, other):
    original = torch_like()
    port = flax_like(original)
    ending = "scale" if "norm" in one else "kernel"
    names = [f"layers.{name}.{ending}" for name in (one, other)]
    port[names[0]], port[names[1]] = port[names[1]], port[names[0]]
    matching = match_parameters(original, port)
    notes = {pair.port: pair.note for pair in matching.pairs if pair.note}
    assert notes.keys() == set(names)
    assert notes[names[0]] == (
        f"holds model.layers.{other}.weight; by name it would be model.layers.{one}.weight"
    )


def test_a_factor_or_a_summand_is_told():
    original = torch_like()
    port = flax_like(original)
    scaled, shifted = "layers.0.self_attn.q_proj.kernel", "layers.0.input_layernorm.scale"
    port[scaled] = port[scaled] / np.float32(3)
    port[shifted] = port[shifted] + np.float32(1)
    matching = match_parameters(original, port)
    assert not matching.is_complete
    assert matching.by_port[scaled].note == "is 0.333333 times it"
    assert matching.by_port[shifted].note == "is 1 times it plus 1"
    assert {matching.by_port[n].means for n in (scaled, shifted)} == {Means.NEAR}


def test_arrays_of_no_elements_and_of_one():
    arrays = {"empty": np.zeros((0, 3)), "scalar": np.full((), 2.5), "flags": np.array([True] * 9)}
    assert match_parameters(arrays, arrays).is_complete
    assert not match_parameters(arrays, {}).pairs
    assert not match_parameters({}, arrays).pairs


def test_a_matching_goes_through_json():
    original = torch_like()
    port = fused(original, JOINS["head by head"])
    port["extra"] = generic(5, 7)
    matching = match_parameters(original | {"mask": generic(3, 3)}, port)
    assert Matching.from_json(json.loads(json.dumps(matching.to_json()))) == matching
    with pytest.raises(ValueError, match="expected the field 'pairs'"):
        Matching.from_json({})


def test_the_table_names_everything():
    original = torch_like()
    port = flax_like(original) | {"extra": generic(5, 7)}
    text = match_parameters(original | {"mask": generic(3, 3)}, port).text()
    assert text.splitlines()[
        0
    ] == f"{len(original)} of {len(port)} parameters of the port matched: " + (
        f"{len(original)} by value"
    )
    assert all(name in text for name in (*original, *port, "mask"))
    nothing = "0 of 0 parameters of the port matched: none"
    assert match_parameters({}, {}).text().splitlines()[0] == nothing


def test_a_model_of_twenty_layers_takes_less_than_a_second():
    original = torch_like(20)
    port = flax_like(original)
    start = time.process_time()
    assert match_parameters(original, port).is_complete
    assert time.process_time() - start < 1
